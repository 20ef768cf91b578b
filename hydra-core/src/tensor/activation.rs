//! Activations, the inputs and outputs of layers: one or several tensors of any rank, on a device or on the
//! host.

use super::any::AnyTensor;
use super::host::HostTensor;
use burn::tensor::{Int, Tensor};

/// The input or output of a layer: one or several tensors on a device.
#[derive(Clone, Debug, Default)]
pub struct Activation {
    parts: Vec<AnyTensor>,
}

impl Activation {
    /// Returns an activation of one tensor.
    pub fn of(tensor: impl Into<AnyTensor>) -> Self {
        Self { parts: vec![tensor.into()] }
    }

    /// Adds a tensor.
    pub fn and(mut self, tensor: impl Into<AnyTensor>) -> Self {
        self.parts.push(tensor.into());
        self
    }

    /// The tensors.
    pub fn parts(&self) -> &[AnyTensor] {
        &self.parts
    }

    /// Returns the tensors.
    pub fn into_parts(self) -> Vec<AnyTensor> {
        self.parts
    }

    /// Returns the only tensor, as floats of rank `D`.
    ///
    /// # Panics
    /// If there is not exactly one tensor, or it has another kind or rank.
    #[track_caller]
    pub fn into_float<const D: usize>(self) -> Tensor<D> {
        self.into_single().into_float()
    }

    /// Returns the only tensor, as integers of rank `D`.
    ///
    /// # Panics
    /// If there is not exactly one tensor, or it has another kind or rank.
    #[track_caller]
    pub fn into_int<const D: usize>(self) -> Tensor<D, Int> {
        self.into_single().into_int()
    }

    #[track_caller]
    fn into_single(mut self) -> AnyTensor {
        let found = self.parts.len();
        assert!(found == 1, "expected an activation of one tensor, found {found}");
        self.parts.remove(0)
    }

    /// Returns a clone of the tensor at `index`.
    ///
    /// # Panics
    /// If there are fewer tensors.
    #[track_caller]
    pub fn part(&self, index: usize) -> AnyTensor {
        let parts = self.parts.len();
        assert!(index < parts, "expected at least {} tensors in the activation, found {parts}", index + 1);
        self.parts[index].clone()
    }

    /// Turns every float tensor into a leaf that collects its gradient.
    pub fn into_leaves(self) -> Self {
        self.parts.into_iter().map(AnyTensor::into_leaf).collect()
    }
}

impl FromIterator<AnyTensor> for Activation {
    fn from_iter<I: IntoIterator<Item = AnyTensor>>(parts: I) -> Self {
        Self { parts: parts.into_iter().collect() }
    }
}

impl From<AnyTensor> for Activation {
    fn from(tensor: AnyTensor) -> Self {
        Self::of(tensor)
    }
}

/// An activation on the host, as stored at a cut-point between two shard tasks.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HostActivation {
    /// The tensors, in the activation's order.
    pub parts: Vec<HostTensor>,
}

impl HostActivation {
    /// Returns an activation of one tensor.
    pub fn of(tensor: HostTensor) -> Self {
        Self { parts: vec![tensor] }
    }

    /// The number of bytes of all tensors.
    pub fn len_bytes(&self) -> u64 {
        self.parts.iter().map(HostTensor::len_bytes).sum()
    }
}
