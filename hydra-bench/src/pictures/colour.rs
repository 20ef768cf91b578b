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
    fn tasks_differ() {
        let mut colours: Vec<_> =
            (0..24).map(|i| task_colour(i, Shade::Dark)).map(|c| (c.0, c.1, c.2)).collect();
        colours.sort_unstable();
        colours.dedup();
        assert_eq!(colours.len(), 24);
    }
}
