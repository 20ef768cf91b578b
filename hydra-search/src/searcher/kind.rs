//! Building the searcher of a spec.

use super::Searcher;
use super::asha::Asha;
use super::bracket::whole_log;
use super::draws::Draws;
use super::grid::grid;
use super::halving::Halving;
use super::hyperband::{Hyperband, brackets};
use super::pbt::{Evolution, Pbt};
use super::random::random;
use super::tpe::{Batches, Tpe};
use crate::spec::{Method, Spec, SpecError};

/// The searcher of a spec.
///
/// # Errors
/// [`SpecError`] if the spec is invalid.
pub(crate) fn build(spec: &Spec, seed: u64) -> Result<Box<dyn Searcher>, SpecError> {
    spec.check()?;
    let draws = Draws::new(spec.space.clone(), spec.given.clone(), seed);
    let (trials, steps) = (spec.draws(), spec.steps);
    let (eta, first_rung) = (spec.eta.unwrap_or(3), spec.first_rung.unwrap_or(1));
    Ok(match spec.search {
        Method::Grid => Box::new(grid(&spec.space, spec.given.clone(), steps)?),
        Method::Random => Box::new(random(&draws, trials, steps)),
        Method::Halving => Box::new(Halving::new(&draws, trials, steps, eta, first_rung)),
        Method::Hyperband => {
            Box::new(Hyperband::new(&draws, steps, eta, most_halvings(trials, steps / first_rung, eta)))
        }
        Method::Asha => {
            Box::new(Asha::new(&draws, trials, steps, eta, first_rung, spec.workers.unwrap_or(8)))
        }
        Method::Pbt => Box::new(Pbt::new(&draws, trials, seed, evolution(spec))),
        Method::Tpe => {
            let (startup, at_once) = (spec.startup.unwrap_or(10), spec.at_once.unwrap_or(4));
            Box::new(Tpe::new(draws, trials, steps, seed, Batches { startup, at_once }))
        }
    })
}

fn evolution(spec: &Spec) -> Evolution {
    Evolution {
        steps: spec.steps,
        interval: spec.interval.unwrap_or(spec.steps / 10).max(1),
        share: spec.share.unwrap_or(0.2),
        resample: spec.resample.unwrap_or(0.25),
        explored: spec.explored(),
    }
}

/// The largest number of halvings for Hyperband that draws no more than `trials`, with `eta^halvings` at most
/// `ratio`.
fn most_halvings(trials: usize, ratio: usize, eta: usize) -> u32 {
    let drawn =
        |halvings: u32| -> usize { brackets(1, eta, halvings).iter().map(|rungs| rungs[0].trials).sum() };
    let fits = |halvings: &u32| drawn(*halvings) <= trials;
    (0..=whole_log(ratio, eta)).take_while(fits).last().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hyperband_draws_no_more_than_it_may() {
        // Brackets of 81, 34, 15, 8 and 5; of 27, 12, 6 and 4; of 9, 5 and 3; of 3 and 2; of 1.
        let most = |trials| most_halvings(trials, 81, 3);
        assert_eq!([1, 4, 5, 16, 17, 48, 49, 142, 143, 1_000].map(most), [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]);
        assert_eq!(most_halvings(1_000, 26, 3), 2, "a trial goes from the first rung to the last");
    }
}
