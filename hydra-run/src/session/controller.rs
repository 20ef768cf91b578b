//! The controller of a run: executes the commands that arrive on its socket, records them, and answers.
//!
//! A command is checked, then sent to the engine, which returns the minibatch at which it takes effect, then recorded on disk
//! with that minibatch. Its consequences, such as a fork that waits for its parent's state, follow from the recorded line,
//! also after a kill.

use crate::run_dir::{CommandLog, PlannedTask, RunCommand, apply};
use crate::session::forks::Forks;
use crate::session::task_table::{TaskRow, TaskTable};
use crate::settings::Configuration;
use crate::settings::flags::Texts;
use crate::terminal::{Usage, tell};
use anyhow::{Context, Result, anyhow, bail, ensure};
use hydra_core::TaskId;
use hydra_engine::{Command, CommandError, Effect, Observer, RunControl, RunEvent, TaskState, fork_obstacle};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The number of attempts to save a task that trains past each requested minibatch.
const TRIES: usize = 100;
/// A placeholder name, which is invalid for a task.
const UNNAMED: &str = "/";
/// How long the answer to a command waits for the task that it starts.
const PATIENCE: Duration = Duration::from_secs(10);

/// Observes a run and controls it. Clones control the same run.
#[derive(Clone)]
pub(crate) struct Controller(Arc<ControllerShared>);

struct ControllerShared {
    control: RunControl,
    state: Mutex<ControllerState>,
    /// Serializes commands. `state` is not locked meanwhile, because the run's events update it.
    command: Mutex<()>,
    /// Notified when tasks were added, or the run stops.
    changed: Condvar,
}

#[derive(Default)]
struct ControllerState {
    task_table: TaskTable,
    /// `None` if a search controls the tasks.
    controlled: Option<Controlled>,
    /// The tasks named in the last note that all remaining tasks are paused.
    noted_paused: Vec<String>,
    stopping: bool,
}

/// The tasks after the commands so far.
struct Controlled {
    planned: Vec<PlannedTask>,
    forks: Forks,
    log: CommandLog,
}

impl Controlled {
    fn planned(&self, task: &str) -> Option<&PlannedTask> {
        self.planned.iter().find(|planned| planned.configuration.name == task)
    }

    fn is_deleted(&self, task: &str) -> bool {
        self.planned(task).is_some_and(|planned| planned.deleted)
    }

    /// Records a command that has taken effect.
    fn note(&mut self, run_command: &RunCommand) -> Result<()> {
        self.log.push(run_command)?;
        Ok(apply(&mut self.planned, run_command)?)
    }

    /// Returns the minibatches at which a task will still be forked.
    fn awaited(&self, task: &str) -> BTreeSet<usize> {
        self.forks.awaited().into_iter().filter(|(of, _)| of == task).map(|(_, at)| at).collect()
    }

    /// Returns the first unused name with this prefix.
    fn free_name(&self, stem: &str) -> String {
        let numbered = (1..).map(|number| format!("{stem}{number}"));
        let is_free = |name: &String| self.planned(name).is_none();
        let mut free = numbered.filter(is_free);
        free.next().unwrap_or_default()
    }
}

impl Controller {
    /// Returns the controller of a run with a search: it answers only `status`.
    pub(crate) fn for_search(control: RunControl) -> Self {
        Self::new(control, None)
    }

    /// Returns the controller of a run with these tasks. The `missing` ones start when the states of their parents are saved.
    pub(crate) fn for_tasks(
        control: RunControl,
        planned: Vec<PlannedTask>,
        mut forks: Forks,
        missing: Vec<PlannedTask>,
        log: CommandLog,
    ) -> Result<Self> {
        missing.into_iter().try_for_each(|fork| forks.request(fork))?;
        Ok(Self::new(control, Some(Controlled { planned, forks, log })))
    }

    fn new(control: RunControl, controlled: Option<Controlled>) -> Self {
        let state = Mutex::new(ControllerState { controlled, ..ControllerState::default() });
        Self(Arc::new(ControllerShared {
            control,
            state,
            command: Mutex::default(),
            changed: Condvar::new(),
        }))
    }

    /// Returns the tasks after the commands so far; none if a search controls them.
    pub(crate) fn planned(&self) -> Vec<PlannedTask> {
        self.state().controlled.as_ref().map_or_else(Vec::new, |controlled| controlled.planned.clone())
    }

    /// Answers a line received on the socket.
    pub(crate) fn answer(&self, line: &str) -> String {
        let answered = self.answered(line).unwrap_or_else(|error| {
            // The answer is one line.
            json!({ "ok": false, "error": format!("{error:#}").replace('\n', " ") })
        });
        answered.to_string()
    }

    fn answered(&self, line: &str) -> Result<Value> {
        let asked: Value = serde_json::from_str(line).context("the request is not valid JSON")?;
        if asked == json!({ "command": "status" }) {
            return Ok(self.status());
        }
        let run_command: RunCommand =
            serde_json::from_value(asked).context("the request is not a command")?;
        let soon = run_command.at().is_none()
            && matches!(run_command, RunCommand::Fork { .. } | RunCommand::Extend { .. });
        let answer = self.execute(run_command)?;
        if soon {
            self.wait_for(answer["task"].as_str().unwrap_or_default());
        }
        Ok(answer)
    }

    fn execute(&self, run_command: RunCommand) -> Result<Value> {
        let _command = self.0.command.lock().unwrap_or_else(PoisonError::into_inner);
        self.check(&run_command)?;
        match run_command {
            RunCommand::Pause { task, at } => self.pause(task, at),
            RunCommand::Resume { task, until, .. } => self.resume(task, until),
            RunCommand::Stop { task, at } => self.stop(task, at),
            RunCommand::Delete { task, at } => self.delete(task, at),
            RunCommand::Extend { task, steps, at, name } => self.extend(&task, steps, at, name),
            RunCommand::Fork { task, at, changes, weights_only, name } => {
                self.fork(&task, at, &changes, weights_only, name)
            }
        }
    }

    /// Waits until a new task is in the run, for at most [`PATIENCE`].
    fn wait_for(&self, task: &str) {
        let is_missing =
            |state: &mut ControllerState| state.task_table.row(task).is_none() && !state.stopping;
        drop(self.0.changed.wait_timeout_while(self.state(), PATIENCE, is_missing));
    }

    fn state(&self) -> MutexGuard<'_, ControllerState> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `work` on the controlled tasks.
    fn with<T>(&self, work: impl FnOnce(&mut Controlled) -> Result<T>) -> Result<T> {
        let mut state = self.state();
        work(state.controlled.as_mut().context("a search controls the tasks")?)
    }

    fn send(&self, command: Command) -> Result<Effect, CommandError> {
        self.0.control.send(command).wait()
    }

    fn status(&self) -> Value {
        let state = self.state();
        let planned = |name: &str| state.controlled.as_ref().and_then(|controlled| controlled.planned(name));
        let described = |row: &TaskRow| {
            let origin = planned(&row.name).and_then(|planned| planned.origin.as_ref());
            let mut described = row.to_json();
            if state.waits(row) {
                described["state"] = "paused".into();
            }
            described["parent"] = json!(origin.map(|origin| &origin.task));
            described["forked_at"] = json!(origin.map(|origin| origin.at));
            if planned(&row.name).is_some_and(|planned| planned.deleted) {
                described["deleted"] = true.into();
            }
            described
        };
        let rows: Vec<Value> =
            state.task_table.rows().iter().chain(&state.pending_forks()).map(described).collect();
        json!({ "ok": true, "tasks": rows })
    }

    /// Fails if a search controls the run, or the task does not exist or was deleted.
    fn check(&self, run_command: &RunCommand) -> Result<()> {
        let (state, task) = (self.state(), run_command.task());
        let Some(controlled) = &state.controlled else {
            bail!(
                "the run is controlled by its search, which pauses, stops and forks its tasks: only `status` is available \
                (interrupt it with Ctrl-C, continue it with hydra resume)"
            );
        };
        let names: Vec<&str> = controlled.planned.iter().map(|one| one.configuration.name.as_str()).collect();
        ensure!(
            names.contains(&task),
            "no task is called `{task}`: {}",
            hydra_search::suggestion(task, &names)
        );
        ensure!(!controlled.is_deleted(task), "task `{task}` was deleted");
        ensure!(
            state.task_table.row(task).is_some(),
            "task `{task}` has not started: its parent has not reached the minibatch of the fork yet"
        );
        Ok(())
    }

    fn pause(&self, task: String, at: Option<usize>) -> Result<Value> {
        let at = self.send(Command::Pause { task: task.clone(), at })?.step;
        self.done(RunCommand::Pause { task, at: Some(at) })
    }

    fn resume(&self, task: String, until: Option<usize>) -> Result<Value> {
        let at = self.send(Command::Continue { task: task.clone(), until })?.step;
        self.state().task_table.mark_resumed(&task);
        self.done(RunCommand::Resume { task, until, at: Some(at) })
    }

    fn stop(&self, task: String, at: Option<usize>) -> Result<Value> {
        let ended = match self.end(&task, at) {
            Err(error) => self.ended(&task).filter(|_| at.is_none()).ok_or(error)?,
            Ok(at) => return self.done(RunCommand::Stop { task, at: Some(at) }),
        };
        Ok(json!({ "ok": true, "task": task, "at": ended }))
    }

    /// Returns the minibatch at which a task has ended, or will end by a command.
    fn ended(&self, task: &str) -> Option<usize> {
        let state = self.state();
        let row = state.task_table.row(task).filter(|row| row.is_over()).map(|row| row.minibatch);
        row.or_else(|| state.controlled.as_ref()?.planned(task)?.ends)
    }

    /// Ends a task, but not before its pending forks.
    fn end(&self, task: &str, at: Option<usize>) -> Result<usize> {
        if let Some(last) = self.with(|controlled| Ok(controlled.awaited(task).pop_last()))? {
            ensure!(
                at.is_some_and(|at| at >= last),
                "task `{task}` will be forked after {last} minibatches: stop it with --at {last} or later"
            );
        }
        Ok(self.send(Command::End { task: task.to_owned(), at })?.step)
    }

    fn delete(&self, task: String, at: Option<usize>) -> Result<Value> {
        let over = self.state().task_table.row(&task).filter(|row| row.is_over()).map(|row| row.minibatch);
        let at = match over {
            Some(step) => step,
            None => self.end(&task, at)?,
        };
        let answer = self.done(RunCommand::Delete { task: task.clone(), at: Some(at) })?;
        if self.state().task_table.row(&task).is_some_and(TaskRow::is_over) {
            self.with(|controlled| controlled.forks.maker.remove(&task))?;
        }
        Ok(answer)
    }

    fn extend(&self, task: &str, steps: usize, at: Option<usize>, name: Option<String>) -> Result<Value> {
        let in_all = self.state().task_table.row(task).map_or(0, TaskRow::minibatches);
        ensure!(
            steps > in_all,
            "--steps of an extended task must be larger than {in_all}, the minibatches of `{task}`, got {steps}"
        );
        let changes = Texts::from([("steps".to_owned(), steps.to_string())]);
        let name = self.new_name(name, task, &changes, false)?;
        let fork = self.fork_of(task, &name, &changes, false)?;
        self.check_fork(&fork)?;
        let at = self.save(task, at)?;
        // The task waits at `at` until its state is saved.
        self.end(task, Some(at))?;
        let (task, at, name) = (task.to_owned(), Some(at), Some(name));
        self.begin(RunCommand::Extend { task, steps, at, name })
    }

    fn fork(
        &self,
        parent: &str,
        at: Option<usize>,
        changes: &Texts,
        weights_only: bool,
        name: Option<String>,
    ) -> Result<Value> {
        let name = self.new_name(name, parent, changes, true)?;
        let fork = self.fork_of(parent, &name, changes, weights_only)?;
        let steps = self.check_fork(&fork)?;
        let place = self.place(parent, at)?;
        ensure!(
            weights_only || steps > place,
            "the --steps of a fork must be larger than {place}, the minibatches trained before it, got {steps}"
        );
        let at = self.save(parent, at)?;
        let (task, changes) = (parent.to_owned(), changes.clone());
        self.begin(RunCommand::Fork { task, at: Some(at), changes, weights_only, name: Some(name) })
    }

    /// Returns the name of a task that starts from another task's state: the given one, if it is valid, or one derived from its
    /// settings, numbered if it is a fork.
    fn new_name(
        &self,
        given: Option<String>,
        parent: &str,
        changes: &Texts,
        is_fork: bool,
    ) -> Result<String> {
        if let Some(given) = given {
            return self.with(|controlled| controlled.checked_name(given));
        }
        let fork = self.fork_of(parent, UNNAMED, changes, false)?;
        self.with(|controlled| {
            let spec = &controlled.forks.spec;
            let tasks: Vec<&Configuration> =
                controlled.planned.iter().map(|planned| &planned.configuration).collect();
            let stem = spec.name_of_fork(&tasks, parent, &fork.configuration)?;
            match controlled.planned(&stem).is_none() && !is_fork {
                true => Ok(stem),
                false => Ok(controlled.free_name(&format!("{stem}{}", if is_fork { "-f" } else { "-" }))),
            }
        })
    }

    /// Returns the task that a fork would create, regardless of its minibatch.
    fn fork_of(&self, parent: &str, name: &str, changes: &Texts, weights_only: bool) -> Result<PlannedTask> {
        self.with(|controlled| {
            let (task, changes, name) = (parent.to_owned(), changes.clone(), Some(name.to_owned()));
            let fork = RunCommand::Fork { task, at: Some(0), changes, weights_only, name };
            let mut planned = controlled.planned.clone();
            apply(&mut planned, &fork)?;
            let fork = planned.pop().context("a fork is a task")?;
            let spec = &controlled.forks.spec;
            spec.training.check_one(&fork.configuration, spec.model_of(&fork.configuration).seed)?;
            Ok(fork)
        })
    }

    /// Checks that a fork is compatible with its parent and has a plan. Returns its total minibatches.
    fn check_fork(&self, fork: &PlannedTask) -> Result<usize> {
        let (command, steps) = self.with(|controlled| {
            let (spec, maker) = (&controlled.forks.spec, &controlled.forks.maker);
            let training = |planned: &PlannedTask| maker.training(spec, &planned.configuration);
            let (own, origin) = (training(fork)?, fork.origin.as_ref().context("a fork has a parent")?);
            let parent = training(controlled.planned(&origin.task).context("a parent is a task")?)?;
            let obstacle = fork_obstacle(&parent, &own).filter(|_| !origin.weights_only);
            if let Some((what, was, is)) = obstacle {
                bail!(
                    "the {what} of a fork must be its parent's, {was}, got {is}; with --weights-only it may be that of another \
                    task in the run"
                );
            }
            let steps = maker.steps(spec, &fork.configuration)?;
            let (task, like) = controlled.forks.task_like(fork).map_err(|error| {
                anyhow!("{error:#}: a running run cannot measure new shapes; start another run for another batch size or rank")
            })?;
            Ok((Command::Check { task: Box::new(task), like }, steps))
        })?;
        self.send(command)?;
        Ok(steps)
    }

    /// Returns the minibatch at which a task can be forked: the requested one, also if its state was saved before, or the next
    /// possible one.
    fn place(&self, task: &str, at: Option<usize>) -> Result<usize> {
        match at {
            Some(at) if self.with(|controlled| controlled.forks.has(task, at))? => Ok(at),
            at => Ok(self.send(Command::Place { task: task.to_owned(), at })?.step),
        }
    }

    /// Saves the state of a task. Returns its minibatch.
    fn save(&self, task: &str, asked: Option<usize>) -> Result<usize> {
        for _ in 0..TRIES {
            let at = self.place(task, asked)?;
            let Some(saved) = self.with(|controlled| controlled.forks.save(task, at))? else { return Ok(at) };
            // Commands are executed in order: once this one is answered, the save is refused or in progress.
            drop(self.send(Command::Place { task: task.to_owned(), at: None }));
            match saved.get() {
                Some(Err(error)) => {
                    self.with(|controlled| {
                        controlled.forks.forget(task, at);
                        Ok(())
                    })?;
                    let passed = matches!(error, CommandError::Place { .. }) && asked.is_none();
                    ensure!(passed, error);
                }
                _ => return Ok(at),
            }
        }
        bail!(
            "task `{task}` trains too fast to be saved at the next opportunity: pass --at MINIBATCH, or pause it first"
        )
    }

    /// Records a command that starts a task, which starts when its parent's state is saved.
    fn begin(&self, run_command: RunCommand) -> Result<Value> {
        let name = self.with(|controlled| {
            controlled.note(&run_command)?;
            let fork = controlled.planned.last().cloned().context("a fork is a task")?;
            let name = fork.configuration.name.clone();
            controlled.forks.request(fork)?;
            controlled.forks.add_ready()?;
            Ok(name)
        })?;
        Ok(json!({ "ok": true, "task": name, "at": run_command.at(), "parent": run_command.task() }))
    }

    /// Records a command that was executed.
    fn done(&self, run_command: RunCommand) -> Result<Value> {
        self.with(|controlled| controlled.note(&run_command))?;
        Ok(json!({ "ok": true, "task": run_command.task(), "at": run_command.at() }))
    }
}

impl Controlled {
    /// Checks that a given name is valid and unused.
    fn checked_name(&self, name: String) -> Result<String> {
        let is_safe = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        let fits =
            (1..=100).contains(&name.len()) && name.chars().all(is_safe) && !name.starts_with(['.', '-']);
        if !fits {
            let expected =
                "expected up to 100 letters, digits, `-`, `_` and `.`, not starting with `-` or `.`";
            bail!(Usage::new(format!("`{name}` is not a valid task name: {expected}")));
        }
        ensure!(self.planned(&name).is_none(), "a task called `{name}` exists already: give another name");
        Ok(name)
    }
}

impl ControllerState {
    /// Returns the forks that have not been submitted yet.
    fn pending_forks(&self) -> Vec<TaskRow> {
        let planned = self.controlled.iter().flat_map(|controlled| &controlled.planned);
        let pending = planned.filter(|planned| self.task_table.row(&planned.configuration.name).is_none());
        pending
            .filter(|planned| !planned.deleted)
            .map(|planned| {
                let (name, training) = (&planned.configuration.name, self.controlled.as_ref());
                let maker = training.map(|controlled| (&controlled.forks.maker, &controlled.forks.spec));
                let steps = maker.and_then(|(maker, spec)| maker.steps(spec, &planned.configuration).ok());
                let kept = planned.origin.as_ref().filter(|origin| !origin.weights_only);
                TaskRow::waiting(name, kept.map_or(0, |origin| origin.at), steps.unwrap_or_default())
            })
            .collect()
    }

    /// Handles the end of a task: removes its files if it is deleted, and drops forks of minibatches that it did not reach.
    fn ended(&mut self, task: TaskId) {
        let (Some(controlled), Some(name)) = (&mut self.controlled, self.task_table.name(task)) else {
            return;
        };
        if controlled.is_deleted(name)
            && let Err(error) = controlled.forks.maker.remove(name)
        {
            tell(&format!("error: the files of task `{name}` could not be removed: {error:#}"));
        }
        if !self.stopping {
            for fork in controlled.forks.lose(name) {
                let (fork, at) = (&fork.configuration.name, fork.parent_state().unwrap_or_default().1);
                tell(&format!("error: task `{fork}` cannot start: `{name}` ended before minibatch {at}"));
            }
        }
    }

    /// Returns true if a task is paused, possibly before its first minibatch.
    fn waits(&self, row: &TaskRow) -> bool {
        let planned = self.controlled.as_ref().and_then(|controlled| controlled.planned(&row.name));
        let at_start = || planned.is_some_and(|planned| planned.until == Some(0));
        row.state == "paused" || row.state == "waiting" && at_start()
    }

    /// Prints a note if all remaining tasks are paused.
    fn note_if_all_paused(&mut self) {
        let open: Vec<&TaskRow> = self.task_table.rows().iter().filter(|row| !row.is_over()).collect();
        let all = !open.is_empty()
            && open.iter().all(|row| self.waits(row))
            && !self.stopping
            && self.controlled.is_some();
        let left: Vec<String> = open.iter().filter(|_| all).map(|row| row.name.clone()).collect();
        if !left.is_empty() && left != self.noted_paused {
            let shown: Vec<String> = open
                .iter()
                .take(NAMES)
                .map(|row| format!("`{}` after {} minibatches", row.name, row.minibatch))
                .collect();
            let more = left.len().saturating_sub(NAMES);
            let more = if more == 0 { String::new() } else { format!(" and {more} more") };
            tell(&format!(
                "note: all remaining tasks are paused ({}{more}): continue one with `hydra ctl DIR resume TASK`, or end the \
                run with Ctrl-C",
                shown.join(", ")
            ));
        }
        self.noted_paused = left;
    }
}

/// The maximum number of tasks named in a note.
const NAMES: usize = 8;

impl Observer for Controller {
    fn observe(&mut self, event: &RunEvent<'_>) {
        let mut state = self.state();
        state.task_table.observe(event);
        match event {
            RunEvent::Saved { task, step, .. } => {
                let ControllerState { task_table, controlled: Some(controlled), .. } = &mut *state else {
                    return;
                };
                let saved = task_table.name(*task).map_or(Ok(()), |name| controlled.forks.saved(name, *step));
                if let Err(error) = saved {
                    tell(&format!("error: a fork cannot start: {error:#}"));
                }
            }
            RunEvent::Ended { task, state: ended, .. } => {
                state.ended(*task);
                if *ended != TaskState::Failed {
                    state.note_if_all_paused();
                }
            }
            RunEvent::Paused { .. } | RunEvent::Began { .. } | RunEvent::Minibatch { .. } => {
                state.note_if_all_paused();
            }
            RunEvent::Submitted { .. } => self.0.changed.notify_all(),
            RunEvent::Stopping => {
                state.stopping = true;
                self.0.changed.notify_all();
            }
            RunEvent::Refused { task, error: CommandError::Engine(error), .. } => {
                tell(&format!("error: a command to task `{task}` failed: {error}"));
            }
            _ => {}
        }
    }
}
