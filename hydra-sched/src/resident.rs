//! The copies of parameters that a simulated device keeps.

/// A copy of one shard's parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Copy {
    pub model: u32,
    pub shard: u32,
    /// The minibatch whose masters it is a copy of.
    pub version: u64,
    bytes: u64,
    used: u64,
}

/// What is on one device. Copies are clean, so letting go of one moves nothing.
#[derive(Clone, Debug)]
pub(crate) struct Copies {
    /// Bytes there are; without a number there is room for two copies of any size.
    memory: Option<u64>,
    /// Of copies that together may have more than a device could.
    held: u128,
    kept: Vec<Copy>,
    clock: u64,
}

impl Copies {
    pub(crate) const fn new(memory: Option<u64>) -> Self {
        Self { memory, held: 0, kept: Vec::new(), clock: 0 }
    }

    pub(crate) fn kept(&self) -> &[Copy] {
        &self.kept
    }

    /// Whether this version of the shard is there, which makes it the most recently used copy.
    pub(crate) fn touch(&mut self, model: u32, shard: u32, version: u64) -> bool {
        self.clock += 1;
        let found = self.kept.iter_mut().find(|c| (c.model, c.shard, c.version) == (model, shard, version));
        match found {
            Some(copy) => {
                copy.used = self.clock;
                true
            }
            None => false,
        }
    }

    /// Puts a copy in the place of those that were used longest ago, but never of the one that
    /// computes.
    pub(crate) fn insert(
        &mut self,
        (model, shard): (u32, u32),
        version: u64,
        bytes: u64,
        computes: Option<(u32, u32)>,
    ) {
        self.forget(model, shard);
        while !self.fits(bytes) && self.evict(computes) {}
        self.held += u128::from(bytes);
        self.clock += 1;
        self.kept.push(Copy { model, shard, version, bytes, used: self.clock });
    }

    /// Lets go of a copy that a step made stale.
    pub(crate) fn forget(&mut self, model: u32, shard: u32) {
        if let Some(place) = self.kept.iter().position(|c| (c.model, c.shard) == (model, shard)) {
            self.held -= u128::from(self.kept.swap_remove(place).bytes);
        }
    }

    fn fits(&self, bytes: u64) -> bool {
        match self.memory {
            Some(memory) => self.held + u128::from(bytes) <= u128::from(memory),
            None => self.kept.len() < 2,
        }
    }

    fn evict(&mut self, computes: Option<(u32, u32)>) -> bool {
        let free = self.kept.iter().filter(|c| Some((c.model, c.shard)) != computes);
        let Some(oldest) = free.min_by_key(|c| c.used).copied() else { return false };
        self.forget(oldest.model, oldest.shard);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_copies_fit_where_no_memory_is_stated() {
        let mut copies = Copies::new(None);
        copies.insert((0, 0), 0, 10, None);
        copies.insert((0, 1), 0, 10, Some((0, 0)));
        assert!(copies.touch(0, 0, 0) && copies.touch(0, 1, 0));
        copies.insert((0, 2), 0, 10, Some((0, 0)));
        assert!(copies.touch(0, 0, 0), "what computes stays, though it was used longest ago");
        assert!(!copies.touch(0, 1, 0));
    }

    #[test]
    fn memory_is_filled_and_the_least_recently_used_goes() {
        let mut copies = Copies::new(Some(100));
        (0..4).for_each(|shard| copies.insert((0, shard), 0, 25, None));
        assert!(copies.touch(0, 0, 0));
        copies.insert((1, 0), 0, 30, None);
        let left: Vec<u32> = copies.kept().iter().filter(|c| c.model == 0).map(|c| c.shard).collect();
        assert_eq!((left.contains(&0), left.contains(&3), left.len(), copies.held), (true, true, 2, 80));
    }

    #[test]
    fn another_version_is_not_there() {
        let mut copies = Copies::new(None);
        copies.insert((0, 0), 4, 1, None);
        assert!(!copies.touch(0, 0, 5));
        copies.insert((0, 0), 5, 1, None);
        assert_eq!(copies.kept().len(), 1);
        copies.forget(0, 0);
        assert_eq!((copies.kept().len(), copies.held), (0, 0));
    }
}
