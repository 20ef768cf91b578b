//! Matrix products, in the configured precision: by cuBLASLt on NVIDIA's cards if it is installed, else by CubeCL.

use super::kernels::sums;
use super::tensors::{arg, elements, empty, float, units};
use crate::ops::precision::{Precision, precision};
use burn::backend::TensorMetadata;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubek::matmul::definition::{MatmulElems, MatmulGlobalElems, MatmulSetupError};
use cubek::matmul::launch::launch_ref;
use cubek::matmul::multi_level;
use cubek::matmul::multi_level::routines::TileSizeSelection;
use cubek::matmul::multi_level::routines::batch::simple_unit::SimpleUnitSelectionArgs;
use cubek::matmul::routine::BlueprintStrategy;
use cubek::matmul::strategy::Strategy;
use cubek::std::InputBinding;

/// `lhs @ rhs` for `[.., rows, inner]` and `[.., inner, columns]` with equal leading dimensions and any memory layout;
/// summed in `f32` and stored in `dtype`.
#[track_caller]
pub(super) fn product(lhs: CubeTensor, rhs: CubeTensor, dtype: DType) -> CubeTensor {
    let mut shape = lhs.shape();
    let last = shape.num_dims() - 1;
    shape[last] = rhs.shape()[last];
    let out = empty(&lhs, shape, dtype);
    product_to(lhs, rhs, &out);
    out
}

/// The same into existing memory, which may be a view. A factor with one matrix is broadcast to every matrix of the
/// other.
#[track_caller]
pub(super) fn product_to(lhs: CubeTensor, rhs: CubeTensor, out: &CubeTensor) {
    assert_eq!(lhs.dtype, rhs.dtype, "the factors of a product have different types");
    if multiplied(&lhs, &rhs, out, Terms::default()) {
        return;
    }
    let launched = launch(precision(), lhs, rhs, out);
    launched.unwrap_or_else(|error| panic!("a matrix product could not be launched: {error:?}"));
}

/// The terms added to a product before it is rounded.
#[derive(Clone, Copy, Default)]
pub(super) struct Terms<'a> {
    /// A row, which is added to each row.
    pub(super) bias: Option<&'a CubeTensor>,
    /// A tensor with the layout of the output, or the output itself.
    pub(super) onto: Option<&'a CubeTensor>,
}

/// Computes `lhs @ rhs` plus `terms` into `out` with cuBLASLt, or returns `false` if it is not installed or has no kernel
/// for the product.
#[cfg(feature = "cuda")]
pub(super) fn multiplied(lhs: &CubeTensor, rhs: &CubeTensor, out: &CubeTensor, terms: Terms<'_>) -> bool {
    super::cuda::multiply(precision(), lhs, rhs, out, terms)
}

/// Returns `false`: this build cannot open cuBLASLt.
#[cfg(not(feature = "cuda"))]
pub(super) fn multiplied(_: &CubeTensor, _: &CubeTensor, _: &CubeTensor, terms: Terms<'_>) -> bool {
    let Terms { bias: _, onto: _ } = terms;
    false
}

/// Returns whether cuBLASLt multiplies on the device of a tensor.
pub(super) fn has_library(tensor: &CubeTensor) -> bool {
    #[cfg(feature = "cuda")]
    let has = super::cuda::multiplies(tensor);
    #[cfg(not(feature = "cuda"))]
    let has = {
        let _ = tensor;
        false
    };
    has
}

/// The library of matrix products on NVIDIA's cards, with its version; `None` if it is not installed, or if this build
/// lacks the feature `cuda`.
pub fn products_library() -> Option<String> {
    #[cfg(feature = "cuda")]
    let version = super::cuda::version();
    #[cfg(not(feature = "cuda"))]
    let version = None;
    version
}

/// Adds `lhs @ rhs` to `out`, in `f32`.
#[track_caller]
pub(super) fn add_product_to(lhs: CubeTensor, rhs: CubeTensor, out: &CubeTensor) {
    if !multiplied(&lhs, &rhs, out, Terms { onto: Some(out), ..Terms::default() }) {
        let product = product(lhs, rhs, DType::F32);
        let cubes = elements(out, out.meta.num_elements());
        sums::add_to::launch(&out.client, cubes, units(), arg(out), arg(&product));
    }
}

/// The ratio of rows to columns from which CubeCL uses tiles of 32 by 8.
const TALL: usize = 4;
/// The maximum number of cuts of a matrix.
const MOST_CUTS: usize = 16;
/// The maximum number of cuts of a transposed factor, each of which takes a launch.
const MOST_LAUNCHES: usize = 2;
/// The buffer alignment in bytes that every device supports.
const BINDING: usize = 256;

/// The number of matrices with equal rows that `out` is cut into so that none is too tall; one if it cannot be cut.
///
/// With tiles of 32 by 8, a tensor-core kernel keeps more sums than it has registers and spills them to memory between
/// products; tiles of 16 by 16 fit. (According to NVIDIA's assembler for compute capabilities 8.0 and 9.0.)
fn cuts(out: &CubeTensor) -> usize {
    let [rows, columns] = sides(out);
    (1..=MOST_CUTS).find(|cuts| rows.is_multiple_of(*cuts) && rows / cuts < TALL * columns).unwrap_or(1)
}

/// Rows and columns of the matrices.
fn sides(tensor: &CubeTensor) -> [usize; 2] {
    let last = tensor.meta.num_dims() - 1;
    [tensor.meta.shape()[last - 1], tensor.meta.shape()[last]]
}

/// `[.., rows, columns]` as `[.., cuts, rows / cuts, columns]`, without copying.
fn cut_rows(mut tensor: CubeTensor, cuts: usize) -> CubeTensor {
    let rows = tensor.meta.num_dims() - 2;
    let (each, stride) = (tensor.meta.shape()[rows] / cuts, tensor.meta.strides()[rows]);
    tensor.meta.shape_mut()[rows] = each;
    tensor.meta.insert(rows, cuts, each * stride);
    tensor
}

/// Cut `nth` of `[.., rows, columns]`, without copying.
fn nth_cut(mut tensor: CubeTensor, nth: usize, cuts: usize) -> CubeTensor {
    let rows = tensor.meta.num_dims() - 2;
    let (each, stride) = (tensor.meta.shape()[rows] / cuts, tensor.meta.strides()[rows]);
    tensor.meta.shape_mut()[rows] = each;
    tensor.handle = tensor.handle.offset_start((nth * each * stride * tensor.dtype.size()) as u64);
    tensor
}

/// A product of 16-bit floats; tall matrices are cut if that takes no copy of a factor.
fn launch_halves(
    strategy: &Strategy,
    lhs: CubeTensor,
    rhs: CubeTensor,
    out: &CubeTensor,
) -> Result<(), MatmulSetupError> {
    let cuts = cuts(out);
    let last = lhs.meta.num_dims() - 1;
    let in_rows = lhs.meta.strides()[last] == 1;
    // CubeCL would first copy a transposed factor with a batch dimension; single cuts are not copied.
    let binds = (sides(&lhs)[0] / cuts * lhs.dtype.size()).is_multiple_of(BINDING);
    match cuts {
        2.. if in_rows => {
            let [lhs, rhs, out] = [(lhs, cuts), (rhs, 1), (out.clone(), cuts)].map(|(of, n)| cut_rows(of, n));
            launch_as(strategy, &lhs, &rhs, &out)
        }
        2..=MOST_LAUNCHES if binds => (0..cuts).try_for_each(|nth| {
            let [lhs, out] = [lhs.clone(), out.clone()].map(|of| nth_cut(of, nth, cuts));
            launch_as(strategy, &lhs, &rhs, &out)
        }),
        _ => launch_as(strategy, &lhs, &rhs, out),
    }
}

fn launch(
    precision: Precision,
    lhs: CubeTensor,
    rhs: CubeTensor,
    out: &CubeTensor,
) -> Result<(), MatmulSetupError> {
    let strategy = match (lhs.dtype, precision) {
        // CubeCL would choose TF32 if the device has it.
        (DType::F32, Precision::F32) => Strategy::from(multi_level::Strategy::SimpleUnit(Default::default())),
        // Tensor cores if the device has them for the type, else the same as for `f32`. The choice follows the
        // device's list of features, never a measurement.
        _ => Strategy::Auto,
    };
    let launched = match lhs.dtype {
        DType::F32 => launch_as(&strategy, &lhs, &rhs, out),
        _ => launch_halves(&strategy, lhs.clone(), rhs.clone(), out),
    };
    match launched {
        // Without tensor cores for the type, tiles of 16 bits take 68 KiB of shared memory, and some cards have 64.
        Err(MatmulSetupError::Unavailable(_)) => launch_as(&small_tiles(), &lhs, &rhs, out),
        launched => launched,
    }
}

fn launch_as(
    strategy: &Strategy,
    lhs: &CubeTensor,
    rhs: &CubeTensor,
    out: &CubeTensor,
) -> Result<(), MatmulSetupError> {
    let (factor, sum) = (float(lhs), float(out));
    let mut types = MatmulElems::from_globals(&MatmulGlobalElems { lhs: factor, rhs: factor, out: sum });
    let [lhs, rhs] = [lhs, rhs].map(|tensor| InputBinding::new(tensor.clone().binding(), factor));
    launch_ref(strategy, &out.client, lhs, rhs, out.clone().binding(), &mut types)
}

/// Tiles that fit the shared memory of every device.
fn small_tiles() -> Strategy {
    let tile_size = TileSizeSelection::MinTileSize;
    let inferred = BlueprintStrategy::Inferred(SimpleUnitSelectionArgs { tile_size });
    multi_level::Strategy::SimpleUnit(inferred).into()
}

/// Transposes the matrices of a tensor, without copying.
pub(super) fn transposed(mut tensor: CubeTensor) -> CubeTensor {
    let last = tensor.meta.num_dims() - 1;
    tensor.meta.swap(last - 1, last);
    tensor
}

#[cfg(all(test, feature = "cube"))]
mod tests {
    use super::super::tests::{device, normal};
    use super::*;
    use crate::ops::cube::tensors::floats;
    use crate::ops::testing::{distance, values};
    use burn::backend::Cube;
    use burn::tensor::{Device, FloatDType, Tensor};

    fn factors(device: &Device) -> [Tensor<2>; 2] {
        [normal(device, 1, [70, 129], 1.0), normal(device, 2, [129, 33], 1.0)]
    }

    #[test]
    fn products_of_either_precision_and_order_are_those_of_the_cpu() {
        let Some(device) = device() else { return };
        let [a, b] = factors(&Device::flex());
        let expected = values(&a.matmul(b));
        // The software driver has no TF32: what allows it computes in `f32` too.
        let both = |precision| [false, true].map(|turn| (precision, turn));
        for (precision, turn) in [Precision::F32, Precision::Tf32].into_iter().flat_map(both) {
            let [a, b] = factors(&device).map(|t| {
                let primitive = |t: Tensor<2>| t.try_into_primitive::<Cube>().expect("a tensor of CubeCL");
                // A transpose that is written in its own order.
                if turn {
                    let [t] = super::super::tensors::whole([primitive(t.transpose())]);
                    transposed(t)
                } else {
                    primitive(t)
                }
            });
            let out = floats(&a, [70, 33]);
            launch(precision, a, b, &out).unwrap();
            assert!(distance(&values(&Tensor::<2>::from_primitive::<Cube>(out)), &expected) < 1e-6);
        }
    }

    #[test]
    fn small_tiles_make_the_same_products() {
        let Some(device) = device() else { return };
        let [a, b] = factors(&Device::flex());
        let expected = values(&a.matmul(b));
        for dtype in [DType::F32, DType::F16] {
            let [a, b] = factors(&device).map(|t| match dtype {
                DType::F16 => t.cast(FloatDType::F16),
                _ => t,
            });
            let [a, b] = [a, b].map(|t| t.try_into_primitive::<Cube>().expect("a tensor of CubeCL"));
            let out = floats(&a, [70, 33]);
            launch_as(&small_tiles(), &a, &b, &out).unwrap();
            let bound = if dtype == DType::F32 { 1e-6 } else { 1e-3 };
            assert!(
                distance(&values(&Tensor::<2>::from_primitive::<Cube>(out)), &expected) < bound,
                "{dtype:?}"
            );
        }
    }

    #[test]
    fn products_of_halves_are_added_in_full_precision() {
        let Some(device) = device() else { return };
        let halves = factors(&device).map(|t| t.cast(FloatDType::F16));
        let [a, b] = halves.clone().map(|t| t.cast(FloatDType::F32).into_data());
        let [a, b] = [a, b].map(|data| Tensor::<2>::from_data(data, &Device::flex()));
        let expected = values(&a.matmul(b));
        for (dtype, bound) in [(DType::F32, 1e-6), (DType::F16, 1.0 / 2048.0)] {
            let [a, b] = halves.clone().map(|t| t.try_into_primitive::<Cube>().expect("a tensor of CubeCL"));
            let out = Tensor::<2>::from_primitive::<Cube>(product(a, b, dtype));
            assert_eq!(out.dtype(), dtype);
            assert!(distance(&values(&out.cast(FloatDType::F32)), &expected) < bound, "{dtype:?}");
        }
    }

    #[test]
    fn products_are_in_full_precision_unless_someone_asks() {
        assert_eq!(precision(), Precision::F32);
        assert_eq!(Precision::default(), Precision::F32);
    }
}
