//! What goes wrong in one task stays there; what cannot work is refused before anything trains.

mod common;

use common::{Fragile, PLENTY, Points, Settings, adamw, gpt2_chain, mlp_chain, spirals, tokens};
use hydra_core::{ByteSize, Chain, Length, OptimizerSpec, TrainSpec};
use hydra_engine::{EngineError, Observer, RunEvent, StopFlag, TaskState, TrainTask, plain};
use hydra_models::mlp;
use std::sync::{Arc, Mutex};

fn linear(inputs: usize, outputs: usize, device: &burn::tensor::Device) -> burn::nn::Linear {
    burn::nn::LinearConfig::new(inputs, outputs).init(device)
}

fn fragile_chain() -> Arc<Chain> {
    let device = burn::tensor::Device::flex();
    let dense = |i, o| mlp::Dense { linear: linear(i, o, &device) };
    let chain = Chain::builder("fragile")
        .layer("dense", dense(2, 4))
        .layer("fragile", Fragile { limit: 100.0 })
        .layer("classifier", mlp::Classifier { linear: linear(4, 3, &device) });
    Arc::new(chain.build().expect("a chain"))
}

fn steps(n: usize) -> TrainSpec {
    TrainSpec { length: Length::Steps(n), shuffle: false, clip: None, ..adamw(4) }
}

#[test]
fn a_panic_and_a_bad_loss_harm_no_other_task() {
    let good = || TrainTask::new("good", gpt2_chain(), tokens(11, 1), steps(6));
    let explosive = OptimizerSpec::Sgd { lr: 1e30, momentum: 0.0, weight_decay: 0.0 };
    let spec = TrainSpec { optimizer: explosive, ..steps(6) };
    let mut run = Settings { devices: 2, ..Settings::default() }.orchestrator();
    run.submit(
        TrainTask::new(
            "panics",
            fragile_chain(),
            Arc::new(Points { len: 24, bad: 12, panics: false }),
            steps(6),
        )
        .cuts(vec![1]),
    )
    .unwrap();
    run.submit(TrainTask::new("explodes", gpt2_chain(), tokens(11, 1), spec).cuts(vec![2, 4])).unwrap();
    run.submit(good().cuts(vec![1, 2])).unwrap();
    let report = run.run().expect("the run goes on");
    let [panics, explodes, survivor] = &report.tasks[..] else { panic!("three tasks") };

    assert_eq!((panics.state, panics.losses.len()), (TaskState::Failed, 3));
    let message = panics.error.as_deref().unwrap();
    assert!(message.contains("step 3") && message.contains("met "), "{message}");
    assert_eq!(explodes.state, TaskState::Failed);
    let message = explodes.error.as_deref().unwrap();
    assert!(message.contains("the loss is") && message.contains("at step"), "{message}");
    let plain = plain::train(&gpt2_chain(), tokens(11, 1).as_ref(), &steps(6)).unwrap();
    assert_eq!((survivor.state, survivor.error.as_deref()), (TaskState::Done, None));
    assert_eq!(survivor.weights_sha256, Some(plain.weights_sha256));
    assert!(!report.all_done());
}

#[test]
fn a_layer_that_fails_on_the_first_batch_is_refused_before_anything_trains() {
    let mut run = Settings::default().orchestrator();
    run.submit(TrainTask::new(
        "panics",
        fragile_chain(),
        Arc::new(Points { len: 24, bad: 0, panics: false }),
        steps(6),
    ))
    .unwrap();
    let message = chain_of(&run.admit().unwrap_err());
    assert!(message.contains("task `panics`") && message.contains("fragile"), "{message}");
}

fn chain_of(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {}", chain_of(source)),
        None => error.to_string(),
    }
}

#[test]
fn what_cannot_fit_is_refused_with_the_numbers() {
    let submit = |settings: Settings, task: TrainTask| {
        let mut run = settings.orchestrator();
        run.submit(task).unwrap();
        chain_of(&run.admit().unwrap_err())
    };
    let task = || TrainTask::new("task", gpt2_chain(), tokens(11, 1), steps(2));
    let small = submit(Settings { memory: ByteSize(70_000), ..Settings::default() }, task());
    assert!(small.contains("layer `") && small.contains("70000 bytes"), "{small}");
    for cuts in [vec![0], vec![3, 2], vec![9]] {
        let bad = submit(Settings::default(), task().cuts(cuts.clone()));
        assert!(bad.contains(&format!("{cuts:?}")), "{bad}");
    }
    let mut run = Settings::default().orchestrator().host_memory(ByteSize(10_000));
    run.submit(task()).unwrap();
    assert!(matches!(run.admit(), Err(EngineError::HostMemory { budget: 10_000, .. })));
}

#[test]
fn bad_submissions_are_named() {
    let mut run = Settings::default().orchestrator();
    let task = |name: &str| TrainTask::new(name, mlp_chain(), spirals(), steps(1));
    run.submit(task("a")).unwrap();
    assert!(matches!(run.submit(task("a")), Err(EngineError::DuplicateTask { name }) if name == "a"));
    let spec = TrainSpec { optimizer: OptimizerSpec::adamw(f64::NAN), ..steps(1) };
    let bad = run.submit(TrainTask::new("b", mlp_chain(), spirals(), spec)).unwrap_err();
    assert!(bad.to_string().contains("learning rate"), "{bad}");
    assert!(matches!(Settings::default().orchestrator().run(), Err(EngineError::NoTask)));
}

/// Stops the run after some minibatches, and remembers what happened.
struct Stopper {
    flag: StopFlag,
    after: usize,
    seen: Arc<Mutex<Vec<String>>>,
}

impl Observer for Stopper {
    fn observe(&mut self, event: &RunEvent<'_>) {
        let mut seen = self.seen.lock().unwrap();
        match event {
            RunEvent::Minibatch { task, step, .. } => {
                seen.push(format!("minibatch {step} of {task}"));
                if seen.len() == self.after {
                    self.flag.stop();
                }
            }
            RunEvent::Ended { state, .. } => seen.push(format!("{state:?}")),
            _ => {}
        }
    }
}

#[test]
fn a_stop_finishes_minibatches_and_keeps_what_was_trained() {
    let flag = StopFlag::new();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let observer = Stopper { flag: flag.clone(), after: 5, seen: seen.clone() };
    let settings = Settings { devices: 2, ..Settings::default() };
    let mut run = settings.orchestrator().stop_flag(flag).observer(Box::new(observer));
    for name in ["one", "two", "three"] {
        let task = TrainTask::new(name, gpt2_chain(), tokens(11, 1), steps(400)).cuts(vec![1, 3]);
        run.submit(task.validation(tokens(3, 1))).unwrap();
    }
    let report = run.run().unwrap();
    for task in &report.tasks {
        assert_eq!(task.state, TaskState::Stopped);
        assert!(task.losses.len() < 400 && task.steps == task.losses.len());
        let so_far = steps(400.min(task.steps.max(1)));
        if task.steps > 0 {
            let plain = plain::train(&gpt2_chain(), tokens(11, 1).as_ref(), &so_far).unwrap();
            assert_eq!(task.weights_sha256, Some(plain.weights_sha256), "{} steps", task.steps);
        }
    }
    assert_eq!(seen.lock().unwrap().iter().filter(|line| *line == "Stopped").count(), 3);
}

#[test]
fn evaluation_is_the_mean_over_all_terms() {
    let data = tokens(7, 3);
    let settings = Settings { memory: PLENTY, ..Settings::default() };
    let of = |batch| settings.orchestrator().evaluate(gpt2_chain(), data.clone(), batch, 0).unwrap();
    let (one, many) = (of(1), of(3));
    assert_eq!((one.predicted_tokens, many.predicted_tokens), (7 * 11, 7 * 11));
    assert!((one.loss - many.loss).abs() < 1e-6, "{} against {}", one.loss, many.loss);
    assert!((one.perplexity - one.loss.exp()).abs() < 1e-9);
}

#[test]
fn frozen_layers_keep_their_weights() {
    let device = burn::tensor::Device::flex();
    let chain = Chain::builder("frozen")
        .frozen("a", mlp::Dense { linear: linear(2, 8, &device) })
        .frozen("b", mlp::Dense { linear: linear(8, 8, &device) })
        .layer("c", mlp::Dense { linear: linear(8, 8, &device) })
        .layer("d", mlp::Classifier { linear: linear(8, 3, &device) });
    let chain = Arc::new(chain.build().unwrap());
    let spec = steps(5);
    let plain = plain::train(&chain, spirals().as_ref(), &spec).unwrap();
    let start =
        plain::train(&chain, spirals().as_ref(), &TrainSpec { length: Length::Steps(1), ..spec.clone() })
            .unwrap();
    assert_eq!(plain.images[0], start.images[0]);
    assert_ne!(plain.images[2], start.images[2]);
    for cuts in [vec![1, 2, 3], vec![3], vec![2]] {
        let settings = Settings { cuts: Some(cuts), devices: 2, ..Settings::default() };
        let report = settings.task(TrainTask::new("task", chain.clone(), spirals(), spec.clone()));
        assert_eq!((report.error, report.weights_sha256), (None, Some(plain.weights_sha256.clone())));
    }
}
