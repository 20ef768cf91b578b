//! Ctrl-C: the first stops a run after its current minibatches, or an export, the second exits immediately.

use crate::terminal::error::{INTERRUPTED, tell};
use crate::terminal::progress::interactive;
use anyhow::{Context, Result};
use hydra_engine::StopFlag;
use indicatif::{MultiProgress, ProgressDrawTarget};

/// Sets `flag` on the first interrupt (or termination request), with a message above the bars; the second ends the process.
pub(crate) fn on_interrupt(flag: StopFlag, terminal: MultiProgress) -> Result<()> {
    let handler = move || {
        if flag.is_stopped() {
            if interactive() {
                // The bars leave the cursor at the end of their last line.
                terminal.set_draw_target(ProgressDrawTarget::hidden());
                tell("");
            }
            std::process::exit(i32::from(INTERRUPTED));
        }
        flag.stop();
        if interactive() {
            terminal.suspend(|| {
                tell("stopping after the current minibatches or tensors; interrupt again to exit immediately")
            });
        }
    };
    ctrlc::set_handler(handler).context("the interrupt handler could not be installed")
}
