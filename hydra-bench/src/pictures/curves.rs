//! The tasks of a run as pictures show them: hyper-parameters, losses over what was trained, and the best one.

use crate::pictures::colour::{CATEGORIES, Palette, ordered};
use crate::pictures::svg::Stroke;
use crate::terminal::{Score, percent};

/// The dashes of lines, of which neighbours can be told apart.
const DASHES: [&str; 6] = ["", "8 3", "3 3", "1 3", "11 3 2 3", "11 3 2 3 2 3"];

/// The curves of a run.
#[derive(Clone, Debug)]
pub(crate) struct Curves {
    /// What the curves are over: `tokens`, or `minibatches` where those are not known.
    pub(crate) unit: String,
    /// What the tasks are, where they are one of several groups.
    pub(crate) title: Option<String>,
    /// What the tasks are ranked by.
    pub(crate) ranked_by: RankedBy,
    pub(crate) tasks: Vec<Curve>,
}

/// The figure that tasks are ranked by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RankedBy {
    ValidationAccuracy,
    ValidationLoss,
    /// Where no trained weights were validated.
    TrainingLoss,
}

impl RankedBy {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::ValidationAccuracy => "validation accuracy",
            Self::ValidationLoss => "validation loss",
            Self::TrainingLoss => "training loss",
        }
    }
}

/// One task.
#[derive(Clone, Debug, Default)]
pub(crate) struct Curve {
    pub(crate) name: String,
    pub(crate) batch: Option<f64>,
    pub(crate) lr: Option<f64>,
    /// `done`, `failed`, `stopped`.
    pub(crate) state: String,
    /// The units trained with the end of each minibatch, and its loss.
    pub(crate) training: Vec<(f64, f64)>,
    /// The units trained before each validation, and its loss.
    pub(crate) validation: Vec<(f64, f64)>,
    /// What ranks it.
    pub(crate) result: Option<Score>,
}

impl Curve {
    /// The accuracy or the loss that ranks it; `None` where it failed, or that is no number.
    pub(crate) fn rank_by(&self) -> Option<f64> {
        let figure = self.result.map(|result| result.accuracy.unwrap_or(result.loss));
        figure.filter(|figure| figure.is_finite() && self.state != "failed")
    }

    /// The figure that ranks it, or its state.
    pub(crate) fn figure(&self) -> String {
        match (self.rank_by(), self.result) {
            (Some(_), Some(Score { accuracy: Some(accuracy), .. })) => percent(accuracy),
            (Some(loss), _) => format!("{loss:.3}"),
            _ => self.state.clone(),
        }
    }

    /// The result in words.
    pub(crate) fn shown(&self) -> String {
        match self.result {
            Some(Score { loss, accuracy: Some(accuracy), .. }) => {
                format!("{} (loss {loss:.3})", percent(accuracy))
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
    /// The tasks from the best to the worst, those without a result last, by their indices.
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

    /// The best task, if one has a result.
    pub(crate) fn best(&self) -> Option<usize> {
        self.ranked().first().copied().filter(|index| self.tasks[*index].rank_by().is_some())
    }

    /// The tasks' colours where there are no lines.
    pub(crate) fn palette(&self) -> Palette {
        let style = self.style();
        let colour = |(index, task): (usize, &Curve)| style.of(index, task).colour;
        Palette::of_lines(&self.tasks.iter().enumerate().map(colour).collect::<Vec<_>>())
    }

    /// How lines tell the tasks apart.
    pub(crate) fn style(&self) -> Style {
        let distinct = |of: fn(&Curve) -> Option<f64>| {
            let mut values: Vec<f64> = self.tasks.iter().filter_map(of).collect();
            values.sort_by(f64::total_cmp);
            values.dedup();
            values
        };
        Style { rates: distinct(|task| task.lr), batches: distinct(|task| task.batch) }
    }
}

/// Colours by learning rate, dashes by batch size; where there is one learning rate, colours by batch size.
#[derive(Clone, Debug)]
pub(crate) struct Style {
    /// The learning rates, ascending.
    pub(crate) rates: Vec<f64>,
    /// The batch sizes, ascending.
    pub(crate) batches: Vec<f64>,
}

impl Style {
    pub(crate) fn of(&self, index: usize, task: &Curve) -> Stroke {
        let place = |values: &[f64], value: Option<f64>| values.iter().position(|v| Some(*v) == value);
        let (rate, batch) = (place(&self.rates, task.lr), place(&self.batches, task.batch));
        match (rate, batch) {
            (Some(rate), Some(batch)) if self.rates.len() > 1 => {
                Stroke { dash: DASHES[batch % DASHES.len()], ..self.of_rate(rate) }
            }
            (_, Some(batch)) if self.batches.len() > 1 => {
                Stroke::new(ordered(batch, self.batches.len()), 1.4)
            }
            _ => Stroke::new(CATEGORIES[index % CATEGORIES.len()], 1.4),
        }
    }

    pub(crate) fn of_rate(&self, rate: usize) -> Stroke {
        Stroke::new(ordered(rate, self.rates.len()), 1.4)
    }

    pub(crate) fn of_batch(&self, batch: usize) -> Stroke {
        Stroke { dash: DASHES[batch % DASHES.len()], ..Stroke::new("#333333", 1.4) }
    }
}

/// Tasks of a grid for tests: the losses of each fall from 5 by its place, over so many minibatches of its batch.
#[cfg(test)]
pub(crate) fn made(rates: &[f64], batches: &[f64], minibatches: usize) -> Curves {
    let pairs = batches.iter().flat_map(|batch| rates.iter().map(move |rate| (*batch, *rate)));
    let task = |(index, (batch, lr)): (usize, (f64, f64))| {
        let at = |step: usize| 5.0 - (0.1 + 0.01 * index as f64) * step as f64 / minibatches as f64;
        let training = (0..minibatches).map(|step| ((step + 1) as f64 * batch, at(step)));
        let (loss, end) = (at(minibatches), minibatches as f64 * batch);
        Curve {
            name: format!("b{batch}-lr{lr:e}"),
            batch: Some(batch),
            lr: Some(lr),
            state: "done".to_owned(),
            training: training.collect(),
            validation: vec![(0.0, 5.0), (end, loss)],
            result: Some(Score { loss, perplexity: Some(loss.exp()), accuracy: None }),
        }
    };
    let tasks = pairs.enumerate().map(task).collect();
    Curves { unit: "tokens".to_owned(), title: None, ranked_by: RankedBy::ValidationLoss, tasks }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pictures::colour::Shade;
    use plotters::style::RGBColor;
    use std::collections::BTreeSet;

    #[test]
    fn the_best_comes_first_and_what_failed_last() {
        let mut curves = made(&[1e-3, 3e-3, 1e-2], &[8.0], 4);
        curves.tasks[2].state = "failed".to_owned();
        curves.tasks[0].result = Some(Score { loss: f64::NAN, perplexity: None, accuracy: None });
        assert_eq!((curves.ranked(), curves.best()), (vec![1, 0, 2], Some(1)));
        assert_eq!(curves.tasks[1].shown(), "4.890 (perplexity 133.0)");
        curves.tasks.truncate(1);
        assert_eq!(curves.best(), None);
    }

    #[test]
    fn classifiers_are_ranked_by_their_accuracy() {
        let mut curves = made(&[1e-3, 3e-3, 1e-2], &[8.0], 4);
        for (task, accuracy) in curves.tasks.iter_mut().zip([0.5, 0.875, 0.25]) {
            task.result = Some(Score { loss: accuracy, perplexity: None, accuracy: Some(accuracy) });
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
        let looks = curves.tasks.iter().enumerate().map(|(index, task)| style.of(index, task));
        let looks: BTreeSet<(String, &str)> = looks.map(|stroke| (stroke.colour, stroke.dash)).collect();
        assert_eq!(looks.len(), 60);
        let one_rate = made(&[1e-3], &[1.0, 2.0, 4.0], 2);
        let colours: BTreeSet<String> =
            one_rate.tasks.iter().map(|task| one_rate.style().of(0, task).colour).collect();
        assert_eq!(colours.len(), 3, "one learning rate: the batch sizes have the colours");
        let hex = |RGBColor(red, green, blue)| format!("#{red:02x}{green:02x}{blue:02x}");
        let of = |curves: &Curves, index| hex(curves.palette().of(index, Shade::Dark));
        assert_eq!(of(&one_rate, 2), one_rate.style().of(2, &one_rate.tasks[2]).colour, "as their lines");
        assert_eq!(of(&curves, 1), CATEGORIES[1], "dashes tell lines apart, and here there are none");
    }
}
