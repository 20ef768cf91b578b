//! Models of Transformers: a configuration, the directory with its weights, a writer and adapters, in the same way for every
//! architecture.
//!
//! An [`Architecture`] is a configuration with what distinguishes its models from others. The rest exists once:
//! [`PretrainedModel`] is the [`Model`](crate::family::Model) of a configuration, [`PretrainedDir`] its directory, and
//! [`PretrainedWriter`] its writer. Each architecture has aliases of them, such as [`Gpt2Dir`](crate::gpt2::Gpt2Dir).

mod architecture;
mod directory;
mod model;
mod writer;

pub use architecture::Architecture;
pub use directory::PretrainedDir;
pub use model::PretrainedModel;
pub use writer::PretrainedWriter;

use crate::ModelError;
use hydra_core::Chain;
use serde::Serialize;
use serde_json::{Map, Value};

/// The chain of a configuration. Its initial weights come from `source`, or from the task's seed.
///
/// # Errors
/// An invalid configuration.
pub(crate) fn chain<C: Architecture>(
    config: &C,
    source: Option<PretrainedDir<C>>,
) -> Result<Chain, ModelError> {
    let chain = config.layers(None)?.chain;
    let chain = match source {
        Some(source) => chain.weights(source.into_weights()),
        None => chain,
    };
    Ok(chain.build()?)
}

/// The keys of a configuration in its file.
///
/// # Errors
/// Numbers that JSON cannot represent.
pub(crate) fn keys(config: &impl Serialize) -> Result<Map<String, Value>, ModelError> {
    let keys = serde_json::to_value(config).and_then(serde_json::from_value);
    keys.map_err(|source| ModelError::Describe { source })
}
