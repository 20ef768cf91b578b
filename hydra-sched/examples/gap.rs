//! Quick look (temporary).
use hydra_sched::*;
fn main() {
    for (name, draw, prefetch) in [
        ("plain", Draw::default(), false),
        ("plain-prefetch", Draw::default(), true),
        ("promote", Draw { promote_s: 0.05, ..Draw::default() }, true),
        ("promote+opt", Draw { promote_s: 0.05, optimizer: 0.05, ..Draw::default() }, true),
    ] {
        for kind in PolicyKind::ALL {
            let t = std::time::Instant::now();
            let mut tasks = 0;
            let mut gaps: Vec<(f64, u64)> = (0..200).map(|seed| {
                let w = draw.workload(seed);
                let r = simulate(&w, &mut *kind.build(seed), SimulationOptions { prefetch, record: false }).unwrap();
                tasks += r.shard_tasks;
                (r.gap(), seed)
            }).collect();
            gaps.sort_by(|a, b| a.0.total_cmp(&b.0));
            println!("{name:16} {kind:20} median {:.4} p90 {:.4} p99 {:.4} worst {:.4} (seed {}) tasks {tasks} {:.0} ns/task", gaps[100].0, gaps[180].0, gaps[198].0, gaps[199].0, gaps[199].1, t.elapsed().as_nanos() as f64 / tasks as f64);
        }
    }
}
