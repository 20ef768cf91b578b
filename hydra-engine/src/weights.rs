//! Computing initial weights, and hashing weights.

use bytes::Bytes;
use hydra_core::{Chain, Encoding, ParamBufferLayout, WeightError, leased};
use hydra_spill::{Budget, Floats, Hashes, ParamBufferId, SpillError, TierStore};
use rayon::prelude::*;
use sha2::{Digest, Sha256};
use std::sync::Arc;

/// The initial values of a buffer.
pub(crate) fn initial_buffer(chain: &Chain, buffer: usize, seed: u64) -> Result<Vec<f32>, WeightError> {
    let mut out = vec![0.0; chain.buffers()[buffer].elements];
    chain.source().fill(chain, buffer, seed, &mut out)?;
    Ok(out)
}

/// The parameters of a buffer in a store, as `f32`.
///
/// If the store has them in a narrower type alone, they are widened in memory reserved from `budget`.
pub(crate) fn read_params(
    store: &dyn TierStore,
    id: ParamBufferId,
    layout: &ParamBufferLayout,
    budget: &Budget,
) -> Result<Bytes, SpillError> {
    match layout.encoding {
        Encoding::Masters => store.read_masters(id).map(|view| view.bytes),
        Encoding::Narrow => widened(layout, &store.read(id)?.bytes, id, budget),
    }
}

/// The values of these bytes of a buffer's element type, as `f32`.
pub(crate) fn widened(
    layout: &ParamBufferLayout,
    narrow: &[u8],
    id: ParamBufferId,
    budget: &Budget,
) -> Result<Bytes, SpillError> {
    let narrow: &[u16] = bytemuck::cast_slice(narrow);
    let reservation = budget.reserve(size_of_val(narrow) as u64 * 2, id.to_string())?;
    let mut values = vec![0.0; narrow.len()];
    layout.float.widen(narrow, &mut values);
    Ok(leased(Bytes::from_owner(Floats::from(values)), Arc::new(reservation)))
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
