//! The models that can be claimed, kept in a policy's order from decision to decision.

use std::collections::{BTreeMap, BTreeSet};

use crate::policy::{Claimable, ModelIndex, ModelView, Policy, Priority, Request};

/// No model at a node of the tree.
const NONE: u32 = u32::MAX;

/// Claimable models kept in a policy's order, for up to millions of models.
///
/// A tournament: the models are the leaves of a binary tree in submission order, and every node knows the first in
/// the policy's order among the leaves below it, and how many there are. A model that comes or goes replays the games
/// on its way to the root, so each change and each question takes a time logarithmic in the number of models.
#[derive(Clone, Debug)]
pub struct Queue {
    /// Leaves; a power of two.
    leaves: usize,
    /// Per node, the root at 1: the winner's index.
    winner: Vec<u32>,
    /// Per node: the models below it.
    count: Vec<u32>,
    models: Vec<Option<(Priority, ModelView)>>,
    /// Per device: the places of the models that it committed to last, and of those that none of them did.
    ran_on: BTreeMap<Option<usize>, BTreeSet<Priority>>,
}

impl Queue {
    /// An empty queue for models of the indices `0..models`, numbered in submission order.
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

    /// The number of models that can be claimed.
    pub fn len(&self) -> usize {
        self.count[1] as usize
    }

    /// True if none can.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Puts a model in, or in its new place.
    ///
    /// # Panics
    /// When the queue was made for fewer models, as indexing does.
    pub fn insert(&mut self, policy: &dyn Policy, view: ModelView) {
        let (model, place) = (view.model.0, policy.priority(&view));
        let before = self.models[model].replace((place, view));
        self.forget(before);
        self.ran_on.entry(view.ran_on).or_default().insert(place);
        self.replay(model);
    }

    /// Takes a model out, if it is there.
    pub fn remove(&mut self, model: ModelIndex) -> Option<ModelView> {
        let there = self.models.get_mut(model.0)?.take()?;
        self.forget(Some(there));
        self.replay(model.0);
        Some(there.1)
    }

    /// Takes a model's place from the device that committed to it last.
    fn forget(&mut self, there: Option<(Priority, ModelView)>) {
        let on = there.and_then(|(place, view)| Some((place, self.ran_on.get_mut(&view.ran_on)?)));
        on.map(|(place, places)| places.remove(&place));
    }

    /// The model as it was put in, if it is there.
    pub fn get(&self, model: ModelIndex) -> Option<&ModelView> {
        self.at(model.0).map(|(_, view)| view)
    }

    /// The models as they were put in, in submission order.
    pub fn iter(&self) -> impl Iterator<Item = &ModelView> {
        self.models.iter().flatten().map(|(_, view)| view)
    }

    /// The first in the policy's order.
    pub fn first(&self) -> Option<ModelView> {
        self.view(1)
    }

    /// Asks the policy for one of the models; `cached` are those, if they are in the queue, whose
    /// next shard is on the asking device. They are put into the policy's order first.
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

    /// The model's place in the policy's order, if it is there.
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

    /// The model of this index, if it is there; [`NONE`] is the index of no model.
    fn at(&self, model: usize) -> Option<&(Priority, ModelView)> {
        self.models.get(model)?.as_ref()
    }

    /// The winner at a node of the tree.
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
    /// The model as the asking device sees it.
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

    /// A list and a queue show the same models, and the same of each.
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
        /// Only what has to be there: the rest is made of it.
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

    /// A model stands with the device that it was last put in with, with all if it was with none, and nowhere when it has gone.
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
