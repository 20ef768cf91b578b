//! Tasks in parallel coordinates: an axis for each setting in which they differ and one for the result, and a line for each
//! task, coloured by its rank.

use crate::plots::colour::ordered;
use crate::plots::curves::{Curve, Curves, SettingValue};
use crate::plots::scale::{Scale, apart, short};
use crate::plots::svg::{Anchor, Stroke, Svg};

const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 560.0;
const LEFT: f64 = 90.0;
const RIGHT: f64 = 800.0;
const TOP: f64 = 112.0;
const BOTTOM: f64 = 510.0;
/// The maximum number of labelled values on an axis.
const NAMED: usize = 12;
/// The maximum length of the name of a setting or a value.
const LONGEST: usize = 16;

/// An axis.
struct Axis {
    name: String,
    /// The position of each task's value, if it has one.
    places: Vec<Option<f64>>,
    ticks: Vec<(f64, String)>,
}

/// Draws a group of tasks.
pub(super) fn draw(curves: &Curves) -> String {
    let mut svg = Svg::new(WIDTH, HEIGHT);
    let measure = curves.ranked_by.name();
    let group = curves.title.as_ref().map_or(String::new(), |title| format!(": {title}"));
    svg.bold(
        (16.0, 30.0),
        19.0,
        &format!("{}{} by settings{group}", measure[..1].to_uppercase(), &measure[1..]),
    );
    let note = "a line for each task: darker is better; black: the best; grey: no result";
    svg.grey((16.0, 51.0), 13.0, Anchor::Start, note);
    let mut axes: Vec<Axis> = (0..curves.settings.len()).map(|setting| of_setting(curves, setting)).collect();
    axes.push(of_result(curves));
    let pitch = (RIGHT - LEFT) / (axes.len() - 1).max(1) as f64;
    let x = |axis: usize| LEFT + pitch * axis as f64;
    lines(&mut svg, curves, &axes, &x);
    for (index, axis) in axes.iter().enumerate() {
        frame(&mut svg, axis, x(index));
    }
    if let Some(best) = curves.best().map(|best| &curves.tasks[best]) {
        svg.bold((16.0, 74.0), 13.0, &format!("best: {}, {}", best.name, best.shown()));
    }
    svg.finish()
}

/// Draws the lines of the tasks from the worst to the best, so that the best are on top.
fn lines(svg: &mut Svg, curves: &Curves, axes: &[Axis], x: &impl Fn(usize) -> f64) {
    let (order, best) = (curves.ranked(), curves.best());
    let opacity = if order.len() > 30 { 0.5 } else { 0.85 };
    for (rank, task) in order.iter().enumerate().rev() {
        let place = |(index, axis): (usize, &Axis)| Some((x(index), axis.places[*task]?));
        let points: Vec<(f64, f64)> = axes.iter().enumerate().filter_map(place).collect();
        let has_result = curves.tasks[*task].rank_by().is_some();
        let colour = if has_result { ordered(rank, order.len().max(2)) } else { "#bbbbbb".to_owned() };
        let stroke = match Some(*task) == best {
            true => Stroke::new("#000000", 3.0),
            false => Stroke { opacity, ..Stroke::new(colour, 1.5) },
        };
        svg.path(&points, &stroke);
    }
}

fn frame(svg: &mut Svg, axis: &Axis, x: f64) {
    svg.line((x, TOP), (x, BOTTOM), &Stroke::new("#444444", 1.0));
    svg.text((x, TOP - 14.0), 13.0, Anchor::Middle, &clipped(&axis.name));
    let wanted: Vec<f64> = axis.ticks.iter().map(|(y, _)| y + 4.0).collect();
    for ((y, text), place) in axis.ticks.iter().zip(apart(&wanted, 13.0, TOP + 4.0..BOTTOM + 4.0)) {
        svg.line((x - 3.0, *y), (x + 3.0, *y), &Stroke::new("#444444", 1.0));
        svg.halo((x + 6.0, place), 12.0, &clipped(text));
    }
}

fn clipped(text: &str) -> String {
    match text.chars().count() > LONGEST {
        true => format!("{}..", text.chars().take(LONGEST - 2).collect::<String>()),
        false => text.to_owned(),
    }
}

/// Returns the axis of a setting.
fn of_setting(curves: &Curves, setting: usize) -> Axis {
    let (name, values) = (curves.settings[setting].clone(), curves.values(setting));
    let coordinates = coordinates(&name, &values);
    let low = coordinates.iter().copied().fold(f64::INFINITY, f64::min);
    let high = coordinates.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let scale = Scale::new(low..high, BOTTOM..TOP);
    let heights: Vec<f64> = coordinates.into_iter().map(|coordinate| scale.at(coordinate)).collect();
    let of = |task: &Curve| {
        let value = task.settings.get(setting)?;
        values.iter().position(|known| known == value).map(|place| heights[place])
    };
    let places = curves.tasks.iter().map(of).collect();
    let every = values.len().div_ceil(NAMED).max(1);
    let ticks = heights.iter().zip(&values).step_by(every);
    Axis { name, places, ticks: ticks.map(|(height, value)| (*height, value.text.clone())).collect() }
}

/// Returns the positions of values: numbers on a linear axis, or a logarithmic one if their magnitudes differ; texts at even
/// distances.
fn coordinates(name: &str, values: &[SettingValue]) -> Vec<f64> {
    let numbers: Option<Vec<f64>> = values.iter().map(|value| value.number).collect();
    match numbers {
        Some(numbers) if is_logarithmic(name, &numbers) => numbers.into_iter().map(f64::log10).collect(),
        Some(numbers) => numbers,
        None => (0..values.len()).map(|place| place as f64).collect(),
    }
}

/// Returns the axis of the result, with better results above.
fn of_result(curves: &Curves) -> Axis {
    let results: Vec<Option<f64>> = curves.tasks.iter().map(Curve::rank_by).collect();
    let mut numbers: Vec<f64> = results.iter().copied().flatten().collect();
    numbers.sort_by(f64::total_cmp);
    let rising = curves.ranked_by.rises();
    // A diverged task does not compress the scale of the others.
    let typical = numbers.get(numbers.len().saturating_sub(1) * 3 / 4).copied().unwrap_or(1.0);
    let low = numbers.first().copied().unwrap_or(0.0);
    let high = numbers.last().copied().unwrap_or(1.0);
    let high = if rising { high } else { high.min(low + 5.0 * (typical - low).max(0.1)) };
    let pixels = if rising { BOTTOM..TOP } else { TOP..BOTTOM };
    let scale = Scale::new(low..high, pixels);
    let place = |result: f64| scale.at(result).clamp(TOP, BOTTOM);
    let ticks = if numbers.is_empty() { Vec::new() } else { scale.ticks(7.0) };
    Axis {
        name: curves.ranked_by.name().to_owned(),
        places: results.into_iter().map(|result| result.map(place)).collect(),
        ticks: ticks.into_iter().map(|tick| (scale.at(tick), short(tick))).collect(),
    }
}

/// Returns true if a setting has a logarithmic axis: its values are positive, and the largest is at least 2 times the smallest
/// for batch sizes, learning rates and LoRA ranks, 200 times for others.
pub(super) fn is_logarithmic(name: &str, numbers: &[f64]) -> bool {
    let least = if matches!(name, "batch" | "lr" | "lora") { 2.0 } else { 200.0 };
    let low = numbers.iter().copied().fold(f64::INFINITY, f64::min);
    let high = numbers.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    low > 0.0 && high / low >= least
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plots::curves::made;

    #[test]
    fn each_setting_has_an_axis_and_each_task_a_line() {
        let mut curves = made(&[1e-3, 3e-3, 1e-2], &[8.0, 4.0], 10);
        curves.settings.push("optimizer".to_owned());
        for (index, task) in curves.tasks.iter_mut().enumerate() {
            let text = if index % 2 == 0 { "adamw" } else { "sgd" }.to_owned();
            task.settings.push(SettingValue { text, number: None });
        }
        curves.tasks[0].state = "failed".to_owned();
        let svg = draw(&curves);
        for part in [">batch<", ">lr<", ">optimizer<", ">validation loss<", ">adamw<", ">sgd<", ">3e-3<"] {
            assert_eq!(svg.matches(part).count(), 1, "{part} in {svg}");
        }
        // Tasks with a result have a point on each axis; the line of the failed one ends before the result.
        let paths: Vec<usize> = svg
            .lines()
            .filter(|line| line.contains("<path"))
            .map(|line| {
                line.split("d=\"").nth(1).unwrap().split('"').next().unwrap().matches(['M', 'L']).count()
            })
            .collect();
        assert_eq!((paths[0], paths[1..6].to_vec()), (3, vec![4; 5]), "{svg}");
        assert!(svg.contains("best: b4-lr1e-2") && svg.contains("#bbbbbb") && !svg.contains("NaN"), "{svg}");
    }

    #[test]
    fn nothing_and_one_task_can_be_drawn() {
        for curves in [made(&[], &[], 0), made(&[1e-3], &[8.0], 1)] {
            let svg = draw(&curves);
            assert!(svg.starts_with("<svg") && !svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        }
    }
}
