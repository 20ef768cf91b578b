//! Evaluations that are bounded, or left out before training.

use crate::common::{grid, json, says};
use serde_json::Value;

#[test]
fn evaluations_are_bounded_and_the_weights_stay() {
    let root = tempfile::tempdir().unwrap();
    let run = |name: &str, more: &'static str| -> (String, Value) {
        let dir = root.path().join(name);
        let arguments = [&grid("--steps 2")[..], &grid(more)[grid("").len()..]].concat();
        let shown = says(&[&arguments[..], &["--out", dir.to_str().unwrap()]].concat());
        (shown, json(&dir.join("report.json")))
    };
    let ((all_shown, all), (shown, bounded)) = (run("all", ""), run("bounded", "--eval-limit 3"));
    let (_, at_once) = run("at-once", "--eval-limit 3 --no-initial-validation");
    let of = |report: &Value, key: &str| report["tasks"][1][key].clone();
    for report in [&bounded, &at_once] {
        assert_eq!(of(report, "weights_sha256"), of(&all, "weights_sha256"));
        // A block of 32 tokens predicts 31.
        let terms = ["validation", "test"].map(|of_which| of(report, of_which)["predicted_tokens"].clone());
        assert_eq!(terms, [3 * 31, 3 * 31].map(Value::from));
        assert_eq!(of(report, "config")["eval_limit"], 3);
    }
    assert!(of(&all, "validation")["predicted_tokens"].as_u64() > Some(3 * 31));
    assert!(of(&bounded, "initial_validation").is_object() && of(&at_once, "initial_validation").is_null());
    let says_so = "evaluated on the first 3 blocks of each text (--eval-limit)";
    assert!(shown.contains(says_so) && !all_shown.contains(says_so), "{shown}");
}
