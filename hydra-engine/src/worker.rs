//! The threads of a device: one that computes and one for copies in each direction.
//!
//! The copy worker fills the device's double buffer, the compute worker takes from it; what a shard task
//! made goes down to the host on the third thread, while the next shard task computes.

use crate::clock::{Clock, Time};
use crate::device::LogicalDevice;
use crate::error::EngineError;
use crate::event::{Computed, Event, HostGradient, Output, Ticket};
use crate::executor::{self, ShardInputs, ShardWork};
use crate::host::{Contribution, HostJob, MicroStep};
use crate::model::HostInputs;
use crossbeam_channel::{Receiver, Sender};
use hydra_core::{Chain, HostActivation, HostTensor, TaskId};
use hydra_spill::{DoubleBuffer, FillGuard, Reservation, Resident, SpillError, alloc};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// What waits in the double buffer for its shard task.
pub(crate) struct Promoted {
    pub resident: Resident,
    /// In device memory.
    pub inputs: HostInputs,
}

/// The output of the last shard task, still on the device.
struct HandedOn {
    output: Output,
    _reservation: Reservation,
}

/// A shard task that can start.
struct Ready {
    resident: Resident,
    inputs: HostInputs,
    reservation: Reservation,
}

/// How long a claimed shard task waits for memory that others are about to release. Nothing waits so long
/// unless a release was lost; the task then fails and says who holds the memory.
const PATIENCE: Duration = Duration::from_secs(120);

pub(crate) type Buffer = DoubleBuffer<Promoted>;

/// Brings a shard's images and those inputs that are on the host already.
pub(crate) struct PromoteJob {
    pub ticket: Ticket,
    pub task: TaskId,
    pub fill: FillGuard,
    pub images: Vec<usize>,
    pub inputs: HostInputs,
    pub reservation: Reservation,
}

/// Runs a shard task when it is in the double buffer and what it needs beyond is free.
pub(crate) struct ComputeJob {
    pub ticket: Ticket,
    pub chain: Arc<Chain>,
    pub work: ShardWork,
    /// Whether it takes the output of the shard task before it on this device.
    pub follows: bool,
    /// Host inputs for which the device had no room during the promotion.
    pub late: HostInputs,
    /// Device bytes beyond those that the promotion reserved.
    pub rest: u64,
    /// Set when the task fails: the promotion then only leaves the double buffer.
    pub abandoned: Arc<AtomicBool>,
}

/// Takes what a shard task made down to the host.
pub(crate) struct TakeDownJob {
    pub ticket: Ticket,
    pub task: TaskId,
    pub chain: Arc<Chain>,
    pub at: MicroStep,
    pub made: Computed,
    pub reservation: Reservation,
}

/// What the threads of a device share.
#[derive(Clone)]
pub(crate) struct Worker {
    pub device: Arc<LogicalDevice>,
    pub buffer: Arc<Buffer>,
    pub events: Sender<Event>,
    pub clock: Clock,
}

impl Worker {
    fn send(&self, event: Event) {
        // The orchestrator outlives its workers; if it is gone, the run was given up.
        let _ = self.events.send(event);
    }

    fn time(&self, start_s: f64) -> Time {
        Time { start_s, end_s: self.clock.now() }
    }

    /// The copy worker.
    pub(crate) fn promote(&self, jobs: &Receiver<PromoteJob>) {
        alloc::tag_thread(None);
        for job in jobs {
            let start_s = self.clock.now();
            let (ticket, device) = (job.ticket, self.device.id);
            let failure = self.promote_one(job).err().map(EngineError::from);
            self.send(Event::Promoted { device, ticket, time: self.time(start_s), failure });
        }
    }

    fn promote_one(&self, job: PromoteJob) -> Result<(), SpillError> {
        let fill = || -> Result<Promoted, SpillError> {
            let inputs = self.bring_in(job.inputs)?;
            Ok(Promoted {
                inputs,
                resident: self.device.manager.promote(job.task, &job.images, job.reservation)?,
            })
        };
        match fill() {
            Ok(promoted) => {
                self.buffer.complete(job.fill, promoted)?;
                Ok(())
            }
            Err(error) => {
                self.buffer.cancel(job.fill);
                Err(error)
            }
        }
    }

    fn bring_in(&self, inputs: HostInputs) -> Result<HostInputs, SpillError> {
        let manager = &self.device.manager;
        Ok(HostInputs {
            activation: inputs.activation.map(|a| manager.bring_in(&a)).transpose()?,
            targets: manager.bring_in(&inputs.targets)?,
            upstream: inputs.upstream.map(|g| move_gradient(g, |a| manager.bring_in(a))).transpose()?,
        })
    }

    /// The compute worker. It runs on a thread of the device's pool, so that a shard task starts without a
    /// change of threads, and takes the next one without asking: it was claimed while this one computed.
    pub(crate) fn compute(&self, jobs: &Receiver<ComputeJob>) {
        // Glue is host memory; what shard tasks allocate is the device's.
        alloc::with_tag(None, || {
            let mut last = None;
            for job in jobs {
                last = self.compute_next(job, last);
            }
        });
    }

    /// Runs a job; gives what the next one may take over from it, with a reservation of its own.
    fn compute_next(&self, job: ComputeJob, last: Option<HandedOn>) -> Option<HandedOn> {
        let (ticket, device) = (job.ticket, self.device.id);
        let waited_s = self.clock.now();
        let ready = self.ready(&job, last);
        let start_s = self.clock.now();
        let result = ready.and_then(|ready| match ready {
            Some(ready) => {
                self.send(Event::Started { device, ticket });
                self.compute_one(&job, ready).map(Some)
            }
            None => Ok(None),
        });
        let time = self.time(start_s);
        let retired = self.buffer.retire(ticket);
        debug_assert!(retired.is_ok() || result.is_err());
        let handed_on = result.as_ref().ok().and_then(Option::as_ref).and_then(|(made, _)| self.keep(made));
        self.send(Event::ShardDone { device, ticket, time, stalled_s: start_s - waited_s, result });
        handed_on
    }

    /// Waits for the promotion and for memory, and brings in what the promotion could not. `None` if the
    /// task has failed meanwhile.
    fn ready(&self, job: &ComputeJob, last: Option<HandedOn>) -> Result<Option<Ready>, EngineError> {
        let promoted = self.buffer.activate(job.ticket).map_err(SpillError::from)?;
        if job.abandoned.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let budget = self.device.manager.budget();
        let reservation =
            budget.reserve_when_free(job.rest, "shard task", PATIENCE).map_err(SpillError::from)?;
        let Promoted { resident, mut inputs } = promoted;
        if job.late.bytes() > 0 {
            inputs = self.bring_in(job.late.clone())?;
        }
        if job.follows {
            // If there is nothing, the shard task before it has failed, and its error was heard first.
            let Some(HandedOn { output, .. }) = last else {
                let problem = "lost the output of the shard task before".to_owned();
                return Err(EngineError::Worker { worker: self.device.spec.name.clone(), problem });
            };
            match output {
                Output::None => {}
                Output::Activation(boundary) => inputs.activation = Some(boundary),
                Output::Gradient(gradient) => inputs.upstream = Some(gradient),
            }
        }
        Ok(Some(Ready { resident, inputs, reservation }))
    }

    fn compute_one(&self, job: &ComputeJob, ready: Ready) -> Result<(Computed, Reservation), EngineError> {
        let Ready { resident, inputs, mut reservation } = ready;
        let inputs = ShardInputs {
            resident,
            activation: inputs.activation.unwrap_or_default(),
            targets: inputs.targets,
            upstream: inputs.upstream.unwrap_or_default(),
        };
        let made = executor::run(&self.device, &job.chain, &job.work, inputs)?;
        reservation.shrink_to(made.bytes());
        Ok((made, reservation))
    }

    fn keep(&self, made: &Computed) -> Option<HandedOn> {
        let bytes = made.output.bytes();
        if bytes == 0 {
            return None;
        }
        // What the shard task has just released leaves room; without it, the copy on the host serves.
        let reservation =
            self.device.manager.budget().reserve_when_free(bytes, "handed on", PATIENCE).ok()?;
        Some(HandedOn { output: made.output.clone(), _reservation: reservation })
    }

    /// The worker that takes outputs and gradients down.
    pub(crate) fn take_down(&self, jobs: &Receiver<TakeDownJob>, host: &Sender<HostJob>) {
        alloc::tag_thread(None);
        for job in jobs {
            let (device, task, ticket) = (self.device.id, job.task, job.ticket);
            let TakeDownJob { chain, at, made, reservation, .. } = job;
            let start_s = self.clock.now();
            if !matches!(made.output, Output::None) {
                let result = self.output_down(made.output).map_err(EngineError::from);
                self.send(Event::OutputDown { device, task, ticket, time: self.time(start_s), result });
            }
            let start_s = self.clock.now();
            let contributions = self.gradients_down(&chain, made.gradients);
            drop(reservation);
            let failure = match contributions {
                Ok(contributions) => {
                    if !contributions.is_empty() {
                        let _ = host.send(HostJob::Gradients { task, at, contributions });
                    }
                    None
                }
                Err(error) => Some(error.into()),
            };
            self.send(Event::GradientsDown { device, task, ticket, time: self.time(start_s), failure });
        }
    }

    fn output_down(&self, output: Output) -> Result<Output, SpillError> {
        let manager = &self.device.manager;
        Ok(match output {
            Output::None => Output::None,
            Output::Activation(boundary) => Output::Activation(manager.take_out(boundary)?),
            Output::Gradient(gradient) => {
                Output::Gradient(move_gradient(gradient, |a| manager.take_out(a.clone()))?)
            }
        })
    }

    /// One buffer for each layer and image, laid out as the image; a parameter that the loss does not
    /// reach has gradient zero.
    fn gradients_down(
        &self,
        chain: &Chain,
        layers: Vec<(usize, HostGradient)>,
    ) -> Result<Vec<Contribution>, SpillError> {
        let link = self.device.manager.link();
        let mut contributions: Vec<Contribution> = Vec::new();
        for (layer, gradients) in layers {
            let first = contributions.len();
            for (at, gradient) in chain.layers()[layer].params.iter().zip(gradients) {
                let layout = &chain.images()[at.image];
                let of_image = contributions[first..].iter().position(|c| c.image == at.image);
                let index = of_image.map_or(contributions.len(), |i| first + i);
                let again = of_image.is_some() && layout.layers.len() > 1;
                if of_image.is_none() {
                    contributions.push(Contribution {
                        layer,
                        image: at.image,
                        values: vec![0.0; layout.elements],
                    });
                }
                let Some(gradient) = gradient else { continue };
                let out = &mut contributions[index].values[layout.params[at.slot].range()];
                link.copy_out_into(&gradient.bytes, out, again)?;
            }
        }
        Ok(contributions)
    }
}

/// Moves those tensors of a gradient that are there.
fn move_gradient(
    gradient: HostGradient,
    mut moved: impl FnMut(&HostActivation) -> Result<HostActivation, SpillError>,
) -> Result<HostGradient, SpillError> {
    let one = |tensor: Option<HostTensor>| match tensor {
        None => Ok(None),
        Some(tensor) => Ok(moved(&HostActivation::of(tensor))?.parts.pop()),
    };
    gradient.into_iter().map(one).collect()
}
