//! The picture of the loss curves: one for each task, thinned to what a picture can show.

use crate::pictures::canvas::{Canvas, svg};
use crate::pictures::colour::{Shade, task_colour};
use anyhow::{Result, anyhow};
use hydra_engine::TaskReport;
use plotters::prelude::*;

const SIZE: (u32, u32) = (1200, 640);
/// Points of a curve; of a longer one each point is the mean of its part.
const POINTS: usize = 400;
/// Tasks that the legend names.
const LEGEND_TASKS: usize = 24;

/// Draws the training losses as SVG, by minibatch.
pub(crate) fn draw(tasks: &[TaskReport]) -> Result<String> {
    let curves: Vec<Vec<(f64, f64)>> = tasks.iter().map(|task| curve(&task.losses)).collect();
    let (low, high) = range(curves.iter().flatten().map(|point| point.1));
    let longest = tasks.iter().map(|task| task.losses.len()).max().unwrap_or(1).max(2) as f64;
    svg(SIZE, |canvas| {
        let drawn = draw_chart(canvas, tasks, &curves, [0.0..longest, low..high]);
        drawn.map_err(|error| anyhow!("{error}"))
    })
}

fn draw_chart(
    canvas: &Canvas<'_>,
    tasks: &[TaskReport],
    curves: &[Vec<(f64, f64)>],
    [x, y]: [std::ops::Range<f64>; 2],
) -> Result<(), Box<dyn std::error::Error>> {
    let mut chart = ChartBuilder::on(&canvas.root)
        .caption("Training loss of each minibatch, before its update", ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(56)
        .build_cartesian_2d(x, y)?;
    let mut mesh = chart.configure_mesh();
    mesh.x_desc("minibatch").y_desc("loss (natural logarithm)").max_light_lines(2).draw()?;
    for (index, (task, curve)) in tasks.iter().zip(curves).enumerate() {
        let colour = task_colour(index, Shade::Dark);
        let series = chart.draw_series(LineSeries::new(curve.iter().copied(), colour.stroke_width(2)))?;
        if index < LEGEND_TASKS {
            let line = move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2));
            series.label(task.name.clone()).legend(line);
        }
    }
    if !curves.is_empty() {
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperRight)
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK)
            .draw()?;
    }
    Ok(())
}

/// The means of the numbers in at most [`POINTS`] parts of the losses, at the middle minibatch of each.
fn curve(losses: &[f64]) -> Vec<(f64, f64)> {
    let part = losses.len().div_ceil(POINTS).max(1);
    let point = |(index, part_of): (usize, &[f64])| {
        let finite: Vec<f64> = part_of.iter().copied().filter(|loss| loss.is_finite()).collect();
        let middle = (index * part) as f64 + (part_of.len() - 1) as f64 / 2.0;
        (!finite.is_empty()).then(|| (middle, finite.iter().sum::<f64>() / finite.len() as f64))
    };
    losses.chunks(part).enumerate().filter_map(point).collect()
}

/// A range that shows these values, without the few that a diverging task has far above all others.
fn range(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let mut values: Vec<f64> = values.collect();
    if values.is_empty() {
        return (0.0, 1.0);
    }
    values.sort_by(f64::total_cmp);
    let low = values[0];
    let typical = values[values.len() * 98 / 100];
    let high = values[values.len() - 1].min(low + 2.0 * (typical - low).max(0.5));
    let space = 0.05 * (high - low).max(1e-3);
    (low - space, high + space)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hydra_engine::TaskState;

    /// A report of a task with these losses and nothing else.
    fn task(name: &str, losses: Vec<f64>) -> TaskReport {
        TaskReport {
            name: name.to_owned(),
            config: serde_json::Value::Null,
            state: TaskState::Done,
            error: None,
            failure: None,
            plan: Default::default(),
            steps: losses.len(),
            losses,
            validations: Default::default(),
            validation: None,
            test: None,
            weights_sha256: None,
            model_dir: None,
            checkpoints: Default::default(),
            times: Default::default(),
        }
    }

    #[test]
    fn long_curves_are_thinned_and_what_is_no_number_left_out() {
        let long: Vec<f64> = (0..1000).map(f64::from).collect();
        let thin = curve(&long);
        assert!(thin.len() <= POINTS);
        assert_eq!(thin[0], (1.0, 1.0));
        assert_eq!(curve(&[2.0, f64::NAN, 4.0]), [(0.0, 2.0), (2.0, 4.0)]);
        assert!(curve(&[]).is_empty());
    }

    #[test]
    fn a_diverging_task_does_not_flatten_the_others() {
        let values = (0..1000).map(|i| if i == 0 { 1e30 } else { 3.0 + f64::from(i) / 1000.0 });
        let (low, high) = range(values);
        assert!(low < 3.1 && high < 6.0, "{low}..{high}");
    }

    #[test]
    fn every_task_is_named() {
        let tasks = [task("b8-lr1e-3", vec![5.0, 4.0, 3.0]), task("b8-<&>", vec![f64::NAN])];
        let svg = draw(&tasks).unwrap();
        assert!(svg.contains("b8-lr1e-3") && svg.contains("b8-&lt;&amp;&gt;") && svg.contains("minibatch"));
        assert!(draw(&[]).unwrap().starts_with("<svg"));
    }
}
