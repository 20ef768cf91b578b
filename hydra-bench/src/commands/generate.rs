//! `hydra generate`: continues prompts with a language model, with or without adapters.

use anyhow::{Result, bail};
use clap::Args;
use clap::builder::NonEmptyStringValueParser;
use hydra_core::FloatType;
use hydra_models::lora::Base;
use hydra_models::tokenizer::BuiltIn;
use hydra_run::session::generation::{self, Asked, Continued, Request, Shown};
use hydra_run::session::{Environment, Model, decode_memory, note_of_cuts, note_of_memory};
use hydra_run::settings::{
    AdapterSettings, DeviceSettings, ModelSettings, OUTPUT, dtypes, find_base, flags, model_help, other_base,
};
use hydra_run::terminal::{Outcome, Show, Usage, tell};
use std::io::IsTerminal;
use std::path::PathBuf;

/// `hydra generate`.
#[derive(Debug, Args)]
pub(crate) struct GenerateArgs {
    #[arg(long, value_name = "PRESET|FILE.json|DIR", value_parser = NonEmptyStringValueParser::new(), help = model_help())]
    pub(crate) model: Option<String>,
    /// Generate with the adapters in this directory, written by PEFT or by a task of a run; several, separated by commas, each
    /// generate for all prompts
    #[arg(long, value_name = "DIR,..", value_delimiter = ',', value_parser = NonEmptyStringValueParser::new())]
    pub(crate) adapter: Vec<String>,
    /// Quantize the linear layers of the model below the adapters, as in training with --base
    #[arg(long, value_name = "TYPE", value_parser = flags::named::<Base>(&["nf4"]))]
    pub(crate) base: Option<Base>,
    /// Tokenizer to use instead of the one in the model directory: bytes (one token per byte) or gpt2 [default: the directory's;
    /// without one, gpt2 for a vocabulary of 50257 ids, else bytes]
    #[arg(long, value_name = "bytes|gpt2", value_parser = flags::named::<BuiltIn>(&BuiltIn::NAMES))]
    pub(crate) tokenizer: Option<BuiltIn>,
    /// Type of parameters, activations and the key-value cache
    #[arg(long, default_value = "f32", value_parser = dtypes())]
    pub(crate) dtype: FloatType,
    #[command(flatten)]
    pub(crate) asked: Asked,
    #[command(flatten)]
    pub(crate) devices: DeviceSettings,
    /// Print a line of JSON for each prompt, adapter and sample, with `prompt`, `adapter`, `text`, `token_ids` of the new tokens,
    /// their `logprob` and the `finish_reason`, and nothing else on standard output
    #[arg(long, help_heading = OUTPUT)]
    pub(crate) json: bool,
    /// File for these lines of JSON instead of standard output
    #[arg(long, value_name = "FILE.jsonl", help_heading = OUTPUT)]
    pub(crate) out: Option<PathBuf>,
}

/// Generates and prints the texts.
pub(crate) fn run(mut args: GenerateArgs, around: &Environment) -> Result<Outcome> {
    let around = &around.planning();
    let devices = args.devices.clone().resolve(&around.machine)?;
    if !devices.are_cpus() {
        bail!(Usage::new("texts are generated on CPUs: pass --devices cpu"));
    }
    args.out.as_deref().map_or(Ok(()), super::predict::check_out)?;
    let mut settings = ModelSettings {
        model: args.model.take(),
        tokenizer: args.tokenizer,
        dtype: args.dtype,
        ..flags::defaults()
    };
    let mut first = args.adapter.first().cloned();
    find_base(&mut settings, &mut first)?;
    if args.adapter.is_empty() {
        args.adapter.extend(first);
    }
    if let Some((_, twice)) =
        args.adapter.iter().enumerate().find(|(at, adapter)| args.adapter[..*at].contains(adapter))
    {
        bail!(Usage::new(format!("--adapter `{twice}` is given twice; give each directory once")));
    }
    if args.base.is_some() && args.adapter.is_empty() {
        bail!(Usage::new(
            "--base quantizes the model below adapters: pass --adapter DIR too, or omit --base"
        ));
    }
    let spec = settings.resolve()?;
    devices.check_dtype(spec.dtype)?;
    let of = |adapter| AdapterSettings { base: args.base, ..AdapterSettings::of(adapter) };
    let each: Vec<AdapterSettings> = match args.adapter.as_slice() {
        [] => vec![of(None)],
        all => all.iter().cloned().map(|adapter| of(Some(adapter))).collect(),
    };
    each.iter().try_for_each(|adapters| adapters.check(&spec))?;
    let mut model = Model::load(&spec, &decode_memory(&devices, &around.machine))?;
    let (own, note_of_own) = match args.tokenizer {
        Some(_) => (None, None),
        None => generation::own_files(&args.adapter, model.directory()),
    };
    let request = Request::new(&model, &args.asked, devices.memory(), own)?;
    tell(&model.note_of_origin(&each[0], &[spec.seed], ""));
    each.iter().skip(1).filter_map(|of| other_base(of, model.directory())).for_each(|note| tell(&note));
    note_of_own.as_deref().into_iter().for_each(tell);
    model.notes().for_each(|note| tell(&note));
    request.notes().iter().for_each(|note| tell(note));
    note_of_memory(&devices, &around.machine)
        .into_iter()
        .chain(note_of_cuts(&devices))
        .for_each(|note| tell(&note));
    let prints_lines = args.json || args.out.is_some();
    let streams = !prints_lines && request.is_one() && each.len() == 1 && around.control.is_none();
    let shown = match around.show {
        _ if streams && std::io::stdout().is_terminal() => Shown::Text,
        Show::Bars => Shown::Bar(around.terminal.clone()),
        _ if around.control.is_some() => Shown::Nothing,
        Show::Lines | Show::Nothing => Shown::Lines,
    };
    let streamed = matches!(shown, Shown::Text);
    let on = (&devices, &spec);
    let (made, failure) = generation::generate(&mut model, &each, &request, on, around, shown)?;
    // A file that exists is kept if nothing was generated.
    if made.iter().any(|made| !made.token_ids.is_empty()) {
        match (&args.out, prints_lines) {
            (Some(out), _) => super::predict::write_text(out, &lines(&made)?)?,
            (None, true) => around.print(&lines(&made)?)?,
            (None, false) if streamed => {}
            (None, false) => around.print(&texts(&made))?,
        }
    }
    ended(&made, failure)
}

/// The outcome, with a note on sequences that have a part of their tokens.
fn ended(made: &[Continued], failure: Option<anyhow::Error>) -> Result<Outcome> {
    let (complete, all) = (made.iter().filter(|made| made.finish_reason.is_some()).count(), made.len());
    if complete < all && made.iter().any(|made| !made.token_ids.is_empty()) {
        tell(&format!(
            "note: {complete} of {all} sequences are complete; the others have no `finish_reason`"
        ));
    }
    match failure {
        Some(error) => Err(error),
        None if complete < all => Ok(Outcome::Interrupted),
        None => Ok(Outcome::Done),
    }
}

/// The lines of JSON.
fn lines(made: &[Continued]) -> Result<String> {
    let mut text = String::new();
    for made in made {
        text.push_str(&serde_json::to_string(made)?);
        text.push('\n');
    }
    Ok(text)
}

/// The texts, each under a line that names its prompt and adapter, unless there is one. Tokens stand for the text of a model
/// without a tokenizer.
fn texts(made: &[Continued]) -> String {
    let text = |made: &Continued| made.text.clone().unwrap_or_else(|| format!("{:?}", made.token_ids));
    if let [one] = made {
        return format!("{}\n", text(one));
    }
    let each = made.iter().map(|made| {
        let adapter = made.adapter.as_ref().map(|adapter| format!(" [{adapter}]")).unwrap_or_default();
        let sample = made.sample.map(|sample| format!(" (sample {sample})")).unwrap_or_default();
        let prompt = made.prompt.clone().unwrap_or_else(|| format!("prompt {}", made.number + 1));
        let start: String = prompt.chars().take(60).map(|c| if c == '\n' { ' ' } else { c }).collect();
        format!("== {start}{adapter}{sample} ==\n{}\n\n", text(made))
    });
    each.collect()
}
