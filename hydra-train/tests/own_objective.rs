//! The example `own_objective`: a custom loss, selected by its own metric.

#[path = "../examples/own_objective.rs"]
mod own_objective;

use hydra_train::mlp;
use hydra_train::prelude::*;
use own_objective::{CONFIDENCE, main, model, spec};

#[test]
fn the_example_does_what_it_says() {
    main().unwrap();
}

#[test]
fn a_metric_that_the_objective_does_not_have_is_refused_with_those_that_it_has() {
    let data = Arc::new(mlp::Spirals::new(1, 20, 3));
    let spec = TrainSpec { metric: Some("f1".to_owned()), ..spec() };
    let task = TrainTask::new("task", Arc::new(model(2.0).unwrap()), data.clone(), spec).validation(data);
    let mut run = Orchestrator::new(DeviceSpec::cpu(ByteSize::mib(64)).times(1)).unwrap();
    let refused = run.submit(task).and_then(|_| run.run().map(drop)).unwrap_err();
    let error = hydra_train::model::with_causes(&refused);
    assert!(error.contains("no metric `f1`") && error.contains(CONFIDENCE), "{error}");
}
