//! Hyperparameter search: the trials to train, how far to train each, early stopping, forks, and the winner.
//!
//! A [`Spec`] describes a search: a space of settings, a method, and the largest number of minibatches of a trial.
//! [`Search`] is its state machine: it returns [`Action`]s (start, continue, fork, stop); a driver trains the trials
//! and reports losses. Decisions are a function of the spec, the seed and the losses. They do not depend on timing,
//! the number of devices, or interruptions: replaying the reports restores a search. Trials that are equal up to a
//! step are trained once and forked where they diverge.
//!
//! Modules; each imports only those above it:
//!
//! | module | content |
//! | --- | --- |
//! | `key`, `names` | random numbers as functions of a key and an index; the nearest of known names |
//! | `rank` | [`Loss`] and its order; rungs whose decisions are certain |
//! | `space` | [`Space`], [`Parameter`], [`Range`], [`Configuration`]; parameters in flag syntax ([`parse_parameter`]); files of trials |
//! | `spec` | [`Spec`] and [`Method`] |
//! | `tree` | [`HyperparamSchedule`], settings as functions of the step, and the [`StageTree`] of equal prefixes |
//! | `searcher` | the trait [`Searcher`], and the methods, one per file: grid, random, halving, Hyperband, ASHA, PBT, TPE |
//! | `search` | [`Search`]: a searcher over the tasks that are trained for it |
//!
//! # Example
//! Three virtual workers search a rate; the "training" is a formula.
//!
//! ```
//! use hydra_search::{Action, Search, Spec, Whole, parse_parameter};
//!
//! let spec = Spec::from_toml(r#"
//!     search = "asha"
//!     workers = 3
//!     trials = 12
//!     steps = 900
//!
//!     [space]
//!     lr = "log:1e-5..1e-2"
//!     batch = [8, 16]
//! "#)?;
//! spec.check_names(&["lr", "batch", "weight_decay"])?;
//! assert_eq!(spec.space.get("lr"), Some(&parse_parameter("log:1e-5..1e-2")?));
//!
//! let mut search = Search::new(&spec, 1, Box::new(Whole { steps: spec.steps }))?;
//! let mut log = Vec::new();
//! while search.outcome().is_none() {
//!     for action in search.actions() {
//!         if let Action::Start { trial, until, .. } | Action::Continue { trial, until } = action {
//!             let lr = search.trial(trial).unwrap().settings.get("lr").unwrap().number().unwrap();
//!             let report = hydra_search::Report::loss(trial, until, (lr.log10() + 3.5).abs() + 9.0 / until as f64);
//!             search.take(&report)?;
//!             log.push(report);
//!         }
//!     }
//! }
//!
//! // The log of its reports repeats the search.
//! let mut again = Search::new(&spec, 1, Box::new(Whole { steps: spec.steps }))?;
//! again.replay(&log)?;
//! assert_eq!(again.outcome(), search.outcome());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Invariant: this crate never spawns a thread, never reads a clock, never does I/O and never draws from a global
//! random generator. The set of its decisions does not depend on the order of reports. It does not use tensors or
//! models; the caller defines the settings of a task.

#![forbid(unsafe_code)]

mod key;
mod names;
mod rank;
mod search;
mod searcher;
mod space;
mod spec;
mod tree;

pub use names::suggestion;
pub use rank::{Loss, TrialId};
pub use search::{Outcome, Report, ReportError, Search, TrialState, TrialView, Work};
pub use searcher::{Action, Repeat, RungPlan, Searcher, brackets, rungs};
pub use space::{
    Configuration, Parameter, Range, ShorthandError, Space, SpaceError, TrialsError, Value, parse_parameter,
    trials_from_jsonl, trials_from_toml,
};
pub use spec::{Method, Spec, SpecError};
pub use tree::{Branch, Edge, HyperparamSchedule, HyperparamSchedules, StageTree, Whole};
