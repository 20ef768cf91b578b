//! Frozen bases in NF4 and optimizer moments in 8 bits: killed runs go on to the bits of uninterrupted ones, with master weights
//! in host memory and on the disk, and `hydra explain` predicts their host memory.

use crate::adapters::BASE;
use crate::common::{json, kill_and_resume, noted, results};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const CUT: &str = "--devices cpu:2x1 --device-memory 64MiB --cuts 1,2,3";

/// A run of 12 minibatches, and how it is cut, slowed down and killed.
struct Killed<'a> {
    /// The command without the devices, and without directories and files of models and data.
    run: &'a str,
    /// A link on which a minibatch takes a tenth of a second or more, so that the run is killed long before its end.
    link: &'a str,
    /// Host memory that holds the models within a minibatch, but not the master weights.
    host: &'a str,
}

impl Killed<'_> {
    /// Asserts that the run has the same results if it is killed, with master weights in host memory and on the disk.
    fn assert_goes_on(&self, paths: &str) {
        let root = TempDir::new().unwrap();
        let out = |name: &str| root.path().join(name);
        let train = format!(
            "train {} {paths} --steps 12 --eval-every 4 --eval-limit 4 --no-initial-validation",
            self.run
        );
        let whole =
            format!("{train} --devices cpu:1x2 --device-memory 256MiB --out {}", out("whole").display());
        noted(&whole);
        let task = |name: &str| json(&out(name).join("report.json"))["tasks"][0].clone();
        let whole = task("whole");
        assert_eq!((whole["shards"].as_u64(), whole["disk_bytes"].as_u64()), (Some(1), Some(0)));
        let on_disk = format!("--host-memory {} --disk-memory 16MiB --frozen-weights memory", self.host);
        for (name, memory) in [("memory", ""), ("disk", on_disk.as_str())] {
            let cut = format!("{train} {CUT} --checkpoint-every 2 --link {} {memory}", self.link);
            let enough = |events: &str| events.matches("\"checkpoint\"").count() >= 2;
            kill_and_resume(&cut, &out(name), enough, ("minibatch", 12));
            let killed = task(name);
            assert!(killed["resumed_at"].as_u64() >= Some(2), "{killed:#}");
            assert_eq!(
                (&killed["shards"], killed["disk_bytes"].as_u64() > Some(0)),
                (&4.into(), name == "disk")
            );
            assert_eq!(results(&killed), results(&whole), "{name}");
        }
    }
}

#[test]
fn a_killed_run_on_a_base_in_nf4_goes_on_to_the_same_bits() {
    for dtype in ["f32", "bf16"] {
        let run = format!("--batch 8 --accumulate 2 --lr 3e-3 --lora 4 --base nf4 --dtype {dtype}");
        let killed = Killed { run: &run, link: "512KiB/s", host: "460KiB" };
        killed.assert_goes_on(&format!("--model {} --data {}", BASE.1.display(), BASE.2.display()));
    }
}

/// Writes the configuration of a GPT-2 with blocks of 790 thousand parameters.
fn gpt2(dir: &Path, blocks: usize) -> PathBuf {
    let config = json!({
        "model_type": "gpt2", "n_embd": 256, "n_layer": blocks, "n_head": 4, "n_positions": 32, "vocab_size": 256,
    });
    let file = dir.join("gpt2.json");
    fs::write(&file, config.to_string()).unwrap();
    file
}

/// The blocks of this model have three pieces of a buffer, whose codes are within one piece on the disk.
#[test]
fn adapters_on_a_base_of_several_pieces_on_the_disk_are_written() {
    let root = TempDir::new().unwrap();
    let model = gpt2(root.path(), 4);
    let trained = |name: &str, memory: &str| {
        let out = root.path().join(name);
        noted(&format!(
            "train --model {} --tokenizer bytes --base nf4 --lora 4 --batch 2 --context 16 --steps 2 --devices cpu:1x1 \
             --device-memory 64MiB --cuts 1,2,3,4,5 --no-initial-validation --eval-limit 2 {memory} --out {}",
            model.display(),
            out.display()
        ));
        json(&out.join("report.json"))["tasks"][0].clone()
    };
    let in_memory = trained("memory", "");
    let on_disk = trained("disk", "--host-memory 6MiB --disk-memory 64MiB");
    assert_eq!(in_memory["disk_bytes"].as_u64(), Some(0));
    assert!(on_disk["disk_bytes"].as_u64() > Some(1 << 20), "the base is in memory: {on_disk:#}");
    assert_eq!(results(&on_disk), results(&in_memory));
}

#[test]
fn a_killed_run_with_moments_in_8_bits_goes_on_to_the_same_bits() {
    let run = "--batch 8 --accumulate 2 --context 32 --lr 3e-3 --optimizer adamw8bit";
    Killed { run, link: "4MiB/s", host: "3MiB" }.assert_goes_on("");
}

/// The lengths of the parameters in a file.
fn lengths(model: &Path) -> Vec<u64> {
    let bytes = fs::read(model.join("model.safetensors")).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..header]).unwrap();
    let tensors = header.as_object().unwrap().iter().filter(|(name, _)| *name != "__metadata__");
    let len = |shape: &Value| shape.as_array().unwrap().iter().map(|size| size.as_u64().unwrap()).product();
    tensors.map(|(_, tensor)| len(&tensor["shape"])).collect()
}

/// All parameters of this model have multiples of 256 elements, so that its buffers have no gaps.
#[test]
fn explain_predicts_the_host_memory_of_moments_in_8_bits() {
    let root = TempDir::new().unwrap();
    let model = gpt2(root.path(), 1);
    let measured = |optimizer: &str| {
        let run = format!(
            "--model {} --tokenizer bytes --optimizer {optimizer} --batch 2 --context 16 --steps 2 --devices cpu:1x1 \
             --device-memory 64MiB --cuts 1,2 --link 256MiB/s --no-initial-validation --eval-limit 2",
            model.display()
        );
        let [explained, _] = noted(&format!("explain {run} --json"));
        let explained: Value = serde_json::from_str(&explained).unwrap();
        let out = root.path().join(optimizer);
        noted(&format!("train {run} --out {}", out.display()));
        let report = json(&out.join("report.json"));
        let lengths = lengths(report["tasks"][0]["model_dir"].as_str().unwrap().as_ref());
        assert!(lengths.iter().all(|len| len % 256 == 0));
        let count = lengths.iter().sum::<u64>();
        assert_eq!(explained["tasks"][0]["parameters"], count);
        let masters = explained["tasks"][0]["master_bytes"].as_u64().unwrap();
        assert_eq!(explained["files"]["checkpoint_bytes"], masters);
        // What is predicted is reserved, and what is reserved is used: the masters over the whole run.
        let [admitted, peak] =
            ["host_admitted_bytes", "host_peak_bytes"].map(|key| report[key].as_u64().unwrap());
        assert_eq!(explained["host_admitted_bytes"], admitted);
        assert!(masters < peak && peak <= admitted, "{masters}, {peak}, {admitted}");
        (lengths, masters, admitted, peak)
    };
    let (lengths, floats, admitted_floats, peak_floats) = measured("adamw");
    assert_eq!(floats, lengths.iter().map(|len| 12 * len).sum::<u64>());
    let (lengths, masters, admitted, peak) = measured("adamw8bit");
    // A code for each element and a scale for 256, for each of two moments; tensors of fewer than 4096 elements have f32 moments.
    let bytes = |len: &u64| if *len < 4096 { 12 * len } else { 4 * len + 2 * (len + 4 * len / 256) };
    assert_eq!(masters, lengths.iter().map(bytes).sum::<u64>());
    assert_eq!(admitted_floats - admitted, floats - masters, "nothing else depends on the optimizer");
    assert!(peak < floats && floats < peak_floats, "{peak} and {peak_floats}");
}
