//! Which trials are trained, how far, who is stopped, who is forked, and which one wins.
//!
//! Rooms, each of which imports only those above it:
//!
//! | room | what it holds |
//! | --- | --- |
//! | `key`, `names` | random numbers as functions of a key and an index; the nearest of known names |
//! | `rank` | [`Loss`] and its order; rungs whose decisions are certain |
//! | `space` | [`Space`], [`Parameter`], [`Range`], [`Configuration`]; parameters as flags write them ([`parse_parameter`]); files of trials |
//! | `spec` | [`Spec`] and [`Method`] |
//! | `tree` | [`Course`], settings as functions of the step, and the [`StageTree`] of equal prefixes |
//! | `searcher` | the port [`Searcher`], and the methods, one a file: grid, random, halving, Hyperband, ASHA, PBT, TPE |
//!
//! Invariant: this crate never spawns a thread, never reads a clock, never does I/O and never draws from a global random
//! generator; what it answers in all does not depend on the order in which it is told. It knows neither tensors nor models,
//! and which settings a task has is for its caller to say.

#![forbid(unsafe_code)]

mod key;
mod names;
mod rank;
mod searcher;
mod space;
mod spec;
mod tree;

pub use rank::{Loss, TrialId};
pub use searcher::{
    Action, Asha, Full, Halving, Hyperband, Pbt, Repeat, RungPlan, Searcher, Tpe, brackets, rungs,
};
pub use space::{
    Configuration, Parameter, Range, ShorthandError, Space, SpaceError, TrialsError, Value, parse_parameter,
    trials_from_jsonl, trials_from_toml,
};
pub use spec::{Method, Spec, SpecError};
pub use tree::{Branch, Course, Courses, Edge, StageTree, Whole};
