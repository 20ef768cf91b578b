//! Operations whose backward is written by hand, each beside a reference made of Burn's own operations.
//!
//! A tracked and an untracked pass run the same kernel, so that a forward without a graph has the bits of
//! the recomputed one. Kernels work on rows that do not depend on one another, and what is summed over rows
//! is summed in a fixed order: no result depends on the number of threads. All of them compute in `f32`.

mod attention;
mod classify;
#[cfg(feature = "cube")]
mod cube;
mod dropout;
mod embedding;
mod gelu;
mod head;
#[allow(unsafe_code)]
mod kernels;
mod linear;
mod math;
mod norm;

pub mod reference;

pub(crate) use attention::working_elements as attention_working_elements;
pub use attention::{Attention, causal_attention};
pub use classify::classification_loss;
#[cfg(feature = "cube")]
pub use cube::{Precision, set_precision, supports};
pub use dropout::{dropout, dropout_onto};
pub use embedding::embedding;
pub use gelu::gelu_tanh;
pub use head::{IGNORED, head_loss};
pub use linear::{linear, linear_onto};
pub use norm::layer_norm;

#[cfg(test)]
mod testing {
    use burn::tensor::{Device, Tensor, TensorData};
    use hydra_core::{AnyTensor, Key};

    pub use crate::synthetic::testing::with_threads;

    /// A tensor of normal numbers on the autodiff device.
    pub fn normal<const D: usize>(seed: u64, shape: [usize; D]) -> Tensor<D> {
        let key = Key::new(seed);
        let values: Vec<f32> =
            (0..shape.iter().product()).map(|i: usize| key.normal(i as u64) as f32).collect();
        Tensor::from_data(TensorData::new(values, shape), &Device::flex().autodiff())
    }

    /// The same values, outside of any graph but on the autodiff device.
    pub fn untracked<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
        // `detach` would not do: it keeps a leaf a leaf.
        let tensor = tensor.inner().autodiff();
        assert!(!tensor.is_tracked());
        tensor
    }

    /// The elements on the host.
    pub fn values<const D: usize>(tensor: &Tensor<D>) -> Vec<f32> {
        AnyTensor::from(tensor.clone()).into_host().as_f32().to_vec()
    }

    /// The distance of two tensors, relative to the norm of the second.
    pub fn distance(found: &[f32], expected: &[f32]) -> f64 {
        assert_eq!(found.len(), expected.len());
        let square = |x: f64| x * x;
        let error: f64 = found.iter().zip(expected).map(|(&a, &b)| square(f64::from(a) - f64::from(b))).sum();
        let norm: f64 = expected.iter().map(|&b| square(f64::from(b))).sum();
        (error / norm.max(1e-30)).sqrt()
    }
}
