//! Cut-points of a chain: pure functions of costs and rules.

use crate::{PartitionError, Profile, ShardMemory};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::ops::Range;

/// The minimum margin in bytes.
const MIN_MARGIN: u64 = 64 << 10;

/// The maximum number of double buffer sizes to try.
const MAX_CANDIDATES: usize = 2000;

/// Returns the bytes of a budget that stay free for memory that a pilot pass cannot observe: 3% of the budget
/// if memory was measured and 25% if it is estimated from shapes, and at least 64 KiB.
pub fn margin(budget: u64, measured: bool) -> u64 {
    let percent = if measured { 3 } else { 25 };
    let share = u128::from(budget) * percent / 100;
    MIN_MARGIN.max(u64::try_from(share).unwrap_or(u64::MAX))
}

/// The constraints on every shard: its parameters fit the double buffer, so that they can be promoted while
/// another shard computes, and its peak fits the budget minus double buffer and margin. In bytes.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// The device's memory.
    pub budget: u64,
    /// The double buffer (R), one for the device and the whole run.
    pub reserve: u64,
    /// The bytes that stay free.
    pub margin: u64,
}

impl Rules {
    /// Returns the rules for a budget and a double buffer, with the [`margin`] for `measured` or estimated
    /// costs.
    pub fn new(budget: u64, reserve: u64, measured: bool) -> Self {
        Self { budget, reserve, margin: margin(budget, measured) }
    }

    /// The bytes available to a shard: the budget minus double buffer and margin.
    pub fn available(&self) -> u64 {
        self.budget.saturating_sub(self.reserve).saturating_sub(self.margin)
    }

    /// Returns whether a peak of `need` bytes fits in the available bytes.
    pub fn holds(&self, need: u64) -> bool {
        need.saturating_add(self.reserve).saturating_add(self.margin) <= self.budget
    }

    /// Half of the margin, which stays free during a run regardless of verified peaks, gradient accumulation
    /// and the parameter cache.
    pub fn spare(&self) -> u64 {
        self.margin / 2
    }

    /// Returns whether a measured peak of `peak` bytes fits in the available bytes plus half of the margin.
    /// Measurements of a pilot pass and a verification always differ slightly; half of the margin covers the
    /// difference.
    pub fn tolerates(&self, peak: u64) -> bool {
        peak.saturating_add(self.reserve).saturating_add(self.spare()) <= self.budget
    }

    /// Returns whether gradients of `gradient_bytes` bytes can be accumulated in addition to a shard's peak:
    /// the previous sum and the new one. Their size is exact, so they may use half of the margin too.
    pub fn holds_sums(&self, need: u64, gradient_bytes: u64) -> bool {
        self.tolerates(need.saturating_add(gradient_bytes.saturating_mul(2)))
    }

    /// Returns whether a shard with this memory satisfies the rules.
    pub fn fits(&self, needs: &ShardMemory) -> bool {
        needs.param_bytes <= self.reserve && self.holds(needs.peak_bytes())
    }
}

/// Cuts all layers greedily: every shard is as long as the rules allow, which gives the fewest shards.
///
/// # Errors
/// [`PartitionError::LayerTooLarge`] for the first layer that does not fit alone.
pub fn cut(profile: &Profile, rules: &Rules) -> Result<Vec<Range<usize>>, PartitionError> {
    cut_from(profile, rules, 0)
}

/// Like [`cut`], for the layers from `first` on.
pub(crate) fn cut_from(
    profile: &Profile,
    rules: &Rules,
    mut first: usize,
) -> Result<Vec<Range<usize>>, PartitionError> {
    let mut shards = Vec::new();
    while first < profile.len() {
        let end = extend(profile, rules, first);
        if end == first {
            return Err(worst(profile, rules));
        }
        shards.push(first..end);
        first = end;
    }
    Ok(shards)
}

/// Returns the end of the longest shard that starts at `first`, or `first` itself if there is none.
fn extend(profile: &Profile, rules: &Rules, first: usize) -> usize {
    let mut needs = ShardMemory::default();
    for layer in first..profile.len() {
        needs = needs.with(profile, first, layer);
        if !rules.fits(&needs) {
            return layer;
        }
    }
    profile.len()
}

/// Returns the error for the largest of the layers that do not fit alone; the budget it names suffices for
/// all layers.
fn worst(profile: &Profile, rules: &Rules) -> PartitionError {
    let need = |layer: &usize| profile.shard_memory(*layer..layer + 1).peak_bytes();
    let layer = (0..profile.len()).max_by_key(need).unwrap_or(0);
    too_large(profile, rules, layer, need(&layer))
}

/// Returns the error for a layer that does not fit alone, with a peak of `need` bytes.
pub(crate) fn too_large(profile: &Profile, rules: &Rules, layer: usize, need: u64) -> PartitionError {
    let cost = &profile.layers[layer];
    let largest = profile.layers.iter().max_by_key(|layer| layer.param_bytes).unwrap_or(cost);
    let reserve = rules.reserve.max(largest.param_bytes);
    PartitionError::LayerTooLarge {
        layer: cost.name.clone(),
        needed: smallest_budget(reserve.saturating_add(need), profile.measured),
        budget: rules.budget,
        param_bytes: cost.param_bytes,
        peak_bytes: need,
        standing_bytes: profile.standing_bytes,
        reserve,
        buffered: (largest.param_bytes == reserve).then(|| largest.name.clone()),
        margin: rules.margin,
    }
}

/// Returns the shards of user-specified cut-points.
///
/// # Errors
/// [`PartitionError::CutPoints`] if they are not ascending or not within `1..layers`, and
/// [`PartitionError::ShardTooLarge`] for the first shard that violates the rules.
pub fn check_cuts(
    profile: &Profile,
    cuts: &[usize],
    rules: &Rules,
) -> Result<Vec<Range<usize>>, PartitionError> {
    let shards = shards_between(cuts, profile.len())?;
    for (shard, range) in shards.iter().enumerate() {
        let needs = profile.shard_memory(range.clone());
        if !rules.fits(&needs) {
            return Err(shard_too_large(rules, shard, range, &needs, needs.peak_bytes()));
        }
    }
    Ok(shards)
}

/// Returns the error for a user-specified shard with a peak of `need` bytes.
pub(crate) fn shard_too_large(
    rules: &Rules,
    shard: usize,
    range: &Range<usize>,
    needs: &ShardMemory,
    need: u64,
) -> PartitionError {
    PartitionError::ShardTooLarge {
        shard,
        first: range.start,
        end: range.end,
        need,
        available: rules.available(),
        param_bytes: needs.param_bytes,
        reserve: rules.reserve,
    }
}

fn shards_between(cuts: &[usize], layers: usize) -> Result<Vec<Range<usize>>, PartitionError> {
    let inside = cuts.iter().all(|cut| (1..layers).contains(cut));
    if layers == 0 || !inside || !cuts.is_sorted_by(|a, b| a < b) {
        return Err(PartitionError::CutPoints { cuts: cuts.to_vec(), layers });
    }
    let starts = std::iter::once(0).chain(cuts.iter().copied());
    let ends = cuts.iter().copied().chain(std::iter::once(layers));
    Ok(starts.zip(ends).map(|(first, end)| first..end).collect())
}

/// A task that shares a device: its costs, and its cut-points if the user specified them.
#[derive(Clone, Copy, Debug)]
pub struct Demand<'a> {
    /// The costs of its layers.
    pub profile: &'a Profile,
    /// The user-specified cut-points, if any.
    pub cuts: Option<&'a [usize]>,
}

impl<'a> From<&'a Profile> for Demand<'a> {
    fn from(profile: &'a Profile) -> Self {
        Self { profile, cuts: None }
    }
}

impl Demand<'_> {
    fn shards(&self, budget: u64, reserve: u64) -> Result<usize, PartitionError> {
        let rules = Rules::new(budget, reserve, self.profile.measured);
        let shards = match self.cuts {
            None => cut(self.profile, &rules)?,
            Some(cuts) => check_cuts(self.profile, cuts, &rules)?,
        };
        Ok(shards.len())
    }

    /// The minimum size in bytes of a double buffer.
    fn least_reserve(&self) -> Result<u64, PartitionError> {
        let largest = self.profile.largest_layer();
        let Some(cuts) = self.cuts else { return Ok(largest) };
        let shards = shards_between(cuts, self.profile.len())?;
        Ok(shards
            .into_iter()
            .map(|range| self.profile.shard_memory(range).param_bytes)
            .fold(largest, u64::max))
    }

    /// The parameter bytes of every contiguous range of layers.
    fn range_params(&self) -> impl Iterator<Item = u64> + '_ {
        let layers = self.profile.len();
        (0..layers).flat_map(move |first| {
            (first..layers).scan(ShardMemory::default(), move |needs, layer| {
                *needs = needs.with(self.profile, first, layer);
                Some(needs.param_bytes)
            })
        })
    }
}

/// Returns the size in bytes of the double buffer (R) of a device that runs these tasks: the smallest one
/// with the minimum total number of shards.
///
/// A larger buffer allows shards with more parameters but leaves them less memory. The best size is always
/// the parameter bytes of some range of some task's layers, and at least those of the largest layer of any
/// task, because any task may be promoted. All candidates are tried, or 2000 of them evenly spaced by rank if
/// there are more; the candidates do not depend on the budget, so a larger budget never gives more shards.
///
/// # Errors
/// The error for the first task that does not fit with the smallest possible buffer, which leaves every task
/// the most memory.
pub fn choose_reserve(tasks: &[Demand<'_>], budget: u64) -> Result<u64, PartitionError> {
    best_reserve(tasks, budget, least_reserve(tasks)?, u64::MAX)
}

/// How devices overlap the shard tasks of a pass with copies and the host's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pipeline {
    /// The number of shards of a model that is cut.
    pub depth: usize,
    /// True if models that fit as one shard are cut too.
    pub cuts_all: bool,
}

/// Returns the size in bytes of a double buffer that is at most `reserve`, the one that [`choose_reserve`] returned: that
/// of the `depth`-th part of the largest task of several shards, or of the largest layer or task of one shard.
///
/// A device that computes on one shard while copies and the host work on others waits for the first and the last of
/// them in every pass. The more shards there are, the shorter is this wait. Tasks of one shard stay so, unless
/// `cuts_all`.
pub fn pipelined_reserve(
    tasks: &[Demand<'_>],
    budget: u64,
    reserve: u64,
    Pipeline { depth, cuts_all }: Pipeline,
) -> u64 {
    let params = |task: &Demand<'_>| task.profile.shard_memory(0..task.profile.len()).param_bytes;
    let is_one_shard =
        |task: &&Demand<'_>| !cuts_all && task.shards(budget, reserve).is_ok_and(|shards| shards == 1);
    let (whole, cut): (Vec<&Demand<'_>>, Vec<&Demand<'_>>) = tasks.iter().partition(is_one_shard);
    let least = whole.into_iter().map(params).chain(least_reserve(tasks)).max().unwrap_or(reserve);
    let share = |task| params(task).div_ceil(depth.max(1) as u64);
    let most = cut.into_iter().map(share).max().unwrap_or(0).min(reserve);
    best_reserve(tasks, budget, least, most).unwrap_or(reserve)
}

/// The smallest double buffer that all tasks can use.
fn least_reserve(tasks: &[Demand<'_>]) -> Result<u64, PartitionError> {
    tasks.iter().try_fold(0, |least, task| Ok(task.least_reserve()?.max(least)))
}

/// The smallest double buffer of `least` bytes, or of more and at most `most`, with the minimum total number of shards.
fn best_reserve(tasks: &[Demand<'_>], budget: u64, least: u64, most: u64) -> Result<u64, PartitionError> {
    let mut best = (total(tasks, budget, least)?, least);
    let between = |reserve: &u64| *reserve > least && *reserve <= most;
    let ranges: BTreeSet<u64> = tasks.iter().flat_map(Demand::range_params).filter(between).collect();
    for reserve in thin_out(ranges.into_iter().collect()) {
        if let Ok(shards) = total(tasks, budget, reserve) {
            best = best.min((shards, reserve));
        }
    }
    Ok(best.1)
}

fn total(tasks: &[Demand<'_>], budget: u64, reserve: u64) -> Result<usize, PartitionError> {
    tasks.iter().map(|task| task.shards(budget, reserve)).sum()
}

/// Returns at most [`MAX_CANDIDATES`] of the candidates, including the last.
fn thin_out(candidates: Vec<u64>) -> Vec<u64> {
    let n = candidates.len();
    if n <= MAX_CANDIDATES {
        return candidates;
    }
    (1..=MAX_CANDIDATES).map(|i| candidates[i * n / MAX_CANDIDATES - 1]).collect()
}

/// The smallest budget in bytes with which this model can be trained alone on a device: every layer fits
/// as a separate shard, with a double buffer for the largest.
pub fn min_device_memory_bytes(profile: &Profile) -> u64 {
    let need = (0..profile.len()).map(|k| profile.shard_memory(k..k + 1).peak_bytes()).max().unwrap_or(0);
    smallest_budget(profile.largest_layer().saturating_add(need), profile.measured)
}

/// The smallest budget in bytes with which this model, alone on a device, is one shard. The double buffer
/// also holds the whole model, since the rules apply to every shard.
pub fn single_shard_bytes(profile: &Profile) -> u64 {
    let needs = profile.shard_memory(0..profile.len());
    smallest_budget(needs.param_bytes.saturating_add(needs.peak_bytes()), profile.measured)
}

/// Returns the smallest budget that holds `bytes` in addition to its own margin. A budget minus its margin
/// never decreases as the budget grows, so this is a binary search.
fn smallest_budget(bytes: u64, measured: bool) -> u64 {
    let holds = |budget: u64| bytes.saturating_add(margin(budget, measured)) <= budget;
    let (mut low, mut high) = (bytes, bytes.saturating_add(MIN_MARGIN).saturating_mul(2));
    while low < high {
        let middle = low + (high - low) / 2;
        if holds(middle) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    low
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{LayerCost, TiedBuffer};
    use proptest::prelude::*;

    fn profile_of(sizes: &[[u64; 5]], tie: Option<(usize, usize, u64)>, measured: bool) -> Profile {
        let last = sizes.len() - 1;
        let layer = |(k, [params, boundary, saved, workspace, gradients]): (usize, &[u64; 5])| LayerCost {
            name: format!("layer{k}"),
            param_bytes: *params,
            gradient_bytes: *gradients,
            input_bytes: *boundary,
            output_bytes: if k == last { 4 } else { sizes[k + 1][1] },
            input_gradient_bytes: if k == 0 { 0 } else { *boundary },
            output_gradient_bytes: if k == last { 0 } else { sizes[k + 1][1] },
            saved_bytes: *saved,
            peak_bytes: saved + workspace + gradients + boundary,
            forward_peak_bytes: workspace + boundary,
            ..LayerCost::default()
        };
        let mut layers: Vec<LayerCost> = sizes.iter().enumerate().map(layer).collect();
        let tied = tie.map(|(a, b, bytes)| (a % sizes.len(), b % sizes.len(), bytes)).filter(|t| t.0 < t.1);
        if let Some((a, b, bytes)) = tied {
            layers[a].param_bytes += bytes;
            layers[b].param_bytes += bytes;
        }
        let tied = tied.map(|(a, b, bytes)| TiedBuffer { bytes, layers: vec![a, b] }).into_iter().collect();
        Profile { layers, tied, standing_bytes: 0, measured }
    }

    prop_compose! {
        fn profiles(most: usize)(
            sizes in prop::collection::vec(prop::array::uniform5(1u64..1 << 20), 1..=most),
            tie in prop::option::of((0..most, 0..most, 1u64..1 << 20)),
            standing_bytes in 0u64..1 << 20,
            measured: bool,
        ) -> Profile {
            Profile { standing_bytes, ..profile_of(&sizes, tie, measured) }
        }
    }

    fn shards(profile: &Profile, budget: u64) -> Result<usize, PartitionError> {
        let reserve = choose_reserve(&[profile.into()], budget)?;
        Ok(cut(profile, &Rules::new(budget, reserve, profile.measured))?.len())
    }

    proptest! {
        #[test]
        fn shards_cover_the_layers_and_obey_the_rules(profile in profiles(12), share in 0.0f64..1.5) {
            let (min, single) = (min_device_memory_bytes(&profile), single_shard_bytes(&profile));
            let budget = min + ((single - min) as f64 * share) as u64;
            let reserve = choose_reserve(&[(&profile).into()], budget).unwrap();
            prop_assert!(reserve >= profile.largest_layer());
            let rules = Rules::new(budget, reserve, profile.measured);
            let shards = cut(&profile, &rules).unwrap();
            prop_assert_eq!(shards[0].start, 0);
            prop_assert_eq!(shards[shards.len() - 1].end, profile.len());
            prop_assert!(shards.windows(2).all(|w| w[0].end == w[1].start));
            for range in &shards {
                let needs = profile.shard_memory(range.clone());
                prop_assert!(needs.param_bytes <= reserve);
                prop_assert!(needs.peak_bytes() + reserve + rules.margin <= budget);
            }
            let cuts: Vec<usize> = shards[1..].iter().map(|s| s.start).collect();
            prop_assert_eq!(check_cuts(&profile, &cuts, &rules).unwrap(), shards);
        }

        #[test]
        fn the_smallest_budget_works_and_one_byte_less_does_not(profile in profiles(12)) {
            let min = min_device_memory_bytes(&profile);
            prop_assert!(shards(&profile, min).is_ok());
            let refused = matches!(shards(&profile, min - 1), Err(PartitionError::LayerTooLarge { .. }));
            prop_assert!(refused);
        }

        #[test]
        fn the_budget_of_one_shard_is_exact(profile in profiles(12)) {
            let single = single_shard_bytes(&profile);
            prop_assert_eq!(shards(&profile, single).unwrap(), 1);
            match shards(&profile, single - 1) {
                Ok(n) => prop_assert!(n > 1),
                Err(_) => prop_assert_eq!(single, min_device_memory_bytes(&profile)),
            }
        }

        #[test]
        fn more_memory_never_gives_more_shards(profile in profiles(12), a in 0.0f64..1.0, b in 0.0f64..1.0) {
            let (min, single) = (min_device_memory_bytes(&profile), single_shard_bytes(&profile));
            let at = |share: f64| min + ((single - min) as f64 * share) as u64;
            let (small, large) = (at(a.min(b)), at(a.max(b)));
            prop_assert!(shards(&profile, small).unwrap() >= shards(&profile, large).unwrap());
        }

        #[test]
        fn no_other_cuts_and_no_other_buffer_give_fewer_shards(profile in profiles(6), share in 0.0f64..1.0) {
            let (min, single) = (min_device_memory_bytes(&profile), single_shard_bytes(&profile));
            let budget = min + ((single - min) as f64 * share) as u64;
            let n = profile.len();
            let best = (0u32..1 << (n - 1)).filter_map(|mask| {
                let cuts: Vec<usize> = (1..n).filter(|k| mask >> (k - 1) & 1 == 1).collect();
                let demand = Demand { profile: &profile, cuts: Some(&cuts) };
                // The smallest buffer that holds the shards leaves them the most memory.
                demand.shards(budget, demand.least_reserve().unwrap()).ok()
            });
            prop_assert_eq!(shards(&profile, budget).unwrap(), best.min().unwrap());
        }

        #[test]
        fn no_other_buffer_gives_the_tasks_of_a_device_fewer_shards(
            one in profiles(4), other in profiles(4), share in 0.0f64..1.0,
        ) {
            let tasks = [Demand::from(&one), Demand::from(&other)];
            let whole: u64 = [&one, &other].map(single_shard_bytes).iter().sum();
            let budget = (whole as f64 * share) as u64;
            // The fewest shards of a task over all of its cuts.
            let fewest = |profile: &Profile, reserve: u64| {
                let rules = Rules::new(budget, reserve, profile.measured);
                let cuts = |mask: u32| (1..profile.len()).filter(|k| mask >> (k - 1) & 1 == 1).collect::<Vec<_>>();
                let counts = (0..1 << (profile.len() - 1)).filter_map(|mask| check_cuts(profile, &cuts(mask), &rules).ok());
                counts.map(|shards| shards.len()).min()
            };
            let params = tasks.iter().flat_map(Demand::range_params);
            let largest = one.largest_layer().max(other.largest_layer());
            let every = params.filter(|reserve| *reserve >= largest);
            let best = every.filter_map(|r| Some((fewest(&one, r)? + fewest(&other, r)?, r))).min();
            match choose_reserve(&tasks, budget) {
                Ok(reserve) => prop_assert_eq!(best.map(|(_, reserve)| reserve), Some(reserve)),
                Err(_) => prop_assert_eq!(best, None),
            }
        }

        #[test]
        fn what_a_refusal_asks_for_is_exactly_enough(
            profile in profiles(8), budget in 1u64..1 << 23, reserve in 0u64..1 << 20,
        ) {
            let rules = Rules::new(budget, reserve, profile.measured);
            if let Err(error) = cut(&profile, &rules) {
                let PartitionError::LayerTooLarge { needed, reserve: buffer, .. } = error else {
                    panic!("{error}");
                };
                let cuts = |b: u64| cut(&profile, &Rules::new(b, buffer, profile.measured)).is_ok();
                prop_assert!(buffer >= reserve && cuts(needed) && !cuts(needed - 1));
            }
        }
    }

    #[test]
    fn the_buffer_is_the_devices_and_holds_the_largest_layer_of_any_task() {
        let small = profile_of(&[[100, 10, 10, 10, 10]; 4], None, true);
        let large = profile_of(&[[5000, 10, 10, 10, 10]; 2], None, true);
        let reserve = choose_reserve(&[(&small).into(), (&large).into()], 1 << 20).unwrap();
        // With a buffer for the larger model both are uncut, which no smaller buffer achieves.
        assert_eq!(reserve, 10_000);
        let tight = min_device_memory_bytes(&large);
        assert_eq!(choose_reserve(&[(&small).into(), (&large).into()], tight).unwrap(), 5000);
        assert_eq!(choose_reserve(&[], 1).unwrap(), 0);
    }

    #[test]
    fn a_pipeline_has_shards_of_a_share_of_the_parameters() {
        let model = profile_of(&[[1000, 10, 10, 10, 10]; 12], None, true);
        let shards = |budget: u64, depth: usize, cuts_all: bool| {
            let tasks = [Demand::from(&model)];
            let pipeline = Pipeline { depth, cuts_all };
            let reserve =
                pipelined_reserve(&tasks, budget, choose_reserve(&tasks, budget).unwrap(), pipeline);
            cut(&model, &Rules::new(budget, reserve, true)).unwrap().len()
        };
        let single = single_shard_bytes(&model);
        let spilled = |depth: usize| shards(single - 1, depth, false);
        assert_eq!([1, 2, 3, 4, 5, 12, 99].map(spilled), [2, 2, 3, 4, 6, 12, 12]);
        assert_eq!([false, true].map(|cuts_all| shards(single, 4, cuts_all)), [1, 4]);
        assert_eq!(shards(min_device_memory_bytes(&model), 4, false), 12);
    }

    #[test]
    fn a_pipeline_cuts_no_task_of_one_shard() {
        let small = profile_of(&[[100_000, 10, 10, 10, 10]; 4], None, true);
        let large = profile_of(&[[100_000, 10, 10, 10, 10]; 40], None, true);
        let tasks = [Demand::from(&small), Demand::from(&large)];
        let budget = single_shard_bytes(&large) / 2;
        let reserve = choose_reserve(&tasks, budget).unwrap();
        let pipelined = pipelined_reserve(&tasks, budget, reserve, Pipeline { depth: 20, cuts_all: false });
        assert!(pipelined < reserve);
        let shards = |profile: &Profile| cut(profile, &Rules::new(budget, pipelined, true)).unwrap().len();
        assert_eq!([shards(&small), shards(&large)], [1, 10]);
    }

    #[test]
    fn what_fits_to_the_byte_fits() {
        let rules = Rules { budget: 1000, reserve: 300, margin: 100 };
        assert_eq!((rules.available(), rules.holds(600), rules.holds(601)), (600, true, false));
        assert_eq!((rules.tolerates(650), rules.tolerates(651)), (true, false));
        let none = Rules { budget: 0, ..rules };
        assert_eq!((none.available(), none.holds(0)), (0, false));
    }

    #[test]
    fn a_refusal_names_the_buffers_layer_only_where_it_is_the_models_own() {
        let profile = profile_of(&[[1000, 8, 8, 8, 8]; 2], None, true);
        let buffered = |reserve| match cut(&profile, &Rules::new(10, reserve, true)) {
            Err(PartitionError::LayerTooLarge { buffered, .. }) => buffered,
            fits => panic!("{fits:?}"),
        };
        assert_eq!((buffered(0), buffered(1001)), (Some("layer1".to_owned()), None));
    }

    #[test]
    fn cuts_by_hand_are_refused_with_the_shard_and_the_numbers() {
        let profile = profile_of(&[[1000, 8, 8, 8, 8]; 4], None, true);
        let rules = Rules { budget: 4000, reserve: 1500, margin: 100 };
        assert_eq!(check_cuts(&profile, &[1, 2, 3], &rules).unwrap().len(), 4);
        let error = check_cuts(&profile, &[1, 3], &rules).unwrap_err();
        let message = error.to_string();
        assert!(message.contains("shard 1 (layers 1 to 2)"), "{message}");
        assert!(matches!(
            error,
            PartitionError::ShardTooLarge { shard: 1, available: 2400, reserve: 1500, .. }
        ));
        for bad in [&[0, 1][..], &[4], &[2, 1], &[1, 1]] {
            let error = check_cuts(&profile, bad, &rules).unwrap_err();
            assert!(error.to_string().contains("expected ascending numbers from 1 to 3"), "{error}");
        }
    }

    #[test]
    fn cuts_by_hand_raise_the_buffer() {
        let profile = profile_of(&[[1000, 8, 8, 8, 8]; 4], None, true);
        let demand = Demand { profile: &profile, cuts: Some(&[3]) };
        assert_eq!(choose_reserve(&[demand], 1 << 20).unwrap(), 3000);
        let wide = Demand { profile: &profile, cuts: Some(&[]) };
        let min = min_device_memory_bytes(&profile);
        assert!(matches!(choose_reserve(&[wide], min), Err(PartitionError::ShardTooLarge { .. })));
    }

    #[test]
    fn many_candidates_are_thinned_out_and_keep_the_largest() {
        let thin = thin_out((0..100_000).collect());
        assert_eq!((thin.len(), thin[MAX_CANDIDATES - 1]), (MAX_CANDIDATES, 99_999));
        assert_eq!(thin_out(vec![1, 2]), [1, 2]);
    }

    #[test]
    fn the_margin_is_a_share_with_a_floor() {
        assert_eq!(margin(1 << 20, true), 64 << 10);
        assert_eq!(margin(100 << 20, true), 3 << 20);
        assert_eq!(margin(100 << 20, false), 25 << 20);
    }
}
