//! The arithmetic of optimizer steps, on devices of CubeCL: that of `optimizer.rs`, formula by formula.
//!
//! Whether a device gives the host's bits is not assumed: [`compare`] tries it.

mod compare;
mod kernels;

pub(crate) use compare::compare;

use crate::optimizer::Update;
use cubecl::client::Client;
use cubecl::prelude::{CubeCount, CubeDim};
use hydra_core::cube::CubeBytes;

/// Units of a cube.
const UNITS: u32 = 256;

/// As many cubes as give each float a unit.
fn cubes(floats: &CubeBytes) -> (CubeCount, CubeDim) {
    let (units, elements) = (CubeDim::new_1d(UNITS), elements(floats));
    (cubecl::calculate_cube_count_elemwise(floats.client(), elements, units), units)
}

fn elements(floats: &CubeBytes) -> usize {
    hydra_core::DeviceBuffer::len(floats) / size_of::<f32>()
}

/// One step of a parameter in place, as the host's: `factor` scales the gradient first (clipping), `moments` are
/// AdamW's two, SGD's momentum, or none. All are as long as the parameter.
pub(crate) fn step(
    update: Update,
    params: &CubeBytes,
    grads: &CubeBytes,
    factor: Option<f32>,
    moments: &[CubeBytes],
) {
    let (client, (count, units)): (&Client, _) = (params.client(), cubes(params));
    let (clipped, factor) = (factor.is_some(), factor.unwrap_or(1.0));
    let (params, grads) = (params.floats(), grads.floats());
    match (update, moments) {
        (Update::AdamW { shrink, beta1, beta2, rest1, rest2, step_size, root2, eps }, [m, v]) => {
            let (m, v) = (m.floats(), v.floats());
            kernels::adamw::launch(
                client, count, units, params, grads, m, v, shrink, beta1, beta2, rest1, rest2, -step_size,
                root2, eps, factor, clipped,
            );
        }
        (Update::Sgd { rate, decay, momentum, first }, [buffer]) => kernels::sgd_with_momentum::launch(
            client,
            count,
            units,
            params,
            grads,
            buffer.floats(),
            -rate,
            decay,
            momentum,
            factor,
            clipped,
            first,
        ),
        (Update::Sgd { rate, decay, .. }, _) => {
            kernels::sgd::launch(client, count, units, params, grads, -rate, decay, factor, clipped);
        }
        (Update::AdamW { .. }, _) => {
            unreachable!("AdamW keeps two moments; the store makes as many as the spec says")
        }
    }
}

/// The sum of two gradients, in memory of its own.
pub(crate) fn sum(a: &CubeBytes, b: &CubeBytes) -> CubeBytes {
    let (out, (count, units)) = (a.room(elements(a)), cubes(a));
    kernels::sum::launch(a.client(), count, units, a.floats(), b.floats(), out.floats());
    out
}

/// Adds a gradient to one that nobody else has.
pub(crate) fn add(total: &CubeBytes, part: &CubeBytes) {
    let (count, units) = cubes(total);
    kernels::add::launch(total.client(), count, units, total.floats(), part.floats());
}

/// Zeros, as many as there are floats in `like`.
pub(crate) fn zeros(like: &CubeBytes) -> CubeBytes {
    let (out, (count, units)) = (like.room(elements(like)), cubes(like));
    kernels::fill::launch(like.client(), count, units, out.floats(), 0.0);
    out
}
