//! Low-rank adaptation: a few weights beside frozen ones.
//!
//! Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021), section 4: beside the weight `W` of a map stands
//! the product of two thin matrices, and `y = W x + (alpha / rank) B A x`; only `A` and `B` are trained. Names, defaults and
//! files are those of PEFT. A [`Lora`] says which maps get one and what else is trained, and a [`Plan`] what that means for a
//! model, whose layers then have a buffer of frozen and one of trained parameters.

mod attach;
mod config;
mod directory;
mod json;
mod merge;
mod plan;
mod residual;
mod source;
mod targets;
mod writer;

pub use config::{Bias, Lora, LoraInit, TokenRows};
pub use directory::AdapterDir;
pub use merge::MergedWriter;
pub use plan::Plan;
pub use targets::{Layers, Modules, Targets};
pub use writer::AdapterWriter;

pub(crate) use attach::{
    Adaptable, AdaptableMap, Adaptation, Layers as AdaptedLayers, adapted_chain, adapter_elements, plan_of,
    transformer,
};
pub(crate) use plan::unties;
pub(crate) use source::AdapterSource;

/// The file that says what is adapted.
const CONFIG: &str = "adapter_config.json";
/// The file with the values.
const WEIGHTS: &str = "adapter_model.safetensors";

/// What PEFT's names begin with.
const PREFIX: &str = "base_model.model.";

/// How the name of an adapter's parameter is made from that of its map's weight, and what PEFT calls it.
const FACTORS: [(&str, &str); 2] = [(".lora.a.", ".lora_A."), (".lora.b.", ".lora_B.")];

/// Returns whether a parameter is an adapter's, by its full name.
pub(crate) fn is_adapter(param: &str) -> bool {
    FACTORS.iter().any(|(own, _)| param.contains(own))
}

/// The name that PEFT gives an adapter's parameter whose name in transformers, but for the adapter, is `name`.
fn peft_name(name: &str) -> String {
    let name = FACTORS.iter().fold(name.to_owned(), |name, (own, theirs)| name.replace(own, theirs));
    format!("{PREFIX}{name}")
}

/// The name that PEFT gives a parameter of a map that has an adapter, for its name in transformers: `q_proj.bias` is
/// `q_proj.base_layer.bias`.
fn base_layer_name(name: &str) -> String {
    match name.rsplit_once('.') {
        Some((map, own)) => format!("{PREFIX}{map}.base_layer.{own}"),
        None => format!("{PREFIX}{name}"),
    }
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
        assert_eq!(
            base_layer_name("h.0.attn.c_attn.bias"),
            "base_model.model.h.0.attn.c_attn.base_layer.bias"
        );
        assert!(is_adapter("h.3.attn.c_attn.lora.b.weight") && !is_adapter("h.3.attn.c_attn.weight"));
    }
}
