//! Finds the GPU setup of a machine: by looking for files in every build, and by querying the driver in a build with CUDA.

use crate::machine::resources::Machine;
use hydra_core::ByteSize;
use serde::Serialize;
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};

/// The driver's library.
pub(super) const DRIVER: &str = "libcuda.so.1";
/// The compiler's library, under the names of the versions that can compile CubeCL's kernels.
pub(super) const COMPILER: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so", "libnvrtc.so.12"];
/// The file with the version of the kernel module.
const KERNEL_MODULE: &str = "/proc/driver/nvidia/version";
/// The folder with a subfolder for each GPU, while the kernel module is loaded.
const KERNEL_CARDS: &str = "/proc/driver/nvidia/gpus";
/// Common library folders of distributions and containers, in the format of LD_LIBRARY_PATH.
const LIBRARY_FOLDERS: &str = "/usr/lib/x86_64-linux-gnu:/usr/lib/aarch64-linux-gnu:/usr/lib64:/usr/lib:/lib64:/lib:\
                               /usr/local/lib:/usr/local/nvidia/lib64:/usr/lib/wsl/lib:/usr/local/cuda/lib64";
/// The headers below `include` that CubeCL's kernels require: types, tensor cores, and the headers that these include.
const HEADERS: [&str; 5] = ["cuda_runtime.h", "cuda_fp16.h", "mma.h", "crt", "cccl"];
/// The folders that list Vulkan drivers.
const VULKAN_FOLDERS: [&str; 2] = ["/usr/share/vulkan/icd.d", "/etc/vulkan/icd.d"];

/// The findings, the only input of reports.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Findings {
    /// True if this build has the feature `cuda`.
    pub(crate) cuda_in_build: bool,
    /// True if the libraries were loaded and queried; otherwise only their files were looked for.
    pub(crate) asked: bool,
    /// True if this build has the feature `wgpu`.
    pub(crate) wgpu_in_build: bool,
    /// The version of NVIDIA's kernel module, if it is loaded.
    pub(crate) kernel_module: Option<String>,
    pub(crate) driver: Library,
    /// The reason why the driver failed to initialize.
    pub(crate) driver_problem: Option<String>,
    pub(crate) compiler: Library,
    /// The reason why a test kernel failed to compile.
    pub(crate) compiler_problem: Option<String>,
    pub(crate) headers: Headers,
    /// The library that multiplies matrices on GPUs, with its version.
    pub(crate) matrix_products: Option<String>,
    /// The GPUs; a build without CUDA knows only their names.
    pub(crate) cards: Vec<Card>,
    /// Pairs of GPUs with peer access: (reader, owner).
    pub(crate) peers: Vec<(usize, usize)>,
    /// The names of the files that list Vulkan drivers.
    pub(crate) vulkan_drivers: Vec<String>,
    /// The limit of locked memory of a process.
    pub(crate) locked_memory: Option<Limit>,
    #[serde(flatten)]
    pub(crate) machine: Machine,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Library {
    /// True if it can be loaded or, in a build without CUDA, its file exists.
    pub(crate) found: bool,
    pub(crate) path: Option<PathBuf>,
    /// The CUDA version that it reports.
    pub(crate) version: Option<Version>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Headers {
    /// The folder whose `include` has them.
    pub(crate) root: Option<PathBuf>,
    pub(crate) version: Option<Version>,
    /// The [`HEADERS`] that are missing.
    pub(crate) missing: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Card {
    pub(crate) name: String,
    pub(crate) capability: Option<Version>,
    pub(crate) total_bytes: Option<ByteSize>,
    pub(crate) free_bytes: Option<ByteSize>,
    /// The reason why it is unusable.
    pub(crate) problem: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(into = "String")]
pub(crate) struct Version(pub(crate) u32, pub(crate) u32);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

impl From<Version> for String {
    fn from(version: Version) -> Self {
        version.to_string()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Limit {
    Unlimited,
    Bytes(ByteSize),
}

impl Findings {
    /// Inspects the machine. With the feature `cuda`, queries the driver.
    pub fn look(machine: &Machine) -> Self {
        let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
        let folders = library_folders();
        let mut found = Self {
            cuda_in_build: cfg!(feature = "cuda"),
            wgpu_in_build: cfg!(feature = "wgpu"),
            kernel_module: std::fs::read_to_string(KERNEL_MODULE).ok().and_then(|text| module_version(&text)),
            driver: Library::in_folders(&[DRIVER], &folders),
            compiler: Library::in_folders(&COMPILER, &folders),
            headers: headers_root().map(|root| Headers::at(&root)).unwrap_or_default(),
            cards: cards_of_the_kernel(Path::new(KERNEL_CARDS)),
            vulkan_drivers: vulkan_drivers(),
            locked_memory: locked_memory(&limits),
            machine: machine.clone(),
            ..Self::default()
        };
        found.query_driver();
        found
    }

    #[cfg(not(feature = "cuda"))]
    fn query_driver(&mut self) {}

    /// Replaces findings from files by those that the libraries report.
    #[cfg(feature = "cuda")]
    fn query_driver(&mut self) {
        let asked = hydra_spill::cuda::detect();
        if !asked.driver && asked.driver_problem.is_some() {
            // The query itself failed, so the findings from files remain.
            self.driver_problem = asked.driver_problem;
            return;
        }
        let version = |(major, minor)| Version(major, minor);
        self.asked = true;
        self.driver.found = asked.driver;
        self.driver.version = asked.driver_version.map(version);
        self.driver_problem = asked.driver_problem;
        self.compiler.found = asked.compiler;
        self.compiler.version = asked.compiler_version.map(version);
        self.compiler_problem = asked.compiler_problem;
        self.matrix_products = hydra_models::ops::products_library();
        self.peers = asked.peers;
        let card = |card: hydra_spill::cuda::CudaCard| Card {
            name: card.name,
            capability: card.capability.map(version),
            total_bytes: card.total,
            free_bytes: card.free,
            problem: card.problem,
        };
        self.cards = asked.cards.into_iter().map(card).collect();
    }
}

#[cfg(not(feature = "cuda"))]
use headers_root_by_files as headers_root;
/// Returns the folder from which CubeCL takes the headers.
#[cfg(feature = "cuda")]
use hydra_spill::cuda::headers_root;

/// Mirrors `install::cuda_path` of `cubecl-cuda` 0.11.3. A test compares the two in builds with both.
#[cfg(any(test, not(feature = "cuda")))]
fn headers_root_by_files() -> Option<PathBuf> {
    let named = std::env::var("CUDA_PATH").ok().map(PathBuf::from);
    let usual = || ["/usr/local/cuda", "/opt/cuda"].map(PathBuf::from).into_iter().find(|path| path.exists());
    let own = || Path::new("/usr/bin/nvcc").exists().then(|| PathBuf::from("/usr"));
    named.or_else(usual).or_else(own)
}

impl Headers {
    fn at(root: &Path) -> Self {
        let include = root.join("include");
        let lacks = |name: &&str| !include.join(name).exists();
        let missing = HEADERS.into_iter().filter(lacks).map(|name| format!("include/{name}")).collect();
        let api = std::fs::read_to_string(include.join("cuda_runtime_api.h")).unwrap_or_default();
        Self { root: Some(root.to_owned()), version: headers_version(&api), missing }
    }
}

/// Parses the headers' version: `#define CUDART_VERSION 13000` is CUDA 13.0.
fn headers_version(text: &str) -> Option<Version> {
    let mut words = text.lines().filter_map(|line| line.trim().strip_prefix("#define"));
    let number = words.find_map(|rest| rest.trim().strip_prefix("CUDART_VERSION"))?;
    let number: u32 = number.trim().parse().ok()?;
    Some(Version(number / 1000, number % 1000 / 10))
}

impl Library {
    fn in_folders(names: &[&str], folders: &[PathBuf]) -> Self {
        let mut paths = names.iter().flat_map(|name| folders.iter().map(move |folder| folder.join(name)));
        let path = paths.find(|path| path.exists());
        Self { found: path.is_some(), path, version: None }
    }
}

/// Returns the folders that a loader searches, and the usual folders of CUDA.
fn library_folders() -> Vec<PathBuf> {
    let named = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let entries = std::fs::read_dir("/etc/ld.so.conf.d").into_iter().flatten().flatten();
    let mut lists: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    lists.sort_unstable();
    let listed = lists.iter().filter_map(|list| std::fs::read_to_string(list).ok());
    let listed: Vec<PathBuf> = listed.flat_map(|text| folders_in(&text)).collect();
    let usual = LIBRARY_FOLDERS.split(':').map(PathBuf::from);
    named_folders(&named).into_iter().chain(listed).chain(usual).collect()
}

fn named_folders(list: &OsString) -> Vec<PathBuf> {
    std::env::split_paths(list).filter(|path| !path.as_os_str().is_empty()).collect()
}

/// Parses the folders in a loader configuration.
fn folders_in(list: &str) -> Vec<PathBuf> {
    list.lines().map(str::trim).filter(|line| line.starts_with('/')).map(PathBuf::from).collect()
}

/// Returns the version in `NVRM version: NVIDIA UNIX .. Kernel Module  580.65.06  ..`, or the whole line.
fn module_version(text: &str) -> Option<String> {
    let line = text.lines().find_map(|line| line.strip_prefix("NVRM version:"))?.trim();
    let is_version = |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    Some(line.split_whitespace().find(is_version).unwrap_or(line).to_owned())
}

/// Returns the GPUs that the kernel module lists, with their names only.
fn cards_of_the_kernel(folder: &Path) -> Vec<Card> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.path().join("information")).collect();
    files.sort_unstable();
    let texts = files.iter().filter_map(|file| std::fs::read_to_string(file).ok());
    let name = |text: String| {
        let model = text.lines().find_map(|line| line.strip_prefix("Model:").map(str::trim));
        Card { name: model.unwrap_or("unnamed GPU").to_owned(), ..Card::default() }
    };
    texts.map(name).collect()
}

/// Returns the names of Vulkan drivers from the files that list them, or from the variables that name such files.
fn vulkan_drivers() -> Vec<String> {
    let named = ["VK_DRIVER_FILES", "VK_ICD_FILENAMES"].into_iter().filter_map(std::env::var_os);
    let named: Vec<PathBuf> = named.flat_map(|list| named_folders(&list)).collect();
    let listed = || VULKAN_FOLDERS.into_iter().flat_map(std::fs::read_dir).flatten().flatten();
    let files = if named.is_empty() { listed().map(|entry| entry.path()).collect() } else { named };
    let json = |path: &PathBuf| path.extension().is_some_and(|end| end == "json") && path.exists();
    let name = |path: PathBuf| Some(path.file_stem()?.to_string_lossy().into_owned());
    let mut names: Vec<String> = files.into_iter().filter(json).filter_map(name).collect();
    names.sort_unstable();
    names
}

/// Parses `Max locked memory` of `/proc/self/limits`: the soft limit in bytes.
fn locked_memory(limits: &str) -> Option<Limit> {
    let rest = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"))?;
    match rest.split_whitespace().next()? {
        "unlimited" => Some(Limit::Unlimited),
        bytes => Some(Limit::Bytes(ByteSize(bytes.parse().ok()?))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_module_tells_its_version() {
        let closed =
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n";
        assert_eq!(module_version(closed).unwrap(), "550.54.15");
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC version: x\n";
        assert_eq!(module_version(open).unwrap(), "580.65.06");
        assert_eq!(module_version("NVRM version: something new\n").unwrap(), "something new");
        assert_eq!(module_version(""), None);
    }

    #[test]
    fn the_kernel_module_tells_the_cards() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(cards_of_the_kernel(&root.path().join("none")), []);
        for (id, text) in [("41", "Model: \t\t Second\nIRQ: 7\n"), ("01", "Model: First\n")] {
            let folder = root.path().join(format!("0000:{id}:00.0"));
            std::fs::create_dir(&folder).unwrap();
            std::fs::write(folder.join("information"), text).unwrap();
        }
        let names: Vec<String> = cards_of_the_kernel(root.path()).into_iter().map(|card| card.name).collect();
        assert_eq!(names, ["First", "Second"]);
    }

    #[test]
    fn headers_say_their_version_and_what_they_lack() {
        let root = tempfile::tempdir().unwrap();
        let include = root.path().join("include");
        std::fs::create_dir_all(include.join("crt")).unwrap();
        std::fs::write(include.join("cuda_runtime.h"), "").unwrap();
        std::fs::write(include.join("cuda_runtime_api.h"), "/* */\n#define CUDART_VERSION  12080\n").unwrap();
        let headers = Headers::at(root.path());
        assert_eq!(headers.version, Some(Version(12, 8)));
        assert_eq!(headers.missing, ["include/cuda_fp16.h", "include/mma.h", "include/cccl"]);
        assert_eq!(headers_version("#define CUDART_VERSION later"), None);
    }

    #[test]
    fn libraries_are_found_by_name_in_the_order_of_names() {
        let root = tempfile::tempdir().unwrap();
        let folders = [root.path().join("a"), root.path().join("b")];
        folders.iter().for_each(|folder| std::fs::create_dir(folder).unwrap());
        assert_eq!(Library::in_folders(&COMPILER, &folders), Library::default());
        std::fs::write(folders[0].join("libnvrtc.so.12"), "").unwrap();
        std::fs::write(folders[1].join("libnvrtc.so.13"), "").unwrap();
        let found = Library::in_folders(&COMPILER, &folders);
        assert!(found.found);
        assert_eq!(found.path, Some(folders[1].join("libnvrtc.so.13")));
    }

    #[test]
    fn limits_and_lists_are_read() {
        let limits =
            "Max open files  20000 20000 files\nMax locked memory         8388608   unlimited  bytes\n";
        assert_eq!(locked_memory(limits), Some(Limit::Bytes(ByteSize::mib(8))));
        let limits = "Max locked memory         unlimited            unlimited            bytes\n";
        assert_eq!(locked_memory(limits), Some(Limit::Unlimited));
        assert_eq!(locked_memory("Max open files  20000"), None);
        assert_eq!(folders_in("# a comment\n /usr/lib/x \ninclude y\n"), [PathBuf::from("/usr/lib/x")]);
        assert_eq!(named_folders(&"/a::b/c:/d".into()), ["/a", "b/c", "/d"].map(PathBuf::from));
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn headers_are_looked_for_where_cubecl_does() {
        assert_eq!(headers_root_by_files(), headers_root());
    }
}
