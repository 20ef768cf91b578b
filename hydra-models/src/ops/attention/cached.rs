//! Attention of new tokens to those in a key-value cache.
//!
//! The result of a sequence depends on its own tokens alone: not on the other sequences of the batch, and not on threads.

use super::cache::{BlockCache, VectorsMut};
use super::grouped::GroupedAttention;
use super::rotary::Rotation;
use crate::ops::kernels::{Mat, MatMut, Write, matmul_here, rows, vectorized};
use crate::ops::math::{exp_in_place, max};
use burn::tensor::{DType, FloatDType, Int, Tensor, TensorData};
use hydra_core::profile::{self, Part};
use hydra_core::{AnyTensor, FloatType};
use rayon::prelude::*;
use std::ops::Range;

/// The maximum number of rows of scores that are computed at a time.
const ROWS: usize = 64;

/// Grouped-query attention of new tokens to themselves, to earlier new ones and to the cached ones of their sequences, within
/// the window. New keys, rotated, and values are added to the cache.
///
/// Queries are `[1, tokens, heads * head width]`, keys and values `[1, tokens, key heads * head width]`. `positions` and
/// `slots` `[1, tokens]` are each token's position in its sequence and the slot of the sequence in the cache; the tokens
/// of a sequence are side by side, in order, and the cache has all before them. There is no dropout and no gradient.
///
/// # Panics
/// If shapes do not match, or the cache lacks a sequence.
pub(crate) fn cached_attention(
    [queries, keys, values]: [Tensor<3>; 3],
    positions: Tensor<2, Int>,
    slots: Tensor<2, Int>,
    attention: &GroupedAttention,
    cache: &BlockCache,
) -> Tensor<3> {
    let (shape, device, dtype) = (queries.dims(), queries.device(), queries.dtype());
    assert!(shape[0] == 1, "a key-value cache reads one row of tokens, found {}", shape[0]);
    let host = |x: Tensor<3>| AnyTensor::from(x.cast(FloatDType::F32)).into_host();
    let [queries, keys, values] = [queries, keys, values].map(host);
    let [positions, slots] = [positions, slots].map(|x| AnyTensor::from(x).into_host());
    let out = profile::time(Part::Attention, || {
        let inputs = [queries.as_f32(), keys.as_f32(), values.as_f32()];
        let new = New { inputs, tokens: shape[1], attention, rotation: attention.rotary.as_ref() };
        let runs = runs(slots.as_i32(), positions.as_i32());
        let longest = runs.iter().map(|run| run.end()).max().unwrap_or(0).max(cache.form().longest);
        let rotation = new.rotation.map(|rotary| rotary.rotation(longest));
        let attend = |run: &Run| new.attend(run, cache, rotation.as_ref());
        // The vectors of a narrow cache are widened, in no more heads at a time than a pilot pass has.
        let parts: Vec<Vec<f32>> = match cache.form().float {
            FloatType::F32 => runs.par_iter().map(attend).collect(),
            _ => runs.iter().map(attend).collect(),
        };
        parts.concat()
    });
    let data = TensorData::new(out, shape);
    let y = Tensor::<3>::from_data(data, (&device, DType::F32));
    if dtype == DType::F32 { y } else { y.cast(dtype) }
}

/// New tokens of one sequence.
#[derive(Clone, Debug, PartialEq)]
struct Run {
    slot: i32,
    /// The position of the first one.
    first: usize,
    tokens: Range<usize>,
}

impl Run {
    /// One past the position of the last one.
    fn end(&self) -> usize {
        self.first + self.tokens.len()
    }
}

/// The runs of tokens of one sequence each.
fn runs(slots: &[i32], positions: &[i32]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (token, (slot, position)) in slots.iter().zip(positions).enumerate() {
        match runs.last_mut() {
            Some(run) if run.slot == *slot && run.end() as i32 == *position => run.tokens.end += 1,
            _ => runs.push(Run { slot: *slot, first: *position as usize, tokens: token..token + 1 }),
        }
    }
    runs
}

/// New queries, keys and values.
struct New<'a> {
    inputs: [&'a [f32]; 3],
    tokens: usize,
    attention: &'a GroupedAttention,
    rotation: Option<&'a super::Rotary>,
}

impl New<'_> {
    /// The columns of a key head in the rows of some tokens of an input.
    fn part(&self, input: usize, tokens: &Range<usize>, head: usize) -> Mat<'_> {
        let data = self.inputs[input];
        let all = data.len() / self.tokens.max(1);
        let width = all / self.attention.key_heads;
        Mat::new(data, self.tokens, all).rows(tokens.clone()).cols(head * width..(head + 1) * width)
    }

    /// The output of a run, `[tokens, heads * width]`.
    fn attend(&self, run: &Run, cache: &BlockCache, rotation: Option<&Rotation>) -> Vec<f32> {
        let key_heads = self.attention.key_heads;
        let heads: Vec<Vec<f32>> = cache.with(run.slot, |stored| {
            let (keys, values) = (stored.keys.split(key_heads), stored.values.split(key_heads));
            let heads = keys.into_par_iter().zip(values).enumerate();
            heads.map(|(head, (keys, values))| self.head(run, head, [keys, values], rotation)).collect()
        });
        let width = heads[0].len() / run.tokens.len();
        let mut out = Vec::with_capacity(heads.len() * heads[0].len());
        for token in 0..run.tokens.len() {
            heads.iter().for_each(|head| out.extend_from_slice(&head[token * width..][..width]));
        }
        out
    }

    /// The output of the query heads of a key head, `[tokens, query heads * width]`.
    fn head(
        &self,
        run: &Run,
        head: usize,
        [mut keys, mut values]: [VectorsMut<'_>; 2],
        rotation: Option<&Rotation>,
    ) -> Vec<f32> {
        let GroupedAttention { heads, key_heads, scale, window, .. } = *self.attention;
        let (new_keys, new_values) = (self.part(1, &run.tokens, head), self.part(2, &run.tokens, head));
        let width = new_keys.row(0).len();
        // A slot of any sequence stands for the last tokens of the longest one.
        let first = if run.slot < 0 { keys.len() / width - run.tokens.len() } else { run.first };
        let mut turned = vec![0.0; width];
        for token in 0..run.tokens.len() {
            let at = first + token;
            turned.copy_from_slice(new_keys.row(token));
            rotation.into_iter().for_each(|rotation| rotation.turn(&mut turned, at));
            keys.write(at * width, &turned);
            values.write(at * width, new_values.row(token));
        }
        let count = heads / key_heads;
        let queries = self.part(0, &run.tokens, head);
        let mut out = vec![0.0; run.tokens.len() * count * width];
        let several = (ROWS / count).max(1);
        let (keys, values) = (&keys, &values);
        // Blocks do not depend on each other: threads that find no key head take them.
        out.par_chunks_mut(several * count * width).enumerate().for_each(|(block, out)| {
            let tokens = block * several..block * several + out.len() / (count * width);
            let seen = |at: usize| (at + 1).saturating_sub(window.unwrap_or(usize::MAX))..at + 1;
            let all = seen(first + tokens.start).start..first + tokens.end;
            let mut turned = vec![0.0; width];
            let mut rows = Vec::with_capacity(tokens.len() * count * width);
            for token in tokens.clone() {
                for query in queries.row(token).chunks(width) {
                    turned.copy_from_slice(query);
                    rotation.into_iter().for_each(|rotation| rotation.turn(&mut turned, first + token));
                    rows.extend(turned.iter().map(|x| x * scale as f32));
                }
            }
            let elements = all.start * width..all.end * width;
            let (keys, values) = (keys.read(elements.clone()), values.read(elements));
            let ranges = tokens.clone().flat_map(|token| {
                let seen = seen(first + token);
                std::iter::repeat_n(seen.start - all.start..seen.end - all.start, count)
            });
            weighted(out, &rows, [&keys, &values], ranges, width);
        });
        out
    }
}

/// Writes the means of values for each query, weighted by the softmax of its products with the keys in its range.
fn weighted(
    out: &mut [f32],
    queries: &[f32],
    [keys, values]: [&[f32]; 2],
    ranges: impl Iterator<Item = Range<usize>>,
    width: usize,
) {
    let (count, seen) = (queries.len() / width, keys.len() / width);
    let mut scores = vec![0.0; count * seen];
    let (queries, keys, values) =
        (Mat::new(queries, count, width), Mat::new(keys, seen, width), Mat::new(values, seen, width));
    product(&mut MatMut::new(&mut scores, count, seen), queries, keys.t());
    let mut factors = Vec::with_capacity(count);
    for (row, range) in scores.chunks_mut(seen).zip(ranges) {
        row[..range.start].fill(0.0);
        row[range.end..].fill(0.0);
        let row = &mut row[range];
        let sum = vectorized(
            #[inline(always)]
            || {
                let largest = max(row);
                exp_in_place(row, largest)
            },
        );
        factors.push((1.0 / sum) as f32);
    }
    product(&mut MatMut::new(out, count, width), Mat::new(&scores, count, seen), values);
    for (row, factor) in out.chunks_mut(width).zip(factors) {
        row.iter_mut().for_each(|x| *x *= factor);
    }
}

/// `a @ b`. Which product computes it depends on the number of rows, which is that of the new tokens of one sequence.
fn product(out: &mut MatMut<'_>, a: Mat<'_>, b: Mat<'_>) {
    match out.len_rows() {
        ..=16 => rows::matmul(out, Write::Set, a, b),
        _ => matmul_here(out, Write::Set, 1.0, a, b),
    }
}

#[cfg(test)]
mod tests {
    use super::super::cache::{KvCache, KvCacheForm};
    use super::super::{Rotary, RotaryScaling, grouped_attention};
    use super::*;
    use crate::ops::testing::{normal, values, with_threads};
    use burn::tensor::Device;
    use hydra_core::{Activation, HostTensor, Pass};

    const TOKENS: usize = 150;

    fn attention(window: Option<usize>) -> GroupedAttention {
        GroupedAttention {
            heads: 6,
            key_heads: 2,
            scale: 0.3,
            causal: true,
            window,
            rotary: Some(Rotary::new(8, 1e4, RotaryScaling::Default)),
            dropout: 0.0,
            site: 0,
        }
    }

    fn inputs(seed: u64) -> [Tensor<3>; 3] {
        [48, 16, 16].map(|width| normal(seed + width as u64, [1, TOKENS, width]))
    }

    fn cache(float: FloatType) -> KvCache {
        KvCache::new(KvCacheForm { blocks: 1, key_heads: 2, head_width: 8, float, longest: TOKENS })
    }

    fn integers(of: Vec<i32>) -> Tensor<2, Int> {
        let shape = [1, of.len()];
        HostTensor::int(of, shape).to_device(&Device::flex().autodiff()).into_int()
    }

    /// The outputs of rows of these runs `(slot, tokens)`, one row after the other.
    fn cached(rows: &[&[(i32, Range<usize>)]], window: Option<usize>, cache: &KvCache) -> Vec<Vec<f32>> {
        let mut outputs = Vec::new();
        for row in rows {
            let parts = [0, 1, 2].map(|input| {
                let part = |(slot, tokens): &(i32, Range<usize>)| {
                    inputs(*slot as u64)[input].clone().narrow(1, tokens.start, tokens.len())
                };
                Tensor::cat(row.iter().map(part).collect(), 1)
            });
            let positions = row.iter().flat_map(|(_, tokens)| tokens.clone().map(|at| at as i32)).collect();
            let slots = row.iter().flat_map(|(slot, tokens)| tokens.clone().map(|_| *slot)).collect();
            let (positions, slots) = (integers(positions), integers(slots));
            let out = cached_attention(parts, positions, slots, &attention(window), &cache.block(0));
            outputs.push(values(&out));
        }
        outputs
    }

    fn assert_near(found: &[f32], expected: &[f32], most: f32) {
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() < most, "{found} is not {expected}");
        }
    }

    #[test]
    fn tokens_in_parts_attend_as_all_at_once() {
        let pass = Pass::evaluate(Activation::default());
        for window in [None, Some(20)] {
            let [q, k, v] = inputs(1);
            let whole = values(&grouped_attention(q, k, v, &attention(window), &pass));
            for (float, most) in [(FloatType::F32, 1e-5), (FloatType::Bf16, 0.02)] {
                let cache = cache(float);
                cache.begin(1, TOKENS);
                let rows: [&[_]; 4] =
                    [&[(1, 0..100)], &[(1, 100..103)], &[(1, 103..104)], &[(1, 104..TOKENS)]];
                assert_near(&cached(&rows, window, &cache).concat(), &whole, most);
            }
        }
    }

    #[test]
    fn bits_depend_neither_on_other_sequences_nor_on_threads() {
        let alone = |slot: i32| {
            let cache = cache(FloatType::F32);
            cache.begin(slot, TOKENS);
            cached(&[&[(slot, 0..40)], &[(slot, 40..41)]], Some(30), &cache)
        };
        let together = cache(FloatType::F32);
        (2..5).for_each(|slot| together.begin(slot, 41));
        let prompts: [&[_]; 3] = [&[(2, 0..40)], &[(3, 0..40)], &[(4, 0..40)]];
        let found = with_threads(3, || {
            cached(&prompts, Some(30), &together);
            cached(&[&[(3, 40..41), (4, 40..41), (2, 40..41)]], Some(30), &together).concat()
        });
        let expected = with_threads(1, || [3, 4, 2].map(|slot| alone(slot)[1].clone()).concat());
        assert_eq!(found, expected);
        together.end(3);
        let lacks = std::panic::catch_unwind(|| cached(&[&[(3, 41..42)]], None, &together));
        assert!(hydra_core::panic_message(lacks.unwrap_err().as_ref()).contains("no sequence in slot 3"));
    }
}
