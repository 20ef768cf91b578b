//! The one formula for what a copy on a device is worth.

/// A resident copy whose shard task has ended, as the choice sees it of which copy goes when a device needs room.
///
/// Belady's rule drops what is used again last. Copies differ in their bytes, and in what a promotion of them costs (one
/// from the disk costs more), so what counts is the link's time that a byte saves for each second that it is kept. Where
/// bytes all cost the same, that is Belady's order. Source: L. A. Belady, "A study of replacement algorithms for a
/// virtual-storage computer", IBM Systems Journal 5(2), 1966; with costs, N. Young, "The k-server dual and loose
/// competitiveness for paging", Algorithmica 11, 1994.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CopyUse {
    /// Estimated seconds until a shard task reads it; `None` if its masters are stepped before, or nothing reads it any
    /// more. See [`CostModel::until_read_s`](crate::CostModel::until_read_s).
    pub next_use_s: Option<f64>,
    /// Estimated seconds to promote a byte of it again, relative to those of other copies.
    pub cost_per_byte: f64,
    /// The devices of which one will read it: 1 if the one that has it committed to its model last, which policies with an eye on
    /// copies leave there, and all where another one did.
    pub devices: usize,
}

impl CopyUse {
    /// The worth: the copy with the least goes first. 0 of one that nothing reads, infinite of one that is read next; it
    /// is never negative, and never not a number.
    pub fn worth(&self) -> f64 {
        match self.next_use_s {
            Some(s) if s > 0.0 => (self.cost_per_byte / (s * self.devices.max(1) as f64)).max(0.0),
            Some(_) => f64::INFINITY,
            None => 0.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_read_last_goes_first_unless_it_is_dear() {
        let on = |devices, next_use_s, cost_per_byte| CopyUse { next_use_s, cost_per_byte, devices }.worth();
        let worth = |next_use_s, cost_per_byte| on(1, next_use_s, cost_per_byte);
        let order = [
            worth(None, 9.0),
            on(2, Some(20.0), 1.0),
            worth(Some(30.0), 1.0),
            on(2, Some(14.0), 1.0),
            worth(Some(10.0), 1.0),
            worth(Some(30.0), 4.0),
            worth(Some(0.0), 0.0),
        ];
        assert!(order.is_sorted_by(|a, b| a < b), "{order:?}");
        assert_eq!((worth(None, f64::NAN), worth(Some(1.0), f64::NAN)), (0.0, 0.0));
    }
}
