use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;

use super::*;
use crate::policy::PolicyKind;
use crate::program::ShardTask;
use crate::simulator::conformance::any_workload;
use crate::simulator::{ShardCost, TaskCost};

/// A shard task starts after the promotion that its device made for it, and after its own when it was
/// committed to.
fn parameters_are_there(workload: &Workload, result: &Simulation) -> TestCaseResult {
    let mut promoted: Vec<Option<&ScheduleSpan>> = vec![None; workload.devices.len()];
    let mut saved = 0;
    for span in &result.spans {
        let what = (span.task, span.minibatch, span.shard);
        if let Occupation::Promote { bytes } = span.what {
            prop_assert_eq!(promoted[span.device].replace(span), None, "it has one place for what is next");
            let least_s = workload.promote_part_s(span.device, span.task, span.shard, bytes);
            prop_assert!(span.end_s >= span.start_s + least_s * (1.0 - 1e-12));
            prop_assert!(span.start_s >= workload.devices[span.device].latency_s);
        } else if let Some(promotion) = promoted[span.device].take() {
            prop_assert_eq!((promotion.task, promotion.minibatch, promotion.shard), what);
            prop_assert!(span.start_s >= promotion.end_s, "{:?} before {:?}", span, promotion);
        } else {
            prop_assert!(workload.devices[span.device].keeps_copies);
            saved += 1;
        }
    }
    prop_assert_eq!(saved, result.promotions_saved);
    Ok(())
}

/// By task, shard and minibatch: the earliest time at which the master weights are final. The host optimizer
/// updates the shards of earlier backwards in the order of their ends, if gradients arrive without delay.
fn finals(workload: &Workload, compute: &[&ScheduleSpan]) -> BTreeMap<(usize, usize, u64), f64> {
    let mut last: BTreeMap<(usize, usize, u64), &ScheduleSpan> = BTreeMap::new();
    let backward = |span: &&&ScheduleSpan| span.what == Occupation::Compute(ShardTaskKind::Backward);
    for span in compute.iter().filter(backward) {
        let of = last.entry((span.task, span.shard, span.minibatch)).or_insert(span);
        *of = if span.end_s > of.end_s { span } else { of };
    }
    let mut backwards: Vec<&ScheduleSpan> = last.into_values().collect();
    backwards.sort_by(|a, b| a.end_s.total_cmp(&b.end_s));
    let shards = workload.tasks.iter().flat_map(|task| &task.shards);
    let queues = shards.clone().all(|shard| shard.gradients_s == 0.0);
    let (mut host_s, mut final_s) = (0.0f64, BTreeMap::new());
    for same in backwards.chunk_by(|a, b| a.end_s == b.end_s) {
        let before_s = if queues { host_s.max(same[0].end_s) } else { same[0].end_s };
        for span in same {
            let task = &workload.tasks[span.task];
            let stepped_s = if task.step_s() > 0.0 { before_s + task.step_s() } else { span.end_s };
            let down_s = task.shards[span.shard].gradients_s;
            final_s.insert((span.task, span.shard, span.minibatch), down_s + stepped_s + task.step_wait_s);
        }
        let steps_s: f64 = same.iter().map(|span| workload.tasks[span.task].step_s()).sum();
        host_s = if steps_s > 0.0 { before_s + steps_s } else { host_s };
    }
    final_s
}

/// The output of a shard task for the next one of its microbatch pass is on the host, unless that follows on
/// the same device.
fn inputs_are_there(
    task: &TaskCost,
    own: &[&ScheduleSpan],
    compute: &[&ScheduleSpan],
    prefetch: bool,
) -> TestCaseResult {
    let program = task.program();
    let tasks: Vec<_> = task.tasks_from(0).collect();
    for (place, of) in tasks.iter().enumerate().filter(|(_, of)| !program.begins_pass(of)) {
        let same_pass = |before: &ShardTask| before.microbatch_pass() == of.microbatch_pass();
        let made = tasks[..place].iter().rposition(same_pass).unwrap();
        prop_assert_eq!(program.following(tasks[made].kind, tasks[made].shard), Some((of.kind, of.shard)));
        let pair = [own[made], own[place]];
        let on_device = compute.iter().filter(|span| span.device == pair[0].device);
        let mut later = on_device.skip_while(|span| !std::ptr::eq(**span, pair[0])).skip(1);
        let follows = later.next().is_some_and(|span| std::ptr::eq(*span, pair[1]));
        let down_s = pair[0].end_s + task.shards[pair[0].shard].download_s;
        prop_assert!(prefetch && follows || pair[1].start_s >= down_s, "{:?} {}", pair, down_s);
    }
    Ok(())
}

/// At most one microbatch group per replica at a time, and no part of a minibatch or an evaluation before the
/// end of the previous one.
fn replicas_are_kept(task: &TaskCost, own: &[&ScheduleSpan]) -> TestCaseResult {
    let what = |span: &&ScheduleSpan| (span.minibatch, format!("{:?}", span.what), span.shard);
    let expected = |of: ShardTask| (of.step as u64, format!("{:?}", Occupation::Compute(of.kind)), of.shard);
    let (mut found, mut expected): (Vec<_>, Vec<_>) =
        (own.iter().map(what).collect(), task.tasks_from(0).map(expected).collect());
    found.sort();
    expected.sort();
    prop_assert_eq!(found, expected);
    let computes = |s: f64| own.iter().filter(|of| of.start_s <= s && s < of.end_s).count();
    prop_assert!(
        own.iter().all(|span| span.start_s == span.end_s || computes(span.start_s) <= task.replicas)
    );
    let trains = |span: &ScheduleSpan| span.what != Occupation::Compute(ShardTaskKind::Evaluate);
    let mut places: BTreeMap<(u64, bool), (f64, f64)> = BTreeMap::new();
    for span in own {
        let (start_s, end_s) = places.entry((span.minibatch, trains(span))).or_insert((f64::INFINITY, 0.0));
        (*start_s, *end_s) = (start_s.min(span.start_s), end_s.max(span.end_s));
    }
    let places: Vec<_> = places.into_values().collect();
    prop_assert!(places.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{places:?}");
    Ok(())
}

/// Models within a minibatch fit on the host together with the master weights of all that have not ended.
fn host_has_room(workload: &Workload, compute: &[&ScheduleSpan]) -> TestCaseResult {
    let Some(host) = workload.host_bytes else { return Ok(()) };
    let (mut minibatches, mut ended_s) = (BTreeMap::new(), vec![0.0f64; workload.tasks.len()]);
    for span in compute {
        ended_s[span.task] = ended_s[span.task].max(span.end_s);
        if span.what != Occupation::Compute(ShardTaskKind::Evaluate) {
            let of = minibatches.entry((span.task, span.minibatch)).or_insert((span.start_s, span.end_s));
            *of = (of.0.min(span.start_s), of.1.max(span.end_s));
        }
    }
    for (start_s, _) in minibatches.values() {
        let within = minibatches.iter().filter(|(_, of)| of.0 <= *start_s && *start_s < of.1);
        let within: u64 = within.map(|((task, _), _)| workload.tasks[*task].active_bytes).sum();
        let tasks = workload.tasks.iter().zip(&ended_s).filter(|(_, ended_s)| **ended_s > *start_s);
        let masters: u64 = tasks.map(|(task, _)| task.masters_bytes).sum();
        prop_assert!(within + masters <= host, "{} and {} of {}", within, masters, host);
    }
    Ok(())
}

/// Devices never use more processors than there are, and except during host steps nothing is slower than
/// alone.
fn processors_are_shared(workload: &Workload, compute: &[&ScheduleSpan]) -> TestCaseResult {
    let processors = workload.processors.unwrap_or(usize::MAX);
    let mut times = Vec::new();
    for span in compute {
        let Occupation::Compute(kind) = span.what else { continue };
        let threads = workload.devices[span.device].threads.min(processors) as i64;
        let seconds = workload.seconds(span.task, span.minibatch, kind, span.shard);
        let seconds = seconds / workload.devices[span.device].speed;
        let took_s = span.end_s - span.start_s;
        prop_assert!(took_s >= seconds - 1e-6, "{:?}: {} of {}", span, took_s, seconds);
        let shares = workload.processors.is_some() && threads > 0 && workload.optimizer_threads > 0;
        prop_assert!(shares || took_s <= seconds + 1e-6, "{:?}: {} of {}", span, took_s, seconds);
        times.extend([(span.start_s, threads), (span.end_s, -threads)]);
    }
    // Ends come before starts at the same time.
    times.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let mut on = 0;
    for (at_s, threads) in times {
        on += threads;
        prop_assert!(
            workload.processors.is_none_or(|processors| on <= processors as i64),
            "{} at {}",
            on,
            at_s
        );
    }
    Ok(())
}

/// Returns whether these spans do not overlap.
fn in_turn<'a>(spans: impl Iterator<Item = &'a ScheduleSpan>) -> bool {
    let spans: Vec<&ScheduleSpan> = spans.collect();
    spans.windows(2).all(|pair| pair[0].end_s <= pair[1].start_s)
}

proptest! {
    /// Everything runs, in order, one shard task of a replica and of a device at a time, with final
    /// parameters on the device, and never faster than the bounds.
    #[test]
    fn every_schedule_keeps_the_rules(workload in any_workload(), prefetch: bool, seed: u64) {
        for kind in PolicyKind::ALL {
            let mut policy = kind.build(seed);
            let options = SimulationOptions { prefetch, record: true };
            let result = simulate(&workload, &mut *policy, options).unwrap();
            prop_assert_eq!(result.shard_tasks, workload.shard_tasks());
            prop_assert_eq!(result.promotions + result.promotions_saved, result.shard_tasks);
            prop_assert!(result.makespan_s >= result.bounds.best_s() * (1.0 - 1e-12));
            prop_assert!(result.makespan_s <= workload.at_most_s() * (1.0 + 1e-12));
            prop_assert!(result.spans.iter().all(|span| span.start_s <= span.end_s));
            let compute: Vec<&ScheduleSpan> = result.spans.iter().filter(|s| !matches!(s.what, Occupation::Promote { .. })).collect();
            parameters_are_there(&workload, &result)?;
            prop_assert_eq!(result.reads.iter().map(Vec::len).sum::<usize>() as u64, result.shard_tasks);
            let fewest = result.fewest_bytes(&workload);
            let whole = !workload.tasks.iter().flat_map(|task| &task.shards).any(ShardCost::is_in_parts);
            let stated = workload.devices.iter().all(|of| of.memory_bytes.is_some());
            prop_assert_eq!(fewest.is_some(), whole && stated);
            prop_assert!(fewest <= result.promoted_bytes, "{:?} {:?}", fewest, result.promoted_bytes);
            host_has_room(&workload, &compute)?;
            processors_are_shared(&workload, &compute)?;
            let final_s = finals(&workload, &compute);
            for (index, task) in workload.tasks.iter().enumerate() {
                let own: Vec<&ScheduleSpan> = compute.iter().copied().filter(|s| s.task == index).collect();
                replicas_are_kept(task, &own)?;
                if task.replicas == 1 {
                    let order: Vec<_> = own.iter().map(|s| (s.minibatch, s.what, s.shard)).collect();
                    let expected: Vec<_> = task
                        .tasks_from(0)
                        .map(|of| (of.step as u64, Occupation::Compute(of.kind), of.shard))
                        .collect();
                    prop_assert_eq!(order, expected);
                    prop_assert!(in_turn(own.iter().copied()));
                    inputs_are_there(task, &own, &compute, prefetch)?;
                }
                prop_assert!(own[0].start_s >= task.arrival_s);
                for span in &own {
                    let trained = span.minibatch.checked_sub(1).filter(|_| span.shard >= task.first_trained);
                    let stepped = trained.map(|before| (index, span.shard, before));
                    let final_s = stepped.map_or(0.0, |of| final_s[&of]);
                    prop_assert!(span.start_s >= final_s - 1e-9, "{span:?} before {final_s}");
                }
            }
            for device in 0..workload.devices.len() {
                prop_assert!(in_turn(compute.iter().copied().filter(|s| s.device == device)));
            }
            let promotes = || result.spans.iter().filter(|s| matches!(s.what, Occupation::Promote { .. }));
            let links = if workload.shared_link { 1 } else { workload.devices.len() };
            for link in 0..links {
                prop_assert!(in_turn(promotes().filter(|s| links == 1 || s.device == link)));
            }
        }
    }

    #[test]
    fn the_same_seed_gives_the_same_schedule(workload in any_workload(), seed: u64) {
        for kind in PolicyKind::ALL {
            let options = SimulationOptions { prefetch: true, record: true };
            let once = simulate(&workload, &mut *kind.build(seed), options).unwrap();
            prop_assert_eq!(&once, &simulate(&workload, &mut *kind.build(seed), options).unwrap());
            let silent = SimulationOptions { record: false, ..options };
            let silent = simulate(&workload, &mut *kind.build(seed), silent).unwrap();
            prop_assert_eq!(Simulation { spans: Vec::new(), reads: Vec::new(), ..once }, silent);
        }
    }
}
