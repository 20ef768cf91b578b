//! The client end of the control socket.

use std::io;
use std::path::Path;

/// Sends a line to a run and returns its answer. Fails with `UnexpectedEof` if the run ends before it has answered.
#[cfg(unix)]
pub fn ask(socket: &Path, line: &str) -> io::Result<String> {
    use std::io::{BufRead, BufReader, Write};
    let mut stream = std::os::unix::net::UnixStream::connect(socket)?;
    stream.write_all(format!("{line}\n").as_bytes())?;
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer)?;
    match answer.strip_suffix('\n') {
        Some(answer) => Ok(answer.to_owned()),
        None => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

#[cfg(not(unix))]
pub(crate) fn ask(_: &Path, _: &str) -> io::Result<String> {
    Err(io::ErrorKind::Unsupported.into())
}
