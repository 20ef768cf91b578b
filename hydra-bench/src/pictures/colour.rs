//! Colours of tasks in pictures.

use plotters::style::RGBColor;

/// The lightness of a task's colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shade {
    /// Evaluations.
    Pale,
    /// Forward.
    Light,
    /// Backward, and curves.
    Dark,
}

/// Colours of things without an order that people tell apart however they see colours (Okabe and Ito, 2008).
pub(crate) const CATEGORIES: [&str; 7] =
    ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000"];

/// Viridis, from dark to light, without its end that is too light on white.
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

/// The colour of value `index` of `count` in their order: lighter, whatever colours a person sees, the further on.
pub(crate) fn ordered(index: usize, count: usize) -> String {
    let last = ORDERED.len() - 1;
    let place = index as f64 / count.saturating_sub(1).max(1) as f64 * last as f64;
    let (lower, share) = ((place as usize).min(last - 1), place.fract());
    let share = if place >= last as f64 { 1.0 } else { share };
    let channel = |n: usize| ORDERED[lower][n] + share * (ORDERED[lower + 1][n] - ORDERED[lower][n]);
    let [red, green, blue] = [0, 1, 2].map(|n| channel(n).round() as u8);
    format!("#{red:02x}{green:02x}{blue:02x}")
}

/// The colour of the task at `index`. Hues are a golden angle apart: neighbours differ however many tasks there are.
pub(crate) fn task_colour(index: usize, shade: Shade) -> RGBColor {
    let hue = (index as f64 * 0.618_033_988_749_895).fract();
    let (saturation, lightness) = match shade {
        Shade::Pale => (0.45, 0.84),
        Shade::Light => (0.65, 0.66),
        Shade::Dark => (0.70, 0.42),
    };
    rgb(hue, saturation, lightness)
}

/// Hue, saturation and lightness in [0, 1], after the CSS Color Module.
fn rgb(hue: f64, saturation: f64, lightness: f64) -> RGBColor {
    let spread = saturation * lightness.min(1.0 - lightness);
    let channel = |n: f64| {
        let k = (n + hue * 12.0) % 12.0;
        let value = lightness - spread * (k - 3.0).min(9.0 - k).clamp(-1.0, 1.0);
        (value * 255.0).round() as u8
    };
    RGBColor(channel(0.0), channel(8.0), channel(4.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_colours() {
        assert_eq!(rgb(0.0, 1.0, 0.5), RGBColor(255, 0, 0));
        assert_eq!(rgb(1.0 / 3.0, 1.0, 0.5), RGBColor(0, 255, 0));
        assert_eq!(rgb(0.5, 0.0, 1.0), RGBColor(255, 255, 255));
    }

    #[test]
    fn values_in_order_go_from_dark_to_light() {
        assert_eq!(ordered(0, 1), "#440154");
        assert_eq!([0, 1, 2].map(|i| ordered(i, 3)), ["#440154", "#27828d", "#add028"]);
    }

    #[test]
    fn tasks_differ() {
        let mut colours: Vec<_> =
            (0..24).map(|i| task_colour(i, Shade::Dark)).map(|c| (c.0, c.1, c.2)).collect();
        colours.sort_unstable();
        colours.dedup();
        assert_eq!(colours.len(), 24);
    }
}
