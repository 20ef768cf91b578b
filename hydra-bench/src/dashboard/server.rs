//! The server: one thread that listens, and ends when nobody holds it any more.

use super::connections::{Connection, Connections};
use super::guard::Token;
use super::routes::{Site, router};
use super::runs::{Runs, Shown};
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

/// How long the head of a request may take to come.
const PATIENCE: Duration = Duration::from_secs(10);
/// The most bytes of a head, and of what is read ahead.
const BUFFER: usize = 1 << 16;
/// The threads that read files.
const READERS: usize = 4;

/// A server of runs.
pub(crate) struct Server {
    address: SocketAddr,
    token: String,
    end: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Listens on an address and shows these runs.
    pub(crate) fn start(address: SocketAddr, shown: Shown) -> Result<Self> {
        let listening = || format!("the page cannot listen on {address}: give another address to --serve");
        let listener = TcpListener::bind(address).with_context(listening)?;
        listener.set_nonblocking(true).with_context(listening)?;
        let address = listener.local_addr().with_context(listening)?;
        let key = Token::new().context("no token could be drawn for the page")?;
        let token = key.text().to_owned();
        let runtime = Builder::new_current_thread().enable_all().max_blocking_threads(READERS).build();
        let runtime = runtime.context("the page's thread could not be begun")?;
        let site = Arc::new(Site::new(Runs::new(shown), key));
        let (end, ended) = oneshot::channel();
        let thread = std::thread::Builder::new().name("page".to_owned());
        let thread = thread.spawn(move || serve(&runtime, listener, site, ended));
        let thread = thread.context("the page's thread could not be begun")?;
        Ok(Self { address, token, end: Some(end), thread: Some(thread) })
    }

    /// The address of the page, with the token: who has it may change runs.
    pub(crate) fn url(&self) -> String {
        let mut address = self.address;
        if address.ip().is_unspecified() {
            // A browser of this machine; others know it by another address.
            let loopback = SocketAddr::from(([127, 0, 0, 1], address.port()));
            address = loopback;
        }
        format!("http://{address}/#token={}", self.token)
    }

    /// What is to be said of who can read, if it is not this machine alone.
    pub(crate) fn warning(&self) -> Option<String> {
        let address = self.address;
        (!address.ip().is_loopback()).then(|| {
            format!("note: the page listens on {address}: whoever reaches that port can read; changing a run needs the token")
        })
    }

    /// Waits until the program ends.
    pub(crate) fn wait(mut self) {
        self.thread.take().into_iter().for_each(|thread| drop(thread.join()));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(end) = self.end.take() {
            // Fails when the thread has ended by itself.
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
                    // Such as too many open files: it passes when a connection ends.
                    Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
                }
            }
        };
        select(pin!(accepting), ended).await;
    });
}

/// Serves a connection in a seat of its own.
fn admit(stream: TcpStream, router: &Router, connections: &Connections) {
    let (number, connection): (u64, Connection) = connections.take();
    let service = TowerToHyperService::new(router.clone().layer(Extension(connection)));
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(PATIENCE).max_buf_size(BUFFER);
    let connection = http.serve_connection(TokioIo::new(stream), service);
    let left = connections.clone();
    let task = tokio::spawn(async move {
        // Whoever goes away in the middle has gone away.
        let _ = connection.await;
        left.leave(number);
    });
    connections.held_by(number, task.abort_handle());
}
