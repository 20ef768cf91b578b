//! The positions of a head that are computed, and which of them together.

use std::ops::Range;

/// Positions whose logits are in memory at once.
#[derive(Debug, PartialEq)]
pub(super) struct Group {
    /// The positions, in their order.
    pub rows: Vec<usize>,
    /// The rows of each chunk of positions that it has some of.
    pub chunks: Vec<Range<usize>>,
}

/// A product of one or two rows is made by other instructions, so so many are computed of a chunk that has any.
const LEAST: usize = 4;

/// Products of up to so many rows and columns add in another order, and those of few elements in all.
const SMALL: usize = 64;
const FEW: usize = 256;

impl Group {
    fn new(rows: Vec<usize>) -> Self {
        let mut group = Self { rows: Vec::new(), chunks: Vec::new() };
        group.add(rows);
        group
    }

    /// The positions, if they are neighbours.
    pub fn neighbours(&self) -> Option<Range<usize>> {
        let (first, last) = (*self.rows.first()?, *self.rows.last()?);
        (last - first + 1 == self.rows.len()).then_some(first..last + 1)
    }

    fn add(&mut self, rows: Vec<usize>) {
        self.chunks.push(self.rows.len()..self.rows.len() + rows.len());
        self.rows.extend(rows);
    }
}

/// Every position, a chunk at a time.
pub(super) fn all(positions: usize, chunk_rows: usize) -> Vec<Group> {
    chunks(positions, chunk_rows).map(|chunk| Group::new(chunk.collect())).collect()
}

/// The positions with a target, as many chunks at a time as are together no more than `most`; a chunk of more is whole, and so
/// is what few others fill up.
pub(super) fn counted(targets: &[Option<usize>], chunk_rows: usize, most: usize) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for chunk in chunks(targets.len(), chunk_rows) {
        let rows = rows(targets, chunk.clone());
        match groups.last_mut() {
            _ if rows.is_empty() => {}
            _ if rows.len() > most => groups.push(Group::new(chunk.collect())),
            Some(group) if group.rows.len() + rows.len() <= most => group.add(rows),
            _ => groups.push(Group::new(rows)),
        }
    }
    groups
}

/// The rows of a chunk that are computed: none, or those with a target and others up to the least.
fn rows(targets: &[Option<usize>], chunk: Range<usize>) -> Vec<usize> {
    let counted = targets[chunk.clone()].iter().flatten().count();
    let mut others = if counted == 0 { 0 } else { LEAST.saturating_sub(counted) };
    let mut other = || others.checked_sub(1).inspect(|left| others = *left).is_some();
    chunk.filter(|row| targets[*row].is_some() || other()).collect()
}

fn chunks(positions: usize, chunk_rows: usize) -> impl Iterator<Item = Range<usize>> {
    (0..positions).step_by(chunk_rows).map(move |start| start..positions.min(start + chunk_rows))
}

/// The most rows that may be gathered, so that with a copy of their vectors and one of these vectors' gradients they take no
/// more memory than a whole chunk without; none where sums would be in another order than a whole chunk's.
pub(super) fn most(positions: usize, chunk_rows: usize, [vocabulary, width]: [usize; 2]) -> Option<usize> {
    let whole = positions.min(chunk_rows) * vocabulary;
    let sums_alike = vocabulary > SMALL && width > SMALL && LEAST * vocabulary > FEW;
    sums_alike.then(|| whole / (vocabulary + 2 * width + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Targets at these positions of so many.
    fn targets(positions: usize, at: &[usize]) -> Vec<Option<usize>> {
        (0..positions).map(|row| at.contains(&row).then_some(row)).collect()
    }

    fn rows_of(groups: &[Group]) -> Vec<Vec<usize>> {
        groups.iter().map(|group| group.rows.clone()).collect()
    }

    #[test]
    fn chunks_share_a_group_as_far_as_there_is_room() {
        let at = [1, 2, 4, 6, 9, 11, 13, 14, 17, 18, 19, 20, 21, 22, 23, 26, 27, 28, 29];
        let groups = counted(&targets(48, &at), 8, 6);
        let expected: [&[usize]; 4] = [
            &[1, 2, 4, 6],
            &[9, 11, 13, 14],
            // Of eight with seven that count nothing is left out.
            &[16, 17, 18, 19, 20, 21, 22, 23],
            &[26, 27, 28, 29],
        ];
        assert_eq!(rows_of(&groups), expected);
        assert_eq!(groups[2].neighbours(), Some(16..24));
        assert_eq!(groups[3].neighbours(), Some(26..30));
        assert_eq!(groups[0].neighbours(), None);
        let together = counted(&targets(48, &at[..8]), 8, 8);
        assert_eq!(rows_of(&together), [at[..8].to_vec()]);
        assert_eq!(together[0].chunks, [0..4, 4..8]);
    }

    #[test]
    fn few_rows_are_filled_up_and_none_are_left_out() {
        assert_eq!(rows_of(&counted(&targets(20, &[6, 18]), 8, 8)), [[0, 1, 2, 6, 16, 17, 18, 19]]);
        assert_eq!(rows_of(&counted(&targets(3, &[2]), 8, 8)), [[0, 1, 2]]);
        assert_eq!(rows_of(&all(5, 3)), [vec![0, 1, 2], vec![3, 4]]);
    }

    #[test]
    fn gathered_rows_take_no_more_memory_than_a_whole_chunk() {
        for [vocabulary, width] in [[49_152, 576], [257, 256], [1000, 65]] {
            let most = most(1024, 256, [vocabulary, width]).unwrap();
            assert!(most * (vocabulary + 2 * width) < 256 * vocabulary && most > 64);
            let at: Vec<usize> = (0..1024).filter(|row| row * row % 7 < 3).collect();
            for group in counted(&targets(1024, &at), 256, most) {
                assert!(group.rows.len() <= most || group.neighbours().is_some_and(|rows| rows.len() == 256));
            }
        }
        assert_eq!(most(1024, 256, [64, 576]).or(most(1024, 256, [49_152, 64])), None);
    }
}
