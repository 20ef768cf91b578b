//! The gradient of a buffer on the host: the gradients of its layers, added in a fixed order.
//!
//! The gradients of a tied parameter are added chunk by chunk while they are read, so that no sum of a large table is
//! ever written. Microbatches are accumulated in a buffer, unless the gradients of all of them fit on the host. Both
//! ways give the same bits: uses in chain order, then microbatches in index order.

use burn::tensor::DType;
use hydra_core::{HostTensor, ParamBufferLayout, StateRule};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::Arc;

/// Elements per parallel piece of work: four streams of them fit in a core's cache.
pub(crate) const CHUNK: usize = 1 << 14;

/// Runs `f` compiled for the widest vectors of the current processor, as far as it is inlined. This contracts and
/// reorders no operation, so the bits are those of `f` itself.
#[inline]
fn vectorized<F: pulp::NullaryFnOnce>(f: F) -> F::Output {
    pulp::Arch::new().dispatch(f)
}

/// The accumulated gradient of a buffer.
pub(crate) trait BufferSum: Sized {
    /// A layer's gradient of a parameter.
    type Use;

    /// The resources for additions.
    type Adder: ?Sized;

    /// The gradient of one microbatch from the gradients of each layer that uses the buffer, in chain order.
    fn of_microbatch(
        layout: &ParamBufferLayout,
        layers: Vec<Vec<Option<Self::Use>>>,
        adder: &Self::Adder,
    ) -> Self;

    /// Adds the gradient of the next microbatch.
    fn add(self, next: Self, adder: &Self::Adder) -> Self;
}

/// A layer's gradients of a buffer, by slot; `None` if the loss does not depend on the parameter.
pub(crate) type Uses = Vec<Option<HostTensor>>;

/// The gradient of a parameter.
pub(crate) enum ParamGradient {
    /// The gradients of its layers, in chain order; zero if there are none.
    Uses { len: usize, tensors: Uses },
    /// The sum over microbatches.
    Sum(Vec<f32>),
    /// Those of two or more microbatches, in index order.
    Microbatches(Vec<ParamGradient>),
    /// The value of a state after the observations so far.
    State { values: Vec<f32>, rule: StateRule },
}

/// The gradients of a buffer's parameters, by slot.
pub(crate) type BufferGradient = Vec<ParamGradient>;

/// Settings for additions on the host.
pub(crate) struct HostAdder {
    pub pool: Arc<rayon::ThreadPool>,
    /// True if host memory fits the gradients of all microbatches: they are then added only when they are read.
    pub as_read: bool,
}

impl BufferSum for BufferGradient {
    type Use = HostTensor;
    type Adder = HostAdder;

    fn of_microbatch(layout: &ParamBufferLayout, layers: Vec<Uses>, _: &HostAdder) -> Self {
        let mut params: Vec<Uses> = layout.params.iter().map(|_| Vec::with_capacity(layers.len())).collect();
        for layer in layers {
            params.iter_mut().zip(layer).for_each(|(uses, gradient)| uses.push(gradient));
        }
        let params = layout.params.iter().zip(params);
        params.map(|(p, tensors)| ParamGradient::Uses { len: p.len, tensors }).collect()
    }

    fn add(self, next: Self, adder: &HostAdder) -> Self {
        let both = self.into_iter().zip(next);
        match adder.as_read {
            true => both.map(|(sum, next)| sum.with(next)).collect(),
            false => adder.pool.install(|| both.map(|(sum, next)| sum.add(next)).collect()),
        }
    }
}

impl ParamGradient {
    fn len(&self) -> usize {
        match self {
            Self::Uses { len, .. } => *len,
            Self::Sum(values) | Self::State { values, .. } => values.len(),
            Self::Microbatches(all) => all[0].len(),
        }
    }

    /// Reads the elements in `range`, at most [`CHUNK`].
    pub(crate) fn chunk<'a, R>(&'a self, range: Range<usize>, read: impl FnOnce(&[f32]) -> R) -> R {
        let (first, others) = match self {
            Self::Sum(values) | Self::State { values, .. } => return read(&values[range]),
            Self::Microbatches(all) => {
                let mut scratch = [0.0; CHUNK];
                let sum = &mut scratch[..range.len()];
                write_sum(all, &range, sum);
                return read(sum);
            }
            Self::Uses { tensors, .. } => match &tensors[..] {
                [Some(only)] if only.dtype == DType::F32 => return read(&only.as_f32()[range]),
                [first, others @ ..] => (first, others),
                [] => (&None, &[][..]),
            },
        };
        let part = |tensor: &'a HostTensor| &tensor.as_f32()[range.clone()];
        let is_wide = |tensor: &HostTensor| tensor.dtype == DType::F32;
        let mut scratch = [0.0; CHUNK];
        let sum = &mut scratch[..range.len()];
        let others = match (first, others) {
            (Some(first), [Some(second), others @ ..]) if is_wide(first) && is_wide(second) => {
                add_into(sum, part(first), part(second));
                others
            }
            (first, others) => {
                first.iter().for_each(|first| first.read_floats(range.clone(), sum));
                others
            }
        };
        for other in others.iter().flatten() {
            if is_wide(other) {
                add(sum, part(other));
                continue;
            }
            let mut scratch = [0.0; CHUNK];
            let wide = &mut scratch[..range.len()];
            other.read_floats(range.clone(), wide);
            add(sum, wide);
        }
        read(sum)
    }

    /// Applies observations to the elements in `range` of a state, at most [`CHUNK`]: microbatch by microbatch, and those of a
    /// microbatch in chain order.
    pub(crate) fn advance(&self, rule: StateRule, range: Range<usize>, states: &mut [f32]) {
        match self {
            Self::Uses { tensors, .. } => {
                let mut scratch = [0.0; CHUNK];
                let observed = &mut scratch[..range.len()];
                for tensor in tensors.iter().flatten() {
                    tensor.read_floats(range.clone(), observed);
                    rule.apply(states, observed);
                }
            }
            Self::Microbatches(all) => all.iter().for_each(|one| one.advance(rule, range.clone(), states)),
            Self::Sum(values) | Self::State { values, .. } => states.copy_from_slice(&values[range]),
        }
    }

    fn add(self, next: Self) -> Self {
        Self::Sum(match self {
            Self::State { mut values, rule } => {
                each_chunk(&mut values, |range, states| next.advance(rule, range, states));
                return Self::State { values, rule };
            }
            Self::Sum(mut sum) => {
                each_chunk(&mut sum, |range, sum| next.chunk(range, |next| add(sum, next)));
                sum
            }
            first => {
                let mut sum = vec![0.0; first.len()];
                each_chunk(&mut sum, |range, sum| {
                    first.chunk(range.clone(), |first| next.chunk(range, |next| add_into(sum, first, next)));
                });
                sum
            }
        })
    }

    /// This gradient and the next, to be added when they are read.
    fn with(self, next: Self) -> Self {
        let mut all = match self {
            Self::Microbatches(all) => all,
            first => vec![first],
        };
        all.push(next);
        Self::Microbatches(all)
    }

    /// The sum of squares: `f64` sums of fixed blocks, added in order, in parallel on the current pool.
    pub(crate) fn sum_of_squares(&self) -> f64 {
        sum_over_blocks(self.len(), |range| self.chunk(range, block_of_squares))
    }
}

/// Writes the sum of two or more gradients, added in order.
fn write_sum(all: &[ParamGradient], range: &Range<usize>, sum: &mut [f32]) {
    let [first, second, others @ ..] = all else { return };
    first.chunk(range.clone(), |first| {
        second.chunk(range.clone(), |second| add_into(sum, first, second));
    });
    for other in others {
        other.chunk(range.clone(), |other| add(sum, other));
    }
}

fn each_chunk(values: &mut [f32], f: impl Fn(Range<usize>, &mut [f32]) + Sync) {
    values.par_chunks_mut(CHUNK).enumerate().for_each(|(index, chunk)| {
        let start = index * CHUNK;
        f(start..start + chunk.len(), chunk);
    });
}

fn add_into(sum: &mut [f32], a: &[f32], b: &[f32]) {
    vectorized(|| sum.iter_mut().zip(a).zip(b).for_each(|((sum, a), b)| *sum = *a + *b));
}

fn add(total: &mut [f32], part: &[f32]) {
    vectorized(|| total.iter_mut().zip(part).for_each(|(total, part)| *total += *part));
}

/// The sum of the squares of a slice, in the order of [`ParamGradient::sum_of_squares`].
pub(crate) fn sum_of_squares(values: &[f32]) -> f64 {
    sum_over_blocks(values.len(), |range| block_of_squares(&values[range]))
}

fn sum_over_blocks(len: usize, of: impl Fn(Range<usize>) -> f64 + Sync) -> f64 {
    let range = |block: usize| block * CHUNK..((block + 1) * CHUNK).min(len);
    let blocks: Vec<f64> = (0..len.div_ceil(CHUNK)).into_par_iter().map(|block| of(range(block))).collect();
    blocks.iter().sum()
}

fn block_of_squares(block: &[f32]) -> f64 {
    vectorized(|| {
        let mut replicas = [0.0f64; 8];
        let (eights, rest) = block.as_chunks::<8>();
        for eight in eights {
            for (replica, g) in replicas.iter_mut().zip(eight) {
                *replica += f64::from(*g) * f64::from(*g);
            }
        }
        rest.iter().zip(&mut replicas).for_each(|(g, replica)| *replica += f64::from(*g) * f64::from(*g));
        replicas.iter().sum()
    })
}

#[cfg(test)]
mod tests {
    use super::super::tests::numbers;
    use super::*;
    use hydra_core::FloatType;

    fn uses(len: usize, tensors: &[Option<&[f32]>]) -> ParamGradient {
        let tensors = tensors.iter().map(|t| t.map(|t| HostTensor::float(t.to_vec(), [len]))).collect();
        ParamGradient::Uses { len, tensors }
    }

    /// The gradient in 16 bits, and the same values in `f32`.
    fn narrow(gradient: &ParamGradient) -> [ParamGradient; 2] {
        let ParamGradient::Uses { len, tensors } = gradient else { panic!("a sum is f32") };
        let rounded = || tensors.iter().map(|t| t.clone().map(|t| t.in_type(FloatType::Bf16)));
        let widened = rounded().map(|t| t.map(|t| t.in_type(FloatType::F32)));
        [rounded().collect(), widened.collect()].map(|tensors| ParamGradient::Uses { len: *len, tensors })
    }

    #[test]
    fn gradients_of_16_bits_add_up_as_their_values_do() {
        let n = 2 * CHUNK + 37;
        let [a, b, c] = [1, 2, 3].map(|key| numbers(key, n));
        for tensors in [vec![Some(&a[..])], vec![Some(&a), Some(&b), Some(&c)], vec![None, Some(&b)]] {
            let [narrow, wide] = narrow(&uses(n, &tensors));
            assert_eq!(bits(&narrow), bits(&wide));
            assert_eq!(narrow.sum_of_squares(), wide.sum_of_squares());
        }
    }

    fn bits(gradient: &ParamGradient) -> Vec<u32> {
        let len = gradient.len();
        let starts = (0..len).step_by(CHUNK);
        let chunk = |start: usize| {
            gradient
                .chunk(start..(start + CHUNK).min(len), |c| c.iter().map(|x| x.to_bits()).collect::<Vec<_>>())
        };
        starts.flat_map(chunk).collect()
    }

    #[test]
    fn uses_are_added_in_order_wherever_they_are_read() {
        let n = CHUNK + 37;
        let [a, b, c] = [1, 2, 3].map(|key| numbers(key, n));
        let sum: Vec<u32> = (0..n).map(|i| ((a[i] + b[i]) + c[i]).to_bits()).collect();
        assert_eq!(bits(&uses(n, &[Some(&a), Some(&b), Some(&c)])), sum);
        let none = uses(n, &[None, None]);
        assert!(bits(&none).iter().all(|bits| *bits == 0));
        let late = bits(&uses(2, &[None, Some(&[-0.0, 1.0])]));
        assert_eq!(late, [0.0f32.to_bits(), 1.0f32.to_bits()], "zero plus minus zero");
    }

    #[test]
    fn microbatches_are_added_to_what_uses_add_up_to() {
        let n = 2 * CHUNK + 5;
        let v: Vec<Vec<f32>> = (1..=6).map(|key| numbers(key, n)).collect();
        let micro = |i: usize| uses(n, &[Some(&v[i]), Some(&v[i + 1])]);
        let sum = micro(0).add(micro(2)).add(micro(4));
        let expected =
            |i: usize| (((v[0][i] + v[1][i]) + (v[2][i] + v[3][i])) + (v[4][i] + v[5][i])).to_bits();
        assert_eq!(bits(&sum), (0..n).map(expected).collect::<Vec<_>>());
        let as_read = micro(0).with(micro(2)).with(micro(4));
        assert_eq!((bits(&as_read), as_read.sum_of_squares()), (bits(&sum), sum.sum_of_squares()));
        let none = || uses(3, &[None]);
        assert!([none().add(none()), none().with(none())].iter().all(|sum| bits(sum) == [0; 3]));
    }

    #[test]
    fn squares_are_summed_alike_for_any_number_of_threads() {
        let values = numbers(3, 100_003);
        let gradient = uses(values.len(), &[Some(&values)]);
        let run = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| (gradient.sum_of_squares(), sum_of_squares(&values)))
        };
        let (one, three) = (run(1), run(3));
        assert!(one == three && one.0 == one.1);
        let exact: f64 = values.iter().map(|x| f64::from(*x).powi(2)).sum();
        assert!((one.0 / exact - 1.0).abs() < 1e-12);
    }
}
