//! `hydra serve`: the dashboard of runs in any state.

use crate::dashboard::{Server, ShownRuns};
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
    /// Run directories, or directories that contain run directories
    #[arg(value_name = "DIR", default_value = "runs")]
    pub(crate) dirs: Vec<PathBuf>,
    /// Listen on PORT, HOST or HOST:PORT; the default is a free port that only this machine can reach
    ///
    /// At an address other than loopback, such as 0.0.0.0:8080, everyone who can reach the port can read the dashboard.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:0", value_parser = address)]
    pub(crate) listen: SocketAddr,
}

/// Serves until the program is interrupted.
pub(crate) fn run(args: &ServeArgs, around: &Environment) -> Result<Outcome> {
    let server = Server::start(args.listen, ShownRuns::new(args.dirs.clone())?)?;
    around.print(&format!("{}\n", server.url()))?;
    server.warning().iter().for_each(|warning| tell(warning));
    tell(
        "note: everyone with this address can control runs in progress; Ctrl-C ends the dashboard, not the runs",
    );
    server.wait();
    Ok(Outcome::Done)
}
