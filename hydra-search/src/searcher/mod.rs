//! The searchers: which trials there are, how far each is trained, who is stopped and who is forked.
//!
//! One a file, behind one port. They may touch spaces, keys and losses. A searcher knows trials by their numbers; that
//! some are the same for a while, and are trained once, is not its business.

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
