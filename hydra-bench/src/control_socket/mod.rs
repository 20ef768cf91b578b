//! The socket of a run: lines of JSON that ask it for something, and its answers.
//! It may touch a socket's file and threads of its own.
//! It never knows what a line means, and never keeps a run from going on: lines and connections are bounded.

mod client;
mod server;

pub(crate) use client::ask;
pub(crate) use server::Server;
