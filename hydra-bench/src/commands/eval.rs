//! `hydra eval`: the loss of a model on a split of its data, with its perplexity or metrics.

use anyhow::{Result, anyhow};
use clap::Args;
use clap::builder::NonEmptyStringValueParser;
use hydra_core::{ByteSize, Chain};
use hydra_engine::{EngineError, Evaluation, EvaluationTask};
use hydra_models::data::{Content, Split, WithReference};
use hydra_models::lora::Base;
use hydra_models::objective::PreferenceLoss;
use hydra_run::session::{
    Both, Environment, Model, decode_memory, evaluating, note_of_cuts, note_of_decoding, note_of_memory,
    score_with_base, without_task,
};
use hydra_run::settings::{
    AdapterSettings, DeviceSettings, ModelSettings, OUTPUT, TaskName, find_base, flags, values,
};
use hydra_run::terminal::{Measure, Outcome, Score, Show, Usage, percent, tell};
use serde_json::json;
use std::sync::Arc;

/// `hydra eval`.
#[derive(Debug, Args)]
pub(crate) struct EvalArgs {
    #[command(flatten)]
    pub(crate) model: ModelSettings,
    /// Evaluate with the adapters in this directory, written by PEFT or by a task of a run
    #[arg(long, value_name = "DIR", value_parser = NonEmptyStringValueParser::new())]
    pub(crate) adapter: Option<String>,
    /// Quantize the linear layers of the model below the adapters, as in training with --base
    #[arg(long, value_name = "TYPE", value_parser = flags::named::<Base>(&["nf4"]))]
    pub(crate) base: Option<Base>,
    /// Split of the data to evaluate on: train, validation or test
    #[arg(long, default_value = "test")]
    pub(crate) split: Split,
    /// Batch size: blocks of text, texts or images per forward pass; the loss changes only by rounding, about 1e-7 of it
    #[arg(long, value_name = "N", default_value = "8", value_parser = values::batch, allow_hyphen_values = true)]
    pub(crate) batch: usize,
    #[command(flatten)]
    pub(crate) devices: DeviceSettings,
    /// Print the result as JSON, and nothing else, on standard output
    #[arg(long, help_heading = OUTPUT)]
    pub(crate) json: bool,
}

/// Evaluates and prints the result.
pub(crate) fn run(mut args: EvalArgs, around: &Environment) -> Result<Outcome> {
    let around = &around.planning();
    let devices = args.devices.clone().resolve(&around.machine)?;
    find_base(&mut args.model, &mut args.adapter)?;
    let spec = args.model.clone().resolve()?;
    devices.check_dtype(spec.dtype)?;
    let memory = decode_memory(&devices, &around.machine);
    let mut model = Model::load(&spec, &memory)?;
    let adapters = AdapterSettings { base: args.base, ..AdapterSettings::of(args.adapter) };
    adapters.check(&spec)?;
    model.take_classes(&adapters)?;
    tell(&model.note_of_origin(&adapters, &[spec.seed], ""));
    let (data, reference) = model.split_with_reference(spec.text(), args.split)?;
    let (units, unit) = (data.units(), data.unit());
    note_of_memory(&devices, &around.machine).as_deref().into_iter().for_each(tell);
    if let Some(pairs) = reference {
        score(&model, &pairs, &adapters, (&devices, &spec, args.batch), around)?;
    }
    let chain = model.evaluated(&adapters)?;
    let kept = memory.keep_largest();
    let of = (&devices, &spec, &adapters);
    let result = evaluated(of, around, ("hydra eval", kept), (chain, data, args.batch))?;
    if args.json {
        let mut json = serde_json::to_value(&result)?;
        json[unit] = json!(units);
        around.print(&format!("{json:#}\n"))?;
        return Ok(Outcome::Done);
    }
    let score = Score::from(&result);
    let (split, text, loss, loss_targets) = (args.split, spec.text(), score.loss, result.loss_targets);
    let perplexity = score.perplexity.map(|value| format!(", perplexity {value:.4}"));
    let metrics = result.metrics.iter().map(|(name, value)| format!(", {name} {}", shown(name, *value)));
    let figures: String = perplexity.into_iter().chain(metrics).collect();
    let over = match score.perplexity {
        Some(_) => format!("{loss_targets} predicted of {units} {unit}"),
        None if unit == TOKENS => format!("{loss_targets} {} ({units} {unit})", items(&spec)),
        None => format!("{units} {unit}"),
    };
    around.print(&format!("{split} split of {text}: loss {loss:.6}{figures} over {over}\n"))?;
    Ok(Outcome::Done)
}

/// Scores pairs with the reference: the model without its adapters.
fn score(
    model: &Model,
    pairs: &Arc<WithReference>,
    adapters: &AdapterSettings,
    (devices, spec, batch): (&DeviceSettings, &ModelSettings, usize),
    around: &Environment,
) -> Result<()> {
    if adapters.adapter.is_none() {
        return Err(Usage::new(
            "the losses dpo, ipo and kto compare a model with the one before its training, which only adapters name: pass --adapter, \
             or --loss orpo or simpo",
        )
        .into());
    }
    tell("scoring the answers with the reference: the model without the adapters");
    let orchestrator = evaluating(devices, spec.dtype, spec.seed, &around.showing(Show::Nothing))?;
    score_with_base(orchestrator, model, adapters, pairs, batch, spec.seed)
}

/// The name of the loss targets of a model that reads texts and predicts no tokens.
fn items(spec: &ModelSettings) -> &'static str {
    match (spec.task, spec.loss) {
        (Some(TaskName::Preference), Some(PreferenceLoss::Kto)) => "answers",
        (Some(TaskName::Preference | TaskName::Reward), _) => "pairs",
        _ => "texts",
    }
}

/// Evaluates a chain on data in batches of this size, on the devices of the settings. The run of this name keeps some host
/// memory for decoding images.
pub(super) fn evaluated(
    (devices, spec, adapters): (&DeviceSettings, &ModelSettings, &AdapterSettings),
    around: &Environment,
    (name, kept): (&str, ByteSize),
    (chain, data, batch): (Arc<Chain>, Arc<dyn Content>, usize),
) -> Result<Evaluation> {
    let mut orchestrator = evaluating(devices, spec.dtype, spec.seed, around)?;
    orchestrator.keep_host_memory(kept);
    note_of_decoding(kept).into_iter().chain(note_of_cuts(devices)).for_each(|note| tell(&note));
    let orchestrator = match &around.control {
        Some(control) => orchestrator.stop_flag(control.stop_flag()),
        None => orchestrator,
    };
    around.print_note_of_others();
    let registrar = around.registrar(devices, name);
    let orchestrator = orchestrator.observer(Box::new(Both(registrar, around.progress())));
    let result = orchestrator.evaluate(EvaluationTask { chain, data, batch, seed: spec.seed });
    result.map_err(|error| explain(error, adapters.or_model(spec.name()), spec.text()))
}

/// The unit of texts.
const TOKENS: &str = "tokens";

/// The value of a metric as text.
fn shown(name: &str, value: f64) -> String {
    if name == Measure::ACCURACY.name() { percent(value) } else { format!("{value:.4}") }
}

/// Explains a loss that is not finite without advice about training.
fn explain(error: EngineError, model: &str, data: &str) -> anyhow::Error {
    if let EngineError::Failed { source, .. } = &error
        && let EngineError::BadLoss { loss, .. } = **source
    {
        return anyhow!(
            "the loss of `{model}` on `{data}` is {loss}: weights that are not finite, or too large, give no finite loss; check \
             the model, or evaluate it on other data"
        );
    }
    without_task(error).1.context(format!("`{model}` could not be evaluated"))
}
