//! Axes: mapping of values to pixels, and round ticks.

use std::ops::Range;

/// A linear mapping of values to pixels.
#[derive(Clone, Debug)]
pub(crate) struct Scale {
    values: Range<f64>,
    pixels: Range<f64>,
}

impl Scale {
    /// Returns the mapping of `values` onto `pixels`, which may be descending.
    pub(crate) fn new(values: Range<f64>, pixels: Range<f64>) -> Self {
        let values = if values.end > values.start { values } else { values.start - 0.5..values.start + 0.5 };
        Self { values, pixels }
    }

    /// Returns the pixel of a value.
    pub(crate) fn at(&self, value: f64) -> f64 {
        let share = (value - self.values.start) / (self.values.end - self.values.start);
        // Clamped, so that viewers can read the coordinates of values far outside.
        self.pixels.start + share.clamp(-10.0, 10.0) * (self.pixels.end - self.pixels.start)
    }

    /// Returns the same mapping with values in a unit.
    pub(crate) fn in_unit(&self, unit: f64) -> Self {
        let values = self.values.start / unit..self.values.end / unit;
        Self { values, pixels: self.pixels.clone() }
    }

    /// Returns about `count` round values.
    pub(crate) fn ticks(&self, count: f64) -> Vec<f64> {
        let raw = (self.values.end - self.values.start) / count;
        let magnitude = 10_f64.powf(raw.log10().floor());
        let steps = [1.0, 2.0, 5.0, 10.0].map(|times| times * magnitude);
        let step = steps.into_iter().find(|step| *step >= raw * 0.999).unwrap_or(10.0 * magnitude);
        let first = (self.values.start / step).ceil();
        let last = self.values.end + 1e-6 * step;
        (0..100).map(|i| (first + f64::from(i)) * step).take_while(|tick| *tick <= last).collect()
    }
}

/// Returns the text of a tick, with a suffix from thousands on, without trailing zeros.
pub(crate) fn short(value: f64) -> String {
    let (value, letter) = match value.abs() {
        v if v >= 1e9 => (value / 1e9, "G"),
        v if v >= 1e6 => (value / 1e6, "M"),
        v if v >= 1e3 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    let text = format!("{value:.3}");
    format!("{}{letter}", text.trim_end_matches('0').trim_end_matches('.'))
}

/// Returns positions of labels that do not overlap, near the wanted ones and in the same order.
pub(crate) fn apart(wanted: &[f64], height: f64, within: Range<f64>) -> Vec<f64> {
    let mut order: Vec<usize> = (0..wanted.len()).collect();
    order.sort_by(|a, b| wanted[*a].total_cmp(&wanted[*b]));
    let mut places = vec![0.0; wanted.len()];
    let mut above = f64::NEG_INFINITY;
    for &index in &order {
        above = wanted[index].max(above + height).max(within.start);
        places[index] = above;
    }
    let mut below = within.end;
    for &index in order.iter().rev() {
        places[index] = places[index].min(below);
        below = places[index] - height;
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_and_ticks_are_where_they_belong() {
        let scale = Scale::new(0.0..10.0, 100.0..0.0);
        assert_eq!((scale.at(0.0), scale.at(2.5), scale.at(10.0)), (100.0, 75.0, 0.0));
        assert_eq!(scale.ticks(5.0), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        assert!(Scale::new(3.0..3.0, 0.0..1.0).at(3.0).is_finite());
        assert!(scale.at(1e300).is_finite());
        assert_eq!(scale.in_unit(5.0).ticks(2.0), [0.0, 1.0, 2.0]);
        assert_eq!([0.0, 0.25, 1500.0, 2e6].map(short), ["0", "0.25", "1.5k", "2M"]);
    }

    #[test]
    fn labels_stand_apart() {
        assert_eq!(apart(&[50.0, 10.0, 51.0], 12.0, 0.0..100.0), [50.0, 10.0, 62.0]);
        assert_eq!(apart(&[98.0, 99.0], 12.0, 0.0..100.0), [88.0, 100.0]);
    }
}
