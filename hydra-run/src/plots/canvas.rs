//! A canvas for rectangles and texts.

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;

/// An SVG plot that is being drawn. Positions are in pixels from the upper left corner.
pub(crate) struct Canvas<'a> {
    pub(super) root: DrawingArea<SVGBackend<'a>, Shift>,
}

impl Canvas<'_> {
    /// Writes one line of text; control characters, such as a line break in a task's name, are replaced.
    pub(crate) fn text(&self, at: (i32, i32), size: i32, text: &str) -> Result<()> {
        self.coloured(at, size, BLACK, text)
    }

    /// Writes one line of text in a colour.
    pub(crate) fn coloured(&self, at: (i32, i32), size: i32, colour: RGBColor, text: &str) -> Result<()> {
        let style = ("sans-serif", size).into_font().color(&colour);
        self.root.draw(&Text::new(one_line(text), at, style)).map_err(|error| anyhow!("{error}"))
    }

    /// Fills a rectangle.
    pub(crate) fn fill(&self, corners: [(i32, i32); 2], colour: RGBColor) -> Result<()> {
        self.root.draw(&Rectangle::new(corners, colour.filled())).map_err(|error| anyhow!("{error}"))
    }
}

/// Returns the SVG text of a white canvas of this size after `draw`.
pub(crate) fn svg(size: (u32, u32), draw: impl FnOnce(&Canvas<'_>) -> Result<()>) -> Result<String> {
    let mut svg = String::new();
    let canvas = Canvas { root: SVGBackend::with_string(&mut svg, size).into_drawing_area() };
    canvas.root.fill(&WHITE).map_err(|error| anyhow!("{error}"))?;
    draw(&canvas)?;
    canvas.root.present().map_err(|error| anyhow!("{error}"))?;
    drop(canvas);
    Ok(svg)
}

/// Returns the text with control characters replaced, as XML and rows of tables need it.
pub fn one_line(text: &str) -> String {
    text.replace(|c: char| c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}'), "\u{fffd}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_escaped() {
        let drawn = svg((100, 50), |canvas| {
            canvas.fill([(0, 0), (10, 10)], RED)?;
            canvas.text((5, 5), 12, "a<b>\u{0}&\nc")
        });
        let drawn = drawn.unwrap();
        assert!(drawn.contains("a&lt;b&gt;\u{fffd}&amp;\u{fffd}c"), "{drawn}");
        assert!(drawn.contains("#FF0000") && drawn.trim_end().ends_with("</svg>"));
    }
}
