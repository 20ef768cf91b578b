//! Evaluations with a limit, or without the one before training.

use crate::common::{grid, json as read, says};
use serde_json::{Value, json};

#[test]
fn evaluations_are_bounded_and_the_weights_stay() {
    let root = tempfile::tempdir().unwrap();
    let run = |name: &str, more: &'static str| -> (String, Value) {
        let dir = root.path().join(name);
        let arguments = [&grid("--steps 2")[..], &grid(more)[grid("").len()..]].concat();
        let shown = says(&[&arguments[..], &["--out", dir.to_str().unwrap()]].concat());
        (shown, read(&dir.join("report.json")))
    };
    let ((all_shown, all), (shown, bounded)) = (run("all", ""), run("bounded", "--eval-limit 3"));
    let (_, at_once) = run("at-once", "--eval-limit 3 --no-initial-validation");
    let of = |report: &Value, key: &str| report["tasks"][1][key].clone();
    for report in [&bounded, &at_once] {
        assert_eq!(of(report, "weights_sha256"), of(&all, "weights_sha256"));
        // A block of 32 tokens predicts 31.
        let loss_targets =
            ["validation", "test"].map(|of_which| of(report, of_which)["predicted_tokens"].clone());
        assert_eq!(loss_targets, [3 * 31, 3 * 31].map(Value::from));
        assert_eq!(of(report, "config")["eval_limit"], 3);
    }
    assert!(of(&all, "validation")["predicted_tokens"].as_u64() > Some(3 * 31));
    assert!(of(&bounded, "initial_validation").is_object() && of(&at_once, "initial_validation").is_null());
    // Three blocks are one batch, which one of two equal tasks evaluates for both.
    let tasks = bounded["tasks"].as_array().unwrap();
    assert_eq!(tasks[0]["initial_validation"], tasks[1]["initial_validation"]);
    let by = |task: &Value| task["initial_validation_by"].clone();
    let expected = [[Value::Null, json!([tasks[0]["name"]])], [json!([tasks[1]["name"]]), Value::Null]];
    assert!(expected.contains(&[by(&tasks[0]), by(&tasks[1])]), "{tasks:?}");
    let says_so = "evaluated on the first 3 blocks of each text (--eval-limit)";
    assert!(shown.contains(says_so) && !all_shown.contains(says_so), "{shown}");
}
