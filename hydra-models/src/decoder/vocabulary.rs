//! A vocabulary that is cut: layers that each have some rows of a table, so that no table is too large for a device.
//!
//! The embedding adds up what its parts know of each token, of which all but one know nothing. The head goes through its
//! parts with the logarithm of the sum of what the logits so far are the logarithms of, and with the logit of the token
//! that is to be predicted, if a part has had it: the loss is the mean of their difference (the online normalizer of
//! Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv 1805.02867, over parts instead of elements).
//! Parts come in the order of their rows, so what comes out does not depend on which of them share a shard. It does depend,
//! in its last bits, on how many parts there are.

use super::DecoderConfig;
use crate::ops;
use crate::parts::{RmsNorm, Table, next_tokens};
use burn::module::Module;
use burn::tensor::{FloatDType, Int, Tensor};
use hydra_core::{Activation, AnyTensor, Forward, Init, Pass};
use std::ops::Range;

/// The place of a part among those of its table.
#[derive(Clone, Copy, Debug)]
struct Place {
    /// The first token that it has a row for.
    first: usize,
    /// True if it has the table's first rows, or its last ones.
    begins: bool,
    ends: bool,
}

impl Place {
    fn of(rows: &Range<usize>, vocabulary: usize) -> Self {
        Self { first: rows.start, begins: rows.start == 0, ends: rows.end == vocabulary }
    }
}

/// The rows of each of so many parts of a vocabulary: as many each as evenly as can be, the first ones one more.
pub(super) fn rows(vocabulary: usize, parts: usize) -> impl Iterator<Item = Range<usize>> {
    let (each, more) = (vocabulary / parts, vocabulary % parts);
    let start = move |part: usize| part * each + part.min(more);
    (0..parts).map(move |part| start(part)..start(part + 1))
}

/// Of ids those that a part has rows for, counted from its first row, and where the others are, in whose place 0 stands.
fn own<const D: usize>(
    ids: Tensor<D, Int>,
    first: usize,
    rows: usize,
) -> (Tensor<D, Int>, Tensor<D, burn::tensor::Bool>) {
    let local = ids.sub_scalar(first as i32);
    let others = local.clone().lower_elem(0).bool_or(local.clone().greater_equal_elem(rows as i32));
    (local.mask_fill(others.clone(), 0), others)
}

/// Some rows of the embedding of tokens: from ids `[batch, tokens]`, in front of which the sum of earlier parts
/// `[batch, tokens, width]` may stand, to that sum with its own rows. But for the last part, the ids ride along, as positions
/// do in every one.
#[derive(Module, Debug)]
pub struct EmbedPart {
    /// The rows, `[rows, width]`; a tied head names them too.
    pub embed_tokens: Table,
    #[module(skip)]
    place: Place,
    /// The number of ids, and the longest sequence in tokens.
    limits: [usize; 2],
    /// The standard deviation of first values.
    deviation: f64,
}

impl EmbedPart {
    /// The layer of these rows, without values.
    pub(super) fn new(config: &DecoderConfig, rows: &Range<usize>) -> Self {
        Self {
            embed_tokens: Table::new(rows.len(), config.hidden_size),
            place: Place::of(rows, config.vocab_size),
            limits: [config.vocab_size, config.max_position_embeddings],
            deviation: config.initializer_range,
        }
    }

    /// # Panics
    /// If there are more tokens than positions, or an id is not below the vocabulary.
    #[track_caller]
    fn check(&self, ids: &Tensor<2, Int>) {
        let ([_, tokens], [vocabulary, positions]) = (ids.dims(), self.limits);
        assert!(
            tokens <= positions,
            "a sequence of {tokens} tokens is longer than the model's {positions} positions: use a shorter context"
        );
        let ids = AnyTensor::from(ids.clone()).into_host();
        let above = ids.as_i32().iter().find(|id| usize::try_from(**id).map_or(true, |id| id >= vocabulary));
        assert!(above.is_none(), "{above:?} names none of the {vocabulary} rows of the table");
    }
}

impl Forward for EmbedPart {
    /// # Panics
    /// As [`Embed`](super::Embed).
    fn forward(&self, x: Activation, _: &Pass) -> Activation {
        let mut parts = x.into_parts();
        let before = (!self.place.begins).then(|| parts.remove(0).into_float::<3>());
        let ids = parts.remove(0).into_int::<2>();
        if self.place.begins {
            self.check(&ids);
        }
        let table = self.embed_tokens.weight.val();
        let ([batch, tokens], [rows, width]) = (ids.dims(), table.dims());
        let (local, others) = own(ids.clone(), self.place.first, rows);
        let others = others.reshape([batch, tokens, 1]).expand([batch, tokens, width]);
        let found = ops::lookup(table, local).mask_fill(others, 0.0);
        let sum = Activation::of(before.map_or_else(|| found.clone(), |before| before + found.clone()));
        let sum = if self.place.ends { sum } else { sum.and(ids) };
        parts.into_iter().fold(sum, Activation::and)
    }

    fn init(&self, _: &str, _: &[usize]) -> Init {
        Init::Normal(self.deviation)
    }

    fn working_bytes(&self, inputs: &[Vec<usize>]) -> Option<u64> {
        let [batch, tokens, ..] = *inputs.first()?.as_slice() else { return None };
        let [_, width] = self.embed_tokens.weight.lazy_shape().dims();
        Some((10 * batch * tokens * width * size_of::<f32>()) as u64)
    }

    fn note(&self) -> Option<String> {
        Some(format!("{:?} {:?}", self.place, self.limits))
    }
}

/// Some rows of the head: from vectors `[batch, tokens, width]`, which the first part normalizes, to the same with the
/// logarithm of the sum of all exponentials of logits so far and the logit of the next token, each `[batch * tokens]` and
/// `F32`. The last part returns the mean loss over `batch * (tokens - 1)` predicted tokens, or fewer where targets are
/// [ignored](crate::ops::IGNORED).
#[derive(Module, Debug)]
pub struct HeadPart {
    /// The final normalization, before the first part.
    pub norm: Option<RmsNorm>,
    /// The rows, `[rows, width]`.
    pub lm_head: Table,
    #[module(skip)]
    place: Place,
    /// The standard deviation of first values.
    deviation: f64,
}

impl HeadPart {
    /// The layer of these rows, without values; where the head is tied, they are those of `embedding`.
    pub(super) fn new(config: &DecoderConfig, rows: &Range<usize>, embedding: &Table) -> Self {
        let own = || Table::new(rows.len(), config.hidden_size);
        let place = Place::of(rows, config.vocab_size);
        Self {
            norm: place.begins.then(|| RmsNorm::new(config.hidden_size, config.rms_norm_eps)),
            lm_head: if config.tie_word_embeddings { embedding.tied() } else { own() },
            place,
            deviation: config.initializer_range,
        }
    }

    /// The logarithm of the sum of the exponentials of its logits, and the logit of each target that it has a row for.
    fn logits(&self, hidden: Tensor<3>, targets: Tensor<1, Int>) -> [Tensor<1>; 2] {
        let ([batch, tokens, _], [rows, _]) = (hidden.dims(), self.lm_head.weight.lazy_shape().dims());
        let count = batch * tokens;
        let logits = ops::linear_transposed(hidden, self.lm_head.weight.val(), None);
        let logits = logits.cast(FloatDType::F32).reshape([count, rows]);
        let largest = logits.clone().max_dim(1).detach();
        let total = (logits.clone() - largest.clone()).exp().sum_dim(1).log() + largest;
        let (local, others) = own(targets, self.place.first, rows);
        let said = logits.gather(1, local.reshape([count, 1])).reshape([count]);
        [total.reshape([count]), said.mask_fill(others, 0.0)]
    }
}

/// The logarithm of the sum of what two numbers are the logarithms of.
fn log_add(a: Tensor<1>, b: Tensor<1>) -> Tensor<1> {
    let larger = a.clone().max_pair(b.clone()).detach();
    ((a - larger.clone()).exp() + (b - larger.clone()).exp()).log() + larger
}

impl Forward for HeadPart {
    /// # Panics
    /// If the targets have another shape than the tokens, or sequences have fewer than two tokens.
    fn forward(&self, x: Activation, pass: &Pass) -> Activation {
        let mut parts = x.into_parts();
        let hidden = parts.remove(0).into_float::<3>();
        let hidden = self.norm.as_ref().map_or_else(|| hidden.clone(), |norm| norm.forward(hidden.clone()));
        let ids = pass.targets().part(0).into_int::<2>();
        let [batch, tokens, _] = hidden.dims();
        assert!(
            ids.dims() == [batch, tokens] && tokens > 1,
            "expected targets of shape {:?} with at least two tokens, found {:?}",
            [batch, tokens],
            ids.dims()
        );
        let targets = next_tokens(ids);
        let [mut total, mut said] = self.logits(hidden.clone(), targets.clone());
        if !self.place.begins {
            let [before, said_before] = [0, 1].map(|_| parts.remove(0).into_float::<1>());
            (total, said) = (log_add(before, total), said_before + said);
        }
        if !self.place.ends {
            return Activation::of(hidden).and(total).and(said);
        }
        let ignored = targets.lower_elem(0);
        let count = ignored.clone().bool_not().int().sum().float().cast(FloatDType::F32);
        Activation::of((total - said).mask_fill(ignored, 0.0).sum() / count)
    }

    fn init(&self, name: &str, _: &[usize]) -> Init {
        if name.starts_with("norm") { Init::Ones } else { Init::Normal(self.deviation) }
    }

    fn working_bytes(&self, inputs: &[Vec<usize>]) -> Option<u64> {
        let [batch, tokens, width] = *inputs.first()?.as_slice() else { return None };
        let [rows, _] = self.lm_head.weight.lazy_shape().dims();
        let elements = batch * tokens * (6 * rows + 8 * width) + 8192 * width;
        Some((elements * size_of::<f32>()) as u64)
    }

    fn note(&self) -> Option<String> {
        let epsilon = self.norm.as_ref().map(|norm| norm.epsilon);
        Some(format!("{:?} {epsilon:?}", self.place))
    }

    fn reads_targets(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Images, config};
    use super::super::{DecoderDir, DecoderWriter, chain};
    use super::*;
    use crate::synthetic::testing::{backward, bf16_agrees, shards_agree, with_threads};
    use crate::weights::WEIGHTS;
    use hydra_core::{Batch, Chain, HostActivation, HostTensor, ModelWriter};
    use serde_json::json;
    use tempfile::TempDir;

    /// A model with a table of 256 rows in so many parts.
    fn model(tied: bool, parts: usize) -> DecoderConfig {
        let whole = config(json!({
            "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
            "tie_word_embeddings": tied,
        }));
        DecoderConfig { vocabulary_parts: parts, ..whole }
    }

    /// Ids of the whole vocabulary, some of which predict nothing.
    fn batch() -> Batch {
        let ids: Vec<i32> = (0..3 * 40).map(|i| (i * 37 + i / 7) % 256).collect();
        let targets =
            ids.iter().zip(0..).map(|(id, i)| if i % 5 == 3 { ops::IGNORED } else { *id }).collect();
        let of = |ids| HostActivation::of(HostTensor::int(ids, [3, 40]));
        Batch { inputs: of(ids), targets: of(targets), items: 3, terms: 3 * 39, units: 3 * 40 }
    }

    /// A directory with the model of seed 7, written by a chain in so many parts.
    fn written(tied: bool, parts: usize) -> TempDir {
        let (dir, config) = (TempDir::new().unwrap(), model(tied, parts));
        let chain = chain(&config, None).unwrap();
        DecoderWriter::new(config).write(&chain, &Images::of(&chain, 7), dir.path()).unwrap();
        dir
    }

    fn read(dir: &TempDir, parts: usize) -> Chain {
        let source = DecoderDir::open(dir.path()).unwrap();
        let config = DecoderConfig { vocabulary_parts: parts, ..source.config().clone() };
        chain(&config, Some(source)).unwrap()
    }

    #[test]
    fn rows_are_divided_evenly() {
        let of = |vocabulary, parts| rows(vocabulary, parts).collect::<Vec<_>>();
        assert_eq!(of(11, 3), [0..4, 4..8, 8..11]);
        assert_eq!(of(4, 4), [0..1, 1..2, 2..3, 3..4]);
    }

    #[test]
    fn a_cut_model_computes_what_the_whole_one_does() {
        for tied in [true, false] {
            let dir = written(tied, 1);
            let (whole, batch) = (backward(&read(&dir, 1), &batch()), batch());
            for parts in [2, 3, 7] {
                let cut = backward(&read(&dir, parts), &batch);
                assert!((cut.0 - whole.0).abs() < 1e-6 * whole.0, "{} for {} in {parts}", cut.0, whole.0);
                // Gradients come layer by layer: the tables' first, then the blocks', then the norm's and the tables' again.
                let table = |from: usize, step: usize, of: &[Vec<f32>]| -> Vec<f32> {
                    of.iter().skip(from).step_by(step).take(parts).flatten().copied().collect()
                };
                let blocks = whole.1.len() - 3;
                let close = |a: &[f32], b: &[f32], what: &str| {
                    let (difference, size) = a.iter().zip(b).fold((0.0_f64, 0.0_f64), |(d, s), (a, b)| {
                        (d + f64::from(a - b).powi(2), s + f64::from(*b).powi(2))
                    });
                    assert_eq!(a.len(), b.len(), "{what}");
                    assert!(
                        difference.sqrt() <= 1e-5 * size.sqrt(),
                        "{what} in {parts}: {difference} of {size}"
                    );
                };
                close(&table(0, 1, &cut.1), &whole.1[0], "the embedding");
                for block in 0..blocks {
                    close(&cut.1[parts + block], &whole.1[1 + block], "a block");
                }
                close(&cut.1[parts + blocks], &whole.1[1 + blocks], "the norm");
                close(&table(parts + blocks + 1, 1, &cut.1), &whole.1[2 + blocks], "the head");
            }
        }
    }

    #[test]
    fn bits_depend_neither_on_cuts_nor_on_threads() {
        for tied in [true, false] {
            let (chain, batch) = (chain(&model(tied, 3), None).unwrap(), batch());
            assert_eq!((chain.len(), chain.targets_from()), (3 + 2 + 3, 5));
            for cuts in [&[0, 1, 2, 3, 4, 5, 6, 7, 8][..], &[0, 2, 6, 8], &[0, 5, 8], &[0, 3, 7, 8]] {
                shards_agree(&chain, &batch, cuts);
            }
            let one = with_threads(1, || backward(&chain, &batch));
            assert_eq!(one, with_threads(3, || backward(&chain, &batch)));
        }
    }

    #[test]
    fn several_examples_in_a_row_are_told_apart() {
        let mut packed = batch();
        let positions = (0..3).flat_map(|_| (0..25).chain(0..15)).collect();
        packed.inputs.parts.push(HostTensor::int(positions, [3, 40]));
        let dir = written(true, 1);
        let (whole, cut) = (backward(&read(&dir, 1), &packed), backward(&read(&dir, 3), &packed));
        assert!((cut.0 - whole.0).abs() < 1e-6 * whole.0 && cut.0 != backward(&read(&dir, 3), &batch()).0);
        shards_agree(&read(&dir, 3), &packed, &[0, 1, 3, 6, 8]);
    }

    #[test]
    fn it_computes_in_bf16() {
        bf16_agrees(|| chain(&model(false, 3), None).unwrap(), &batch(), &[0, 1, 4, 6, 8]);
    }

    #[test]
    fn files_have_whole_tables_whatever_the_parts() {
        for tied in [true, false] {
            let whole = written(tied, 1);
            let again = TempDir::new().unwrap();
            let chain = read(&whole, 3);
            let writer = DecoderWriter::from(&DecoderDir::open(whole.path()).unwrap());
            writer.write(&chain, &Images::of(&chain, 0), again.path()).unwrap();
            let bytes = |dir: &TempDir| {
                let bytes = std::fs::read(dir.path().join(WEIGHTS)).unwrap();
                let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
                let all = tensors
                    .tensors()
                    .into_iter()
                    .map(|(name, of)| (name, of.shape().to_vec(), of.data().to_vec()));
                all.collect::<std::collections::BTreeSet<_>>()
            };
            assert_eq!(bytes(&again), bytes(&whole));
            assert_eq!(Images::of(&read(&again, 5), 0), Images::of(&read(&whole, 5), 0));
        }
    }

    #[test]
    fn an_impossible_number_of_parts_is_refused() {
        for parts in [0, 257] {
            let error = chain(&model(true, parts), None).unwrap_err().to_string();
            assert!(error.contains("vocabulary_parts") && error.contains("between 1 and"), "{error}");
        }
    }
}
