//! First values of a model with adapters.

use super::{AdapterDir, is_adapter};
use crate::ModelError;
use hydra_core::{Chain, SeededInit, WeightError, WeightSource};
use std::sync::Arc;

/// First values of a frozen model and of its adapters: each from files where they are given, else from the task's seed
/// (`A` as PEFT draws it, `B` zero, so that a model begins as its base).
#[derive(Clone)]
pub struct AdapterSource {
    /// What gives the frozen values.
    pub base: Arc<dyn WeightSource>,
    /// Adapters that were trained before.
    pub adapter: Option<AdapterDir>,
}

impl AdapterSource {
    /// Fresh adapters beside what `base` gives, or where there is none, beside values from the seed.
    pub fn new(base: Option<Arc<dyn WeightSource>>, adapter: Option<AdapterDir>) -> Self {
        Self { base: base.unwrap_or_else(|| Arc::new(SeededInit)), adapter }
    }
}

impl AdapterSource {
    /// The adapted chain that `chain` makes with first values from a base and perhaps from a directory, whose adapters must
    /// fit it. `name` gives parameters their names in transformers.
    ///
    /// # Errors
    /// Those of `chain`, and adapters of another model.
    pub(crate) fn fill_adapted(
        base: Option<Arc<dyn WeightSource>>,
        adapter: Option<AdapterDir>,
        name: fn(&str) -> String,
        chain: impl Fn(Self) -> Result<Chain, ModelError>,
    ) -> Result<Chain, ModelError> {
        let fresh = chain(Self::new(base.clone(), None))?;
        match adapter {
            Some(adapter) => chain(Self::new(base, Some(adapter.of(&fresh, name)?))),
            None => Ok(fresh),
        }
    }
}

impl WeightSource for AdapterSource {
    fn fill(&self, chain: &Chain, image: usize, seed: u64, out: &mut [f32]) -> Result<(), WeightError> {
        match &self.adapter {
            _ if !is_of_adapters(chain, image) => self.base.fill(chain, image, seed, out),
            Some(adapter) => adapter.fill(chain, image, seed, out),
            None => SeededInit.fill(chain, image, seed, out),
        }
    }

    fn origin(&self, chain: &Chain, image: usize, seed: u64) -> Option<String> {
        // What is trained is no other task's.
        self.base.origin(chain, image, seed).filter(|_| !is_of_adapters(chain, image))
    }
}

/// Returns whether an image is one of adapters: they are trained and nothing else is, so they have images of their own.
fn is_of_adapters(chain: &Chain, image: usize) -> bool {
    chain.images()[image].params.iter().any(|param| is_adapter(&param.name))
}
