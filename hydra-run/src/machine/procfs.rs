//! Memory figures from Linux's files: of the machine, of processes and of control groups.

use hydra_core::ByteSize;
use std::fs;
use std::path::{Path, PathBuf};

/// Parses the size of a field in lines such as `MemAvailable:    8000 kB`, whose unit is 1024 bytes.
pub(crate) fn size_of(name: &str, text: &str) -> Option<ByteSize> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024).map(ByteSize)
}

/// Returns a field of `/proc/self/status`, such as `VmRSS`.
pub fn of_this_process(name: &str) -> Option<ByteSize> {
    size_of(name, &fs::read_to_string("/proc/self/status").ok()?)
}

/// The memory of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProcessMemory {
    /// Anonymous and shared memory, without file pages.
    Bytes(ByteSize),
    /// The process is ending and holds no memory.
    Ending,
    /// Unknown, such as for a process in another container.
    Unknown,
}

impl ProcessMemory {
    /// Returns the memory of a process, with the file system at `root`.
    pub(super) fn of_process(root: &Path, process: u32) -> Self {
        let Ok(text) = fs::read_to_string(root.join(format!("proc/{process}/status"))) else {
            return Self::Unknown;
        };
        let size = |name| size_of(name, &text).map(ByteSize::bytes);
        // Old kernels do not report the parts.
        let parts = size("RssAnon").map(|own| own.saturating_add(size("RssShmem").unwrap_or(0)));
        parts.or_else(|| size("VmRSS")).map_or(Self::Ending, |bytes| Self::Bytes(ByteSize(bytes)))
    }
}

/// Memory available without swapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AvailableMemory {
    pub(super) bytes: ByteSize,
    /// True if a control group, such as a container's, limits it below the machine's memory.
    pub(super) limited: bool,
    /// The bytes that other processes are not expected to use.
    pub(super) left: ByteSize,
}

/// Returns the available memory, with the file system at `root`, or `None` if it is not reported. `expected` are bytes that
/// processes will still allocate: they are subtracted from the machine's memory, and from that of the control groups of
/// these processes.
pub(super) fn free(root: &Path, expected: &[(u32, ByteSize)]) -> Option<AvailableMemory> {
    let machine = fs::read_to_string(root.join("proc/meminfo")).ok();
    let machine = machine.and_then(|text| size_of("MemAvailable", &text));
    let groups: Vec<(PathBuf, ByteSize)> = groups(root, "self")
        .unwrap_or_default()
        .iter()
        .flat_map(|(of, group)| of.headrooms(root, group))
        .collect();
    let less = |bytes: ByteSize, counts: &dyn Fn(u32) -> bool| {
        let expected = expected.iter().filter(|(process, _)| counts(*process));
        let sum = expected.fold(0_u64, |sum, (_, bytes)| sum.saturating_add(bytes.bytes()));
        ByteSize(bytes.bytes().saturating_sub(sum))
    };
    let left = groups.iter().map(|(dir, bytes)| less(*bytes, &|process| is_in(root, process, dir)));
    let left = left.chain(machine.map(|bytes| less(bytes, &|_| true))).min()?;
    let bytes = groups.iter().map(|(_, bytes)| *bytes).chain(machine).min()?;
    Some(AvailableMemory { bytes, limited: machine != Some(bytes), left })
}

/// The files of one version of the memory controller.
struct MemoryController {
    mount: &'static str,
    limit: &'static str,
    usage: &'static str,
    /// The fields of `memory.stat` with the reclaimable file pages of the group and its descendants.
    reclaimable: [&'static str; 2],
}

const V1: MemoryController = MemoryController {
    mount: "sys/fs/cgroup/memory",
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    reclaimable: ["total_inactive_file", "total_active_file"],
};

const V2: MemoryController = MemoryController {
    mount: "sys/fs/cgroup",
    limit: "memory.max",
    usage: "memory.current",
    reclaimable: ["inactive_file", "active_file"],
};

/// Returns the memory control groups of a process: `0::PATH` in version 2 of `/proc/PROCESS/cgroup`, `ID:CONTROLLERS:PATH`
/// in version 1. Returns `None` if they are not reported.
fn groups(root: &Path, process: &str) -> Option<Vec<(MemoryController, PathBuf)>> {
    let text = fs::read_to_string(root.join("proc").join(process).join("cgroup")).ok()?;
    Some(text.lines().filter_map(|line| group(root, line)).collect())
}

fn group(root: &Path, line: &str) -> Option<(MemoryController, PathBuf)> {
    let (id, rest) = line.split_once(':')?;
    let (controllers, path) = rest.split_once(':')?;
    let controller = match (id, controllers) {
        ("0", "") => V2,
        (_, names) if names.split(',').any(|name| name == "memory") => V1,
        _ => return None,
    };
    let group = root.join(controller.mount).join(path.trim_start_matches('/'));
    Some((controller, group))
}

/// Returns true if a process is in the group of this folder or in a descendant, or its group is unknown.
fn is_in(root: &Path, process: u32, dir: &Path) -> bool {
    let groups = groups(root, &process.to_string());
    groups.is_none_or(|groups| groups.iter().any(|(_, group)| group.starts_with(dir)))
}

impl MemoryController {
    /// Returns the headroom of a group and of its ancestors that have a limit.
    fn headrooms(&self, root: &Path, group: &Path) -> Vec<(PathBuf, ByteSize)> {
        // In a container the path may be the host's, while the mount starts at the container's group: missing folders are
        // skipped, and the mount itself comes last.
        let mount = root.join(self.mount);
        let above = group.ancestors().take_while(|dir| dir.starts_with(&mount));
        above.filter_map(|dir| Some((dir.to_owned(), self.headroom(dir)?))).collect()
    }

    /// Returns the limit of a group minus its memory in use that is not reclaimable, or `None` without a limit.
    fn headroom(&self, dir: &Path) -> Option<ByteSize> {
        let number = |file: &str| fs::read_to_string(dir.join(file)).ok()?.trim().parse::<u64>().ok();
        let limit = number(self.limit)?;
        let stat = fs::read_to_string(dir.join("memory.stat")).unwrap_or_default();
        let field = |name: &str| -> Option<u64> {
            stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?.trim().parse().ok()
        };
        let reclaimable: u64 = self.reclaimable.into_iter().filter_map(field).sum();
        let used = number(self.usage).unwrap_or(0).saturating_sub(reclaimable);
        Some(ByteSize(limit.saturating_sub(used)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_in_units_of_1024_bytes() {
        let text = "MemTotal:       16000 kB\nMemFree:  1 kB\nMemAvailable:    8000 kB\nVmHWM:\t    12 kB\n";
        assert_eq!(size_of("MemAvailable", text), Some(ByteSize(8_192_000)));
        assert_eq!(size_of("VmHWM", text), Some(ByteSize(12 * 1024)));
        assert_eq!(size_of("Mem", text), None);
        assert_eq!(size_of("MemFree", "MemFree: 1\nMemFree: 1 kB\n"), None);
    }

    /// Returns the available memory for a file system with these files.
    fn found(files: &[(&str, &str)]) -> Option<(u64, bool)> {
        found_beside(files, &[]).map(|(bytes, limited, _)| (bytes, limited))
    }

    /// Returns the same, and the rest after other processes use these bytes.
    fn found_beside(files: &[(&str, &str)], expected: &[(u32, u64)]) -> Option<(u64, bool, u64)> {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let file = root.path().join(path);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        }
        let expected: Vec<_> = expected.iter().map(|(process, bytes)| (*process, ByteSize(*bytes))).collect();
        free(root.path(), &expected).map(|free| (free.bytes.bytes(), free.limited, free.left.bytes()))
    }

    const MACHINE: (&str, &str) = ("proc/meminfo", "MemAvailable: 1000 kB\n");
    const FREE: u64 = 1_024_000;

    #[test]
    fn a_machine_without_control_groups_has_what_is_free() {
        assert_eq!(found(&[]), None);
        assert_eq!(found(&[MACHINE]), Some((FREE, false)));
        let unlimited = [MACHINE, ("proc/self/cgroup", "0::/\n"), ("sys/fs/cgroup/memory.max", "max\n")];
        assert_eq!(found(&unlimited), Some((FREE, false)));
    }

    #[test]
    fn the_smallest_room_up_to_the_root_counts_in_version_2() {
        let inner = [
            MACHINE,
            ("proc/self/cgroup", "0::/a/b\n"),
            ("sys/fs/cgroup/a/b/memory.max", "900000\n"),
            ("sys/fs/cgroup/a/b/memory.current", "300000\n"),
            ("sys/fs/cgroup/a/b/memory.stat", "anon 1\ninactive_file 200000\nactive_file 7\n"),
        ];
        assert_eq!(found(&inner), Some((800_007, true)));
        let outer = [
            ("sys/fs/cgroup/a/memory.max", "500000\n"),
            ("sys/fs/cgroup/a/memory.current", "450000\n"),
            // Not an ancestor of this process.
            ("sys/fs/cgroup/c/memory.max", "1\n"),
        ];
        assert_eq!(found(&[&inner[..], &outer].concat()), Some((50_000, true)));
        let full = [("sys/fs/cgroup/a/b/memory.current", "1000000\n")];
        assert_eq!(found(&[&inner[..4], &full].concat()), Some((0, true)));
    }

    #[test]
    fn a_container_is_asked_at_the_mount_where_its_path_is_the_hosts() {
        let files = [
            MACHINE,
            ("proc/self/cgroup", "5:cpu:/x\n4:hugetlb,memory:/docker/0123\n0::/\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "800000\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "500000\n"),
            ("sys/fs/cgroup/memory/memory.stat", "inactive_file 1\ntotal_inactive_file 100000\n"),
        ];
        assert_eq!(found(&files), Some((400_000, true)));
        let unlimited = [("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")];
        assert_eq!(found(&[&files[..2], &unlimited].concat()), Some((FREE, false)));
        assert_eq!(found(&files[1..]), Some((400_000, true)));
    }

    #[test]
    fn bytes_that_others_will_use_are_taken_off_where_they_are() {
        assert_eq!(found_beside(&[MACHINE], &[(1, 24_000), (2, 500_000)]), Some((FREE, false, 500_000)));
        assert_eq!(found_beside(&[MACHINE], &[(1, FREE), (2, u64::MAX)]), Some((FREE, false, 0)));
        let groups = [
            MACHINE,
            ("proc/self/cgroup", "0::/a/b\n"),
            ("proc/7/cgroup", "0::/a/c\n"),
            ("proc/8/cgroup", "0::/d\n"),
            ("sys/fs/cgroup/a/memory.max", "600000\n"),
            ("sys/fs/cgroup/a/b/memory.max", "500000\n"),
        ];
        // A process in another group reduces only the machine's memory; one with an unknown group counts everywhere.
        let left = |expected: &[(u32, u64)]| found_beside(&groups, expected);
        assert_eq!(left(&[(8, 300_000)]), Some((500_000, true, 500_000)));
        assert_eq!(left(&[(8, 1_000_000)]), Some((500_000, true, 24_000)));
        assert_eq!(left(&[(7, 300_000)]), Some((500_000, true, 300_000)));
        assert_eq!(left(&[(9, 300_000)]), Some((500_000, true, 200_000)));
    }

    #[test]
    fn a_process_holds_its_own_memory_and_no_files() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("proc/7")).unwrap();
        let held = |text: &str| {
            fs::write(root.path().join("proc/7/status"), text).unwrap();
            ProcessMemory::of_process(root.path(), 7)
        };
        let kib = |count: u64| ProcessMemory::Bytes(ByteSize(count << 10));
        assert_eq!(held("VmRSS:\t 90 kB\nRssAnon:\t 50 kB\nRssFile:\t 30 kB\nRssShmem:\t 10 kB\n"), kib(60));
        assert_eq!(held("VmRSS:\t 90 kB\n"), kib(90));
        assert_eq!(held("Name: hydra\nState: Z (zombie)\n"), ProcessMemory::Ending);
        assert_eq!(ProcessMemory::of_process(root.path(), 8), ProcessMemory::Unknown);
        let own = ProcessMemory::of_process(Path::new("/"), std::process::id());
        assert!(matches!(own, ProcessMemory::Bytes(_)) || cfg!(not(target_os = "linux")), "{own:?}");
    }
}
