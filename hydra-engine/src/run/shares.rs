//! The share of a processor that the threads of each device had while they computed, so that a run's times can be told as they
//! would be on processors of their own.

/// Who computes, on how many processors.
pub(super) struct Shares {
    processors: usize,
    devices: Vec<Device>,
    /// When what devices had was last added up.
    at_s: f64,
}

#[derive(Default)]
struct Device {
    /// Its threads on the processors; none of a device that has its own.
    threads: usize,
    /// When what it computes began, and the seconds of a processor that each of its threads has had since.
    since: Option<(f64, f64)>,
    /// The share that each of its threads had in the last shard task that ended.
    share: f64,
}

impl Shares {
    /// Devices of so many threads.
    pub(super) fn new(threads: impl IntoIterator<Item = usize>, processors: usize) -> Self {
        let device = |threads: usize| Device { threads: threads.min(processors), since: None, share: 1.0 };
        Self { processors, devices: threads.into_iter().map(device).collect(), at_s: 0.0 }
    }

    /// A device began to compute a shard task.
    pub(super) fn started(&mut self, device: usize, at_s: f64) {
        self.progress(at_s);
        self.devices[device].since = Some((self.at_s, 0.0));
    }

    /// A device has computed one.
    pub(super) fn ended(&mut self, device: usize, at_s: f64) {
        self.progress(at_s);
        let of = &mut self.devices[device];
        if let Some((from_s, had_s)) = of.since.take() {
            let took_s = self.at_s - from_s;
            of.share = if took_s > 0.0 { had_s / took_s } else { 1.0 };
        }
    }

    /// The share of a processor that each of a device's threads had in the last shard task that ended.
    pub(super) fn of_last(&self, device: usize) -> f64 {
        self.devices.get(device).map_or(1.0, |device| device.share)
    }

    fn progress(&mut self, at_s: f64) {
        // Threads report in an order that is not quite that of their times.
        let passed_s = (at_s - self.at_s).max(0.0);
        self.at_s += passed_s;
        let computing = || self.devices.iter().filter(|device| device.since.is_some());
        let threads: usize = computing().map(|device| device.threads).sum();
        let share = (self.processors as f64 / threads.max(1) as f64).min(1.0);
        for device in &mut self.devices {
            let share = if device.threads > 0 { share } else { 1.0 };
            device.since.iter_mut().for_each(|(_, had_s)| *had_s += passed_s * share);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_share_the_processors_that_there_are() {
        let mut shares = Shares::new([1, 1, 4, 0], 2);
        shares.started(0, 1.0);
        shares.started(1, 2.0);
        shares.ended(1, 4.0);
        assert_eq!(shares.of_last(1), 1.0, "two threads on two processors");
        // Four threads on two processors are as slow alone: they count as two.
        shares.started(2, 4.0);
        shares.started(3, 4.0);
        shares.ended(0, 7.0);
        assert_eq!(shares.of_last(0), (3.0 + 3.0 * 2.0 / 3.0) / 6.0);
        shares.ended(2, 9.0);
        assert_eq!(shares.of_last(2), (3.0 * 2.0 / 3.0 + 2.0) / 5.0);
        shares.ended(3, 9.0);
        assert_eq!(shares.of_last(3), 1.0, "it has its own");
        // What did not begin has had all; and reports may be late.
        shares.ended(1, 8.0);
        shares.started(1, 8.5);
        shares.ended(1, 8.9);
        assert_eq!((shares.of_last(1), shares.of_last(9)), (1.0, 1.0));
    }
}
