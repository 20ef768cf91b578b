//! The double buffer of one device: one payload is computed on while the next is uploaded.
//!
//! It has two slots, identified by ascending tickets. The states of the *prefetch* slot are
//!
//! ```text
//! Empty --begin_fill--> Filling --complete--> Ready --activate--> Empty, and the ticket is active
//!                          |
//!                          +--cancel--> Empty, and the ticket is cancelled
//! ```
//!
//! and the *active* slot holds a ticket from `activate` to `retire`. So at most one payload is being uploaded
//! or waiting, and at most one is computed on, which is what one double-buffer reserve per device covers.
//! The state machine does not depend on its payloads, and only `activate` blocks.

use crate::{Monitor, StdMonitor};
use std::fmt;

/// The number of a shard task on a device. Tickets of one buffer ascend.
pub type Ticket = u64;

/// The state of the prefetch slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotState {
    /// Nothing is being prefetched.
    Empty,
    /// The payload of this ticket is being uploaded.
    Filling(Ticket),
    /// The payload of this ticket waits for its activation.
    Ready(Ticket),
}

impl fmt::Display for SlotState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => write!(f, "empty"),
            Self::Filling(ticket) => write!(f, "filling for ticket {ticket}"),
            Self::Ready(ticket) => write!(f, "ready with ticket {ticket}"),
        }
    }
}

/// A transition that the state of a double buffer does not allow. The state is unchanged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the error messages describe the fields")]
pub enum BufferError {
    /// A prefetch was started while another one is filling or ready.
    #[error("cannot prefetch ticket {ticket}: the slot is {state}; activate or cancel that one first")]
    Occupied { ticket: Ticket, state: SlotState },
    /// A ticket is not above the previous tickets.
    #[error("cannot prefetch ticket {ticket} after ticket {last}: tickets ascend; take one above {last}")]
    OutOfOrder { ticket: Ticket, last: Ticket },
    /// A payload was passed for a ticket that the slot is not filling.
    #[error("cannot complete ticket {ticket}: the slot is {state}; begin the fill in this buffer first")]
    NotFilling { ticket: Ticket, state: SlotState },
    /// The ticket's prefetch was cancelled.
    #[error("the prefetch of ticket {ticket} was cancelled; begin again with a new ticket")]
    Cancelled { ticket: Ticket },
    /// A requested ticket is not in the prefetch slot, so waiting could last forever.
    #[error("ticket {ticket} was not begun, or is over: the slot is {state}; begin its fill first")]
    NotBegun { ticket: Ticket, state: SlotState },
    /// A ticket was activated while one is active.
    #[error("cannot activate ticket {ticket}: ticket {active} is active; retire it first")]
    Busy { ticket: Ticket, active: Ticket },
    /// A retired ticket is not active.
    #[error("cannot retire ticket {ticket}: {}; activate it first", active_name(*.active))]
    NotActive {
        ticket: Ticket,
        /// The active ticket, if any.
        active: Option<Ticket>,
    },
}

fn active_name(active: Option<Ticket>) -> String {
    active.map_or_else(|| "no ticket is active".to_owned(), |ticket| format!("ticket {ticket} is active"))
}

/// The right to fill the prefetch slot for one ticket. Return it with [`DoubleBuffer::complete`] or
/// [`DoubleBuffer::cancel`]; a token that is only dropped leaves the slot filling forever.
#[derive(Debug)]
#[must_use = "the slot is filling until the token is given to `complete` or `cancel`"]
pub struct FillGuard {
    ticket: Ticket,
}

impl FillGuard {
    /// The ticket whose payload is to be uploaded.
    pub fn ticket(&self) -> Ticket {
        self.ticket
    }
}

/// The double buffer of one device; see the module's documentation for its states.
pub struct DoubleBuffer<T, M: Monitor = StdMonitor> {
    cell: M::Cell<BufferState<T>>,
}

impl<T> DoubleBuffer<T> {
    /// Returns an empty buffer.
    pub fn new() -> Self {
        Self::with_monitor()
    }
}

impl<T> Default for DoubleBuffer<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T, M: Monitor> fmt::Debug for DoubleBuffer<T, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (prefetch, active) = self.state();
        f.debug_struct("DoubleBuffer").field("prefetch", &prefetch).field("active", &active).finish()
    }
}

impl<T, M: Monitor> DoubleBuffer<T, M> {
    /// Returns an empty buffer over the monitor `M`.
    pub fn with_monitor() -> Self {
        let state = BufferState {
            prefetch: SlotState::Empty,
            payload: None,
            active: None,
            last: None,
            cancelled: None,
        };
        Self { cell: M::guard(state) }
    }

    /// Reserves the prefetch slot for `ticket`.
    ///
    /// # Errors
    /// [`BufferError::Occupied`] while another prefetch is filling or ready, [`BufferError::OutOfOrder`] if
    /// the ticket is not above all previous ones.
    pub fn begin_fill(&self, ticket: Ticket) -> Result<FillGuard, BufferError> {
        M::enter(&self.cell, |state| state.begin_fill(ticket))
    }

    /// Stores the payload into the slot of the token, and wakes the waiting thread.
    ///
    /// # Errors
    /// [`BufferError::Cancelled`] or [`BufferError::NotFilling`] if the token is of another buffer. The
    /// payload, and the memory it holds, is then dropped.
    pub fn complete(&self, fill: FillGuard, payload: T) -> Result<(), BufferError> {
        // A refused payload is dropped after the lock is released, because dropping may take long.
        let (result, _refused) = M::enter(&self.cell, |state| state.complete(fill.ticket, payload));
        result
    }

    /// Releases the slot without a payload; a thread that waits for the ticket gets
    /// [`BufferError::Cancelled`]. Does nothing if the token is of another buffer.
    pub fn cancel(&self, fill: FillGuard) {
        M::enter(&self.cell, |state| {
            if state.prefetch == SlotState::Filling(fill.ticket) {
                state.cancelled = Some(fill.ticket);
                state.prefetch = SlotState::Empty;
            }
        });
    }

    /// Waits until the payload of `ticket` is ready, makes the ticket active and returns the payload; the
    /// prefetch slot is then empty.
    ///
    /// # Errors
    /// [`BufferError::Busy`] if a ticket is active, [`BufferError::Cancelled`] if the prefetch was
    /// cancelled before or during the wait, and immediately [`BufferError::NotBegun`] if there is none.
    pub fn activate(&self, ticket: Ticket) -> Result<T, BufferError> {
        M::wait_for(&self.cell, |state| state.activate(ticket))
    }

    /// Ends the active ticket.
    ///
    /// # Errors
    /// [`BufferError::NotActive`] if `ticket` is not the active one.
    pub fn retire(&self, ticket: Ticket) -> Result<(), BufferError> {
        M::enter(&self.cell, |state| match state.active {
            Some(active) if active == ticket => {
                state.active = None;
                Ok(())
            }
            active => Err(BufferError::NotActive { ticket, active }),
        })
    }

    /// The prefetch slot's state and the active ticket.
    pub fn state(&self) -> (SlotState, Option<Ticket>) {
        M::enter(&self.cell, |state| (state.prefetch, state.active))
    }
}

/// The state that the monitor guards.
struct BufferState<T> {
    prefetch: SlotState,
    /// The payload of a ready slot.
    payload: Option<T>,
    active: Option<Ticket>,
    /// The last ticket that was started.
    last: Option<Ticket>,
    /// The last ticket that was cancelled: requests for it must not wait. Older ones are refused too, as not
    /// begun.
    cancelled: Option<Ticket>,
}

impl<T> BufferState<T> {
    fn begin_fill(&mut self, ticket: Ticket) -> Result<FillGuard, BufferError> {
        let state = self.prefetch;
        if state != SlotState::Empty {
            return Err(BufferError::Occupied { ticket, state });
        }
        if let Some(last) = self.last.filter(|&last| ticket <= last) {
            return Err(BufferError::OutOfOrder { ticket, last });
        }
        self.last = Some(ticket);
        self.prefetch = SlotState::Filling(ticket);
        Ok(FillGuard { ticket })
    }

    fn complete(&mut self, ticket: Ticket, payload: T) -> (Result<(), BufferError>, Option<T>) {
        match self.prefetch {
            SlotState::Filling(at) if at == ticket => {
                (self.prefetch, self.payload) = (SlotState::Ready(ticket), Some(payload));
                (Ok(()), None)
            }
            _ if self.cancelled == Some(ticket) => (Err(BufferError::Cancelled { ticket }), Some(payload)),
            state => (Err(BufferError::NotFilling { ticket, state }), Some(payload)),
        }
    }

    /// `None` while the ticket is being filled.
    fn activate(&mut self, ticket: Ticket) -> Option<Result<T, BufferError>> {
        if let Some(active) = self.active {
            return Some(Err(BufferError::Busy { ticket, active }));
        }
        match self.prefetch {
            SlotState::Filling(at) if at == ticket => None,
            SlotState::Ready(at) if at == ticket => {
                let payload = self.payload.take()?;
                (self.prefetch, self.active) = (SlotState::Empty, Some(ticket));
                Some(Ok(payload))
            }
            _ if self.cancelled == Some(ticket) => Some(Err(BufferError::Cancelled { ticket })),
            state => Some(Err(BufferError::NotBegun { ticket, state })),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::monitor::tests::LoomMonitor;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    type Text = DoubleBuffer<&'static str>;

    /// A buffer in each state, reached by legal transitions: the prefetch of ticket 2 (or none) while ticket
    /// 1 is active (or retired).
    fn reach(prefetch: SlotState, active: bool) -> (Text, Option<FillGuard>) {
        let buffer = Text::new();
        buffer.complete(buffer.begin_fill(1).unwrap(), "first").unwrap();
        assert_eq!(buffer.activate(1), Ok("first"));
        if !active {
            buffer.retire(1).unwrap();
        }
        let fill = match prefetch {
            SlotState::Empty => None,
            SlotState::Filling(_) => Some(buffer.begin_fill(2).unwrap()),
            SlotState::Ready(_) => {
                buffer.complete(buffer.begin_fill(2).unwrap(), "second").unwrap();
                None
            }
        };
        assert_eq!(buffer.state(), (prefetch, active.then_some(1)));
        (buffer, fill)
    }

    #[derive(Clone, Copy)]
    enum Move {
        Begin(Ticket),
        Complete(Ticket),
        Cancel(Ticket),
        Activate(Ticket),
        Retire(Ticket),
    }

    /// Makes a transition, with the buffer's own token if there is one.
    fn make(buffer: &Text, fill: Option<FillGuard>, step: Move) -> Result<&'static str, BufferError> {
        let token = |ticket| fill.filter(|f| f.ticket() == ticket).unwrap_or(FillGuard { ticket });
        match step {
            Move::Begin(ticket) => buffer.begin_fill(ticket).map(|fill| {
                assert_eq!(fill.ticket(), ticket);
                ""
            }),
            Move::Complete(ticket) => buffer.complete(token(ticket), "second").map(|()| ""),
            Move::Cancel(ticket) => {
                buffer.cancel(token(ticket));
                Ok("")
            }
            Move::Activate(ticket) => buffer.activate(ticket),
            Move::Retire(ticket) => buffer.retire(ticket).map(|()| ""),
        }
    }

    type Row = (SlotState, bool, Move, Result<&'static str, BufferError>, SlotState, Option<Ticket>);

    /// State, transition, result and next state. `activate(2)` while ticket 2 fills would block and is
    /// tested with threads.
    fn transitions() -> Vec<Row> {
        use BufferError::{Busy, NotActive, NotBegun, NotFilling, Occupied, OutOfOrder};
        use Move::{Activate, Begin, Cancel, Complete, Retire};
        use SlotState::{Empty, Filling, Ready};
        let (filling, ready) = (Filling(2), Ready(2));
        let mut rows = Vec::new();
        for active in [false, true] {
            let is = active.then_some(1);
            let busy = |ticket| Busy { ticket, active: 1 };
            let or_busy = |ticket, state| if active { busy(ticket) } else { NotBegun { ticket, state } };
            rows.extend([
                (Empty, active, Begin(2), Ok(""), filling, is),
                (Empty, active, Begin(1), Err(OutOfOrder { ticket: 1, last: 1 }), Empty, is),
                (Empty, active, Begin(0), Err(OutOfOrder { ticket: 0, last: 1 }), Empty, is),
                (Empty, active, Complete(2), Err(NotFilling { ticket: 2, state: Empty }), Empty, is),
                (Empty, active, Cancel(2), Ok(""), Empty, is),
                (Empty, active, Activate(2), Err(or_busy(2, Empty)), Empty, is),
                (Empty, active, Activate(1), Err(or_busy(1, Empty)), Empty, is),
                (filling, active, Begin(3), Err(Occupied { ticket: 3, state: filling }), filling, is),
                (filling, active, Complete(2), Ok(""), ready, is),
                (filling, active, Complete(3), Err(NotFilling { ticket: 3, state: filling }), filling, is),
                (filling, active, Cancel(2), Ok(""), Empty, is),
                (filling, active, Cancel(3), Ok(""), filling, is),
                (filling, active, Activate(3), Err(or_busy(3, filling)), filling, is),
                (ready, active, Begin(3), Err(Occupied { ticket: 3, state: ready }), ready, is),
                (ready, active, Complete(2), Err(NotFilling { ticket: 2, state: ready }), ready, is),
                (ready, active, Cancel(2), Ok(""), ready, is),
                (ready, active, Activate(3), Err(or_busy(3, ready)), ready, is),
            ]);
            for state in [Empty, filling, ready] {
                let refused = |ticket| Err(NotActive { ticket, active: is });
                rows.push((state, active, Retire(2), refused(2), state, is));
                rows.push((state, active, Retire(1), if active { Ok("") } else { refused(1) }, state, None));
            }
        }
        rows.push((ready, false, Activate(2), Ok("second"), Empty, Some(2)));
        rows.push((ready, true, Activate(2), Err(Busy { ticket: 2, active: 1 }), ready, Some(1)));
        rows.push((filling, true, Activate(2), Err(Busy { ticket: 2, active: 1 }), filling, Some(1)));
        rows
    }

    #[test]
    fn every_move_from_every_state_does_what_the_table_says() {
        for (index, (prefetch, active, step, answer, slot_after, active_after)) in
            transitions().into_iter().enumerate()
        {
            let (buffer, fill) = reach(prefetch, active);
            assert_eq!(make(&buffer, fill, step), answer, "row {index}");
            assert_eq!(buffer.state(), (slot_after, active_after), "row {index}");
        }
    }

    #[test]
    fn what_was_cancelled_is_refused_at_once_and_the_next_ticket_goes_through() {
        let buffer = Text::new();
        buffer.cancel(buffer.begin_fill(4).unwrap());
        assert_eq!(buffer.activate(4), Err(BufferError::Cancelled { ticket: 4 }));
        assert_eq!(buffer.retire(4), Err(BufferError::NotActive { ticket: 4, active: None }));
        buffer.complete(buffer.begin_fill(5).unwrap(), "next").unwrap();
        assert_eq!(buffer.activate(4), Err(BufferError::Cancelled { ticket: 4 }));
        assert_eq!(buffer.activate(5), Ok("next"));
    }

    #[test]
    fn a_token_of_another_buffer_is_refused_and_its_payload_dropped() {
        let payload = Arc::new(());
        let buffer = DoubleBuffer::<Arc<()>>::new();
        buffer.cancel(buffer.begin_fill(1).unwrap());
        let next = buffer.begin_fill(2).unwrap();
        let refused = buffer.complete(FillGuard { ticket: 1 }, payload.clone());
        assert_eq!(refused, Err(BufferError::Cancelled { ticket: 1 }));
        assert_eq!(Arc::strong_count(&payload), 1, "a refused payload is dropped");
        buffer.cancel(FillGuard { ticket: 1 });
        assert_eq!(buffer.state(), (SlotState::Filling(2), None));
        buffer.complete(next, payload).unwrap();
    }

    #[test]
    fn errors_name_the_ticket_the_state_and_the_way_out() {
        let (buffer, _) = reach(SlotState::Ready(2), true);
        let text = |error: BufferError| error.to_string();
        let occupied = text(buffer.begin_fill(3).unwrap_err());
        assert_eq!(
            occupied,
            "cannot prefetch ticket 3: the slot is ready with ticket 2; activate or cancel that one first"
        );
        assert_eq!(
            text(buffer.activate(2).unwrap_err()),
            "cannot activate ticket 2: ticket 1 is active; retire it first"
        );
        buffer.retire(1).unwrap();
        assert_eq!(
            text(buffer.retire(1).unwrap_err()),
            "cannot retire ticket 1: no ticket is active; activate it first"
        );
        assert_eq!(format!("{buffer:?}"), "DoubleBuffer { prefetch: Ready(2), active: None }");
    }

    #[test]
    fn threads_hand_over_every_payload_in_order() {
        let buffer = Arc::new(DoubleBuffer::<Ticket>::new());
        let (send, fills) = std::sync::mpsc::channel::<FillGuard>();
        let filling = buffer.clone();
        let copier = std::thread::spawn(move || {
            for fill in fills {
                let ticket = fill.ticket();
                filling.complete(fill, ticket * 10).unwrap();
            }
        });
        send.send(buffer.begin_fill(1).unwrap()).unwrap();
        for ticket in 1..2000 {
            assert_eq!(buffer.activate(ticket), Ok(ticket * 10));
            send.send(buffer.begin_fill(ticket + 1).unwrap()).unwrap();
            buffer.retire(ticket).unwrap();
        }
        drop(send);
        copier.join().unwrap();
    }

    type Modelled<T> = DoubleBuffer<T, LoomMonitor>;

    /// A payload that counts the live payloads.
    struct Payload(Ticket, Arc<AtomicUsize>);

    impl Payload {
        fn new(ticket: Ticket, alive: &Arc<AtomicUsize>) -> Self {
            let before = alive.fetch_add(1, Ordering::SeqCst);
            assert!(before < 2, "one payload computes and one is prefetched, never more");
            Self(ticket, alive.clone())
        }
    }

    impl Drop for Payload {
        fn drop(&mut self) {
            self.1.fetch_sub(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn model_copier_and_compute_keep_the_order_with_two_payloads_at_most() {
        const ROUNDS: Ticket = 3;
        loom::model(|| {
            let buffer = loom::sync::Arc::new(Modelled::<Payload>::with_monitor());
            let alive = Arc::new(AtomicUsize::new(0));
            let (send, fills) = loom::sync::mpsc::channel::<FillGuard>();
            send.send(buffer.begin_fill(1).unwrap()).unwrap();
            let (filling, made) = (buffer.clone(), alive.clone());
            let copier = loom::thread::spawn(move || {
                for _ in 0..ROUNDS {
                    let fill = fills.recv().unwrap();
                    let payload = Payload::new(fill.ticket(), &made);
                    filling.complete(fill, payload).unwrap();
                }
            });
            for ticket in 1..=ROUNDS {
                let payload = buffer.activate(ticket).unwrap();
                assert_eq!(payload.0, ticket);
                if ticket < ROUNDS {
                    send.send(buffer.begin_fill(ticket + 1).unwrap()).unwrap();
                }
                drop(payload);
                buffer.retire(ticket).unwrap();
            }
            copier.join().unwrap();
            assert_eq!(buffer.state(), (SlotState::Empty, None));
            assert_eq!(alive.load(Ordering::SeqCst), 0);
        });
    }

    #[test]
    fn model_a_cancel_wakes_the_waiter_and_the_next_round_goes_on() {
        loom::model(|| {
            let buffer = loom::sync::Arc::new(Modelled::<Ticket>::with_monitor());
            let (send, fills) = loom::sync::mpsc::channel::<FillGuard>();
            send.send(buffer.begin_fill(1).unwrap()).unwrap();
            let filling = buffer.clone();
            let copier = loom::thread::spawn(move || {
                filling.cancel(fills.recv().unwrap());
                let fill = fills.recv().unwrap();
                let ticket = fill.ticket();
                filling.complete(fill, ticket).unwrap();
            });
            assert_eq!(buffer.activate(1), Err(BufferError::Cancelled { ticket: 1 }));
            send.send(buffer.begin_fill(2).unwrap()).unwrap();
            assert_eq!(buffer.activate(2), Ok(2));
            buffer.retire(2).unwrap();
            copier.join().unwrap();
        });
    }

    #[test]
    fn model_two_that_prefetch_at_the_same_time_are_never_both_admitted() {
        loom::model(|| {
            let buffer = loom::sync::Arc::new(Modelled::<Ticket>::with_monitor());
            let other = buffer.clone();
            let second = loom::thread::spawn(move || other.begin_fill(2).map(|fill| fill.ticket()));
            let first = buffer.begin_fill(1).map(|fill| fill.ticket());
            let second = second.join().unwrap();
            assert!(first.is_ok() != second.is_ok(), "{first:?} {second:?}");
            let winner = first.or(second).unwrap();
            assert_eq!(buffer.state(), (SlotState::Filling(winner), None));
        });
    }
}
