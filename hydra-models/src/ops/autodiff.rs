//! The names that an operation with a backward of its own needs of Burn, and what all such backwards share.

pub(super) use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
pub(super) use burn::backend::autodiff::grads::Gradients;
pub(super) use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
pub(super) use burn::backend::autodiff::{Autodiff, NodeId};
pub(super) use burn::backend::tensor::{FloatTensor, IntTensor};
pub(super) use burn::backend::{Backend, Dispatch, Flex, TensorMetadata, backend_extension};

/// Registers the gradients of those parents that are tracked.
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

/// The parents of an operation that are tracked.
pub(super) fn parents<S, const N: usize>(ops: &Ops<S, N>) -> [Option<NodeId>; N] {
    ops.parents.each_ref().map(|parent| parent.as_ref().map(|node| node.id))
}
