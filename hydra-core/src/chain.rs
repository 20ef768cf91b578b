//! A model as a sequence of layers, ended by a loss, and the images its parameters live in.

use crate::{
    CoreError, Declared, DeviceBytes, DeviceTensor, FloatType, Forward, HostTensor, Init, Layer, OwnInit,
    SeededInit, WeightSource, panic_message,
};
use burn::module::ParamId;
use burn::tensor::DType;
use std::collections::HashMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Parameters start at multiples of so many bytes in an image of `f32`, and of half as many in one of 16 bits:
/// what the widest vector loads and the sub-buffers of a GPU need.
pub const IMAGE_ALIGN: usize = 512;

const ALIGN_ELEMENTS: usize = IMAGE_ALIGN / size_of::<f32>();

/// Where a layer finds one of its parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParamRef {
    /// The image.
    pub image: usize,
    /// The parameter's place in [`ImageLayout::params`].
    pub slot: usize,
}

/// A parameter within an image.
#[derive(Clone, Debug)]
pub struct ImageParam {
    /// The full name: the layer's name and the path of fields.
    pub name: String,
    /// The sizes of the dimensions.
    pub shape: Vec<usize>,
    /// The first element within the image.
    pub offset: usize,
    /// The number of elements.
    pub len: usize,
    /// How it gets its first values when nobody gives any; [`Init::Module`] only where the module held values.
    pub init: Init,
    /// The values that the module held when it was given to the chain.
    pub given: Option<HostTensor>,
}

impl ImageParam {
    /// The elements of the image that are this parameter's.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.len
    }

    /// Whether the parameter is a vector, as norms and biases are.
    pub fn is_vector(&self) -> bool {
        self.shape.len() <= 1
    }
}

/// One contiguous buffer of parameters that moves as one: all parameters of a layer that no other layer
/// names, or one parameter that several layers name (tied).
#[derive(Clone, Debug)]
pub struct ImageLayout {
    /// The layer's name, or the tied parameter's.
    pub name: String,
    /// The parameters, by offset.
    pub params: Vec<ImageParam>,
    /// The length in elements, with the gaps that alignment leaves.
    pub elements: usize,
    /// The layers that name it, in chain order.
    pub layers: Vec<usize>,
    /// Whether it is trained; frozen images have neither gradient nor optimizer state.
    pub trained: bool,
    /// The type in which it moves and is on devices, and that of its gradients.
    pub float: FloatType,
}

impl ImageLayout {
    fn new(name: String, layer: usize, trained: bool) -> Self {
        Self { name, params: Vec::new(), elements: 0, layers: vec![layer], trained, float: FloatType::F32 }
    }

    fn push(&mut self, name: String, shape: Vec<usize>, init: Init, given: Option<HostTensor>) -> usize {
        let len = shape.iter().product();
        self.params.push(ImageParam { name, shape, offset: self.elements, len, init, given });
        self.elements += usize::next_multiple_of(len, ALIGN_ELEMENTS);
        self.params.len() - 1
    }

    /// The length in bytes of what moves.
    pub fn bytes(&self) -> u64 {
        (self.elements * self.float.bytes()) as u64
    }

    /// The length in bytes of the masters' parameters, which are `f32`, with what moves in their place if that
    /// is narrower. Each of the optimizer's moments has [`moment_bytes`](Self::moment_bytes).
    pub fn master_bytes(&self) -> u64 {
        self.moment_bytes() + if self.float == FloatType::F32 { 0 } else { self.bytes() }
    }

    /// The length in bytes of one of the optimizer's moments.
    pub fn moment_bytes(&self) -> u64 {
        (self.elements * size_of::<f32>()) as u64
    }

    /// Parameters in the image, without gaps.
    pub fn parameters(&self) -> u64 {
        self.params.iter().map(|p| p.len as u64).sum()
    }
}

/// A layer of a chain.
pub struct ChainLayer {
    /// The layer's name, unique within the chain.
    pub name: String,
    /// Its parameters, in the order of [`Layer::params`].
    pub params: Vec<ParamRef>,
    /// Whether its parameters keep their first values.
    pub frozen: bool,
    layer: Box<dyn Layer>,
}

impl ChainLayer {
    /// The hollow layer.
    pub fn layer(&self) -> &dyn Layer {
        self.layer.as_ref()
    }
}

/// A model as a sequence of layers; the last one returns the loss.
///
/// A chain is hollow: layers have names, shapes and code, and the values of their parameters come from the
/// [`WeightSource`] image by image. It is shared between threads and tasks and never written.
pub struct Chain {
    name: String,
    note: String,
    metrics: Vec<String>,
    language_model: bool,
    layers: Vec<ChainLayer>,
    images: Vec<ImageLayout>,
    float: FloatType,
    source: Arc<dyn WeightSource>,
}

impl std::fmt::Debug for Chain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<&str> = self.layers.iter().map(|l| l.name.as_str()).collect();
        f.debug_struct("Chain").field("name", &self.name).field("layers", &names).finish()
    }
}

/// Builds a [`Chain`] layer by layer.
pub struct ChainBuilder {
    name: String,
    note: String,
    metrics: Vec<String>,
    language_model: bool,
    layers: Vec<(String, Box<dyn Layer>, bool)>,
    source: Arc<dyn WeightSource>,
}

impl ChainBuilder {
    /// Appends a layer. Layers that hold parameters of the same `ParamId` share them.
    pub fn layer(self, name: impl Into<String>, module: impl Forward + Sync + 'static) -> Self {
        self.push(name, module, false)
    }

    /// Appends a layer whose parameters keep their first values.
    pub fn frozen(self, name: impl Into<String>, module: impl Forward + Sync + 'static) -> Self {
        self.push(name, module, true)
    }

    fn push(mut self, name: impl Into<String>, module: impl Forward + Sync + 'static, frozen: bool) -> Self {
        self.layers.push((name.into(), Box::new(module), frozen));
        self
    }

    /// What makes this chain differ from others of the same names and shapes, such as dropout, the activation or the
    /// number of attention heads. It is part of [`Chain::architecture`], by which saved plans and checkpoints are known:
    /// without it, those of a chain that differs in nothing else would be taken for this one's. Chains that have one and
    /// are the same by it are measured once.
    pub fn note(mut self, note: impl Into<String>) -> Self {
        self.note = note.into();
        self
    }

    /// What evaluations measure beside the loss, by name, such as `accuracy`. In a pass that evaluates, the last layer
    /// then returns one tensor more for each, in this order: a float of shape `[1]`, the mean over the batch's terms.
    /// Evaluations average it over all terms of their dataset, as they do the loss; tensors without a name are left out.
    /// In a pass that trains the last layer returns the loss alone.
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
    ///         Activation::of(loss).and(right.mean_dim(0))
    ///     }
    /// }
    ///
    /// let linear = LinearConfig::new(8, 3).init(&Device::flex());
    /// let chain = Chain::builder("mine").layer("head", Classifier { linear }).metrics(["accuracy"]).build()?;
    /// # assert_eq!(chain.metrics(), ["accuracy"]);
    /// # Ok::<(), hydra_core::CoreError>(())
    /// ```
    pub fn metrics(mut self, names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.metrics = names.into_iter().map(Into::into).collect();
        self
    }

    /// Says that the loss is the mean cross-entropy of the predicted tokens, in natural logarithms: evaluations then
    /// report a perplexity, `exp(loss)`, beside it.
    pub fn language_model(mut self) -> Self {
        self.language_model = true;
        self
    }

    /// Where the first values come from; [`SeededInit`] if this is not called.
    pub fn weights(mut self, source: impl WeightSource + 'static) -> Self {
        self.source = Arc::new(source);
        self
    }

    /// The chain, or what is wrong with it. See [`Forward::init`] for what is done to lazy parameters.
    pub fn build(self) -> Result<Chain, CoreError> {
        if self.layers.is_empty() {
            return Err(CoreError::EmptyChain { chain: self.name });
        }
        self.check_names()?;
        self.check_metrics()?;
        let mut parts = Vec::new();
        for (name, layer, frozen) in self.layers {
            parts.push((Part::declared(&self.name, name, layer.as_ref(), frozen)?, layer));
        }
        let mut uses: HashMap<ParamId, usize> = HashMap::new();
        let ids = parts.iter().flat_map(|(part, _)| part.params.iter().map(|p| p.info.id));
        ids.for_each(|id| *uses.entry(id).or_default() += 1);
        let mut layout = Layout { chain: &self.name, uses, images: Vec::new(), tied: HashMap::new() };
        let mut layers = Vec::new();
        for (index, (mut part, layer)) in parts.into_iter().enumerate() {
            let layer = part.settle(&self.name, layer, |id| layout.tied.contains_key(&id))?;
            let (name, frozen) = (part.name.clone(), part.frozen);
            let params = layout.place(index, part)?;
            layers.push(ChainLayer { name, params, frozen, layer });
        }
        let images = layout.images;
        let trained = images.iter().any(|image| image.trained);
        if !trained && !images.is_empty() {
            return Err(CoreError::NothingToTrain { chain: self.name });
        }
        let float = FloatType::F32;
        let Self { name, note, metrics, language_model, source, .. } = self;
        Ok(Chain { name, note, metrics, language_model, layers, images, float, source })
    }

    fn check_metrics(&self) -> Result<(), CoreError> {
        for (index, metric) in self.metrics.iter().enumerate() {
            if metric.is_empty() || metric == "loss" || self.metrics[..index].contains(metric) {
                return Err(CoreError::MetricName { chain: self.name.clone(), metric: metric.clone() });
            }
        }
        Ok(())
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

/// Runs what a user wrote for a layer.
fn guarded<T>(chain: &str, layer: &str, run: impl FnOnce() -> T) -> Result<T, CoreError> {
    catch_unwind(AssertUnwindSafe(run)).map_err(|panic| CoreError::LayerPanicked {
        chain: chain.to_owned(),
        layer: layer.to_owned(),
        message: panic_message(panic.as_ref()),
    })
}

/// A layer while its chain is built.
struct Part {
    name: String,
    frozen: bool,
    params: Vec<Declared>,
    /// How each of them gets its first values.
    inits: Vec<Init>,
}

impl Part {
    fn declared(chain: &str, name: String, layer: &dyn Layer, frozen: bool) -> Result<Self, CoreError> {
        let (params, inits) = guarded(chain, &name, || {
            let params = layer.declared();
            let inits = params.iter().map(|p| layer.init(&p.info.name, &p.info.shape)).collect();
            (params, inits)
        })?;
        let mut part = Self { name, frozen, params, inits };
        part.check(chain)?;
        part.frozen |= part.frozen_by_burn(chain)?;
        Ok(part)
    }

    /// No parameter is there twice or changes by itself, and values that modules hold are `f32`.
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

    /// Whether Burn trains none of the parameters; a layer that is frozen here anyway may have any.
    fn frozen_by_burn(&self, chain: &str) -> Result<bool, CoreError> {
        let first = |trained| self.params.iter().find(|p| p.trained == Some(trained));
        match (first(false), first(true)) {
            (Some(frozen), Some(trained)) if !self.frozen => Err(CoreError::PartlyFrozen {
                chain: chain.to_owned(),
                layer: self.name.clone(),
                frozen: frozen.info.name.clone(),
                trained: trained.info.name.clone(),
            }),
            (frozen, trained) => Ok(frozen.is_some() && trained.is_none()),
        }
    }

    /// The hollow layer. What the module says itself of first values is found out, but for parameters that another
    /// layer has named before.
    fn settle(
        &mut self,
        chain: &str,
        layer: Box<dyn Layer>,
        named: impl Fn(ParamId) -> bool,
    ) -> Result<Box<dyn Layer>, CoreError> {
        let own = self.params.iter().zip(&self.inits);
        let own: Vec<bool> = own.map(|(p, init)| *init == Init::Module && !named(p.info.id)).collect();
        let (layer, found) = guarded(chain, &self.name, || layer.settle(&own))?;
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

struct Layout<'a> {
    chain: &'a str,
    uses: HashMap<ParamId, usize>,
    images: Vec<ImageLayout>,
    tied: HashMap<ParamId, usize>,
}

impl Layout<'_> {
    fn place(&mut self, index: usize, part: Part) -> Result<Vec<ParamRef>, CoreError> {
        let Part { name, frozen, params, inits, .. } = part;
        let mut own: Option<usize> = None;
        let mut refs = Vec::new();
        for (Declared { info, given, .. }, init) in params.into_iter().zip(inits) {
            let full = format!("{name}.{}", info.name);
            if self.uses[&info.id] > 1 {
                refs.push(self.place_tied(index, full, info.id, info.shape, init, given, frozen)?);
                continue;
            }
            let image = *own.get_or_insert_with(|| {
                self.images.push(ImageLayout::new(name.clone(), index, !frozen));
                self.images.len() - 1
            });
            refs.push(ParamRef { image, slot: self.images[image].push(full, info.shape, init, given) });
        }
        Ok(refs)
    }

    #[allow(clippy::too_many_arguments)]
    fn place_tied(
        &mut self,
        index: usize,
        full: String,
        id: ParamId,
        shape: Vec<usize>,
        init: Init,
        given: Option<HostTensor>,
        frozen: bool,
    ) -> Result<ParamRef, CoreError> {
        let Some(&image) = self.tied.get(&id) else {
            let mut layout = ImageLayout::new(full.clone(), index, !frozen);
            layout.push(full, shape, init, given);
            self.images.push(layout);
            self.tied.insert(id, self.images.len() - 1);
            return Ok(ParamRef { image: self.images.len() - 1, slot: 0 });
        };
        let layout = &mut self.images[image];
        if layout.params[0].shape != shape {
            return Err(CoreError::TiedShapes {
                chain: self.chain.to_owned(),
                first: layout.name.clone(),
                second: full,
                first_shape: layout.params[0].shape.clone(),
                second_shape: shape,
            });
        }
        if layout.trained == frozen {
            return Err(CoreError::TiedFrozen { chain: self.chain.to_owned(), param: layout.name.clone() });
        }
        layout.layers.push(index);
        Ok(ParamRef { image, slot: 0 })
    }
}

impl Chain {
    /// Starts a chain.
    pub fn builder(name: impl Into<String>) -> ChainBuilder {
        ChainBuilder {
            name: name.into(),
            note: String::new(),
            metrics: Vec::new(),
            language_model: false,
            layers: Vec::new(),
            source: Arc::new(SeededInit),
        }
    }

    /// The chain with floats of another type on devices; `f32` if this is not called. Values stay what they are,
    /// for masters are `f32` always.
    pub fn with_float_type(mut self, float: FloatType) -> Self {
        self.float = float;
        self.images.iter_mut().for_each(|image| image.float = float);
        self
    }

    /// The type of the floats that the layers see.
    pub fn float_type(&self) -> FloatType {
        self.float
    }

    /// The chain's name, for messages and fingerprints.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What evaluations measure beside the loss; see [`ChainBuilder::metrics`].
    pub fn metrics(&self) -> &[String] {
        &self.metrics
    }

    /// Says that evaluations have a perplexity; see [`ChainBuilder::language_model`].
    pub fn is_language_model(&self) -> bool {
        self.language_model
    }

    /// The number of layers.
    pub fn len(&self) -> usize {
        self.layers.len()
    }

    /// Never: a chain has at least the layer that returns the loss.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// The layers.
    pub fn layers(&self) -> &[ChainLayer] {
        &self.layers
    }

    /// The images, in the order in which the chain first names them.
    pub fn images(&self) -> &[ImageLayout] {
        &self.images
    }

    /// Where first values come from.
    pub fn source(&self) -> &dyn WeightSource {
        self.source.as_ref()
    }

    /// The images that these layers name, ascending, each once.
    ///
    /// # Panics
    /// If the range reaches beyond the layers.
    pub fn images_of(&self, layers: Range<usize>) -> Vec<usize> {
        let mut images: Vec<usize> =
            self.layers[layers].iter().flat_map(|l| l.params.iter().map(|p| p.image)).collect();
        images.sort_unstable();
        images.dedup();
        images
    }

    /// Bytes of the images that these layers name: what their promotion moves.
    ///
    /// # Panics
    /// If the range reaches beyond the layers.
    pub fn param_bytes(&self, layers: Range<usize>) -> u64 {
        self.images_of(layers).into_iter().map(|i| self.images[i].bytes()).sum()
    }

    /// Bytes of the trained ones among the images that these layers name: what their gradients take. A tied
    /// parameter counts once for every layer that names it, because each makes a gradient of its own.
    ///
    /// # Panics
    /// If the range reaches beyond the layers.
    pub fn gradient_bytes(&self, layers: Range<usize>) -> u64 {
        let trained = |p: &&ParamRef| self.images[p.image].trained;
        let bytes = |p: &ParamRef| (self.images[p.image].params[p.slot].len * self.float.bytes()) as u64;
        self.layers[layers].iter().flat_map(|l| l.params.iter().filter(trained).map(bytes)).sum()
    }

    /// Parameters of the whole model; a tied one counts once.
    pub fn parameters(&self) -> u64 {
        self.images.iter().map(ImageLayout::parameters).sum()
    }

    /// The first layer that is trained. Backward passes end there.
    pub fn first_trained(&self) -> usize {
        let trained = |l: &ChainLayer| l.params.iter().any(|p| self.images[p.image].trained);
        self.layers.iter().position(trained).unwrap_or(0)
    }

    /// The parameters of the layer at `layer`, as views of images that `image` gives.
    ///
    /// # Panics
    /// If there is no such layer, or an image is shorter than its layout.
    pub fn layer_params(&self, layer: usize, image: &dyn Fn(usize) -> DeviceBytes) -> Vec<DeviceTensor> {
        let view = |p: &ParamRef| {
            let param = &self.images[p.image].params[p.slot];
            let bytes = param.offset * self.float.bytes()..(param.offset + param.len) * self.float.bytes();
            DeviceTensor::view(image(p.image).slice(bytes), param.shape.clone(), self.float.dtype())
        };
        self.layers[layer].params.iter().map(view).collect()
    }

    /// What the [builder](ChainBuilder::note) said of it.
    pub fn note(&self) -> &str {
        &self.note
    }

    /// A text that is the same for chains of the same architecture: names and shapes of all layers, what is
    /// tied and what is frozen, and the builder's note.
    pub fn architecture(&self) -> String {
        let layer = |l: &ChainLayer| {
            let params: Vec<String> = l.params.iter().map(|p| self.describe(p)).collect();
            format!("{}{}({})", l.name, if l.frozen { "!" } else { "" }, params.join(","))
        };
        let layers: Vec<String> = self.layers.iter().map(layer).collect();
        let metrics = if self.metrics.is_empty() { String::new() } else { format!("{:?}", self.metrics) };
        format!("{}[{}]{metrics}:{}", self.name, self.note, layers.join(";"))
    }

    fn describe(&self, p: &ParamRef) -> String {
        let param = &self.images[p.image].params[p.slot];
        format!("{}@{}{:?}", param.name, p.image, param.shape)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Activation, Pass};
    use burn::module::{Module, Param};
    use burn::nn::{Linear, LinearConfig};
    use burn::tensor::{Device, Tensor};

    #[derive(Module, Debug)]
    struct Dense {
        linear: Linear,
    }

    impl Forward for Dense {
        fn forward(&self, x: Activation, _: &Pass) -> Activation {
            Activation::of(self.linear.forward(x.into_float::<2>()))
        }
    }

    #[derive(Module, Debug)]
    struct Tied {
        table: Param<Tensor<2>>,
        bias: Param<Tensor<1>>,
    }

    impl Forward for Tied {
        fn forward(&self, x: Activation, _: &Pass) -> Activation {
            x
        }
    }

    #[derive(Module, Debug)]
    struct Twin {
        one: Param<Tensor<1>>,
        two: Param<Tensor<1>>,
    }

    impl Forward for Twin {
        fn forward(&self, x: Activation, _: &Pass) -> Activation {
            x
        }
    }

    fn dense(inputs: usize, outputs: usize) -> Dense {
        Dense { linear: LinearConfig::new(inputs, outputs).init(&Device::flex()) }
    }

    fn tied(table: &Param<Tensor<2>>) -> Tied {
        Tied { table: table.clone(), bias: Param::from_tensor(Tensor::ones([3], &Device::flex())) }
    }

    fn table(rows: usize) -> Param<Tensor<2>> {
        Param::from_tensor(Tensor::ones([rows, 3], &Device::flex()))
    }

    #[test]
    fn a_layer_is_one_image_with_aligned_parameters() {
        let chain = Chain::builder("mlp").layer("a", dense(3, 5)).layer("b", dense(5, 2)).build().unwrap();
        assert_eq!(chain.images().len(), 2);
        let image = &chain.images()[0];
        assert_eq!(image.params[0].name, "a.linear.weight");
        assert_eq!((image.params[0].offset, image.params[1].offset), (0, 128));
        assert!(!image.params[0].is_vector() && image.params[1].is_vector());
        assert_eq!(image.bytes(), 1024);
        assert_eq!(chain.parameters(), (3 * 5 + 5 + 5 * 2 + 2) as u64);
        assert_eq!(chain.param_bytes(0..2), 2048);
    }

    #[test]
    fn a_tied_parameter_is_an_image_that_both_layers_name() {
        let shared = table(4);
        let chain =
            Chain::builder("tied").layer("in", tied(&shared)).layer("out", tied(&shared)).build().unwrap();
        assert_eq!(chain.images().len(), 3);
        assert_eq!(chain.images()[0].layers, [0, 1]);
        assert_eq!(chain.images_of(1..2), [0, 2]);
        assert_eq!(chain.param_bytes(0..2), 3 * 512);
        assert_eq!(chain.gradient_bytes(0..2), (2 * 12 + 2 * 3) * 4);
    }

    #[test]
    fn values_that_modules_hold_are_taken_and_lazy_ones_follow_the_seed() {
        let shared = table(4);
        let chain =
            Chain::builder("c").layer("a", tied(&shared)).layer("b", dense(3, 3)).layer("c", dense(3, 3));
        let chain = chain.build().unwrap();
        let fill = |image: usize, seed| {
            let mut out = vec![0.0; chain.images()[image].elements];
            chain.source().fill(&chain, image, seed, &mut out).unwrap();
            out
        };
        assert_eq!(fill(0, 1)[..12], [1.0; 12]);
        let weights = fill(1, 1);
        assert!(weights[..9].iter().all(|w| w.abs() <= 1.0 / 3f32.sqrt() && *w != 0.0));
        assert_eq!(weights, fill(1, 1));
        assert!(weights != fill(1, 2) && weights != fill(2, 1), "seeds and images have values of their own");
        assert_ne!(weights[..3], weights[128..131], "and parameters");
    }

    #[derive(Module, Debug)]
    struct Plain {
        #[module(skip)]
        unused: usize,
    }

    impl Forward for Plain {
        fn forward(&self, x: Activation, _: &Pass) -> Activation {
            x
        }
    }

    #[test]
    fn a_narrower_type_halves_what_moves_and_not_the_moments() {
        let chain = || Chain::builder("c").layer("a", dense(3, 5)).build().unwrap();
        let (wide, narrow) = (chain(), chain().with_float_type(FloatType::Bf16));
        let bytes = |chain: &Chain| {
            let image = &chain.images()[0];
            [image.bytes(), image.moment_bytes(), image.master_bytes(), chain.gradient_bytes(0..1)]
        };
        assert_eq!((bytes(&wide), bytes(&narrow)), ([1024, 1024, 1024, 80], [512, 1024, 1536, 40]));
        let image = DeviceBytes::from(bytes::Bytes::from_iter((0..512).map(|i| (i / 256) as u8)));
        let [weight, bias] = &narrow.layer_params(0, &|_| image.clone())[..] else {
            panic!("two parameters")
        };
        assert_eq!((&weight.bytes.as_host().unwrap()[..], weight.dtype), (&[0; 30][..], DType::BF16));
        assert_eq!((&bias.bytes.as_host().unwrap()[..], bias.dtype), (&[1; 10][..], DType::BF16));
    }

    #[test]
    fn layers_without_parameters_are_neither_trained_nor_frozen() {
        let plain = || Plain { unused: 0 };
        let none = Chain::builder("c").layer("a", plain()).layer("b", plain()).build().unwrap();
        assert_eq!((none.images().len(), none.parameters(), none.first_trained()), (0, 0, 0));
        let chain = |frozen: bool| {
            let builder = Chain::builder("c").layer("a", plain());
            let builder =
                if frozen { builder.frozen("b", dense(2, 2)) } else { builder.layer("b", dense(2, 2)) };
            builder.layer("c", dense(2, 2)).build().unwrap()
        };
        assert_eq!((chain(false).first_trained(), chain(true).first_trained()), (1, 2));
        assert_ne!(chain(false).architecture(), chain(true).architecture());
    }

    #[test]
    fn what_is_wrong_with_a_chain_is_named() {
        assert!(matches!(Chain::builder("none").build(), Err(CoreError::EmptyChain { .. })));
        let shared = table(4);
        let twice = Chain::builder("c").layer("a", dense(2, 2)).layer("a", dense(2, 2)).build();
        assert!(matches!(twice, Err(CoreError::DuplicateLayer { layer, .. }) if layer == "a"));
        let bias = Param::from_tensor(Tensor::ones([3], &Device::flex()));
        let within = Chain::builder("c").layer("a", Twin { one: bias.clone(), two: bias }).build();
        assert!(matches!(within, Err(CoreError::SharedWithinLayer { param, .. }) if param == "two"));
        let ones = |device: &Device, _: bool| Tensor::ones([5, 3], device);
        let table = Param::uninitialized(shared.id, ones, Device::flex(), true, [5, 3].into());
        let other = Tied { table, ..tied(&shared) };
        let shapes = Chain::builder("c").layer("a", tied(&shared)).layer("b", other).build();
        assert!(matches!(shapes, Err(CoreError::TiedShapes { second_shape, .. }) if second_shape == [5, 3]));
        for metrics in [vec!["loss"], vec![""], vec!["a", "a"]] {
            let metrics = Chain::builder("c").layer("a", dense(2, 2)).metrics(metrics).build();
            assert!(matches!(metrics, Err(CoreError::MetricName { .. })));
        }
        let half_frozen = Chain::builder("c").frozen("a", tied(&shared)).layer("b", tied(&shared)).build();
        assert!(matches!(half_frozen, Err(CoreError::TiedFrozen { .. })));
        let all_frozen = Chain::builder("c").frozen("a", dense(2, 2)).build();
        assert!(matches!(all_frozen, Err(CoreError::NothingToTrain { .. })));
    }
}
