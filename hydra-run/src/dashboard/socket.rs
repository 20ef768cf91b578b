//! The client of a running run's control socket: one line of JSON in, one line back.

use crate::run_dir::SOCKET;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// The commands that the dashboard forwards.
const COMMANDS: [&str; 7] = ["status", "pause", "resume", "stop", "delete", "extend", "fork"];

/// The maximum length of a reply in bytes.
const LONGEST: u64 = 1 << 20;

/// Returns the path of the control socket of the run in a directory.
pub(super) fn path(dir: &Path) -> PathBuf {
    dir.join(SOCKET)
}

/// Returns the request as the line that the run reads, or why it is invalid.
pub(super) fn line(body: &[u8]) -> Result<String, String> {
    let request: Value =
        serde_json::from_slice(body).map_err(|error| format!("the request is not JSON: {error}"))?;
    let command = request["command"].as_str().unwrap_or_default();
    match COMMANDS.contains(&command) {
        // Serialized again, it has no line breaks.
        true => Ok(format!("{request}\n")),
        false => Err(format!("unknown command `{command}`: expected one of {}", COMMANDS.join(", "))),
    }
}

/// Sends a line to the run and returns its reply, which arrives once the command has taken effect.
#[cfg(unix)]
pub(super) async fn send(dir: &Path, line: &str) -> Result<String, String> {
    use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
    let exchange = async {
        let mut socket = tokio::net::UnixStream::connect(path(dir)).await?;
        socket.write_all(line.as_bytes()).await?;
        let mut reply = String::new();
        BufReader::new(socket.take(LONGEST)).read_line(&mut reply).await?;
        std::io::Result::Ok(reply)
    };
    let reply = exchange.await.map_err(|error| {
        format!(
            "cannot connect to the run ({error}): it has ended, or its version of hydra has no run control"
        )
    })?;
    let is_reply = serde_json::from_str::<Value>(&reply).is_ok_and(|reply| reply["ok"].is_boolean());
    is_reply.then_some(reply).ok_or_else(|| "the run ended before it answered".to_owned())
}

#[cfg(not(unix))]
pub(super) async fn send(_: &Path, _: &str) -> Result<String, String> {
    Err("run control needs Unix sockets, which this system does not have".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_one_line_of_a_known_command() {
        let asked = line(b"{\n \"command\": \"pause\",\n \"task\": \"a\\nb\" }").unwrap();
        assert_eq!(asked, "{\"command\":\"pause\",\"task\":\"a\\nb\"}\n");
        assert!(line(b"{").unwrap_err().contains("not JSON"));
        assert!(line(b"{\"command\":\"burn\"}").unwrap_err().contains("`burn`"));
        assert!(line(b"[]").is_err());
    }
}
