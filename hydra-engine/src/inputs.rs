//! What a shard task reads beside its images.

use crate::event::{Gradient, LenBytes, len_bytes};

/// The inputs of a shard task that are on the host already.
#[derive(Clone, Debug)]
pub(crate) struct Inputs<T> {
    pub activation: Option<Vec<T>>,
    pub targets: Vec<T>,
    pub upstream: Option<Gradient<T>>,
}

impl<T> Default for Inputs<T> {
    fn default() -> Self {
        Self { activation: None, targets: Vec::new(), upstream: None }
    }
}

impl<T: LenBytes> Inputs<T> {
    pub(crate) fn bytes(&self) -> u64 {
        len_bytes(self.tensors())
    }
}

impl<T> Inputs<T> {
    /// All tensors, in the order of the fields.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = &T> {
        let upstream = self.upstream.iter().flatten().flatten();
        self.activation.iter().flatten().chain(&self.targets).chain(upstream)
    }

    /// These inputs with each tensor replaced by the next of `others`.
    pub(crate) fn replaced<U>(&self, others: impl IntoIterator<Item = U>) -> Inputs<U> {
        let mut others = others.into_iter();
        let activation = self.activation.as_ref().map(|a| others.by_ref().take(a.len()).collect());
        let targets = others.by_ref().take(self.targets.len()).collect();
        let one = |t: &Option<T>| t.as_ref().and_then(|_| others.next());
        let upstream = self.upstream.as_ref().map(|of| of.iter().map(one).collect());
        Inputs { activation, targets, upstream }
    }
}
