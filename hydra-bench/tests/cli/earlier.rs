//! Run directories of version 0.1, written before names changed: `left_out`, `pictures`, `visit`, `need_bytes`.

use crate::common::says;
use serde_json::Value;

const RUNS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/specs/earlier");

#[test]
fn reports_of_an_earlier_version_are_shown_in_the_current_terms() {
    let [done, unfinished] = ["done", "unfinished"].map(|run| format!("{RUNS}/{run}"));
    for runs in [&[done.as_str()][..], &[unfinished.as_str()], &[done.as_str(), unfinished.as_str()]] {
        let shown = says(&[&["report"], runs].concat());
        assert!(shown.contains("skipped") && shown.contains("accuracy"), "{shown}");
        let json = says(&[&["report", "--json"], runs].concat());
        for old in ["left_out", "left out", "pictures/s", "\"unit\": \"pictures\""] {
            assert!(!shown.contains(old) && !json.contains(old), "{old} in\n{shown}\n{json}");
        }
        let json: Value = serde_json::from_str(&json).unwrap();
        let tasks = json["tasks"].as_array().unwrap();
        assert_eq!((&tasks[0]["name"], &tasks[0]["unit"]), (&"b2".into(), &"images".into()));
        let skipped = json["skipped"].as_array().cloned().unwrap_or_default();
        let is_skipped = |task: &&Value| task["name"] == "b32";
        let skipped = tasks.iter().find(is_skipped).or(skipped.iter().find(is_skipped)).unwrap();
        let reason = [&skipped["reason"], &skipped["error"]].into_iter().find_map(Value::as_str);
        assert_eq!(reason, Some("layer `layer.2` is too large"));
    }
    let shown = says(&["report", &done]);
    assert!(shown.contains(" images/s") && shown.contains("first 2 images of each split"), "{shown}");
}
