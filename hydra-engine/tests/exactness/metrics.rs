//! Metrics: the values that evaluations measure in addition to the loss.

use crate::common::Classifier;
use crate::common::{Settings, adamw, mlp_chain, spirals};
use burn::module::Module;
use burn::nn::LinearConfig;
use burn::tensor::Device;
use hydra_core::{Activation, Chain, Forward, Length, Pass, TrainSpec};
use hydra_engine::{
    Checkpoint, CheckpointEvery, Evaluation, EvaluationTask, Observer, RunEvent, TrainTask, plain,
};
use hydra_models::mlp::{Dense, Spirals};
use hydra_models::objective::ACCURACY;
use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tempfile::TempDir;

fn spec() -> TrainSpec {
    TrainSpec { length: Length::Steps(6), eval_every: Some(2), ..adamw(8) }
}

fn task(chain: Arc<Chain>) -> TrainTask {
    let held_out = |seed, items| Arc::new(Spirals::new(seed, items, 3));
    // 21 and 17 items in batches of 8: the last batch has fewer loss targets.
    TrainTask::new("task", chain, spirals(), spec()).validation(held_out(2, 21)).test(held_out(3, 17))
}

/// The accuracy of these weights, item by item, without Burn.
fn accuracy_of(buffers: &[Vec<f32>], chain: &Chain, data: &Spirals) -> f64 {
    use hydra_core::Dataset;
    let items: Vec<usize> = (0..data.len()).collect();
    let batch = data.batch(&items).unwrap();
    let (points, classes) = (batch.inputs.parts[0].as_f32(), batch.targets.parts[0].as_i32());
    let layers = chain.layers().iter().map(|layer| {
        let param = |at: usize| {
            let at = layer.params[at];
            let param = &chain.buffers()[at.buffer].params[at.slot];
            (param.shape.clone(), &buffers[at.buffer][param.range()])
        };
        (param(0), param(1))
    });
    let layers: Vec<_> = layers.collect();
    let right = points.chunks(2).zip(classes).filter(|(point, class)| {
        let mut x = point.to_vec();
        for (index, ((shape, weight), (_, bias))) in layers.iter().enumerate() {
            let column = |j: usize| (0..shape[0]).map(|i| x[i] * weight[i * shape[1] + j]).sum::<f32>();
            let last = index + 1 == layers.len();
            let y = (0..shape[1]).map(|j| column(j) + bias[j]).map(|y| if last { y } else { y.max(0.0) });
            x = y.collect();
        }
        let best = (0..x.len()).max_by(|a, b| x[*a].total_cmp(&x[*b])).unwrap();
        best as i32 == **class
    });
    right.count() as f64 / data.len() as f64
}

#[test]
fn metrics_are_means_over_all_items_however_the_chain_is_cut() {
    let whole = Settings::default().task(task(mlp_chain()));
    let spec = TrainSpec { length: Length::Steps(whole.validations.best_step.unwrap()), ..spec() };
    let whole_length = TrainSpec { length: Length::Steps(6), ..spec.clone() };
    assert_eq!(
        spec.rate(0, 6),
        whole_length.rate(0, 6),
        "the rate is constant: the best weights are a prefix's"
    );
    let best = plain::train(&mlp_chain(), spirals().as_ref(), &spec).unwrap();
    assert_eq!(whole.weights_sha256.as_ref(), Some(&best.weights_sha256));
    let test = whole.test.clone().unwrap();
    let expected = accuracy_of(&best.buffers, &mlp_chain(), &Spirals::new(3, 17, 3));
    assert_eq!(test.metrics[ACCURACY], expected, "a count of right answers, to the bit: {test:?}");
    let at_first = whole.validations.initial_validation.clone().unwrap();
    assert!(at_first.metrics[ACCURACY] >= 0.0 && whole.validations.evaluations.len() == 3);

    let evaluations = |report: &hydra_engine::TaskReport| {
        let periodic = report.validations.evaluations.iter().map(|(_, result)| result.clone());
        let ends = [&report.validations.initial_validation, &report.validation, &report.test];
        periodic.chain(ends.into_iter().flatten().cloned()).collect::<Vec<Evaluation>>()
    };
    let settings = [
        Settings { cuts: Some(vec![1, 2, 3]), devices: 2, others: 1, ..Settings::default() },
        Settings { threads: 2, prefetch: false, zero_copy: true, ..Settings::default() },
    ];
    for settings in settings {
        assert_eq!(evaluations(&settings.task(task(mlp_chain()))), evaluations(&whole), "{settings:?}");
    }
    let json = serde_json::to_value(&whole).unwrap();
    assert_eq!(json["test"]["metrics"][ACCURACY], test.metrics[ACCURACY]);
}

/// Records the progress of pilot passes and evaluations as text.
struct Far(Arc<Mutex<Vec<String>>>);

impl Observer for Far {
    fn observe(&mut self, event: &RunEvent<'_>) {
        let mut far = self.0.lock().unwrap();
        match event {
            RunEvent::Pilot { task, progress } => far.push(format!("{task}: {progress:?}")),
            RunEvent::Admitted(_) => far.push("admitted".to_owned()),
            RunEvent::Evaluating { batch, batches, units, .. } => {
                far.push(format!("{} of {batches}, {units}", batch + 1));
            }
            RunEvent::Evaluated { result, .. } => far.push(format!("all {}", result.loss_targets)),
            _ => {}
        }
    }
}

#[test]
fn an_evaluation_tells_how_far_it_is_and_so_does_its_pilot_pass() {
    let far = Arc::new(Mutex::new(Vec::new()));
    let run = Settings::default().orchestrator().observer(Box::new(Far(far.clone())));
    let chain = mlp_chain();
    let layers = chain.len();
    let data = Arc::new(Spirals::new(3, 17, 3));
    run.evaluate(EvaluationTask { chain, data, batch: 7, seed: 0 }).unwrap();
    let far = std::mem::take(&mut *far.lock().unwrap());
    let admitted = far.iter().position(|line| line == "admitted").unwrap();
    let measured =
        (1..=layers).map(|done| format!("evaluate: Measured {{ done: {done}, layers: {layers} }}"));
    assert_eq!(far[..layers], measured.collect::<Vec<_>>());
    assert!(far[layers..admitted].iter().all(|line| line.starts_with("evaluate: Verified")), "{far:?}");
    assert_eq!(far[admitted + 1..], ["1 of 3, 7", "2 of 3, 7", "all 17"]);
}

/// Copies the checkpoint after each write.
struct Copies(PathBuf, Arc<Mutex<Vec<PathBuf>>>);

impl Observer for Copies {
    fn observe(&mut self, event: &RunEvent<'_>) {
        if let RunEvent::Checkpointed { .. } = event {
            let mut copies = self.1.lock().unwrap();
            let copy = self.0.with_extension(copies.len().to_string());
            fs::copy(&self.0, &copy).unwrap();
            copies.push(copy);
        }
    }
}

#[test]
fn an_evaluation_that_was_interrupted_goes_on() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("task.safetensors");
    let copies = Arc::new(Mutex::new(Vec::new()));
    let mut run = Settings::default().orchestrator();
    run = run.checkpoint_every(CheckpointEvery::Time(Duration::ZERO));
    run = run.observer(Box::new(Copies(file.clone(), copies.clone())));
    run.submit(task(mlp_chain()).checkpoint_to(file)).unwrap();
    let whole = run.run().unwrap().tasks.remove(0);
    let copies = std::mem::take(&mut *copies.lock().unwrap());
    assert!(copies.len() > 12, "also within evaluations: {}", copies.len());
    for copy in copies {
        let from = Checkpoint::open(&copy).unwrap();
        let report = Settings::default().task(task(mlp_chain()).resume_from(from));
        assert_eq!(
            (&report.validations.evaluations, &report.validation),
            (&whole.validations.evaluations, &whole.validation)
        );
        assert_eq!(report.test, whole.test);
    }
}

/// A last layer that contradicts its chain's description.
#[derive(Module, Debug)]
struct Odd {
    #[module(skip)]
    evaluating: usize,
    #[module(skip)]
    training: usize,
}

impl Forward for Odd {
    fn forward(&self, x: Activation, pass: &Pass) -> Activation {
        let mean = x.into_float::<2>().mean_dim(0).mean_dim(1).reshape([1]);
        let count = if pass.is_training() { self.training } else { self.evaluating };
        (0..count).map(|_| mean.clone().into()).collect()
    }
}

fn refusal(metrics: &[&str], training: usize, evaluating: usize) -> String {
    let linear = LinearConfig::new(2, 4).init(&Device::flex());
    let chain = Chain::builder("odd").layer("dense", Dense { linear });
    let chain = chain.layer("odd", Odd { evaluating, training }).metrics(metrics.iter().copied());
    let mut run = Settings::default().orchestrator();
    let submitted = run.submit(task(Arc::new(chain.build().unwrap())));
    let error = submitted.map(|_| ()).and_then(|()| run.run().map(|_| ())).unwrap_err();
    hydra_core::with_causes(&error)
}

#[test]
fn a_layer_that_returns_other_numbers_than_it_should_is_refused_before_anything_trains() {
    let said = refusal(&["a", "b"], 1, 2);
    assert!(
        said.contains("expected a loss and 2 metrics [\"a\", \"b\"]") && said.contains("found 2"),
        "{said}"
    );
    let said = refusal(&["a"], 2, 2);
    assert!(said.contains("expected only a loss") && said.contains("found 2"), "{said}");
}

#[test]
fn what_has_no_name_is_left_out() {
    let mut run = Settings::default().orchestrator();
    let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(&Device::flex());
    let chain = Chain::builder("mine").layer("dense", Dense { linear: linear(2, 4) });
    let chain = chain.layer("classifier", Classifier { linear: linear(4, 3) }).build().unwrap();
    run.submit(task(Arc::new(chain))).unwrap();
    let test = run.run().unwrap().tasks.remove(0).test.unwrap();
    assert!(test.loss > 0.0 && test.metrics.is_empty());
}

#[test]
fn metrics_have_names_of_their_own() {
    for metrics in [&["loss"][..], &["a", "a"], &[""]] {
        let linear = LinearConfig::new(2, 4).init(&Device::flex());
        let chain = Chain::builder("odd").layer("dense", Dense { linear }).metrics(metrics.iter().copied());
        let said = chain.build().map(|_| ()).unwrap_err().to_string();
        assert!(said.contains(&format!("a metric called `{}`", metrics[metrics.len() - 1])), "{said}");
    }
}
