//! `hydra step` on the built program: its JSON and its refusals.

use crate::common::{fails, says};
use serde_json::Value;

const PARTS: [&str; 9] = [
    "matmul",
    "attention",
    "norm",
    "activation",
    "embedding",
    "head_and_loss",
    "optimizer",
    "transfer",
    "other",
];

fn step(arguments: &[&str]) -> Value {
    let base = ["step", "--json", "--context", "16", "--batch", "2"];
    let out = says(&[&base[..], arguments].concat());
    assert_eq!(out.lines().count(), 1, "one line: {out}");
    serde_json::from_str(&out).unwrap()
}

#[test]
fn a_step_of_adapters_moves_the_bits_of_its_base() {
    let step = "step --json --model bytes-llama-tiny --context 32 --batch 2 --steps 1 --warmup 1 --devices cpu:1x1 \
                --device-memory 64MiB --cuts 3 --no-cache --lora 4";
    let step = |more: &[&'static str]| -> Value {
        serde_json::from_str(&says(&step.split_whitespace().chain(more.iter().copied()).collect::<Vec<_>>()))
            .unwrap()
    };
    let (floats, nf4) = (step(&[]), step(&["--base", "nf4"]));
    assert_eq!((&nf4["lora"], &nf4["base"], &nf4["gflops"]), (&4.into(), &"nf4".into(), &Value::Null));
    let moved = |result: &Value| result["promoted_bytes_per_step"].as_u64().unwrap();
    assert!(moved(&nf4) < moved(&floats), "{} and {}", moved(&nf4), moved(&floats));
}

#[test]
fn the_json_has_times_parts_and_figures() {
    let result = step(&["--devices", "cpu:1x1", "--steps", "4", "--warmup", "1"]);
    let number = |name: &str| result[name].as_f64().unwrap_or_else(|| panic!("{name} in {result}"));
    let times: Vec<f64> = result["step_s"].as_array().unwrap().iter().map(|s| s.as_f64().unwrap()).collect();
    assert_eq!(times.len(), 4);
    assert!(times.iter().all(|seconds| *seconds > 0.0));
    assert!(number("tokens_per_s_best") >= number("tokens_per_s_median"));
    let best = times.iter().copied().fold(f64::INFINITY, f64::min);
    assert!((number("tokens_per_s_best") * best / 32.0 - 1.0).abs() < 1e-9, "32 tokens a step");
    let parts = result["parts"].as_object().unwrap();
    assert!(parts.len() == PARTS.len() && PARTS.iter().all(|part| parts[*part].as_f64().unwrap() >= 0.0));
    assert!(parts["optimizer"].as_f64().unwrap() > 0.0);
    // 6 (12 L d^2 + V d) and 12 L d T, each for 32 tokens.
    let (maps, attention) = (6.0 * (48.0 * 64.0 * 64.0 + 256.0 * 64.0), 12.0 * 4.0 * 64.0 * 16.0);
    assert_eq!(number("flops_per_step"), (maps + attention) * 32.0);
    assert!((number("gflops") / (number("flops_per_step") / best * 1e-9) - 1.0).abs() < 1e-9);
    assert!(number("matmul_peak_gflops") > 0.0 && number("peak_rss_bytes") > 1e6);
    assert!(number("page_faults_per_step") >= 0.0 && number("allocations_per_step") > 0.0);
    assert_eq!((number("shards"), number("threads"), number("warmup")), (1.0, 1.0, 1.0));
    assert_eq!((number("context"), number("batch"), number("parameters")), (16.0, 2.0, 224_640.0));
    assert_eq!((result["model"].as_str(), result["dtype"].as_str()), (Some("bytes-tiny"), Some("f32")));
    assert_eq!(result["losses"].as_array().unwrap().len(), 5, "the first one too");
}

#[test]
fn losses_depend_neither_on_budgets_nor_on_threads() {
    let losses = |more: &[&str]| step(&[&["--steps", "3", "--dropout", "0.1"], more].concat());
    let resident = losses(&[]);
    let cut = losses(&["--device-memory", "64MiB", "--cuts", "1,3"]);
    let threads = losses(&["--devices", "cpu:2x2"]);
    assert_eq!((&cut["shards"], &cut["resident"]), (&3.into(), &false.into()));
    assert!(cut["promoted_bytes_per_step"].as_u64() > Some(0));
    assert_eq!((&resident["shards"], &resident["resident"]), (&1.into(), &true.into()));
    let moved = ["promoted_bytes_per_step", "demoted_bytes_per_step"].map(|name| resident[name].as_u64());
    assert_eq!(moved, [Some(0); 2], "nothing is copied");
    assert_eq!((&resident["losses"], &resident["losses"]), (&cut["losses"], &threads["losses"]));
    assert_ne!(losses(&["--seed", "1"])["losses"], resident["losses"]);
}

#[test]
fn without_json_it_prints_a_table() {
    let out = says(&["step", "--context", "16", "--batch", "1", "--steps", "1", "--warmup", "0"]);
    for part in PARTS.iter().chain(&["tokens/s", "GFLOP/s", "peak RSS", "1 shard"]) {
        assert!(out.contains(part), "{part} in {out}");
    }
}

#[test]
fn what_cannot_be_stepped_is_refused() {
    for (arguments, status, parts) in [
        (&["--config", "d"][..], 2, &["--config", "[possible values: a, b, c]"][..]),
        (&["--config", "a", "--model", "gpt2"], 2, &["--config", "--model"]),
        (&["--config", "a", "--batch", "2"], 2, &["--config", "--batch"]),
        (&["--config", "a", "--context", "64"], 2, &["--config", "--context"]),
        (&["--steps", "0"], 2, &["--steps", "`0`"]),
        (&["--warmup", "-1"], 2, &["--warmup", "`-1`"]),
        (&["--dtype", "f64"], 2, &["--dtype", "f64"]),
        (&["--dropout", "1"], 2, &["--dropout"]),
        (&["--context", "129"], 2, &["--context must be at most 128", "got 129"]),
        (&["--devices", "tpu:1"], 2, &["`tpu:1` is not a device"]),
        (&["--device-memory", "lots"], 2, &["`lots` is not a size"]),
        (&["--model", "gpt5"], 1, &["`gpt5` is not a model", "bytes-tiny"]),
        (&["--device-memory", "64KiB"], 1, &["64.00 KiB"]),
    ] {
        fails(&[&["step"], arguments].concat(), status, parts);
    }
}
