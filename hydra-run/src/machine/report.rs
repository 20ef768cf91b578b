//! The report of `hydra doctor`: the GPU setup, and whether `--devices cuda:0` can be used.

use crate::machine::findings::{Card, DRIVER, Findings, Library, Limit};
use crate::machine::gpus::{Missing, counted, gpus_memory, missing_for_cuda, refusal};
use crate::machine::names::Gpus;
use crate::machine::reservations::in_one_line;
use crate::machine::resources::Machine;
use hydra_core::ByteSize;
use serde::Serialize;
use std::fmt;

/// The schema version of the JSON output.
const SCHEMA: u32 = 1;
const NOT_MEASURED: &str =
    "the CUDA path has been run on one kind of GPU, an H100; docs/cuda.md lists what has not been run";

/// The report, a pure function of the findings.
#[derive(Clone, Debug, Serialize)]
pub struct DoctorReport {
    schema: u32,
    /// True if `--devices cuda:0` can be used.
    pub usable: bool,
    verdict: String,
    missing: Vec<Missing>,
    rows: Vec<ReportRow>,
    not_measured: &'static str,
    findings: Findings,
}

/// A row of the report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct ReportRow {
    about: String,
    says: String,
}

impl DoctorReport {
    /// Returns the report on these findings.
    pub fn from_findings(findings: Findings) -> Self {
        let missing = missing_for_cuda(&findings, &[0]);
        let (usable, rows) = (missing.is_empty(), rows(&findings));
        let verdict = if usable { can_be_used(&findings) } else { refusal("cuda:0", &missing) };
        Self { schema: SCHEMA, usable, verdict, missing, rows, not_measured: NOT_MEASURED, findings }
    }
}

impl fmt::Display for DoctorReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.rows.iter().map(|row| row.about.len()).max().unwrap_or(0);
        for ReportRow { about, says } in &self.rows {
            writeln!(f, "{about:width$}  {says}")?;
        }
        writeln!(f, "\nnot measured: {}\n\n{}", self.not_measured, self.verdict)
    }
}

fn can_be_used(found: &Findings) -> String {
    let gpus = Gpus { cards: vec![0], logical: 1 };
    let card = found.cards.first().map_or("a GPU", |card| &card.name);
    match gpus_memory(&gpus, None, found) {
        Ok(memory) => format!(
            "`--devices cuda:0` can be used here: {card}; a device uses {memory} of its memory by default \
            (--device-memory)"
        ),
        Err(_) => format!("`--devices cuda:0` can be used here with --device-memory: {card}"),
    }
}

fn rows(found: &Findings) -> Vec<ReportRow> {
    let row = |about: &str, says: String| ReportRow { about: about.to_owned(), says };
    let mut rows = vec![
        row("build", build(found)),
        row("kernel module", found.kernel_module.clone().unwrap_or_else(|| "not loaded".to_owned())),
        row("driver", library(found, &found.driver, DRIVER, "supports CUDA")),
        row("compiler", library(found, &found.compiler, "NVRTC", "has CUDA version")),
        row("headers", headers(found)),
    ];
    rows.extend(found.asked.then(|| row("GPU products", gpu_products(found))));
    rows.extend(found.cards.is_empty().then(|| row("GPUs", "none".to_owned())));
    rows.extend(found.cards.iter().enumerate().map(|(i, card)| row(&format!("GPU {i}"), words(card))));
    if found.cards.len() > 1 && found.asked {
        rows.push(row("peer access", peers(found)));
    }
    rows.push(row("Vulkan drivers", vulkan(found)));
    rows.push(row("locked memory", locked(found.locked_memory)));
    let Machine { free, available, limited, cores, bf16_products, others, cpu_device_bytes } = &found.machine;
    let limit = if *limited { "free within the limit of a control group" } else { "free" };
    let left = available.filter(|left| Some(*left) < *free);
    let left = left.map(|left| format!(", {left} not reserved by other runs")).unwrap_or_default();
    rows.push(row("host memory", size_or(*free, limit) + &left));
    rows.extend(in_one_line(others).map(|says| row("other runs", says)));
    let (threads, memory) = (counted(*cores, "thread"), size_or(*cpu_device_bytes, "of memory"));
    rows.push(row("CPU devices", format!("cpu:1 by default: {threads}, {memory}")));
    rows.push(row("bf16 products", (*bf16_products).to_owned()));
    rows
}

fn build(found: &Findings) -> String {
    let has = |has: bool| if has { "with" } else { "without" };
    let note = match found.cuda_in_build {
        true => "",
        false => "; the rest of this report is based on files only, and no library is loaded",
    };
    let (cuda, vulkan) = (has(found.cuda_in_build), has(found.wgpu_in_build));
    format!("{cuda} CUDA (feature `cuda`), {vulkan} Vulkan (feature `wgpu`){note}")
}

fn library(found: &Findings, library: &Library, name: &str, version_is: &str) -> String {
    let place = library.path.as_ref().map(|path| format!(" at {}", path.display())).unwrap_or_default();
    let version = library.version.map(|version| format!(", {version_is} {version}")).unwrap_or_default();
    match (library.found, &library.path) {
        (true, _) if found.asked => format!("{name} loads{version}"),
        (true, _) => format!("{name} found{place}"),
        (false, Some(_)) => format!("{name} found{place}, but could not be loaded"),
        (false, None) => format!("{name} not found"),
    }
}

fn headers(found: &Findings) -> String {
    let headers = &found.headers;
    let Some(root) = &headers.root else { return "not found".to_owned() };
    let version = headers.version.map(|version| format!(" of CUDA {version}")).unwrap_or_default();
    let tried = match (&found.compiler_problem, found.asked && found.compiler.found) {
        (None, true) => "; NVRTC compiles a kernel with them",
        _ => "",
    };
    match headers.missing.is_empty() {
        true => format!("at {}{version}{tried}", root.display()),
        false => format!("at {}{version}, without {}", root.display(), headers.missing.join(", ")),
    }
}

fn gpu_products(found: &Findings) -> String {
    match &found.matrix_products {
        Some(library) => library.clone(),
        None => {
            "cuBLASLt not found; CubeCL's kernels multiply instead, several times slower in bf16 and TF32"
                .to_owned()
        }
    }
}

fn words(card: &Card) -> String {
    let mut text = card.name.clone();
    if let Some(capability) = card.capability {
        text.push_str(&format!(", compute capability {capability}"));
    }
    match (card.total_bytes, card.free_bytes) {
        (Some(total), Some(free)) => text.push_str(&format!(", {total} of memory, {free} free")),
        (Some(total), None) => text.push_str(&format!(", {total} of memory")),
        _ => {}
    }
    if let Some(problem) = &card.problem {
        text.push_str(&format!("; cannot be used: {problem}"));
    }
    text
}

fn peers(found: &Findings) -> String {
    let pairs = found.peers.iter().map(|(reader, owner)| format!("{reader} reads {owner}"));
    if found.peers.is_empty() { "none".to_owned() } else { pairs.collect::<Vec<_>>().join(", ") }
}

fn vulkan(found: &Findings) -> String {
    match found.vulkan_drivers.as_slice() {
        [] => "none listed".to_owned(),
        drivers => format!("{} (for `--devices wgpu:0`)", drivers.join(", ")),
    }
}

fn locked(limit: Option<Limit>) -> String {
    match limit {
        None => "the system does not report its limit".to_owned(),
        Some(Limit::Unlimited) => "no limit (ulimit -l)".to_owned(),
        Some(Limit::Bytes(bytes)) => {
            format!("at most {bytes} (ulimit -l); a driver may refuse to page-lock more than that")
        }
    }
}

fn size_or(size: Option<ByteSize>, what: &str) -> String {
    size.map_or("the system does not report its memory".to_owned(), |size| format!("{size} {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::findings::{Headers, Version};
    use crate::machine::gpus::missing_for_wgpu;
    use crate::machine::reservations::{Admitted, OtherRun};
    use crate::machine::resources::card_name_here;
    use std::path::PathBuf;

    const MEMORY: Option<ByteSize> = Some(ByteSize::mib(4096));

    /// Returns findings of a machine with a complete setup and `cards` GPUs.
    fn complete(cards: usize) -> Findings {
        let library = |version| Library { found: true, path: None, version: Some(version) };
        let card = |index| Card {
            name: format!("Made-up {index}"),
            capability: Some(Version(9, 0)),
            total_bytes: Some(ByteSize::mib(10_000)),
            free_bytes: Some(ByteSize::mib(9_500)),
            problem: None,
        };
        Findings {
            cuda_in_build: true,
            asked: true,
            kernel_module: Some("580.65.06".to_owned()),
            driver: library(Version(13, 2)),
            compiler: library(Version(13, 0)),
            headers: Headers {
                root: Some("/usr/local/cuda".into()),
                version: Some(Version(13, 0)),
                missing: vec![],
            },
            cards: (0..cards).map(card).collect(),
            locked_memory: Some(Limit::Bytes(ByteSize::mib(8))),
            machine: Machine {
                free: MEMORY,
                available: MEMORY,
                cores: 2,
                bf16_products: "emulated",
                cpu_device_bytes: Some(ByteSize::mib(1638)),
                ..Machine::default()
            },
            ..Findings::default()
        }
    }

    /// Returns findings without driver, compiler, headers and GPUs.
    fn bare() -> Findings {
        let (driver, compiler, headers) = Default::default();
        Findings { kernel_module: None, driver, compiler, headers, ..complete(0) }
    }

    fn whats(found: &Findings, cards: &[usize]) -> Vec<String> {
        missing_for_cuda(found, cards).into_iter().map(|missing| missing.what).collect()
    }

    #[track_caller]
    fn one(found: &Findings, cards: &[usize], part: &str) {
        let whats = whats(found, cards);
        assert!(whats.len() == 1 && whats[0].contains(part), "{part:?} in {whats:?}");
    }

    #[test]
    fn where_all_is_there_nothing_is_missing() {
        let report = DoctorReport::from_findings(complete(1));
        assert!(report.usable && report.missing.is_empty());
        let text = report.to_string();
        let parts = "with CUDA (feature `cuda`)|580.65.06|libcuda.so.1 loads, supports CUDA 13.2|NVRTC loads, has CUDA version 13.0|\
                     at /usr/local/cuda of CUDA 13.0; NVRTC compiles a kernel with them|4.00 GiB free|\
                     GPU 0           Made-up 0, compute capability 9.0, 9.77 GiB of memory, 9.28 GiB free|\
                     at most 8.00 MiB (ulimit -l)|cpu:1 by default: 2 threads, 1.60 GiB of memory|bf16 products   emulated\n|GPU products    cuBLASLt not found; CubeCL's kernels|\
                     not measured: the CUDA path has been run on one kind of GPU, an H100; docs/cuda.md";
        for part in parts.split('|') {
            assert!(text.contains(part), "{part:?} in\n{text}");
        }
        assert!(!text.contains("peer access"), "there is no pair:\n{text}");
        let last = text.lines().last().unwrap();
        assert!(last.starts_with("`--devices cuda:0` can be used here: Made-up 0;"), "{last}");
        assert!(last.contains("uses 8.79 GiB"), "{last}");
    }

    #[test]
    fn the_limit_of_a_control_group_is_said() {
        let mut found = complete(1);
        assert!(DoctorReport::from_findings(found.clone()).to_string().contains("4.00 GiB free\n"));
        found.machine.limited = true;
        assert!(
            DoctorReport::from_findings(found)
                .to_string()
                .contains("4.00 GiB free within the limit of a control group\n")
        );
    }

    #[test]
    fn without_a_driver_everything_that_is_missing_is_said_at_once() {
        let report = DoctorReport::from_findings(bare());
        assert!(!report.usable);
        let whats = whats(&bare(), &[0]);
        assert_eq!(whats.len(), 3, "{whats:?}");
        let parts = ["no NVIDIA driver (libcuda.so.1", "NVRTC was not found", "headers"];
        assert!(whats.iter().zip(parts).all(|(what, part)| what.contains(part)), "{whats:?}");
        let text = report.to_string();
        assert!(text.ends_with(&format!("{}\n", report.verdict)), "the verdict is last:\n{text}");
        for part in ["not loaded", "libcuda.so.1 not found", "NVRTC not found", "GPUs            none"] {
            assert!(text.contains(part), "{part:?} in\n{text}");
        }
    }

    #[test]
    fn a_build_without_cuda_says_so_first_and_knows_what_files_tell() {
        let found = Findings { cuda_in_build: false, asked: false, ..bare() };
        let whats = whats(&found, &[0]);
        assert!(whats[0].starts_with("this build has no CUDA") && whats.len() == 4, "{whats:?}");
        let library = Library { found: true, path: Some("/usr/lib64/libcuda.so.1".into()), version: None };
        let named = Card { name: "Made-up".to_owned(), ..Card::default() };
        let without = Findings { cuda_in_build: false, asked: false, ..complete(0) };
        let found = Findings { driver: library, cards: vec![named], ..without };
        one(&found, &[0], "this build has no CUDA");
        let text = DoctorReport::from_findings(found).to_string();
        let parts = "based on files only|libcuda.so.1 found at /usr/lib64/libcuda.so.1|GPU 0           Made-up\n|\
                     cargo build --release -p hydra-bench --features cuda";
        for part in parts.split('|') {
            assert!(text.contains(part), "{part:?} in\n{text}");
        }
    }

    #[test]
    fn a_driver_without_a_compiler() {
        let found = Findings { compiler: Library::default(), ..complete(1) };
        one(&found, &[0], "NVRTC was not found (libnvrtc.so.13, libnvrtc.so, libnvrtc.so.12)");
        let path = Some(PathBuf::from("/x/libnvrtc.so.13"));
        let found = Findings { compiler: Library { path, ..Library::default() }, ..complete(1) };
        one(&found, &[0], "`/x/libnvrtc.so.13` could not be loaded");
    }

    #[test]
    fn headers_that_are_not_there_or_not_whole() {
        one(&Findings { headers: Headers::default(), ..complete(1) }, &[0], "CUDA_PATH is not set");
        let mut found = complete(1);
        found.headers.missing = vec!["include/crt".to_owned(), "include/cccl".to_owned()];
        // The failing compilation follows from the missing headers, and is not listed separately.
        found.compiler_problem = Some("cannot open source file \"crt/mma.h\"".to_owned());
        one(&found, &[0], "`/usr/local/cuda` lacks the headers include/crt, include/cccl");
        let text = DoctorReport::from_findings(found).to_string();
        assert!(text.contains("of CUDA 13.0, without include/crt, include/cccl\n"), "{text}");
    }

    #[test]
    fn a_compiler_that_does_not_compile_or_is_newer_than_the_driver() {
        let problem = Some("failed to open libnvrtc-builtins.so.13.0".to_owned());
        let found = Findings { compiler_problem: problem, ..complete(1) };
        one(&found, &[0], "NVRTC could not compile a kernel: failed to open libnvrtc-builtins");
        assert!(!DoctorReport::from_findings(found).to_string().contains("compiles a kernel with them"));
        let mut found = complete(1);
        found.driver.version = Some(Version(12, 8));
        one(&found, &[0], "NVRTC has CUDA version 13.0, and the driver supports kernels up to CUDA 12.8");
    }

    #[test]
    fn cards_that_are_not_there() {
        one(&complete(0), &[0], "there is no GPU");
        one(&complete(1), &[1], "there is no GPU 1, only GPU 0");
        one(&complete(2), &[0, 5, 1], "there is no GPU 5, only GPUs 0 to 1");
        let mut found = complete(2);
        found.cards[1].problem = Some("it gives no context: out of memory".to_owned());
        assert!(missing_for_cuda(&found, &[0]).is_empty());
        one(&found, &[0, 1], "GPU 1 (Made-up 1) cannot be used: it gives no context");
        assert!(
            DoctorReport::from_findings(found).to_string().contains("cannot be used: it gives no context")
        );
        let found = Findings { driver: Library::default(), ..complete(0) };
        one(&found, &[0], "the kernel module is loaded, but libcuda.so.1 was not found");
        // Requirements that cannot be checked are not listed as missing.
        let found = Findings { driver_problem: Some("system not yet initialized".to_owned()), ..complete(0) };
        one(&found, &[0], "the driver failed to initialize: system not yet initialized");
    }

    #[test]
    fn libraries_that_could_not_be_asked_are_known_by_their_files() {
        let problem = Some("Missing symbol cuDriverGetVersion".to_owned());
        let path = Some(PathBuf::from("/x/libnvrtc.so.13"));
        let compiler = Library { found: true, path, version: None };
        let found = Findings { asked: false, driver_problem: problem, compiler, ..complete(0) };
        one(&found, &[0], "failed to initialize: Missing symbol");
        let text = DoctorReport::from_findings(found).to_string();
        assert!(text.contains("NVRTC found at /x/libnvrtc.so.13\n"), "{text}");
        assert!(!text.contains("compiles a kernel with them"), "{text}");
    }

    #[test]
    fn peers_are_listed_where_there_are_two_cards() {
        let found = Findings { peers: vec![(0, 1), (1, 0)], ..complete(2) };
        assert!(
            DoctorReport::from_findings(found).to_string().contains("peer access     0 reads 1, 1 reads 0\n")
        );
        assert!(DoctorReport::from_findings(complete(2)).to_string().contains("peer access     none\n"));
    }

    #[test]
    fn a_card_is_shared_by_its_logical_devices() {
        let gpus = |cards: &[usize], logical| Gpus { cards: cards.to_vec(), logical };
        let mut found = complete(2);
        found.cards[1].total_bytes = Some(ByteSize::mib(5_000));
        let memory = |gpus, asked| gpus_memory(&gpus, asked, &found).map_err(|error| error.to_string());
        assert_eq!(memory(gpus(&[0], 1), None), Ok(ByteSize::mib(9_000)));
        assert_eq!(memory(gpus(&[0], 2), None), Ok(ByteSize::mib(4_500)));
        // The smallest GPU decides, because all devices have the same budget.
        assert_eq!(memory(gpus(&[0, 1], 2), None), Ok(ByteSize::mib(2_250)));
        assert_eq!(memory(gpus(&[0], 2), Some(ByteSize::mib(5_000))), Ok(ByteSize::mib(5_000)));
        let refused = memory(gpus(&[0, 1], 2), Some(ByteSize::mib(2_501))).unwrap_err();
        assert!(refused.contains("GPU 1 has 4.88 GiB"), "{refused}");
        assert!(refused.contains("2 devices of 2.44 GiB"), "{refused}");
        let without = Findings { cards: vec![Card::default()], ..complete(1) };
        let blind = |asked| gpus_memory(&gpus(&[0], 1), asked, &without);
        assert!(blind(None).unwrap_err().to_string().contains("--device-memory"));
        assert!(blind(Some(ByteSize::mib(1))).is_ok());
    }

    #[test]
    fn other_runs_are_listed_and_leave_less_of_memory_and_cards() {
        let taking = |card: u64, host: u64| {
            let cards = [(card_name_here(1), ByteSize::mib(card))].into();
            let admitted = Admitted { process: 7, run: "a".to_owned(), cards, ..Admitted::default() };
            let mut found = complete(2);
            found.machine.available = Some(ByteSize::mib(4096 - host));
            found.machine.others = vec![OtherRun { admitted, expected: ByteSize::mib(host) }];
            found
        };
        let memory = |cards: &[usize], found: &Findings| {
            let gpus = Gpus { cards: cards.to_vec(), logical: 1 };
            gpus_memory(&gpus, None, found).map_err(|error| error.to_string())
        };
        let some = taking(2_000, 1024);
        assert_eq!(memory(&[0], &some), Ok(ByteSize::mib(9_000)));
        assert_eq!(memory(&[0, 1], &some), Ok(ByteSize::mib(7_000)));
        let refused = memory(&[0, 1], &taking(9_000, 0)).unwrap_err();
        assert!(refused.contains("GPU 1 has 9.77 GiB") && refused.contains("; run `a` ("), "{refused}");
        let text = DoctorReport::from_findings(some).to_string();
        for part in
            ["4.00 GiB free, 3.00 GiB not reserved by other runs\n", "other runs      run `a` (process 7)"]
        {
            assert!(text.contains(part), "{part:?} in\n{text}");
        }
        assert!(!DoctorReport::from_findings(complete(1)).to_string().contains("other runs"));
    }

    #[test]
    fn wgpu_wants_its_feature_and_a_driver() {
        let without = missing_for_wgpu(&complete(1));
        assert!(without[0].what.contains("no Vulkan support (feature `wgpu`)"), "{without:?}");
        let with = Findings { wgpu_in_build: true, ..complete(1) };
        assert_eq!(missing_for_wgpu(&with).len(), usize::from(cfg!(target_os = "linux")));
        let driver = Findings { vulkan_drivers: vec!["lvp_icd.x86_64".to_owned()], ..with };
        assert_eq!(missing_for_wgpu(&driver), []);
        assert!(
            DoctorReport::from_findings(driver)
                .to_string()
                .contains("lvp_icd.x86_64 (for `--devices wgpu:0`)")
        );
    }

    #[test]
    fn the_json_has_what_the_text_has() {
        let found = Findings { peers: vec![(0, 1)], ..complete(2) };
        let json = serde_json::to_value(DoctorReport::from_findings(found)).unwrap();
        assert_eq!(json["usable"], true);
        assert_eq!(json["findings"]["driver"]["version"], "13.2");
        assert_eq!(json["findings"]["cards"][1]["total_bytes"], 10_000_u64 << 20);
        assert_eq!(json["findings"]["locked_memory"]["bytes"], 8 << 20);
        assert_eq!(json["findings"]["peers"][0], serde_json::json!([0, 1]));
        let rows = json["rows"].as_array().unwrap();
        assert!(rows.iter().any(|row| row["about"] == "peer access" && row["says"] == "0 reads 1"));
        let json = serde_json::to_value(DoctorReport::from_findings(bare())).unwrap();
        assert_eq!((json["usable"].as_bool(), json["missing"].as_array().unwrap().len()), (Some(false), 3));
    }
}
