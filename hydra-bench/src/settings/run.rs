//! All settings of a run, and the demo.

use super::{AdapterSettings, DeviceSettings, ModelSettings, SaveSettings, SearchSettings, TrainingSettings};
use crate::machine::DevicesArg;
use clap::Args;
use hydra_core::ByteSize;

/// The minibatch sizes and learning rates of a grid for which nobody gives any; the rates suit training from scratch.
const BATCHES: [usize; 2] = [16, 8];
const RATES: [f64; 6] = [3e-3, 1e-3, 6e-4, 3e-4, 1e-4, 3e-5];
/// The minibatch sizes of the demo. A block takes as much at 16 as two do at 8: no one budget would cut both that often.
const DEMO_BATCHES: [usize; 2] = [12, 8];
/// The devices of the demo: two logical ones of one thread.
const DEMO_DEVICES: DevicesArg = DevicesArg::Cpu { count: 2, threads: Some(1) };
/// The memory of each: one block of the model fits at both batch sizes, and two at neither, so each of the four is a shard.
const DEMO_MEMORY: ByteSize = ByteSize::mib(12);

/// The settings that a spec holds.
#[derive(Clone, Debug, Args)]
pub(crate) struct RunSettings {
    #[command(flatten)]
    pub(crate) model: ModelSettings,
    #[command(flatten)]
    pub(crate) training: TrainingSettings,
    #[command(flatten)]
    pub(crate) adapters: AdapterSettings,
    #[command(flatten)]
    pub(crate) search: SearchSettings,
    #[command(flatten)]
    pub(crate) devices: DeviceSettings,
    #[command(flatten)]
    pub(crate) save: SaveSettings,
}

impl RunSettings {
    /// These settings with the default grid in place of one that is not given, or with those of the demo.
    pub(crate) fn with_grid(mut self) -> Self {
        if !self.search.is_none() {
            return self;
        }
        let demo = self.is_demo();
        let (training, devices) = (&mut self.training, &mut self.devices);
        if training.batch.is_empty() {
            training.batch = if demo { DEMO_BATCHES } else { BATCHES }.to_vec();
        }
        if training.lr.is_empty() {
            training.lr = RATES.to_vec();
        }
        if demo {
            (devices.devices, devices.device_memory) = (Some(DEMO_DEVICES), Some(DEMO_MEMORY));
        }
        self
    }

    /// Returns true if nothing is given that decides which models train on what; the demo's memory is made for its batches.
    fn is_demo(&self) -> bool {
        self.model.model.is_none()
            && self.model.data.is_none()
            && self.training.batch.is_empty()
            && self.devices.devices.is_none()
            && self.devices.device_memory.is_none()
    }
}
