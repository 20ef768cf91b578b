//! The phase of a task: its state between submission and end, as one enum with one transition table.
//!
//! ```text
//! Waiting --begin--> Running      Waiting --stop--> Ended (stopped)
//!
//! Running --stop--> Stopping --close--> Closing (stopped) --written--> Ended (stopped)
//!    |                 |                    |
//!    +---mark_failed---+--> Failing --close-+--> Closing (failed) --written--> Ended (failed)
//!    |                 |       |            |        ^
//!    +-----------------+-------+------------+--------+ give up
//!    |--leave--> Waiting (resumes from its checkpoint)
//!    |
//!    +--written--> Ended (done)            every phase --fail--> Ended (failed)
//! ```

use crate::error::EngineError;
use crate::protocol::TaskState;
use crate::protocol::Ticket;
use std::sync::Arc;

/// The error of a failed task.
pub(crate) type Failure = Arc<EngineError>;

/// The phase of a task's life.
#[derive(Debug)]
pub(crate) enum Phase {
    /// Its master weights are not loaded: it is queued for host memory.
    Waiting,
    /// It evaluates and trains.
    Running,
    /// It received a stop request, and ends before its next minibatch or evaluation batch.
    Stopping,
    /// It cannot continue, and ends before the current minibatch, keeping all earlier training. Shard tasks claimed
    /// after the ticket `before` are cancelled.
    Failing { error: EngineError, before: Option<Ticket> },
    /// It was cut short: its best weights, if any, are restored and its model is written.
    Closing { failure: Option<Failure> },
    /// It is over.
    Ended { state: TaskState, failure: Option<Failure> },
}

/// A change of phase.
#[derive(Debug)]
pub(crate) enum Change {
    /// Its master weights fit in host memory.
    Begin,
    /// It releases its host memory for other tasks, and will resume from its checkpoint.
    Leave,
    /// It receives a stop request.
    Stop,
    /// The shard task of this ticket, or a read of its data, failed before any buffer was stepped for the minibatch.
    MarkFailed { error: EngineError, before: Option<Ticket> },
    /// Nothing of it is in flight, and it ends. `trained` is true if there is something to write.
    Close { trained: bool },
    /// It failed, and its best weights are written.
    GiveUp(EngineError),
    /// It failed, and there is nothing to write.
    Fail(EngineError),
    /// Its model was hashed and written.
    Written,
}

impl Phase {
    /// Applies `change`.
    pub(crate) fn change(&mut self, change: Change) {
        *self = std::mem::replace(self, Self::Waiting).after(change);
    }

    /// The transition table. The first error is the one that the task reports.
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

    /// Returns whether the task's master weights are not loaded.
    pub(crate) fn is_waiting(&self) -> bool {
        matches!(self, Self::Waiting)
    }

    /// Returns whether the task is over.
    pub(crate) fn is_over(&self) -> bool {
        matches!(self, Self::Ended { .. })
    }

    /// Returns whether the task is over, or has failed and only has to be written: results of its shard tasks are
    /// dropped.
    pub(crate) fn gave_up(&self) -> bool {
        matches!(self, Self::Closing { failure: Some(_) } | Self::Ended { .. })
    }

    /// Returns whether it ends as soon as nothing of it is in flight.
    pub(crate) fn ends_at_rest(&self) -> bool {
        matches!(self, Self::Stopping | Self::Failing { .. })
    }

    /// Returns whether it was cut short: stopped, or failed.
    pub(crate) fn is_closing(&self) -> bool {
        matches!(self, Self::Closing { .. })
    }

    /// The ticket from which on shard tasks of a failing task are cancelled.
    pub(crate) fn failing_before(&self) -> Option<Ticket> {
        match self {
            Self::Failing { before, .. } => *before,
            _ => None,
        }
    }

    /// The state in which it ended; `None` before.
    pub(crate) fn state(&self) -> Option<TaskState> {
        match self {
            Self::Ended { state, .. } => Some(*state),
            _ => None,
        }
    }

    /// The error of a failed task.
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

    /// An error that can be distinguished from others.
    fn error(number: u64) -> EngineError {
        EngineError::NoProgress { available: number, needed: 0 }
    }

    fn number(error: &EngineError) -> u64 {
        match error {
            EngineError::NoProgress { available, .. } => *available,
            other => panic!("{other}"),
        }
    }

    /// A change of this kind, with a number for its error and a ticket.
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

    /// The rank of a phase: no change leads to a lower one.
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
        /// For every sequence of changes: phases only advance, the first error is reported, and only a written task
        /// ends well.
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
                    // A task that only has to be written has no shard task left that could fail it.
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
