//! What rows have beside what is learned.

use super::Remarks;
use std::collections::BTreeMap;

/// Names, each with the number of rows that have it.
pub type Counts = BTreeMap<String, usize>;

/// What some rows have beside what is learned of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Fields without a use.
    pub unused: Counts,
    /// Fields that say what is learned, which have no use where everything is.
    pub masks: Counts,
    /// Rows that are written with Alpaca's prompt template.
    pub alpaca: usize,
    /// Conversations with ShareGPT's names of roles.
    pub sharegpt: usize,
    /// Rows in which tokens cross the end of the prompt, so that the completion begins where they differ.
    pub merged: usize,
    /// What else is to be said of them.
    pub remarks: Remarks,
}

impl Tally {
    /// Counts a row that has these fields without a use.
    pub(super) fn unused<'a>(&mut self, names: impl Iterator<Item = &'a String>) {
        names.for_each(|name| count(&mut self.unused, name));
    }

    /// Counts a row that has this field, which says what is learned.
    pub(super) fn mask(&mut self, name: &str) {
        count(&mut self.masks, name);
    }

    /// Adds what other rows have.
    pub(in crate::data) fn add(&mut self, other: &Self) {
        for (counts, others) in [(&mut self.unused, &other.unused), (&mut self.masks, &other.masks)] {
            others.iter().for_each(|(name, rows)| *counts.entry(name.clone()).or_default() += rows);
        }
        self.alpaca += other.alpaca;
        self.sharegpt += other.sharegpt;
        self.merged += other.merged;
        self.remarks.extend(other.remarks.clone());
    }
}

fn count(counts: &mut Counts, name: &str) {
    match counts.get_mut(name) {
        Some(rows) => *rows += 1,
        None => drop(counts.insert(name.to_owned(), 1)),
    }
}
