//! The float type on devices, and rounding to it.

use crate::{HostActivation, HostTensor};
use burn::tensor::DType;
use half::{bf16, f16};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::fmt;

/// The float type that layers see on a device, for parameters, activations, and the gradients of both.
/// The loss is always `f32`.
///
/// Master weights are always `f32`, and optimizers compute in it. With a narrower type, parameters are rounded
/// to it after each step (to nearest, ties to even), and gradients are widened before they are accumulated.
/// This is mixed-precision training with `f32` master weights (Micikevicius et al., 2018), without loss
/// scaling.
///
/// # Custom layers and losses
///
/// A layer's parameters and the floats of its input have the chain's type, which is also the type of a
/// dataset's inputs. Targets stay `f32` ([`Batch::in_type`](crate::Batch::in_type)), and the loss must be
/// `f32` ([`loss_value`](crate::loss_value) otherwise panics with both types in its message). Burn does not
/// promote types: an operation on tensors of two types panics (`dtype mismatch`), which fails the task.
/// Therefore:
///
/// - the last layer casts its result before it compares, `let y = y.cast(FloatDType::F32);`, and then
///   computes the loss, for which 16 bits are too few;
/// - a layer that creates a tensor, such as a mask or a table of positions, creates it in its input's type:
///   `Tensor::zeros(shape, (&device, x.dtype()))` or `table.cast(x.dtype())`;
/// - a layer may compute in `f32` between two casts; the gradient of a cast is rounded to its input's type.
///
/// Both casts are free in `f32`. Tested with `Linear`, `LayerNorm`, `GroupNorm`, `Conv2d`, `Embedding`,
/// [`Site::dropout`](crate::Site::dropout) and the activations of the models in `hydra-models`, and with the
/// residual perceptron of `hydra-train/examples/own_model.rs`. Other parts of Burn have not been tested in 16
/// bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FloatType {
    /// 32 bits; the type of master weights.
    #[default]
    F32,
    /// 16 bits with the exponent of `f32` and a mantissa of 8 bits.
    Bf16,
    /// 16 bits with an exponent of 5 bits. Small gradients underflow, because there is no loss scaling. For
    /// devices without `bf16`, in tests.
    F16,
}

impl FloatType {
    /// The bytes per element.
    pub fn bytes(self) -> usize {
        self.dtype().size()
    }

    /// Burn's type.
    pub fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 => DType::BF16,
            Self::F16 => DType::F16,
        }
    }

    /// Converts from Burn's type, if it is one of these.
    pub fn from_dtype(dtype: DType) -> Option<Self> {
        [Self::F32, Self::Bf16, Self::F16].into_iter().find(|float| float.dtype() == dtype)
    }

    /// Rounds `values` to this 16-bit type, to nearest, ties to even.
    ///
    /// # Panics
    /// If it is `f32`, or the lengths differ.
    pub fn narrow(self, values: &[f32], out: &mut [u16]) {
        assert_eq!(values.len(), out.len(), "the slices differ in length");
        let pairs = out.iter_mut().zip(values);
        pulp::Arch::new().dispatch(
            #[inline(always)]
            || match self {
                Self::Bf16 => pairs.for_each(|(out, x)| *out = bf16::from_f32(*x).to_bits()),
                Self::F16 => pairs.for_each(|(out, x)| *out = f16::from_f32(*x).to_bits()),
                Self::F32 => panic!("f32 is not rounded"),
            },
        );
    }

    /// Returns whether `bits` of this 16-bit type are exactly `values`, to the bit.
    ///
    /// # Panics
    /// If it is `f32`, or the lengths differ.
    pub fn has(self, bits: &[u16], values: &[f32]) -> bool {
        const CHUNK: usize = 4096;
        assert_eq!(bits.len(), values.len(), "the slices differ in length");
        let mut wide = [0.0; CHUNK];
        bits.chunks(CHUNK).zip(values.chunks(CHUNK)).all(|(bits, values)| {
            let wide = &mut wide[..bits.len()];
            self.widen(bits, wide);
            bytemuck::cast_slice::<f32, u32>(wide) == bytemuck::cast_slice::<f32, u32>(values)
        })
    }

    /// Widens `bits` of this 16-bit type to `f32`.
    ///
    /// # Panics
    /// If it is `f32`, or the lengths differ.
    pub fn widen(self, bits: &[u16], out: &mut [f32]) {
        assert_eq!(bits.len(), out.len(), "the slices differ in length");
        let pairs = out.iter_mut().zip(bits);
        pulp::Arch::new().dispatch(
            #[inline(always)]
            || match self {
                Self::Bf16 => pairs.for_each(|(out, bits)| *out = f32::from_bits(u32::from(*bits) << 16)),
                Self::F16 => pairs.for_each(|(out, bits)| *out = f16::from_bits(*bits).to_f32()),
                Self::F32 => panic!("f32 is not widened"),
            },
        );
    }
}

impl fmt::Display for FloatType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        })
    }
}

impl HostTensor {
    /// Converts floats of another type to this one; integers are unchanged.
    ///
    /// # Panics
    /// If the floats have a type that is not a [`FloatType`].
    pub fn in_type(self, float: FloatType) -> Self {
        if !self.is_float() || self.dtype == float.dtype() {
            return self;
        }
        let wide = self.floats(0..self.shape.iter().product());
        if float == FloatType::F32 {
            return Self::float(wide.into_owned(), self.shape);
        }
        let mut bits = vec![0; wide.len()];
        float.narrow(&wide, &mut bits);
        drop(wide);
        Self::own(bits, self.shape, float.dtype())
    }

    /// Returns the floats in `range`, borrowed if they are `f32` and aligned.
    ///
    /// # Panics
    /// If the elements are integers, or floats of a type that is not a [`FloatType`].
    pub fn floats(&self, range: std::ops::Range<usize>) -> Cow<'_, [f32]> {
        match self.dtype {
            DType::F32 => elements(&self.bytes[range.start * 4..range.end * 4]),
            _ => {
                let mut out = vec![0.0; range.len()];
                self.read_floats(range, &mut out);
                Cow::Owned(out)
            }
        }
    }

    /// Writes the values of the floats in `range` to `out`.
    ///
    /// # Panics
    /// Those of [`floats`](Self::floats), and if `out` has another length.
    pub fn read_floats(&self, range: std::ops::Range<usize>, out: &mut [f32]) {
        match FloatType::from_dtype(self.dtype) {
            Some(FloatType::F32) => out.copy_from_slice(&self.floats(range)),
            Some(narrow) => {
                let bytes = &self.bytes[range.start * narrow.bytes()..range.end * narrow.bytes()];
                narrow.widen(&elements(bytes), out);
            }
            None => panic!("a host tensor of {:?} was read as floats", self.dtype),
        }
    }
}

/// Reinterprets bytes as elements, copied if they are not aligned, as views of files may be.
fn elements<T: bytemuck::AnyBitPattern + bytemuck::NoUninit>(bytes: &[u8]) -> Cow<'_, [T]> {
    bytemuck::try_cast_slice(bytes).map_or_else(|_| bytemuck::pod_collect_to_vec(bytes).into(), Cow::Borrowed)
}

impl HostActivation {
    /// The activation with floats of this type; see [`HostTensor::in_type`].
    pub fn in_type(self, float: FloatType) -> Self {
        Self { parts: self.parts.into_iter().map(|part| part.in_type(float)).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NARROW: [FloatType; 2] = [FloatType::Bf16, FloatType::F16];

    #[test]
    fn values_are_rounded_to_nearest_and_even() {
        let one = f32::from_bits(0x3F80_0000);
        let step = |halves: u32| f32::from_bits(0x3F80_0000 + halves * 0x8000);
        let values = [one, step(1), step(2), step(3), -step(3), step(1) + f32::EPSILON, 0.0, -0.0];
        let expected = [0x3F80, 0x3F80, 0x3F81, 0x3F82, 0xBF82, 0x3F81, 0, 0x8000];
        let mut bits = [0; 8];
        FloatType::Bf16.narrow(&values, &mut bits);
        assert_eq!(bits, expected);
        let mut odd = [0; 4];
        FloatType::Bf16.narrow(&[f32::INFINITY, f32::MAX, f32::NAN, f32::MIN_POSITIVE / 4.0], &mut odd);
        assert_eq!(odd[..2], [0x7F80, 0x7F80]);
        assert!(bf16::from_bits(odd[2]).is_nan() && odd[3] == 0x0020);
    }

    #[test]
    fn every_value_of_16_bits_survives_the_way_there_and_back() {
        let all: Vec<u16> = (0..=u16::MAX).collect();
        for float in NARROW {
            let (mut wide, mut back) = (vec![0.0; all.len()], vec![0; all.len()]);
            float.widen(&all, &mut wide);
            float.narrow(&wide, &mut back);
            for ((bits, wide), back) in all.iter().zip(&wide).zip(&back) {
                assert!(bits == back || wide.is_nan(), "{float}: {bits:#x} became {back:#x}");
            }
        }
    }

    #[test]
    fn views_that_are_not_aligned_are_read_like_others() {
        let tensor = HostTensor::float((0..33).map(|i| i as f32 * 0.25).collect(), [33]);
        for float in [FloatType::F32, FloatType::Bf16, FloatType::F16] {
            let aligned = tensor.clone().in_type(float);
            let shifted = bytes::Bytes::from_iter([0].into_iter().chain(aligned.bytes.iter().copied()));
            let view = HostTensor::view(shifted.slice(1..), [33], float.dtype());
            assert_eq!(view.floats(3..9), aligned.floats(3..9));
            for other in [FloatType::F32, FloatType::Bf16] {
                assert_eq!(view.clone().in_type(other), tensor.clone().in_type(other));
            }
        }
    }

    #[test]
    fn tensors_change_their_type_and_integers_do_not() {
        let values: Vec<f32> = (0..33).map(|i| i as f32 * 0.25 - 4.0).collect();
        let tensor = HostTensor::float(values.clone(), [3, 11]);
        assert_eq!(tensor.clone().in_type(FloatType::F32), tensor);
        for float in NARROW {
            let narrow = tensor.clone().in_type(float);
            assert_eq!((narrow.dtype, narrow.len_bytes()), (float.dtype(), 66));
            assert_eq!(narrow.floats(5..33), &values[5..], "16 bits represent these exactly");
            assert_eq!(narrow.in_type(FloatType::F32), tensor);
        }
        let ids = HostTensor::int(vec![1, 2], [2]);
        assert_eq!(ids.clone().in_type(FloatType::Bf16), ids);
    }
}
