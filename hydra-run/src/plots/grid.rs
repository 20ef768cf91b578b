//! The leaderboard as a plot: the validation loss or accuracy of each task against the settings in which the tasks differ.
//! One or two settings are drawn as an axis and lines, more settings as parallel coordinates.

use crate::plots::colour::CATEGORIES;
use crate::plots::curves::{Curve, Curves, RankedBy, SettingValue};
use crate::plots::parallel::{self, is_logarithmic};
use crate::plots::scale::{Scale, apart, short};
use crate::plots::svg::{Anchor, Stroke, Svg, stacked};
use crate::terminal::Measure;

const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 560.0;
const LEFT: f64 = 72.0;
const RIGHT: f64 = 740.0;
const TOP: f64 = 84.0;
const BOTTOM: f64 = 500.0;
/// The minimum distance of two numbers below the axis, in pixels.
const TICK: f64 = 44.0;

/// The indices of the setting along the axis, and of the setting that has a line for each value.
struct Axes {
    along: Option<usize>,
    lines: Option<usize>,
    /// True if the axis is logarithmic.
    logarithmic: bool,
}

/// The setting along the axis, if tasks differ in it.
const RATE: &str = "lr";
/// The maximum number of lines.
const MOST_LINES: usize = 8;

impl Axes {
    /// Returns the axes of tasks that differ in at most two settings, one of them numeric; else `None`.
    fn new(curves: &Curves) -> Option<Self> {
        let compared = curves.compared();
        let numbers = |setting: usize| -> Option<Vec<f64>> {
            curves.values(setting).iter().map(|value| value.number).collect()
        };
        let is_rate = |setting: &usize| curves.settings[*setting] == RATE;
        let numeric = |setting: &usize| numbers(*setting).is_some();
        let along = compared.iter().find(|setting| is_rate(setting)).or(compared.iter().find(|s| numeric(s)));
        let lines = compared.iter().find(|setting| Some(*setting) != along).copied();
        let is_drawn = compared.len() <= 2
            && along.is_some() != compared.is_empty()
            && lines.is_none_or(|lines| curves.values(lines).len() <= MOST_LINES);
        let logarithmic = along.is_some_and(|along| {
            numbers(*along).is_some_and(|all| is_logarithmic(&curves.settings[*along], &all))
        });
        is_drawn.then_some(Self { along: along.copied(), lines, logarithmic })
    }

    /// Returns the position of a task along the axis, in its scale.
    fn place(&self, task: &Curve) -> Option<f64> {
        let Some(along) = self.along else { return Some(0.0) };
        self.scaled(task.settings.get(along)?.number?)
    }

    fn scaled(&self, number: f64) -> Option<f64> {
        if self.logarithmic { (number > 0.0).then(|| number.log10()) } else { Some(number) }
    }
}

/// Draws the results against the settings, one group of tasks below the other.
pub(crate) fn draw(groups: &[Curves]) -> String {
    stacked((WIDTH, HEIGHT), groups.iter().map(of_group).collect())
}

fn of_group(curves: &Curves) -> String {
    let Some(axes) = Axes::new(curves) else { return parallel::draw(curves) };
    let mut svg = Svg::new(WIDTH, HEIGHT);
    let measure = curves.ranked_by.name();
    let group = curves.title.as_ref().map_or(String::new(), |title| format!(": {title}"));
    let title = format!("{}{} by settings{group}", measure[..1].to_uppercase(), &measure[1..]);
    svg.bold((16.0, 30.0), 19.0, &title);
    let along = axes.along.map(|along| curves.values(along)).unwrap_or_default();
    let lines = axes.lines.map(|lines| curves.values(lines)).unwrap_or_default();
    let places = along.iter().filter_map(|value| axes.scaled(value.number?));
    let (first, last) = places.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), p| (l.min(p), h.max(p)));
    let (first, last) = if first <= last { (first, last) } else { (-1.0, 1.0) };
    let least = if axes.logarithmic { 0.2 } else { f64::MIN_POSITIVE };
    let edge = 0.05 * (last - first).max(least);
    let x = Scale::new(first - edge..last + edge, LEFT..RIGHT);
    let (range, above) = range(curves);
    let y = Scale::new(range, BOTTOM..TOP);
    let name = axes.along.map_or("", |along| &curves.settings[along]);
    frame(&mut svg, (&x, &y), &axes, &along, [name, &measure]);
    let plot = Plot { curves, axes, x, y, best: curves.best() };
    plot.lines(&mut svg, &lines);
    let scale = match curves.ranked_by {
        RankedBy::Validation(Measure::ACCURACY) => "share of correct answers, higher is better",
        RankedBy::Validation(Measure::Metric { higher_is_better: true, .. }) => "higher is better",
        RankedBy::Validation(Measure::Metric { .. }) => "lower is better",
        RankedBy::Validation(_) | RankedBy::TrainingLoss => "natural logarithm",
    };
    let mut notes = vec![format!("{scale}; each point is a task")];
    notes.extend(plot.unfinished().then(|| "hollow: not trained to the end".to_owned()));
    notes.extend(
        (above > 0 || plot.failed() > 0)
            .then(|| "crosses: failed, or above the range of the plot".to_owned()),
    );
    svg.grey((16.0, 51.0), 13.0, Anchor::Start, &notes.join("; "));
    svg.finish()
}

/// Returns the range of results that is drawn, and the number above it. Outliers, such as diverged tasks, are above the range, so
/// that they do not compress it.
fn range(curves: &Curves) -> (std::ops::Range<f64>, usize) {
    let mut values: Vec<f64> = curves.tasks.iter().filter_map(Curve::rank_by).collect();
    values.sort_by(f64::total_cmp);
    let (Some(&low), Some(&high)) = (values.first(), values.last()) else { return (0.0..1.0, 0) };
    if curves.ranked_by.rises() {
        let space = 0.08 * (high - low).max(0.1);
        return (low - space..high + space, 0);
    }
    // With few tasks none is an outlier.
    let typical = values[((values.len() - 1) * 3).div_ceil(4)];
    let high = high.min(low + 5.0 * (typical - low).max(0.1));
    let space = 0.08 * (high - low).max(0.5);
    (low - space..high + space, values.iter().filter(|value| **value > high + space).count())
}

fn frame(
    svg: &mut Svg,
    (x, y): (&Scale, &Scale),
    axes: &Axes,
    along: &[SettingValue],
    [name, measure]: [&str; 2],
) {
    let light = Stroke::new("#e4e4e4", 1.0);
    for tick in y.ticks(7.0) {
        svg.line((LEFT, y.at(tick)), (RIGHT, y.at(tick)), &light);
        svg.text((LEFT - 7.0, y.at(tick) + 4.0), 12.0, Anchor::End, &short(tick));
    }
    let mut last = f64::NEG_INFINITY;
    for value in along {
        let Some(at) = value.number.and_then(|number| axes.scaled(number)).map(|place| x.at(place)) else {
            continue;
        };
        svg.line((at, TOP), (at, BOTTOM), &light);
        if at - last >= TICK {
            svg.text((at, BOTTOM + 18.0), 12.0, Anchor::Middle, &value.text);
            last = at;
        }
    }
    let dark = Stroke::new("#444444", 1.0);
    svg.line((LEFT, BOTTOM), (RIGHT, BOTTOM), &dark);
    svg.line((LEFT, TOP), (LEFT, BOTTOM), &dark);
    let label = if axes.logarithmic { format!("{name} (logarithmic)") } else { name.to_owned() };
    svg.grey(((LEFT + RIGHT) / 2.0, BOTTOM + 42.0), 13.0, Anchor::Middle, &label);
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

    fn lines(&self, svg: &mut Svg, lines: &[SettingValue]) {
        let mut ends = Vec::new();
        for index in 0..lines.len().max(1) {
            let (line, colour) = (lines.get(index), CATEGORIES[index % CATEGORIES.len()]);
            // Crosses of tasks with the same value are side by side.
            let aside = 9.0 * (index as f64 - (lines.len().max(1) - 1) as f64 / 2.0);
            if let Some((end, line)) = self.line(svg, line, (index, aside), colour).zip(line) {
                ends.push((end, index, line, colour));
            }
        }
        self.name_best(svg);
        let wanted: Vec<f64> = ends.iter().map(|((_, y), ..)| y + 4.0).collect();
        let places = apart(&wanted, 15.0, TOP + 10.0..BOTTOM);
        let name = self.axes.lines.map_or("", |lines| &self.curves.settings[lines]);
        for (((x, y), index, line, colour), place) in ends.into_iter().zip(places) {
            svg.line(
                (x + 7.0, y),
                (RIGHT + 8.0, place - 4.0),
                &Stroke { opacity: 0.5, ..Stroke::new(colour, 1.0) },
            );
            mark(svg, (RIGHT + 16.0, place - 4.0), index, colour, true);
            svg.text((RIGHT + 27.0, place), 13.0, Anchor::Start, &format!("{name} {}", line.text));
        }
    }

    /// Draws the tasks of one line, through the means of tasks with the same position. Returns the last point.
    fn line(
        &self,
        svg: &mut Svg,
        line: Option<&SettingValue>,
        (index, aside): (usize, f64),
        colour: &str,
    ) -> Option<(f64, f64)> {
        let is_on_line = |task: &&Curve| self.axes.lines.is_none_or(|lines| task.settings.get(lines) == line);
        let mut tasks: Vec<(f64, &Curve)> = self
            .curves
            .tasks
            .iter()
            .filter(is_on_line)
            .filter_map(|task| Some((self.x.at(self.axes.place(task)?), task)))
            .collect();
        tasks.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut shown: Vec<((f64, f64), &Curve)> = Vec::new();
        for (at, task) in tasks {
            match task.rank_by().map(|loss| self.y.at(loss)) {
                Some(y) if y >= TOP => shown.push(((at, y), task)),
                _ => cross(svg, (at + aside, TOP + 8.0), colour),
            }
        }
        let points: Vec<(f64, f64)> = shown
            .chunk_by(|(a, _), (b, _)| a.0 == b.0)
            .map(|same| (same[0].0.0, same.iter().map(|(point, _)| point.1).sum::<f64>() / same.len() as f64))
            .collect();
        svg.path(&points, &Stroke { opacity: 0.75, ..Stroke::new(colour, 1.8) });
        shown.iter().for_each(|(point, task)| mark(svg, *point, index, colour, task.state == "done"));
        points.last().copied()
    }

    /// Draws a ring around the best task, and its name above the plot.
    fn name_best(&self, svg: &mut Svg) {
        let Some(task) = self.best.map(|best| &self.curves.tasks[best]) else { return };
        let (Some(place), Some(loss)) = (self.axes.place(task), task.rank_by()) else { return };
        svg.circle((self.x.at(place), self.y.at(loss)), 11.0, "none", &Stroke::new("#000000", 2.0));
        svg.bold((LEFT, TOP - 9.0), 13.0, &format!("best: {}, {}", task.name, task.shown()));
    }
}

/// Draws a mark. Lines have different shapes; marks of tasks that are not done are hollow.
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
    use crate::plots::curves::made;
    use crate::terminal::Score;

    #[test]
    fn each_batch_is_a_line_over_the_learning_rates() {
        let svg = of_group(&made(&[1e-3, 3e-3, 1e-2], &[8.0, 4.0], 10));
        for part in ["batch 8", "batch 4", "1e-3", "lr (logarithmic)", "best: b4-lr1e-2, 4.850"] {
            assert!(svg.contains(part), "{part} in {svg}");
        }
        assert_eq!((svg.matches("r=\"11\"").count(), svg.contains("hollow")), (1, false));
        let by_batch = of_group(&made(&[1e-3], &[8.0, 4.0], 10));
        assert!(by_batch.contains("batch (logarithmic)") && !by_batch.contains(">lr"), "{by_batch}");
    }

    #[test]
    fn names_are_lines_and_more_settings_than_two_are_parallel_coordinates() {
        let mut curves = made(&[1e-3, 3e-3, 1e-2], &[8.0, 4.0], 10);
        curves.settings[0] = "optimizer".to_owned();
        for task in &mut curves.tasks {
            let text = if task.settings[0].text == "8" { "adamw" } else { "sgd" }.to_owned();
            task.settings[0] = SettingValue { text, number: None };
        }
        let svg = of_group(&curves);
        assert!(svg.contains("optimizer adamw") && svg.contains("optimizer sgd"), "{svg}");
        curves.settings.push("warmup".to_owned());
        for (index, task) in curves.tasks.iter_mut().enumerate() {
            task.settings.push(SettingValue { text: index.to_string(), number: Some(index as f64) });
        }
        assert!(of_group(&curves).contains("a line for each task"));
        // Repetitions with other seeds are points at one place.
        curves.settings[2] = "seed".to_owned();
        assert!(of_group(&curves).contains("each point is a task"));
    }

    #[test]
    fn what_failed_or_was_stopped_is_told_apart() {
        let mut curves = made(&[1e-3, 3e-3, 1e-2], &[8.0], 10);
        (curves.tasks[2].state, curves.tasks[0].state) = ("failed".to_owned(), "stopped".to_owned());
        let svg = of_group(&curves);
        assert!(svg.contains("crosses: failed") && svg.contains("hollow: not trained to the end"), "{svg}");
        assert!(svg.contains("best: b8-lr3e-3"));
    }

    #[test]
    fn accuracies_are_shown_from_the_least_to_the_best() {
        let mut curves = made(&[1e-3, 3e-3, 1e-2], &[8.0], 10);
        curves.ranked_by = RankedBy::Validation(Measure::ACCURACY);
        for (task, accuracy) in curves.tasks.iter_mut().zip([0.1, 0.1, 1.0]) {
            task.result = Some(Score { metric: Some((Measure::ACCURACY, accuracy)), ..Score::of_loss(1.0) });
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
                task.result = Some(Score::of_loss(loss));
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
