//! Plots of a report and of the events in `metrics.jsonl`.

use crate::plots::colour::Palette;
use crate::plots::curves::{Curve, Curves, RankedBy, SettingValue};
use crate::plots::html_report::PlotFigure;
use crate::plots::{grid, losses, memory};
use crate::run_dir::differences::Differences;
use crate::run_dir::directory::{LEADERBOARD, LOSSES, MEMORY};
use crate::run_dir::group::TaskGroup;
use crate::run_dir::journal::Journal;
use crate::run_dir::leaderboard::Report;
use crate::run_dir::task::ReportTask;
use crate::terminal::{Measure, Score};

impl Report {
    /// Returns the plots of the run. Memory is plotted from `journal`, since the report does not record it over time.
    pub fn plots(&self, journal: &Journal) -> Vec<PlotFigure> {
        let groups = self.groups();
        let title = |group: &TaskGroup<'_>| (groups.len() > 1).then(|| group.title());
        let curves: Vec<Curves> = groups.iter().map(|group| curves(group, title(group), journal)).collect();
        let mut plots = vec![
            PlotFigure { title: "Losses", file: LOSSES, svg: losses::draw(&curves) },
            PlotFigure { title: "Hyper-parameters", file: LEADERBOARD, svg: grid::draw(&curves) },
        ];
        let memory = memory::draw(&journal.memory);
        plots.extend(memory.map(|svg| PlotFigure { title: "Memory", file: MEMORY, svg }));
        plots
    }

    /// Returns the colours of the tasks in report order, for plots other than curves.
    pub(crate) fn palette(&self) -> Palette {
        let tasks: Vec<&ReportTask> = self.tasks.iter().collect();
        let (settings, values) = differing(&tasks);
        let tasks = tasks.iter().zip(values).map(|(task, values)| curve(task, &[], values, true)).collect();
        let (unit, title, ranked_by) = (String::new(), None, RankedBy::Validation(Measure::Loss));
        Curves { unit, title, ranked_by, settings, tasks }.palette()
    }
}

/// Returns the curves of a group's tasks over the items counted in `journal`. Without counts, a minibatch is taken as batch
/// times context, which overstates the last minibatch of an epoch.
fn curves(group: &TaskGroup<'_>, title: Option<String>, journal: &Journal) -> Curves {
    let (tasks, validated) = (&group.tasks, group.is_validated());
    let trained: Option<Vec<Vec<f64>>> = tasks.iter().map(|task| trained(task, journal)).collect();
    let unit = tasks.iter().find_map(|task| task.unit.as_deref()).unwrap_or("tokens");
    let unit = if trained.is_some() { unit } else { "minibatches" };
    let minibatches = |task: &&ReportTask| (0..=task.losses.len()).map(|count| count as f64).collect();
    let trained = trained.unwrap_or_else(|| tasks.iter().map(minibatches).collect());
    let (settings, values) = differing(tasks);
    let tasks = tasks.iter().zip(&trained).zip(values);
    let tasks = tasks.map(|((task, at), values)| curve(task, at, values, validated)).collect();
    let ranked_by = match (validated, group.measure) {
        (false, _) => RankedBy::TrainingLoss,
        (true, Measure::Perplexity) => RankedBy::Validation(Measure::Loss),
        (true, measure) => RankedBy::Validation(measure),
    };
    Curves { unit: unit.to_owned(), title, ranked_by, settings, tasks }
}

/// Returns the names of the settings in which tasks differ, and their values for each task.
fn differing(tasks: &[&ReportTask]) -> (Vec<String>, Vec<Vec<SettingValue>>) {
    let differences = Differences::of(tasks.iter().map(|task| &task.config));
    let of = |task: usize| {
        let setting = |name: &String| SettingValue {
            text: differences.text(task, name),
            number: differences.value(task, name).and_then(serde_json::Value::as_f64),
        };
        differences.names.iter().map(setting).collect()
    };
    let values = (0..tasks.len()).map(of).collect();
    (differences.names.clone(), values)
}

/// Returns the items trained after 0, 1, 2, .. minibatches, if known.
fn trained(task: &ReportTask, journal: &Journal) -> Option<Vec<f64>> {
    let of = |key: &str| task.config.get(key).and_then(serde_json::Value::as_f64);
    let noted = journal.tasks.iter().find(|entry| entry.name == task.name).map(|entry| &entry.units);
    let noted = noted.filter(|units| units.len() >= task.losses.len());
    let every = of("batch").zip(of("context")).map(|(batch, context)| batch * context);
    let units = |step: usize| noted.map(|units| units[step] as f64).or(every);
    let mut sum = 0.0;
    let sums = (0..task.losses.len()).map(|step| {
        sum += units(step)?;
        Some(sum)
    });
    std::iter::once(Some(0.0)).chain(sums).collect()
}

fn curve(task: &ReportTask, trained: &[f64], settings: Vec<SettingValue>, validated: bool) -> Curve {
    let at = |step: usize| trained.get(step).or(trained.last()).copied().unwrap_or(0.0);
    let training = task.losses.iter().enumerate();
    let training = training.map(|(step, loss)| (at(step + 1), loss.unwrap_or(f64::NAN)));
    let (results, steps) = (&task.results, task.progress.steps);
    let initial = results.initial_validation.iter().map(|result| (0.0, result.loss));
    let periodic = results.evaluations.iter().map(|(step, result)| (at(*step), result.loss));
    // If the best weights were restored, the final validation repeats an earlier one.
    let last = results.validation.iter().filter(|_| task.best_step.is_none_or(|step| step == steps));
    let last = last.filter(|_| results.evaluations.last().is_none_or(|(step, _)| *step < steps));
    let last = last.map(|result| (at(steps), result.loss));
    let result = match task.validated() {
        Some((_, result)) => Some(*result),
        None if !validated => task.training_loss().map(Score::of_loss),
        None => None,
    };
    Curve {
        name: task.name.clone(),
        settings,
        state: task.state.clone(),
        training: training.collect(),
        validation: initial.chain(periodic).chain(last).collect(),
        result,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn report(more: serde_json::Value) -> Report {
        let mut task = json!({
            "name": "a", "config": { "batch": 2, "context": 8, "lr": 0.1 }, "state": "done", "steps": 2,
            "losses": [5.0, null], "initial_validation": { "loss": 5.5, "predicted_tokens": 9 },
            "validation": { "loss": 4.0, "perplexity": 54.6, "predicted_tokens": 9 },
        });
        more.as_object().unwrap().iter().for_each(|(key, value)| task[key] = value.clone());
        Report::so_far(vec![task]).unwrap()
    }

    fn of(report: &Report) -> Curves {
        curves(&report.groups()[0], None, &Journal::default())
    }

    fn score(loss: f64, perplexity: Option<f64>) -> Score {
        Score { perplexity, ..Score::of_loss(loss) }
    }

    #[test]
    fn curves_are_over_tokens() {
        let curves = of(&report(json!({})));
        let curve = &curves.tasks[0];
        assert_eq!(
            (curves.unit.as_str(), curve.training[0], curve.training[1].0),
            ("tokens", (16.0, 5.0), 32.0)
        );
        assert_eq!(curve.validation, [(0.0, 5.5), (32.0, 4.0)]);
        assert_eq!(curve.result, Some(score(4.0, Some(54.6))));
        let unknown = of(&report(json!({ "config": { "lr": 0.1 } })));
        assert_eq!((unknown.unit.as_str(), unknown.tasks[0].training[0].0), ("minibatches", 1.0));
    }

    #[test]
    fn a_stopped_task_is_ranked_by_what_it_has() {
        let stopped = of(&report(json!({ "state": "stopped", "validation": null })));
        assert_eq!(
            (stopped.ranked_by.name(), stopped.tasks[0].result),
            ("training loss".to_owned(), Some(score(5.0, None)))
        );
        let evaluations = json!([[1, { "loss": 4.5, "predicted_tokens": 9 }]]);
        let stopped = report(json!({ "state": "stopped", "validation": null, "evaluations": evaluations }));
        let stopped = of(&stopped);
        assert_eq!(
            (stopped.ranked_by.name(), stopped.tasks[0].result),
            ("validation loss".to_owned(), Some(score(4.5, None)))
        );
    }
}
