//! Plots of runs as SVG text: schedules, losses, the leaderboard, memory, bar charts; and the HTML report that contains them.
//! It may touch spans and reports of the engine and the simulator; of this crate it imports the numbers of `terminal`.
//! It never reads or writes a file, and nothing computes with its output.

pub mod bars;
pub mod canvas;
pub mod colour;
pub(crate) mod curves;
pub(crate) mod grid;
pub mod html_report;
pub(crate) mod losses;
pub(crate) mod memory;
pub(crate) mod parallel;
pub(crate) mod scale;
pub mod schedule;
pub(crate) mod svg;
