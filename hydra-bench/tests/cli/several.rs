//! Several kinds of models in one run, each with its own data and measure.

use crate::common::{fails, hydra, json, says, text};
use image::{Rgb, RgbImage};
use serde_json::Value;
use std::fs;
use std::path::Path;
use tempfile::TempDir;

/// Images of two colours, in three splits.
fn colours() -> TempDir {
    let root = TempDir::new().unwrap();
    for (split, count) in [("train", 16), ("validation", 4), ("test", 4)] {
        for (class, colour) in [("dark", 20), ("light", 200)] {
            let folder = root.path().join(split).join(class);
            fs::create_dir_all(&folder).unwrap();
            for index in 0..count {
                let image = RgbImage::from_pixel(8, 8, Rgb([colour + index, colour, colour]));
                image.save(folder.join(format!("{index}.png"))).unwrap();
            }
        }
    }
    root
}

fn tasks(out: &Path) -> Vec<Value> {
    json(&out.join("report.json"))["tasks"].as_array().unwrap().clone()
}

#[test]
fn models_of_several_kinds_train_as_each_alone_and_are_ranked_by_kind() {
    let (root, data) = (TempDir::new().unwrap(), colours());
    let (out, data) = (root.path().join("all"), data.path().to_str().unwrap());
    let all = format!("builtin,builtin,{data},{data}");
    let grid =
        ["--batch", "4", "--lr", "1e-3", "--steps", "3", "--devices", "cpu:2x1", "--device-memory", "64MiB"];
    let select = |model: &str, data: &str, out: &Path| {
        let of = ["select", "--model", model, "--data", data, "--out", out.to_str().unwrap()];
        says(&[&of[..], &grid].concat())
    };
    let said = select("bytes-tiny,bytes-llama-tiny,vit-tiny,convnext-mini", &all, &out);
    let names: Vec<String> =
        tasks(&out).iter().map(|task| task["name"].as_str().unwrap().to_owned()).collect();
    let expected = ["bytes-tiny", "bytes-llama-tiny", "vit-tiny", "convnext-mini"];
    assert_eq!(names, expected);
    let images = said.find(&format!("accuracy on {data}:\n")).unwrap();
    let language = said.find("\nperplexity on builtin:\n").unwrap();
    assert!(images < language && said.contains(" images/s and ") && said.contains(" tokens/s,"), "{said}");
    for (index, (model, data)) in expected.into_iter().zip(["builtin", "builtin", data, data]).enumerate() {
        let alone = root.path().join(model);
        select(model, data, &alone);
        let (together, alone) = (&tasks(&out)[index], &tasks(&alone)[0]);
        for key in ["weights_sha256", "losses", "test"] {
            assert_eq!(together[key], alone[key], "{model}: {key}");
        }
        assert_eq!(
            (&together["config"]["model"], &together["config"]["data"]),
            (&model.into(), &data.into())
        );
    }
    let losses = fs::read_to_string(out.join("losses.svg")).unwrap();
    assert!(losses.contains("images trained") && losses.contains("tokens trained"));
    // The spec can be repeated and resumed.
    let again = root.path().join("again");
    let spec = out.join("spec.toml");
    assert!(fs::read_to_string(&spec).unwrap().contains("[[models]]"));
    says(&["select", "--spec", spec.to_str().unwrap(), "--out", again.to_str().unwrap()]);
    for (one, other) in tasks(&out).iter().zip(&tasks(&again)) {
        assert_eq!(one["weights_sha256"], other["weights_sha256"]);
    }
    let resumed = hydra(&["resume", again.to_str().unwrap()]).output().unwrap();
    assert!(text(&resumed.stderr).contains("nothing is left to do"), "{}", text(&resumed.stderr));
}

#[test]
fn what_is_for_one_model_is_refused_for_several() {
    let two =
        |more: &[&'static str]| [&["select", "--model", "bytes-tiny,bytes-llama-tiny"][..], more].concat();
    fails(&two(&["--cuts", "1"]), 2, &["--cuts requires a single model", "names 2"]);
    fails(&two(&["--data", "builtin,builtin,builtin"]), 2, &["--data has 3 values and --model 2"]);
    fails(&["train", "--model", "bytes-tiny,bytes-llama-tiny"], 2, &["hydra train requires a single model"]);
    fails(
        &["eval", "--model", "bytes-tiny,bytes-llama-tiny"],
        1,
        &["`bytes-tiny,bytes-llama-tiny` is not a model"],
    );
    let search = [
        "--search",
        "random",
        "--trials",
        "2",
        "--sample",
        "lr=log:1e-4..1e-3",
        "--steps",
        "4",
        "--batch",
        "4",
    ];
    fails(&two(&search), 2, &["a search requires a single model"]);
}
