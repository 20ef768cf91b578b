//! Mean and standard deviation over tasks that differ in the seed alone.

use super::differences::{Differences, SEED, settings};
use super::group::TaskGroup;
use super::task::{ReportTask, figure};
use crate::terminal::{Measure, Score, Table};
use serde_json::{Map, Value, json};

/// The mean and the standard deviation of a sample.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Sample {
    n: usize,
    mean: f64,
    /// With n - 1 degrees of freedom; `None` for a single value.
    deviation: Option<f64>,
}

impl Sample {
    /// Returns the statistics of some values, if there are any.
    fn from_values(values: &[f64]) -> Option<Self> {
        let n = values.len();
        let mean = values.iter().sum::<f64>() / n as f64;
        let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
        let deviation = (n > 1).then(|| (squares / (n as f64 - 1.0)).sqrt());
        (n > 0).then_some(Self { n, mean, deviation })
    }

    fn json(self) -> Value {
        json!({ "mean": self.mean, "deviation": self.deviation })
    }

    /// Returns the mean and the deviation as text, in the format of a measure.
    fn shown(self, measure: Measure) -> String {
        let text = |value: f64| measure.shown(value, figure);
        match self.deviation {
            Some(deviation) => format!("{} ± {}", text(self.mean), text(deviation)),
            None => text(self.mean),
        }
    }
}

/// Accessors: a result of a task, and a figure of a result.
type ResultOf = fn(&ReportTask) -> Option<&Score>;
type FigureOf = fn(&Score) -> Option<f64>;

/// The evaluations whose results are compared.
const RESULTS: [(&str, ResultOf); 2] =
    [("validation", |task| task.results.validation.as_ref()), ("test", |task| task.results.test.as_ref())];
/// Stands for the name of the metric that ranks the group.
const METRIC: &str = "metric";
/// The figures of a result.
const FIGURES: [(&str, FigureOf); 3] = [
    ("loss", |score| Some(score.loss)),
    ("perplexity", |score| score.perplexity),
    (METRIC, |score| score.metric.map(|(_, value)| value)),
];

/// Tasks whose settings are equal except for the seed.
pub(super) struct Repeated<'a> {
    /// Their indices in the group.
    tasks: Vec<usize>,
    /// The tasks among them that were trained to their end.
    done: Vec<&'a ReportTask>,
}

impl Repeated<'_> {
    /// Returns the statistics of a figure of their results.
    fn sample(&self, result: ResultOf, figure: FigureOf) -> Option<Sample> {
        let values = self.done.iter().filter_map(|task| figure(result(task)?));
        Sample::from_values(&values.collect::<Vec<_>>())
    }

    pub(super) fn json(&self, group: &TaskGroup<'_>, differences: &Differences) -> Value {
        let first = self.tasks.first().copied().unwrap_or_default();
        let names: Vec<&str> = self.tasks.iter().map(|task| group.tasks[*task].name.as_str()).collect();
        let mut json = json!({ "differs": differences.json(first), "tasks": names, "n": self.done.len() });
        for (name, result) in RESULTS {
            let figures = FIGURES
                .iter()
                .filter_map(|(key, figure)| Some((named(key, group), self.sample(result, *figure)?.json())));
            let figures: Map<String, Value> = figures.collect();
            json[name] = if figures.is_empty() { Value::Null } else { figures.into() };
        }
        json
    }
}

/// The name of a figure of a group's results.
fn named(key: &str, group: &TaskGroup<'_>) -> String {
    if key == METRIC { group.measure.name().to_owned() } else { key.to_owned() }
}

/// Groups tasks by their settings without the seed, best mean first. Returns nothing if no settings are repeated.
pub(super) fn repeated<'a>(group: &TaskGroup<'a>) -> Vec<Repeated<'a>> {
    let mut all: Vec<(Value, Repeated<'a>)> = Vec::new();
    for (index, task) in group.tasks.iter().enumerate() {
        let key = without_seed(&task.config);
        let place = all.iter().position(|(other, _)| *other == key).unwrap_or_else(|| {
            all.push((key, Repeated { tasks: Vec::new(), done: Vec::new() }));
            all.len() - 1
        });
        all[place].1.tasks.push(index);
        all[place].1.done.extend((task.state == "done").then_some(*task));
    }
    let is_repeated = all.iter().any(|(_, repeated)| repeated.tasks.len() > 1);
    let mut all: Vec<Repeated<'a>> =
        all.into_iter().map(|(_, repeated)| repeated).filter(|_| is_repeated).collect();
    let mean = |repeated: &Repeated<'_>| {
        let mean = repeated.sample(RESULTS[0].1, |score| Some(score.value())).map(|sample| sample.mean);
        mean.map_or(f64::INFINITY, |mean| group.measure.cost(mean))
    };
    all.sort_by(|a, b| mean(a).total_cmp(&mean(b)));
    all
}

/// Returns a key that is equal for tasks that differ in the seed alone. A fork with changed settings has another key, because it
/// trained with other settings before the fork.
fn without_seed(config: &Value) -> Value {
    let mut settings = settings(config);
    settings.remove(SEED);
    let fork =
        config.get("fork").filter(|fork| fork.get("changes").is_some() || fork["weights_only"] == true);
    json!([settings, fork])
}

/// Returns the table of a group's statistics over seeds, empty if no settings are repeated.
pub(super) fn table(group: &TaskGroup<'_>) -> String {
    let repeated = repeated(group);
    if repeated.is_empty() {
        return String::new();
    }
    let (differences, _) = Differences::of(group.tasks.iter().map(|task| &task.config)).without_seed();
    let what = group.measure.brief();
    let mut columns = vec![">seeds".to_owned(), format!(">validation {what}"), format!(">test {what}")];
    columns.splice(0..0, differences.names.iter().map(|name| format!(">{name}")));
    let mut table = Table::new(columns);
    for one in &repeated {
        let first = one.tasks.first().copied().unwrap_or_default();
        let mut cells = differences.texts(first);
        let (done, all) = (one.done.len(), one.tasks.len());
        cells.push(if done == all { all.to_string() } else { format!("{done} of {all}") });
        cells.extend(RESULTS.map(|(_, result)| {
            let sample = one.sample(result, |score| Some(score.value()));
            sample.map_or_else(|| "-".to_owned(), |sample| sample.shown(group.measure))
        }));
        table.row(cells);
    }
    format!("\nover seeds, mean ± standard deviation of the tasks that are done:\n{}", table.render())
}
