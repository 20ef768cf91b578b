//! Memory as Linux tells it in files: of the machine, and of the control groups that a process is in.

use hydra_core::ByteSize;
use std::fs;
use std::path::Path;

/// The size behind such a name in a text with lines like `MemAvailable:    8000 kB`, whose unit is 1024 bytes.
pub(crate) fn size_of(name: &str, text: &str) -> Option<ByteSize> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024).map(ByteSize)
}

/// A line of `/proc/self/status`, such as `VmRSS`.
pub(crate) fn of_this_process(name: &str) -> Option<ByteSize> {
    size_of(name, &fs::read_to_string("/proc/self/status").ok()?)
}

/// The memory that can be had without swapping where the file system begins at `root`, and true if a control group, such
/// as that of a container, leaves less than the machine has; `None` where it does not tell.
pub(crate) fn available(root: &Path) -> Option<(ByteSize, bool)> {
    let free = fs::read_to_string(root.join("proc/meminfo")).ok();
    let free = free.and_then(|text| size_of("MemAvailable", &text));
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let room = groups.lines().filter_map(|line| group(root, line)).min();
    let size = free.into_iter().chain(room).min()?;
    Some((size, free != Some(size)))
}

/// The files of the memory controller of one version.
struct Controller {
    mount: &'static str,
    limit: &'static str,
    usage: &'static str,
    /// The fields of `memory.stat` that have the files' pages, of the group and of those below it, which go first.
    reclaimable: [&'static str; 2],
}

const V1: Controller = Controller {
    mount: "sys/fs/cgroup/memory",
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    reclaimable: ["total_inactive_file", "total_active_file"],
};

const V2: Controller = Controller {
    mount: "sys/fs/cgroup",
    limit: "memory.max",
    usage: "memory.current",
    reclaimable: ["inactive_file", "active_file"],
};

/// The least memory that the group in a line of `/proc/self/cgroup`, or one above it, leaves: `0::PATH` in version 2,
/// `ID:CONTROLLERS:PATH` in version 1.
fn group(root: &Path, line: &str) -> Option<ByteSize> {
    let (id, rest) = line.split_once(':')?;
    let (controllers, path) = rest.split_once(':')?;
    let controller = match (id, controllers) {
        ("0", "") => V2,
        (_, names) if names.split(',').any(|name| name == "memory") => V1,
        _ => return None,
    };
    // In a container the path may be that on its host, and what is mounted begin at the container's group: folders
    // that are not there say nothing, and the mount itself is asked last.
    let mount = root.join(controller.mount);
    let group = mount.join(path.trim_start_matches('/'));
    let above = group.ancestors().take_while(|dir| dir.starts_with(&mount));
    above.filter_map(|dir| controller.room(dir)).min()
}

impl Controller {
    /// The limit of a group less what is in use and cannot be had back at once; `None` where there is no limit.
    fn room(&self, dir: &Path) -> Option<ByteSize> {
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

    /// The memory that is available where the file system has these files.
    fn found(files: &[(&str, &str)]) -> Option<(u64, bool)> {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let file = root.path().join(path);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        }
        available(root.path()).map(|(size, limited)| (size.bytes(), limited))
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
            // Not above this process.
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
}
