//! `hydra serve`: the page of runs, whatever state they are in.

use crate::dashboard::{Server, Shown};
use crate::session::Environment;
use crate::settings::address;
use crate::terminal::{Outcome, tell};
use anyhow::Result;
use clap::Args;
use std::net::SocketAddr;
use std::path::PathBuf;

/// `hydra serve`.
#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// Run directories, or directories of runs
    #[arg(value_name = "DIR", default_value = "runs")]
    pub(crate) dirs: Vec<PathBuf>,
    /// Listen on PORT, HOST or HOST:PORT; by default on a free port of this machine alone
    ///
    /// On another address than the loopback one, such as 0.0.0.0:8080, whoever reaches that port can read.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:0", value_parser = address)]
    pub(crate) listen: SocketAddr,
}

/// Serves until the program is ended.
pub(crate) fn run(args: &ServeArgs, around: &Environment) -> Result<Outcome> {
    let server = Server::start(args.listen, Shown::new(args.dirs.clone())?)?;
    around.print(&format!("{}\n", server.url()))?;
    server.warning().iter().for_each(|warning| tell(warning));
    tell("note: whoever has this address can change runs that go on; Ctrl-C ends the page, and no run");
    server.wait();
    Ok(Outcome::Done)
}
