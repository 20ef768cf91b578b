//! Draws initial weights while models are measured, on cores that pilot passes leave idle and in memory that the
//! masters will take anyway.
//!
//! May touch: chains, and their sources. Never: a device or a store.
//! On a miss the caller computes the same values itself.

use crate::error::guarded;
use crate::train_task::TrainTask;
use crate::weights::initial_buffer;
use hydra_core::Chain;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

/// The initial values drawn so far, by task name and buffer.
#[derive(Debug, Default)]
pub(crate) struct AheadOfTimeInit(Mutex<BTreeMap<(String, usize), Vec<f32>>>);

impl AheadOfTimeInit {
    /// Removes and returns the values of a buffer.
    pub(crate) fn take(&self, task: &str, buffer: usize) -> Option<Vec<f32>> {
        let mut values = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        values.remove(&(task.to_owned(), buffer))
    }

    fn put(&self, task: &str, buffer: usize, values: Vec<f32>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert((task.to_owned(), buffer), values);
    }

    /// Copies the values of a buffer.
    fn copied(&self, task: &str, buffer: usize) -> Option<Vec<f32>> {
        let values = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        values.get(&(task.to_owned(), buffer)).cloned()
    }
}

/// A task whose values are drawn. Tasks with the same chain and seed have the same values.
#[derive(Clone)]
struct Wanted {
    task: String,
    chain: Arc<Chain>,
    seed: u64,
}

/// A thread that draws initial values until it is ended or dropped.
pub(crate) struct Drawing {
    values: Arc<AheadOfTimeInit>,
    ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drawing {
    /// Starts drawing the initial values of tasks that start untrained, on `threads` threads; with 0, nothing is
    /// drawn.
    pub(crate) fn begin(tasks: &[TrainTask], threads: usize) -> Self {
        let (values, ended) = <(Arc<AheadOfTimeInit>, Arc<AtomicBool>)>::default();
        let fresh = tasks.iter().filter(|task| task.start.weights().is_none());
        let wanted: Vec<Wanted> = fresh
            .map(|task| Wanted { task: task.name.clone(), chain: task.chain.clone(), seed: task.spec.seed })
            .collect();
        let pool = move || rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        let work = {
            let (values, ended) = (values.clone(), ended.clone());
            // An error here occurs again, and is reported, when the task draws the values itself.
            move || drop(pool().map(|pool| pool.install(|| draw(&wanted, &values, &ended))))
        };
        let begun = (threads > 0)
            .then(|| std::thread::Builder::new().name("hydra-init-ahead".to_owned()).spawn(work));
        Self { values, ended, thread: begun.and_then(Result::ok) }
    }

    /// Ends after the current buffer and returns the values so far.
    pub(crate) fn end(mut self) -> Arc<AheadOfTimeInit> {
        self.stop();
        std::mem::take(&mut self.values)
    }

    fn stop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        // The thread does not panic: calls of sources are guarded.
        self.thread.take().map(JoinHandle::join).into_iter().for_each(drop);
    }
}

impl Drop for Drawing {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Draws the trained buffers one after another, until it is ended or one fails. Frozen buffers are read when
/// they are stored, and once for all tasks that share them unless their files change.
fn draw(wanted: &[Wanted], values: &AheadOfTimeInit, ended: &AtomicBool) {
    for (index, Wanted { task, chain, seed }) in wanted.iter().enumerate() {
        let same = |other: &&Wanted| Arc::ptr_eq(&other.chain, chain) && other.seed == *seed;
        let first = wanted[..index].iter().find(same);
        let trained = |buffer: &usize| chain.buffers()[*buffer].trained;
        for buffer in (0..chain.buffers().len()).filter(trained) {
            if ended.load(Ordering::Relaxed) {
                return;
            }
            let known = first.and_then(|first| values.copied(&first.task, buffer));
            let drawn = || guarded("drawing initial weights", || Ok(initial_buffer(chain, buffer, *seed)?));
            match known.map_or_else(drawn, Ok) {
                Ok(drawn) => values.put(task, buffer, drawn),
                Err(_) => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hydra_core::{SeededInit, WeightError, WeightSource};
    use hydra_models::mlp;

    fn wanted(task: &str, chain: &Arc<Chain>, seed: u64) -> Wanted {
        Wanted { task: task.to_owned(), chain: chain.clone(), seed }
    }

    fn drawn(wanted: &[Wanted]) -> AheadOfTimeInit {
        let values = AheadOfTimeInit::default();
        draw(wanted, &values, &AtomicBool::new(false));
        values
    }

    #[test]
    fn what_is_drawn_early_is_what_a_task_begins_with_and_is_taken_once() {
        let chain = Arc::new(mlp::chain(&[2, 16, 16], 3).unwrap());
        let wanted = [wanted("a", &chain, 1), wanted("b", &chain, 1), wanted("c", &chain, 2)];
        let values = drawn(&wanted);
        for Wanted { task, seed, .. } in &wanted {
            for buffer in 0..chain.buffers().len() {
                let expected = initial_buffer(&chain, buffer, *seed).unwrap();
                assert_eq!(values.take(task, buffer), Some(expected), "{task}, {buffer}");
                assert_eq!(values.take(task, buffer), None, "{task}, {buffer}");
            }
        }
    }

    #[test]
    fn what_is_frozen_waits() {
        let chain = Arc::new(mlp::chain(&[2, 16, 16], 3).unwrap().training_only(&["classifier"]).unwrap());
        let values = drawn(&[wanted("a", &chain, 1)]);
        let there = (0..3).map(|buffer| values.take("a", buffer).is_some()).collect::<Vec<_>>();
        assert_eq!(there, [false, false, true]);
    }

    /// A source that fails or panics at its second buffer.
    struct Broken {
        panics: bool,
    }

    impl WeightSource for Broken {
        fn fill(&self, chain: &Chain, buffer: usize, seed: u64, out: &mut [f32]) -> Result<(), WeightError> {
            assert!(!self.panics || buffer == 0, "unreadable");
            match buffer {
                0 => SeededInit.fill(chain, buffer, seed, out),
                _ => Err(WeightError::Read { param: "out".to_owned(), source: "unreadable".into() }),
            }
        }
    }

    #[test]
    fn a_source_that_breaks_is_left_to_whoever_needs_it() {
        for panics in [false, true] {
            let linear = |inputs, outputs| {
                burn::nn::LinearConfig::new(inputs, outputs).init(&burn::tensor::Device::flex())
            };
            let builder = Chain::builder("broken").layer("in", mlp::Dense { linear: linear(2, 4) });
            let builder =
                builder.layer("out", mlp::Classifier { linear: linear(4, 3) }).weights(Broken { panics });
            let chain = Arc::new(builder.build().unwrap());
            let values = drawn(&[wanted("a", &chain, 1), wanted("b", &chain, 2)]);
            assert!(
                values.take("a", 0).is_some()
                    && values.take("a", 1).is_none()
                    && values.take("b", 0).is_none()
            );
        }
    }

    #[test]
    fn drawing_ends_when_it_is_told_and_without_a_thread_it_does_not_begin() {
        let chain = Arc::new(mlp::chain(&[2, 16, 16], 3).unwrap());
        let values = AheadOfTimeInit::default();
        draw(&[wanted("a", &chain, 1)], &values, &AtomicBool::new(true));
        assert_eq!(values.take("a", 0), None);
        assert_eq!(Drawing::begin(&[], 1).end().take("a", 0), None);
        assert!(Drawing::begin(&[], 0).thread.is_none());
    }
}
