//! Merges adapters into their base model.

use super::plan::{Plan, unties};
use super::source::transposed;
use super::{Lora, is_adapter};
use crate::ModelError;
use crate::family::Model;
use crate::family::supported::refuse;
use crate::weights::{SaveForm, read_param};
use bytes::Bytes;
use hydra_core::{BufferParam, Chain, Encoding, ModelWriter, ParamBufferReader, WeightError};
use rayon::prelude::*;
use std::borrow::Cow;
use std::cell::RefCell;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Writes a model with adapters as one without: each adapted weight becomes `W + scale * B A`, computed in `f32`, and is then rounded
/// to the written type. Its outputs equal those of the model with adapters except for rounding.
///
/// The weights have the bits of PEFT's `merge_and_unload` on a CPU with fused multiply-add, where adapters are in `f32`, as PEFT loads them,
/// and up to the rank at which PyTorch's matrix product adds in several parts (192).
pub struct MergedWriter {
    /// The model without adapters.
    plain: Chain,
    writer: Arc<dyn ModelWriter>,
    plan: Plan,
    fan_in_fan_out: bool,
}

impl MergedWriter {
    /// A writer of `model` with adapters merged, with weights of this type or in this form.
    ///
    /// # Errors
    /// The model cannot be built, or its adapters cannot be merged.
    pub fn new(model: &dyn Model, lora: Lora, saved: impl Into<SaveForm>) -> Result<Self, ModelError> {
        let saved = saved.into();
        Self::with(model, lora, |model| Ok(model.writer(saved)))
    }

    /// The same with the writer that `writer` makes of the model without adapters.
    ///
    /// # Errors
    /// Those of [`new`](Self::new) and of `writer`.
    pub fn with<E: From<ModelError>>(
        model: &dyn Model,
        lora: Lora,
        writer: impl FnOnce(&dyn Model) -> Result<Arc<dyn ModelWriter>, E>,
    ) -> Result<Self, E> {
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
        let (plain, writer) = (model.chain()?, writer(model)?);
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
    /// The last merged parameter: its name and its values.
    last: RefCell<Option<(String, Vec<f32>)>>,
}

impl Merged<'_> {
    /// Finds a parameter of the chain with adapters and its buffer's index.
    fn find(&self, name: &str) -> Option<(usize, &BufferParam)> {
        let buffers = self.chain.buffers().iter().enumerate();
        buffers
            .flat_map(|(at, buffer)| buffer.params.iter().map(move |param| (at, param)))
            .find(|(_, p)| p.name == name)
    }

    /// Reads some elements of a parameter into `out`.
    fn read(
        &self,
        (buffer, param): (usize, &BufferParam),
        wanted: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), WeightError> {
        if self.is_turned(buffer) {
            let mut values = vec![0.0; param.len];
            self.stored((buffer, param), 0..param.len, &mut values)?;
            out.copy_from_slice(&transposed(&values, param.shape[1])[wanted]);
            return Ok(());
        }
        self.stored((buffer, param), wanted, out)
    }

    /// Reads some elements of a parameter into `out`, as they lie in the chain.
    fn stored(
        &self,
        (buffer, param): (usize, &BufferParam),
        wanted: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), WeightError> {
        let (mut at, elements) = (0, self.chain.buffers()[buffer].elements);
        read_param(self.buffers, (buffer, elements), param, wanted, |values| {
            out[at..at + values.len()].copy_from_slice(values);
            at += values.len();
            Ok(())
        })
    }

    /// Whether a buffer has matrices that are transposed in the plain model, which has its weights as its files do.
    fn is_turned(&self, buffer: usize) -> bool {
        self.writer.fan_in_fan_out && self.chain.buffers()[buffer].encoding == Encoding::Nf4
    }

    fn values(&self, (buffer, param): (usize, &BufferParam)) -> Result<Vec<f32>, WeightError> {
        let mut values = vec![0.0; param.len];
        self.read((buffer, param), 0..param.len, &mut values)?;
        Ok(values)
    }

    /// Writes some elements of a parameter of the merged model into `out`.
    fn part_of(&self, param: &BufferParam, wanted: Range<usize>, out: &mut [f32]) -> Result<(), WeightError> {
        let name = param.name.as_str();
        let missing = || WeightError::ParamBuffer {
            chain: self.chain.name().to_owned(),
            buffer: 0,
            source: format!("the model has no parameter `{name}`").into(),
        };
        let base = self.find(name).ok_or_else(missing)?;
        let map = name.rsplit_once('.').map_or("", |(map, _)| map);
        let is_own = self.writer.plan.adapter(map).is_none() || is_adapter(name);
        // A transposed matrix is kept too, because each part needs all of it.
        if is_own && !self.is_turned(base.0) {
            return self.read(base, wanted, out);
        }
        let mut last = self.last.borrow_mut();
        if last.as_ref().is_none_or(|(merged, _)| merged != name) {
            *last = None;
            *last = Some((name.to_owned(), self.merged(name, base)?));
        }
        out.copy_from_slice(last.as_ref().map_or(&[], |(_, values)| &values[wanted]));
        Ok(())
    }

    /// The values of a parameter of an adapted module with the adapter merged in.
    fn merged(&self, name: &str, base: (usize, &BufferParam)) -> Result<Vec<f32>, WeightError> {
        let mut values = self.values(base)?;
        let Some((map, own)) = name.rsplit_once('.') else { return Ok(values) };
        let Some(strength) = self.writer.plan.adapter(map) else { return Ok(values) };
        let factor = |which: &str| self.find(&format!("{map}.lora.{which}"));
        match (own, factor("a.weight"), factor("b.weight"), factor("b.bias")) {
            ("weight", Some(a), Some(b), _) => {
                let inputs = a.1.shape[1];
                self.add(&mut values, strength.scale as f32, &self.values(a)?, &self.values(b)?, inputs);
            }
            ("bias", .., Some(bias)) => {
                for (value, more) in values.iter_mut().zip(self.values(bias)?) {
                    *value += more * strength.scale as f32;
                }
            }
            _ => {}
        }
        Ok(values)
    }

    /// Adds the scaled product of `b` `[out, rank]` and `a` `[rank, in]`, for any number of threads to the same bits.
    fn add(&self, weight: &mut [f32], scale: f32, a: &[f32], b: &[f32], inputs: usize) {
        let rank = a.len() / inputs;
        // The rows of the weight have factors `[rows, rank]`, and its columns `[rank, columns]`.
        let (rows, columns): (Cow<'_, [f32]>, Cow<'_, [f32]>) = match self.writer.fan_in_fan_out {
            true => (transposed(a, inputs).into(), transposed(b, rank).into()),
            false => (b.into(), a.into()),
        };
        let width = columns.len() / rank;
        weight.par_chunks_mut(width).zip(rows.par_chunks(rank)).for_each_init(
            || vec![0.0; width],
            |sums, (weights, factors)| add_row(weights, scale, factors, &columns, sums),
        );
    }
}

/// Adds the scaled product of `factors` `[rank]` and `columns` `[rank, columns]` to a row of a weight. Each sum adds its products in the
/// order of the ranks with fused multiply-add; it is rounded, scaled and rounded before it is added. `sums` is working memory.
fn add_row(weights: &mut [f32], scale: f32, factors: &[f32], columns: &[f32], sums: &mut [f32]) {
    pulp::Arch::new().dispatch(
        #[inline(always)]
        || {
            sums.fill(0.0);
            for (factor, values) in factors.iter().zip(columns.chunks_exact(weights.len())) {
                for (sum, value) in sums.iter_mut().zip(values) {
                    *sum = factor.mul_add(*value, *sum);
                }
            }
            for (weight, sum) in weights.iter_mut().zip(sums.iter()) {
                *weight += *sum * scale;
            }
        },
    );
}

/// At most a merged tensor and a part of a buffer are in memory, unless a whole buffer is asked for.
impl ParamBufferReader for Merged<'_> {
    fn buffer(&self, buffer: usize) -> Result<Bytes, WeightError> {
        self.part(buffer, 0..self.writer.plain.buffers()[buffer].elements)
    }

    fn part(&self, buffer: usize, elements: Range<usize>) -> Result<Bytes, WeightError> {
        let mut out = vec![0_f32; elements.len()];
        for param in &self.writer.plain.buffers()[buffer].params {
            let Some(wanted) = param.among(&elements) else { continue };
            let out = &mut out[wanted.start - elements.start..wanted.end - elements.start];
            self.part_of(param, wanted.start - param.offset..wanted.end - param.offset, out)?;
        }
        Ok(Bytes::copy_from_slice(bytemuck::cast_slice(&out)))
    }
}
