//! `hydra report`: the leaderboard of a run, as far as it has come, and its plots so far.

use crate::plots::page::Page;
use crate::run_dir::{Journal, Merged, PAGE, Report, SPEC, is_taken, is_unfinished, read_report, write_in};
use crate::session::Environment;
use crate::terminal::{Outcome, Usage, tell, time};
use anyhow::{Context, Result};
use clap::Args;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// `hydra report`.
#[derive(Debug, Args)]
pub(crate) struct ReportArgs {
    /// A run directory, also of a run that is under way or was killed; of several, such as the parts of a grid (--part), one
    /// leaderboard
    #[arg(value_name = "DIR", required = true)]
    pub(crate) dirs: Vec<PathBuf>,
    /// Print the report as JSON, alone on standard output
    #[arg(long)]
    pub(crate) json: bool,
    /// Draw losses.svg, leaderboard.svg, memory.svg and report.html into DIR, of a run that has not ended
    ///
    /// A run that has ended has drawn them itself, with its schedule, and they stay as they are.
    #[arg(long)]
    pub(crate) plots: bool,
}

/// Prints the report of a run directory, or what there is of a run that has none yet; of several, their tasks together.
pub(crate) fn run(args: &ReportArgs, around: &Environment) -> Result<Outcome> {
    let [dir] = args.dirs.as_slice() else {
        if args.plots {
            return Err(Usage::new("--plots draws into one run directory: give one").into());
        }
        let merged = Merged::read(&args.dirs)?;
        around.print(&if args.json { merged.to_json()? } else { merged.render() })?;
        return Ok(Outcome::Done);
    };
    show(dir, args.json, args.plots, around)
}

/// Prints the report of one run, or what there is of it, and draws its plots so far if they are asked for.
pub(crate) fn show(dir: &Path, json: bool, plots: bool, around: &Environment) -> Result<Outcome> {
    if is_unfinished(dir) {
        return so_far(dir, json, plots, around);
    }
    let text = read_report(dir)?;
    let report =
        Report::parse(&text).with_context(|| format!("the report in `{}` cannot be shown", dir.display()))?;
    around.print(&if json { text } else { report.render() })?;
    if plots {
        tell("note: the run has ended, and has drawn its pictures itself: nothing is drawn");
    }
    Ok(Outcome::Done)
}

fn so_far(dir: &Path, json: bool, plots: bool, around: &Environment) -> Result<Outcome> {
    let (running, journal) = (is_taken(dir), Journal::read(dir)?);
    let tasks = journal.report(running);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0.0, |t| t.as_secs_f64());
    let ending = ending(&journal, &tasks, running, now, dir);
    let as_json = json.then(|| journal.to_json(running)).transpose()?;
    let report = Report::so_far(tasks)?;
    let failures: String = report.failures().iter().map(|failure| format!("{failure}\n")).collect();
    let text = format!("{}\n{failures}{ending}", report.ranking());
    around.print(as_json.as_ref().unwrap_or(&text))?;
    match plots {
        true if running && journal.has_ended() => {
            tell("note: every task has ended, and the run draws its pictures itself: nothing is drawn");
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

/// Draws a run that has no report yet, as far as it has come, and returns the files; `summary` is what the terminal shows.
fn draw(dir: &Path, journal: &Journal, report: &Report, summary: &str) -> Result<Vec<&'static str>> {
    let plots = report.plots(journal);
    let page = Page {
        title: &format!("Hydra: {} tasks in {}, so far", report.len(), dir.display()),
        summary,
        plots: &plots,
        schedule: None,
        spec: &fs::read_to_string(dir.join(SPEC)).unwrap_or_default(),
    };
    let page = page.draw()?;
    let files = plots.iter().map(|plot| (plot.file, &plot.svg)).chain([(PAGE, &page)]);
    // A run that has ended meanwhile has drawn its own, which say more.
    let files = files.filter(|_| is_unfinished(dir));
    files.map(|(name, text)| write_in(dir, name, text).map(|()| name)).collect()
}

/// The state of the run in words.
fn ending(journal: &Journal, tasks: &[Value], running: bool, now: f64, dir: &Path) -> String {
    let states = Journal::states(tasks);
    let counts: Vec<String> = states.iter().map(|(state, count)| format!("{count} {state}")).collect();
    let (counts, dir) = (counts.join(", "), dir.display());
    let age = journal.time.map(|at| format!("{} ago, ", time(now - at))).unwrap_or_default();
    let last = match journal.at_s {
        at_s if at_s > 0.0 => format!("the last event was {age}after {} of running", time(at_s)),
        _ => "nothing has happened yet".to_owned(),
    };
    match running {
        true => format!("the run is under way: {counts}; {last}\n"),
        false => format!(
            "the run has not ended, and is not running: {counts}; {last}\ngo on with: hydra resume {dir}\n"
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
            "the run is under way: 2 done, 1 running; the last event was 3s ago, after 1m30s of running\n"
        );
        assert!(says(false).ends_with("\ngo on with: hydra resume here\n"));
        assert!(ending(&Journal::default(), &[], true, 0.0, Path::new("")).contains("nothing has happened"));
    }
}
