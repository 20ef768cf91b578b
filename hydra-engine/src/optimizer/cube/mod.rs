//! The arithmetic of optimizer steps, on devices of CubeCL: that of `optimizer.rs`, formula by formula.
//!
//! Whether a device gives the host's bits is not assumed: [`compare`] tries it.

mod compare;
mod kernels;

pub(crate) use compare::compare;

use crate::optimizer::arithmetic::Update;
use cubecl::client::Client;
use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::{BufferArg, CubeCount, CubeDim};
use hydra_core::FloatType;
use hydra_core::cube::CubeBytes;

/// Units of a cube.
const UNITS: u32 = 256;

/// Floats on the device, of any type.
#[derive(Clone, Debug)]
pub(crate) struct CubeFloats {
    pub bytes: CubeBytes,
    pub float: FloatType,
}

impl CubeFloats {
    pub(crate) fn wide(bytes: CubeBytes) -> Self {
        Self { bytes, float: FloatType::F32 }
    }

    /// As a kernel's argument, and the type that it is generic over.
    fn arg(&self) -> (BufferArg, ElemType) {
        let kind = match self.float {
            FloatType::F32 => FloatKind::F32,
            FloatType::Bf16 => FloatKind::BF16,
            FloatType::F16 => FloatKind::F16,
        };
        (self.bytes.floats(self.float), ElemType::Float(kind))
    }

    fn elements(&self) -> usize {
        hydra_core::DeviceBuffer::len(&self.bytes) / self.float.bytes()
    }

    /// Room for a sum of as many.
    fn room(&self) -> CubeBytes {
        self.bytes.room(self.elements())
    }

    /// As many cubes as give each float a unit.
    fn cubes(&self) -> (CubeCount, CubeDim) {
        let units = CubeDim::new_1d(UNITS);
        (cubecl::calculate_cube_count_elemwise(self.bytes.client(), self.elements(), units), units)
    }
}

/// `f32` as a kernel's argument.
fn wide(bytes: &CubeBytes) -> BufferArg {
    bytes.floats(FloatType::F32)
}

/// One step of a parameter in place, as the host's: `factor` scales the gradient first (clipping), `moments` are
/// AdamW's two, SGD's momentum, or none. All are as long as the parameter.
pub(crate) fn step(
    update: Update,
    params: &CubeBytes,
    grads: &CubeFloats,
    factor: Option<f32>,
    moments: &[CubeBytes],
) {
    let (client, (count, units)): (&Client, _) = (params.client(), grads.cubes());
    let (clipped, factor) = (factor.is_some(), factor.unwrap_or(1.0));
    let (params, (grads, float)) = (wide(params), grads.arg());
    match (update, moments) {
        (Update::AdamW { shrink, beta1, beta2, rest1, rest2, step_size, root2, eps }, [m, v]) => {
            let (m, v) = (wide(m), wide(v));
            kernels::adamw::launch(
                client, count, units, params, grads, m, v, shrink, beta1, beta2, rest1, rest2, -step_size,
                root2, eps, factor, clipped, float,
            );
        }
        (Update::Sgd { rate, decay, momentum, first }, [buffer]) => kernels::sgd_with_momentum::launch(
            client,
            count,
            units,
            params,
            grads,
            wide(buffer),
            -rate,
            decay,
            momentum,
            factor,
            clipped,
            first,
            float,
        ),
        (Update::Sgd { rate, decay, .. }, _) => {
            kernels::sgd::launch(client, count, units, params, grads, -rate, decay, factor, clipped, float);
        }
        (Update::AdamW { .. }, _) => {
            unreachable!("AdamW keeps two moments; the store makes as many as the spec says")
        }
    }
}

/// The sum of two gradients, in memory of its own.
pub(crate) fn sum(a: &CubeFloats, b: &CubeFloats) -> CubeBytes {
    let (out, (count, units)) = (a.room(), a.cubes());
    let ((a, a_float), (b, b_float), client) = (a.arg(), b.arg(), out.client());
    kernels::sum::launch(client, count, units, a, b, wide(&out), a_float, b_float);
    out
}

/// Adds a gradient to one that nobody else has.
pub(crate) fn add(total: &CubeBytes, part: &CubeFloats) {
    let ((count, units), (part, float)) = (part.cubes(), part.arg());
    kernels::add::launch(total.client(), count, units, wide(total), part, float);
}

/// Rounds as many values to the other type, in place of what is there.
pub(crate) fn round(values: &CubeBytes, out: &CubeFloats) {
    let ((count, units), (out, float)) = (out.cubes(), out.arg());
    kernels::round::launch(values.client(), count, units, wide(values), out, float);
}

/// Zeros, as many as there are floats in `like`.
pub(crate) fn zeros(like: &CubeFloats) -> CubeFloats {
    let (out, (count, units)) = (like.room(), like.cubes());
    kernels::fill::launch(out.client(), count, units, wide(&out), 0.0);
    CubeFloats::wide(out)
}
