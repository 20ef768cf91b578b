//! Learning-rate schedules: a linear warmup followed by a [`Curve`].
//!
//! A curve is a function of only the step and the number of steps, so a task that resumes from a
//! checkpoint has the same rates as an uninterrupted one. Users can implement [`Curve`] for their own types.

mod curves;

pub use curves::{Constant, Cosine, Linear, WarmupStableDecay};

use crate::{CoreError, Settings};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::sync::Arc;

/// Reads a curve from its settings and adds a warmup.
type Read = fn(&Settings, usize) -> Result<Schedule, CoreError>;

/// The built-in curves, by name.
const REGISTERED: [(&str, Read); 4] = [
    ("constant", |_, warmup| Ok(Schedule::new(Constant, warmup))),
    ("linear", |_, warmup| Ok(Schedule::new(Linear, warmup))),
    ("cosine", |_, warmup| Ok(Schedule::new(Cosine, warmup))),
    ("wsd", |settings, warmup| Ok(Schedule::new(WarmupStableDecay::read(settings)?, warmup))),
];

/// The learning rate after the warmup, as a factor on the base rate.
pub trait Curve: fmt::Debug + Send + Sync {
    /// The unique name of the curve in files and checkpoints.
    fn name(&self) -> &str;

    /// Everything that the curve depends on besides the step.
    fn settings(&self) -> Settings {
        Settings::new()
    }

    /// Checks every setting against its range.
    ///
    /// # Errors
    /// [`CoreError::Spec`] with the first setting that is out of range.
    fn validate(&self) -> Result<(), CoreError> {
        Ok(())
    }

    /// The factor on the base rate at `step` of `steps`, both counted from the end of the warmup. It is also
    /// defined for steps at or beyond the end, which are not trained.
    fn factor(&self, step: usize, steps: usize) -> f64;

    /// The number of initial steps with a factor of exactly one. Tasks that differ only in curves or curve
    /// settings have the same rates in these steps, and can share them.
    fn stable(&self, steps: usize) -> usize {
        let _ = steps;
        0
    }
}

/// The learning-rate schedule of a whole training. Clones share the curve.
///
/// Two are equal if their warmups, curve names and curve settings are equal. Files store the curve's name as
/// `kind`, `warmup`, and the curve's settings at the same level. If the name in a file is not registered, the
/// result compares equal to a task's own curve of that name, and is refused in a spec
/// ([`TrainSpec::validate`](crate::TrainSpec::validate)).
#[derive(Clone, Debug)]
pub struct Schedule {
    curve: Arc<dyn Curve>,
    warmup: usize,
}

impl Schedule {
    /// Returns a curve after `warmup` steps in which the rate rises linearly from zero; the first of them has
    /// rate zero.
    pub fn new(curve: impl Curve + 'static, warmup: usize) -> Self {
        Self { curve: Arc::new(curve), warmup }
    }

    /// The names of the built-in curves.
    pub fn names() -> impl ExactSizeIterator<Item = &'static str> {
        REGISTERED.iter().map(|(name, _)| *name)
    }

    /// The factor on the base rate at `step` (from zero) of `total` steps.
    pub fn factor(&self, step: usize, total: usize) -> f64 {
        match step.checked_sub(self.warmup) {
            Some(step) => self.curve.factor(step, total.saturating_sub(self.warmup)),
            None => step as f64 / self.warmup as f64,
        }
    }

    /// The stretches of a training of `total` steps, each with its end. Two schedules have bitwise equal
    /// factors up to the first stretch in which they differ.
    pub fn stretches(&self, total: usize) -> Vec<(usize, Stretch<'_>)> {
        let warmup = self.warmup.min(total);
        let stable = warmup + self.curve.stable(total - warmup).min(total - warmup);
        let all = [
            (0, warmup, Stretch::Rise { warmup: self.warmup }),
            (warmup, stable, Stretch::Stable),
            (stable, total, Stretch::Curve { schedule: self, total }),
        ];
        all.into_iter().filter(|(from, to, _)| from < to).map(|(_, to, stretch)| (to, stretch)).collect()
    }

    /// Checks every setting against its range.
    ///
    /// # Errors
    /// [`CoreError::Spec`] with the first one that is out of it.
    pub fn validate(&self) -> Result<(), CoreError> {
        self.curve.validate()
    }

    fn description(&self) -> Description {
        let (kind, warmup) = (self.curve.name().to_owned(), self.warmup);
        Description { kind, warmup, settings: self.curve.settings() }
    }
}

/// The dependencies of the factor in some consecutive steps, besides the step.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Stretch<'a> {
    /// The factor rises from zero.
    Rise {
        /// The number of steps of the whole warmup.
        warmup: usize,
    },
    /// The factor is one.
    Stable,
    /// The factor is defined by the curve.
    Curve {
        /// The schedule with all its settings.
        schedule: &'a Schedule,
        /// The number of steps of the whole training.
        total: usize,
    },
}

impl Default for Schedule {
    /// A constant rate without a warmup.
    fn default() -> Self {
        Self::new(Constant, 0)
    }
}

impl PartialEq for Schedule {
    fn eq(&self, other: &Self) -> bool {
        self.description() == other.description()
    }
}

impl Serialize for Schedule {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.description().serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Schedule {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let described = Description::deserialize(deserializer)?;
        let (warmup, settings) = (described.warmup, &described.settings);
        match REGISTERED.iter().find(|(name, _)| *name == described.kind) {
            Some((_, read)) => read(settings, warmup).map_err(D::Error::custom),
            None => Ok(Self::new(described, warmup)),
        }
    }
}

/// A schedule as stored in a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Description {
    kind: String,
    warmup: usize,
    #[serde(flatten)]
    settings: Settings,
}

/// A placeholder for a curve that is not registered.
impl Curve for Description {
    fn name(&self) -> &str {
        &self.kind
    }

    fn settings(&self) -> Settings {
        self.settings.clone()
    }

    fn validate(&self) -> Result<(), CoreError> {
        let expected = "a built-in schedule, or a `Curve` that the task provides";
        Err(CoreError::Spec { name: "schedule", found: self.kind.clone(), expected })
    }

    fn factor(&self, _: usize, _: usize) -> f64 {
        panic!("the schedule `{}` is known only by its name and has no factors", self.kind);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{OptimizerSpec, TrainSpec};

    type Make = fn(usize) -> Schedule;
    const CONSTANT: Make = |warmup| Schedule::new(Constant, warmup);
    const LINEAR: Make = |warmup| Schedule::new(Linear, warmup);
    const COSINE: Make = |warmup| Schedule::new(Cosine, warmup);

    fn close(a: f64, b: f64) {
        assert!((a - b).abs() < 1e-12, "{a} against {b}");
    }

    #[test]
    fn schedules_follow_hugging_face() {
        let at = |of: Make, step| of(3).factor(step, 10);
        for of in [CONSTANT, LINEAR, COSINE] {
            close(at(of, 0), 0.0);
            close(at(of, 1), 1.0 / 3.0);
            close(at(of, 3), 1.0);
        }
        close(at(CONSTANT, 9), 1.0);
        close(at(LINEAR, 9), 1.0 / 7.0);
        close(at(COSINE, 4), 0.950_484_433_951_209_5);
        close(at(COSINE, 9), 0.049_515_566_048_790_48);
    }

    #[test]
    fn schedules_have_ends() {
        for of in [CONSTANT, LINEAR, COSINE] {
            let at = |warmup, step, total| of(warmup).factor(step, total);
            assert_eq!(
                (at(0, 0, 1), at(0, 0, 7)),
                (1.0, 1.0),
                "without a warmup the first step has the base rate"
            );
            assert_eq!(
                (at(5, 4, 5), at(9, 4, 5)),
                (0.8, 4.0 / 9.0),
                "a warmup may be as long as the training"
            );
            assert_eq!((at(1, 0, 1), at(usize::MAX, 0, 1)), (0.0, 0.0));
            assert!(
                (0..12).all(|step| (0.0..=1.0).contains(&at(2, step, 10))),
                "also of steps beyond the end"
            );
        }
        let last = |of: Make| of(0).factor(10, 10);
        assert_eq!([LINEAR, COSINE].map(last), [0.0, 0.0]);
    }

    #[test]
    fn warmup_stable_decay_is_constant_until_the_last_part() {
        let schedule = Schedule::new(WarmupStableDecay { decay_steps: 4, decay_to: 0.0 }, 2);
        let factors: Vec<f64> = (0..=11).map(|step| schedule.factor(step, 10)).collect();
        // Hugging Face's `get_wsd_schedule` with 2 warmup and 4 decay steps of 10, decaying linearly.
        assert_eq!(factors, [0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]);
        let longer = Schedule::new(WarmupStableDecay { decay_steps: 99, decay_to: 0.0 }, 2);
        (2..10).for_each(|step| close(longer.factor(step, 10), LINEAR(2).factor(step, 10)));
        assert!(schedule.validate().is_ok());
        assert!(Schedule::new(WarmupStableDecay { decay_steps: 0, decay_to: 0.0 }, 0).validate().is_err());
    }

    #[test]
    fn a_decay_may_end_above_zero() {
        let to = |decay_to| Schedule::new(WarmupStableDecay { decay_steps: 4, decay_to }, 2);
        // Hugging Face's `min_lr_ratio`.
        assert_eq!([6, 7, 8, 9].map(|step| to(0.5).factor(step, 10)), [1.0, 0.875, 0.75, 0.625]);
        assert_eq!([7, 9, 10].map(|step| to(1.0).factor(step, 10)), [1.0; 3]);
        assert!(to(1.0).validate().is_ok());
        assert!([-0.1, 1.1, f64::NAN].iter().all(|share| to(*share).validate().is_err()));
    }

    #[test]
    fn equal_stretches_have_equal_factors() {
        let wsd = |decay_steps, decay_to, warmup| {
            Schedule::new(WarmupStableDecay { decay_steps, decay_to }, warmup)
        };
        for warmup in [0, 1, 3, 9, 12, 40] {
            let schedules = [
                CONSTANT(warmup),
                LINEAR(warmup),
                COSINE(warmup),
                wsd(1, 0.0, warmup),
                wsd(4, 0.0, warmup),
                wsd(4, 0.3, warmup),
                wsd(99, 0.0, warmup),
                CONSTANT(warmup + 1),
            ];
            for total in [0, 1, 4, 12] {
                let flat = |schedule: &Schedule| {
                    let stretches = schedule.stretches(total);
                    let ends = stretches.iter().map(|(end, _)| *end).collect::<Vec<_>>();
                    assert!(ends.is_sorted() && ends.last().copied().unwrap_or(0) == total, "{schedule:?}");
                    let of = |step: &usize| stretches.iter().position(|(end, _)| step < end).unwrap();
                    (0..total).map(|step| format!("{:?}", stretches[of(&step)].1)).collect::<Vec<_>>()
                };
                for (one, other) in
                    schedules.iter().flat_map(|one| schedules.iter().map(move |other| (one, other)))
                {
                    let same = flat(one).into_iter().zip(flat(other));
                    for (step, _) in same.enumerate().take_while(|(_, (one, other))| one == other) {
                        let bits = |schedule: &Schedule| schedule.factor(step, total).to_bits();
                        assert_eq!(bits(one), bits(other), "{one:?} and {other:?} at {step} of {total}");
                    }
                }
            }
        }
        let ends =
            |schedule: Schedule| schedule.stretches(20).iter().map(|(end, _)| *end).collect::<Vec<_>>();
        assert_eq!(ends(wsd(4, 0.0, 3)), [3, 17, 20], "the first step of the decay has the base rate");
        assert_eq!((ends(CONSTANT(0)), ends(COSINE(2))), (vec![20], vec![2, 20]));
    }

    #[test]
    fn files_have_the_kind_the_warmup_and_the_settings() {
        for (schedule, text) in [
            (CONSTANT(0), "kind = \"constant\"\nwarmup = 0\n"),
            (LINEAR(2), "kind = \"linear\"\nwarmup = 2\n"),
            (COSINE(3), "kind = \"cosine\"\nwarmup = 3\n"),
            (
                Schedule::new(WarmupStableDecay { decay_steps: 7, decay_to: 0.0 }, 3),
                "kind = \"wsd\"\nwarmup = 3\ndecay_steps = 7\n",
            ),
            (
                Schedule::new(WarmupStableDecay { decay_steps: 7, decay_to: 0.1 }, 3),
                "kind = \"wsd\"\nwarmup = 3\ndecay_steps = 7\ndecay_to = 0.1\n",
            ),
        ] {
            assert_eq!(toml::to_string(&schedule).unwrap(), text);
            let read: Schedule = toml::from_str(text).unwrap();
            assert_eq!((&read, read.factor(5, 9)), (&schedule, schedule.factor(5, 9)));
        }
        assert_ne!(LINEAR(2), COSINE(2));
        assert_ne!(LINEAR(2), LINEAR(3));
    }

    #[derive(Debug)]
    struct Halves;

    impl Curve for Halves {
        fn name(&self) -> &str {
            "halves"
        }

        fn factor(&self, step: usize, _: usize) -> f64 {
            0.5f64.powi(step as i32)
        }
    }

    #[test]
    fn a_curve_of_a_task_is_known_again_and_not_run_from_a_file() {
        let own = Schedule::new(Halves, 1);
        assert_eq!([0, 1, 2, 3].map(|step| own.factor(step, 9)), [0.0, 1.0, 0.5, 0.25]);
        let read: Schedule = toml::from_str(&toml::to_string(&own).unwrap()).unwrap();
        assert_eq!(read, own);
        let spec = |schedule| TrainSpec { schedule, ..TrainSpec::new(OptimizerSpec::adamw(0.1), 1) };
        assert!(spec(own).validate().is_ok());
        let refused = spec(read).validate().unwrap_err().to_string();
        assert!(refused.starts_with("`schedule` is halves, expected a built-in schedule"), "{refused}");
    }
}
