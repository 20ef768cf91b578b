//! Objectives: how a chain's outputs and a batch's targets give the loss that is trained and the metrics of evaluations.

use super::initializer::OwnInit;
use super::layer::{CostKey, Declared, Init, Layer, ParamInfo};
use crate::{Activation, AnyTensor, DeviceTensor, HostActivation, Pass};
use burn::tensor::{DType, Device, Gradients, Tensor};
use serde::{Deserialize, Serialize};
use std::fmt::Debug;
use std::sync::Arc;

/// What a chain is trained for: the loss of its outputs, and the metrics that evaluations report.
///
/// The engine calls [`loss`](Self::loss) and [`measure`](Self::measure) on the device of the chain's last shard, and
/// [`values`](Self::values) on the host at the end of an evaluation. An objective holds no parameters and draws no random
/// numbers. `hydra-train/examples/own_objective.rs` is an example.
pub trait Objective: Debug + Send + Sync {
    /// Identifies the objective with all its options. It is part of [`Chain::architecture`](crate::Chain::architecture).
    fn name(&self) -> String;

    /// The mean loss over the batch's loss targets, `F32` of shape `[1]`. The pass holds the targets
    /// ([`Pass::targets`]).
    ///
    /// Outputs or targets of wrong shapes may panic: the panic fails the task with its message.
    fn loss(&self, outputs: &Activation, pass: &Pass) -> Tensor<1>;

    /// The metrics of evaluations besides the loss; none by default.
    fn metrics(&self) -> Vec<Metric> {
        Vec::new()
    }

    /// What a batch of an evaluation contributes to the metrics; nothing by default.
    fn measure(&self, _outputs: &Activation, _pass: &Pass) -> Measures {
        Measures::default()
    }

    /// The values of [`metrics`](Self::metrics), in their order. `sums` and `rows` are those of all batches: the sums are
    /// added in the order of the batches, and the rows are in the order of the items. The default is for metrics that are
    /// means: it divides each of the sums by the number of loss targets.
    fn values(&self, sums: &[f64], _rows: &[f32], loss_targets: u64) -> Vec<f64> {
        sums.iter().map(|sum| sum / loss_targets.max(1) as f64).collect()
    }

    /// Returns what the loss of a microbatch reads of its whole minibatch; nothing by default.
    ///
    /// A minibatch of several microbatches has one such number, [`statistic_of`](Self::statistic_of) the sums of all of
    /// them. It is known before the first of them is trained: [`Pass::statistic`] in [`loss`](Self::loss).
    fn statistic(&self) -> Statistic {
        Statistic::Nothing
    }

    /// What a batch contributes to a statistic [of targets](Statistic::OfTargets).
    fn measure_targets(&self, _targets: &HostActivation) -> Vec<f64> {
        Vec::new()
    }

    /// The statistic of a minibatch with these sums over its microbatches, added in their order.
    fn statistic_of(&self, _sums: &[f64], _loss_targets: u64) -> f64 {
        0.0
    }

    /// Returns whether evaluations also return the rows of their items, for predictions. The default is false.
    fn keeps_rows(&self) -> bool {
        false
    }

    /// Returns whether the loss is the mean cross-entropy of predicted tokens in natural logarithms. Evaluations then
    /// also report the perplexity, `exp(loss)`.
    fn is_language_model(&self) -> bool {
        false
    }
}

/// What the loss of a microbatch reads of its whole minibatch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Statistic {
    /// Nothing.
    #[default]
    Nothing,
    /// A number that follows from the targets ([`Objective::measure_targets`]), such as a number of tokens.
    OfTargets,
    /// A number that follows from the outputs ([`Objective::measure`]). All microbatches of the minibatch are evaluated with
    /// the current parameters, without dropout, before the first of them is trained.
    OfOutputs,
}

/// A metric of an evaluation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Metric {
    /// The name, such as `accuracy`.
    pub name: String,
    /// Whether larger values are better.
    pub higher_is_better: bool,
}

impl Metric {
    /// A metric whose larger values are better.
    pub fn higher(name: impl Into<String>) -> Self {
        Self { name: name.into(), higher_is_better: true }
    }

    /// A metric whose smaller values are better.
    pub fn lower(name: impl Into<String>) -> Self {
        Self { name: name.into(), higher_is_better: false }
    }
}

/// A metric whose larger values are better.
impl From<&str> for Metric {
    fn from(name: &str) -> Self {
        Self::higher(name)
    }
}

/// What a batch of an evaluation contributes to the metrics, on the device. Both tensors are `F32`.
#[derive(Clone, Debug, Default)]
pub struct Measures {
    /// Sums over the batch's loss targets, as many for every batch. Counts are exact up to 2^24.
    pub sums: Option<Tensor<1>>,
    /// Figures of each item, `[items, figures]`, for metrics that no sums give, such as rank correlations.
    pub rows: Option<Tensor<2>>,
}

/// The objective of a chain whose last layer computes the loss itself, as a language model's head does chunk by chunk.
///
/// In an evaluation pass the last layer also returns one tensor for each metric, `F32` of shape `[1]`: the sum over the
/// batch's loss targets. Tensors beyond these are ignored.
#[derive(Clone, Debug, Default)]
pub(crate) struct LossInLastLayer {
    pub metrics: Vec<Metric>,
    pub language_model: bool,
}

impl Objective for LossInLastLayer {
    fn name(&self) -> String {
        let names: Vec<&str> = self.metrics.iter().map(|metric| metric.name.as_str()).collect();
        if names.is_empty() { String::new() } else { format!("{names:?}") }
    }

    fn loss(&self, outputs: &Activation, pass: &Pass) -> Tensor<1> {
        let found = outputs.parts().len();
        assert!(
            found == 1 || !pass.is_training(),
            "expected only a loss from the last layer in a training pass, found {found} tensors"
        );
        if !pass.is_training() && found <= self.metrics.len() {
            let (names, expected) = (self.name(), self.metrics.len());
            panic!(
                "expected a loss and {expected} metrics {names} from the last layer in an evaluation pass, found {found} tensors"
            );
        }
        outputs.part(0).into_float()
    }

    fn metrics(&self) -> Vec<Metric> {
        self.metrics.clone()
    }

    fn measure(&self, outputs: &Activation, _: &Pass) -> Measures {
        let parts = outputs.parts().iter().skip(1).zip(&self.metrics);
        let sums = parts.map(|(part, Metric { name, .. })| one_number(part, &format!("a metric `{name}`")));
        let sums: Vec<Tensor<1>> = sums.collect();
        Measures { sums: (!sums.is_empty()).then(|| Tensor::cat(sums, 0)), rows: None }
    }

    fn is_language_model(&self) -> bool {
        self.language_model
    }
}

/// The tensor, if it is one `F32` number.
fn one_number(part: &AnyTensor, what: &str) -> Tensor<1> {
    let (dtype, shape) = (part.dtype(), part.shape());
    assert!(
        dtype == DType::F32 && shape[..] == [1],
        "expected {what} of F32 and of shape [1] from the last layer, found {dtype:?} and {shape:?}"
    );
    part.clone().into_float()
}

/// Returns `layer` as the last one of a chain with this objective: what [`Layer::with_objective`] returns for a type that
/// implements [`Layer`] itself.
pub fn last_layer(layer: Box<dyn Layer>, objective: Arc<dyn Objective>) -> Box<dyn Layer> {
    Box::new(LastLayer { layer, objective })
}

/// The last layer of a chain with the chain's objective. It returns the loss, and in an evaluation pass also the
/// [`Measures`]: the sums of rank 1 and the rows of rank 2, each if there are any.
pub(crate) struct LastLayer {
    pub layer: Box<dyn Layer>,
    pub objective: Arc<dyn Objective>,
}

impl Layer for LastLayer {
    fn params(&self) -> Vec<ParamInfo> {
        self.layer.params()
    }

    fn declared(&self) -> Vec<Declared> {
        self.layer.declared()
    }

    fn uninitialized(self: Box<Self>, own: &[bool]) -> (Box<dyn Layer>, Vec<Option<OwnInit>>) {
        let Self { layer, objective } = *self;
        let (layer, inits) = layer.uninitialized(own);
        (Box::new(Self { layer, objective }), inits)
    }

    fn init(&self, name: &str, shape: &[usize]) -> Init {
        self.layer.init(name, shape)
    }

    fn working_bytes(&self, inputs: &[Vec<usize>]) -> Option<u64> {
        self.layer.working_bytes(inputs)
    }

    fn cost_key(&self) -> Option<CostKey> {
        let name = self.objective.name();
        self.layer.cost_key().map(|key| CostKey { text: key.text + &name, ..key })
    }

    fn reads_targets(&self) -> bool {
        self.layer.reads_targets()
    }

    fn with_fixed_states(self: Box<Self>, fixed: &[bool]) -> Box<dyn Layer> {
        let Self { layer, objective } = *self;
        Box::new(Self { layer: layer.with_fixed_states(fixed), objective })
    }

    fn with_objective(self: Box<Self>, objective: Arc<dyn Objective>) -> Box<dyn Layer> {
        Box::new(Self { objective, ..*self })
    }

    fn promote(&self, params: &[DeviceTensor], device: &Device, track: &[bool]) -> Box<dyn Layer> {
        let objective = Arc::clone(&self.objective);
        Box::new(Self { layer: self.layer.promote(params, device, track), objective })
    }

    fn forward(&self, x: Activation, pass: &Pass) -> Activation {
        let outputs = self.layer.forward(x, pass);
        let loss = Activation::of(self.objective.loss(&outputs, pass));
        if pass.is_training() {
            return loss;
        }
        let Measures { sums, rows } = self.objective.measure(&outputs, pass);
        let y = sums.into_iter().fold(loss, Activation::and);
        rows.into_iter().fold(y, Activation::and)
    }

    fn take_gradients(&self, gradients: &mut Gradients) -> Vec<Option<AnyTensor>> {
        self.layer.take_gradients(gradients)
    }
}
