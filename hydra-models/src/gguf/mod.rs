//! Writes language models and their adapters as GGUF files, which llama.cpp and programs that build on it read.
//!
//! A file holds the model's settings, its tokenizer with the chat template, and its tensors under llama.cpp's names and in
//! its layout. Tensors are written one after the other; at most one of them is in memory, and of those that keep their
//! layout only a part.

mod adapter;
mod error;
mod file;
mod layout;
mod quantize;
mod tokens;

pub use error::GgufError;
pub use file::GgufWriter;
pub use layout::GgufLayout;
pub(crate) use layout::{of_decoder, of_gpt2};
pub use quantize::GgufType;
