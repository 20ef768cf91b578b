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

/// What waits in the double buffer for its shard task.
pub(crate) struct Promoted {
    pub resident: Resident,
    /// In device memory.
    pub inputs: HostInputs,
}

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

/// Runs a shard task whose ticket is, or is about to be, in the double buffer.
pub(crate) struct ComputeJob {
    pub ticket: Ticket,
    pub chain: Arc<Chain>,
    /// `None` if the task failed meanwhile: the promotion only leaves the double buffer.
    pub work: Option<ShardWork>,
    /// What the shard task before it on this device left for it.
    pub handoff: Output,
    /// Host inputs for which the device had no room during the promotion.
    pub late: HostInputs,
    pub reservation: Reservation,
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

    /// The compute worker.
    pub(crate) fn compute(&self, jobs: &Receiver<ComputeJob>) {
        // Glue around the pool is host memory; what the pool's threads allocate is the device's.
        alloc::tag_thread(None);
        for job in jobs {
            let waited_s = self.clock.now();
            let ready = self.ready(&job);
            self.send(Event::Started { device: self.device.id, ticket: job.ticket });
            let start_s = self.clock.now();
            let result = ready.and_then(|(resident, inputs)| self.compute_one(&job, resident, inputs));
            let time = self.time(start_s);
            let retired = self.buffer.retire(job.ticket);
            debug_assert!(retired.is_ok() || result.is_err());
            let (ticket, device, reservation) = (job.ticket, self.device.id, job.reservation);
            let stalled_s = start_s - waited_s;
            self.send(Event::ShardDone { device, ticket, time, stalled_s, result, reservation });
        }
    }

    /// Waits for the promotion, and brings in what it could not.
    fn ready(&self, job: &ComputeJob) -> Result<(Resident, HostInputs), EngineError> {
        let Promoted { resident, inputs } = self.buffer.activate(job.ticket).map_err(SpillError::from)?;
        let mut inputs = inputs;
        if job.late.bytes() > 0 {
            inputs = self.bring_in(job.late.clone())?;
        }
        match &job.handoff {
            Output::None => {}
            Output::Activation(boundary) => inputs.activation = Some(boundary.clone()),
            Output::Gradient(gradient) => inputs.upstream = Some(gradient.clone()),
        }
        Ok((resident, inputs))
    }

    fn compute_one(
        &self,
        job: &ComputeJob,
        resident: Resident,
        inputs: HostInputs,
    ) -> Result<Option<Computed>, EngineError> {
        let Some(work) = &job.work else { return Ok(None) };
        let inputs = ShardInputs {
            resident,
            activation: inputs.activation.unwrap_or_default(),
            targets: inputs.targets,
            upstream: inputs.upstream.unwrap_or_default(),
        };
        executor::run(&self.device, &job.chain, work, inputs).map(Some)
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
