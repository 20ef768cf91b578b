//! `hydra step`: benchmarks training steps of the engine and the parts of their time.

mod measure;

use anyhow::{Context, Result, bail};
use clap::builder::NonEmptyStringValueParser;
use clap::{Args, ValueEnum};
use hydra_core::{ByteSize, FloatType, Key, Length, OptimizerSpec, TrainSpec};
use hydra_engine::{DeviceKind, RunReport, TrainTask};
use hydra_models::family::{self, Model, Reads, TaskType};
use hydra_models::gpt2::{Gpt2, Gpt2Config};
use hydra_models::lora::Base;
use hydra_run::session::{
    Both, Environment, Synthetic, admit, context_of, devices, note_of_memory, orchestrator, quantized,
    with_frozen_dtype,
};
use hydra_run::settings::{
    AdapterSettings, DEFAULT_MODEL, DeviceSettings, OUTPUT, check_frozen_dtype, dtypes, flags, model_help,
    values,
};
use hydra_run::terminal::{Outcome, Table, Usage, print, tell};
use measure::{Meter, StepCosts};
use serde_json::{Value, json};
use std::sync::Arc;

/// `hydra step`.
#[derive(Debug, Args)]
pub(crate) struct StepArgs {
    #[arg(long, value_name = "PRESET|FILE.json|DIR", value_parser = NonEmptyStringValueParser::new(), help = model_help())]
    model: Option<String>,
    /// Sequence length in tokens [default: the model's maximum, at most 512]
    #[arg(long, value_name = "N", value_parser = values::context, allow_hyphen_values = true)]
    context: Option<usize>,
    /// Minibatch size [default: 8]
    #[arg(long, value_name = "N", value_parser = values::batch, allow_hyphen_values = true)]
    batch: Option<usize>,
    /// Use the model, context and batch of a reference configuration
    #[arg(long, value_enum, conflicts_with_all = ["model", "context", "batch"])]
    config: Option<Reference>,
    /// Number of measured minibatches
    #[arg(long, value_name = "N", default_value = "5", value_parser = values::count, allow_hyphen_values = true)]
    steps: usize,
    /// Number of minibatches before the measured ones
    #[arg(long, value_name = "N", default_value = "2", value_parser = values::warmup, allow_hyphen_values = true)]
    warmup: usize,
    /// Split the embedding and output matrices into N layers each [default: not split]
    #[arg(long, value_name = "N", value_parser = values::count, allow_hyphen_values = true)]
    vocabulary_parts: Option<usize>,
    /// Dropout probability of every dropout in the model
    #[arg(long, value_name = "P", default_value = "0", value_parser = values::dropout, allow_hyphen_values = true)]
    dropout: f64,
    /// Seed of weights, tokens and dropout
    #[arg(long, value_name = "N", default_value = "0", value_parser = values::seed, allow_hyphen_values = true)]
    seed: u64,
    /// Train LoRA adapters of this rank on the default layers and freeze the model [default: train the model's own weights]
    #[arg(long, value_name = "RANK", value_parser = values::lora_rank, allow_hyphen_values = true)]
    lora: Option<usize>,
    /// With --lora: quantize the linear layers of the frozen model, other than the head, to 4 bits: nf4, as bitsandbytes does
    #[arg(long, value_name = "TYPE", requires = "lora", value_parser = flags::named::<Base>(&["nf4"]))]
    base: Option<Base>,
    /// Type of parameters, activations and gradients on devices
    #[arg(long, default_value = "f32", value_parser = dtypes())]
    dtype: FloatType,
    /// With --lora and --dtype f32: type in which the frozen weights are stored, and from which devices widen them [default: f32]
    #[arg(long, value_name = "bf16|f16", requires = "lora", value_parser = flags::named::<FloatType>(&["bf16", "f16"]))]
    frozen_dtype: Option<FloatType>,
    #[command(flatten)]
    devices: DeviceSettings,
    /// Print the result as one line of JSON, and nothing else, on standard output
    #[arg(long, help_heading = OUTPUT)]
    json: bool,
}

/// Configurations that other programs are benchmarked with, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Reference {
    /// 4 layers of width 256, 4 heads, GPT-2's vocabulary, context 128, batch 8
    A,
    /// 6 layers of width 512, 8 heads, GPT-2's vocabulary, context 256, batch 4
    B,
    /// GPT-2 of 124 million parameters, context 512, batch 1
    C,
}

struct Subject {
    name: String,
    model: Box<dyn Model>,
    context: usize,
    batch: usize,
}

/// Runs the steps and prints their times.
pub(crate) fn run(args: StepArgs, around: &Environment) -> Result<Outcome> {
    let around = &around.planning();
    let spec = args.devices.clone().resolve(&around.machine)?;
    spec.check_dtype(args.dtype)?;
    let mut subject = Subject::new(&args)?;
    subject.model.set_dropout(args.dropout);
    subject.model.cut_vocabulary(args.vocabulary_parts.unwrap_or(1))?;
    note_of_memory(&spec, &around.machine).as_deref().into_iter().for_each(tell);
    let mut orchestrator = orchestrator(&spec, args.dtype, args.seed, around)?;
    orchestrator.submit(subject.task(&args, spec.cuts.clone())?)?;
    let run = admit(orchestrator, around, |_| String::new())?;
    // The progress display ends here, so that it does not disturb the measurement.
    let meter = Meter::default();
    let observer = Both(around.registrar(&spec, "hydra step"), meter.clone());
    let report = run.observer(Box::new(observer)).start().context("the run ended early")?;
    if let Some(error) = &report.tasks[0].error {
        bail!("the steps failed: {error}");
    }
    let device = &devices(&spec, &around.machine)[0];
    let threads = (device.kind == DeviceKind::Cpu).then_some(device.threads);
    let measured = meter.measured(args.warmup, threads)?;
    let mut result = settings(&args, &spec, &subject, &report)?;
    if let (Some(all), Value::Object(more)) =
        (result.as_object_mut(), figures(&args, &subject, &report, &measured))
    {
        all.extend(more);
    }
    print(&if args.json { format!("{result}\n") } else { render(&result) })?;
    Ok(Outcome::Done)
}

impl Subject {
    fn new(args: &StepArgs) -> Result<Self> {
        if let Some(reference) = args.config {
            return Self::reference(reference);
        }
        let name = args.model.clone().unwrap_or_else(|| DEFAULT_MODEL.to_owned());
        let model = family::load(&name).with_context(|| format!("the model `{name}` could not be loaded"))?;
        let Reads::Tokens { positions, .. } = model.reads() else {
            return Err(Usage::new(format!(
                "`{name}` is an image model, and steps are measured on tokens; pass another --model"
            ))
            .into());
        };
        if model.task_type() != TaskType::CausalLm {
            return Err(Usage::new(format!(
                "`{name}` is a classifier of texts, and steps are measured of language models; pass another --model"
            ))
            .into());
        }
        let context = context_of(positions, args.context)?.block;
        Ok(Self { context, batch: args.batch.unwrap_or(8), model, name })
    }

    fn reference(reference: Reference) -> Result<Self> {
        let gpt2 = Gpt2Config::preset("gpt2")?;
        let of = |name: &str, n_layer, n_embd, n_head, n_positions, batch| {
            let config = Gpt2Config { n_layer, n_embd, n_head, n_positions, ..gpt2.clone() };
            (name.to_owned(), config, n_positions, batch)
        };
        let (name, config, context, batch) = match reference {
            Reference::A => of("a", 4, 256, 4, 128, 8),
            Reference::B => of("b", 6, 512, 8, 256, 4),
            Reference::C => ("c".to_owned(), gpt2, 512, 1),
        };
        Ok(Self { name, model: Box::new(Gpt2::new(config)), context, batch })
    }

    fn task(&self, args: &StepArgs, cuts: Option<Vec<usize>>) -> Result<TrainTask> {
        check_frozen_dtype(args.frozen_dtype, args.dtype)?;
        if self.model.is_quantized() && args.lora.is_none() {
            return Err(quantized(&self.name).into());
        }
        let lora = |rank| {
            let adapters = AdapterSettings { base: args.base, ..flags::defaults() };
            self.model.adapted(&adapters.of_rank(rank, self.model.adapting().targets), None)
        };
        let chain = args.lora.map_or_else(|| self.model.chain(), lora)?.with_float_type(args.dtype);
        let (chain, note) = match args.frozen_dtype {
            Some(float) => with_frozen_dtype(chain, float, &self.name)?,
            None => (chain, None),
        };
        note.iter().for_each(|note| tell(note));
        let Reads::Tokens { vocabulary, .. } = self.model.reads() else {
            bail!("steps are measured on tokens")
        };
        let steps = args.warmup.saturating_add(args.steps);
        let data = Synthetic {
            key: Key::new(args.seed).fold(0x7374_6570),
            context: self.context,
            vocabulary: vocabulary as u64,
            len: steps.saturating_mul(self.batch),
        };
        let spec = TrainSpec::new(OptimizerSpec::adamw(1e-4), self.batch);
        let spec = TrainSpec { length: Length::Steps(steps), seed: args.seed, shuffle: false, ..spec };
        let task = TrainTask::new("step", Arc::new(chain), Arc::new(data), spec);
        Ok(if let Some(cuts) = cuts { task.cuts(cuts) } else { task })
    }

    fn tokens(&self) -> f64 {
        (self.batch * self.context) as f64
    }

    /// Floating-point operations of a training step.
    fn flops(&self) -> f64 {
        self.model.flops(self.context) * self.batch as f64
    }
}

fn settings(
    args: &StepArgs,
    devices: &DeviceSettings,
    subject: &Subject,
    report: &RunReport,
) -> Result<Value> {
    let task = &report.tasks[0];
    Ok(json!({
        "model": subject.name, "configuration": subject.model.description()?,
        "parameters": task.plan.parameters, "context": subject.context, "batch": subject.batch, "dropout": args.dropout, "dtype": args.dtype,
        "lora": args.lora, "base": args.base, "frozen_dtype": args.frozen_dtype,
        "precision": devices.precision, "seed": args.seed, "devices": devices.devices,
        "threads": report.devices[0].threads, "device_memory_bytes": devices.device_memory,
        "resident": devices.zero_copy, "link_bytes_per_s": devices.link, "warmup": args.warmup,
        "steps": args.steps, "shards": task.plan.shards,
    }))
}

fn figures(args: &StepArgs, subject: &Subject, report: &RunReport, measured: &StepCosts) -> Value {
    // The arithmetic of a model that is trained as a whole is not that of its adapters.
    let (tokens, flops) = (subject.tokens(), args.lora.is_none().then(|| subject.flops()));
    let parts: serde_json::Map<String, Value> =
        measured.parts.iter().map(|(name, seconds)| ((*name).to_owned(), json!(seconds))).collect();
    let steps = (args.warmup + args.steps) as u64;
    json!({
        "step_s": measured.step_s, "tokens_per_s_best": tokens / measured.best_s(),
        "tokens_per_s_median": tokens / measured.median_s(), "parts": parts, "flops_per_step": flops,
        "gflops": flops.map(|flops| flops / measured.best_s() * 1e-9), "matmul_peak_gflops": measured.matmul_peak_gflops,
        "peak_rss_bytes": measured.peak_rss_bytes, "page_faults_per_step": measured.page_faults,
        "allocations_per_step": measured.allocations, "device_peak_bytes": report.devices[0].peak_bytes,
        "promoted_bytes_per_step": report.transfers.promoted_bytes / steps,
        "demoted_bytes_per_step": report.transfers.demoted_bytes / steps, "losses": report.tasks[0].losses,
    })
}

fn render(result: &Value) -> String {
    let number = |name: &str| result[name].as_f64().unwrap_or(0.0);
    let text = |name: &str| result[name].as_str().unwrap_or_default().to_owned();
    let many = |count: f64, one: &str| format!("{count} {one}{}", if count == 1.0 { "" } else { "s" });
    let allocations = result["allocations_per_step"].as_f64();
    let threads = allocations.map(|_| format!(" of {}", many(number("threads"), "thread")));
    let [parameters, batch, context] = ["parameters", "batch", "context"].map(number);
    let (model, on, threads) = (text("model"), text("devices"), threads.unwrap_or_default());
    let shards = many(number("shards"), "shard");
    let mut out = format!(
        "{model}: {parameters} parameters, batch {batch}, context {context}, {on}{threads}, {shards}\n\n"
    );
    let mut table = Table::new(["<part", ">seconds per step"]);
    for (name, seconds) in result["parts"].as_object().into_iter().flatten() {
        table.row(vec![name.clone(), format!("{:.4}", seconds.as_f64().unwrap_or(0.0))]);
    }
    out.push_str(&table.render());
    let peak = result["matmul_peak_gflops"].as_f64();
    let peak = peak.map(|peak| format!(" of {peak:.1} in a large matrix product")).unwrap_or_default();
    let [best, median] = ["tokens_per_s_best", "tokens_per_s_median"].map(number);
    let gflops = result["gflops"].as_f64().map(|gflops| format!("{gflops:.1} GFLOP/s{peak}\n"));
    let gflops = gflops.unwrap_or_default();
    let [rss, on_device] = ["peak_rss_bytes", "device_peak_bytes"].map(|name| ByteSize(number(name) as u64));
    let faults = number("page_faults_per_step");
    let device = match allocations {
        Some(allocations) => format!("and {allocations:.0} device allocations per step"),
        None => format!("per step; peak device memory {on_device}"),
    };
    out + &format!(
        "\n{best:.1} tokens/s at best, median {median:.1}\n{gflops}\
         peak RSS {rss}, {faults:.0} page faults {device}\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_have_their_arithmetic() {
        // The formula of the peers: 6 (12 L d^2 + V d) tokens + 12 L d T tokens.
        for (reference, [layers, width, context, batch]) in [
            (Reference::A, [4, 256, 128, 8]),
            (Reference::B, [6, 512, 256, 4]),
            (Reference::C, [12, 768, 512, 1]),
        ] {
            let subject = Subject::reference(reference).unwrap();
            let [l, d, t, b] = [layers, width, context, batch].map(|n| n as f64);
            let expected = (6.0 * (12.0 * l * d * d + 50_257.0 * d) + 12.0 * l * d * t) * b * t;
            assert!((subject.flops() / expected - 1.0).abs() < 1e-12);
            subject.model.chain().unwrap();
        }
    }

    #[test]
    fn a_gpu_has_no_threads_and_no_allocations_of_the_host() {
        let result = |allocations: Option<f64>| {
            let text = render(&json!({
                "model": "a", "parameters": 7, "batch": 2, "context": 3, "devices": "d", "threads": 1, "shards": 2,
                "allocations_per_step": allocations, "device_peak_bytes": 1 << 20, "parts": {"compute": 0.5},
            }));
            let lines: Vec<&str> = text.lines().collect();
            (lines[0].to_owned(), lines[lines.len() - 1].to_owned())
        };
        let (head, tail) = result(None);
        assert_eq!(head, "a: 7 parameters, batch 2, context 3, d, 2 shards");
        assert_eq!(tail, "peak RSS 0 B, 0 page faults per step; peak device memory 1.00 MiB");
        let (head, tail) = result(Some(9.0));
        assert_eq!(head, "a: 7 parameters, batch 2, context 3, d of 1 thread, 2 shards");
        assert!(tail.ends_with("0 page faults and 9 device allocations per step"), "{tail}");
    }
}
