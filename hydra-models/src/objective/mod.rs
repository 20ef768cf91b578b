//! Objectives besides the next token, a file each. Of classifiers: one class, several classes, or numbers for each item;
//! the last layer of their chains returns logits `[items, outputs]`, and part 0 of the pass's targets holds the labels. Of
//! preferences: the losses of pairs of answers, and that of a reward model. And that of
//! predictions.
//!
//! This module may use tensors and [`Objective`](hydra_core::Objective); it does not depend on models or data.

mod multi_label;
mod predictions;
mod preference;
mod regression;
mod single_label;

pub use multi_label::MultiLabel;
pub use predictions::Predictions;
pub use preference::{LogProbabilities, Preference, PreferenceLoss, RewardModel, SEGMENTS};
pub use regression::Regression;
pub use single_label::{ACCURACY, SingleLabel, classification_loss};

use burn::tensor::{Bool, FloatDType, Tensor};
use hydra_core::{Activation, ChainBuilder, Pass};
use serde::{Deserialize, Serialize};

/// What the outputs of a classifier mean, as in the `problem_type` of a Transformers `config.json`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProblemType {
    /// Numbers: [`Regression`].
    Regression,
    /// One of the classes: [`SingleLabel`].
    SingleLabelClassification,
    /// Any number of the classes: [`MultiLabel`].
    MultiLabelClassification,
}

impl ProblemType {
    /// Sets the objective of a chain whose last layer returns logits `[items, outputs]`.
    pub fn objective(self, chain: ChainBuilder, outputs: usize) -> ChainBuilder {
        match self {
            Self::Regression => chain.objective(Regression { numbers: outputs }),
            Self::SingleLabelClassification => chain.objective(SingleLabel { classes: outputs }),
            Self::MultiLabelClassification => chain.objective(MultiLabel { classes: outputs }),
        }
    }
}

/// The labels of a dataset of classified items.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Labels {
    /// What the labels are.
    pub problem: ProblemType,
    /// The names of the classes in the data's order; of a regression, a name for each number of an item.
    pub names: Vec<String>,
}

/// The outputs, of this name in messages, and the labels, `F32` of one shape.
fn operands(name: &str, outputs: &Activation, pass: &Pass) -> (Tensor<2>, Tensor<2>) {
    let outputs = outputs.part(0).into_float::<2>().cast(FloatDType::F32);
    let labels = pass.targets().part(0).into_float::<2>().cast(FloatDType::F32);
    let (shape, found) = (outputs.dims(), labels.dims());
    assert!(shape == found && shape[0] > 0, "expected a label for each of {shape:?} {name}, found {found:?}");
    (outputs, labels)
}

/// Truth values as `F32` numbers, 0 and 1.
fn numbers<const D: usize>(truths: Tensor<D, Bool>) -> Tensor<D> {
    truths.float().cast(FloatDType::F32)
}

/// The counts of one class over an evaluation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct ClassCounts {
    /// Items of the class that are predicted to have it.
    both: f64,
    /// Items that are predicted to have it.
    predicted: f64,
    /// Items that have it.
    labelled: f64,
}

impl ClassCounts {
    /// The counts of each class in a batch, one after the other: `[both, predicted, labelled]` of class 0, of class 1,
    /// and so on, from `[items, classes]` of zeros and ones.
    fn sums(predicted: Tensor<2>, labelled: Tensor<2>) -> Tensor<1> {
        let both = predicted.clone() * labelled.clone();
        let [items, classes] = both.dims();
        // Sums of zeros and ones are exact in any order.
        let counts = [both, predicted, labelled].map(|of| of.reshape([items, classes, 1]));
        Tensor::cat(counts.to_vec(), 2).sum_dim(0).reshape([3 * classes])
    }

    /// The counts in [`sums`](Self::sums) of all batches.
    fn of(sums: &[f64]) -> Vec<Self> {
        let counts = |class: &[f64]| Self { both: class[0], predicted: class[1], labelled: class[2] };
        sums.chunks_exact(3).map(counts).collect()
    }

    /// The harmonic mean of precision and recall; 0 where the class is neither predicted nor labelled.
    fn f1(self) -> f64 {
        ratio(2.0 * self.both, self.predicted + self.labelled)
    }

    /// The mean F1 over all classes.
    fn macro_f1(classes: &[Self]) -> f64 {
        ratio(classes.iter().map(|class| class.f1()).sum(), classes.len() as f64)
    }

    /// The sums over all classes.
    fn total(classes: &[Self]) -> Self {
        classes.iter().fold(Self::default(), |sum, class| Self {
            both: sum.both + class.both,
            predicted: sum.predicted + class.predicted,
            labelled: sum.labelled + class.labelled,
        })
    }
}

/// The quotient; 0 if the denominator is 0.
fn ratio(numerator: f64, denominator: f64) -> f64 {
    if denominator == 0.0 { 0.0 } else { numerator / denominator }
}
