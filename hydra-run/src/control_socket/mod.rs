//! The control socket of a run: commands as lines of JSON, and their answers.
//! It may touch a socket's file and threads of its own.
//! It never interprets a line, and never blocks a run: the sizes of lines and the number of connections are bounded.

mod client;
mod server;

pub use client::ask;
pub(crate) use server::ControlServer;
