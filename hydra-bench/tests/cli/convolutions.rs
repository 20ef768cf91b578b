//! A convolutional network on images: the same bits whole, cut and on several devices; evaluated from its written files;
//! settings that do not apply are refused.

use crate::common::{assert_evaluates_as_tested, fails, hydra, json, results, says, text};
use image::{Rgb, RgbImage};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::sync::LazyLock;
use tempfile::TempDir;

/// Images of horizontal or vertical stripes, in three splits.
pub static STRIPES: LazyLock<(TempDir, String)> = LazyLock::new(|| {
    let root = TempDir::new().unwrap();
    for (split, count, first) in [("train", 24, 0), ("validation", 8, 100), ("test", 8, 200)] {
        for (class, name) in ["lying", "standing"].into_iter().enumerate() {
            let folder = root.path().join(split).join(name);
            fs::create_dir_all(&folder).unwrap();
            for index in first..first + count {
                let along = |x: u32, y: u32| if class == 0 { y } else { x };
                let pixel = |x: u32, y: u32| {
                    let bright = (along(x, y) + index) / 4 % 2 * 120;
                    Rgb([(60 + bright + (x * 7 + y * 13 + index * 29) % 40) as u8; 3])
                };
                RgbImage::from_fn(32, 32, pixel).save(folder.join(format!("{index}.png"))).unwrap();
            }
        }
    }
    let path = root.path().to_str().unwrap().to_owned();
    (root, path)
});

/// The task of a run.
fn run(arguments: &str, out: &Path) -> Value {
    let run = format!("{arguments} --model convnext-mini --data {} --out {}", STRIPES.1, out.display());
    says(&run.split_whitespace().collect::<Vec<_>>());
    json(&out.join("report.json"))["tasks"][0].clone()
}

/// Device memory between the largest layer and the whole model.
fn between_least_and_whole(dtype: &str) -> u64 {
    let flags = format!(
        "partition --model convnext-mini --data {} --batch 8 --accumulate 2 --dtype {dtype}",
        STRIPES.1
    );
    let flags = format!("{flags} --devices cpu:1x1 --device-memory 256MiB --json");
    let plan: Value = serde_json::from_str(&says(&flags.split_whitespace().collect::<Vec<_>>())).unwrap();
    let bytes = |key: &str| plan[key].as_u64().unwrap();
    bytes("min_device_memory_bytes").midpoint(bytes("single_shard_bytes"))
}

const TRAIN: &str = "train --batch 8 --lr 3e-3 --dropout 0.1";

#[test]
fn its_bits_depend_neither_on_cuts_nor_on_devices() {
    let root = TempDir::new().unwrap();
    for dtype in ["f32", "bf16"] {
        let train = format!("{TRAIN} --accumulate 2 --steps 4 --eval-every 2 --dtype {dtype}");
        let of = |name: &str, settings: &str| {
            let task = run(&format!("{train} {settings}"), &root.path().join(format!("{dtype}-{name}")));
            (task["shards"].as_u64().unwrap(), results(&task))
        };
        let (shards, whole) = of("whole", "--devices cpu:1x2 --device-memory 256MiB");
        assert_eq!(shards, 1);
        let memory = between_least_and_whole(dtype);
        let (shards, small) = of("small", &format!("--devices cpu:1x1 --device-memory {memory}"));
        assert!(shards > 1, "{shards} shards");
        let (shards, cut) =
            of("cut", "--devices cpu:2x1 --device-memory 64MiB --cuts 1,2,3,5,6,7 --microbatch-group 2");
        assert_eq!(shards, 7);
        assert!(small == whole && cut == whole, "{dtype}");
    }
}

#[test]
fn what_it_learned_is_written_and_evaluated() {
    let root = TempDir::new().unwrap();
    let out = root.path().join("run");
    let task = run(&format!("{TRAIN} --epochs 6 --devices cpu:1x2"), &out);
    let accuracy = task["test"]["metrics"]["accuracy"].as_f64().unwrap();
    assert_eq!(accuracy, (accuracy * 16.0).round() / 16.0, "a count of right answers");
    let model = task["model_dir"].as_str().unwrap();
    let file = |name: &str| json(&Path::new(model).join(name));
    assert_eq!(file("config.json")["architectures"][0], "ConvNextForImageClassification");
    assert_eq!(file("config.json")["id2label"]["1"], "standing");
    assert_eq!(file("preprocessor_config.json")["size"]["width"], 32);
    assert_evaluates_as_tested(model, &STRIPES.1, &task);
}

#[test]
fn what_it_has_no_use_for_is_refused() {
    let with = |more: &[&'static str]| {
        let start = ["train", "--model", "convnext-mini", "--steps", "1", "--data", STRIPES.1.as_str()];
        let all: Vec<&str> = start.into_iter().chain(more.iter().copied()).collect();
        let output = hydra(&all).output().unwrap();
        assert!(!output.status.success());
        text(&output.stderr).to_string()
    };
    assert!(with(&["--lora", "4"]).contains("convnext"), "{}", with(&["--lora", "4"]));
    assert!(with(&["--vocabulary-parts", "2"]).contains("vocabulary_parts"));
    fails(&["train", "--model", "convnext-mini", "--steps", "1"], 2, &["`convnext-mini` reads images"]);
}
