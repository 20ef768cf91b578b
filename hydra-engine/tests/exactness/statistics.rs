//! Statistics of whole minibatches: what the loss of each microbatch reads is known before the first one is trained.

use crate::common::{Settings, adamw, mlp_chain, spirals};
use burn::tensor::{Tensor, activation};
use hydra_core::{
    Activation, Chain, HostActivation, Length, Measures, Metric, Objective, Pass, Statistic, TrainSpec,
};
use hydra_engine::{TrainTask, plain};
use std::sync::Arc;

/// The mean sigmoid of each item's first output above a baseline: the mean over the minibatch of its second output, or of
/// the items' classes.
#[derive(Clone, Copy, Debug)]
struct AboveMean(Statistic);

impl Objective for AboveMean {
    fn name(&self) -> String {
        format!("above the mean of {:?}", self.0)
    }

    fn loss(&self, outputs: &Activation, pass: &Pass) -> Tensor<1> {
        let outputs = outputs.part(0).into_float::<2>();
        let [items, _] = outputs.dims();
        let first = outputs.clone().narrow(1, 0, 1).reshape([items]);
        let above = match (pass.statistic(), self.0) {
            (Some(baseline), _) => first - baseline,
            (None, Statistic::OfTargets) => first - pass.targets().part(0).into_int::<1>().float().mean(),
            (None, _) => first - outputs.narrow(1, 1, 1).reshape([items]).detach().mean(),
        };
        activation::sigmoid(above * 4.0).mean()
    }

    fn metrics(&self) -> Vec<Metric> {
        vec![Metric::lower("second")]
    }

    fn measure(&self, outputs: &Activation, _: &Pass) -> Measures {
        let second = outputs.part(0).into_float::<2>().narrow(1, 1, 1);
        Measures { sums: Some(second.sum_dim(0).reshape([1])), rows: None }
    }

    fn statistic(&self) -> Statistic {
        self.0
    }

    fn measure_targets(&self, targets: &HostActivation) -> Vec<f64> {
        vec![targets.parts[0].as_i32().iter().map(|class| f64::from(*class)).sum()]
    }

    fn statistic_of(&self, sums: &[f64], loss_targets: u64) -> f64 {
        sums[0] / loss_targets as f64
    }
}

fn spec(accumulate: usize) -> TrainSpec {
    TrainSpec { length: Length::Steps(9), accumulate, eval_every: Some(4), ..adamw(8) }
}

/// A perceptron that trains these layers, or all of them.
fn chain(of: Statistic, layers: &[&str]) -> Arc<Chain> {
    let chain = Arc::into_inner(mlp_chain()).expect("the only one");
    let chain = chain.with_objective(AboveMean(of)).expect("an objective");
    Arc::new(if layers.is_empty() { chain } else { chain.training_only(layers).expect("layers") })
}

#[test]
fn a_statistic_is_that_of_the_whole_minibatch_however_it_is_cut() {
    // Minibatches of 8, 8, .. and 4 items, whose first shards are ready before the last one of the minibatch before has ended
    // where they are frozen.
    for (of, layers) in [Statistic::OfTargets, Statistic::OfOutputs]
        .into_iter()
        .flat_map(|of| [(of, &[][..]), (of, &["classifier"]), (of, &["dense.2", "classifier"])])
    {
        let chain = || chain(of, layers);
        let plain = |spec: &TrainSpec| plain::train(&chain(), spirals().as_ref(), spec).expect("a plain run");
        let [whole, parts] = [1, 3].map(|accumulate| plain(&spec(accumulate)));
        for (step, (whole, parts)) in whole.losses.iter().zip(&parts.losses).enumerate() {
            let close = (whole - parts).abs() < 1e-6;
            assert!(close, "{of:?} {layers:?}, {step}: {whole} in one microbatch, {parts} in three");
        }
        let settings = [
            Settings::default(),
            Settings { cuts: Some(vec![1, 2, 3]), microbatch_group: Some(2), ..Settings::default() },
            Settings { cuts: Some(vec![1, 2, 3]), ..Settings::default() },
            Settings { cuts: Some(vec![2]), devices: 3, replicas: Some(3), ..Settings::default() },
            Settings {
                cuts: Some(vec![1, 3]),
                devices: 2,
                others: 2,
                prefetch: false,
                ..Settings::default()
            },
            Settings {
                cuts: Some(vec![1, 2, 3]),
                microbatch_group: Some(3),
                cache: false,
                ..Settings::default()
            },
        ];
        for settings in settings {
            let task = TrainTask::new("task", chain(), spirals(), spec(3)).validation(spirals());
            let report = settings.task(task);
            assert_eq!(report.losses, parts.losses, "{of:?} {layers:?}, {settings:?}");
            let best = report.validations.best_step.expect("evaluations");
            let best = plain(&TrainSpec { length: Length::Steps(best), ..spec(3) });
            assert_eq!(report.weights_sha256, Some(best.weights_sha256), "{of:?} {layers:?}, {settings:?}");
        }
    }
}
