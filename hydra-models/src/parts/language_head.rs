//! What the heads of language models compute.

use super::vocabulary::{Place, head_elements};
use super::{Norm, SEQUENCES, Table, language_model, last_tokens, next_logits};
use crate::family::HeadConfig;
use hydra_core::{Activation, Pass};
use std::ops::Range;

/// The maximum bytes of a chunk of logits.
const CHUNK_BYTES: usize = 64 << 20;

/// The number of tokens whose logits a head computes at a time on a CPU: 256, or fewer for large vocabularies, so that a chunk of
/// logits takes at most 64 MiB. It is a constant of a model because it determines the order in which gradients are summed.
pub(crate) fn chunk_rows(vocabulary: usize) -> usize {
    (CHUNK_BYTES / (size_of::<f32>() * vocabulary.max(1))).clamp(16, 256)
}

/// The rows of its table that a head's layer has, and what it computes of them.
#[derive(Clone, Copy, Debug)]
pub(crate) enum HeadRows {
    /// All of them: the mean loss over the predicted tokens, `[1]`.
    All {
        /// The number of tokens whose logits are in memory at a time.
        chunk_rows: usize,
    },
    /// All of them: the logits `[sequences, vocabulary]` after the last token of each sequence.
    Generating,
    /// Those of a part: the vectors with the log-sum-exp of the logits so far and the target's logit, each `[batch * tokens]` and
    /// `F32`; the last part returns the mean loss.
    Part(Place),
}

impl HeadRows {
    /// Those of a head with these rows of `vocabulary`.
    pub fn of(rows: &Range<usize>, vocabulary: usize, head: &HeadConfig) -> Self {
        match Place::of(rows, vocabulary) {
            place if !place.is_whole() => Self::Part(place),
            _ if head.cache.is_some() => Self::Generating,
            _ => Self::All { chunk_rows: chunk_rows(vocabulary) },
        }
    }

    /// Whether the layer has the table's first rows, and with them the final normalization.
    pub fn begins(self) -> bool {
        if let Self::Part(place) = self { place.begins } else { true }
    }

    /// Computes the layer's output from vectors `[batch, tokens, width]`.
    ///
    /// # Panics
    /// If the targets have another shape than the tokens, or sequences have fewer than two tokens.
    #[track_caller]
    pub fn forward(self, x: Activation, norm: Option<&Norm>, table: &Table, pass: &Pass) -> Activation {
        let normed = |x| Norm::optional(norm, x);
        let (mut parts, table) = (x.into_parts(), table.weight.val());
        let hidden = parts.remove(0).into_float();
        match self {
            Self::All { chunk_rows } => language_model(normed(hidden), table, chunk_rows, pass),
            Self::Generating => next_logits(normed(last_tokens(hidden, pass)), table),
            Self::Part(place) => {
                // Before the first part, the remaining tensors are positions.
                let before = if place.begins { Vec::new() } else { parts };
                place.predict(normed(hidden), before, table, pass)
            }
        }
    }

    /// See [`Forward::working_bytes`](hydra_core::Forward::working_bytes).
    pub fn working_bytes(self, inputs: &[Vec<usize>], table: &Table) -> Option<u64> {
        let shape @ [batch, tokens, width]: [usize; 3] = inputs.first()?.as_slice().try_into().ok()?;
        let [rows, _] = table.weight.lazy_shape().dims();
        let elements = match self {
            Self::All { chunk_rows } => 2 * chunk_rows * rows + 8 * batch * tokens * width + 8192 * width,
            // Logits of as many sequences as the row has at most, and copies of them.
            Self::Generating => 4 * tokens.min(SEQUENCES) * rows + 8 * batch * tokens * width,
            Self::Part(_) => head_elements(shape, rows),
        };
        Some((elements * size_of::<f32>()) as u64)
    }

    /// See [`Forward::cost_key`](hydra_core::Forward::cost_key), for the epsilon of the normalization.
    pub fn cost_key(self, epsilon: Option<f64>) -> Option<String> {
        if let Self::Part(place) = self { Some(format!("{place:?} {epsilon:?}")) } else { None }
    }
}
