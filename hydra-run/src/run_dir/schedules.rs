//! Hyperparameter schedules of trials, so that trials with a common prefix train it once.

use crate::run_dir::spec::RunSpec;
use crate::settings::{AdapterSettings, SearchSettings, TrainingSettings};
use hydra_search::{Configuration, HyperparamSchedule, HyperparamSchedules, TrialId, Whole};
use serde_json::{Value, json};

/// Computes the schedules of a run's trials. Settings outside a schedule (model, data and run-wide settings) are equal for all
/// trials.
pub(crate) struct TrialSchedules {
    search: SearchSettings,
    training: TrainingSettings,
    adapters: AdapterSettings,
    seed: u64,
    /// Minibatches of a trial that is trained to its end.
    steps: usize,
}

impl TrialSchedules {
    pub(crate) fn new(spec: &RunSpec, steps: usize) -> Self {
        let (search, training) = (spec.search.clone(), spec.training.clone());
        Self { search, training, adapters: spec.adapters.clone(), seed: spec.model.seed, steps }
    }

    /// Returns the schedule of valid settings, or `None` if they are invalid.
    fn valid_schedule(&self, settings: &Configuration) -> Option<HyperparamSchedule> {
        // The trial number affects the name only.
        let one = self.search.configuration(TrialId(0), settings, &self.training, &self.adapters).ok()?;
        let train = self.training.of(&one, self.seed, usize::MAX).ok()?;
        let Value::Object(mut same) = serde_json::to_value(&train).ok()? else { return None };
        // The learning rate is the optimizer's, times a factor that depends on the step.
        same.remove("schedule")?;
        let stretches = train.schedule.stretches(self.steps).into_iter();
        Some(stretches.fold(HyperparamSchedule::new(), |schedule, (end, rate)| {
            schedule.then(end, json!({ "lora": one.lora, "rate": rate, "training": same }).to_string())
        }))
    }
}

impl HyperparamSchedules for TrialSchedules {
    fn schedule(&self, settings: &Configuration) -> HyperparamSchedule {
        // Invalid settings are refused when the task is created.
        self.valid_schedule(settings).unwrap_or_else(|| Whole { steps: self.steps }.schedule(settings))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::flags;
    use hydra_search::Value as Setting;

    fn schedules(schedule: &str) -> TrialSchedules {
        let training = TrainingSettings {
            schedule: schedule.to_owned(),
            batch: vec![4],
            lr: vec![1e-3],
            steps: Some(100),
            epochs: None,
            ..flags::defaults()
        };
        TrialSchedules {
            search: flags::defaults(),
            training,
            adapters: flags::defaults(),
            seed: 0,
            steps: 100,
        }
    }

    fn shared(of: &TrialSchedules, one: &[(&str, Setting)], other: &[(&str, Setting)]) -> usize {
        let settings = |of: &[(&str, Setting)]| {
            of.iter().fold(Configuration::new(), |all, (name, value)| all.with(name, value.clone()))
        };
        of.schedule(&settings(one)).shared(&of.schedule(&settings(other)))
    }

    #[test]
    fn trials_share_up_to_where_their_steps_differ() {
        let (wsd, constant) = (schedules("wsd"), schedules("constant"));
        let decay = |steps: i64| ("decay_steps", Setting::from(steps));
        assert_eq!(
            shared(&wsd, &[decay(20)], &[decay(40)]),
            61,
            "the first step of a decay has the whole rate"
        );
        assert_eq!(shared(&wsd, &[decay(20), ("decay_to", 0.1.into())], &[decay(20)]), 81);
        assert_eq!(shared(&wsd, &[decay(20), ("lr", 0.1.into())], &[decay(20)]), 0);
        assert_eq!(shared(&wsd, &[decay(20), ("warmup", 5.into())], &[decay(40), ("warmup", 5.into())]), 61);
        assert_eq!(shared(&wsd, &[decay(20), ("warmup", 5.into())], &[decay(20), ("warmup", 6.into())]), 0);
        assert_eq!(shared(&wsd, &[("schedule", "constant".into())], &[decay(40)]), 61);
        let warm = |schedule: &str| [("schedule", Setting::from(schedule)), ("warmup", 7.into())];
        assert_eq!(shared(&constant, &warm("linear"), &warm("cosine")), 7);
        assert_eq!(shared(&constant, &warm("linear"), &warm("constant")), 7);
        for other in [
            ("seed", Setting::from(1)),
            ("weight_decay", 0.5.into()),
            ("batch", 5.into()),
            ("clip", 1.0.into()),
        ] {
            assert_eq!(shared(&constant, std::slice::from_ref(&other), &[]), 0, "{other:?}");
            assert_eq!(shared(&constant, std::slice::from_ref(&other), std::slice::from_ref(&other)), 100);
        }
        assert_eq!(shared(&constant, &[("optimizer", "sgd".into())], &[("optimizer", "adamw".into())]), 0);
    }
}
