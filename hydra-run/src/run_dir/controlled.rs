//! The planned tasks of a run after its recorded run-control commands have been applied.

use crate::run_dir::directory::CONTROL;
use crate::run_dir::run_command::RunCommand;
use crate::run_dir::searched::{Origin, PlannedTask};
use crate::run_dir::spec::{Notation, RunSpec};
use crate::settings::Configuration;
use crate::terminal::Usage;
use anyhow::{Context, Result};
use std::path::Path;

impl PlannedTask {
    fn end(&mut self, at: usize) {
        self.ends = Some(at);
        self.until.take_if(|until| *until >= at);
        // Before the first minibatch there is nothing to keep.
        self.stopped |= at == 0;
    }
}

/// Applies a recorded command to the planned tasks of a run.
pub(crate) fn apply(planned: &mut Vec<PlannedTask>, run_command: &RunCommand) -> Result<(), Usage> {
    let known = || planned.iter().map(|one| one.configuration.name.as_str()).collect::<Vec<_>>().join(", ");
    let unknown = || {
        Usage::new(format!(
            "no task is called `{}`; the tasks of the run are {}",
            run_command.task(),
            known()
        ))
    };
    let at = run_command.at().ok_or_else(|| {
        Usage::new("a recorded command has no `at`: add the minibatch at which it took effect")
    })?;
    let index =
        planned.iter().position(|one| one.configuration.name == run_command.task()).ok_or_else(unknown)?;
    if let Some((name, changes, weights_only)) = run_command.started_task() {
        if planned.iter().any(|one| one.configuration.name == name) {
            return Err(Usage::new(format!("a task called `{name}` exists already: give another name")));
        }
        let configuration = planned[index].configuration.forked(name, &changes)?;
        let origin = Origin { task: run_command.task().to_owned(), at, changes, weights_only };
        planned.push(PlannedTask { origin: Some(origin), ..PlannedTask::from(configuration) });
    }
    let task = &mut planned[index];
    match run_command {
        RunCommand::Pause { .. } => task.until = Some(at),
        RunCommand::Resume { until, .. } => task.until = *until,
        RunCommand::Stop { .. } | RunCommand::Extend { .. } => task.end(at),
        RunCommand::Delete { .. } => {
            task.end(at);
            task.deleted = true;
        }
        RunCommand::Fork { .. } => {}
    }
    Ok(())
}

impl RunSpec {
    /// Returns the tasks of a run without a search, after its recorded commands.
    pub(crate) fn controlled(&self) -> Result<Vec<PlannedTask>> {
        let mut planned: Vec<PlannedTask> = self.grid()?.into_iter().map(PlannedTask::from).collect();
        for (number, run_command) in self.run_commands.iter().enumerate() {
            let applied = apply(&mut planned, run_command).and_then(|()| match planned.last() {
                Some(last) => self.training.check_one(&last.configuration, self.model.seed),
                None => Ok(()),
            });
            applied.with_context(|| format!("command {} of {CONTROL} cannot be repeated", number + 1))?;
        }
        Ok(planned)
    }

    /// Returns this spec with the commands of another run. Tasks that the commands left paused stop where they paused.
    pub fn replaying(mut self, run_commands: Vec<RunCommand>) -> Result<Self> {
        self.run_commands = run_commands;
        self.take_notation_of_commands()?;
        let paused = self.controlled()?.into_iter().filter(|task| task.ends.is_none());
        let end = |task: PlannedTask| {
            Some(RunCommand::Stop { at: Some(task.until?), task: task.configuration.name })
        };
        let ends: Vec<RunCommand> = paused.filter_map(end).collect();
        // Pauses do not change a task's bits.
        self.run_commands.retain(|run_command| {
            !matches!(run_command, RunCommand::Pause { .. } | RunCommand::Resume { .. })
        });
        self.run_commands.extend(ends);
        Ok(self)
    }

    /// Switches to the task names of earlier versions if the commands refer to such names.
    fn take_notation_of_commands(&mut self) -> Result<(), Usage> {
        let has = |spec: &Self| -> Result<bool, Usage> {
            let grid = spec.grid()?;
            let first = self.run_commands.first().map(RunCommand::task);
            Ok(first.is_none_or(|task| grid.iter().any(|one| one.name == task)))
        };
        let earlier = Self { names: Notation::BatchAndRate, ..self.clone() };
        if !has(self)? && has(&earlier)? {
            self.names = Notation::BatchAndRate;
        }
        Ok(())
    }

    /// Returns the tasks of a run directory so far in submission order, without deleted tasks.
    pub fn tasks_in(&self, dir: &Path) -> Result<Vec<PlannedTask>> {
        let mut planned = match self.search_in(dir)? {
            Some(search) => self.planned(&search)?,
            None => self.controlled()?,
        };
        planned.retain(|task| !task.deleted);
        Ok(planned)
    }

    /// Returns the configurations of [`tasks_in`](Self::tasks_in).
    pub fn grid_in(&self, dir: &Path) -> Result<Vec<Configuration>> {
        Ok(self.tasks_in(dir)?.into_iter().map(|task| task.configuration).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use toml::Table;

    fn planned() -> Vec<PlannedTask> {
        let changes = Table::new();
        let one = Configuration {
            name: "a".to_owned(),
            model: 0,
            batch: 4,
            lr: 1e-3,
            lora: None,
            seed: None,
            changes,
        };
        vec![PlannedTask::from(one)]
    }

    fn run_command(json: &str) -> RunCommand {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn tasks_are_where_their_commands_left_them() {
        let mut tasks = planned();
        for line in [
            r#"{"command":"pause","task":"a","at":3}"#,
            r#"{"command":"fork","task":"a","at":3,"changes":{"lr":"1e-4"},"name":"b"}"#,
            r#"{"command":"resume","task":"a","at":3,"until":9}"#,
            r#"{"command":"extend","task":"b","at":5,"steps":20,"name":"c"}"#,
            r#"{"command":"delete","task":"c","at":7}"#,
        ] {
            apply(&mut tasks, &run_command(line)).unwrap();
        }
        let seen: Vec<_> = tasks.iter().map(|task| (task.until, task.ends, task.deleted)).collect();
        assert_eq!(seen, [(Some(9), None, false), (None, Some(5), false), (None, Some(7), true)]);
        let origin = tasks[2].origin.as_ref().unwrap();
        assert_eq!((origin.task.as_str(), origin.at, tasks[2].configuration.lr), ("b", 5, 1e-4));
        assert_eq!(tasks[2].configuration.changes["steps"].as_integer(), Some(20));
    }

    #[test]
    fn commands_of_an_earlier_version_find_their_tasks() {
        let text = "format = 1\ncommand = 'select'\nnames = 'differences'\n[model]\n[training]\nbatch = [4]\n\
                    lr = [0.001, 0.0003]\nsteps = 9\n[devices]\n";
        let spec: RunSpec = toml::from_str(text).unwrap();
        let names = |task: &str| {
            let stop = run_command(&format!(r#"{{"command":"stop","task":"{task}","at":1}}"#));
            let tasks = spec.clone().replaying(vec![stop])?.controlled()?;
            anyhow::Ok(tasks.into_iter().map(|task| task.configuration.name).collect::<Vec<_>>())
        };
        assert_eq!(names("b4-lr1e-3").unwrap(), ["b4-lr1e-3", "b4-lr3e-4"]);
        assert_eq!(names("lr1e-3").unwrap(), ["lr1e-3", "lr3e-4"]);
        assert!(format!("{:#}", names("x").unwrap_err()).contains("the tasks of the run are lr1e-3, lr3e-4"));
    }

    #[test]
    fn commands_that_mean_nothing_are_refused() {
        let says = |line: &str| apply(&mut planned(), &run_command(line)).unwrap_err().to_string();
        assert!(says(r#"{"command":"stop","task":"b","at":1}"#).contains("no task is called `b`"));
        assert!(says(r#"{"command":"stop","task":"a"}"#).contains("has no `at`"));
        assert!(says(r#"{"command":"fork","task":"a","at":1,"name":"a"}"#).contains("exists already"));
        for line in [
            r#"{"command":"halt","task":"a"}"#,
            r#"{"command":"pause","task":"a","att":3}"#,
            r#"{"command":"pause","task":"a","at":-3}"#,
            r#"{"command":"extend","task":"a"}"#,
        ] {
            assert!(serde_json::from_str::<RunCommand>(line).is_err(), "{line}");
        }
    }
}
