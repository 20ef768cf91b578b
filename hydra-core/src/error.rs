//! Errors of chains and specs, and their messages.

/// An invalid chain or training spec.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the error messages describe the fields")]
pub enum CoreError {
    /// A chain without layers.
    #[error("chain `{chain}` has no layers: add at least the layer that returns the loss")]
    EmptyChain { chain: String },
    /// Two layers with the same name.
    #[error(
        "chain `{chain}` has two layers called `{layer}`; names must differ, because weights are stored under them"
    )]
    DuplicateLayer { chain: String, layer: String },
    /// A layer uses one parameter twice.
    #[error(
        "layer `{layer}` of chain `{chain}` has the parameter `{param}` twice; parameters can be shared between layers, not within one"
    )]
    SharedWithinLayer {
        chain: String,
        layer: String,
        /// The second of the two paths.
        param: String,
    },
    /// A module holds values of another type than `f32`.
    #[error(
        "parameter `{param}` of layer `{layer}` holds values of type {found}, expected F32: master weights are kept in f32"
    )]
    GivenDtype { layer: String, param: String, found: String },
    /// The code of a layer panicked while its chain was built.
    #[error("layer `{layer}` of chain `{chain}` panicked while the chain was built: {message}")]
    LayerPanicked { chain: String, layer: String, message: String },
    /// A layer updates state in its forwards.
    #[error(
        "layer `{layer}` of chain `{chain}` updates running statistics in `{param}` by itself, in each forward pass, also in one that is recomputed and in evaluations: use `hydra_models::BatchNorm` instead of Burn's, or keep them in a `hydra_core::State`"
    )]
    RunningStatistics {
        chain: String,
        layer: String,
        /// The path of the first of them.
        param: String,
    },
    /// A parameter's load mapper is not supported, so its shape in forwards is unknown.
    #[error(
        "parameter `{param}` of layer `{layer}` has a load mapper that does more than permute dimensions; give it values before the chain is built"
    )]
    StoredForm { layer: String, param: String },
    /// A lazy parameter's own initializer cannot be drawn with a task's seed.
    #[error(
        "the initializer of parameter `{param}` of layer `{layer}` is not recognized as a uniform distribution, a normal one or fixed values: return one from `Forward::init`, or read the parameter before the chain is built, so that its values are used (no other thread may draw from Burn's generator meanwhile)"
    )]
    UnknownInitializer { layer: String, param: String },
    /// A parameter that is tied between layers has different shapes.
    #[error(
        "chain `{chain}`: `{first}` and `{second}` share a parameter but have shapes {first_shape:?} and {second_shape:?}"
    )]
    TiedShapes {
        chain: String,
        /// The parameter's full name in the first layer.
        first: String,
        second: String,
        first_shape: Vec<usize>,
        second_shape: Vec<usize>,
    },
    /// A tied parameter is frozen in one layer and trained in another.
    #[error(
        "chain `{chain}`: the shared parameter `{param}` is frozen in one layer and trained in another; freeze both layers or none"
    )]
    TiedFrozen { chain: String, param: String },
    /// A tied parameter is a state of one layer, and not of another or with another rule.
    #[error(
        "chain `{chain}`: the shared parameter `{param}` is a state in one layer, and an optimized parameter or a state with another rule \
         in another; declare it alike in both"
    )]
    TiedStates { chain: String, param: String },
    /// A metric whose name is not unique.
    #[error(
        "chain `{chain}` has a metric called `{metric}`; metric names must be unique, not empty and neither `loss` nor `perplexity`"
    )]
    MetricName { chain: String, metric: String },
    /// An objective, and properties of a last layer that computes the loss itself.
    #[error(
        "chain `{chain}` has an objective, which names the metrics: build it without `metrics` and `language_model`, which describe a \
         last layer that returns the loss"
    )]
    TwoObjectives { chain: String },
    /// A metric that the chain's objective does not have.
    #[error("chain `{chain}` has no metric `{metric}`; its evaluations have {expected}")]
    NoSuchMetric { chain: String, metric: String, expected: String },
    /// A layer to train does not exist in the chain.
    #[error("chain `{chain}` has no layer `{layer}` to train; it has {layers}")]
    NoSuchLayer {
        chain: String,
        layer: String,
        /// The names of the chain's layers.
        layers: String,
    },
    /// Every parameter is frozen.
    #[error("chain `{chain}` has nothing to train: every parameter is frozen")]
    NothingToTrain { chain: String },
    /// A quantized matrix is trained, or several layers use it.
    #[error(
        "chain `{chain}` trains the quantized matrix `{param}` or shares it among layers: freeze it, or do not quantize it"
    )]
    QuantizedTrained { chain: String, param: String },
    /// A value of a training spec is out of its range.
    #[error("`{name}` is {found}, expected {expected}")]
    Spec { name: &'static str, found: String, expected: &'static str },
}

/// Returns the messages of an error and its causes, joined in one line.
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

/// Returns an error if a value is not finite or not `in_range`.
pub(crate) fn in_range(
    name: &'static str,
    value: f64,
    in_range: bool,
    expected: &'static str,
) -> Result<(), CoreError> {
    match value.is_finite() && in_range {
        true => Ok(()),
        false => Err(CoreError::Spec { name, found: value.to_string(), expected }),
    }
}

pub(crate) fn at_least_zero(name: &'static str, value: f64) -> Result<(), CoreError> {
    in_range(name, value, value >= 0.0, "a finite number, zero or above")
}

pub(crate) fn below_one(name: &'static str, value: f64) -> Result<(), CoreError> {
    in_range(name, value, (0.0..1.0).contains(&value), "a number in [0, 1)")
}

pub(crate) fn positive(name: &'static str, value: usize) -> Result<(), CoreError> {
    match value {
        0 => Err(CoreError::Spec { name, found: "0".to_owned(), expected: "at least 1" }),
        _ => Ok(()),
    }
}

pub(crate) fn countable(name: &'static str, value: usize) -> Result<(), CoreError> {
    match u32::try_from(value) {
        Ok(1..) => Ok(()),
        _ => {
            let expected = "at least 1 and at most 4294967295";
            Err(CoreError::Spec { name, found: value.to_string(), expected })
        }
    }
}
