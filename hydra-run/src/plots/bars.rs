//! Bar charts: a name, a bar and its value in each row.

use crate::plots::canvas::{Canvas, svg};
use crate::plots::colour::{Palette, Shade};
use anyhow::Result;

const WIDTH: i32 = 960;
const LEFT: i32 = 210;
/// Space for the label next to the longest bar.
const RIGHT: i32 = 200;
const TOP: i32 = 64;
const ROW: i32 = 24;
const GAP: i32 = 10;

/// A row of a bar chart.
pub struct Bar {
    /// The label of the row.
    pub name: String,
    /// The length of the bar; `None` for a row without one.
    pub value: Option<f64>,
    /// The text next to the bar: the value with its unit, or why there is none.
    pub label: String,
}

/// Draws the bars as SVG. The scale ends at `full`, by default at the longest bar.
pub fn draw(title: &str, note: &str, full: Option<f64>, bars: &[Bar]) -> Result<String> {
    let longest = bars.iter().filter_map(|bar| bar.value).fold(0.0, f64::max);
    let full = full.unwrap_or(longest);
    let height = TOP + bars.len() as i32 * (ROW + GAP) + GAP;
    svg((WIDTH as u32, height as u32), |canvas| {
        canvas.text((16, 10), 20, title)?;
        canvas.text((16, 36), 13, note)?;
        bars.iter().enumerate().try_for_each(|(index, bar)| row(canvas, index, bar, full))
    })
}

fn row(canvas: &Canvas<'_>, index: usize, bar: &Bar, full: f64) -> Result<()> {
    let top = TOP + index as i32 * (ROW + GAP);
    let share = bar.value.filter(|_| full > 0.0).map_or(0.0, |value| (value / full).clamp(0.0, 1.0));
    let right = LEFT + (share * f64::from(WIDTH - RIGHT - LEFT)).round() as i32;
    canvas.text((16, top + 5), 14, &bar.name)?;
    if bar.value.is_some() {
        // A bar of length zero has one pixel, unlike a row without a bar.
        canvas.fill(
            [(LEFT, top), (right.max(LEFT + 1), top + ROW)],
            Palette::default().colour(index, Shade::Light),
        )?;
    }
    canvas.text((right + 8, top + 5), 13, &bar.label)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bar(name: &str, value: Option<f64>) -> Bar {
        Bar { name: name.to_owned(), value, label: value.map_or("does not fit".into(), |v| format!("{v} s")) }
    }

    /// Returns the widths of the bars, without the white background.
    fn widths(svg: &str) -> Vec<i32> {
        let of = |part: &str| part.split("width=\"").nth(1)?.split('"').next()?.parse().ok();
        svg.split("<rect").skip(2).filter_map(of).collect()
    }

    #[test]
    fn bars_are_as_long_as_their_values() {
        let bars = [bar("a", Some(4.0)), bar("b", Some(1.0)), bar("c", None), bar("d", Some(0.0))];
        let svg = draw("Runtime", "in seconds", None, &bars).unwrap();
        let all = WIDTH - LEFT - RIGHT;
        let found = widths(&svg);
        assert_eq!(found.len(), 3, "a row without a value has no bar: {svg}");
        assert!((found[0] - all).abs() <= 1 && (found[1] - all / 4).abs() <= 1 && found[2] <= 2, "{found:?}");
        assert!(["Runtime", "in seconds", "4 s", "does not fit"].iter().all(|part| svg.contains(part)));
        let half = draw("", "", Some(8.0), &bars).unwrap();
        assert!((widths(&half)[0] - all / 2).abs() <= 1);
    }

    #[test]
    fn nothing_can_be_drawn() {
        assert!(draw("Empty", "", None, &[]).unwrap().contains("Empty"));
        assert!(draw("Zero", "", None, &[bar("a", Some(0.0))]).unwrap().contains("0 s"));
    }
}
