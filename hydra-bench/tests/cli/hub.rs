//! Models by their names on the Hugging Face hub, in the local cache, and the line on the best model.

use crate::common::{fails, hydra, json, says, text};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

/// Trains briefly. Returns the output and the model directory.
fn trained(root: &Path) -> (String, PathBuf) {
    let (data, out) = (root.join("text.txt"), root.join("run"));
    fs::write(&data, "a model that is found by its name\n".repeat(60)).unwrap();
    let run = "train --steps 1 --batch 2 --lr 1e-3 --context 16 --devices cpu:1x1 --no-initial-validation --model bytes-tiny";
    let [data, out] = [data, out].map(|path| path.to_str().unwrap().to_owned());
    let arguments: Vec<&str> = run.split_whitespace().chain(["--data", &data, "--out", &out]).collect();
    let printed = says(&arguments);
    let report: Value = json(&root.join("run/report.json"));
    (printed, report["tasks"][0]["model_dir"].as_str().unwrap().into())
}

#[test]
fn a_model_is_found_by_its_name_in_the_cache_or_its_download_is_named() {
    let root = tempfile::tempdir().unwrap();
    let (_, model) = trained(root.path());
    let commit = "fedcba9876543210fedcba9876543210fedcba98";
    let of_model = root.path().join("hf/hub/models--org--tiny");
    let snapshot = of_model.join("snapshots").join(commit);
    for (path, text) in [("refs/main", commit), ("snapshots/none", "")] {
        fs::create_dir_all(of_model.join(path).parent().unwrap()).unwrap();
        fs::write(of_model.join(path), text).unwrap();
    }
    fs::create_dir_all(&snapshot).unwrap();
    for file in fs::read_dir(&model).unwrap().map(|file| file.unwrap().path()) {
        fs::copy(&file, snapshot.join(file.file_name().unwrap())).unwrap();
    }
    let data = root.path().join("text.txt");
    let evaluated = |name: &str| {
        let arguments = ["eval", "--model", name, "--data", data.to_str().unwrap(), "--context", "16"];
        let mut command = hydra(&arguments);
        command.env_remove("HF_HUB_CACHE").env_remove("HUGGINGFACE_HUB_CACHE");
        command.env("HF_HOME", root.path().join("hf")).output().unwrap()
    };
    let expected = evaluated(model.to_str().unwrap());
    assert!(expected.status.success(), "{}", text(&expected.stderr));
    for name in ["org/tiny".to_owned(), format!("org/tiny@{commit}")] {
        let found = evaluated(&name);
        assert!(found.status.success(), "{}", text(&found.stderr));
        assert_eq!(text(&found.stdout), text(&expected.stdout), "{name}");
    }
    for (name, part) in [
        ("org/none", "`hf download org/none`"),
        ("org/tiny@v2", "`hf download org/tiny --revision v2`, or use a cached revision: org/tiny@fedc"),
    ] {
        let refused = evaluated(name);
        let said = text(&refused.stderr);
        assert!(refused.status.code() == Some(1) && said.contains(part), "{said}");
        assert!(said.contains(root.path().join("hf/hub").to_str().unwrap()), "{said}");
    }
    fails(&["eval", "--model", "no/such/model"], 1, &["`no/such/model` is not a model", "org/name"]);
}

#[test]
fn the_last_line_names_the_best_model_and_a_command_that_works() {
    let root = tempfile::tempdir().unwrap();
    let (printed, model) = trained(root.path());
    let last = printed.lines().last().unwrap();
    assert!(last.starts_with(&format!("best: {} (validation perplexity ", model.display())), "{last}");
    assert!(
        last.ends_with(&format!("load it: AutoModelForCausalLM.from_pretrained(\"{}\")", model.display())),
        "{last}"
    );
    let command = last.split("evaluate it: hydra ").nth(1).unwrap().split("; load it").next().unwrap();
    let evaluated = says(&command.split_whitespace().collect::<Vec<_>>());
    assert!(evaluated.contains("perplexity"), "{evaluated}");
}
