//! `hydra serve`: the dashboard of runs in any state.

use super::generate::{self, GenerateArgs};
use anyhow::{Context as _, Result};
use clap::{Args, Parser};
use hydra_run::control::Control;
use hydra_run::dashboard::{Server, ShownRuns};
use hydra_run::session::Environment;
use hydra_run::settings::address;
use hydra_run::terminal::{Outcome, Show, quietly, tell};
use serde_json::Value;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

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
    let texts = Box::new(text_of);
    let server = Server::start(args.listen, ShownRuns::new(args.dirs.clone())?, Some(texts))?;
    around.print(&format!("{}\n", server.url()))?;
    server.warning().iter().for_each(|warning| tell(warning));
    tell(
        "note: everyone with this address can control runs in progress; Ctrl-C ends the dashboard, not the runs",
    );
    server.wait();
    Ok(Outcome::Done)
}

/// `hydra generate` as a program of its own.
#[derive(Debug, Parser)]
struct Generating {
    #[command(flatten)]
    args: GenerateArgs,
}

/// Continues a prompt with the model in a directory, as `hydra generate` does.
fn text_of(model: &Path, prompt: &Value, most: u64) -> Result<Value> {
    let prompts = tempfile::Builder::new().suffix(".jsonl").tempfile()?;
    fs::write(prompts.path(), format!("{prompt}\n"))?;
    let (model, prompts, most) = (model.as_os_str(), prompts.path().as_os_str(), most.to_string());
    let line = ["generate", "--json", "--model"].map(AsRef::as_ref).into_iter();
    let line = line.chain([model, "--prompts".as_ref(), prompts, "--max-new-tokens".as_ref(), most.as_ref()]);
    let Generating { args } = Generating::try_parse_from(line)?;
    let control = Control::new(None);
    let around = Environment::look(Show::Nothing).inside(control.clone());
    quietly(|| generate::run(args, &around))?;
    let output = control.state().output.clone();
    output
        .lines()
        .next()
        .map(serde_json::from_str)
        .context("the model generated no text")?
        .map_err(Into::into)
}
