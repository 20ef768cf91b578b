//! Parquet tables: the same bits as the same rows in JSON Lines, and refusals of invalid files.

use crate::common::{fails, json, says};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A file written by pyarrow, or its rows as JSON Lines.
fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../hydra-models/tests/fixtures/parquet").join(name)
}

/// Returns the result of training on a file.
fn trained(data: &Path, out: &Path) -> [Value; 3] {
    let run = "train --model bytes-tiny --batch 4 --lr 1e-3 --steps 3 --context 64 --devices cpu:1x1";
    let paths = ["--data", data.to_str().unwrap(), "--out", out.to_str().unwrap()];
    says(&run.split_whitespace().chain(paths).collect::<Vec<_>>());
    ["weights_sha256", "losses", "test"].map(|key| json(&out.join("report.json"))["tasks"][0][key].clone())
}

#[test]
fn parquet_trains_what_the_same_lines_of_json_do() {
    let root = TempDir::new().unwrap();
    for name in ["text", "completions", "tokens"] {
        let of = |ending: &str| {
            trained(&fixture(&format!("{name}.{ending}")), &root.path().join(format!("{name}-{ending}")))
        };
        assert_eq!(of("parquet"), of("jsonl"), "{name}");
    }
    let folders = ["parquet", "jsonl"].map(|ending| {
        let folder = root.path().join(format!("in-{ending}"));
        fs::create_dir(&folder).unwrap();
        for (split, name) in [("train", "text"), ("validation", "completions"), ("test", "tokens")] {
            let (from, to) = (format!("{name}.{ending}"), format!("{split}.{ending}"));
            fs::copy(fixture(&from), folder.join(to)).unwrap();
        }
        trained(&folder, &root.path().join(format!("out-{ending}")))
    });
    assert_eq!(folders[0], folders[1]);
}

#[test]
fn parquet_that_is_none_is_refused() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("a.parquet");
    fs::write(&file, "PAR1 and no more").unwrap();
    let data = |file: &Path| ["train", "--steps", "1", "--data", file.to_str().unwrap()].map(str::to_owned);
    let refused = |file: &Path, parts: &[&str]| {
        let arguments = data(file);
        fails(&arguments.each_ref().map(String::as_str), 1, parts);
    };
    refused(&file, &["a.parquet` is not a readable Parquet file"]);
    refused(
        &fixture("columns.parquet"),
        &["has the columns `question`, `answer`", "--columns prompt=question,completion=answer"],
    );
    refused(&fixture("missing.parquet"), &["row 3 of", "`completion` is null"]);
}
