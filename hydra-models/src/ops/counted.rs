//! Selects and groups the positions whose logits the head computes.

use std::ops::Range;

/// Positions whose logits are in memory at the same time.
#[derive(Debug, PartialEq)]
pub(super) struct Group {
    /// The positions, in ascending order.
    pub rows: Vec<usize>,
    /// The rows of each chunk of positions that the group contains.
    pub chunks: Vec<Range<usize>>,
}

/// The minimum number of rows computed of a chunk: products of one or two rows use other instructions.
const LEAST: usize = 4;

/// Products with at most this many rows or columns sum in another order, as do those with at most [`FEW`] elements.
const SMALL: usize = 64;
const FEW: usize = 256;

impl Group {
    fn new(rows: Vec<usize>) -> Self {
        let mut group = Self { rows: Vec::new(), chunks: Vec::new() };
        group.add(rows);
        group
    }

    /// The range of positions, if they are contiguous.
    pub fn neighbours(&self) -> Option<Range<usize>> {
        let (first, last) = (*self.rows.first()?, *self.rows.last()?);
        (last - first + 1 == self.rows.len()).then_some(first..last + 1)
    }

    fn add(&mut self, rows: Vec<usize>) {
        self.chunks.push(self.rows.len()..self.rows.len() + rows.len());
        self.rows.extend(rows);
    }
}

/// All positions, one chunk per group.
pub(super) fn all(positions: usize, chunk_rows: usize) -> Vec<Group> {
    chunks(positions, chunk_rows).map(|chunk| Group::new(chunk.collect())).collect()
}

/// The positions with a target. Of each `together` positions of a chunk, all are computed or none. A group takes as many
/// chunks as have at most `most` positions together; a chunk with more is computed whole, and so is one that rounding up
/// to [`LEAST`] fills.
pub(super) fn counted(
    targets: &[Option<usize>],
    [chunk_rows, together]: [usize; 2],
    most: usize,
) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for chunk in chunks(targets.len(), chunk_rows) {
        let rows = rows(targets, chunk.clone(), together);
        match groups.last_mut() {
            _ if rows.is_empty() => {}
            _ if rows.len() > most => groups.push(Group::new(chunk.collect())),
            Some(group) if group.rows.len() + rows.len() <= most => group.add(rows),
            _ => groups.push(Group::new(rows)),
        }
    }
    groups
}

/// The rows of a chunk to compute, `together` at a time: none, or those with a target and others up to [`LEAST`].
fn rows(targets: &[Option<usize>], chunk: Range<usize>, together: usize) -> Vec<usize> {
    let sets = chunk.clone().step_by(together).map(|start| start..chunk.end.min(start + together));
    let counts = |rows: &Range<usize>| targets[rows.clone()].iter().any(Option::is_some);
    let counted = sets.clone().filter(counts).count();
    let mut others = if counted == 0 { 0 } else { LEAST.div_ceil(together).saturating_sub(counted) };
    let mut other = || others.checked_sub(1).inspect(|left| others = *left).is_some();
    sets.filter(|rows| counts(rows) || other()).flatten().collect()
}

fn chunks(positions: usize, chunk_rows: usize) -> impl Iterator<Item = Range<usize>> {
    (0..positions).step_by(chunk_rows).map(move |start| start..positions.min(start + chunk_rows))
}

/// The maximum number of gathered rows such that they, a copy of their vectors and these vectors' gradients take no
/// more memory than a whole chunk; `None` if sums would be in another order than a whole chunk's.
pub(super) fn most(positions: usize, chunk_rows: usize, [vocabulary, width]: [usize; 2]) -> Option<usize> {
    let whole = positions.min(chunk_rows) * vocabulary;
    let sums_alike = vocabulary > SMALL && width > SMALL && LEAST * vocabulary > FEW;
    sums_alike.then(|| whole / (vocabulary + 2 * width + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Targets at these of `positions` positions.
    fn targets(positions: usize, at: &[usize]) -> Vec<Option<usize>> {
        (0..positions).map(|row| at.contains(&row).then_some(row)).collect()
    }

    fn rows_of(groups: &[Group]) -> Vec<Vec<usize>> {
        groups.iter().map(|group| group.rows.clone()).collect()
    }

    #[test]
    fn chunks_share_a_group_as_far_as_there_is_room() {
        let at = [1, 2, 4, 6, 9, 11, 13, 14, 17, 18, 19, 20, 21, 22, 23, 26, 27, 28, 29];
        let groups = counted(&targets(48, &at), [8, 1], 6);
        let expected: [&[usize]; 4] = [
            &[1, 2, 4, 6],
            &[9, 11, 13, 14],
            // Seven of eight positions have targets: none is left out.
            &[16, 17, 18, 19, 20, 21, 22, 23],
            &[26, 27, 28, 29],
        ];
        assert_eq!(rows_of(&groups), expected);
        assert_eq!(groups[2].neighbours(), Some(16..24));
        assert_eq!(groups[3].neighbours(), Some(26..30));
        assert_eq!(groups[0].neighbours(), None);
        let together = counted(&targets(48, &at[..8]), [8, 1], 8);
        assert_eq!(rows_of(&together), [at[..8].to_vec()]);
        assert_eq!(together[0].chunks, [0..4, 4..8]);
    }

    #[test]
    fn few_rows_are_filled_up_and_none_are_left_out() {
        assert_eq!(rows_of(&counted(&targets(20, &[6, 18]), [8, 1], 8)), [[0, 1, 2, 6, 16, 17, 18, 19]]);
        assert_eq!(rows_of(&counted(&targets(3, &[2]), [8, 1], 8)), [[0, 1, 2]]);
        assert_eq!(rows_of(&all(5, 3)), [vec![0, 1, 2], vec![3, 4]]);
    }

    #[test]
    fn neighbours_of_a_pair_are_computed_together() {
        let groups = counted(&targets(27, &[3, 4, 12, 19, 21, 26]), [9, 2], 9);
        assert_eq!(rows_of(&groups), [vec![2, 3, 4, 5, 9, 10, 11, 12], vec![18, 19, 20, 21, 26]]);
        assert_eq!(groups[0].chunks, [0..4, 4..8]);
    }

    #[test]
    fn gathered_rows_take_no_more_memory_than_a_whole_chunk() {
        for [vocabulary, width] in [[49_152, 576], [257, 256], [1000, 65]] {
            let most = most(1024, 256, [vocabulary, width]).unwrap();
            assert!(most * (vocabulary + 2 * width) < 256 * vocabulary && most > 64);
            let at: Vec<usize> = (0..1024).filter(|row| row * row % 7 < 3).collect();
            for group in counted(&targets(1024, &at), [256, 1], most) {
                assert!(group.rows.len() <= most || group.neighbours().is_some_and(|rows| rows.len() == 256));
            }
        }
        assert_eq!(most(1024, 256, [64, 576]).or(most(1024, 256, [49_152, 64])), None);
    }
}
