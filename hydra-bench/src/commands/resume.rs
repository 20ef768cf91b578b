//! `hydra resume`: continues an interrupted run.

use crate::commands::report;
use anyhow::{Result, bail};
use clap::Args;
use hydra_engine::Checkpoint;
use hydra_run::run_dir::{REPORT, Report, RunDir, RunSpec, read_report};
use hydra_run::session::watching::Trackers;
use hydra_run::session::{Environment, run};
use hydra_run::settings::{CheckpointSettings, DeviceSettings, ResultSettings, flags::GivenFlags};
use hydra_run::terminal::{Outcome, tell};
use std::path::PathBuf;

/// `hydra resume`.
#[derive(Debug, Args)]
pub(crate) struct ResumeArgs {
    /// The run directory of an interrupted run
    #[arg(value_name = "DIR")]
    pub(crate) dir: PathBuf,
    #[command(flatten)]
    pub(crate) devices: GivenFlags<DeviceSettings>,
    #[command(flatten)]
    pub(crate) checkpoints: CheckpointSettings,
    #[command(flatten)]
    pub(crate) results: ResultSettings,
}

/// Continues the run from the checkpoints in its directory.
pub(crate) fn run(args: &ResumeArgs, around: &Environment) -> Result<Outcome> {
    args.results.record.as_deref().map_or(Ok(()), run::check_record)?;
    let dir = RunDir::resume(&args.dir)?;
    let around = &around.planning();
    let mut spec = RunSpec::resume(dir.path(), &args.devices, &around.machine)?;
    spec = spec.checkpointed(args.checkpoints);
    if let Some(file) = &args.results.record {
        run::check_record_replaces_nothing(file, &spec)?;
    }
    let mut left = left(&dir, &spec)?;
    if left.new.len() == spec.grid_in(dir.path())?.len() && was_trained(&dir, &spec)? {
        // The run wrote no checkpoints (`--checkpoint-every never`) and is finished.
        left = Left { finished: left.new.len(), new: Vec::new(), ..left };
    }
    let note = match left.gone_from(&dir) {
        Some(gone) if left.is_nothing() => bail!(gone),
        Some(gone) => format!("note: {}\nnote: {gone}", left.shown()),
        None => format!("note: {}", left.shown()),
    };
    let searched = spec.search_in(dir.path())?.is_some_and(|search| search.outcome().is_some());
    if searched && dir.file(REPORT).is_file() {
        tell("note: nothing is left to do: the search is finished");
        Trackers::begin(dir.path(), &args.results.watching)?.end();
        return report::show(&args.dir, args.results.json, false, around);
    }
    if left.is_nothing() && dir.file(REPORT).is_file() {
        tell(&note);
        args.results.record.as_deref().into_iter().for_each(run::note_unrecorded);
        around.control.iter().for_each(|control| control.in_directory(dir.path()));
        Trackers::begin(dir.path(), &args.results.watching)?.end();
        return report::show(&args.dir, args.results.json, false, around);
    }
    run::run_in(dir, &mut spec, &args.results, Some(&note), around)
}

/// Returns true if, by the report, every task was trained to its end, and all models exist.
fn was_trained(dir: &RunDir, spec: &RunSpec) -> Result<bool> {
    for configuration in spec.grid_in(dir.path())? {
        if spec.save.keep_best.is_none() && !dir.model_dir(&configuration.name)?.is_dir() {
            return Ok(false);
        }
    }
    let report = read_report(dir.path()).and_then(|text| Report::parse(&text));
    Ok(report.is_ok_and(|report| report.all_done()))
}

/// The largest number of tasks that a note names.
const NAMES: usize = 8;

/// The progress of a run's tasks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Left {
    finished: usize,
    begun: usize,
    /// Unfinished tasks without a checkpoint.
    new: Vec<String>,
    /// Finished tasks whose models no longer exist.
    gone: Vec<String>,
}

fn left(dir: &RunDir, spec: &RunSpec) -> Result<Left> {
    let mut left = Left::default();
    for task in spec.tasks_in(dir.path())? {
        let name = task.configuration.name;
        let file = dir.checkpoint_file(&name)?;
        let written = dir.model_dir(&name)?.is_dir();
        // A task that ended at the minibatch of its fork has no checkpoint.
        if task.ends == Some(0) || task.ends.is_some() && written && !file.exists() {
            left.finished += 1;
            continue;
        }
        if !file.exists() {
            left.new.push(name);
            continue;
        }
        let checkpoint = Checkpoint::open(&file)?;
        let ended = written && task.ends.is_some_and(|ends| checkpoint.step() >= ends);
        match checkpoint.is_finished() {
            true => {
                // A run with `--keep-best` deletes models itself.
                if !written && spec.save.keep_best.is_none() {
                    left.gone.push(name);
                }
                left.finished += 1;
            }
            false if ended => left.finished += 1,
            false => left.begun += 1,
        }
    }
    Ok(left)
}

impl Left {
    fn is_nothing(&self) -> bool {
        self.begun == 0 && self.new.is_empty()
    }

    /// An error about missing models, if any, with a remedy. The checkpoint of a finished task has its results, but not its model.
    fn gone_from(&self, dir: &RunDir) -> Option<String> {
        let names: Vec<String> = self.gone.iter().map(|name| format!("`{name}`")).collect();
        let (dir, all) = (dir.path().display(), names.join(", "));
        let says = format!(
            "these tasks are finished, and their models are missing from `{dir}/models`: {all}; to train them again, delete \
             their files in `{dir}/checkpoints` and run: hydra resume {dir}"
        );
        (!names.is_empty()).then_some(says)
    }

    fn shown(&self) -> String {
        if self.is_nothing() {
            return "nothing is left to do: every task is finished".to_owned();
        }
        let new = format!("from the start ({})", self.new_names());
        let counts = [(self.begun, "from a checkpoint"), (self.new.len(), &new), (self.finished, "finished")];
        let some = counts.into_iter().filter(|(count, _)| *count > 0);
        let shown: Vec<String> = some.map(|(count, how)| format!("{count} {how}")).collect();
        format!("resuming tasks: {}", shown.join(", "))
    }

    /// The names of the tasks that start over, at most the first [`NAMES`].
    fn new_names(&self) -> String {
        let names: Vec<String> = self.new.iter().take(NAMES).map(|name| format!("`{name}`")).collect();
        match self.new.len().saturating_sub(NAMES) {
            0 => names.join(", "),
            more => format!("{} and {more} more", names.join(", ")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_is_counted() {
        let left = Left { finished: 9, begun: 2, ..Left::default() };
        assert_eq!(left.shown(), "resuming tasks: 2 from a checkpoint, 9 finished");
        assert!(Left { begun: 0, ..left.clone() }.shown().starts_with("nothing is left"));
        let new = |count: usize| {
            Left { new: (1..=count).map(|n| format!("t{n}")).collect(), ..left.clone() }.shown()
        };
        assert!(new(2).contains("checkpoint, 2 from the start (`t1`, `t2`), 9 finished"), "{}", new(2));
        assert!(new(8).contains("`t7`, `t8`), 9"), "{}", new(8));
        assert!(
            new(60).contains("60 from the start (`t1`, ") && new(60).contains("`t8` and 52 more)"),
            "{}",
            new(60)
        );
    }
}
