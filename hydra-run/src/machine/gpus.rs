//! Requirements of GPU devices: what is missing and how to fix it. `hydra doctor` and the refusal of a run share the texts.

use crate::machine::findings::{COMPILER, DRIVER, Findings, Library};
use crate::machine::names::{DevicesArg, Gpus};
use crate::machine::resources::Machine;
use anyhow::{Result, bail};
use hydra_core::ByteSize;
use serde::Serialize;

/// The default share of a GPU's memory for devices. The rest is for the driver and kernels.
const CARD_SHARE: (u64, u64) = (9, 10);
const BUILD: &str = "cargo build --release -p hydra-bench --features";

/// Returns the memory of each device. Fails if the devices are unusable, with the texts of `hydra doctor`.
pub(crate) fn memory(devices: &DevicesArg, asked: Option<ByteSize>, machine: &Machine) -> Result<ByteSize> {
    match devices {
        DevicesArg::Cpu { count, .. } => asked.map_or_else(|| machine.device_share(*count), Ok),
        DevicesArg::Cuda(gpus) => {
            let found = Findings::look(machine);
            refuse(devices, &missing_for_cuda(&found, &gpus.cards))?;
            gpus_memory(gpus, asked, &found)
        }
        DevicesArg::Wgpu(gpus) => {
            refuse(devices, &missing_for_wgpu(&Findings::look(machine)))?;
            // Vulkan does not report the memory of a device; a software driver uses host memory.
            asked.map_or_else(|| machine.device_share(gpus.count()), Ok)
        }
    }
}

/// Returns the memory of each logical device on these GPUs. The default excludes memory admitted by other runs.
pub(super) fn gpus_memory(gpus: &Gpus, asked: Option<ByteSize>, found: &Findings) -> Result<ByteSize> {
    let (logical, devices) = (gpus.logical as u64, counted(gpus.logical, "device"));
    let totals = gpus.cards.iter().filter_map(|&card| Some((card, found.cards.get(card)?.total_bytes?)));
    let left = |(card, total): &(usize, ByteSize)| {
        (total.bytes() / CARD_SHARE.1 * CARD_SHARE.0).saturating_sub(found.machine.admitted_on(*card).bytes())
    };
    let smallest = match asked {
        Some(_) => totals.min_by_key(|(_, total)| *total),
        None => totals.min_by_key(left),
    };
    match (asked, smallest) {
        (Some(asked), Some((card, total))) if asked.bytes().saturating_mul(logical) > total.bytes() => bail!(
            "GPU {card} has {total} of memory, and {devices} of {asked} were requested: pass a smaller --device-memory"
        ),
        (Some(asked), _) => Ok(asked),
        (None, Some((card, total))) if left(&(card, total)) < logical => bail!(
            "GPU {card} has {total} of memory, and other runs have reserved {}: wait for one to end, or pass \
            --device-memory{}",
            found.machine.admitted_on(card),
            found.machine.because_of_others()
        ),
        (None, Some(card)) => Ok(ByteSize(left(&card) / logical)),
        (None, None) => bail!("the driver does not report the GPU's memory: pass --device-memory"),
    }
}

/// A missing requirement and its remedy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Missing {
    pub(super) what: String,
    remedy: String,
}

impl Missing {
    fn new(what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { what: what.into(), remedy: remedy.into() }
    }
}

fn refuse(devices: &DevicesArg, missing: &[Missing]) -> Result<()> {
    if missing.is_empty() { Ok(()) } else { bail!(refusal(&devices.to_string(), missing)) }
}

/// Returns the text of a refusal, with a line for each missing requirement.
pub(super) fn refusal(devices: &str, missing: &[Missing]) -> String {
    let lines = missing.iter().map(|Missing { what, remedy }| format!("\n  - {what}: {remedy}"));
    format!("`--devices {devices}` cannot be used here:{}", lines.collect::<String>())
}

/// Returns the missing requirements for CUDA on these GPUs, in the order in which to fix them.
pub(super) fn missing_for_cuda(found: &Findings, cards: &[usize]) -> Vec<Missing> {
    let mut missing = Vec::new();
    if !found.cuda_in_build {
        let how = format!("build it with `{BUILD} cuda`, or run `cargo run -p hydra-bench --features cuda`");
        missing.push(Missing::new("this build has no CUDA support (feature `cuda`)", how));
    }
    missing.extend(missing_driver(found));
    missing.extend(missing_compiler(found));
    missing.extend(missing_headers(found));
    missing.extend(compiler_and_driver_disagree(found));
    if let (Some(problem), true) = (&found.compiler_problem, found.headers.missing.is_empty()) {
        missing.push(Missing::new(
            format!("NVRTC could not compile a kernel: {problem}"),
            "install NVRTC and headers of the same version, and add NVRTC's folder to LD_LIBRARY_PATH so that its \
            libnvrtc-builtins is found",
        ));
    }
    if found.driver.found && found.driver_problem.is_none() {
        missing.extend(cards.iter().filter_map(|&card| missing_card(found, card)));
    }
    missing
}

fn missing_driver(found: &Findings) -> Option<Missing> {
    let install = "install NVIDIA's driver; start a container with GPUs (`docker run --gpus all`); or add the library's \
    folder to LD_LIBRARY_PATH";
    if let Some(problem) = &found.driver_problem {
        let what = format!("the driver failed to initialize: {problem}");
        return Some(Missing::new(what, "check the output of `nvidia-smi`"));
    }
    if found.driver.found {
        return None;
    }
    let but = match (&found.driver.path, &found.kernel_module) {
        (Some(path), _) => format!("`{}` could not be loaded", path.display()),
        (None, Some(_)) => format!("the kernel module is loaded, but {DRIVER} was not found"),
        (None, None) => format!("there is no NVIDIA driver ({DRIVER} was not found)"),
    };
    Some(Missing::new(but, install))
}

fn missing_compiler(found: &Findings) -> Option<Missing> {
    let what = match &found.compiler {
        Library { found: true, .. } => return None,
        Library { path: Some(path), .. } => {
            format!("NVRTC at `{}` could not be loaded", path.display())
        }
        Library { path: None, .. } => format!("NVRTC was not found ({})", COMPILER.join(", ")),
    };
    let how = "install the CUDA toolkit, or `pip install nvidia-cuda-nvrtc` of the driver's CUDA version, and add its \
    folder to LD_LIBRARY_PATH";
    Some(Missing::new(what, how))
}

fn missing_headers(found: &Findings) -> Option<Missing> {
    let how = "install the CUDA toolkit, or `pip install nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl` of \
               NVRTC's version, and set CUDA_PATH to the folder that has `include`";
    let what = match &found.headers.root {
        None => "CUDA's headers were not found (CUDA_PATH is not set, and neither /usr/local/cuda nor /opt/cuda exists)"
            .to_owned(),
        Some(_) if found.headers.missing.is_empty() => return None,
        Some(root) => format!("`{}` lacks the headers {}", root.display(), found.headers.missing.join(", ")),
    };
    Some(Missing::new(what, how))
}

/// Checks the versions: a driver does not load kernels from a newer compiler.
fn compiler_and_driver_disagree(found: &Findings) -> Option<Missing> {
    let (compiler, driver) = found.compiler.version.zip(found.driver.version)?;
    (compiler > driver).then(|| {
        Missing::new(
            format!("NVRTC has CUDA version {compiler}, and the driver supports kernels up to CUDA {driver}"),
            format!("update the driver, or install NVRTC and headers of CUDA {driver} or older"),
        )
    })
}

fn missing_card(found: &Findings, index: usize) -> Option<Missing> {
    let Some(card) = found.cards.get(index) else {
        let what = match found.cards.as_slice() {
            [] => "there is no GPU".to_owned(),
            [_] => format!("there is no GPU {index}, only GPU 0"),
            cards => format!("there is no GPU {index}, only GPUs 0 to {}", cards.len() - 1),
        };
        let how = "check the list of `nvidia-smi`; CUDA_VISIBLE_DEVICES and containers hide GPUs";
        return Some(Missing::new(what, how));
    };
    let problem = card.problem.as_ref()?;
    let what = format!("GPU {index} ({}) cannot be used: {problem}", card.name);
    Some(Missing::new(what, "check whether another program uses it exclusively, or choose another GPU"))
}

/// Returns the missing requirements for `wgpu` devices.
pub(super) fn missing_for_wgpu(found: &Findings) -> Vec<Missing> {
    if !found.wgpu_in_build {
        let how = format!("build it with `{BUILD} wgpu`");
        return vec![Missing::new("this build has no Vulkan support (feature `wgpu`)", how)];
    }
    if cfg!(target_os = "linux") && found.vulkan_drivers.is_empty() {
        let what = "there is no Vulkan driver (no file lists one in /usr/share/vulkan/icd.d)";
        let how = "install one, such as `mesa-vulkan-drivers`, or set VK_DRIVER_FILES to its file";
        return vec![Missing::new(what, how)];
    }
    Vec::new()
}

pub(super) fn counted(count: usize, what: &str) -> String {
    if count == 1 { format!("1 {what}") } else { format!("{count} {what}s") }
}
