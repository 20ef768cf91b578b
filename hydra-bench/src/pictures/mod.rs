//! Pictures of runs as SVG text: schedules, loss curves, bar charts.
//! It may touch spans and reports of the engine and the simulator; of this crate it imports the numbers of `terminal`.
//! It never reads or writes a file, and nothing computes with what it draws.

pub(crate) mod bars;
pub(crate) mod canvas;
pub(crate) mod colour;
pub(crate) mod losses;
pub(crate) mod schedule;
