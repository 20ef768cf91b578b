//! Packs examples into rows.

use std::cmp::Reverse;
use std::collections::{BTreeMap, VecDeque};

/// Packs examples of these lengths, none longer than `most`, into rows of at most `most` tokens. Returns the example
/// indices of each row in order. The result depends on the lengths alone.
///
/// Best-fit decreasing, as TRL's `bfd`: examples are taken from longest to shortest (in index order at equal length),
/// and each goes to the row that it leaves the least space in (of several, the one that has waited longest), or starts
/// a new row.
///
/// # Panics
/// If an example is longer than `most`.
pub(super) fn rows(lengths: &[usize], most: usize) -> Vec<Vec<u32>> {
    let mut examples: Vec<usize> = (0..lengths.len()).collect();
    examples.sort_by_key(|example| Reverse(lengths[*example]));
    let mut rows: Vec<Vec<u32>> = Vec::new();
    // Rows by their free space.
    let mut by_space: BTreeMap<usize, VecDeque<usize>> = BTreeMap::new();
    for example in examples {
        let length = lengths[example];
        let (space, row) = take_row_with_space(length, &mut by_space).unwrap_or((most, rows.len()));
        let left = space.checked_sub(length);
        let left =
            left.unwrap_or_else(|| panic!("an example of {length} tokens does not fit a row of {most}"));
        if row == rows.len() {
            rows.push(Vec::new());
        }
        rows[row].push(example as u32);
        by_space.entry(left).or_default().push_back(row);
    }
    rows
}

/// Takes the row with the least free space of at least `length` tokens.
fn take_row_with_space(length: usize, rows: &mut BTreeMap<usize, VecDeque<usize>>) -> Option<(usize, usize)> {
    let (&space, waiting) = rows.range_mut(length..).next()?;
    let row = waiting.pop_front();
    if waiting.is_empty() {
        rows.remove(&space);
    }
    row.map(|row| (space, row))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn each_example_lies_where_it_leaves_the_least_room() {
        assert_eq!(rows(&[2, 5, 3, 4, 1], 8), [vec![1, 2], vec![3, 0, 4]]);
        assert_eq!(rows(&[4, 4, 4], 8), [vec![0, 1], vec![2]], "in their order");
        assert_eq!(rows(&[], 8), Vec::<Vec<u32>>::new());
    }

    #[test]
    #[should_panic(expected = "an example of 9 tokens does not fit a row of 8")]
    fn no_example_is_cut() {
        rows(&[3, 9], 8);
    }

    proptest! {
        #[test]
        fn every_example_lies_in_one_row_and_no_two_rows_fit_into_one(
            lengths in prop::collection::vec(1usize..40, 0..200), more in 0usize..60,
        ) {
            let most = lengths.iter().max().map_or(1, |longest| longest + more);
            let found = rows(&lengths, most);
            prop_assert_eq!(&found, &rows(&lengths, most));
            let mut all: Vec<u32> = found.concat();
            all.sort_unstable();
            prop_assert_eq!(all, (0..lengths.len() as u32).collect::<Vec<_>>());
            let mut tokens: Vec<usize> =
                found.iter().map(|row| row.iter().map(|example| lengths[*example as usize]).sum()).collect();
            prop_assert!(tokens.iter().all(|tokens| *tokens <= most));
            tokens.sort_unstable();
            prop_assert!(tokens.iter().take(2).sum::<usize>() > most || tokens.len() < 2);
        }
    }
}
