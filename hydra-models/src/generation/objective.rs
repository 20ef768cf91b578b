//! The objective of a model that generates.

use super::Sequences;
use burn::tensor::{DType, FloatDType, Tensor, TensorData};
use hydra_core::{Activation, AnyTensor, Chain, CoreError, Measures, Objective, Pass};
use rayon::prelude::*;
use std::fmt;
use std::sync::Arc;

/// Chooses the next token of each sequence from the logits `[sequences, vocabulary]` of the last layer. The row of an item
/// holds a token and its log-probability for each sequence of the item. The loss is zero, or NaN if a logit is not finite.
pub struct NextToken(Arc<Sequences>);

impl NextToken {
    /// The chain with this objective for the sequences.
    ///
    /// # Errors
    /// Those of [`Chain::map_objective`].
    pub fn of(chain: Chain, sequences: Arc<Sequences>) -> Result<Chain, CoreError> {
        chain.map_objective(|_| Arc::new(Self(sequences)))
    }
}

impl fmt::Debug for NextToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("NextToken").field(&self.0.sampling()).finish()
    }
}

impl Objective for NextToken {
    fn name(&self) -> String {
        "next token".to_owned()
    }

    fn loss(&self, outputs: &Activation, _: &Pass) -> Tensor<1> {
        outputs.part(0).into_float::<2>().cast(FloatDType::F32).sum().mul_scalar(0.0)
    }

    fn measure(&self, outputs: &Activation, pass: &Pass) -> Measures {
        let logits = outputs.part(0).into_float::<2>();
        let ([sequences, vocabulary], device) = (logits.dims(), logits.device());
        let logits = AnyTensor::from(logits.cast(FloatDType::F32)).into_host();
        let slots = pass.targets().part(0).into_host();
        let lasts = pass.targets().part(1).into_host();
        let rows = logits.as_f32().par_chunks(vocabulary).zip(lasts.as_i32());
        let chosen = rows.map(|(logits, last)| {
            let (token, logprob) = self.0.choose(slots.as_i32()[*last as usize], logits);
            [token as f32, logprob as f32]
        });
        let chosen: Vec<[f32; 2]> = chosen.collect();
        let data = TensorData::new(chosen.concat(), [1, 2 * sequences]);
        Measures { sums: None, rows: Some(Tensor::from_data(data, (&device, DType::F32))) }
    }

    fn values(&self, _: &[f64], _: &[f32], _: u64) -> Vec<f64> {
        Vec::new()
    }

    fn keeps_rows(&self) -> bool {
        true
    }
}
