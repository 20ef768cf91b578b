//! Bases in 4 bits, against bitsandbytes, and adapters of them, against PEFT. `tests/fixtures/quantized/make_quantized.py` made the
//! fixtures.

use crate::peft::gradient_name;
use crate::reference::Model;
use hydra_core::{Encoding, nf4};
use hydra_models::family;
use hydra_models::lora::{AdapterDir, Base, Lora};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use std::path::Path;

/// The adapters, each with its base and the form of the base: a checkpoint in 4 bits is read as it is.
const MODELS: [(&str, &str, Base); 4] = [
    ("single", "quantized/single", Base::Float),
    ("double", "quantized/double", Base::Float),
    ("llama", "peft/bases/llama", Base::Nf4),
    ("gpt2", "peft/bases/gpt2", Base::Nf4),
];

fn models() -> impl Iterator<Item = Model> {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    MODELS.into_iter().map(move |(name, base, form)| {
        let path = fixtures.join("quantized").join(format!("lora-{name}"));
        let adapter = AdapterDir::open(&path).unwrap();
        let lora = Lora { base: form, ..adapter.lora().clone() };
        let base = family::load(fixtures.join(base).to_str().unwrap()).unwrap();
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
}

/// A drawn matrix, with the sha256 of what bitsandbytes makes of it.
#[derive(Deserialize)]
struct Drawn {
    rows: usize,
    columns: usize,
    seed: u32,
    /// Whether values are cut to bf16.
    bf16: bool,
    codes: String,
    absmax: String,
    dequantized: String,
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

fn sha256(bytes: &[u8]) -> String {
    format!("{:x}", Sha256::digest(bytes))
}

#[test]
fn drawn_matrices_have_the_codes_scales_and_values_of_bitsandbytes() {
    let hashes: Hashes = serde_json::from_str(include_str!("../fixtures/quantized/hashes.json")).unwrap();
    assert_eq!((hashes.bitsandbytes.as_str(), hashes.drawn.len()), ("0.50.2", 5));
    for drawn in hashes.drawn {
        let mut values = drawn.values();
        let mut blocks = vec![0; nf4::bytes_of(0..values.len()).len()];
        nf4::quantize(&values, &mut blocks);
        nf4::dequantize(&blocks, 0, &mut values);
        let each = || blocks.chunks_exact(nf4::BLOCK_BYTES);
        let mut codes: Vec<u8> = each().flat_map(|block| &block[size_of::<f32>()..]).copied().collect();
        codes.truncate(values.len().div_ceil(2));
        let scales: Vec<f32> = each().map(nf4::scale).collect();
        let found = [&codes[..], bytemuck::cast_slice(&scales), bytemuck::cast_slice(&values)].map(sha256);
        let expected = [&drawn.codes, &drawn.absmax, &drawn.dequantized];
        assert_eq!(found.each_ref(), expected, "[{}, {}]", drawn.rows, drawn.columns);
    }
}
