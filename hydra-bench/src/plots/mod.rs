//! Plots of runs as SVG text: schedules, losses, the leaderboard, memory, bar charts; and the HTML report that contains them.
//! It may touch spans and reports of the engine and the simulator; of this crate it imports the numbers of `terminal`.
//! It never reads or writes a file, and nothing computes with its output.

pub(crate) mod bars;
pub(crate) mod canvas;
pub(crate) mod colour;
pub(crate) mod curves;
pub(crate) mod grid;
pub(crate) mod html_report;
pub(crate) mod losses;
pub(crate) mod memory;
pub(crate) mod parallel;
pub(crate) mod scale;
pub(crate) mod schedule;
pub(crate) mod svg;
