//! The trials of a run that searches: as its spec says, and as far as its log says how far they have come.

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
use hydra_search::{Action, Report, Search, Spec, Standing, TrialId};
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::Path;

/// A task of a run, as it begins or goes on.
#[derive(Clone, Debug)]
pub(crate) struct Planned {
    pub(crate) configuration: Configuration,
    /// The minibatches after which it waits to be told to go on.
    pub(crate) until: Option<usize>,
    /// True if it is to train no further.
    pub(crate) stopped: bool,
    /// The minibatches after which it ends before its length.
    pub(crate) ends: Option<usize>,
    /// True if what it has written is removed.
    pub(crate) deleted: bool,
    /// What it begins with, if that is another task's.
    pub(crate) origin: Option<Origin>,
}

/// The state that a task begins with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Origin {
    /// Whose it is.
    pub(crate) task: String,
    /// The minibatches that were trained.
    pub(crate) at: usize,
    /// What its settings are in place of those of that task, where a person gave them.
    pub(crate) changes: Texts,
    /// True if the task has its weights alone, and begins at the first minibatch.
    pub(crate) weights_only: bool,
}

impl Planned {
    /// Where its parent is to be saved, and whose state that is.
    pub(crate) fn place(&self) -> Option<(String, usize)> {
        self.origin.as_ref().map(|origin| (origin.task.clone(), origin.at))
    }
}

impl From<Configuration> for Planned {
    fn from(configuration: Configuration) -> Self {
        Self { configuration, until: None, stopped: false, ends: None, deleted: false, origin: None }
    }
}

impl RunSpec {
    /// The search of this spec before it is told anything, if it has one.
    pub(crate) fn search(&self) -> Result<Option<Search>, Usage> {
        let Some(spec) = self.search.spec(&self.training)? else { return Ok(None) };
        self.begun(&spec).map(Some)
    }

    fn begun(&self, spec: &Spec) -> Result<Search, Usage> {
        let schedules = TrialSchedules::of(self, spec.steps);
        Search::new(spec, self.model.seed, Box::new(schedules)).map_err(Usage::from_error)
    }

    /// The search as far as the log in a run directory says, if it has one.
    pub(crate) fn search_in(&self, dir: &Path) -> Result<Option<Search>> {
        let Some(mut search) = self.search()? else { return Ok(None) };
        let path = dir.join(SEARCH);
        let text = match fs::read_to_string(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
            read => read.with_context(|| could_not(&path, "read"))?,
        };
        // The last line may be half written: then what it says is found again.
        let reports: Vec<Report> = text.lines().map_while(|line| serde_json::from_str(line).ok()).collect();
        search.replay(&reports).with_context(|| format!("`{}` is not of this search", path.display()))?;
        Ok(Some(search))
    }

    /// The configuration of a trial. `names` has the names of the trials before it, or is empty.
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
        Ok(Configuration { name: names.of(self, search, trial, &one.name), ..one })
    }

    /// The tasks of a search as far as it has come: all that were begun.
    pub(crate) fn planned(&self, search: &Search) -> Result<Vec<Planned>, Usage> {
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
                let stopped = matches!(view.standing, Standing::Stopped | Standing::Failed);
                let until = self.training.steps.filter(|steps| until < *steps).map(|_| until);
                Ok(Planned { until, stopped, origin, ..Planned::from(configuration) })
            })
            .collect()
    }
}

/// How far the search in a run directory is: minibatches that are trained, and those that it has asked for so far, by its log;
/// nobody knows yet what else it will ask for. None where nothing is searched, or the spec cannot be read.
pub(crate) fn search_progress(dir: &Path, journal: &Journal) -> Option<(usize, usize)> {
    let search = RunSpec::in_dir(dir).ok()?.search_in(dir).ok()??;
    let trained = journal.trained();
    Some((trained, search.work().trained.max(trained)))
}

/// The log of a search: a line for each report, which is on the disk before anything follows from it.
pub(crate) struct SearchLog(File);

impl SearchLog {
    /// The log in a run directory, behind its last whole line.
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

/// Where an action sends its trial.
pub(crate) fn until(action: &Action) -> Option<usize> {
    match action {
        Action::Start { until, .. } | Action::Continue { until, .. } | Action::Fork { until, .. } => {
            Some(*until)
        }
        Action::Stop { .. } => None,
    }
}
