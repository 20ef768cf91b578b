//! Embedding lookup, and the gradients of the tables.

use cubecl::ir::ElemType;
use cubecl::prelude::*;

/// The rows of `tokens` selected by `ids` plus those of `positions`, one unit per element. The row of an out-of-range
/// id is `absent`.
#[cube(launch)]
pub(crate) fn embed<E: Float>(
    tokens: &[E],
    positions: &[E],
    ids: &[i32],
    out: &mut [E],
    length: usize,
    width: usize,
    absent: f32,
    #[define(E)] _float: ElemType,
) {
    if ABSOLUTE_POS < out.len() {
        let (place, column) = (ABSOLUTE_POS / width, ABSOLUTE_POS % width);
        let id = ids[place];
        let rows = tokens.len() / width;
        let mut token = absent;
        if id >= 0i32 && (id as usize) < rows {
            token = f32::cast_from(tokens[id as usize * width + column]);
        }
        let position = f32::cast_from(positions[(place % length) * width + column]);
        out[ABSOLUTE_POS] = E::cast_from(token + position);
    }
}

/// The rows of `tokens` selected by `ids`, one unit per element. The row of an out-of-range id is `absent`.
#[cube(launch)]
pub(crate) fn lookup<E: Float>(
    tokens: &[E],
    ids: &[i32],
    out: &mut [E],
    width: usize,
    absent: f32,
    #[define(E)] _float: ElemType,
) {
    if ABSOLUTE_POS < out.len() {
        let (place, column) = (ABSOLUTE_POS / width, ABSOLUTE_POS % width);
        let id = ids[place];
        let rows = tokens.len() / width;
        let mut token = E::cast_from(absent);
        if id >= 0i32 && (id as usize) < rows {
            token = tokens[id as usize * width + column];
        }
        out[ABSOLUTE_POS] = token;
    }
}

/// For each position, the next one with the same id, or the number of positions if there is none; in `first`, whether
/// it is the first with its id. One unit per position.
#[cube(launch)]
pub(crate) fn link_places(ids: &[i32], next: &mut [u32], first: &mut [u32]) {
    let places = ids.len();
    if ABSOLUTE_POS < places {
        let id = ids[ABSOLUTE_POS];
        let mut after = ABSOLUTE_POS + 1;
        while after < places && ids[after] != id {
            after += 1;
        }
        next[ABSOLUTE_POS] = after as u32;
        let mut before = 0usize;
        while before < ABSOLUTE_POS && ids[before] != id {
            before += 1;
        }
        let mut is_first = 0u32;
        if before == ABSOLUTE_POS {
            is_first = 1u32;
        }
        first[ABSOLUTE_POS] = is_first;
    }
}

/// Writes the gradient's rows into the table's gradient, which holds zeros: one unit per position and column; the unit
/// of an id's first position adds all positions of the id in order.
#[cube(launch)]
pub(crate) fn token_gradient<E: Float>(
    ids: &[i32],
    next: &[u32],
    first: &[u32],
    gradient: &[E],
    out: &mut [E],
    width: usize,
    #[define(E)] _float: ElemType,
) {
    if ABSOLUTE_POS < gradient.len() {
        let (place, column) = (ABSOLUTE_POS / width, ABSOLUTE_POS % width);
        let id = ids[place];
        let rows = out.len() / width;
        if first[place] == 1u32 && id >= 0i32 && (id as usize) < rows {
            let mut sum = 0.0f32;
            let mut at = place;
            while at < ids.len() {
                sum += f32::cast_from(gradient[at * width + column]);
                at = next[at] as usize;
            }
            out[id as usize * width + column] = E::cast_from(sum);
        }
    }
}

/// The gradient of the position table: the sum over the batch for the first `length` rows, zero below.
#[cube(launch)]
pub(crate) fn position_gradient<E: Float>(
    gradient: &[E],
    out: &mut [E],
    batch: usize,
    length: usize,
    width: usize,
    #[define(E)] _float: ElemType,
) {
    if ABSOLUTE_POS < out.len() {
        let mut sum = 0.0f32;
        if ABSOLUTE_POS / width < length {
            for sequence in 0..batch {
                sum += f32::cast_from(gradient[sequence * length * width + ABSOLUTE_POS]);
            }
        }
        out[ABSOLUTE_POS] = E::cast_from(sum);
    }
}
