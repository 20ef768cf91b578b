//! What can be wrong with a chain or a spec, and how errors are told.

/// An invalid chain or training spec.
#[derive(Debug, thiserror::Error)]
pub enum CoreError {
    /// A chain without layers.
    #[error("chain `{chain}` has no layers: add at least the layer that returns the loss")]
    EmptyChain {
        /// The chain's name.
        chain: String,
    },
    /// Two layers of one name.
    #[error(
        "chain `{chain}` has two layers called `{layer}`; names must differ, because weights are stored under them"
    )]
    DuplicateLayer {
        /// The chain's name.
        chain: String,
        /// The layer's name.
        layer: String,
    },
    /// A layer names one parameter twice.
    #[error(
        "layer `{layer}` of chain `{chain}` has the parameter `{param}` twice; parameters can be shared between layers, not within one"
    )]
    SharedWithinLayer {
        /// The chain's name.
        chain: String,
        /// The layer's name.
        layer: String,
        /// The second of the two places.
        param: String,
    },
    /// A module holds values of another type than `f32`.
    #[error(
        "parameter `{param}` of layer `{layer}` holds values of type {found}, expected F32: masters are kept in f32"
    )]
    GivenDtype {
        /// The layer's name.
        layer: String,
        /// The parameter's path.
        param: String,
        /// The type found.
        found: String,
    },
    /// A parameter that is tied between layers has different shapes.
    #[error(
        "chain `{chain}`: `{first}` and `{second}` share a parameter but have shapes {first_shape:?} and {second_shape:?}"
    )]
    TiedShapes {
        /// The chain's name.
        chain: String,
        /// The parameter's full name in the first layer.
        first: String,
        /// The parameter's full name in the other layer.
        second: String,
        /// Its shape in the first.
        first_shape: Vec<usize>,
        /// Its shape in the other.
        second_shape: Vec<usize>,
    },
    /// A tied parameter is frozen in one layer and trained in another.
    #[error(
        "chain `{chain}`: the shared parameter `{param}` is frozen in one layer and trained in another; freeze both layers or none"
    )]
    TiedFrozen {
        /// The chain's name.
        chain: String,
        /// The parameter's full name.
        param: String,
    },
    /// Every layer is frozen.
    #[error("chain `{chain}` has nothing to train: every layer with parameters is frozen")]
    NothingToTrain {
        /// The chain's name.
        chain: String,
    },
    /// A value of a training spec is out of its range.
    #[error("`{name}` is {found}, expected {expected}")]
    Spec {
        /// The value's name.
        name: &'static str,
        /// What was given.
        found: String,
        /// What is allowed.
        expected: &'static str,
    },
}

/// What an error says, with its causes, in one line.
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}
