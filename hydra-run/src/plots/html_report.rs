//! The HTML report of a run: the leaderboard, the plots, and the schedule, which can be zoomed.
//! It is one self-contained file, which opens without a network.

use crate::plots::canvas::one_line;
use crate::plots::colour::Palette;
use crate::plots::schedule::Timeline;
use crate::plots::svg::escape;
use anyhow::Result;
use plotters::style::RGBColor;
use serde_json::json;

const SCRIPT: &str = include_str!("schedule.js");
const STYLE: &str = "body { font-family: Helvetica, Arial, sans-serif; color: #222; max-width: 1300px; margin: 24px auto; \
padding: 0 16px; } h1 { font-size: 24px; } h2 { font-size: 19px; margin-top: 36px; } pre { background: #f6f6f6; padding: 12px; \
overflow-x: auto; font-size: 13px; } figure { margin: 16px 0; overflow-x: auto; } svg { max-width: 100%; height: auto; } \
canvas { width: 100%; cursor: grab; } .note { color: #5a5a5a; font-size: 14px; min-height: 18px; }";

/// The content of an HTML report.
pub struct HtmlReport<'a> {
    /// The title of the page.
    pub title: &'a str,
    /// The leaderboard, devices and transfers, as the terminal shows them.
    pub summary: &'a str,
    /// The plots, in their order.
    pub plots: &'a [PlotFigure],
    /// The schedule, if the run has ended.
    pub schedule: Option<Schedule<'a>>,
    /// The text of `spec.toml`.
    pub spec: &'a str,
}

/// A plot with its heading in the report, and the name of its file.
pub struct PlotFigure {
    pub(crate) title: &'static str,
    /// The name of its file.
    pub file: &'static str,
    /// The plot.
    pub svg: String,
}

/// The zoomable schedule of a report.
pub struct Schedule<'a> {
    /// The plot as SVG, for viewers without scripts.
    pub(crate) svg: &'a str,
    pub(crate) timeline: &'a Timeline,
    pub(crate) palette: &'a Palette,
    pub(crate) devices: &'a [String],
    pub(crate) tasks: &'a [String],
}

impl HtmlReport<'_> {
    /// Returns the HTML text.
    pub fn draw(&self) -> Result<String> {
        let Self { title, summary, plots, schedule, spec } = self;
        let (title, summary, spec) = (escape(&one_line(title)), escape(summary), escape(spec));
        let figure = |PlotFigure { title, svg, .. }: &PlotFigure| {
            format!("<h2>{title}</h2>\n<figure>{svg}</figure>\n")
        };
        let plots: String = plots.iter().map(figure).collect();
        let schedule = schedule.as_ref().map(Schedule::draw).transpose()?;
        let [schedule, script] = schedule.unwrap_or_default();
        Ok(format!(
            "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<title>{title}</title>\n\
             <style>{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n<pre>{summary}</pre>\n\
             {plots}{schedule}\
             <h2>The run's settings</h2>\n<details><summary>spec.toml</summary><pre>{spec}</pre></details>\n\
             {script}</body>\n</html>\n"
        ))
    }
}

impl Schedule<'_> {
    /// Returns the schedule's part of the report, and its script.
    fn draw(&self) -> Result<[String; 2]> {
        let (resolution, data) = self.data()?;
        let part = format!(
            "<h2>Schedule</h2>\n<p class=\"note\">Scroll to zoom, drag to move, double-click to show the whole run; \
             resolution {resolution} ms. Light: forward; dark: backward; pale: evaluation.</p>\n\
             {}<canvas id=\"schedule\"></canvas>\n<p class=\"note\" id=\"schedule-label\"></p>\n\
             <details><summary>The schedule as a plot</summary><figure>{}</figure></details>\n",
            legend(self.palette),
            self.svg
        );
        Ok([part, format!("<script>\nconst data = {data};\n{SCRIPT}</script>\n")])
    }

    /// Returns the milliseconds of a column, and the data of the script as JSON.
    fn data(&self) -> Result<(String, String)> {
        let zoomable = self.timeline.zoomable(self.tasks.len(), self.palette);
        let resolution = 1e3 * self.timeline.end_s / zoomable.columns as f64;
        let tasks: Vec<String> = self.tasks.iter().map(|task| one_line(task)).collect();
        let data = json!({
            "devices": self.devices, "tasks": tasks, "colours": zoomable.colours, "columns": zoomable.columns,
            "seconds": self.timeline.end_s.max(1e-9), "rows": zoomable.rows,
        });
        // `</script>` would end the script even within quotes.
        Ok((format!("{resolution:.2}"), serde_json::to_string(&data)?.replace('<', "\\u003c")))
    }
}

/// Returns the legend of the colours, if they are those of a setting.
fn legend(palette: &Palette) -> String {
    let entry = |(RGBColor(red, green, blue), text): &(RGBColor, String)| {
        let text = escape(&one_line(text));
        format!("<span style=\"color: rgb({red} {green} {blue})\">&#9632;</span> {text} ")
    };
    match palette.entries() {
        [] => String::new(),
        entries => format!("<p class=\"note\">{}</p>\n", entries.iter().map(entry).collect::<String>()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plots::schedule::span;
    use hydra_engine::Work;

    #[test]
    fn a_page_stands_by_itself() {
        let mut timeline = Timeline::new(1);
        timeline.push(&span(Work::Forward, 0.0, 1.0));
        timeline.push(&span(Work::Backward, 1.0, 2.0));
        let (devices, tasks) = (["cpu:0".to_owned()], ["</script>".to_owned()]);
        let plot = PlotFigure { title: "Losses", file: "losses.svg", svg: "<svg id=\"1\"></svg>".to_owned() };
        let svg = "<svg id=\"3\"></svg>";
        let report = HtmlReport {
            title: "a <run>",
            summary: "rank & task",
            plots: &[plot],
            schedule: Some(Schedule {
                svg,
                timeline: &timeline,
                palette: &Palette::default(),
                devices: &devices,
                tasks: &tasks,
            }),
            spec: "format = 1",
        };
        let html = report.draw().unwrap();
        let parts = ["<h1>a &lt;run&gt;</h1>", "rank &amp; task", "<h2>Losses</h2>\n<figure><svg id=\"1\">"];
        for part in parts.into_iter().chain([svg, "format = 1"]) {
            assert!(html.contains(part), "{part} in {html}");
        }
        let bare = HtmlReport { schedule: None, ..report }.draw().unwrap();
        assert!(bare.contains("<svg id=\"1\">") && bare.ends_with("</html>\n"), "{bare}");
        assert!(!bare.contains("Schedule") && !bare.contains("<script>"), "{bare}");
        assert_eq!(html.matches("</script>").count(), 1, "a task's name ends no script");
        let columns = timeline.zoomable(1, &Palette::default()).columns;
        let half = columns / 2;
        assert!(html.contains(&format!("\"rows\":[[0,{half},0,0,{half},{columns},0,1]]")), "{html}");
        let loads = ["http:", "https:", "src=", "href=", "@import"];
        let own = html.replace("http://www.w3.org/2000/svg", "");
        assert!(loads.iter().all(|part| !own.contains(part)), "the report loads nothing");
    }
}
