//! The last layer: the classifier of each sequence.

use super::modern::Pooling;
use super::{EncoderConfig, ModelType};
use crate::lora::{Adaptable, AdaptableMap, adapter_elements};
use crate::ops;
use crate::parts::{Activate, Linear, Norm, Sequences, initial};
use burn::module::Module;
use burn::tensor::{FloatDType, Int, Tensor};
use hydra_core::{Activation, Forward, Init, Pass};

/// The head of Transformers' `..ForSequenceClassification`. Computes logits `[items, outputs]` from the first token of each
/// sequence, `[1, items, width]`, or, where it reads their means, from one row `[1, tokens, width]` that holds all
/// [`Sequences`]: one vector of each sequence goes through a linear layer, an activation function and the classifier.
#[derive(Module, Debug)]
pub struct ClassificationHead {
    /// Of the vectors of tokens, if the blocks do not end with one.
    pub final_norm: Option<Norm>,
    /// The first linear layer, `[width, width]`.
    pub dense: Linear,
    /// After the activation function, if the model has it.
    pub norm: Option<Norm>,
    /// The classifier, `[outputs, width]`.
    pub classifier: Linear,
    #[module(skip)]
    options: HeadOptions,
}

#[derive(Clone, Debug)]
struct HeadOptions {
    pooling: Pooling,
    activate: Activate,
    /// The dropout probabilities before the first linear layer and before the classifier.
    dropouts: [f64; 2],
    /// The standard deviations of the initial weights of both linear layers.
    deviations: [f64; 2],
}

impl HeadOptions {
    fn new(config: &EncoderConfig) -> Self {
        let (modern, dropout) = (config.modern.as_ref(), config.head_dropout());
        let (activate, first) = match config.model_type {
            ModelType::Bert => (Activate::Tanh, 0.0),
            ModelType::Roberta | ModelType::XlmRoberta => (Activate::Tanh, dropout),
            ModelType::DistilBert => (Activate::Relu, 0.0),
            ModelType::ModernBert => {
                let named = modern.and_then(|modern| Activate::named(&modern.classifier_activation));
                (named.unwrap_or(Activate::Gelu), 0.0)
            }
        };
        let deviation = match modern {
            Some(_) => 1.0 / (config.hidden_size as f64).sqrt(),
            None => config.initializer_range,
        };
        Self {
            pooling: config.pooling(),
            activate,
            dropouts: [first, dropout],
            deviations: [config.outward_deviation(), deviation],
        }
    }
}

impl ClassificationHead {
    /// The layer without values.
    pub fn new(config: &EncoderConfig) -> Self {
        let (width, modern) = (config.hidden_size, config.modern.as_ref());
        let norm = || modern.map(|_| config.norm());
        Self {
            final_norm: norm(),
            dense: Linear::new(width, width, modern.is_none_or(|modern| modern.classifier_bias)),
            norm: norm(),
            classifier: Linear::new(width, config.head.outputs(), true),
            options: HeadOptions::new(config),
        }
    }

    /// The vector of each sequence, `[1, items, width]`.
    fn pooled(&self, x: Tensor<3>, pass: &Pass) -> Tensor<3> {
        let x = Norm::optional(self.final_norm.as_ref(), x);
        match self.options.pooling {
            Pooling::First => x,
            Pooling::Mean => means(x, Sequences::of(pass)),
        }
    }
}

/// The means `[1, items, width]` over the tokens of each sequence of one row `[1, tokens, width]`.
fn means(x: Tensor<3>, Sequences { firsts, lengths, .. }: Sequences) -> Tensor<3> {
    let ([_, tokens, width], [items]) = (x.dims(), firsts.dims());
    let (float, x) = (FloatDType::from(x.dtype()), x.cast(FloatDType::F32));
    let at = Tensor::<1, Int>::arange(0..tokens as i64, &x.device()).cast(firsts.dtype());
    let at = at.reshape([1, tokens]).expand([items, tokens]);
    let column = |of: Tensor<1, Int>| of.reshape([items, 1]).expand([items, tokens]);
    let ends = column(firsts.clone() + lengths.clone());
    let own = at.clone().greater_equal(column(firsts)).bool_and(at.lower(ends));
    let own = own.float().cast(FloatDType::F32).unsqueeze_dim(0);
    let none = Tensor::<1>::zeros([width], &x.device()).cast(FloatDType::F32);
    // A product with zeros and ones, so that sums have the order of all matrix products.
    let sums = ops::linear(own, x.reshape([tokens, width]), none);
    // In 32 bits, because sums and lengths may exceed what 16 bits represent; the mean is rounded once.
    (sums / lengths.float().cast(FloatDType::F32).reshape([1, items, 1])).cast(float)
}

impl Adaptable for ClassificationHead {
    fn maps(&mut self) -> Vec<AdaptableMap<'_>> {
        vec![self.dense.adaptable("dense"), self.classifier.adaptable("classifier")]
    }
}

impl Forward for ClassificationHead {
    /// # Panics
    /// If it reads means, and the input has several rows or the targets do not hold the sequences.
    fn forward(&self, x: Activation, pass: &Pass) -> Activation {
        let pooled = self.pooled(x.part(0).into_float(), pass);
        let [first, second] = self.options.dropouts;
        let x = self.dense.forward(ops::dropout(pooled, first, pass.site(0)), pass);
        let x = Norm::optional(self.norm.as_ref(), self.options.activate.forward(x));
        let logits = self.classifier.forward(ops::dropout(x, second, pass.site(1)), pass);
        Activation::of(logits.squeeze_dim::<2>(0))
    }

    fn init(&self, name: &str, shape: &[usize]) -> Init {
        let [dense, classifier] = self.options.deviations;
        initial(name, shape, if name == "dense.weight" { dense } else { classifier })
    }

    fn working_bytes(&self, inputs: &[Vec<usize>]) -> Option<u64> {
        let [batch, tokens, width] = *inputs.first()?.as_slice() else { return None };
        let [outputs, _] = self.classifier.weight.lazy_shape().dims();
        // The input has a token for each sequence, or all tokens, whose means multiply a matrix for each of at most some hundred sequences.
        let masks = if self.options.pooling == Pooling::Mean { 8 * tokens.min(512) } else { 0 };
        let elements = batch * tokens * (20 * width + 8 * outputs + masks + adapter_elements(self));
        Some(((elements + 256 * width) * size_of::<f32>()) as u64)
    }
}
