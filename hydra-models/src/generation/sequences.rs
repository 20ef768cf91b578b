//! The sequences that a model generates, as the data of its rounds.

use super::{KvCache, Sampling};
use crate::parts::SEQUENCES;
use hydra_core::{Batch, Dataset, DatasetError, HostActivation, HostTensor, Key, Metric, Rounds};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The tokens of a prompt that are computed in one round, at most.
pub(super) const CHUNK: usize = 512;

/// A prompt to continue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// Its tokens, at least one.
    pub ids: Vec<u32>,
    /// The number of the sample, for several samples of one prompt.
    pub sample: usize,
}

/// When sequences end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The maximum number of new tokens of a sequence, at least one.
    pub new_tokens: usize,
    /// The maximum number of tokens of a sequence: the model's positions.
    pub positions: usize,
    /// The tokens that end a sequence.
    pub ends: Vec<u32>,
    /// The bytes of the key-value cache that the sequences in it may have together. It has at least one sequence.
    pub cache_bytes: u64,
    /// The maximum number of sequences whose newest tokens are one item.
    pub item_sequences: usize,
}

impl Limits {
    /// The number of sequences that an item may have on every device, however small.
    pub const FEW_SEQUENCES: usize = 64;

    /// The sequences of an item so that their logits for this vocabulary, and copies of them, are at most a quarter of a device's
    /// memory; at least [`Self::FEW_SEQUENCES`]. More of them in one item hide more of the promotion of the next shard.
    pub fn item_sequences(vocabulary: usize, device_bytes: u64) -> usize {
        let bytes = (4 * size_of::<f32>() * vocabulary.max(1)) as u64;
        (device_bytes / 4 / bytes).clamp(Self::FEW_SEQUENCES as u64, SEQUENCES as u64) as usize
    }

    /// The most tokens that the sequence of a prompt can have.
    pub fn tokens(&self, prompt: usize) -> usize {
        prompt.saturating_add(self.new_tokens).min(self.positions)
    }
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// With a token that ends sequences.
    End,
    /// It has a text that ends sequences.
    Stop,
    /// It has the maximum number of tokens.
    Length,
}

/// What was generated for a prompt.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Generated {
    /// The new tokens, with the one that ended the sequence.
    pub ids: Vec<u32>,
    /// The sum of the logarithms of their probabilities, before all processors of [`Sampling`].
    pub logprob: f64,
    /// Why it ended; `None` while it goes on.
    pub ended: Option<Ended>,
}

/// Called after each new token of a prompt, by number; returns whether the sequence ends with it.
type OnToken = Box<dyn Fn(usize, &Generated) -> bool + Send + Sync>;

/// Values of metrics of all generated texts, and a report on them as JSON.
pub type Judged = (Vec<f64>, Option<String>);

/// The error of a judge.
type Failure = Box<dyn std::error::Error + Send + Sync>;

type Judge = Box<dyn Fn(&[Generated]) -> Result<Judged, Failure> + Send + Sync>;

/// The sequences of some prompts. In the order of the prompts, as many as the cache has memory for are in it at a time.
///
/// An item of a round is the next tokens of one prompt, or the newest tokens of several sequences.
pub struct Sequences {
    prompts: Vec<Prompt>,
    limits: Limits,
    sampling: Sampling,
    cache: KvCache,
    on_token: OnToken,
    metrics: Vec<Metric>,
    judge: Option<Judge>,
    state: Mutex<SequenceState>,
}

#[derive(Default)]
struct SequenceState {
    /// What the last evaluation generated, also if it was interrupted.
    finished: Option<Vec<Generated>>,
    /// What is known of it.
    judged: Judged,
    generated: Vec<Generated>,
    /// The prompts that have not begun.
    waiting: VecDeque<usize>,
    /// The sequences in the cache, in the order in which they began.
    active: Vec<Active>,
    /// The items of this round.
    items: Vec<Item>,
}

/// A sequence in the cache; its slot is the number of its prompt.
struct Active {
    prompt: usize,
    key: Key,
    ids: Vec<u32>,
    /// The tokens whose keys and values are in the cache.
    cached: usize,
    /// Whether the cache has memory for it.
    begun: bool,
}

/// The tokens of sequences that are computed together.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Item {
    /// These tokens of one sequence's prompt.
    Chunk(usize, Range<usize>),
    /// The newest tokens of these sequences.
    Newest(Vec<usize>),
}

impl Sequences {
    /// The sequences of these prompts, which keep their keys and values in `cache`. `on_token` is called after each round
    /// for each new token, in the order of the prompts.
    ///
    /// # Panics
    /// If a prompt is empty or has all positions, or no tokens are to be generated.
    pub fn new(
        prompts: Vec<Prompt>,
        limits: Limits,
        sampling: Sampling,
        cache: KvCache,
        on_token: impl Fn(usize, &Generated) -> bool + Send + Sync + 'static,
    ) -> Self {
        let fits = |prompt: &Prompt| (1..limits.positions).contains(&prompt.ids.len());
        assert!(
            prompts.iter().all(fits) && limits.new_tokens > 0,
            "a prompt has tokens, and positions after them"
        );
        let (on_token, state) = (Box::new(on_token), Mutex::default());
        let (metrics, judge) = (Vec::new(), None);
        let all = Self { prompts, limits, sampling, cache, on_token, metrics, judge, state };
        all.begin(&mut all.state());
        all
    }

    /// Adds metrics of all generated texts, and a report on them. `judge` returns a value for each metric; its error is that of
    /// [`next_round`](Rounds::next_round).
    pub fn judged(
        self,
        metrics: Vec<Metric>,
        judge: impl Fn(&[Generated]) -> Result<Judged, Failure> + Send + Sync + 'static,
    ) -> Self {
        Self { metrics, judge: Some(Box::new(judge)), ..self }
    }

    /// Begins with the first round.
    fn begin(&self, state: &mut SequenceState) {
        state.generated = vec![Generated::default(); self.prompts.len()];
        state.waiting = (0..self.prompts.len()).collect();
        self.plan(state);
    }

    /// Ends an evaluation, and begins the next one.
    fn end(&self, state: &mut SequenceState) -> Result<(), DatasetError> {
        let generated = std::mem::take(&mut state.generated);
        let judged = self.judge.as_ref().map(|judge| judge(&generated)).transpose();
        state.finished = Some(generated);
        self.begin(state);
        let dataset = || self.name().to_owned();
        let judged = judged.map_err(|source| DatasetError::Round { dataset: dataset(), source })?;
        state.judged = judged.unwrap_or_default();
        Ok(())
    }

    /// The tokens of the longest sequence that these prompts can have, at least those of the largest item of several sequences.
    pub fn longest(prompts: &[Prompt], limits: &Limits) -> usize {
        let most = limits.item_sequences.min(prompts.len());
        prompts.iter().map(|prompt| limits.tokens(prompt.ids.len())).fold(most, usize::max)
    }

    /// How tokens are chosen.
    pub fn sampling(&self) -> Sampling {
        self.sampling
    }

    /// What was generated, in the order of the prompts, by the last evaluation, or by the first one so far.
    pub fn generated(&self) -> Vec<Generated> {
        let state = self.state();
        state.finished.as_ref().unwrap_or(&state.generated).clone()
    }

    /// Records that `tokens` more tokens of a sequence are in the cache, and the token after them.
    fn computed(&self, state: &mut SequenceState, slot: usize, tokens: usize, token: u32, logprob: f64) {
        let SequenceState { active, generated, .. } = state;
        let Some(of) = active.iter_mut().find(|of| of.prompt == slot) else { return };
        of.cached += tokens;
        if of.cached < of.ids.len() {
            return;
        }
        of.ids.push(token);
        let made = &mut generated[slot];
        made.ids.push(token);
        made.logprob += logprob;
        let stops = (self.on_token)(slot, made);
        let most = self.limits.tokens(self.prompts[slot].ids.len());
        made.ended = match () {
            () if self.limits.ends.contains(&token) => Some(Ended::End),
            () if stops => Some(Ended::Stop),
            () if of.ids.len() >= most => Some(Ended::Length),
            () => None,
        };
    }

    /// Begins sequences for which the cache has memory, and plans the items of a round.
    fn plan(&self, state: &mut SequenceState) {
        let bytes =
            |prompt: usize| self.cache.form().bytes(self.limits.tokens(self.prompts[prompt].ids.len()));
        let mut used: u64 = state.active.iter().map(|of| bytes(of.prompt)).sum();
        while let Some(next) = state.waiting.front().copied() {
            used += bytes(next);
            if used > self.limits.cache_bytes && !state.active.is_empty() {
                break;
            }
            state.waiting.pop_front();
            let Prompt { ids, sample } = self.prompts[next].clone();
            let key = self.sampling.key(&ids, sample);
            state.active.push(Active { prompt: next, key, ids, cached: 0, begun: false });
        }
        let is_prompt = |of: &&Active| of.cached < self.prompts[of.prompt].ids.len();
        let chunk = |of: &Active| {
            let end = self.prompts[of.prompt].ids.len().min(of.cached + CHUNK);
            Item::Chunk(of.prompt, of.cached..end)
        };
        let chunks = state.active.iter().filter(is_prompt).map(chunk);
        let newest: Vec<usize> =
            state.active.iter().filter(|of| !is_prompt(of)).map(|of| of.prompt).collect();
        state.items = chunks
            .chain(newest.chunks(self.limits.item_sequences).map(|slots| Item::Newest(slots.to_vec())))
            .collect();
    }

    /// Chooses the next token of the sequence in a slot; for a negative slot, which pilot passes have, the first one.
    pub(super) fn choose(&self, slot: i32, logits: &[f32]) -> (u32, f64) {
        let Ok(slot) = usize::try_from(slot) else { return self.sampling.choose(logits, &[], Key::new(0)) };
        let (ids, key) = {
            let state = self.state();
            let of = state.active.iter().find(|of| of.prompt == slot);
            of.map_or_else(|| (Vec::new(), Key::new(0)), |of| (of.ids.clone(), of.key))
        };
        self.sampling.choose(logits, &ids, key)
    }

    fn state(&self) -> MutexGuard<'_, SequenceState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Rounds for Sequences {
    /// Receives the rows of a round: for each sequence of each item, the chosen token and the logarithm of its probability.
    /// Plans the next round, and returns whether there is one.
    fn next_round(&self, rows: &[f32]) -> Result<bool, DatasetError> {
        let mut state = self.state();
        let mut rows = rows.chunks_exact(2).map(|row| (row[0] as u32, f64::from(row[1])));
        for item in std::mem::take(&mut state.items) {
            let (sequences, tokens) = match item {
                Item::Chunk(slot, tokens) => (vec![slot], tokens.len()),
                Item::Newest(slots) => (slots, 1),
            };
            for (slot, (token, logprob)) in sequences.into_iter().zip(rows.by_ref()) {
                self.computed(&mut state, slot, tokens, token, logprob);
            }
        }
        let (going, over): (Vec<Active>, Vec<Active>) = std::mem::take(&mut state.active)
            .into_iter()
            .partition(|of| state.generated[of.prompt].ended.is_none());
        over.iter().for_each(|of| self.cache.end(of.prompt as i32));
        state.active = going;
        self.plan(&mut state);
        let goes_on = !state.items.is_empty();
        if !goes_on {
            self.end(&mut state)?;
        }
        Ok(goes_on)
    }

    /// Assumes that all sequences go on to their largest length, and that as many as now are in the cache.
    fn later_items(&self) -> usize {
        let state = self.state();
        let most = |prompt: usize| self.limits.tokens(self.prompts[prompt].ids.len());
        let active = state.active.iter().map(|of| (most(of.prompt) - of.ids.len()).saturating_sub(1));
        let waiting = state.waiting.iter().map(|prompt| most(*prompt) - self.prompts[*prompt].ids.len());
        (active.sum::<usize>() + waiting.sum::<usize>())
            .div_ceil(state.active.len().clamp(1, self.limits.item_sequences))
    }

    fn release(&self) {
        let mut state = self.state();
        let has_tokens = state.generated.iter().any(|made| !made.ids.is_empty());
        if !has_tokens && !state.active.iter().any(|of| of.begun) {
            return;
        }
        std::mem::take(&mut state.active).iter().for_each(|of| self.cache.end(of.prompt as i32));
        if has_tokens {
            state.finished = Some(std::mem::take(&mut state.generated));
        }
        self.begin(&mut state);
    }

    /// The bytes of the sequences that are in the cache at a time, at most.
    fn kept_bytes(&self) -> u64 {
        let bytes = |prompt: &Prompt| self.cache.form().bytes(self.limits.tokens(prompt.ids.len()));
        let all = self.prompts.iter().map(bytes);
        all.clone().sum::<u64>().min(self.limits.cache_bytes.max(all.max().unwrap_or(0)))
    }

    fn metrics(&self) -> Vec<(Metric, f64)> {
        let values = self.state().judged.0.clone();
        let value = |at: usize| values.get(at).copied().unwrap_or(f64::NAN);
        self.metrics.iter().cloned().enumerate().map(|(at, metric)| (metric, value(at))).collect()
    }

    fn report(&self) -> Option<String> {
        self.state().judged.1.clone()
    }
}

/// The batch of these tokens: their ids, positions and slots, and the places of the last ones of sequences.
fn batch(ids: Vec<i32>, positions: Vec<i32>, slots: Vec<i32>, lasts: Vec<i32>) -> Batch {
    let units = ids.len();
    let row = |values: Vec<i32>| {
        let shape = [1, values.len()];
        HostTensor::int(values, shape)
    };
    Batch {
        inputs: HostActivation { parts: vec![row(ids), row(positions)] },
        targets: HostActivation { parts: vec![row(slots), row(lasts)] },
        items: 1,
        loss_targets: 1,
        units,
    }
}

impl Dataset for Sequences {
    fn name(&self) -> &str {
        "prompts"
    }

    fn len(&self) -> usize {
        self.state().items.len()
    }

    fn batch(&self, items: &[usize]) -> Result<Batch, DatasetError> {
        let SequenceState { items: all, active, .. } = &mut *self.state();
        let (dataset, len) = (self.name().to_owned(), all.len());
        let out_of_range = |index: usize| DatasetError::OutOfRange { dataset: dataset.clone(), index, len };
        let [index] = *items else { return Err(out_of_range(items.len())) };
        let item = all.get(index).ok_or_else(|| out_of_range(index))?;
        let (mut ids, mut positions, mut slots, mut lasts) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let (sequences, chunk) = match item {
            Item::Chunk(slot, tokens) => (vec![*slot], Some(tokens.clone())),
            Item::Newest(slots) => (slots.clone(), None),
        };
        for slot in sequences {
            let of = active.iter_mut().find(|of| of.prompt == slot).ok_or_else(|| out_of_range(index))?;
            if !std::mem::replace(&mut of.begun, true) {
                self.cache.begin(slot as i32, self.limits.tokens(self.prompts[slot].ids.len()));
            }
            let tokens = chunk.clone().unwrap_or(of.cached..of.ids.len());
            ids.extend(of.ids[tokens.clone()].iter().map(|id| *id as i32));
            positions.extend(tokens.clone().map(|at| at as i32));
            slots.extend(tokens.map(|_| slot as i32));
            lasts.push(ids.len() as i32 - 1);
        }
        Ok(batch(ids, positions, slots, lasts))
    }

    /// Tokens of any sequence: as many as a chunk of the longest prompt or an item of several sequences has.
    fn largest(&self, _: usize) -> Result<Batch, DatasetError> {
        let longest = self.prompts.iter().map(|prompt| prompt.ids.len()).max().unwrap_or(1).min(CHUNK);
        let group = self.prompts.len().clamp(1, self.limits.item_sequences) as i32;
        let tokens = longest.max(group as usize) as i32;
        let last = self.limits.positions as i32 - 1;
        Ok(batch(
            vec![0; tokens as usize],
            (0..tokens).map(|at| at.min(last)).collect(),
            vec![-1; tokens as usize],
            (0..group).collect(),
        ))
    }

    fn unit(&self) -> &'static str {
        "tokens"
    }
}

#[cfg(test)]
mod tests {
    use super::super::KvCacheForm;
    use super::*;
    use hydra_core::FloatType;

    /// The rows of the next tokens of `sequences` sequences.
    fn rows(sequences: usize) -> Vec<f32> {
        [1.0, 0.0].repeat(sequences)
    }

    #[test]
    fn an_item_has_as_many_sequences_as_the_device_has_memory_for_their_logits() {
        let mib = 1 << 20;
        assert_eq!(Limits::item_sequences(4096, 0), Limits::FEW_SEQUENCES);
        assert_eq!(Limits::item_sequences(4096, 104 * mib), SEQUENCES);
        // 4 copies of 4 bytes for each of 128,000 logits: 1.95 MiB a sequence.
        assert_eq!(Limits::item_sequences(128_000, 1024 * mib), 131);
        assert_eq!(Limits::item_sequences(128_000, 104 * mib), Limits::FEW_SEQUENCES);
    }

    #[test]
    fn later_items_are_those_of_the_rounds_that_are_left() {
        let form = KvCacheForm { blocks: 1, key_heads: 1, head_width: 1, float: FloatType::F32, longest: 9 };
        let later = |prompts: usize, cached: usize| {
            let prompts = vec![Prompt { ids: vec![1, 2], sample: 0 }; prompts];
            let limits = Limits {
                new_tokens: 5,
                positions: 9,
                ends: vec![],
                cache_bytes: form.bytes(7) * cached as u64,
                item_sequences: 3,
            };
            let sequences =
                Sequences::new(prompts, limits, Sampling::default(), KvCache::new(form), |_, _| false);
            let mut counts = vec![sequences.later_items()];
            loop {
                let active = sequences.state().active.len();
                if !sequences.next_round(&rows(active)).unwrap() {
                    return counts;
                }
                counts.push(sequences.later_items());
            }
        };
        assert_eq!(later(1, 1), [4, 3, 2, 1, 0]);
        // One item has the newest tokens of all of them.
        assert_eq!(later(3, 3), [4, 3, 2, 1, 0]);
        assert_eq!(later(4, 4), [6, 4, 3, 2, 0]);
        // The second sequence begins when the first one has ended.
        assert_eq!(later(2, 1), [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]);
    }
}
