//! Records the costs of a run's shard tasks as a workload, which the simulator can replay under any policy.

use super::costs::{device_cost, host_bytes, split_off_cache, working_bytes};
use crate::admission::{AdmittedTask, ShardBuffers};
use crate::device::{LogicalDevice, processors};
use crate::error::guarded;
use crate::observer::{Observer, RunEvent, Span, Track, Work};
use crate::protocol::Time;
use crate::task::ParameterBytes;
use hydra_core::{DeviceId, TaskId};
use hydra_sched::{
    DeviceCost, Epoch, EvaluationCost, PolicyKind, ShardCost, ShardTaskKind, ShardTimes, SimulationOptions,
    TaskCost, WorkingBytes, Workload, replay,
};

/// Forwards events to another observer and records their costs.
pub(crate) struct Recorder {
    /// `None` after it has panicked; the run goes on without it.
    observer: Option<Box<dyn Observer>>,
    prefetch: bool,
    devices: Vec<RecordedDevice>,
    host_bytes: Option<u64>,
    tasks: Vec<RecordedTask>,
    /// The time of each of the first [`MOST_TIMED`] shard tasks.
    times: ShardTimes,
    timed: usize,
}

/// Shard tasks whose times are kept, about ten MiB at most; later ones are replayed with mean times.
const MOST_TIMED: usize = 1 << 17;

struct RecordedDevice {
    cost: DeviceCost,
    /// Promotions whose shard tasks have not ended: task, shard, start, and the end of the last download before.
    promoted: Vec<(TaskId, usize, f64, f64)>,
    /// The ends of downloads since the last promotion started.
    downloads_s: Vec<f64>,
    /// The last shard task: its task, start and end.
    last: Option<(TaskId, f64, f64)>,
    latency: Mean,
}

#[derive(Default)]
struct RecordedTask {
    name: String,
    shards: Vec<Shard>,
    /// Training passes so far; evaluation passes follow, by the number of minibatches before them.
    trained: u64,
    evaluations: Vec<EvaluationCost>,
    /// The training microbatch passes of each minibatch.
    minibatches: Vec<u64>,
    /// Bytes of host memory: masters, and within a minibatch.
    masters_bytes: u64,
    active_bytes: u64,
    /// Length of microbatch groups in training and in evaluations, and groups in flight.
    microbatch_groups: [u64; 2],
    replicas: usize,
    /// Training passes of the current minibatch.
    begun: u64,
    /// The last minibatch, the time when its gradients were on the host, and the end of its last step.
    last: Option<(usize, f64)>,
    stepped_s: f64,
    /// When the output of its last shard task was on the host.
    down_s: f64,
    /// Seconds from gradients on the host to last steps, over all minibatches.
    steps_s: f64,
}

#[derive(Default)]
struct Shard {
    bytes: u64,
    working: WorkingBytes,
    buffers: ShardBuffers,
    forward: Mean,
    backward: Mean,
    evaluate: Mean,
    promote: Mean,
    take_down: Mean,
    /// Seconds and bytes of gradient downloads.
    gradients: (f64, u64),
    /// When its last shard task ended.
    ended_s: f64,
}

#[derive(Clone, Copy, Default)]
struct Mean {
    sum: f64,
    count: u64,
}

impl Mean {
    fn add(&mut self, seconds: f64) {
        self.sum += seconds.max(0.0);
        self.count += 1;
    }

    fn get(self) -> Option<f64> {
        (self.count > 0).then(|| nanos(self.sum / self.count as f64))
    }
}

/// Rounds to nanoseconds, so that a workload in text form is short and reads back as the same numbers.
fn nanos(seconds: f64) -> f64 {
    (seconds * 1e9).round() / 1e9
}

impl Recorder {
    pub(crate) fn new<'a>(
        observer: Box<dyn Observer>,
        prefetch: bool,
        devices: impl IntoIterator<Item = &'a LogicalDevice>,
    ) -> Self {
        let device = |of| RecordedDevice {
            cost: device_cost(of),
            promoted: Vec::new(),
            downloads_s: Vec::new(),
            last: None,
            latency: Mean::default(),
        };
        let devices: Vec<RecordedDevice> = devices.into_iter().map(device).collect();
        let (tasks, times) = (Vec::new(), ShardTimes::default());
        Self { observer: Some(observer), prefetch, devices, host_bytes: None, tasks, times, timed: 0 }
    }

    /// The workload of the run so far; `None` if nothing has been trained.
    pub(crate) fn workload(&self) -> Option<Workload> {
        let tasks: Vec<TaskCost> =
            self.tasks.iter().filter(|task| task.trained > 0).map(RecordedTask::cost).collect();
        let device = |of: &RecordedDevice| DeviceCost {
            latency_s: of.latency.get().unwrap_or(0.0),
            ..of.cost.clone()
        };
        let devices = self.devices.iter().map(device).collect();
        let (host_bytes, processors) = (self.host_bytes, Some(processors()));
        let workload = Workload { host_bytes, processors, ..Workload::new(tasks, devices) };
        workload.check().ok().map(|()| workload)
    }

    /// Seconds from the first shard task's start to the last one's end, as the simulator replays the run with the
    /// recorded time of each shard task.
    pub(crate) fn replay_s(&self, workload: &Workload, policy: PolicyKind, seed: u64) -> Option<f64> {
        let options = SimulationOptions { prefetch: self.prefetch, record: false };
        let run = replay(workload, &self.times, &mut *policy.build(seed), options).ok()?;
        Some(run.makespan_s - run.first_start_s)
    }

    /// Returns whether the simulator models this run exactly: every task was trained, a workload can express its
    /// microbatches, and all backward passes ended at the same shard.
    pub(crate) fn is_as_simulated(&self) -> bool {
        let is = |task: &RecordedTask| {
            task.trained > 0 && task.microbatches().is_some() && task.first_trained().is_some()
        };
        self.tasks.iter().all(is)
    }

    fn span(&mut self, span: &Span) {
        self.device_span(span);
        let Some(task) = self.tasks.get_mut(span.task.0) else { return };
        if span.work == Work::Step {
            return task.step(span);
        }
        let last = span.shard + 1 == task.shards.len();
        let Some(shard) = task.shards.get_mut(span.shard) else { return };
        let seconds = span.end_s - span.start_s;
        if matches!(span.work, Work::Forward | Work::Backward | Work::Evaluate) {
            shard.ended_s = span.end_s;
            task.down_s = span.end_s;
        }
        let kind = match span.work {
            Work::Forward => Some((&mut shard.forward, ShardTaskKind::Forward)),
            Work::Backward => Some((&mut shard.backward, ShardTaskKind::Backward)),
            Work::Evaluate => Some((&mut shard.evaluate, ShardTaskKind::Evaluate)),
            Work::Promote | Work::TakeDown | Work::Step => None,
        };
        if let Some((mean, kind)) = kind {
            mean.add(seconds);
            if self.timed < MOST_TIMED {
                self.timed += 1;
                let of = (span.task.0, kind, task.minibatches.len() as u64, span.shard);
                self.times.insert(of, span.microbatch_pass, seconds.max(0.0));
            }
        }
        match span.work {
            Work::Backward if last => task.begun += 1,
            Work::Evaluate if last => task.evaluated(),
            _ => {}
        }
    }

    /// Records a promotion. Its time is scaled up by the parameters that were cached.
    pub(crate) fn promoted(
        &mut self,
        device: DeviceId,
        (task, shard): (TaskId, usize),
        bytes: ParameterBytes,
        time: Time,
    ) {
        let link = self.devices.get(device.0).and_then(|device| device.cost.link_bytes_per_s);
        let Some(shard) = self.tasks.get_mut(task.0).and_then(|task| task.shards.get_mut(shard)) else {
            return;
        };
        let ParameterBytes { promoted, cached } = bytes;
        if promoted > 0 {
            shard.promote.add(match link {
                Some(link) => time.seconds() + cached as f64 / link,
                None => time.seconds() * (promoted + cached) as f64 / promoted as f64,
            });
        } else if cached == 0 {
            shard.promote.add(time.seconds());
        }
    }

    /// Records that the output of a shard task is on the host. The device downloads one output after another.
    pub(crate) fn output_down(&mut self, device: DeviceId, (task, shard): (TaskId, usize), time: Time) {
        let (Some(device), Some(task)) = (self.devices.get(device.0), self.tasks.get_mut(task.0)) else {
            return;
        };
        task.down_s = task.down_s.max(time.end_s);
        let before_s = device.downloaded_s(time.start_s);
        if let Some(shard) = task.shards.get_mut(shard) {
            // The end of that shard task, unless another one of this shard has ended since.
            let made_s = if shard.ended_s <= time.start_s { shard.ended_s } else { time.start_s };
            shard.take_down.add(time.end_s - made_s.max(before_s));
        }
    }

    /// Records that `bytes` of gradients of a minibatch's shard task were downloaded.
    pub(crate) fn gradients_down(
        &mut self,
        (task, shard, step): (TaskId, usize, usize),
        bytes: u64,
        time: Time,
    ) {
        let Some(task) = self.tasks.get_mut(task.0) else { return };
        if let Some((_, down_s)) = task.last.as_mut().filter(|(last, _)| *last == step) {
            *down_s = down_s.max(time.end_s);
        }
        if let Some(shard) = task.shards.get_mut(shard).filter(|_| bytes > 0) {
            shard.gradients.0 += time.seconds();
            shard.gradients.1 += bytes;
        }
    }

    /// Records the latency of a promotion when its shard task ends: the time from the moment when the device could
    /// commit to it until the promotion started.
    fn device_span(&mut self, span: &Span) {
        let (Track::Compute(device) | Track::Copy(device)) = span.track else { return };
        let Some(device) = self.devices.get_mut(device.0) else { return };
        match span.work {
            Work::Promote => {
                let down_s = device.downloaded_s(span.start_s);
                device.downloads_s.retain(|end_s| *end_s >= down_s);
                device.promoted.push((span.task, span.shard, span.start_s, down_s));
            }
            Work::Forward | Work::Backward | Work::Evaluate => {
                let of = |(task, shard, ..): &(TaskId, usize, f64, f64)| {
                    (*task, *shard) == (span.task, span.shard)
                };
                let promoted = device.promoted.iter().position(of).map(|place| device.promoted.remove(place));
                let last = device.last.replace((span.task, span.start_s, span.end_s));
                let (Some((.., begun_s, down_s)), Some(last), Some(task)) =
                    (promoted, last, self.tasks.get(span.task.0))
                else {
                    return;
                };
                let occasion_s = task.occasion_s(span.task, last, self.prefetch, begun_s);
                // The promotion may have waited for device memory that the download freed.
                device.latency.add(begun_s - occasion_s.max(down_s));
            }
            Work::TakeDown => device.downloads_s.push(span.end_s),
            Work::Step => {}
        }
    }

    fn minibatch(&mut self, task: TaskId, step: usize, at_s: f64) {
        let Some(task) = self.tasks.get_mut(task.0) else { return };
        task.steps_s += task.waited_s();
        let microbatch_passes = std::mem::take(&mut task.begun);
        task.trained += microbatch_passes;
        task.minibatches.push(microbatch_passes);
        task.last = Some((step, at_s));
        task.stepped_s = at_s;
    }

    /// Forwards an event to the observer. A panic there must not lose the training.
    fn forward(&mut self, event: &RunEvent<'_>) {
        let Some(observer) = &mut self.observer else { return };
        let result = guarded("an observer", || {
            observer.observe(event);
            Ok(())
        });
        if let Err(error) = result {
            tracing::error!("{error}: the run goes on without it");
            self.observer = None;
        }
    }
}

impl Observer for Recorder {
    fn observe(&mut self, event: &RunEvent<'_>) {
        match event {
            RunEvent::Admitted(admission) => {
                self.tasks = admission.tasks.iter().map(RecordedTask::new).collect();
                self.host_bytes = host_bytes(admission);
                split_off_cache(self.devices.iter_mut().map(|device| &mut device.cost), admission);
            }
            RunEvent::Submitted { admitted, .. } => {
                self.tasks.push(RecordedTask::new(admitted));
                // It starts when other tasks have freed memory, which the simulator does not model.
                self.host_bytes = None;
            }
            RunEvent::Span(span) => self.span(span),
            RunEvent::Minibatch { task, step, at_s, .. } => self.minibatch(*task, *step, *at_s),
            _ => {}
        }
        self.forward(event);
    }
}

impl RecordedDevice {
    /// The end of the last download before `before_s`.
    fn downloaded_s(&self, before_s: f64) -> f64 {
        let before = self.downloads_s.iter().copied().filter(|end_s| *end_s <= before_s);
        before.fold(0.0, f64::max)
    }
}

impl RecordedTask {
    fn new(task: &AdmittedTask) -> Self {
        let shard = |(index, buffers): (usize, &ShardBuffers)| Shard {
            bytes: task.promoted_bytes(index),
            working: working_bytes(task, &task.plan, index),
            buffers: buffers.clone(),
            ..Shard::default()
        };
        Self {
            name: task.name.clone(),
            shards: task.storage.buffers.iter().enumerate().map(shard).collect(),
            microbatch_groups: [
                task.microbatch_group.microbatches as u64,
                task.microbatch_group.batches as u64,
            ],
            replicas: task.replicas,
            masters_bytes: task.storage.memory_bytes(),
            active_bytes: task.memory.active_bytes,
            ..Self::default()
        }
    }

    fn evaluated(&mut self) {
        let after = self.minibatches.len() as u64;
        match self.evaluations.last_mut().filter(|of| of.after == after) {
            Some(of) => of.microbatch_passes += 1,
            None => self.evaluations.push(EvaluationCost { after, microbatch_passes: 1 }),
        }
    }

    /// The microbatches per minibatch, and the epochs if the last minibatch of each is shorter; `None` if minibatches
    /// differ in another way.
    fn microbatches(&self) -> Option<(u64, Option<Epoch>)> {
        let each = self.minibatches.iter().copied().max()?;
        let Some(first) = self.minibatches.iter().position(|microbatch_passes| *microbatch_passes < each)
        else {
            return Some((each, None));
        };
        let (epoch, last) = (first + 1, self.minibatches[first]);
        let is_last = |minibatch: usize| minibatch % epoch == first;
        let expected = |minibatch| if is_last(minibatch) { last } else { each };
        let regular = (0..self.minibatches.len()).all(|of| self.minibatches[of] == expected(of));
        let epoch = Epoch { minibatches: epoch as u64, last_microbatches: last };
        (regular && last > 0).then_some((each, Some(epoch)))
    }

    /// The shard at which all backward passes ended; `None` if they differ.
    fn first_trained(&self) -> Option<usize> {
        let first = self.shards.iter().position(|shard| shard.backward.count > 0)?;
        self.shards[first..].iter().all(|shard| shard.backward.count == self.trained).then_some(first)
    }

    /// When a device, after its shard task `last`, could commit to this task's next shard task, whose promotion
    /// started at `begun_s`.
    fn occasion_s(&self, task: TaskId, last: (TaskId, f64, f64), prefetch: bool, begun_s: f64) -> f64 {
        let (last_task, start_s, end_s) = last;
        let device_s = if prefetch { start_s } else { end_s };
        // A successor on the same device is committed to while its predecessor computes, unless it waits for a step.
        let inputs_s = if prefetch && last_task == task { start_s } else { self.down_s };
        let before = |s: f64| if s <= begun_s { s } else { 0.0 };
        device_s.max(before(inputs_s)).max(before(self.stepped_s))
    }

    fn step(&mut self, span: &Span) {
        if self.last.is_some_and(|(step, _)| step == span.step) {
            self.stepped_s = self.stepped_s.max(span.end_s);
        }
    }

    /// Seconds from the last gradients of the last minibatch to its last step.
    fn waited_s(&self) -> f64 {
        // Gradients count as arrived when the optimizer has received them, and it may have stepped already.
        self.last.map_or(0.0, |(_, down_s)| (self.stepped_s - down_s).max(0.0))
    }

    /// The costs of the task. The next minibatch waits for the step of the first shard, whose backward comes last, so
    /// the measured wait applies to each shard. It includes the queue of the host optimizer.
    fn cost(&self) -> TaskCost {
        let shards = self.shards.iter().map(Shard::cost).collect();
        let waits_s = self.steps_s + self.waited_s();
        let mut cost = TaskCost::new(&self.name, self.minibatches.len() as u64, shards);
        cost.step_wait_s = nanos(waits_s / self.minibatches.len() as f64);
        cost.evaluations.clone_from(&self.evaluations);
        cost.first_trained = self.first_trained().unwrap_or(0);
        cost.replicas = self.replicas;
        (cost.masters_bytes, cost.active_bytes) = (self.masters_bytes, self.active_bytes);
        // With a single shard, the order of microbatch passes in a replica does not depend on the microbatch group.
        if self.shards.len() > 1 || self.replicas > 1 {
            [cost.microbatch_group, cost.evaluation_group] = self.microbatch_groups;
        }
        match self.microbatches() {
            Some((microbatches, epoch)) => (cost.microbatches, cost.epoch) = (microbatches, epoch),
            // Each microbatch is recorded as a minibatch.
            None => {
                let microbatch_passes = |after: u64| self.minibatches.iter().take(after as usize).sum();
                cost.evaluations.iter_mut().for_each(|of| of.after = microbatch_passes(of.after));
                cost.minibatches = self.trained;
            }
        }
        cost
    }
}

impl Shard {
    fn cost(&self) -> ShardCost {
        let (gradients_s, downloaded) = self.gradients;
        ShardCost {
            forward_s: self.forward.get().unwrap_or(0.0),
            backward_s: self.backward.get().unwrap_or(0.0),
            evaluate_s: self.evaluate.get(),
            promote_s: self.promote.get(),
            bytes: Some(self.bytes),
            frozen: self.buffers.frozen.clone(),
            buffers: self.buffers.stepped.clone(),
            download_s: self.take_down.get().unwrap_or(0.0),
            gradients_s: nanos(gradients_s / downloaded.max(1) as f64 * self.working.gradients as f64),
            working: self.working,
        }
    }
}
