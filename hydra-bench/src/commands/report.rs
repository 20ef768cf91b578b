//! `hydra report`: the leaderboard and the plots of a run, finished or not.

use anyhow::{Context, Result};
use clap::Args;
use hydra_run::plots::html_report::HtmlReport;
use hydra_run::run_dir::{
    Journal, Merged, PAGE, Report, SPEC, is_taken, is_unfinished, read_report, samples, write_in,
};
use hydra_run::session::Environment;
use hydra_run::terminal::{Outcome, Usage, tell, time};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// `hydra report`.
#[derive(Debug, Args)]
pub(crate) struct ReportArgs {
    /// Directories of finished, unfinished or killed runs; several, such as the parts of a grid (--part), are ranked on one
    /// leaderboard
    #[arg(value_name = "DIR", required = true)]
    pub(crate) dirs: Vec<PathBuf>,
    /// Print the report as JSON, and nothing else, on standard output
    #[arg(long)]
    pub(crate) json: bool,
    /// Draw losses.svg, leaderboard.svg, memory.svg and report.html of an unfinished run into DIR
    ///
    /// A finished run has drawn them itself, with its schedule; they are not changed.
    #[arg(long)]
    pub(crate) plots: bool,
}

/// Prints the report of a run, or the results so far of an unfinished run; the tasks of several runs are ranked together.
pub(crate) fn run(args: &ReportArgs, around: &Environment) -> Result<Outcome> {
    let [dir] = args.dirs.as_slice() else {
        if args.plots {
            let got = args.dirs.len();
            return Err(
                Usage::new(format!("--plots draws into one run directory, got {got}; pass one")).into()
            );
        }
        let merged = Merged::read(&args.dirs)?;
        around.print(&if args.json { merged.to_json()? } else { merged.render() })?;
        return Ok(Outcome::Done);
    };
    show(dir, args.json, args.plots, around)
}

/// Prints the report of one run, or its results so far, and draws its plots if `plots` is true.
pub(crate) fn show(dir: &Path, json: bool, plots: bool, around: &Environment) -> Result<Outcome> {
    if is_unfinished(dir) {
        return so_far(dir, json, plots, around);
    }
    let text = read_report(dir)?;
    let report =
        Report::parse(&text).with_context(|| format!("the report in `{}` cannot be shown", dir.display()))?;
    let readable = || -> Result<String> {
        let journal = Journal::read(dir)?;
        tell_unread(&journal);
        Ok(format!("{}{}", report.render(), samples(&journal)))
    };
    around.print(&if json { text } else { readable()? })?;
    if plots {
        tell("note: the run is finished and has drawn its plots; nothing is drawn");
    }
    Ok(Outcome::Done)
}

/// Prints a note if lines of the journal could not be read.
fn tell_unread(journal: &Journal) {
    if let Some(unread) = journal.unread() {
        tell(&format!("note: {unread}"));
    }
}

fn so_far(dir: &Path, json: bool, plots: bool, around: &Environment) -> Result<Outcome> {
    let (running, journal) = (is_taken(dir), Journal::read(dir)?);
    tell_unread(&journal);
    let tasks = journal.report(running);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0.0, |t| t.as_secs_f64());
    let ending = ending(&journal, &tasks, running, now, dir);
    let as_json = json.then(|| journal.to_json(running)).transpose()?;
    let report = Report::so_far(tasks)?;
    let failures: String = report.failures().iter().map(|failure| format!("{failure}\n")).collect();
    let text = format!("{}{}\n{failures}{ending}", report.ranking(), samples(&journal));
    around.print(as_json.as_ref().unwrap_or(&text))?;
    match plots {
        true if running && journal.has_ended() => {
            tell("note: every task has ended and the run is drawing its plots; nothing is drawn");
        }
        true => {
            let drawn = draw(dir, &journal, &report, &text)?;
            if !json {
                around.print(&format!("drawn into {}: {}\n", dir.display(), drawn.join(", ")))?;
            }
        }
        false => {}
    }
    Ok(Outcome::Done)
}

/// Draws the plots so far of an unfinished run and returns the names of the files; `summary` is the text on the terminal.
fn draw(dir: &Path, journal: &Journal, report: &Report, summary: &str) -> Result<Vec<&'static str>> {
    let plots = report.plots(journal);
    let html = HtmlReport {
        title: &format!("Hydra: {} tasks in {}, so far", report.task_count(), dir.display()),
        summary,
        plots: &plots,
        schedule: None,
        spec: &fs::read_to_string(dir.join(SPEC)).unwrap_or_default(),
    };
    let html = html.draw()?;
    let files = plots.iter().map(|plot| (plot.file, &plot.svg)).chain([(PAGE, &html)]);
    // A run that has ended in the meantime has drawn its own plots, with more in them.
    let files = files.filter(|_| is_unfinished(dir));
    files.map(|(name, text)| write_in(dir, name, text).map(|()| name)).collect()
}

/// The state of the run as a sentence.
fn ending(journal: &Journal, tasks: &[Value], running: bool, now: f64, dir: &Path) -> String {
    let states = Journal::states(tasks);
    let counts: Vec<String> = states.iter().map(|(state, count)| format!("{count} {state}")).collect();
    let (counts, dir) = (counts.join(", "), dir.display());
    let age = journal.time.map(|at| format!("{} ago, ", time(now - at))).unwrap_or_default();
    let last = match journal.at_s {
        at_s if at_s > 0.0 => format!("the last event was {age}after {} of running", time(at_s)),
        _ => "there was no event yet".to_owned(),
    };
    match running {
        true => format!("the run is in progress: {counts}; {last}\n"),
        false => format!(
            "the run is unfinished and not in progress: {counts}; {last}\ncontinue it with: hydra resume {dir}\n"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn how_the_run_stands_is_said() {
        let tasks = [json!({ "state": "done" }), json!({ "state": "running" }), json!({ "state": "done" })];
        let journal = Journal { at_s: 90.0, time: Some(1000.0), ..Journal::default() };
        let says = |running| ending(&journal, &tasks, running, 1003.0, Path::new("here"));
        assert_eq!(
            says(true),
            "the run is in progress: 2 done, 1 running; the last event was 3s ago, after 1m30s of running\n"
        );
        assert!(says(false).ends_with("\ncontinue it with: hydra resume here\n"));
        assert!(
            ending(&Journal::default(), &[], true, 0.0, Path::new("")).contains("there was no event yet")
        );
    }
}
