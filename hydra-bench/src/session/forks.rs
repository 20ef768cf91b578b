//! Tasks that are added to a run: from the start, or as others stand when they have been saved.

use crate::run_dir::{Planned, RunSpec};
use crate::session::tasks::TaskMaker;
use anyhow::{Context, Result};
use hydra_engine::{Answer, Checkpoint, Command, RunControl};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// A task, and the minibatches that it has trained.
pub(crate) type Place = (String, usize);

/// Adds tasks to a run. A fork waits until the state that it begins with is saved.
pub(crate) struct Forks {
    pub(crate) spec: RunSpec,
    pub(crate) maker: TaskMaker,
    control: RunControl,
    /// The tasks that the run has.
    begun: BTreeSet<String>,
    /// The states that are saved, or will be, and whether they are.
    states: BTreeMap<Place, State>,
    /// The states with which tasks began: they may read them yet, and do so again where the run goes on after a kill.
    used: BTreeSet<Place>,
    /// The states with which tasks may begin yet.
    held: BTreeSet<Place>,
    /// Forks whose parent's state is not saved yet.
    waiting: Vec<Planned>,
}

struct State {
    file: PathBuf,
    saved: bool,
}

impl Forks {
    /// The forks of a run that has begun with these tasks.
    pub(crate) fn new<'a>(
        spec: RunSpec,
        maker: TaskMaker,
        control: RunControl,
        begun: impl Iterator<Item = &'a Planned> + Clone,
    ) -> Self {
        let used = begun.clone().filter_map(Planned::place).collect();
        let begun = begun.map(|planned| planned.configuration.name.clone()).collect();
        let (states, held, waiting) = Default::default();
        Self { spec, maker, control, begun, states, used, held, waiting }
    }

    /// Has a fork's parent saved, when the run has that. The fork is added [when its state is there](Self::add_ready).
    pub(crate) fn ask(&mut self, fork: Planned) -> Result<()> {
        if let Some((parent, at)) = fork.place().filter(|(parent, _)| self.begun.contains(parent)) {
            self.save(&parent, at)?;
        }
        self.waiting.push(fork);
        Ok(())
    }

    /// Has the state of a task saved that it has after so many minibatches; gives the answer, if that was not done before.
    pub(crate) fn save(&mut self, task: &str, at: usize) -> Result<Option<Answer>> {
        let place = (task.to_owned(), at);
        if self.states.contains_key(&place) {
            return Ok(None);
        }
        let file = self.maker.state_file(task, at)?;
        let saved = file.exists();
        let save = || Command::Save { task: task.to_owned(), at: Some(at), file: file.clone() };
        let answer = (!saved).then(|| self.control.send(save()));
        self.states.insert(place, State { file, saved });
        Ok(answer)
    }

    /// Returns whether a state is saved.
    pub(crate) fn has(&self, task: &str, at: usize) -> Result<bool> {
        let known = self.states.get(&(task.to_owned(), at)).map(|state| state.saved);
        Ok(known.unwrap_or(self.maker.state_file(task, at)?.exists()))
    }

    /// Knows nothing more of a state that could not be saved.
    pub(crate) fn forget(&mut self, task: &str, at: usize) {
        self.states.remove(&(task.to_owned(), at));
    }

    /// A state was saved: adds what waits for it.
    pub(crate) fn saved(&mut self, task: &str, at: usize) -> Result<()> {
        let place = (task.to_owned(), at);
        self.states.get_mut(&place).into_iter().for_each(|state| state.saved = true);
        self.add_ready()
    }

    /// Adds the forks whose parent's state is there.
    pub(crate) fn add_ready(&mut self) -> Result<()> {
        let states = &mut self.states;
        let ready =
            |fork: &mut Planned| fork.place().is_some_and(|of| states.get(&of).is_some_and(|s| s.saved));
        let ready: Vec<Planned> = self.waiting.extract_if(.., ready).collect();
        for fork in ready {
            self.used.extend(fork.place());
            self.add(&fork)?;
        }
        Ok(())
    }

    /// Adds a task now: from the start, or with a state that is there.
    pub(crate) fn add(&mut self, planned: &Planned) -> Result<()> {
        let (mut task, like) = self.task_like(planned)?;
        if let Some((parent, at)) = planned.place() {
            let state = Checkpoint::open(self.maker.state_file(&parent, at)?)?;
            let weights_only = planned.origin.as_ref().is_some_and(|origin| origin.weights_only);
            task = if weights_only { task.weights_from(state) } else { task.fork_from(state) };
        }
        drop(self.control.send(Command::Submit { task: Box::new(task), like }));
        let own = &planned.configuration.name;
        self.begun.insert(own.clone());
        self.save_held_of(|task| task == own)
    }

    /// Has the states of the run's tasks saved with which others begin, or may begin.
    fn save_held_of(&mut self, is_it: impl Fn(&str) -> bool) -> Result<()> {
        let all = self.awaited().into_iter().chain(self.held.iter().cloned());
        let of = all.filter(|(task, _)| self.begun.contains(task) && is_it(task));
        let of: BTreeSet<Place> = of.collect();
        of.into_iter().try_for_each(|(task, at)| self.save(&task, at).map(drop))
    }

    /// A task without what it begins with, and the name of one that has its plan.
    pub(crate) fn task_like(&self, planned: &Planned) -> Result<(hydra_engine::TrainTask, String)> {
        let one = &planned.configuration;
        let like = self.maker.like(one, &self.maker.training(&self.spec, one)?);
        let like = like.with_context(|| format!("no task of the shape of `{}` was measured", one.name))?;
        Ok((self.maker.task(&self.spec, planned)?, like))
    }

    /// The places whose states are waited for.
    pub(crate) fn awaited(&self) -> BTreeSet<Place> {
        self.waiting.iter().filter_map(Planned::place).collect()
    }

    /// Gives up the forks of states of a task that were not saved, for they never will be.
    pub(crate) fn lose(&mut self, task: &str) -> Vec<Planned> {
        let states = &self.states;
        let lost = |fork: &mut Planned| {
            let place = fork.place().filter(|(parent, _)| parent == task);
            place.is_some_and(|of| !states.get(&of).is_some_and(|state| state.saved))
        };
        self.waiting.extract_if(.., lost).collect()
    }

    /// Has those states saved with which tasks may begin yet, before their own tasks pass them; removes those of which nobody
    /// needs anything any more.
    pub(crate) fn hold(&mut self, held: BTreeSet<Place>) -> Result<()> {
        self.held = held;
        self.save_held_of(|_| true)?;
        let (awaited, used, held) = (self.awaited(), &self.used, &self.held);
        let is_needed = |of: &Place| used.contains(of) || held.contains(of) || awaited.contains(of);
        let gone = self.states.extract_if(.., |of, state| state.saved && !is_needed(of));
        // A file that cannot be removed is in nobody's way.
        gone.for_each(|(_, state)| drop(std::fs::remove_file(state.file)));
        Ok(())
    }
}
