//! The workload: GPT-2, an MLP and a CNN chain, tokenizers, datasets, Hugging Face weights.

pub mod data;
pub mod tokenizer;
