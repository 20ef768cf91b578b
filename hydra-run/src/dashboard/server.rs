//! The HTTP server: one thread, which ends when the [`Server`] is dropped.

use super::connections::{Connection, Connections};
use super::guard::Token;
use super::routes::{Generate, Site, router};
use super::runs::{Runs, ShownRuns};
use anyhow::{Context, Result};
use axum::{Extension, Router};
use futures_util::future::select;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::net::{SocketAddr, TcpListener};
use std::pin::pin;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;

/// The time limit to receive the head of a request.
const PATIENCE: Duration = Duration::from_secs(10);
/// The maximum size of the head of a request and of the read buffer, in bytes.
const BUFFER: usize = 1 << 16;
/// The number of threads that read files.
const READERS: usize = 4;

/// A running server of the dashboard.
pub struct Server {
    address: SocketAddr,
    token: String,
    end: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Starts to listen on an address and to show these runs, whose models continue prompts by `generate`, if it is given.
    pub fn start(address: SocketAddr, shown: ShownRuns, generate: Option<Generate>) -> Result<Self> {
        let listening = || format!("the dashboard cannot listen on {address}: give another address");
        let listener = TcpListener::bind(address).with_context(listening)?;
        listener.set_nonblocking(true).with_context(listening)?;
        let address = listener.local_addr().with_context(listening)?;
        let key = Token::new().context("cannot create the token of the dashboard")?;
        let token = key.text().to_owned();
        let runtime = Builder::new_current_thread().enable_all().max_blocking_threads(READERS).build();
        let runtime = runtime.context("cannot start the thread of the dashboard")?;
        let site = Arc::new(Site::new(Runs::new(shown), key, generate));
        let (end, ended) = oneshot::channel();
        let thread = std::thread::Builder::new().name("dashboard".to_owned());
        let thread = thread.spawn(move || serve(&runtime, listener, site, ended));
        let thread = thread.context("cannot start the thread of the dashboard")?;
        Ok(Self { address, token, end: Some(end), thread: Some(thread) })
    }

    /// Returns the URL of the dashboard with the token, which authorizes changes to runs.
    pub fn url(&self) -> String {
        let mut address = self.address;
        if address.ip().is_unspecified() {
            // For a browser on this machine.
            address = SocketAddr::from(([127, 0, 0, 1], address.port()));
        }
        format!("http://{address}/#token={}", self.token)
    }

    /// Returns a warning if the dashboard is reachable from other machines.
    pub fn warning(&self) -> Option<String> {
        let address = self.address;
        (!address.ip().is_loopback()).then(|| {
            format!("note: the dashboard listens on {address}: every client that reaches this port can read runs; commands need the token")
        })
    }

    /// Waits until the server ends, which is when the program does.
    pub fn wait(mut self) {
        self.thread.take().into_iter().for_each(|thread| drop(thread.join()));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(end) = self.end.take() {
            // Fails if the thread has already ended.
            let _ = end.send(());
        }
        self.thread.take().into_iter().for_each(|thread| drop(thread.join()));
    }
}

fn serve(runtime: &Runtime, listener: TcpListener, site: Arc<Site>, ended: oneshot::Receiver<()>) {
    runtime.block_on(async {
        let Ok(listener) = tokio::net::TcpListener::from_std(listener) else { return };
        let connections = Connections::default();
        let router = router(site, connections.clone());
        let accepting = async {
            loop {
                match listener.accept().await {
                    Ok((stream, _)) => admit(stream, &router, &connections),
                    // Such as too many open files, until a connection ends.
                    Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
                }
            }
        };
        select(pin!(accepting), ended).await;
    });
}

/// Registers a connection and serves it.
fn admit(stream: TcpStream, router: &Router, connections: &Connections) {
    let (number, connection): (u64, Connection) = connections.open();
    let service = TowerToHyperService::new(router.clone().layer(Extension(connection)));
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(PATIENCE).max_buf_size(BUFFER);
    let connection = http.serve_connection(TokioIo::new(stream), service);
    let registered = connections.clone();
    let task = tokio::spawn(async move {
        // A client that disconnects early is not an error.
        let _ = connection.await;
        registered.close(number);
    });
    connections.set_handle(number, task.abort_handle());
}
