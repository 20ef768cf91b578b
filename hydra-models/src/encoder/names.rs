//! The names of modules: those of a chain, and those of Transformers by model type.

use super::ModelType;
use crate::weights::Naming;

/// A module of a chain, without the index of its block, and its Transformers name.
type Module = (&'static str, &'static str);

/// The names of a model type.
struct Names {
    /// The Transformers name of the blocks, with the prefix of models with a head.
    blocks: &'static str,
    modules: &'static [Module],
}

/// BERT's names, or RoBERTa's: those of the embeddings and blocks with this prefix, and those of the head.
macro_rules! bert {
    ($prefix:literal, $dense:literal, $classifier:literal) => {
        Names {
            blocks: concat!($prefix, "encoder.layer."),
            modules: &[
                ("embeddings.words", concat!($prefix, "embeddings.word_embeddings")),
                ("embeddings.positions", concat!($prefix, "embeddings.position_embeddings")),
                ("embeddings.types", concat!($prefix, "embeddings.token_type_embeddings")),
                ("embeddings.norm", concat!($prefix, "embeddings.LayerNorm")),
                ("projections.0", "attention.self.query"),
                ("projections.1", "attention.self.key"),
                ("projections.2", "attention.self.value"),
                ("output", "attention.output.dense"),
                ("attention_norm", "attention.output.LayerNorm"),
                ("inner", "intermediate.dense"),
                ("outer", "output.dense"),
                ("outer_norm", "output.LayerNorm"),
                ("head.dense", $dense),
                ("head.classifier", $classifier),
            ],
        }
    };
}

const BERT: Names = bert!("bert.", "bert.pooler.dense", "classifier");
const ROBERTA: Names = bert!("roberta.", "classifier.dense", "classifier.out_proj");

const DISTILBERT: Names = Names {
    blocks: "distilbert.transformer.layer.",
    modules: &[
        ("embeddings.words", "distilbert.embeddings.word_embeddings"),
        ("embeddings.positions", "distilbert.embeddings.position_embeddings"),
        ("embeddings.norm", "distilbert.embeddings.LayerNorm"),
        ("projections.0", "attention.q_lin"),
        ("projections.1", "attention.k_lin"),
        ("projections.2", "attention.v_lin"),
        ("output", "attention.out_lin"),
        ("attention_norm", "sa_layer_norm"),
        ("inner", "ffn.lin1"),
        ("outer", "ffn.lin2"),
        ("outer_norm", "output_layer_norm"),
        ("head.dense", "pre_classifier"),
        ("head.classifier", "classifier"),
    ],
};

const MODERNBERT: Names = Names {
    blocks: "model.layers.",
    modules: &[
        ("embeddings.words", "model.embeddings.tok_embeddings"),
        ("embeddings.norm", "model.embeddings.norm"),
        ("projections.0", "attn.Wqkv"),
        ("output", "attn.Wo"),
        ("attention_norm", "attn_norm"),
        ("inner", "mlp.Wi"),
        ("outer", "mlp.Wo"),
        ("outer_norm", "mlp_norm"),
        ("head.final_norm", "model.final_norm"),
        ("head.dense", "head.dense"),
        ("head.norm", "head.norm"),
        ("head.classifier", "classifier"),
    ],
};

impl Names {
    fn hf_name(&self, param: &str) -> String {
        let in_block = param.strip_prefix("layer.").and_then(|rest| rest.split_once('.'));
        let (block, own) = match in_block {
            Some((index, own)) => (format!("{}{index}.", self.blocks), own),
            None => (String::new(), param),
        };
        let rest_of = |module: &str| own.strip_prefix(module).filter(|rest| rest.starts_with('.'));
        let found = self.modules.iter().find_map(|(module, name)| Some((name, rest_of(module)?)));
        found.map_or_else(|| format!("{block}{own}"), |(name, rest)| format!("{block}{name}{rest}"))
    }
}

impl ModelType {
    /// Maps a parameter of a [`chain`](super::chain) to its Transformers name, in files and in memory:
    /// `layer.0.projections.0.weight` becomes `bert.encoder.layer.0.attention.self.query.weight` in a BERT, and
    /// `head.classifier.bias` becomes `classifier.bias`.
    pub fn hf_name(self) -> fn(&str) -> String {
        match self {
            Self::Bert => |param| BERT.hf_name(param),
            Self::Roberta | Self::XlmRoberta => |param| ROBERTA.hf_name(param),
            Self::DistilBert => |param| DISTILBERT.hf_name(param),
            Self::ModernBert => |param| MODERNBERT.hf_name(param),
        }
    }

    /// The names in files.
    pub(super) fn naming(self) -> Naming {
        let (prefix, blocks, depth) = match self {
            Self::Bert => ("bert.", "encoder.layer.", "num_hidden_layers"),
            Self::Roberta | Self::XlmRoberta => ("roberta.", "encoder.layer.", "num_hidden_layers"),
            Self::DistilBert => ("distilbert.", "transformer.layer.", "n_layers"),
            Self::ModernBert => ("model.", "layers.", "num_hidden_layers"),
        };
        Naming::new(prefix, blocks, depth, self.hf_name())
    }

    /// The Transformers name of the token table.
    pub(super) fn embedding(self) -> &'static str {
        match self {
            Self::Bert => "bert.embeddings.word_embeddings",
            Self::Roberta | Self::XlmRoberta => "roberta.embeddings.word_embeddings",
            Self::DistilBert => "distilbert.embeddings.word_embeddings",
            Self::ModernBert => "model.embeddings.tok_embeddings",
        }
    }

    /// The default targets of adapters: those of PEFT, and the modules of the same function where PEFT has none.
    pub(super) fn targets(self) -> &'static [&'static str] {
        match self {
            Self::Bert | Self::Roberta | Self::XlmRoberta => &["query", "value"],
            Self::DistilBert => &["q_lin", "v_lin"],
            Self::ModernBert => &["Wqkv"],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_transformers() {
        for (kind, param, expected) in [
            (ModelType::Bert, "embeddings.norm.weight", "bert.embeddings.LayerNorm.weight"),
            (
                ModelType::Bert,
                "layer.11.projections.0.lora.a.weight",
                "bert.encoder.layer.11.attention.self.query.lora.a.weight",
            ),
            (ModelType::Bert, "layer.0.outer_norm.bias", "bert.encoder.layer.0.output.LayerNorm.bias"),
            (ModelType::Bert, "head.dense.bias", "bert.pooler.dense.bias"),
            (
                ModelType::XlmRoberta,
                "layer.0.output.weight",
                "roberta.encoder.layer.0.attention.output.dense.weight",
            ),
            (ModelType::Roberta, "head.classifier.weight", "classifier.out_proj.weight"),
            (
                ModelType::DistilBert,
                "layer.5.attention_norm.bias",
                "distilbert.transformer.layer.5.sa_layer_norm.bias",
            ),
            (ModelType::ModernBert, "layer.2.projections.0.weight", "model.layers.2.attn.Wqkv.weight"),
            (ModelType::ModernBert, "head.norm.weight", "head.norm.weight"),
            (ModelType::ModernBert, "head.final_norm.weight", "model.final_norm.weight"),
        ] {
            assert_eq!(kind.hf_name()(param), expected);
        }
    }
}
