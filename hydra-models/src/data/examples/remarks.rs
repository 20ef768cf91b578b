//! Notes about examples.

use std::collections::BTreeMap;

/// A fact about an example that the user should know.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::data) enum Remark {
    /// A field of messages that the chat template does not use.
    UnusedField(String),
    /// The chat template uses the current date.
    Dated,
    /// The end of the generation prompt that the answer does not start with.
    Opening(String),
}

/// Remarks, each with the number of examples that it applies to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Remarks(BTreeMap<Remark, usize>);

impl Remarks {
    pub(in crate::data) fn add(&mut self, remarks: Vec<Remark>) {
        remarks.into_iter().for_each(|remark| *self.0.entry(remark).or_default() += 1);
    }

    /// Adds the remarks on other examples.
    pub fn extend(&mut self, other: Self) {
        other.0.into_iter().for_each(|(remark, count)| *self.0.entry(remark).or_default() += count);
    }

    /// One line per remark.
    pub fn notes(&self) -> Vec<String> {
        let note = |(remark, count): (&Remark, &usize)| {
            let examples = if *count == 1 { "1 example".to_owned() } else { format!("{count} examples") };
            format!("note: {}", remark.text(&examples))
        };
        self.0.iter().map(note).collect()
    }
}

impl Remark {
    fn text(&self, examples: &str) -> String {
        match self {
            Self::UnusedField(name) => {
                format!("the chat template ignores the message field `{name}`, which {examples} have")
            }
            Self::Dated => format!(
                "the chat template uses today's date ({examples}): Hydra always passes 26 July 2024, so that the run is \
                 reproducible"
            ),
            Self::Opening(text) => format!(
                "the chat template's generation prompt ends with {text:?}, but the answers of {examples} do not start \
                 with that: the loss covers them from the first difference, and at inference the model sees a different start"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remarks_are_counted_and_said_once() {
        let mut one = Remarks::default();
        one.add(vec![Remark::UnusedField("id".to_owned()), Remark::Dated]);
        let mut other = Remarks::default();
        other.add(vec![Remark::UnusedField("id".to_owned())]);
        one.extend(other);
        let notes = one.notes();
        assert_eq!(notes[0], "note: the chat template ignores the message field `id`, which 2 examples have");
        assert!(notes[1].contains("(1 example)") && notes[1].contains("26 July 2024"), "{}", notes[1]);
        assert_eq!(notes.len(), 2);
    }
}
