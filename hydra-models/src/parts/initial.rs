//! The initial weights of most layers.

use super::Adapter;
use hydra_core::Init;

/// The initial weights of a layer's parameter, by its name within the layer, as in Transformers: normally distributed with this
/// standard deviation, but biases are 0, weights of normalizations 1, and adapters those of PEFT.
pub(crate) fn initial(name: &str, shape: &[usize], deviation: f64) -> Init {
    let is_norm = name.contains("norm") || name.starts_with("ln_");
    Adapter::init(name, shape).unwrap_or(match name {
        _ if name.ends_with("bias") => Init::Zeros,
        _ if is_norm => Init::Ones,
        _ => Init::Normal(deviation),
    })
}
