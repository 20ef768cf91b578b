//! The tasks that are submitted to a run.

use crate::checkpoint::Checkpoint;
use crate::error::EngineError;
use crate::protocol::StopFlag;
use crate::stages::{Cursor, MicrobatchGroup, Program};
use hydra_core::{Chain, Dataset, ModelWriter, TrainSpec};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// One model to train: a chain, its data, how it learns, and where the result goes.
#[derive(Clone)]
pub struct TrainTask {
    pub(crate) name: String,
    pub(crate) chain: Arc<Chain>,
    pub(crate) spec: TrainSpec,
    pub(crate) train: Arc<dyn Dataset>,
    pub(crate) validation: Option<Arc<dyn Dataset>>,
    pub(crate) test: Option<Arc<dyn Dataset>>,
    pub(crate) config: serde_json::Value,
    pub(crate) cuts: Option<Vec<usize>>,
    pub(crate) output: Option<(Arc<dyn ModelWriter>, PathBuf)>,
    pub(crate) checkpoint: Option<PathBuf>,
    pub(crate) resume: Option<Checkpoint>,
    /// True if that is another task's, with which this one has a beginning in common.
    pub(crate) forked: bool,
    /// The state of which it begins with the weights alone.
    pub(crate) weights: Option<Checkpoint>,
    /// The minibatches after which it pauses.
    pub(crate) until: Option<usize>,
    /// The minibatches after which it ends before its length.
    pub(crate) ends: Option<usize>,
    pub(crate) initial_validation: bool,
    pub(crate) stop: StopFlag,
    /// The microbatches of a microbatch group, where they are not chosen by what they cost.
    pub(crate) microbatch_group: Option<usize>,
    /// The most devices that compute it at once, where not all may.
    pub(crate) most_devices: Option<usize>,
    /// True for a task that trains nothing: only the test data is evaluated.
    pub(crate) evaluate_only: bool,
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
            cuts: None,
            output: None,
            checkpoint: None,
            resume: None,
            forked: false,
            weights: None,
            until: None,
            ends: None,
            initial_validation: true,
            stop: StopFlag::new(),
            microbatch_group: None,
            most_devices: None,
            evaluate_only: false,
        }
    }

    /// Items of an evaluation batch: as many as the microbatch that was measured.
    pub(crate) fn evaluation_batch(&self) -> usize {
        self.spec.microbatch().min(self.train.len()).max(1)
    }

    /// The counts of what the task is made of, if it is cut into these shards and its first trained layer is `first_trained`.
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
        Program {
            shards: shards.len(),
            first_trained: shards.iter().position(|range| range.contains(&first_trained)).unwrap_or(0),
            steps: if self.evaluate_only { 0 } else { spec.steps(items) },
            epoch: items.div_ceil(spec.batch).max(1),
            microbatches: spec.accumulate.clamp(1, spec.batch.min(items).max(1)),
            last_microbatches: spec.accumulate.clamp(1, last.max(1)),
            microbatch_group,
            replicas: 1,
            validation: batches(&self.validation),
            test: batches(&self.test),
            initial_validation: self.initial_validation,
            shared: false,
            evaluations: spec.evaluations(),
        }
    }

    /// The place where a task of this program begins, or goes on after its checkpoint.
    pub(crate) fn beginning(&self, program: Program) -> Cursor {
        match self.resume.as_ref().map(Checkpoint::state) {
            Some(state) => Cursor::resumed(program, state.step, state.position.stage()),
            None => Cursor::new(program),
        }
    }

    /// Evaluates on this data before and after training, and during it if the spec says so.
    pub fn validation(self, data: Arc<dyn Dataset>) -> Self {
        Self { validation: Some(data), ..self }
    }

    /// Evaluates on this data after training.
    pub fn test(self, data: Arc<dyn Dataset>) -> Self {
        Self { test: Some(data), ..self }
    }

    /// A description for the report.
    pub fn config(self, config: serde_json::Value) -> Self {
        Self { config, ..self }
    }

    /// Cut-points given by hand; the run is refused where they do not fit.
    pub fn cuts(self, cuts: Vec<usize>) -> Self {
        Self { cuts: Some(cuts), ..self }
    }

    /// The microbatches that a promoted shard takes before the next shard has its turn, from 1 to `accumulate`, which takes
    /// host memory for the boundary activations of all of them; chosen by what it costs where this is not said. It changes
    /// no bit.
    pub fn microbatch_group(self, microbatches: usize) -> Self {
        Self { microbatch_group: Some(microbatches), ..self }
    }

    /// The most devices that compute this task at once, each another microbatch group of its microbatches or batches, as far as there
    /// are microbatch groups and host memory for what waits in them; as many as the run has where this is not said. Other tasks come
    /// first. It changes no bit.
    pub fn most_devices(self, most: usize) -> Self {
        Self { most_devices: Some(most.max(1)), ..self }
    }

    /// Writes the trained model into `dir`.
    pub fn write_to(self, writer: Arc<dyn ModelWriter>, dir: PathBuf) -> Self {
        Self { output: Some((writer, dir)), ..self }
    }

    /// Writes checkpoints into this file, whose directory is made: as often as
    /// [`Orchestrator::checkpoint_every`](crate::Orchestrator::checkpoint_every) says, when the run is asked to stop, and at
    /// the task's end: of the results alone where the model was [written](Self::write_to), else with the trained weights.
    pub fn checkpoint_to(self, file: PathBuf) -> Self {
        Self { checkpoint: Some(file), ..self }
    }

    /// Begins where the checkpoint says, and comes to the bits to which the task would have come. Chain, spec, data and kind
    /// of device must be as they were; budgets, cuts, the number of devices, threads and policy may differ. One that is
    /// finished is not trained again; if it has the trained weights and this task a writer, its model is written.
    pub fn resume_from(self, checkpoint: Checkpoint) -> Self {
        Self { resume: Some(checkpoint), forked: false, ..self }
    }

    /// Begins where another task stood when it was [saved](crate::Command::Save): with its weights, moments, results and place
    /// in the data. From there it trains with its own spec, whose schedule goes on as if the task had come there by itself.
    /// Rates, decay, clipping, schedule, length and evaluations may be others than those of the checkpoint's task; chain,
    /// data, seed, minibatches and the kind of optimizer must be the same.
    pub fn fork_from(self, checkpoint: Checkpoint) -> Self {
        Self { resume: Some(checkpoint), forked: true, ..self }
    }

    /// Begins with the weights that another task had when it was [saved](crate::Command::Save), and with nothing else of it: at
    /// the first minibatch, with fresh moments. The chain must be the same.
    pub fn weights_from(self, checkpoint: Checkpoint) -> Self {
        Self { weights: Some(checkpoint), ..self }
    }

    /// Ends after so many minibatches, with a rate that follows its schedule over the whole length all the same: with the
    /// weights that it has there, or the best ones of a spec that evaluates periodically, it is written and reported as
    /// stopped.
    pub fn ends_at(self, minibatches: usize) -> Self {
        Self { ends: Some(minibatches), ..self }
    }

    /// Pauses after so many minibatches, until a [command](crate::Command::Continue) lets it go on. At 0 it does not even begin.
    pub fn until(self, minibatches: usize) -> Self {
        Self { until: Some(minibatches), ..self }
    }

    /// A flag that stops this task alone at the end of the minibatch that has begun: with the weights of that minibatch, or
    /// the best ones of a spec that evaluates periodically, it is written and reported as stopped.
    pub fn stop_flag(self, stop: StopFlag) -> Self {
        Self { stop, ..self }
    }

    pub(crate) fn checkpoint_file(&self) -> Option<&Path> {
        self.checkpoint.as_deref()
    }

    /// Refuses a task that would be in the way of one of these: of the same name, or with the same files.
    pub(crate) fn check_beside<'a>(
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

    /// Returns true if nothing of it is left to do.
    pub(crate) fn is_finished(&self) -> bool {
        let written = |checkpoint: &Checkpoint| self.output.is_none() || !checkpoint.is_unwritten();
        self.resume.as_ref().is_some_and(|checkpoint| checkpoint.is_finished() && written(checkpoint))
    }

    /// The same from its beginning.
    pub(crate) fn without_state(&self) -> Self {
        Self { resume: None, ..self.clone() }
    }

    /// Evaluates on the validation data before training, or does not; on by default.
    pub fn initial_validation(self, on: bool) -> Self {
        Self { initial_validation: on, ..self }
    }
}

/// One model to evaluate: a chain with the first values that its source gives, and its data.
#[derive(Clone)]
pub struct EvaluationTask {
    /// The model.
    pub chain: Arc<Chain>,
    /// The data, all of which is read.
    pub data: Arc<dyn Dataset>,
    /// The items of a batch.
    pub batch: usize,
    /// The seed of first values that are drawn.
    pub seed: u64,
}
