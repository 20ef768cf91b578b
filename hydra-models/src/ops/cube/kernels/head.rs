//! The loss of rows of logits, one row per cube.

use super::UNITS;
use super::sums::{max_units, sum_units};
use cubecl::ir::ElemType;
use cubecl::prelude::*;

/// One over the number of positions with a target: one cube.
#[cube(launch)]
pub(crate) fn share(targets: &[i32], out: &mut [f32]) {
    let mut count = 0.0f32;
    let mut i = UNIT_POS as usize;
    while i < targets.len() {
        if targets[i] >= 0i32 {
            count += 1.0f32;
        }
        i += UNITS;
    }
    // Integers below 2^24 are exact.
    let count = sum_units(count);
    if UNIT_POS == 0 {
        out[0] = 1.0f32 / count;
    }
}

/// Columns of logits per part.
pub(crate) const PART: usize = 2048;

/// The index of a logit in a chunk of `rows` rows: columns are stored in parts, each row by row; the remaining `rest`
/// columns form a narrower last part.
#[cube]
fn place(row: usize, column: usize, rows: usize, rest: usize, vocabulary: usize) -> usize {
    let behind = vocabulary - rest;
    let mut place = behind * rows + row * rest + column - behind;
    if column < behind {
        place = (column / PART * rows + row) * PART + column % PART;
    }
    place
}

/// The losses of a chunk's positions, starting at `start`: zero without a target, `absent` for a target outside the
/// vocabulary. Writes the logits' gradients to `out`, which may alias the logits, if `gradients`: those of the sum of the
/// losses times `shares`, which holds one number for all positions, or one for `each`. Logits and gradients have the
/// layout of [`place`].
#[cube(launch)]
pub(crate) fn row_losses<E: Float>(
    logits: &[f32],
    out: &mut [E],
    targets: &[i32],
    shares: &[f32],
    losses: &mut [f32],
    start: usize,
    rest: usize,
    vocabulary: usize,
    absent: f32,
    #[comptime] gradients: bool,
    #[comptime] each: bool,
    #[define(E)] _float: ElemType,
) {
    let (row, rows) = (CUBE_POS, logits.len() / vocabulary);
    if row >= rows {
        terminate!();
    }
    let target = targets[start + row];
    let mut largest = logits[place(row, 0, rows, rest, vocabulary)];
    let mut i = UNIT_POS as usize;
    while i < vocabulary {
        let logit = logits[place(row, i, rows, rest, vocabulary)];
        if logit > largest {
            largest = logit;
        }
        i += UNITS;
    }
    let largest = max_units(largest);
    let mut sum = 0.0f32;
    // The target's logit in the unit that reads it, zero in the others: a unit reads an element that it overwrites
    // later.
    let mut logit = 0.0f32;
    if UNIT_POS == 0 && target >= 0i32 && (target as usize) >= vocabulary {
        logit = absent;
    }
    let mut i = UNIT_POS as usize;
    while i < vocabulary {
        let other = logits[place(row, i, rows, rest, vocabulary)];
        sum += f32::exp(other - largest);
        if target >= 0i32 && i == target as usize {
            logit = other;
        }
        i += UNITS;
    }
    let (sum, logit) = (sum_units(sum), sum_units(logit));
    if UNIT_POS == 0 {
        let mut loss = 0.0f32;
        if target >= 0i32 {
            loss = largest - logit + f32::ln(sum);
        }
        losses[start + row] = loss;
    }
    if gradients {
        let mut share = shares[0];
        if each {
            share = shares[start + row];
        }
        if target < 0i32 {
            share = 0.0f32;
        }
        let factor = share / sum;
        let mut i = UNIT_POS as usize;
        while i < vocabulary {
            let at = place(row, i, rows, rest, vocabulary);
            let mut gradient = 0.0f32;
            if target >= 0i32 {
                gradient = f32::exp(logits[at] - largest) * factor;
                if i == target as usize {
                    gradient -= share;
                }
            }
            out[at] = E::cast_from(gradient);
            i += UNITS;
        }
    }
}

/// The sum of the losses times `share`: one cube.
#[cube(launch)]
pub(crate) fn mean_loss(losses: &[f32], share: &[f32], out: &mut [f32]) {
    let mut sum = 0.0f32;
    let mut i = UNIT_POS as usize;
    while i < losses.len() {
        sum += losses[i];
        i += UNITS;
    }
    let sum = sum_units(sum);
    if UNIT_POS == 0 {
        out[0] = sum * share[0];
    }
}
