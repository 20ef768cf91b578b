//! Ten training steps of GPT-2 against Hugging Face Transformers, spilled over shards. One reference model is in the
//! repository, with the tests of `hydra-models`; another, beside the repository, is taken where it is there.

use crate::common::Settings;
use hydra_core::schedule::{Constant, Cosine, Linear};
use hydra_core::{Length, OptimizerSpec, Schedule, TrainSpec};
use hydra_engine::TrainTask;
use hydra_models::data::{BlockSpec, TokenBlocks};
use hydra_models::gpt2::{self, Gpt2Dir};
use std::path::{Path, PathBuf};
use std::sync::Arc;

fn parity(name: &str) -> Option<PathBuf> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folders = [here.join("../hydra-models/tests/fixtures/parity"), here.join("../../shared/parity")];
    let found = folders.iter().map(|folder| folder.join(name)).find(|dir| dir.is_dir());
    if found.is_none() {
        assert_ne!(name, "tiny", "it is in the repository");
        println!("skipped: {name} is not in the repository, and not in {}", folders[1].display());
    }
    found
}

/// The batches of the reference: `[step, item, position]` token ids.
fn batches(dir: &Path) -> (TokenBlocks, usize) {
    let bytes = std::fs::read(dir.join("inputs.safetensors")).expect("the inputs");
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
    let ids = file.tensor("input_ids").expect("input_ids");
    let [_, items, context] = ids.shape() else { panic!("three dimensions") };
    let words = ids.data().chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().expect("eight bytes")));
    let tokens: Vec<u32> = words.map(|id| u32::try_from(id).expect("an id")).collect();
    (TokenBlocks::new(tokens, BlockSpec { context: *context, vocab_size: 257 }).expect("blocks"), *items)
}

fn check(dir: &Path, variant: &str, clip: Option<f64>, schedule: Schedule) {
    let (data, batch) = batches(dir);
    let text = std::fs::read_to_string(dir.join(format!("train_{variant}.json"))).expect("the reference");
    let reference: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let expected: Vec<f64> = serde_json::from_value(reference["losses"].clone()).expect("losses");
    let model = Gpt2Dir::open(dir).expect("a checkpoint");
    let chain = gpt2::chain(&model.config().clone(), Some(model)).expect("a chain");
    let spec = TrainSpec {
        schedule,
        clip,
        shuffle: false,
        length: Length::Steps(10),
        ..TrainSpec::new(OptimizerSpec::adamw(1e-3), batch)
    };
    let settings = Settings { cuts: Some(vec![1, 3]), ..Settings::default() };
    let report = settings.task(TrainTask::new("parity", Arc::new(chain), Arc::new(data), spec));
    assert_eq!(report.error, None);
    let worst = report.losses.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    println!("{} {variant}: losses differ by {worst:.2e} at most", dir.display());
    assert_eq!(report.losses.len(), expected.len());
    assert!(worst < 1e-5, "{variant}: {:?} against {expected:?}", report.losses);
}

#[test]
fn ten_losses_of_every_variant_agree_with_hugging_face() {
    for name in ["tiny", "tiny_pert"] {
        let Some(dir) = parity(name) else { continue };
        check(&dir, "const", None, Schedule::new(Constant, 0));
        check(&dir, "cosine", Some(1.0), Schedule::new(Cosine, 3));
        check(&dir, "linear", Some(1.0), Schedule::new(Linear, 3));
    }
}
