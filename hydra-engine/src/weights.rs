//! Computing initial weights, and hashing weights.

use hydra_core::{Chain, WeightError};
use hydra_spill::Hashes;
use rayon::prelude::*;
use sha2::{Digest, Sha256};

/// The initial values of a buffer.
pub(crate) fn initial_buffer(chain: &Chain, buffer: usize, seed: u64) -> Result<Vec<f32>, WeightError> {
    let mut out = vec![0.0; chain.buffers()[buffer].elements];
    chain.source().fill(chain, buffer, seed, &mut out)?;
    Ok(out)
}

/// The SHA-256 of each parameter of a buffer.
pub(crate) fn param_hashes(chain: &Chain, buffer: usize, values: &[f32]) -> Hashes {
    let params = chain.buffers()[buffer].params.par_iter();
    params
        .map(|param| Sha256::digest(bytemuck::cast_slice::<f32, u8>(&values[param.range()])).into())
        .collect()
}

/// Hashes weights buffer by buffer, in chain order, without alignment gaps.
#[derive(Default)]
pub(crate) struct WeightHash(Sha256);

impl WeightHash {
    /// Adds the next buffer of the chain.
    pub(crate) fn add(&mut self, chain: &Chain, buffer: usize, values: &[f32]) {
        for param in &chain.buffers()[buffer].params {
            self.0.update(bytemuck::cast_slice::<f32, u8>(&values[param.range()]));
        }
    }

    /// Adds the hashes of the parameters of the next buffer.
    pub(crate) fn add_hashes(&mut self, hashes: &Hashes) {
        hashes.iter().for_each(|hash| self.0.update(hash));
    }

    /// The hash in hexadecimal.
    pub(crate) fn finish(self) -> String {
        hexadecimal(self.0)
    }
}

/// A hash in hexadecimal.
pub(crate) fn hexadecimal(hash: Sha256) -> String {
    format!("{:x}", hash.finalize())
}
