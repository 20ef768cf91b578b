//! `hydra eval`: the loss of a model over a text.

use crate::args::EvalArgs;
use crate::error::{Outcome, print};
use crate::session::{Surroundings, orchestrator};
use crate::spec::{DevicesSpec, ModelSpec, check_dtype};
use crate::workload::Model;
use anyhow::{Result, anyhow};
use hydra_engine::{EngineError, EvaluationTask};
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
    let task =
        EvaluationTask { chain: model.chain.clone(), data: blocks, batch: args.batch, seed: spec.seed };
    let orchestrator = orchestrator(&devices, spec.dtype, spec.seed, around)?;
    let result = orchestrator.evaluate(task).map_err(|error| explain(error, &spec))?;
    print(&match args.json {
        true => {
            let mut result = serde_json::to_value(&result)?;
            result["tokens"] = json!(tokens);
            format!("{result:#}\n")
        }
        false => {
            let perplexity =
                result.perplexity.map_or(String::new(), |value| format!(", perplexity {value:.4}"));
            format!(
                "{} split of {}: loss {:.6}{perplexity} over {} predicted of {tokens} tokens\n",
                args.split, spec.data, result.loss, result.terms,
            )
        }
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
