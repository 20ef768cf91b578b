//! Adapters in GGUF files, as llama.cpp's `--lora` reads them.
//!
//! A tensor of the model has two in the file of adapters: `NAME.lora_a`, `[rank, inputs]`, and `NAME.lora_b`, `[outputs, rank]`, whose
//! rows are in the order of the model's tensor. llama.cpp adds `alpha / rank` times their product, with one `alpha` for all.

use super::GgufError;
use super::file::{StoredTensor, Value};
use super::layout::{GgufLayout, Transform};
use crate::lora::{Plan, RankAndScale};

/// The adapters of a file.
#[derive(Clone, Debug)]
pub(super) struct Adapters {
    plan: Plan,
    /// llama.cpp's `alpha`. Scales that it does not express are factors of the second matrices.
    alpha: f32,
}

/// A parameter of an adapter, by its name in the chain.
pub(super) struct AdapterParam<'a> {
    /// The adapted module.
    module: &'a str,
    /// Whether it is the second matrix.
    is_second: bool,
}

impl<'a> AdapterParam<'a> {
    pub(super) fn of(param: &'a str) -> Option<Self> {
        let module = |ending: &str| param.strip_suffix(ending);
        let first = module(".lora.a.weight").map(|module| Self { module, is_second: false });
        first.or_else(|| module(".lora.b.weight").map(|module| Self { module, is_second: true }))
    }
}

impl Adapters {
    /// The adapters of a plan.
    ///
    /// # Errors
    /// A plan that changes the model otherwise than by adapters of its matrices.
    pub(super) fn new(plan: Plan) -> Result<Self, GgufError> {
        match plan.besides_adapters() {
            Some(found) => Err(GgufError::Adapters { found }),
            None => {
                let alpha = plan.adapters().map(alpha).find(|alpha| *alpha != 0.0).unwrap_or(1.0) as f32;
                Ok(Self { plan, alpha })
            }
        }
    }

    pub(super) fn metadata(&self) -> [(String, Value); 2] {
        [
            ("adapter.type".to_owned(), Value::Text("lora".to_owned())),
            ("adapter.lora.alpha".to_owned(), Value::Number(self.alpha)),
        ]
    }

    /// What the file has of a parameter; `None` if llama.cpp has no such tensor.
    pub(super) fn place(&self, param: &AdapterParam<'_>, layout: &GgufLayout) -> Option<StoredTensor> {
        let weight = (layout.transformers)(&format!("{}.weight", param.module));
        let name = layout.name(&weight)?;
        if !param.is_second {
            return Some(StoredTensor {
                name: format!("{name}.lora_a"),
                transform: Transform::Keep,
                factor: 1.0,
            });
        }
        // The matrices of adapters are `[out, in]` for every family.
        let transform = match layout.transform(&weight) {
            heads @ Transform::Heads(_) => heads,
            Transform::Keep | Transform::Transpose => Transform::Keep,
        };
        let factor = (alpha(self.plan.adapter(param.module)?) / f64::from(self.alpha)) as f32;
        Some(StoredTensor { name: format!("{name}.lora_b"), transform, factor })
    }
}

/// The `alpha` with which `alpha / rank` is an adapter's scale.
fn alpha(of: RankAndScale) -> f64 {
    of.scale * of.rank as f64
}
