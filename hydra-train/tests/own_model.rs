//! The example of a custom model runs, its chain learns in 16 bits, and its saved weights can be trained
//! further.

#[path = "../examples/own_model.rs"]
mod own_model;

use hydra_train::model::with_causes;
use hydra_train::plain::PlainRun;
use hydra_train::prelude::*;
use hydra_train::weights::{ModelWriter, ParamBufferReader, WeightError};
use own_model::{DEPTH, Sines, WIDTH, main, model, spec};

// One at a time: memory is measured for the whole process.
#[test]
fn the_example_does_what_it_says_and_so_does_its_model() {
    main().unwrap();
    let first = learns_in_bf16();
    let dir = tempfile::tempdir().unwrap();
    SafetensorsWriter
        .write(&model(WIDTH, DEPTH).build().unwrap(), &ParamBuffers(&first), dir.path())
        .unwrap();
    let saved = SafetensorsSource::open(dir.path()).unwrap();
    goes_on_from(&saved, &first);
    another_model_is_refused(saved);
}

fn data() -> Arc<Sines> {
    Arc::new(Sines { points: 64, seed: 1 })
}

fn short() -> TrainSpec {
    TrainSpec { length: Length::Epochs(6), ..spec(3e-3) }
}

fn run(chain: &Arc<Chain>) -> Result<RunReport, EngineError> {
    let mut orchestrator = Orchestrator::new(DeviceSpec::cpu(ByteSize::mib(16)).times(2))?;
    orchestrator.submit(TrainTask::new("task", chain.clone(), data(), short()).cuts(vec![2, 4]))?;
    orchestrator.run()
}

/// The plain loop's run, which the spilled one equals.
fn agrees(chain: Chain) -> PlainRun {
    let chain = Arc::new(chain);
    let plain = plain::train(&chain, data().as_ref(), &short()).unwrap();
    let task = run(&chain).unwrap().tasks.remove(0);
    assert_eq!((task.error, &task.losses), (None, &plain.losses));
    assert_eq!(task.weights_sha256.as_ref(), Some(&plain.weights_sha256));
    plain
}

fn learns_in_bf16() -> PlainRun {
    let run = agrees(model(WIDTH, DEPTH).build().unwrap().with_float_type(FloatType::Bf16));
    assert!(run.losses[run.losses.len() - 1] < run.losses[0]);
    run
}

struct ParamBuffers<'a>(&'a PlainRun);

impl ParamBufferReader for ParamBuffers<'_> {
    fn buffer(&self, buffer: usize) -> Result<bytes::Bytes, WeightError> {
        Ok(bytes::Bytes::copy_from_slice(bytemuck::cast_slice(&self.0.buffers[buffer])))
    }
}

fn goes_on_from(saved: &SafetensorsSource, first: &PlainRun) {
    let further = agrees(model(WIDTH, DEPTH).weights(saved.clone()).build().unwrap());
    assert!(further.losses[0] < first.losses[0] / 2.0, "{:?} after {:?}", further.losses, first.losses);
}

fn another_model_is_refused(saved: SafetensorsSource) {
    let smaller = Arc::new(model(WIDTH, DEPTH - 1).weights(saved).build().unwrap());
    let reason = match run(&smaller) {
        Ok(report) => report.tasks[0].error.clone().unwrap(),
        Err(error) => with_causes(&error),
    };
    assert!(reason.contains("has the tensor `block.7.down.bias`"), "{reason}");
}
