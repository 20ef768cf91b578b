//! Frozen images that several tasks have in common, which the store keeps once for all of them.
//!
//! They are found by what they are made from: names and shapes of parameters, the type that moves, and what their source
//! says of where its values are from. That they have the same values is seen when they are read.

use crate::train_task::TrainTask;
use hydra_core::{Chain, FloatType, TaskId};
use hydra_spill::ImageId;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// An image that several tasks have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SharedImage {
    /// Its name in the store.
    pub id: ImageId,
    /// The bytes that the store holds of it.
    pub bytes: u64,
}

/// All that an image's first values and its home depend on.
#[derive(PartialEq, Eq, Hash)]
struct Made {
    /// Names and shapes of the parameters.
    params: Vec<(String, Vec<usize>)>,
    float: FloatType,
    origin: Origin,
    /// True if its home is a device.
    device_homed: bool,
}

#[derive(PartialEq, Eq, Hash)]
enum Origin {
    /// The words of the source.
    Said(String),
    /// One of the images of a chain, for a seed.
    Of { chain: *const Chain, image: usize, seed: u64 },
}

impl Made {
    fn of(task: &TrainTask, image: usize, device_homed: bool) -> Self {
        let (chain, seed) = (&task.chain, task.spec.seed);
        let layout = &chain.images()[image];
        let said = chain.source().origin(chain, image, seed).map(Origin::Said);
        Self {
            params: layout.params.iter().map(|param| (param.name.clone(), param.shape.clone())).collect(),
            float: layout.float,
            origin: said.unwrap_or(Origin::Of { chain: Arc::as_ptr(chain), image, seed }),
            device_homed,
        }
    }
}

/// For each image of each task the one that it has in common with others, in the name of the first of them, if there are
/// any. With each task comes whether it is device-homed: what lives on a device is not what lives on the host.
pub(super) fn shared_images<'a>(
    tasks: impl Iterator<Item = (&'a TrainTask, bool)>,
) -> Vec<Vec<Option<ImageId>>> {
    let mut firsts: HashMap<Made, ImageId> = HashMap::new();
    let mut users: HashMap<ImageId, BTreeSet<usize>> = HashMap::new();
    let mut of = |(index, (task, device_homed)): (usize, (&TrainTask, bool))| {
        let mut image = |(image, trained): (usize, bool)| {
            if trained || task.is_finished() {
                return None;
            }
            let own = ImageId::new(TaskId(index), image).shared();
            let first = *firsts.entry(Made::of(task, image, device_homed)).or_insert(own);
            users.entry(first).or_default().insert(index);
            Some(first)
        };
        let images = task.chain.images().iter().map(|layout| layout.trained).enumerate();
        images.map(&mut image).collect::<Vec<_>>()
    };
    let mut found: Vec<Vec<Option<ImageId>>> = tasks.enumerate().map(&mut of).collect();
    found.iter_mut().flatten().for_each(|image| *image = image.filter(|image| users[image].len() > 1));
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use hydra_core::{OptimizerSpec, TrainSpec, WeightError, WeightSource};
    use hydra_models::mlp::{Classifier, Dense, Spirals};

    /// Says where values are from, or nothing.
    struct Said(Option<&'static str>);

    impl WeightSource for Said {
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

    /// The tasks that have the images of each task, by the first of them.
    fn shown(tasks: &[(TrainTask, bool)]) -> Vec<Vec<Option<usize>>> {
        let found = shared_images(tasks.iter().map(|(task, homed)| (task, *homed)));
        found
            .into_iter()
            .map(|images| images.into_iter().map(|id| id.map(|id| id.task.0)).collect())
            .collect()
    }

    #[test]
    fn frozen_images_of_one_origin_are_shared() {
        let (one, other) = (chain(Said(Some("file")), 4), chain(Said(Some("file")), 4));
        let tasks = [(task(&one, 0), false), (task(&other, 1), false), (task(&one, 2), false)];
        assert_eq!(shown(&tasks), vec![vec![Some(0), Some(0), None]; 3]);
        // The second layer is another, and so is the last, which is trained anyway.
        let wide = chain(Said(Some("file")), 5);
        assert_eq!(
            shown(&[(task(&one, 0), false), (task(&wide, 0), false)]),
            vec![vec![Some(0), None, None]; 2]
        );
    }

    #[test]
    fn what_may_differ_is_not_shared() {
        let none = vec![vec![None; 3]; 2];
        let file = chain(Said(Some("file")), 4);
        let narrow =
            |source| Arc::new(Arc::into_inner(chain(source, 4)).unwrap().with_float_type(FloatType::Bf16));
        let others = [chain(Said(Some("another")), 4), chain(Said(None), 4), narrow(Said(Some("file")))];
        for other in others {
            assert_eq!(shown(&[(task(&file, 0), false), (task(&other, 0), false)]), none);
        }
        assert_eq!(shown(&[(task(&file, 0), false), (task(&file, 0), true)]), none, "homes");
        assert_eq!(shown(&[(task(&file, 0), true), (task(&file, 0), true)])[1], [Some(0), Some(0), None]);
    }

    #[test]
    fn a_source_that_says_nothing_gives_one_chain_the_same_values_for_one_seed() {
        let silent = chain(Said(None), 4);
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
