//! Multilayer perceptrons over points in the plane: small chains for tests and first steps.

use crate::ModelError;
use crate::objective::SingleLabel;
use crate::ops::dropout;
use crate::synthetic::{self, recorded_init};
use burn::module::Module;
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::{Device, Tensor, activation};
use hydra_core::{Activation, Batch, Chain, Dataset, DatasetError, Forward, Init, Key, Pass};

/// A hidden layer: a linear layer and a ReLU, `[items, in]` to `[items, out]`.
#[derive(Module, Debug)]
pub struct Dense {
    /// The linear layer.
    pub linear: Linear,
}

impl Forward for Dense {
    fn forward(&self, x: Activation, _: &Pass) -> Activation {
        Activation::of(activation::relu(self.linear.forward(x.into_float::<2>())))
    }

    recorded_init!();
}

/// The last layer: a linear layer from `[items, in]` to logits `[items, classes]`.
#[derive(Module, Debug)]
pub struct Classifier {
    /// The linear layer.
    pub linear: Linear,
}

impl Forward for Classifier {
    fn forward(&self, x: Activation, _: &Pass) -> Activation {
        Activation::of(self.linear.forward(x.into_float::<2>()))
    }

    recorded_init!();
}

fn linear(inputs: usize, outputs: usize) -> Linear {
    LinearConfig::new(inputs, outputs).init(&Device::flex())
}

fn positive(name: &'static str, sizes: &[usize]) -> Result<(), ModelError> {
    match sizes.contains(&0) {
        true => {
            Err(ModelError::Config { name, found: format!("{sizes:?}"), expected: "at least 1".to_owned() })
        }
        false => Ok(()),
    }
}

/// A perceptron: layers `dense.0`, `dense.1` and so on between consecutive `sizes` (inputs first, then the widths of
/// hidden layers), and the layer `classifier` to `classes`.
///
/// # Errors
/// No sizes, or a size of zero.
pub fn chain(sizes: &[usize], classes: usize) -> Result<Chain, ModelError> {
    positive("sizes", sizes)?;
    positive("classes", &[classes])?;
    let Some(&last) = sizes.last() else {
        let (found, expected) = ("empty".to_owned(), "the number of inputs and the hidden widths".to_owned());
        return Err(ModelError::Config { name: "sizes", found, expected });
    };
    let mut chain = Chain::builder("mlp");
    for (index, pair) in sizes.windows(2).enumerate() {
        chain = chain.layer(format!("dense.{index}"), Dense { linear: linear(pair[0], pair[1]) });
    }
    let chain = chain.layer("classifier", Classifier { linear: linear(last, classes) });
    Ok(chain.objective(SingleLabel { classes }).build()?)
}

/// The first layer of [`two_stream_chain`]: maps a point to a hidden vector, a residual, and the number of its
/// quadrant.
#[derive(Module, Debug)]
pub struct Open {
    /// Maps to the hidden vector.
    pub linear: Linear,
    /// Maps to the residual.
    pub residual: Linear,
}

/// An inner layer: transforms the hidden vector and passes residual and quadrant on.
#[derive(Module, Debug)]
pub struct Mix {
    /// The linear layer.
    pub linear: Linear,
}

/// The last layer: adds hidden vector, residual and the quadrant's vector, and classifies the sum.
#[derive(Module, Debug)]
pub struct Close {
    /// A vector for each quadrant.
    pub quadrants: Embedding,
    /// Maps to classes.
    pub linear: Linear,
}

impl Forward for Open {
    fn forward(&self, x: Activation, _: &Pass) -> Activation {
        let x = x.into_float::<2>();
        let positive =
            |column: usize| x.clone().narrow(1, column, 1).squeeze_dim::<1>(1).greater_elem(0.0).int();
        let quadrant = positive(0) + positive(1).mul_scalar(2);
        let hidden = activation::tanh(self.linear.forward(x.clone()));
        Activation::of(hidden).and(self.residual.forward(x)).and(quadrant)
    }

    recorded_init!();
}

impl Forward for Mix {
    fn forward(&self, x: Activation, pass: &Pass) -> Activation {
        let (hidden, residual) = (x.part(0).into_float::<2>(), x.part(1).into_float::<2>());
        let hidden = activation::relu(self.linear.forward(hidden)) + residual.clone();
        let hidden = dropout(hidden, 0.1, pass.site(0));
        Activation::of(hidden).and(residual).and(x.part(2).into_int::<1>())
    }

    recorded_init!();
}

impl Forward for Close {
    fn forward(&self, x: Activation, _: &Pass) -> Activation {
        let (hidden, residual) = (x.part(0).into_float::<2>(), x.part(1).into_float::<2>());
        let quadrant: Tensor<2> =
            self.quadrants.forward(x.part(2).into_int::<1>().unsqueeze_dim(0)).squeeze_dim(0);
        Activation::of(self.linear.forward(hidden + residual + quadrant))
    }

    fn init(&self, name: &str, shape: &[usize]) -> Init {
        match name {
            "quadrants.weight" => Init::Normal(1.0),
            _ => Init::default_for(name, shape),
        }
    }
}

/// A chain over points whose boundary consists of three tensors: a hidden vector, a residual that is passed through,
/// and an integer. It has `depth` layers with dropout between the first and the last.
///
/// # Errors
/// A size of zero.
pub fn two_stream_chain(width: usize, depth: usize, classes: usize) -> Result<Chain, ModelError> {
    positive("width", &[width])?;
    positive("classes", &[classes])?;
    let open = Open { linear: linear(2, width), residual: linear(2, width) };
    let mut chain = Chain::builder("two-stream").layer("open", open);
    for index in 0..depth {
        chain = chain.layer(format!("mix.{index}"), Mix { linear: linear(width, width) });
    }
    let quadrants = EmbeddingConfig::new(4, width).init(&Device::flex());
    Ok(chain
        .layer("close", Close { quadrants, linear: linear(width, classes) })
        .objective(SingleLabel { classes })
        .build()?)
}

/// Points `[2]` on interleaved spirals, one per class; deterministic for a seed.
#[derive(Clone, Debug)]
pub struct Spirals {
    key: Key,
    points: usize,
    classes: usize,
}

impl Spirals {
    /// This many points on `classes` spirals, at least one.
    pub fn new(seed: u64, points: usize, classes: usize) -> Self {
        Self { key: Key::new(seed).fold(0x7370_6972), points, classes: classes.max(1) }
    }

    fn point(&self, index: usize, out: &mut Vec<f32>) -> i32 {
        let class = index % self.classes;
        let key = self.key.fold(index as u64);
        let along = key.uniform(0);
        let noise = 0.1 * key.fold(1).normal(0);
        let turn = std::f64::consts::TAU * (class as f64 / self.classes as f64 + along) + noise;
        let radius = 0.2 + 1.8 * along;
        out.extend([(radius * turn.cos()) as f32, (radius * turn.sin()) as f32]);
        class as i32
    }
}

impl Dataset for Spirals {
    fn name(&self) -> &str {
        "spirals"
    }

    fn len(&self) -> usize {
        self.points
    }

    fn batch(&self, items: &[usize]) -> Result<Batch, DatasetError> {
        synthetic::batch("spirals", self.points, &[2], items, |index, out| self.point(index, out))
    }

    fn unit(&self) -> &'static str {
        "points"
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic::testing::{backward, bf16_agrees, descend, shards_agree};
    use hydra_core::FloatType;

    #[test]
    fn a_perceptron_learns_the_spirals() {
        let (chain, data) = (chain(&[2, 32, 32], 2).unwrap(), Spirals::new(1, 256, 2));
        let (first, last) = descend(&chain, &data, 200, 0.3);
        assert!((first - std::f32::consts::LN_2).abs() < 0.2, "{first}");
        assert!(last < 0.5 * first, "{first} to {last}");
    }

    #[test]
    fn perceptrons_compute_in_bf16() {
        let (chain, data) = (|| chain(&[2, 32, 32], 2).unwrap(), Spirals::new(1, 256, 2));
        bf16_agrees(chain, &data.batch(&(0..256).collect::<Vec<_>>()).unwrap(), &[0, 1, 2, 3]);
        let (first, last) = descend(&chain().with_float_type(FloatType::Bf16), &data, 200, 0.3);
        assert!(last < 0.5 * first, "{first} to {last}");
        let (chain, data) = (|| two_stream_chain(16, 3, 3).unwrap(), Spirals::new(2, 40, 3));
        let batch = data.batch(&(0..40).collect::<Vec<_>>()).unwrap();
        bf16_agrees(chain, &batch, &[0, 1, 3, 5]);
        bf16_agrees(chain, &batch, &[0, 2, 5]);
    }

    #[test]
    fn streams_pass_through_cuts_without_a_changed_bit() {
        let (chain, data) = (two_stream_chain(16, 3, 3).unwrap(), Spirals::new(2, 40, 3));
        let batch = data.batch(&(0..40).collect::<Vec<_>>()).unwrap();
        shards_agree(&chain, &batch, &[0, 1, 3, 5]);
        shards_agree(&chain, &batch, &[0, 2, 5]);
        let (_, gradients) = backward(&chain, &batch);
        assert!(gradients.iter().all(|g| g.iter().any(|x| *x != 0.0)), "the loss reaches every parameter");
    }

    #[test]
    fn points_are_a_function_of_the_seed() {
        let values = |seed| Spirals::new(seed, 9, 3).batch(&[8, 1]).unwrap().inputs;
        assert_eq!(values(1), values(1));
        assert_ne!(values(1), values(2));
        let batch = Spirals::new(1, 9, 3).batch(&[8, 1]).unwrap();
        assert_eq!(batch.targets.parts[0].as_i32(), [2, 1]);
        assert!(matches!(
            Spirals::new(1, 9, 3).batch(&[9]),
            Err(DatasetError::OutOfRange { index: 9, len: 9, .. })
        ));
    }

    #[test]
    fn sizes_of_zero_are_refused() {
        assert!(chain(&[], 2).is_err() && chain(&[2, 0], 2).is_err() && chain(&[2], 0).is_err());
        assert!(two_stream_chain(0, 1, 2).is_err());
    }

    #[test]
    fn first_values_are_those_that_recorded_runs_began_with() {
        let chains = [chain(&[2, 4, 4], 3).unwrap(), two_stream_chain(4, 2, 3).unwrap()];
        for param in chains.iter().flat_map(|chain| chain.buffers()).flat_map(|buffer| &buffer.params) {
            let expected = match param.name.as_str() {
                "close.quadrants.weight" => Init::Normal(1.0),
                name => Init::default_for(name, &param.shape),
            };
            assert_eq!(param.init, expected, "{}", param.name);
        }
    }
}
