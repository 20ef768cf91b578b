//! The controller of a run: what it is asked on its socket is carried out, written down, and then answered.
//!
//! A command is checked first, then given to the engine, which says where it takes effect, then on the disk with that place.
//! What follows from it, such as a fork whose parent has to come to a place, follows from the line on the disk, now and
//! after a kill.

use crate::run_dir::{CommandLog, Planned, RunCommand, apply};
use crate::session::forks::Forks;
use crate::session::task_table::{Row, TaskTable};
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

/// How often a place is asked for again that a task has passed meanwhile.
const TRIES: usize = 100;
/// The name of a task before it has one, which no task can be given.
const UNNAMED: &str = "/";
/// How long the answer to a command waits for a task that begins by it at the next opportunity.
const PATIENCE: Duration = Duration::from_secs(10);

/// Listens to a run, and steers it as it is asked. Clones are of the same run.
#[derive(Clone)]
pub(crate) struct Controller(Arc<Shared>);

struct Shared {
    control: RunControl,
    state: Mutex<State>,
    /// Commands are carried out one after the other. The state is free meanwhile, for the run tells of itself.
    turn: Mutex<()>,
    /// Tasks were added, or the run stops.
    heard: Condvar,
}

#[derive(Default)]
struct State {
    task_table: TaskTable,
    /// None where a search owns the tasks.
    controlled: Option<Controlled>,
    /// The tasks that were last said to be all that is left.
    told: Vec<String>,
    stopping: bool,
}

/// What the commands so far have made of the tasks.
struct Controlled {
    planned: Vec<Planned>,
    forks: Forks,
    log: CommandLog,
}

impl Controlled {
    fn planned(&self, task: &str) -> Option<&Planned> {
        self.planned.iter().find(|planned| planned.configuration.name == task)
    }

    fn is_deleted(&self, task: &str) -> bool {
        self.planned(task).is_some_and(|planned| planned.deleted)
    }

    /// Writes down a command that counts from now on.
    fn note(&mut self, run_command: &RunCommand) -> Result<()> {
        self.log.push(run_command)?;
        Ok(apply(&mut self.planned, run_command)?)
    }

    /// The places from which a task is forked yet.
    fn awaited(&self, task: &str) -> BTreeSet<usize> {
        self.forks.awaited().into_iter().filter(|(of, _)| of == task).map(|(_, at)| at).collect()
    }

    /// The first name of this beginning that no task has.
    fn free_name(&self, stem: &str) -> String {
        let numbered = (1..).map(|number| format!("{stem}{number}"));
        let is_free = |name: &String| self.planned(name).is_none();
        let mut free = numbered.filter(is_free);
        free.next().unwrap_or_default()
    }
}

impl Controller {
    /// The controller of a run whose search owns its tasks: it only says how they are.
    pub(crate) fn of_search(control: RunControl) -> Self {
        Self::new(control, None)
    }

    /// The controller of a run with these tasks, of which those that are `missing` begin when their parents have been saved.
    pub(crate) fn of_tasks(
        control: RunControl,
        planned: Vec<Planned>,
        mut forks: Forks,
        missing: Vec<Planned>,
        log: CommandLog,
    ) -> Result<Self> {
        missing.into_iter().try_for_each(|fork| forks.ask(fork))?;
        Ok(Self::new(control, Some(Controlled { planned, forks, log })))
    }

    fn new(control: RunControl, controlled: Option<Controlled>) -> Self {
        let state = Mutex::new(State { controlled, ..State::default() });
        Self(Arc::new(Shared { control, state, turn: Mutex::default(), heard: Condvar::new() }))
    }

    /// The tasks as the commands so far have made them; none where a search owns them.
    pub(crate) fn planned(&self) -> Vec<Planned> {
        self.state().controlled.as_ref().map_or_else(Vec::new, |controlled| controlled.planned.clone())
    }

    /// Answers a line of the socket.
    pub(crate) fn answer(&self, line: &str) -> String {
        let answered = self.answered(line).unwrap_or_else(|error| {
            // One sentence, whatever the causes.
            json!({ "ok": false, "error": format!("{error:#}").replace('\n', " ") })
        });
        answered.to_string()
    }

    fn answered(&self, line: &str) -> Result<Value> {
        let asked: Value = serde_json::from_str(line).context("the line is no JSON")?;
        if asked == json!({ "command": "status" }) {
            return Ok(self.status());
        }
        let run_command: RunCommand = serde_json::from_value(asked).context("the line is no command")?;
        let soon = run_command.at().is_none()
            && matches!(run_command, RunCommand::Fork { .. } | RunCommand::Extend { .. });
        let answer = self.carry_out(run_command)?;
        if soon {
            self.wait_for(answer["task"].as_str().unwrap_or_default());
        }
        Ok(answer)
    }

    fn carry_out(&self, run_command: RunCommand) -> Result<Value> {
        let _turn = self.0.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.check(&run_command)?;
        match run_command {
            RunCommand::Pause { task, at } => self.pause(task, at),
            RunCommand::Resume { task, until, .. } => self.go_on(task, until),
            RunCommand::Stop { task, at } => self.stop(task, at),
            RunCommand::Delete { task, at } => self.delete(task, at),
            RunCommand::Extend { task, steps, at, name } => self.extend(&task, steps, at, name),
            RunCommand::Fork { task, at, changes, weights_only, name } => {
                self.fork(&task, at, &changes, weights_only, name)
            }
        }
    }

    /// Waits until the run has heard of a new task, but not for ever.
    fn wait_for(&self, task: &str) {
        let unheard = |state: &mut State| state.task_table.row(task).is_none() && !state.stopping;
        drop(self.0.heard.wait_timeout_while(self.state(), PATIENCE, unheard));
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does something with what the commands have made so far.
    fn with<T>(&self, work: impl FnOnce(&mut Controlled) -> Result<T>) -> Result<T> {
        let mut state = self.state();
        work(state.controlled.as_mut().context("a search owns the tasks")?)
    }

    fn send(&self, command: Command) -> Result<Effect, CommandError> {
        self.0.control.send(command).wait()
    }

    fn status(&self) -> Value {
        let state = self.state();
        let planned = |name: &str| state.controlled.as_ref().and_then(|controlled| controlled.planned(name));
        let described = |row: &Row| {
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
            state.task_table.rows().iter().chain(&state.to_come()).map(described).collect();
        json!({ "ok": true, "tasks": rows })
    }

    /// Refuses what nobody can do here, and tasks that are not there.
    fn check(&self, run_command: &RunCommand) -> Result<()> {
        let (state, task) = (self.state(), run_command.task());
        let Some(controlled) = &state.controlled else {
            bail!(
                "the run searches, and its search pauses, stops and forks its tasks: only `status` can be asked of it \
                 (Ctrl-C ends it, and hydra resume goes on with it)"
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
            "task `{task}` has not begun: its parent has yet to come to where it is forked"
        );
        Ok(())
    }

    fn pause(&self, task: String, at: Option<usize>) -> Result<Value> {
        let at = self.send(Command::Pause { task: task.clone(), at })?.step;
        self.done(RunCommand::Pause { task, at: Some(at) })
    }

    fn go_on(&self, task: String, until: Option<usize>) -> Result<Value> {
        let at = self.send(Command::Continue { task: task.clone(), until })?.step;
        self.state().task_table.goes_on(&task);
        self.done(RunCommand::Resume { task, until, at: Some(at) })
    }

    fn stop(&self, task: String, at: Option<usize>) -> Result<Value> {
        let ended = match self.end(&task, at) {
            Err(error) => self.ended(&task).filter(|_| at.is_none()).ok_or(error)?,
            Ok(at) => return self.done(RunCommand::Stop { task, at: Some(at) }),
        };
        Ok(json!({ "ok": true, "task": task, "at": ended }))
    }

    /// Where a task has ended, or is to end by a command.
    fn ended(&self, task: &str) -> Option<usize> {
        let state = self.state();
        let row = state.task_table.row(task).filter(|row| row.is_over()).map(|row| row.minibatch);
        row.or_else(|| state.controlled.as_ref()?.planned(task)?.ends)
    }

    /// Has a task end, but not before it is forked where it was promised.
    fn end(&self, task: &str, at: Option<usize>) -> Result<usize> {
        if let Some(last) = self.with(|controlled| Ok(controlled.awaited(task).pop_last()))? {
            ensure!(
                at.is_some_and(|at| at >= last),
                "task `{task}` is to be forked after {last} minibatches: stop it --at {last} or later"
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
        if self.state().task_table.row(&task).is_some_and(Row::is_over) {
            self.with(|controlled| controlled.forks.maker.remove(&task))?;
        }
        Ok(answer)
    }

    fn extend(&self, task: &str, steps: usize, at: Option<usize>, name: Option<String>) -> Result<Value> {
        let in_all = self.state().task_table.row(task).map_or(0, Row::minibatches);
        ensure!(
            steps > in_all,
            "task `{task}` trains {in_all} minibatches: extend it to more than that, not to {steps}"
        );
        let changes = Texts::from([("steps".to_owned(), steps.to_string())]);
        let name = self.new_name(name, task, &changes, false)?;
        let fork = self.fork_of(task, &name, &changes, false)?;
        self.check_fork(&fork)?;
        let at = self.save(task, at)?;
        // It stands there until it is saved.
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
            "a fork after {place} minibatches trains {steps} in all: give more --steps"
        );
        let at = self.save(parent, at)?;
        let (task, changes) = (parent.to_owned(), changes.clone());
        self.begin(RunCommand::Fork { task, at: Some(at), changes, weights_only, name: Some(name) })
    }

    /// Returns the name of a task that begins as another one stands: the one that is given, if it can be one, or one that
    /// its settings make, with a number behind it if it is a fork.
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

    /// The task that a fork would be, wherever it begins.
    fn fork_of(&self, parent: &str, name: &str, changes: &Texts, weights_only: bool) -> Result<Planned> {
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

    /// Refuses a fork that cannot be one of its parent, or has no plan; returns how many minibatches it trains in all.
    fn check_fork(&self, fork: &Planned) -> Result<usize> {
        let (command, steps) = self.with(|controlled| {
            let (spec, maker) = (&controlled.forks.spec, &controlled.forks.maker);
            let training = |planned: &Planned| maker.training(spec, &planned.configuration);
            let (own, origin) = (training(fork)?, fork.origin.as_ref().context("a fork has a parent")?);
            let parent = training(controlled.planned(&origin.task).context("a parent is a task")?)?;
            let obstacle = fork_obstacle(&parent, &own).filter(|_| !origin.weights_only);
            if let Some((what, was, is)) = obstacle {
                bail!(
                    "the {what} of a fork is its parent's, {was}, and not {is}: with --weights-only it may be another one, where \
                     a task of that shape is there"
                );
            }
            let (task, like) = controlled.forks.task_like(fork).map_err(|error| {
                anyhow!("{error:#}: a run measures nothing while it goes on, so begin another run for another batch or rank")
            })?;
            Ok((Command::Check { task: Box::new(task), like }, maker.steps(spec, &fork.configuration)?))
        })?;
        self.send(command)?;
        Ok(steps)
    }

    /// Where a task can be forked: where that was asked for, or at the next opportunity. A place that was saved before is one.
    fn place(&self, task: &str, at: Option<usize>) -> Result<usize> {
        match at {
            Some(at) if self.with(|controlled| controlled.forks.has(task, at))? => Ok(at),
            at => Ok(self.send(Command::Place { task: task.to_owned(), at })?.step),
        }
    }

    /// Has a task saved; returns where.
    fn save(&self, task: &str, asked: Option<usize>) -> Result<usize> {
        for _ in 0..TRIES {
            let at = self.place(task, asked)?;
            let Some(saved) = self.with(|controlled| controlled.forks.save(task, at))? else { return Ok(at) };
            // Commands are carried out in their order: when this is answered, that is refused or under way.
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
            "task `{task}` is too fast to be saved at the next opportunity: give a place, or pause it first"
        )
    }

    /// Writes down a command by which a task begins, and has it begin when its parent is saved.
    fn begin(&self, run_command: RunCommand) -> Result<Value> {
        let name = self.with(|controlled| {
            controlled.note(&run_command)?;
            let fork = controlled.planned.last().cloned().context("a fork is a task")?;
            let name = fork.configuration.name.clone();
            controlled.forks.ask(fork)?;
            controlled.forks.add_ready()?;
            Ok(name)
        })?;
        Ok(json!({ "ok": true, "task": name, "at": run_command.at(), "parent": run_command.task() }))
    }

    /// Writes down a command that was carried out.
    fn done(&self, run_command: RunCommand) -> Result<Value> {
        self.with(|controlled| controlled.note(&run_command))?;
        Ok(json!({ "ok": true, "task": run_command.task(), "at": run_command.at() }))
    }
}

impl Controlled {
    /// Returns a name that is given, if it can be that of a new task.
    fn checked_name(&self, name: String) -> Result<String> {
        let is_safe = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        let fits =
            (1..=100).contains(&name.len()) && name.chars().all(is_safe) && !name.starts_with(['.', '-']);
        if !fits {
            let says = "is no name of a task: give up to 100 letters, digits, `-`, `_` and `.`, not `-` or `.` first";
            bail!(Usage::new(format!("`{name}` {says}")));
        }
        ensure!(self.planned(&name).is_none(), "a task is called `{name}`: give another name");
        Ok(name)
    }
}

impl State {
    /// The forks that the run has not heard of yet.
    fn to_come(&self) -> Vec<Row> {
        let planned = self.controlled.iter().flat_map(|controlled| &controlled.planned);
        let unheard = planned.filter(|planned| self.task_table.row(&planned.configuration.name).is_none());
        unheard
            .filter(|planned| !planned.deleted)
            .map(|planned| {
                let (name, training) = (&planned.configuration.name, self.controlled.as_ref());
                let maker = training.map(|controlled| (&controlled.forks.maker, &controlled.forks.spec));
                let steps = maker.and_then(|(maker, spec)| maker.steps(spec, &planned.configuration).ok());
                let kept = planned.origin.as_ref().filter(|origin| !origin.weights_only);
                Row::waiting(name, kept.map_or(0, |origin| origin.at), steps.unwrap_or_default())
            })
            .collect()
    }

    /// A task has ended: what was to be removed is, and what was to begin as it would have stood never will.
    fn ended(&mut self, task: TaskId) {
        let (Some(controlled), Some(name)) = (&mut self.controlled, self.task_table.name(task)) else {
            return;
        };
        if controlled.is_deleted(name)
            && let Err(error) = controlled.forks.maker.remove(name)
        {
            tell(&format!("error: what task `{name}` has written could not be removed: {error:#}"));
        }
        if !self.stopping {
            for fork in controlled.forks.lose(name) {
                let (fork, at) = (&fork.configuration.name, fork.place().unwrap_or_default().1);
                tell(&format!("error: task `{fork}` cannot begin: `{name}` ended before minibatch {at}"));
            }
        }
    }

    /// Returns true if a task waits for a command, perhaps before it has begun.
    fn waits(&self, row: &Row) -> bool {
        let planned = self.controlled.as_ref().and_then(|controlled| controlled.planned(&row.name));
        let at_start = || planned.is_some_and(|planned| planned.until == Some(0));
        row.state == "paused" || row.state == "waiting" && at_start()
    }

    /// Says it when all that is left waits for a command.
    fn tell_if_waiting(&mut self) {
        let open: Vec<&Row> = self.task_table.rows().iter().filter(|row| !row.is_over()).collect();
        let all = !open.is_empty()
            && open.iter().all(|row| self.waits(row))
            && !self.stopping
            && self.controlled.is_some();
        let left: Vec<String> = open.iter().filter(|_| all).map(|row| row.name.clone()).collect();
        if !left.is_empty() && left != self.told {
            let shown: Vec<String> = open
                .iter()
                .take(NAMES)
                .map(|row| format!("`{}` after {} minibatches", row.name, row.minibatch))
                .collect();
            let more = left.len().saturating_sub(NAMES);
            let more = if more == 0 { String::new() } else { format!(" and {more} more") };
            tell(&format!(
                "note: the run waits, for every task that is left is paused ({}{more}): let one go on with `hydra ctl DIR \
                 resume TASK`, or end the run with Ctrl-C",
                shown.join(", ")
            ));
        }
        self.told = left;
    }
}

/// The tasks that are named at most.
const NAMES: usize = 8;

impl Observer for Controller {
    fn observe(&mut self, event: &RunEvent<'_>) {
        let mut state = self.state();
        state.task_table.observe(event);
        match event {
            RunEvent::Saved { task, step, .. } => {
                let State { task_table, controlled: Some(controlled), .. } = &mut *state else { return };
                let saved = task_table.name(*task).map_or(Ok(()), |name| controlled.forks.saved(name, *step));
                if let Err(error) = saved {
                    tell(&format!("error: a fork cannot begin: {error:#}"));
                }
            }
            RunEvent::Ended { task, state: ended, .. } => {
                state.ended(*task);
                if *ended != TaskState::Failed {
                    state.tell_if_waiting();
                }
            }
            RunEvent::Paused { .. } | RunEvent::Began { .. } | RunEvent::Minibatch { .. } => {
                state.tell_if_waiting();
            }
            RunEvent::Submitted { .. } => self.0.heard.notify_all(),
            RunEvent::Stopping => {
                state.stopping = true;
                self.0.heard.notify_all();
            }
            RunEvent::Refused { task, error: CommandError::Engine(error), .. } => {
                tell(&format!("error: a command to task `{task}` could not be carried out: {error}"));
            }
            _ => {}
        }
    }
}
