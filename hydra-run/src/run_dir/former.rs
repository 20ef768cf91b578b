//! Spellings of earlier versions in the files of a run directory, which are replaced by the current ones on reading.

use serde_json::Value;

/// Returns the current name of a kind of items.
pub(super) fn current_unit(unit: &str) -> &str {
    if unit == "pictures" { "images" } else { unit }
}

/// Returns the text of a `report.json` with the current spellings. A text without old ones is returned unchanged.
pub(super) fn current_report(text: String) -> String {
    if !["left_out", "pictures"].iter().any(|old| text.contains(&format!("\"{old}\""))) {
        return text;
    }
    let Ok(mut report) = serde_json::from_str::<Value>(&text) else { return text };
    if let Some(skipped) = report.as_object_mut().and_then(|report| report.remove("left_out")) {
        report["skipped"] = skipped;
    }
    for task in report["tasks"].as_array_mut().into_iter().flatten() {
        let unit = task["unit"].as_str().map(|unit| current_unit(unit).to_owned());
        unit.into_iter().for_each(|unit| task["unit"] = unit.into());
    }
    serde_json::to_string_pretty(&report).unwrap_or(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run_dir::{RunSpec, read_commands};
    use hydra_partition::PartitionPlan;
    use serde_json::json;
    use std::path::Path;

    #[test]
    fn a_report_of_an_earlier_version_has_the_current_names() {
        let task = |unit: &str| json!({ "name": "a", "config": { "data": "pictures" }, "unit": unit });
        let skipped = json!([{ "name": "b", "reason": "too large" }]);
        let old = json!({ "tasks": [task("pictures")], "left_out": skipped, "devices": [] });
        let new = json!({ "tasks": [task("images")], "skipped": skipped, "devices": [] });
        let read = |report: &Value| current_report(report.to_string());
        assert_eq!(serde_json::from_str::<Value>(&read(&old)).unwrap(), new);
        let tokens = json!({ "tasks": [task("tokens")], "skipped": [] });
        for report in [tokens, new] {
            assert_eq!(serde_json::from_str::<Value>(&read(&report)).unwrap(), report);
        }
        assert_eq!(
            current_report("{\"left_out\"".to_owned()),
            "{\"left_out\"",
            "invalid JSON is left to its reader"
        );
    }

    #[test]
    fn a_run_directory_of_an_earlier_version_is_read() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../hydra-bench/tests/specs/earlier/unfinished");
        let devices = RunSpec::in_dir(&dir).unwrap().devices;
        assert_eq!((devices.microbatch_group, devices.replicas), (Some(1), Some(1)));
        assert!(devices.reserve_for_forks);
        let plan = PartitionPlan::load(&dir.join("plans/b2.json")).unwrap();
        assert_eq!(plan.shards.iter().map(|shard| shard.peak_bytes).max(), Some(1_352_376));
        assert_eq!(read_commands(&dir.join("control.jsonl")).unwrap().len(), 2);
    }
}
