//! Reads and writes the weights of any chain.
//!
//! A trained chain is one file `model.safetensors` with a tensor for each parameter under its full name, which is the
//! layer's name and the path of fields: `head.linear.weight`. A parameter shared by layers is stored once, under the
//! name of the first of them.
//!
//! ```
//! use burn::module::Module;
//! use burn::nn::{Linear, LinearConfig};
//! use burn::tensor::Device;
//! use hydra_core::{Activation, Chain, CoreError, Forward, Pass};
//! use hydra_models::weights::SafetensorsSource;
//! use std::path::Path;
//!
//! #[derive(Module, Debug)]
//! struct Head {
//!     linear: Linear,
//! }
//!
//! impl Forward for Head {
//!     fn forward(&self, x: Activation, pass: &Pass) -> Activation {
//!         let error = self.linear.forward(x.into_float()) - pass.targets().part(0).into_float::<2>();
//!         Activation::of((error.clone() * error).mean_dim(0).reshape([1]))
//!     }
//! }
//!
//! /// The model with the weights of an earlier run, to continue training or to evaluate.
//! fn saved(file: &Path) -> Result<Chain, Box<dyn std::error::Error>> {
//!     let source = SafetensorsSource::open(file)?;
//!     let head = Head { linear: LinearConfig::new(8, 1).init(&Device::flex()) };
//!     let chain = Chain::builder("mine").layer("head", head).weights(source.clone()).build()?;
//!     source.check(&chain)?;
//!     Ok(chain)
//! }
//! ```

mod directory;
mod export;
mod file;
mod quantized;
mod saved;
mod source;
mod stored;
mod write;

pub use saved::{SaveForm, SavedType};
pub use source::{SafetensorsSource, SafetensorsWriter};
pub use stored::StoredWeights;

#[cfg(test)]
pub(crate) use directory::HEAD;
pub(crate) use directory::{CONFIG, Directory, INDEX, Naming, ParamSource, in_file, read_json};
pub(crate) use export::Export;
pub(crate) use file::TensorFile;
pub(crate) use write::{WriteFailure, failed, read_param, write_model, write_with_metadata};

use hydra_core::{BufferParam, StateRule};

/// Returns whether a parameter is the count of a batch normalization, which files have as an integer without dimensions.
pub(crate) fn is_count(param: &BufferParam) -> bool {
    param.state == Some(StateRule::SUM) && param.len == 1 && param.name.ends_with("num_batches_tracked")
}

/// The file's name, as in Transformers.
pub const WEIGHTS: &str = "model.safetensors";

#[cfg(test)]
pub(crate) mod testing {
    use hydra_core::{Chain, ParamBufferReader, WeightError};

    /// The master weights of a chain in memory.
    #[derive(PartialEq, Debug)]
    pub struct ParamBuffers(pub Vec<bytes::Bytes>);

    impl ParamBuffers {
        /// Fills the buffers from the chain's source with `seed`.
        pub fn of(chain: &Chain, seed: u64) -> Self {
            let fill = |index: usize| {
                let mut out = vec![0.0; chain.buffers()[index].elements];
                chain.source().fill(chain, index, seed, &mut out).unwrap();
                bytes::Bytes::copy_from_slice(bytemuck::cast_slice(&out))
            };
            Self((0..chain.buffers().len()).map(fill).collect())
        }
    }

    /// Master weights that fail to read.
    pub struct Broken;

    impl ParamBufferReader for Broken {
        fn buffer(&self, buffer: usize) -> Result<bytes::Bytes, WeightError> {
            let source = std::io::Error::other("gone").into();
            Err(WeightError::ParamBuffer { chain: "c".to_owned(), buffer, source })
        }
    }

    impl ParamBufferReader for ParamBuffers {
        fn buffer(&self, buffer: usize) -> Result<bytes::Bytes, WeightError> {
            Ok(self.0[buffer].clone())
        }
    }
}
