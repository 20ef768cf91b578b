//! The life of a task, as one enum with one table of transitions.
//!
//! ```text
//! Waiting --begin--> Running      Waiting --stop--> Ended (stopped)
//!
//! Running --stop--> Stopping --close--> Closing (stopped) --written--> Ended (stopped)
//!    |                 |                    |
//!    +------mark_failed-------+--> Failing --close--+--> Closing (failed) --written--> Ended (failed)
//!    |                 |       |            |        ^
//!    +-----------------+-------+------------+--------+ give up
//!    |--leave--> Waiting (to go on from its checkpoint)
//!    |
//!    +--written--> Ended (done)            every phase --fail--> Ended (failed)
//! ```

use crate::error::EngineError;
use crate::protocol::Ticket;
use crate::stages::TaskState;
use std::sync::Arc;

/// Why a task failed.
pub(crate) type Failure = Arc<EngineError>;

/// The phase of a task's life.
#[derive(Debug)]
pub(crate) enum Phase {
    /// It has no masters yet: it begins when there is room for them.
    Waiting,
    /// It evaluates and trains, and comes to its end.
    Running,
    /// It was told to stop, and ends before its next minibatch or evaluation batch.
    Stopping,
    /// It cannot go on, and ends before the minibatch that has begun, with all that it has trained. What was claimed after
    /// the ticket `before` comes to nothing.
    Failing { error: EngineError, before: Option<Ticket> },
    /// It was cut short: its best masters are put back, if there are any, and written as its model.
    Closing { failure: Option<Failure> },
    /// It is over.
    Ended { state: TaskState, failure: Option<Failure> },
}

/// A change in a task's life.
#[derive(Debug)]
pub(crate) enum Change {
    /// It has room for its masters.
    Begin,
    /// Its masters make room for others, and it goes on from its checkpoint.
    Leave,
    /// It is told to stop.
    Stop,
    /// The shard task of this ticket, or its data, failed before anything of the minibatch was stepped.
    MarkFailed { error: EngineError, before: Option<Ticket> },
    /// Nothing of it is under way any more, and it is to end; whether something was `trained` that can be written.
    Close { trained: bool },
    /// It failed, and what it has trained is to be written.
    GiveUp(EngineError),
    /// It failed, and there is nothing to write.
    Fail(EngineError),
    /// Its model was hashed and written.
    Written,
}

impl Phase {
    /// Goes where `change` leads.
    pub(crate) fn change(&mut self, change: Change) {
        *self = std::mem::replace(self, Self::Waiting).after(change);
    }

    /// The table. What went wrong first is why.
    fn after(self, change: Change) -> Self {
        let ended = |state, failure| Self::Ended { state, failure };
        let failed = |failure: Failure| ended(TaskState::Failed, Some(failure));
        match (self, change) {
            (over @ Self::Ended { .. }, _) => over,

            (Self::Waiting, Change::Begin) => Self::Running,
            (begun, Change::Begin) => begun,
            (Self::Running, Change::Leave) => Self::Waiting,
            (other, Change::Leave) => other,
            (Self::Waiting, Change::MarkFailed { error, .. } | Change::GiveUp(error)) => {
                failed(Arc::new(error))
            }
            (Self::Waiting, Change::Stop | Change::Close { .. }) => ended(TaskState::Stopped, None),

            (Self::Failing { error, .. }, Change::Fail(_)) => failed(Arc::new(error)),
            (Self::Closing { failure: Some(first) }, Change::Fail(_)) => failed(first),
            (_, Change::Fail(error)) => failed(Arc::new(error)),

            (Self::Closing { failure: Some(first) }, Change::Written) => failed(first),
            (Self::Failing { error, .. }, Change::Written) => failed(Arc::new(error)),
            (Self::Closing { failure: None }, Change::Written) => ended(TaskState::Stopped, None),
            (Self::Waiting | Self::Running | Self::Stopping, Change::Written) => ended(TaskState::Done, None),

            (closing @ Self::Closing { failure: Some(_) }, _) => closing,
            (Self::Failing { error, .. }, Change::Close { trained: false }) => failed(Arc::new(error)),
            (Self::Failing { error, .. }, Change::GiveUp(_) | Change::Close { trained: true }) => {
                Self::Closing { failure: Some(Arc::new(error)) }
            }
            (_, Change::GiveUp(error)) => Self::Closing { failure: Some(Arc::new(error)) },
            (closing @ Self::Closing { .. }, _) => closing,

            (Self::Failing { error, before: first }, Change::MarkFailed { before, .. }) => {
                Self::Failing { error, before: first.into_iter().chain(before).min() }
            }
            (failing @ Self::Failing { .. }, Change::Stop) => failing,
            (_, Change::MarkFailed { error, before }) => Self::Failing { error, before },

            (_, Change::Stop) => Self::Stopping,
            (_, Change::Close { .. }) => Self::Closing { failure: None },
        }
    }

    /// Returns whether the task has no masters yet.
    pub(crate) fn is_waiting(&self) -> bool {
        matches!(self, Self::Waiting)
    }

    /// Returns whether the task is over.
    pub(crate) fn is_over(&self) -> bool {
        matches!(self, Self::Ended { .. })
    }

    /// Returns whether the task is over, or has failed and only has to be written: what its shard tasks make is of no use.
    pub(crate) fn gave_up(&self) -> bool {
        matches!(self, Self::Closing { failure: Some(_) } | Self::Ended { .. })
    }

    /// Returns whether it ends when nothing of it is under way any more.
    pub(crate) fn ends_at_rest(&self) -> bool {
        matches!(self, Self::Stopping | Self::Failing { .. })
    }

    /// Returns whether it was cut short: stopped, or failed.
    pub(crate) fn is_closing(&self) -> bool {
        matches!(self, Self::Closing { .. })
    }

    /// The first shard task that counts no more, of a task that cannot go on.
    pub(crate) fn failing_before(&self) -> Option<Ticket> {
        match self {
            Self::Failing { before, .. } => *before,
            _ => None,
        }
    }

    /// The state in which it ended, once it has.
    pub(crate) fn state(&self) -> Option<TaskState> {
        match self {
            Self::Ended { state, .. } => Some(*state),
            _ => None,
        }
    }

    /// Why it failed, if it has.
    pub(crate) fn failure(&self) -> Option<&Failure> {
        match self {
            Self::Closing { failure } | Self::Ended { failure, .. } => failure.as_ref(),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// An error that can be told from others.
    fn error(number: u64) -> EngineError {
        EngineError::NoProgress { available: number, needed: 0 }
    }

    fn number(error: &EngineError) -> u64 {
        match error {
            EngineError::NoProgress { available, .. } => *available,
            other => panic!("{other}"),
        }
    }

    /// A change, by its kind, with a number for its error and a ticket.
    fn change(kind: u8, at: u64, ticket: Option<Ticket>) -> Change {
        match kind {
            0 => Change::Stop,
            1 => Change::MarkFailed { error: error(at), before: ticket },
            2 => Change::Close { trained: ticket.is_some() },
            3 => Change::GiveUp(error(at)),
            4 => Change::Fail(error(at)),
            5 => Change::Begin,
            _ => Change::Written,
        }
    }

    /// The age of a life: no change leads back.
    fn age(phase: &Phase) -> u8 {
        match phase {
            Phase::Waiting => 0,
            Phase::Running => 1,
            Phase::Stopping => 2,
            Phase::Failing { .. } => 3,
            Phase::Closing { failure: None } => 4,
            Phase::Closing { failure: Some(_) } => 5,
            Phase::Ended { .. } => 6,
        }
    }

    #[test]
    fn a_task_that_nothing_befalls_is_done() {
        let mut phase = Phase::Running;
        phase.change(Change::Written);
        assert_eq!((phase.state(), phase.failure().is_none()), (Some(TaskState::Done), true));
    }

    #[test]
    fn a_task_that_is_told_to_stop_while_its_model_is_written_is_done() {
        let mut phase = Phase::Running;
        phase.change(Change::Stop);
        phase.change(Change::Written);
        assert_eq!(phase.state(), Some(TaskState::Done));
    }

    #[test]
    fn a_task_that_waits_begins_or_ends_with_nothing() {
        let after = |change: Change| {
            let mut phase = Phase::Waiting;
            phase.change(change);
            phase
        };
        assert!(matches!(after(Change::Begin), Phase::Running));
        assert_eq!(after(Change::Stop).state(), Some(TaskState::Stopped));
        assert_eq!(after(Change::Fail(error(1))).state(), Some(TaskState::Failed));
        assert_eq!(
            after(Change::Written).state(),
            Some(TaskState::Done),
            "a checkpoint says that it is finished"
        );
    }

    #[test]
    fn a_task_that_stops_is_written_and_stopped() {
        let mut phase = Phase::Running;
        for change in [Change::Stop, Change::Close { trained: true }] {
            phase.change(change);
        }
        assert!(phase.is_closing() && !phase.gave_up());
        phase.change(Change::Written);
        assert_eq!(phase.state(), Some(TaskState::Stopped));
    }

    #[test]
    fn of_two_shard_tasks_that_fail_the_earlier_one_counts_and_the_first_error_is_why() {
        let mut phase = Phase::Running;
        phase.change(Change::MarkFailed { error: error(1), before: Some(7) });
        phase.change(Change::MarkFailed { error: error(2), before: Some(5) });
        phase.change(Change::MarkFailed { error: error(3), before: Some(6) });
        assert_eq!(phase.failing_before(), Some(5));
        phase.change(Change::GiveUp(error(4)));
        assert_eq!(phase.failure().map(|failure| number(failure)), Some(1));
    }

    proptest! {
        /// Whatever befalls a task, its life goes one way, its first error is why it fails, and only what is written ends well.
        #[test]
        fn lives_go_one_way(events in prop::collection::vec((0..7_u8, prop::option::of(0..9_u64)), 0..24)) {
            let mut phase = Phase::Waiting;
            let mut first: Option<u64> = None;
            let (mut begun, mut written) = (false, false);
            for (at, (kind, ticket)) in events.into_iter().enumerate() {
                let at = at as u64 + 1;
                let (before, ticket_before) = (age(&phase), phase.failing_before());
                if !phase.is_over() {
                    begun |= kind == 5;
                    written |= kind == 6;
                    // In a task that only has to be written no shard task is left that could doom it.
                    if matches!(kind, 3 | 4) || kind == 1 && !phase.is_closing() {
                        first.get_or_insert(at);
                    }
                }
                phase.change(change(kind, at, ticket));
                prop_assert!(age(&phase) >= before);
                prop_assert!(!phase.gave_up() || !phase.ends_at_rest());
                if let (Some(old), Some(new)) = (ticket_before, phase.failing_before()) {
                    prop_assert!(new <= old);
                }
                if phase.gave_up() {
                    prop_assert_eq!(phase.failure().map(|failure| number(failure)), first);
                }
                match phase.state() {
                    Some(TaskState::Failed) => prop_assert!(first.is_some()),
                    Some(TaskState::Done) => prop_assert!(written && first.is_none()),
                    Some(TaskState::Stopped) => prop_assert!((written || !begun) && first.is_none()),
                    None => {}
                }
            }
        }
    }
}
