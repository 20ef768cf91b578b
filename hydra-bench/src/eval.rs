//! `hydra eval`: the loss of a model over a text.

use crate::args::EvalArgs;
use crate::error::{Outcome, print};
use crate::session::{Surroundings, orchestrator};
use crate::spec::{DevicesSpec, ModelSpec};
use crate::workload::Model;
use anyhow::{Context, Result};
use hydra_models::data::Corpus;
use serde_json::json;
use std::sync::Arc;

/// Evaluates and prints the result.
pub(crate) fn run(args: &EvalArgs, around: &Surroundings) -> Result<Outcome> {
    let spec = ModelSpec::new(&args.model)?;
    let devices = DevicesSpec::new(&args.devices, false, &around.machine)?;
    let model = Model::load(&spec)?;
    let context = model.context(spec.context)?;
    let corpus = Corpus::load(&spec.data)?;
    let blocks = Arc::new(model.blocks(&corpus, args.split, context)?);
    let tokens = blocks.tokens().len();
    let orchestrator = orchestrator(&devices, spec.seed, around)?;
    let result = orchestrator
        .evaluate(model.chain.clone(), blocks, args.batch, spec.seed)
        .context("the model could not be evaluated")?;
    print(&match args.json {
        true => {
            let result = json!({
                "loss": result.loss,
                "perplexity": result.perplexity,
                "predicted_tokens": result.predicted_tokens,
                "tokens": tokens,
            });
            format!("{result:#}\n")
        }
        false => format!(
            "{} split of {}: loss {:.6}, perplexity {:.4} over {} predicted of {tokens} tokens\n",
            args.split, spec.data, result.loss, result.perplexity, result.predicted_tokens,
        ),
    })?;
    Ok(Outcome::Done)
}
