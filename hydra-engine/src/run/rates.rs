//! Measures the host's time per element for optimizer steps, gradient additions and disk reads. The measurement runs
//! before the run on a synthetic buffer, with the threads and the kind of store that the run will use.
//!
//! May touch: the optimizer's arithmetic, and stores of its own.
//! Never: touches a buffer of a run.

use super::threads::{host_pool, host_threads};
use crate::device::{LogicalDevice, processors};
use crate::error::EngineError;
use crate::optimizer::{BufferGradient, BufferSum, HostAdder, TaskStep};
use crate::protocol::Clock;
use crate::train_task::TrainTask;
use hydra_core::{
    BufferParam, ByteSize, Chain, Encoding, FloatType, HostTensor, Init, ParamBufferLayout, TaskId,
};
use hydra_spill::{
    Budget, DiskStore, DramStore, Floats, Masters, NarrowFloats, ParamBufferId, SpillError, TierStore,
};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Elements of the synthetic buffer: with moments, it is larger than a core's caches.
const ELEMENTS: usize = 1 << 20;
/// Repetitions; the shortest counts.
const TIMES: usize = 3;

/// Seconds per element.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Seconds {
    /// A step of masters in host memory.
    pub step: f64,
    /// A step of masters on the disk, including reading and writing them.
    pub disk_step: f64,
    /// Adding one microbatch's gradient to a sum.
    pub add: f64,
    /// Reading parameters from the disk.
    pub disk_read: f64,
}

/// The host of a run and the directory of its disk.
pub(super) struct HostRates {
    adder: HostAdder,
    disk: Option<PathBuf>,
    /// Measurements so far.
    known: Vec<(StepKind, Seconds)>,
}

/// The properties of a task that its seconds per element depend on.
#[derive(Debug, PartialEq)]
struct StepKind {
    optimizer: String,
    moments: usize,
    float: FloatType,
    on_disk: bool,
}

impl HostRates {
    pub(super) fn new(devices: &[LogicalDevice], disk: Option<&Path>) -> Result<Self, EngineError> {
        let threads = host_threads(devices.iter().map(|device| &device.spec), processors());
        let pool = host_pool(threads)?;
        // The run creates its directory when it starts; the files of this measurement are unlinked.
        let disk = disk.and_then(|dir| dir.ancestors().find(|dir| dir.is_dir())).map(Path::to_owned);
        Ok(Self { adder: HostAdder { pool, as_read: false }, disk, known: Vec::new() })
    }

    /// The seconds of a task. Those of the disk are measured if some of its buffers are `on_disk`.
    pub(super) fn seconds(&mut self, task: &TrainTask, on_disk: bool) -> Result<Seconds, EngineError> {
        let Some(layout) = synthetic_layout(&task.chain) else { return Ok(Seconds::default()) };
        let optimizer = &task.spec.optimizer;
        let (name, moments) = (optimizer.name().to_owned(), optimizer.moments());
        let kind = StepKind { optimizer: name, moments, float: layout.float, on_disk };
        if let Some((_, seconds)) = self.known.iter().find(|(of, _)| *of == kind) {
            return Ok(*seconds);
        }
        let seconds = self.measured(task, &layout, on_disk)?;
        self.known.push((kind, seconds));
        Ok(seconds)
    }

    fn measured(
        &self,
        task: &TrainTask,
        layout: &ParamBufferLayout,
        on_disk: bool,
    ) -> Result<Seconds, EngineError> {
        let memory: Arc<dyn TierStore> = Arc::new(DramStore::new());
        let (step, _) = self.in_store(&*memory, task, layout)?;
        let (disk_step, disk_read) = match self.disk.as_ref().filter(|_| on_disk) {
            Some(dir) => {
                let bytes = masters(task, layout).len_bytes();
                let working = Budget::new("the disk measurement", ByteSize(2 * bytes));
                let disk = DiskStore::new(memory);
                disk.assign(dir, &working, &[(BUFFER_NAME, bytes)])?;
                self.in_store(&disk, task, layout)?
            }
            None => (0.0, 0.0),
        };
        let one = || self.gradient(layout);
        let mut sum = one().add(one(), &self.adder);
        let add = shortest(|| {
            sum = std::mem::take(&mut sum).add(one(), &self.adder);
            Ok(())
        })?;
        Ok(Seconds { step, disk_step, add, disk_read })
    }

    /// Seconds per element of a step and of a read, with the masters in `store`.
    fn in_store(
        &self,
        store: &dyn TierStore,
        task: &TrainTask,
        layout: &ParamBufferLayout,
    ) -> Result<(f64, f64), EngineError> {
        let masters = masters(task, layout);
        let budget = Budget::new("the optimizer measurement", ByteSize(masters.len_bytes()));
        let reservation =
            budget.reserve(masters.len_bytes(), BUFFER_NAME.to_string()).map_err(SpillError::from)?;
        store.insert(BUFFER_NAME, masters, reservation)?;
        let rate = task.spec.optimizer.lr();
        let (gradient, step) =
            (self.gradient(layout), TaskStep { spec: &task.spec, rate, index: 0, clip: None });
        let stepped = shortest(|| {
            let mut step_piece = |start: usize, masters: &mut Masters| {
                step.piece(layout, start, masters, &gradient);
                Ok(())
            };
            Ok(self.adder.pool.install(|| store.write_pieces(BUFFER_NAME, &mut step_piece))?)
        })?;
        let read = shortest(|| store.read(BUFFER_NAME).map(drop).map_err(EngineError::from))?;
        store.discard(BUFFER_NAME)?;
        Ok((stepped, read))
    }

    /// The gradient of one microbatch.
    fn gradient(&self, layout: &ParamBufferLayout) -> BufferGradient {
        let tensor = HostTensor::float(vec![1e-3; layout.elements], [layout.elements]).in_type(layout.float);
        BufferGradient::of_microbatch(layout, vec![vec![Some(tensor)]], &self.adder)
    }
}

/// The id of the only buffer in these stores.
const BUFFER_NAME: ParamBufferId = ParamBufferId::new(TaskId(0), 0);

/// A buffer of one parameter, like the trained ones of the chain; `None` if it trains nothing.
fn synthetic_layout(chain: &Chain) -> Option<ParamBufferLayout> {
    let float = chain.buffers().iter().find(|buffer| buffer.trained)?.float;
    let name = "synthetic".to_owned();
    let param = BufferParam {
        name: name.clone(),
        shape: vec![ELEMENTS],
        offset: 0,
        len: ELEMENTS,
        init: Init::Zeros,
        given: None,
        state: None,
    };
    Some(ParamBufferLayout {
        name,
        params: vec![param],
        elements: ELEMENTS,
        layers: vec![0],
        trained: true,
        float,
        encoding: Encoding::Masters,
    })
}

fn masters(task: &TrainTask, layout: &ParamBufferLayout) -> Masters {
    let params = vec![1.0; layout.elements];
    let narrow = match layout.float {
        FloatType::F32 => None,
        float => Some(NarrowFloats::of(&params, float, Floats::from)),
    };
    let moments = task.spec.optimizer.moment_layouts(layout);
    Masters { narrow, ..Masters::new(params, Vec::new()).with_moments(moments).with_zeros() }
}

/// Seconds per element of the shortest of [`TIMES`] repetitions.
fn shortest(mut work: impl FnMut() -> Result<(), EngineError>) -> Result<f64, EngineError> {
    let mut shortest = f64::INFINITY;
    for _ in 0..TIMES {
        let clock = Clock::start();
        work()?;
        shortest = shortest.min(clock.now());
    }
    Ok(shortest / ELEMENTS as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hydra_core::{OptimizerSpec, TrainSpec};
    use hydra_models::mlp::{Classifier, Spirals};

    /// Each measurement takes time and leaves no file.
    #[test]
    fn steps_additions_and_reads_are_measured() {
        let dir = tempfile::tempdir().unwrap();
        let adder = HostAdder { pool: host_pool(1).unwrap(), as_read: false };
        let mut host = HostRates { adder, disk: Some(dir.path().to_owned()), known: Vec::new() };
        let linear = burn::nn::LinearConfig::new(2, 3).init(&burn::tensor::Device::flex());
        let chain = Arc::new(Chain::builder("c").layer("c", Classifier { linear }).build().unwrap());
        let task = |optimizer: OptimizerSpec| {
            let data = Arc::new(Spirals::new(1, 8, 3));
            TrainTask::new("task", chain.clone(), data, TrainSpec::new(optimizer, 1))
        };
        let memory = host.seconds(&task(OptimizerSpec::sgd(1e-2)), false).unwrap();
        assert!(memory.step > 0.0 && memory.add > 0.0 && memory.disk_step == 0.0 && memory.disk_read == 0.0);
        let disk = host.seconds(&task(OptimizerSpec::adamw(1e-3)), true).unwrap();
        assert!(
            [disk.step, disk.add, disk.disk_step, disk.disk_read].iter().all(|s| s.is_finite() && *s > 0.0)
        );
        assert_eq!(host.known.len(), 2);
        host.seconds(&task(OptimizerSpec::adamw(1e-2)), true).unwrap();
        assert_eq!(host.known.len(), 2, "tasks that step alike are measured once");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
