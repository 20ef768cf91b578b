//! A sequence of configurations: given ones first, then random ones.

use crate::key::Key;
use crate::rank::TrialId;
use crate::space::{Configuration, Space};
use std::collections::BTreeMap;

/// A draw that equals an earlier trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repeat {
    /// The number of the draw, from zero.
    pub draw: usize,
    /// The equal trial.
    pub trial: TrialId,
}

/// Configurations by number: given ones first, the others as functions of the key and their number.
#[derive(Clone, Debug)]
pub(super) struct Draws {
    space: Space,
    given: Vec<Configuration>,
    key: Key,
}

impl Draws {
    pub(super) fn new(space: Space, given: Vec<Configuration>, seed: u64) -> Self {
        Self { space, given, key: Key::new(seed).fold_name("draw") }
    }

    pub(super) fn draw(&self, number: usize) -> Configuration {
        match self.given.get(number) {
            Some(given) => given.clone(),
            None => self.space.draw(self.key.fold(number as u64)),
        }
    }

    pub(super) fn given(&self) -> usize {
        self.given.len()
    }

    pub(super) fn space(&self) -> &Space {
        &self.space
    }
}

/// The distinct configurations of a sequence, and a record of the repeats.
#[derive(Clone, Debug, Default)]
pub(super) struct Distinct {
    trials: BTreeMap<String, TrialId>,
    repeats: Vec<Repeat>,
}

impl Distinct {
    /// Records a draw as `trial`; returns false if it equals an earlier one.
    pub(super) fn take(&mut self, draw: usize, configuration: &Configuration, trial: TrialId) -> bool {
        match self.trials.insert(configuration.identity(), trial) {
            None => true,
            Some(earlier) => {
                self.trials.insert(configuration.identity(), earlier);
                self.repeats.push(Repeat { draw, trial: earlier });
                false
            }
        }
    }

    /// The distinct configurations among many draws, as trials from `first` on.
    pub(super) fn take_all(
        &mut self,
        draws: impl IntoIterator<Item = (usize, Configuration)>,
        first: usize,
    ) -> Vec<Configuration> {
        let mut taken = Vec::new();
        for (draw, configuration) in draws {
            if self.take(draw, &configuration, TrialId(first + taken.len())) {
                taken.push(configuration);
            }
        }
        taken
    }

    pub(super) fn repeats(&self) -> &[Repeat] {
        &self.repeats
    }
}
