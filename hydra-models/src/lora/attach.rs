//! Adds adapters to the linear modules of a layer.

use super::directory::in_config_file;
use super::plan::{AdaptableLayer, Plan, unties};
use super::{AdapterDir, AdapterSource, Base, Lora, LoraInit};
use crate::ModelError;
use crate::family::supported::{QUANTIZATION, refuse};
use crate::family::{Adapting, HeadConfig};
use crate::parts::{Adapter, AdapterOptions, uninitialized};
use crate::weights::ParamSource;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::Tensor;
use hydra_core::{Chain, ChainBuilder, Encoding, Forward, ParamBufferLayout};
use std::sync::Arc;

/// The first dropout site of adapters; a layer's own sites are below.
const FIRST_SITE: u64 = 16;

/// A linear module that can be adapted.
pub(crate) struct AdaptableMap<'a> {
    /// The path within the layer: `self_attn.q_proj`.
    pub name: &'static str,
    /// The slot for its adapter.
    pub adapter: &'a mut Option<Adapter>,
    /// The input and output widths.
    pub shape: [usize; 2],
    /// Its weight.
    pub weight: &'a mut Param<Tensor<2>>,
    /// Whether the weight is quantized: the module then computes with the blocks of a matrix `[out, in]`.
    pub quantized: &'a mut bool,
}

impl AdaptableMap<'_> {
    /// Quantizes the module, whose weight then is a new parameter `[out, in]`.
    fn quantize(&mut self) {
        let [inputs, outputs] = self.shape;
        *self.weight = uninitialized([outputs, inputs]).set_require_grad(false);
        *self.quantized = true;
    }
}

/// A layer of a model that can be adapted.
pub(crate) trait Adaptable: Module {
    /// The linear modules that can have adapters, always in the same order.
    fn maps(&mut self) -> Vec<AdaptableMap<'_>> {
        Vec::new()
    }
}

/// The adapter settings for a model.
#[derive(Clone, Copy)]
pub struct Adaptation<'a> {
    /// The settings.
    pub lora: &'a Lora,
    /// PEFT's view of the model.
    pub adapting: &'a Adapting,
    /// Whether each target must match a module.
    pub strict: bool,
}

/// The layers of a model, and its adapter plan.
pub struct Layers {
    /// The chain without a weight source.
    pub chain: ChainBuilder,
    /// The adapter plan, if the model has adapters.
    pub plan: Option<Plan>,
}

impl Layers {
    /// Marks the loss as that of a language model.
    pub fn language_model(self) -> Self {
        Self { chain: self.chain.language_model(), ..self }
    }

    /// Trains the outputs of a classifier for its labels.
    pub fn classifier(self, head: &HeadConfig) -> Self {
        Self { chain: head.problem().objective(self.chain, head.outputs()), ..self }
    }
}

/// Collects the full names of a layer's parameters.
struct Params {
    path: Vec<String>,
    found: Vec<String>,
}

impl ModuleVisitor for Params {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, _: &Param<Tensor<D>>) {
        self.found.push(self.path.join("."));
    }
}

/// Freezes the parameters of a layer that the plan does not train.
struct Freeze<'a> {
    path: Vec<String>,
    plan: &'a Plan,
}

impl ModuleMapper for Freeze<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let trained = self.plan.trains(&self.path.join("."));
        param.set_require_grad(trained)
    }
}

fn described<M: Adaptable>(layers: &mut [(String, M)], out: &mut Vec<AdaptableLayer>) {
    for (name, layer) in layers {
        let mut params = Params { path: vec![name.clone()], found: Vec::new() };
        layer.visit(&mut params);
        let maps = layer.maps().into_iter().map(|map| (format!("{name}.{}", map.name), map.shape)).collect();
        out.push(AdaptableLayer { params: params.found, maps });
    }
}

/// Returns the layers frozen except for what the plan trains.
fn adapted<M: Adaptable + Forward + Sync + 'static>(
    mut chain: ChainBuilder,
    layers: Vec<(String, M)>,
    plan: &Plan,
) -> ChainBuilder {
    for (name, layer) in layers {
        let mut layer = layer.map(&mut Freeze { path: vec![name.clone()], plan });
        for (mut map, site) in layer.maps().into_iter().zip(FIRST_SITE..) {
            let full = format!("{name}.{}", map.name);
            if plan.quantizes(&full) {
                map.quantize();
            }
            let AdaptableMap { adapter, shape, .. } = map;
            let Some(strength) = plan.adapter(&full) else { continue };
            let Lora { dropout, lora_bias, init, .. } = plan.lora;
            let options = AdapterOptions { scale: strength.scale, dropout, site };
            let new = Adapter::new(shape, strength.rank, lora_bias, options);
            *adapter = Some(if init == LoraInit::FrozenB { new.with_frozen_b() } else { new });
        }
        chain = chain.layer(name, layer);
    }
    chain
}

/// The chain of a model from its embedding, blocks and head: fully trained, or frozen with adapters and the other
/// parameters that the adapter settings train. `note` describes the computation without adapters.
///
/// # Errors
/// Those of [`Plan::new`].
pub(crate) fn transformer<E, B, H>(
    (name, note): (String, String),
    embed: impl IntoIterator<Item = (String, E)>,
    blocks: impl IntoIterator<Item = (String, B)>,
    head: impl IntoIterator<Item = (String, H)>,
    adaptation: Option<Adaptation<'_>>,
) -> Result<Layers, ModelError>
where
    E: Adaptable + Forward + Sync + 'static,
    B: Adaptable + Forward + Sync + 'static,
    H: Adaptable + Forward + Sync + 'static,
{
    let mut embed: Vec<(String, E)> = embed.into_iter().collect();
    let mut blocks: Vec<(String, B)> = blocks.into_iter().collect();
    let mut head: Vec<(String, H)> = head.into_iter().collect();
    let Some(Adaptation { lora, adapting, strict }) = adaptation else {
        let chain = plain(plain(plain(Chain::builder(name).description(note), embed), blocks), head);
        return Ok(Layers { chain, plan: None });
    };
    let mut layers = Vec::new();
    described(&mut embed, &mut layers);
    described(&mut blocks, &mut layers);
    described(&mut head, &mut layers);
    let plan = Plan::new(lora, adapting, &layers, strict)?;
    let chain = Chain::builder(name).description(format!("{note}, {}", lora.description()));
    let chain = adapted(adapted(adapted(chain, embed, &plan), blocks, &plan), head, &plan);
    Ok(Layers { chain, plan: Some(plan) })
}

/// The chain of a model with adapters, new ones or those of a directory. Other weights come from `base` or from a
/// task's seed. `files` is PEFT's view of the model when the directory was written.
///
/// # Errors
/// Those of `layers`, and adapters of another model.
pub(crate) fn adapted_chain(
    lora: &Lora,
    [adapting, files]: [&Adapting; 2],
    base: Option<Arc<dyn ParamSource>>,
    adapter: Option<AdapterDir>,
    layers: impl Fn(Adaptation<'_>) -> Result<Layers, ModelError>,
) -> Result<Chain, ModelError> {
    let mut lora = adapting.named(lora.clone());
    let is_quantized = base.as_ref().is_some_and(|base| base.has_quantized());
    if is_quantized {
        lora.base = Base::Nf4;
    }
    let lora = &lora;
    if let Some(adapter) = &adapter {
        adapter.check_task(adapting.task)?;
    }
    if lora.base == Base::Nf4 {
        check_quantizable(lora, adapting)?;
    }
    if base.is_none() && unties(lora, adapting) {
        let found = format!("`{}`", lora.modules_to_save.join("`, `"));
        return Err(refuse(
            "modules_to_save",
            found,
            "no shared embedding table if weights are initialized at random",
        ));
    }
    let made = || {
        let made = layers(Adaptation { lora, adapting, strict: adapter.is_none() });
        made.map_err(|error| match &adapter {
            Some(adapter) => in_config_file(adapter.as_ref(), error),
            None => error,
        })
    };
    let Layers { chain, plan: Some(plan) } = made()? else {
        return Err(ModelError::NoAdapters { model_type: "this" });
    };
    let first = chain.build()?;
    let placed = adapter.as_ref().map(|adapter| adapter.clone().bind(&first, &plan, files)).transpose()?;
    let source = AdapterSource { base, adapter: placed, plan, turned: adapting.fan_in_fan_out };
    let chain = made()?.chain.weights(source).build()?;
    let floats = |(index, buffer): &(usize, &ParamBufferLayout)| {
        buffer.encoding == Encoding::Nf4 && !chain.source().is_quantized(&chain, *index)
    };
    match chain.buffers().iter().enumerate().find(floats).filter(|_| is_quantized) {
        Some((_, buffer)) => {
            let found = format!("for some layers and not for all of `{}`", buffer.name);
            let expected = "all linear layers of blocks: quantize the original model with --base nf4";
            Err(refuse(QUANTIZATION, found, expected))
        }
        None => Ok(chain),
    }
}

/// Checks that the model's base can be quantized with these settings.
fn check_quantizable(lora: &Lora, adapting: &Adapting) -> Result<(), ModelError> {
    if !adapting.quantizes {
        let expected =
            "no value for this model: the linear layers of GPT-2, Llama, Mistral and Qwen can be quantized";
        return Err(refuse("base", "nf4", expected));
    }
    match lora.init {
        LoraInit::Pissa | LoraInit::Olora => Err(refuse(
            "init_lora_weights",
            format!("{:?}", lora.init).to_lowercase(),
            "an initialization that leaves the base unchanged: nothing can be subtracted from a quantized base",
        )),
        LoraInit::Beside | LoraInit::FrozenB => Ok(()),
    }
}

/// Resolves adapter settings for the model with these layers.
///
/// # Errors
/// Those of `layers`.
pub(crate) fn plan_of(
    lora: &Lora,
    adapting: &Adapting,
    layers: impl Fn(Adaptation<'_>) -> Result<Layers, ModelError>,
) -> Result<Plan, ModelError> {
    let lora = &adapting.named(lora.clone());
    let made = layers(Adaptation { lora, adapting, strict: false })?;
    made.plan.ok_or(ModelError::NoAdapters { model_type: "this" })
}

fn plain<M: Forward + Sync + 'static>(chain: ChainBuilder, layers: Vec<(String, M)>) -> ChainBuilder {
    layers.into_iter().fold(chain, |chain, (name, layer)| chain.layer(name, layer))
}

/// The maximum number of elements per token that a layer's adapters hold.
pub(crate) fn adapter_elements<M: Adaptable>(layer: &M) -> usize {
    // The clone of an uninitialized layer has no values to copy.
    let mut layer = layer.clone();
    layer.maps().into_iter().filter_map(|map| map.adapter.as_ref().map(Adapter::working_elements)).sum()
}

/// Returns whether the weight `name` of a layer is quantized.
pub(crate) fn is_quantized<M: Adaptable>(layer: &M, name: &str) -> bool {
    let mut layer = layer.clone();
    let module = name.strip_suffix(".weight");
    layer.maps().iter().any(|map| *map.quantized && module == Some(map.name))
}

#[cfg(test)]
mod tests {
    use crate::family;
    use crate::lora::AdapterDir;
    use crate::synthetic::testing::{backward, shards_agree, with_threads};
    use hydra_core::{Batch, Chain, HostActivation, HostTensor};
    use std::path::Path;

    /// The chain of a test case made with PEFT.
    fn chain(name: &str) -> Chain {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/peft");
        let base = folder.join("bases").join(name.split('-').next().unwrap());
        let adapter = AdapterDir::open(folder.join(name)).unwrap();
        family::load(base.to_str().unwrap()).unwrap().adapted(&adapter.lora().clone(), Some(adapter)).unwrap()
    }

    #[test]
    fn bits_depend_neither_on_cuts_nor_on_threads() {
        let ids: Vec<i32> = (0..3 * 32).map(|i| (i * 31) % 40).collect();
        let ids = HostActivation::of(HostTensor::int(ids, [3, 32]));
        let batch =
            Batch { inputs: ids.clone(), targets: ids, items: 3, loss_targets: 3 * 31, units: 3 * 32 };
        for name in ["llama-pissa", "gpt2-lora-bias", "gpt2-bias-all", "qwen2-table-saved"] {
            let chain = chain(name);
            shards_agree(&chain, &batch, &[0, 1, 2, 3, 4]);
            shards_agree(&chain, &batch, &[0, 2, 4]);
            let one = with_threads(1, || backward(&chain, &batch));
            assert_eq!(one, with_threads(3, || backward(&chain, &batch)), "{name}");
        }
    }
}
