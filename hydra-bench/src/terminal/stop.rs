//! Ctrl-C: the first ends the run at the minibatches' ends, the second at once.

use crate::terminal::error::{INTERRUPTED, tell};
use crate::terminal::progress::interactive;
use anyhow::{Context, Result};
use hydra_engine::StopFlag;
use indicatif::{MultiProgress, ProgressDrawTarget};

/// Sets `flag` on the first interrupt (or request to terminate), as is said above the bars; the second ends the process.
pub(crate) fn on_interrupt(flag: StopFlag, terminal: MultiProgress) -> Result<()> {
    let handler = move || {
        if flag.is_stopped() {
            if interactive() {
                // The bars leave the cursor at the end of their last line, and the shell would go on there.
                terminal.set_draw_target(ProgressDrawTarget::hidden());
                tell("");
            }
            std::process::exit(i32::from(INTERRUPTED));
        }
        flag.stop();
        if interactive() {
            terminal.suspend(|| tell("stopping at the minibatches' ends; interrupt again to leave at once"));
        }
    };
    ctrlc::set_handler(handler).context("the handler of interrupts could not be installed")
}
