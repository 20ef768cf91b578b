//! Plots of runs as SVG text: schedules, losses, the leaderboard, memory, bar charts; and the page that has them all.
//! It may touch spans and reports of the engine and the simulator; of this crate it imports the numbers of `terminal`.
//! It never reads or writes a file, and nothing computes with what it draws.

pub(crate) mod bars;
pub(crate) mod canvas;
pub(crate) mod colour;
pub(crate) mod curves;
pub(crate) mod grid;
pub(crate) mod losses;
pub(crate) mod memory;
pub(crate) mod page;
pub(crate) mod parallel;
pub(crate) mod scale;
pub(crate) mod schedule;
pub(crate) mod svg;
