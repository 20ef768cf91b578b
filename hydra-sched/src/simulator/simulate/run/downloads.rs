//! Downloads from devices to the host: outputs for later shard tasks, and gradients for the host optimizer.

use std::collections::VecDeque;

use super::{Claim, SimulatedEvent, SimulatedRun};
use crate::policy::claimable::ordered;
use crate::program::ShardTask;

/// The downloads of a device, which run in sequence.
#[derive(Default)]
pub(super) struct Downloads {
    queue: VecDeque<Download>,
    /// The time at which all of them are done.
    free_s: f64,
}

struct Download {
    end_s: f64,
    bytes: u64,
    /// The model and the last of this many backwards, whose gradients are all on the host at the end.
    gradients: Option<((usize, ShardTask), u64)>,
}

impl SimulatedRun<'_> {
    /// Downloads the output of a shard task to the host.
    pub(super) fn download_output(&mut self, device: usize, claim: &Claim, bytes: u64) {
        let Claim { model, replica, task, .. } = *claim;
        let output_s = self.queue_download(device, self.workload.tasks[model].shards[task.shard].download_s);
        self.leaves(device, bytes, false);
        self.push_download(device, Download { end_s: output_s, bytes, gradients: None });
        if self.models[model].made(replica, &task, output_s) && output_s > self.now_s {
            self.at(output_s, SimulatedEvent::Final { model });
        }
    }

    /// Downloads gradients of `bytes` bytes, after which all gradients of this many backwards are on the
    /// host.
    pub(super) fn download_gradients(
        &mut self,
        device: usize,
        (model, task): (usize, ShardTask),
        bytes: u64,
        backwards: u64,
    ) {
        let cost = &self.workload.tasks[model].shards[task.shard];
        let all = cost.working.gradients;
        let part = if all == 0 { 1.0 } else { bytes as f64 / all as f64 };
        let end_s = self.queue_download(device, cost.gradients_s * part);
        self.leaves(device, bytes, false);
        self.push_download(device, Download { end_s, bytes, gradients: Some(((model, task), backwards)) });
    }

    /// Returns the end of a download that takes this long, after all queued ones; a download of zero duration
    /// is never queued.
    fn queue_download(&mut self, device: usize, seconds: f64) -> f64 {
        let downloads = &mut self.devices[device].downloads;
        if seconds == 0.0 {
            return self.now_s;
        }
        downloads.free_s = downloads.free_s.max(self.now_s) + seconds;
        downloads.free_s
    }

    fn push_download(&mut self, device: usize, download: Download) {
        if download.end_s <= self.now_s {
            return self.downloaded_one(device, download);
        }
        self.at(download.end_s, SimulatedEvent::Downloaded { device });
        self.devices[device].downloads.queue.push_back(download);
    }

    /// Ends downloads of a device: shard tasks that wait for memory there may start.
    pub(super) fn downloaded(&mut self, device: usize) {
        let now_s = ordered(self.now_s);
        let is_over = |download: &mut Download| ordered(download.end_s) <= now_s;
        while let Some(download) = self.devices[device].downloads.queue.pop_front_if(is_over) {
            let model = download.gradients.map(|((model, _), _)| model);
            self.downloaded_one(device, download);
            model.into_iter().for_each(|model| self.release(model));
        }
        self.start(device);
        self.share_processors();
    }

    fn downloaded_one(&mut self, device: usize, download: Download) {
        self.leaves(device, download.bytes, true);
        let Some(((model, task), backwards)) = download.gradients else { return };
        if self.models[model].gave(&task, backwards) {
            self.step(device, model, task.shard);
        }
    }
}
