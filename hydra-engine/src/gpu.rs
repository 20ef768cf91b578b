//! GPUs as logical devices: what computes, the way to its memory, and what measures it.

use crate::device::{DeviceKind, DeviceSpec, Hardware};
use crate::error::EngineError;
#[cfg(feature = "cube")]
use hydra_core::{
    DeviceError,
    cube::{CubeAdapter, CubeProbe},
};
#[cfg(feature = "cube")]
use std::sync::Arc;

/// Opens the GPU of `spec`.
///
/// # Errors
/// [`EngineError::Device`] if the machine or this build lacks it.
pub(crate) fn hardware(spec: &DeviceSpec) -> Result<Hardware, EngineError> {
    match spec.kind {
        #[cfg(feature = "cuda")]
        DeviceKind::Cuda { card } => opened(spec, CubeAdapter::cuda(card)),
        #[cfg(feature = "wgpu")]
        DeviceKind::Wgpu { adapter } => opened(spec, CubeAdapter::wgpu(adapter)),
        _ => Err(EngineError::Device {
            device: spec.name.clone(),
            problem: format!(
                "this build has no {} devices: build it with their feature",
                kind_name(spec.kind)
            ),
        }),
    }
}

fn kind_name(kind: DeviceKind) -> &'static str {
    match kind {
        DeviceKind::Cpu => "CPU",
        DeviceKind::Cuda { .. } => "CUDA",
        DeviceKind::Wgpu { .. } => "Vulkan",
    }
}

#[cfg(feature = "cube")]
fn opened(spec: &DeviceSpec, adapter: Result<CubeAdapter, DeviceError>) -> Result<Hardware, EngineError> {
    let adapter = adapter
        .map_err(|error| EngineError::Device { device: spec.name.clone(), problem: error.to_string() })?;
    let link = Arc::new(hydra_spill::CubeLink::new(&spec.name, adapter.clone()));
    let probe = Arc::new(CubeProbe::new(adapter.client));
    Ok(Hardware { burn: adapter.burn, link: link.clone(), probe, pilot: link })
}
