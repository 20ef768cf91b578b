//! Detection of CUDA on this machine through `cudarc`, before any other use of it.
//!
//! CubeCL panics if the driver or the headers are missing, and cudarc panics if a library lacks a function.
//! Therefore this module first checks whether the libraries can be loaded. The only code of Burn or CubeCL
//! that it runs is CubeCL's search for the headers, which only checks paths.

use cudarc::driver::result::{self as driver, DriverError};
use cudarc::driver::sys::{self, CUdevice_attribute_enum as Attribute, CUresult};
use cudarc::driver::{CudaContext, sys::CUdevice};
use cudarc::nvrtc::{result as nvrtc, sys as nvrtc_sys};
use hydra_core::{ByteSize, panic_message};
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The target of the test kernel if there is no card: CUDA 11, 12 and 13 support it, and the compiler's
/// default differs between them.
const ANY_CAPABILITY: (u32, u32) = (8, 0);

/// A version of CUDA, as (major, minor).
pub type CudaVersion = (u32, u32);

/// The result of the detection; missing parts are reported and are not errors.
#[derive(Clone, Debug, Default)]
pub struct CudaFindings {
    /// Whether the driver's library (`libcuda.so.1`) can be loaded.
    pub driver: bool,
    /// The latest CUDA version that the driver supports.
    pub driver_version: Option<CudaVersion>,
    /// Why the driver could not be initialized; also `None` if there is no driver.
    pub driver_problem: Option<String>,
    /// Whether the compiler's library (`libnvrtc.so`, under any of its names) can be loaded.
    pub compiler: bool,
    /// The compiler's version.
    pub compiler_version: Option<CudaVersion>,
    /// Why a small kernel could not be compiled with the headers; also `None` if it was not tried.
    pub compiler_problem: Option<String>,
    /// The root directory of the headers for CubeCL (they are in its `include` folder).
    pub headers: Option<PathBuf>,
    /// The cards, in the driver's order.
    pub cards: Vec<CudaCard>,
    /// The pairs of cards with peer access: (reader, owner).
    pub peers: Vec<(usize, usize)>,
}

/// One card.
#[derive(Clone, Debug, Default)]
pub struct CudaCard {
    /// The driver's name for the card.
    pub name: String,
    /// Its compute capability, as (major, minor).
    pub capability: Option<(u32, u32)>,
    /// Its memory.
    pub total: Option<ByteSize>,
    /// The free part of it.
    pub free: Option<ByteSize>,
    /// Why the card cannot be used.
    pub problem: Option<String>,
}

/// Detects the driver, the compiler, the headers and the cards. Briefly retains the primary context of each
/// card to read its free memory.
pub fn detect() -> CudaFindings {
    // On a separate thread, which contains cudarc's panic about a library that lacks a function, and whose
    // name suppresses the panic message.
    let looked = std::thread::Builder::new().name("hydra-doctor".to_owned()).spawn(look);
    let problem = match looked.map(std::thread::JoinHandle::join) {
        Ok(Ok(found)) => return found,
        Ok(Err(panic)) => panic_message(panic.as_ref()),
        Err(error) => error.to_string(),
    };
    CudaFindings { headers: headers_root(), driver_problem: Some(problem), ..CudaFindings::default() }
}

fn look() -> CudaFindings {
    let mut found = CudaFindings { headers: headers_root(), ..CudaFindings::default() };
    find_compiler(&mut found);
    find_driver(&mut found);
    found
}

/// The root directory of the headers for CubeCL: `CUDA_PATH`, or the installation paths of distributions.
pub fn headers_root() -> Option<PathBuf> {
    cubecl_cuda::install::cuda_path()
}

fn find_compiler(found: &mut CudaFindings) {
    // SAFETY: loads and unloads NVRTC, NVIDIA's library, which runs nothing by itself.
    found.compiler = unsafe { nvrtc_sys::is_culib_present() };
    if !found.compiler {
        return;
    }
    let (mut major, mut minor) = (0, 0);
    // SAFETY: writes two numbers to two numbers.
    let status = unsafe { nvrtc_sys::nvrtcVersion(&mut major, &mut minor) };
    found.compiler_version = status.result().is_ok().then(|| version(major, minor)).flatten();
    if let Some(root) = &found.headers {
        found.compiler_problem = compile_trial(root, ANY_CAPABILITY).err();
    }
}

fn find_driver(found: &mut CudaFindings) {
    // SAFETY: loads and unloads the driver's library, NVIDIA's own, which runs nothing by itself.
    found.driver = unsafe { sys::is_culib_present() };
    if !found.driver {
        return;
    }
    let mut number = 0;
    // SAFETY: writes one number to one number; may be called before `cuInit`.
    let status = unsafe { sys::cuDriverGetVersion(&mut number) };
    if status.result().is_ok() {
        // 13020 is CUDA 13.2.
        found.driver_version = version(number / 1000, number % 1000 / 10);
    }
    match devices() {
        Ok(devices) => look_at(&devices, found),
        Err(error) => found.driver_problem = Some(describe(error)),
    }
}

/// The cards of a driver; having none is not an error.
fn devices() -> Result<Vec<CUdevice>, DriverError> {
    let count = driver::init().and_then(|()| driver::device::get_count());
    match count {
        Err(DriverError(CUresult::CUDA_ERROR_NO_DEVICE)) => Ok(Vec::new()),
        count => (0..count?).map(driver::device::get).collect(),
    }
}

fn look_at(devices: &[CUdevice], found: &mut CudaFindings) {
    // A kernel that compiles for one card compiles for every card of that capability.
    let mut tried = BTreeMap::new();
    for (ordinal, &device) in devices.iter().enumerate() {
        let (mut card, context) = card(ordinal, device);
        let compiles = found.compiler && found.compiler_problem.is_none();
        if let (true, Some(root), Some(capability)) = (compiles, &found.headers, card.capability) {
            let compiled = tried.entry(capability).or_insert_with(|| compile_trial(root, capability));
            let problem = match compiled {
                Ok(ptx) => context.and_then(|context| load_trial(&context, ptx).err()),
                Err(log) => Some(format!("no kernel can be compiled for it: {log}")),
            };
            card.problem = card.problem.or(problem);
        }
        found.cards.push(card);
    }
    for (reader, &from) in devices.iter().enumerate() {
        let owners = devices.iter().enumerate().filter(|(owner, _)| *owner != reader);
        found.peers.extend(owners.filter(|(_, to)| reads(from, **to)).map(|(owner, _)| (reader, owner)));
    }
}

fn card(ordinal: usize, device: CUdevice) -> (CudaCard, Option<Arc<CudaContext>>) {
    let name = driver::device::get_name(device).unwrap_or_else(describe);
    let part = |attribute| attribute_of(device, attribute);
    let capability = part(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
        .zip(part(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR));
    // SAFETY: the driver returned this device.
    let total = unsafe { driver::device::total_mem(device) }.ok().map(|bytes| ByteSize(bytes as u64));
    // The free memory is known only within a context; dropping the context frees its memory on the card.
    let opened = CudaContext::new(ordinal).and_then(|context| Ok((context.mem_get_info()?.0, context)));
    match opened {
        Ok((free, context)) => {
            let free = Some(ByteSize(free as u64));
            (CudaCard { name, capability, total, free, problem: None }, Some(context))
        }
        Err(error) => {
            let problem = Some(format!("no context can be created: {}", describe(error)));
            (CudaCard { name, capability, total, free: None, problem }, None)
        }
    }
}

/// Loads a compiled kernel, as CubeCL does: the driver translates it to the card's machine code, with its own
/// compiler. The error is the driver's.
fn load_trial(context: &CudaContext, ptx: &[c_char]) -> Result<(), String> {
    let load = || {
        context.bind_to_thread()?;
        // SAFETY: the compiler's text ends with a zero, and the driver has read it when this returns. The
        // card's context is current on this thread.
        let module = unsafe { driver::module::load_data(ptx.as_ptr().cast()) }?;
        // SAFETY: loaded above in the same context, and nothing of it was launched.
        unsafe { driver::module::unload(module) }
    };
    let said = |error| {
        format!(
            "it cannot load a kernel: {}; the driver's compiler (libnvidia-ptxjitcompiler.so.1) may be missing",
            describe(error)
        )
    };
    load().map_err(said)
}

fn attribute_of(device: CUdevice, attribute: Attribute) -> Option<u32> {
    // SAFETY: the driver returned this device.
    let value = unsafe { driver::device::get_attribute(device, attribute) };
    value.ok().and_then(|value| u32::try_from(value).ok())
}

/// Returns whether a card can read the memory of another.
fn reads(from: CUdevice, to: CUdevice) -> bool {
    let mut access = 0;
    // SAFETY: writes one number to one number; the driver returned both devices.
    let status = unsafe { sys::cuDeviceCanAccessPeer(&mut access, from, to) };
    status.result().is_ok() && access != 0
}

/// Compiles an empty kernel to PTX, with the headers that CubeCL's kernels include, as CubeCL does.
/// `cooperative_groups.h` is not among them, because it takes more than a second. The error is the
/// compiler's, in one line.
fn compile_trial(root: &Path, capability: (u32, u32)) -> Result<Vec<c_char>, String> {
    const SOURCE: &CStr =
        c"#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n#include <mma.h>\nextern \"C\" __global__ void trial() {}\n";
    let include = root.join("include");
    let mut options =
        vec![include_option(&include).ok_or_else(|| format!("`{}` is not UTF-8", root.display()))?];
    options
        .extend(Some(include.join("cccl")).filter(|path| path.exists()).as_deref().and_then(include_option));
    options.push(architecture(capability));
    let program = nvrtc::create_program(SOURCE, None).map_err(|error| error.to_string())?;
    // SAFETY: the program was created above and lives until it is destroyed below.
    let compiled = unsafe { nvrtc::compile_program(program, &options) };
    let compiled = compiled.map_err(|error| {
        // SAFETY: as above.
        let log = unsafe { nvrtc::get_program_log(program) };
        log.ok().and_then(|log| first_line(&log)).unwrap_or_else(|| error.to_string())
    });
    // SAFETY: as above, and it was compiled.
    let ptx = compiled.and_then(|()| unsafe { nvrtc::get_ptx(program) }.map_err(|error| error.to_string()));
    // SAFETY: as above; it is not used afterwards.
    let _ = unsafe { nvrtc::destroy_program(program) };
    ptx
}

/// The compiler option that CubeCL uses for a folder of headers.
fn include_option(folder: &Path) -> Option<String> {
    folder.to_str().filter(|text| !text.contains('\0')).map(|text| format!("--include-path={text}"))
}

/// The compiler option that CubeCL uses for a card.
fn architecture((major, minor): (u32, u32)) -> String {
    let own = if major >= 9 { "a" } else { "" };
    format!("--gpu-architecture=sm_{major}{minor}{own}")
}

/// The first non-empty line of a compiler's log.
fn first_line(log: &[c_char]) -> Option<String> {
    let bytes: Vec<u8> = log.iter().map(|&c| c as u8).take_while(|&byte| byte != 0).collect();
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let mut lines = text.lines().map(|line| line.trim().trim_end_matches('.'));
    lines.find(|line| !line.is_empty()).map(str::to_owned)
}

fn version(major: i32, minor: i32) -> Option<CudaVersion> {
    Some((u32::try_from(major).ok()?, u32::try_from(minor).ok()?))
}

/// Formats a driver's error with its name and its description.
fn describe(error: DriverError) -> String {
    let text = |said: Result<&CStr, DriverError>| said.ok().map(|text| text.to_string_lossy().into_owned());
    match (text(error.error_name()), text(error.error_string())) {
        (Some(name), Some(said)) => format!("{said} ({name})"),
        _ => format!("{:?}", error.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_there_is_found_missing_without_a_panic() {
        let found = detect();
        assert!(found.driver || (found.cards.is_empty() && found.driver_version.is_none()));
        assert!(found.compiler || (found.compiler_version.is_none() && found.compiler_problem.is_none()));
        assert!(found.peers.is_empty() || found.cards.len() > 1);
        if !found.driver || !found.compiler {
            println!("skipped: this machine has a driver and NVRTC: {found:?}");
        }
    }

    #[test]
    fn options_are_those_of_cubecl() {
        assert_eq!(architecture((8, 0)), "--gpu-architecture=sm_80");
        assert_eq!(architecture((9, 0)), "--gpu-architecture=sm_90a");
        assert_eq!(architecture((12, 0)), "--gpu-architecture=sm_120a");
        assert_eq!(include_option(Path::new("/x/include")).unwrap(), "--include-path=/x/include");
        assert_eq!(include_option(Path::new("a\0b")), None);
    }

    #[test]
    fn a_log_is_told_by_its_first_line() {
        let log: Vec<c_char> = b"\n  error: no such file.\nmore\0rest".iter().map(|&b| b as c_char).collect();
        assert_eq!(first_line(&log).unwrap(), "error: no such file");
        assert_eq!(first_line(&[0]), None);
    }
}
