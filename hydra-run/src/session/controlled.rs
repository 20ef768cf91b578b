//! Run-control commands at the start and at the end of a run.

use crate::control_socket::ControlServer;
use crate::machine::process_memory::ProcessGrowth;
use crate::run_dir::{CommandLog, Journal, PlannedTask, RunDir, RunSpec, SOCKET, compare};
use crate::session::controller::Controller;
use crate::session::forks::Forks;
use crate::session::tasks::TaskMaker;
use crate::terminal::tell;
use anyhow::{Context, Result};
use hydra_engine::RunReport;
use serde_json::Value;

/// Opens the socket for commands, if the system and the length of the directory's path allow it.
pub(super) fn listen(dir: &RunDir, controller: Controller) -> Option<ControlServer> {
    let opened = ControlServer::open(&dir.file(SOCKET), move |line| controller.answer(line));
    opened
        .map_err(|error| tell(&format!("note: `hydra ctl` cannot control this run: {SOCKET}: {error}")))
        .ok()
}

/// Opens the command log of a run with the commands that the spec starts with, and removes the files of deleted tasks.
pub(super) fn begin_commands(
    dir: &RunDir,
    spec: &RunSpec,
    tasks: &[String],
    planned: &[PlannedTask],
    forks: &Forks,
) -> Result<CommandLog> {
    let mut log = CommandLog::in_dir(dir.path());
    if !dir.resumed {
        spec.run_commands.iter().try_for_each(|run_command| log.push(run_command))?;
    }
    let deleted = planned.iter().filter(|task| task.deleted).map(|task| &task.configuration.name);
    // A deleted task that others depend on is trained, and removed when it ends.
    let mut gone = deleted.filter(|name| !tasks.contains(name));
    gone.try_for_each(|name| forks.maker.remove(name))?;
    Ok(log)
}

/// Returns the note on tasks of a resumed run that commands paused, stopped, deleted or forked.
pub(super) fn note_of_commands(planned: &[PlannedTask]) -> Option<String> {
    let named = |what: &str, of: &dyn Fn(&PlannedTask) -> Option<usize>| {
        let named =
            planned.iter().filter_map(|task| Some(format!("`{}` ({})", task.configuration.name, of(task)?)));
        let named: Vec<String> = named.collect();
        (!named.is_empty()).then(|| format!("{what}: {}", named.join(", ")))
    };
    let live = |task: &PlannedTask| !task.deleted;
    let parts = [
        named("paused", &|task| task.until.filter(|_| live(task) && task.ends.is_none())),
        named("stopped", &|task| task.ends.filter(|_| live(task))),
        named("deleted", &|task| task.ends.filter(|_| task.deleted)),
        named("forked", &|task| task.parent_state().map(|(_, at)| at).filter(|_| live(task))),
    ];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    (!parts.is_empty())
        .then(|| format!("note: run control before the interruption (task, minibatch): {}", parts.join("; ")))
}

/// Returns true if a command ended the task.
pub(super) fn is_stopped_by_command(planned: &[PlannedTask], task: &str) -> bool {
    planned.iter().any(|planned| planned.configuration.name == task && planned.ends.is_some())
}

/// Returns the report as JSON with the settings in which its tasks differ and the memory of the process. Deleted tasks are
/// included as far as their events describe them.
pub(super) fn report_text(
    report: &RunReport,
    process: Option<&ProcessGrowth>,
    planned: &[PlannedTask],
    dir: &RunDir,
) -> Result<String> {
    let no_json = "the report could not be written as JSON";
    let mut json = serde_json::to_value(report).context(no_json)?;
    process.into_iter().for_each(|growth| json["process"] = growth.json());
    let deleted: Vec<&PlannedTask> = planned.iter().filter(|task| task.deleted).collect();
    let known = if deleted.is_empty() { Vec::new() } else { Journal::read(dir.path())?.report(false) };
    for name in deleted.iter().map(|task| task.configuration.name.as_str()) {
        let tasks = json["tasks"].as_array_mut().context("a report has tasks")?;
        let of_name = |task: &&Value| task["name"] == name;
        if !tasks.iter().any(|task| of_name(&task)) {
            tasks.extend(known.iter().find(of_name).cloned());
        }
        for task in tasks.iter_mut().filter(|task| task["name"] == name) {
            (task["state"], task["model_dir"]) = ("deleted".into(), Value::Null);
        }
    }
    compare(&mut json)?;
    serde_json::to_string_pretty(&json).context(no_json)
}

/// Returns true if another task must start from a state of this one that has not been saved.
pub(super) fn is_needed(maker: &TaskMaker, all: &[PlannedTask], task: &PlannedTask) -> Result<bool> {
    for fork in all {
        let is_its = fork.origin.as_ref().is_some_and(|origin| origin.task == task.configuration.name);
        if is_its && !maker.can_start(fork)? && (!fork.deleted || is_needed(maker, all, fork)?) {
            return Ok(true);
        }
    }
    Ok(false)
}
