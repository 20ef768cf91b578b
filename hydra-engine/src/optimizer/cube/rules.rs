//! The optimizers that have kernels.

use super::{CubeFloats, kernels, wide};
use hydra_core::Optimizer;
use hydra_core::cube::CubeBytes;
use hydra_core::optimizer::{AdamW, AdamWConstants, Sgd, SgdConstants, Step};

/// An optimizer whose formula has a kernel.
pub(super) trait Kernel {
    /// Steps a parameter in place, as on the host; `clip` scales the gradient first. All slices have the parameter's
    /// length.
    fn launch(
        &self,
        step: &Step,
        clip: Option<f32>,
        params: &CubeBytes,
        grads: &CubeFloats,
        moments: &[CubeBytes],
    );
}

/// The kernel of an optimizer, if it has one.
pub(super) fn kernel(optimizer: &dyn Optimizer) -> Option<&dyn Kernel> {
    let adamw = optimizer.downcast_ref::<AdamW>().map(|rule| rule as &dyn Kernel);
    adamw.or_else(|| optimizer.downcast_ref::<Sgd>().map(|rule| rule as &dyn Kernel))
}

impl Kernel for AdamW {
    fn launch(
        &self,
        step: &Step,
        clip: Option<f32>,
        params: &CubeBytes,
        grads: &CubeFloats,
        moments: &[CubeBytes],
    ) {
        let AdamWConstants { shrink, beta1, beta2, rest1, rest2, step_size, root2, eps } =
            self.constants(step);
        let (client, (count, units), (grads, float)) = (params.client(), grads.cubes(), grads.arg());
        let (params, m, v) = (wide(params), wide(&moments[0]), wide(&moments[1]));
        let (clipped, factor) = (clip.is_some(), clip.unwrap_or(1.0));
        kernels::adamw::launch(
            client, count, units, params, grads, m, v, shrink, beta1, beta2, rest1, rest2, -step_size, root2,
            eps, factor, clipped, float,
        );
    }
}

impl Kernel for Sgd {
    fn launch(
        &self,
        step: &Step,
        clip: Option<f32>,
        params: &CubeBytes,
        grads: &CubeFloats,
        moments: &[CubeBytes],
    ) {
        let SgdConstants { rate, decay, momentum, first } = self.constants(step);
        let (client, (count, units), (grads, float)) = (params.client(), grads.cubes(), grads.arg());
        let (params, clipped, factor) = (wide(params), clip.is_some(), clip.unwrap_or(1.0));
        match moments {
            [] => kernels::sgd::launch(
                client, count, units, params, grads, -rate, decay, factor, clipped, float,
            ),
            [buffer, ..] => {
                let buffer = wide(buffer);
                kernels::sgd_with_momentum::launch(
                    client, count, units, params, grads, buffer, -rate, decay, momentum, factor, clipped,
                    first, float,
                );
            }
        }
    }
}
