//! Bases in 4 bits, against bitsandbytes, and adapters of them, against PEFT. `tests/fixtures/quantized/make_quantized.py` made the
//! fixtures.

use crate::peft::gradient_name;
use crate::reference::Model;
use hydra_core::{Encoding, nf4};
use hydra_models::lora::{AdapterDir, Base, Lora};
use hydra_models::{decoder, family, gpt2};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The adapters, each with its base and the form of the base: a checkpoint in 4 bits is read as it is.
const MODELS: [(&str, &str, Base); 7] = [
    ("single", "quantized/single", Base::Float),
    ("double", "quantized/double", Base::Float),
    ("llama", "peft/bases/llama", Base::Nf4),
    ("gpt2", "peft/bases/gpt2", Base::Nf4),
    ("qwen2", "peft/bases/qwen2", Base::Nf4),
    ("llama-saved", "peft/bases/llama", Base::Nf4),
    ("classifier", "peft/bases/classifier", Base::Nf4),
];

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn load(base: &str) -> Box<dyn family::Model> {
    family::load(fixture(base).to_str().unwrap()).unwrap()
}

fn models() -> impl Iterator<Item = Model> {
    MODELS.into_iter().map(move |(name, base, form)| {
        let path = fixture(&format!("quantized/lora-{name}"));
        let adapter = AdapterDir::open(&path).unwrap();
        let lora = Lora { base: form, ..adapter.lora().clone() };
        let base = load(base);
        let chain = base.adapted(&lora, Some(adapter)).unwrap();
        assert!(chain.buffers().iter().any(|buffer| buffer.encoding == Encoding::Nf4), "{name}");
        Model::new(path, chain, gradient_name(name))
    })
}

#[test]
fn losses_and_gradients_are_those_of_peft_on_bitsandbytes() {
    models().for_each(|model| model.assert_loss_and_gradients());
}

#[test]
fn losses_of_training_are_those_of_peft_on_bitsandbytes() {
    models().for_each(Model::assert_trains);
}

#[test]
fn cut_chains_and_untracked_forwards_give_the_same_bits() {
    models().for_each(|model| model.assert_cuts_agree());
}

/// What bitsandbytes computed: its version, and the matrices that it quantized.
#[derive(Deserialize)]
struct Hashes {
    bitsandbytes: String,
    drawn: Vec<Drawn>,
    /// By base, all matrices that Transformers quantizes when it loads the base, by name.
    loaded: BTreeMap<String, BTreeMap<String, Hashed>>,
}

impl Hashes {
    fn read() -> Self {
        let hashes: Self = serde_json::from_str(include_str!("../fixtures/quantized/hashes.json")).unwrap();
        assert_eq!(hashes.bitsandbytes, "0.50.2");
        hashes
    }
}

/// The sha256 of what bitsandbytes makes of a matrix.
#[derive(Debug, Deserialize, PartialEq)]
struct Hashed {
    codes: String,
    absmax: String,
    dequantized: String,
}

impl Hashed {
    /// Those of the blocks of this many elements.
    fn of(blocks: &[u8], elements: usize) -> Self {
        let mut values = vec![0.0; elements];
        nf4::dequantize(blocks, 0, &mut values);
        let each = || blocks.chunks_exact(nf4::BLOCK_BYTES);
        let mut codes: Vec<u8> = each().flat_map(|block| &block[size_of::<f32>()..]).copied().collect();
        codes.truncate(elements.div_ceil(2));
        let scales: Vec<f32> = each().map(nf4::scale).collect();
        let sha256 = |bytes: &[u8]| format!("{:x}", Sha256::digest(bytes));
        Self {
            codes: sha256(&codes),
            absmax: sha256(bytemuck::cast_slice(&scales)),
            dequantized: sha256(bytemuck::cast_slice(&values)),
        }
    }
}

/// A drawn matrix, and what bitsandbytes makes of it.
#[derive(Deserialize)]
struct Drawn {
    rows: usize,
    columns: usize,
    seed: u32,
    /// Whether values are cut to bf16.
    bf16: bool,
    #[serde(flatten)]
    hashed: Hashed,
}

/// Factors of the rows of a drawn matrix, in turn.
const ROWS: [f32; 7] = [1.0, 0.5, 1e-3, 7.0, 0.0, 1e-39, 0.02];

/// As in `make_quantized.py`.
fn mix(x: u32) -> u32 {
    let x = (x ^ (x >> 15)).wrapping_mul(0x2C1B_3CE5);
    let x = (x ^ (x >> 12)).wrapping_mul(0x297A_2D39);
    x ^ (x >> 15)
}

impl Drawn {
    fn values(&self) -> Vec<f32> {
        let value = |i: usize| {
            let first =
                mix((i as u32).wrapping_mul(0x85EB_CA77).wrapping_add(self.seed.wrapping_mul(0x9E37_79B1)));
            let halves = [first, mix(first)].map(|x| i64::from(x & 0xFFFF) + i64::from(x >> 16));
            let sum = halves[0] + halves[1] - 2 * 0xFFFF;
            let value = sum as f32 / (1 << 17) as f32 * ROWS[i / self.columns % ROWS.len()];
            if self.bf16 { f32::from_bits(value.to_bits() & 0xFFFF_0000) } else { value }
        };
        (0..self.rows * self.columns).map(value).collect()
    }
}

#[test]
fn drawn_matrices_have_the_codes_scales_and_values_of_bitsandbytes() {
    let drawn = Hashes::read().drawn;
    assert_eq!(drawn.len(), 6);
    for drawn in drawn {
        let values = drawn.values();
        let mut blocks = vec![0; nf4::bytes_of(0..values.len()).len()];
        nf4::quantize(&values, &mut blocks);
        assert_eq!(Hashed::of(&blocks, values.len()), drawn.hashed, "[{}, {}]", drawn.rows, drawn.columns);
    }
}

/// Embeddings, norms, heads and classifiers are not among them.
#[test]
fn the_matrices_that_transformers_quantizes_are_quantized_to_the_same_bits_and_no_others() {
    let loaded = Hashes::read().loaded;
    assert_eq!(loaded.len(), 5);
    for (base, expected) in loaded {
        let lora = Lora { rank: 2, base: Base::Nf4, ..Lora::default() };
        let chain = load(&format!("peft/bases/{base}")).adapted(&lora, None).unwrap();
        let name: fn(&str) -> String =
            if base.starts_with("gpt2") { gpt2::hf_name } else { decoder::hf_name };
        let mut found = BTreeMap::new();
        for (index, buffer) in chain.buffers().iter().enumerate().filter(|(_, b)| b.encoding == Encoding::Nf4)
        {
            let blocks = chain.initial_values(index, 0).unwrap().bytes;
            for param in &buffer.params {
                let hashed = Hashed::of(&blocks[nf4::bytes_of(param.range())], param.len);
                found.insert(name(&param.name), hashed);
            }
        }
        assert_eq!(found, expected, "{base}");
    }
}
