//! The guarantee of the default policy if one model is longer than an even share of all work.

use hydra_sched::{Draw, PolicyKind, SimulationOptions, simulate};

/// Gaps to the lower bound under default options, ascending.
fn gaps(draw: Draw, count: usize, kind: PolicyKind) -> Vec<f64> {
    let gap = |(_, workload)| {
        let run = simulate(&workload, &mut *kind.build(0), SimulationOptions::default());
        run.expect("a run").gap()
    };
    let mut gaps: Vec<f64> = draw.with_a_long_model().take(count).map(gap).collect();
    gaps.sort_by(f64::total_cmp);
    gaps
}

/// Twelve workloads on few devices: the figures of `hydra-bench/runs/sched-tails`.
#[test]
fn twelve_workloads_end_near_their_bounds() {
    let of = |kind| gaps(Draw::few_devices(), 12, kind);
    let (default, eager) = (of(PolicyKind::default()), of(PolicyKind::ShardedLrtfEager));
    assert!(default[11] <= 1.0032, "{default:?}");
    assert!(eager[11] > 1.1, "the drawn workloads distinguish the policies: {eager:?}");
}

/// Ten times as many, on few devices and on many, where the steps of short models delay the long one's.
#[test]
fn few_of_many_workloads_end_further_away() {
    let full = Draw { promote_s: 0.05, optimizer: 0.05, ..Draw::default() };
    for (draw, within, worst) in
        [(Draw::few_devices(), 119, 1.0126), (full, 115, 1.0547), (Draw::default(), 120, 1.0001)]
    {
        let gaps = gaps(draw, 120, PolicyKind::default());
        assert!(gaps[within - 1] <= 1.01 && gaps[119] <= worst, "{draw:?}: {gaps:?}");
    }
}
