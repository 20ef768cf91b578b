//! Equal layers and shards, which are measured once.

use crate::pilot::Pilot;
use burn::tensor::DType;
use hydra_core::{CostKey, FloatType, HostActivation, ParamRef};
use std::ops::Range;

/// Everything that the cost of a range of layers depends on, on one device and in one chain.
#[derive(Debug, PartialEq)]
pub(crate) struct Kind {
    layers: Vec<LayerKind>,
    /// The types and shapes of the input's tensors.
    input: Vec<(DType, Vec<usize>)>,
    /// Whether a backward computes the gradient of the input.
    has_input_gradient: bool,
    /// Whether there is a backward.
    has_backward: bool,
    /// Whether the last layer returns the loss.
    is_last: bool,
    /// Whether a layer reads the targets.
    has_targets: bool,
}

#[derive(Debug, PartialEq)]
struct LayerKind {
    key: CostKey,
    params: Vec<ParamKind>,
}

#[derive(Debug, PartialEq)]
struct ParamKind {
    /// The field path within the layer.
    name: String,
    shape: Vec<usize>,
    /// The buffer that holds it, numbered by first use in the range, which captures ties within the range.
    buffer: usize,
    trained: bool,
    /// The element type in copies.
    float: FloatType,
}

impl Pilot<'_> {
    /// Returns the kind of these layers, or `None` if one of them has no cost key.
    pub fn kind(&self, range: Range<usize>, x: &HostActivation) -> Option<Kind> {
        let mut buffers = Vec::new();
        let layers = range.clone().map(|layer| self.layer_kind(layer, &mut buffers));
        Some(Kind {
            layers: layers.collect::<Option<_>>()?,
            input: forms(x),
            has_input_gradient: self.has_input_gradient(range.start),
            has_backward: self.has_backward(range.end),
            is_last: range.end == self.chain.len(),
            has_targets: range.end > self.chain.targets_from(),
        })
    }

    fn layer_kind(&self, layer: usize, buffers: &mut Vec<usize>) -> Option<LayerKind> {
        let layer = &self.chain.layers()[layer];
        let key = layer.cost_key.clone()?;
        let param = |(at, name): (&ParamRef, String)| {
            let buffer = buffers.iter().position(|buffer| *buffer == at.buffer).unwrap_or_else(|| {
                buffers.push(at.buffer);
                buffers.len() - 1
            });
            let layout = &self.chain.buffers()[at.buffer];
            ParamKind {
                name,
                shape: layout.params[at.slot].shape.clone(),
                buffer,
                trained: layout.trained,
                float: layout.float,
            }
        };
        let names = layer.layer().params().into_iter().map(|param| param.name);
        let params = layer.params.iter().zip(names).map(param).collect();
        Some(LayerKind { key, params })
    }
}

fn forms(x: &HostActivation) -> Vec<(DType, Vec<usize>)> {
    x.parts.iter().map(|part| (part.dtype, part.shape.clone())).collect()
}

/// Measurements by kind of range, for skipping later ranges of the same kind.
///
/// A skipped range has no output. Therefore only kinds with outputs of the same form as their inputs are
/// recorded, and the next range runs on the input of the skipped one. The repeated blocks of a model satisfy
/// this.
#[derive(Debug)]
pub(crate) struct Measurements<T>(Vec<(Kind, T)>);

impl<T> Measurements<T> {
    /// Returns an empty collection.
    pub fn new() -> Self {
        Self(Vec::new())
    }

    /// Returns the measurements of a range of this kind.
    pub fn get(&self, kind: Option<&Kind>) -> Option<&T> {
        let kind = kind?;
        self.0.iter().find(|(known, _)| known == kind).map(|(_, needs)| needs)
    }

    /// Records the measurements of a range of this kind, if its output has the form of its input.
    pub fn add(&mut self, kind: Option<Kind>, output: &HostActivation, needs: T) {
        if let Some(kind) = kind.filter(|kind| kind.input == forms(output)) {
            self.0.push((kind, needs));
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::toy::{self, Inline, LogProbe};
    use crate::{
        Fingerprint, InitialValues, PartitionPlan, PilotDevice, PilotPartitioner, PilotProgress, PilotValues,
        Profile, Rules, choose_reserve,
    };
    use bytes::Bytes;
    use hydra_core::{Chain, WeightError};
    use std::cell::RefCell;

    const SCRIPTED: Inline<LogProbe> = Inline(LogProbe);

    /// Initial values, recording the buffers that were read: those of layers that ran.
    struct Reads<'a> {
        values: InitialValues<'a>,
        buffers: RefCell<Vec<usize>>,
    }

    impl<'a> Reads<'a> {
        fn of(chain: &'a Chain) -> Self {
            Self { values: InitialValues::new(chain, 0), buffers: RefCell::default() }
        }
    }

    impl PilotValues for Reads<'_> {
        fn promoted(&self, buffer: usize) -> Result<Bytes, WeightError> {
            self.buffers.borrow_mut().push(buffer);
            self.values.promoted(buffer)
        }
    }

    /// The costs of a chain without seconds, and the layers that ran.
    fn measure(chain: &Chain, device: &dyn PilotDevice) -> (Profile, Vec<usize>) {
        toy::set_standing_bytes(0);
        let buffers = Reads::of(chain);
        let mut profile = PilotPartitioner::new(&buffers).measure(chain, &toy::batch(2), device).unwrap();
        profile.layers.iter_mut().for_each(|layer| (layer.forward_s, layer.backward_s) = (0.0, 0.0));
        (profile, buffers.buffers.into_inner())
    }

    fn verify(profile: &Profile, chain: &Chain, budget: u64) -> (PartitionPlan, Vec<usize>) {
        let buffers = Reads::of(chain);
        let partitioner = PilotPartitioner::new(&buffers);
        let reserve = choose_reserve(&[profile.into()], budget).unwrap();
        let rules = Rules::new(budget, reserve, profile.measured);
        let fingerprint = Fingerprint::new(chain, &toy::batch(2), "");
        let mut plan = partitioner.plan(profile, fingerprint, rules, None).unwrap();
        partitioner.verify(&mut plan, chain, &toy::batch(2), &SCRIPTED).unwrap();
        plan.shards.iter_mut().for_each(|shard| (shard.forward_s, shard.backward_s) = (0.0, 0.0));
        (plan, buffers.buffers.into_inner())
    }

    #[test]
    fn layers_that_say_the_same_are_measured_once() {
        let (each, noted) = (toy::keyed_chain(&[None; 7]), toy::keyed_chain(&[Some(""); 7]));
        let devices: [&dyn PilotDevice; 2] = [&SCRIPTED, &toy::BLIND];
        for device in devices {
            let ((expected, all), (profile, first)) = (measure(&each, device), measure(&noted, device));
            assert_eq!(profile, expected);
            // A backward ends in the first layer, which therefore has no gradient of its input.
            assert_eq!((all, first), ((0..7).collect(), vec![0, 1]));
        }
    }

    #[test]
    fn layers_that_differ_in_anything_are_measured_each() {
        let (none, some, other) = (None, Some(""), Some("other"));
        let (frozen, part, bent) = (Some("!"), Some("%"), Some("~"));
        let cases = [
            (vec![none; 4], vec![0, 1, 2, 3]),
            (vec![some, some, none, none, some], vec![0, 1, 2, 3]),
            (vec![some, some, other, some, other], vec![0, 1, 2]),
            (vec![some, some, frozen, some, frozen], vec![0, 1, 2]),
            (vec![some, some, bent, some, bent], vec![0, 1, 2]),
            // The frozen parameters of the third are in a separate buffer.
            (vec![some, some, part, some, part], vec![0, 1, 2, 3]),
            // Nothing below the third is trained: no backward reaches the first two, which are equal.
            (vec![frozen, frozen, some, some, some], vec![0, 2, 3]),
        ];
        for (notes, expected) in cases {
            assert_eq!(measure(&toy::keyed_chain(&notes), &SCRIPTED).1, expected, "{notes:?}");
        }
    }

    #[test]
    fn shards_of_equal_layers_are_verified_once_and_the_plan_is_the_same() {
        let (each, noted) = (toy::keyed_chain(&[None; 11]), toy::keyed_chain(&[Some(""); 11]));
        let profile = measure(&each, &SCRIPTED).0;
        let two = budget_for(&profile, 2);
        for (crowd, most) in [(0, 6), (200, 12), (1 << 20, 12)] {
            toy::crowd(crowd);
            let ((expected, all), (plan, first)) =
                (verify(&profile, &each, two), verify(&profile, &noted, two));
            assert_eq!((&plan.shards, &plan.cut_points), (&expected.shards, &expected.cut_points), "{crowd}");
            assert!(first.len() <= most && first.len() < all.len(), "{crowd}: {first:?} of {all:?}");
        }
    }

    /// The smallest budget with at least `layers` layers in a shard.
    fn budget_for(profile: &Profile, layers: usize) -> u64 {
        let long = |budget: &u64| {
            let Ok(reserve) = choose_reserve(&[profile.into()], *budget) else { return false };
            let cut = crate::cut(profile, &Rules::new(*budget, reserve, profile.measured));
            cut.is_ok_and(|shards| shards[0].len() >= layers)
        };
        let least = crate::min_device_memory_bytes(profile);
        (least..=crate::single_shard_bytes(profile)).find(long).unwrap()
    }

    #[test]
    fn an_buffer_of_several_layers_is_drawn_once() {
        let chain = toy::tied_chain();
        let values = InitialValues::new(&chain, 0);
        let tied =
            (0..chain.buffers().len()).find(|buffer| chain.buffers()[*buffer].layers.len() > 1).unwrap();
        let drawn = [0; 2].map(|_| values.promoted(tied).unwrap());
        assert_eq!(drawn[0].as_ptr(), drawn[1].as_ptr());
    }

    #[test]
    fn progress_goes_up_to_all_layers() {
        let chain = toy::keyed_chain(&[Some(""); 5]);
        let reported = RefCell::new(Vec::new());
        let report = |progress| reported.borrow_mut().push(progress);
        let buffers = InitialValues::new(&chain, 0);
        PilotPartitioner::new(&buffers)
            .with_progress(&report)
            .measure(&chain, &toy::batch(2), &SCRIPTED)
            .unwrap();
        let all: Vec<PilotProgress> =
            (1..=6).map(|done| PilotProgress::Measured { done, layers: 6 }).collect();
        assert_eq!(reported.into_inner(), all);
    }
}
