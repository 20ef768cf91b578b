//! A custom model, from its layers to its saved weights: a residual perceptron that learns a function of
//! eight numbers, trained twice, on two small devices.
//!
//! ```sh
//! cargo run --example own_model
//! ```

use hydra_train::prelude::*;
use std::error::Error;

// Measures the memory of shards. Without it, memory is estimated from shapes, with a larger margin.
#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new(std::alloc::System);

/// The number of inputs of the function.
const INPUTS: usize = 8;

/// The width of the residual.
pub const WIDTH: usize = 64;

/// The number of blocks.
pub const DEPTH: usize = 8;

/// The metric besides the loss.
const ABSOLUTE: &str = "mean absolute error";

/// The first layer: `[items, INPUTS]` to `[items, width]`.
#[derive(Module, Debug)]
pub struct Stem {
    linear: nn::Linear,
}

impl Forward for Stem {
    fn forward(&self, x: Activation, _: &Pass) -> Activation {
        Activation::of(self.linear.forward(x.into_float::<2>()))
    }
}

/// A residual block: `[items, width]` to `[items, width]`. The residual stays inside the layer.
#[derive(Module, Debug)]
pub struct Block {
    norm: nn::LayerNorm,
    up: nn::Linear,
    down: nn::Linear,
    dropout: f64,
}

impl Forward for Block {
    fn forward(&self, x: Activation, pass: &Pass) -> Activation {
        let x = x.into_float::<2>();
        let hidden = activation::gelu(self.up.forward(self.norm.forward(x.clone())));
        // From the pass: the mask is the same when a backward pass recomputes the forward. A second dropout
        // in this layer would use another site than 0.
        let hidden = pass.site(0).dropout(hidden, self.dropout);
        Activation::of(x + self.down.forward(hidden))
    }

    // Everything that may differ between blocks besides their shapes: equal blocks are measured once.
    fn cost_key(&self) -> Option<String> {
        Some(format!("dropout {}", self.dropout))
    }
}

/// The last layer: `[items, width]` to the mean squared error, of shape `[1]`, against the targets `[items,
/// 1]`, and in an evaluation also to the sum of the absolute errors, whose mean evaluations report.
#[derive(Module, Debug)]
pub struct Head {
    norm: nn::LayerNorm,
    linear: nn::Linear,
}

impl Forward for Head {
    fn forward(&self, x: Activation, pass: &Pass) -> Activation {
        let y = self.linear.forward(self.norm.forward(x.into_float::<2>()));
        // The loss and the targets are f32 for every type of the chain; in f32 this does nothing.
        let error = y.cast(FloatDType::F32) - pass.targets().part(0).into_float::<2>();
        // Along a dimension, Burn adds in a fixed order; over a whole tensor it may not.
        let loss = Activation::of((error.clone() * error.clone()).mean_dim(0).reshape([1]));
        // An evaluation also returns the metric.
        if pass.is_training() { loss } else { loss.and(error.abs().sum_dim(0).reshape([1])) }
    }
}

/// The model: its parameters are lazy and initialized by the initializers of their Burn modules, drawn with a
/// task's seed.
pub fn model(width: usize, depth: usize) -> ChainBuilder {
    let device = Device::flex();
    let linear = |inputs, outputs| nn::LinearConfig::new(inputs, outputs).init(&device);
    let norm = || nn::LayerNormConfig::new(width).init(&device);
    // Names and shapes do not include dropout, so the description does: a checkpoint of another model is
    // refused.
    let dropout = 0.1;
    let mut chain = Chain::builder("residual-mlp").description(format!("dropout {dropout}, gelu"));
    chain = chain.layer("stem", Stem { linear: linear(INPUTS, width) });
    for index in 0..depth {
        let (up, down) = (linear(width, 4 * width), linear(4 * width, width));
        chain = chain.layer(format!("block.{index}"), Block { norm: norm(), up, down, dropout });
    }
    chain.layer("head", Head { norm: norm(), linear: linear(width, 1) }).metrics([ABSOLUTE])
}

/// Points and the sine of their sum, each a function of its index.
pub struct Sines {
    /// The number of points.
    pub points: usize,
    /// Distinguishes datasets.
    pub seed: u64,
}

impl Dataset for Sines {
    fn name(&self) -> &str {
        "sines"
    }

    fn len(&self) -> usize {
        self.points
    }

    fn batch(&self, items: &[usize]) -> Result<Batch, DatasetError> {
        let mut inputs = Vec::with_capacity(items.len() * INPUTS);
        let mut targets = Vec::with_capacity(items.len());
        for &index in items {
            if index >= self.points {
                let (dataset, len) = (self.name().to_owned(), self.points);
                return Err(DatasetError::OutOfRange { dataset, index, len });
            }
            let key = Key::new(self.seed).fold(index as u64);
            let point = (0..INPUTS as u64).map(|i| key.normal(i) as f32 * 0.5);
            let start = inputs.len();
            inputs.extend(point);
            targets.push(inputs[start..].iter().sum::<f32>().sin());
        }
        let n = items.len();
        Ok(Batch {
            inputs: HostActivation::of(HostTensor::float(inputs, [n, INPUTS])),
            targets: HostActivation::of(HostTensor::float(targets, [n, 1])),
            items: n,
            loss_targets: n,
            units: n,
        })
    }
}

/// The training spec of a task.
pub fn spec(lr: f64) -> TrainSpec {
    let spec = TrainSpec::new(OptimizerSpec::adamw(lr), 32);
    TrainSpec { length: Length::Epochs(12), decay: Decay::Matrices, clip: Some(1.0), seed: 3, ..spec }
}

/// Trains two tasks, compares them with the plain loop, and reads back the saved weights.
pub fn main() -> Result<(), Box<dyn Error>> {
    let dir = std::env::temp_dir().join(format!("hydra-own-model-{}", std::process::id()));
    let chain = Arc::new(model(WIDTH, DEPTH).build()?);
    let train = Arc::new(Sines { points: 256, seed: 1 });
    let test = Arc::new(Sines { points: 64, seed: 2 });

    // Less memory than the model needs with its gradients: it is trained in shards.
    let devices = || DeviceSpec::cpu(ByteSize(2_900_000)).times(2);
    let rates = [3e-3, 1e-3];
    let mut orchestrator = Orchestrator::new(devices())?;
    for lr in rates {
        let name = format!("lr-{lr}");
        let task = TrainTask::new(&name, chain.clone(), train.clone(), spec(lr))
            .test(test.clone())
            .write_to(Arc::new(SafetensorsWriter), dir.join(&name));
        orchestrator.submit(task)?;
    }
    let report = orchestrator.run()?;

    for (task, lr) in report.tasks.iter().zip(rates) {
        assert_eq!((task.state, &task.error), (TaskState::Done, &None));
        let (first, last) = (task.losses[0], task.losses[task.losses.len() - 1]);
        println!("{}: {} shards, loss {first:.3} -> {last:.3}", task.name, task.plan.shards);
        assert!(task.plan.shards > 1 && last < first);
        // Bitwise equal to the loop without shards, devices or other tasks.
        let plain = plain::train(&chain, train.as_ref(), &spec(lr))?;
        assert_eq!(task.weights_sha256.as_ref(), Some(&plain.weights_sha256));

        // The saved weights are a source of initial weights, for evaluating or continuing training.
        let source = SafetensorsSource::open(dir.join(&task.name))?;
        let saved = model(WIDTH, DEPTH).weights(source.clone()).build()?;
        source.check(&saved)?;
        let evaluation = Orchestrator::new(devices())?.evaluate(EvaluationTask {
            chain: Arc::new(saved),
            data: test.clone(),
            batch: 32,
            seed: 0,
        })?;
        let absolute = evaluation.metrics[ABSOLUTE];
        println!("  test loss of the saved weights: {:.3}, {ABSOLUTE} {absolute:.3}", evaluation.loss);
        assert!(absolute * absolute <= evaluation.loss);
        assert_eq!(Some(evaluation), task.test);
    }
    std::fs::remove_dir_all(dir)?;
    Ok(())
}
