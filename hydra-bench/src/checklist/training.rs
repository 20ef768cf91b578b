//! Checks of training: bitwise equality with the plain loop, the cold start, and a spilled model vs. a resident one.

use super::found::{Finding, Verdict, guarded, timed};
use super::subject::{Subject, supports};
use anyhow::{Context, Result, bail, ensure};
use hydra_core::{ByteSize, Chain, Dataset, FloatType, Key, Length, OptimizerSpec, TrainSpec};
use hydra_engine::{
    Admission, Observer, OptimizerPlacement, Orchestrator, Place, RunEvent, RunReport, Span, TrainTask, Work,
    plain,
};
use hydra_models::data::{BlockSpec, Corpus, Split, TokenBlocks};
use hydra_models::family::{self, Reads};
use hydra_models::gpt2::{Gpt2Config, chain};
use hydra_models::mlp;
use hydra_models::tokenizer::Tokenizer;
use hydra_run::session::Synthetic;
use serde_json::{Value, json};
use std::sync::{Arc, Mutex, PoisonError};

/// The maximum time of a spilled step, relative to the longer of its computation and its copies.
const SPILLED: f64 = 1.15;

/// A small model with its data.
pub(super) struct SmallModel {
    pub(super) name: &'static str,
    pub(super) chain: Arc<Chain>,
    pub(super) data: Arc<dyn Dataset>,
    pub(super) cuts: Vec<usize>,
    batch: usize,
}

impl SmallModel {
    pub(super) fn spec(&self, steps: usize) -> TrainSpec {
        let spec = TrainSpec::new(OptimizerSpec::adamw(3e-3), self.batch);
        TrainSpec { length: Length::Steps(steps), clip: Some(1.0), ..spec }
    }

    /// Trains it in shards.
    pub(super) fn train(&self, mut run: Orchestrator, spec: TrainSpec) -> Result<RunReport> {
        let task = TrainTask::new(self.name, self.chain.clone(), self.data.clone(), spec);
        run.submit(task.cuts(self.cuts.clone()))?;
        finished(run.run()?)
    }
}

/// Returns a small GPT-2 with this float type on the device.
pub(super) fn gpt2(subject: &Subject, float: FloatType) -> Result<SmallModel> {
    let name = if float == FloatType::F32 { "gpt2" } else { "gpt2 in bf16" };
    let config = Gpt2Config::preset("bytes-tiny")?;
    let chain = chain(&config, None)?.with_float_type(float);
    let data = text(&config, subject.pick(64, 16))?;
    Ok(SmallModel { name, chain: Arc::new(chain), data, cuts: vec![1, 3, 5], batch: 8 })
}

/// Returns the built-in text for a GPT-2.
fn text(config: &Gpt2Config, context: usize) -> Result<Arc<TokenBlocks>> {
    let tokenizer = Tokenizer::for_model(None, config.vocab_size)?;
    let form = BlockSpec { context, vocab_size: config.vocab_size };
    Ok(Arc::new(Corpus::builtin().blocks(Split::Train, &tokenizer, form)?))
}

/// Returns an MLP, which uses only Burn's kernels, and GPT-2s, which use this project's.
fn small_models(subject: &Subject) -> Result<Vec<SmallModel>> {
    let dense = SmallModel {
        name: "mlp",
        chain: Arc::new(mlp::chain(&[2, 64, 64, 64], 3)?),
        data: Arc::new(mlp::Spirals::new(7, 64, 3)),
        cuts: vec![1, 2, 3],
        // Full batches, so that a few steps show whether it learns.
        batch: 64,
    };
    // Odd sizes and batch size 1, because some devices pad rows.
    let tiny = Gpt2Config::preset("bytes-tiny")?;
    let odd = Gpt2Config { n_embd: 42, n_head: 2, n_layer: 2, n_positions: 50, ..tiny };
    let (name, data, chain) = ("gpt2 of odd sizes", text(&odd, 50)?, chain(&odd, None)?);
    let uneven = SmallModel { name, chain: Arc::new(chain), data, cuts: vec![1, 2, 3], batch: 1 };
    let mut models = vec![dense, gpt2(subject, FloatType::F32)?, uneven];
    if supports(&subject.open()?.burn, FloatType::Bf16) {
        models.push(gpt2(subject, FloatType::Bf16)?);
    }
    Ok(models)
}

/// Adds a row for each small model. Returns the failures.
pub(super) fn each_model(
    subject: &Subject,
    rows: &mut Vec<Value>,
    mut measure: impl FnMut(&SmallModel) -> Result<Value>,
) -> Result<Vec<String>> {
    let mut problems = Vec::new();
    for model in small_models(subject)? {
        match guarded(|| measure(&model)) {
            Ok(row) => rows.push(row),
            Err(error) => {
                let problem = format!("{error:#}");
                problems.push(format!("{}: {problem}", model.name));
                rows.push(json!({"model": model.name, "problem": problem}));
            }
        }
    }
    Ok(problems)
}

/// Compares spilled training of small models with the plain loop on the same device.
pub(super) fn learns(subject: &Subject) -> Result<Finding> {
    let mut rows = Vec::new();
    let problems = each_model(subject, &mut rows, |model| learned(subject, model))?;
    let figures: Vec<String> = rows.iter().filter_map(fall).collect();
    let good = "losses and weights of every spilled run are bitwise equal to the plain loop's";
    Ok(Finding::of(&problems, figures.join(", "), good, rows))
}

fn fall(row: &Value) -> Option<String> {
    let losses = row["losses"].as_array()?;
    let loss = |at: Option<&Value>| at.and_then(Value::as_f64);
    Some(format!("{} {:.3} to {:.3}", row["model"].as_str()?, loss(losses.first())?, loss(losses.last())?))
}

fn learned(subject: &Subject, model: &SmallModel) -> Result<Value> {
    let spec = model.spec(subject.pick(30, 8));
    let device = subject.open()?;
    let plain = plain::train_on(&model.chain, model.data.as_ref(), &spec, &device.burn)?;
    drop(device);
    let report = model.train(subject.orchestrator(subject.device.memory)?, spec)?;
    let task = &report.tasks[0];
    let (shards, losses, expected) = (task.plan.shards, &task.losses, &plain.losses);
    ensure!(falls(expected), "the loss does not fall: {expected:?}");
    ensure!(
        losses == expected,
        "the losses of {shards} shards differ from the plain loop's: {losses:?} vs. {expected:?}"
    );
    ensure!(
        task.weights_sha256.as_deref() == Some(&plain.weights_sha256),
        "the weights of {shards} shards differ from the plain loop's, although the losses are equal"
    );
    Ok(json!({
        "model": model.name, "shards": shards, "losses": losses,
        "weights_sha256": task.weights_sha256,
    }))
}

/// Returns true if the mean of the last two losses is below that of the first two.
fn falls(losses: &[f64]) -> bool {
    let finite = losses.iter().all(|loss| loss.is_finite());
    let pair = |two: &[f64]| two.iter().sum::<f64>();
    finite && losses.len() >= 4 && pair(&losses[losses.len() - 2..]) < pair(&losses[..2])
}

pub(super) fn cold_start(subject: &Subject) -> Result<Finding> {
    let mut rows = Vec::new();
    let problems = each_model(subject, &mut rows, |model| first_and_later(subject, model))?;
    let seconds = |name: &str| rows.iter().filter_map(|row| row[name].as_f64()).sum::<f64>();
    let figure = format!("{:.3} s, then {:.3} s", seconds("first_s"), seconds("later_s"));
    let good = "the first step includes compiling kernels; the figures are sums over the models";
    Ok(Finding::of(&problems, figure, good, rows))
}

fn first_and_later(subject: &Subject, model: &SmallModel) -> Result<Value> {
    let (device, open_s) = timed(|| subject.open())?;
    let spec = model.spec(1);
    let step = || timed(|| Ok(plain::train_on(&model.chain, model.data.as_ref(), &spec, &device.burn)?));
    let (_, first) = step()?;
    let later: Vec<f64> = (0..5).map(|_| Ok(step()?.1)).collect::<Result<_>>()?;
    let shortest = later.iter().copied().fold(f64::INFINITY, f64::min);
    Ok(json!({"model": model.name, "open_s": open_s, "first_s": first, "later_s": shortest, "later": later}))
}

struct Stepped {
    preset: &'static str,
    context: usize,
    batch: usize,
    warmup: usize,
    steps: usize,
}

/// Compares a GPT-2 that fits with the same model in a quarter of the memory.
pub(super) fn spilled(subject: &Subject) -> Result<Finding> {
    let stepped = match (subject.quick, subject.is_cuda()) {
        (true, _) => Stepped { preset: "bytes-small", context: 32, batch: 1, warmup: 1, steps: 2 },
        (false, true) => Stepped { preset: "gpt2", context: 512, batch: 4, warmup: 2, steps: 6 },
        (false, false) => Stepped { preset: "bytes-small", context: 128, batch: 4, warmup: 2, steps: 6 },
    };
    // Uncut, although a GPU overlaps the steps of the host with several shards.
    let uncut = stepped.task()?.cuts(Vec::new());
    let all = subject.device.memory;
    let (whole, admission) = step(&stepped, uncut, subject.orchestrator(all)?, all)?;
    let plan = &admission.tasks[0].plan;
    let (resident, least) = (plan.single_shard_bytes, plan.min_device_memory_bytes);
    // Measurements of pilot passes vary slightly.
    let memory = ByteSize((resident / 4).max(least + least / 10));
    let spilled = subject.placed(memory, OptimizerPlacement::Auto)?;
    let (cut, _) = step(&stepped, stepped.task()?, spilled, memory)?;
    let mut rows = vec![whole.row("resident", all, &stepped), cut.row("spilled", memory, &stepped)];
    if let Some(on_device) = stepped_on_device(subject, &stepped)? {
        let losses = &on_device.losses;
        ensure!(*losses == whole.losses, "the losses with the optimizer on the device differ: {losses:?}");
        rows.push(on_device.row("resident, optimizer on device", all, &stepped));
    }
    rows.iter_mut().for_each(|row| row["takes_whole_bytes"] = json!(resident));
    Ok(judge_spilled(subject, &whole, &cut, memory.bytes() as f64 / resident as f64, rows))
}

fn judge_spilled(
    subject: &Subject,
    whole: &Timeline,
    cut: &Timeline,
    share: f64,
    rows: Vec<Value>,
) -> Finding {
    let ratio = cut.step_s() / cut.compute_s().max(cut.transfer_s());
    let over = cut.step_s() / whole.step_s();
    let (copies, shards) = (cut.transfer_s(), cut.shards);
    let figure = format!("{ratio:.2} of computation or copies, {over:.2} of the resident step");
    if whole.losses != cut.losses {
        let says = "the losses of the spilled run differ from the resident run's";
        return Finding::new(Verdict::Fails, figure, says, rows);
    }
    let says = format!(
        "with {:.0} % of the memory and {shards} shards, a step takes {:.4} s, with {:.4} s of computation and \
        {copies:.4} s of copies in the busier direction; the losses equal the resident run's",
        100.0 * share,
        cut.step_s(),
        cut.compute_s()
    );
    if !subject.is_cuda() {
        let says = format!("{says}; only NVIDIA GPUs have a bound");
        return Finding::new(Verdict::NotApplicable, figure, says, rows);
    }
    Finding::new(Verdict::of(ratio <= SPILLED), figure, format!("{says}; {SPILLED} is allowed"), rows)
}

#[derive(Clone, Debug, Default)]
struct Timeline {
    warmup: usize,
    shards: usize,
    peak_bytes: u64,
    /// Bytes moved in the whole run, to the device and to the host.
    moved: [u64; 2],
    /// Optimizer stalls between the first minibatch and the last.
    stall_s: f64,
    losses: Vec<f64>,
    ends: Vec<f64>,
    spans: Vec<Span>,
}

impl Timeline {
    /// Returns the time from the end of the warmup to the end of the last minibatch.
    fn window(&self) -> (f64, f64) {
        let last = self.ends.last().copied().unwrap_or(0.0);
        let first = self.warmup.checked_sub(1).and_then(|at| self.ends.get(at)).copied().unwrap_or(0.0);
        (first, last)
    }

    fn steps(&self) -> f64 {
        (self.ends.len() - self.warmup) as f64
    }

    fn step_s(&self) -> f64 {
        (self.window().1 - self.window().0) / self.steps()
    }

    /// Returns the seconds per step of these kinds of work. Spans count with their part within the window.
    fn seconds_of(&self, works: &[Work]) -> f64 {
        let (from, to) = self.window();
        let within = |span: &Span| (span.end_s.min(to) - span.start_s.max(from)).max(0.0);
        self.spans.iter().filter(|span| works.contains(&span.work)).map(within).sum::<f64>() / self.steps()
    }

    fn compute_s(&self) -> f64 {
        self.seconds_of(&[Work::Forward, Work::Backward])
    }

    /// Returns the copy seconds per step of the busier direction, since the directions are independent.
    fn transfer_s(&self) -> f64 {
        self.seconds_of(&[Work::Promote]).max(self.seconds_of(&[Work::TakeDown]))
    }

    fn row(&self, variant: &str, memory: ByteSize, stepped: &Stepped) -> Value {
        // The wait for the optimizer before a step; the first step has none.
        let step_stall_s = self.stall_s / (self.ends.len() - 1) as f64;
        json!({
            "variant": variant, "model": stepped.preset, "context": stepped.context, "batch": stepped.batch,
            "budget_bytes": memory.bytes(), "peak_bytes": self.peak_bytes, "shards": self.shards,
            "step_s": self.step_s(), "compute_s": self.compute_s(), "up_s": self.seconds_of(&[Work::Promote]),
            "down_s": self.seconds_of(&[Work::TakeDown]), "run_up_bytes": self.moved[0],
            "run_down_bytes": self.moved[1], "optimizer_s": self.seconds_of(&[Work::Step]),
            "optimizer_stall_s": step_stall_s, "losses": self.losses,
        })
    }
}

struct Recording(Arc<Mutex<Timeline>>);

impl Observer for Recording {
    fn observe(&mut self, event: &RunEvent<'_>) {
        let mut timeline = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match event {
            RunEvent::Span(span) => timeline.spans.push(*span),
            RunEvent::Minibatch { at_s, .. } => timeline.ends.push(*at_s),
            _ => {}
        }
    }
}

/// Runs the same with the optimizer on the device. Returns `None` if that is not bitwise equal.
fn stepped_on_device(subject: &Subject, stepped: &Stepped) -> Result<Option<Timeline>> {
    let run = || subject.placed(subject.device.memory, OptimizerPlacement::Auto);
    let mut probe = run()?;
    probe.submit(stepped.task()?)?;
    match probe.admit()?.admission().tasks[0].optimizer.on {
        Place::Host | Place::Partial => Ok(None),
        Place::Device => Ok(Some(step(stepped, stepped.task()?, run()?, subject.device.memory)?.0)),
    }
}

fn step(
    stepped: &Stepped,
    task: TrainTask,
    run: Orchestrator,
    memory: ByteSize,
) -> Result<(Timeline, Admission)> {
    let timeline = Arc::new(Mutex::new(Timeline { warmup: stepped.warmup, ..Timeline::default() }));
    let mut run = run.observer(Box::new(Recording(timeline.clone())));
    run.submit(task)?;
    let run = run.admit().with_context(|| format!("{} in {memory}", stepped.preset))?;
    let admission = run.admission().clone();
    let report = finished(run.start()?)?;
    let mut timeline = timeline.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let (task, device) = (&report.tasks[0], &report.devices[0]);
    ensure!(timeline.ends.len() == stepped.warmup + stepped.steps, "a minibatch was not seen");
    (timeline.shards, timeline.peak_bytes) = (task.plan.shards, device.peak_bytes);
    (timeline.stall_s, timeline.losses) = (task.times.optimizer_stall_s, task.losses.clone());
    timeline.moved = [report.transfers.promoted_bytes, report.transfers.demoted_bytes];
    Ok((timeline, admission))
}

/// Returns the report, or the error of its first task.
fn finished(report: RunReport) -> Result<RunReport> {
    match &report.tasks[0].error {
        Some(error) => bail!("{error}"),
        None => Ok(report),
    }
}

impl Stepped {
    fn task(&self) -> Result<TrainTask> {
        let mut model = family::load(self.preset)?;
        model.set_dropout(0.0);
        let Reads::Tokens { vocabulary, .. } = model.reads() else {
            bail!("`{}` does not read tokens", self.preset)
        };
        let steps = self.warmup + self.steps;
        let data = Synthetic {
            key: Key::new(0),
            context: self.context,
            vocabulary: vocabulary as u64,
            len: steps * self.batch,
        };
        let spec = TrainSpec::new(OptimizerSpec::adamw(1e-4), self.batch);
        let spec = TrainSpec { length: Length::Steps(steps), shuffle: false, ..spec };
        Ok(TrainTask::new("step", Arc::new(model.chain()?), Arc::new(data), spec))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hydra_core::{DeviceId, TaskId};
    use hydra_engine::Track;

    fn span(work: Work, start_s: f64, end_s: f64) -> Span {
        let (device, task) = (DeviceId(0), TaskId(0));
        Span {
            track: Track::Compute(device),
            task,
            work,
            shard: 0,
            step: 0,
            microbatch_pass: 0,
            start_s,
            end_s,
        }
    }

    #[test]
    fn a_loss_falls_if_it_ends_below_its_beginning() {
        assert!(falls(&[5.0, 4.9, 4.0, 3.0]));
        assert!(!falls(&[5.0, 4.9, 5.0, 4.9]));
        assert!(!falls(&[5.0, 4.9, 4.0, f64::NAN]));
        assert!(!falls(&[5.0, 4.0]));
    }

    #[test]
    fn the_window_is_what_follows_the_warmup() {
        let timeline = Timeline {
            warmup: 1,
            ends: vec![1.0, 3.0, 5.0],
            spans: vec![
                span(Work::Forward, 0.0, 2.0),
                span(Work::Backward, 2.0, 4.0),
                span(Work::Promote, 1.0, 2.0),
                span(Work::TakeDown, 2.0, 5.0),
            ],
            stall_s: 0.5,
            moved: [30, 6],
            ..Timeline::default()
        };
        assert_eq!((timeline.step_s(), timeline.compute_s(), timeline.transfer_s()), (2.0, 1.5, 1.5));
        let stepped = Stepped { preset: "bytes-small", context: 1, batch: 1, warmup: 1, steps: 2 };
        let row = timeline.row("spilled", ByteSize(9), &stepped);
        assert_eq!((&row["optimizer_stall_s"], &row["budget_bytes"]), (&json!(0.25), &json!(9)));
        assert_eq!((&row["run_up_bytes"], &row["run_down_bytes"]), (&json!(30), &json!(6)));
    }
}
