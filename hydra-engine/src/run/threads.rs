//! The threads of a run and their channels.

use super::initial_weights::{self, InitialWeights};
use crate::device::{
    Buffer, ComputeJob, DeviceKind, DeviceSpec, DownloadJob, LogicalDevice, PromoteJob, TimeSlices, Worker,
    processors,
};
use crate::error::EngineError;
use crate::io::loader::{self, LoadJob, MAX_LOADERS};
use crate::io::writer::{self, WriterJob, WriterStores};
use crate::optimizer::{HostJob, HostOptimizer};
use crate::protocol::Reporter;
use crossbeam_channel::{Receiver, Sender, unbounded};
use hydra_spill::TierStore;
use std::sync::Arc;
use std::thread::JoinHandle;

/// The channels to one device's threads.
pub(crate) struct DeviceThreads {
    pub device: Arc<LogicalDevice>,
    pub buffer: Arc<Buffer>,
    pub promote: Sender<PromoteJob>,
    pub compute: Sender<ComputeJob>,
    pub download: Sender<DownloadJob>,
}

/// All threads of a run. Dropping the senders ends them; `join` waits for them, except for loaders that may never
/// return.
pub(crate) struct Threads {
    pub devices: Vec<DeviceThreads>,
    pub host: Sender<HostJob>,
    pub writer: Sender<WriterJob>,
    /// Stores the initial weights of tasks that start while others run.
    pub masters: Sender<InitialWeights>,
    loaders: Loaders,
    handles: Vec<JoinHandle<()>>,
}

/// The threads that read batches. An idle thread takes the next job, so a slow dataset does not delay others while a
/// thread is free.
struct Loaders {
    jobs: Sender<LoadJob>,
    queue: Receiver<LoadJob>,
    handles: Vec<JoinHandle<()>>,
}

impl Loaders {
    fn start(tasks: usize, reporter: &Reporter) -> Result<Self, EngineError> {
        let (jobs, queue) = unbounded::<LoadJob>();
        let start = |index: usize| {
            let (queue, reporter) = (queue.clone(), reporter.clone());
            spawn(format!("hydra-loader-{index}"), move || loader::run(&queue, &reporter))
        };
        let handles = (0..tasks.clamp(1, MAX_LOADERS)).map(start).collect::<Result<_, _>>()?;
        Ok(Self { jobs, queue, handles })
    }

    /// Ends the threads. Waits for them unless one is inside a dataset, which may never return. Such a thread holds
    /// the dataset until it returns and reads nothing more.
    fn end(self, reading: bool) {
        let Self { jobs, queue, handles } = self;
        drop(jobs);
        queue.try_iter().for_each(drop);
        if !reading {
            wait_for(handles);
        }
    }
}

impl Threads {
    pub(crate) fn start(
        devices: Vec<LogicalDevice>,
        tasks: usize,
        store: &Arc<dyn TierStore>,
        stores: WriterStores,
        reporter: &Reporter,
    ) -> Result<Self, EngineError> {
        let mut handles = Vec::new();
        let (host, host_jobs) = unbounded();
        let (writer, write_jobs) = unbounded();
        let threads = host_threads(devices.iter().map(|device| &device.spec), processors());
        let stepper = devices.first().map(LogicalDevice::stepper).ok_or(EngineError::NoDevice)?;
        let pool = host_pool(threads)?;
        let optimizer = HostOptimizer::new(store.clone(), pool, stepper, writer.clone(), reporter.clone());
        handles.push(spawn("hydra-optimizer".to_owned(), move || optimizer.run(&host_jobs))?);
        let write_reporter = reporter.clone();
        let write = move || writer::run(&stores, &write_jobs, &write_reporter);
        handles.push(spawn("hydra-writer".to_owned(), write)?);
        let (masters, initial_weights) = unbounded();
        let begun = reporter.clone();
        handles.push(spawn("hydra-initial-weights".to_owned(), move || {
            initial_weights::run(&initial_weights, &begun)
        })?);
        let loaders = Loaders::start(tasks, reporter)?;
        let time_slices = Arc::new(TimeSlices::new(processors()));
        let mut started = Vec::new();
        for device in devices {
            started.push(start_device(device, &time_slices, reporter, &host, &mut handles)?);
        }
        Ok(Self { devices: started, host, writer, masters, loaders, handles })
    }

    /// Queues a read of batches for the next idle thread.
    pub(crate) fn load(&self, job: LoadJob) {
        // The loaders' channel closes only with the run.
        let _ = self.loaders.jobs.send(job);
    }

    /// Ends the threads and waits for them, except for the loaders if some are `reading`.
    pub(crate) fn join(self, reading: bool) {
        let Self { devices, host, writer, masters, loaders, handles } = self;
        drop((devices, host, writer, masters));
        loaders.end(reading);
        wait_for(handles);
    }
}

fn wait_for(threads: Vec<JoinHandle<()>>) {
    // A panic in a job was already reported as the error of its task.
    threads.into_iter().for_each(|thread| drop(thread.join()));
}

/// Threads of a device in addition to its pool: one for copies in each direction.
const COPIERS: usize = 2;

/// The number of threads of the host optimizer. With CPU devices it is their number of threads, up to the number of
/// processors; with GPUs it is the processors that feeding the GPUs leaves. Results do not depend on it.
pub(super) fn host_threads<'a>(
    devices: impl Iterator<Item = &'a DeviceSpec> + Clone,
    processors: usize,
) -> usize {
    let of = |gpu: bool| devices.clone().filter(move |spec| (spec.kind != DeviceKind::Cpu) == gpu);
    let computing: usize = of(false).map(|spec| spec.threads).sum();
    let feeding: usize = of(true).map(|spec| spec.threads + COPIERS).sum();
    let rest = if feeding > 0 { processors.saturating_sub(feeding) } else { 0 };
    computing.min(processors).max(rest).max(1)
}

pub(super) fn host_pool(threads: usize) -> Result<Arc<rayon::ThreadPool>, EngineError> {
    let pool =
        rayon::ThreadPoolBuilder::new().num_threads(threads).thread_name(|i| format!("hydra-host-{i}"));
    let pool = pool.build().map_err(|error| EngineError::Worker {
        worker: "host optimizer".to_owned(),
        problem: format!("could not start its threads: {error}"),
    })?;
    Ok(Arc::new(pool))
}

fn start_device(
    device: LogicalDevice,
    time_slices: &Arc<TimeSlices>,
    reporter: &Reporter,
    host: &Sender<HostJob>,
    handles: &mut Vec<JoinHandle<()>>,
) -> Result<DeviceThreads, EngineError> {
    let device = Arc::new(device);
    let buffer = Arc::new(Buffer::new());
    let worker = Worker {
        device: device.clone(),
        buffer: buffer.clone(),
        time_slices: time_slices.clone(),
        reporter: reporter.clone(),
    };
    let (promote, promote_jobs) = unbounded();
    let (compute, compute_jobs) = unbounded();
    let (download, download_jobs) = unbounded();
    let name = |what: &str| format!("hydra-{what}-{}", device.id.0);
    let (copier, computer, taker, host) = (worker.clone(), worker.clone(), worker, host.clone());
    handles.push(spawn(name("copy-up"), move || copier.promote(&promote_jobs))?);
    let pool = device.pool.clone();
    handles.push(spawn(name("compute"), move || pool.install(|| computer.compute(&compute_jobs)))?);
    handles.push(spawn(name("copy-down"), move || taker.download(&download_jobs, &host))?);
    Ok(DeviceThreads { device, buffer, promote, compute, download })
}

fn spawn(name: String, body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, EngineError> {
    std::thread::Builder::new().name(name.clone()).spawn(body).map_err(|error| EngineError::Worker {
        worker: name,
        problem: format!("could not be started: {error}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use hydra_core::ByteSize;

    #[test]
    fn the_optimizer_has_the_threads_of_cpu_devices_or_what_gpus_leave() {
        let cpus = DeviceSpec::cpu(ByteSize::mib(1)).threads(3).times(2);
        let gpus = DeviceSpec::cuda(0, ByteSize::mib(1)).times(2);
        assert_eq!(host_threads(cpus.iter(), 16), 6);
        assert_eq!(host_threads(gpus[..1].iter(), 16), 13);
        assert_eq!(host_threads(gpus.iter(), 16), 10);
        assert_eq!(host_threads(gpus.iter(), 2), 1);
        assert_eq!(host_threads(cpus.iter().chain(&gpus), 8), 6);
        assert_eq!(host_threads(cpus.iter(), 4), 4);
    }
}
