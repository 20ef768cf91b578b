//! What a run does with the commands by which it was steered, at its beginning and at its end.

use crate::control_socket::Server;
use crate::run_dir::{CommandLog, Journal, Planned, RunDir, RunSpec, SOCKET, compare};
use crate::session::controller::Controller;
use crate::session::forks::Forks;
use crate::session::tasks::TaskMaker;
use crate::terminal::tell;
use anyhow::{Context, Result};
use hydra_engine::RunReport;
use serde_json::Value;

/// Listens to commands, where the system and the directory's path allow that.
pub(super) fn listen(dir: &RunDir, controller: Controller) -> Option<Server> {
    let opened = Server::open(&dir.file(SOCKET), move |line| controller.answer(line));
    opened.map_err(|error| tell(&format!("note: `hydra ctl` cannot reach the run: {SOCKET}: {error}"))).ok()
}

/// The log of the commands of a run, which has those that it begins with; what deleted tasks have left is removed.
pub(super) fn begin_commands(
    dir: &RunDir,
    spec: &RunSpec,
    tasks: &[String],
    planned: &[Planned],
    forks: &Forks,
) -> Result<CommandLog> {
    let mut log = CommandLog::in_dir(dir.path());
    if !dir.resumed {
        spec.run_commands.iter().try_for_each(|run_command| log.push(run_command))?;
    }
    let deleted = planned.iter().filter(|task| task.deleted).map(|task| &task.configuration.name);
    // One that goes on for the sake of others is removed when it ends.
    let mut gone = deleted.filter(|name| !tasks.contains(name));
    gone.try_for_each(|name| forks.maker.remove(name))?;
    Ok(log)
}

/// Says which tasks of a run that goes on are as somebody left them.
pub(super) fn note_of_commands(planned: &[Planned]) -> Option<String> {
    let named = |what: &str, of: &dyn Fn(&Planned) -> Option<usize>| {
        let named =
            planned.iter().filter_map(|task| Some(format!("`{}` ({})", task.configuration.name, of(task)?)));
        let named: Vec<String> = named.collect();
        (!named.is_empty()).then(|| format!("{what}: {}", named.join(", ")))
    };
    let live = |task: &Planned| !task.deleted;
    let parts = [
        named("paused", &|task| task.until.filter(|_| live(task) && task.ends.is_none())),
        named("stopped", &|task| task.ends.filter(|_| live(task))),
        named("deleted", &|task| task.ends.filter(|_| task.deleted)),
        named("forked", &|task| task.place().map(|(_, at)| at).filter(|_| live(task))),
    ];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    (!parts.is_empty()).then(|| format!("note: as it was steered, with minibatches: {}", parts.join("; ")))
}

/// Returns true if somebody told the task to end.
pub(super) fn is_stopped_by_command(planned: &[Planned], task: &str) -> bool {
    planned.iter().any(|planned| planned.configuration.name == task && planned.ends.is_some())
}

/// The report as JSON, with the settings in which its tasks differ. Tasks that were deleted are in it with what is known of
/// them.
pub(super) fn report_text(report: &RunReport, planned: &[Planned], dir: &RunDir) -> Result<String> {
    let no_json = "the report could not be written as JSON";
    let mut json = serde_json::to_value(report).context(no_json)?;
    let deleted: Vec<&Planned> = planned.iter().filter(|task| task.deleted).collect();
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

/// Returns true if a task is to begin with a state of this one that is not there.
pub(super) fn is_needed(maker: &TaskMaker, all: &[Planned], task: &Planned) -> Result<bool> {
    for fork in all {
        let is_its = fork.origin.as_ref().is_some_and(|origin| origin.task == task.configuration.name);
        if is_its && !maker.can_begin(fork)? && (!fork.deleted || is_needed(maker, all, fork)?) {
            return Ok(true);
        }
    }
    Ok(false)
}
