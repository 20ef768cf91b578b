//! Tensors on a device, of any kind and rank.

use burn::backend::TensorMetadata;
use burn::tensor::{DType, Device, DispatchTensor, Gradients, Int, Tensor};

/// A float or integer tensor whose rank is known only at run time.
#[derive(Clone, Debug)]
pub enum AnyTensor {
    /// Floats; they carry gradients.
    Float(DispatchTensor),
    /// Integers, such as token ids.
    Int(DispatchTensor),
}

/// Runs an expression with `D` bound to the rank as a constant.
macro_rules! by_rank {
    ($rank:expr, $d:ident => $body:expr) => { by_rank!(@ $rank, $d, $body, 1 2 3 4 5 6 7 8) };
    (@ $rank:expr, $d:ident, $body:expr, $($n:literal)*) => {
        match $rank {
            $($n => {
                const $d: usize = $n;
                $body
            })*
            rank => panic!("tensors have 1 to 8 dimensions, found {rank}"),
        }
    };
}
pub(crate) use by_rank;

impl AnyTensor {
    /// The sizes of the dimensions.
    pub fn shape(&self) -> Vec<usize> {
        let (Self::Float(t) | Self::Int(t)) = self;
        t.shape().to_vec()
    }

    /// The type of an element.
    pub(crate) fn dtype(&self) -> DType {
        let (Self::Float(t) | Self::Int(t)) = self;
        t.dtype()
    }

    /// The number of dimensions.
    pub fn rank(&self) -> usize {
        self.shape().len()
    }

    /// Returns whether the elements are floats.
    pub fn is_float(&self) -> bool {
        matches!(self, Self::Float(_))
    }

    /// Returns the tensor as a float tensor of rank `D`.
    ///
    /// # Panics
    /// If it holds integers or has another rank, that is, a layer received an input that it does not support.
    #[track_caller]
    pub fn into_float<const D: usize>(self) -> Tensor<D> {
        Tensor::from_dispatch(self.of_kind(true, D))
    }

    /// Returns the tensor as an integer tensor of rank `D`.
    ///
    /// # Panics
    /// If it holds floats or has another rank.
    #[track_caller]
    pub fn into_int<const D: usize>(self) -> Tensor<D, Int> {
        Tensor::from_dispatch(self.of_kind(false, D))
    }

    /// Returns whether the tensor gets a gradient in a backward pass.
    pub fn is_tracked(&self) -> bool {
        match self {
            Self::Float(t) => Tensor::<1>::from_dispatch(t.clone()).is_tracked(),
            Self::Int(_) => false,
        }
    }

    /// The device of a float tensor.
    pub(crate) fn float_device(&self) -> Option<Device> {
        match self {
            Self::Float(t) => Some(Tensor::<1>::from_dispatch(t.clone()).device()),
            Self::Int(_) => None,
        }
    }

    #[track_caller]
    fn of_kind(self, float: bool, rank: usize) -> DispatchTensor {
        let (shape, expected) = (self.shape(), if float { "a float" } else { "an integer" });
        let found = if self.is_float() { "floats" } else { "integers" };
        assert!(
            self.is_float() == float && shape.len() == rank,
            "expected {expected} tensor of rank {rank}, found {found} of shape {shape:?}"
        );
        let (Self::Float(t) | Self::Int(t)) = self;
        t
    }

    /// Turns a float tensor, which must be on an autodiff device, into a leaf that collects its gradient;
    /// integers are unchanged.
    pub(super) fn into_leaf(self) -> Self {
        match self {
            Self::Float(t) => by_rank!(t.shape().num_dims(), D => {
                Tensor::<D>::from_dispatch(t).require_grad().into()
            }),
            int => int,
        }
    }

    /// Returns the tensor on the plain device, detached from the graph.
    pub(crate) fn outside_of_the_graph(self) -> Self {
        by_rank!(self.rank(), D => match self {
            Self::Float(t) => {
                let t = Tensor::<D>::from_dispatch(t);
                if t.device().is_autodiff() { t.inner().into() } else { t.into() }
            }
            Self::Int(t) => {
                let t = Tensor::<D, Int>::from_dispatch(t);
                if t.device().is_autodiff() { t.inner().into() } else { t.into() }
            }
        })
    }

    /// Takes the gradient that this leaf collected, detached from the graph.
    pub(crate) fn take_gradient(&self, gradients: &mut Gradients) -> Option<AnyTensor> {
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
