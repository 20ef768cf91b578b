//! `hydra man`: the manual pages.

use anyhow::{Context, Result};
use clap::{Args, Command};
use clap_mangen::Man;
use hydra_run::run_dir::could_not;
use hydra_run::terminal::{Outcome, print};
use std::fs;
use std::path::PathBuf;

/// `hydra man`.
#[derive(Debug, Args)]
pub(crate) struct ManArgs {
    /// Directory for hydra.1 and one page for each command, created if it is missing; or - to print hydra.1
    #[arg(value_name = "DIR|-")]
    pub(crate) to: PathBuf,
}

/// Writes the manual pages of this command line, and replaces existing ones.
pub(crate) fn run(args: &ManArgs, line: Command) -> Result<Outcome> {
    if args.to.as_os_str() == "-" {
        let mut page = Vec::new();
        // The files have no page for `help` either.
        let line = line.disable_help_subcommand(true);
        Man::new(line).render(&mut page).context("the manual page could not be rendered")?;
        print(&String::from_utf8(page).context("the manual page is not UTF-8")?)?;
        return Ok(Outcome::Done);
    }
    fs::create_dir_all(&args.to).with_context(|| could_not(&args.to, "created"))?;
    clap_mangen::generate_to(line, &args.to).with_context(|| could_not(&args.to, "written into"))?;
    Ok(Outcome::Done)
}
