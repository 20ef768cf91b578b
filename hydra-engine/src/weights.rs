//! Computing initial weights, and hashing weights.

use bytes::Bytes;
use hydra_core::{BufferParam, Chain, Encoding, FloatType, ParamBufferLayout, WeightError, leased};
use hydra_spill::{
    Budget, Floats, Hashes, InPlaceParams, MastersPart, PIECE, ParamBufferId, SpillError, TierStore,
};
use rayon::prelude::*;
use sha2::{Digest, Sha256};
use std::ops::Range;
use std::sync::Arc;

/// The initial values of a buffer.
pub(crate) fn initial_buffer(chain: &Chain, buffer: usize, seed: u64) -> Result<Vec<f32>, WeightError> {
    let mut out = vec![0.0; chain.buffers()[buffer].elements];
    chain.source().fill(chain, buffer, seed, &mut out)?;
    Ok(out)
}

/// The parameters of a buffer in a store, as `f32`.
///
/// If the store has them in a narrower form alone, they are widened in memory reserved from `budget`.
pub(crate) fn read_params(
    store: &dyn TierStore,
    id: ParamBufferId,
    layout: &ParamBufferLayout,
    budget: &Budget,
) -> Result<Bytes, SpillError> {
    match (store.in_place(id)?, layout.encoding) {
        (Some((files, _)), _) => read_in_place(&files, id, layout, 0..layout.elements, budget),
        (None, Encoding::Masters) => store.read_masters(id).map(|view| view.bytes),
        (None, _) => widened(store, id, layout, 0..layout.elements, budget),
    }
}

/// Some elements of the parameters of a buffer in a store, as `f32`: whole pieces, or up to the end. They are widened as by
/// [`read_params`].
pub(crate) fn read_piece(
    store: &dyn TierStore,
    id: ParamBufferId,
    layout: &ParamBufferLayout,
    elements: Range<usize>,
    budget: &Budget,
) -> Result<Bytes, SpillError> {
    match (store.in_place(id)?, layout.encoding) {
        (Some((files, _)), _) => read_in_place(&files, id, layout, elements, budget),
        (None, Encoding::Masters) => {
            store.read_part(id, MastersPart::Params, elements).map(|view| view.bytes)
        }
        (None, _) => widened(store, id, layout, elements, budget),
    }
}

/// Reads elements of a buffer from its files piece by piece, as `f32`.
fn read_in_place(
    files: &InPlaceParams,
    id: ParamBufferId,
    layout: &ParamBufferLayout,
    elements: Range<usize>,
    budget: &Budget,
) -> Result<Bytes, SpillError> {
    let is_wide = layout.float == FloatType::F32;
    let narrow = if is_wide { 0 } else { elements.len().min(PIECE) };
    let bytes = elements.len() * size_of::<f32>() + narrow * layout.float.bytes();
    let mut reservation = budget.reserve(bytes as u64, id.to_string())?;
    let (mut values, mut bits) = (vec![0.0; elements.len()], vec![0_u16; narrow]);
    if is_wide {
        files.read(elements, bytemuck::cast_slice_mut(&mut values))?;
    } else {
        for (index, values) in values.chunks_mut(PIECE).enumerate() {
            let (start, bits) = (elements.start + index * PIECE, &mut bits[..values.len()]);
            // The gaps between parameters.
            bits.fill(0);
            files.read(start..start + values.len(), bytemuck::cast_slice_mut(bits))?;
            layout.float.widen(bits, values);
        }
    }
    drop(bits);
    drop(reservation.split((narrow * layout.float.bytes()) as u64));
    Ok(leased(Bytes::from_owner(Floats::from(values)), Arc::new(reservation)))
}

/// The pieces of a buffer, and the parameters' elements in each of them.
pub(crate) fn pieces(
    layout: &ParamBufferLayout,
) -> impl Iterator<Item = (Range<usize>, impl Iterator<Item = (usize, Range<usize>)>)> {
    (0..layout.elements).step_by(PIECE).map(|start| {
        let piece = start..layout.elements.min(start + PIECE);
        let among = {
            let piece = piece.clone();
            move |(slot, param): (usize, &BufferParam)| Some((slot, param.among(&piece)?))
        };
        (piece, layout.params.iter().enumerate().filter_map(among))
    })
}

/// Reads elements of a buffer that is not stored as `f32`, piece by piece, and widens them.
fn widened(
    store: &dyn TierStore,
    id: ParamBufferId,
    layout: &ParamBufferLayout,
    elements: Range<usize>,
    budget: &Budget,
) -> Result<Bytes, SpillError> {
    let reservation = budget.reserve((elements.len() * size_of::<f32>()) as u64, id.to_string())?;
    let mut values = vec![0.0; elements.len()];
    for (index, values) in values.chunks_mut(PIECE).enumerate() {
        let start = elements.start + index * PIECE;
        let words = layout.words_of(start..start + values.len());
        let narrow = store.read_promoted(id, words, size_of::<u16>())?;
        layout.decode(bytemuck::cast_slice(&narrow.bytes), values);
    }
    Ok(leased(Bytes::from_owner(Floats::from(values)), Arc::new(reservation)))
}

/// The SHA-256 of each parameter of a buffer.
pub(crate) fn param_hashes(chain: &Chain, buffer: usize, values: &[f32]) -> Hashes {
    let params = chain.buffers()[buffer].params.par_iter();
    params
        .map(|param| Sha256::digest(bytemuck::cast_slice::<f32, u8>(&values[param.range()])).into())
        .collect()
}

/// Hashes the parameters of a buffer part by part; the result is that of [`param_hashes`].
pub(crate) struct ParamHashes(Vec<Sha256>);

impl ParamHashes {
    /// Nothing of a buffer with this number of parameters.
    pub(crate) fn new(params: usize) -> Self {
        Self(vec![Sha256::default(); params])
    }

    /// Adds the next values of a parameter.
    pub(crate) fn add(&mut self, slot: usize, values: &[f32]) {
        self.0[slot].update(bytemuck::cast_slice::<f32, u8>(values));
    }

    /// The hashes.
    pub(crate) fn finish(self) -> Hashes {
        self.0.into_iter().map(|hash| hash.finalize().into()).collect()
    }
}

/// Hashes weights: the SHA-256 of the hashes of their parameters, in chain order.
#[derive(Default)]
pub(crate) struct WeightHash(Sha256);

impl WeightHash {
    /// Adds the hashes of the parameters of the next buffer.
    pub(crate) fn add(&mut self, hashes: &Hashes) {
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
