//! Low-rank adaptation (LoRA): trains small adapters while the base weights stay frozen.
//!
//! Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021), section 4: the product of two low-rank
//! matrices is added to the weight `W` of a linear module, `y = W x + (alpha / rank) B A x`; only `A` and `B` are
//! trained. Names, defaults and files are those of PEFT. A [`Lora`] holds the settings: target modules and other
//! trained modules. A [`Plan`] resolves them for a model, whose layers then have one buffer of frozen and one of
//! trained parameters.

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

pub use config::{Base, Bias, Lora, LoraInit, TokenRows};
pub use directory::AdapterDir;
pub use merge::MergedWriter;
pub use plan::Plan;
pub use targets::{Layers, Modules, Targets};
pub use writer::AdapterWriter;

pub(crate) use attach::{
    Adaptable, AdaptableMap, Adaptation, Layers as AdaptedLayers, adapted_chain, adapter_elements,
    is_quantized, plan_of, transformer,
};
pub(crate) use plan::{RankAndScale, unties};
pub(crate) use source::AdapterSource;

/// The file with the configuration.
const CONFIG: &str = "adapter_config.json";
/// The file with the weights.
const WEIGHTS: &str = "adapter_model.safetensors";

/// The metadata of the weights' file with the class names of a classifier by number, which PEFT does not store. JSON.
const LABELS: &str = "id2label";

/// The metadata of the weights' file with what a classifier's outputs mean, a Transformers `problem_type`.
const PROBLEM: &str = "problem_type";

/// The key of the form of the base, if it is quantized, in the metadata of an adapter's weight file.
const BASE: &str = "base";
/// Its value for [`Base::Nf4`].
const NF4: &str = "nf4";

/// The prefix of PEFT's names.
const PREFIX: &str = "base_model.model.";

/// The modules that PEFT trains in full with the adapters of a sequence classifier; a model has some of them.
const CLASSIFIERS: [&str; 2] = ["classifier", "score"];

/// The parts that name adapter parameters: in the chain, and in PEFT.
const FACTORS: [(&str, &str); 2] = [(".lora.a.", ".lora_A."), (".lora.b.", ".lora_B.")];

/// Returns whether the parameter of this full name belongs to an adapter.
pub(crate) fn is_adapter(param: &str) -> bool {
    FACTORS.iter().any(|(own, _)| param.contains(own))
}

/// PEFT's name of an adapter parameter; `name` is Transformers' name with the adapter part.
fn peft_name(name: &str) -> String {
    let name = FACTORS.iter().fold(name.to_owned(), |name, (own, theirs)| name.replace(own, theirs));
    format!("{PREFIX}{name}")
}

/// PEFT's name of a parameter of an adapted module, from its Transformers name: `q_proj.bias` becomes
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
