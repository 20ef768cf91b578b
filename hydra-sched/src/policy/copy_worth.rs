//! The formula for the worth of a cached copy.

/// A cached copy as an input of the eviction order when a device needs memory.
///
/// Belady's rule evicts the copy with the latest next use. Copies differ in size and in promotion cost (a
/// promotion from disk costs more), so the worth is the link time saved per byte and second in the cache. If
/// all bytes cost the same, the result is Belady's order. Source: L. A. Belady, "A study of replacement
/// algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966; with costs, N. Young, "The
/// k-server dual and loose competitiveness for paging", Algorithmica 11, 1994.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CopyUse {
    /// Estimated seconds until a shard task reads it; `None` if its master weights are updated before, or
    /// nothing reads it again. See [`CostModel::until_read_s`](crate::CostModel::until_read_s).
    pub next_use_s: Option<f64>,
    /// Estimated seconds to promote one of its bytes again, relative to other copies.
    pub cost_per_byte: f64,
    /// The number of devices that may read it next: 1 if its device last committed to its model, because
    /// cache-aware policies keep the model there, and all devices otherwise.
    pub devices: usize,
}

impl CopyUse {
    /// Returns the worth; the copy with the smallest is evicted first. 0 if nothing reads it, infinite if it
    /// is read next; never negative or not-a-number.
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
