//! Runs of one process, and of processes that do what they are told when they are told.

use crate::machine::reservations::admitted::Admitted;
use crate::machine::reservations::folder::MachineReservations;
use crate::machine::resources::Machine;
use hydra_core::ByteSize;
use std::fs;
use std::io::{BufRead, BufReader, Lines, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};

/// Set in a process that is a run: the folder of its ledger, beside which the machine is.
const RUN: &str = "HYDRA_TEST_LEDGER";
/// The memory of the machine, in units of 1024 bytes.
const MEMORY: u64 = 1000;

/// A machine on which no process holds anything, with an empty ledger.
struct Here {
    root: tempfile::TempDir,
    reservations: MachineReservations,
}

impl Here {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("proc")).unwrap();
        fs::write(root.path().join("proc/meminfo"), format!("MemAvailable: {MEMORY} kB\n")).unwrap();
        let reservations = MachineReservations::at(&root.path().join("ledger"));
        Self { root, reservations }
    }

    fn look(&self) -> Machine {
        Machine::look_at(self.root.path(), Some(&self.reservations))
    }

    fn left(&self) -> u64 {
        self.look().available.unwrap().bytes() >> 10
    }

    fn runs(&self) -> Vec<String> {
        self.look().others.into_iter().map(|other| other.admitted.run).collect()
    }

    fn files(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.reservations.folder).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort_unstable();
        names
    }
}

fn admitted(run: &str, process: u32, kib: u64) -> Admitted {
    Admitted { process, run: run.to_owned(), host_bytes: ByteSize(kib << 10), ..Admitted::default() }
}

#[test]
fn an_entry_counts_until_its_run_has_ended() {
    let here = Here::new();
    assert_eq!((here.left(), here.runs().len()), (MEMORY, 0), "there is no folder yet");
    let admit = |run, kib| {
        let planning_lock = here.reservations.planning_lock(|_| panic!("nobody plans")).unwrap();
        planning_lock.admit(&admitted(run, 7, kib)).unwrap()
    };
    let (one, two) = (admit("one", 300), admit("two", 200));
    assert_eq!((here.left(), here.runs()), (MEMORY - 500, vec!["one".to_owned(), "two".to_owned()]));
    assert_eq!(here.files(), ["7-0.json", "7-1.json", "planning"]);
    drop(one);
    assert_eq!((here.left(), here.runs()), (MEMORY - 200, vec!["two".to_owned()]));
    // What it holds now is not free any more: it does not count twice.
    fs::create_dir(here.root.path().join("proc/7")).unwrap();
    fs::write(here.root.path().join("proc/7/status"), "RssAnon: 150 kB\n").unwrap();
    assert_eq!(here.left(), MEMORY - 50);
    // A process that is ending keeps its lock longer than its memory.
    fs::write(here.root.path().join("proc/7/status"), "State: Z (zombie)\n").unwrap();
    assert_eq!((here.left(), here.runs().len()), (MEMORY, 0));
    drop(two);
    assert_eq!((here.left(), here.files()), (MEMORY, vec!["planning".to_owned()]));
}

#[test]
fn files_that_nobody_has_locked_do_not_count_and_are_removed() {
    let here = Here::new();
    drop(here.reservations.planning_lock(|_| {}).unwrap());
    let left = serde_json::to_vec(&admitted("left", 1, 900)).unwrap();
    for (name, bytes) in [("1-0.json", &left[..]), ("2-0.json", b"{"), ("3-0.part", b"{"), ("mine", b"")] {
        fs::write(here.reservations.folder.join(name), bytes).unwrap();
    }
    assert_eq!((here.left(), here.runs().len()), (MEMORY, 0));
    let planning_lock = here.reservations.planning_lock(|_| {}).unwrap();
    assert_eq!(here.files(), ["mine", "planning"]);
    // An entry that another version has written differently.
    let _entry = planning_lock.admit(&admitted("later", 4, 900)).unwrap();
    fs::write(here.reservations.folder.join("4-0.json"), "{\"format\": 9}").unwrap();
    assert_eq!(here.runs().len(), 0);
}

#[cfg(unix)]
#[test]
fn the_folder_is_ones_own() {
    use std::os::unix::fs::{PermissionsExt, chown, symlink};
    let here = Here::new();
    let _entry = here.reservations.planning_lock(|_| {}).unwrap().admit(&admitted("a", 1, 1)).unwrap();
    let mode = |folder: &Path| fs::metadata(folder).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&here.reservations.folder), here.runs().len()), (0o700, 1));
    let refused = |folder: &Path, why: &str| {
        let reservations = MachineReservations::at(folder);
        let said = reservations.planning_lock(|_| {}).unwrap_err().to_string();
        assert!(said.contains(why) && said.contains(folder.to_str().unwrap()), "{said}");
        assert!(reservations.others(Path::new("/")).is_empty());
    };
    let own = "is not a folder that you alone may write to";
    let [file, link, below] = ["file", "link", "file/below"].map(|name| here.root.path().join(name));
    fs::write(&file, "").unwrap();
    symlink(&here.reservations.folder, &link).unwrap();
    refused(&link, own);
    refused(&file, "could not be used");
    refused(&below, "could not be used");
    let folder = here.reservations.folder.clone();
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o770)).unwrap();
    refused(&folder, own);
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(here.runs().len(), 1);
    // Only a privileged user gives folders away.
    if chown(&folder, Some(54_321), None).is_ok() {
        refused(&folder, own);
    }
}

/// A run in a process of its own, which says what it does and waits where it is told to.
struct Process {
    child: Child,
    said: Lines<BufReader<ChildStderr>>,
}

impl Process {
    fn start(here: &Here) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "machine::ledger::tests::what_a_run_does", "--nocapture"]);
        command.env(RUN, &here.reservations.folder).stdin(Stdio::piped()).stdout(Stdio::null());
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let said = BufReader::new(child.stderr.take().unwrap()).lines();
        Self { child, said }
    }

    /// Waits for what it says next.
    fn says(&mut self) -> String {
        self.said.next().expect("the run ended early").unwrap()
    }

    /// Lets it go on.
    fn tell(&mut self) {
        self.child.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    }

    /// Waits until it has admitted, and returns how much.
    fn admits(&mut self) -> u64 {
        loop {
            if let Some(bytes) = self.says().strip_prefix("admitted ") {
                return bytes.parse().unwrap();
            }
        }
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// Nothing, but in a process that another test has started.
#[test]
fn what_a_run_does() {
    let Some(folder) = std::env::var_os(RUN).map(PathBuf::from) else { return };
    let told = || std::io::stdin().lines().next();
    let reservations = MachineReservations::at(&folder);
    // Who plans may not have said who it is yet.
    let named = |process: Option<u32>| process.map_or("somebody".to_owned(), |process| process.to_string());
    let planning_lock =
        reservations.planning_lock(|process| eprintln!("waits for {}", named(process))).unwrap();
    let machine = Machine::look_at(folder.parent().unwrap(), Some(&reservations));
    let devices = machine.device_share(1).unwrap();
    let host = machine.host_share(devices).unwrap();
    eprintln!("plans");
    told();
    let bytes = devices.bytes() + host.bytes();
    let admitted = Admitted { host_bytes: ByteSize(bytes), ..admitted("a", std::process::id(), 0) };
    let _entry = planning_lock.admit(&admitted).unwrap();
    eprintln!("admitted {bytes}");
    told();
}

#[test]
fn a_run_that_begins_while_another_plans_waits_and_plans_with_the_rest() {
    let here = Here::new();
    let mut first = Process::start(&here);
    assert_eq!(first.says(), "plans");
    let mut second = Process::start(&here);
    assert_eq!(second.says(), format!("waits for {}", first.child.id()));
    first.tell();
    let one = first.admits();
    assert!(one > (MEMORY << 10) / 2, "{one}");
    assert_eq!(second.says(), "plans");
    second.tell();
    let two = second.admits();
    assert!(two > 0 && one + two <= MEMORY << 10, "{one} and {two}");
    assert_eq!(here.runs().len(), 2);
    for mut run in [first, second] {
        run.tell();
        assert!(run.child.wait().unwrap().success());
    }
    assert_eq!((here.left(), here.files()), (MEMORY, vec!["planning".to_owned()]));
}

#[test]
fn runs_that_start_together_admit_no_more_than_there_is() {
    let here = Here::new();
    let mut runs: Vec<Process> = (0..3).map(|_| Process::start(&here)).collect();
    runs.iter_mut().for_each(Process::tell);
    let admitted: Vec<u64> = runs.iter_mut().map(Process::admits).collect();
    assert!(admitted.iter().sum::<u64>() <= MEMORY << 10, "{admitted:?}");
    assert_eq!(here.runs().len(), 3);
}

#[test]
fn what_a_killed_run_had_admitted_or_planned_is_free_again() {
    let here = Here::new();
    let mut run = Process::start(&here);
    run.tell();
    run.admits();
    assert!(here.left() < MEMORY && here.runs() == ["a"]);
    run.kill();
    assert_eq!((here.left(), here.runs().len()), (MEMORY, 0));
    assert_eq!(here.files(), [format!("{}-0.json", run.child.id()), "planning".to_owned()]);
    let mut planner = Process::start(&here);
    assert_eq!(planner.says(), "plans");
    planner.kill();
    drop(here.reservations.planning_lock(|_| panic!("nobody plans any more")).unwrap());
    assert_eq!(here.files(), ["planning"]);
}
