//! The results of a task so far, and the decisions that evaluations lead to.

use crate::checkpoint::SavedResults;
use crate::protocol::{Evaluation, SavedEvaluation, Sums};
use hydra_core::{Chain, Measured};
use hydra_sched::program::EvaluationKind;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The results of a task so far, with those of the minibatch or evaluation that it computes.
#[derive(Debug, Default)]
pub(crate) struct Results {
    pub losses: Vec<f64>,
    pub units: u64,
    pub initial: Option<Evaluation>,
    /// The tasks that computed `initial`, if other tasks took part.
    pub initial_by: Vec<String>,
    pub validation: Option<Evaluation>,
    pub test: Option<Evaluation>,
    pub periodic: Vec<(usize, Evaluation)>,
    pub best: Option<(usize, Evaluation)>,
    /// The error of the last checkpoint, if it could not be written.
    pub checkpoint_error: Option<String>,
    pub sha256: Option<String>,
    pub dir: Option<PathBuf>,
    pub compute_s: f64,
    pub optimizer_stall_s: f64,
    pub(super) underway: Underway,
}

/// The progress that a shard task completed.
#[derive(Debug, PartialEq)]
pub(crate) enum Progress {
    Nothing,
    Minibatch {
        step: usize,
        loss: f64,
        units: usize,
    },
    Evaluating {
        kind: EvaluationKind,
        batch: usize,
        batches: usize,
        units: usize,
    },
    /// A batch of a shared initial evaluation.
    SharedBatch {
        batch: usize,
        sums: Sums,
        units: usize,
    },
    Evaluated {
        kind: EvaluationKind,
        step: usize,
        result: Evaluation,
        best: bool,
    },
}

/// The current minibatch and evaluation. Microbatches and batches end in any order, and are added in index order.
#[derive(Debug, Default)]
pub(crate) struct Underway {
    /// The weighted sum of the microbatch losses so far.
    loss: f64,
    /// The tokens (or items) of those microbatches.
    units: usize,
    pub evaluation: Sums,
    /// The current batch of a shared evaluation; its other batches may be computed by other tasks.
    pub batch: Sums,
    /// The rows of the current round.
    pub round: Vec<f32>,
    /// Microbatches in the loss, or batches in the evaluation or the round.
    pub known: usize,
    /// Results that wait for an earlier one, by index.
    ahead: BTreeMap<usize, Ended>,
    /// Microbatches whose backward pass has ended.
    pub passes_done: usize,
}

/// A microbatch or batch whose loss is computed.
#[derive(Debug)]
pub(crate) struct Ended {
    pub measured: Measured,
    /// Its share of the minibatch's loss targets.
    pub weight: f64,
    /// Its own loss targets.
    pub loss_targets: usize,
    /// Its tokens (or items).
    pub units: usize,
}

impl Underway {
    /// Stores the loss of a microbatch or batch.
    pub(crate) fn ended(&mut self, index: usize, ended: Ended) {
        self.ahead.insert(index, ended);
    }

    /// Takes the next one in index order, if its loss is known.
    pub(crate) fn next(&mut self) -> Option<Ended> {
        let next = self.ahead.remove(&self.known)?;
        self.known += 1;
        Some(next)
    }

    /// The number of microbatches or batches whose losses are known.
    pub(crate) fn computed(&self) -> usize {
        self.known + self.ahead.len()
    }

    /// Adds a microbatch to the minibatch.
    pub(crate) fn add_to_minibatch(&mut self, of: &Ended) {
        self.loss += of.weight * f64::from(of.measured.loss);
        self.units += of.units;
    }

    /// Ends the evaluation; returns its sums.
    pub(crate) fn end_evaluation(&mut self) -> Sums {
        self.known = 0;
        std::mem::take(&mut self.evaluation)
    }
}

impl Results {
    /// Restores the results in a checkpoint of a task of this chain.
    pub(crate) fn of(saved: SavedResults, chain: &Chain) -> Self {
        let SavedResults { losses, initial, initial_by, validation, test, periodic, best } = saved;
        let of = |saved: SavedEvaluation| saved.evaluation(chain);
        Self {
            losses,
            initial: initial.map(of),
            initial_by,
            validation: validation.map(of),
            test: test.map(of),
            periodic: periodic.into_iter().map(|(step, result)| (step, of(result))).collect(),
            best: best.map(|(step, result)| (step, of(result))),
            ..Self::default()
        }
    }

    /// Ends the minibatch; records and returns its loss and its tokens (or items).
    pub(crate) fn end_minibatch(&mut self) -> (f64, usize) {
        let of = &mut self.underway;
        (of.known, of.passes_done) = (0, 0);
        let (loss, units) = (std::mem::take(&mut of.loss), std::mem::take(&mut of.units));
        self.losses.push(loss);
        self.units += units as u64;
        (loss, units)
    }

    /// Records an evaluation after `step` minibatches; returns whether its weights are the best so far.
    pub(crate) fn note(&mut self, kind: EvaluationKind, step: usize, result: &Evaluation) -> bool {
        match kind {
            EvaluationKind::Initial => self.initial = Some(result.clone()),
            EvaluationKind::Validation => self.validation = Some(result.clone()),
            EvaluationKind::Test => self.test = Some(result.clone()),
            EvaluationKind::Periodic => {
                self.periodic.push((step, result.clone()));
                if self.best.as_ref().is_none_or(|(_, best)| result.cost() < best.cost()) {
                    self.best = Some((step, result.clone()));
                    self.validation = Some(result.clone());
                    return true;
                }
            }
        }
        false
    }

    /// Returns whether the last `patience` evaluations were no better than the best one.
    pub(crate) fn exhaust(&self, patience: Option<usize>) -> bool {
        let best = self.best.as_ref().map(|(step, _)| *step);
        let since = self.periodic.iter().rev().take_while(|(step, _)| Some(*step) != best).count();
        patience.is_some_and(|patience| since >= patience)
    }

    /// The results that are saved in a checkpoint; times are not, because they belong to one run.
    pub(crate) fn saved(&self) -> SavedResults {
        SavedResults {
            losses: self.losses.clone(),
            initial: self.initial.clone().map(Into::into),
            initial_by: self.initial_by.clone(),
            validation: self.validation.clone().map(Into::into),
            test: self.test.clone().map(Into::into),
            periodic: self.periodic.iter().map(|(step, result)| (*step, result.clone().into())).collect(),
            best: self.best.clone().map(|(step, result)| (step, result.into())),
        }
    }
}
