//! What bare `hydra` says on a terminal before it begins.

use crate::terminal::{interactive, tell};
use std::env;
use std::sync::mpsc::channel;
use std::time::Duration;

/// The time to change one's mind.
const SECONDS: u64 = 3;

/// Says what bare `hydra` is about to do, and waits a moment in which an interrupt costs nothing. Nobody is kept waiting where no
/// one reads: in a pipe, or where `CI` is set as services for continuous integration do.
pub(crate) fn announce() {
    if !interactive() || env::var_os("CI").is_some_and(|value| !value.is_empty()) {
        return;
    }
    tell(&text());
    // Nobody sends: that is a wait which ends at a time.
    let (_sender, receiver) = channel::<()>();
    let _ = receiver.recv_timeout(Duration::from_secs(SECONDS));
}

fn text() -> String {
    format!(
        "This is the demo: twelve small GPT-2 models over bytes are trained from random weights on a built-in text, each cut \
         into four shards\nfor two CPU devices of 12 MiB, and ranked. It takes a few minutes (hydra --steps 50: some seconds), \
         and writes into runs/select-N here.\nCtrl-C stops it, now or later: what is trained by then is kept, and hydra resume \
         goes on with it.\nhydra --help lists what else there is, such as hydra train --model DIR --data FILE.\n\
         It begins in {SECONDS} seconds."
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
