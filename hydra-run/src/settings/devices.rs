//! The devices of a run, the memory budgets of devices and host, and scheduling.

use super::{flags, values};
use crate::machine::{DevicesArg, Machine, gpus};
use crate::terminal::Usage;
use anyhow::{Result, bail};
use clap::{ArgAction, Args};
use hydra_core::{Bandwidth, ByteSize, FloatType};
use hydra_engine::{FrozenWeights, OptimizerPlacement};
use hydra_models::ops::Precision;
use hydra_sched::PolicyKind;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// The devices of a run.
#[derive(Clone, Debug, PartialEq, Args, Serialize, Deserialize)]
#[command(next_help_heading = "Devices")]
#[serde(default = "flags::defaults", deny_unknown_fields)]
pub struct DeviceSettings {
    /// Devices to train on: cpu:N (N logical devices that share the cores evenly), cpu:NxT (T threads each), cuda:0 or cuda:0,1
    /// (NVIDIA GPUs), cuda:0/2 (two logical devices on one GPU), wgpu: likewise (Vulkan) [default: cpu:1]
    #[arg(long, value_name = "SPEC")]
    pub devices: Option<DevicesArg>,
    /// Memory budget of each device, such as 64MiB; a model that needs more is cut into shards [default: on CPUs an even share
    /// of two fifths of the free memory, on a GPU nine tenths of its own]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    #[serde(rename = "device_memory_bytes", alias = "device_memory")]
    pub device_memory: Option<ByteSize>,
    /// True if the devices read parameters in host memory without a copy, as CPU devices without `--device-memory` do.
    #[arg(skip)]
    #[serde(rename = "resident")]
    pub zero_copy: bool,
    /// Host memory budget for master weights, optimizer state, gradients and boundary activations [default: nine tenths of the
    /// free memory, minus the CPU devices' budgets]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    #[serde(rename = "host_memory_bytes", alias = "host_memory")]
    pub host_memory: Option<ByteSize>,
    /// Disk budget for master weights and optimizer state that exceed --host-memory [default: none]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    #[serde(rename = "disk_memory_bytes", alias = "disk_memory")]
    pub disk_memory: Option<ByteSize>,
    /// Directory for --disk-memory, in unlinked files that vanish when the run ends [default: the run directory, if any]
    #[arg(long, value_name = "DIR")]
    pub disk: Option<PathBuf>,
    /// Train at most N tasks at the same time; the others are queued [default: as many as fit in host memory]
    #[arg(long, value_name = "N", value_parser = values::count, allow_hyphen_values = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub concurrent: Option<usize>,
    /// Refuse the run if any task can never fit in memory, instead of skipping that task
    #[arg(long)]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub strict: bool,
    /// Reserve the whole host memory budget for tasks that are forked during the run (hydra ctl fork), with optimizer steps on the
    /// host; otherwise a fork that does not fit is queued until other tasks end or are paused
    #[arg(long)]
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    #[serde(alias = "room_for_forks")]
    pub reserve_for_forks: bool,
    /// Host memory that may be page-locked for transfers to NVIDIA GPUs, within --host-memory [default: half of the free memory]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    #[serde(rename = "pinned_memory_bytes", alias = "pinned_memory")]
    pub pinned_memory: Option<ByteSize>,
    /// Precision of GPT-2's matrix products on NVIDIA GPUs: f32, or tf32, which multiplies with a 10-bit mantissa on faster units
    #[arg(long, default_value = "f32", value_parser = flags::named::<Precision>(&["f32", "tf32"]))]
    pub precision: Precision,
    /// Where optimizer steps run: auto (on a GPU for the weights that fit there with their optimizer state, and on the host for the
    /// others, if a step gives the same bits on both), host, partial (on the GPU for a part, also if everything would fit), or device
    /// (everything, even if its bits differ, which the report marks)
    #[arg(long, value_name = "PLACE", default_value = "auto", value_parser = flags::named::<OptimizerPlacement>(&["auto", "host", "partial", "device"]))]
    pub optimizer_placement: OptimizerPlacement,
    /// Where frozen weights are kept: memory (host memory), files (in the model's own safetensors files, which are read each time
    /// that a shard is loaded; host memory then has no copy), or auto (in host memory if everything fits there, else in the files)
    #[arg(long, value_name = "PLACE", default_value = "auto", value_parser = flags::named::<FrozenWeights>(&["auto", "memory", "files"]))]
    #[serde(default, skip_serializing_if = "is_auto")]
    pub frozen_weights: FrozenWeights,
    /// Simulate a link of this bandwidth between the host and CPU devices, such as 8GiB/s [default: none]
    #[arg(long, value_name = "SIZE/s", allow_hyphen_values = true)]
    #[serde(rename = "link_bytes_per_s", alias = "link")]
    pub link: Option<Bandwidth>,
    /// Do not prefetch: copy a shard's parameters to its device only when the device is idle, without double buffering
    #[arg(long = "no-prefetch", action = ArgAction::SetFalse)]
    pub prefetch: bool,
    /// Run K microbatches through a shard on its device before the next shard is loaded, at most --accumulate [default: the K
    /// that moves the fewest bytes and whose boundary activations fit in host memory]
    #[arg(long, value_name = "K", value_parser = values::count, allow_hyphen_values = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[serde(alias = "visit")]
    pub microbatch_group: Option<usize>,
    /// Data parallelism: at most N devices train one model, each on other microbatches (--accumulate) or evaluation batches;
    /// devices prefer other models [default: all devices, as far as the pending gradients fit in host memory]
    #[arg(long, value_name = "N", value_parser = values::count, allow_hyphen_values = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[serde(alias = "devices_per_model")]
    pub replicas: Option<usize>,
    /// Do not cache parameters on the device: free a shard's parameters after each shard task, even if memory is left
    #[arg(long = "no-cache", action = ArgAction::SetFalse)]
    #[serde(default = "on", skip_serializing_if = "Clone::clone")]
    pub cache: bool,
    /// The scheduling policy.
    #[arg(long, value_name = "POLICY", default_value_t, hide_default_value = true, help = policy_help(&PolicyKind::ALL))]
    pub policy: PolicyKind,
    /// Cut models by hand: the numbers of the layers at which a new shard begins, separated by commas; overrides --plan
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = values::cut, allow_hyphen_values = true)]
    pub cuts: Option<Vec<usize>>,
    /// Use a plan of `hydra partition`, or a directory of plans, for each model whose fingerprint matches, instead of measuring it
    #[arg(long, value_name = "FILE|DIR")]
    pub plan: Option<PathBuf>,
}

const fn on() -> bool {
    true
}

fn is_auto(frozen: &FrozenWeights) -> bool {
    *frozen == FrozenWeights::Auto
}

/// The help of `--policy` with these policies.
pub fn policy_help(offered: &[PolicyKind]) -> String {
    let names: Vec<&str> = offered.iter().map(|kind| kind.name()).collect();
    format!(
        "Scheduling policy, which picks the next task to run on a free device: {} [default: {}]",
        values::any_of(&names),
        PolicyKind::default()
    )
}

impl DeviceSettings {
    /// These settings with the machine's defaults for those that are not given, and with absolute paths.
    pub fn resolve(self, machine: &Machine) -> Result<Self> {
        self.check()?;
        let devices = self.devices();
        let shares_memory =
            matches!(devices, DevicesArg::Cpu { .. }) && self.device_memory.is_none() && self.link.is_none();
        let absolute = |path: Option<PathBuf>| path.map(std::path::absolute).transpose();
        Ok(Self {
            device_memory: Some(gpus::memory(&devices, self.device_memory, machine)?),
            zero_copy: self.zero_copy || shares_memory,
            devices: Some(devices),
            disk: absolute(self.disk)?,
            plan: absolute(self.plan)?,
            ..self
        })
    }

    /// The settings of a resumed run: its own, overridden by the flags that are given now, with its plans in `plans`.
    pub(crate) fn resumed(
        &self,
        given: &flags::GivenFlags<Self>,
        plans: &Path,
        machine: &Machine,
    ) -> Result<Self> {
        let memory = self.device_memory.filter(|_| !self.zero_copy);
        let begun = Self { device_memory: memory, zero_copy: false, ..self.clone() };
        let mut settings = given.over(&begun)?;
        if let Some(gone) =
            self.disk.as_deref().filter(|dir| settings.disk.as_deref() == Some(*dir) && !dir.is_dir())
        {
            let gone = gone.display();
            bail!(Usage::new(format!(
                "the run started with --disk `{gone}`, and there is no such directory now; pass another --disk DIR"
            )));
        }
        settings.plan = settings.plan.or_else(|| plans.is_dir().then(|| plans.to_owned()));
        settings.resolve(machine)
    }

    /// These settings, with `dir` as the directory of `--disk-memory` if `--disk` is not given.
    pub(crate) fn with_disk_in(&self, dir: &Path) -> Self {
        Self { disk: self.disk.clone().or_else(|| Some(dir.to_owned())), ..self.clone() }
    }

    /// Returns whether all devices are CPUs.
    pub fn are_cpus(&self) -> bool {
        matches!(self.devices(), DevicesArg::Cpu { .. })
    }

    /// The logical devices; by default one CPU device.
    pub fn devices(&self) -> DevicesArg {
        self.devices.clone().unwrap_or(DevicesArg::ONE_CPU)
    }

    /// The memory budget of each device; zero before these settings are resolved.
    pub fn memory(&self) -> ByteSize {
        self.device_memory.unwrap_or_default()
    }

    fn check(&self) -> Result<(), Usage> {
        let devices = self.devices();
        let on_gpu = [("device", OptimizerPlacement::Device), ("partial", OptimizerPlacement::Partial)]
            .into_iter()
            .find_map(|(name, placement)| (placement == self.optimizer_placement).then_some(name));
        match (&devices, self.link) {
            (DevicesArg::Cuda(_) | DevicesArg::Wgpu(_), Some(_)) => Err(format!(
                "--link simulates a link to CPU devices, and --devices {devices} have a real one; leave it out"
            )),
            (DevicesArg::Cpu { .. } | DevicesArg::Wgpu(_), _) if self.precision == Precision::Tf32 => Err(format!(
                "--precision tf32 needs an NVIDIA GPU, and --devices {devices} names none; leave it out, or pass \
                 --devices cuda:0"
            )),
            (DevicesArg::Cpu { .. }, _) if let Some(place) = on_gpu => Err(format!(
                "--optimizer-placement {place} needs a GPU, and --devices {devices} names none; leave it out, or pass \
                 --devices cuda:0"
            )),
            _ => self.check_disk(),
        }
        .map_err(Usage::new)
    }

    /// Refuses a microbatch group with more microbatches than a minibatch has.
    pub(crate) fn check_group(&self, accumulate: usize) -> Result<(), Usage> {
        match self.microbatch_group.filter(|group| *group > accumulate) {
            Some(group) => Err(Usage::new(format!(
                "--microbatch-group must be between 1 and --accumulate ({accumulate}), got {group}"
            ))),
            None => Ok(()),
        }
    }

    /// Refuses a directory that does not exist, and one without a budget.
    fn check_disk(&self) -> Result<(), String> {
        match self.disk.as_deref().map(|dir| (dir.is_dir(), dir.display())) {
            Some((_, shown)) if self.disk_memory.is_none() => {
                Err(format!("--disk `{shown}` needs a size; pass --disk-memory SIZE too"))
            }
            Some((false, shown)) => Err(format!("--disk `{shown}`: there is no such directory")),
            _ => Ok(()),
        }
    }

    /// Refuses `--precision tf32` with `--dtype bf16`, which has no `f32` products.
    pub fn check_dtype(&self, dtype: FloatType) -> Result<(), Usage> {
        match (dtype, self.precision) {
            (FloatType::Bf16, Precision::Tf32) => Err(Usage::new(
                "--precision tf32 applies to f32 matrix products, and --dtype bf16 has none; leave one of the two out",
            )),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_of_one_minibatch() {
        let settings = DeviceSettings { microbatch_group: Some(4), ..flags::defaults() };
        let said = settings.check_group(3).unwrap_err().to_string();
        assert_eq!(said, "--microbatch-group must be between 1 and --accumulate (3), got 4");
        assert!(
            settings.check_group(4).is_ok() && flags::defaults::<DeviceSettings>().check_group(1).is_ok()
        );
    }

    #[test]
    fn products_of_16_bits_have_one_precision() {
        let check = |dtype, precision| DeviceSettings { precision, ..flags::defaults() }.check_dtype(dtype);
        let said = check(FloatType::Bf16, Precision::Tf32).unwrap_err().to_string();
        assert!(said.ends_with("leave one of the two out"), "{said}");
        assert!(check(FloatType::Bf16, Precision::F32).is_ok());
        assert!(check(FloatType::F32, Precision::Tf32).is_ok());
    }
}
