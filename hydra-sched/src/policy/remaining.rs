//! The formula for the remaining time of a model.

use super::{CostError, ShardTaskKind};

/// The weight of a new measurement in the moving average. A quarter follows a lasting change (a processor
/// that slows down) within about ten minibatches, and damps a single slow one.
const NEW_WEIGHT: f64 = 0.25;

/// The remaining work, as counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkLeft {
    /// Whole training microbatch passes (microbatches, forward and backward) that have not started.
    pub microbatch_passes: u64,
    /// Whole evaluation microbatch passes that have not started.
    pub evaluations: u64,
    /// The next shard task in the microbatch pass that has started; `None` at the start of a pass.
    pub position: Option<(ShardTaskKind, usize)>,
    /// Of the other microbatch passes in the group of that one: the number that also have this shard task
    /// before them. `past` is the number that have just completed it.
    pub also: u64,
    /// See `also`.
    pub past: u64,
}

/// Estimated seconds of each kind of shard task of one model, corrected as shard tasks finish.
#[derive(Clone, Debug, PartialEq)]
pub struct CostModel {
    /// One for each kind: forwards, backwards and evaluations.
    tracks: [Track; 3],
}

impl CostModel {
    /// Starts from a plan's estimates, in seconds, each list with one entry per shard.
    ///
    /// The backward of the last shard is its fused forward and backward. The forward of the last shard is
    /// never a separate shard task: its entry is returned by [`CostModel::seconds`] and not used otherwise.
    ///
    /// # Errors
    /// [`CostError`] if there is no shard, the lists differ in length, or a time is negative,
    /// infinite or not a number.
    pub fn new(forward_s: Vec<f64>, backward_s: Vec<f64>, evaluate_s: Vec<f64>) -> Result<Self, CostError> {
        let (forward, backward, evaluate) = (forward_s.len(), backward_s.len(), evaluate_s.len());
        if forward != backward || backward != evaluate {
            return Err(CostError::Lengths { forward, backward, evaluate });
        }
        if backward == 0 {
            return Err(CostError::NoShards);
        }
        check_seconds(ShardTaskKind::Forward, &forward_s)?;
        check_seconds(ShardTaskKind::Backward, &backward_s)?;
        check_seconds(ShardTaskKind::Evaluate, &evaluate_s)?;
        let forward = Track::new(forward_s, forward - 1, Direction::Up);
        let backward = Track::new(backward_s, backward, Direction::Down);
        Ok(Self { tracks: [forward, backward, Track::new(evaluate_s, evaluate, Direction::Up)] })
    }

    /// The number of shards; at least one.
    pub fn shards(&self) -> usize {
        self.track(ShardTaskKind::Backward).seconds.len()
    }

    /// The estimated seconds of one shard task.
    ///
    /// # Panics
    /// If the model has no such shard.
    #[track_caller]
    pub fn seconds(&self, kind: ShardTaskKind, shard: usize) -> f64 {
        self.must_have(kind, shard);
        self.track(kind).seconds[shard]
    }

    /// Corrects the estimate of one shard task by a measured time, in seconds.
    ///
    /// The first measurement replaces the estimate; later ones update an exponential moving average. A time
    /// that is negative, infinite or not a number is ignored, so that an estimate is always finite.
    ///
    /// # Panics
    /// If the model has no such shard, for any time. Measured times may be arbitrary, but the shard is one
    /// that the caller has just run.
    #[track_caller]
    pub fn observe(&mut self, kind: ShardTaskKind, shard: usize, seconds: f64) {
        self.must_have(kind, shard);
        if is_time(seconds) {
            self.tracks[kind as usize].observe(shard, seconds);
        }
    }

    /// Estimated seconds of compute of a whole training microbatch pass.
    pub fn pass_s(&self) -> f64 {
        self.track(ShardTaskKind::Forward).total() + self.track(ShardTaskKind::Backward).total()
    }

    /// Estimated seconds of compute of a whole evaluation microbatch pass.
    pub fn evaluation_s(&self) -> f64 {
        self.track(ShardTaskKind::Evaluate).total()
    }

    /// Estimated seconds of compute left: the rest of the current microbatch pass, including the shard task
    /// at its position, and every pass that has not started. Takes constant time.
    ///
    /// # Panics
    /// If the position names a shard that the model does not have.
    #[track_caller]
    pub fn remaining_s(&self, left: &WorkLeft) -> f64 {
        if let Some((kind, shard)) = left.position {
            self.must_have(kind, shard);
        }
        let here_s = self.rest_of_pass_s(left.position);
        let done_s = left.position.map_or(0.0, |(kind, shard)| self.track(kind).seconds[shard]);
        here_s
            + times(left.also, here_s)
            + times(left.past, (here_s - done_s).max(0.0))
            + times(left.microbatch_passes, self.pass_s())
            + times(left.evaluations, self.evaluation_s())
    }

    /// Estimated seconds of the model's own compute until a shard task reads this shard; 0 if the next one,
    /// `next`, does. A backward pass ends at the shard `down_to`. `then` is the kind of the following
    /// microbatch pass, if it reads the same master weights. `None` if nothing reads them again. Takes
    /// constant time.
    ///
    /// # Panics
    /// If the model has no such shard.
    #[track_caller]
    pub fn until_read_s(
        &self,
        next: (ShardTaskKind, usize),
        shard: usize,
        down_to: usize,
        then: Option<ShardTaskKind>,
    ) -> Option<f64> {
        self.must_have(next.0, next.1);
        self.must_have(next.0, shard);
        let backward = self.track(ShardTaskKind::Backward);
        let below = down_to.checked_sub(1).map_or(0.0, |shard| backward.rest[shard]);
        let in_pass = |(kind, at): (ShardTaskKind, usize)| match kind {
            ShardTaskKind::Backward => {
                (down_to..=at).contains(&shard).then(|| backward.rest[at] - backward.rest[shard])
            }
            ShardTaskKind::Evaluate => {
                let track = self.track(kind);
                (at <= shard).then(|| track.rest[at] - track.rest[shard])
            }
            ShardTaskKind::Forward => {
                let track = self.track(kind);
                match shard {
                    _ if shard + 1 == self.shards() => Some(track.rest[at]),
                    _ if at <= shard => Some(track.rest[at] - track.rest[shard]),
                    _ if down_to <= shard => Some(track.rest[at] + backward.total() - backward.rest[shard]),
                    _ => None,
                }
            }
        };
        in_pass(next).or_else(|| {
            let trains = next.0 != ShardTaskKind::Evaluate;
            let rest_s = self.rest_of_pass_s(Some(next)) - if trains { below } else { 0.0 };
            let start = match then? {
                ShardTaskKind::Evaluate => ShardTaskKind::evaluation_start(),
                _ => ShardTaskKind::training_start(self.shards()),
            };
            in_pass(start).map(|more_s| rest_s + more_s)
        })
    }

    /// Panics with both numbers; indexing would report the length of an inner list.
    #[track_caller]
    fn must_have(&self, kind: ShardTaskKind, shard: usize) {
        let shards = self.shards();
        assert!(
            shard < shards,
            "there is no {kind} of shard {shard}: the model of these costs has {shards} shards, counted from 0"
        );
    }

    fn rest_of_pass_s(&self, position: Option<(ShardTaskKind, usize)>) -> f64 {
        match position {
            None => 0.0,
            Some((kind @ ShardTaskKind::Forward, shard)) => {
                self.track(kind).rest[shard] + self.track(ShardTaskKind::Backward).total()
            }
            Some((kind, shard)) => self.track(kind).rest[shard],
        }
    }

    fn track(&self, kind: ShardTaskKind) -> &Track {
        &self.tracks[kind as usize]
    }
}

/// The order in which a microbatch pass runs one kind of shard task over the shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Up,
    Down,
}

/// One kind of shard task over all shards, with cached sums.
#[derive(Clone, Debug, PartialEq)]
struct Track {
    /// Estimated seconds, per shard.
    seconds: Vec<f64>,
    /// Whether a measurement has replaced the plan's estimate, per shard.
    measured: Vec<bool>,
    /// Seconds from a shard's task to the last of this kind in the microbatch pass, both included, per
    /// shard. Recomputed at each measurement: updates by differences would accumulate rounding errors.
    rest: Vec<f64>,
    /// The number of first shards that have a task of this kind.
    counted: usize,
    direction: Direction,
}

impl Track {
    fn new(seconds: Vec<f64>, counted: usize, direction: Direction) -> Self {
        let shards = seconds.len();
        let mut track =
            Self { seconds, measured: vec![false; shards], rest: vec![0.0; shards], counted, direction };
        track.sum();
        track
    }

    fn observe(&mut self, shard: usize, seconds: f64) {
        let estimate = &mut self.seconds[shard];
        if self.measured[shard] {
            *estimate += NEW_WEIGHT * (seconds - *estimate);
        } else {
            *estimate = seconds;
            self.measured[shard] = true;
        }
        self.sum();
    }

    fn sum(&mut self) {
        let mut rest = 0.0;
        for i in 0..self.counted {
            let shard = match self.direction {
                Direction::Up => self.counted - 1 - i,
                Direction::Down => i,
            };
            rest += self.seconds[shard];
            self.rest[shard] = rest;
        }
    }

    /// Seconds of all tasks of this kind in a microbatch pass.
    fn total(&self) -> f64 {
        match self.direction {
            Direction::Up => self.rest[0],
            Direction::Down => self.rest[self.counted - 1],
        }
    }
}

fn check_seconds(kind: ShardTaskKind, seconds: &[f64]) -> Result<(), CostError> {
    match seconds.iter().position(|&s| !is_time(s)) {
        None => Ok(()),
        Some(shard) => Err(CostError::Seconds { kind, shard, found: seconds[shard] }),
    }
}

fn is_time(seconds: f64) -> bool {
    seconds.is_finite() && seconds >= 0.0
}

/// Returns the product, and zero for zero times infinity, which is not a number otherwise.
fn times(count: u64, seconds: f64) -> f64 {
    if count == 0 { 0.0 } else { count as f64 * seconds }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::ShardTaskKind::{Backward, Evaluate, Forward};
    use super::*;
    use crate::policy::microbatch_pass::tasks_from;

    const KINDS: [ShardTaskKind; 3] = [Forward, Backward, Evaluate];

    fn three_shards() -> CostModel {
        CostModel::new(vec![1.0, 2.0, 64.0], vec![4.0, 8.0, 16.0], vec![0.25, 0.5, 0.125]).unwrap()
    }

    fn at(kind: ShardTaskKind, shard: usize) -> WorkLeft {
        WorkLeft { position: Some((kind, shard)), ..WorkLeft::default() }
    }

    #[test]
    fn counts_the_rest_of_the_pass_from_its_position() {
        let cost = three_shards();
        assert_eq!(cost.remaining_s(&at(Forward, 0)), 31.0);
        assert_eq!(cost.remaining_s(&at(Forward, 1)), 30.0);
        assert_eq!(cost.remaining_s(&at(Backward, 2)), 28.0);
        assert_eq!(cost.remaining_s(&at(Backward, 1)), 12.0);
        assert_eq!(cost.remaining_s(&at(Backward, 0)), 4.0);
        assert_eq!(cost.remaining_s(&at(Evaluate, 0)), 0.875);
        assert_eq!(cost.remaining_s(&at(Evaluate, 2)), 0.125);
        assert_eq!(cost.remaining_s(&WorkLeft::default()), 0.0);
    }

    #[test]
    fn counts_whole_passes() {
        let left = WorkLeft {
            microbatch_passes: 3,
            evaluations: 2,
            position: Some((Backward, 1)),
            ..WorkLeft::default()
        };
        assert_eq!(three_shards().remaining_s(&left), 12.0 + 3.0 * 31.0 + 2.0 * 0.875);
    }

    #[test]
    fn one_shard_has_only_its_fused_task() {
        let cost = CostModel::new(vec![8.0], vec![2.0], vec![0.5]).unwrap();
        assert_eq!((cost.shards(), cost.pass_s(), cost.evaluation_s()), (1, 2.0, 0.5));
        assert_eq!(cost.remaining_s(&at(Backward, 0)), 2.0);
    }

    #[test]
    fn the_first_measurement_replaces_and_later_ones_average() {
        let mut cost = three_shards();
        cost.observe(Backward, 1, 2.0);
        assert_eq!(cost.seconds(Backward, 1), 2.0);
        assert_eq!(cost.pass_s(), 25.0);
        cost.observe(Backward, 1, 6.0);
        assert_eq!(cost.seconds(Backward, 1), 3.0);
        assert_eq!(cost.remaining_s(&at(Backward, 1)), 7.0);
        assert_eq!(cost.seconds(Backward, 0), 4.0);
        assert_eq!(cost.seconds(Evaluate, 1), 0.5);
    }

    #[test]
    fn measurements_that_are_no_times_are_passed_over() {
        let mut cost = three_shards();
        for kind in KINDS {
            for seconds in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -1.0] {
                cost.observe(kind, 0, seconds);
            }
        }
        assert_eq!(cost, three_shards());
    }

    #[test]
    fn a_shard_that_is_not_there_is_named() {
        let said = |ask: &dyn Fn(&mut CostModel)| {
            let asked = std::panic::AssertUnwindSafe(|| ask(&mut three_shards()));
            let panic = std::panic::catch_unwind(asked).expect_err("there are three shards");
            panic.downcast_ref::<String>().expect("a message").clone()
        };
        for kind in KINDS {
            let asks: [&dyn Fn(&mut CostModel); 4] = [
                &|cost| _ = cost.seconds(kind, 3),
                &|cost| cost.observe(kind, 3, 1.0),
                &|cost| cost.observe(kind, 3, f64::NAN),
                &|cost| _ = cost.remaining_s(&at(kind, 3)),
            ];
            for ask in asks {
                let expected = format!("no {kind} of shard 3: the model of these costs has 3 shards");
                assert!(said(ask).contains(&expected), "{}", said(ask));
            }
        }
    }

    #[test]
    fn times_too_large_to_add_still_give_no_nan() {
        let max = vec![f64::MAX; 2];
        let cost = CostModel::new(max.clone(), max.clone(), max).unwrap();
        assert_eq!(cost.remaining_s(&WorkLeft::default()), 0.0);
        let left =
            WorkLeft { microbatch_passes: u64::MAX, evaluations: 0, position: None, ..WorkLeft::default() };
        assert_eq!(cost.remaining_s(&left), f64::INFINITY);
    }

    #[test]
    fn refuses_estimates_that_make_no_sense() {
        assert_eq!(CostModel::new(vec![], vec![], vec![]), Err(CostError::NoShards));
        let lengths = CostModel::new(vec![1.0], vec![1.0, 1.0], vec![1.0, 1.0]).unwrap_err();
        assert_eq!(lengths, CostError::Lengths { forward: 1, backward: 2, evaluate: 2 });
        let negative = CostModel::new(vec![1.0, 1.0], vec![1.0, -2.0], vec![1.0, 1.0]).unwrap_err();
        assert_eq!(negative, CostError::Seconds { kind: Backward, shard: 1, found: -2.0 });
        assert!(negative.to_string().contains("backward of shard 1 takes -2 s"), "{negative}");
        assert!(CostModel::new(vec![1.0], vec![1.0], vec![f64::NAN]).is_err());
    }

    fn any_cost() -> impl Strategy<Value = CostModel> {
        prop::collection::vec((0.0..9.0f64, 0.0..9.0f64, 0.0..9.0f64), 1..8).prop_map(|times| {
            let pick = |f: fn(&(f64, f64, f64)) -> f64| times.iter().map(f).collect();
            CostModel::new(pick(|t| t.0), pick(|t| t.1), pick(|t| t.2)).unwrap()
        })
    }

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() <= 1e-12 * (1.0 + a.abs() + b.abs())
    }

    proptest! {
        /// The cached sums equal adding up the microbatch pass's shard tasks one by one, after any
        /// measurements.
        #[test]
        fn agrees_with_walking_the_pass(
            mut cost in any_cost(),
            measurements in prop::collection::vec(
                (0..3usize, any::<prop::sample::Index>(), 0.0..9.0f64),
                0..30,
            ),
            microbatch_passes in 0..50u64,
            evaluations in 0..50u64,
        ) {
            let shards = cost.shards();
            for (kind, shard, seconds) in measurements {
                cost.observe(KINDS[kind], shard.index(shards), seconds);
            }
            let walk = |start| -> f64 {
                tasks_from(start, shards).iter().map(|&(kind, shard)| cost.seconds(kind, shard)).sum()
            };
            let training = ShardTaskKind::training_start(shards);
            let evaluation = ShardTaskKind::evaluation_start();
            let whole = microbatch_passes as f64 * walk(training) + evaluations as f64 * walk(evaluation);
            for start in [training, evaluation] {
                for position in tasks_from(start, shards) {
                    let left = WorkLeft { microbatch_passes, evaluations, position: Some(position), ..WorkLeft::default() };
                    prop_assert!(close(cost.remaining_s(&left), walk(position) + whole));
                }
            }
            let left = WorkLeft { microbatch_passes, evaluations, position: None, ..WorkLeft::default() };
            prop_assert!(close(cost.remaining_s(&left), whole));
        }

        /// The cached sums equal walking to the first shard task that reads the shard, in this microbatch
        /// pass and the next.
        #[test]
        fn the_next_read_is_where_a_walk_meets_it(cost in any_cost(), down_to in 0..8usize, then in 0..3usize) {
            let shards = cost.shards();
            let down_to = down_to.min(shards - 1);
            let then = [None, Some(Forward), Some(Evaluate)][then];
            let starts = [ShardTaskKind::training_start(shards), ShardTaskKind::evaluation_start()];
            let microbatch_pass = |start| {
                let skipped = |task: &(ShardTaskKind, usize)| task.0 == Backward && task.1 < down_to;
                tasks_from(start, shards).into_iter().filter(move |task| !skipped(task))
            };
            let next_pass: Vec<_> = then.map(|kind| microbatch_pass(starts[usize::from(kind == Evaluate)])).into_iter().flatten().collect();
            for start in starts {
                let tasks: Vec<_> = microbatch_pass(start).collect();
                for (place, next) in tasks.iter().enumerate() {
                    let ahead: Vec<_> = tasks[place..].iter().chain(&next_pass).collect();
                    for shard in 0..shards {
                        let meets = ahead.iter().position(|(_, at)| *at == shard);
                        let walked = meets.map(|n| ahead[..n].iter().map(|(kind, at)| cost.seconds(*kind, *at)).sum::<f64>());
                        let found = cost.until_read_s(*next, shard, down_to, then);
                        prop_assert_eq!(found.is_some(), walked.is_some());
                        prop_assert!(found.zip(walked).is_none_or(|(a, b)| close(a, b)), "{found:?} {walked:?}");
                    }
                }
            }
        }

        /// Repeated measurements of the same time converge to it.
        #[test]
        fn converges_to_a_steady_time(
            mut cost in any_cost(),
            first in 0.0..9.0f64,
            steady in 0.0..9.0f64,
        ) {
            cost.observe(Evaluate, 0, first);
            for _ in 0..100 {
                cost.observe(Evaluate, 0, steady);
            }
            prop_assert!((cost.seconds(Evaluate, 0) - steady).abs() < 1e-9);
        }
    }
}
