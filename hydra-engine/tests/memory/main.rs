//! Memory: budgets hold to the byte, and ended work leaves nothing behind. These tests measure the whole process, so
//! each runs in a process of its own.

/// Ends the current test when it has passed in a process of its own, which has these environment variables too.
macro_rules! in_own_process {
    ($($variable:literal = $value:literal)?) => {
        fn here() {}
        if crate::runs_elsewhere(std::any::type_name_of_val(&here), &[$(($variable, $value))?]) {
            return;
        }
    };
}

mod backtraces;
#[path = "../common/mod.rs"]
mod common;
mod drawn;
mod equal;
mod leak;
mod slow_optimizer;
mod tight;

use hydra_spill::alloc::CountingAllocator;
use std::process::Command;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new(std::alloc::System);

/// Set in the processes of single tests.
const OWN_PROCESS: &str = "HYDRA_TEST_OWN_PROCESS";

/// Runs a test in a process of its own, unless this is that process. Returns whether it has run, and passed, there.
///
/// `here` is the path of a function in that of the test.
fn runs_elsewhere(here: &str, variables: &[(&str, &str)]) -> bool {
    if std::env::var_os(OWN_PROCESS).is_some() {
        return false;
    }
    let test = here
        .strip_prefix("memory::")
        .and_then(|path| path.strip_suffix("::here"))
        .expect("a test of this program");
    let mut child = Command::new(std::env::current_exe().expect("this program"));
    child.args([test, "--exact", "--nocapture"]).env(OWN_PROCESS, "1").envs(variables.iter().copied());
    let output = child.output().expect("a process");
    let printed = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.success() && printed.contains("1 passed"), "{printed}");
    true
}
