//! The tasks that are submitted to a run.

use crate::checkpoint::Checkpoint;
use crate::error::EngineError;
use crate::protocol::StopFlag;
use hydra_core::{
    Chain, CoreError, Dataset, Metric, ModelWriter, ParamBufferLayout, Rounds, Statistic, TrainSpec,
};
use hydra_sched::program::{Cursor, EvaluationPoints, MicrobatchGroup, Microbatches, Program, RoundBatches};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// One model to train: a chain, its data, its training spec, and the destination of the result.
#[derive(Clone)]
pub struct TrainTask {
    pub(crate) name: String,
    pub(crate) chain: Arc<Chain>,
    pub(crate) spec: TrainSpec,
    pub(crate) train: Arc<dyn Dataset>,
    pub(crate) validation: Option<Arc<dyn Dataset>>,
    pub(crate) test: Option<Arc<dyn Dataset>>,
    pub(crate) config: serde_json::Value,
    pub(crate) output: Option<(Arc<dyn ModelWriter>, PathBuf)>,
    pub(crate) checkpoint: Option<PathBuf>,
    pub(crate) start: Start,
    pub(crate) control: TaskControl,
    pub(crate) execution: Execution,
    pub(crate) initial_validation: bool,
    /// True for a task that only evaluates the test data.
    pub(crate) evaluate_only: bool,
    /// The rounds in which its evaluations go on.
    pub(crate) rounds: Option<InRounds>,
}

/// Where a task starts.
#[derive(Clone, Debug, Default)]
pub(crate) enum Start {
    /// At the first minibatch, with the initial weights of its chain.
    #[default]
    Untrained,
    /// At the first minibatch, with the weights of another task and fresh moments.
    Weights(Checkpoint),
    /// At its own checkpoint.
    Resumed(Checkpoint),
    /// At the state of another task.
    Forked(Checkpoint),
}

impl Start {
    /// The checkpoint whose state it continues.
    pub(crate) fn state(&self) -> Option<&Checkpoint> {
        match self {
            Self::Resumed(checkpoint) | Self::Forked(checkpoint) => Some(checkpoint),
            Self::Untrained | Self::Weights(_) => None,
        }
    }

    /// The checkpoint whose weights it starts with.
    pub(crate) fn weights(&self) -> Option<&Checkpoint> {
        match self {
            Self::Weights(checkpoint) => Some(checkpoint),
            other => other.state(),
        }
    }
}

/// When a task pauses or stops before its end.
#[derive(Clone, Debug, Default)]
pub(crate) struct TaskControl {
    /// The minibatches after which it pauses.
    pub(crate) until: Option<usize>,
    /// The minibatches after which it ends early.
    pub(crate) ends: Option<usize>,
    pub(crate) stop: StopFlag,
}

/// What of a task's execution is set instead of chosen. Results do not depend on it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Execution {
    pub(crate) cuts: Option<Vec<usize>>,
    /// The microbatches of a microbatch group; `None` chooses them by cost.
    pub(crate) microbatch_group: Option<usize>,
    /// The largest number of devices that train it at a time; `None` allows all.
    pub(crate) most_devices: Option<usize>,
}

impl TrainTask {
    /// A task that trains `chain` on `train`. Names must differ within a run.
    pub fn new(name: impl Into<String>, chain: Arc<Chain>, train: Arc<dyn Dataset>, spec: TrainSpec) -> Self {
        Self {
            name: name.into(),
            chain,
            spec,
            train,
            validation: None,
            test: None,
            config: serde_json::Value::Null,
            output: None,
            checkpoint: None,
            start: Start::default(),
            control: TaskControl::default(),
            execution: Execution::default(),
            initial_validation: true,
            evaluate_only: false,
            rounds: None,
        }
    }

    /// The items of an evaluation batch: those of the microbatch that was measured.
    pub(crate) fn evaluation_batch(&self) -> usize {
        self.spec.microbatch().min(self.train.len()).max(1)
    }

    /// The shape of the task, if it is cut into these shards and its first trained layer is `first_trained`.
    pub(crate) fn program(
        &self,
        shards: &[Range<usize>],
        first_trained: usize,
        microbatch_group: MicrobatchGroup,
    ) -> Program {
        let spec = &self.spec;
        let items = self.train.len();
        let batches = |data: &Option<Arc<dyn Dataset>>| {
            data.as_ref().map_or(0, |data| data.len().div_ceil(self.evaluation_batch()))
        };
        let last = match items % spec.batch {
            0 => spec.batch.min(items),
            rest => rest,
        };
        let steps = if self.evaluate_only { 0 } else { spec.steps(items) };
        let validation = batches(&self.validation);
        let evaluated = spec.evaluations().within(steps).into_iter();
        Program {
            shards: shards.len(),
            first_trained: shards.iter().position(|range| range.contains(&first_trained)).unwrap_or(0),
            steps,
            microbatches: Microbatches {
                each: spec.accumulate.clamp(1, spec.batch.min(items).max(1)),
                last: spec.accumulate.clamp(1, last.max(1)),
                epoch: items.div_ceil(spec.batch).max(1),
            },
            reads_statistic: self.chain.objective().statistic() == Statistic::OfOutputs,
            microbatch_group,
            replicas: 1,
            validation,
            test: batches(&self.test),
            rounds: self.rounds.as_ref().map(|of| round_batches(of.data.as_ref())),
            initial_validation: self.initial_validation,
            shared: false,
            evaluations: EvaluationPoints::new(evaluated.map(|after| (after, validation))),
        }
    }

    /// The position at which a task of this program starts, or resumes from its checkpoint.
    pub(crate) fn initial_cursor(&self, program: Program) -> Cursor {
        match self.start.state().map(Checkpoint::state) {
            Some(state) => Cursor::resumed(program, state.step, state.position.stage()),
            None => Cursor::new(program),
        }
    }

    /// Evaluates on this data before and after training, and periodically if the spec has evaluations.
    pub fn validation(self, data: Arc<dyn Dataset>) -> Self {
        Self { validation: Some(data), ..self }
    }

    /// Evaluates on this data after training.
    pub fn test(self, data: Arc<dyn Dataset>) -> Self {
        Self { test: Some(data), ..self }
    }

    /// Makes evaluations on the validation data, but for the initial one, go on in rounds after their batches, with this
    /// chain and data. The chain has the parameters and layers of the task's chain, and another objective. Its metrics are
    /// added to those of the evaluation. The task does nothing else until the rounds are over; other tasks do.
    ///
    /// A checkpoint within rounds goes on with the first one.
    pub fn rounds(self, chain: Arc<Chain>, data: Arc<dyn Rounds>) -> Self {
        Self { rounds: Some(InRounds { chain, data }), ..self }
    }

    /// The metric of this name: one of its rounds or of its chain.
    ///
    /// # Errors
    /// Its evaluations have no such metric.
    pub fn metric(&self, name: &str) -> Result<Metric, CoreError> {
        let of_rounds = self.rounds.iter().flat_map(|of| of.data.metrics());
        let found = of_rounds.map(|(metric, _)| metric).find(|metric| metric.name == name);
        found.map_or_else(|| self.chain.metric(name), Ok)
    }

    /// Sets the configuration for the report.
    pub fn config(self, config: serde_json::Value) -> Self {
        Self { config, ..self }
    }

    /// Sets the cut-points. The run is refused if the shards do not fit.
    pub fn cuts(self, cuts: Vec<usize>) -> Self {
        Self { execution: Execution { cuts: Some(cuts), ..self.execution }, ..self }
    }

    /// Sets the size of a microbatch group, from 1 to `accumulate`: the microbatches that a promoted shard computes
    /// before the next shard does. A larger group needs fewer promotions, and host memory for the boundary
    /// activations of all its microbatches. The default is chosen by cost. Results do not change by a bit.
    pub fn microbatch_group(self, microbatches: usize) -> Self {
        Self { execution: Execution { microbatch_group: Some(microbatches), ..self.execution }, ..self }
    }

    /// Limits the number of replicas: the devices that train this task at a time, each on another microbatch group.
    /// The default is all devices of the run; the number of microbatch groups and host memory limit it further. Other
    /// tasks have priority. Results do not change by a bit.
    pub fn most_devices(self, most: usize) -> Self {
        Self { execution: Execution { most_devices: Some(most.max(1)), ..self.execution }, ..self }
    }

    /// Writes the trained model into `dir`.
    pub fn write_to(self, writer: Arc<dyn ModelWriter>, dir: PathBuf) -> Self {
        Self { output: Some((writer, dir)), ..self }
    }

    /// Writes checkpoints to this file, and creates its directory. A checkpoint is written at the interval of
    /// [`Orchestrator::checkpoint_every`](crate::Orchestrator::checkpoint_every), when a stop is requested, and at
    /// the end of the task. The last one holds only results if the model was [written](Self::write_to), otherwise the
    /// trained weights too.
    pub fn checkpoint_to(self, file: PathBuf) -> Self {
        Self { checkpoint: Some(file), ..self }
    }

    /// Resumes from a checkpoint; the results have the same bits as without interruption. Chain, spec, data and kind
    /// of device must be the same; budgets, cuts, number of devices, threads and policy may differ. A finished task
    /// is not trained again; if its checkpoint has the trained weights and this task a writer, its model is written.
    pub fn resume_from(self, checkpoint: Checkpoint) -> Self {
        Self { start: Start::Resumed(checkpoint), ..self }
    }

    /// Starts from the state of another task that was [saved](crate::Command::Save): its weights, moments, results
    /// and position in the data. From there it trains with its own spec, whose schedule counts the minibatches of the
    /// other task. Rates, decay, clipping, schedule, length and evaluations may differ; chain, data, seed,
    /// minibatches and the kind of optimizer must be the same.
    pub fn fork_from(self, checkpoint: Checkpoint) -> Self {
        Self { start: Start::Forked(checkpoint), ..self }
    }

    /// Starts at the first minibatch with the weights of another task that was [saved](crate::Command::Save), and
    /// with fresh moments. The chain must be the same.
    pub fn weights_from(self, checkpoint: Checkpoint) -> Self {
        Self { start: Start::Weights(checkpoint), ..self }
    }

    /// Ends after `minibatches` minibatches; the schedule still covers the whole length. The current weights, or the
    /// best ones of a spec with periodic evaluations, are written, and the task is reported as stopped.
    pub fn ends_at(self, minibatches: usize) -> Self {
        Self { control: TaskControl { ends: Some(minibatches), ..self.control }, ..self }
    }

    /// Pauses after `minibatches` minibatches, until a [command](crate::Command::Continue) resumes it. At 0 it does
    /// not start.
    pub fn until(self, minibatches: usize) -> Self {
        Self { control: TaskControl { until: Some(minibatches), ..self.control }, ..self }
    }

    /// Sets a flag that stops this task at the end of the current minibatch. The current weights, or the best ones of
    /// a spec with periodic evaluations, are written, and the task is reported as stopped.
    pub fn stop_flag(self, stop: StopFlag) -> Self {
        Self { control: TaskControl { stop, ..self.control }, ..self }
    }

    pub(crate) fn checkpoint_file(&self) -> Option<&Path> {
        self.checkpoint.as_deref()
    }

    /// Refuses a task that conflicts with one of `others`: same name, or same files.
    pub(crate) fn check_conflicts<'a>(
        &self,
        others: impl Iterator<Item = &'a Self> + Clone,
    ) -> Result<(), EngineError> {
        let (name, absolute) =
            (&self.name, |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned()));
        if others.clone().any(|other| other.name == *name) {
            return Err(EngineError::DuplicateTask { name: name.clone() });
        }
        let with = |of: fn(&Self) -> Option<&Path>| {
            let path = of(self)?;
            let same = |other: &&Self| of(other).map(absolute) == Some(absolute(path));
            others.clone().find(same).map(|other| (other.name.clone(), name.clone(), path.to_owned()))
        };
        if let Some((first, second, path)) = with(Self::checkpoint_file) {
            return Err(EngineError::SameCheckpoint { first, second, path });
        }
        match with(Self::output_dir) {
            Some((first, second, path)) => Err(EngineError::SameOutput { first, second, path }),
            None => Ok(()),
        }
    }

    pub(crate) fn output_dir(&self) -> Option<&Path> {
        self.output.as_ref().map(|(_, dir)| dir.as_path())
    }

    /// Returns true if the task has nothing left to do.
    pub(crate) fn is_finished(&self) -> bool {
        let written = |checkpoint: &Checkpoint| self.output.is_none() || !checkpoint.is_unwritten();
        self.start.state().is_some_and(|checkpoint| checkpoint.is_finished() && written(checkpoint))
    }

    /// A copy of the task that starts from the beginning.
    pub(crate) fn without_state(&self) -> Self {
        Self { start: Start::Untrained, ..self.clone() }
    }

    /// Enables or disables the evaluation on the validation data before training; enabled by default.
    pub fn initial_validation(self, on: bool) -> Self {
        Self { initial_validation: on, ..self }
    }
}

/// The batches of the current round of some data, and of its later rounds.
pub(crate) fn round_batches(data: &dyn Rounds) -> RoundBatches {
    RoundBatches { here: data.len(), later: data.later_items() }
}

/// What computes evaluations in rounds.
#[derive(Clone)]
pub(crate) struct InRounds {
    /// A chain with the parameters of the task's chain, all frozen, whose objective keeps rows.
    pub(crate) chain: Arc<Chain>,
    pub(crate) data: Arc<dyn Rounds>,
}

impl InRounds {
    /// Refuses a chain whose layers or parameters are not those of a task's chain.
    pub(crate) fn check(&self, chain: &Chain) -> Result<(), EngineError> {
        let layers = |chain: &Chain| -> Vec<_> {
            chain.layers().iter().map(|layer| (layer.name.clone(), layer.params.len())).collect()
        };
        let buffers = |chain: &Chain| -> Vec<_> {
            let of = |buffer: &ParamBufferLayout| (buffer.name.clone(), buffer.elements, buffer.bytes());
            chain.buffers().iter().map(of).collect()
        };
        let same = layers(&self.chain) == layers(chain) && buffers(&self.chain) == buffers(chain);
        let (rounds, chain) = (self.chain.name().to_owned(), chain.name().to_owned());
        match same {
            _ if self.data.is_empty() => {
                Err(EngineError::EmptyDataset { task: rounds, dataset: self.data.name().to_owned() })
            }
            true => Ok(()),
            false => Err(EngineError::OtherParameters { chain, rounds }),
        }
    }

    /// The bytes of host memory of `batches` batches, and of what the data keeps between rounds.
    pub(crate) fn host_bytes(&self, batches: usize) -> u64 {
        let batch = self.data.largest(1);
        let bytes = batch.map_or(0, |batch| batch.inputs.len_bytes() + batch.targets.len_bytes());
        bytes.saturating_mul(batches as u64).saturating_add(self.data.kept_bytes())
    }
}

/// One model to evaluate: a chain with its initial values, and its data.
#[derive(Clone)]
pub struct EvaluationTask {
    /// The model.
    pub chain: Arc<Chain>,
    /// The data; all of it is read.
    pub data: Arc<dyn Dataset>,
    /// The items of a batch.
    pub batch: usize,
    /// The seed of random initial values.
    pub seed: u64,
}

/// One model to evaluate in rounds. A batch is one item.
#[derive(Clone)]
pub struct RoundsTask {
    /// A name, which differs from those of the other tasks.
    pub name: String,
    /// The model, whose objective [keeps rows](hydra_core::Objective::keeps_rows).
    pub chain: Arc<Chain>,
    /// The data.
    pub data: Arc<dyn Rounds>,
    /// The seed of random initial values.
    pub seed: u64,
}
