//! Tensors on a device, of any kind and rank.

use burn::backend::TensorMetadata;
use burn::tensor::{Device, DispatchTensor, Gradients, Int, Tensor};

/// A float or integer tensor whose rank is known at run time only.
#[derive(Clone, Debug)]
pub enum AnyTensor {
    /// Floats; they carry gradients.
    Float(DispatchTensor),
    /// Integers, such as token ids.
    Int(DispatchTensor),
}

/// Runs an expression with `D` bound to the rank as a constant.
macro_rules! by_rank {
    ($rank:expr, $d:ident => $body:expr) => {
        match $rank {
            1 => by_rank!(@ $d, 1, $body),
            2 => by_rank!(@ $d, 2, $body),
            3 => by_rank!(@ $d, 3, $body),
            4 => by_rank!(@ $d, 4, $body),
            5 => by_rank!(@ $d, 5, $body),
            6 => by_rank!(@ $d, 6, $body),
            7 => by_rank!(@ $d, 7, $body),
            8 => by_rank!(@ $d, 8, $body),
            rank => panic!("tensors have 1 to 8 dimensions, found {rank}"),
        }
    };
    (@ $d:ident, $n:literal, $body:expr) => {{
        const $d: usize = $n;
        $body
    }};
}
pub(crate) use by_rank;

impl AnyTensor {
    /// The sizes of the dimensions.
    pub fn shape(&self) -> Vec<usize> {
        let (Self::Float(t) | Self::Int(t)) = self;
        t.shape().to_vec()
    }

    /// The number of dimensions.
    pub fn rank(&self) -> usize {
        self.shape().len()
    }

    /// Returns whether the elements are floats.
    pub fn is_float(&self) -> bool {
        matches!(self, Self::Float(_))
    }

    /// The tensor as a float tensor of rank `D`.
    ///
    /// # Panics
    /// If it holds integers or has another rank: the layer was given what it does not take.
    #[track_caller]
    pub fn into_float<const D: usize>(self) -> Tensor<D> {
        let shape = self.shape();
        assert!(
            self.is_float() && shape.len() == D,
            "expected a float tensor of rank {D}, found {} of shape {shape:?}",
            self.kind()
        );
        let (Self::Float(t) | Self::Int(t)) = self;
        Tensor::from_dispatch(t)
    }

    /// The tensor as an integer tensor of rank `D`.
    ///
    /// # Panics
    /// If it holds floats or has another rank.
    #[track_caller]
    pub fn into_int<const D: usize>(self) -> Tensor<D, Int> {
        let shape = self.shape();
        assert!(
            !self.is_float() && shape.len() == D,
            "expected an integer tensor of rank {D}, found {} of shape {shape:?}",
            self.kind()
        );
        let (Self::Float(t) | Self::Int(t)) = self;
        Tensor::from_dispatch(t)
    }

    /// The device of a float tensor.
    pub(crate) fn float_device(&self) -> Option<Device> {
        match self {
            Self::Float(t) => Some(Tensor::<1>::from_dispatch(t.clone()).device()),
            Self::Int(_) => None,
        }
    }

    fn kind(&self) -> &'static str {
        if self.is_float() { "floats" } else { "integers" }
    }

    /// A float tensor becomes a leaf that gathers its gradient; integers stay what they are.
    /// The tensor must be on an autodiff device.
    pub fn into_leaf(self) -> Self {
        match self {
            Self::Float(t) => by_rank!(t.shape().num_dims(), D => {
                Tensor::<D>::from_dispatch(t).require_grad().into()
            }),
            int => int,
        }
    }

    /// The gradient that was gathered for this leaf, outside of the graph.
    pub fn take_gradient(&self, gradients: &mut Gradients) -> Option<AnyTensor> {
        match self {
            Self::Float(t) => by_rank!(t.shape().num_dims(), D => {
                Tensor::<D>::from_dispatch(t.clone()).grad_remove(gradients).map(Into::into)
            }),
            Self::Int(_) => None,
        }
    }
}

impl<const D: usize> From<Tensor<D>> for AnyTensor {
    fn from(tensor: Tensor<D>) -> Self {
        Self::Float(tensor.into_dispatch())
    }
}

impl<const D: usize> From<Tensor<D, Int>> for AnyTensor {
    fn from(tensor: Tensor<D, Int>) -> Self {
        Self::Int(tensor.into_dispatch())
    }
}
