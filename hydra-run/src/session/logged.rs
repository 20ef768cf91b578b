//! The end of a run's log: its plots, and the HTML report that contains them.

use crate::plots::html_report::{HtmlReport, Schedule};
use crate::plots::schedule::{self, Timeline};
use crate::run_dir::{
    Journal, METRICS, PAGE, Report, RunDir, SCHEDULE, SharedRunLog, TRACE, could_not, samples,
};
use anyhow::{Context, Result};
use hydra_engine::RunReport;

/// The log of a run, from which plots are drawn at its end.
pub(crate) struct RunLogs {
    pub(crate) log: SharedRunLog,
    pub(crate) tasks: Vec<String>,
    pub(crate) devices: Vec<String>,
    /// The text of the spec.
    pub(crate) spec: String,
}

impl RunLogs {
    /// Finishes the log and writes the plots.
    pub(crate) fn end(&self, dir: &RunDir, report: &RunReport, readable: &Report) -> Vec<Result<()>> {
        let ended = match self.log.finish() {
            Ok(ended) => ended,
            Err(error) => return vec![Err(error).context("the run log could not be finished")],
        };
        let mut results = vec![
            ended.metrics.with_context(|| could_not(&dir.file(METRICS), "written")),
            ended.trace.with_context(|| could_not(&dir.file(TRACE), "written")),
        ];
        match self.draw(dir, report, readable, &ended.timeline) {
            Ok(plots) => {
                results.extend(plots.iter().map(|(name, plot)| dir.write(name, plot)));
            }
            Err(error) => results.push(Err(error).context("the plots could not be drawn")),
        }
        results
    }

    /// The plots and the HTML report, each with the name of its file.
    fn draw(
        &self,
        dir: &RunDir,
        report: &RunReport,
        readable: &Report,
        timeline: &Timeline,
    ) -> Result<Vec<(&'static str, String)>> {
        let utilizations: Vec<f64> = report.devices.iter().map(|device| device.utilization).collect();
        // Without the events, tokens are counted from the configuration.
        let journal = Journal::read(dir.path()).unwrap_or_default();
        let (plots, palette) = (readable.plots(&journal), readable.palette());
        let schedule = schedule::draw(timeline, &self.devices, &utilizations, &self.tasks, &palette)?;
        let html = HtmlReport {
            title: &format!("Hydra: {} tasks in {}", report.tasks.len(), dir.path().display()),
            summary: &format!("{}{}", readable.render(), samples(&journal)),
            plots: &plots,
            schedule: Some(Schedule {
                svg: &schedule,
                timeline,
                palette: &palette,
                devices: &self.devices,
                tasks: &self.tasks,
            }),
            spec: &self.spec,
        };
        let html = html.draw()?;
        let plots = plots.into_iter().map(|plot| (plot.file, plot.svg));
        Ok([(SCHEDULE, schedule), (PAGE, html)].into_iter().chain(plots).collect())
    }
}
