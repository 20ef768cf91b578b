//! What each step of a trial depends on, so that trials which begin alike are trained once until they part.

use crate::run_dir::spec::RunSpec;
use crate::settings::{AdapterSettings, SearchSettings, TrainingSettings};
use hydra_search::{Configuration, HyperparamSchedule, HyperparamSchedules, TrialId, Whole};
use serde_json::{Value, json};

/// The schedules of a run's trials. All that they do not say is the same for all of them: model, data, and what the run has
/// beside a task's settings.
pub(crate) struct TrialSchedules {
    search: SearchSettings,
    training: TrainingSettings,
    adapters: AdapterSettings,
    seed: u64,
    /// The minibatches of every trial that is trained to its end.
    steps: usize,
}

impl TrialSchedules {
    pub(crate) fn of(spec: &RunSpec, steps: usize) -> Self {
        let (search, training) = (spec.search.clone(), spec.training.clone());
        Self { search, training, adapters: spec.adapters.clone(), seed: spec.model.seed, steps }
    }

    /// The schedule of settings that a task can have.
    fn of_task(&self, settings: &Configuration) -> Option<HyperparamSchedule> {
        // The number is in the name alone.
        let one = self.search.configuration(TrialId(0), settings, &self.training, &self.adapters).ok()?;
        let train = self.training.of(&one, self.seed, usize::MAX).ok()?;
        let Value::Object(mut same) = serde_json::to_value(&train).ok()? else { return None };
        // A rate is that of the optimizer times a factor, which is a function of the step.
        same.remove("schedule")?;
        let stretches = train.schedule.stretches(self.steps).into_iter();
        Some(stretches.fold(HyperparamSchedule::new(), |schedule, (end, rate)| {
            schedule.then(end, json!({ "lora": one.lora, "rate": rate, "training": same }).to_string())
        }))
    }
}

impl HyperparamSchedules for TrialSchedules {
    fn schedule(&self, settings: &Configuration) -> HyperparamSchedule {
        // Settings that no task can have are refused where the task is made.
        self.of_task(settings).unwrap_or_else(|| Whole { steps: self.steps }.schedule(settings))
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
