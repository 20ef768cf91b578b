//! Builds chains: checks names, initial values and ties, and lays parameters out in buffers.

use super::buffer::{Encoding, ParamBufferLayout, ParamRef};
use super::objective::LossInLastLayer;
use super::{Chain, ChainLayer, Metric, Objective};
use crate::{
    CoreError, CostKey, Declared, FloatType, Forward, Init, Layer, OwnInit, SeededInit, WeightSource,
    panic_message,
};
use burn::module::ParamId;
use burn::tensor::DType;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Builds a [`Chain`] layer by layer.
pub struct ChainBuilder {
    name: String,
    description: String,
    objective: Option<Arc<dyn Objective>>,
    in_last_layer: LossInLastLayer,
    layers: Vec<(String, Box<dyn Layer>, bool)>,
    source: Arc<dyn WeightSource>,
}

impl ChainBuilder {
    pub(super) fn new(name: String) -> Self {
        let source = Arc::new(SeededInit);
        Self {
            name,
            description: String::new(),
            objective: None,
            in_last_layer: LossInLastLayer::default(),
            layers: Vec::new(),
            source,
        }
    }

    /// Appends a layer. Layers whose parameters have the same `ParamId` share (tie) them. Parameters that
    /// Burn freezes keep their initial values ([`Forward`]).
    pub fn layer(self, name: impl Into<String>, module: impl Forward + Sync + 'static) -> Self {
        self.push(name, module, false)
    }

    /// Appends a layer whose parameters keep their initial values.
    pub fn frozen(self, name: impl Into<String>, module: impl Forward + Sync + 'static) -> Self {
        self.push(name, module, true)
    }

    /// Appends a layer of a type that implements [`Layer`] itself, because it is no Burn module.
    pub fn boxed(mut self, name: impl Into<String>, layer: Box<dyn Layer>) -> Self {
        self.layers.push((name.into(), layer, false));
        self
    }

    fn push(mut self, name: impl Into<String>, module: impl Forward + Sync + 'static, frozen: bool) -> Self {
        self.layers.push((name.into(), Box::new(module), frozen));
        self
    }

    /// Sets a text that distinguishes this chain from others with the same names and shapes, such as dropout,
    /// the activation or the number of attention heads. It is part of [`Chain::architecture`], which
    /// identifies saved plans and checkpoints: without it, the plans and checkpoints of a chain that differs
    /// only in these options would be used for this one. Chains with equal descriptions and architectures are
    /// profiled once; [`Forward::cost_key`] does that for the layers of a chain. Tasks of such chains that
    /// start from the same weights and validate on one dataset share the validation before training.
    pub fn description(mut self, description: impl Into<String>) -> Self {
        self.description = description.into();
        self
    }

    /// Names the metrics of evaluations besides the loss, such as `accuracy`, of a chain whose last layer returns the
    /// loss. In an evaluation pass, the last layer then returns one additional tensor per metric, in this order: a float of shape `[1]`, the sum
    /// over the batch's loss targets, so that counts are exact. Evaluations divide the total by the number of
    /// loss targets in the dataset and report the mean, as they do for the loss. Additional tensors without a
    /// name are ignored. In a training pass the last layer returns only the loss.
    ///
    /// ```
    /// # use burn::module::Module;
    /// # use burn::nn::{Linear, LinearConfig};
    /// # use burn::tensor::{Device, FloatDType, activation::log_softmax};
    /// # use hydra_core::{Activation, Chain, Forward, Pass};
    /// #[derive(Module, Debug)]
    /// struct Classifier {
    ///     linear: Linear,
    /// }
    ///
    /// impl Forward for Classifier {
    ///     fn forward(&self, x: Activation, pass: &Pass) -> Activation {
    ///         let logits = self.linear.forward(x.into_float::<2>());
    ///         let classes = pass.targets().part(0).into_int::<1>();
    ///         let at = classes.clone().reshape([-1, 1]);
    ///         let loss = log_softmax(logits.clone(), 1).gather(1, at).mean_dim(0).neg().reshape([1]);
    ///         if pass.is_training() {
    ///             return Activation::of(loss);
    ///         }
    ///         let right = logits.argmax(1).reshape([-1]).equal(classes).float().cast(FloatDType::F32);
    ///         Activation::of(loss).and(right.sum_dim(0))
    ///     }
    /// }
    ///
    /// let linear = LinearConfig::new(8, 3).init(&Device::flex());
    /// let chain = Chain::builder("mine").layer("head", Classifier { linear }).metrics(["accuracy"]).build()?;
    /// # assert_eq!(chain.objective().metrics()[0].name, "accuracy");
    /// # Ok::<(), hydra_core::CoreError>(())
    /// ```
    pub fn metrics(mut self, metrics: impl IntoIterator<Item = impl Into<Metric>>) -> Self {
        self.in_last_layer.metrics = metrics.into_iter().map(Into::into).collect();
        self
    }

    /// Declares that the loss is the mean cross-entropy of the predicted tokens, in natural logarithms.
    /// Evaluations then also report the perplexity, `exp(loss)`.
    pub fn language_model(mut self) -> Self {
        self.in_last_layer.language_model = true;
        self
    }

    /// Sets what the chain is trained for. The last layer then returns outputs, such as logits, and the objective turns
    /// them and the targets into the loss and the metrics of evaluations. Without an objective, the last layer returns
    /// the loss itself ([`metrics`](Self::metrics), [`language_model`](Self::language_model)).
    pub fn objective(mut self, objective: impl Objective + 'static) -> Self {
        self.objective = Some(Arc::new(objective));
        self
    }

    /// Sets the source of the initial values; the default is [`SeededInit`].
    pub fn weights(mut self, source: impl WeightSource + 'static) -> Self {
        self.source = Arc::new(source);
        self
    }

    /// Builds and checks the chain. See [`Forward::init`] for the initialization of lazy parameters.
    ///
    /// # Errors
    /// [`CoreError`] with the first fault found.
    pub fn build(self) -> Result<Chain, CoreError> {
        if self.layers.is_empty() {
            return Err(CoreError::EmptyChain { chain: self.name });
        }
        self.check_names()?;
        let LossInLastLayer { metrics, language_model } = &self.in_last_layer;
        if self.objective.is_some() && (!metrics.is_empty() || *language_model) {
            return Err(CoreError::TwoObjectives { chain: self.name });
        }
        let objective = self.objective.unwrap_or_else(|| Arc::new(self.in_last_layer));
        check_metrics(&self.name, objective.as_ref())?;
        let mut parts = Vec::new();
        let last = self.layers.len() - 1;
        for (index, (name, layer, frozen)) in self.layers.into_iter().enumerate() {
            let layer: Box<dyn Layer> = match index == last {
                true => layer.with_objective(Arc::clone(&objective)),
                false => layer,
            };
            parts.push((DeclaredLayer::declared(&self.name, name, layer.as_ref(), frozen)?, layer));
        }
        let mut uses: HashMap<ParamId, usize> = HashMap::new();
        let ids = parts.iter().flat_map(|(part, _)| part.params.iter().map(|p| p.info.id));
        ids.for_each(|id| *uses.entry(id).or_default() += 1);
        let mut layout = ChainLayout { chain: &self.name, uses, buffers: Vec::new(), tied: HashMap::new() };
        let mut layers = Vec::new();
        for (index, (mut part, layer)) in parts.into_iter().enumerate() {
            let layer = part.uninitialized(&self.name, layer, |id| layout.tied.contains_key(&id))?;
            let (name, cost_key) = (part.name.clone(), part.cost_key.take());
            let frozen = part.frozen || !part.params.is_empty() && !part.trained().any(|trained| trained);
            let params = layout.place(index, part)?;
            layers.push(ChainLayer { name, params, frozen, cost_key, layer });
        }
        let buffers = layout.buffers;
        let layers = layers.into_iter().map(|layer| layer.fixing_frozen_states(&buffers)).collect();
        let trained = buffers.iter().any(ParamBufferLayout::is_optimized);
        if !trained && !buffers.is_empty() {
            return Err(CoreError::NothingToTrain { chain: self.name });
        }
        let float = FloatType::F32;
        let Self { name, description, source, .. } = self;
        Ok(Chain { name, description, objective, layers, buffers, float, source })
    }

    fn check_names(&self) -> Result<(), CoreError> {
        for (index, (name, ..)) in self.layers.iter().enumerate() {
            if self.layers[..index].iter().any(|(other, ..)| other == name) {
                return Err(CoreError::DuplicateLayer { chain: self.name.clone(), layer: name.clone() });
            }
        }
        Ok(())
    }
}

/// Checks that the metrics have names of their own.
pub(super) fn check_metrics(chain: &str, objective: &dyn Objective) -> Result<(), CoreError> {
    let names: Vec<String> = objective.metrics().into_iter().map(|metric| metric.name).collect();
    let taken = |(at, name): (usize, &String)| {
        name.is_empty() || name == "loss" || name == "perplexity" || names[..at].contains(name)
    };
    match names.iter().enumerate().find(|metric| taken(*metric)) {
        Some((_, metric)) => Err(CoreError::MetricName { chain: chain.to_owned(), metric: metric.clone() }),
        None => Ok(()),
    }
}

/// Runs user code of a layer and converts a panic into an error.
fn guarded<T>(chain: &str, layer: &str, run: impl FnOnce() -> T) -> Result<T, CoreError> {
    catch_unwind(AssertUnwindSafe(run)).map_err(|panic| CoreError::LayerPanicked {
        chain: chain.to_owned(),
        layer: layer.to_owned(),
        message: panic_message(panic.as_ref()),
    })
}

/// A layer while its chain is built.
struct DeclaredLayer {
    name: String,
    /// Whether the whole layer is frozen, regardless of Burn's flags on its parameters.
    frozen: bool,
    cost_key: Option<CostKey>,
    params: Vec<Declared>,
    /// The initializer of each parameter.
    inits: Vec<Init>,
}

impl DeclaredLayer {
    fn declared(chain: &str, name: String, layer: &dyn Layer, frozen: bool) -> Result<Self, CoreError> {
        let (params, inits, cost_key) = guarded(chain, &name, || {
            let params = layer.declared();
            let inits = params.iter().map(|p| layer.init(&p.info.name, &p.info.shape)).collect();
            (params, inits, layer.cost_key())
        })?;
        let part = Self { name, frozen, cost_key, params, inits };
        part.check(chain)?;
        Ok(part)
    }

    /// Checks that no parameter appears twice or is a running statistic of Burn's, and that given values are `f32`.
    fn check(&self, chain: &str) -> Result<(), CoreError> {
        for (at, declared) in self.params.iter().enumerate() {
            let (layer, param) = (self.name.clone(), declared.info.name.clone());
            if declared.running {
                return Err(CoreError::RunningStatistics { chain: chain.to_owned(), layer, param });
            }
            if declared.trained.is_none() {
                return Err(CoreError::StoredForm { layer, param });
            }
            if self.params[..at].iter().any(|other| other.info.id == declared.info.id) {
                return Err(CoreError::SharedWithinLayer { chain: chain.to_owned(), layer, param });
            }
            if let Some(given) = declared.given.as_ref().filter(|given| given.dtype != DType::F32) {
                return Err(CoreError::GivenDtype { layer, param, found: format!("{:?}", given.dtype) });
            }
        }
        Ok(())
    }

    /// Returns for each parameter whether it is trained, that is, neither the layer nor Burn freezes it.
    fn trained(&self) -> impl Iterator<Item = bool> {
        self.params.iter().map(|param| !self.frozen && param.trained == Some(true))
    }

    /// Returns the uninitialized layer. Recognizes the module's own initializers, except for parameters that
    /// an earlier layer already uses.
    fn uninitialized(
        &mut self,
        chain: &str,
        layer: Box<dyn Layer>,
        named: impl Fn(ParamId) -> bool,
    ) -> Result<Box<dyn Layer>, CoreError> {
        let own = self.params.iter().zip(&self.inits);
        let own: Vec<bool> = own.map(|(p, init)| *init == Init::Module && !named(p.info.id)).collect();
        let (layer, found) = guarded(chain, &self.name, || layer.uninitialized(&own))?;
        for ((declared, init), found) in self.params.iter_mut().zip(&mut self.inits).zip(found) {
            match found {
                Some(OwnInit::Drawn(found)) => (*init, declared.given) = (found, None),
                Some(OwnInit::Fixed(values)) => declared.given = Some(values),
                Some(OwnInit::Unknown) => {
                    let (layer, param) = (self.name.clone(), declared.info.name.clone());
                    return Err(CoreError::UnknownInitializer { layer, param });
                }
                None => {}
            }
        }
        Ok(layer)
    }
}

struct ChainLayout<'a> {
    chain: &'a str,
    uses: HashMap<ParamId, usize>,
    buffers: Vec<ParamBufferLayout>,
    tied: HashMap<ParamId, usize>,
}

impl ChainLayout<'_> {
    fn place(&mut self, index: usize, part: DeclaredLayer) -> Result<Vec<ParamRef>, CoreError> {
        let trained: Vec<bool> = part.trained().collect();
        let DeclaredLayer { name, params, inits, .. } = part;
        // One buffer for frozen parameters, one for trained ones, one for quantized ones and one for state.
        let mut own: [Option<usize>; 4] = [None; 4];
        let mut refs = Vec::new();
        for ((Declared { info, given, quantized, state, .. }, init), trained) in
            params.into_iter().zip(inits).zip(trained)
        {
            let full = format!("{name}.{}", info.name);
            if quantized && (trained || self.uses[&info.id] > 1) {
                let chain = self.chain.to_owned();
                return Err(CoreError::QuantizedTrained { chain, param: full });
            }
            if self.uses[&info.id] > 1 {
                let mut shared = ParamBufferLayout::new(full.clone(), index, trained);
                let slot = shared.push(full, info.shape, init, given);
                shared.params[slot].state = state;
                refs.push(ParamRef { buffer: self.tie(info.id, shared)?, slot });
                continue;
            }
            let kind = match (quantized, trained, state) {
                (true, ..) => 2,
                (_, true, Some(_)) => 3,
                _ => usize::from(trained),
            };
            let buffer = *own[kind].get_or_insert_with(|| {
                let encoding = if quantized { Encoding::Nf4 } else { Encoding::default() };
                let new = ParamBufferLayout::new(name.clone(), index, trained);
                self.buffers.push(ParamBufferLayout { encoding, ..new });
                self.buffers.len() - 1
            });
            let slot = self.buffers[buffer].push(full, info.shape, init, given);
            self.buffers[buffer].params[slot].state = state;
            refs.push(ParamRef { buffer, slot });
        }
        Ok(refs)
    }

    /// Returns the buffer of a shared parameter: `found`, unless an earlier layer already uses the parameter.
    fn tie(&mut self, id: ParamId, found: ParamBufferLayout) -> Result<usize, CoreError> {
        let Some(&buffer) = self.tied.get(&id) else {
            self.buffers.push(found);
            self.tied.insert(id, self.buffers.len() - 1);
            return Ok(self.buffers.len() - 1);
        };
        let layout = &mut self.buffers[buffer];
        if layout.params[0].shape != found.params[0].shape {
            return Err(CoreError::TiedShapes {
                chain: self.chain.to_owned(),
                first: layout.name.clone(),
                second: found.name,
                first_shape: layout.params[0].shape.clone(),
                second_shape: found.params[0].shape.clone(),
            });
        }
        if layout.trained != found.trained {
            return Err(CoreError::TiedFrozen { chain: self.chain.to_owned(), param: layout.name.clone() });
        }
        if layout.params[0].state != found.params[0].state {
            return Err(CoreError::TiedStates { chain: self.chain.to_owned(), param: layout.name.clone() });
        }
        layout.layers.extend(found.layers);
        Ok(buffer)
    }
}
