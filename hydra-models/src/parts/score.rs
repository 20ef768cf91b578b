//! The head of a decoder's sequence classifier.

use super::{Linear, Norm, initial};
use crate::lora::Adaptable;
use burn::module::Module;
use hydra_core::{Activation, Forward, Init, Pass};

/// The final normalization and the linear layer without a bias of Transformers' `..ForSequenceClassification`. Computes
/// logits `[items, outputs]` from the last token that is not the padding of each of the [`Sequences`](super::Sequences),
/// `[1, items, width]`, which the last block computes alone.
#[derive(Module, Debug)]
pub struct ScoreHead {
    /// The final normalization.
    pub norm: Norm,
    /// The linear layer, `[outputs, width]`.
    pub score: Linear,
    /// The standard deviation of initial weights.
    pub deviation: f64,
}

impl ScoreHead {
    /// The layer without values, from vectors of `width` to this number of outputs.
    pub fn new(norm: Norm, width: usize, outputs: usize, deviation: f64) -> Self {
        Self { norm, score: Linear::new(width, outputs, false), deviation }
    }
}

/// The beginning of the names of the linear layer's parameters in a chain with a [`ScoreHead`].
pub(crate) const SCORE: &str = "head.score.";

/// Returns whether a parameter of a chain belongs to the linear layer of its [`ScoreHead`].
pub(crate) fn is_score(param: &str) -> bool {
    param.starts_with(SCORE)
}

/// PEFT trains the head in full and gives it no adapter.
impl Adaptable for ScoreHead {}

impl Forward for ScoreHead {
    fn forward(&self, x: Activation, pass: &Pass) -> Activation {
        let hidden = self.norm.forward(x.part(0).into_float());
        Activation::of(self.score.forward(hidden, pass).squeeze_dim::<2>(0))
    }

    fn init(&self, name: &str, shape: &[usize]) -> Init {
        initial(name, shape, self.deviation)
    }

    fn working_bytes(&self, inputs: &[Vec<usize>]) -> Option<u64> {
        let [batch, tokens, width] = *inputs.first()?.as_slice() else { return None };
        let [outputs, _] = self.score.weight.lazy_shape().dims();
        // The input has a token for each sequence.
        let elements = batch * tokens * (10 * width + 8 * outputs) + 128 * width;
        Some((elements * size_of::<f32>()) as u64)
    }
}

#[cfg(test)]
mod tests {
    use crate::family::{self, Labels, Model};
    use crate::objective::ProblemType::{self, *};
    use crate::synthetic::testing::{backward, bf16_agrees, sequences, shards_agree, with_threads};
    use hydra_core::{Batch, Chain, HostTensor};

    const PRESETS: [&str; 2] = ["bytes-tiny", "bytes-llama-tiny"];

    fn model(preset: &str, problem: ProblemType, names: &[&str]) -> Box<dyn Model> {
        let mut model = family::load(preset).unwrap();
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        model.classify(&Labels { problem, names }).unwrap();
        model
    }

    fn chain(preset: &str, problem: ProblemType) -> Chain {
        let mut model = model(preset, problem, &["a", "b", "c"]);
        model.set_dropout(0.1);
        model.chain().unwrap()
    }

    fn batch(problem: ProblemType) -> Batch {
        let numbers = || (0..12).map(|at| f32::from(u8::from(at % 5 < 2))).collect();
        let labels = match problem {
            SingleLabelClassification => HostTensor::int(vec![0, 2, 1, 2], [4]),
            _ => HostTensor::float(numbers(), [4, 3]),
        };
        sequences(&[40, 1, 87, 64], labels)
    }

    #[test]
    fn the_head_has_a_norm_and_a_row_for_each_output() {
        for (preset, norm) in PRESETS.into_iter().zip([2, 1]) {
            let (language, classifier) =
                (family::load(preset).unwrap().chain().unwrap(), chain(preset, SingleLabelClassification));
            assert_eq!(
                classifier.parameters(),
                language.parameters() + 3 * 64,
                "{preset}: the table was tied"
            );
            let head = classifier.buffers().last().unwrap();
            assert_eq!(head.layers, [5]);
            assert_eq!(
                (head.params.len(), head.params.last().unwrap().shape.as_slice()),
                (norm + 1, &[3, 64][..])
            );
            let mut out = vec![0.0; head.elements];
            classifier.source().fill(&classifier, classifier.buffers().len() - 1, 1, &mut out).unwrap();
            let score = &out[head.params[norm].range()];
            let deviation = (score.iter().map(|x| x * x).sum::<f32>() / score.len() as f32).sqrt();
            assert!((deviation - 0.02).abs() < 0.003, "{preset}: {deviation}");
            assert!(out[head.params[0].range()].iter().all(|x| *x == 1.0));
        }
    }

    #[test]
    fn bits_depend_neither_on_cuts_nor_on_threads_with_dropout() {
        for preset in PRESETS {
            for problem in [SingleLabelClassification, MultiLabelClassification, Regression] {
                let (chain, batch) = (chain(preset, problem), batch(problem));
                shards_agree(&chain, &batch, &[0, 1, 2, 3, 4, 5, 6]);
                shards_agree(&chain, &batch, &[0, 3, 6]);
                let one = with_threads(1, || backward(&chain, &batch));
                assert_eq!(one, with_threads(3, || backward(&chain, &batch)));
            }
        }
    }

    #[test]
    fn classifiers_compute_in_bf16_with_dropout() {
        for preset in PRESETS {
            let batch = batch(SingleLabelClassification);
            bf16_agrees(|| chain(preset, SingleLabelClassification), &batch, &[0, 1, 3, 5, 6]);
        }
    }

    #[test]
    fn a_cut_vocabulary_is_that_of_the_embedding_alone() {
        for preset in PRESETS {
            let mut model = model(preset, SingleLabelClassification, &["a", "b", "c"]);
            model.set_dropout(0.0);
            let whole = model.chain().unwrap();
            model.cut_vocabulary(3).unwrap();
            let cut = model.chain().unwrap();
            assert_eq!((cut.len(), cut.targets_from()), (3 + 4 + 1, 6), "the last block reads the sequences");
            assert_eq!(cut.parameters(), whole.parameters());
            shards_agree(&cut, &batch(SingleLabelClassification), &[0, 1, 2, 4, 7, 8]);
        }
    }

    #[test]
    fn only_the_last_token_that_is_not_the_padding_is_read() {
        let chain = chain("bytes-llama-tiny", SingleLabelClassification);
        let (batch, mut padded) = (batch(SingleLabelClassification), batch(SingleLabelClassification));
        let HostTensor { bytes, .. } = padded.inputs.parts[0].clone();
        let mut ids: Vec<i32> = bytemuck::pod_collect_to_vec(&bytes);
        *ids.last_mut().unwrap() += 1;
        padded.inputs.parts[0] = HostTensor::int(ids.clone(), [1, 192]);
        assert_eq!(backward(&chain, &batch).0, backward(&chain, &padded).0);
        ids[190] += 1;
        padded.inputs.parts[0] = HostTensor::int(ids, [1, 192]);
        assert_ne!(backward(&chain, &batch).0, backward(&chain, &padded).0);
    }

    #[test]
    fn uninitialized_heads_know_what_they_need() {
        let chain = chain("bytes-tiny", Regression);
        let bytes = |shape: &[usize]| chain.layers()[5].layer().working_bytes(&[shape.to_vec()]);
        assert!(bytes(&[1, 256, 64]).unwrap() > bytes(&[1, 128, 64]).unwrap());
        assert_eq!(bytes(&[1, 128]), None);
    }
}
