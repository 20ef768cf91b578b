//! Activation functions.

use crate::ops;
use burn::tensor::{Tensor, activation};

/// An activation function without gates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activate {
    /// The Gaussian error linear unit in its tanh approximation.
    GeluTanh,
    /// The Gaussian error linear unit.
    Gelu,
    /// The rectified linear unit.
    Relu,
    /// The hyperbolic tangent.
    Tanh,
}

impl Activate {
    /// Transformers' names.
    pub(crate) const NAMES: [&str; 5] = ["gelu_new", "gelu_pytorch_tanh", "gelu", "relu", "tanh"];

    /// The activation with this Transformers name, if supported.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "gelu_new" | "gelu_pytorch_tanh" => Some(Self::GeluTanh),
            "gelu" => Some(Self::Gelu),
            "relu" => Some(Self::Relu),
            "tanh" => Some(Self::Tanh),
            _ => None,
        }
    }

    /// Applies the activation to each element.
    pub fn forward(self, x: Tensor<3>) -> Tensor<3> {
        match self {
            Self::GeluTanh => ops::gelu_tanh(x),
            Self::Gelu => ops::gelu(x),
            Self::Relu => activation::relu(x),
            Self::Tanh => activation::tanh(x),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::Device;
    use hydra_core::AnyTensor;

    #[test]
    fn every_name_is_one() {
        assert!(Activate::NAMES.iter().all(|name| Activate::named(name).is_some()));
        assert_eq!(Activate::named("silu"), None);
    }

    /// Expected values are from tables of the normal distribution and its derivative.
    #[test]
    fn gelu_is_the_one_without_an_approximation() {
        let known = [
            (-5.0, -1.433_258e-6, -7.146_7e-6),
            (-3.0, -0.004_049_694, -0.011_945_647),
            (-1.0, -0.158_655_25, -0.083_315_47),
            (0.0, 0.0, 0.5),
            (0.5, 0.345_731_23, 0.867_495_1),
            (1.0, 0.841_344_8, 1.083_315_5),
            (2.0, 1.954_499_7, 1.085_231_8),
        ];
        let x = Tensor::<1>::from_floats(known.map(|(x, ..)| x), &Device::flex().autodiff()).require_grad();
        let y = ops::gelu(x.clone());
        let gradient = x.grad(&y.clone().sum().backward()).expect("a gradient");
        let [y, gradient] = [y, gradient].map(|t| AnyTensor::from(t).into_host().as_f32().to_vec());
        for (i, (x, value, slope)) in known.into_iter().enumerate() {
            assert!((y[i] - value).abs() < 5e-7 && (gradient[i] - slope).abs() < 1e-6, "at {x}");
        }
    }
}
