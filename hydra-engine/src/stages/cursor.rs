//! The position of a task, and the shard task that comes next: a pure state machine.
//!
//! A task evaluates, trains minibatch after minibatch with evaluations in between, evaluates again, and
//! writes its model. A minibatch is one *sweep* for each microbatch: forward of every shard but the last,
//! the last shard's forward fused with its backward, and backward down to the first trained shard.
//!
//! Several sweeps may be made in one *visit*, breadth-first: each shard has its turn for all microbatches of the visit, or
//! for all batches of an evaluation's, before the next shard has. What is added up over microbatches or batches comes in
//! their order all the same, so a visit changes no bit.

use super::{EvaluationKind, ShardTask, Stage};
use hydra_sched::{CostModel, ShardTaskKind, WorkLeft};
use serde::Serialize;
use std::ops::Range;

/// The sweeps that are made in one visit, at most: a promoted shard has its turn for all of them before the next shard has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Visit {
    /// Microbatches of a minibatch.
    pub microbatches: usize,
    /// Batches of an evaluation.
    pub batches: usize,
}

impl Visit {
    /// One sweep after the other.
    pub(crate) const ONE: Self = Self { microbatches: 1, batches: 1 };
}

/// The parts of a task, in counts.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    /// Shards of the model.
    pub shards: usize,
    /// The shard that holds the first trained layer: backward passes end there.
    pub first_trained: usize,
    /// Minibatches to train.
    pub steps: usize,
    /// Minibatches of an epoch, and the microbatches of a full and of the epoch's last one.
    pub epoch: usize,
    pub microbatches: usize,
    pub last_microbatches: usize,
    /// The most microbatches, and the most batches of an evaluation, that a visit has; at least one.
    pub visit: Visit,
    /// Batches of the validation and the test data; zero where there is none.
    pub validation: usize,
    pub test: usize,
    pub initial_validation: bool,
    /// True if other tasks may compute batches of its first evaluation, so that it is told which ones to evaluate.
    pub shared: bool,
    pub eval_every: Option<usize>,
}

impl Program {
    /// Microbatches of the minibatch `step`.
    pub(crate) fn microbatches_of(&self, step: usize) -> usize {
        if step % self.epoch == self.epoch - 1 { self.last_microbatches } else { self.microbatches }
    }

    /// Batches of an evaluation.
    pub(crate) fn batches(&self, kind: EvaluationKind) -> usize {
        if kind == EvaluationKind::Test { self.test } else { self.validation }
    }

    /// Returns true if the batches of an evaluation are divided among tasks.
    pub(crate) fn shares(&self, kind: EvaluationKind) -> bool {
        self.shared && kind == EvaluationKind::Initial
    }

    /// Returns true if the weights are evaluated after `done` minibatches, while training.
    fn evaluates_after(&self, done: usize) -> bool {
        let due = |every: usize| done.is_multiple_of(every) || done == self.steps;
        self.validation > 0 && done > 0 && self.eval_every.is_some_and(due)
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Cursor {
    program: Program,
    stage: Stage,
    step: usize,
    position: (ShardTaskKind, usize),
    /// The microbatches or batches of the visit.
    visit: Range<usize>,
    /// Batches of a shared first evaluation, from the first one, of which the task knows the sums.
    evaluated: usize,
}

impl Cursor {
    pub(crate) fn new(program: Program) -> Self {
        let validates = program.initial_validation && program.validation > 0;
        if validates && program.steps > 0 {
            return Self::resumed(program, 0, Stage::Evaluate { kind: EvaluationKind::Initial, batch: 0 });
        }
        let mut cursor = Self::resumed(program, 0, Stage::Finished);
        cursor.after_minibatches();
        cursor
    }

    /// A task that has trained `step` minibatches and goes on at `stage`.
    pub(crate) fn resumed(program: Program, step: usize, stage: Stage) -> Self {
        let mut cursor =
            Self { stage, step, position: (ShardTaskKind::Evaluate, 0), visit: 0..1, evaluated: 0, program };
        match stage {
            Stage::Evaluate { kind, batch } if cursor.program.shares(kind) => {
                cursor.evaluated = batch;
                cursor.stage = Stage::Shared;
            }
            stage => cursor.enter(stage),
        }
        cursor
    }

    /// Goes back to the beginning of a minibatch or evaluation batch, or on to another stage.
    pub(crate) fn go_to(&mut self, step: usize, stage: Stage) {
        self.step = step;
        self.enter(stage);
    }

    pub(crate) fn program(&self) -> &Program {
        &self.program
    }

    pub(crate) fn stage(&self) -> Stage {
        self.stage
    }

    /// The stage from which a checkpoint goes on: of a shared evaluation, the first batch whose sums are not known.
    pub(crate) fn saved_stage(&self) -> Stage {
        match self.is_in_shared_evaluation() {
            true => Stage::Evaluate { kind: EvaluationKind::Initial, batch: self.evaluated },
            false => self.stage,
        }
    }

    /// Batches of a shared first evaluation, from the first one, of which the task knows the sums.
    pub(crate) fn evaluated(&self) -> usize {
        self.evaluated
    }

    /// Returns true if the task evaluates batches of a first evaluation with others, or waits for them.
    pub(crate) fn is_in_shared_evaluation(&self) -> bool {
        match self.stage {
            Stage::Shared => true,
            Stage::Evaluate { kind, .. } => self.program.shares(kind),
            _ => false,
        }
    }

    /// Minibatches that have been trained or are being finished.
    pub(crate) fn step(&self) -> usize {
        self.step
    }

    /// The next shard task; `None` at a stage that waits or when all is over.
    pub(crate) fn peek(&self) -> Option<ShardTask> {
        let (kind, shard) = self.position;
        match self.stage {
            Stage::Evaluate { .. } | Stage::Train { .. } => {
                Some(ShardTask { stage: self.stage, kind, shard, step: self.step })
            }
            Stage::Shared | Stage::Restore | Stage::Write | Stage::Finished => None,
        }
    }

    /// Returns true if the next shard task is the first of a minibatch.
    pub(crate) fn at_minibatch_start(&self) -> bool {
        self.stage == (Stage::Train { microbatch: 0 }) && self.starts_visit()
    }

    /// Returns true if the next shard task is the first of a visit.
    pub(crate) fn starts_visit(&self) -> bool {
        self.sweep() == self.visit.start && self.position == self.sweep_start()
    }

    /// The microbatches of the visit, or the batches of an evaluation's.
    pub(crate) fn visit(&self) -> Range<usize> {
        self.visit.clone()
    }

    /// The microbatch or batch of the next shard task.
    fn sweep(&self) -> usize {
        self.stage.sweep()
    }

    /// Goes to the shard task after the next one.
    pub(crate) fn advance(&mut self) {
        if self.sweep() + 1 < self.visit.end {
            return self.set_sweep(self.sweep() + 1);
        }
        match self.following() {
            Some(position) => {
                self.position = position;
                self.set_sweep(self.visit.start);
            }
            None => self.end_visit(),
        }
    }

    /// The position after this one in a sweep.
    fn following(&self) -> Option<(ShardTaskKind, usize)> {
        let (kind, shard) = self.position;
        let over = kind == ShardTaskKind::Backward && shard == self.program.first_trained;
        kind.following(shard, self.program.shards).filter(|_| !over)
    }

    fn set_sweep(&mut self, to: usize) {
        match &mut self.stage {
            Stage::Train { microbatch: sweep } | Stage::Evaluate { batch: sweep, .. } => *sweep = to,
            Stage::Shared | Stage::Restore | Stage::Write | Stage::Finished => {}
        }
    }

    /// Evaluates this batch next, of a first evaluation that is shared.
    pub(crate) fn take_batch(&mut self, batch: usize) {
        self.enter(Stage::Evaluate { kind: EvaluationKind::Initial, batch });
    }

    /// The sums of so many batches of a shared first evaluation, from the first one, are known.
    pub(crate) fn know_batches(&mut self, evaluated: usize) {
        self.evaluated = evaluated;
    }

    /// Leaves a shared first evaluation, the result of which is there.
    pub(crate) fn end_shared_evaluation(&mut self) {
        self.after_minibatches();
    }

    /// Ends training here, at the end of a minibatch or within an evaluation: what is left is to write.
    pub(crate) fn stop(&mut self, restore: bool) {
        self.stage = if restore { Stage::Restore } else { Stage::Write };
    }

    /// Leaves a waiting stage.
    pub(crate) fn waited(&mut self, stopped: bool) {
        match self.stage {
            Stage::Restore if stopped => self.stage = Stage::Write,
            Stage::Restore => self.final_test(),
            _ => self.stage = Stage::Finished,
        }
    }

    /// Work that no one has claimed yet.
    pub(crate) fn left(&self) -> WorkLeft {
        let p = &self.program;
        let begun = self.peek().is_some() && !self.starts_visit();
        // Of the visit: sweeps at the position beside the next one, and sweeps beyond it.
        let (also, past) = match begun {
            true => (self.visit.end - self.sweep() - 1, self.sweep() - self.visit.start),
            false => (0, 0),
        };
        let position = begun.then_some(self.position);
        let visited = |sweeps, evaluations| WorkLeft {
            sweeps,
            evaluations,
            position,
            also: also as u64,
            past: past as u64,
        };
        let not_begun = if begun { self.visit.end } else { self.visit.start };
        let later = |step: usize| (p.steps - step.min(p.steps)) as u64 * p.microbatches as u64;
        let at_the_end = if p.eval_every.is_some() { 0 } else { p.validation };
        let final_evaluations = (at_the_end + p.test) as u64;
        // After every so many minibatches, and after the last.
        let periodic = |step: usize| match p.eval_every {
            Some(every) => {
                (p.steps.div_ceil(every) - step.min(p.steps).div_ceil(every)) as u64 * p.validation as u64
            }
            None => 0,
        };
        match self.stage {
            Stage::Train { .. } => {
                let here = (p.microbatches_of(self.step) - not_begun) as u64;
                visited(later(self.step + 1) + here, final_evaluations + periodic(self.step))
            }
            Stage::Evaluate { kind, .. } => {
                // A checkpoint that is not of this task may say a batch that is not there; it is refused later.
                let batches = if p.shares(kind) { self.visit.end } else { p.batches(kind) };
                let here = batches.saturating_sub(not_begun) as u64;
                let after = match kind {
                    EvaluationKind::Initial | EvaluationKind::Periodic => {
                        final_evaluations + periodic(self.step)
                    }
                    EvaluationKind::Validation => p.test as u64,
                    EvaluationKind::Test => 0,
                };
                visited(later(self.step), here + after)
            }
            // Others may evaluate what is left of that.
            Stage::Shared => {
                let evaluations = final_evaluations + periodic(self.step);
                WorkLeft { sweeps: later(self.step), evaluations, ..WorkLeft::default() }
            }
            Stage::Restore => WorkLeft { evaluations: p.test as u64, ..WorkLeft::default() },
            Stage::Write | Stage::Finished => WorkLeft::default(),
        }
    }

    /// Estimated seconds of the task's own compute until a shard task that no one has claimed reads the parameters of a
    /// shard in the version that they have now; `None` if they are stepped before, as `trained` ones are at the end of a
    /// minibatch, or if nothing reads them any more.
    pub(crate) fn until_read_s(&self, costs: &CostModel, shard: usize, trained: bool) -> Option<f64> {
        let p = &self.program;
        let (trains, evaluates) = (Some(ShardTaskKind::Forward), Some(ShardTaskKind::Evaluate));
        let then = match self.stage {
            Stage::Train { .. } if self.visit.end < p.microbatches_of(self.step) => trains,
            Stage::Train { .. } if trained => None,
            Stage::Train { .. } if p.evaluates_after(self.step + 1) => evaluates,
            Stage::Train { .. } if self.step + 1 < p.steps => trains,
            Stage::Train { .. } => evaluates.filter(|_| p.validation + p.test > 0),
            Stage::Evaluate { kind, .. } if self.visit.end < p.batches(kind) => evaluates,
            Stage::Evaluate { kind: EvaluationKind::Test, .. } => None,
            Stage::Evaluate { .. } if self.step < p.steps => trains,
            Stage::Evaluate { .. } => evaluates.filter(|_| p.validation + p.test > 0),
            Stage::Shared => {
                let training = ShardTaskKind::training_start(p.shards);
                return costs.until_read_s(training, shard, p.first_trained, None);
            }
            Stage::Restore | Stage::Write | Stage::Finished => return None,
        };
        let s = costs.until_read_s(self.position, shard, p.first_trained, then)?;
        // Each shard has as many shard tasks in turn as the visit has sweeps.
        Some(s * self.visit.len() as f64)
    }

    fn sweep_start(&self) -> (ShardTaskKind, usize) {
        match self.stage {
            Stage::Train { .. } => ShardTaskKind::training_start(self.program.shards),
            _ => ShardTaskKind::evaluation_start(),
        }
    }

    fn enter(&mut self, stage: Stage) {
        self.stage = stage;
        self.position = self.sweep_start();
        let (p, first) = (&self.program, self.sweep());
        let end = match stage {
            Stage::Train { .. } => (first + p.visit.microbatches).min(p.microbatches_of(self.step)),
            // Of a shared one the task is told batch by batch what to evaluate.
            Stage::Evaluate { kind, .. } if p.shares(kind) => first + 1,
            Stage::Evaluate { kind, .. } => (first + p.visit.batches).min(p.batches(kind)),
            Stage::Shared | Stage::Restore | Stage::Write | Stage::Finished => 1,
        };
        self.visit = first..end.max(first + 1);
    }

    fn end_visit(&mut self) {
        let next = self.visit.end;
        match self.stage {
            Stage::Train { .. } if next < self.program.microbatches_of(self.step) => {
                self.enter(Stage::Train { microbatch: next });
            }
            Stage::Train { .. } => {
                self.step += 1;
                match self.program.evaluates_after(self.step) {
                    true => self.enter(Stage::Evaluate { kind: EvaluationKind::Periodic, batch: 0 }),
                    false => self.after_minibatches(),
                }
            }
            Stage::Evaluate { kind, .. } if self.program.shares(kind) => self.stage = Stage::Shared,
            Stage::Evaluate { kind, .. } if next < self.program.batches(kind) => {
                self.enter(Stage::Evaluate { kind, batch: next });
            }
            Stage::Evaluate { kind, .. } => match kind {
                EvaluationKind::Initial | EvaluationKind::Periodic => self.after_minibatches(),
                EvaluationKind::Validation => self.final_test(),
                EvaluationKind::Test => self.stage = Stage::Write,
            },
            waiting => self.stage = waiting,
        }
    }

    fn after_minibatches(&mut self) {
        let p = &self.program;
        if self.step < p.steps {
            self.enter(Stage::Train { microbatch: 0 });
        } else if p.eval_every.is_some() && p.validation > 0 && p.steps > 0 {
            self.stage = Stage::Restore;
        } else if p.validation > 0 {
            self.enter(Stage::Evaluate { kind: EvaluationKind::Validation, batch: 0 });
        } else {
            self.final_test();
        }
    }

    fn final_test(&mut self) {
        match self.program.test {
            0 => self.stage = Stage::Write,
            _ => self.enter(Stage::Evaluate { kind: EvaluationKind::Test, batch: 0 }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program() -> Program {
        Program {
            shards: 3,
            first_trained: 0,
            steps: 3,
            epoch: 2,
            microbatches: 2,
            last_microbatches: 1,
            visit: Visit::ONE,
            validation: 2,
            test: 1,
            initial_validation: true,
            shared: false,
            eval_every: None,
        }
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
                    cursor.advance();
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
        let sweep = |step| format!("f0@{step} f1@{step} b2@{step} b1@{step} b0@{step}");
        let expected = [
            evaluate(0),
            evaluate(0),
            sweep(0),
            sweep(0), // two microbatches
            sweep(1), // the last, smaller minibatch of the epoch has one
            sweep(2),
            sweep(2),
            evaluate(3),
            evaluate(3),
            evaluate(3),
            "Write".to_owned(),
        ];
        assert_eq!(log, expected.join(" "));
    }

    /// Shard tasks with their sweeps.
    fn swept(mut cursor: Cursor) -> Vec<String> {
        let mut log = Vec::new();
        while let Some(task) = cursor.peek() {
            log.push(format!("{}{}/{}", &task.kind.to_string()[..1], task.shard, task.stage.sweep()));
            cursor.advance();
        }
        log
    }

    #[test]
    fn a_visit_takes_its_sweeps_shard_by_shard() {
        let visit = Visit { microbatches: 2, batches: 3 };
        let five =
            Program { steps: 1, epoch: 9, microbatches: 5, visit, validation: 4, test: 0, ..program() };
        let log = swept(Cursor::new(Program { shards: 2, ..five })).join(" ");
        let evaluate = "e0/0 e0/1 e0/2 e1/0 e1/1 e1/2 e0/3 e1/3";
        let train = "f0/0 f0/1 b1/0 b1/1 b0/0 b0/1 f0/2 f0/3 b1/2 b1/3 b0/2 b0/3 f0/4 b1/4 b0/4";
        assert_eq!(log, format!("{evaluate} {train} {evaluate}"));
    }

    #[test]
    fn a_visit_begins_where_an_evaluation_goes_on() {
        let stage = Stage::Evaluate { kind: EvaluationKind::Initial, batch: 1 };
        let p = Program { validation: 6, visit: Visit { microbatches: 1, batches: 4 }, ..program() };
        let log = swept(Cursor::resumed(p, 0, stage));
        assert_eq!(log[..5], ["e0/1", "e0/2", "e0/3", "e0/4", "e1/1"]);
    }

    #[test]
    fn what_is_left_of_a_visit_counts_down_by_one_shard_task_each() {
        for (microbatches, batches) in [(1, 1), (2, 2), (3, 1), (9, 9)] {
            let p = Program {
                microbatches: 3,
                last_microbatches: 3,
                visit: Visit { microbatches, batches },
                ..program()
            };
            let one = vec![1.0; p.shards];
            let costs = CostModel::new(one.clone(), one.clone(), one).unwrap();
            let mut cursor = Cursor::new(p);
            let mut left = Vec::new();
            while cursor.peek().is_some() {
                left.push(costs.remaining_s(&cursor.left()));
                cursor.advance();
            }
            let expected: Vec<f64> = (1..=left.len()).rev().map(|n| n as f64).collect();
            assert_eq!(left, expected, "{microbatches} {batches}");
        }
    }

    #[test]
    fn a_copy_is_read_again_before_its_masters_change_or_never() {
        let one = vec![1.0; 3];
        let costs = CostModel::new(one.clone(), one.clone(), one).unwrap();
        let p = Program { steps: 2, epoch: 9, initial_validation: false, visit: Visit::ONE, ..program() };
        let mut cursor = Cursor::new(p);
        let until = |cursor: &Cursor, trained| -> Vec<Option<f64>> {
            (0..3).map(|shard| cursor.until_read_s(&costs, shard, trained)).collect()
        };
        assert_eq!(until(&cursor, true), [Some(0.0), Some(1.0), Some(2.0)]);
        // Before the backward of shard 1, of the first microbatch and of the second.
        (0..3).for_each(|_| cursor.advance());
        assert_eq!(until(&cursor, true), [Some(1.0), Some(0.0), Some(4.0)]);
        (0..5).for_each(|_| cursor.advance());
        assert_eq!(until(&cursor, true), [Some(1.0), Some(0.0), None]);
        assert_eq!(until(&cursor, false), [Some(1.0), Some(0.0), Some(4.0)]);
    }

    #[test]
    fn periodic_evaluation_ends_in_a_restore() {
        let log = run(Cursor::new(Program { eval_every: Some(2), ..program() })).join(" ");
        assert!(log.ends_with("e0@3 e1@3 e2@3 e0@3 e1@3 e2@3 Restore e0@3 e1@3 e2@3 Write"), "{log}");
        assert_eq!(log.matches("e0@2").count(), 2);
    }

    #[test]
    fn a_frozen_prefix_ends_the_backward_early_and_one_shard_is_one_task() {
        let frozen =
            run(Cursor::new(Program { first_trained: 1, steps: 1, validation: 0, test: 0, ..program() }));
        assert_eq!(frozen[..4], ["f0@0", "f1@0", "b2@0", "b1@0"]);
        let one =
            Program { shards: 1, steps: 2, epoch: 5, microbatches: 1, validation: 0, test: 0, ..program() };
        assert_eq!(run(Cursor::new(one)), ["b0@0", "b0@1", "Write"]);
    }

    #[test]
    fn a_shared_evaluation_is_told_its_batches_and_waits_between_them() {
        let initial = |batch| Stage::Evaluate { kind: EvaluationKind::Initial, batch };
        let shared = || Program { shared: true, ..program() };
        let mut cursor = Cursor::new(shared());
        let alone = Cursor::new(program()).left();
        assert_eq!((cursor.stage(), cursor.peek(), cursor.saved_stage()), (Stage::Shared, None, initial(0)));
        assert_eq!(cursor.left(), WorkLeft { evaluations: alone.evaluations - 2, ..alone });
        cursor.take_batch(1);
        for shard in 0..3 {
            let next = cursor.peek().unwrap();
            assert_eq!((next.stage, next.shard, cursor.saved_stage()), (initial(1), shard, initial(0)));
            cursor.advance();
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
            cursor.advance();
        }
        assert_eq!(cursor.left(), WorkLeft::default());
    }
}
