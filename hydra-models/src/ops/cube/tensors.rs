//! Converts tensors to the kernels' form: contiguous, row-major, of a float type that the device supports.

use super::kernels::UNITS;
use burn::backend::TensorMetadata;
use burn::tensor::{DType, Device, Shape};
use burn_cubecl::ops::numeric::{empty_device_contiguous_dtype, zeros};
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::features::TypeUsage;
use cubecl::ir::ElemType;
use cubecl::prelude::{BufferArg, CubeCount, CubeDim, Scalar};
use hydra_core::FloatType;
use hydra_core::cube::{exact, place};

/// Returns whether this crate's ops support a float type on a device: `f32`, `bf16` and `f16` on a CPU; on a CubeCL
/// device those of them that it stores and computes with.
pub fn supports(device: &Device, dtype: DType) -> bool {
    match place(device) {
        Some(place) => has(&place.client(), dtype),
        None => FloatType::from_dtype(dtype).is_some(),
    }
}

/// The kernels' float type, if they support it.
fn float_of(dtype: DType) -> Option<ElemType> {
    match dtype {
        DType::F32 => Some(f32::elem_type_native()),
        DType::F16 => Some(half::f16::elem_type_native()),
        DType::BF16 => Some(half::bf16::elem_type_native()),
        _ => None,
    }
}

/// Storing is not enough: kernels widen and round, but Burn computes between the ops of this crate, such as sums of two
/// gradients, in the type itself.
fn has(client: &Client, dtype: DType) -> bool {
    let usage = TypeUsage::Buffer | TypeUsage::Conversion | TypeUsage::Arithmetic;
    float_of(dtype).is_some_and(|float| client.properties().type_usage(float).is_superset(usage))
}

/// The generic float type of kernels for a tensor.
#[track_caller]
pub(super) fn float(tensor: &CubeTensor) -> ElemType {
    float_of(tensor.dtype).expect("a tensor of floats")
}

/// The tensors with their elements in row-major order.
///
/// # Panics
/// If they have different float types, or one that the device does not support.
#[track_caller]
pub(super) fn whole<const N: usize>(tensors: [CubeTensor; N]) -> [CubeTensor; N] {
    let CubeTensor { dtype, client, device, .. } = &tensors[0];
    let found = tensors.each_ref().map(|tensor| tensor.dtype);
    assert!(found.iter().all(|found| found == dtype), "an op expects floats of one type, found {found:?}");
    assert!(has(client, *dtype), "this crate's ops do not compute with {dtype:?} on {device:?}");
    tensors.map(exact)
}

/// 32-bit ids in row-major order.
#[track_caller]
pub(super) fn whole_ids(ids: CubeTensor) -> CubeTensor {
    let ids = if ids.dtype == DType::I32 { ids } else { burn_cubecl::kernel::cast(ids, DType::I32) };
    exact(ids)
}

/// An uninitialized tensor on the device of another.
pub(super) fn empty(like: &CubeTensor, shape: impl Into<Shape>, dtype: DType) -> CubeTensor {
    empty_device_contiguous_dtype(like.client.clone(), like.device.clone(), shape.into(), dtype)
}

/// The same with the other's type.
pub(super) fn floats(like: &CubeTensor, shape: impl Into<Shape>) -> CubeTensor {
    empty(like, shape, like.dtype)
}

/// The same for values that stay in `f32` regardless of the stored type.
pub(super) fn wide(like: &CubeTensor, shape: impl Into<Shape>) -> CubeTensor {
    empty(like, shape, DType::F32)
}

/// The output of an elementwise kernel, derived from its argument at `position`, in this float type: a tensor and the
/// argument for it. It reuses the argument's memory if the types are equal.
pub(super) fn made_of(from: &CubeTensor, position: usize, dtype: DType) -> (CubeTensor, BufferArg) {
    if from.dtype == dtype {
        return (from.clone(), BufferArg::alias(position, from.meta.num_elements()));
    }
    let out = empty(from, from.shape(), dtype);
    let room = arg(&out);
    (out, room)
}

/// Zeros of the type and on the device of another tensor.
pub(super) fn zero_floats(like: &CubeTensor, shape: impl Into<Shape>) -> CubeTensor {
    let shape = shape.into();
    let row = zeros(like.device.clone(), Shape::new([shape.num_elements()]), like.dtype);
    reshaped(row, shape)
}

/// The same elements, in row-major order, in another shape.
#[track_caller]
pub(super) fn reshaped(tensor: CubeTensor, shape: impl Into<Shape>) -> CubeTensor {
    let shape = shape.into();
    assert_eq!(tensor.meta.num_elements(), shape.num_elements(), "a shape of as many elements");
    let CubeTensor { client, device, handle, dtype, .. } = exact(tensor);
    CubeTensor::new_contiguous(client, device, shape, handle, dtype)
}

/// A view of a tensor's elements in row-major order, from element `start` on, in this shape. Matrix products only use
/// vector accesses if the view is aligned for them.
pub(super) fn part(tensor: &CubeTensor, start: usize, shape: impl Into<Shape>) -> CubeTensor {
    let CubeTensor { client, device, handle, dtype, meta, .. } = tensor.clone();
    let (shape, size) = (shape.into(), dtype.size());
    let behind = meta.num_elements() - start - shape.num_elements();
    let handle = handle.offset_start((start * size) as u64).offset_end((behind * size) as u64);
    CubeTensor::new_contiguous(client, device, shape, handle, dtype)
}

/// Converts the tensor to another float type; returns it unchanged if it already has that type.
pub(super) fn rounded(tensor: CubeTensor, dtype: DType) -> CubeTensor {
    let shape = tensor.shape();
    // As one row: Burn may pad the rows of a matrix.
    let row = reshaped(tensor, [shape.num_elements()]);
    reshaped(burn_cubecl::kernel::cast(row, dtype), shape)
}

/// The sizes of the dimensions.
pub(super) fn dims<const D: usize>(tensor: &CubeTensor) -> [usize; D] {
    tensor.shape().dims()
}

/// The tensor as a kernel argument.
pub(super) fn arg(tensor: &CubeTensor) -> BufferArg {
    tensor.clone().into_buffer_arg()
}

/// The units of a cube.
pub(super) fn units() -> CubeDim {
    CubeDim::new_1d(UNITS as u32)
}

/// The number of cubes that gives each of `count` elements a unit.
pub(super) fn elements(tensor: &CubeTensor, count: usize) -> CubeCount {
    cubecl::calculate_cube_count_elemwise(&tensor.client, count, units())
}

/// One cube per row.
pub(super) fn rows(tensor: &CubeTensor, count: usize) -> CubeCount {
    elements(tensor, count * UNITS)
}
