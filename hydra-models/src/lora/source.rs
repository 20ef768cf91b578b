//! Initial weights of a model with adapters.

use super::plan::Plan;
use super::residual::{take_first_columns, take_largest};
use super::{AdapterDir, LoraInit, is_adapter};
use crate::weights::ParamSource;
use hydra_core::{
    BufferParam, Chain, Encoding, FileSpan, FileVersion, FloatType, PartReader, SeededInit, WeightError,
    WeightSource,
};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Initial weights of a frozen model and of its adapters, each from files if given, else from the task's seed (`A` as
/// in PEFT, `B` zero, so that the model starts equal to its base). If the adapters' initial values come from the base
/// weights, they are subtracted from the base.
#[derive(Clone)]
pub(crate) struct AdapterSource {
    /// The source of the base's weights.
    pub base: Option<Arc<dyn ParamSource>>,
    /// Previously trained adapters.
    pub adapter: Option<AdapterDir>,
    /// The adapter plan.
    pub plan: Plan,
    /// Whether files have weights as `[in, out]`, which are transposed to be quantized.
    pub turned: bool,
}

impl AdapterSource {
    fn fill_base(&self, param: &BufferParam, out: &mut [f32]) -> Result<(), WeightError> {
        if let Some(base) = self.base.as_ref().filter(|base| !base.draws(param)) {
            base.read(param, out).map_err(|source| failed(param, source))?;
        }
        if let Some(strength) = self.plan.taken_from(&param.name) {
            let columns = param.shape[1];
            match self.plan.lora.init {
                LoraInit::Olora => take_first_columns(out, columns, strength.rank, strength.scale),
                _ => take_largest(out, columns, strength.rank),
            }
        }
        Ok(())
    }

    /// The source of the base, if it has all values of a buffer.
    fn unchanged_base(&self, chain: &Chain, buffer: usize) -> Option<&dyn ParamSource> {
        self.base.as_deref().filter(|_| self.is_of_base(chain, buffer))
    }

    /// Returns whether all values of a buffer are those of the base: an adapter's file can replace values of the base, and some
    /// initializations subtract from them.
    fn is_of_base(&self, chain: &Chain, buffer: usize) -> bool {
        let changed = |param: &BufferParam| {
            let saved = self.adapter.as_ref().is_some_and(|adapter| adapter.has(&param.name));
            saved || is_adapter(&param.name) || self.plan.taken_from(&param.name).is_some()
        };
        !chain.buffers()[buffer].params.iter().any(changed)
    }

    /// Returns whether a parameter has no file and is drawn from the seed.
    fn draws(&self, param: &BufferParam) -> bool {
        match is_adapter(&param.name) {
            true => self.adapter.is_none(),
            false => self.base.as_ref().is_none_or(|base| base.draws(param)),
        }
    }
}

/// The transpose of a matrix with this number of columns.
pub(super) fn transposed(values: &[f32], columns: usize) -> Vec<f32> {
    let rows = values.len() / columns;
    (0..values.len()).map(|i| values[i % rows * columns + i / rows]).collect()
}

fn failed(param: &BufferParam, source: crate::ModelError) -> WeightError {
    WeightError::Read { param: param.name.clone(), source: source.into() }
}

impl WeightSource for AdapterSource {
    fn fill(&self, chain: &Chain, buffer: usize, seed: u64, out: &mut [f32]) -> Result<(), WeightError> {
        let params = &chain.buffers()[buffer].params;
        if params.iter().any(|param| self.draws(param)) {
            SeededInit.fill(chain, buffer, seed, out)?;
        }
        for param in params {
            let out = &mut out[param.range()];
            if !is_adapter(&param.name) {
                self.fill_base(param, out)?;
            }
            if let Some(adapter) = &self.adapter {
                adapter.fill(param, out).map_err(|source| failed(param, source))?;
            }
            if self.turned && chain.buffers()[buffer].encoding == Encoding::Nf4 {
                let turned = transposed(out, param.shape[0]);
                out.copy_from_slice(&turned);
            }
        }
        Ok(())
    }

    fn origin(&self, chain: &Chain, buffer: usize, seed: u64) -> Option<String> {
        let layout = &chain.buffers()[buffer];
        // Trained buffers are specific to a task.
        if layout.trained || layout.params.iter().any(|param| is_adapter(&param.name)) {
            return None;
        }
        let mut origin = match &self.base {
            Some(base) => base.origin(chain, buffer, seed)?,
            None => SeededInit.origin(chain, buffer, seed)?,
        };
        let taken: Vec<_> =
            layout.params.iter().filter_map(|param| self.plan.taken_from(&param.name)).collect();
        if !taken.is_empty() {
            origin = format!("{origin} without {:?} of {taken:?}", self.plan.lora.init);
        }
        let saved = |adapter: &&AdapterDir| layout.params.iter().any(|param| adapter.has(&param.name));
        Some(match self.adapter.as_ref().filter(saved) {
            Some(adapter) => format!("{origin} and {}", adapter.file().display()),
            None => origin,
        })
    }

    fn files_of(&self, chain: &Chain, buffer: usize) -> Option<BTreeSet<FileVersion>> {
        let mut files = match &self.base {
            Some(base) => base.files_of(chain, buffer)?,
            None => BTreeSet::new(),
        };
        files.extend(self.adapter.as_ref().map(AdapterDir::version));
        Some(files)
    }

    fn float_type(&self, chain: &Chain, buffer: usize) -> FloatType {
        match &self.base {
            _ if !self.is_of_base(chain, buffer) => FloatType::F32,
            Some(base) => base.float_type(chain, buffer),
            None => SeededInit.float_type(chain, buffer),
        }
    }

    fn parts<'a>(&'a self, chain: &'a Chain, buffer: usize) -> Option<PartReader<'a>> {
        if self.turned && chain.buffers()[buffer].encoding == Encoding::Nf4 {
            return None;
        }
        self.unchanged_base(chain, buffer)?.parts(chain, buffer)
    }

    fn spans(&self, chain: &Chain, buffer: usize) -> Option<Vec<FileSpan>> {
        self.unchanged_base(chain, buffer)?.spans(chain, buffer)
    }

    fn is_quantized(&self, chain: &Chain, buffer: usize) -> bool {
        self.unchanged_base(chain, buffer).is_some_and(|base| base.is_quantized(chain, buffer))
    }
}
