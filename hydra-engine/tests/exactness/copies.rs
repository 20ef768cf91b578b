//! Reuse of promotions: the parameter cache, and microbatch groups of several microbatches. They save traffic, and
//! change no bit.

use crate::common::{Settings, adamw, config, tokens};
use hydra_core::{ByteSize, Chain, Length, TrainSpec};
use hydra_engine::{EngineError, RunReport, TrainTask, plain};
use hydra_models::gpt2::{self, Gpt2Config};
use proptest::prelude::*;
use std::sync::{Arc, OnceLock};

/// A GPT-2 whose memory is mostly parameters.
fn chain() -> Arc<Chain> {
    let wide = Gpt2Config { n_embd: 96, n_layer: 4, ..config() };
    Arc::new(gpt2::chain(&wide, None).expect("a chain"))
}

/// Minibatches of four microbatches; the last one of an epoch is smaller.
fn spec() -> TrainSpec {
    TrainSpec { length: Length::Steps(4), accumulate: 4, eval_every: Some(2), ..adamw(4) }
}

fn task() -> TrainTask {
    TrainTask::new("task", chain(), tokens(11, 1), spec()).validation(tokens(5, 3)).test(tokens(4, 2))
}

fn cut() -> Settings {
    Settings { cuts: Some(vec![1, 2, 3, 4]), ..Settings::default() }
}

/// The smallest device memory for this task with this many threads, and its permanent allocations.
fn least_for(task: TrainTask, threads: usize) -> [u64; 2] {
    let mut run = Settings { threads, ..Settings::default() }.orchestrator();
    run.submit(task).expect("a task");
    let run = run.admit().expect("it fits");
    let plan = &run.admission().tasks[0].plan;
    [plan.min_device_memory_bytes, plan.standing_bytes]
}

/// Device memory for two shards of this task at a time with this many threads, and little more.
fn tight_for(task: TrainTask, threads: usize) -> ByteSize {
    let [least, _] = least_for(task, threads);
    ByteSize(least + least / 64)
}

fn tight() -> ByteSize {
    static TIGHT: OnceLock<ByteSize> = OnceLock::new();
    *TIGHT.get_or_init(|| tight_for(task(), 1))
}

/// Device memory for two shards of the largest task of the drawn settings, with the most threads.
fn tight_for_all() -> ByteSize {
    static TIGHT: OnceLock<ByteSize> = OnceLock::new();
    let whole = || TrainTask::new("task", chain(), tokens(11, 1), adamw(3));
    *TIGHT.get_or_init(|| tight_for(whole(), 2))
}

/// The results that a run must not change.
fn outcome(report: &RunReport) -> String {
    let task = &report.tasks[0];
    format!(
        "{:?} {:?} {:?} {:?} {:?} {:?}",
        task.error, task.losses, task.validations, task.validation, task.test, task.weights_sha256
    )
}

fn reference() -> &'static str {
    static OUTCOME: OnceLock<String> = OnceLock::new();
    OUTCOME.get_or_init(|| {
        outcome(&Settings { cache: false, microbatch_group: Some(1), ..Settings::default() }.run(task()))
    })
}

#[test]
fn copies_and_groups_equal_the_plain_loop() {
    let spec = TrainSpec { eval_every: None, ..spec() };
    let plain = plain::train(&chain(), tokens(11, 1).as_ref(), &spec).expect("the plain loop");
    for microbatch_group in [None, Some(1), Some(2), Some(3), Some(4)] {
        for memory in [tight(), Settings::default().memory] {
            let cuts = if memory == tight() { None } else { cut().cuts };
            let settings = Settings { microbatch_group, memory, cuts, ..Settings::default() };
            let report = settings.task(TrainTask::new("task", chain(), tokens(11, 1), spec.clone()));
            assert_eq!(report.error, None, "{settings:?}");
            assert_eq!(
                (report.losses, report.weights_sha256),
                (plain.losses.clone(), Some(plain.weights_sha256.clone())),
                "{settings:?}"
            );
        }
    }
}

#[test]
fn what_has_room_is_promoted_once_for_each_version_of_it() {
    let report = cut().run(task());
    assert_eq!(outcome(&report), reference());
    let parameters: u64 = chain().buffers().iter().map(|buffer| buffer.bytes()).sum();
    let stepped = 4 * parameters;
    // The initial weights, and those after each step; the best ones are restored before the last evaluation.
    let moved = report.transfers.parameter_bytes;
    assert!((stepped..=stepped + 2 * parameters).contains(&moved), "{moved} of {parameters}");
    assert!(report.transfers.cached_bytes > moved);
    let without = Settings { cache: false, ..cut() }.run(task());
    assert_eq!((outcome(&without), without.transfers.cached_bytes), (reference().to_owned(), 0));
    assert_eq!(without.transfers.parameter_bytes, moved + report.transfers.cached_bytes);
}

#[test]
fn a_group_promotes_each_shard_twice_a_minibatch() {
    let spec = TrainSpec { eval_every: None, length: Length::Steps(2), shuffle: false, ..spec() };
    let run = |microbatch_group| {
        let task = TrainTask::new("task", chain(), tokens(8, 1), spec.clone()).initial_validation(false);
        Settings { memory: tight(), microbatch_group: Some(microbatch_group), ..Settings::default() }
            .run(task)
    };
    let [one, four] = [1, 4].map(run);
    assert_eq!(one.tasks[0].weights_sha256, four.tasks[0].weights_sha256);
    assert!(one.tasks[0].plan.shards > 2, "{:?}", one.tasks[0].plan);
    let [each, together] = [&one, &four].map(|report| report.transfers.parameter_bytes);
    let parameters: u64 = chain().buffers().iter().map(|buffer| buffer.bytes()).sum();
    assert!(
        together <= 2 * 2 * parameters && 5 * together <= 2 * each,
        "{together} of {each}, of {parameters}"
    );
}

#[test]
fn gradients_of_a_group_add_up_on_the_device() {
    let spec = TrainSpec { eval_every: None, length: Length::Steps(2), shuffle: false, ..spec() };
    let run = |microbatch_group| {
        let task = TrainTask::new("task", chain(), tokens(8, 1), spec.clone());
        Settings { microbatch_group: Some(microbatch_group), ..cut() }.run(task)
    };
    let [one, two, four] = [1, 2, 4].map(run);
    for other in [&two, &four] {
        assert_eq!(one.tasks[0].weights_sha256, other.tasks[0].weights_sha256);
        assert_eq!(one.tasks[0].losses, other.tasks[0].losses);
    }
}

#[test]
fn a_minibatch_moves_the_bytes_that_are_predicted() {
    let spec = TrainSpec { eval_every: None, length: Length::Steps(3), shuffle: false, ..spec() };
    // Predicted and moved bytes of boundaries, in both directions; moved ones include the inputs of the chain.
    let moved = |microbatch_group: usize| {
        let admitted = || {
            let task = TrainTask::new("task", chain(), tokens(48, 1), spec.clone());
            let task = task.cuts(vec![1, 2, 3, 4]).microbatch_group(microbatch_group);
            let mut run = cut().orchestrator();
            run.submit(task).expect("a task");
            run.admit().expect("it fits")
        };
        let forecast = admitted().forecast().expect("rates").expect("a forecast");
        let predicted = &forecast.tasks[0];
        let moved = admitted().start().expect("a run").transfers;
        let gradients = 3 * predicted.gradient_down_bytes;
        assert_eq!(moved.demoted_bytes, gradients + 3 * predicted.boundary_down_bytes);
        let others = moved.promoted_bytes - moved.parameter_bytes + moved.demoted_bytes - gradients;
        [3 * (predicted.boundary_up_bytes + predicted.boundary_down_bytes), others]
    };
    // Without a group, how many boundaries stay on the device depends on when the next shard is claimed.
    let [two, four] = [2, 4].map(moved);
    assert_eq!(two, four);
}

#[test]
fn shards_are_short_enough_for_gradients_to_add_up() {
    let spec = TrainSpec { eval_every: None, length: Length::Steps(2), shuffle: false, ..spec() };
    let [least, standing] = least_for(task(), 1);
    let memory = ByteSize(standing + (least - standing) * 5 / 2);
    let run = |microbatch_group| {
        let task = TrainTask::new("task", chain(), tokens(8, 1), spec.clone());
        Settings { memory, microbatch_group, ..Settings::default() }.run(task)
    };
    let [each, sums] = [Some(1), None].map(run);
    let [one, four] = [&each, &sums].map(|report| &report.tasks[0]);
    assert_eq!((&one.losses, &one.weights_sha256), (&four.losses, &four.weights_sha256));
    assert!(four.plan.shards > one.plan.shards && one.plan.shards > 1, "{:?} {:?}", four.plan, one.plan);
    // Three of a minibatch's four gradients stay on the device, except those of the tied table; boundaries are
    // downloaded instead.
    let [each, sums] = [each, sums].map(|report| report.transfers.demoted_bytes);
    assert!(2 * sums < each, "{sums} of {each}");
}

#[test]
fn shards_are_longer_where_the_host_has_no_room_for_their_boundaries() {
    let wide = || TrainTask::new("task", chain(), tokens(64, 1), TrainSpec { accumulate: 4, ..adamw(64) });
    let [least, standing] = least_for(wide(), 1);
    let memory = ByteSize(standing + (least - standing) * 2);
    let admit = |microbatch_group: Option<usize>, host: u64| {
        let task =
            microbatch_group.map_or_else(wide, |microbatch_group| wide().microbatch_group(microbatch_group));
        let mut run = Settings { memory, ..Settings::default() }.orchestrator().host_memory(ByteSize(host));
        run.submit(task).expect("a task");
        run.admit().map(|run| run.admission().tasks[0].clone())
    };
    let roomy = admit(None, 1 << 30).expect("it fits");
    let plain = admit(Some(1), 1 << 30).expect("it fits");
    let (mut least, mut most) = (0_u64, 1 << 30);
    while most - least > 1024 {
        let middle = least.midpoint(most);
        *(if admit(Some(1), middle).is_ok() { &mut most } else { &mut least }) = middle;
    }
    let tight = admit(None, most).expect("it fits");
    assert_eq!(tight.plan.cut_points, plain.plan.cut_points);
    assert!(roomy.plan.shards.len() > plain.plan.shards.len() && roomy.microbatch_group.microbatches == 4);
}

#[test]
fn groups_are_chosen_by_what_they_save_and_within_what_there_is() {
    let admitted = |settings: Settings, host: Option<u64>| {
        let mut run = settings.orchestrator();
        if let Some(bytes) = host {
            run = run.host_memory(ByteSize(bytes));
        }
        run.submit(task()).expect("a task");
        run.admit()
            .map(|run| (run.admission().tasks[0].microbatch_group, run.admission().host_admitted_bytes))
    };
    let spilled = Settings { memory: tight(), ..Settings::default() };
    let (microbatch_group, bytes) = admitted(spilled.clone(), None).expect("it fits");
    assert_eq!(
        (microbatch_group.microbatches, microbatch_group.batches),
        (4, 4),
        "a fifth batch of an evaluation would save nothing"
    );
    assert_eq!(admitted(cut(), None).expect("it fits").0.microbatches, 4, "one sum of gradients goes down");
    assert_eq!(
        admitted(Settings { cache: false, ..spilled.clone() }, None).expect("it fits").0.microbatches,
        1
    );
    // With less host memory microbatch groups are shorter, down to one microbatch pass.
    let length = |host: u64| {
        admitted(spilled.clone(), Some(host)).map(|(microbatch_group, _)| microbatch_group.microbatches)
    };
    let (mut least, mut most) = (0, bytes);
    while most - least > 1024 {
        let middle = least.midpoint(most);
        *(if length(middle).is_ok() { &mut most } else { &mut least }) = middle;
    }
    let mut lengths: Vec<usize> = (0..24).map(|more| length(most + (more << 16)).expect("it fits")).collect();
    lengths.dedup();
    assert_eq!(lengths, [1, 2, 4]);
}

#[test]
fn a_group_that_no_minibatch_has_is_refused() {
    for microbatch_group in [0, 5] {
        let mut run = Settings::default().orchestrator();
        run.submit(task().microbatch_group(microbatch_group)).expect("a task");
        let error = run.admit().expect_err("no such microbatch group");
        let EngineError::Task { source, .. } = &error else { panic!("{error:?}") };
        let expected = format!(
            "a microbatch group must have from 1 to 4 microbatches (those of a minibatch), got {microbatch_group}"
        );
        assert_eq!(source.to_string(), expected);
    }
}

prop_compose! {
    fn settings()(
        devices in 1usize..=3,
        threads in 1usize..=2,
        memory in 0_u64..=4,
        microbatch_group in prop::option::of(1usize..=4),
        cache: bool,
        prefetch: bool,
        others in 0usize..=2,
    ) -> Settings {
        let memory = ByteSize(tight_for_all().bytes() * (16 + memory) / 16);
        Settings { devices, threads, memory, microbatch_group, cache, prefetch, others, ..Settings::default() }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, ..ProptestConfig::default() })]
    #[test]
    fn no_copy_and_no_group_changes_a_bit(settings in settings()) {
        prop_assert_eq!(outcome(&settings.run(task())), reference());
    }
}
