//! The devices of a run, their memory and the host's, and who runs next on them.

use super::{flags, values};
use crate::machine::{DevicesArg, Machine, gpus};
use crate::terminal::Usage;
use anyhow::{Result, bail};
use clap::{ArgAction, Args};
use hydra_core::{Bandwidth, ByteSize, FloatType};
use hydra_engine::OptimizerPlacement;
use hydra_models::ops::Precision;
use hydra_sched::PolicyKind;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// The devices of a run.
#[derive(Clone, Debug, PartialEq, Args, Serialize, Deserialize)]
#[command(next_help_heading = "Devices")]
#[serde(default = "flags::defaults", deny_unknown_fields)]
pub(crate) struct DeviceSettings {
    /// cpu:N (N logical devices that share the cores evenly), cpu:NxT (T threads each), cuda:0 or cuda:0,1
    /// (NVIDIA's GPUs), cuda:0/2 (two logical devices on one), or wgpu: likewise [default: cpu:1]
    #[arg(long, value_name = "SPEC")]
    pub(crate) devices: Option<DevicesArg>,
    /// The memory of each device, such as 64MiB [default: two fifths of the machine's free memory, shared; on a
    /// GPU nine tenths of its own]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    #[serde(rename = "device_memory_bytes", alias = "device_memory")]
    pub(crate) device_memory: Option<ByteSize>,
    /// True if the devices read the host's memory in place, as they do when nobody gives them one of theirs.
    #[arg(skip)]
    #[serde(rename = "resident")]
    pub(crate) zero_copy: bool,
    /// The host memory for masters, gradients and activations [default: nine tenths of what is free,
    /// without the devices' part of it]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    #[serde(rename = "host_memory_bytes", alias = "host_memory")]
    pub(crate) host_memory: Option<ByteSize>,
    /// So much of a disk for masters and optimizer state that host memory has no room for [default: none]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    #[serde(rename = "disk_memory_bytes", alias = "disk_memory")]
    pub(crate) disk_memory: Option<ByteSize>,
    /// The directory for them, in files that nobody sees and that end with the run [default: the run directory, if any]
    #[arg(long, value_name = "DIR")]
    pub(crate) disk: Option<PathBuf>,
    /// The most tasks that have begun at once: others wait until one has ended [default: as many as host memory has room for]
    #[arg(long, value_name = "N", value_parser = values::count, allow_hyphen_values = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) concurrent: Option<usize>,
    /// Refuse the run if one task can never fit, instead of leaving that task out
    #[arg(long)]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(crate) strict: bool,
    /// Have all of the host memory, for tasks that are forked while the run goes on (hydra ctl): without it they begin when others
    /// have ended or are paused
    #[arg(long)]
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    #[serde(alias = "room_for_forks")]
    pub(crate) reserve_for_forks: bool,
    /// The part of the host memory that may be page-locked for NVIDIA's GPUs [default: half of what is free]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    #[serde(rename = "pinned_memory_bytes", alias = "pinned_memory")]
    pub(crate) pinned_memory: Option<ByteSize>,
    /// The numbers that GPT-2's matrix products multiply on NVIDIA's GPUs: f32, or tf32 with 10 bits of mantissa, for which
    /// they have faster units
    #[arg(long, default_value = "f32", value_parser = flags::named::<Precision>(&["f32", "tf32"]))]
    pub(crate) precision: Precision,
    /// The place where optimizers step: auto (on a GPU if everything stays there at once and a step has the host's bits, else
    /// on the host), host, or device (also if its bits are others, which the report says)
    #[arg(long, value_name = "PLACE", default_value = "auto", value_parser = flags::named::<OptimizerPlacement>(&["auto", "host", "device"]))]
    pub(crate) optimizer_placement: OptimizerPlacement,
    /// Simulate a link of this bandwidth between host and devices, such as 8GiB/s [default: none]
    #[arg(long, value_name = "SIZE/s", allow_hyphen_values = true)]
    #[serde(rename = "link_bytes_per_s", alias = "link")]
    pub(crate) link: Option<Bandwidth>,
    /// Promote a shard only when its device is free
    #[arg(long = "no-prefetch", action = ArgAction::SetFalse)]
    pub(crate) prefetch: bool,
    /// The microbatches that a promoted shard takes before the next one has its turn, up to --accumulate [default: as many as
    /// move the least bytes, as far as host memory has room for their boundary activations]
    #[arg(long, value_name = "K", value_parser = values::count, allow_hyphen_values = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[serde(alias = "visit")]
    pub(crate) microbatch_group: Option<usize>,
    /// The devices that compute one model at once, at most, each other microbatches (--accumulate) or batches of an evaluation;
    /// other models come first [default: as many as there are, as far as host memory has room for what waits]
    #[arg(long, value_name = "N", value_parser = values::count, allow_hyphen_values = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[serde(alias = "devices_per_model")]
    pub(crate) replicas: Option<usize>,
    /// Let go of a shard's parameters on the device with its shard task, also where there is room for them
    #[arg(long = "no-cache", action = ArgAction::SetFalse)]
    #[serde(default = "on", skip_serializing_if = "Clone::clone")]
    pub(crate) cache: bool,
    #[arg(long, value_name = "POLICY", default_value_t, hide_default_value = true, help = policy_help(&PolicyKind::ALL))]
    pub(crate) policy: PolicyKind,
    /// Cut-points by hand, separated by commas: the layers at which a new shard begins; they win over --plan
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = values::cut, allow_hyphen_values = true)]
    pub(crate) cuts: Option<Vec<usize>>,
    /// A plan, or a directory of plans, to use where the fingerprint matches
    #[arg(long, value_name = "FILE|DIR")]
    pub(crate) plan: Option<PathBuf>,
}

const fn on() -> bool {
    true
}

/// The help of `--policy` where these are offered.
pub(crate) fn policy_help(offered: &[PolicyKind]) -> String {
    let names: Vec<&str> = offered.iter().map(|kind| kind.name()).collect();
    format!("Who runs next: {} [default: {}]", values::any_of(&names), PolicyKind::default())
}

impl DeviceSettings {
    /// These settings with the defaults of the machine in place of what is not given; paths become absolute.
    pub(crate) fn resolve(self, machine: &Machine) -> Result<Self> {
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

    /// The settings of a run that goes on: as it was begun, but for the flags that are given now, with its plans in `plans`.
    pub(crate) fn resumed(
        &self,
        given: &flags::Given<Self>,
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
                "the run was begun with --disk `{gone}`, which is no directory any more: give another --disk"
            )));
        }
        settings.plan = settings.plan.or_else(|| plans.is_dir().then(|| plans.to_owned()));
        settings.resolve(machine)
    }

    /// These settings, with masters on the disk in this directory if no other was named.
    pub(crate) fn with_disk_in(&self, dir: &Path) -> Self {
        Self { disk: self.disk.clone().or_else(|| Some(dir.to_owned())), ..self.clone() }
    }

    pub(crate) fn devices(&self) -> DevicesArg {
        self.devices.clone().unwrap_or(DevicesArg::ONE_CPU)
    }

    /// The memory of each device; none before these settings are resolved.
    pub(crate) fn memory(&self) -> ByteSize {
        self.device_memory.unwrap_or_default()
    }

    fn check(&self) -> Result<(), Usage> {
        let devices = self.devices();
        match (&devices, self.link) {
            (DevicesArg::Cuda(_) | DevicesArg::Wgpu(_), Some(_)) => Err(format!(
                "--link simulates a link in front of CPU devices, and those of --devices {devices} have one of their own"
            )),
            (DevicesArg::Cpu { .. } | DevicesArg::Wgpu(_), _) if self.precision == Precision::Tf32 => Err(format!(
                "--precision tf32 is for NVIDIA's GPUs, and --devices {devices} names none: leave it out, or give \
                 --devices cuda:0"
            )),
            (DevicesArg::Cpu { .. }, _) if self.optimizer_placement == OptimizerPlacement::Device => Err(format!(
                "--optimizer-placement device is for GPUs, and --devices {devices} names none: leave it out, or give \
                 --devices cuda:0"
            )),
            _ => self.check_disk(),
        }
        .map_err(Usage::new)
    }

    /// Refuses a microbatch group of more microbatches than a minibatch has.
    pub(crate) fn check_group(&self, accumulate: usize) -> Result<(), Usage> {
        match self.microbatch_group.filter(|microbatch_group| *microbatch_group > accumulate) {
            Some(microbatch_group) => Err(Usage::new(format!(
                "--microbatch-group {microbatch_group} is more than the microbatches of a minibatch, which --accumulate {accumulate} says: give \
                 {accumulate} or less, or leave it out"
            ))),
            None => Ok(()),
        }
    }

    /// Refuses a directory that is not there, or that nothing is to be in.
    fn check_disk(&self) -> Result<(), String> {
        match self.disk.as_deref().map(|dir| (dir.is_dir(), dir.display())) {
            Some((_, shown)) if self.disk_memory.is_none() => {
                Err(format!("--disk `{shown}` says where, and nothing how much: give --disk-memory too"))
            }
            Some((false, shown)) => Err(format!("--disk `{shown}` names no directory that exists")),
            _ => Ok(()),
        }
    }

    /// Refuses a precision of products where the type of their factors leaves no choice.
    pub(crate) fn check_dtype(&self, dtype: FloatType) -> Result<(), Usage> {
        match (dtype, self.precision) {
            (FloatType::Bf16, Precision::Tf32) => Err(Usage::new(
                "--precision tf32 is about products of f32, and --dtype bf16 leaves none: leave one of the two out",
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
        assert!(said.contains("--microbatch-group 4 is more") && said.contains("give 3 or less"), "{said}");
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
