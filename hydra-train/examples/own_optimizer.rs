//! A custom optimizer, Adagrad (Duchi et al., "Adaptive subgradient methods", JMLR 2011), which trains a
//! perceptron in shards, with its state on disk and with clipping, bitwise equal to the plain loop.
//!
//! ```sh
//! cargo run --example own_optimizer
//! ```

use hydra_train::mlp::{self, Spirals};
use hydra_train::model::optimizer::{Elements, Optimizer, Step};
use hydra_train::model::{CoreError, Settings};
use hydra_train::prelude::*;
use std::error::Error;

/// Adagrad with decoupled weight decay.
#[derive(Clone, Copy, Debug)]
pub struct Adagrad {
    /// Base learning rate.
    pub lr: f64,
    /// Added to the root of the sum of squares.
    pub eps: f64,
    /// Weight decay, scaled by the learning rate.
    pub weight_decay: f64,
}

impl Optimizer for Adagrad {
    fn name(&self) -> &str {
        "adagrad"
    }

    // A task can resume from another's checkpoint only if all of these are equal.
    fn settings(&self) -> Settings {
        let settings = Settings::new().with("lr", self.lr).with("eps", self.eps);
        settings.with("weight_decay", self.weight_decay)
    }

    fn lr(&self) -> f64 {
        self.lr
    }

    // The sum of squares.
    fn moments(&self) -> usize {
        1
    }

    fn validate(&self) -> Result<(), CoreError> {
        match self.eps > 0.0 && self.eps.is_finite() {
            true => Ok(()),
            false => {
                let (found, expected) = (self.eps.to_string(), "a finite number above zero");
                Err(CoreError::Spec { name: "eps", found, expected })
            }
        }
    }

    fn update(&self, step: &Step, elements: Elements<'_, '_>) {
        let decay = if step.decays { self.weight_decay } else { 0.0 };
        let (rate, shrink, eps) = (step.rate as f32, (1.0 - step.rate * decay) as f32, self.eps as f32);
        // The gradient is already clipped, and accumulated over microbatches and layers.
        elements.update(|p, g, [sum]| {
            let sum = g.mul_add(g, sum);
            ((-rate).mul_add(g / (sum.sqrt() + eps), p * shrink), [sum])
        });
    }
}

/// The training spec of a task.
pub fn spec(lr: f64) -> TrainSpec {
    let optimizer = Adagrad { lr, eps: 1e-6, weight_decay: 0.01 };
    let schedule = Schedule::new(WarmupStableDecay { decay_steps: 8, decay_to: 0.0 }, 2);
    TrainSpec { schedule, length: Length::Steps(24), clip: Some(0.5), ..TrainSpec::new(optimizer, 16) }
}

/// Trains on two devices with less host memory than the model needs, and compares with the plain loop.
pub fn main() -> Result<(), Box<dyn Error>> {
    let chain = Arc::new(mlp::chain(&[2, 64, 64, 64, 64], 3)?);
    let data = Arc::new(Spirals::new(1, 200, 3));
    let devices = || DeviceSpec::cpu(ByteSize::mib(64)).threads(1).times(2);
    let task = || TrainTask::new("adagrad", chain.clone(), data.clone(), spec(0.05)).cuts(vec![1, 2, 3]);
    let dir = std::env::temp_dir();
    let on_disk = |host| {
        Orchestrator::new(devices()).map(|run| run.host_memory(host).disk(dir.clone(), ByteSize::mib(64)))
    };

    // The error for too little host memory states how much is needed, which is then used.
    let mut refused = on_disk(ByteSize(1))?;
    refused.submit(task())?;
    let Err(EngineError::HostMemory { needed, .. }) = refused.run() else { panic!("one byte will not do") };
    let mut orchestrator = on_disk(ByteSize(needed))?;
    orchestrator.submit(task())?;
    let report = orchestrator.run()?;

    let trained = &report.tasks[0];
    let plain = plain::train(&chain, data.as_ref(), &spec(0.05))?;
    let (first, last) = (plain.losses[0], plain.losses[plain.losses.len() - 1]);
    println!(
        "{} shards, {} bytes on the disk, loss {first:.3} -> {last:.3}",
        trained.plan.shards, trained.plan.disk_bytes
    );
    assert!(trained.plan.shards > 1 && trained.plan.disk_bytes > 0 && last < first);
    assert_eq!(trained.weights_sha256.as_ref(), Some(&plain.weights_sha256));
    Ok(())
}
