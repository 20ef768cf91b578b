//! The plot of the schedule: a Gantt chart with a row for each device and a colour for each task.
//!
//! A run has far more shard tasks than a plot has pixels. A row is therefore divided into pixel columns: a column shows the
//! task that fills most of it, and equal neighbours form one rectangle, so the width bounds the number of elements. If the run
//! is too long to see single shard tasks, a second panel shows an interval from the middle. Simulated runs show promotions in a
//! strip below each row of the detailed panel, each at least a column wide.

use crate::plots::canvas::{Canvas, svg};
use crate::plots::colour::{Palette, Shade, ink};
use crate::terminal::fixed;
use anyhow::{Result, ensure};
use hydra_engine::{Span, Track, Work};
use hydra_sched::{Occupation, ShardTaskKind};
use plotters::style::{BLACK, RGBColor, WHITE};
use std::iter;
use std::ops::Range;

const WIDTH: u32 = 1400;
const LEFT: i32 = 130;
const RIGHT: i32 = 20;
const TOP: i32 = 56;
const ROW: i32 = 44;
const GAP: i32 = 14;
/// The height of the strip of promotions, in the gap below a row.
const STRIP: i32 = 8;
const AXIS: i32 = 36;
const LEGEND_COLUMNS: usize = 5;
const LEGEND_LINE: i32 = 20;
/// The maximum number of entries in the legend; the others are counted.
const LEGEND_TASKS: usize = 100;
/// The font size of a text on a rectangle, the pixels of each character, and the padding.
const NUMBER: i32 = 12;
const DIGIT: usize = 6;
const PADDING: usize = 4;
/// The number of shard tasks of a device in the detailed panel.
const DETAIL_TASKS: f64 = 60.0;
/// The minimum of this number, for rectangles with long texts.
const MIN_DETAIL_TASKS: f64 = 12.0;
/// The maximum number of spans in the plot; a longer run is shown up to there.
const MAX_SPANS: usize = 1 << 21;
/// The maximum number of devices of a simulation that is drawn.
const MAX_ROWS: usize = 256;
/// The total number of columns of all rows of a zoomable schedule, and the maximum of one row.
const ZOOM_COLUMNS: usize = 80_000;
const ZOOM_ROW: usize = 24_000;

/// The compute spans of a run, and the promotions of a simulated one.
pub struct Timeline {
    title: String,
    rows: Vec<DeviceRow>,
    spans: usize,
    /// The end of the last span.
    pub(crate) end_s: f64,
}

#[derive(Clone, Default)]
struct DeviceRow {
    compute: Vec<ScheduleBar>,
    promotions: Vec<ScheduleBar>,
}

#[derive(Clone, Copy, Debug)]
struct ScheduleBar {
    label: Label,
    start_s: f32,
    end_s: f32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Label {
    task: u32,
    shade: Shade,
}

/// A rectangle of a row: columns from, to (exclusive), and what it shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RowSegment {
    from: usize,
    to: usize,
    label: Label,
}

impl Timeline {
    /// Returns an empty timeline of a number of devices.
    pub(crate) fn new(devices: usize) -> Self {
        Self { title: "Schedule".to_owned(), rows: vec![DeviceRow::default(); devices], spans: 0, end_s: 0.0 }
    }

    /// Returns the timeline of a simulation.
    pub fn simulated(title: String, devices: usize, spans: &[hydra_sched::ScheduleSpan]) -> Self {
        let mut timeline = Self { title, ..Self::new(devices) };
        for span in spans {
            let Some(bars) = timeline.rows.get_mut(span.device) else { continue };
            let (bars, shade) = match span.what {
                Occupation::Compute(ShardTaskKind::Forward) => (&mut bars.compute, Shade::Light),
                Occupation::Compute(ShardTaskKind::Evaluate) => (&mut bars.compute, Shade::Pale),
                Occupation::Compute(ShardTaskKind::Backward) => (&mut bars.compute, Shade::Dark),
                Occupation::Promote { .. } => (&mut bars.promotions, Shade::Dark),
            };
            bars.push(ScheduleBar::new(span.task, shade, span.start_s, span.end_s));
            timeline.end_s = timeline.end_s.max(span.end_s);
        }
        timeline
    }

    /// Adds a span, if it is on a compute track.
    pub(crate) fn push(&mut self, span: &Span) {
        let Track::Compute(device) = span.track else { return };
        if self.spans >= MAX_SPANS {
            return;
        }
        let Some(bars) = self.rows.get_mut(device.0) else { return };
        let shade = match span.work {
            Work::Forward => Shade::Light,
            Work::Evaluate => Shade::Pale,
            _ => Shade::Dark,
        };
        bars.compute.push(ScheduleBar::new(span.task.0, shade, span.start_s, span.end_s));
        self.spans += 1;
        self.end_s = self.end_s.max(span.end_s);
    }

    /// Returns the whole run and, if its shard tasks are too short to be seen, an interval from the middle with about `tasks` shard
    /// tasks per device.
    fn intervals(&self, tasks: f64) -> Vec<Range<f64>> {
        let bars = || self.rows.iter().flat_map(|bars| &bars.compute);
        let busy: f64 = bars().map(|bar| f64::from(bar.end_s - bar.start_s)).sum();
        let length = tasks * busy / bars().count().max(1) as f64;
        let middle = self.end_s / 2.0;
        let detail = length > 0.0 && 2.0 * length < self.end_s;
        let detail = detail.then(|| middle - length / 2.0..middle + length / 2.0);
        iter::once(0.0..self.end_s).chain(detail).collect()
    }
}

/// A schedule for a viewer with zoom.
pub(crate) struct Zoomable {
    pub(crate) columns: usize,
    /// The rectangles of each device, flattened: from column, to column, task, shade, and so on.
    pub(crate) rows: Vec<Vec<usize>>,
    /// The colours of each task: forward, backward, evaluation.
    pub(crate) colours: Vec<[String; 3]>,
}

impl Timeline {
    /// Returns the whole run with many more columns than the plot has.
    pub(crate) fn zoomable(&self, tasks: usize, palette: &Palette) -> Zoomable {
        let columns = (ZOOM_COLUMNS / self.rows.len().max(1)).clamp(1000, ZOOM_ROW);
        let shades = [Shade::Light, Shade::Dark, Shade::Pale];
        let numbers = |block: RowSegment| {
            let shade = shades.iter().position(|shade| *shade == block.label.shade).unwrap_or(0);
            [block.from, block.to, block.label.task as usize, shade]
        };
        let blocks = |device: &DeviceRow| {
            row(&device.compute, &(0.0..self.end_s), columns).into_iter().flat_map(numbers)
        };
        let rows = self.rows.iter().map(|device| blocks(device).collect()).collect();
        let hex = |RGBColor(red, green, blue)| format!("#{red:02x}{green:02x}{blue:02x}");
        let colours = (0..tasks).map(|task| shades.map(|shade| hex(palette.colour(task, shade)))).collect();
        Zoomable { columns, rows, colours }
    }
}

/// Checks that a simulated run has few enough devices and shard tasks to be drawn.
pub fn check_size(devices: usize, shard_tasks: u64) -> Result<()> {
    ensure!(devices <= MAX_ROWS, "{devices} devices are too many for a plot: the maximum is {MAX_ROWS}");
    ensure!(
        shard_tasks <= MAX_SPANS as u64,
        "{shard_tasks} shard tasks are too many for a plot: the maximum is {MAX_SPANS}; draw fewer minibatches"
    );
    Ok(())
}

impl ScheduleBar {
    const fn new(task: usize, shade: Shade, start_s: f64, end_s: f64) -> Self {
        let label = Label { task: task as u32, shade };
        Self { label, start_s: start_s as f32, end_s: end_s as f32 }
    }

    /// Returns the start and the end as columns of an interval that is `columns` wide.
    fn place(&self, interval: &Range<f64>, columns: usize) -> (f64, f64) {
        let per_column = (interval.end - interval.start).max(1e-9) / columns as f64;
        let place = |at_s: f32| (f64::from(at_s) - interval.start).max(0.0) / per_column;
        (place(self.start_s), place(self.end_s))
    }
}

/// Returns the rectangles of a row over a time interval, `columns` wide.
fn row(bars: &[ScheduleBar], interval: &Range<f64>, columns: usize) -> Vec<RowSegment> {
    let mut cells: Vec<Vec<(Label, f64)>> = vec![Vec::new(); columns];
    for bar in bars {
        let (start, end) = bar.place(interval, columns);
        let last = (end.ceil() as usize).min(columns);
        for (column, cell) in cells.iter_mut().enumerate().take(last).skip(start as usize) {
            let covered = end.min(column as f64 + 1.0) - start.max(column as f64);
            match cell.iter_mut().find(|(other, _)| *other == bar.label) {
                Some((_, sum)) => *sum += covered,
                None => cell.push((bar.label, covered)),
            }
        }
    }
    runs(cells.iter().map(|cell| most(cell)))
}

/// Returns the rectangles of a row in which every bar longer than zero has at least one column.
fn strip(bars: &[ScheduleBar], interval: &Range<f64>, columns: usize) -> Vec<RowSegment> {
    let mut cells = vec![None; columns];
    let within = |bar: &&ScheduleBar| f64::from(bar.end_s) > interval.start && bar.end_s > bar.start_s;
    for bar in bars.iter().filter(within) {
        let (start, end) = bar.place(interval, columns);
        let first = (start as usize).min(columns);
        let last = (end.round() as usize).max(first + 1).min(columns);
        cells[first..last].fill(Some(bar.label));
    }
    runs(cells.into_iter())
}

/// Returns the label that fills most of a column; `None` if the column is idle for more than half of it.
fn most(cell: &[(Label, f64)]) -> Option<Label> {
    let busy: f64 = cell.iter().map(|(_, covered)| covered).sum();
    let most = cell.iter().max_by(|a, b| a.1.total_cmp(&b.1));
    most.filter(|_| busy >= 0.5).map(|(label, _)| *label)
}

fn runs(columns: impl Iterator<Item = Option<Label>>) -> Vec<RowSegment> {
    let mut blocks: Vec<RowSegment> = Vec::new();
    for (column, label) in columns.enumerate() {
        let Some(label) = label else { continue };
        match blocks.last_mut() {
            Some(last) if last.to == column && last.label == label => last.to += 1,
            _ => blocks.push(RowSegment { from: column, to: column + 1, label }),
        }
    }
    blocks
}

/// Draws the schedule as SVG. `devices` and `utilizations` have one entry for each row.
pub fn draw(
    timeline: &Timeline,
    devices: &[String],
    utilizations: &[f64],
    tasks: &[String],
    palette: &Palette,
) -> Result<String> {
    let numbered = palette.entries().is_empty() && !palette.is_unique_for(tasks.len());
    let legend = legend(tasks, palette, numbered);
    let legend_lines = legend.len().min(LEGEND_TASKS).div_ceil(LEGEND_COLUMNS) as i32 + 2;
    let text_width = (DIGIT * palette.longest() + 2 * PADDING) as f64;
    let near = (f64::from(WIDTH as i32 - RIGHT - LEFT) / text_width).clamp(MIN_DETAIL_TASKS, DETAIL_TASKS);
    let intervals = timeline.intervals(near);
    let panel = TOP + devices.len() as i32 * (ROW + GAP) + AXIS;
    let legend_y = intervals.len() as i32 * panel;
    let height = legend_y + (legend_lines + 1) * LEGEND_LINE;
    svg((WIDTH, height as u32), |canvas| {
        let sheet = Sheet { canvas, timeline, devices, utilizations, palette, numbered };
        for (index, interval) in intervals.iter().enumerate() {
            let (name, seconds) = (&timeline.title, fixed(interval.end - interval.start, 2));
            let title = match index {
                0 => format!("{name}: {seconds} s on {} devices", devices.len()),
                _ => format!("Detail from the middle, {seconds} s long"),
            };
            sheet.panel(interval, index + 1 == intervals.len(), &title, index as i32 * panel)?;
        }
        sheet.legend(&legend, legend_y)
    })
}

/// Returns the entries of the legend: the values of the colouring setting, or the tasks.
fn legend(tasks: &[String], palette: &Palette, numbered: bool) -> Vec<(RGBColor, String)> {
    if !palette.entries().is_empty() {
        return palette.entries().to_vec();
    }
    let number = |index: usize| if numbered { format!("{}: ", index + 1) } else { String::new() };
    let entry = |(index, task): (usize, &String)| {
        (palette.colour(index, Shade::Dark), format!("{}{task}", number(index)))
    };
    tasks.iter().enumerate().map(entry).collect()
}

struct Sheet<'a, 'b> {
    canvas: &'a Canvas<'b>,
    timeline: &'a Timeline,
    devices: &'a [String],
    utilizations: &'a [f64],
    palette: &'a Palette,
    /// True if rectangles show the task's number in the legend, because colours repeat and no settings are known.
    numbered: bool,
}

impl Sheet<'_, '_> {
    /// Draws the panel of one time interval. With `near`, it has texts and promotions.
    fn panel(&self, interval: &Range<f64>, near: bool, title: &str, y: i32) -> Result<()> {
        self.canvas.text((LEFT, y + 16), 20, title)?;
        for (index, device) in self.devices.iter().enumerate() {
            let top = y + TOP + index as i32 * (ROW + GAP);
            let utilization = self.utilizations.get(index).copied().unwrap_or(0.0);
            self.device_row(index, interval, near, top)?;
            self.canvas.text((10, top + 8), 15, device)?;
            self.canvas.text((10, top + 26), 12, &format!("{:.1}% busy overall", 100.0 * utilization))?;
        }
        self.axis(interval, y + TOP + self.devices.len() as i32 * (ROW + GAP))
    }

    fn device_row(&self, device: usize, interval: &Range<f64>, near: bool, top: i32) -> Result<()> {
        let right = WIDTH as i32 - RIGHT;
        self.canvas.fill([(LEFT, top), (right, top + ROW)], RGBColor(240, 240, 240))?;
        let Some(bars) = self.timeline.rows.get(device) else { return Ok(()) };
        let columns = (right - LEFT) as usize;
        let blocks = row(&bars.compute, interval, columns);
        self.blocks(&blocks, top, ROW)?;
        if near {
            self.texts(&blocks, top)?;
        }
        match near {
            true => self.blocks(&strip(&bars.promotions, interval, columns), top + ROW + 1, STRIP),
            false => Ok(()),
        }
    }

    fn blocks(&self, blocks: &[RowSegment], top: i32, height: i32) -> Result<()> {
        blocks.iter().try_for_each(|block| {
            let corners = [(LEFT + block.from as i32, top), (LEFT + block.to as i32, top + height)];
            self.canvas.fill(corners, self.colour(block))
        })
    }

    fn colour(&self, block: &RowSegment) -> RGBColor {
        self.palette.colour(block.label.task as usize, block.label.shade)
    }

    /// Writes on each large enough rectangle the settings of its task, or the task's number in the legend. A white edge separates
    /// neighbours of one colour.
    fn texts(&self, blocks: &[RowSegment], top: i32) -> Result<()> {
        blocks.iter().try_for_each(|block| {
            let (from, task) = (LEFT + block.from as i32, block.label.task as usize);
            let number = match self.numbered {
                true => (task + 1).to_string(),
                false => self.palette.text(task).to_owned(),
            };
            let width = block.to - block.from;
            if number.is_empty() || width < DIGIT * number.chars().count() + PADDING {
                return Ok(());
            }
            let ink = ink(self.colour(block));
            self.canvas.fill([(from, top), (from + 1, top + ROW)], WHITE)?;
            let x = from + (width - DIGIT * number.chars().count()) as i32 / 2 + 1;
            self.canvas.coloured((x, top + (ROW - NUMBER) / 2), NUMBER, ink, &number)
        })
    }

    fn axis(&self, interval: &Range<f64>, y: i32) -> Result<()> {
        let width = f64::from(WIDTH as i32 - RIGHT - LEFT);
        let length = (interval.end - interval.start).max(1e-9);
        self.canvas.fill([(LEFT, y), (WIDTH as i32 - RIGHT, y + 1)], BLACK)?;
        for tick in ticks(interval) {
            let x = LEFT + ((tick - interval.start) / length * width).round() as i32;
            self.canvas.fill([(x, y), (x + 1, y + 6)], BLACK)?;
            self.canvas.text((x - 8, y + 10), 12, &format!("{} s", short(tick)))?;
        }
        Ok(())
    }

    fn legend(&self, entries: &[(RGBColor, String)], y: i32) -> Result<()> {
        let column = (WIDTH as i32 - LEFT - RIGHT) / LEGEND_COLUMNS as i32;
        let shown = entries.len().min(LEGEND_TASKS);
        for (index, (colour, text)) in entries[..shown].iter().enumerate() {
            let x = LEFT + (index % LEGEND_COLUMNS) as i32 * column;
            let y = y + (index / LEGEND_COLUMNS) as i32 * LEGEND_LINE;
            self.swatch(x, y, 14, *colour)?;
            self.canvas.text((x + 20, y), 13, text)?;
        }
        let y = y + (shown.div_ceil(LEGEND_COLUMNS) as i32) * LEGEND_LINE;
        let promotes = self.timeline.rows.iter().any(|bars| !bars.promotions.is_empty());
        let promotion = promotes.then_some((Shade::Dark, "promotion, below a row", STRIP));
        let shades = [(Shade::Light, "forward"), (Shade::Dark, "backward"), (Shade::Pale, "evaluation")];
        let shades = shades.map(|(shade, name)| (shade, name, 14)).into_iter().chain(promotion);
        for (index, (shade, name, height)) in shades.enumerate() {
            let x = LEFT + index as i32 * column;
            self.swatch(x, y, height, self.palette.colour(0, shade))?;
            self.canvas.text((x + 20, y), 13, name)?;
        }
        let written = Some(self.palette.written()).filter(|written| !written.is_empty());
        let written = written.map(|written| format!("text: {written}"));
        let more = (entries.len() > shown).then(|| format!("and {} more", entries.len() - shown));
        let notes: Vec<String> = written.into_iter().chain(more).collect();
        self.canvas.text((LEFT, y + LEGEND_LINE), 13, &notes.join("; "))
    }

    fn swatch(&self, x: i32, y: i32, height: i32, colour: RGBColor) -> Result<()> {
        self.canvas.fill([(x, y), (x + 14, y + height)], colour)
    }
}

/// Returns about ten round times within an interval.
fn ticks(interval: &Range<f64>) -> Vec<f64> {
    let raw = (interval.end - interval.start) / 10.0;
    if !(raw.is_finite() && raw > 0.0) {
        return vec![interval.start];
    }
    let magnitude = 10_f64.powf(raw.log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|m| m * magnitude);
    let step = steps.into_iter().find(|s| *s >= raw * 0.999).unwrap_or(10.0 * magnitude);
    let first = (interval.start / step).ceil();
    let last = interval.end + 1e-4 * step;
    (0..100).map(|i| (first + f64::from(i)) * step).take_while(|tick| *tick <= last).collect()
}

fn short(seconds: f64) -> String {
    let text = fixed(seconds, 6);
    if text.contains('e') { text } else { text.trim_end_matches('0').trim_end_matches('.').to_owned() }
}

/// Returns a span of the first task, for tests.
#[cfg(test)]
pub(crate) fn span(work: Work, start_s: f64, end_s: f64) -> Span {
    let (device, task) = (hydra_core::DeviceId(0), hydra_core::TaskId(0));
    Span { track: Track::Compute(device), task, work, shard: 0, step: 0, microbatch_pass: 0, start_s, end_s }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hydra_core::{DeviceId, TaskId};

    fn span(device: usize, task: usize, start_s: f64, end_s: f64) -> Span {
        let track = Track::Compute(DeviceId(device));
        Span { track, task: TaskId(task), ..super::span(Work::Forward, start_s, end_s) }
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
        let light = |from, to, task| RowSegment { from, to, label: Label { task, shade: Shade::Light } };
        let row = |device: usize, interval, columns| row(&timeline.rows[device].compute, interval, columns);
        assert_eq!(row(0, &(0.0..10.0), 10), [light(0, 2, 7), light(2, 3, 8)]);
        assert_eq!(row(1, &(0.0..10.0), 10), [light(9, 10, 1)]);
        assert_eq!(row(0, &(1.5..2.5), 2), [light(0, 1, 7), light(1, 2, 8)]);
        assert!(row(0, &(4.0..9.0), 5).is_empty());
        assert_eq!(timeline.intervals(DETAIL_TASKS), [0.0..10.0]);
    }

    /// Device 0 promotes and computes model 7, and device 1 model 8, whose promotion takes no time.
    #[test]
    fn promotions_of_a_simulation_are_seen() {
        let (minibatch, shard) = (0, 0);
        let span = |device: usize, task, what, start_s, end_s| hydra_sched::ScheduleSpan {
            device,
            task,
            minibatch,
            shard,
            what,
            start_s,
            end_s,
        };
        let compute = Occupation::Compute(ShardTaskKind::Backward);
        let spans = [
            span(0, 7, Occupation::Promote { bytes: 1 }, 0.0, 0.01),
            span(0, 7, compute, 0.01, 6.0),
            span(0, 8, Occupation::Promote { bytes: 1 }, 4.0, 6.0),
            span(1, 8, Occupation::Promote { bytes: 1 }, 0.0, 0.0),
            span(1, 8, compute, 0.0, 10.0),
        ];
        let timeline = Timeline::simulated("Simulated".to_owned(), 2, &spans);
        let dark = |from, to, task| RowSegment { from, to, label: Label { task, shade: Shade::Dark } };
        let strip = |device: usize, interval| strip(&timeline.rows[device].promotions, interval, 10);
        assert_eq!(strip(0, &(0.0..10.0)), [dark(0, 1, 7), dark(4, 6, 8)]);
        assert_eq!(strip(0, &(5.0..15.0)), [dark(0, 1, 8)]);
        assert!(strip(1, &(0.0..10.0)).is_empty());
        assert_eq!(row(&timeline.rows[1].compute, &(0.0..10.0), 10), [dark(0, 10, 8)]);
        let devices = ["device 0".to_owned(), "device 1".to_owned()];
        let svg =
            draw(&timeline, &devices, &[0.6, 1.0], &vec!["a".to_owned(); 9], &Palette::default()).unwrap();
        let parts = ["Simulated: 10.00 s on 2 devices", "promotion, below a row", "device 1"];
        assert!(parts.iter().all(|part| svg.contains(part)));
    }

    #[test]
    fn plots_have_a_largest_size() {
        assert!(check_size(MAX_ROWS, MAX_SPANS as u64).is_ok());
        assert!(check_size(MAX_ROWS + 1, 1).unwrap_err().to_string().contains("257 devices"));
        assert!(check_size(1, MAX_SPANS as u64 + 1).unwrap_err().to_string().contains("2097153 shard tasks"));
    }

    #[test]
    fn a_long_run_has_a_bounded_plot() {
        let many: Vec<Span> =
            (0..50_000).map(|i| span(i % 2, i % 12, i as f64 / 100.0, i as f64 / 100.0 + 0.01)).collect();
        let devices = ["cpu:0".to_owned(), "cpu:1".to_owned()];
        let tasks: Vec<String> = (0..12).map(|i| format!("task {i}")).collect();
        let svg = draw(&timeline(&many), &devices, &[0.5, 0.5], &tasks, &Palette::default()).unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        assert!(svg.matches("<rect").count() < 4 * WIDTH as usize + 100);
        for text in ["cpu:1", "50.0% busy", "task 11", "backward", "500.00 s on 2", "middle, 0.60 s long"] {
            assert!(svg.contains(text), "{text}");
        }
    }

    /// Draws two devices with twelve tasks of one second each. `tasks` of them have names.
    fn drawn_of(tasks: usize) -> String {
        let spans: Vec<Span> =
            (0..24).map(|i| span(i % 2, i / 2, (i / 2) as f64, (i / 2) as f64 + 1.0)).collect();
        let devices = ["cpu:0".to_owned(), "cpu:1".to_owned()];
        let tasks: Vec<String> = (0..tasks).map(|i| format!("task {i}")).collect();
        draw(&timeline(&spans), &devices, &[1.0, 1.0], &tasks, &Palette::default()).unwrap()
    }

    #[test]
    fn where_colours_repeat_rectangles_have_numbers() {
        let svg = drawn_of(12);
        let texts = |part: &str| svg.lines().filter(|line| line.trim() == part).count();
        for number in 1..=12 {
            assert!(texts(&format!("{number}: task {}", number - 1)) == 1, "the legend: {svg}");
            assert_eq!(texts(&number.to_string()), 2, "on each device: {svg}");
        }
        assert!(["#80B9D9", "#EAAF80"].iter().all(|forward| svg.contains(forward)), "{svg}");
        let few = drawn_of(7);
        assert!(!few.contains("7: task 6") && few.contains("task 6"), "colours suffice: {few}");
    }

    #[test]
    fn equal_settings_have_equal_colours_and_the_legend_names_them() {
        let colours = ["#440154", "#27828d"].map(str::to_owned);
        let entries = colours.iter().zip(["lr 1e-3", "lr 3e-3"]);
        let entries = entries.map(|(colour, text)| (colour.clone(), text.to_owned())).collect();
        let texts = ["8", "8", "16", "16"].map(|batch| format!("{batch} sgd")).to_vec();
        let of_task: Vec<String> = (0..4).map(|task| colours[task % 2].clone()).collect();
        let palette = Palette::of_settings(&of_task, entries, texts, "batch, optimizer".to_owned());
        let spans: Vec<Span> = (0..4).map(|i| span(0, i, i as f64, i as f64 + 1.0)).collect();
        let tasks: Vec<String> = (0..4).map(|i| format!("task {i}")).collect();
        let svg = draw(&timeline(&spans), &["cpu:0".to_owned()], &[1.0], &tasks, &palette).unwrap();
        let texts = |part: &str| svg.lines().filter(|line| line.trim() == part).count();
        assert_eq!(["lr 1e-3", "lr 3e-3", "text: batch, optimizer"].map(texts), [1, 1, 1], "{svg}");
        assert_eq!((texts("8 sgd"), texts("16 sgd"), texts("task 1")), (2, 2, 0), "{svg}");
    }

    #[test]
    fn an_empty_run_can_be_drawn() {
        let svg = draw(&Timeline::new(1), &["cpu:0".to_owned()], &[0.0], &[], &Palette::default()).unwrap();
        assert!(svg.contains("cpu:0"));
    }

    #[test]
    fn ticks_are_round() {
        assert_eq!(ticks(&(0.0..10.0)), (0..=10).map(f64::from).collect::<Vec<_>>());
        assert_eq!(ticks(&(12.0..35.0)), [15.0, 20.0, 25.0, 30.0, 35.0]);
        assert_eq!(ticks(&(0.0..0.0)), [0.0]);
        assert_eq!([0.25, 20.0, 2e299].map(short), ["0.25", "20", "2.000e299"]);
    }
}
