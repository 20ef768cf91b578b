//! Stands in for `cubecl-llvm`, one of the two back ends through which CubeCL compiles kernels for CUDA.
//!
//! Hydra's feature `cuda` uses the other one: CUDA C++, compiled by NVRTC at run time (`cubecl-cuda`'s feature
//! `cpp`). `cubecl-cuda` links both all the same, and the real crate's build script downloads an LLVM of its
//! own, so that nothing would build where that host is out of reach. This crate has just the names that
//! `cubecl-cuda` 0.11.3 uses, with the shapes they have there; its compiler returns an error that names
//! the way to go on. The workspace's manifest replaces the real crate with it (`[patch.crates-io]`).
#![forbid(unsafe_code)]

use cubecl_core::Compiler;
use cubecl_core::ir::nvidia::SmArch;
use cubecl_core::prelude::KernelDefinition;
use cubecl_environment::backtrace::BackTrace;
use cubecl_runtime::compiler::CompilationError;
use cubecl_runtime::kernel::BufferIOAttr;
use std::fmt;

/// The targets of the back end.
pub mod nvptx {
    /// Versions of the PTX language.
    pub mod ptx_version {
        use std::fmt;

        /// A version of PTX; this crate emits none.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum PtxVersion {}

        impl PtxVersion {
            /// The newest version that a driver loads: none is emitted.
            pub fn for_driver(_: i32) -> Option<Self> {
                None
            }
        }

        impl fmt::Display for PtxVersion {
            fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
                match *self {}
            }
        }
    }
}

/// What the back ends for GPUs share.
pub mod shared {
    /// Narrowing a device's features to what the back end lowers.
    pub mod lowered_features {
        use cubecl_core::ir::DeviceProperties;

        /// What is compiled for.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum GpuTarget {
            /// NVIDIA's.
            Nvptx,
        }

        /// Takes nothing away: kernels do not come through this back end.
        pub fn restrict_features(_: &mut DeviceProperties, _: GpuTarget) {}
    }
}

/// What is compiled for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LlvmTarget {
    /// NVIDIA's.
    #[default]
    Nvptx,
}

/// The compiler; it compiles nothing.
#[derive(Clone, Debug, Default)]
pub struct PlironCompiler {
    /// What is compiled for.
    pub target: LlvmTarget,
}

/// How a kernel is to be compiled.
#[derive(Clone, Debug, Default)]
pub struct PlironOptions {
    /// The architecture of another target.
    pub arch: Option<()>,
    /// The architecture of the device.
    pub sm_arch: Option<SmArch>,
    /// The version of PTX.
    pub ptx_version: Option<nvptx::ptx_version::PtxVersion>,
    /// How scalars are passed.
    pub grid_constants: bool,
    /// The fields that only the real compiler reads.
    pub others: (),
}

/// A compiled kernel; there is none.
#[derive(Clone, Debug)]
pub struct NvptxModule {
    /// PTX, ended by a NUL.
    pub ptx: Vec<core::ffi::c_char>,
    /// The name of the kernel.
    pub entrypoint: String,
    /// For logs.
    pub ir: String,
    /// Bytes of shared memory of a launch.
    pub shared_memory_size: usize,
    /// What the kernel does with each buffer.
    pub io: Vec<BufferIOAttr>,
}

/// What the compiler gives.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum PlironArtifact {
    /// For NVIDIA's.
    NvptxCode(NvptxModule),
}

impl fmt::Display for PlironArtifact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::NvptxCode(module) = self;
        f.write_str(&module.ir)
    }
}

impl Compiler for PlironCompiler {
    type Representation = PlironArtifact;
    type CompilationOptions = PlironOptions;

    fn compile(
        &mut self,
        _: KernelDefinition,
        _: &PlironOptions,
    ) -> Result<PlironArtifact, CompilationError> {
        Err(CompilationError::Generic {
            reason: "this build has CubeCL's CUDA C++ back end only; build it with the feature `cpp` of \
                     cubecl-cuda, and leave the choice of the back end alone"
                .to_owned(),
            backtrace: BackTrace::capture(),
        })
    }

    fn extension(&self) -> &'static str {
        "ll"
    }

    fn lang_tag(&self) -> &'static str {
        "llvm"
    }
}
