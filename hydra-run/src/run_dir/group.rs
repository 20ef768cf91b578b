//! Groups of tasks that are ranked together.

use super::task::{ReportTask, data, same_data};
use crate::terminal::{Measure, Score};
use std::cmp::Ordering;

/// Tasks with the same measure and the same data.
pub(super) struct TaskGroup<'a> {
    pub(super) measure: Measure,
    pub(super) data: &'a str,
    /// In report order.
    pub(super) tasks: Vec<&'a ReportTask>,
}

/// Groups tasks, sorted by measure and, within a measure, by the first task of each data set. Returns at least one group.
pub(super) fn groups(tasks: &[ReportTask]) -> Vec<TaskGroup<'_>> {
    let mut groups: Vec<TaskGroup<'_>> = Vec::new();
    for task in tasks {
        let (measure, data) = (measure(task, tasks), data(&task.config));
        let is_its = |group: &&mut TaskGroup<'_>| group.measure == measure && same_data(group.tasks[0], task);
        match groups.iter_mut().find(is_its) {
            Some(group) => group.tasks.push(task),
            None => groups.push(TaskGroup { measure, data, tasks: vec![task] }),
        }
    }
    groups.sort_by_key(|group| group.measure);
    match groups.is_empty() {
        true => vec![TaskGroup { measure: Measure::Perplexity, data: "the data", tasks: Vec::new() }],
        false => groups,
    }
}

/// Returns the measure of a task. A task without evaluations has the measure of other tasks on its data.
fn measure(task: &ReportTask, tasks: &[ReportTask]) -> Measure {
    let of_data = || tasks.iter().filter(|other| same_data(other, task)).find_map(ReportTask::measure);
    let of_kind = || match task.config["task"].as_str() {
        Some("preference" | "reward") => Some(Measure::Loss),
        Some("classify") => Some(Measure::ACCURACY),
        _ => (task.unit.as_deref() == Some("images")).then_some(Measure::ACCURACY),
    };
    task.measure().or_else(of_data).or_else(of_kind).unwrap_or(Measure::Perplexity)
}

impl<'a> TaskGroup<'a> {
    /// Returns the title that distinguishes the group from others.
    pub(super) fn title(&self) -> String {
        format!("{} on {}", self.measure.name(), self.data)
    }

    /// Returns true if a task of the group has a validation of trained weights.
    pub(super) fn is_validated(&self) -> bool {
        self.tasks.iter().any(|task| task.validated().is_some())
    }

    pub(super) fn is_unfinished(&self) -> bool {
        self.tasks.iter().any(|task| task.is_unfinished())
    }

    /// Returns the tasks with their ranks, best validation first; ties have equal ranks, and the lower loss is first, because the
    /// order of tasks in merged reports depends on which node trained them. Tasks without a validation have no rank
    /// and follow by training loss; failed tasks are last. If the run is unfinished and no task is validated, the training
    /// loss ranks them.
    pub(super) fn ranked(&self) -> Vec<(Option<usize>, &'a ReportTask)> {
        let by_training = !self.is_validated() && self.is_unfinished();
        let mut tasks: Vec<(RankKey<'a>, &'a ReportTask)> =
            self.tasks.iter().map(|task| (RankKey::from_task(task, by_training), *task)).collect();
        tasks.sort_by(|(a, _), (b, _)| a.order(b).then(a.loss().total_cmp(&b.loss())));
        let rank = |place: &RankKey<'_>| 1 + tasks.partition_point(|(other, _)| other.order(place).is_lt());
        tasks.iter().map(|(place, task)| (place.is_ranked().then(|| rank(place)), *task)).collect()
    }
}

/// The sort key of a task in its group.
enum RankKey<'a> {
    Validated(&'a Score),
    /// Ranked by its training loss.
    Trained(f64),
    /// Not ranked, with its training loss.
    Unranked(f64),
    Failed,
}

impl<'a> RankKey<'a> {
    fn from_task(task: &'a ReportTask, by_training: bool) -> Self {
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

    /// The loss of a validation or of the last minibatches.
    fn loss(&self) -> f64 {
        match self {
            Self::Validated(score) => score.loss,
            Self::Trained(loss) | Self::Unranked(loss) => *loss,
            Self::Failed => f64::INFINITY,
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
