//! `hydra eval`: the loss of a model over a text.

use crate::run_dir::spec::{DevicesSpec, ModelSpec, check_dtype};
use crate::session::model::Model;
use crate::session::orchestrator::{Surroundings, orchestrator};
use crate::settings::args::EvalArgs;
use crate::terminal::error::{Outcome, print};
use anyhow::{Result, anyhow};
use hydra_engine::EngineError;
use hydra_models::data::Corpus;
use serde_json::json;
use std::sync::Arc;

/// Evaluates and prints the result.
pub(crate) fn run(args: &EvalArgs, around: &Surroundings) -> Result<Outcome> {
    let devices = DevicesSpec::new(&args.devices, false, &around.machine)?;
    let spec = ModelSpec::new(&args.model)?;
    check_dtype(spec.dtype, devices.precision)?;
    let model = Model::load(&spec)?;
    let context = model.context(spec.context)?;
    let corpus = Corpus::load(&spec.data)?;
    let blocks = Arc::new(model.blocks(&corpus, args.split, context)?);
    let tokens = blocks.tokens().len();
    let orchestrator = orchestrator(&devices, spec.dtype, spec.seed, around)?;
    let result = orchestrator
        .evaluate(model.chain.clone(), blocks, args.batch, spec.seed)
        .map_err(|error| explain(error, &spec))?;
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

/// A loss that is no number is told in words that are not about training.
fn explain(error: EngineError, spec: &ModelSpec) -> anyhow::Error {
    let bad = match &error {
        EngineError::Failed { source, .. } => match **source {
            EngineError::BadLoss { loss, .. } => Some(loss),
            _ => None,
        },
        _ => None,
    };
    match bad {
        Some(loss) => anyhow!(
            "the loss of `{}` over `{}` is {loss}: weights that are not finite or too large give no loss; \
             check the model, or evaluate it on another text",
            spec.model,
            spec.data
        ),
        None => anyhow::Error::new(error).context("the model could not be evaluated"),
    }
}
