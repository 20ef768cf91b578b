//! Counts the data in rows that training does not use.

use super::Remarks;
use std::collections::BTreeMap;

/// Names, each with the number of rows that have it.
pub type Counts = BTreeMap<String, usize>;

/// Unused data and noteworthy forms of rows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Unused fields.
    pub unused: Counts,
    /// Fields that select what is trained on, which are ignored with `LossOn::All`.
    pub masks: Counts,
    /// Rows rendered with Alpaca's prompt template.
    pub alpaca: usize,
    /// Conversations with ShareGPT's role names.
    pub sharegpt: usize,
    /// Rows with tokens that cross the end of the prompt; the loss starts at the first difference.
    pub merged: usize,
    /// Rows with an empty answer, whose end alone is trained on.
    pub empty: usize,
    /// Other remarks.
    pub remarks: Remarks,
}

impl Tally {
    /// Counts a row with these unused fields.
    pub(in crate::data) fn unused<'a>(&mut self, names: impl Iterator<Item = &'a String>) {
        names.for_each(|name| count(&mut self.unused, name));
    }

    /// Counts a row with this loss mask.
    pub(super) fn mask(&mut self, name: &str) {
        count(&mut self.masks, name);
    }

    /// Adds the counts of other rows.
    pub(in crate::data) fn add(&mut self, other: &Self) {
        for (counts, others) in [(&mut self.unused, &other.unused), (&mut self.masks, &other.masks)] {
            others.iter().for_each(|(name, rows)| *counts.entry(name.clone()).or_default() += rows);
        }
        self.alpaca += other.alpaca;
        self.sharegpt += other.sharegpt;
        self.merged += other.merged;
        self.empty += other.empty;
        self.remarks.extend(other.remarks.clone());
    }
}

fn count(counts: &mut Counts, name: &str) {
    match counts.get_mut(name) {
        Some(rows) => *rows += 1,
        None => drop(counts.insert(name.to_owned(), 1)),
    }
}
