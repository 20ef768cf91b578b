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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::PREPROCESSOR;
    use crate::family::{Classes, NamedConfig, Reads};
    use crate::weights::testing::ParamBuffers;
    use crate::weights::{CONFIG, WEIGHTS, read_json};
    use crate::{convnext, decoder, encoder, gpt2, resnet, vit};
    use hydra_core::ModelWriter;
    use std::fs;
    use tempfile::TempDir;

    fn is_read_as_it_was_written<C: Architecture>(preset: &str) {
        let (from, to) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        let mut config = NamedConfig::find(C::PRESETS, preset).unwrap();
        config.classes_mut().into_iter().for_each(|classes| *classes = Classes::numbered(3));
        let fresh = chain(&config, None).unwrap();
        let buffers = ParamBuffers::of(&fresh, 7);
        PretrainedWriter::new(config.clone()).write(&fresh, &buffers, from.path()).unwrap();
        let mut files = vec![WEIGHTS];
        if let Reads::Images { .. } = config.reads() {
            let file = from.path().join(PREPROCESSOR);
            assert!(fs::read_to_string(&file).unwrap().contains("ViTImageProcessor"), "{preset}");
            fs::write(&file, "{}").unwrap();
            files.extend([CONFIG, PREPROCESSOR]);
        }
        let source = PretrainedDir::<C>::open(from.path()).unwrap();
        let mut read = source.config().clone();
        assert!(read.classes_mut().is_none_or(|classes| classes.count() == 3), "{preset}");
        assert_eq!((read.reads(), read.task_type()), (config.reads(), config.task_type()), "{preset}");
        let loaded = chain(source.config(), Some(source.clone())).unwrap();
        assert_eq!(ParamBuffers::of(&loaded, 0), buffers, "{preset}");
        PretrainedWriter::from(&source).write(&loaded, &buffers, to.path()).unwrap();
        for name in files {
            let [from, to] = [&from, &to].map(|dir| fs::read(dir.path().join(name)).unwrap());
            assert_eq!(from, to, "{name} of {preset}");
        }
        // The keys of a file may come in another order than those of a preset.
        let keys = |dir: &TempDir| read_json::<Value>(&dir.path().join(CONFIG)).unwrap();
        assert_eq!(keys(&from), keys(&to), "{preset}");
    }

    #[test]
    fn models_are_read_as_they_were_written_with_what_belongs_to_them() {
        is_read_as_it_was_written::<gpt2::Gpt2Config>("bytes-tiny");
        is_read_as_it_was_written::<decoder::DecoderConfig>("bytes-llama-tiny");
        is_read_as_it_was_written::<encoder::EncoderConfig>("bytes-bert-tiny");
        is_read_as_it_was_written::<vit::VitConfig>("vit-tiny");
        is_read_as_it_was_written::<convnext::ConvNextConfig>("convnext-mini");
        is_read_as_it_was_written::<resnet::ResNetConfig>("resnet-mini");
    }
}
