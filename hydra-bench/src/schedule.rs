//! The picture of the schedule: a Gantt chart with a row for each device and a colour for each task.
//!
//! A run has far more shard tasks than a picture has pixels. So each row is a line of pixel columns, each
//! column shows what filled most of it, and equal neighbours are one rectangle: the number of elements is
//! bounded by the width, however long the run. Of a run that is too long to see its shard tasks, a second
//! panel shows a stretch from the middle.

use crate::colour::{Shade, task_colour};
use anyhow::{Result, anyhow};
use hydra_engine::{Span, Track, Work};
use plotters::prelude::*;
use std::iter;
use std::ops::Range;

const WIDTH: u32 = 1400;
const LEFT: i32 = 130;
const RIGHT: i32 = 20;
const TOP: i32 = 56;
const ROW: i32 = 44;
const GAP: i32 = 14;
const AXIS: i32 = 36;
const LEGEND_COLUMNS: usize = 5;
const LEGEND_LINE: i32 = 20;
/// Tasks that the legend names; of more, the rest is counted.
const LEGEND_TASKS: usize = 30;
/// Shard tasks of a device that can be told apart side by side.
const DETAIL_TASKS: f64 = 60.0;
/// Spans that are kept for the picture; a longer run is shown up to there.
const MAX_SPANS: usize = 1 << 21;

/// The compute spans of a run, in the order in which they ended.
pub(crate) struct Timeline {
    devices: usize,
    spans: Vec<Bar>,
    end_s: f64,
}

#[derive(Clone, Copy, Debug)]
struct Bar {
    device: u16,
    label: Label,
    start_s: f32,
    end_s: f32,
}

/// What a column shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Label {
    task: u32,
    shade: Shade,
}

/// A rectangle of a row: columns from, to (exclusive), and what it shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Block {
    from: usize,
    to: usize,
    label: Label,
}

impl Timeline {
    /// An empty timeline of so many devices.
    pub(crate) fn new(devices: usize) -> Self {
        Self { devices, spans: Vec::new(), end_s: 0.0 }
    }

    /// Takes note of a span, if it is one of compute.
    pub(crate) fn push(&mut self, span: &Span) {
        let Track::Compute(device) = span.track else { return };
        if device.0 >= self.devices || self.spans.len() >= MAX_SPANS {
            return;
        }
        self.end_s = self.end_s.max(span.end_s);
        let shade = match span.work {
            Work::Forward => Shade::Light,
            Work::Evaluate => Shade::Pale,
            _ => Shade::Dark,
        };
        let label = Label { task: span.task.0 as u32, shade };
        let (start_s, end_s) = (span.start_s as f32, span.end_s as f32);
        self.spans.push(Bar { device: device.0 as u16, label, start_s, end_s });
    }

    /// When the last span ended.
    pub(crate) fn end_s(&self) -> f64 {
        self.end_s
    }

    /// A stretch from the middle in which shard tasks can be told apart; `None` if the whole run is short
    /// enough.
    fn detail(&self) -> Option<Range<f64>> {
        let busy: f64 = self.spans.iter().map(|bar| f64::from(bar.end_s - bar.start_s)).sum();
        let length = DETAIL_TASKS * busy / self.spans.len().max(1) as f64;
        let middle = self.end_s / 2.0;
        (length > 0.0 && 2.0 * length < self.end_s).then(|| middle - length / 2.0..middle + length / 2.0)
    }

    /// The rectangles of a device's row over a stretch of time, `columns` wide.
    fn row(&self, device: usize, stretch: &Range<f64>, columns: usize) -> Vec<Block> {
        let per_column = (stretch.end - stretch.start).max(1e-9) / columns as f64;
        let place = |at_s: f32| (f64::from(at_s) - stretch.start).max(0.0) / per_column;
        let mut cells: Vec<Vec<(Label, f64)>> = vec![Vec::new(); columns];
        for bar in self.spans.iter().filter(|bar| bar.device as usize == device) {
            let (start, end) = (place(bar.start_s), place(bar.end_s));
            let last = (end.ceil() as usize).min(columns);
            for (column, cell) in cells.iter_mut().enumerate().take(last).skip(start as usize) {
                let covered = end.min(column as f64 + 1.0) - start.max(column as f64);
                add(cell, bar.label, covered);
            }
        }
        runs(cells.iter().map(|cell| most(cell)))
    }
}

fn add(cell: &mut Vec<(Label, f64)>, label: Label, covered: f64) {
    match cell.iter_mut().find(|(other, _)| *other == label) {
        Some((_, sum)) => *sum += covered,
        None => cell.push((label, covered)),
    }
}

/// What fills most of a column; `None` where it is idle for more than half of it.
fn most(cell: &[(Label, f64)]) -> Option<Label> {
    let busy: f64 = cell.iter().map(|(_, covered)| covered).sum();
    let most = cell.iter().max_by(|a, b| a.1.total_cmp(&b.1));
    most.filter(|_| busy >= 0.5).map(|(label, _)| *label)
}

fn runs(columns: impl Iterator<Item = Option<Label>>) -> Vec<Block> {
    let mut blocks: Vec<Block> = Vec::new();
    for (column, label) in columns.enumerate() {
        let Some(label) = label else { continue };
        match blocks.last_mut() {
            Some(last) if last.to == column && last.label == label => last.to += 1,
            _ => blocks.push(Block { from: column, to: column + 1, label }),
        }
    }
    blocks
}

/// Draws the schedule as SVG. `devices` and `utilizations` have one entry for each row.
pub(crate) fn draw(
    timeline: &Timeline,
    devices: &[String],
    utilizations: &[f64],
    tasks: &[String],
) -> Result<String> {
    let shown = tasks.len().min(LEGEND_TASKS);
    let legend_lines = shown.div_ceil(LEGEND_COLUMNS) as i32 + 2;
    let stretches: Vec<Range<f64>> = iter::once(0.0..timeline.end_s()).chain(timeline.detail()).collect();
    let panel = TOP + devices.len() as i32 * (ROW + GAP) + AXIS;
    let legend = stretches.len() as i32 * panel;
    let mut svg = String::new();
    {
        let height = legend + (legend_lines + 1) * LEGEND_LINE;
        let root = SVGBackend::with_string(&mut svg, (WIDTH, height as u32)).into_drawing_area();
        let sheet = Sheet { root: &root };
        root.fill(&WHITE).map_err(|e| anyhow!("{e}"))?;
        for (index, stretch) in stretches.iter().enumerate() {
            let title = match index {
                0 => format!("Schedule: {:.2} s on {} devices", timeline.end_s(), devices.len()),
                _ => format!("A stretch from the middle, {:.2} s long", stretch.end - stretch.start),
            };
            sheet.panel(timeline, stretch, devices, utilizations, &title, index as i32 * panel)?;
        }
        sheet.legend(&tasks[..shown], tasks.len() - shown, legend)?;
        root.present().map_err(|e| anyhow!("{e}"))?;
    }
    Ok(svg)
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

struct Sheet<'a, 'b> {
    root: &'a Area<'b>,
}

impl Sheet<'_, '_> {
    fn text(&self, at: (i32, i32), size: i32, text: &str) -> Result<()> {
        let style = ("sans-serif", size).into_font().color(&BLACK);
        self.root.draw(&Text::new(text.to_owned(), at, style)).map_err(|e| anyhow!("{e}"))
    }

    fn rectangle(&self, corners: [(i32, i32); 2], style: ShapeStyle) -> Result<()> {
        self.root.draw(&Rectangle::new(corners, style)).map_err(|e| anyhow!("{e}"))
    }

    fn panel(
        &self,
        timeline: &Timeline,
        stretch: &Range<f64>,
        devices: &[String],
        utilizations: &[f64],
        title: &str,
        y: i32,
    ) -> Result<()> {
        self.text((LEFT, y + 16), 20, title)?;
        for (index, device) in devices.iter().enumerate() {
            let top = y + TOP + index as i32 * (ROW + GAP);
            let utilization = utilizations.get(index).copied().unwrap_or(0.0);
            self.row(timeline, index, stretch, top)?;
            self.text((10, top + 8), 15, device)?;
            self.text((10, top + 26), 12, &format!("{:.1}% busy in all", 100.0 * utilization))?;
        }
        self.axis(stretch, y + TOP + devices.len() as i32 * (ROW + GAP))
    }

    fn row(&self, timeline: &Timeline, device: usize, stretch: &Range<f64>, top: i32) -> Result<()> {
        let right = WIDTH as i32 - RIGHT;
        self.rectangle([(LEFT, top), (right, top + ROW)], RGBColor(240, 240, 240).filled())?;
        for block in timeline.row(device, stretch, (right - LEFT) as usize) {
            let corners = [(LEFT + block.from as i32, top), (LEFT + block.to as i32, top + ROW)];
            let colour = task_colour(block.label.task as usize, block.label.shade);
            self.rectangle(corners, colour.filled())?;
        }
        Ok(())
    }

    fn axis(&self, stretch: &Range<f64>, y: i32) -> Result<()> {
        let width = f64::from(WIDTH as i32 - RIGHT - LEFT);
        let length = (stretch.end - stretch.start).max(1e-9);
        self.rectangle([(LEFT, y), (WIDTH as i32 - RIGHT, y + 1)], BLACK.filled())?;
        for tick in ticks(stretch) {
            let x = LEFT + ((tick - stretch.start) / length * width).round() as i32;
            self.rectangle([(x, y), (x + 1, y + 6)], BLACK.filled())?;
            self.text((x - 8, y + 10), 12, &format!("{} s", short(tick)))?;
        }
        Ok(())
    }

    fn legend(&self, tasks: &[String], more: usize, y: i32) -> Result<()> {
        let column = (WIDTH as i32 - LEFT - RIGHT) / LEGEND_COLUMNS as i32;
        for (index, task) in tasks.iter().enumerate() {
            let x = LEFT + (index % LEGEND_COLUMNS) as i32 * column;
            let y = y + (index / LEGEND_COLUMNS) as i32 * LEGEND_LINE;
            self.swatch(x, y, task_colour(index, Shade::Dark))?;
            self.text((x + 20, y), 13, task)?;
        }
        let y = y + (tasks.len().div_ceil(LEGEND_COLUMNS) as i32) * LEGEND_LINE;
        let shades = [(Shade::Light, "forward"), (Shade::Dark, "backward"), (Shade::Pale, "evaluation")];
        for (index, (shade, name)) in shades.into_iter().enumerate() {
            let x = LEFT + index as i32 * column;
            self.swatch(x, y, task_colour(0, shade))?;
            self.text((x + 20, y), 13, name)?;
        }
        match more {
            0 => Ok(()),
            _ => self.text((LEFT, y + LEGEND_LINE), 13, &format!("and {more} more tasks")),
        }
    }

    fn swatch(&self, x: i32, y: i32, colour: RGBColor) -> Result<()> {
        self.rectangle([(x, y), (x + 14, y + 14)], colour.filled())
    }
}

/// Round times within a stretch, about ten of them.
fn ticks(stretch: &Range<f64>) -> Vec<f64> {
    let raw = (stretch.end - stretch.start) / 10.0;
    if !(raw.is_finite() && raw > 0.0) {
        return vec![stretch.start];
    }
    let magnitude = 10_f64.powf(raw.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|m| m * magnitude).into_iter().find(|s| *s >= raw * 0.999);
    let step = step.unwrap_or(10.0 * magnitude);
    let first = (stretch.start / step).ceil();
    let last = stretch.end + 1e-4 * step;
    (0..100).map(|i| (first + f64::from(i)) * step).take_while(|tick| *tick <= last).collect()
}

fn short(seconds: f64) -> String {
    let text = format!("{seconds:.6}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use hydra_core::{DeviceId, TaskId};

    fn span(device: usize, task: usize, start_s: f64, end_s: f64) -> Span {
        let track = Track::Compute(DeviceId(device));
        Span { track, task: TaskId(task), work: Work::Forward, shard: 0, step: 0, start_s, end_s }
    }

    fn timeline(spans: &[Span]) -> Timeline {
        let mut timeline = Timeline::new(2);
        spans.iter().for_each(|span| timeline.push(span));
        timeline
    }

    #[test]
    fn a_row_shows_what_filled_most_of_each_column() {
        let timeline = timeline(&[
            span(0, 7, 0.0, 2.0),
            span(0, 8, 2.0, 2.7),
            span(0, 9, 2.7, 3.0),
            span(0, 9, 3.0, 3.2),
            span(1, 1, 9.0, 10.0),
        ]);
        let light = |task| Label { task, shade: Shade::Light };
        assert_eq!(
            timeline.row(0, &(0.0..10.0), 10),
            [Block { from: 0, to: 2, label: light(7) }, Block { from: 2, to: 3, label: light(8) }]
        );
        assert_eq!(timeline.row(1, &(0.0..10.0), 10), [Block { from: 9, to: 10, label: light(1) }]);
        assert_eq!(
            timeline.row(0, &(1.5..2.5), 2),
            [Block { from: 0, to: 1, label: light(7) }, Block { from: 1, to: 2, label: light(8) },]
        );
        assert!(timeline.row(0, &(4.0..9.0), 5).is_empty());
        assert!(timeline.detail().is_none());
    }

    #[test]
    fn a_long_run_has_a_bounded_picture() {
        let many: Vec<Span> =
            (0..50_000).map(|i| span(i % 2, i % 12, i as f64 / 100.0, i as f64 / 100.0 + 0.01)).collect();
        let devices = ["cpu:0".to_owned(), "cpu:1".to_owned()];
        let tasks: Vec<String> = (0..12).map(|i| format!("task {i}")).collect();
        let svg = draw(&timeline(&many), &devices, &[0.5, 0.5], &tasks).unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        assert!(svg.matches("<rect").count() < 4 * WIDTH as usize + 100);
        for text in ["cpu:1", "50.0% busy", "task 11", "backward", "500.00 s on 2", "middle, 0.60 s long"] {
            assert!(svg.contains(text), "{text}");
        }
    }

    #[test]
    fn an_empty_run_can_be_drawn() {
        let svg = draw(&Timeline::new(1), &["cpu:0".to_owned()], &[0.0], &[]).unwrap();
        assert!(svg.contains("cpu:0"));
    }

    #[test]
    fn ticks_are_round() {
        assert_eq!(ticks(&(0.0..10.0)), (0..=10).map(f64::from).collect::<Vec<_>>());
        assert_eq!(ticks(&(12.0..35.0)), [15.0, 20.0, 25.0, 30.0, 35.0]);
        assert_eq!(ticks(&(0.0..0.0)), [0.0]);
        assert_eq!(short(0.25), "0.25");
        assert_eq!(short(20.0), "20");
    }
}
