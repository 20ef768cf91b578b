//! The layers of a GPT-2 with a split vocabulary: each has some rows of the token table.

use super::{Gpt2Config, Norm, Table};
use crate::lora::Adaptable;
use crate::ops;
use crate::parts::vocabulary::{Place, embedding_elements, head_elements};
use burn::module::Module;
use burn::tensor::{Int, Tensor};
use hydra_core::{Activation, Forward, HostTensor, Init, Pass};
use std::ops::Range;

/// Some rows of the token embedding: adds its tokens' vectors to the sum of earlier parts `[batch, tokens, width]`,
/// which precedes the ids `[batch, tokens]` in the input unless this is the first part. The last part adds the position
/// vectors; until then the ids are passed on, and positions within examples always.
#[derive(Module, Debug)]
pub struct EmbedPart {
    /// The rows, `[rows, width]`; the head names them too.
    pub wte: Table,
    /// The positions' table, `[positions, width]`, in the last part.
    pub wpe: Option<Table>,
    #[module(skip)]
    place: Place,
    /// The number of ids, and the longest sequence in tokens.
    limits: [usize; 2],
    /// The dropout probability after the last part.
    dropout: f64,
    /// The standard deviation of initial weights.
    deviation: f64,
}

impl EmbedPart {
    /// The layer of these rows, without values.
    pub(super) fn new(config: &Gpt2Config, rows: &Range<usize>) -> Self {
        let place = Place::of(rows, config.vocab_size);
        Self {
            wte: Table::new(rows.len(), config.n_embd),
            wpe: place.ends.then(|| Table::new(config.n_positions, config.n_embd)),
            place,
            limits: [config.vocab_size, config.n_positions],
            dropout: config.embd_pdrop,
            deviation: config.initializer_range,
        }
    }
}

/// The position vectors of tokens `[batch, tokens]`: those within their examples if rows hold several.
fn places(table: Tensor<2>, [batch, tokens]: [usize; 2], at: Option<Tensor<2, Int>>) -> Tensor<3> {
    let in_order = || {
        let row = 0..tokens as i32;
        let rows = (0..batch).flat_map(|_| row.clone()).collect();
        HostTensor::int(rows, [batch, tokens]).to_device(&table.device()).into_int::<2>()
    };
    let at = at.unwrap_or_else(in_order);
    ops::lookup(table, at)
}

impl Adaptable for EmbedPart {}

impl Forward for EmbedPart {
    /// # Panics
    /// As for [`Embed`](super::Embed).
    fn forward(&self, x: Activation, pass: &Pass) -> Activation {
        let known = self.place.look_up(x, self.wte.weight.val(), self.limits);
        let sum = match &self.wpe {
            Some(wpe) => {
                let at = known.rest.first().map(|at| at.clone().into_int::<2>());
                let x = known.sum + places(wpe.weight.val(), known.ids.dims(), at);
                Activation::of(ops::dropout(x, self.dropout, pass.site(0)))
            }
            None => Activation::of(known.sum).and(known.ids),
        };
        known.rest.into_iter().fold(sum, Activation::and)
    }

    fn init(&self, _: &str, _: &[usize]) -> Init {
        Init::Normal(self.deviation)
    }

    fn working_bytes(&self, inputs: &[Vec<usize>]) -> Option<u64> {
        let [batch, tokens, ..] = *inputs.first()?.as_slice() else { return None };
        let [_, width] = self.wte.weight.lazy_shape().dims();
        let places = if self.wpe.is_some() { 6 * batch * tokens * width } else { 0 };
        Some(((embedding_elements([batch, tokens, width]) + places) * size_of::<f32>()) as u64)
    }

    fn cost_key(&self) -> Option<String> {
        Some(format!("{:?} {:?} {}", self.place, self.limits, self.dropout))
    }
}

/// Some rows of the head: takes vectors `[batch, tokens, width]`, which the first part normalizes, and returns them
/// with the log-sum-exp of the logits so far and the target's logit, each `[batch * tokens]` and `F32`. The last part
/// returns the mean loss over the `batch * (tokens - 1)` predicted tokens, or fewer if targets are
/// [ignored](crate::ops::IGNORED).
#[derive(Module, Debug)]
pub struct HeadPart {
    /// The final normalization, before the first part.
    pub ln_f: Option<Norm>,
    /// The rows, `[rows, width]`: those of the embedding.
    pub wte: Table,
    #[module(skip)]
    place: Place,
}

impl HeadPart {
    /// The layer of these rows, without values; they are the parameter of `wte`.
    pub(super) fn new(config: &Gpt2Config, rows: &Range<usize>, wte: &Table) -> Self {
        let place = Place::of(rows, config.vocab_size);
        let ln_f = place.begins.then(|| Norm::new(config.n_embd, config.layer_norm_epsilon));
        Self { ln_f, wte: wte.tied(), place }
    }
}

impl Adaptable for HeadPart {}

impl Forward for HeadPart {
    /// # Panics
    /// If the targets have another shape than the tokens, or sequences have fewer than two tokens.
    fn forward(&self, x: Activation, pass: &Pass) -> Activation {
        let mut parts = x.into_parts();
        let hidden = parts.remove(0).into_float::<3>();
        let hidden = match &self.ln_f {
            Some(norm) => norm.forward(hidden),
            None => hidden,
        };
        // Before the first part, the remaining tensors are positions.
        let before = if self.place.begins { Vec::new() } else { parts };
        self.place.predict(hidden, before, self.wte.weight.val(), pass)
    }

    fn init(&self, name: &str, _: &[usize]) -> Init {
        if name.ends_with("bias") { Init::Zeros } else { Init::Ones }
    }

    fn working_bytes(&self, inputs: &[Vec<usize>]) -> Option<u64> {
        let [batch, tokens, width] = *inputs.first()?.as_slice() else { return None };
        let [rows, _] = self.wte.weight.lazy_shape().dims();
        Some((head_elements([batch, tokens, width], rows) * size_of::<f32>()) as u64)
    }

    fn cost_key(&self) -> Option<String> {
        let epsilon = self.ln_f.as_ref().map(|norm| norm.epsilon);
        Some(format!("{:?} {epsilon:?}", self.place))
    }

    fn reads_targets(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::ParamBuffers;
    use super::super::{Gpt2Dir, Gpt2Writer, chain};
    use super::*;
    use crate::synthetic::testing::{backward, bf16_agrees, shards_agree, with_threads};
    use crate::weights::WEIGHTS;
    use hydra_core::{Batch, Chain, HostActivation, ModelWriter};
    use tempfile::TempDir;

    /// A model with a table of 256 rows in this many parts.
    fn model(parts: usize, dropout: f64) -> Gpt2Config {
        Gpt2Config {
            vocabulary_parts: parts,
            n_layer: 2,
            embd_pdrop: dropout,
            attn_pdrop: dropout,
            resid_pdrop: dropout,
            ..Gpt2Config::preset("bytes-tiny").unwrap()
        }
    }

    /// Ids of the whole vocabulary; some targets are ignored.
    fn batch() -> Batch {
        let ids: Vec<i32> = (0..3 * 40).map(|i| (i * 37 + i / 7) % 256).collect();
        let targets =
            ids.iter().zip(0..).map(|(id, i)| if i % 5 == 3 { ops::IGNORED } else { *id }).collect();
        let of = |ids| HostActivation::of(HostTensor::int(ids, [3, 40]));
        Batch { inputs: of(ids), targets: of(targets), items: 3, loss_targets: 3 * 39, units: 3 * 40 }
    }

    /// The same with several examples in a row.
    fn packed() -> Batch {
        let mut packed = batch();
        let positions = (0..3).flat_map(|_| (0..25).chain(0..15)).collect();
        packed.inputs.parts.push(HostTensor::int(positions, [3, 40]));
        packed
    }

    /// A directory with the model of seed 7, written by a chain with this many parts.
    fn written(parts: usize) -> TempDir {
        let (dir, config) = (TempDir::new().unwrap(), model(parts, 0.0));
        let chain = chain(&config, None).unwrap();
        Gpt2Writer::new(config).write(&chain, &ParamBuffers::of(&chain, 7), dir.path()).unwrap();
        dir
    }

    fn read(dir: &TempDir, parts: usize) -> Chain {
        let source = Gpt2Dir::open(dir.path()).unwrap();
        let config = Gpt2Config { vocabulary_parts: parts, ..source.config().clone() };
        chain(&config, Some(source)).unwrap()
    }

    /// The gradients of all parameters, in the order of a file.
    fn in_order(chain: &Chain, gradients: &[Vec<f32>]) -> Vec<(String, Vec<f32>)> {
        let refs = chain.layers().iter().flat_map(|layer| &layer.params).zip(gradients);
        let mut all: Vec<(String, Vec<f32>)> = Vec::new();
        // A table's gradients as embedding and as head.
        for (place, gradient) in refs {
            let param = &chain.buffers()[place.buffer].params[place.slot].name;
            let name = format!("{} {}", super::super::hf_name(param), all.len() > 4);
            match all.iter_mut().find(|(known, _)| *known == name) {
                Some((_, values)) => values.extend(gradient),
                None => all.push((name, gradient.clone())),
            }
        }
        all
    }

    #[test]
    fn a_cut_model_computes_what_the_whole_one_does() {
        let dir = written(1);
        for batch in [batch(), packed()] {
            let chain = read(&dir, 1);
            let whole = backward(&chain, &batch);
            let expected = in_order(&chain, &whole.1);
            for parts in [2, 3, 7] {
                let chain = read(&dir, parts);
                let cut = backward(&chain, &batch);
                assert!((cut.0 - whole.0).abs() < 1e-6 * whole.0, "{} for {} in {parts}", cut.0, whole.0);
                let found = in_order(&chain, &cut.1);
                assert_eq!(found.len(), expected.len());
                for (name, expected) in &expected {
                    let (_, found) = found.iter().find(|(known, _)| known == name).unwrap();
                    let error = crate::ops::testing::distance(found, expected);
                    // The gradient of a bias's key third is only rounding noise; it is a small part of the whole.
                    assert!(error < 1e-5, "{name} in {parts}: {error}");
                }
            }
        }
        assert_ne!(backward(&read(&dir, 3), &batch()).0, backward(&read(&dir, 3), &packed()).0);
    }

    #[test]
    fn bits_depend_neither_on_cuts_nor_on_threads_with_dropout() {
        for batch in [batch(), packed()] {
            let chain = chain(&model(3, 0.1), None).unwrap();
            assert_eq!((chain.len(), chain.targets_from()), (3 + 2 + 3, 5));
            for cuts in [&[0, 1, 2, 3, 4, 5, 6, 7, 8][..], &[0, 2, 6, 8], &[0, 5, 8], &[0, 3, 7, 8]] {
                shards_agree(&chain, &batch, cuts);
            }
            let one = with_threads(1, || backward(&chain, &batch));
            assert_eq!(one, with_threads(3, || backward(&chain, &batch)));
        }
    }

    #[test]
    fn it_computes_in_bf16() {
        bf16_agrees(|| chain(&model(3, 0.1), None).unwrap(), &batch(), &[0, 1, 4, 6, 8]);
    }

    #[test]
    fn files_have_whole_tables_whatever_the_parts() {
        let (whole, again) = (written(1), TempDir::new().unwrap());
        let writer = Gpt2Writer::from(&Gpt2Dir::open(whole.path()).unwrap());
        let chain = read(&whole, 3);
        writer.write(&chain, &ParamBuffers::of(&chain, 0), again.path()).unwrap();
        let tensors = |dir: &TempDir| {
            let bytes = std::fs::read(dir.path().join(WEIGHTS)).unwrap();
            let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
            let all =
                file.tensors().into_iter().map(|(name, of)| (name, of.shape().to_vec(), of.data().to_vec()));
            all.collect::<std::collections::BTreeSet<_>>()
        };
        assert_eq!(tensors(&again), tensors(&whole));
        assert_eq!(ParamBuffers::of(&read(&again, 5), 0), ParamBuffers::of(&read(&whole, 5), 0));
    }

    #[test]
    fn an_impossible_number_of_parts_is_refused() {
        for parts in [0, 257] {
            let error = chain(&model(parts, 0.0), None).unwrap_err().to_string();
            assert!(error.contains("vocabulary_parts") && error.contains("between 1 and"), "{error}");
        }
    }
}
