//! Whole model outputs, for tests and for reading logits.

use burn::tensor::{Device, FloatDType, Tensor};
use hydra_core::{Activation, AnyTensor, Chain, DeviceBytes, Pass, forward_range, promote_layers};

/// The input `[items, vectors, width]` of a chain's last layer for these inputs and targets, without dropout, and that layer's
/// parameters, on the plain `device`. Layers are promoted one after the other from the bytes that `buffer` returns.
pub(crate) fn before_last<const D: usize, const N: usize>(
    chain: &Chain,
    buffer: &dyn Fn(usize) -> DeviceBytes,
    (inputs, targets): (Activation, Activation),
    device: &Device,
) -> (Tensor<D>, [AnyTensor; N]) {
    let pass = Pass::evaluate(targets);
    let last = chain.len() - 1;
    let x = (0..last).fold(inputs, |x, index| {
        forward_range(&promote_layers(chain, index..index + 1, buffer, device, false), index, x, &pass)
    });
    let device = device.clone().autodiff();
    let params: Vec<AnyTensor> =
        chain.layer_params(last, buffer).iter().map(|p| p.to_device(&device)).collect();
    let found = params.len();
    let params = params.try_into();
    (
        x.part(0).into_float(),
        params.unwrap_or_else(|_| panic!("the last layer has {found} parameters, expected {N}")),
    )
}

/// The `F32` logits `[batch, tokens, vocabulary]` of vectors `[batch, tokens, width]` for a table `[vocabulary,
/// width]`.
pub(crate) fn table_logits(x: Tensor<3>, table: AnyTensor) -> Tensor<3> {
    let ([batch, tokens, width], table) = (x.dims(), table.into_float::<2>().cast(FloatDType::F32));
    let vocabulary = table.dims()[0];
    let logits = x.cast(FloatDType::F32).reshape([batch * tokens, width]).matmul(table.transpose());
    logits.reshape([batch, tokens, vocabulary])
}
