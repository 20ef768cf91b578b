//! Tensors as the kernels want them: whole, in row-major order.

use super::kernels::UNITS;
use burn::backend::TensorMetadata;
use burn::tensor::{DType, Shape};
use burn_cubecl::ops::numeric::{empty_device_contiguous_dtype, zeros};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::{BufferArg, CubeCount, CubeDim};
use hydra_core::cube::exact;

/// The tensor with its elements in row-major order.
#[track_caller]
pub(super) fn whole(tensor: CubeTensor) -> CubeTensor {
    assert_eq!(tensor.dtype, DType::F32, "this op computes in f32");
    exact(tensor)
}

/// Ids of 32 bits in row-major order.
#[track_caller]
pub(super) fn whole_ids(ids: CubeTensor) -> CubeTensor {
    let ids = if ids.dtype == DType::I32 { ids } else { burn_cubecl::kernel::cast(ids, DType::I32) };
    exact(ids)
}

/// A tensor of numbers that are still to be written, on the device of another.
pub(super) fn empty(like: &CubeTensor, shape: impl Into<Shape>, dtype: DType) -> CubeTensor {
    empty_device_contiguous_dtype(like.client.clone(), like.device.clone(), shape.into(), dtype)
}

/// The same for floats.
pub(super) fn floats(like: &CubeTensor, shape: impl Into<Shape>) -> CubeTensor {
    empty(like, shape, DType::F32)
}

/// Zeros on the device of another tensor.
pub(super) fn zero_floats(like: &CubeTensor, shape: impl Into<Shape>) -> CubeTensor {
    let shape = shape.into();
    let row = zeros(like.device.clone(), Shape::new([shape.num_elements()]), DType::F32);
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

/// The sizes of the dimensions.
pub(super) fn dims<const D: usize>(tensor: &CubeTensor) -> [usize; D] {
    tensor.shape().dims()
}

/// The tensor as a kernel's argument.
pub(super) fn arg(tensor: &CubeTensor) -> BufferArg {
    tensor.clone().into_buffer_arg()
}

/// The units of a cube.
pub(super) fn units() -> CubeDim {
    CubeDim::new_1d(UNITS as u32)
}

/// As many cubes as give each of so many elements a unit.
pub(super) fn elements(tensor: &CubeTensor, count: usize) -> CubeCount {
    cubecl::calculate_cube_count_elemwise(&tensor.client, count, units())
}

/// As many cubes as rows.
pub(super) fn rows(tensor: &CubeTensor, count: usize) -> CubeCount {
    elements(tensor, count * UNITS)
}
