//! The data of the plots: for each task the settings in which it differs, its losses, and its rank.

use crate::plots::colour::{CATEGORIES, Palette, ordered};
use crate::plots::svg::Stroke;
use crate::terminal::{Measure, Score};

/// The dash patterns of lines; neighbours are distinguishable.
const DASHES: [&str; 6] = ["", "8 3", "3 3", "1 3", "11 3 2 3", "11 3 2 3 2 3"];

/// The curves of a run.
#[derive(Clone, Debug)]
pub(crate) struct Curves {
    /// The unit of the horizontal axis: `tokens`, or `minibatches` if the numbers of tokens are not known.
    pub(crate) unit: String,
    /// The title of this group of tasks, if there are several.
    pub(crate) title: Option<String>,
    /// The metric that ranks the tasks.
    pub(crate) ranked_by: RankedBy,
    /// The names of the settings in which the tasks differ.
    pub(crate) settings: Vec<String>,
    pub(crate) tasks: Vec<Curve>,
}

/// The value of a setting.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct SettingValue {
    /// The text that is shown.
    pub(crate) text: String,
    /// The value, if it is a number.
    pub(crate) number: Option<f64>,
}

/// The setting whose values are repetitions: it has a colour or an axis only if there is no other setting.
const SEED: &str = "seed";
/// The setting that gives the colours, if the tasks differ in it.
const RATE: &str = "lr";

/// The metric that ranks tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RankedBy {
    /// A metric of the validations, or their loss.
    Validation(Measure),
    /// If no trained weights were validated.
    TrainingLoss,
}

impl RankedBy {
    pub(crate) fn name(self) -> String {
        match self {
            Self::Validation(measure) => format!("validation {}", measure.name()),
            Self::TrainingLoss => "training loss".to_owned(),
        }
    }

    /// Returns whether larger values are better.
    pub(crate) fn rises(self) -> bool {
        matches!(self, Self::Validation(Measure::Metric { higher_is_better: true, .. }))
    }
}

/// One task.
#[derive(Clone, Debug, Default)]
pub(crate) struct Curve {
    pub(crate) name: String,
    /// Its settings, in the order of the names in [`Curves::settings`].
    pub(crate) settings: Vec<SettingValue>,
    /// `done`, `failed`, `stopped`.
    pub(crate) state: String,
    /// The units trained at the end of each minibatch, and its loss.
    pub(crate) training: Vec<(f64, f64)>,
    /// The units trained before each validation, and its loss.
    pub(crate) validation: Vec<(f64, f64)>,
    /// The result that ranks it.
    pub(crate) result: Option<Score>,
}

impl Curve {
    /// Returns the metric or the loss that ranks the task; `None` if it failed, or the value is not finite.
    pub(crate) fn rank_by(&self) -> Option<f64> {
        let figure = self.result.map(|result| result.metric.map_or(result.loss, |(_, value)| value));
        figure.filter(|figure| figure.is_finite() && self.state != "failed")
    }

    /// Returns the metric that ranks the task as text, or its state.
    pub(crate) fn figure(&self) -> String {
        match (self.rank_by(), self.result) {
            (Some(_), Some(Score { metric: Some((measure, value)), .. })) => {
                measure.shown(value, four_digits)
            }
            (Some(loss), _) => format!("{loss:.3}"),
            _ => self.state.clone(),
        }
    }

    /// Returns the result as text, with its secondary metric.
    pub(crate) fn shown(&self) -> String {
        match self.result {
            Some(Score { loss, metric: Some((measure, value)), .. }) => {
                format!("{} (loss {loss:.3})", measure.shown(value, four_digits))
            }
            Some(Score { loss, perplexity: Some(perplexity), .. }) if perplexity < 1e6 => {
                format!("{loss:.3} (perplexity {})", four_digits(perplexity))
            }
            Some(Score { loss, .. }) if loss.is_finite() => format!("{loss:.3}"),
            _ => self.state.clone(),
        }
    }
}

fn four_digits(value: f64) -> String {
    match value {
        v if v >= 1000.0 => format!("{v:.0}"),
        v if v >= 100.0 => format!("{v:.1}"),
        v => format!("{v:.2}"),
    }
}

impl Curves {
    /// Returns the indices of the tasks from best to worst, those without a result last.
    pub(crate) fn ranked(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.tasks.len()).collect();
        let result =
            |index: usize| self.tasks[index].result.filter(|_| self.tasks[index].rank_by().is_some());
        order.sort_by(|a, b| match (result(*a), result(*b)) {
            (Some(a), Some(b)) => a.order(&b),
            (a, b) => b.is_some().cmp(&a.is_some()),
        });
        order
    }

    /// Returns the index of the best task, if one has a result.
    pub(crate) fn best(&self) -> Option<usize> {
        self.ranked().first().copied().filter(|index| self.tasks[*index].rank_by().is_some())
    }

    /// Returns the indices of the settings without the seed; with the seed if it is the only one.
    pub(crate) fn compared(&self) -> Vec<usize> {
        let all = 0..self.settings.len();
        let others: Vec<usize> = all.clone().filter(|setting| self.settings[*setting] != SEED).collect();
        if others.is_empty() { all.collect() } else { others }
    }

    /// Returns the distinct values of a setting: numbers in order, then texts in order of occurrence.
    pub(crate) fn values(&self, setting: usize) -> Vec<SettingValue> {
        let mut values: Vec<SettingValue> = Vec::new();
        for value in self.tasks.iter().filter_map(|task| task.settings.get(setting)) {
            if !values.contains(value) {
                values.push(value.clone());
            }
        }
        values.sort_by(|a, b| {
            let number = |value: &SettingValue| value.number.unwrap_or(f64::INFINITY);
            number(a).total_cmp(&number(b))
        });
        values
    }

    /// Returns the colours of tasks in plots without lines: tasks with equal values of the colouring setting share a colour,
    /// and texts have the other settings.
    pub(crate) fn palette(&self) -> Palette {
        let style = self.style();
        let Some(keyed) = &style.colour else { return Palette::default() };
        let colour = |(index, task): (usize, &Curve)| style.stroke(index, task).colour;
        let colours: Vec<String> = self.tasks.iter().enumerate().map(colour).collect();
        // With more values than distinguishable colours, the texts have the colouring setting too.
        let few = keyed.values.len() <= Palette::DISTINGUISHABLE;
        let compared = self.compared();
        let written: Vec<usize> =
            compared.into_iter().filter(|setting| !few || *setting != keyed.setting).collect();
        let written: Vec<usize> = if few { written } else { [vec![keyed.setting], written].concat() };
        let mut seen = std::collections::BTreeSet::new();
        let written: Vec<usize> = written.into_iter().filter(|setting| seen.insert(*setting)).collect();
        let text = |task: &Curve| {
            let values = written.iter().filter_map(|setting| task.settings.get(*setting));
            values.map(|value| value.text.as_str()).collect::<Vec<_>>().join(" ")
        };
        let names: Vec<&str> = written.iter().map(|setting| self.settings[*setting].as_str()).collect();
        let entries = keyed.values.iter().enumerate();
        let entries = entries.map(|(place, value)| {
            (keyed.colour(place), format!("{} {}", self.settings[keyed.setting], value.text))
        });
        Palette::of_settings(
            &colours,
            entries.collect(),
            self.tasks.iter().map(text).collect(),
            names.join(", "),
        )
    }

    /// Returns the style of lines: colours by the learning rate, or by the first setting in which tasks differ, and dashes by the
    /// next one.
    pub(crate) fn style(&self) -> Style {
        let compared = self.compared();
        let keyed = |setting: usize| {
            let (name, values) = (self.settings[setting].clone(), self.values(setting));
            Keyed { setting, name, ordered: values.iter().all(|value| value.number.is_some()), values }
        };
        let rate = compared.iter().position(|setting| self.settings[*setting] == RATE).unwrap_or(0);
        let colour = compared.get(rate).copied();
        let dash = compared.iter().copied().find(|setting| Some(*setting) != colour);
        Style { colour: colour.map(keyed), dash: dash.map(keyed) }
    }
}

/// A setting whose values have different colours or dashes.
#[derive(Clone, Debug)]
pub(crate) struct Keyed {
    setting: usize,
    pub(crate) name: String,
    pub(crate) values: Vec<SettingValue>,
    /// True if the values are numbers; the colours are then ordered.
    ordered: bool,
}

impl Keyed {
    fn place(&self, task: &Curve) -> Option<usize> {
        let value = task.settings.get(self.setting)?;
        self.values.iter().position(|known| known == value)
    }

    pub(crate) fn colour(&self, place: usize) -> String {
        match self.ordered {
            true => ordered(place, self.values.len()),
            false => CATEGORIES[place % CATEGORIES.len()].to_owned(),
        }
    }
}

/// The settings that give lines their colours and dashes.
#[derive(Clone, Debug)]
pub(crate) struct Style {
    pub(crate) colour: Option<Keyed>,
    pub(crate) dash: Option<Keyed>,
}

impl Style {
    /// Returns the stroke of a task's line.
    pub(crate) fn stroke(&self, index: usize, task: &Curve) -> Stroke {
        let place = |keyed: &Option<Keyed>| keyed.as_ref().and_then(|keyed| keyed.place(task));
        let own = || CATEGORIES[index % CATEGORIES.len()].to_owned();
        let colour = self.colour.as_ref().zip(place(&self.colour));
        let colour = colour.map_or_else(own, |(keyed, place)| keyed.colour(place));
        let dash = place(&self.dash).map_or("", |place| DASHES[place % DASHES.len()]);
        Stroke { dash, ..Stroke::new(colour, 1.4) }
    }

    /// Returns the legends of colours and of dashes: the setting, and a line and a text for each of its values.
    pub(crate) fn keys(&self) -> Vec<(&str, Vec<(Stroke, String)>)> {
        let entries = |keyed: &Keyed, stroke: &dyn Fn(usize) -> Stroke| {
            let values = keyed.values.iter().enumerate();
            values.map(|(place, value)| (stroke(place), value.text.clone())).collect::<Vec<_>>()
        };
        let colours = self.colour.as_ref().map(|keyed| {
            (keyed.name.as_str(), entries(keyed, &|place| Stroke::new(keyed.colour(place), 1.4)))
        });
        let dashed =
            |place: usize| Stroke { dash: DASHES[place % DASHES.len()], ..Stroke::new("#333333", 1.4) };
        let dashes = self.dash.as_ref().map(|keyed| (keyed.name.as_str(), entries(keyed, &dashed)));
        colours.into_iter().chain(dashes).collect()
    }
}

/// Returns the tasks of a grid for tests. The losses fall from 5, each task's faster than those before it.
#[cfg(test)]
pub(crate) fn made(rates: &[f64], batches: &[f64], minibatches: usize) -> Curves {
    let pairs = batches.iter().flat_map(|batch| rates.iter().map(move |rate| (*batch, *rate)));
    let task = |(index, (batch, lr)): (usize, (f64, f64))| {
        let at = |step: usize| 5.0 - (0.1 + 0.01 * index as f64) * step as f64 / minibatches as f64;
        let training = (0..minibatches).map(|step| ((step + 1) as f64 * batch, at(step)));
        let (loss, end) = (at(minibatches), minibatches as f64 * batch);
        Curve {
            name: format!("b{batch}-lr{lr:e}"),
            settings: vec![
                SettingValue { text: batch.to_string(), number: Some(batch) },
                SettingValue { text: format!("{lr:e}"), number: Some(lr) },
            ],
            state: "done".to_owned(),
            training: training.collect(),
            validation: vec![(0.0, 5.0), (end, loss)],
            result: Some(Score { perplexity: Some(loss.exp()), ..Score::of_loss(loss) }),
        }
    };
    let mut tasks: Vec<Curve> = pairs.enumerate().map(task).collect();
    let differ = [batches.len() > 1, rates.len() > 1];
    for task in &mut tasks {
        let mut kept = differ.into_iter();
        task.settings.retain(|_| kept.next() == Some(true));
    }
    let settings = ["batch", "lr"].into_iter().zip(differ).filter(|(_, differ)| *differ);
    let settings = settings.map(|(name, _)| name.to_owned()).collect();
    Curves {
        unit: "tokens".to_owned(),
        title: None,
        ranked_by: RankedBy::Validation(Measure::Loss),
        settings,
        tasks,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plots::colour::Shade;
    use plotters::style::RGBColor;
    use std::collections::BTreeSet;

    #[test]
    fn the_best_comes_first_and_what_failed_last() {
        let mut curves = made(&[1e-3, 3e-3, 1e-2], &[8.0], 4);
        curves.tasks[2].state = "failed".to_owned();
        curves.tasks[0].result = Some(Score::of_loss(f64::NAN));
        assert_eq!((curves.ranked(), curves.best()), (vec![1, 0, 2], Some(1)));
        assert_eq!(curves.tasks[1].shown(), "4.890 (perplexity 133.0)");
        curves.tasks.truncate(1);
        assert_eq!(curves.best(), None);
    }

    #[test]
    fn classifiers_are_ranked_by_their_accuracy() {
        let mut curves = made(&[1e-3, 3e-3, 1e-2], &[8.0], 4);
        for (task, accuracy) in curves.tasks.iter_mut().zip([0.5, 0.875, 0.25]) {
            task.result =
                Some(Score { metric: Some((Measure::ACCURACY, accuracy)), ..Score::of_loss(accuracy) });
        }
        assert_eq!(curves.ranked(), [1, 0, 2]);
        let best = &curves.tasks[1];
        assert_eq!((best.figure(), best.shown()), ("87.50%".to_owned(), "87.50% (loss 0.875)".to_owned()));
    }

    #[test]
    fn every_task_of_a_grid_has_a_line_of_its_own() {
        let rates: Vec<f64> = (1..=10).map(|i| f64::from(i) / 1e4).collect();
        let curves = made(&rates, &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0], 2);
        let style = curves.style();
        let looks = curves.tasks.iter().enumerate().map(|(index, task)| style.stroke(index, task));
        let looks: BTreeSet<(String, &str)> = looks.map(|stroke| (stroke.colour, stroke.dash)).collect();
        assert_eq!(looks.len(), 60);
        let one_rate = made(&[1e-3], &[1.0, 2.0, 4.0], 2);
        let colours: BTreeSet<String> =
            one_rate.tasks.iter().map(|task| one_rate.style().stroke(0, task).colour).collect();
        assert_eq!(colours.len(), 3, "one learning rate: the batch sizes have the colours");
        let hex = |RGBColor(red, green, blue)| format!("#{red:02x}{green:02x}{blue:02x}");
        let of = |curves: &Curves, index| hex(curves.palette().colour(index, Shade::Dark));
        assert_eq!(of(&one_rate, 2), one_rate.style().stroke(2, &one_rate.tasks[2]).colour, "as their lines");
        assert_eq!(of(&curves, 1), curves.style().stroke(1, &curves.tasks[1]).colour, "as their lines");
        assert_eq!(of(&curves, 1), of(&curves, 11), "equal colours for equal learning rates");
    }

    #[test]
    fn what_colours_do_not_say_is_written() {
        let grid = made(&[1e-3, 3e-3], &[4.0, 8.0], 2);
        let palette = grid.palette();
        assert_eq!((palette.text(0), palette.text(2)), ("4", "8"));
        let entries: Vec<&str> = palette.entries().iter().map(|(_, text)| text.as_str()).collect();
        assert_eq!((entries, palette.written()), (vec!["lr 1e-3", "lr 3e-3"], "batch"));
        let rates: Vec<f64> = (1..=12).map(|i| f64::from(i) / 1e4).collect();
        let many = made(&rates, &[4.0, 8.0], 2).palette();
        assert_eq!((many.text(1), many.written()), ("2e-4 4", "lr, batch"));
        assert_eq!(made(&rates[..1], &[4.0], 2).palette().written(), "", "one task needs no text");
    }

    #[test]
    fn names_have_the_colours_of_categories_and_seeds_have_none() {
        let mut curves = made(&[1e-3, 3e-3], &[4.0], 2);
        curves.settings = vec!["optimizer".to_owned(), SEED.to_owned()];
        for (task, (optimizer, seed)) in curves.tasks.iter_mut().zip([("adamw", 1.0), ("sgd", 2.0)]) {
            let text = |text: &str, number| SettingValue { text: text.to_owned(), number };
            task.settings = vec![text(optimizer, None), text(&seed.to_string(), Some(seed))];
        }
        let style = curves.style();
        assert_eq!(style.stroke(1, &curves.tasks[1]).colour, CATEGORIES[1]);
        assert!(style.dash.is_none() && style.keys().len() == 1 && style.keys()[0].0 == "optimizer");
    }
}
