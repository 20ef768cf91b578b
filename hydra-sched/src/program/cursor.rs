//! The position of a task and its next shard tasks: a pure state machine.
//!
//! A task evaluates, trains minibatch after minibatch with evaluations in between, evaluates again, and writes its
//! model. Its model is cut into *shards*, ranges of layers. A *shard task* is one pass of one microbatch through one
//! shard: forward, backward or evaluation.
//!
//! A *microbatch pass* is the sequence of shard tasks of one microbatch: forward of every shard but the last, the
//! last shard's forward fused with its backward, and backward down to the first trained shard. A minibatch is one
//! microbatch pass for each of its microbatches.
//!
//! A *microbatch group* runs several microbatch passes breadth-first: each shard computes all microbatches of the
//! group (or all batches, in an evaluation) before the next shard does, so a promotion serves all of them. Losses and
//! gradients are added in index order in any case, so that grouping changes no bit.
//!
//! Several microbatch groups of one minibatch or evaluation may be in flight at the same time, each in its own
//! *replica*. A replica that ends its microbatch group takes the next one that has not started.

use super::{EvaluationKind, Program, RoundBatches, ShardTask, Stage};
use crate::policy::{CostModel, ShardTaskKind, WorkLeft};
use std::ops::Range;

/// A microbatch group that has started, and the position of its replica in it.
#[derive(Clone, Debug)]
struct GroupProgress {
    /// Its microbatches or batches.
    microbatch_passes: Range<usize>,
    /// The next one of them.
    microbatch_pass: usize,
    position: (ShardTaskKind, usize),
}

impl GroupProgress {
    /// The work that is left in it.
    fn left(&self) -> WorkLeft {
        WorkLeft {
            position: Some(self.position),
            also: (self.microbatch_passes.end - self.microbatch_pass - 1) as u64,
            past: (self.microbatch_pass - self.microbatch_passes.start) as u64,
            ..WorkLeft::default()
        }
    }
}

/// The position of a task in its program.
#[derive(Clone, Debug)]
pub struct Cursor {
    program: Program,
    /// The stage, with the first microbatch or batch that is in no microbatch group yet.
    stage: Stage,
    /// One past the last microbatch or batch that a microbatch group may take.
    until: usize,
    /// The batches of the current round of an evaluation, or of the next first one.
    round: RoundBatches,
    step: usize,
    /// The microbatch groups that have started, by replica.
    replicas: Vec<Option<GroupProgress>>,
    /// The number of leading batches of the evaluation with known results; in a shared one, including those that
    /// other tasks computed.
    evaluated: usize,
}

impl Cursor {
    /// A task that has done nothing.
    pub fn new(program: Program) -> Self {
        let validates = program.initial_validation && program.validation > 0;
        if validates && program.steps > 0 {
            let stage = Stage::Evaluate { kind: EvaluationKind::Initial, batch: 0, rounds: false };
            return Self::resumed(program, 0, stage);
        }
        Self::after(program, 0, usize::MAX)
    }

    /// A task that has trained `step` minibatches and continues with the evaluation after them, if any, in at most
    /// `most_replicas` replicas.
    pub fn after(program: Program, step: usize, most_replicas: usize) -> Self {
        let mut cursor = Self::waiting(program, step, most_replicas);
        cursor.after_minibatch();
        cursor
    }

    fn waiting(program: Program, step: usize, most_replicas: usize) -> Self {
        let replicas = vec![None; program.replicas.min(most_replicas).max(1)];
        let round = program.first_round();
        Self { stage: Stage::Finished, until: 0, round, step, replicas, evaluated: 0, program }
    }

    /// A task that has trained `step` minibatches and continues at `stage`.
    pub fn resumed(program: Program, step: usize, stage: Stage) -> Self {
        let mut cursor = Self::waiting(program, step, usize::MAX);
        match stage {
            Stage::Evaluate { kind, batch, .. } if cursor.program.shares(kind) => {
                cursor.evaluated = batch;
                cursor.stage = Stage::Shared;
            }
            Stage::Evaluate { kind, batch, rounds: false } if cursor.begins_rounds(kind, batch) => {
                cursor.evaluated = batch;
                cursor.enter(Stage::Evaluate { kind, batch: 0, rounds: true });
            }
            stage => cursor.go_to(step, stage),
        }
        cursor
    }

    /// Returns whether the first `evaluated` batches of an evaluation are all of them, and rounds follow.
    fn begins_rounds(&self, kind: EvaluationKind, evaluated: usize) -> bool {
        self.program.has_rounds(kind) && evaluated == self.program.batches(kind, self.step)
    }

    /// Moves to the start of a minibatch or evaluation batch, or to another stage.
    pub fn go_to(&mut self, step: usize, stage: Stage) {
        self.step = step;
        self.enter(match stage {
            Stage::Measure { .. } | Stage::Train { .. } => self.program.minibatch_start(step),
            stage => stage,
        });
    }

    /// Its program.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// The stage, with the first microbatch or batch that is in no microbatch group yet.
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// The stage that a checkpoint resumes at: in an evaluation, the first batch without a known result.
    pub fn saved_stage(&self) -> Stage {
        match self.stage {
            Stage::Shared => {
                Stage::Evaluate { kind: EvaluationKind::Initial, batch: self.evaluated, rounds: false }
            }
            // Rounds are repeated from the first one.
            Stage::Evaluate { kind, .. } | Stage::Round { kind } => {
                Stage::Evaluate { kind, batch: self.evaluated, rounds: false }
            }
            Stage::Measure { .. } => Stage::Train { microbatch: 0 },
            stage => stage,
        }
    }

    /// The stage of the next shard task, or the one that waits: in a shared evaluation, the first batch without a
    /// known result.
    pub fn current_stage(&self) -> Stage {
        match self.is_in_shared_evaluation() {
            true => self.saved_stage(),
            false => self.peek().map_or(self.stage, |next| next.stage),
        }
    }

    /// The number of leading batches of the evaluation with known results.
    pub fn evaluated(&self) -> usize {
        self.evaluated
    }

    /// The batches of the current round of an evaluation.
    pub fn round(&self) -> usize {
        self.round.here
    }

    /// Returns true if it is in the rounds of an evaluation.
    pub fn is_in_rounds(&self) -> bool {
        matches!(self.stage, Stage::Evaluate { rounds: true, .. })
    }

    /// Returns true if it is in the batches of this evaluation, after `step` minibatches.
    pub fn is_evaluating(&self, kind: EvaluationKind, step: usize) -> bool {
        let here = matches!(self.stage, Stage::Evaluate { kind: now, rounds: false, .. } | Stage::Round { kind: now } if now == kind);
        self.step == step && here
    }

    /// Returns true if the task takes part in a shared initial evaluation, or waits for its result.
    pub fn is_in_shared_evaluation(&self) -> bool {
        match self.stage {
            Stage::Shared => true,
            Stage::Evaluate { kind, .. } => self.program.shares(kind),
            _ => false,
        }
    }

    /// Minibatches that have been trained or are being finished.
    pub fn step(&self) -> usize {
        self.step
    }

    /// The number of replicas.
    pub fn replicas(&self) -> usize {
        self.replicas.len()
    }

    /// Returns true if a replica is within a microbatch group. If not, its next shard task starts one.
    pub fn is_in_group(&self, replica: usize) -> bool {
        self.replicas[replica].is_some()
    }

    /// The replicas that are within a microbatch group, in the order of their microbatches or batches.
    pub fn replicas_in_group(&self) -> Vec<usize> {
        let begun =
            self.replicas.iter().enumerate().filter_map(|(replica, of)| Some((of.as_ref()?, replica)));
        let mut begun: Vec<(usize, usize)> =
            begun.map(|(of, replica)| (of.microbatch_passes.start, replica)).collect();
        begun.sort_unstable();
        begun.into_iter().map(|(_, replica)| replica).collect()
    }

    /// A replica's next shard task; `None` if no microbatch group is left for it, at a stage that waits, and at the
    /// end.
    pub fn peek_in(&self, replica: usize) -> Option<ShardTask> {
        self.replicas[replica]
            .as_ref()
            .map_or_else(|| self.first_of_next(), |begun| Some(self.next_of(begun)))
    }

    /// The first shard task of the microbatch group that starts next, if any.
    pub fn first_of_next(&self) -> Option<ShardTask> {
        self.next_group().map(|begun| self.next_of(&begun))
    }

    /// The next shard task of the microbatch group that started first, or of the next one if none is in flight;
    /// `None` at a stage that waits and at the end.
    pub fn peek(&self) -> Option<ShardTask> {
        self.first_in_group().map_or_else(|| self.first_of_next(), |replica| self.peek_in(replica))
    }

    /// The replica of the microbatch group that started first; `None` if none is in flight.
    pub fn first_in_group(&self) -> Option<usize> {
        let begun =
            self.replicas.iter().enumerate().filter_map(|(replica, of)| Some((of.as_ref()?, replica)));
        begun.min_by_key(|(of, _)| of.microbatch_passes.start).map(|(_, replica)| replica)
    }

    /// The shard tasks until the next stage that waits, one microbatch group after another.
    pub fn tasks(mut self) -> impl Iterator<Item = ShardTask> {
        std::iter::from_fn(move || {
            let next = self.peek_in(0);
            self.advance(0);
            next
        })
    }

    fn next_of(&self, begun: &GroupProgress) -> ShardTask {
        let ((kind, shard), microbatch_pass) = (begun.position, begun.microbatch_pass);
        let stage = match self.stage {
            Stage::Measure { .. } => Stage::Measure { microbatch: microbatch_pass },
            Stage::Train { .. } => Stage::Train { microbatch: microbatch_pass },
            Stage::Evaluate { kind, rounds, .. } => Stage::Evaluate { kind, batch: microbatch_pass, rounds },
            waiting => waiting,
        };
        ShardTask { stage, kind, shard, step: self.step }
    }

    /// Returns true if no microbatch group is in flight.
    pub fn is_between_groups(&self) -> bool {
        self.replicas.iter().all(Option::is_none)
    }

    /// Returns true if the next shard task is the first of a minibatch.
    pub fn at_minibatch_start(&self) -> bool {
        let trains = matches!(self.stage, Stage::Measure { .. } | Stage::Train { .. });
        trains && self.stage == self.program.minibatch_start(self.step) && self.is_between_groups()
    }

    /// The microbatches (or evaluation batches) of a replica's microbatch group, or of the next one if the replica
    /// has none.
    pub fn microbatch_group(&self, replica: usize) -> Range<usize> {
        self.replicas[replica]
            .as_ref()
            .map_or_else(|| self.next_passes(), |begun| begun.microbatch_passes.clone())
    }

    /// The microbatches (or evaluation batches) of the microbatch group that starts next; empty if none is left.
    pub fn next_passes(&self) -> Range<usize> {
        self.next_group().map_or(0..0, |begun| begun.microbatch_passes)
    }

    fn next_group(&self) -> Option<GroupProgress> {
        let (p, start) = (&self.program, self.stage.microbatch_pass());
        let length = match self.stage {
            Stage::Measure { .. } | Stage::Train { .. } => p.minibatch_group(self.step),
            // Rounds differ in their batches, so no number of groups is usual.
            Stage::Evaluate { rounds: true, .. } => {
                self.round.here.div_ceil(self.replicas()).clamp(1, p.microbatch_group.batches)
            }
            Stage::Evaluate { kind, .. } => p.evaluation_group(p.batches(kind, self.step)),
            Stage::Shared | Stage::Round { .. } | Stage::Restore | Stage::Write | Stage::Finished => {
                return None;
            }
        };
        let microbatch_passes = start..start.saturating_add(length).min(self.until);
        (!microbatch_passes.is_empty()).then(|| GroupProgress {
            microbatch_pass: start,
            microbatch_passes,
            position: p.pass_start(self.stage),
        })
    }

    /// Moves a replica past its next shard task.
    pub fn advance(&mut self, replica: usize) {
        let Some(mut begun) = self.replicas[replica].take().or_else(|| self.begin_group()) else { return };
        begun.microbatch_pass += 1;
        if begun.microbatch_pass == begun.microbatch_passes.end {
            let (kind, shard) = begun.position;
            let Some(position) = self.program.following(kind, shard) else { return self.end_group() };
            (begun.position, begun.microbatch_pass) = (position, begun.microbatch_passes.start);
        }
        self.replicas[replica] = Some(begun);
    }

    fn begin_group(&mut self) -> Option<GroupProgress> {
        let begun = self.next_group()?;
        match &mut self.stage {
            Stage::Measure { microbatch: microbatch_pass }
            | Stage::Train { microbatch: microbatch_pass }
            | Stage::Evaluate { batch: microbatch_pass, .. } => {
                *microbatch_pass = begun.microbatch_passes.end
            }
            Stage::Shared | Stage::Round { .. } | Stage::Restore | Stage::Write | Stage::Finished => {}
        }
        Some(begun)
    }

    /// Makes this batch of a shared initial evaluation the next one.
    pub fn take_batch(&mut self, batch: usize) {
        self.enter(Stage::Evaluate { kind: EvaluationKind::Initial, batch, rounds: false });
    }

    /// Records that the results of the first `evaluated` batches of the evaluation are known.
    pub fn know_batches(&mut self, evaluated: usize) {
        self.evaluated = evaluated;
    }

    /// Leaves a shared initial evaluation with a known result.
    pub fn end_shared_evaluation(&mut self) {
        self.after_minibatches();
    }

    /// Begins the next round of the evaluation, with these batches, or ends the evaluation if there are none.
    pub fn next_round(&mut self, round: RoundBatches) {
        let Stage::Round { kind } = self.stage else { return };
        self.round = round;
        match round.here {
            0 => self.after_evaluation(kind),
            _ => self.enter(Stage::Evaluate { kind, batch: 0, rounds: true }),
        }
    }

    /// Ends training here, after a minibatch or within an evaluation; only the model is left to write.
    pub fn stop(&mut self, restore: bool) {
        self.stage = if restore { Stage::Restore } else { Stage::Write };
    }

    /// Leaves a waiting stage.
    pub fn waited(&mut self, stopped: bool) {
        match self.stage {
            Stage::Restore if stopped => self.stage = Stage::Write,
            Stage::Restore => self.final_test(),
            _ => self.stage = Stage::Finished,
        }
    }

    /// Estimated seconds of compute that is not claimed yet.
    pub fn remaining_s(&self, costs: &CostModel) -> f64 {
        let first = self.first_in_group();
        let next = if first.is_none() { self.next_group() } else { None };
        let of_first = first.and_then(|replica| self.replicas[replica].as_ref()).or(next.as_ref());
        let others = self.replicas.iter().enumerate().filter(|(replica, _)| Some(*replica) != first);
        let others = others.filter_map(|(_, of)| of.as_ref());
        others
            .fold(costs.remaining_s(&self.left_with(of_first)), |sum, of| sum + costs.remaining_s(&of.left()))
    }

    /// Work that is not claimed yet, without that in microbatch groups in flight other than the first.
    pub fn left(&self) -> WorkLeft {
        self.left_with(self.first_in_group().and_then(|replica| self.replicas[replica].as_ref()))
    }

    /// The work left in this microbatch group, in flight or the next one, and in all that have not started.
    fn left_with(&self, group: Option<&GroupProgress>) -> WorkLeft {
        let p = &self.program;
        let begun = group.map(GroupProgress::left).unwrap_or_default();
        let begun_until = group.map_or(0, |group| group.microbatch_passes.end);
        let with = |microbatch_passes, evaluations| WorkLeft { microbatch_passes, evaluations, ..begun };
        let in_rounds = |kind| if p.has_rounds(kind) { p.first_round().all() } else { 0 };
        // Microbatches or batches of this stage that are in no microbatch group yet, and those of later rounds.
        let not_begun = self.until.saturating_sub(self.stage.microbatch_pass().max(begun_until));
        let here = match self.stage {
            Stage::Round { .. } => self.round.later,
            Stage::Evaluate { rounds: true, .. } => not_begun + self.round.later,
            Stage::Evaluate { kind, .. } => not_begun + in_rounds(kind),
            _ => not_begun,
        } as u64;
        let later = |step: usize| p.microbatches_from(step);
        // The evaluations after this stage, and those of minibatches from `from` on.
        let after = |from: usize| {
            let (count, batches) = p.evaluations.later(self.step);
            // Rounds follow each evaluation on the validation data.
            let count = if p.validation > 0 { count + usize::from(p.evaluations.is_empty()) } else { 0 };
            let rounds = count * in_rounds(EvaluationKind::Validation);
            batches + p.measured_from(from) + (rounds + p.final_batches()) as u64
        };
        match self.stage {
            Stage::Measure { .. } => with(later(self.step), here + after(self.step + 1)),
            Stage::Train { .. } => with(later(self.step + 1) + here, after(self.step + 1)),
            Stage::Evaluate { kind, .. } | Stage::Round { kind } => {
                let after = match kind {
                    EvaluationKind::Initial | EvaluationKind::Periodic => after(self.step),
                    EvaluationKind::Validation => p.test as u64,
                    EvaluationKind::Test => 0,
                };
                with(later(self.step), here + after)
            }
            // Other tasks may evaluate the remaining batches.
            Stage::Shared => with(later(self.step), after(self.step)),
            Stage::Restore => WorkLeft { evaluations: p.test as u64, ..WorkLeft::default() },
            Stage::Write | Stage::Finished => WorkLeft::default(),
        }
    }

    /// Estimated seconds of the task's own compute until an unclaimed shard task reads the current version of a
    /// shard's parameters; `None` if they are stepped before (`trained` ones are, at the end of a minibatch) or never
    /// read again.
    pub fn until_read_s(&self, costs: &CostModel, shard: usize, trained: bool) -> Option<f64> {
        let start = match self.stage {
            Stage::Shared if self.program.measured_of(self.step) == 0 => {
                Some(ShardTaskKind::training_start(self.program.shards))
            }
            Stage::Shared => Some(ShardTaskKind::evaluation_start()),
            Stage::Round { .. } => Some(ShardTaskKind::evaluation_start()),
            _ => None,
        };
        if let Some(start) = start {
            return costs.until_read_s(start, shard, self.program.first_trained, None);
        }
        let begun = self.replicas.iter().flatten();
        let in_begun = begun.filter_map(|begun| self.until_read_in(begun, costs, shard, trained));
        let next = || self.until_read_in(&self.next_group()?, costs, shard, trained);
        if self.is_between_groups() { next() } else { in_begun.min_by(f64::total_cmp) }
    }

    /// The same for a read in this microbatch group or in the next one that starts.
    fn until_read_in(
        &self,
        begun: &GroupProgress,
        costs: &CostModel,
        shard: usize,
        trained: bool,
    ) -> Option<f64> {
        let then = self.after_groups(begun.microbatch_passes.end.max(self.stage.microbatch_pass()), trained);
        let s = costs.until_read_s(begun.position, shard, self.program.first_trained, then)?;
        // Each shard has one shard task for each microbatch pass of the group, back to back.
        Some(s * begun.microbatch_passes.len() as f64)
    }

    /// The kind of the microbatch pass that reads the same parameters next, after the microbatch groups that end at
    /// `end`; for `trained` parameters, only before they are stepped.
    fn after_groups(&self, end: usize, trained: bool) -> Option<ShardTaskKind> {
        let p = &self.program;
        let (trains, evaluates) = (Some(ShardTaskKind::Forward), Some(ShardTaskKind::Evaluate));
        let starts = |step: usize| if p.measured_of(step) > 0 { evaluates } else { trains };
        match self.stage {
            Stage::Measure { .. } if end < self.until => evaluates,
            Stage::Measure { .. } => trains,
            Stage::Train { .. } if end < self.until => trains,
            Stage::Train { .. } if trained => None,
            Stage::Train { .. } if p.evaluations.batches_after(self.step + 1) > 0 => evaluates,
            Stage::Train { .. } if self.step + 1 < p.steps => starts(self.step + 1),
            Stage::Train { .. } => evaluates.filter(|_| p.validation + p.test > 0),
            Stage::Evaluate { .. } if end < self.until => evaluates,
            // Another round may follow.
            Stage::Evaluate { kind, .. } if p.has_rounds(kind) => evaluates,
            Stage::Evaluate { kind: EvaluationKind::Test, .. } => None,
            Stage::Evaluate { .. } if self.step < p.steps => starts(self.step),
            Stage::Evaluate { .. } => evaluates.filter(|_| p.validation + p.test > 0),
            Stage::Shared | Stage::Round { .. } | Stage::Restore | Stage::Write | Stage::Finished => None,
        }
    }

    fn enter(&mut self, stage: Stage) {
        self.stage = stage;
        self.replicas.iter_mut().for_each(|replica| *replica = None);
        let (p, first) = (&self.program, self.stage.microbatch_pass());
        self.until = match stage {
            Stage::Measure { .. } | Stage::Train { .. } => p.microbatches.of(self.step),
            // In a shared evaluation the task takes one batch at a time.
            Stage::Evaluate { kind, .. } if p.shares(kind) => first + 1,
            Stage::Evaluate { rounds: true, .. } => self.round.here,
            Stage::Evaluate { kind, batch, .. } => {
                self.evaluated = batch;
                // The checkpoint of another task may name a batch that does not exist; it is refused later.
                p.batches(kind, self.step).max(first + 1)
            }
            Stage::Shared | Stage::Round { .. } | Stage::Restore | Stage::Write | Stage::Finished => 0,
        };
    }

    /// Ends a microbatch group, and the stage with its last one.
    fn end_group(&mut self) {
        if self.is_between_groups() && self.next_group().is_none() {
            self.end_stage();
        }
    }

    fn end_stage(&mut self) {
        match self.stage {
            Stage::Measure { .. } => self.enter(Stage::Train { microbatch: 0 }),
            Stage::Train { .. } => {
                self.step += 1;
                self.after_minibatch();
            }
            Stage::Evaluate { kind, .. } if self.program.shares(kind) => self.stage = Stage::Shared,
            Stage::Evaluate { kind, .. } if self.program.has_rounds(kind) => {
                self.stage = Stage::Round { kind }
            }
            Stage::Evaluate { kind, .. } => self.after_evaluation(kind),
            waiting => self.stage = waiting,
        }
    }

    /// Enters the evaluation after the minibatches so far, or else what follows.
    fn after_minibatch(&mut self) {
        let kind = EvaluationKind::Periodic;
        match self.program.evaluations.batches_after(self.step) {
            0 => self.after_minibatches(),
            _ => self.enter(Stage::Evaluate { kind, batch: 0, rounds: false }),
        }
    }

    fn after_evaluation(&mut self, kind: EvaluationKind) {
        match kind {
            EvaluationKind::Initial | EvaluationKind::Periodic => self.after_minibatches(),
            EvaluationKind::Validation => self.final_test(),
            EvaluationKind::Test => self.stage = Stage::Write,
        }
    }

    fn after_minibatches(&mut self) {
        let p = &self.program;
        if self.step < p.steps {
            self.enter(p.minibatch_start(self.step));
        } else if !p.evaluations.is_empty() && p.validation > 0 {
            self.stage = Stage::Restore;
        } else if p.validation > 0 {
            self.enter(Stage::Evaluate { kind: EvaluationKind::Validation, batch: 0, rounds: false });
        } else {
            self.final_test();
        }
    }

    fn final_test(&mut self) {
        let kind = EvaluationKind::Test;
        match self.program.test {
            0 if self.program.is_rounds_alone() => {
                self.enter(Stage::Evaluate { kind, batch: 0, rounds: true })
            }
            0 => self.stage = Stage::Write,
            _ => self.enter(Stage::Evaluate { kind, batch: 0, rounds: false }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{EvaluationPoints, MicrobatchGroup, MicrobatchPass, Microbatches};
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn program() -> Program {
        Program {
            shards: 3,
            first_trained: 0,
            steps: 3,
            microbatches: Microbatches { each: 2, last: 1, epoch: 2 },
            reads_statistic: false,
            microbatch_group: MicrobatchGroup::ONE,
            validation: 2,
            test: 1,
            rounds: None,
            initial_validation: true,
            replicas: 1,
            shared: false,
            evaluations: EvaluationPoints::default(),
        }
    }

    fn full(each: usize) -> Microbatches {
        Microbatches { each, last: each, epoch: 1 }
    }

    /// Evaluations after two and three minibatches.
    fn twice() -> EvaluationPoints {
        EvaluationPoints::new([(2, 2), (3, 2)])
    }

    fn round(here: usize, later: usize) -> RoundBatches {
        RoundBatches { here, later }
    }

    fn run(mut cursor: Cursor) -> Vec<String> {
        let mut log = Vec::new();
        while cursor.stage() != Stage::Finished {
            match cursor.peek() {
                Some(task) => {
                    let kind = match task.kind {
                        ShardTaskKind::Forward => 'f',
                        ShardTaskKind::Backward => 'b',
                        ShardTaskKind::Evaluate => 'e',
                    };
                    log.push(format!("{kind}{}@{}", task.shard, task.step));
                    let before = cursor.left();
                    cursor.advance(0);
                    let after = cursor.left();
                    assert_ne!(before, after, "every shard task is work");
                }
                None => {
                    log.push(format!("{:?}", cursor.stage()));
                    cursor.waited(false);
                }
            }
        }
        log
    }

    #[test]
    fn a_task_evaluates_trains_and_evaluates() {
        let log = run(Cursor::new(program())).join(" ");
        let evaluate = |step| format!("e0@{step} e1@{step} e2@{step}");
        let microbatch_pass = |step| format!("f0@{step} f1@{step} b2@{step} b1@{step} b0@{step}");
        let expected = [
            evaluate(0),
            evaluate(0),
            microbatch_pass(0),
            microbatch_pass(0), // two microbatches
            microbatch_pass(1), // the last, smaller minibatch of the epoch has one
            microbatch_pass(2),
            microbatch_pass(2),
            evaluate(3),
            evaluate(3),
            evaluate(3),
            "Write".to_owned(),
        ];
        assert_eq!(log, expected.join(" "));
    }

    #[test]
    fn a_minibatch_of_several_microbatches_is_measured_before_it_is_trained() {
        let measured = Program { shards: 2, reads_statistic: true, initial_validation: false, ..program() };
        let start = Stage::Measure { microbatch: 0 };
        let mut cursor = Cursor::new(measured.clone());
        assert!(cursor.at_minibatch_start() && cursor.stage() == start);
        assert_eq!(
            cursor.left(),
            WorkLeft { microbatch_passes: 5, evaluations: 4 + 3, ..WorkLeft::default() }
        );
        let log = run(cursor.clone()).join(" ");
        // The last minibatch of an epoch has one microbatch, which knows all of it.
        let (two, one) = ("e0@2 e1@2 e0@2 e1@2 f0@2 b1@2 b0@2 f0@2 b1@2 b0@2", "f0@1 b1@1 b0@1");
        let evaluations = "e0@3 e1@3 e0@3 e1@3 e0@3 e1@3 Write";
        assert_eq!(log, format!("{} {one} {two} {evaluations}", two.replace("@2", "@0")));
        for place in 1..5 {
            cursor.advance(0);
            assert!(!cursor.at_minibatch_start() && cursor.saved_stage() == Stage::Train { microbatch: 0 });
            let resumed = Cursor::resumed(measured.clone(), cursor.step(), cursor.saved_stage());
            assert_eq!((resumed.stage(), resumed.step()), (start, 0), "after {place} shard tasks");
        }
    }

    #[test]
    fn an_evaluation_goes_on_in_rounds() {
        let program =
            Program { steps: 0, validation: 0, test: 0, rounds: Some(round(2, 6)), shards: 1, ..program() };
        let mut cursor = Cursor::new(program);
        let costs = CostModel::new(vec![1.0], vec![1.0], vec![1.0]).unwrap();
        for (batches, later) in [(2, 4), (1, 3), (3, 0), (0, 0)] {
            while let Some(task) = cursor.peek() {
                assert_eq!(task.kind, ShardTaskKind::Evaluate);
                cursor.advance(0);
            }
            assert_eq!(cursor.stage(), Stage::Round { kind: EvaluationKind::Test });
            assert_eq!(cursor.until_read_s(&costs, 0, false), Some(0.0), "the next round reads the shard");
            cursor.next_round(round(batches, later));
            assert_eq!(
                cursor.next_passes(),
                0..batches.min(1),
                "a group for each of two replicas, of at most one batch"
            );
            assert_eq!(cursor.left().evaluations, (batches + later) as u64);
        }
        assert_eq!((cursor.stage(), cursor.peek()), (Stage::Write, None));
    }

    #[test]
    fn evaluations_during_and_after_training_go_on_in_rounds() {
        let p = Program { evaluations: twice(), rounds: Some(round(1, 0)), shards: 1, ..program() };
        let mut cursor = Cursor::new(p.clone());
        let (mut log, mut rounds) = (Vec::new(), 0);
        while cursor.stage() != Stage::Finished {
            let Some(task) = cursor.peek() else {
                match cursor.stage() {
                    // After the batches, two rounds of one and two batches.
                    Stage::Round { kind } => {
                        cursor.know_batches(2);
                        let again = Cursor::resumed(p.clone(), cursor.step(), cursor.saved_stage());
                        assert_eq!(
                            again.peek().unwrap().stage,
                            Stage::Evaluate { kind, batch: 0, rounds: true }
                        );
                        rounds = (rounds + 1) % 3;
                        cursor.next_round(round(rounds, 0));
                    }
                    _ => cursor.waited(false),
                }
                continue;
            };
            let rounds = matches!(task.stage, Stage::Evaluate { rounds: true, .. });
            let kind = if rounds { "r".to_owned() } else { task.kind.to_string()[..1].to_owned() };
            log.push(format!("{kind}{}@{}", task.stage.microbatch_pass(), task.step));
            cursor.advance(0);
        }
        let expected =
            "e0@0 e1@0 b0@0 b1@0 b0@1 e0@2 e1@2 r0@2 r0@2 r1@2 b0@2 b1@2 e0@3 e1@3 r0@3 r0@3 r1@3 e0@3";
        assert_eq!(log.join(" "), expected);
    }

    /// The shard tasks with their microbatches or batches.
    fn swept(mut cursor: Cursor) -> Vec<String> {
        let mut log = Vec::new();
        while let Some(task) = cursor.peek() {
            log.push(format!(
                "{}{}/{}",
                &task.kind.to_string()[..1],
                task.shard,
                task.stage.microbatch_pass()
            ));
            cursor.advance(0);
        }
        log
    }

    #[test]
    fn a_group_takes_its_passes_shard_by_shard() {
        let microbatch_group = MicrobatchGroup { microbatches: 2, batches: 3 };
        let five = Program {
            steps: 1,
            microbatches: full(5),
            microbatch_group,
            validation: 4,
            test: 0,
            ..program()
        };
        let log = swept(Cursor::new(Program { shards: 2, ..five })).join(" ");
        let evaluate = "e0/0 e0/1 e0/2 e1/0 e1/1 e1/2 e0/3 e1/3";
        let train = "f0/0 f0/1 b1/0 b1/1 b0/0 b0/1 f0/2 f0/3 b1/2 b1/3 b0/2 b0/3 f0/4 b1/4 b0/4";
        assert_eq!(log, format!("{evaluate} {train} {evaluate}"));
    }

    #[test]
    fn a_group_begins_where_an_evaluation_goes_on() {
        let stage = Stage::Evaluate { kind: EvaluationKind::Initial, batch: 1, rounds: false };
        let p = Program {
            validation: 6,
            microbatch_group: MicrobatchGroup { microbatches: 1, batches: 4 },
            ..program()
        };
        let log = swept(Cursor::resumed(p, 0, stage));
        assert_eq!(log[..5], ["e0/1", "e0/2", "e0/3", "e0/4", "e1/1"]);
    }

    #[test]
    fn what_is_left_of_a_group_counts_down_by_one_shard_task_each() {
        for (microbatches, batches) in [(1, 1), (2, 2), (3, 1), (9, 9)] {
            let p = Program {
                microbatches: full(3),
                microbatch_group: MicrobatchGroup { microbatches, batches },
                ..program()
            };
            let one = vec![1.0; p.shards];
            let costs = CostModel::new(one.clone(), one.clone(), one).unwrap();
            let mut cursor = Cursor::new(p);
            let mut left = Vec::new();
            while cursor.peek().is_some() {
                left.push(costs.remaining_s(&cursor.left()));
                cursor.advance(0);
            }
            let expected: Vec<f64> = (1..=left.len()).rev().map(|n| n as f64).collect();
            assert_eq!(left, expected, "{microbatches} {batches}");
        }
    }

    #[test]
    fn a_copy_is_read_again_before_its_masters_change_or_never() {
        let one = vec![1.0; 3];
        let costs = CostModel::new(one.clone(), one.clone(), one).unwrap();
        let p = Program {
            steps: 2,
            microbatches: full(2),
            initial_validation: false,
            microbatch_group: MicrobatchGroup::ONE,
            ..program()
        };
        let mut cursor = Cursor::new(p);
        let until = |cursor: &Cursor, trained| -> Vec<Option<f64>> {
            (0..3).map(|shard| cursor.until_read_s(&costs, shard, trained)).collect()
        };
        assert_eq!(until(&cursor, true), [Some(0.0), Some(1.0), Some(2.0)]);
        // Before the backward of shard 1, of the first microbatch and of the second.
        (0..3).for_each(|_| cursor.advance(0));
        assert_eq!(until(&cursor, true), [Some(1.0), Some(0.0), Some(4.0)]);
        (0..5).for_each(|_| cursor.advance(0));
        assert_eq!(until(&cursor, true), [Some(1.0), Some(0.0), None]);
        assert_eq!(until(&cursor, false), [Some(1.0), Some(0.0), Some(4.0)]);
    }

    #[test]
    fn periodic_evaluation_ends_in_a_restore() {
        let log = run(Cursor::new(Program { evaluations: twice(), ..program() })).join(" ");
        assert!(log.ends_with("e0@3 e1@3 e2@3 e0@3 e1@3 e2@3 Restore e0@3 e1@3 e2@3 Write"), "{log}");
        assert_eq!(log.matches("e0@2").count(), 2);
    }

    #[test]
    fn a_frozen_prefix_ends_the_backward_early_and_one_shard_is_one_task() {
        let frozen =
            run(Cursor::new(Program { first_trained: 1, steps: 1, validation: 0, test: 0, ..program() }));
        assert_eq!(frozen[..4], ["f0@0", "f1@0", "b2@0", "b1@0"]);
        let one = Program { shards: 1, steps: 2, microbatches: full(1), validation: 0, test: 0, ..program() };
        assert_eq!(run(Cursor::new(one)), ["b0@0", "b0@1", "Write"]);
    }

    #[test]
    fn a_shared_evaluation_is_told_its_batches_and_waits_between_them() {
        let initial = |batch| Stage::Evaluate { kind: EvaluationKind::Initial, batch, rounds: false };
        let shared = || Program { shared: true, ..program() };
        let mut cursor = Cursor::new(shared());
        let alone = Cursor::new(program()).left();
        assert_eq!((cursor.stage(), cursor.peek(), cursor.saved_stage()), (Stage::Shared, None, initial(0)));
        assert_eq!(cursor.left(), WorkLeft { evaluations: alone.evaluations - 2, ..alone });
        cursor.take_batch(1);
        for shard in 0..3 {
            let next = cursor.peek().unwrap();
            assert_eq!((next.stage, next.shard, cursor.saved_stage()), (initial(1), shard, initial(0)));
            cursor.advance(0);
        }
        assert_eq!(cursor.stage(), Stage::Shared);
        cursor.know_batches(1);
        assert_eq!(cursor.saved_stage(), initial(1));
        let resumed = Cursor::resumed(shared(), 0, cursor.saved_stage());
        assert_eq!((resumed.stage(), resumed.evaluated()), (Stage::Shared, 1));
        cursor.end_shared_evaluation();
        assert!(cursor.at_minibatch_start());
        assert_eq!(run(cursor), run(Cursor::resumed(program(), 0, Stage::Train { microbatch: 0 })));
    }

    #[test]
    fn the_work_left_counts_down_to_nothing() {
        let mut cursor = Cursor::new(program());
        assert_eq!(cursor.left().evaluations, 2 + 3);
        while cursor.peek().is_some() {
            cursor.advance(0);
        }
        assert_eq!(cursor.left(), WorkLeft::default());
    }

    fn drawn() -> impl Strategy<Value = Program> {
        let microbatch_group = (1..4_usize, 1..4_usize)
            .prop_map(|(microbatches, batches)| MicrobatchGroup { microbatches, batches });
        let shards = (1..4_usize).prop_flat_map(|shards| (Just(shards), 0..shards));
        (
            shards,
            1..6_usize,
            microbatch_group,
            1..5_usize,
            (0..5_usize, 0..3_usize),
            prop::collection::btree_set(1..4_usize, 0..3),
        )
            .prop_map(
                |(
                    (shards, first_trained),
                    microbatches,
                    microbatch_group,
                    replicas,
                    (validation, test),
                    evaluated,
                )| {
                    Program {
                        shards,
                        first_trained,
                        microbatches: Microbatches {
                            each: microbatches,
                            last: microbatches.div_ceil(2),
                            epoch: 2,
                        },
                        microbatch_group,
                        replicas,
                        validation,
                        test,
                        evaluations: EvaluationPoints::new(
                            evaluated.into_iter().map(|after| (after, validation)),
                        ),
                        ..program()
                    }
                },
            )
    }

    /// The shard tasks of each microbatch pass in order, by minibatches trained before and stage.
    fn by_pass(tasks: &[ShardTask]) -> BTreeMap<(usize, String), Vec<(ShardTaskKind, usize)>> {
        let mut microbatch_passes: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for task in tasks {
            let of = microbatch_passes.entry((task.step, format!("{:?}", task.stage))).or_default();
            of.push((task.kind, task.shard));
        }
        microbatch_passes
    }

    proptest! {
        /// In every interleaving of replicas, each shard task runs exactly once, those of a microbatch pass in order,
        /// no minibatch or evaluation starts before the previous one is over, and the work left decreases.
        #[test]
        fn replicas_make_what_one_does(p in drawn(), choices in prop::collection::vec(0..5_usize, 400)) {
            let one = vec![1.0; p.shards];
            let costs = CostModel::new(one.clone(), one.clone(), one).unwrap();
            let made = |mut cursor: Cursor, choose: &mut dyn FnMut() -> usize| {
                let (mut made, mut left) = (Vec::new(), Vec::new());
                loop {
                    let open: Vec<usize> =
                        (0..cursor.replicas()).filter(|replica| cursor.peek_in(*replica).is_some()).collect();
                    if open.is_empty() {
                        if matches!(cursor.stage(), Stage::Write | Stage::Finished) {
                            break (made, left);
                        }
                        cursor.waited(false);
                        continue;
                    }
                    let replica = open[choose() % open.len()];
                    made.push(cursor.peek_in(replica).unwrap());
                    left.push(cursor.remaining_s(&costs));
                    cursor.advance(replica);
                }
            };
            let (plain, _) = made(Cursor::new(Program { replicas: 1, microbatch_group: MicrobatchGroup::ONE, ..p.clone() }), &mut || 0);
            let mut next = choices.iter().cycle();
            let (several, left) = made(Cursor::new(p), &mut || *next.next().unwrap());
            prop_assert_eq!(by_pass(&several), by_pass(&plain));
            let places = |tasks: &[ShardTask]| {
                let mut places: Vec<MicrobatchPass> = tasks.iter().map(MicrobatchPass::of).collect();
                places.dedup_by(|a, b| a.same_minibatch(b));
                places.len()
            };
            prop_assert_eq!(places(&several), places(&plain));
            // An epoch's last minibatch has fewer microbatches than are counted before it.
            prop_assert!(left.windows(2).all(|pair| pair[1] < pair[0]), "{:?}", left);
        }
    }
}
