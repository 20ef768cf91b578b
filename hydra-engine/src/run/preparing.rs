//! Estimates the time a run takes before its first minibatch: a few initial weights are drawn or read and timed.
//!
//! May touch: the chains of tasks.
//! Never: keeps what it has drawn or read.

use super::setup::AdmittedRun;
use crate::error::EngineError;
use crate::protocol::Clock;
use crate::train_task::TrainTask;
use crate::weights::initial_buffer;
use hydra_core::Chain;
use rayon::prelude::*;
use std::sync::Arc;

/// Elements to draw or read; more if the smallest parameter buffer is larger.
const ELEMENTS: usize = 4 << 20;

impl AdmittedRun {
    /// Estimated seconds for drawing or reading the initial weights of all tasks, from a sample of each model.
    ///
    /// # Errors
    /// Weights that cannot be read.
    pub fn initial_weights_s(&self) -> Result<f64, EngineError> {
        let mut known: Vec<(&Arc<Chain>, f64)> = Vec::new();
        let mut all_s = 0.0;
        for task in self.tasks.iter().filter(|task| !task.is_finished()) {
            let chain = &task.chain;
            let seconds = match known.iter().find(|(of, _)| Arc::ptr_eq(of, chain)) {
                Some((_, seconds)) => *seconds,
                None => initial_weights_s(task)?,
            };
            known.push((chain, seconds));
            all_s += seconds;
        }
        Ok(all_s)
    }
}

/// The seconds of one task, extrapolated from its smallest buffers.
fn initial_weights_s(task: &TrainTask) -> Result<f64, EngineError> {
    let (chain, seed) = (&task.chain, task.spec.seed);
    let elements = |buffer: &usize| chain.buffers()[*buffer].elements;
    let mut buffers: Vec<usize> = (0..chain.buffers().len()).collect();
    buffers.sort_by_key(elements);
    let all: usize = buffers.iter().map(elements).sum();
    let mut timed = 0;
    buffers.retain(|buffer| {
        let takes = timed < ELEMENTS;
        timed += if takes { elements(buffer) } else { 0 };
        takes
    });
    let clock = Clock::start();
    buffers.par_iter().try_for_each(|buffer| initial_buffer(chain, *buffer, seed).map(drop))?;
    Ok(clock.now() * all as f64 / timed.max(1) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hydra_core::{OptimizerSpec, TrainSpec};
    use hydra_models::mlp::{self, Spirals};

    #[test]
    fn initial_weights_take_time() {
        let chain = Arc::new(mlp::chain(&[2, 16, 16], 3).unwrap());
        let spec = TrainSpec::new(OptimizerSpec::sgd(1e-2), 1);
        let task = TrainTask::new("task", chain, Arc::new(Spirals::new(1, 8, 3)), spec);
        let seconds = initial_weights_s(&task).unwrap();
        assert!(seconds.is_finite() && seconds > 0.0);
    }
}
