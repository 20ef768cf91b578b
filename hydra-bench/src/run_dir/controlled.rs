//! What the tasks of a run are to do after the commands by which it was steered.

use crate::run_dir::directory::CONTROL;
use crate::run_dir::run_command::RunCommand;
use crate::run_dir::searched::{Origin, Planned};
use crate::run_dir::spec::{Notation, RunSpec};
use crate::settings::Configuration;
use crate::terminal::Usage;
use anyhow::{Context, Result};
use std::path::Path;

impl Planned {
    fn end(&mut self, at: usize) {
        self.ends = Some(at);
        self.until.take_if(|until| *until >= at);
        // It has nothing that could be kept.
        self.stopped |= at == 0;
    }
}

/// Does to the tasks of a run what a command says that was written down.
pub(crate) fn apply(planned: &mut Vec<Planned>, run_command: &RunCommand) -> Result<(), Usage> {
    let known = || planned.iter().map(|one| one.configuration.name.as_str()).collect::<Vec<_>>().join(", ");
    let unknown =
        || Usage::new(format!("no task is called `{}`: the run has {}", run_command.task(), known()));
    let at =
        run_command.at().ok_or_else(|| Usage::new("a command that was carried out says where: give `at`"))?;
    let index =
        planned.iter().position(|one| one.configuration.name == run_command.task()).ok_or_else(unknown)?;
    if let Some((name, changes, weights_only)) = run_command.begins() {
        if planned.iter().any(|one| one.configuration.name == name) {
            return Err(Usage::new(format!("two tasks are called `{name}`: give another name")));
        }
        let configuration = planned[index].configuration.forked(name, &changes)?;
        let origin = Origin { task: run_command.task().to_owned(), at, changes, weights_only };
        planned.push(Planned { origin: Some(origin), ..Planned::from(configuration) });
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
    /// The tasks of a run without a search, after the commands that it was given.
    pub(crate) fn controlled(&self) -> Result<Vec<Planned>> {
        let mut planned: Vec<Planned> = self.grid()?.into_iter().map(Planned::from).collect();
        for (number, run_command) in self.run_commands.iter().enumerate() {
            let applied = apply(&mut planned, run_command).and_then(|()| match planned.last() {
                Some(last) => self.training.check_one(&last.configuration, self.model.seed),
                None => Ok(()),
            });
            applied.with_context(|| format!("command {} of {CONTROL} cannot be repeated", number + 1))?;
        }
        Ok(planned)
    }

    /// This spec with commands that another run was given: tasks that they left paused end where they waited.
    pub(crate) fn replaying(mut self, run_commands: Vec<RunCommand>) -> Result<Self> {
        self.run_commands = run_commands;
        self.take_notation_of_commands()?;
        let paused = self.controlled()?.into_iter().filter(|task| task.ends.is_none());
        let end =
            |task: Planned| Some(RunCommand::Stop { at: Some(task.until?), task: task.configuration.name });
        let ends: Vec<RunCommand> = paused.filter_map(end).collect();
        // Where a task waits in between is nothing to its bits.
        self.run_commands.retain(|run_command| {
            !matches!(run_command, RunCommand::Pause { .. } | RunCommand::Resume { .. })
        });
        self.run_commands.extend(ends);
        Ok(self)
    }

    /// Names the tasks as a run of an earlier version did, if the commands are about tasks with such names.
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

    /// The tasks of a run directory so far, in the order in which they were submitted, without those that were deleted.
    pub(crate) fn tasks_in(&self, dir: &Path) -> Result<Vec<Planned>> {
        let mut planned = match self.search_in(dir)? {
            Some(search) => self.planned(&search)?,
            None => self.controlled()?,
        };
        planned.retain(|task| !task.deleted);
        Ok(planned)
    }

    /// Their configurations.
    pub(crate) fn grid_in(&self, dir: &Path) -> Result<Vec<Configuration>> {
        Ok(self.tasks_in(dir)?.into_iter().map(|task| task.configuration).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use toml::Table;

    fn planned() -> Vec<Planned> {
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
        vec![Planned::from(one)]
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
        assert!(format!("{:#}", names("x").unwrap_err()).contains("the run has lr1e-3, lr3e-4"));
    }

    #[test]
    fn commands_that_mean_nothing_are_refused() {
        let says = |line: &str| apply(&mut planned(), &run_command(line)).unwrap_err().to_string();
        assert!(says(r#"{"command":"stop","task":"b","at":1}"#).contains("no task is called `b`"));
        assert!(says(r#"{"command":"stop","task":"a"}"#).contains("give `at`"));
        assert!(says(r#"{"command":"fork","task":"a","at":1,"name":"a"}"#).contains("two tasks"));
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
