//! The loss plots: training and validation losses side by side, and next to them the ranking, which is the legend of the lines.

use crate::plots::curves::{Curves, Style};
use crate::plots::scale::{Scale, short};
use crate::plots::svg::{Anchor, Stroke, Svg, stacked};
use std::ops::Range;

const WIDTH: f64 = 1390.0;
const HEIGHT: f64 = 600.0;
const TOP: f64 = 92.0;
const BOTTOM: f64 = 544.0;
/// The pixels of the two plots.
const TRAINING: Range<f64> = 64.0..516.0;
const VALIDATION: Range<f64> = 548.0..1000.0;
/// The left edge of the ranking.
const SIDE: f64 = 1024.0;
const ROW: f64 = 17.0;
/// The maximum length of a name in the ranking.
const LONGEST: usize = 38;
/// The number of windows over which the training loss is averaged.
const WINDOWS: f64 = 100.0;
/// The maximum number of tasks in a full ranking, and the number in one with a legend of colours and dashes.
const NAMED: usize = 18;
const NAMED_OF_MANY: usize = 8;

/// Draws the losses of each group of tasks as SVG, one below the other.
pub(crate) fn draw(groups: &[Curves]) -> String {
    stacked((WIDTH, HEIGHT), groups.iter().map(of_group).collect())
}

fn of_group(curves: &Curves) -> String {
    let mut svg = Svg::new(WIDTH, HEIGHT);
    let longest = curves.tasks.iter().flat_map(|task| task.training.iter().chain(&task.validation));
    let longest = longest.map(|point| point.0).fold(0.0, f64::max).max(1e-9);
    let window = longest / WINDOWS;
    let smooth: Vec<Smooth> =
        curves.tasks.iter().map(|task| Smooth::average(&task.training, window)).collect();
    let range = range(curves, &smooth, longest);
    let averaged = smooth.iter().any(|smooth| smooth.averaged);
    heading(&mut svg, curves, averaged.then_some(window), above(curves, &smooth, range.end));
    let (style, best) = (curves.style(), curves.best());
    let validated = curves.tasks.iter().any(|task| !task.validation.is_empty());
    let side_by_side = [TRAINING, VALIDATION];
    let one = [TRAINING.start..VALIDATION.end];
    let plots: &[Range<f64>] = if validated { &side_by_side } else { &one };
    for (index, pixels) in plots.iter().enumerate() {
        let plot = Plot {
            x: Scale::new(0.0..longest, pixels.clone()),
            y: Scale::new(range.clone(), BOTTOM..TOP),
            pixels: pixels.clone(),
        };
        plot.frame(&mut svg, ["training loss", "validation loss"][index], &curves.unit, index == 0);
        svg.clipped(pixels.start..pixels.end + 6.0, TOP..BOTTOM + 6.0, |svg| {
            // The best task is drawn last, on top of the others.
            let others = (0..curves.tasks.len()).rev().filter(|task| Some(*task) != best);
            for task in others.chain(best) {
                let curve = &curves.tasks[task];
                let points = if index == 0 { &smooth[task].points } else { &curve.validation };
                let stroke = style.stroke(task, curve);
                plot.curve(svg, points, &stroke, Some(task) == best, index == 1, curves.tasks.len());
            }
        });
    }
    if let Some(best) = best.map(|best| &curves.tasks[best]) {
        let label = format!("best: {}, {}", best.name, best.shown());
        svg.text((VALIDATION.end, TOP - 12.0), 13.0, Anchor::End, &label);
    }
    side(&mut svg, curves, &style);
    svg.finish()
}

fn heading(svg: &mut Svg, curves: &Curves, window: Option<f64>, above: bool) {
    let title = curves.title.as_ref().map_or(String::new(), |title| format!(": {title}"));
    svg.bold((16.0, 30.0), 19.0, &format!("Training and validation loss{title}"));
    let unit = &curves.unit;
    let smoothing = window.map_or_else(
        || "every minibatch, before its update".to_owned(),
        |window| format!("training: mean over every {} {unit}", short(round(window))),
    );
    let cut = if above { "; higher losses are cut off" } else { "" };
    let note = format!("natural logarithm, over {unit} trained; {smoothing}; validation: as measured{cut}");
    svg.grey((16.0, 51.0), 13.0, Anchor::Start, &note);
}

/// Rounds a number to three digits.
fn round(value: f64) -> f64 {
    let digit = 10_f64.powf(value.max(1e-9).log10().floor() - 2.0);
    (value / digit).round() * digit
}

/// A smoothed training curve.
struct Smooth {
    points: Vec<(f64, f64)>,
    /// True if a point is the mean of more than one minibatch.
    averaged: bool,
}

impl Smooth {
    /// Averages the finite losses of each window, at their mean position.
    fn average(training: &[(f64, f64)], window: f64) -> Self {
        let mut points = Vec::new();
        let mut averaged = false;
        let of = |point: &(f64, f64)| (point.0 / window) as u64;
        for part in training.chunk_by(|a, b| of(a) == of(b)) {
            let finite: Vec<(f64, f64)> = part.iter().copied().filter(|point| point.1.is_finite()).collect();
            let mean = |of: fn(&(f64, f64)) -> f64| finite.iter().map(of).sum::<f64>() / finite.len() as f64;
            averaged |= finite.len() > 1;
            if !finite.is_empty() {
                points.push((mean(|point| point.0), mean(|point| point.1)));
            }
        }
        Self { points, averaged }
    }
}

/// Returns the range of losses that is drawn. It excludes losses far above the typical ones, and above the untrained model.
fn range(curves: &Curves, smooth: &[Smooth], longest: f64) -> Range<f64> {
    let training = || smooth.iter().flat_map(|smooth| &smooth.points);
    let validation = || curves.tasks.iter().flat_map(|task| &task.validation);
    let finite = |point: &&(f64, f64)| point.1.is_finite();
    let all = training().chain(validation()).filter(finite).map(|point| point.1);
    let (low, high) = all.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
    if low > high {
        return 0.0..1.0;
    }
    let untrained = validation().filter(finite).filter(|point| point.0 == 0.0).map(|point| point.1);
    let untrained = untrained.fold(f64::NEG_INFINITY, f64::max);
    let mut later: Vec<f64> = training().filter(|point| point.0 > 0.1 * longest).map(|p| p.1).collect();
    later.sort_by(f64::total_cmp);
    let typical = later.get(later.len() * 85 / 100).copied().unwrap_or(high);
    let high = high.min(low + 5.0 * (typical - low).max(0.1));
    let high = if untrained > low { high.min(untrained) } else { high };
    let space = 0.04 * (high - low).max(1e-3);
    low - space..high + space
}

/// Returns true if a point is above the range.
fn above(curves: &Curves, smooth: &[Smooth], top: f64) -> bool {
    let points = smooth.iter().flat_map(|smooth| &smooth.points);
    points.chain(curves.tasks.iter().flat_map(|task| &task.validation)).any(|point| point.1 > top)
}

struct Plot {
    x: Scale,
    y: Scale,
    pixels: Range<f64>,
}

impl Plot {
    fn frame(&self, svg: &mut Svg, title: &str, unit: &str, numbered: bool) {
        let light = Stroke::new("#e4e4e4", 1.0);
        for tick in self.y.ticks(7.0) {
            let y = self.y.at(tick);
            svg.line((self.pixels.start, y), (self.pixels.end, y), &light);
            if numbered {
                svg.text((self.pixels.start - 7.0, y + 4.0), 12.0, Anchor::End, &short(tick));
            }
        }
        for tick in self.x.ticks(6.0) {
            let x = self.x.at(tick);
            svg.line((x, TOP), (x, BOTTOM), &light);
            svg.text((x, BOTTOM + 17.0), 12.0, Anchor::Middle, &short(tick));
        }
        let dark = Stroke::new("#444444", 1.0);
        svg.line((self.pixels.start, BOTTOM), (self.pixels.end, BOTTOM), &dark);
        svg.line((self.pixels.start, TOP), (self.pixels.start, BOTTOM), &dark);
        svg.bold((self.pixels.start, TOP - 12.0), 14.0, title);
        let middle = (self.pixels.start + self.pixels.end) / 2.0;
        svg.grey((middle, BOTTOM + 38.0), 13.0, Anchor::Middle, &format!("{unit} trained"));
        if numbered {
            svg.upward((18.0, (TOP + BOTTOM) / 2.0), 13.0, "loss");
        }
    }

    /// Draws a curve; the best one has an outline. With `marked`, each point has a mark.
    fn curve(
        &self,
        svg: &mut Svg,
        points: &[(f64, f64)],
        stroke: &Stroke,
        best: bool,
        marked: bool,
        of: usize,
    ) {
        let finite = points.iter().filter(|point| point.1.is_finite());
        let points: Vec<(f64, f64)> = finite.map(|point| (self.x.at(point.0), self.y.at(point.1))).collect();
        let opacity = if of > 20 { 0.55 } else { 0.8 };
        let stroke = match best {
            true => Stroke { width: 3.0, dash: "", ..stroke.clone() },
            false => Stroke { opacity, ..stroke.clone() },
        };
        if best {
            svg.path(&points, &Stroke::new("#000000", 5.2));
        }
        svg.path(&points, &stroke);
        if marked || points.len() == 1 {
            let radius = if best { 4.5 } else { 2.4 };
            let edge = Stroke::new(if best { "#000000" } else { &stroke.colour }, 1.0);
            points.iter().for_each(|point| svg.circle(*point, radius, &stroke.colour, &edge));
        }
    }
}

/// Draws the ranking. For many tasks it has the best ones, and the legend of colours and dashes.
fn side(svg: &mut Svg, curves: &Curves, style: &Style) {
    let order = curves.ranked();
    let many = order.len() > NAMED;
    let named = if many { NAMED_OF_MANY } else { NAMED };
    svg.bold((SIDE, TOP - 12.0), 14.0, &format!("by {}", curves.ranked_by.name()));
    let mut y = TOP + 8.0;
    for (rank, &index) in order.iter().take(named).enumerate() {
        let task = &curves.tasks[index];
        let mut stroke = Stroke { width: 2.6, ..style.stroke(index, task) };
        if rank == 0 && task.rank_by().is_some() {
            svg.line((SIDE, y - 4.0), (SIDE + 34.0, y - 4.0), &Stroke::new("#000000", 5.2));
            stroke = Stroke { width: 3.0, dash: "", ..stroke };
        }
        svg.line((SIDE, y - 4.0), (SIDE + 34.0, y - 4.0), &stroke);
        let name = shortened(&task.name);
        match rank {
            0 if task.rank_by().is_some() => svg.bold((SIDE + 42.0, y), 12.5, &name),
            _ => svg.text((SIDE + 42.0, y), 12.5, Anchor::Start, &name),
        }
        svg.text((WIDTH - 16.0, y), 12.5, Anchor::End, &task.figure());
        y += ROW;
    }
    if many {
        let more = format!("and {} more", order.len() - named);
        svg.grey((SIDE + 42.0, y), 12.5, Anchor::Start, &more);
        keys(svg, style, y + 2.0 * ROW);
    }
}

/// Shortens a name to [`LONGEST`] characters.
fn shortened(name: &str) -> String {
    if name.chars().count() <= LONGEST {
        return name.to_owned();
    }
    format!("{}...", name.chars().take(LONGEST - 2).collect::<String>())
}

/// Draws the legend of colours and dashes, in two columns.
fn keys(svg: &mut Svg, style: &Style, top: f64) {
    let rows = ((BOTTOM - top - ROW) / ROW).max(1.0) as usize;
    for (column, (title, entries)) in style.keys().into_iter().enumerate() {
        let x = SIDE + column as f64 * 128.0;
        svg.bold((x, top), 13.0, title);
        // If there are more values than rows, evenly spaced ones.
        let every = entries.len().div_ceil(rows);
        for (row, (stroke, name)) in entries.into_iter().step_by(every).enumerate() {
            let y = top + (row + 1) as f64 * ROW;
            svg.line((x, y - 4.0), (x + 34.0, y - 4.0), &Stroke { width: 2.6, ..stroke });
            svg.text((x + 42.0, y), 12.5, Anchor::Start, &name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plots::curves::made;

    /// Returns the x of each text that starts with this one.
    fn places(svg: &str, text: &str) -> Vec<f64> {
        let of = |element: &&str| element.split('>').nth(1).is_some_and(|inner| inner.starts_with(text));
        let x = |element: &str| element.split("x=\"").nth(1)?.split('"').next()?.parse().ok();
        svg.split("<text").skip(1).filter(of).filter_map(x).collect()
    }

    #[test]
    fn names_stand_next_to_the_plots_the_best_first() {
        let curves = made(&[1e-3, 3e-3, 1e-2], &[8.0, 4.0], 10);
        let svg = of_group(&curves);
        for task in &curves.tasks {
            let places = places(&svg, &task.name);
            assert!(places.len() == 1 && places[0] > VALIDATION.end, "{}: {places:?}", task.name);
        }
        let best = svg.find(">b4-lr1e-2<").unwrap();
        assert!(curves.tasks.iter().all(|task| svg.find(&format!(">{}<", task.name)).unwrap() >= best));
        assert!(svg.contains("best: b4-lr1e-2, 4.850 (perplexity 127.7)"), "{svg}");
        assert!(svg.contains("validation loss") && svg.contains("tokens trained"));
    }

    #[test]
    fn groups_stand_below_each_other_with_their_titles() {
        let group = |title: &str| Curves { title: Some(title.to_owned()), ..made(&[1e-3], &[8.0], 4) };
        let svg = draw(&[group("pets"), group("builtin")]);
        assert!(
            svg.starts_with("<svg xmlns")
                && svg.contains("height=\"1200\"")
                && svg.contains("<svg y=\"600\" "),
            "{svg}"
        );
        assert!(svg.contains("validation loss: pets<") && svg.contains("validation loss: builtin<"), "{svg}");
        assert_eq!(svg.matches("</svg>").count(), 3);
        assert_eq!(draw(&[made(&[1e-3], &[8.0], 4)]), of_group(&made(&[1e-3], &[8.0], 4)));
    }

    #[test]
    fn of_many_tasks_the_best_are_named_and_the_rest_explained() {
        let rates: Vec<f64> = (1..=10).map(|i| f64::from(i) / 1e4).collect();
        let mut curves = made(&rates, &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0], 10);
        curves.tasks.truncate(59);
        let svg = of_group(&curves);
        assert!(svg.contains("and 51 more") && svg.contains(">lr<") && svg.contains(">batch<"));
        assert!(svg.contains("best: b32-lr9e-4"), "not only the first ones are named");
    }

    #[test]
    fn smoothing_is_over_tokens_and_noted() {
        let long = of_group(&made(&[1e-3], &[8.0], 1000));
        assert!(long.contains("training: mean over every 80 tokens"), "{long}");
        let short = of_group(&made(&[1e-3], &[8.0], 10));
        assert!(short.contains("every minibatch, before its update"), "{short}");
        let smooth = Smooth::average(&[(1.0, 2.0), (2.0, f64::NAN), (3.0, 4.0), (11.0, 1.0)], 10.0);
        assert_eq!((smooth.points, smooth.averaged), (vec![(2.0, 3.0), (11.0, 1.0)], true));
        // The batch sizes differ, so the curves end at different numbers of tokens.
        let curves = made(&[1e-3], &[4.0, 8.0], 10);
        let ends: Vec<f64> = curves
            .tasks
            .iter()
            .map(|task| Smooth::average(&task.training, 1.0).points.last().unwrap().0)
            .collect();
        assert_eq!(ends, [40.0, 80.0]);
    }

    #[test]
    fn a_diverging_task_does_not_flatten_the_others() {
        let mut curves = made(&[1e-3, 3e-3], &[8.0], 100);
        curves.tasks[0].training.iter_mut().skip(5).for_each(|point| point.1 = 1e30);
        let smooth: Vec<Smooth> =
            curves.tasks.iter().map(|task| Smooth::average(&task.training, 1.0)).collect();
        let range = range(&curves, &smooth, 800.0);
        assert!(range.start > 4.0 && range.end < 5.5, "{range:?}");
        assert!(of_group(&curves).contains("higher losses are cut off"));
    }

    #[test]
    fn nothing_can_be_drawn() {
        assert!(of_group(&made(&[], &[], 0)).starts_with("<svg"));
        let mut bare = made(&[1e-3], &[8.0], 3);
        (bare.tasks[0].validation, bare.tasks[0].result) = (Vec::new(), None);
        let svg = of_group(&bare);
        assert!(!svg.contains("NaN") && !svg.contains(">validation loss<"), "{svg}");
    }
}
