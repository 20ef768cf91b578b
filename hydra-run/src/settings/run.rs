//! All settings of a run, and the demo.

use super::axis::Axis;
use super::{
    AdapterSettings, DeviceSettings, ModelSettings, SaveSettings, SearchSettings, TrainingSettings, flags,
};
use crate::machine::DevicesArg;
use clap::Args;
use hydra_core::ByteSize;
use std::str::FromStr;

/// The default minibatch size and learning rate; the rate suits training from scratch.
const BATCH: usize = 8;
const RATE: f64 = 3e-4;
/// The learning rates of the demo.
const DEMO_RATES: [f64; 6] = [3e-3, 1e-3, 6e-4, 3e-4, 1e-4, 3e-5];
/// The minibatch sizes of the demo. A block takes as much memory at 16 as two blocks at 8, so no single budget would cut both
/// models at every block.
const DEMO_BATCHES: [usize; 2] = [12, 8];
/// The devices of the demo: two logical ones of one thread.
const DEMO_DEVICES: DevicesArg = DevicesArg::Cpu { count: 2, threads: Some(1) };
/// The memory of each device: one block of the model fits at both batch sizes and two fit at neither, so each of the four
/// blocks is a shard.
const DEMO_MEMORY: ByteSize = ByteSize::mib(12);

/// The settings that a spec holds.
#[derive(Clone, Debug, Args)]
pub struct RunSettings {
    #[command(flatten)]
    pub(crate) model: ModelSettings,
    /// The settings of training.
    #[command(flatten)]
    pub training: TrainingSettings,
    #[command(flatten)]
    pub(crate) adapters: AdapterSettings,
    /// A list of values of a setting, which `--weight-decay 0,0.1` is rewritten to
    #[arg(long, value_name = "NAME=VALUE,..", value_parser = Axis::from_str, hide = true)]
    pub grid: Vec<Axis>,
    /// The search, if there is one.
    #[command(flatten)]
    pub search: SearchSettings,
    /// The devices and their memory.
    #[command(flatten)]
    pub devices: DeviceSettings,
    #[command(flatten)]
    pub(crate) save: SaveSettings,
}

impl RunSettings {
    /// These settings with the demo's, if no flag selects what to train; else with the default minibatch size and learning rate, if
    /// these are not given, and a note that names them.
    pub fn with_defaults(mut self) -> (Self, Option<String>) {
        if !self.search.is_none() {
            return (self, None);
        }
        let demo = self.is_demo();
        let (training, devices) = (&mut self.training, &mut self.devices);
        if demo {
            (training.batch, training.lr) = (DEMO_BATCHES.to_vec(), DEMO_RATES.to_vec());
            if devices.devices.is_none() && devices.device_memory.is_none() {
                (devices.devices, devices.device_memory) = (Some(DEMO_DEVICES), Some(DEMO_MEMORY));
            }
            return (self, None);
        }
        let mut taken = Vec::new();
        if training.batch.is_empty() {
            taken.push(format!("--batch {BATCH}"));
            training.batch = vec![BATCH];
        }
        if training.lr.is_empty() {
            taken.push(format!("--lr {RATE:e}"));
            training.lr = vec![RATE];
        }
        let note = format!(
            "note: by default {}; pass a list such as --lr 1e-3,3e-4 to compare values",
            taken.join(" and ")
        );
        (self, (!taken.is_empty()).then_some(note))
    }

    /// Returns true for the demo, if no flag selects what to train. Length, evaluations, samples, seed and devices may be given.
    fn is_demo(&self) -> bool {
        let of_training = TrainingSettings {
            epochs: self.training.epochs,
            steps: self.training.steps,
            eval_every: self.training.eval_every,
            eval_at: self.training.eval_at.clone(),
            patience: self.training.patience,
            eval_limit: self.training.eval_limit,
            sample_prompts: self.training.sample_prompts.clone(),
            sample_tokens: self.training.sample_tokens,
            initial_validation: self.training.initial_validation,
            ..flags::defaults()
        };
        let of_model = ModelSettings { seed: self.model.seed, ..flags::defaults() };
        self.training == of_training
            && self.model == of_model
            && self.adapters.is_none()
            && self.grid.is_empty()
    }
}
