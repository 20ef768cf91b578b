//! Random search (Bergstra and Bengio, "Random search for hyper-parameter optimization", JMLR 13, 2012).

use super::draws::Draws;
use super::full::Full;

/// `trials` draws, all trained to the end.
pub(super) fn random(draws: &Draws, trials: usize, steps: usize) -> Full {
    Full::new((0..trials).map(|number| draws.draw(number)), steps)
}
