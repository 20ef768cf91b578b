//! The tasks that are ranked with each other.

use super::task::{Task, data, same_data};
use crate::terminal::{Measure, Score};
use std::cmp::Ordering;

/// Tasks with one measure on one data.
pub(super) struct Group<'a> {
    pub(super) measure: Measure,
    pub(super) data: &'a str,
    /// In the order of the report.
    pub(super) tasks: Vec<&'a Task>,
}

/// The groups of some tasks by measure, and of one measure by the first task of each data. There is one group at least.
pub(super) fn groups(tasks: &[Task]) -> Vec<Group<'_>> {
    let mut groups: Vec<Group<'_>> = Vec::new();
    for task in tasks {
        let (measure, data) = (measure(task, tasks), data(&task.config));
        let is_its = |group: &&mut Group<'_>| group.measure == measure && same_data(group.tasks[0], task);
        match groups.iter_mut().find(is_its) {
            Some(group) => group.tasks.push(task),
            None => groups.push(Group { measure, data, tasks: vec![task] }),
        }
    }
    groups.sort_by_key(|group| group.measure);
    match groups.is_empty() {
        true => vec![Group { measure: Measure::Perplexity, data: "the data", tasks: Vec::new() }],
        false => groups,
    }
}

/// The measure of a task, of one that was not evaluated that of others on its data.
fn measure(task: &Task, tasks: &[Task]) -> Measure {
    let of_data = || tasks.iter().filter(|other| same_data(other, task)).find_map(Task::measure);
    let of_unit = || matches!(task.unit.as_deref(), Some("images" | "pictures")).then_some(Measure::Accuracy);
    task.measure().or_else(of_data).or_else(of_unit).unwrap_or(Measure::Perplexity)
}

impl<'a> Group<'a> {
    /// What tells it from other groups.
    pub(super) fn title(&self) -> String {
        format!("{} on {}", self.measure.name(), self.data)
    }

    /// Returns true if a task was validated after it had been trained.
    pub(super) fn is_validated(&self) -> bool {
        self.tasks.iter().any(|task| task.validated().is_some())
    }

    pub(super) fn is_unfinished(&self) -> bool {
        self.tasks.iter().any(|task| task.is_unfinished())
    }

    /// The tasks by their validation, of which equal ones have equal ranks; failed ones and those that were not validated have
    /// none and come last, by training loss, the failed ones behind the others. Where a run has not come to its end and no
    /// task was validated, the training loss ranks them.
    pub(super) fn ranked(&self) -> Vec<(Option<usize>, &'a Task)> {
        let by_training = !self.is_validated() && self.is_unfinished();
        let mut tasks: Vec<(Place<'a>, &'a Task)> =
            self.tasks.iter().map(|task| (Place::of(task, by_training), *task)).collect();
        tasks.sort_by(|(a, _), (b, _)| a.order(b));
        let rank = |place: &Place<'_>| 1 + tasks.partition_point(|(other, _)| other.order(place).is_lt());
        tasks.iter().map(|(place, task)| (place.is_ranked().then(|| rank(place)), *task)).collect()
    }
}

/// The place of a task among others.
enum Place<'a> {
    Validated(&'a Score),
    /// Ranked by its training loss.
    Trained(f64),
    /// Not ranked, with its training loss.
    Unranked(f64),
    Failed,
}

impl<'a> Place<'a> {
    fn of(task: &'a Task, by_training: bool) -> Self {
        let training = task.training_loss();
        match (task.state == "failed", task.validated()) {
            (true, _) => Self::Failed,
            (false, Some((_, validation))) => Self::Validated(validation),
            (false, None) if by_training && training.is_some() => {
                Self::Trained(training.unwrap_or(f64::INFINITY))
            }
            (false, None) if task.is_unfinished() => Self::Unranked(training.unwrap_or(f64::INFINITY)),
            (false, None) => Self::Unranked(f64::INFINITY),
        }
    }

    fn is_ranked(&self) -> bool {
        matches!(self, Self::Validated(_) | Self::Trained(_))
    }

    fn order(&self, other: &Self) -> Ordering {
        match (self, other) {
            (Self::Validated(a), Self::Validated(b)) => a.order(b),
            (Self::Trained(a), Self::Trained(b)) | (Self::Unranked(a), Self::Unranked(b)) => a.total_cmp(b),
            _ => self.group().cmp(&other.group()),
        }
    }

    fn group(&self) -> u8 {
        match self {
            Self::Validated(_) | Self::Trained(_) => 0,
            Self::Unranked(_) => 1,
            Self::Failed => 2,
        }
    }
}
