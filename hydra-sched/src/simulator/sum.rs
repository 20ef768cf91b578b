//! A sum with updatable terms.

/// Terms that are added in pairs, the pairs in pairs, and so on: an update recomputes the sums that include
/// the term, in logarithmic time. Nothing is subtracted, so the sum is a function of the current terms, and a
/// huge earlier term leaves no rounding error.
#[derive(Clone, Debug)]
pub(crate) struct Sum {
    leaves: usize,
    /// The root is at 1.
    nodes: Vec<f64>,
}

impl Sum {
    pub(crate) fn new(terms: &[f64]) -> Self {
        let leaves = terms.len().next_power_of_two();
        let mut nodes = vec![0.0; 2 * leaves];
        nodes[leaves..leaves + terms.len()].copy_from_slice(terms);
        (1..leaves).rev().for_each(|node| nodes[node] = nodes[2 * node] + nodes[2 * node + 1]);
        Self { leaves, nodes }
    }

    pub(crate) fn set(&mut self, term: usize, value: f64) {
        let mut node = self.leaves + term;
        self.nodes[node] = value;
        while node > 1 {
            node /= 2;
            self.nodes[node] = self.nodes[2 * node] + self.nodes[2 * node + 1];
        }
    }

    pub(crate) fn get(&self) -> f64 {
        self.nodes[1]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sum_forgets_what_a_term_was() {
        for count in [1, 2, 3, 8, 9] {
            let mut sum = Sum::new(&vec![1.0; count]);
            assert_eq!(sum.get(), count as f64);
            for huge in [1e300, f64::INFINITY] {
                (0..count).for_each(|term| sum.set(term, huge));
                (0..count).for_each(|term| sum.set(term, 0.1));
                assert_eq!(sum.get(), Sum::new(&vec![0.1; count]).get());
            }
        }
    }
}
