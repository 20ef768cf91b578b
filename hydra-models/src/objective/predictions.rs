//! The outputs of a model instead of metrics: predictions for items without labels.

use burn::tensor::{FloatDType, Tensor};
use hydra_core::{Activation, Chain, CoreError, Measures, Objective, Pass};
use std::sync::Arc;

/// The outputs for each item, which evaluations return as rows.
///
/// The row of an item is the logits of a classifier. The labels of the targets are not read, and the loss is zero. The row
/// of a language model is the mean loss of a batch, which must hold one item.
#[derive(Debug)]
pub struct Predictions(Arc<dyn Objective>);

impl Predictions {
    /// The chain with its outputs as the rows of its evaluations.
    ///
    /// # Errors
    /// Those of [`Chain::map_objective`].
    pub fn of(chain: Chain) -> Result<Chain, CoreError> {
        chain.map_objective(|objective| Arc::new(Self(objective)))
    }
}

impl Objective for Predictions {
    fn name(&self) -> String {
        format!("predictions of {}", self.0.name())
    }

    fn loss(&self, outputs: &Activation, pass: &Pass) -> Tensor<1> {
        match self.0.is_language_model() {
            true => self.0.loss(outputs, pass),
            false => {
                Tensor::<1>::zeros([1], &outputs.part(0).into_float::<2>().device()).cast(FloatDType::F32)
            }
        }
    }

    fn measure(&self, outputs: &Activation, _: &Pass) -> Measures {
        let rows = match self.0.is_language_model() {
            true => outputs.part(0).into_float::<1>().reshape([1, 1]),
            false => outputs.part(0).into_float::<2>(),
        };
        Measures { sums: None, rows: Some(rows.cast(FloatDType::F32)) }
    }

    fn values(&self, _: &[f64], _: &[f32], _: u64) -> Vec<f64> {
        Vec::new()
    }

    fn keeps_rows(&self) -> bool {
        true
    }

    fn is_language_model(&self) -> bool {
        self.0.is_language_model()
    }
}
