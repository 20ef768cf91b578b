//! The threads of a device: the copy worker fills its double buffer, the compute worker takes from it, and the
//! download worker downloads the results of a shard task while the next one computes.

use super::executor::{self, Promoted, ShardWork};
use super::sums::{self, Sums};
use super::{LogicalDevice, TimeSlices};
use crate::error::{EngineError, guarded};
use crate::optimizer::{Contribution, HostJob, MicroStep};
use crate::protocol::{Computed, Event, Inputs, LayerGradients, Made, Output, Reporter, Ticket, kept_bytes};
use crossbeam_channel::{Receiver, Sender};
use hydra_core::profile::{self, Part};
use hydra_core::{Chain, DeviceTensor, HostTensor, TaskId};
use hydra_spill::{DoubleBuffer, FillGuard, HeldCopies, LinkError, Reservation, SpillError, alloc};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Results of the last shard task that stay on the device for the next one.
struct HandedOn {
    /// Its output, with the reservation that it shares with its download.
    output: Output<DeviceTensor>,
    charge: Arc<Reservation>,
    /// The gradients that the next one may add its own to.
    sums: Option<Sums>,
}

/// A shard task that can start.
struct Ready {
    promoted: Promoted,
    reservation: Reservation,
    /// Covers the input that stayed on the device.
    _handed: Option<Arc<Reservation>>,
    /// The gradients that it adds its own to.
    sums: Option<Sums>,
}

/// The interval at which a shard task that waits for memory checks whether its task has failed.
const LOOK_UP: Duration = Duration::from_millis(100);

pub(crate) type Buffer = DoubleBuffer<Promoted>;

/// Uploads the buffers of a shard that are not on the device, and the inputs that are on the host.
pub(crate) struct PromoteJob {
    pub ticket: Ticket,
    pub task: TaskId,
    pub fill: FillGuard,
    pub buffers: Vec<usize>,
    /// The buffers that are in the device's parameter cache.
    pub held: HeldCopies,
    pub inputs: Inputs<HostTensor>,
    pub reservation: Reservation,
}

/// Runs a shard task when it is in the double buffer and its remaining memory is free.
pub(crate) struct ComputeJob {
    pub ticket: Ticket,
    pub chain: Arc<Chain>,
    pub work: ShardWork,
    /// True if it takes the output of the previous shard task on this device.
    pub follows: bool,
    pub adding: Adding,
    /// Host inputs that did not fit on the device during the promotion.
    pub late: Inputs<HostTensor>,
    /// Device bytes beyond those that the promotion reserved.
    pub rest: u64,
    /// Set when the task fails: the promotion then only leaves the double buffer.
    pub abandoned: Arc<AtomicBool>,
}

/// The role of a shard task in gradient accumulation on its device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Adding {
    /// None: its gradients are downloaded separately.
    #[default]
    Nothing,
    /// The next one may add to its gradients.
    First,
    /// It adds its gradients to those of the previous shard task on this device, and the next one may add to them.
    Next,
}

/// The gradients of a shard task to download.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GradientPart {
    All,
    /// Those that are not accumulated on the device.
    Others,
    /// Those that are.
    Sums,
}

impl GradientPart {
    /// Returns whether it includes gradients that are (or are not) accumulated.
    fn has(self, adds_up: bool) -> bool {
        match self {
            Self::All => true,
            Self::Others => !adds_up,
            Self::Sums => adds_up,
        }
    }
}

/// Downloads the results of a shard task.
pub(crate) struct DownloadJob {
    pub ticket: Ticket,
    pub task: TaskId,
    pub chain: Arc<Chain>,
    /// For each buffer, whether its master weights are resident on the device; its gradients stay there.
    pub resident: Arc<[bool]>,
    pub at: MicroStep,
    pub made: Made,
    pub adding: Adding,
    pub part: GradientPart,
    /// The shard, for the trace.
    pub shard: usize,
}

/// The tensors of contributions.
fn tensors(contributions: &[Contribution<DeviceTensor>]) -> impl Iterator<Item = &DeviceTensor> {
    contributions.iter().flat_map(|of| of.gradients.iter().flatten())
}

/// The state that the threads of a device share.
#[derive(Clone)]
pub(crate) struct Worker {
    pub device: Arc<LogicalDevice>,
    pub buffer: Arc<Buffer>,
    pub time_slices: Arc<TimeSlices>,
    pub reporter: Reporter,
}

impl Made {
    /// The output and the accumulated gradients, for the next shard task on the device.
    fn hand_on(&self, job: &ComputeJob) -> HandedOn {
        let sums = || Sums {
            gradients: sums::summable(&job.chain, &self.computed.gradients),
            _charge: self.sums.clone(),
        };
        HandedOn {
            output: self.computed.output.clone(),
            charge: self.output.clone(),
            sums: (job.adding != Adding::Nothing).then(sums),
        }
    }

    /// Takes out the accumulated gradients, for the next shard task or for a separate download.
    pub(crate) fn take_sums(&mut self, chain: &Chain) -> Self {
        let mut sums = Vec::new();
        for (layer, gradients) in &mut self.computed.gradients {
            let take = |(param, gradient): (usize, &mut Option<DeviceTensor>)| {
                gradient.take_if(|_| sums::adds_up(chain, *layer, param))
            };
            sums.push((*layer, gradients.iter_mut().enumerate().map(take).collect()));
        }
        let mut none = self.gradients.split(0);
        let output = Arc::new(none.split(0));
        let charge = std::mem::replace(&mut self.sums, Arc::new(none));
        let computed = Computed { output: Output::None, gradients: sums, measured: None };
        Self { computed, output, gradients: self.gradients.split(0), sums: charge }
    }
}

impl Worker {
    /// The copy worker.
    pub(crate) fn promote(&self, jobs: &Receiver<PromoteJob>) {
        alloc::tag_thread(None);
        for job in jobs {
            let start_s = self.reporter.now();
            let PromoteJob { ticket, task, fill, buffers, held, inputs, reservation } = job;
            let device = self.device.id;
            let promote = move || {
                let tensors: Vec<HostTensor> = inputs.tensors().cloned().collect();
                let manager = &self.device.manager;
                let (resident, uploaded) = manager.promote(task, &buffers, &tensors, held, reservation)?;
                Ok(Promoted { resident, inputs: inputs.replaced(uploaded) })
            };
            let promoted = profile::time(Part::Transfer, || guarded("a promotion", promote));
            let time = self.reporter.since(start_s);
            // The error is sent before the compute worker, which waits for this, can report the failure.
            let (promoted, failure) = match promoted {
                Ok(promoted) => (Some(promoted), None),
                Err(error) => (None, Some(error)),
            };
            self.reporter.send(Event::Promoted { device, task, ticket, time, failure });
            match promoted {
                // It is refused only after a cancellation, when no worker waits for it.
                Some(promoted) => drop(self.buffer.complete(fill, promoted)),
                None => self.buffer.cancel(fill),
            }
        }
    }

    /// The compute worker, on a thread of the device's pool, so that a shard task starts without a thread switch.
    pub(crate) fn compute(&self, jobs: &Receiver<ComputeJob>) {
        // Bookkeeping is host memory; allocations of shard tasks are charged to the device.
        alloc::with_tag(None, || {
            let mut last = None;
            for job in jobs {
                last = self.compute_next(job, last);
            }
        });
    }

    /// Runs a job; returns the results that the next one may take over, with their own reservation.
    fn compute_next(&self, job: ComputeJob, last: Option<HandedOn>) -> Option<HandedOn> {
        let (ticket, device) = (job.ticket, self.device.id);
        let waited_s = self.reporter.now();
        let ready = guarded("waiting for a promotion", || self.ready(&job, last));
        let stalled_s = self.reporter.now() - waited_s;
        let time_slice = matches!(ready, Ok(Some(_))).then(|| self.time_slices.take(&self.device.spec));
        let start_s = self.reporter.now();
        let result = ready.and_then(|ready| match ready {
            Some(ready) => {
                self.reporter.send(Event::Started { device, ticket, at_s: start_s });
                guarded("a shard task", || self.compute_one(&job, ready)).map(Some)
            }
            None => Ok(None),
        });
        let time = self.reporter.since(start_s);
        drop(time_slice);
        let retired = self.buffer.retire(ticket);
        assert!(retired.is_ok() || result.is_err());
        let made = result.as_ref().ok().and_then(Option::as_ref);
        let handed_on = made.map(|made| made.hand_on(&job));
        let lost = result.is_err() && !self.device.computes();
        self.reporter.send(Event::ShardDone { device, ticket, time, stalled_s, result, lost });
        handed_on
    }

    /// Waits for the promotion and for memory, and uploads the remaining inputs. `None` if the task has failed
    /// meanwhile.
    fn ready(&self, job: &ComputeJob, last: Option<HandedOn>) -> Result<Option<Ready>, EngineError> {
        let mut promoted = self.buffer.activate(job.ticket).map_err(SpillError::from)?;
        // Results of the previous shard task are released before waiting for memory, unless this one takes them over;
        // their memory is reserved already.
        let mut last = last;
        let sums = last.as_mut().and_then(|last| last.sums.take()).filter(|_| job.adding == Adding::Next);
        if job.adding == Adding::Next && sums.is_none() {
            return Err(self.nothing_before());
        }
        let last = last.filter(|_| job.follows);
        let paid = last.as_ref().map_or(0, |handed| handed.output.bytes());
        let Some(reservation) = self.wait_for_memory(job, job.rest.saturating_sub(paid))? else {
            return Ok(None);
        };
        if job.late.bytes() > 0 {
            let late: Vec<HostTensor> = job.late.tensors().cloned().collect();
            let uploaded = profile::time(Part::Transfer, || self.device.manager.upload(&late))?;
            promoted.inputs = job.late.replaced(uploaded);
        }
        let Some(HandedOn { output, charge, .. }) = last else {
            if job.follows {
                return Err(self.nothing_before());
            }
            return Ok(Some(Ready { promoted, reservation, _handed: None, sums }));
        };
        match output {
            Output::None => {}
            Output::Activation(boundary) => promoted.inputs.activation = Some(boundary),
            Output::Gradient(gradient) => promoted.inputs.upstream = Some(gradient),
        }
        Ok(Some(Ready { promoted, reservation, _handed: Some(charge), sums }))
    }

    /// The error of a shard task whose predecessor failed; that failure was reported first.
    fn nothing_before(&self) -> EngineError {
        let problem = "has no output of the previous shard task".to_owned();
        EngineError::Worker { worker: self.device.spec.name.clone(), problem }
    }

    /// Waits until missing memory is released; `None` if the task fails meanwhile. The partition leaves memory for
    /// every shard in addition to pending downloads, so the wait ends.
    fn wait_for_memory(&self, job: &ComputeJob, bytes: u64) -> Result<Option<Reservation>, EngineError> {
        let manager = &self.device.manager;
        while !job.abandoned.load(Ordering::Relaxed) {
            match manager.reserve_when_free(bytes, "shard task", LOOK_UP) {
                Ok(reservation) => return Ok(Some(reservation)),
                Err(error) if bytes > manager.budget().usable() => {
                    return Err(SpillError::from(error).into());
                }
                Err(_) => {}
            }
        }
        Ok(None)
    }

    fn compute_one(&self, job: &ComputeJob, ready: Ready) -> Result<Made, EngineError> {
        let Ready { promoted, mut reservation, _handed, sums } = ready;
        let mut computed = executor::run(&self.device, &job.chain, &job.work, promoted)?;
        if let Some(sums) = sums {
            self.device.add_gradients(&job.chain, sums, &mut computed.gradients)?;
        }
        self.device.trim();
        reservation.shrink_to(computed.device_bytes());
        let output = reservation.split(computed.output.bytes().min(reservation.bytes()));
        let add_up = match job.adding {
            Adding::Nothing => 0,
            _ => sums::bytes(&sums::summable(&job.chain, &computed.gradients)),
        };
        let sums = Arc::new(reservation.split(add_up.min(reservation.bytes())));
        Ok(Made { computed, output: Arc::new(output), gradients: reservation, sums })
    }

    /// The download worker.
    pub(crate) fn download(&self, jobs: &Receiver<DownloadJob>, host: &Sender<HostJob>) {
        alloc::tag_thread(None);
        for job in jobs {
            let (device, task, ticket) = (self.device.id, job.task, job.ticket);
            let DownloadJob { chain, resident, at, made, adding, part, shard, .. } = job;
            let of = (shard, at.step);
            let Made { computed, output: output_charge, gradients: reservation, sums: sums_charge } = made;
            let start_s = self.reporter.now();
            if !matches!(computed.output, Output::None) {
                let down = || Ok(self.output_down(computed.output)?);
                let result = profile::time(Part::Transfer, || guarded("copying an output", down));
                let time = self.reporter.since(start_s);
                self.reporter.send(Event::OutputDown { device, task, ticket, of, time, result });
            }
            drop(output_charge);
            let start_s = self.reporter.now();
            let gradients = computed.gradients;
            let mut bytes = 0;
            let down = || {
                let contributions = self.contributions(&chain, at, gradients, adding, part)?;
                let (staying, leaving): (Vec<_>, Vec<_>) =
                    contributions.into_iter().partition(|of| resident[of.buffer]);
                let mut reservation = reservation;
                if !staying.is_empty() {
                    let bytes = kept_bytes(tensors(&staying)).min(reservation.bytes());
                    let reservation = reservation.split(bytes);
                    let _ =
                        host.send(HostJob::DeviceGradients { task, at, contributions: staying, reservation });
                }
                if !leaving.is_empty() {
                    bytes = tensors(&leaving).map(DeviceTensor::len_bytes).sum();
                    let _ = host.send(self.gradients_down(task, at, leaving, (reservation, sums_charge))?);
                }
                Ok(())
            };
            let down = profile::time(Part::Transfer, || guarded("copying gradients", down));
            let failure = down.err();
            let time = self.reporter.since(start_s);
            self.reporter.send(Event::GradientsDown { device, task, of, bytes, time, failure });
        }
    }

    fn output_down(&self, output: Output<DeviceTensor>) -> Result<Output<HostTensor>, SpillError> {
        Ok(match output {
            Output::None => Output::None,
            Output::Activation(boundary) => {
                let down = self.device.manager.download(boundary.into_iter().map(Some).collect())?;
                Output::Activation(down.into_iter().flatten().collect())
            }
            Output::Gradient(gradient) => Output::Gradient(self.device.manager.download(gradient)?),
        })
    }

    /// The optimizer's job with gradients of a shard task, which are downloaded.
    fn gradients_down(
        &self,
        task: TaskId,
        at: MicroStep,
        contributions: Vec<Contribution<DeviceTensor>>,
        (reservation, sums): (Reservation, Arc<Reservation>),
    ) -> Result<HostJob, SpillError> {
        let whose = |of: &Contribution<DeviceTensor>| (of.layer, of.buffer, of.first, of.gradients.len());
        let whose: Vec<_> = contributions.iter().map(whose).collect();
        let all = contributions.into_iter().flat_map(|of| of.gradients).collect();
        let mut down = self.device.manager.download(all)?.into_iter();
        drop((reservation, sums));
        let of = |(layer, buffer, first, slots)| {
            let gradients = down.by_ref().take(slots).collect();
            Contribution { layer, buffer, first, gradients }
        };
        let contributions: Vec<Contribution> = whose.into_iter().map(of).collect();
        Ok(HostJob::Gradients { task, at, contributions })
    }

    /// The gradients by layer and buffer, by slot of the buffer.
    fn contributions(
        &self,
        chain: &Chain,
        of: MicroStep,
        layers: LayerGradients,
        adding: Adding,
        part: GradientPart,
    ) -> Result<Vec<Contribution<DeviceTensor>>, SpillError> {
        let mut contributions: Vec<Contribution<DeviceTensor>> = Vec::new();
        for (layer, gradients) in layers {
            let first = contributions.len();
            for (param, (at, gradient)) in chain.layers()[layer].params.iter().zip(gradients).enumerate() {
                let adds_up = adding != Adding::Nothing && sums::adds_up(chain, layer, param);
                if !part.has(adds_up) || !chain.buffers()[at.buffer].trained {
                    continue;
                }
                let params = &chain.buffers()[at.buffer].params;
                let of_buffer = contributions[first..].iter().position(|c| c.buffer == at.buffer);
                let index = of_buffer.map_or(contributions.len(), |i| first + i);
                if of_buffer.is_none() {
                    let gradients = params.iter().map(|_| None).collect();
                    // Accumulation starts at the first microbatch.
                    let first = if adds_up { 0 } else { of.microbatch };
                    contributions.push(Contribution { layer, buffer: at.buffer, first, gradients });
                }
                let Some(gradient) = gradient else { continue };
                let expected = params[at.slot].len * chain.buffers()[at.buffer].float.bytes();
                let (expected, found) = (expected as u64, gradient.len_bytes());
                if expected != found {
                    let link = self.device.manager.link().name().to_owned();
                    return Err(LinkError::Length { link, expected, found }.into());
                }
                contributions[index].gradients[at.slot] = Some(gradient);
            }
        }
        Ok(contributions)
    }
}
