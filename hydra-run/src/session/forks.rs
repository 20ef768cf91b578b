//! Tasks added to a run: from the start, or from saved states of other tasks.

use crate::run_dir::{PlannedTask, RunSpec};
use crate::session::tasks::TaskMaker;
use anyhow::{Context, Result};
use hydra_engine::{Answer, Checkpoint, Command, RunControl};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// A task and a number of trained minibatches, which identify a state.
pub(crate) type StateKey = (String, usize);

/// Adds tasks to a run. A fork waits until the state that it starts from is saved.
pub(crate) struct Forks {
    pub(crate) spec: RunSpec,
    pub(crate) maker: TaskMaker,
    control: RunControl,
    /// The tasks of the run.
    begun: BTreeSet<String>,
    /// States that are saved or being saved.
    states: BTreeMap<StateKey, SavedState>,
    /// States that tasks started from. They may still be read, also after a kill and resume.
    used: BTreeSet<StateKey>,
    /// States from which tasks may still start.
    held: BTreeSet<StateKey>,
    /// Forks that wait for their parent's state.
    waiting: Vec<PlannedTask>,
}

struct SavedState {
    file: PathBuf,
    saved: bool,
}

impl Forks {
    /// Returns the forks of a run that started with these tasks.
    pub(crate) fn new<'a>(
        spec: RunSpec,
        maker: TaskMaker,
        control: RunControl,
        begun: impl Iterator<Item = &'a PlannedTask> + Clone,
    ) -> Self {
        let used = begun.clone().filter_map(PlannedTask::parent_state).collect();
        let begun = begun.map(|planned| planned.configuration.name.clone()).collect();
        let (states, held, waiting) = Default::default();
        Self { spec, maker, control, begun, states, used, held, waiting }
    }

    /// Requests the state of a fork's parent, if the parent is in the run. The fork is added once [the state is
    /// saved](Self::add_ready).
    pub(crate) fn request(&mut self, fork: PlannedTask) -> Result<()> {
        if let Some((parent, at)) = fork.parent_state().filter(|(parent, _)| self.begun.contains(parent)) {
            self.save(&parent, at)?;
        }
        self.waiting.push(fork);
        Ok(())
    }

    /// Requests that the state of a task after `at` minibatches be saved. Returns the engine's answer, or `None` if the state is
    /// saved or requested already.
    pub(crate) fn save(&mut self, task: &str, at: usize) -> Result<Option<Answer>> {
        let key = (task.to_owned(), at);
        if self.states.contains_key(&key) {
            return Ok(None);
        }
        let file = self.maker.state_file(task, at)?;
        let saved = file.exists();
        let save = || Command::Save { task: task.to_owned(), at: Some(at), file: file.clone() };
        let answer = (!saved).then(|| self.control.send(save()));
        self.states.insert(key, SavedState { file, saved });
        Ok(answer)
    }

    /// Returns true if a state is saved.
    pub(crate) fn has(&self, task: &str, at: usize) -> Result<bool> {
        let known = self.states.get(&(task.to_owned(), at)).map(|state| state.saved);
        Ok(known.unwrap_or(self.maker.state_file(task, at)?.exists()))
    }

    /// Forgets a state that could not be saved.
    pub(crate) fn forget(&mut self, task: &str, at: usize) {
        self.states.remove(&(task.to_owned(), at));
    }

    /// Records that a state was saved, and adds the forks that wait for it.
    pub(crate) fn saved(&mut self, task: &str, at: usize) -> Result<()> {
        let key = (task.to_owned(), at);
        self.states.get_mut(&key).into_iter().for_each(|state| state.saved = true);
        self.add_ready()
    }

    /// Adds the forks whose parent's state is saved.
    pub(crate) fn add_ready(&mut self) -> Result<()> {
        let states = &mut self.states;
        let ready = |fork: &mut PlannedTask| {
            fork.parent_state().is_some_and(|of| states.get(&of).is_some_and(|s| s.saved))
        };
        let ready: Vec<PlannedTask> = self.waiting.extract_if(.., ready).collect();
        for fork in ready {
            self.used.extend(fork.parent_state());
            self.add(&fork)?;
        }
        Ok(())
    }

    /// Adds a task now: from the start, or from a saved state.
    pub(crate) fn add(&mut self, planned: &PlannedTask) -> Result<()> {
        let (mut task, like) = self.task_like(planned)?;
        if let Some((parent, at)) = planned.parent_state() {
            let state = Checkpoint::open(self.maker.state_file(&parent, at)?)?;
            let weights_only = planned.origin.as_ref().is_some_and(|origin| origin.weights_only);
            task = if weights_only { task.weights_from(state) } else { task.fork_from(state) };
        }
        drop(self.control.send(Command::Submit { task: Box::new(task), like }));
        let own = &planned.configuration.name;
        self.begun.insert(own.clone());
        self.save_held_of(|task| task == own)
    }

    /// Requests the states of matching tasks from which others will or may start.
    fn save_held_of(&mut self, is_it: impl Fn(&str) -> bool) -> Result<()> {
        let all = self.awaited().into_iter().chain(self.held.iter().cloned());
        let of = all.filter(|(task, _)| self.begun.contains(task) && is_it(task));
        let of: BTreeSet<StateKey> = of.collect();
        of.into_iter().try_for_each(|(task, at)| self.save(&task, at).map(drop))
    }

    /// Returns a task without its initial state, and the name of a task with the same plan.
    pub(crate) fn task_like(&mut self, planned: &PlannedTask) -> Result<(hydra_engine::TrainTask, String)> {
        let one = &planned.configuration;
        let like = self.maker.like(one, &self.maker.training(&self.spec, one)?);
        let like = like.with_context(|| format!("no measured task has the shape of `{}`", one.name))?;
        Ok((self.maker.task(&self.spec, planned)?, like))
    }

    /// Returns the states that forks wait for.
    pub(crate) fn awaited(&self) -> BTreeSet<StateKey> {
        self.waiting.iter().filter_map(PlannedTask::parent_state).collect()
    }

    /// Removes and returns the forks that wait for states which a task will never reach.
    pub(crate) fn lose(&mut self, task: &str) -> Vec<PlannedTask> {
        let states = &self.states;
        let lost = |fork: &mut PlannedTask| {
            let key = fork.parent_state().filter(|(parent, _)| parent == task);
            key.is_some_and(|of| !states.get(&of).is_some_and(|state| state.saved))
        };
        self.waiting.extract_if(.., lost).collect()
    }

    /// Requests the states from which tasks may still start, before their tasks train past them, and removes states that are no
    /// longer used.
    pub(crate) fn hold(&mut self, held: BTreeSet<StateKey>) -> Result<()> {
        self.held = held;
        self.save_held_of(|_| true)?;
        let (awaited, used, held) = (self.awaited(), &self.used, &self.held);
        let is_needed = |of: &StateKey| used.contains(of) || held.contains(of) || awaited.contains(of);
        let gone = self.states.extract_if(.., |of, state| state.saved && !is_needed(of));
        // A leftover file does no harm.
        gone.for_each(|(_, state)| drop(std::fs::remove_file(state.file)));
        Ok(())
    }
}
