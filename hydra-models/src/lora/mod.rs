//! Low-rank adaptation: a few weights beside frozen ones.
//!
//! Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021), section 4: beside the weight `W` of a map stands
//! the product of two thin matrices, and `y = W x + (alpha / rank) B A x`; only `A` and `B` are trained. Names, defaults and
//! files are those of PEFT. A [`Lora`] says which maps get one; a model's layers then have an image of frozen and one of
//! trained parameters, and first values come from [`AdapterSource`].

mod attach;
mod config;
mod directory;
mod merge;
mod source;
mod writer;

pub use config::Lora;
pub use directory::AdapterDir;
pub use merge::MergedWriter;
pub use source::AdapterSource;
pub use writer::AdapterWriter;

pub(crate) use attach::{Adaptable, AdaptableMap, adapter_elements, language_model, transformer};

/// How the name of an adapter's parameter is made from that of its map's weight, and what PEFT calls it.
const FACTORS: [(&str, &str); 2] = [(".lora.a.", ".lora_A."), (".lora.b.", ".lora_B.")];

/// Returns whether a parameter is an adapter's, by its full name.
pub(crate) fn is_adapter(param: &str) -> bool {
    FACTORS.iter().any(|(own, _)| param.contains(own))
}

/// The name that PEFT gives an adapter's parameter whose name in transformers, but for the adapter, is `name`.
fn peft_name(name: &str) -> String {
    let name = FACTORS.iter().fold(name.to_owned(), |name, (own, theirs)| name.replace(own, theirs));
    format!("base_model.model.{name}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_peft() {
        assert_eq!(
            peft_name("model.layers.0.self_attn.q_proj.lora.a.weight"),
            "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
        );
        assert!(is_adapter("h.3.attn.c_attn.lora.b.weight") && !is_adapter("h.3.attn.c_attn.weight"));
    }
}
