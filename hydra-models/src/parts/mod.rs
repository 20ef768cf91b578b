//! Layers shared by model families; fields are named as in Transformers.
//!
//! Parameters here have shapes but no memory: a chain fills them when it promotes a layer.

mod activate;
mod adapter;
mod batch_norm;
mod generation;
mod image_head;
mod initial;
mod language_head;
mod linear;
mod norm;
mod outputs;
mod patches;
mod score;
mod sequences;
mod table;
mod tokens;
pub(crate) mod vocabulary;

pub use activate::Activate;
pub(crate) use adapter::AdapterOptions;
pub use adapter::{Adapter, Factor};
pub use batch_norm::BatchNorm;
pub(crate) use generation::{SEQUENCES, generating, last_tokens, next_logits, slots};
pub use image_head::ImageHead;
pub(crate) use image_head::ImagePooling;
pub(crate) use initial::initial;
pub(crate) use language_head::{HeadRows, chunk_rows};
pub use linear::Linear;
pub use norm::Norm;
pub use outputs::class_logits;
pub(crate) use outputs::{before_last, table_logits};
pub use patches::Projection;
pub(crate) use patches::check_images;
pub use score::ScoreHead;
pub(crate) use score::{SCORE, is_score};
pub(crate) use sequences::Pooled;
pub use sequences::Sequences;
pub use table::Table;
pub(crate) use tokens::{Segments, along, check_length, language_model, targets, with_positions};

use burn::module::{Param, ParamId};
use burn::tensor::{Device, Shape, Tensor};

/// A parameter with a shape but no memory.
pub(crate) fn uninitialized<const D: usize>(shape: [usize; D]) -> Param<Tensor<D>> {
    let absent = |_: &Device, _: bool| panic!("a parameter was read before its layer was promoted");
    Param::uninitialized(ParamId::new(), absent, Device::flex(), true, Shape::from(shape))
}
