//! The socket of a run that goes on: one line of JSON in, one line back.

use crate::run_dir::SOCKET;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// What a person may ask a run for by its page.
const COMMANDS: [&str; 7] = ["status", "pause", "resume", "stop", "delete", "extend", "fork"];

/// The longest reply, in bytes.
const LONGEST: u64 = 1 << 20;

/// The socket of the run in a directory.
pub(super) fn path(dir: &Path) -> PathBuf {
    dir.join(SOCKET)
}

/// A request as the run reads it; or why it is none.
pub(super) fn line(body: &[u8]) -> Result<String, String> {
    let request: Value =
        serde_json::from_slice(body).map_err(|error| format!("the request is no JSON: {error}"))?;
    let command = request["command"].as_str().unwrap_or_default();
    match COMMANDS.contains(&command) {
        // Written anew it has no line ends.
        true => Ok(format!("{request}\n")),
        false => Err(format!("`{command}` is none of the commands of the page: {}", COMMANDS.join(", "))),
    }
}

/// Hands a line to the run, and waits for its reply: until what was asked for has taken effect.
#[cfg(unix)]
pub(super) async fn ask(dir: &Path, line: &str) -> Result<String, String> {
    use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
    let asked = async {
        let mut socket = tokio::net::UnixStream::connect(path(dir)).await?;
        socket.write_all(line.as_bytes()).await?;
        let mut reply = String::new();
        BufReader::new(socket.take(LONGEST)).read_line(&mut reply).await?;
        std::io::Result::Ok(reply)
    };
    let reply = asked.await.map_err(|error| {
        format!("the run does not listen ({error}): it has ended, or is of a version that is not steered")
    })?;
    let is_reply = serde_json::from_str::<Value>(&reply).is_ok_and(|reply| reply["ok"].is_boolean());
    is_reply.then_some(reply).ok_or_else(|| "the run ended before it answered".to_owned())
}

#[cfg(not(unix))]
pub(super) async fn ask(_: &Path, _: &str) -> Result<String, String> {
    Err("runs are steered where the system has Unix sockets".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_one_line_of_a_known_command() {
        let asked = line(b"{\n \"command\": \"pause\",\n \"task\": \"a\\nb\" }").unwrap();
        assert_eq!(asked, "{\"command\":\"pause\",\"task\":\"a\\nb\"}\n");
        assert!(line(b"{").unwrap_err().contains("no JSON"));
        assert!(line(b"{\"command\":\"burn\"}").unwrap_err().contains("`burn`"));
        assert!(line(b"[]").is_err());
    }
}
