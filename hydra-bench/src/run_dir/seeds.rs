//! Tasks that differ in the seed alone, shown together: the mean of their results, and the standard deviation.

use super::differences::{Differences, SEED, add_differences, settings};
use super::group::Group;
use super::leaderboard::{Report, figure};
use super::task::Task;
use crate::terminal::{Measure, Score, Table, percent};
use anyhow::Result;
use serde_json::{Map, Value, json};

/// The mean and the standard deviation of a sample.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Sample {
    n: usize,
    mean: f64,
    /// With n - 1 degrees of freedom; none of a single value.
    deviation: Option<f64>,
}

impl Sample {
    /// Returns the statistics of some values, if there are any.
    fn of(values: &[f64]) -> Option<Self> {
        let n = values.len();
        let mean = values.iter().sum::<f64>() / n as f64;
        let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
        let deviation = (n > 1).then(|| (squares / (n as f64 - 1.0)).sqrt());
        (n > 0).then_some(Self { n, mean, deviation })
    }

    fn json(self) -> Value {
        json!({ "mean": self.mean, "deviation": self.deviation })
    }

    /// Returns the mean and the deviation in the digits of a measure.
    fn shown(self, measure: Measure) -> String {
        let text = |value: f64| match measure {
            Measure::Accuracy => percent(value),
            Measure::Perplexity | Measure::Loss => figure(value),
        };
        match self.deviation {
            Some(deviation) => format!("{} ± {}", text(self.mean), text(deviation)),
            None => text(self.mean),
        }
    }
}

/// A result of a task, if it has one, and a figure of a result.
type ResultOf = fn(&Task) -> Option<&Score>;
type FigureOf = fn(&Score) -> Option<f64>;

/// The evaluations whose results are compared.
const RESULTS: [(&str, ResultOf); 2] =
    [("validation", |task| task.validation.as_ref()), ("test", |task| task.test.as_ref())];
/// The figures of a result.
const FIGURES: [(&str, FigureOf); 3] = [
    ("loss", |score| Some(score.loss)),
    ("perplexity", |score| score.perplexity),
    ("accuracy", |score| score.accuracy),
];

/// Tasks with equal settings but for the seed.
pub(super) struct Repeated<'a> {
    /// Their places in the group.
    tasks: Vec<usize>,
    /// Those of them that were trained to their end.
    done: Vec<&'a Task>,
}

impl Repeated<'_> {
    /// Returns the statistics of a figure of their results.
    fn sample(&self, result: ResultOf, figure: FigureOf) -> Option<Sample> {
        let values = self.done.iter().filter_map(|task| figure(result(task)?));
        Sample::of(&values.collect::<Vec<_>>())
    }

    fn json(&self, group: &Group<'_>, differences: &Differences) -> Value {
        let first = self.tasks.first().copied().unwrap_or_default();
        let names: Vec<&str> = self.tasks.iter().map(|task| group.tasks[*task].name.as_str()).collect();
        let mut json = json!({ "differs": differences.json(first), "tasks": names, "n": self.done.len() });
        for (name, result) in RESULTS {
            let figures = FIGURES
                .iter()
                .filter_map(|(key, figure)| Some(((*key).to_owned(), self.sample(result, *figure)?.json())));
            let figures: Map<String, Value> = figures.collect();
            json[name] = if figures.is_empty() { Value::Null } else { figures.into() };
        }
        json
    }
}

/// Returns the tasks of a group by their settings without the seed, where several tasks have the same; the best mean first.
pub(super) fn repeated<'a>(group: &Group<'a>) -> Vec<Repeated<'a>> {
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
        mean.map_or(f64::INFINITY, |mean| if group.measure == Measure::Accuracy { -mean } else { mean })
    };
    all.sort_by(|a, b| mean(a).total_cmp(&mean(b)));
    all
}

/// Returns what tasks have in common that differ in the seed alone. A fork with settings of its own is none of them: it was
/// trained in another way before it began.
fn without_seed(config: &Value) -> Value {
    let mut settings = settings(config);
    settings.remove(SEED);
    let fork =
        config.get("fork").filter(|fork| fork.get("changes").is_some() || fork["weights_only"] == true);
    json!([settings, fork])
}

/// Returns a table of the tasks of a group that differ in the seed alone; nothing where there are none.
pub(super) fn table(group: &Group<'_>) -> String {
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

/// Adds to a report, as JSON, in which settings its tasks differ (`differs` of each), and where tasks differ in the seed
/// alone, their results together (`seeds`).
pub(crate) fn compare(report: &mut Value) -> Result<()> {
    let Some(tasks) = report["tasks"].as_array_mut() else { return Ok(()) };
    add_differences(tasks);
    let read = Report::so_far(tasks.clone())?;
    let of = |group: &Group<'_>| {
        let (differences, _) = Differences::of(group.tasks.iter().map(|task| &task.config)).without_seed();
        repeated(group).iter().map(|one| one.json(group, &differences)).collect::<Vec<_>>()
    };
    let seeds: Vec<Value> = read.groups().iter().flat_map(of).collect();
    if !seeds.is_empty() {
        report["seeds"] = seeds.into();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task(name: &str, lr: f64, seed: u64, loss: f64) -> Value {
        let training = json!({ "batch": 8, "seed": seed, "optimizer": { "name": "sgd", "lr": lr } });
        let result = json!({ "loss": loss, "perplexity": loss.exp(), "predicted_tokens": 9 });
        json!({
            "name": name, "state": "done", "steps": 4, "validation": result, "test": null,
            "config": { "batch": 8, "lr": lr, "data": "builtin", "training": training },
        })
    }

    fn tasks() -> Vec<Value> {
        let mut other = task("lr1e-2-seed2", 1e-2, 2, 9.0);
        other["state"] = json!("failed");
        vec![
            task("lr1e-2-seed1", 1e-2, 1, 5.0),
            other,
            task("lr1e-3-seed1", 1e-3, 1, 1.0),
            task("lr1e-3-seed2", 1e-3, 2, 2.0),
            task("lr1e-3-seed3", 1e-3, 3, 3.0),
        ]
    }

    #[test]
    fn tasks_that_differ_in_the_seed_alone_have_a_mean_and_a_deviation() {
        let mut report = json!({ "tasks": tasks() });
        compare(&mut report).unwrap();
        let seeds = report["seeds"].as_array().unwrap();
        assert_eq!(seeds.len(), 2);
        let [best, other] = [&seeds[0], &seeds[1]];
        assert_eq!((&best["differs"], &best["n"]), (&json!({ "lr": 1e-3 }), &json!(3)));
        assert_eq!(best["tasks"], json!(["lr1e-3-seed1", "lr1e-3-seed2", "lr1e-3-seed3"]));
        assert_eq!(best["validation"]["loss"], json!({ "mean": 2.0, "deviation": 1.0 }));
        assert_eq!((&best["test"], &other["n"]), (&Value::Null, &json!(1)));
        assert_eq!(other["validation"]["loss"], json!({ "mean": 5.0, "deviation": null }));
        assert_eq!(report["tasks"][2]["differs"], json!({ "lr": 1e-3, "seed": 1 }));
        let text = Report::so_far(tasks()).unwrap().ranking();
        let (_, table) = text.split_once("over seeds, ").unwrap();
        let rows: Vec<Vec<&str>> =
            table.lines().skip(1).map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(rows[0], ["lr", "seeds", "validation", "ppl", "test", "ppl"]);
        // e, e^2 and e^3, whose mean is 10.06 and whose deviation is 8.987.
        assert_eq!(rows[1], ["1e-3", "3", "10.064", "±", "8.987", "-"]);
        assert_eq!(rows[2], ["1e-2", "1", "of", "2", "148.4", "-"]);
    }

    #[test]
    fn tasks_without_a_repetition_have_no_table_and_forks_with_changes_are_no_repetition() {
        let mut tasks = vec![task("a", 1e-3, 1, 1.0), task("b", 1e-2, 2, 1.0)];
        assert!(!Report::so_far(tasks.clone()).unwrap().ranking().contains("over seeds"));
        tasks.push(task("c", 1e-3, 2, 1.0));
        assert!(Report::so_far(tasks.clone()).unwrap().ranking().contains("over seeds"));
        tasks[2]["config"]["fork"] = json!({ "of": "b", "at": 2, "changes": { "lr": "1e-3" } });
        assert!(!Report::so_far(tasks.clone()).unwrap().ranking().contains("over seeds"));
        // A trial that another one was trained for at first is trained as if it were alone.
        tasks[2]["config"]["fork"] = json!({ "of": "b", "at": 2 });
        assert!(Report::so_far(tasks).unwrap().ranking().contains("over seeds"));
    }
}
