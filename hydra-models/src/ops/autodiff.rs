//! Burn's names for operations with a custom backward, and helpers that all of them share.

pub(super) use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
pub(super) use burn::backend::autodiff::grads::Gradients;
pub(super) use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
pub(super) use burn::backend::autodiff::{Autodiff, NodeId};
pub(super) use burn::backend::tensor::{FloatTensor, IntTensor};
pub(super) use burn::backend::{Backend, Dispatch, Flex, TensorMetadata, backend_extension};

/// Registers the gradients of the tracked parents.
pub(super) fn register<B: Backend, const N: usize>(
    grads: &mut Gradients,
    parents: [Option<NodeId>; N],
    gradients: [Option<FloatTensor<B>>; N],
) {
    for (node, gradient) in parents.into_iter().zip(gradients) {
        if let (Some(node), Some(gradient)) = (node, gradient) {
            grads.register::<B>(node, gradient);
        }
    }
}

/// The tracked parents of an operation.
pub(super) fn parents<S, const N: usize>(ops: &Ops<S, N>) -> [Option<NodeId>; N] {
    ops.parents.each_ref().map(|parent| parent.as_ref().map(|node| node.id))
}
