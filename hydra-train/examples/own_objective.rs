//! A custom objective, the focal loss (Lin et al., "Focal loss for dense object detection", ICCV 2017), which trains a
//! perceptron in shards on two devices, keeps the weights of the best value of its metric, and ends with the bits of the
//! plain loop.
//!
//! ```sh
//! cargo run --example own_objective
//! ```

use hydra_train::mlp::{Classifier, Dense, Spirals};
use hydra_train::prelude::*;
use std::error::Error;

/// The metric: the mean probability of the right class.
pub const CONFIDENCE: &str = "confidence";

/// The focal loss: cross-entropy that gives less weight to items that are predicted well. The last layer returns logits
/// `[items, classes]`; the targets are the classes `[items]`.
#[derive(Clone, Copy, Debug)]
pub struct Focal {
    /// The exponent of the weight; 0 gives the cross-entropy.
    pub gamma: f64,
}

impl Focal {
    /// The logarithm of the probability of each item's class, `F32` of shape `[items, 1]`.
    fn log_likelihood(outputs: &Activation, pass: &Pass) -> Tensor<2> {
        let logits = outputs.part(0).into_float::<2>().cast(FloatDType::F32);
        let classes = pass.targets().part(0).into_int::<1>();
        activation::log_softmax(logits, 1).gather(1, classes.unsqueeze_dim(1))
    }
}

impl Objective for Focal {
    // Checkpoints and plans of another objective, or of another exponent, are refused.
    fn name(&self) -> String {
        format!("focal loss, gamma {}", self.gamma)
    }

    fn loss(&self, outputs: &Activation, pass: &Pass) -> Tensor<1> {
        let log = Self::log_likelihood(outputs, pass);
        let weight = (log.clone().exp().neg() + 1.0).powf_scalar(self.gamma as f32);
        // Along a dimension, Burn adds in a fixed order; over a whole tensor it may not.
        (weight * log).mean_dim(0).reshape([1]).neg()
    }

    fn metrics(&self) -> Vec<Metric> {
        vec![Metric::higher(CONFIDENCE)]
    }

    // A sum over the batch, which the evaluation divides by the number of items.
    fn measure(&self, outputs: &Activation, pass: &Pass) -> Measures {
        let sum = Self::log_likelihood(outputs, pass).exp().sum_dim(0).reshape([1]);
        Measures { sums: Some(sum), rows: None }
    }
}

/// A perceptron from points to three classes.
pub fn model(gamma: f64) -> Result<Chain, Box<dyn Error>> {
    let device = Device::flex();
    let linear = |inputs, outputs| nn::LinearConfig::new(inputs, outputs).init(&device);
    let mut chain = Chain::builder("focal").layer("in", Dense { linear: linear(2, 64) });
    for index in 0..3 {
        chain = chain.layer(format!("hidden.{index}"), Dense { linear: linear(64, 64) });
    }
    Ok(chain.layer("out", Classifier { linear: linear(64, 3) }).objective(Focal { gamma }).build()?)
}

/// The training spec of a task: the weights with the best confidence are kept.
pub fn spec() -> TrainSpec {
    let spec = TrainSpec::new(OptimizerSpec::adamw(0.01), 16);
    let metric = Some(CONFIDENCE.to_owned());
    TrainSpec { length: Length::Steps(40), eval_every: Some(10), metric, ..spec }
}

/// Trains with two exponents, and compares with the plain loop.
pub fn main() -> Result<(), Box<dyn Error>> {
    let train = Arc::new(Spirals::new(1, 200, 3));
    let validation = Arc::new(Spirals::new(2, 60, 3));
    let mut orchestrator = Orchestrator::new(DeviceSpec::cpu(ByteSize::mib(64)).threads(1).times(2))?;
    let gammas = [0.0, 2.0];
    for gamma in gammas {
        let chain = Arc::new(model(gamma)?);
        let task = TrainTask::new(format!("gamma-{gamma}"), chain, train.clone(), spec());
        orchestrator.submit(task.validation(validation.clone()).cuts(vec![1, 2, 3]))?;
    }
    let report = orchestrator.run()?;

    for (task, gamma) in report.tasks.iter().zip(gammas) {
        let confidence = |result: &Evaluation| result.metrics[CONFIDENCE];
        let evaluations = || task.validations.evaluations.iter();
        let best = evaluations().map(|(_, result)| confidence(result)).fold(0.0, f64::max);
        println!("{}: {} shards, best confidence {best:.3}", task.name, task.plan.shards);
        assert!(task.plan.shards > 1 && best > 1.0 / 3.0);
        assert_eq!(task.validation.as_ref().map(confidence), Some(best));

        let kept = task.validations.best_step.unwrap_or_default();
        let spec = TrainSpec { length: Length::Steps(kept), ..spec() };
        let plain = plain::train(&model(gamma)?, train.as_ref(), &spec)?;
        assert_eq!(task.weights_sha256.as_ref(), Some(&plain.weights_sha256));
    }
    Ok(())
}
