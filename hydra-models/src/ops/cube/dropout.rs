//! Dropout.

use super::kernels::dropout::{DrawsLaunch, drop_out, drop_out_onto};
use super::tensors::{arg, elements, float, floats, units, whole};
use crate::ops::dropout::DropoutOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Cube, TensorMetadata};
use hydra_core::DropoutMask;

/// A mask as a kernel argument; without a mask, an argument that is never read.
pub(super) fn draws(mask: Option<DropoutMask>) -> DrawsLaunch {
    let Some(mask) = mask else { return DrawsLaunch::new(0, 0, 0, 1.0) };
    let (key, dropped, keep) = mask.numbers();
    // If every draw is below the bound, everything is dropped.
    let (dropped, keep) = u32::try_from(dropped).map_or((0, 0.0), |dropped| (dropped, keep));
    DrawsLaunch::new(key as u32, (key >> 32) as u32, dropped, keep)
}

impl DropoutOps for Cube {
    fn drop_out(x: FloatTensor<Self>, mask: DropoutMask) -> FloatTensor<Self> {
        let [x] = whole([x]);
        let y = floats(&x, x.shape());
        let cubes = elements(&y, y.meta.num_elements());
        drop_out::launch(&y.client, cubes, units(), arg(&x), arg(&y), draws(Some(mask)), float(&y));
        y
    }

    fn drop_out_onto(
        residual: FloatTensor<Self>,
        x: FloatTensor<Self>,
        mask: DropoutMask,
    ) -> FloatTensor<Self> {
        let [residual, x] = whole([residual, x]);
        let y = floats(&x, x.shape());
        let cubes = elements(&y, y.meta.num_elements());
        let (residual, x, draws) = (arg(&residual), arg(&x), draws(Some(mask)));
        drop_out_onto::launch(&y.client, cubes, units(), residual, x, arg(&y), draws, float(&y));
        y
    }
}
