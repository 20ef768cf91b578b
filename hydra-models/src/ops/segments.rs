//! Sums of the numbers of a batch by sequence.

use super::autodiff::*;
use super::embedding::integers_below;
use super::tensors::{flex, floats, owned};
use burn::tensor::{DType, Int, Tensor};
use burn_flex::FlexTensor;
use hydra_core::FloatType;

/// The sums, `F32` of shape `[count]`, of the `values` `[positions]` of each segment. `segments` `[positions]` holds the
/// number of the segment of each value, or a negative number for a value that belongs to none. Values are added in the
/// order of their positions, in `f64`.
///
/// # Panics
/// If there is not one segment for each value, values are not `F32`, or a number is not below `count`.
pub fn segment_sums(values: Tensor<1>, segments: Tensor<1, Int>, count: usize) -> Tensor<1> {
    let ([positions], [found]) = (values.dims(), segments.dims());
    assert!(positions == found, "expected the segment of each of {positions} values, found {found} segments");
    let dtype = values.dtype();
    assert!(dtype == DType::F32, "expected values of F32, found {dtype:?}");
    let (values, segments) = (values.into_dispatch(), segments.into_dispatch());
    Tensor::from_dispatch(<Dispatch as SegmentOps>::segment_sums(values, segments, count))
}

/// The sums as a backend op.
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cube"))]
pub(crate) trait SegmentOps: Backend {
    /// The sum of each segment.
    fn segment_sums(values: FloatTensor<Self>, segments: IntTensor<Self>, count: usize) -> FloatTensor<Self>;
}

/// The operations that a differentiable backend provides.
pub(crate) trait SegmentKernels: SegmentOps {
    /// The gradient of the values, given that of the sums.
    fn spread(sums: FloatTensor<Self>, segments: IntTensor<Self>) -> FloatTensor<Self>;
}

/// The segment of each position.
fn numbers(segments: FlexTensor, count: usize) -> Vec<Option<usize>> {
    integers_below(segments, count, ["segment", "the number of segments,"])
}

impl SegmentOps for Flex {
    fn segment_sums(values: FloatTensor<Self>, segments: IntTensor<Self>, count: usize) -> FloatTensor<Self> {
        let (values, mut sums) = (owned(values), vec![0f64; count]);
        for (value, segment) in floats(&values).iter().zip(numbers(segments, count)) {
            segment.into_iter().for_each(|segment| sums[segment] += f64::from(*value));
        }
        flex(sums.into_iter().map(|sum| sum as f32).collect(), [count], FloatType::F32)
    }
}

impl SegmentKernels for Flex {
    fn spread(sums: FloatTensor<Self>, segments: IntTensor<Self>) -> FloatTensor<Self> {
        let sums = owned(sums);
        let sums = floats(&sums);
        let values: Vec<f32> = numbers(segments, sums.len())
            .into_iter()
            .map(|segment| segment.map_or(0.0, |segment| sums[segment]))
            .collect();
        let positions = values.len();
        flex(values, [positions], FloatType::F32)
    }
}

#[derive(Debug)]
struct SumsBackward;

impl<B: SegmentKernels> Backward<B, 1> for SumsBackward {
    type State = IntTensor<B>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let sums = grads.consume::<B>(&ops.node);
        let nodes = parents(&ops);
        register::<B, 1>(grads, nodes, [Some(B::spread(sums, ops.state))]);
    }
}

impl<B: SegmentKernels, C: CheckpointStrategy> SegmentOps for Autodiff<B, C> {
    fn segment_sums(values: FloatTensor<Self>, segments: IntTensor<Self>, count: usize) -> FloatTensor<Self> {
        let (nodes, values) = ([values.node()], values.into_primitive());
        let sums = B::segment_sums(values, segments.clone(), count);
        match SumsBackward.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(segments, sums),
            OpsKind::UnTracked(prep) => prep.finish(sums),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{gradient, normal, values};
    use super::*;
    use burn::tensor::{Device, TensorData};

    fn segments(of: &[i32]) -> Tensor<1, Int> {
        let device = Device::flex().autodiff();
        Tensor::from_data(TensorData::new(of.to_vec(), [of.len()]), (&device, DType::I32))
    }

    #[test]
    fn each_segment_is_summed_in_order_and_gets_its_gradient() {
        let x = normal::<1>(1, [6]).require_grad();
        let numbers = values(&x);
        let sums = segment_sums(x.clone(), segments(&[2, 0, -1, 2, 0, 2]), 4);
        let sum = |of: &[usize]| of.iter().map(|at| f64::from(numbers[*at])).sum::<f64>() as f32;
        assert_eq!(values(&sums), [sum(&[1, 4]), 0.0, sum(&[0, 3, 5]), 0.0]);
        let weights = Tensor::from_data([1.0, 2.0, 3.0, 4.0], &x.device());
        let slopes = gradient(&x, &(sums * weights).sum().backward());
        assert_eq!(slopes, [3.0, 1.0, 0.0, 3.0, 1.0, 3.0]);
    }

    #[test]
    #[should_panic(expected = "segment 2 is not below the number of segments, 2")]
    fn a_segment_beyond_the_count_is_named() {
        segment_sums(normal::<1>(1, [2]), segments(&[0, 2]), 2);
    }
}
