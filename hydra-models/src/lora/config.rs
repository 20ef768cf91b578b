//! Adapter settings.

use super::CLASSIFIERS;
use super::targets::{Layers, Modules, Targets};
use crate::ModelError;
use crate::family::supported::refuse;
use serde::{Deserialize, Serialize};

/// Adapter settings, with the meaning of PEFT's `LoraConfig`.
#[derive(Clone, Debug, PartialEq)]
pub struct Lora {
    /// The rank of adapters.
    pub rank: usize,
    /// The adapter's output is multiplied by `alpha / rank`, or by `alpha / sqrt(rank)` with [`rslora`](Self::rslora).
    pub alpha: f64,
    /// The dropout probability of an adapter's input elements in training.
    pub dropout: f64,
    /// The modules that are adapted.
    pub targets: Targets,
    /// Modules that are not adapted even if [`targets`](Self::targets) match them.
    pub exclude: Option<Modules>,
    /// The blocks whose modules are adapted; `None` for all.
    pub layers: Option<Layers>,
    /// Ranks of individual modules, by regular expressions for the ends of their names; the first match applies.
    pub rank_pattern: Vec<(String, usize)>,
    /// Values of [`alpha`](Self::alpha) of individual modules, likewise.
    pub alpha_pattern: Vec<(String, f64)>,
    /// Whether scaling is that of rank-stabilized LoRA (Kalajdzievski, 2023).
    pub rslora: bool,
    /// The base model's biases that are trained.
    pub bias: Bias,
    /// Whether adapters have biases.
    pub lora_bias: bool,
    /// The initialization of adapters.
    pub init: LoraInit,
    /// Base modules that are trained in full, by the ends of their names.
    pub modules_to_save: Vec<String>,
    /// Whether a table shared by embedding and head stays shared when it is trained.
    pub ensure_weight_tying: bool,
    /// Individually replaced rows of embedding tables.
    pub tokens: Vec<TokenRows>,
    /// The form of the frozen linear modules.
    pub base: Base,
}

/// The form of the frozen linear modules of a model with adapters. Embeddings, norms, biases and the head stay in the model's
/// type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Base {
    /// Floats.
    #[default]
    Float,
    /// Quantized to 4 bits ([`nf4`](hydra_core::nf4)), as bitsandbytes does.
    Nf4,
}

/// Rows of an embedding table that have their own values in the adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenRows {
    /// The end of the table's name, or `None` for the input embedding.
    pub module: Option<String>,
    /// The row indices.
    pub rows: Vec<usize>,
}

/// The base model's biases that are trained.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Bias {
    /// No biases.
    #[default]
    None,
    /// All biases.
    All,
    /// The biases of adapted modules.
    LoraOnly,
}

impl Bias {
    /// The values by PEFT's names.
    pub(super) const NAMED: [(&str, Self); 3] =
        [("none", Self::None), ("all", Self::All), ("lora_only", Self::LoraOnly)];
}

/// The initialization of adapters. Two kinds subtract the initial adapter from the base weight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LoraInit {
    /// From the seed, with an unchanged base: PEFT's default and other kinds that leave the base unchanged.
    #[default]
    Beside,
    /// With an unchanged base; `B` stays frozen and only `A` is trained (MiCA).
    FrozenB,
    /// From the largest singular values of the base weight, which are subtracted from it (Meng et al., "PiSSA", 2024).
    Pissa,
    /// From the first columns of the base weight's QR decomposition, which are subtracted from it (Büyükakyüz, "OLoRA",
    /// 2024).
    Olora,
}

impl Default for Lora {
    /// PEFT's defaults, with the model family's targets.
    fn default() -> Self {
        Self {
            rank: 8,
            alpha: Self::ALPHA,
            dropout: 0.0,
            targets: Targets::default(),
            exclude: None,
            layers: None,
            rank_pattern: Vec::new(),
            alpha_pattern: Vec::new(),
            rslora: false,
            bias: Bias::None,
            lora_bias: false,
            init: LoraInit::Beside,
            modules_to_save: Vec::new(),
            ensure_weight_tying: false,
            tokens: Vec::new(),
            base: Base::Float,
        }
    }
}

/// The exclusive upper bound of ranks.
const WIDEST: usize = 1 << 16;

impl Lora {
    /// PEFT's default of [`alpha`](Self::alpha).
    pub const ALPHA: f64 = 8.0;

    /// The scale of an adapter with this rank and alpha.
    pub(super) fn scale_of(&self, rank: usize, alpha: f64) -> f64 {
        let rank = rank as f64;
        if self.rslora { alpha / rank.sqrt() } else { alpha / rank }
    }

    /// The same settings with target names mapped by `name`.
    pub(crate) fn with_targets(mut self, name: for<'a> fn(&'a str) -> &'a str) -> Self {
        if let Targets::Names(names) = &mut self.targets {
            names.iter_mut().for_each(|target| *target = name(target).to_owned());
            names.dedup();
        }
        self
    }

    /// The same settings for a sequence classifier: PEFT trains modules with the names of classifiers in full.
    pub(crate) fn with_classifier(mut self) -> Self {
        let new = CLASSIFIERS.iter().filter(|name| !self.modules_to_save.iter().any(|own| own == *name));
        let new: Vec<String> = new.map(|name| (*name).to_owned()).collect();
        self.modules_to_save.extend(new);
        self
    }

    /// Everything besides names and shapes that cost and results depend on.
    pub(crate) fn description(&self) -> String {
        let Self { rank, alpha, dropout, .. } = self;
        let plain = Self { rank: *rank, alpha: *alpha, dropout: *dropout, ..Self::default() };
        let rest = Self { targets: Targets::default(), ..self.clone() };
        let short = format!("lora {rank} alpha {alpha} dropout {dropout}");
        if rest == plain { short } else { format!("{short}, {rest:?}") }
    }

    /// Checks the numbers.
    ///
    /// # Errors
    /// The first invalid value.
    pub fn validate(&self) -> Result<(), ModelError> {
        let ranks = self.rank_pattern.iter().map(|(_, rank)| *rank).chain([self.rank]);
        for rank in ranks {
            if !(1..=WIDEST).contains(&rank) {
                return Err(refuse("lora rank", rank, format!("1 to {WIDEST}")));
            }
        }
        for alpha in self.alpha_pattern.iter().map(|(_, alpha)| *alpha).chain([self.alpha]) {
            if !(alpha.is_finite() && alpha > 0.0) {
                return Err(refuse("lora alpha", alpha, "a number above 0"));
            }
        }
        match (0.0..1.0).contains(&self.dropout) {
            true => Ok(()),
            false => Err(refuse("lora dropout", self.dropout, "at least 0 and below 1")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scale_is_that_of_peft() {
        let lora = Lora { alpha: 16.0, ..Lora::default() };
        assert_eq!(lora.scale_of(4, 16.0), 4.0);
        assert_eq!(Lora { rslora: true, ..lora }.scale_of(4, 16.0), 8.0);
    }

    #[test]
    fn numbers_that_cannot_be_are_named() {
        let refused = |lora: Lora| lora.validate().unwrap_err().to_string();
        let lora = Lora::default;
        assert!(lora().validate().is_ok());
        assert!(refused(Lora { rank: 0, ..lora() }).starts_with("`lora rank` is 0"));
        assert!(refused(Lora { alpha: f64::NAN, ..lora() }).starts_with("`lora alpha` is NaN"));
        assert!(refused(Lora { dropout: 1.0, ..lora() }).starts_with("`lora dropout` is 1"));
        let pattern = Lora { rank_pattern: vec![("q_proj".to_owned(), 0)], ..lora() };
        assert!(refused(pattern).starts_with("`lora rank` is 0"));
    }

    #[test]
    fn a_note_says_what_differs_from_plain_adapters() {
        let lora = Lora { rank: 4, targets: vec!["q_proj".to_owned()].into(), ..Lora::default() };
        assert_eq!(lora.description(), "lora 4 alpha 8 dropout 0");
        assert!(Lora { rslora: true, ..lora }.description().contains("rslora: true"));
    }
}
