//! The trials of a run with a search, rebuilt from its spec and its log.

use crate::run_dir::directory::SEARCH;
use crate::run_dir::journal::Journal;
use crate::run_dir::naming::TrialNames;
use crate::run_dir::paths::could_not;
use crate::run_dir::schedules::TrialSchedules;
use crate::run_dir::spec::RunSpec;
use crate::settings::Configuration;
use crate::settings::flags::Texts;
use crate::terminal::Usage;
use anyhow::{Context, Result};
use hydra_search::{Action, Report, Search, Spec, TrialId, TrialState};
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::Path;

/// A task of a run to start or to continue.
#[derive(Clone, Debug)]
pub struct PlannedTask {
    pub configuration: Configuration,
    /// Minibatches after which it pauses.
    pub(crate) until: Option<usize>,
    /// True if it must not train further.
    pub(crate) stopped: bool,
    /// Minibatches after which it ends, before its full length.
    pub ends: Option<usize>,
    /// True if its files are removed.
    pub(crate) deleted: bool,
    /// The state of another task that it starts from, if any.
    pub(crate) origin: Option<Origin>,
}

/// The state of another task that a task starts from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Origin {
    /// The other task.
    pub(crate) task: String,
    /// The minibatches trained by then.
    pub(crate) at: usize,
    /// Settings that differ from the other task's, as given by a user.
    pub(crate) changes: Texts,
    /// True if only the weights are taken over, and training starts at the first minibatch.
    pub(crate) weights_only: bool,
}

impl PlannedTask {
    /// Returns the task and the minibatch whose state must be saved for this task.
    pub(crate) fn parent_state(&self) -> Option<(String, usize)> {
        self.origin.as_ref().map(|origin| (origin.task.clone(), origin.at))
    }
}

impl From<Configuration> for PlannedTask {
    fn from(configuration: Configuration) -> Self {
        Self { configuration, until: None, stopped: false, ends: None, deleted: false, origin: None }
    }
}

impl RunSpec {
    /// Returns the search of this spec without any reports, if it has a search.
    pub(crate) fn search(&self) -> Result<Option<Search>, Usage> {
        let Some(spec) = self.search.spec(&self.training)? else { return Ok(None) };
        self.begun(&spec).map(Some)
    }

    fn begun(&self, spec: &Spec) -> Result<Search, Usage> {
        let schedules = TrialSchedules::new(self, spec.steps);
        Search::new(spec, self.model.seed, Box::new(schedules)).map_err(Usage::from_error)
    }

    /// Returns the search after the reports logged in a run directory, if the spec has a search.
    pub fn search_in(&self, dir: &Path) -> Result<Option<Search>> {
        let Some(mut search) = self.search()? else { return Ok(None) };
        let path = dir.join(SEARCH);
        let text = match fs::read_to_string(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
            read => read.with_context(|| could_not(&path, "read"))?,
        };
        // An incomplete last line is dropped; its report is made again.
        let reports: Vec<Report> = text.lines().map_while(|line| serde_json::from_str(line).ok()).collect();
        search
            .replay(&reports)
            .with_context(|| format!("`{}` does not belong to this search", path.display()))?;
        Ok(Some(search))
    }

    /// Returns the configuration of a trial. `names` holds the names of earlier trials, or is empty.
    pub(crate) fn configuration(
        &self,
        search: &Search,
        trial: TrialId,
        names: &mut TrialNames,
    ) -> Result<Configuration, Usage> {
        let view = search.trial(trial).ok_or_else(|| Usage::new(format!("there is no trial {trial}")))?;
        let one = self.search.configuration(trial, view.settings, &self.training, &self.adapters)?;
        let checked = self.training.check_one(&one, self.model.seed);
        checked.map_err(|error| Usage::new(format!("trial {trial} ({}): {error}", view.settings)))?;
        Ok(Configuration { name: names.name(self, search, trial, &one.name), ..one })
    }

    /// Returns the tasks that a search has started.
    pub(crate) fn planned(&self, search: &Search) -> Result<Vec<PlannedTask>, Usage> {
        let mut names = TrialNames::default();
        search
            .trials()
            .filter(|view| view.begun)
            .map(|view| {
                let configuration = self.configuration(search, view.trial, &mut names)?;
                let until = view.until;
                let mut name = |parent| self.configuration(search, parent, &mut names).map(|of| of.name);
                let origin = view.branch.map(|branch| {
                    let (task, changes) = (name(branch.parent)?, Texts::new());
                    Ok::<_, Usage>(Origin { task, at: branch.at, changes, weights_only: false })
                });
                let origin = origin.transpose()?;
                let stopped = matches!(view.standing, TrialState::Stopped | TrialState::Failed);
                let until = self.training.steps.filter(|steps| until < *steps).map(|_| until);
                Ok(PlannedTask { until, stopped, origin, ..PlannedTask::from(configuration) })
            })
            .collect()
    }
}

/// Returns the progress of the search in a run directory: minibatches trained, and minibatches requested so far. The search may
/// request more later. `None` if there is no search, or the spec cannot be read.
pub fn search_progress(dir: &Path, journal: &Journal) -> Option<(usize, usize)> {
    let search = RunSpec::in_dir(dir).ok()?.search_in(dir).ok()??;
    let trained = journal.trained();
    Some((trained, search.work().trained.max(trained)))
}

/// The log of a search: one line per report, synced to disk before the search acts on it.
pub(crate) struct SearchLog(File);

impl SearchLog {
    /// Opens the log in a run directory after its last complete line.
    pub(crate) fn open(dir: &Path) -> Result<Self> {
        let path = dir.join(SEARCH);
        let open = || {
            let mut file = File::options().create(true).append(true).read(true).open(&path)?;
            let text = fs::read(&path)?;
            let whole = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
            file.set_len(whole as u64)?;
            file.flush().map(|()| file)
        };
        open().map(Self).with_context(|| could_not(&path, "written"))
    }

    pub(crate) fn push(&mut self, report: &Report) -> Result<()> {
        let line = serde_json::to_string(report).context("a report could not be written as JSON")?;
        self.0.write_all(format!("{line}\n").as_bytes())?;
        Ok(self.0.sync_data()?)
    }
}

/// Returns the minibatch up to which an action trains its trial.
pub(crate) fn until(action: &Action) -> Option<usize> {
    match action {
        Action::Start { until, .. } | Action::Continue { until, .. } | Action::Fork { until, .. } => {
            Some(*until)
        }
        Action::Stop { .. } => None,
    }
}
