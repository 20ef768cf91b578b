//! The searchers: they decide the trials, how far each is trained, early stopping and forks.
//!
//! One per file, behind one trait.
//!
//! May touch: spaces, keys and losses.
//! Never: handles shared training; a searcher sees trials as independent.

mod asha;
mod bracket;
mod draws;
mod full;
mod grid;
mod halving;
mod hyperband;
mod kind;
mod pbt;
mod port;
mod random;
mod tpe;

pub use bracket::{RungPlan, rungs};
pub use draws::Repeat;
pub use hyperband::brackets;
pub(crate) use kind::build;
pub use port::{Action, Searcher};
