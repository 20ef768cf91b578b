//! GPUs as logical devices: hardware, link and memory probe.

use super::{DeviceKind, DeviceSpec, Hardware};
use crate::error::EngineError;
use hydra_core::ByteSize;
#[cfg(feature = "cube")]
use hydra_core::cube::{CubeAdapter, CubeProbe};
use hydra_spill::Budget;
#[cfg(feature = "cube")]
use hydra_spill::DeviceLink;
#[cfg(feature = "cube")]
use std::sync::Arc;

/// Page-locked host memory, shared by the cards of a run.
pub(crate) struct PageLocked {
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "only NVIDIA's cards take some"))]
    budget: Budget,
    #[cfg(feature = "cuda")]
    pool: std::cell::OnceCell<hydra_spill::cuda::PinnedPool>,
}

impl PageLocked {
    /// A budget of `bytes`; nothing is locked yet.
    pub(crate) fn new(bytes: ByteSize) -> Self {
        Self {
            budget: Budget::new("page-locked memory", bytes),
            #[cfg(feature = "cuda")]
            pool: std::cell::OnceCell::new(),
        }
    }
}

/// Opens the GPU of `spec`, if the machine and this build have it.
pub(crate) fn hardware(spec: &DeviceSpec, locked: &PageLocked) -> Result<Hardware, EngineError> {
    let _ = locked;
    match spec.kind {
        #[cfg(feature = "cuda")]
        DeviceKind::Cuda { card } => cuda(spec, card, locked),
        #[cfg(feature = "wgpu")]
        DeviceKind::Wgpu { adapter } => wgpu(spec, adapter),
        _ => {
            let kind = match spec.kind {
                DeviceKind::Cpu => "CPU",
                DeviceKind::Cuda { .. } => "CUDA",
                DeviceKind::Wgpu { .. } => "Vulkan",
            };
            Err(refused(
                spec,
                format!("this build does not support {kind} devices: rebuild it with their feature"),
            ))
        }
    }
}

fn refused(spec: &DeviceSpec, problem: impl std::fmt::Display) -> EngineError {
    EngineError::Device { device: spec.name.clone(), problem: problem.to_string() }
}

#[cfg(feature = "wgpu")]
fn wgpu(spec: &DeviceSpec, adapter: usize) -> Result<Hardware, EngineError> {
    let adapter = CubeAdapter::wgpu(adapter).map_err(|error| refused(spec, error))?;
    let link = Arc::new(hydra_spill::CubeLink::new(&spec.name, adapter.clone()));
    Ok(opened("wgpu".to_owned(), adapter, link))
}

#[cfg(feature = "cuda")]
fn cuda(spec: &DeviceSpec, card: usize, locked: &PageLocked) -> Result<Hardware, EngineError> {
    use hydra_spill::cuda::{CardLink, CudaDriver, CudaMemory, Dma, PinnedPool, STAGING_CHUNK};
    let found = found();
    let missing = "the driver, NVRTC, CUDA's headers or the card is missing or unusable: run `hydra doctor`";
    let problem = [&found.driver_problem, &found.compiler_problem].into_iter().any(Option::is_some);
    // CubeCL panics if a component is missing.
    let Some(there) = found.cards.get(card).filter(|_| found.compiler && found.headers.is_some() && !problem)
    else {
        return Err(refused(spec, missing));
    };
    if let Some(problem) = &there.problem {
        return Err(refused(spec, problem));
    }
    let driver = Arc::new(CudaDriver::new(card).map_err(|error| refused(spec, error))?);
    let adapter = CubeAdapter::cuda(card).map_err(|error| refused(spec, error))?;
    let pool = locked.pool.get_or_init(|| PinnedPool::new(driver.clone(), locked.budget.clone()));
    let dma = Dma::new(&spec.name, driver.as_ref(), pool.clone(), STAGING_CHUNK)?;
    let link = Arc::new(CardLink::new(dma, CudaMemory::new(adapter.clone())));
    Ok(opened(there.name.clone(), adapter, link))
}

/// The result of the search for CUDA, run once because it takes a context on each card for a moment.
#[cfg(feature = "cuda")]
fn found() -> &'static hydra_spill::cuda::CudaFindings {
    static FOUND: std::sync::OnceLock<hydra_spill::cuda::CudaFindings> = std::sync::OnceLock::new();
    FOUND.get_or_init(hydra_spill::cuda::detect)
}

#[cfg(feature = "cube")]
fn opened(model: String, adapter: CubeAdapter, link: Arc<dyn DeviceLink>) -> Hardware {
    let probe = Arc::new(CubeProbe::new(adapter.client));
    Hardware { model, burn: adapter.burn, link: link.clone(), probe, pilot: link }
}
