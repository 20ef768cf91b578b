//! The server end of the control socket: a thread that accepts connections, and a thread for each connection.

use std::io;
use std::path::Path;

/// The maximum number of open connections; further ones receive an error and are closed.
#[cfg(unix)]
const CONNECTIONS: usize = 16;
/// The maximum length of a line in bytes.
#[cfg(unix)]
const LINE: usize = 1 << 16;

/// Answers lines on a socket until it is dropped, which removes the socket's file.
#[cfg(unix)]
pub(crate) use unix::ControlServer;

/// The stub for systems without Unix sockets.
#[cfg(not(unix))]
#[derive(Debug)]
pub(crate) struct ControlServer;

#[cfg(not(unix))]
impl ControlServer {
    pub(crate) fn open(_: &Path, _: impl Fn(&str) -> String) -> io::Result<Self> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

#[cfg(unix)]
mod unix {
    use super::{CONNECTIONS, LINE, Path, io};
    use std::fs::{self, Permissions};
    use std::io::{ErrorKind, Read, Write};
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::path::PathBuf;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::thread::{Builder, JoinHandle};
    use std::time::{Duration, Instant};

    /// The interval at which an idle connection checks whether the run has ended.
    const TICK: Duration = Duration::from_millis(200);
    /// The time limit for the next line after an answer, and for writing an answer.
    const PATIENCE: Duration = Duration::from_secs(30);
    const TOO_MANY: &[u8] = b"{\"ok\":false,\"error\":\"too many connections: close one and try again\"}\n";
    const TOO_LONG: &[u8] = b"{\"ok\":false,\"error\":\"the line is too long\"}\n";

    type Answer = dyn Fn(&str) -> String + Send + Sync;

    pub(crate) struct ControlServer {
        socket: PathBuf,
        shared: Arc<SharedAnswer>,
        thread: Option<JoinHandle<()>>,
    }

    struct SharedAnswer {
        answer: Box<Answer>,
        closing: AtomicBool,
        open: AtomicUsize,
    }

    impl ControlServer {
        /// Listens on a socket file that only its owner can use. Replaces an existing file, which a killed run has left.
        pub(crate) fn open(
            socket: &Path,
            answer: impl Fn(&str) -> String + Send + Sync + 'static,
        ) -> io::Result<Self> {
            // Renamed only when it listens and has its permissions, so no client finds it before.
            let unready = socket.with_extension("new");
            match fs::remove_file(&unready) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            let listener = UnixListener::bind(&unready)?;
            let named = fs::set_permissions(&unready, Permissions::from_mode(0o600))
                .and_then(|()| fs::rename(&unready, socket));
            if let Err(error) = named {
                let _ = fs::remove_file(&unready);
                return Err(error);
            }
            let (answer, closing, open) = (Box::new(answer), AtomicBool::new(false), AtomicUsize::new(0));
            let shared = Arc::new(SharedAnswer { answer, closing, open });
            let thread = Builder::new().name("hydra-control".to_owned());
            let accepting = shared.clone();
            let thread = Some(thread.spawn(move || accept(&listener, &accepting))?);
            Ok(Self { socket: socket.to_owned(), shared, thread })
        }
    }

    impl Drop for ControlServer {
        fn drop(&mut self) {
            self.shared.closing.store(true, Ordering::SeqCst);
            // Wakes the thread, which waits for a connection.
            let woken = UnixStream::connect(&self.socket).is_ok();
            if let Some(thread) = self.thread.take().filter(|_| woken) {
                let _ = thread.join();
            }
            let _ = fs::remove_file(&self.socket);
        }
    }

    /// Accepts connections until the run has ended.
    fn accept(listener: &UnixListener, shared: &Arc<SharedAnswer>) {
        for stream in listener.incoming() {
            if shared.closing.load(Ordering::SeqCst) {
                return;
            }
            let Ok(stream) = stream else { continue };
            serve(stream, shared);
        }
    }

    /// Answers a connection on a thread of its own, or refuses it if too many are open.
    fn serve(mut stream: UnixStream, shared: &Arc<SharedAnswer>) {
        let bounded = stream.set_read_timeout(Some(TICK)).and_then(|()| stream.set_write_timeout(Some(TICK)));
        if bounded.is_err() {
            return;
        }
        if shared.open.fetch_add(1, Ordering::SeqCst) >= CONNECTIONS {
            // A client that does not read delays this by at most one TICK.
            let _ = stream.write_all(TOO_MANY);
            shared.open.fetch_sub(1, Ordering::SeqCst);
            return;
        }
        let (of_thread, thread) = (shared.clone(), Builder::new().name("hydra-control".to_owned()));
        let spawned = thread.spawn(move || {
            converse(&mut stream, &of_thread);
            of_thread.open.fetch_sub(1, Ordering::SeqCst);
        });
        if spawned.is_err() {
            shared.open.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Answers a connection line by line.
    fn converse(stream: &mut UnixStream, shared: &SharedAnswer) {
        let mut read = Vec::new();
        while let Some(line) = next_line(stream, &mut read, shared) {
            let answer = (shared.answer)(&line) + "\n";
            // An answer may take long to compute; the timeout is for writing it alone.
            let _ = stream.set_write_timeout(Some(PATIENCE));
            if stream.write_all(answer.as_bytes()).is_err() {
                return;
            }
        }
    }

    /// Returns the next line, or `None` if it does not arrive in time. `read` holds bytes of later lines.
    fn next_line(stream: &mut UnixStream, read: &mut Vec<u8>, shared: &SharedAnswer) -> Option<String> {
        let until = Instant::now() + PATIENCE;
        let mut some = [0; 4096];
        loop {
            if let Some(end) = read.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = read.drain(..=end).collect();
                return Some(String::from_utf8_lossy(&line[..end]).into_owned());
            }
            if read.len() > LINE {
                let _ = stream.write_all(TOO_LONG);
                return None;
            }
            if shared.closing.load(Ordering::SeqCst) || Instant::now() > until {
                return None;
            }
            match stream.read(&mut some) {
                Ok(0) => return None,
                Ok(count) => read.extend_from_slice(&some[..count]),
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return None,
            }
        }
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use crate::control_socket::ask;
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixStream;

    fn echo(dir: &Path) -> (std::path::PathBuf, ControlServer) {
        let socket = dir.join("socket");
        let server = ControlServer::open(&socket, |line| format!("<{line}>")).unwrap();
        (socket, server)
    }

    #[test]
    fn lines_are_answered_in_their_order_for_the_owner_alone_and_until_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let (socket, server) = echo(dir.path());
        assert_eq!(socket.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        let mut stream = UnixStream::connect(&socket).unwrap();
        stream.write_all(b"one\ntwo\nth").unwrap();
        stream.write_all(b"ree\n").unwrap();
        let answers: Vec<String> = BufReader::new(&stream).lines().take(3).map(Result::unwrap).collect();
        assert_eq!(answers, ["<one>", "<two>", "<three>"]);
        drop(server);
        assert!(!socket.exists() && ask(&socket, "one").is_err());
        // A file that a killed run left is replaced.
        std::fs::write(&socket, "").unwrap();
        let (socket, _server) = echo(dir.path());
        assert_eq!(ask(&socket, "again").unwrap(), "<again>");
    }

    #[test]
    fn a_line_without_end_and_a_crowd_are_turned_away() {
        let dir = tempfile::tempdir().unwrap();
        let (socket, _server) = echo(dir.path());
        let mut stream = UnixStream::connect(&socket).unwrap();
        // The server may close it during the write.
        let _ = stream.write_all(&vec![b'x'; LINE + 8192]);
        let mut answer = String::new();
        let _ = BufReader::new(stream).read_line(&mut answer);
        assert!(answer.is_empty() || answer.contains("too long"), "{answer}");
        let crowd: Vec<UnixStream> = (0..300).map(|_| UnixStream::connect(&socket).unwrap()).collect();
        // The last one is accepted after all others.
        let mut answer = String::new();
        BufReader::new(crowd.last().unwrap()).read_line(&mut answer).unwrap();
        assert!(answer.contains("too many connections"), "{answer}");
        drop(crowd);
        let mut tries = (0..).map(|_| ask(&socket, "still").unwrap_or_default());
        assert!(tries.any(|answer| answer == "<still>"));
    }
}
