//! The workload: GPT-2, an MLP and a CNN chain, tokenizers, datasets, Hugging Face weights.
#![forbid(unsafe_code)]

pub mod data;
pub mod ops;
pub mod tokenizer;
