//! Finds frozen buffers that several tasks share; the store keeps them once for all of these tasks.
//!
//! Buffers are matched by their origin: names and shapes of parameters, float type, encoding, and the origin that their weight
//! source reports. Equal values are verified when they are read. Tasks that resume have their values in checkpoints,
//! whose hashes show whether they are equal.

use crate::train_task::TrainTask;
use hydra_core::{Chain, Encoding, FloatType, TaskId};
use hydra_spill::ParamBufferId;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

/// A buffer that several tasks share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SharedBuffer {
    /// Its id in the store.
    pub id: ParamBufferId,
    /// The bytes that the store holds for it.
    pub bytes: u64,
}

/// The bytes of shared buffers, each counted once.
pub(crate) fn bytes_once(buffers: impl Iterator<Item = SharedBuffer>) -> u64 {
    buffers.collect::<BTreeSet<_>>().into_iter().map(|buffer| buffer.bytes).sum()
}

/// Everything that a buffer's initial values and its tier depend on.
#[derive(Clone, PartialEq, Eq, Hash)]
struct SharingKey {
    /// Names and shapes of the parameters.
    params: Vec<(String, Vec<usize>)>,
    float: FloatType,
    encoding: Encoding,
    origin: Origin,
    /// True if it is device-resident.
    device_resident: bool,
    /// The frozen values of the task's checkpoint, if checkpoints differ.
    kept: Option<FrozenValues>,
}

/// The frozen values of a checkpoint.
#[derive(Clone, PartialEq, Eq, Hash)]
enum FrozenValues {
    /// Values with this hash.
    Hash(String),
    /// Values of the task with this index, whose checkpoint has no hash.
    Own(usize),
}

impl FrozenValues {
    fn of_checkpoint(index: usize, task: &TrainTask) -> Option<Self> {
        let hash = task.start.state()?.state().frozen.clone();
        Some(hash.map_or(Self::Own(index), Self::Hash))
    }
}

#[derive(Clone, PartialEq, Eq, Hash)]
enum Origin {
    /// The origin that the weight source reports.
    Reported(String),
    /// A buffer of a chain, for a seed.
    Buffer { chain: *const Chain, buffer: usize, seed: u64 },
}

impl SharingKey {
    fn of(task: &TrainTask, buffer: usize, device_resident: bool) -> Self {
        let (chain, seed) = (&task.chain, task.spec.seed);
        let layout = &chain.buffers()[buffer];
        let reported = chain.source().origin(chain, buffer, seed).map(Origin::Reported);
        Self {
            params: layout.params.iter().map(|param| (param.name.clone(), param.shape.clone())).collect(),
            float: layout.float,
            encoding: layout.encoding,
            origin: reported.unwrap_or(Origin::Buffer { chain: Arc::as_ptr(chain), buffer, seed }),
            device_resident,
            kept: None,
        }
    }
}

/// For each buffer of each task, the stored buffer that it shares with other tasks, under the id of the first of
/// them; `None` if it is not shared. The function of each task returns whether a buffer is resident on the device:
/// buffers on a device and on the host are not shared.
pub(super) fn shared_buffers<'a, R: Fn(usize) -> bool>(
    tasks: impl Iterator<Item = (&'a TrainTask, R)>,
) -> Vec<Vec<Option<ParamBufferId>>> {
    let tasks: Vec<(&TrainTask, R)> = tasks.collect();
    let kept: Vec<Option<FrozenValues>> =
        tasks.iter().enumerate().map(|(index, (task, _))| FrozenValues::of_checkpoint(index, task)).collect();
    let made: Vec<Vec<Option<SharingKey>>> =
        tasks.iter().map(|(task, is_resident)| frozen(task, is_resident)).collect();
    let differ = differing(&made, &kept);
    let mut users: HashMap<SharingKey, Vec<ParamBufferId>> = HashMap::new();
    for (index, (made, kept)) in made.iter().zip(&kept).enumerate() {
        for (buffer, made) in
            made.iter().enumerate().filter_map(|(buffer, made)| Some((buffer, made.as_ref()?)))
        {
            let kept = kept.clone().filter(|_| differ.contains(made));
            let own = ParamBufferId::new(TaskId(index), buffer);
            users.entry(SharingKey { kept, ..made.clone() }).or_default().push(own);
        }
    }
    let mut found: Vec<Vec<Option<ParamBufferId>>> = made.iter().map(|made| vec![None; made.len()]).collect();
    for users in users.into_values() {
        let several = users.iter().any(|user| user.task != users[0].task);
        for user in users.iter().filter(|_| several) {
            found[user.task.0][user.buffer] = Some(users[0].shared());
        }
    }
    found
}

/// The origins for which checkpoints have different values.
fn differing(made: &[Vec<Option<SharingKey>>], kept: &[Option<FrozenValues>]) -> HashSet<SharingKey> {
    let mut checkpoints: HashMap<&SharingKey, HashSet<&FrozenValues>> = HashMap::new();
    for (made, kept) in made.iter().zip(kept).filter_map(|(made, kept)| Some((made, kept.as_ref()?))) {
        for made in made.iter().flatten() {
            checkpoints.entry(made).or_default().insert(kept);
        }
    }
    checkpoints.into_iter().filter(|(_, kept)| kept.len() > 1).map(|(made, _)| made.clone()).collect()
}

/// The origin of each frozen buffer of a task; `None` for all buffers of a finished task.
fn frozen(task: &TrainTask, is_resident: impl Fn(usize) -> bool) -> Vec<Option<SharingKey>> {
    let buffers = task.chain.buffers().iter().enumerate();
    let frozen = |trained: bool| !trained && !task.is_finished();
    buffers
        .map(|(buffer, of)| frozen(of.trained).then(|| SharingKey::of(task, buffer, is_resident(buffer))))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use hydra_core::{OptimizerSpec, TrainSpec, WeightError, WeightSource};
    use hydra_models::mlp::{Classifier, Dense, Spirals};

    /// A weight source that reports this origin, if any.
    struct ReportedOrigin(Option<&'static str>);

    impl WeightSource for ReportedOrigin {
        fn fill(&self, _: &Chain, _: usize, _: u64, _: &mut [f32]) -> Result<(), WeightError> {
            Ok(())
        }

        fn origin(&self, _: &Chain, _: usize, _: u64) -> Option<String> {
            self.0.map(str::to_owned)
        }
    }

    fn chain(source: impl WeightSource + 'static, width: usize) -> Arc<Chain> {
        let linear = |inputs, outputs| {
            burn::nn::LinearConfig::new(inputs, outputs).init(&burn::tensor::Device::flex())
        };
        let builder = Chain::builder("c").frozen("a", Dense { linear: linear(2, 2) });
        let builder = builder.frozen("b", Dense { linear: linear(2, width) });
        let chain = builder.layer("c", Classifier { linear: linear(width, 3) }).weights(source);
        Arc::new(chain.build().unwrap())
    }

    fn task(chain: &Arc<Chain>, seed: u64) -> TrainTask {
        let spec = TrainSpec { seed, ..TrainSpec::new(OptimizerSpec::adamw(1e-3), 2) };
        TrainTask::new("task", chain.clone(), Arc::new(Spirals::new(1, 8, 3)), spec)
    }

    /// The first task that shares each buffer of each task.
    fn shown(tasks: &[(TrainTask, bool)]) -> Vec<Vec<Option<usize>>> {
        let found = shared_buffers(tasks.iter().map(|(task, device_resident)| (task, |_| *device_resident)));
        found
            .into_iter()
            .map(|buffers| buffers.into_iter().map(|id| id.map(|id| id.task.0)).collect())
            .collect()
    }

    #[test]
    fn frozen_buffers_of_one_origin_are_shared() {
        let (one, other) = (chain(ReportedOrigin(Some("file")), 4), chain(ReportedOrigin(Some("file")), 4));
        let tasks = [(task(&one, 0), false), (task(&other, 1), false), (task(&one, 2), false)];
        assert_eq!(shown(&tasks), vec![vec![Some(0), Some(0), None]; 3]);
        // The second layer differs, and so does the last, which is trained anyway.
        let wide = chain(ReportedOrigin(Some("file")), 5);
        assert_eq!(
            shown(&[(task(&one, 0), false), (task(&wide, 0), false)]),
            vec![vec![Some(0), None, None]; 2]
        );
    }

    #[test]
    fn what_may_differ_is_not_shared() {
        let none = vec![vec![None; 3]; 2];
        let file = chain(ReportedOrigin(Some("file")), 4);
        let narrow =
            |source| Arc::new(Arc::into_inner(chain(source, 4)).unwrap().with_float_type(FloatType::Bf16));
        let others = [
            chain(ReportedOrigin(Some("another")), 4),
            chain(ReportedOrigin(None), 4),
            narrow(ReportedOrigin(Some("file"))),
        ];
        for other in others {
            assert_eq!(shown(&[(task(&file, 0), false), (task(&other, 0), false)]), none);
        }
        assert_eq!(shown(&[(task(&file, 0), false), (task(&file, 0), true)]), none, "homes");
        assert_eq!(shown(&[(task(&file, 0), true), (task(&file, 0), true)])[1], [Some(0), Some(0), None]);
    }

    #[test]
    fn a_source_that_says_nothing_gives_one_chain_the_same_values_for_one_seed() {
        let silent = chain(ReportedOrigin(None), 4);
        let tasks = [0, 0, 1].map(|seed| (task(&silent, seed), false));
        let found = shown(&tasks);
        assert_eq!((&found[1][0], &found[2]), (&Some(0), &vec![None; 3]));
        let drawn = || {
            let linear = burn::nn::LinearConfig::new(2, 2).init(&burn::tensor::Device::flex());
            let head = burn::nn::LinearConfig::new(2, 3).init(&burn::tensor::Device::flex());
            let chain = Chain::builder("c").frozen("a", Dense { linear });
            Arc::new(chain.layer("b", Classifier { linear: head }).build().unwrap())
        };
        let tasks = [(task(&drawn(), 1), false), (task(&drawn(), 1), false), (task(&drawn(), 2), false)];
        assert_eq!(shown(&tasks), [vec![Some(0), None], vec![Some(0), None], vec![None; 2]]);
    }
}
