//! Handles commands to the run and answers them.

use super::Run;
use crate::admission::{AdmittedTask, Place, check_identity};
use crate::checkpoint::{self, Checkpoint, Identity};
use crate::control::{Command, Effect, PendingCommand, RunControl};
use crate::error::{CommandError, EngineError, refused};
use crate::observer::RunEvent;
use crate::task::{Change, Leaving, LiveTask, TaskInfo};
use crate::train_task::{Start, TrainTask};
use crossbeam_channel::Sender;
use hydra_core::TaskId;
use std::path::PathBuf;
use std::sync::Arc;

type CommandResult = Result<Effect, CommandError>;

/// The source of the run's commands, and the saves that are not answered yet.
pub(super) struct PendingCommands {
    control: RunControl,
    saves: Vec<PendingSave>,
    /// True if a command has changed what the run does.
    used: bool,
}

/// A requested save and the sender of its answer.
struct PendingSave {
    task: TaskId,
    file: PathBuf,
    answer: Sender<CommandResult>,
}

impl PendingCommands {
    pub(super) fn new(control: RunControl) -> Self {
        Self { control, saves: Vec::new(), used: false }
    }

    /// Returns whether a command has changed what the run does.
    pub(super) fn was_used(&self) -> bool {
        self.used
    }

    fn take_save(&mut self, is_it: impl Fn(&PendingSave) -> bool) -> Option<PendingSave> {
        let at = self.saves.iter().position(is_it)?;
        Some(self.saves.remove(at))
    }
}

impl Drop for PendingCommands {
    fn drop(&mut self) {
        self.control.close();
    }
}

impl Run {
    /// Handles all commands received since the last call.
    pub(super) fn handle_commands(&mut self) {
        let asked = self.commands.as_ref().map(|commands| commands.control.take());
        for PendingCommand { command, answer } in asked.into_iter().flatten() {
            let (name, asks) = (command.task().to_owned(), command.is_query());
            self.commands.iter_mut().for_each(|commands| commands.used |= !asks);
            let answered = match command {
                Command::Pause { task, at } => self.pause(&task, at),
                Command::Continue { task, until } => self.resume_task(&task, until),
                Command::Stop { task } => self.stop_one(&task),
                Command::End { task, at } => self.end_one(&task, at),
                Command::Place { task, at } => self.check_pause_step(&task, at),
                Command::Check { task, like } => {
                    let id = TaskId(self.tasks.len());
                    self.check_submit(&task, &like).map(|_| Effect { task: id, step: 0 })
                }
                Command::Submit { task, like } => self.submit(*task, &like),
                Command::Save { task, at, file } => match self.save(&task, at, file, &answer) {
                    // It is answered when the file is complete.
                    Ok(()) => continue,
                    Err(error) => Err(error),
                },
            };
            match asks {
                true => drop(answer.send(answered)),
                false => self.answer(&name, &answer, answered),
            }
        }
    }

    /// Sends the answer. A refusal is also reported to the observer.
    fn answer(&mut self, task: &str, to: &Sender<CommandResult>, answered: CommandResult) {
        if let Err(error) = &answered {
            let at_s = self.journal.clock.now();
            self.journal.observe(&RunEvent::Refused { task, error, at_s });
        }
        // The sender of the command may have dropped the receiver.
        let _ = to.send(answered);
    }

    /// The index of the task with this name.
    fn named_task(&self, name: &str) -> Result<usize, CommandError> {
        let found = self.tasks.iter().position(|task| task.info.name() == name);
        found.ok_or_else(|| CommandError::NoTask {
            task: name.to_owned(),
            known: self.tasks.iter().map(|task| task.info.name().to_owned()).collect(),
        })
    }

    /// The index of an open task and the step at which it can pause: `at` if that is possible, else the earliest.
    fn pause_step(&self, name: &str, at: Option<usize>) -> Result<(usize, usize), CommandError> {
        let index = self.named_task(name)?;
        let (first, last) = self.open(index)?.can_pause().ok_or_else(|| ending(name))?;
        match at.unwrap_or(first) {
            at if (first..=last).contains(&at) => Ok((index, at)),
            at => Err(CommandError::Place { task: name.to_owned(), at, first, last }),
        }
    }

    fn open(&self, index: usize) -> Result<&LiveTask, CommandError> {
        let task = &self.tasks[index];
        match task.phase.is_over() {
            true => Err(CommandError::Ended { task: task.info.name().to_owned() }),
            false => Ok(task),
        }
    }

    fn pause(&mut self, name: &str, at: Option<usize>) -> CommandResult {
        let (index, step) = self.pause_step(name, at)?;
        self.tasks[index].pause.until = Some(step);
        Ok(Effect { task: TaskId(index), step })
    }

    fn check_pause_step(&self, name: &str, at: Option<usize>) -> CommandResult {
        let (index, step) = self.pause_step(name, at)?;
        Ok(Effect { task: TaskId(index), step })
    }

    fn end_one(&mut self, name: &str, at: Option<usize>) -> CommandResult {
        let (index, step) = self.pause_step(name, at)?;
        let task = &mut self.tasks[index];
        task.pause.ends = Some(step);
        task.pause.until.take_if(|until| *until >= step);
        match step {
            // Nothing was trained that could be written.
            0 if task.phase.is_waiting() => self.stop(index),
            _ => task.pause.leaving = Leaving::No,
        }
        Ok(Effect { task: TaskId(index), step })
    }

    /// Stops the tasks that have reached the step at which they are to end.
    pub(super) fn stop_at_end_steps(&mut self) {
        let ended: Vec<usize> =
            (0..self.tasks.len()).filter(|index| self.tasks[*index].is_where_it_ends()).collect();
        ended.into_iter().for_each(|index| self.stop(index));
    }

    fn resume_task(&mut self, name: &str, until: Option<usize>) -> CommandResult {
        let (index, step) = self.pause_step(name, None)?;
        let end = self.tasks[index].cursor.program().steps;
        let until = until.filter(|until| *until != end);
        if until.is_some() {
            self.pause_step(name, until)?;
        }
        let pause = &mut self.tasks[index].pause;
        (pause.until, pause.leaving) = (until, Leaving::No);
        Ok(Effect { task: TaskId(index), step })
    }

    fn stop_one(&mut self, name: &str) -> CommandResult {
        let index = self.named_task(name)?;
        let step = match self.open(index)?.can_pause() {
            Some((first, _)) => first,
            None => self.tasks[index].cursor.step(),
        };
        self.stop(index);
        Ok(Effect { task: TaskId(index), step })
    }

    fn save(
        &mut self,
        name: &str,
        at: Option<usize>,
        file: PathBuf,
        answer: &Sender<CommandResult>,
    ) -> Result<(), CommandError> {
        let (index, step) = self.pause_step(name, at)?;
        checkpoint::prepare(&file).map_err(EngineError::from)?;
        self.tasks[index].pause.saves.entry(step).or_default().push(file.clone());
        if let Some(commands) = &mut self.commands {
            commands.saves.push(PendingSave { task: TaskId(index), file, answer: answer.clone() });
        }
        Ok(())
    }

    /// Answers the save of a task after its file was written or failed.
    pub(super) fn saved(&mut self, id: TaskId, result: Result<u64, EngineError>) {
        let task = &mut self.tasks[id.0];
        let (step, file) = (task.cursor.step(), task.saved_here());
        let save = self
            .commands
            .as_mut()
            .zip(file)
            .and_then(|(commands, file)| commands.take_save(|save| save.task == id && save.file == file));
        let Some(PendingSave { file, answer, .. }) = save else { return };
        if result.is_ok() {
            let (file, at_s) = (file.as_path(), self.journal.clock.now());
            self.journal.observe(&RunEvent::Saved { task: id, step, file, at_s });
        }
        let answered = result.map(|_| Effect { task: id, step }).map_err(CommandError::from);
        let name = self.tasks[id.0].info.name().to_owned();
        self.answer(&name, &answer, answered);
    }

    /// Answers the pending saves of a task that has ended with an error.
    pub(super) fn leave_unsaved(&mut self, id: TaskId) {
        let is_its = |save: &PendingSave| save.task == id;
        while let Some(save) = self.commands.as_mut().and_then(|commands| commands.take_save(is_its)) {
            let task = self.tasks[id.0].info.name().to_owned();
            let error = CommandError::Ended { task: task.clone() };
            self.answer(&task, &save.answer, Err(error));
        }
    }

    /// Reports a task that has just paused.
    pub(super) fn report_pause(&mut self, index: usize) {
        if let Some(step) = self.tasks[index].has_paused() {
            let (task, at_s) = (TaskId(index), self.journal.clock.now());
            self.journal.observe(&RunEvent::Paused { task, step, at_s });
        }
    }

    /// Returns whether paused tasks wait for a command. If no sender of commands is left, they are stopped.
    pub(super) fn awaits_commands(&mut self) -> bool {
        let paused: Vec<usize> =
            (0..self.tasks.len()).filter(|index| self.tasks[*index].is_paused()).collect();
        let alone = self.commands.as_ref().is_none_or(|commands| commands.control.is_alone());
        paused.iter().filter(|_| alone).for_each(|index| self.stop(*index));
        !paused.is_empty()
    }

    /// Asks a paused task to give up its memory if another task waits for memory. It first saves a checkpoint.
    pub(super) fn ask_for_memory(&mut self) {
        let wait = self.tasks.iter().any(|task| task.phase.is_waiting() && !task.is_paused());
        let leaves = |task: &LiveTask| task.pause.leaving == Leaving::Requested && task.has_begun();
        let leaving = self.tasks.iter().any(leaves) || !self.memory.to_discard.is_empty();
        if self.commands.is_none() || self.stopping || !wait || leaving {
            return;
        }
        if let Some(task) = self.tasks.iter_mut().find(|task| task.can_leave()) {
            task.pause.leaving = Leaving::Requested;
        }
    }

    /// Frees the memory of a paused task. It resumes from its checkpoint when it fits again.
    pub(super) fn free_memory_of_paused(&mut self, index: usize) {
        let task = &mut self.tasks[index];
        let here = |saved: &Checkpoint| saved.step() == task.cursor.step();
        let file = task.info.task.checkpoint_file();
        let Some(checkpoint) = file.and_then(|file| Checkpoint::open(file).ok()).filter(here) else {
            // The checkpoint could not be written, which was reported. The task keeps its memory.
            task.pause.leaving = Leaving::Never;
            return;
        };
        let mut info = TaskInfo::clone(&task.info);
        info.task.start = Start::Resumed(checkpoint);
        task.info = Arc::new(info);
        task.pause.leaving = Leaving::No;
        task.reader.release();
        task.phase.change(Change::Leave);
        self.queue.queue_from_now_on();
        self.release_buffers(index);
    }

    /// Checks whether a new task can be added and returns the task or shape `like` whose plan it gets.
    fn check_submit(&self, task: &TrainTask, like: &str) -> Result<&TaskInfo, CommandError> {
        let like = match self.shapes.iter().find(|shape| shape.name() == like) {
            Some(shape) => shape,
            None => &*self.tasks[self.named_task(like)?].info,
        };
        self.check_new(task)?;
        check_shape(task, like)?;
        Ok(like)
    }

    /// Adds a task with the plan of `like`, which must have the same shape.
    fn submit(&mut self, task: TrainTask, like: &str) -> CommandResult {
        let like = self.check_submit(&task, like)?;
        let of = like.identity.clone();
        let identity = of.map(|of| Identity {
            spec: task.spec.clone(),
            initial_validation: task.initial_validation,
            ..of
        });
        if let Some((checkpoint, identity)) = task.start.state().zip(identity.as_ref()) {
            check_identity(&task, checkpoint, identity).map_err(EngineError::from)?;
        }
        task.checkpoint_file().map_or(Ok(()), checkpoint::prepare).map_err(EngineError::from)?;
        let id = TaskId(self.tasks.len());
        let admitted = AdmittedTask::with_shape_of((&like.admitted, &like.task), &task);
        let costs = super::costs_of(&admitted.plan, &self.tasks).map_err(EngineError::from)?;
        let mut live = LiveTask::new(TaskInfo::new(id, task, admitted, identity), costs);
        let at_s = self.journal.clock.now();
        let (admitted, config) = (&live.info.admitted, &live.info.task.config);
        self.journal.observe(&RunEvent::Submitted { task: id, admitted, config, at_s });
        super::resume(&mut live, &mut self.journal);
        let step = live.cursor.step();
        self.queue.queue_from_now_on();
        self.tasks.push(live);
        Ok(Effect { task: id, step })
    }

    /// Checks a new task against the state and the tasks of the run.
    fn check_new(&self, task: &TrainTask) -> Result<(), CommandError> {
        let others = || self.tasks.iter().map(|other| &other.info.task);
        if self.stopping {
            return Err(CommandError::Over);
        }
        task.check_conflicts(others())?;
        task.spec.validate().map_err(EngineError::from).map_err(refused(&task.name))?;
        Ok(())
    }
}

fn ending(task: &str) -> CommandError {
    CommandError::Ending { task: task.to_owned() }
}

/// Refuses a task whose shape differs from that of `like`.
fn check_shape(task: &TrainTask, like: &TaskInfo) -> Result<(), CommandError> {
    let other = &like.task;
    let (spec, of) = (&task.spec, &other.spec);
    let same = |one: &Option<_>, other: &Option<_>| match (one, other) {
        (Some(one), Some(other)) => Arc::ptr_eq(one, other),
        (None, None) => true,
        _ => false,
    };
    let draws = || like.shared_names().next().is_some() && spec.seed != of.seed;
    let differs = [
        ("chain", !Arc::ptr_eq(&task.chain, &other.chain)),
        ("training data", !Arc::ptr_eq(&task.train, &other.train)),
        ("validation data", !same(&task.validation, &other.validation)),
        ("test data", !same(&task.test, &other.test)),
        ("batch", (spec.batch, spec.accumulate) != (of.batch, of.accumulate)),
        ("optimizer state", spec.optimizer.encodings() != of.optimizer.encodings()),
        ("clipping", spec.clip.is_some() != of.clip.is_some()),
        ("choice to keep the best weights", spec.keeps_best() != of.keeps_best()),
        ("seed (frozen weights are drawn from it)", draws()),
    ];
    if let Some((what, _)) = differs.into_iter().find(|(_, differs)| *differs) {
        return Err(CommandError::Shape { task: task.name.clone(), like: other.name.clone(), what });
    }
    let task = other.name.clone();
    let Some(admitted) = like.admitted.fresh(other) else {
        let why = "it had ended before the run was resumed, and a new task like it does not fit; give the run more host memory";
        return Err(CommandError::NoSpace { task, why });
    };
    if admitted.optimizer.on != Place::Host {
        let why = "some of its masters are resident on a device; let optimizers step on the host";
        return Err(CommandError::NoSpace { task, why });
    }
    if admitted.storage.on_disk.contains(&true) {
        let why = "its masters are on the disk, where no space can be added during the run; give the run more host memory";
        return Err(CommandError::NoSpace { task, why });
    }
    Ok(())
}
