//! The dashboard: an HTTP server that shows run directories during and after training.
//! It may read run directories, forward commands to the control socket of a run, and ask a model of a run for a text.
//! It never decides what is trained, and never writes into a run directory.
//!
//! One thread serves all connections. Every client that reaches the port can read; requests that change a run need the token,
//! and requests from other sites are refused (`guard`). A slow connection occupies only its own slot (`connections`).

mod assets;
mod connections;
mod curves;
mod events;
mod guard;
mod routes;
mod runs;
mod server;
mod snapshot;
mod socket;

pub use runs::ShownRuns;
pub use server::Server;
