//! Whole model outputs, for tests and for reading logits.

use burn::tensor::{Device, FloatDType, Tensor};
use hydra_core::{
    Activation, AnyTensor, Chain, DeviceBytes, Measures, Objective, Pass, forward_range, promote_layers,
};
use std::sync::Arc;

/// The objective whose rows are the outputs of a chain's last layer, `[items, outputs]`. Its loss is zero.
#[derive(Debug)]
struct Outputs;

impl Objective for Outputs {
    fn name(&self) -> String {
        "outputs".to_owned()
    }

    fn loss(&self, outputs: &Activation, _: &Pass) -> Tensor<1> {
        outputs.part(0).into_float::<2>().cast(FloatDType::F32).sum().mul_scalar(0.0)
    }

    fn measure(&self, outputs: &Activation, _: &Pass) -> Measures {
        Measures { sums: None, rows: Some(outputs.part(0).into_float()) }
    }

    fn values(&self, _: &[f64], _: &[f32], _: u64) -> Vec<f64> {
        Vec::new()
    }
}

/// The output of a chain's first layers, without dropout, on the plain `device`. Layers are promoted one after the other from the
/// bytes that `buffer` returns.
fn outputs(
    chain: &Chain,
    layers: usize,
    buffer: &dyn Fn(usize) -> DeviceBytes,
    (inputs, targets): (Activation, Activation),
    device: &Device,
) -> Activation {
    let pass = Pass::evaluate(targets);
    (0..layers).fold(inputs, |x, index| {
        forward_range(&promote_layers(chain, index..index + 1, buffer, device, false), index, x, &pass)
    })
}

/// The logits `[items, outputs]` of a classifier for the inputs and the targets of a batch, without dropout, on the plain `device`.
/// The inputs and targets are on its autodiff device. Only classifiers of texts read the targets, a row of all sequences. Layers
/// are promoted one after the other from the bytes that `buffer` returns.
///
/// # Panics
/// If `chain` is not that of a classifier, or the inputs or targets do not fit it.
pub fn class_logits(
    chain: &Chain,
    buffer: &dyn Fn(usize) -> DeviceBytes,
    batch: (Activation, Activation),
    device: &Device,
) -> Tensor<2> {
    let (last, pass) = (chain.len() - 1, Pass::evaluate(batch.1.clone()));
    let x = outputs(chain, last, buffer, batch, device);
    let head = promote_layers(chain, last..last + 1, buffer, device, false);
    // The chain's own objective returns the loss, and no logits.
    let head: Vec<_> = head.into_iter().map(|head| head.with_objective(Arc::new(Outputs))).collect();
    forward_range(&head, last, x, &pass).part(1).into_float()
}

/// The input `[items, vectors, width]` of a chain's last layer for these inputs and targets, without dropout, and that layer's
/// parameters, on the plain `device`. Layers are promoted one after the other from the bytes that `buffer` returns.
pub(crate) fn before_last<const D: usize, const N: usize>(
    chain: &Chain,
    buffer: &dyn Fn(usize) -> DeviceBytes,
    (inputs, targets): (Activation, Activation),
    device: &Device,
) -> (Tensor<D>, [AnyTensor; N]) {
    let last = chain.len() - 1;
    let x = outputs(chain, last, buffer, (inputs, targets), device);
    let device = device.clone().autodiff();
    let params: Vec<AnyTensor> =
        chain.layer_params(last, buffer, &device).iter().map(|p| p.to_device(&device)).collect();
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
