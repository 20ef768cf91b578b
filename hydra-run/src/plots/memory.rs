//! The memory plot: the reserved bytes of each tier over time, and its budget.

use crate::plots::colour::CATEGORIES;
use crate::plots::scale::{Scale, apart, short};
use crate::plots::svg::{Anchor, Stroke, Svg};
use hydra_core::ByteSize;
use hydra_engine::TierMemory;
use std::collections::BTreeSet;

const WIDTH: f64 = 1280.0;
const LEFT: f64 = 92.0;
const RIGHT: f64 = 1000.0;
const TOP: f64 = 96.0;
/// The height of a tier's panel, and the distance from one to the next.
const PANEL: f64 = 110.0;
const PITCH: f64 = PANEL + 42.0;
const AXIS: f64 = 52.0;
/// A budget larger than the peak by this factor is above the range of the plot, so that the reserved bytes stay visible.
const FAR: f64 = 5.0;
const RESERVED: &str = CATEGORIES[0];
const PEAK: &str = "#cfe3f1";
const BUDGET: &str = CATEGORIES[1];

/// The memory of all tiers at one time, in seconds from the start of the run.
#[derive(Clone, Debug)]
pub struct Moment {
    pub(crate) at_s: f64,
    pub tiers: Vec<TierMemory>,
}

/// Draws a panel for each tier. Returns `None` without moments.
pub(crate) fn draw(moments: &[Moment]) -> Option<String> {
    let mut seen = BTreeSet::new();
    let names = moments.iter().flat_map(|moment| &moment.tiers).map(|tier| tier.name.as_str());
    let names: Vec<&str> = names.filter(|name| seen.insert(*name)).collect();
    let end_s = moments.iter().map(|moment| moment.at_s).fold(0.0, f64::max);
    let bottom = TOP + PITCH * names.len().checked_sub(1)? as f64 + PANEL;
    let mut svg = Svg::new(WIDTH, bottom + AXIS);
    svg.bold((16.0, 30.0), 19.0, "Memory of each tier over time");
    let note = "reserved bytes; bold: peak since the previous sample; thin: at each sample; dashed: budget";
    svg.grey((16.0, 51.0), 13.0, Anchor::Start, note);
    let time = Time::new(end_s);
    for (index, name) in names.into_iter().enumerate() {
        Panel::new(name, moments, &time).draw(&mut svg, TOP + PITCH * index as f64);
    }
    time.axis(&mut svg, bottom);
    Some(svg.finish())
}

/// The time axis.
struct Time {
    /// The scale, in `unit`.
    scale: Scale,
    unit: &'static str,
    unit_s: f64,
}

impl Time {
    fn new(end_s: f64) -> Self {
        let (unit, unit_s) = match end_s {
            s if s > 3.0 * 3600.0 => ("hours", 3600.0),
            s if s > 180.0 => ("minutes", 60.0),
            _ => ("seconds", 1.0),
        };
        Self { scale: Scale::new(0.0..(end_s / unit_s).max(1e-9), LEFT..RIGHT), unit, unit_s }
    }

    fn at(&self, at_s: f64) -> f64 {
        self.scale.at(at_s / self.unit_s)
    }

    fn axis(&self, svg: &mut Svg, bottom: f64) {
        for tick in self.scale.ticks(10.0) {
            svg.text((self.scale.at(tick), bottom + 17.0), 12.0, Anchor::Middle, &short(tick));
        }
        let label = format!("running time in {}", self.unit);
        svg.grey(((LEFT + RIGHT) / 2.0, bottom + 38.0), 13.0, Anchor::Middle, &label);
    }

    fn grid(&self) -> impl Iterator<Item = f64> {
        self.scale.ticks(10.0).into_iter().map(|tick| self.scale.at(tick))
    }
}

/// The panel of a tier.
struct Panel<'a> {
    name: &'a str,
    time: &'a Time,
    points: Vec<Point>,
    most: u64,
    budget: u64,
}

/// A point of a tier's curve; its peak is since the point before.
struct Point {
    x: f64,
    reserved: u64,
    peak: u64,
    budget: u64,
}

impl Point {
    /// Returns the point of the moments that share a pixel.
    fn merge(moments: &[(f64, &TierMemory)]) -> Option<Self> {
        let &(x, last) = moments.last()?;
        let peak = moments.iter().map(|(_, tier)| tier.peak_bytes).max()?;
        Some(Self { x, reserved: last.reserved_bytes, peak, budget: last.budget_bytes })
    }
}

impl<'a> Panel<'a> {
    fn new(name: &'a str, moments: &[Moment], time: &'a Time) -> Self {
        let of = |moment: &'_ Moment| moment.tiers.iter().position(|tier| tier.name == name);
        let all =
            moments.iter().filter_map(|moment| Some((time.at(moment.at_s), &moment.tiers[of(moment)?])));
        let all: Vec<(f64, &TierMemory)> = all.collect();
        let points: Vec<Point> =
            all.chunk_by(|a, b| a.0 as u64 == b.0 as u64).filter_map(Point::merge).collect();
        let most = points.iter().map(|point| point.peak).max().unwrap_or(0);
        let budget = points.iter().map(|point| point.budget).max().unwrap_or(0);
        Self { name, time, points, most, budget }
    }

    /// Returns true if the budget is above the range of the plot.
    fn budget_is_above(&self) -> bool {
        self.most > 0 && self.budget as f64 > FAR * self.most as f64
    }

    fn draw(&self, svg: &mut Svg, top: f64) {
        let bottom = top + PANEL;
        let highest = if self.budget_is_above() {
            1.3 * self.most as f64
        } else {
            1.1 * self.most.max(self.budget) as f64
        };
        let y = Scale::new(0.0..highest.max(1.0), bottom..top);
        svg.bold((LEFT, top - 10.0), 14.0, self.name);
        let of = |bytes: fn(&Point) -> u64| self.steps(&y, bytes);
        let ground = [(self.points.last().map_or(LEFT, |point| point.x), bottom), (LEFT, bottom)];
        svg.polygon(&[of(|point| point.peak), ground.to_vec()].concat(), PEAK, &Stroke::new(PEAK, 1.0));
        self.frame(svg, &y, [top, bottom]);
        let reserved = self.points.iter().map(|point| (point.x, y.at(point.reserved as f64)));
        svg.path(&reserved.collect::<Vec<_>>(), &Stroke { opacity: 0.6, ..Stroke::new(RESERVED, 0.8) });
        svg.path(&of(|point| point.peak), &Stroke::new(RESERVED, 1.6));
        let budget = Stroke { dash: "6 4", ..Stroke::new(BUDGET, 1.6) };
        if !self.budget_is_above() {
            svg.path(&of(|point| point.budget), &budget);
        }
        self.labels(svg, &y, top);
    }

    /// Returns a step line: horizontal from each point back to the one before it.
    fn steps(&self, y: &Scale, bytes: fn(&Point) -> u64) -> Vec<(f64, f64)> {
        let before = std::iter::once(LEFT).chain(self.points.iter().map(|point| point.x));
        let level = |(before, point): (f64, &Point)| {
            let y = y.at(bytes(point) as f64);
            [(before, y), (point.x, y)]
        };
        before.zip(&self.points).flat_map(level).collect()
    }

    fn frame(&self, svg: &mut Svg, y: &Scale, [top, bottom]: [f64; 2]) {
        let light = Stroke { opacity: 0.7, ..Stroke::new("#d8d8d8", 1.0) };
        self.time.grid().for_each(|x| svg.line((x, top), (x, bottom), &light));
        for (bytes, label) in ticks(y, self.most.max(if self.budget_is_above() { 0 } else { self.budget })) {
            svg.line((LEFT, y.at(bytes)), (RIGHT, y.at(bytes)), &light);
            svg.text((LEFT - 7.0, y.at(bytes) + 4.0), 12.0, Anchor::End, &label);
        }
        let dark = Stroke::new("#444444", 1.0);
        svg.path(&[(LEFT, top), (LEFT, bottom), (RIGHT, bottom)], &dark);
    }

    /// Draws the labels of the budget and the peak next to the plot, at their heights.
    fn labels(&self, svg: &mut Svg, y: &Scale, top: f64) {
        let (most, budget) = (ByteSize(self.most), ByteSize(self.budget));
        let share = 100.0 * self.most as f64 / self.budget.max(1) as f64;
        let far = if self.budget_is_above() { ", above the plot" } else { "" };
        let share = if share >= 1.0 { format!(" ({share:.0}%)") } else { String::new() };
        let labels = [format!("budget {budget}{far}"), format!("peak {most}{share}")];
        let wanted = [self.budget, self.most].map(|bytes| y.at(bytes as f64).max(top) + 4.0);
        let places = apart(&wanted, 16.0, top + 4.0..top + PANEL);
        for ((text, place), colour) in labels.iter().zip(places).zip([BUDGET, RESERVED]) {
            svg.line((RIGHT + 8.0, place - 4.0), (RIGHT + 22.0, place - 4.0), &Stroke::new(colour, 3.0));
            svg.text((RIGHT + 28.0, place), 13.0, Anchor::Start, text);
        }
    }
}

/// Returns round numbers of bytes in the unit of `most`, and their texts.
fn ticks(y: &Scale, most: u64) -> Vec<(f64, String)> {
    let units = [("B", 0), ("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40)];
    let unit = units.into_iter().rev().find(|(_, shift)| most >> shift > 0).unwrap_or(units[0]);
    let (name, bytes) = (unit.0, (1_u64 << unit.1) as f64);
    let ticks = y.in_unit(bytes).ticks(5.0).into_iter();
    ticks
        .map(|tick| {
            (tick * bytes, if tick == 0.0 { "0".to_owned() } else { format!("{} {name}", short(tick)) })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tier(name: &str, [reserved_bytes, peak_bytes, budget_bytes]: [u64; 3]) -> TierMemory {
        TierMemory { name: name.to_owned(), reserved_bytes, peak_bytes, budget_bytes }
    }

    const MIB: u64 = 1 << 20;

    /// Returns the memory of the host and of a device at 0, 5 and 10 seconds.
    fn moments() -> Vec<Moment> {
        let moment = |at_s, host: u64, device: [u64; 2]| {
            let [reserved, peak] = device;
            let tiers = vec![
                tier("host memory", [host, host, 100 << 30]),
                tier("<cpu:0>", [reserved, peak, 100 * MIB]),
            ];
            Moment { at_s, tiers }
        };
        vec![
            moment(0.0, 8 * MIB, [0, 0]),
            moment(5.0, 16 * MIB, [10 * MIB, 80 * MIB]),
            moment(10.0, 0, [0, 40 * MIB]),
        ]
    }

    /// Returns the lines of the SVG that contain a text.
    fn with<'a>(svg: &'a str, look: &str) -> Vec<&'a str> {
        svg.lines().filter(|line| line.contains(look)).collect()
    }

    #[test]
    fn every_tier_has_a_panel_with_what_is_reserved_what_was_and_its_budget() {
        let svg = draw(&moments()).unwrap();
        let places = [">host memory<", ">&lt;cpu:0&gt;<", "running time in seconds"]
            .map(|part| svg.find(part).unwrap());
        assert!(places.is_sorted(), "{places:?}");
        let (host, device) = (TOP, TOP + PITCH);
        // The range ends at 1.1 times the budget, so 80 of 100 MiB are at 72.7% of the height.
        let height = |share: f64| format!("{:.1}", device + PANEL - PANEL * share / 1.1);
        let (left, middle, right) =
            (format!("{LEFT:.1}"), format!("{:.1}", (LEFT + RIGHT) / 2.0), format!("{RIGHT:.1}"));
        let areas = with(&svg, "<polygon");
        assert_eq!(areas.len(), 2);
        let most = height(0.8);
        assert!(
            areas[1].contains(&format!("{left},{most} {middle},{most} ")),
            "the peak between two moments: {}",
            areas[1]
        );
        let line = with(&svg, &format!("stroke=\"{RESERVED}\" stroke-width=\"0.8\""))[1];
        let at_moments = format!("M{left} {}L{middle} {}L{right} {}", height(0.0), height(0.1), height(0.0));
        assert!(line.contains(&at_moments), "{line}");
        let budget = with(&svg, "stroke-dasharray");
        assert_eq!(budget.len(), 1, "the budget of the host is above the range: {budget:?}");
        assert!(
            budget[0].contains(BUDGET) && budget[0].contains(&format!("M{left} {}", height(1.0))),
            "{budget:?}"
        );
        for part in [
            "budget 100.00 GiB, above the plot",
            "peak 16.00 MiB<",
            "budget 100.00 MiB<",
            "peak 80.00 MiB (80%)",
        ] {
            assert!(svg.contains(part), "{part} in {svg}");
        }
        // The range ends at 1.3 times the peak of 16 MiB, independent of the budget.
        let highest = format!("{:.1}", host + PANEL - PANEL / 1.3);
        assert!(areas[0].contains(&format!("{left},{highest} {middle},{highest}")), "{}", areas[0]);
    }

    #[test]
    fn a_long_run_has_a_plot_of_bounded_size_that_leaves_out_no_peak() {
        let moment = |i: u32| Moment {
            at_s: f64::from(i),
            tiers: vec![tier("cpu:0", [MIB, if i == 30_001 { 9 * MIB } else { 2 * MIB }, 10 * MIB])],
        };
        let svg = draw(&(0..60_000).map(moment).collect::<Vec<_>>()).unwrap();
        assert!(svg.len() < 120_000, "{}", svg.len());
        let most = format!(",{:.1} ", TOP + PANEL - PANEL * 0.9 / 1.1);
        assert!(with(&svg, "<polygon")[0].contains(&most) && svg.contains("peak 9.00 MiB (90%)"));
        assert!(svg.contains("running time in hours"), "{svg}");
    }

    #[test]
    fn nothing_and_one_moment_can_be_drawn() {
        assert!(draw(&[]).is_none());
        for bytes in [[0, 0, 0], [5, 5, 5]] {
            let svg = draw(&[Moment { at_s: 0.0, tiers: vec![tier("cpu:0", bytes)] }]).unwrap();
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        }
    }
}
