//! What is adapted, how strongly, and what else is trained beside the adapters.

use super::targets::{Layers, Modules, Targets};
use crate::ModelError;
use crate::family::supported::refuse;

/// The settings of adapters, with the meaning that PEFT's `LoraConfig` gives them.
#[derive(Clone, Debug, PartialEq)]
pub struct Lora {
    /// The inner width of the product.
    pub rank: usize,
    /// The product counts `alpha / rank` times, or `alpha` over the root of the rank with [`rslora`](Self::rslora).
    pub alpha: f64,
    /// The probability with which an element of an adapter's input is dropped while training.
    pub dropout: f64,
    /// The maps that are adapted.
    pub targets: Targets,
    /// The maps that are not, although [`targets`](Self::targets) has them.
    pub exclude: Option<Modules>,
    /// The blocks whose maps are adapted, if not those of all.
    pub layers: Option<Layers>,
    /// Other ranks of maps, by regular expressions for the ends of their names; the first that matches counts.
    pub rank_pattern: Vec<(String, usize)>,
    /// Other values of [`alpha`](Self::alpha), likewise.
    pub alpha_pattern: Vec<(String, f64)>,
    /// Whether the scale is that of rank-stabilized LoRA (Kalajdzievski, 2023).
    pub rslora: bool,
    /// Which biases of the base are trained.
    pub bias: Bias,
    /// Whether adapters have biases of their own.
    pub lora_bias: bool,
    /// How adapters begin, and what they take from the base for it.
    pub init: LoraInit,
    /// Modules of the base that are trained as a whole, by the ends of their names.
    pub modules_to_save: Vec<String>,
    /// Whether a table that embedding and head share stays one when it is trained.
    pub ensure_weight_tying: bool,
    /// Rows of tables that have values of their own.
    pub tokens: Vec<TokenRows>,
}

/// Rows of a table of tokens that have values of their own beside the adapters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenRows {
    /// The end of the table's name, or none for the embedding of the input.
    pub module: Option<String>,
    /// The rows.
    pub rows: Vec<usize>,
}

/// Which biases of the base are trained.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Bias {
    /// None.
    #[default]
    None,
    /// Every one.
    All,
    /// Those of adapted maps.
    LoraOnly,
}

impl Bias {
    /// PEFT's names, with their values.
    pub(super) const NAMED: [(&str, Self); 3] =
        [("none", Self::None), ("all", Self::All), ("lora_only", Self::LoraOnly)];
}

/// How adapters begin. Two kinds take what they begin with out of the base weight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LoraInit {
    /// From the seed beside an unchanged base, in one of PEFT's ways that leave the base as it is.
    #[default]
    Beside,
    /// Beside an unchanged base, with `B` kept as it is and `A` alone trained (MiCA).
    FrozenB,
    /// With the largest singular values of the base weight, which loses them (Meng et al., "PiSSA", 2024).
    Pissa,
    /// With the first columns of the base weight's QR decomposition, which loses them (Büyükakyüz, "OLoRA", 2024).
    Olora,
}

impl Default for Lora {
    /// PEFT's defaults, with the targets of the family.
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
        }
    }
}

/// No adapter is as wide as this.
const WIDEST: usize = 1 << 16;

impl Lora {
    /// PEFT's default for [`alpha`](Self::alpha).
    pub const ALPHA: f64 = 8.0;

    /// The factor on the product of an adapter of this rank and alpha.
    pub(super) fn scale_of(&self, rank: usize, alpha: f64) -> f64 {
        let rank = rank as f64;
        if self.rslora { alpha / rank.sqrt() } else { alpha / rank }
    }

    /// The same with other names of the targets.
    pub(crate) fn with_targets(mut self, name: for<'a> fn(&'a str) -> &'a str) -> Self {
        if let Targets::Names(names) = &mut self.targets {
            names.iter_mut().for_each(|target| *target = name(target).to_owned());
            names.dedup();
        }
        self
    }

    /// What costs and results depend on beside names and shapes.
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
    /// The first value that cannot be.
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
