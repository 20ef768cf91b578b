//! Converts CPU tensors to the kernels' form, row-major `f32`, and back.
//!
//! Kernels compute in `f32` for any operand type, and their results are rounded once; products of `bf16` and what is
//! around them read and write its bits themselves.

use super::kernels::{self, map};
use burn::tensor::{Bytes, DType, Shape};
use burn_flex::{FlexTensor, Layout};
use half::{bf16, f16};
use hydra_core::FloatType;

/// Checks that an op's float operands have the same type, on any device.
///
/// # Panics
/// If types differ, or one is not a [`FloatType`].
#[track_caller]
pub(super) fn one_type<const N: usize>(op: &str, operands: [DType; N]) {
    let first = operands[0];
    assert!(
        FloatType::from_dtype(first).is_some() && operands.iter().all(|dtype| *dtype == first),
        "{op} expects floats of one type, F32, BF16 or F16; found {operands:?}: cast the operands to one type"
    );
}

/// The type of a tensor of floats.
#[track_caller]
pub(super) fn float_type(tensor: &FlexTensor) -> FloatType {
    let found = tensor.dtype();
    FloatType::from_dtype(found)
        .unwrap_or_else(|| panic!("this op computes on F32, BF16 or F16, found {found:?}"))
}

/// The elements of a contiguous `f32` tensor.
#[track_caller]
pub(super) fn floats(tensor: &FlexTensor) -> &[f32] {
    tensor.as_slice::<f32>().expect("the tensor was made contiguous f32 before")
}

/// The elements of a contiguous 16-bit tensor.
#[track_caller]
pub(super) fn bits(tensor: &FlexTensor) -> &[u16] {
    let bits = match tensor.dtype() {
        DType::BF16 => tensor.as_slice::<bf16>().map(bytemuck::cast_slice),
        _ => tensor.as_slice::<f16>().map(bytemuck::cast_slice),
    };
    bits.expect("the tensor was made contiguous, of 16 bits")
}

/// The values of `bits`, on the threads of the current pool.
pub(super) fn widened(bits: &[u16], narrow: FloatType) -> Vec<f32> {
    match narrow {
        FloatType::Bf16 => map(bits, kernels::bf16::wide),
        FloatType::F16 => map(bits, |bits| f16::from_bits(bits).to_f32()),
        FloatType::F32 => panic!("f32 is not widened"),
    }
}

/// Rounds `values` to a 16-bit type, on the threads of the current pool.
pub(super) fn narrowed(values: &[f32], narrow: FloatType) -> Vec<u16> {
    match narrow {
        FloatType::Bf16 => map(values, kernels::bf16::rounded),
        FloatType::F16 => map(values, |x| f16::from_f32(x).to_bits()),
        FloatType::F32 => panic!("f32 is not rounded"),
    }
}

/// The tensor as contiguous, exclusively owned `f32`, copied only if it is shared or has 16 bits.
#[track_caller]
pub(super) fn owned(tensor: FlexTensor) -> FlexTensor {
    let float = float_type(&tensor);
    let contiguous = tensor.to_contiguous();
    drop(tensor);
    match float {
        FloatType::F32 => contiguous,
        narrow => {
            let shape = contiguous.layout().shape().clone();
            flex(widened(bits(&contiguous), narrow), shape, FloatType::F32)
        }
    }
}

/// A tensor of this shape and type from `values`, rounded if the type has 16 bits.
pub(super) fn flex(values: Vec<f32>, shape: impl Into<Shape>, float: FloatType) -> FlexTensor {
    match float {
        FloatType::F32 => {
            FlexTensor::new(Bytes::from_elems(values), Layout::contiguous(shape.into()), DType::F32)
        }
        narrow => flex_bits(narrowed(&values, narrow), shape, narrow),
    }
}

/// A tensor of this shape and 16-bit type from the bits.
pub(super) fn flex_bits(bits: Vec<u16>, shape: impl Into<Shape>, narrow: FloatType) -> FlexTensor {
    FlexTensor::new(Bytes::from_elems(bits), Layout::contiguous(shape.into()), narrow.dtype())
}

/// Converts a contiguous `f32` tensor to this type, rounding if it has 16 bits.
#[track_caller]
pub(super) fn rounded(tensor: FlexTensor, float: FloatType) -> FlexTensor {
    match float {
        FloatType::F32 => tensor,
        narrow => flex_bits(narrowed(floats(&tensor), narrow), tensor.layout().shape().clone(), narrow),
    }
}

#[cfg(test)]
mod tests {
    use super::super::math::ELEMENTS;
    use super::super::testing::with_threads;
    use super::*;

    #[test]
    fn f32_is_neither_copied_nor_changed() {
        let values = vec![1.0, f32::from_bits(0x3F80_0001), f32::NAN, -0.0];
        let place = values.as_ptr();
        let tensor = rounded(owned(flex(values, [2, 2], FloatType::F32)), FloatType::F32);
        assert_eq!(floats(&tensor).as_ptr(), place);
        assert_eq!(floats(&tensor)[1].to_bits(), 0x3F80_0001);
        assert!(tensor.is_unique());
    }

    #[test]
    fn narrow_tensors_are_widened_in_row_major_order_and_rounded_back() {
        let values: Vec<f32> = (0..6).map(|i| i as f32 * 0.1).collect();
        for float in [FloatType::Bf16, FloatType::F16] {
            let narrow = flex(values.clone(), [2, 3], float);
            assert_eq!((narrow.bytes().len(), float_type(&narrow)), (12, float));
            let held = widened(bits(&narrow), float);
            assert!(values.iter().zip(&held).all(|(a, b)| (a - b).abs() < 0.002) && held != values);
            let wide = owned(narrow.transpose(0, 1));
            assert_eq!((float_type(&wide), wide.layout().shape().to_vec()), (FloatType::F32, vec![3, 2]));
            let turned = [0, 3, 1, 4, 2, 5].map(|i| held[i]);
            assert_eq!(floats(&wide), turned);
            assert_eq!(widened(bits(&rounded(wide, float)), float), turned);
        }
    }

    #[test]
    fn every_element_is_rounded_however_many_threads_there_are() {
        let values: Vec<f32> = (0..3 * ELEMENTS + 7).map(|i| (i as f32).sqrt()).collect();
        let expected: Vec<u16> = values.iter().map(|&x| bf16::from_f32(x).to_bits()).collect();
        for threads in [1, 3] {
            assert_eq!(with_threads(threads, || narrowed(&values, FloatType::Bf16)), expected);
        }
    }

    #[test]
    fn types_that_fit_are_accepted() {
        one_type("an op", [DType::F32; 3]);
        one_type("an op", [DType::BF16; 2]);
    }

    #[test]
    #[should_panic(expected = "linear expects floats of one type, F32, BF16 or F16; found [BF16, F32]")]
    fn types_that_differ_are_named() {
        one_type("linear", [DType::BF16, DType::F32]);
    }

    #[test]
    #[should_panic(expected = "found [F64]")]
    fn types_that_no_kernel_has_are_named() {
        one_type("gelu_tanh", [DType::F64]);
    }
}
