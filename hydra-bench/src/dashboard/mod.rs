//! The page of runs: a server of HTTP that shows run directories while runs are trained and afterwards.
//! It may touch run directories, which it reads, and the socket of a run, to which it hands on what a person asks for.
//! It never decides what is trained, and never writes into a run directory.
//!
//! One thread serves everyone. Whoever reaches the port can read; what changes a run needs the token, and no other site's
//! script is obeyed ([`guard`]). A connection that is slow costs its own seat alone ([`connections`]).

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

pub(crate) use runs::Shown;
pub(crate) use server::Server;
