//! The tensors that shard tasks read and produce, on the host and on the device.

use hydra_core::{DeviceTensor, HostTensor, Measured};
use hydra_spill::Reservation;
use std::sync::Arc;

/// The gradient of each tensor of an activation.
pub(crate) type Gradient<T> = Vec<Option<T>>;

/// The index in the chain and the gradients of each layer with trained parameters.
pub(crate) type LayerGradients = Vec<(usize, Gradient<DeviceTensor>)>;

/// The output of a shard task for the next one of its microbatch pass, on the device or on the host.
#[derive(Clone, Debug)]
pub(crate) enum Output<T> {
    /// Nothing: the microbatch pass ends here.
    None,
    /// The boundary activation.
    Activation(Vec<T>),
    /// The gradient with respect to the shard's input.
    Gradient(Gradient<T>),
}

impl Output<DeviceTensor> {
    fn tensors(&self) -> Vec<&DeviceTensor> {
        match self {
            Self::None => Vec::new(),
            Self::Activation(boundary) => boundary.iter().collect(),
            Self::Gradient(gradient) => gradient.iter().flatten().collect(),
        }
    }

    /// The number of bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.tensors().into_iter().map(DeviceTensor::len_bytes).sum()
    }
}

/// The results of a compute worker, all in device memory.
pub(crate) struct Computed {
    pub output: Output<DeviceTensor>,
    pub gradients: LayerGradients,
    /// The mean loss of the microbatch, at the last shard, with the chain's metrics in an evaluation.
    pub measured: Option<Measured>,
}

impl Computed {
    /// All tensors.
    pub(crate) fn made(&self) -> Vec<&DeviceTensor> {
        let gradients = self.gradients.iter().flat_map(|(_, of)| of.iter().flatten());
        self.output.tensors().into_iter().chain(gradients).collect()
    }

    /// The bytes of outputs and gradients on the device until they are downloaded.
    pub(crate) fn device_bytes(&self) -> u64 {
        kept_bytes(self.made())
    }
}

/// The bytes of tensors that are kept on the device.
pub(crate) fn kept_bytes<'a>(tensors: impl IntoIterator<Item = &'a DeviceTensor>) -> u64 {
    tensors.into_iter().map(|tensor| UPKEEP + tensor.len_bytes()).sum()
}

/// Overhead of a tensor in bytes: its shape, its reference counts and the headers of these blocks. Some 350 bytes
/// were measured. It matters for models with many small tensors.
const UPKEEP: u64 = 512;

/// The results of a shard task, with their device memory until they are downloaded.
pub(crate) struct Made {
    pub computed: Computed,
    /// Shared with the next shard task if that takes the output on the device.
    pub output: Arc<Reservation>,
    pub gradients: Reservation,
    /// The memory of accumulated gradients that the next shard task may add to, shared with it.
    pub sums: Arc<Reservation>,
}

/// The inputs of a shard task that are on the host.
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

impl Inputs<HostTensor> {
    pub(crate) fn bytes(&self) -> u64 {
        self.tensors().map(HostTensor::len_bytes).sum()
    }
}

impl<T> Inputs<T> {
    /// All tensors, in field order.
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
