//! Runs in one process, and in child processes that the tests step.

use crate::machine::reservations::admitted::Admitted;
use crate::machine::reservations::folder::MachineReservations;
use crate::machine::resources::Machine;
use hydra_core::ByteSize;
use std::fs;
use std::io::{BufRead, BufReader, Lines, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};

/// Set in a child process: the folder of its reservations, next to the files of its machine.
const RUN: &str = "HYDRA_TEST_RESERVATIONS";
/// Memory of the machine in KiB.
const MEMORY: u64 = 1000;

/// A machine without processes and reservations.
struct TestMachine {
    root: tempfile::TempDir,
    reservations: MachineReservations,
}

impl TestMachine {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("proc")).unwrap();
        fs::write(root.path().join("proc/meminfo"), format!("MemAvailable: {MEMORY} kB\n")).unwrap();
        let reservations = MachineReservations::at(&root.path().join("reservations"));
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
    let here = TestMachine::new();
    assert_eq!((here.left(), here.runs().len()), (MEMORY, 0), "there is no folder yet");
    let admit = |run, kib| {
        let planning_lock = here.reservations.planning_lock(|_| panic!("another run plans")).unwrap();
        planning_lock.admit(&admitted(run, 7, kib)).unwrap()
    };
    let (one, two) = (admit("one", 300), admit("two", 200));
    assert_eq!((here.left(), here.runs()), (MEMORY - 500, vec!["one".to_owned(), "two".to_owned()]));
    assert_eq!(here.files(), ["7-0.json", "7-1.json", "planning"]);
    drop(one);
    assert_eq!((here.left(), here.runs()), (MEMORY - 200, vec!["two".to_owned()]));
    // Memory that it holds is no longer free, and is not counted twice.
    fs::create_dir(here.root.path().join("proc/7")).unwrap();
    fs::write(here.root.path().join("proc/7/status"), "RssAnon: 150 kB\n").unwrap();
    assert_eq!(here.left(), MEMORY - 50);
    // An ending process keeps its lock longer than its memory.
    fs::write(here.root.path().join("proc/7/status"), "State: Z (zombie)\n").unwrap();
    assert_eq!((here.left(), here.runs().len()), (MEMORY, 0));
    drop(two);
    assert_eq!((here.left(), here.files()), (MEMORY, vec!["planning".to_owned()]));
}

#[test]
fn files_that_nobody_has_locked_do_not_count_and_are_removed() {
    let here = TestMachine::new();
    drop(here.reservations.planning_lock(|_| {}).unwrap());
    let left = serde_json::to_vec(&admitted("left", 1, 900)).unwrap();
    for (name, bytes) in [("1-0.json", &left[..]), ("2-0.json", b"{"), ("3-0.part", b"{"), ("mine", b"")] {
        fs::write(here.reservations.folder.join(name), bytes).unwrap();
    }
    assert_eq!((here.left(), here.runs().len()), (MEMORY, 0));
    let planning_lock = here.reservations.planning_lock(|_| {}).unwrap();
    assert_eq!(here.files(), ["mine", "planning"]);
    // An entry in the format of another version.
    let _entry = planning_lock.admit(&admitted("later", 4, 900)).unwrap();
    fs::write(here.reservations.folder.join("4-0.json"), "{\"format\": 9}").unwrap();
    assert_eq!(here.runs().len(), 0);
}

#[cfg(unix)]
#[test]
fn the_folder_is_ones_own() {
    use std::os::unix::fs::{PermissionsExt, chown, symlink};
    let here = TestMachine::new();
    let _entry = here.reservations.planning_lock(|_| {}).unwrap().admit(&admitted("a", 1, 1)).unwrap();
    let mode = |folder: &Path| fs::metadata(folder).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&here.reservations.folder), here.runs().len()), (0o700, 1));
    let refused = |folder: &Path, why: &str| {
        let reservations = MachineReservations::at(folder);
        let said = reservations.planning_lock(|_| {}).unwrap_err().to_string();
        assert!(said.contains(why) && said.contains(folder.to_str().unwrap()), "{said}");
        assert!(reservations.others(Path::new("/")).is_empty());
    };
    let own = "is not a folder that only you can write to";
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
    // Only a privileged user can change the owner.
    if chown(&folder, Some(54_321), None).is_ok() {
        refused(&folder, own);
    }
}

/// A run in a child process, which prints its steps and waits for a line before each.
struct Process {
    child: Child,
    said: Lines<BufReader<ChildStderr>>,
}

impl Process {
    fn start(here: &TestMachine) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "machine::reservations::tests::what_a_run_does", "--nocapture"]);
        command.env(RUN, &here.reservations.folder).stdin(Stdio::piped()).stdout(Stdio::null());
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let said = BufReader::new(child.stderr.take().unwrap()).lines();
        Self { child, said }
    }

    /// Waits for the next printed step.
    fn next_step(&mut self) -> String {
        self.said.next().expect("the run ended early").unwrap()
    }

    /// Releases it, so that it continues.
    fn step(&mut self) {
        self.child.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    }

    /// Waits until it has admitted memory, and returns the bytes.
    fn admits(&mut self) -> u64 {
        loop {
            if let Some(bytes) = self.next_step().strip_prefix("admitted ") {
                return bytes.parse().unwrap();
            }
        }
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// Does nothing, except in a child process of another test.
#[test]
fn what_a_run_does() {
    let Some(folder) = std::env::var_os(RUN).map(PathBuf::from) else { return };
    let wait = || std::io::stdin().lines().next();
    let reservations = MachineReservations::at(&folder);
    // The planning process may not have written its ID yet.
    let named = |process: Option<u32>| process.map_or("unknown".to_owned(), |process| process.to_string());
    let planning_lock =
        reservations.planning_lock(|process| eprintln!("waits for {}", named(process))).unwrap();
    let machine = Machine::look_at(folder.parent().unwrap(), Some(&reservations));
    let devices = machine.device_share(1).unwrap();
    let host = machine.host_share(devices).unwrap();
    eprintln!("plans");
    wait();
    let bytes = devices.bytes() + host.bytes();
    let admitted = Admitted { host_bytes: ByteSize(bytes), ..admitted("a", std::process::id(), 0) };
    let _entry = planning_lock.admit(&admitted).unwrap();
    eprintln!("admitted {bytes}");
    wait();
}

#[test]
fn a_run_that_begins_while_another_plans_waits_and_plans_with_the_rest() {
    let here = TestMachine::new();
    let mut first = Process::start(&here);
    assert_eq!(first.next_step(), "plans");
    let mut second = Process::start(&here);
    assert_eq!(second.next_step(), format!("waits for {}", first.child.id()));
    first.step();
    let one = first.admits();
    assert!(one > (MEMORY << 10) / 2, "{one}");
    assert_eq!(second.next_step(), "plans");
    second.step();
    let two = second.admits();
    assert!(two > 0 && one + two <= MEMORY << 10, "{one} and {two}");
    assert_eq!(here.runs().len(), 2);
    for mut run in [first, second] {
        run.step();
        assert!(run.child.wait().unwrap().success());
    }
    assert_eq!((here.left(), here.files()), (MEMORY, vec!["planning".to_owned()]));
}

#[test]
fn runs_that_start_together_admit_no_more_than_there_is() {
    let here = TestMachine::new();
    let mut runs: Vec<Process> = (0..3).map(|_| Process::start(&here)).collect();
    runs.iter_mut().for_each(Process::step);
    let admitted: Vec<u64> = runs.iter_mut().map(Process::admits).collect();
    assert!(admitted.iter().sum::<u64>() <= MEMORY << 10, "{admitted:?}");
    assert_eq!(here.runs().len(), 3);
}

#[test]
fn what_a_killed_run_had_admitted_or_planned_is_free_again() {
    let here = TestMachine::new();
    let mut run = Process::start(&here);
    run.step();
    run.admits();
    assert!(here.left() < MEMORY && here.runs() == ["a"]);
    run.kill();
    assert_eq!((here.left(), here.runs().len()), (MEMORY, 0));
    assert_eq!(here.files(), [format!("{}-0.json", run.child.id()), "planning".to_owned()]);
    let mut planner = Process::start(&here);
    assert_eq!(planner.next_step(), "plans");
    planner.kill();
    drop(here.reservations.planning_lock(|_| panic!("a killed run still plans")).unwrap());
    assert_eq!(here.files(), ["planning"]);
}
