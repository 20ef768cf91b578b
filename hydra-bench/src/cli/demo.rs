//! The announcement of `hydra` without arguments on a terminal.

use hydra_run::terminal::{interactive, tell};
use std::env;
use std::sync::mpsc::channel;
use std::time::Duration;

/// The time in which an interrupt costs nothing.
const SECONDS: u64 = 3;

/// Announces what `hydra` without arguments does, and waits a moment before it starts. Does nothing in a pipe, and where the
/// variable `CI` is set, as it is on services for continuous integration.
pub(crate) fn announce() {
    if !interactive() || env::var_os("CI").is_some_and(|value| !value.is_empty()) {
        return;
    }
    tell(&text());
    // The channel has no messages, so this waits for the timeout.
    let (_sender, receiver) = channel::<()>();
    let _ = receiver.recv_timeout(Duration::from_secs(SECONDS));
}

fn text() -> String {
    format!(
        "This is the demo: it trains twelve small byte-level GPT-2 models from random weights on a built-in text, each cut \
         into four shards\nfor two CPU devices of 12 MiB, and ranks them. It takes a few minutes (hydra --steps 50: some seconds) \
         and writes to runs/select-N here.\nCtrl-C stops it, now or later: trained models are kept, and hydra resume continues \
         the others.\nhydra --help lists the other commands, such as hydra train --model DIR --data FILE.\n\
         It starts in {SECONDS} seconds."
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_says_what_where_how_to_stop_and_where_help_is() {
        let text = text();
        for part in
            ["the demo", "minutes", "runs/select-N", "Ctrl-C stops it", "hydra --help", "in 3 seconds"]
        {
            assert!(text.contains(part), "{part} in {text}");
        }
    }
}
