//! Models, tokenizers and datasets: GPT-2, Llama and related decoders, BERT and related encoders, vision transformers,
//! ConvNeXt, ResNet, MLP and CNN chains, and Hugging Face weights.
//!
//! A model is a function from a configuration to a [`Chain`](hydra_core::Chain): [`gpt2::chain`] for a
//! [`gpt2::Gpt2Config`] (a preset, or that of a Hugging Face directory), [`decoder::chain`] for the
//! [`decoder::DecoderConfig`] of a Llama, Mistral or Qwen, [`encoder::chain`] for the [`encoder::EncoderConfig`] of a
//! BERT, RoBERTa, DistilBERT or ModernBERT with a classifier, [`vit::chain`] for the [`vit::VitConfig`] of a vision
//! transformer, [`convnext::chain`] and [`resnet::chain`] for the [`convnext::ConvNextConfig`] and the
//! [`resnet::ResNetConfig`] of convolutional networks, and [`mlp::chain`]
//! and [`cnn::chain`] for tests and first steps. [`family`] finds the model of a name or directory, and [`pretrained`] opens and
//! writes directories of all architectures alike. [`lora`] adds adapters to a frozen model. [`objective`] holds what
//! classifiers are trained for. [`data`] and [`tokenizer`] make token blocks from texts and examples from instruction
//! data. [`ops`] holds the operations with a hand-written backward pass. [`weights`] saves and loads any chain, and [`gguf`] writes
//! language models for llama.cpp. [`generation`] continues texts, and [`metrics`] compares them with references.
//!
//! ```
//! use hydra_models::gpt2::{self, Gpt2Config};
//!
//! let config = Gpt2Config::preset("bytes-tiny")?;
//! let chain = gpt2::chain(&config, None)?;
// The embedding, one layer per block, and the head with its loss.
//! assert_eq!(chain.len(), config.n_layer + 2);
//! # Ok::<(), hydra_models::ModelError>(())
//! ```
//!
//! Invariant: this crate never opens a connection, never draws from a global random generator, never holds a model's
//! weights whole, and never computes a result that depends on the number of threads.
#![deny(unsafe_code)]

pub mod cnn;
pub mod convnext;
pub mod data;
pub mod decoder;
pub mod encoder;
mod error;
pub mod family;
pub mod generation;
pub mod gguf;
pub mod gpt2;
pub mod lora;
pub mod metrics;
pub mod mlp;
pub mod objective;
pub mod ops;
pub mod parts;
pub mod pretrained;
pub mod resnet;
mod synthetic;
pub mod tokenizer;
pub mod vit;
pub mod weights;

pub use error::ModelError;
pub use parts::BatchNorm;
