//! The layers of a decoder with a split vocabulary: each has some rows of a table.

use super::DecoderConfig;
use crate::lora::Adaptable;
use crate::parts::vocabulary::{Place, embedding_elements, head_elements};
use crate::parts::{RmsNorm, Table};
use burn::module::Module;
use hydra_core::{Activation, Forward, Init, Pass};
use std::ops::Range;

/// Some rows of the token embedding: adds its tokens' vectors to the sum of earlier parts `[batch, tokens, width]`,
/// which precedes the ids `[batch, tokens]` in the input unless this is the first part. All parts but the last pass the
/// ids on, and all pass positions on.
#[derive(Module, Debug)]
pub struct EmbedPart {
    /// The rows, `[rows, width]`; a tied head shares them.
    pub embed_tokens: Table,
    #[module(skip)]
    place: Place,
    /// The vocabulary size, and the longest sequence in tokens.
    limits: [usize; 2],
    /// The standard deviation of initial weights.
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
}

impl Adaptable for EmbedPart {}

impl Forward for EmbedPart {
    /// # Panics
    /// As for [`Embed`](super::Embed).
    fn forward(&self, x: Activation, _: &Pass) -> Activation {
        let known = self.place.look_up(x, self.embed_tokens.weight.val(), self.limits);
        let sum = Activation::of(known.sum);
        let sum = if self.place.ends { sum } else { sum.and(known.ids) };
        known.rest.into_iter().fold(sum, Activation::and)
    }

    fn init(&self, _: &str, _: &[usize]) -> Init {
        Init::Normal(self.deviation)
    }

    fn working_bytes(&self, inputs: &[Vec<usize>]) -> Option<u64> {
        let [batch, tokens, ..] = *inputs.first()?.as_slice() else { return None };
        let [_, width] = self.embed_tokens.weight.lazy_shape().dims();
        Some((embedding_elements([batch, tokens, width]) * size_of::<f32>()) as u64)
    }

    fn cost_key(&self) -> Option<String> {
        Some(format!("{:?} {:?}", self.place, self.limits))
    }
}

/// Some rows of the head: takes vectors `[batch, tokens, width]`, which the first part normalizes, and returns them
/// with the log-sum-exp of the logits so far and the target's logit, each `[batch * tokens]` and `F32`. The last part
/// returns the mean loss over the `batch * (tokens - 1)` predicted tokens, or fewer if targets are
/// [ignored](crate::ops::IGNORED).
#[derive(Module, Debug)]
pub struct HeadPart {
    /// The final normalization, before the first part.
    pub norm: Option<RmsNorm>,
    /// The rows, `[rows, width]`.
    pub lm_head: Table,
    #[module(skip)]
    place: Place,
    /// The standard deviation of initial weights.
    deviation: f64,
}

impl HeadPart {
    /// The layer of these rows, without values; if the head is tied, they are those of `embedding`.
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
}

impl Adaptable for HeadPart {}

impl Forward for HeadPart {
    /// # Panics
    /// If the targets have another shape than the tokens, or sequences have fewer than two tokens.
    fn forward(&self, x: Activation, pass: &Pass) -> Activation {
        let mut parts = x.into_parts();
        let hidden = parts.remove(0).into_float::<3>();
        let hidden = match &self.norm {
            Some(norm) => norm.forward(hidden),
            None => hidden,
        };
        // Before the first part, the remaining tensors are positions.
        let before = if self.place.begins { Vec::new() } else { parts };
        self.place.predict(hidden, before, self.lm_head.weight.val(), pass)
    }

    fn init(&self, name: &str, _: &[usize]) -> Init {
        if name.starts_with("norm") { Init::Ones } else { Init::Normal(self.deviation) }
    }

    fn working_bytes(&self, inputs: &[Vec<usize>]) -> Option<u64> {
        let [batch, tokens, width] = *inputs.first()?.as_slice() else { return None };
        let [rows, _] = self.lm_head.weight.lazy_shape().dims();
        Some((head_elements([batch, tokens, width], rows) * size_of::<f32>()) as u64)
    }

    fn cost_key(&self) -> Option<String> {
        let epsilon = self.norm.as_ref().map(|norm| norm.epsilon);
        Some(format!("{:?} {epsilon:?}", self.place))
    }

    fn reads_targets(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{ParamBuffers, config};
    use super::super::{DecoderDir, DecoderWriter, chain};
    use super::*;
    use crate::ops;
    use crate::synthetic::testing::{backward, bf16_agrees, shards_agree, with_threads};
    use crate::weights::WEIGHTS;
    use hydra_core::{Batch, Chain, HostActivation, HostTensor, ModelWriter};
    use serde_json::json;
    use tempfile::TempDir;

    /// A model with a table of 256 rows in this many parts.
    fn model(tied: bool, parts: usize) -> DecoderConfig {
        let whole = config(json!({
            "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
            "tie_word_embeddings": tied,
        }));
        DecoderConfig { vocabulary_parts: parts, ..whole }
    }

    /// Ids of the whole vocabulary; some targets are ignored.
    fn batch() -> Batch {
        let ids: Vec<i32> = (0..3 * 40).map(|i| (i * 37 + i / 7) % 256).collect();
        let targets =
            ids.iter().zip(0..).map(|(id, i)| if i % 5 == 3 { ops::IGNORED } else { *id }).collect();
        let of = |ids| HostActivation::of(HostTensor::int(ids, [3, 40]));
        Batch { inputs: of(ids), targets: of(targets), items: 3, loss_targets: 3 * 39, units: 3 * 40 }
    }

    /// A directory with the model of seed 7, written by a chain with this many parts.
    fn written(tied: bool, parts: usize) -> TempDir {
        let (dir, config) = (TempDir::new().unwrap(), model(tied, parts));
        let chain = chain(&config, None).unwrap();
        DecoderWriter::new(config).write(&chain, &ParamBuffers::of(&chain, 7), dir.path()).unwrap();
        dir
    }

    fn read(dir: &TempDir, parts: usize) -> Chain {
        let source = DecoderDir::open(dir.path()).unwrap();
        let config = DecoderConfig { vocabulary_parts: parts, ..source.config().clone() };
        chain(&config, Some(source)).unwrap()
    }

    #[test]
    fn a_cut_model_computes_what_the_whole_one_does() {
        for tied in [true, false] {
            let dir = written(tied, 1);
            let (whole, batch) = (backward(&read(&dir, 1), &batch()), batch());
            for parts in [2, 3, 7] {
                let cut = backward(&read(&dir, parts), &batch);
                assert!((cut.0 - whole.0).abs() < 1e-6 * whole.0, "{} for {} in {parts}", cut.0, whole.0);
                // Gradients are in layer order: the tables' first, then the blocks', then the norm's and the tables'
                // again.
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
            writer.write(&chain, &ParamBuffers::of(&chain, 0), again.path()).unwrap();
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
            assert_eq!(ParamBuffers::of(&read(&again, 5), 0), ParamBuffers::of(&read(&whole, 5), 0));
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
