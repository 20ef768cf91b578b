//! Gradient accumulation on a device: the gradients of consecutive microbatches of a microbatch group are added
//! there, and only the result is downloaded.
//!
//! Accumulation starts at the first microbatch of a minibatch, and the host adds later microbatches in the same
//! order, so the bits are those of gradients that are downloaded one by one.

use crate::optimizer::{DeviceFloats, DeviceMemory};
use crate::protocol::{Gradient, LayerGradients};
use hydra_core::{Chain, DeviceTensor, FloatType};
use hydra_spill::Reservation;
use std::sync::Arc;

/// The gradients accumulated so far, for the next shard task on the device, with the reservation that covers them.
pub(super) struct Sums {
    pub gradients: LayerGradients,
    pub _charge: Arc<Reservation>,
}

/// Returns whether a layer's gradient of a parameter is accumulated on the device.
pub(super) fn adds_up(chain: &Chain, layer: usize, param: usize) -> bool {
    let buffer = chain.layers()[layer].params[param].buffer;
    chain.buffers()[buffer].adds_up()
}

/// The gradients that are accumulated on the device; `None` for others.
pub(super) fn summable(chain: &Chain, gradients: &LayerGradients) -> LayerGradients {
    let of = |(layer, gradients): &(usize, Gradient<DeviceTensor>)| {
        let param = |(param, gradient): (usize, &Option<DeviceTensor>)| {
            gradient.clone().filter(|_| adds_up(chain, *layer, param))
        };
        (*layer, gradients.iter().enumerate().map(param).collect())
    };
    gradients.iter().map(of).collect()
}

/// The bytes of gradients.
pub(super) fn bytes(gradients: &LayerGradients) -> u64 {
    gradients.iter().flat_map(|(_, of)| of.iter().flatten()).map(DeviceTensor::len_bytes).sum()
}

/// Adds the gradients of a microbatch to the accumulated ones. A missing gradient counts as zero, which is added too.
pub(super) fn add(
    chain: &Chain,
    memory: &dyn DeviceMemory,
    sums: &LayerGradients,
    next: &mut LayerGradients,
) {
    for ((layer, next), (_, sums)) in next.iter_mut().zip(sums) {
        for (param, (next, sum)) in next.iter_mut().zip(sums).enumerate() {
            if adds_up(chain, *layer, param) {
                *next = add_one(memory, sum.as_ref(), next.take());
            }
        }
    }
}

fn add_one(
    memory: &dyn DeviceMemory,
    sum: Option<&DeviceTensor>,
    next: Option<DeviceTensor>,
) -> Option<DeviceTensor> {
    let floats =
        |of: &DeviceTensor| DeviceFloats { bytes: of.bytes.clone(), float: FloatType::F32, own: false };
    let shape = sum.or(next.as_ref())?.shape.clone();
    let dtype = sum.or(next.as_ref())?.dtype;
    let total = match (sum, next) {
        (Some(sum), next) => memory.sum(&floats(sum), next.as_ref().map(floats).as_ref()),
        (None, Some(next)) => memory.sum(&floats(&next), None),
        (None, None) => return None,
    };
    Some(DeviceTensor::view(total.bytes, shape, dtype))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimizer::memory_of;
    use hydra_core::{DeviceId, HostTensor};
    use hydra_models::gpt2::{self, Gpt2Config};
    use hydra_spill::HostCopyLink;

    /// A gradient of each parameter of the first two layers, counting from this number; none of the third parameter.
    fn gradients(chain: &Chain, from: f32) -> LayerGradients {
        let layer = |layer: usize| {
            let params = chain.layers()[layer].params.iter().enumerate();
            let gradient = |(param, at): (usize, &hydra_core::ParamRef)| {
                let len = chain.buffers()[at.buffer].params[at.slot].len;
                let values = (0..len).map(|i| from + (i + param) as f32).collect();
                (param != 2).then(|| {
                    let HostTensor { bytes, shape, dtype } = HostTensor::float(values, [len]);
                    DeviceTensor::view(bytes.into(), shape, dtype)
                })
            };
            (layer, params.map(gradient).collect())
        };
        (0..2).map(layer).collect()
    }

    #[test]
    fn what_one_layer_alone_names_adds_up_in_order() {
        let mut config = Gpt2Config::preset("bytes-tiny").unwrap();
        (config.n_embd, config.n_layer, config.n_head, config.n_positions) = (8, 1, 2, 4);
        let chain = gpt2::chain(&config, None).unwrap();
        let memory = memory_of(Arc::new(HostCopyLink::new(DeviceId(77))), &burn::tensor::Device::flex());
        let (first, second) = (gradients(&chain, 1e8), gradients(&chain, 3.0));
        let mut sum = second.clone();
        add(&chain, memory.as_ref(), &summable(&chain, &first), &mut sum);
        let values = |of: &Option<DeviceTensor>| -> Vec<f32> {
            of.as_ref().map_or_else(Vec::new, |of| bytemuck::cast_slice(of.bytes.as_host().unwrap()).to_vec())
        };
        let mut tied = 0;
        for (layer, of) in sum.iter().map(|(layer, of)| (*layer, of)) {
            for (param, of) in of.iter().enumerate() {
                let [a, b] = [&first, &second].map(|given| values(&given[layer].1[param]));
                let expected = match adds_up(&chain, layer, param) {
                    true => a.iter().zip(&b).map(|(a, b)| a + b).collect(),
                    false => b,
                };
                tied += usize::from(!adds_up(&chain, layer, param));
                assert_eq!(values(of), expected, "parameter {param} of layer {layer}");
            }
        }
        assert_eq!(tied, 1, "the embedding is the head's too");
        let all: u64 =
            first.iter().flat_map(|(_, of)| of.iter().flatten()).map(DeviceTensor::len_bytes).sum();
        assert_eq!(bytes(&first), all);
        assert!(bytes(&summable(&chain, &first)) < all);
    }
}
