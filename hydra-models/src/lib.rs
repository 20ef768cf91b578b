//! The workload: GPT-2, Llama and its relatives, a vision transformer, ConvNeXt, an MLP and a CNN chain, tokenizers,
//! datasets, Hugging Face weights.
//!
//! A model here is a function from a description to a [`Chain`](hydra_core::Chain): [`gpt2::chain`] for a
//! [`gpt2::Gpt2Config`] (a preset, or the one of a Hugging Face directory), [`decoder::chain`] for the
//! [`decoder::DecoderConfig`] of a Llama, Mistral or Qwen, [`vit::chain`] for the [`vit::VitConfig`] of a vision
//! transformer, [`convnext::chain`] for the [`convnext::ConvNextConfig`] of a convolutional network, [`mlp::chain`] and [`cnn::chain`] for tests and first steps; [`family`] finds which language model a name or
//! a directory asks for. [`lora`] puts adapters beside a frozen one. [`data`] and [`tokenizer`] make blocks of tokens of
//! texts, and examples of instruction data, and [`ops`] holds the operations whose backward is written by hand. [`weights`]
//! saves any chain and reads it back.
//!
//! ```
//! use hydra_models::gpt2::{self, Gpt2Config};
//!
//! let config = Gpt2Config::preset("bytes-tiny")?;
//! let chain = gpt2::chain(&config, None)?;
//! // The embedding, one layer for each block, and the head with its loss.
//! assert_eq!(chain.len(), config.n_layer + 2);
//! # Ok::<(), hydra_models::ModelError>(())
//! ```
//!
//! Invariant: this crate never opens a connection, never draws from a global random generator, never holds
//! a model's weights whole, and never computes a result that depends on the number of threads.
#![deny(unsafe_code)]

pub mod cnn;
pub mod convnext;
pub mod data;
pub mod decoder;
mod error;
pub mod family;
pub mod gpt2;
pub mod lora;
pub mod mlp;
pub mod ops;
pub mod parts;
mod synthetic;
pub mod tokenizer;
pub mod vit;
pub mod weights;

pub use error::ModelError;
