//! The leaderboard as a picture: the validation loss or accuracy of each task against its hyper-parameters.

use crate::pictures::colour::CATEGORIES;
use crate::pictures::curves::{Curve, Curves, RankedBy};
use crate::pictures::scale::{Scale, apart, short};
use crate::pictures::svg::{Anchor, Stroke, Svg, stacked};

const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 560.0;
const LEFT: f64 = 72.0;
const RIGHT: f64 = 740.0;
const TOP: f64 = 84.0;
const BOTTOM: f64 = 500.0;
/// Pixels within which two numbers below the axis would touch.
const TICK: f64 = 44.0;

/// The hyper-parameter along the axis and the one that has a line for each of its values.
struct Axes {
    along: &'static str,
    lines: &'static str,
    value: fn(&Curve) -> Option<f64>,
    line: fn(&Curve) -> Option<f64>,
}

const BY_RATE: Axes = Axes { along: "learning rate", lines: "batch", value: |t| t.lr, line: |t| t.batch };
const BY_BATCH: Axes = Axes { along: "batch", lines: "learning rate", value: |t| t.batch, line: |t| t.lr };

/// Draws the results against the learning rates, or against the batch sizes where there is one learning rate.
/// Groups of tasks stand one below the other.
pub(crate) fn draw(groups: &[Curves]) -> String {
    stacked((WIDTH, HEIGHT), groups.iter().map(of_group).collect())
}

fn of_group(curves: &Curves) -> String {
    let style = curves.style();
    let axes = if style.rates.len() > 1 || style.batches.len() <= 1 { BY_RATE } else { BY_BATCH };
    let mut svg = Svg::new(WIDTH, HEIGHT);
    let measure = curves.ranked_by.name();
    let group = curves.title.as_ref().map_or(String::new(), |title| format!(": {title}"));
    let title = format!("{}{} by hyper-parameters{group}", measure[..1].to_uppercase(), &measure[1..]);
    svg.bold((16.0, 30.0), 19.0, &title);
    let along = distinct(&curves.tasks, axes.value);
    let lines = distinct(&curves.tasks, axes.line);
    let logs: Vec<f64> = along.iter().map(|value| value.max(1e-300).log10()).collect();
    let edge = 0.05 * (logs.last().unwrap_or(&1.0) - logs.first().unwrap_or(&0.0)).max(0.2);
    let first = logs.first().unwrap_or(&0.0) - edge;
    let x = Scale::new(first..logs.last().unwrap_or(&1.0) + edge, LEFT..RIGHT);
    let (range, above) = range(curves);
    let y = Scale::new(range, BOTTOM..TOP);
    frame(&mut svg, &x, &y, &along, [axes.along, measure]);
    let plot = Plot { curves, axes, x, y, best: curves.best() };
    plot.lines(&mut svg, &lines);
    let scale = match curves.ranked_by {
        RankedBy::ValidationAccuracy => "share of right answers, higher is better",
        RankedBy::ValidationLoss | RankedBy::TrainingLoss => "natural logarithm",
    };
    let mut notes = vec![format!("{scale}; each point is a task")];
    notes.extend(plot.unfinished().then(|| "hollow: not trained to its end".to_owned()));
    notes.extend((above > 0 || plot.failed() > 0).then(|| "crosses: failed, or above the plot".to_owned()));
    svg.grey((16.0, 51.0), 13.0, Anchor::Start, &notes.join("; "));
    svg.finish()
}

fn distinct(tasks: &[Curve], of: fn(&Curve) -> Option<f64>) -> Vec<f64> {
    let mut values: Vec<f64> = tasks.iter().filter_map(of).filter(|value| *value > 0.0).collect();
    values.sort_by(f64::total_cmp);
    values.dedup();
    values
}

/// The figures that are shown, and how many lie above: the loss of a task that diverged shall not flatten the others.
fn range(curves: &Curves) -> (std::ops::Range<f64>, usize) {
    let mut values: Vec<f64> = curves.tasks.iter().filter_map(Curve::rank_by).collect();
    values.sort_by(f64::total_cmp);
    let (Some(&low), Some(&high)) = (values.first(), values.last()) else { return (0.0..1.0, 0) };
    if curves.ranked_by == RankedBy::ValidationAccuracy {
        let space = 0.08 * (high - low).max(0.1);
        return (low - space..high + space, 0);
    }
    // Of few tasks none is an outlier.
    let typical = values[((values.len() - 1) * 3).div_ceil(4)];
    let high = high.min(low + 5.0 * (typical - low).max(0.1));
    let space = 0.08 * (high - low).max(0.5);
    (low - space..high + space, values.iter().filter(|value| **value > high + space).count())
}

fn frame(svg: &mut Svg, x: &Scale, y: &Scale, along: &[f64], [name, measure]: [&str; 2]) {
    let light = Stroke::new("#e4e4e4", 1.0);
    for tick in y.ticks(7.0) {
        svg.line((LEFT, y.at(tick)), (RIGHT, y.at(tick)), &light);
        svg.text((LEFT - 7.0, y.at(tick) + 4.0), 12.0, Anchor::End, &short(tick));
    }
    let mut last = f64::NEG_INFINITY;
    for value in along {
        let at = x.at(value.log10());
        svg.line((at, TOP), (at, BOTTOM), &light);
        if at - last >= TICK {
            let label = if *value >= 1.0 { short(*value) } else { format!("{value:e}") };
            svg.text((at, BOTTOM + 18.0), 12.0, Anchor::Middle, &label);
            last = at;
        }
    }
    let dark = Stroke::new("#444444", 1.0);
    svg.line((LEFT, BOTTOM), (RIGHT, BOTTOM), &dark);
    svg.line((LEFT, TOP), (LEFT, BOTTOM), &dark);
    let says = format!("{name} (logarithmic)");
    svg.grey(((LEFT + RIGHT) / 2.0, BOTTOM + 42.0), 13.0, Anchor::Middle, &says);
    svg.upward((20.0, (TOP + BOTTOM) / 2.0), 13.0, measure);
}

struct Plot<'a> {
    curves: &'a Curves,
    axes: Axes,
    x: Scale,
    y: Scale,
    best: Option<usize>,
}

impl Plot<'_> {
    fn failed(&self) -> usize {
        self.curves.tasks.iter().filter(|task| task.rank_by().is_none()).count()
    }

    fn unfinished(&self) -> bool {
        self.curves.tasks.iter().any(|task| task.rank_by().is_some() && task.state != "done")
    }

    fn lines(&self, svg: &mut Svg, lines: &[f64]) {
        let mut ends = Vec::new();
        for (index, line) in lines.iter().enumerate() {
            let colour = CATEGORIES[index % CATEGORIES.len()];
            // Crosses of tasks with the same value stand side by side.
            let aside = 9.0 * (index as f64 - (lines.len() - 1) as f64 / 2.0);
            if let Some(end) = self.line(svg, *line, (index, aside), colour) {
                ends.push((end, index, *line, colour));
            }
        }
        self.name_best(svg);
        let wanted: Vec<f64> = ends.iter().map(|((_, y), ..)| y + 4.0).collect();
        let places = apart(&wanted, 15.0, TOP + 10.0..BOTTOM);
        for (((x, y), index, line, colour), place) in ends.into_iter().zip(places) {
            svg.line(
                (x + 7.0, y),
                (RIGHT + 8.0, place - 4.0),
                &Stroke { opacity: 0.5, ..Stroke::new(colour, 1.0) },
            );
            mark(svg, (RIGHT + 16.0, place - 4.0), index, colour, true);
            let name = if line >= 1.0 { short(line) } else { format!("{line:e}") };
            svg.text((RIGHT + 27.0, place), 13.0, Anchor::Start, &format!("{} {name}", self.axes.lines));
        }
    }

    /// The tasks of one line in the order of the axis; returns the place of the last one that is shown.
    fn line(
        &self,
        svg: &mut Svg,
        line: f64,
        (index, aside): (usize, f64),
        colour: &str,
    ) -> Option<(f64, f64)> {
        let of = |task: &&Curve| (self.axes.line)(task) == Some(line) && (self.axes.value)(task).is_some();
        let mut tasks: Vec<&Curve> = self.curves.tasks.iter().filter(of).collect();
        let value = |task: &Curve| (self.axes.value)(task).unwrap_or(1.0);
        tasks.sort_by(|a, b| value(a).total_cmp(&value(b)));
        let at = |task: &Curve| self.x.at(value(task).log10());
        let mut shown: Vec<((f64, f64), &Curve)> = Vec::new();
        for task in tasks {
            match task.rank_by().map(|loss| self.y.at(loss)) {
                Some(y) if y >= TOP => shown.push(((at(task), y), task)),
                _ => cross(svg, (at(task) + aside, TOP + 8.0), colour),
            }
        }
        let points: Vec<(f64, f64)> = shown.iter().map(|(point, _)| *point).collect();
        svg.path(&points, &Stroke { opacity: 0.75, ..Stroke::new(colour, 1.8) });
        shown.iter().for_each(|(point, task)| mark(svg, *point, index, colour, task.state == "done"));
        points.last().copied()
    }

    /// A ring around the best task, and its name above the plot.
    fn name_best(&self, svg: &mut Svg) {
        let Some(task) = self.best.map(|best| &self.curves.tasks[best]) else { return };
        let (Some(value), Some(loss)) = ((self.axes.value)(task), task.rank_by()) else { return };
        svg.circle((self.x.at(value.log10()), self.y.at(loss)), 11.0, "none", &Stroke::new("#000000", 2.0));
        svg.bold((LEFT, TOP - 9.0), 13.0, &format!("best: {}, {}", task.name, task.shown()));
    }
}

/// A mark whose shape tells lines apart without colours; hollow where the result is not the last word.
fn mark(svg: &mut Svg, (x, y): (f64, f64), index: usize, colour: &str, filled: bool) {
    let (fill, edge) = (if filled { colour } else { "#ffffff" }, Stroke::new(colour, 1.8));
    let around = |offsets: &[(f64, f64)]| offsets.iter().map(|(dx, dy)| (x + dx, y + dy)).collect::<Vec<_>>();
    match index % 4 {
        0 => svg.circle((x, y), 5.0, fill, &edge),
        1 => svg.polygon(&around(&[(-4.5, -4.5), (4.5, -4.5), (4.5, 4.5), (-4.5, 4.5)]), fill, &edge),
        2 => svg.polygon(&around(&[(0.0, -5.5), (5.5, 4.5), (-5.5, 4.5)]), fill, &edge),
        _ => svg.polygon(&around(&[(0.0, -6.0), (6.0, 0.0), (0.0, 6.0), (-6.0, 0.0)]), fill, &edge),
    }
}

fn cross(svg: &mut Svg, (x, y): (f64, f64), colour: &str) {
    let stroke = Stroke::new(colour, 2.2);
    svg.line((x - 4.0, y - 4.0), (x + 4.0, y + 4.0), &stroke);
    svg.line((x - 4.0, y + 4.0), (x + 4.0, y - 4.0), &stroke);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pictures::curves::made;
    use crate::terminal::Score;

    #[test]
    fn each_batch_is_a_line_over_the_learning_rates() {
        let svg = of_group(&made(&[1e-3, 3e-3, 1e-2], &[8.0, 4.0], 10));
        for part in ["batch 8", "batch 4", "1e-3", "learning rate (logarithmic)", "best: b4-lr1e-2, 4.850"] {
            assert!(svg.contains(part), "{part} in {svg}");
        }
        assert_eq!((svg.matches("r=\"11\"").count(), svg.contains("hollow")), (1, false));
        let by_batch = of_group(&made(&[1e-3], &[8.0, 4.0], 10));
        assert!(
            by_batch.contains("batch (logarithmic)") && by_batch.contains("learning rate 1e-3"),
            "{by_batch}"
        );
    }

    #[test]
    fn what_failed_or_was_stopped_is_told_apart() {
        let mut curves = made(&[1e-3, 3e-3, 1e-2], &[8.0], 10);
        (curves.tasks[2].state, curves.tasks[0].state) = ("failed".to_owned(), "stopped".to_owned());
        let svg = of_group(&curves);
        assert!(svg.contains("crosses: failed") && svg.contains("hollow: not trained to its end"), "{svg}");
        assert!(svg.contains("best: b8-lr3e-3"));
    }

    #[test]
    fn accuracies_are_shown_from_the_least_to_the_best() {
        let mut curves = made(&[1e-3, 3e-3, 1e-2], &[8.0], 10);
        curves.ranked_by = RankedBy::ValidationAccuracy;
        for (task, accuracy) in curves.tasks.iter_mut().zip([0.1, 0.1, 1.0]) {
            task.result = Some(Score { loss: 1.0, perplexity: None, accuracy: Some(accuracy) });
        }
        let svg = of_group(&curves);
        assert!(svg.contains("Validation accuracy by") && svg.contains("higher is better"), "{svg}");
        assert!(svg.contains("best: b8-lr1e-2, 100.00%") && !svg.contains("crosses"), "{svg}");
    }

    #[test]
    fn the_worse_of_few_tasks_is_a_point_and_one_that_diverged_among_many_is_a_cross() {
        let rates: Vec<f64> = (1..=8).map(|rate| f64::from(rate) * 1e-3).collect();
        for (count, is_cross) in [(2, false), (4, false), (8, true)] {
            let mut curves = made(&rates[..count], &[8.0], 10);
            for (place, task) in curves.tasks.iter_mut().enumerate() {
                let loss = if place == 0 { 90.0 } else { 2.0 };
                task.result = Some(Score { loss, perplexity: None, accuracy: None });
            }
            assert_eq!(of_group(&curves).contains("crosses"), is_cross, "{count} tasks");
        }
    }

    #[test]
    fn nothing_and_one_task_can_be_drawn() {
        for curves in [made(&[], &[], 0), made(&[1e-3], &[8.0], 1)] {
            let svg = of_group(&curves);
            assert!(svg.starts_with("<svg") && !svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        }
    }
}
