//! An SVG writer with dashes, opacity, clipping and text anchors.

use crate::plots::canvas::one_line;
use std::fmt::Write;
use std::ops::Range;

/// An SVG plot that is being drawn. Positions are in pixels from the upper left corner.
pub(crate) struct Svg {
    size: (f64, f64),
    body: String,
}

/// The part of a text that is at its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Anchor {
    Start,
    Middle,
    End,
}

/// The style of a line.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Stroke {
    pub(crate) colour: String,
    pub(crate) width: f64,
    /// The lengths of dashes and gaps; empty for a solid line.
    pub(crate) dash: &'static str,
    pub(crate) opacity: f64,
}

impl Stroke {
    pub(crate) fn new(colour: impl Into<String>, width: f64) -> Self {
        Self { colour: colour.into(), width, dash: "", opacity: 1.0 }
    }

    fn attributes(&self) -> String {
        let Self { colour, width, dash, opacity } = self;
        let dash = if dash.is_empty() { String::new() } else { format!(" stroke-dasharray=\"{dash}\"") };
        format!("stroke=\"{colour}\" stroke-width=\"{width}\" stroke-opacity=\"{opacity}\"{dash}")
    }
}

impl Svg {
    pub(crate) fn new(width: f64, height: f64) -> Self {
        Self { size: (width, height), body: String::new() }
    }

    pub(crate) fn text(&mut self, at: (f64, f64), size: f64, anchor: Anchor, text: &str) {
        self.styled_text(at, size, anchor, "#222222", text);
    }

    pub(crate) fn bold(&mut self, at: (f64, f64), size: f64, text: &str) {
        self.styled_text(at, size, Anchor::Start, "#000000\" font-weight=\"bold", text);
    }

    pub(crate) fn grey(&mut self, at: (f64, f64), size: f64, anchor: Anchor, text: &str) {
        self.styled_text(at, size, anchor, "#5a5a5a", text);
    }

    /// Writes text with a white outline, readable on lines.
    pub(crate) fn halo(&mut self, at: (f64, f64), size: f64, text: &str) {
        let edge = "#222222\" stroke=\"#ffffff\" stroke-width=\"3\" paint-order=\"stroke";
        self.styled_text(at, size, Anchor::Start, edge, text);
    }

    fn styled_text(&mut self, (x, y): (f64, f64), size: f64, anchor: Anchor, fill: &str, text: &str) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let text = escape(&one_line(text));
        self.push(format!(
            "<text x=\"{x:.1}\" y=\"{y:.1}\" font-size=\"{size}\" text-anchor=\"{anchor}\" fill=\"{fill}\">{text}</text>"
        ));
    }

    /// Writes text upwards, for the name of a vertical axis.
    pub(crate) fn upward(&mut self, (x, y): (f64, f64), size: f64, text: &str) {
        self.body.push_str(&format!("<g transform=\"rotate(-90 {x:.1} {y:.1})\">"));
        self.grey((x, y), size, Anchor::Middle, text);
        self.push("</g>".to_owned());
    }

    pub(crate) fn line(&mut self, from: (f64, f64), to: (f64, f64), stroke: &Stroke) {
        self.path(&[from, to], stroke);
    }

    pub(crate) fn path(&mut self, points: &[(f64, f64)], stroke: &Stroke) {
        let mut path = String::new();
        for (index, (x, y)) in points.iter().enumerate() {
            let _ = write!(path, "{}{x:.1} {y:.1}", if index == 0 { "M" } else { "L" });
        }
        let stroke = stroke.attributes();
        self.push(format!("<path d=\"{path}\" fill=\"none\" stroke-linejoin=\"round\" {stroke}/>"));
    }

    pub(crate) fn circle(&mut self, (x, y): (f64, f64), radius: f64, fill: &str, stroke: &Stroke) {
        let stroke = stroke.attributes();
        self.push(format!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{radius}\" fill=\"{fill}\" {stroke}/>"));
    }

    pub(crate) fn polygon(&mut self, points: &[(f64, f64)], fill: &str, stroke: &Stroke) {
        let points: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let (points, stroke) = (points.join(" "), stroke.attributes());
        self.push(format!("<polygon points=\"{points}\" fill=\"{fill}\" {stroke}/>"));
    }

    /// Draws with `draw`, clipped to a rectangle.
    pub(crate) fn clipped(&mut self, x: Range<f64>, y: Range<f64>, draw: impl FnOnce(&mut Self)) {
        let id = format!("clip{:.0}-{:.0}-{:.0}", x.start, y.start, self.size.1);
        let (width, height) = (x.end - x.start, y.end - y.start);
        self.push(format!(
            "<clipPath id=\"{id}\"><rect x=\"{:.1}\" y=\"{:.1}\" width=\"{width:.1}\" height=\"{height:.1}\"/></clipPath>",
            x.start, y.start
        ));
        self.push(format!("<g clip-path=\"url(#{id})\">"));
        draw(self);
        self.push("</g>".to_owned());
    }

    fn push(&mut self, element: String) {
        self.body.push_str(&element);
        self.body.push('\n');
    }

    /// Returns the SVG text, on a white background.
    pub(crate) fn finish(self) -> String {
        let Self { size: (width, height), body } = self;
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} \
             {height}\" font-family=\"Helvetica, Arial, sans-serif\">\n<rect width=\"{width}\" height=\"{height}\" \
             fill=\"#ffffff\"/>\n{body}</svg>\n"
        )
    }
}

/// Stacks finished plots of one size vertically.
pub(crate) fn stacked((width, height): (f64, f64), plots: Vec<String>) -> String {
    if plots.len() == 1 {
        return plots.concat();
    }
    let mut all = Svg::new(width, height * plots.len() as f64);
    for (index, plot) in plots.iter().enumerate() {
        all.push(plot.replacen("<svg ", &format!("<svg y=\"{}\" ", height * index as f64), 1));
    }
    all.finish()
}

/// Escapes text for XML and HTML.
pub(crate) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_escaped_and_what_is_clipped_is_in_its_group() {
        let mut svg = Svg::new(100.0, 50.0);
        svg.text((1.0, 2.0), 12.0, Anchor::End, "a<b>\u{0}&\nc");
        svg.clipped(0.0..10.0, 0.0..20.0, |svg| {
            svg.line((0.0, 0.0), (5.0, 5.0), &Stroke::new("#123456", 2.0))
        });
        let text = svg.finish();
        assert!(text.starts_with("<svg") && text.trim_end().ends_with("</svg>"));
        assert!(
            text.contains("a&lt;b&gt;\u{fffd}&amp;\u{fffd}c") && text.contains("text-anchor=\"end\""),
            "{text}"
        );
        let (_, clipped) = text.split_once("<g clip-path=\"url(#clip0-0-50)\">").unwrap();
        assert!(clipped.split("</g>").next().unwrap().contains("M0.0 0.0L5.0 5.0"), "{text}");
        assert_eq!(text.matches("id=\"clip0-0-50\"").count(), 1);
    }
}
