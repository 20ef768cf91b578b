//! The claimable models in a policy's order, kept between decisions.

use std::collections::{BTreeMap, BTreeSet};

use crate::policy::{Claimable, ModelIndex, ModelView, Policy, Priority, Request};

/// The index for no model at a node of the tree.
const NONE: u32 = u32::MAX;

/// Claimable models in a policy's order, for up to millions of models.
///
/// It is a tournament tree: the models are the leaves of a binary tree in submission order, and every node
/// stores the first leaf below it in the policy's order, and their number. A model that enters or leaves
/// updates the nodes on its path to the root, so each operation takes logarithmic time in the number of
/// models.
#[derive(Clone, Debug)]
pub struct Queue {
    /// The number of leaves; a power of two.
    leaves: usize,
    /// Per node, with the root at 1: the winner's index.
    winner: Vec<u32>,
    /// Per node: the number of models below it.
    count: Vec<u32>,
    models: Vec<Option<(Priority, ModelView)>>,
    /// Per device, and for none: the positions of the models that last committed to it.
    ran_on: BTreeMap<Option<usize>, BTreeSet<Priority>>,
}

impl Queue {
    /// Returns an empty queue for models with indices `0..models`, in submission order.
    pub fn new(models: usize) -> Self {
        let leaves = models.next_power_of_two().max(1);
        Self {
            leaves,
            winner: vec![NONE; 2 * leaves],
            count: vec![0; 2 * leaves],
            models: vec![None; models],
            ran_on: BTreeMap::new(),
        }
    }

    /// The number of claimable models.
    pub fn len(&self) -> usize {
        self.count[1] as usize
    }

    /// Returns whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Inserts a model, or updates its position.
    ///
    /// # Panics
    /// If the index is beyond the queue's number of models.
    pub fn insert(&mut self, policy: &dyn Policy, view: ModelView) {
        let (model, place) = (view.model.0, policy.priority(&view));
        let before = self.models[model].replace((place, view));
        self.forget(before);
        self.ran_on.entry(view.ran_on).or_default().insert(place);
        self.replay(model);
    }

    /// Removes a model, if it is in the queue.
    pub fn remove(&mut self, model: ModelIndex) -> Option<ModelView> {
        let there = self.models.get_mut(model.0)?.take()?;
        self.forget(Some(there));
        self.replay(model.0);
        Some(there.1)
    }

    /// Removes a model's position from the device that it last ran on.
    fn forget(&mut self, there: Option<(Priority, ModelView)>) {
        let on = there.and_then(|(place, view)| Some((place, self.ran_on.get_mut(&view.ran_on)?)));
        on.map(|(place, places)| places.remove(&place));
    }

    /// Returns the model as it was inserted, if it is in the queue.
    pub fn get(&self, model: ModelIndex) -> Option<&ModelView> {
        self.at(model.0).map(|(_, view)| view)
    }

    /// The models as they were inserted, in submission order.
    pub fn iter(&self) -> impl Iterator<Item = &ModelView> {
        self.models.iter().flatten().map(|(_, view)| view)
    }

    /// The first model in the policy's order.
    pub fn first(&self) -> Option<ModelView> {
        self.view(1)
    }

    /// Returns the policy's choice of a model; `cached` are the models whose next shard is cached on the requesting
    /// device. Those that are in the queue are first sorted by the policy's order.
    pub fn choose(
        &self,
        policy: &mut dyn Policy,
        request: &Request,
        cached: &[ModelIndex],
    ) -> Option<ModelIndex> {
        let cached = cached.iter().filter_map(|model| self.place(*model).copied()).collect();
        self.choose_near(policy, request, &cached)
    }

    /// The same with the cached models in the policy's order.
    pub(crate) fn choose_near(
        &self,
        policy: &mut dyn Policy,
        request: &Request,
        cached: &BTreeSet<Priority>,
    ) -> Option<ModelIndex> {
        policy.pick(request, &Queued { queue: self, device: request.device, cached })
    }

    /// The model's position in the policy's order, if it is in the queue.
    pub(crate) fn place(&self, model: ModelIndex) -> Option<&Priority> {
        self.at(model.0).map(|(priority, _)| priority)
    }

    fn replay(&mut self, model: usize) {
        let mut node = self.leaves + model;
        let queued = self.models[model].is_some();
        self.winner[node] = if queued { model as u32 } else { NONE };
        self.count[node] = u32::from(queued);
        while node > 1 {
            node /= 2;
            self.winner[node] = self.game(self.winner[2 * node], self.winner[2 * node + 1]);
            self.count[node] = self.count[2 * node] + self.count[2 * node + 1];
        }
    }

    fn game(&self, a: u32, b: u32) -> u32 {
        match [a, b].map(|model| self.at(model as usize).map(|(priority, _)| priority)) {
            [Some(first), Some(second)] if second < first => b,
            [Some(_), _] => a,
            [None, _] => b,
        }
    }

    /// Returns the model with this index, if it is in the queue; [`NONE`] is not the index of a model.
    fn at(&self, model: usize) -> Option<&(Priority, ModelView)> {
        self.models.get(model)?.as_ref()
    }

    /// Returns the winner at a node of the tree.
    fn view(&self, node: usize) -> Option<ModelView> {
        self.at(self.winner[node] as usize).map(|(_, view)| *view)
    }

    /// The number of models below this index.
    fn rank(&self, model: usize) -> usize {
        let mut node = self.leaves + model.min(self.leaves - 1);
        let mut below = if model >= self.leaves { self.count[node] as usize } else { 0 };
        while node > 1 {
            if node % 2 == 1 {
                below += self.count[node - 1] as usize;
            }
            node /= 2;
        }
        below
    }
}

/// The queue as one device sees it.
struct Queued<'a> {
    queue: &'a Queue,
    device: usize,
    cached: &'a BTreeSet<Priority>,
}

impl Queued<'_> {
    /// Returns the model as the requesting device sees it.
    fn seen(&self, view: ModelView) -> ModelView {
        let cached = self.queue.place(view.model).is_some_and(|place| self.cached.contains(place));
        ModelView { cached, ..view }
    }
}

impl Claimable for Queued<'_> {
    fn count(&self) -> usize {
        self.queue.len()
    }

    fn first(&self) -> Option<ModelView> {
        self.queue.first().map(|view| self.seen(view))
    }

    fn first_cached(&self) -> Option<ModelView> {
        let first = self.queue.get(self.cached.first()?.model)?;
        Some(ModelView { cached: true, ..*first })
    }

    fn first_here(&self) -> Option<ModelView> {
        let of = |ran_on: Option<usize>| self.queue.ran_on.get(&ran_on)?.first();
        let place = of(None).into_iter().chain(of(Some(self.device))).min()?;
        self.queue.get(place.model).map(|view| self.seen(*view))
    }

    fn nth_submitted(&self, rank: usize) -> Option<ModelView> {
        let queue = self.queue;
        if rank >= queue.len() {
            return None;
        }
        let (mut node, mut rank) = (1, rank as u32);
        while node < queue.leaves {
            node *= 2;
            if rank >= queue.count[node] {
                rank -= queue.count[node];
                node += 1;
            }
        }
        queue.view(node).map(|view| self.seen(view))
    }

    fn submitted_after(&self, (_, model): (u64, ModelIndex)) -> Option<ModelView> {
        self.nth_submitted(self.queue.rank(model.0.saturating_add(1)))
    }

    fn iter(&self) -> Box<dyn Iterator<Item = ModelView> + '_> {
        Box::new(self.queue.iter().map(|view| self.seen(*view)))
    }

    fn get(&self, model: ModelIndex) -> Option<ModelView> {
        self.queue.get(model).map(|view| self.seen(*view))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::cases::models;
    use crate::policy::claimable::Listed;
    use crate::policy::{PolicyKind, ShardedLrtfEager};

    /// A list and a queue return the same models with the same properties.
    #[test]
    fn both_show_the_models_in_submission_order() {
        let mut shown = models(&[(3.0, 0), (7.0, 1), (5.0, 2)]);
        (shown[1].cached, shown[2].cached) = (true, true);
        (shown[0].ran_on, shown[1].ran_on, shown[2].ran_on) = (Some(1), Some(0), Some(1));
        let mut queue = Queue::new(5);
        shown.iter().for_each(|model| queue.insert(&ShardedLrtfEager, ModelView { cached: false, ..*model }));
        let cached = [ModelIndex(1), ModelIndex(2), ModelIndex(4)];
        let places = cached.iter().filter_map(|model| queue.place(*model).copied()).collect();
        let queued = Queued { queue: &queue, device: 1, cached: &places };
        let turned: Vec<ModelView> = shown.iter().rev().copied().collect();
        let listed = Listed::new(&turned, 1, Priority::longest);
        for claimable in [&queued as &dyn Claimable, &listed] {
            assert_eq!(claimable.iter().collect::<Vec<_>>(), shown);
            assert_eq!(claimable.get(ModelIndex(1)), Some(shown[1]));
            assert_eq!(claimable.get(ModelIndex(3)), None);
            assert_eq!(claimable.get(ModelIndex(usize::MAX)), None);
            assert_eq!((claimable.first(), claimable.nth_submitted(2)), (Some(shown[1]), Some(shown[2])));
            assert_eq!((claimable.first_cached(), claimable.first_here()), (Some(shown[1]), Some(shown[2])));
            assert_eq!(claimable.submitted_after((0, ModelIndex(0))), Some(shown[1]));
            assert_eq!(claimable.submitted_after((u64::MAX, ModelIndex(usize::MAX))), None);
        }
        /// Implements only the required methods.
        struct Least<'a>(&'a dyn Claimable);
        impl Claimable for Least<'_> {
            fn count(&self) -> usize {
                self.0.count()
            }
            fn first(&self) -> Option<ModelView> {
                self.0.first()
            }
            fn first_cached(&self) -> Option<ModelView> {
                self.0.first_cached()
            }
            fn first_here(&self) -> Option<ModelView> {
                self.0.first_here()
            }
            fn nth_submitted(&self, rank: usize) -> Option<ModelView> {
                self.0.nth_submitted(rank)
            }
            fn submitted_after(&self, after: (u64, ModelIndex)) -> Option<ModelView> {
                self.0.submitted_after(after)
            }
        }
        let least = Least(&queued);
        assert_eq!(least.iter().collect::<Vec<_>>(), shown);
        assert_eq!((least.get(ModelIndex(2)), least.get(ModelIndex(4))), (Some(shown[2]), None));
    }

    /// A model is listed for the device that it was last inserted with, for all if it had none, and nowhere
    /// after its removal.
    #[test]
    fn models_go_from_device_to_device() {
        let mut queue = Queue::new(2);
        let here = |queue: &Queue, device: usize| {
            let queued = Queued { queue, device, cached: &BTreeSet::new() };
            queued.first_here().map(|view| view.model.0)
        };
        for (model, device) in [(0, 0), (1, 0), (0, 1)] {
            let view = ModelView { ran_on: Some(device), ..models(&[(9.0, 0), (7.0, 1)])[model] };
            queue.insert(&ShardedLrtfEager, view);
        }
        assert_eq!((here(&queue, 0), here(&queue, 1), here(&queue, 2)), (Some(1), Some(0), None));
        queue.remove(ModelIndex(1));
        queue.insert(&ShardedLrtfEager, models(&[(9.0, 0)])[0]);
        assert_eq!([0, 1, 2].map(|device| here(&queue, device)), [Some(0); 3]);
        queue.remove(ModelIndex(0));
        assert_eq!((here(&queue, 0), here(&queue, 1)), (None, None));
    }

    #[test]
    fn an_empty_queue_gives_no_model() {
        for models in [0, 1, 5] {
            let queue = Queue::new(models);
            let request = Request::new(0, 1, 0);
            for kind in PolicyKind::ALL {
                assert_eq!(queue.choose(&mut *kind.build(0), &request, &[]), None);
            }
        }
    }
}
