//! Colours of tasks in plots.

use plotters::style::RGBColor;

/// The lightness of a task's colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shade {
    /// Evaluations.
    Pale,
    /// Forward.
    Light,
    /// Backward.
    Dark,
}

/// Categorical colours that are distinguishable with colour vision deficiencies (Okabe and Ito, 2008).
pub(crate) const CATEGORIES: [&str; 7] =
    ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000"];

/// Viridis, from dark to light, without the end that is too light on white.
const ORDERED: [[f64; 3]; 8] = [
    [68.0, 1.0, 84.0],
    [71.0, 45.0, 123.0],
    [59.0, 82.0, 139.0],
    [44.0, 114.0, 142.0],
    [33.0, 145.0, 140.0],
    [40.0, 174.0, 128.0],
    [94.0, 201.0, 98.0],
    [173.0, 208.0, 40.0],
];

/// Returns the colour of value `index` of `count` ordered values. Later values are lighter, also without colour vision.
pub(crate) fn ordered(index: usize, count: usize) -> String {
    let last = ORDERED.len() - 1;
    let place = index as f64 / count.saturating_sub(1).max(1) as f64 * last as f64;
    let (lower, share) = ((place as usize).min(last - 1), place.fract());
    let share = if place >= last as f64 { 1.0 } else { share };
    let channel = |n: usize| ORDERED[lower][n] + share * (ORDERED[lower + 1][n] - ORDERED[lower][n]);
    let [red, green, blue] = [0, 1, 2].map(|n| channel(n).round() as u8);
    format!("#{red:02x}{green:02x}{blue:02x}")
}

/// Colours of tasks, which repeat if there are more tasks, and their legend.
#[derive(Clone, Debug)]
pub struct Palette {
    colours: Vec<RGBColor>,
    /// The legend: a colour for each value of a setting. Empty if each task has its own colour.
    entries: Vec<(RGBColor, String)>,
    /// The text of each task in addition to its colour, and the names of the settings in it.
    texts: Vec<String>,
    written: String,
}

impl Default for Palette {
    /// Uses the colours of categories.
    fn default() -> Self {
        let colours = CATEGORIES.map(rgb).to_vec();
        Self { colours, entries: Vec::new(), texts: Vec::new(), written: String::new() }
    }
}

impl Palette {
    /// The maximum number of values of a setting with distinguishable colours.
    pub(crate) const DISTINGUISHABLE: usize = ORDERED.len();

    /// Returns the colours of tasks by the values of a setting, with the entries of the legend. `texts` has for each task its
    /// values of the settings in `written`.
    pub(crate) fn of_settings(
        colours: &[String],
        entries: Vec<(String, String)>,
        texts: Vec<String>,
        written: String,
    ) -> Self {
        let entries = entries.into_iter().map(|(colour, text)| (rgb(&colour), text)).collect();
        Self { colours: colours.iter().map(|colour| rgb(colour)).collect(), entries, texts, written }
    }

    /// Returns true if each of `tasks` tasks has a colour of its own.
    pub(crate) fn is_unique_for(&self, tasks: usize) -> bool {
        self.entries.is_empty() && tasks <= self.colours.len()
    }

    /// Returns the entries of the legend.
    pub(crate) fn entries(&self) -> &[(RGBColor, String)] {
        &self.entries
    }

    /// Returns the text of a task.
    pub(crate) fn text(&self, index: usize) -> &str {
        self.texts.get(index).map_or("", String::as_str)
    }

    /// Returns the names of the settings in the texts.
    pub(crate) fn written(&self) -> &str {
        &self.written
    }

    /// Returns the length of the longest text, in characters.
    pub(crate) fn longest(&self) -> usize {
        self.texts.iter().map(|text| text.chars().count()).max().unwrap_or(0)
    }

    /// Returns the colour of the task at `index`.
    pub(crate) fn colour(&self, index: usize, shade: Shade) -> RGBColor {
        let white = match shade {
            Shade::Pale => 0.75,
            Shade::Light => 0.5,
            Shade::Dark => 0.0,
        };
        let RGBColor(red, green, blue) = self.colours[index % self.colours.len().max(1)];
        let mixed = |channel: u8| (f64::from(channel) * (1.0 - white) + 255.0 * white).round() as u8;
        RGBColor(mixed(red), mixed(green), mixed(blue))
    }
}

/// Returns black or white, the one with more contrast on a colour.
pub(crate) fn ink(on: RGBColor) -> RGBColor {
    let RGBColor(red, green, blue) = on;
    let bright = 0.299 * f64::from(red) + 0.587 * f64::from(green) + 0.114 * f64::from(blue);
    if bright > 140.0 { RGBColor(0, 0, 0) } else { RGBColor(255, 255, 255) }
}

/// Returns the colour of `#rrggbb`; invalid digits are read as 0.
fn rgb(hex: &str) -> RGBColor {
    let channel =
        |at: usize| hex.get(at..at + 2).and_then(|two| u8::from_str_radix(two, 16).ok()).unwrap_or(0);
    RGBColor(channel(1), channel(3), channel(5))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_in_order_go_from_dark_to_light() {
        assert_eq!(ordered(0, 1), "#440154");
        assert_eq!([0, 1, 2].map(|i| ordered(i, 3)), ["#440154", "#27828d", "#add028"]);
    }

    #[test]
    fn tasks_have_the_colours_of_the_other_plots() {
        let palette = Palette::default();
        let shades = [Shade::Dark, Shade::Light, Shade::Pale].map(|shade| palette.colour(1, shade));
        assert_eq!(shades, [RGBColor(213, 94, 0), RGBColor(234, 175, 128), RGBColor(245, 215, 191)]);
        assert_eq!(palette.colour(8, Shade::Dark), palette.colour(1, Shade::Dark));
        assert!(palette.is_unique_for(7) && !palette.is_unique_for(8));
        let lines = ["#440154", "#27828d"].map(str::to_owned);
        let palette = Palette::of_settings(&lines, Vec::new(), Vec::new(), String::new());
        assert_eq!(palette.colour(1, Shade::Dark), RGBColor(0x27, 0x82, 0x8d));
    }

    /// Colours as seen with deuteranopia and protanopia (Vienot, Brettel and Mollon, 1999); differences as in CIE 1976.
    #[test]
    fn neighbours_differ_for_the_colour_blind() {
        let deutan = [[0.29275, 0.70725, 0.0], [0.29275, 0.70725, 0.0], [-0.02234, 0.02234, 1.0]];
        let protan = [[0.11238, 0.88762, 0.0], [0.11238, 0.88762, 0.0], [0.00401, -0.00401, 1.0]];
        let palette = Palette::default();
        let tasks = palette.colours.len();
        for sees in [deutan, protan] {
            let seen = |index: usize| simulated(&sees, palette.colour(index, Shade::Dark));
            for (a, b) in (0..tasks).flat_map(|a| (0..a).map(move |b| (a, b))) {
                let apart = seen(a).iter().zip(seen(b)).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt();
                assert!(apart > 15.0, "{a} and {b}: {apart}");
            }
        }
    }

    fn simulated(sees: &[[f64; 3]; 3], RGBColor(red, green, blue): RGBColor) -> [f64; 3] {
        let linear = [red, green, blue].map(|channel| (f64::from(channel) / 255.0).powf(2.2));
        let times = |rows: &[[f64; 3]; 3], of: [f64; 3]| {
            rows.map(|row| row.iter().zip(of).map(|(a, b)| a * b).sum::<f64>())
        };
        let xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]];
        let [x, y, z] = times(&xyz, times(sees, linear));
        let root = |value: f64| if value > 0.008_856 { value.cbrt() } else { 7.787 * value + 16.0 / 116.0 };
        let [x, y, z] = [x / 0.9505, y, z / 1.089].map(root);
        [116.0 * y - 16.0, 500.0 * (x - y), 200.0 * (y - z)]
    }
}
