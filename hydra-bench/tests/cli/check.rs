//! `hydra check` on the built program: every item on a CPU device.

use crate::common::{fails, hydra, says, text};
use serde_json::Value;

fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"))).collect()
}

/// The row with all of these values.
fn row<'a>(item: &'a Value, has: &[(&str, Value)]) -> &'a Value {
    let rows = item["rows"].as_array().unwrap();
    let found = rows.iter().find(|row| has.iter().all(|(name, value)| row[*name] == *value));
    found.unwrap_or_else(|| panic!("{has:?} in {item}"))
}

#[test]
fn every_item_is_tried_on_a_cpu_device() {
    let lines = lines(&says(&["check", "--devices", "cpu:1", "--quick", "--json"]));
    let [items @ .., whole] = lines.as_slice() else { panic!("nothing") };
    let item = |number: u64| items.iter().find(|item| item["item"] == number).unwrap();
    for (number, verdict) in [
        (1, "pass"),
        (2, "not applicable"),
        (3, "not applicable"),
        (4, "pass"),
        (5, "not applicable"),
        (6, "not applicable"),
        (7, "pass"),
        (8, "pass"),
        (9, "pass"),
        (10, "not applicable"),
        (11, "not applicable"),
        (12, "pass"),
    ] {
        let item = item(number);
        assert_eq!(item["verdict"], verdict, "{item}");
        let filled = |name: &str| item[name].as_str().is_some_and(|text| !text.is_empty());
        assert!(filled("says") && filled("figure") && filled("name"), "{item}");
        assert_eq!(item["rows"].as_array().unwrap().is_empty(), number == 5 || number == 11, "{item}");
    }
    assert_eq!((items.len(), &whole["items"]), (12, &12.into()));
    assert_eq!(
        (&whole["pass"], &whole["fails"], &whole["not_applicable"]),
        (&6.into(), &0.into(), &6.into())
    );
    figures(&item);
}

fn figures<'a>(item: &impl Fn(u64) -> &'a Value) {
    let above_zero = |row: &Value, names: &[&str]| {
        names.iter().for_each(|name| assert!(row[*name].as_f64() > Some(0.0), "{name} in {row}"));
    };
    for floats in ["f32", "bf16"] {
        let compared = row(item(12), &[("floats", floats.into())]);
        assert!(compared["worst"].as_f64() < compared["bound"].as_f64(), "{compared}");
    }
    for model in ["mlp", "gpt2", "gpt2 in bf16"] {
        let learned = row(item(1), &[("model", model.into()), ("shards", 4.into())]);
        assert_eq!(learned["losses"].as_array().unwrap().len(), 8);
        above_zero(row(item(6), &[("model", model.into())]), &["swaps", "minibatches"]);
        above_zero(row(item(9), &[("model", model.into())]), &["first_s", "later_s"]);
    }
    for mib in [1, 4] {
        let rates = ["up_gb_per_s", "down_gb_per_s", "up_beside_down_gb_per_s", "down_beside_up_gb_per_s"];
        above_zero(row(item(2), &[("mib", mib.into()), ("page_locked", false.into())]), &rates);
    }
    above_zero(row(item(3), &[]), &["compute_alone_s", "copy_alone_s", "together_s"]);
    row(item(4), &[("swaps", 100.into()), ("wrong", 0.into())]);
    for side in [128, 256] {
        for product in ["GPT-2's f32", "Burn's f32"] {
            above_zero(row(item(7), &[("side", side.into()), ("product", product.into())]), &["tflops"]);
        }
    }
    row(item(7), &[("gpt2_keeps_f32", true.into()), ("burn_keeps_f32", true.into())]);
    for (op, context) in [("attention", 64), ("attention", 128), ("head", 64), ("head", 128)] {
        let row = row(item(8), &[("op", op.into()), ("context", context.into())]);
        above_zero(row, &["seconds", "peak_bytes"]);
    }
    let [whole, cut] =
        ["resident", "spilled"].map(|variant: &str| row(item(10), &[("variant", variant.into())]));
    assert_eq!((&whole["shards"], &whole["losses"]), (&1.into(), &cut["losses"]));
    assert!(
        cut["shards"].as_u64() > Some(1) && cut["budget_bytes"].as_u64() < whole["budget_bytes"].as_u64()
    );
    above_zero(cut, &["step_s", "compute_s", "up_s", "down_s", "optimizer_s"]);
}

#[test]
fn the_table_has_the_items_that_were_asked_for() {
    let out = says(&["check", "--quick", "--only", "5,7"]);
    let lines: Vec<&str> = out.lines().collect();
    assert!(lines[0].contains("cpu:0") && lines[0].contains("verdict"), "{out}");
    assert!(lines[1].contains("out of memory") && lines[1].contains("not applicable"), "{out}");
    assert!(lines[2].contains("matrix products") && lines[2].contains("GPT-2's f32 "), "{out}");
    assert!(out.contains("\n 5: a CPU device uses host memory"), "{out}");
    assert!(!out.contains("checksums"), "{out}");
}

#[test]
fn an_item_that_fails_is_said_and_ends_with_status_1() {
    let output = hydra(&["check", "--quick", "--only", "10", "--device-memory", "64KiB"]).output().unwrap();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!((output.status.code(), err.as_str()), (Some(1), ""), "{out}");
    assert!(out.contains("fails") && out.contains("64.00 KiB"), "{out}");
}

#[test]
fn what_cannot_be_checked_is_refused() {
    fails(&["check", "--devices", "cpu:2"], 2, &["cpu:2 names 2 devices", "one at a time"]);
    fails(&["check", "--only", "13"], 2, &["--only 13", "1 to 12"]);
    fails(&["check", "--devices", "cuda:63"], 1, &["`--devices cuda:63` cannot be used here"]);
}
