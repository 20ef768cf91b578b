//! A driver for tests: weights are a hash of all training settings so far, so that two trials have the same weights
//! exactly if they were trained the same way.

use hydra_search::{
    Action, Configuration, HyperparamSchedule, HyperparamSchedules, Loss, Report, Search, Spec, TrialId,
    TrialState, Value,
};
use std::collections::BTreeMap;

/// The settings of a step of a trial, with warmup-stable-decay: a constant rate up to the last `decay` steps.
fn trained_with(settings: &Configuration, step: usize, steps: usize) -> String {
    let decay = settings.get("decay").and_then(Value::number).unwrap_or(0.0) as usize;
    let rate = settings.get("lr").map(Value::identity).unwrap_or_default();
    match step + decay >= steps && decay > 0 {
        true => format!("{} decays over {decay}", others(settings, rate)),
        false => others(settings, rate),
    }
}

fn others(settings: &Configuration, rate: String) -> String {
    let others = settings.iter().filter(|(name, _)| !["decay", "lr"].contains(name));
    others.fold(rate, |text, (name, value)| format!("{text} {name}={}", value.identity()))
}

/// The schedules of this driver.
pub(crate) struct Stable {
    pub(crate) steps: usize,
}

impl HyperparamSchedules for Stable {
    fn schedule(&self, settings: &Configuration) -> HyperparamSchedule {
        let at = |schedule: HyperparamSchedule, step| {
            schedule.then(step + 1, trained_with(settings, step, self.steps))
        };
        (0..self.steps).fold(HyperparamSchedule::new(), at)
    }
}

/// SplitMix64's finalizer over both words.
pub(crate) fn hash(a: u64, b: u64) -> u64 {
    let mut z = a.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ b.wrapping_add(0xD1B5_4A32_D192_ED03);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

fn hash_text(text: &str) -> u64 {
    text.bytes().fold(1, |state, byte| hash(state, u64::from(byte)))
}

/// Weights after one more step.
fn trained(weights: u64, settings: &Configuration, step: usize, steps: usize) -> u64 {
    hash(weights, hash_text(&trained_with(settings, step, steps)))
}

/// How losses depend on weights.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Nature {
    /// The number of distinct losses, so that there are ties.
    pub(crate) losses: u64,
    /// One of this many losses is not a number; none if zero.
    pub(crate) lost: u64,
    /// One of this many steps fails; none if zero.
    pub(crate) failing: u64,
}

impl Nature {
    pub(crate) const KIND: Self = Self { losses: 1 << 50, lost: 0, failing: 0 };

    fn loss(self, weights: u64) -> f64 {
        let lost = self.lost > 0 && hash(weights, 1).is_multiple_of(self.lost);
        if lost { f64::NAN } else { (hash(weights, 2) % self.losses) as f64 }
    }

    fn fails(self, weights: u64) -> bool {
        self.failing > 0 && hash(weights, 3).is_multiple_of(self.failing)
    }

    /// The reports of a trial that is trained alone, at each of these steps; none after a failure.
    pub(crate) fn alone(self, settings: &Configuration, steps: usize) -> Vec<Option<f64>> {
        let mut weights = Some(0);
        let mut losses = vec![Some(self.loss(0))];
        for step in 0..steps {
            weights =
                weights.map(|weights| trained(weights, settings, step, steps)).filter(|w| !self.fails(*w));
            losses.push(weights.map(|weights| self.loss(weights)));
        }
        losses
    }
}

/// A pending training job.
#[derive(Clone, Debug)]
struct Job {
    trial: TrialId,
    from: Origin,
    until: usize,
}

#[derive(Clone, Copy, Debug)]
enum Origin {
    Nothing,
    Itself,
    Parent(TrialId, usize),
}

/// Trains the trials of a search, in any order.
pub(crate) struct Machine {
    nature: Nature,
    steps: usize,
    /// The kept states: trial and minibatches.
    states: BTreeMap<(TrialId, usize), u64>,
    jobs: Vec<Job>,
    pub(crate) reports: Vec<Report>,
    pub(crate) actions: Vec<Action>,
    /// Minibatches that were trained.
    pub(crate) work: usize,
}

impl Machine {
    pub(crate) fn new(nature: Nature, steps: usize) -> Self {
        let (states, jobs, reports, actions) = Default::default();
        Self { nature, steps, states, jobs, reports, actions, work: 0 }
    }

    /// Runs a search to its end; `choose` picks the next of a number of jobs.
    pub(crate) fn run(&mut self, search: &mut Search, mut choose: impl FnMut(usize) -> usize) {
        while search.outcome().is_none() {
            self.step(search, &mut choose);
        }
        self.fetch(search);
        assert!(self.jobs.is_empty(), "a search that is over has nothing to train: {:?}", self.jobs);
    }

    /// Fetches actions and carries out one job.
    pub(crate) fn step(&mut self, search: &mut Search, choose: &mut impl FnMut(usize) -> usize) {
        self.fetch(search);
        let can = |(index, job): (usize, &Job)| match job.from {
            Origin::Parent(parent, at) => self.states.contains_key(&(parent, at)).then_some(index),
            Origin::Nothing | Origin::Itself => Some(index),
        };
        let can: Vec<usize> = self.jobs.iter().enumerate().filter_map(can).collect();
        assert!(!can.is_empty(), "nothing can be done, and the search is not over: {:?}", self.jobs);
        let job = self.jobs.remove(can[choose(can.len())]);
        self.train(&job, search);
    }

    fn fetch(&mut self, search: &mut Search) {
        for action in search.actions() {
            let job = match &action {
                Action::Start { trial, until, .. } => Some((*trial, Origin::Nothing, *until)),
                Action::Continue { trial, until } => Some((*trial, Origin::Itself, *until)),
                Action::Fork { trial, parent, at, until, .. } => {
                    Some((*trial, Origin::Parent(*parent, *at), *until))
                }
                Action::Stop { trial } => {
                    // It waits, for another action or for a parent that has failed.
                    let waits = |job: &Job| matches!(job.from, Origin::Parent(..));
                    assert!(self.jobs.iter().all(|job| job.trial != *trial || waits(job)), "{trial} trains");
                    self.jobs.retain(|job| job.trial != *trial);
                    None
                }
            };
            self.jobs.extend(job.map(|(trial, from, until)| Job { trial, from, until }));
            self.actions.push(action);
        }
    }

    /// Trains to the end of a job, keeps the states that the search may fork from, drops all others, and reports.
    fn train(&mut self, job: &Job, search: &mut Search) {
        let settings = search.trial(job.trial).expect("a trial that an action named").settings.clone();
        let wanted: Vec<usize> =
            self.wanted(search).into_iter().filter(|(of, _)| *of == job.trial).map(|(_, at)| at).collect();
        let (mut step, mut weights) = self.origin(job);
        let mut failed = false;
        while step < job.until && !failed {
            weights = trained(weights, &settings, step, self.steps);
            failed = self.nature.fails(weights);
            if !failed {
                step += 1;
                self.work += 1;
                if wanted.contains(&step) || step == job.until {
                    self.states.insert((job.trial, step), weights);
                }
            }
        }
        let report = match failed {
            true => Report::Failed { trial: job.trial, step },
            false if search.compares(job.trial, step) => {
                Report::loss(job.trial, step, self.nature.loss(weights))
            }
            false => Report::Reached { trial: job.trial, step },
        };
        search.take(&report).expect("a report that was asked for");
        self.reports.push(report);
        self.drop_states(search);
    }

    fn origin(&self, job: &Job) -> (usize, u64) {
        match job.from {
            Origin::Nothing => (0, 0),
            Origin::Itself => self.latest(job.trial).expect("the state of a trial that waits"),
            Origin::Parent(parent, at) => (at, self.states[&(parent, at)]),
        }
    }

    fn latest(&self, trial: TrialId) -> Option<(usize, u64)> {
        let of = self.states.range((trial, 0)..=(trial, usize::MAX)).next_back();
        of.map(|((_, step), weights)| (*step, *weights))
    }

    /// The states that will be forked from: those of the search, and those of waiting jobs.
    fn wanted(&self, search: &Search) -> Vec<(TrialId, usize)> {
        let waiting = self.jobs.iter().filter_map(|job| match job.from {
            Origin::Parent(parent, at) => Some((parent, at)),
            Origin::Nothing | Origin::Itself => None,
        });
        search.held().into_iter().chain(waiting).collect()
    }

    /// Drops all states except wanted ones and the current one of each trial.
    fn drop_states(&mut self, search: &mut Search) {
        // Actions of this report start from the current states.
        let held = self.wanted(search);
        self.fetch(search);
        let waiting = self.wanted(search);
        let latest: BTreeMap<TrialId, usize> = self.states.keys().copied().collect();
        self.states.retain(|state, _| {
            latest[&state.0] == state.1 || held.contains(state) || waiting.contains(state)
        });
    }

    /// Resumes a replayed search from the kept states.
    pub(crate) fn resume(&mut self, search: &Search) {
        self.jobs.clear();
        for trial in search.trials() {
            if let TrialState::Training { until } = trial.standing {
                let from = match (self.latest(trial.trial), trial.branch) {
                    (Some(_), _) => Origin::Itself,
                    (None, Some(branch)) => Origin::Parent(branch.parent, branch.at),
                    (None, None) => Origin::Nothing,
                };
                self.jobs.push(Job { trial: trial.trial, from, until });
            }
        }
    }
}

/// The results of a search.
#[derive(Debug, PartialEq)]
pub(crate) struct Result {
    pub(crate) best: Option<TrialId>,
    pub(crate) leaderboard: Vec<TrialId>,
    pub(crate) trials: Vec<(Configuration, BTreeMap<usize, Loss>, TrialState)>,
    pub(crate) trained: usize,
}

impl Result {
    pub(crate) fn of(search: &Search) -> Self {
        Self {
            best: search.outcome().expect("a search that is over").best,
            leaderboard: search.leaderboard(),
            trials: search
                .trials()
                .map(|trial| (trial.settings.clone(), trial.losses.clone(), trial.standing))
                .collect(),
            trained: search.work().trained,
        }
    }
}

pub(crate) fn search(spec: &Spec, seed: u64) -> Search {
    let schedules = Box::new(Stable { steps: spec.steps });
    Search::new(spec, seed, schedules).expect("a spec that can be searched")
}

/// A search on one device, first come first served.
pub(crate) fn run(spec: &Spec, seed: u64, nature: Nature) -> (Search, Machine) {
    let mut search = search(spec, seed);
    let mut machine = Machine::new(nature, spec.steps);
    machine.run(&mut search, |_| 0);
    (search, machine)
}
