//! Merges adapters into their base model.

use super::plan::{Plan, unties};
use super::source::transposed;
use super::{Lora, is_adapter};
use crate::ModelError;
use crate::family::Model;
use crate::family::supported::refuse;
use crate::weights::SavedType;
use bytes::Bytes;
use hydra_core::{BufferParam, Chain, Encoding, ModelWriter, ParamBufferReader, WeightError};
use std::cell::RefCell;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Writes a model with adapters as one without: each adapted weight becomes `W + scale * B A`, summed in `f64` and
/// rounded once. Its outputs equal those of the model with adapters except for rounding.
pub struct MergedWriter {
    /// The model without adapters.
    plain: Chain,
    writer: Arc<dyn ModelWriter>,
    plan: Plan,
    fan_in_fan_out: bool,
}

impl MergedWriter {
    /// A writer of `model` with adapters merged, with weights of this type.
    ///
    /// # Errors
    /// The model cannot be built, or its adapters cannot be merged.
    pub fn new(model: &dyn Model, lora: Lora, saved: SavedType) -> Result<Self, ModelError> {
        let (plan, adapting) = (model.plan(&lora)?, model.adapting());
        let own = match unties(&lora, &adapting) {
            true => Some(model.untied().ok_or_else(|| {
                refuse(
                    "modules_to_save",
                    format!("`{}`", lora.modules_to_save.join("`, `")),
                    "no table shared by embedding and head if adapters are merged: omit \
                     --merge, or set `ensure_weight_tying`",
                )
            })?),
            false => None,
        };
        let model = own.as_deref().unwrap_or(model);
        let (plain, writer) = (model.chain()?, model.writer(saved));
        if lora.lora_bias {
            plan.check_biases(&plain)?;
        }
        Ok(Self { plain, writer, plan, fan_in_fan_out: adapting.fan_in_fan_out })
    }
}

impl ModelWriter for MergedWriter {
    fn write(&self, chain: &Chain, buffers: &dyn ParamBufferReader, dir: &Path) -> Result<(), WeightError> {
        let merged = Merged { writer: self, chain, buffers, last: RefCell::default() };
        self.writer.write(&self.plain, &merged, dir)
    }
}

/// The parameter buffers of the merged model.
struct Merged<'a> {
    writer: &'a MergedWriter,
    chain: &'a Chain,
    buffers: &'a dyn ParamBufferReader,
    /// The last merged buffer.
    last: RefCell<Option<(usize, Bytes)>>,
}

impl Merged<'_> {
    /// Finds a parameter of the chain with adapters and its buffer's index.
    fn find(&self, name: &str) -> Option<(usize, &BufferParam)> {
        let buffers = self.chain.buffers().iter().enumerate();
        buffers
            .flat_map(|(at, buffer)| buffer.params.iter().map(move |param| (at, param)))
            .find(|(_, p)| p.name == name)
    }

    fn values(&self, (buffer, param): (usize, &BufferParam)) -> Result<Vec<f32>, WeightError> {
        let bytes = self.buffers.buffer(buffer)?;
        let range = param.range();
        let bytes = &bytes[range.start * size_of::<f32>()..range.end * size_of::<f32>()];
        let values: Vec<f32> = bytemuck::pod_collect_to_vec(bytes);
        // The plain model has its weights as its files do.
        let turned = self.writer.fan_in_fan_out && self.chain.buffers()[buffer].encoding == Encoding::Nf4;
        Ok(if turned { transposed(&values, param.shape[1]) } else { values })
    }

    /// The values of a parameter with its adapter merged in.
    fn merged(&self, name: &str) -> Result<Vec<f32>, WeightError> {
        let missing = || WeightError::ParamBuffer {
            chain: self.chain.name().to_owned(),
            buffer: 0,
            source: format!("the model has no parameter `{name}`").into(),
        };
        let mut values = self.values(self.find(name).ok_or_else(missing)?)?;
        let Some((map, own)) = name.rsplit_once('.') else { return Ok(values) };
        let Some(strength) = self.writer.plan.adapter(map).filter(|_| !is_adapter(name)) else {
            return Ok(values);
        };
        let factor = |which: &str| self.find(&format!("{map}.lora.{which}"));
        match (own, factor("a.weight"), factor("b.weight"), factor("b.bias")) {
            ("weight", Some(a), Some(b), _) => {
                let inputs = a.1.shape[1];
                self.add(&mut values, strength.scale, &self.values(a)?, &self.values(b)?, inputs);
            }
            ("bias", .., Some(bias)) => {
                for (value, more) in values.iter_mut().zip(self.values(bias)?) {
                    *value = (f64::from(*value) + strength.scale * f64::from(more)) as f32;
                }
            }
            _ => {}
        }
        Ok(values)
    }

    /// Adds the scaled product of `b` `[out, rank]` and `a` `[rank, in]`.
    fn add(&self, weight: &mut [f32], scale: f64, a: &[f32], b: &[f32], inputs: usize) {
        let rank = a.len() / inputs;
        let outputs = b.len() / rank;
        for (output, b) in b.chunks(rank).enumerate() {
            for input in 0..inputs {
                let product: f64 =
                    b.iter().enumerate().map(|(r, b)| f64::from(*b) * f64::from(a[r * inputs + input])).sum();
                let at = if self.writer.fan_in_fan_out {
                    input * outputs + output
                } else {
                    output * inputs + input
                };
                weight[at] = (f64::from(weight[at]) + scale * product) as f32;
            }
        }
    }
}

impl ParamBufferReader for Merged<'_> {
    fn buffer(&self, buffer: usize) -> Result<Bytes, WeightError> {
        let layout = &self.writer.plain.buffers()[buffer];
        let mut out = vec![0_f32; layout.elements];
        for param in &layout.params {
            out[param.range()].copy_from_slice(&self.merged(&param.name)?);
        }
        Ok(Bytes::copy_from_slice(bytemuck::cast_slice(&out)))
    }

    /// Merges a buffer once and keeps it while its parts are read.
    fn part(&self, buffer: usize, elements: Range<usize>) -> Result<Bytes, WeightError> {
        let mut last = self.last.borrow_mut();
        if last.as_ref().is_none_or(|(merged, _)| *merged != buffer) {
            *last = None;
            *last = Some((buffer, self.buffer(buffer)?));
        }
        let each = size_of::<f32>();
        let slice = |(_, bytes): &(usize, Bytes)| bytes.slice(elements.start * each..elements.end * each);
        Ok(last.as_ref().map(slice).unwrap_or_default())
    }
}
