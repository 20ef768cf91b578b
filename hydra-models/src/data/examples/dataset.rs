//! Examples as a dataset.

use super::encode::Example;
use crate::data::{DataError, TokenForm, Tokens};
use crate::ops::IGNORED;
use hydra_core::{Batch, Dataset, DatasetError, HostActivation, HostTensor};
use std::fmt;
use std::sync::Arc;

/// The bit of an id that counts; ids are below it.
const COUNTS: u32 = 1 << 31;

/// Examples of up to `context` tokens; cloning it is cheap.
///
/// As a [`Dataset`] its items are the examples. A batch's inputs are ids `[items, context]`, filled up after each example
/// with a token that nothing learns from. Its targets are the same where they count, and [`IGNORED`] elsewhere; the loss
/// shifts them, so that it is a mean over the tokens that count of the whole batch, an example's first one left out.
#[derive(Clone)]
pub struct Examples {
    name: Arc<str>,
    context: usize,
    /// The id with which short examples are filled up.
    filler: u32,
    /// All ids, one example after the other.
    ids: Arc<[u32]>,
    /// The place after the last id of each example.
    ends: Arc<[u32]>,
    /// Examples that were left out.
    left_out: usize,
}

impl Examples {
    /// The examples of which something counts.
    pub(super) fn new(name: String, examples: Vec<Example>, form: &TokenForm<'_>) -> Result<Self, DataError> {
        let (context, given) = (form.context.most(), examples.len());
        if context < 2 {
            return Err(DataError::ContextTooShort { context });
        }
        let (mut ids, mut ends) = (Vec::new(), Vec::new());
        for example in examples.into_iter().filter(|example| terms(&example.counts) > 0) {
            check(&name, &example.ids, form.vocabulary)?;
            let counts = example.counts.into_iter().map(|counts| if counts { COUNTS } else { 0 });
            ids.extend(example.ids.into_iter().zip(counts).map(|(id, counts)| id | counts));
            let end =
                u32::try_from(ids.len()).map_err(|_| DataError::TooManyTokens { name: name.clone() })?;
            ends.push(end);
        }
        if ends.is_empty() {
            return Err(DataError::NothingToLearn { name, examples: given, context });
        }
        let filler = form.conventions.end.unwrap_or(0);
        let left_out = given - ends.len();
        Ok(Self { name: name.into(), context, filler, ids: ids.into(), ends: ends.into(), left_out })
    }

    /// Examples of which nothing counts within the context, and that are not items therefore.
    pub fn left_out(&self) -> usize {
        self.left_out
    }

    /// Fills examples up to so many tokens from now on, which is at least the [longest](Self::longest).
    pub(in crate::data) fn fill_up_to(&mut self, context: usize) {
        debug_assert!(context >= self.longest());
        self.context = context;
    }

    /// The longest example in tokens.
    pub fn longest(&self) -> usize {
        (0..self.ends.len()).map(|item| self.marked(item).len()).max().unwrap_or(0)
    }

    /// The ids of an example, those that count with [`COUNTS`].
    fn marked(&self, item: usize) -> &[u32] {
        let start = item.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.ids[start as usize..self.ends[item] as usize]
    }
}

/// Predictions that count: nothing predicts the first token.
fn terms(counts: &[bool]) -> usize {
    counts.iter().skip(1).filter(|counts| **counts).count()
}

fn check(name: &str, ids: &[u32], vocab_size: usize) -> Result<(), DataError> {
    let fits = |id: &u32| i32::try_from(*id).is_ok() && (*id as usize) < vocab_size;
    match ids.iter().position(|id| !fits(id)) {
        Some(position) => {
            Err(DataError::TokenOutOfRange { name: name.to_owned(), position, id: ids[position], vocab_size })
        }
        None => Ok(()),
    }
}

impl Dataset for Examples {
    fn name(&self) -> &str {
        &self.name
    }

    fn len(&self) -> usize {
        self.ends.len()
    }

    fn batch(&self, items: &[usize]) -> Result<Batch, DatasetError> {
        let (context, len) = (self.context, self.ends.len());
        let mut ids = Vec::with_capacity(items.len() * context);
        let mut targets = Vec::with_capacity(items.len() * context);
        let mut units = 0;
        for (at, &index) in items.iter().enumerate() {
            if index >= len {
                return Err(DatasetError::OutOfRange { dataset: self.name.to_string(), index, len });
            }
            let marked = self.marked(index);
            units += marked.len();
            // Ids fit: they were checked when the examples were made.
            ids.extend(marked.iter().map(|id| (id & !COUNTS) as i32));
            targets.extend(
                marked.iter().map(|id| if id & COUNTS != 0 { (id & !COUNTS) as i32 } else { IGNORED }),
            );
            ids.resize((at + 1) * context, self.filler as i32);
            targets.resize((at + 1) * context, IGNORED);
        }
        let predicted = |row: &[i32]| row.iter().skip(1).filter(|target| **target != IGNORED).count();
        let terms = targets.chunks(context).map(predicted).sum();
        let of = |ids| HostActivation::of(HostTensor::int(ids, [items.len(), context]));
        Ok(Batch { inputs: of(ids), targets: of(targets), items: items.len(), terms, units })
    }

    fn unit(&self) -> &'static str {
        "tokens"
    }
}

impl Tokens for Examples {
    fn content(&self) -> Vec<&[u32]> {
        vec![&self.ids, &self.ends]
    }

    fn tokens(&self) -> usize {
        self.ids.len()
    }
}

impl fmt::Debug for Examples {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Examples")
            .field("name", &self.name)
            .field("examples", &self.ends.len())
            .field("tokens", &self.ids.len())
            .field("context", &self.context)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::super::LossOn;
    use super::*;
    use crate::data::Context;
    use crate::tokenizer::{Conventions, Tokenizer};

    fn examples(examples: &[(&[u32], &[u8])], vocabulary: usize) -> Result<Examples, DataError> {
        let conventions = Conventions { end: Some(9), chat: None };
        let (tokenizer, conventions) = (&Tokenizer::Bytes, &conventions);
        let form = TokenForm {
            tokenizer,
            conventions,
            context: Context::AtMost(4),
            vocabulary,
            loss_on: LossOn::Completions,
        };
        let example = |(ids, counts): &(&[u32], &[u8])| Example {
            ids: ids.to_vec(),
            counts: counts.iter().map(|counts| *counts == 1).collect(),
        };
        Examples::new("the data".to_owned(), examples.iter().map(example).collect(), &form)
    }

    #[test]
    fn a_batch_is_filled_up_and_counts_what_is_to_be_said() {
        let data = examples(&[(&[1, 2, 3], &[0, 1, 1]), (&[4, 5, 6, 7], &[1, 0, 0, 1])], 10).unwrap();
        let batch = data.batch(&[1, 0]).unwrap();
        assert_eq!(batch.inputs.parts[0].as_i32(), [4, 5, 6, 7, 1, 2, 3, 9]);
        assert_eq!(batch.targets.parts[0].as_i32(), [4, -1, -1, 7, -1, 2, 3, -1]);
        assert_eq!((batch.items, batch.terms, batch.units), (2, 3, 7), "nothing predicts a first token");
        assert!(matches!(data.batch(&[2]), Err(DatasetError::OutOfRange { index: 2, len: 2, .. })));
        assert_eq!((data.longest(), data.tokens(), data.left_out()), (4, 7, 0));
    }

    #[test]
    fn examples_of_which_nothing_counts_are_left_out() {
        let data = examples(&[(&[1, 2], &[1, 0]), (&[3, 4], &[0, 1]), (&[], &[])], 10).unwrap();
        assert_eq!((data.len(), data.left_out()), (1, 2));
        assert_eq!(data.batch(&[0]).unwrap().inputs.parts[0].as_i32(), [3, 4, 9, 9]);
        let error = examples(&[(&[1, 2], &[1, 0])], 10).unwrap_err().to_string();
        assert!(error.contains("1 example") && error.contains("context of 4"), "{error}");
    }

    #[test]
    fn an_id_that_the_model_does_not_have_is_named() {
        let error = examples(&[(&[1, 300], &[0, 1])], 256).unwrap_err();
        assert!(matches!(error, DataError::TokenOutOfRange { position: 1, id: 300, .. }), "{error}");
    }

    #[test]
    fn what_counts_is_part_of_the_content() {
        let one = examples(&[(&[1, 2], &[0, 1]), (&[3, 4], &[0, 1])], 10).unwrap();
        let other = examples(&[(&[1, 2], &[1, 1]), (&[3, 4], &[0, 1])], 10).unwrap();
        assert_eq!(one.content(), one.clone().content());
        assert_ne!(one.content(), other.content());
    }
}
