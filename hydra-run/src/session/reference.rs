//! The log-probabilities of preference data by the reference: the model before training. They are computed once for all tasks
//! of a model, in an evaluation that is spilled like every other one, and kept in the run directory.

use super::data::Data;
use super::model::Model;
use super::orchestrator::{Environment, orchestrator, without_task};
use crate::machine::DevicesArg;
use crate::run_dir::{Inputs, REFERENCE, RunSpec, could_not};
use crate::settings::{AdapterSettings, ModelSettings};
use crate::terminal::{Interrupted, Show, Usage, tell};
use anyhow::{Context, Result, ensure};
use hydra_core::{ByteSize, Chain, Dataset, FirstItems, replace_file};
use hydra_engine::{EngineError, EvaluationTask, Orchestrator, RunReport, StopFlag};
use hydra_models::data::WithReference;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;

/// The log-probabilities of both answers of each pair, one pair after the other. As `f64`, numbers keep their bits in JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Scores {
    train: Vec<f64>,
    validation: Vec<f64>,
    test: Vec<f64>,
}

/// The reference of a model, and the data that it scores.
pub(super) struct Reference {
    name: String,
    chain: Arc<Chain>,
    /// The training, validation and test splits.
    splits: [Option<Arc<WithReference>>; 3],
    /// A hash of what the log-probabilities depend on.
    hash: String,
    /// Pairs of a batch. On CPUs the results do not depend on it, and the memory does.
    batch: usize,
    seed: u64,
}

/// Returns the references of the models of a run whose losses have one.
///
/// # Errors
/// A loss for which there is not one reference, or a metric that the tasks do not have.
pub(super) fn references(spec: &RunSpec, models: &[(Model, Data)]) -> Result<Vec<Reference>> {
    let with = models.iter().zip(spec.all_models()).filter(|((model, _), _)| model.has_reference());
    with.map(|((model, data), settings)| Reference::of(spec, model, data, settings)).collect()
}

impl Reference {
    fn of(spec: &RunSpec, model: &Model, data: &Data, settings: &ModelSettings) -> Result<Self> {
        if let Some(metric) = &spec.training.metric {
            // Before the time that scoring takes.
            model.evaluated(&spec.adapters)?.metric(metric).map_err(Usage::from_error)?;
        }
        let drawn = model.is_drawn();
        let seeds = spec.grid.seeds().unwrap_or_else(|| vec![settings.seed]);
        let ranks = &spec.adapters.lora;
        if drawn && (seeds.len() > 1 || ranks.len() > 1 || spec.search.has("seed") || spec.search.has("lora"))
        {
            return Err(Usage::new(format!(
                "the initial weights of `{}` are drawn for each seed and LoRA rank, and the reference of a preference loss is one \
                 model: pass a --model with weights, or one --seed and at most one --lora rank",
                settings.name()
            ))
            .into());
        }
        let seed = seeds.first().copied().unwrap_or(settings.seed);
        let rank = ranks.first().copied();
        let inputs = Inputs::of(&model.described()?, &model.files(&spec.adapters)?, data.splits())?;
        let adapters =
            spec.adapters.adapter.as_ref().map(|dir| adapter_config(Path::new(dir))).transpose()?;
        let drawn_from = drawn.then_some((seed, rank));
        let limit = spec.training.eval_limit;
        let form = (spec.adapters.base, spec.model.dtype);
        let mut all = serde_json::to_string(&(inputs, adapters, form, drawn_from, limit))?;
        if let Some(frozen) = spec.model.frozen_dtype {
            all += &frozen.to_string();
        }
        // The last bits of a product on a GPU depend on the kind of device and on the precision.
        let gpus = match &spec.devices.devices {
            Some(DevicesArg::Cuda(_)) => Some("cuda"),
            Some(DevicesArg::Wgpu(_)) => Some("wgpu"),
            Some(DevicesArg::Cpu { .. }) | None => None,
        };
        if let Some(kind) = gpus {
            all += &serde_json::to_string(&(kind, spec.devices.precision))?;
        }
        Ok(Self {
            name: settings.name().to_owned(),
            chain: model.reference(&spec.adapters, rank)?,
            splits: data.references.clone(),
            hash: format!("{:x}", Sha256::digest(all))[..16].to_owned(),
            batch: match spec.grid.has("accumulate") {
                true => 1,
                false => {
                    (spec.training.batch.iter().min().copied().unwrap_or(1) / spec.training.accumulate).max(1)
                }
            },
            seed,
        })
    }

    /// Gives the data the log-probabilities: those in the run directory if they were computed for the same weights and data, or
    /// computed now and written there.
    pub(super) fn score(
        &self,
        spec: &RunSpec,
        dir: &Path,
        stop: &StopFlag,
        around: &Environment,
    ) -> Result<()> {
        let file = dir.join(REFERENCE).join(format!("{}.json", self.hash));
        let scores = match file.exists() {
            true => Scores::read(&file)?,
            false => {
                let scores = self.compute(spec, dir, stop, around)?;
                scores.write(&file)?;
                scores
            }
        };
        let Scores { train, validation, test } = scores;
        for (split, scores) in self.splits.iter().zip([train, validation, test]) {
            let Some(split) = split else { continue };
            let scores: Vec<f32> = scores.into_iter().map(|score| score as f32).collect();
            ensure!(scores.len() == 2 * self.scored(spec, split).len() && split.set(scores), damaged(&file));
        }
        Ok(())
    }

    /// The pairs of a split that the run reads.
    fn scored(&self, spec: &RunSpec, split: &Arc<WithReference>) -> Arc<dyn Dataset> {
        let is_train = self.splits[0].as_ref().is_some_and(|train| Arc::ptr_eq(train, split));
        match spec.training.eval_limit {
            Some(most) if !is_train => Arc::new(FirstItems::new(Arc::clone(split) as Arc<dyn Dataset>, most)),
            _ => Arc::clone(split) as Arc<dyn Dataset>,
        }
    }

    /// Computes the log-probabilities of all splits.
    fn compute(&self, spec: &RunSpec, dir: &Path, stop: &StopFlag, around: &Environment) -> Result<Scores> {
        // Its lines in a pipe would be those of an evaluation after training.
        let around = &around.showing(if around.show == Show::Bars { Show::Bars } else { Show::Nothing });
        let pairs: usize = self.splits.iter().flatten().map(|split| self.scored(spec, split).len()).sum();
        tell(&format!(
            "scoring {pairs} pairs of answers with the reference `{}`, once for all tasks",
            self.name
        ));
        let on = spec.devices.with_disk_in(dir);
        let (mut seconds, mut bytes) = (0.0, 0);
        let mut score = |split: &Option<Arc<WithReference>>| -> Result<Vec<f64>> {
            let Some(split) = split else { return Ok(Vec::new()) };
            let orchestrator =
                orchestrator(&on, spec.model.dtype, self.seed, around)?.stop_flag(stop.clone());
            let data = self.scored(spec, split);
            let (log_probs, report) = log_probs(orchestrator, &self.chain, data, self.batch, self.seed)?;
            seconds += report.makespan_s;
            bytes += report.transfers.parameter_bytes;
            Ok(log_probs.into_iter().map(f64::from).collect())
        };
        let [train, validation, test] = &self.splits;
        let scores = Scores { train: score(train)?, validation: score(validation)?, test: score(test)? };
        tell(&format!("scored in {seconds:.1} s, for which {} of parameters were promoted", ByteSize(bytes)));
        Ok(scores)
    }
}

/// The configuration of adapters, which changes what their weights compute.
fn adapter_config(dir: &Path) -> Result<String> {
    let file = dir.join("adapter_config.json");
    fs::read_to_string(&file).with_context(|| could_not(&file, "read"))
}

impl Scores {
    fn read(file: &Path) -> Result<Self> {
        let text = fs::read_to_string(file).with_context(|| could_not(file, "read"))?;
        serde_json::from_str(&text).with_context(|| damaged(file))
    }

    fn write(&self, file: &Path) -> Result<()> {
        let failed = || could_not(file, "written");
        file.parent().map_or(Ok(()), fs::create_dir_all).with_context(failed)?;
        let text = serde_json::to_string(self)?;
        replace_file(file, |to| to.write_all(text.as_bytes())).with_context(failed)
    }
}

/// The log-probabilities of both answers of each pair by this chain of a [reference](Model::reference), and what it took.
fn log_probs(
    orchestrator: Orchestrator,
    chain: &Arc<Chain>,
    data: Arc<dyn Dataset>,
    batch: usize,
    seed: u64,
) -> Result<(Vec<f32>, RunReport)> {
    let chain = Arc::clone(chain);
    let result = orchestrator.evaluate_and_report(EvaluationTask { chain, data, batch, seed });
    let (result, report) = result.map_err(|error| match error {
        EngineError::Stopped => anyhow::Error::from(Interrupted),
        error => without_task(error).1.context("the answers could not be scored by the reference model"),
    })?;
    Ok((result.rows, report))
}

/// Scores pairs with the model without its adapters, which is the reference of adapters.
pub fn score_with_base(
    orchestrator: Orchestrator,
    model: &Model,
    adapters: &AdapterSettings,
    pairs: &Arc<WithReference>,
    batch: usize,
    seed: u64,
) -> Result<()> {
    let chain = model.base_reference(adapters)?;
    let scores = log_probs(orchestrator, &chain, Arc::clone(pairs) as Arc<dyn Dataset>, batch, seed)?;
    ensure!(pairs.set(scores.0), "the evaluation has other rows than two for each pair");
    Ok(())
}

fn damaged(file: &Path) -> String {
    format!(
        "the log-probabilities in `{}` are damaged: remove the file, and they are computed again",
        file.display()
    )
}
