//! Stage trees: trials whose settings are the same up to a step are one until they part.
//!
//! It may touch settings as functions of the step and the numbers of trials. It knows no loss and decides nothing.

mod course;
mod prefixes;

pub use course::{Course, Courses, Whole};
pub use prefixes::{Branch, Edge, StageTree};
