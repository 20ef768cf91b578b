//! Shared parts of the experiments: a folder of results, and a small line plot.

#![allow(dead_code, reason = "each experiment uses a part of it")]

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::Command;
use std::{env, fs, io};

/// A folder under `hydra-bench/runs/` with results and how they were measured.
pub struct Run {
    folder: PathBuf,
    command: String,
}

impl Run {
    /// Opens the folder in the first argument; creates it if it does not exist.
    pub fn new(example: &str) -> io::Result<Self> {
        Self::in_folder(example, &format!("sched-{example}"))
    }

    /// The same with another default name of the folder.
    pub fn in_folder(example: &str, name: &str) -> io::Result<Self> {
        let folder = env::args().nth(1).unwrap_or_else(|| format!("hydra-bench/runs/{name}"));
        let command = format!("cargo run -p hydra-sched --example {example} -- {folder}");
        let folder = PathBuf::from(folder);
        fs::create_dir_all(&folder)?;
        Ok(Self { folder, command })
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    pub fn write(&self, name: &str, text: &str) -> io::Result<()> {
        fs::write(self.folder.join(name), text)
    }

    /// Writes `README.md`: the command, the commit, the machine, and the figures.
    pub fn summary(&self, title: &str, text: &str) -> io::Result<()> {
        let commit = Command::new("git").args(["rev-parse", "--short", "HEAD"]).output()?;
        let commit = String::from_utf8_lossy(&commit.stdout).trim().to_owned();
        let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let cpu = cpu.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or(": unknown");
        let cpu = cpu.trim_start_matches([' ', '\t', ':']);
        let text = format!(
            "# {title}\n\n- command: `{}`\n- commit: {commit} and what was not committed on it\n- machine: {cpu}; one \
             thread\n\nVirtual time: the figures are functions of the code and the seeds, not of the machine, but for \
             the seconds that the simulations took.\n\n{text}",
            self.command
        );
        print!("{text}");
        self.write("README.md", &text)
    }
}

/// The smallest number that at least this share of the sorted numbers does not exceed.
pub fn quantile(sorted: &[f64], share: f64) -> f64 {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted[rank.clamp(1, sorted.len()) - 1]
}

/// The share of the cases up to each of the sorted ratios, at two hundred points.
pub fn distribution(name: String, sorted: &[f64]) -> Series {
    let place = |percent| (quantile(sorted, f64::from(percent) / 200.0), f64::from(percent) / 200.0);
    Series { name, points: (1..=200).map(place).collect() }
}

/// A line of a plot.
pub struct Series {
    pub name: String,
    pub points: Vec<(f64, f64)>,
}

const COLOURS: [&str; 12] = [
    "#1b6ca8", "#c8553d", "#3a7d44", "#8e5ea2", "#b8860b", "#444444", "#17a2a2", "#d6336c", "#7f7f00",
    "#000080", "#a0522d", "#2e8b57",
];
const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 64.0;
const TOP: f64 = 40.0;
const RIGHT: f64 = 330.0;
const BOTTOM: f64 = 52.0;

/// Plots lines over an axis that may be logarithmic, as SVG.
pub fn plot(title: &str, axes: (&str, &str), log: bool, series: &[Series]) -> String {
    let along = |x: f64| if log { x.log2() } else { x };
    let all = || series.iter().flat_map(|s| &s.points);
    let range = |of: &dyn Fn(&(f64, f64)) -> f64| {
        let low = all().map(of).fold(f64::INFINITY, f64::min);
        let high = all().map(of).fold(f64::NEG_INFINITY, f64::max);
        (low, if high > low { high } else { low + 1.0 })
    };
    let (x_range, y_range) = (range(&|p| along(p.0)), range(&|p| if log { along(p.1) } else { p.1 }));
    let x = |v: f64| LEFT + (WIDTH - LEFT - RIGHT) * (v - x_range.0) / (x_range.1 - x_range.0);
    let y = |v: f64| HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (v - y_range.0) / (y_range.1 - y_range.0);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n<text x=\"{LEFT}\" y=\"24\" \
         font-size=\"15\">{title}</text>\n"
    );
    let steps = if log { 6 } else { 5 };
    for step in 0..=steps {
        let share = f64::from(step) / f64::from(steps);
        let (vx, vy) =
            (x_range.0 + share * (x_range.1 - x_range.0), y_range.0 + share * (y_range.1 - y_range.0));
        let label = |v: f64| if log { format!("{:.0}", v.exp2()) } else { format!("{:.3}", v) };
        let _ = writeln!(
            svg,
            "<line x1=\"{LEFT}\" x2=\"{}\" y1=\"{1}\" y2=\"{1}\" stroke=\"#ddd\"/><text x=\"{2}\" y=\"{3}\" \
             text-anchor=\"end\">{4}</text><text x=\"{5}\" y=\"{6}\" text-anchor=\"middle\">{7}</text>",
            WIDTH - RIGHT,
            y(vy),
            LEFT - 6.0,
            y(vy) + 4.0,
            label(vy),
            x(vx),
            HEIGHT - BOTTOM + 18.0,
            label(vx)
        );
    }
    for (index, line) in series.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        let place =
            |p: &(f64, f64)| format!("{:.1},{:.1}", x(along(p.0)), y(if log { along(p.1) } else { p.1 }));
        let points: Vec<String> = line.points.iter().map(place).collect();
        let (legend_x, legend_y) = (WIDTH - RIGHT + 12.0, TOP + 20.0 * index as f64);
        let _ = writeln!(
            svg,
            "<polyline fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\" points=\"{}\"/><text x=\"{legend_x}\" \
             y=\"{legend_y}\" fill=\"{colour}\">{}</text>",
            points.join(" "),
            line.name
        );
    }
    let (x_name, y_name) = axes;
    let _ = writeln!(
        svg,
        "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{x_name}</text><text x=\"16\" y=\"{TOP}\" \
         transform=\"rotate(-90 16 {TOP})\" text-anchor=\"end\">{y_name}</text>\n</svg>",
        LEFT + (WIDTH - LEFT - RIGHT) / 2.0,
        HEIGHT - 12.0
    );
    svg
}
