//! A safetensors writer and source for any chain.

use super::directory::unread;
use super::write::write_tensors;
use super::{SavedType, TensorFile, WEIGHTS, failed};
use crate::ModelError;
use hydra_core::{
    BufferParam, Chain, FileSpan, FileVersion, FloatType, ModelWriter, ParamBufferReader, PartReader,
    SeededInit, WeightError, WeightSource,
};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::Arc;

/// Writes a trained chain to a file [`WEIGHTS`] in a directory, with a tensor for each parameter under its full name.
///
/// The file is renamed into place when it is complete; an existing file stays until then. One buffer is in memory at a
/// time. [`SafetensorsSource`] reads the file.
#[derive(Clone, Copy, Debug, Default)]
pub struct SafetensorsWriter;

impl ModelWriter for SafetensorsWriter {
    fn write(&self, chain: &Chain, buffers: &dyn ParamBufferReader, dir: &Path) -> Result<(), WeightError> {
        fs::create_dir_all(dir).map_err(|e| failed(dir, e))?;
        write_tensors(chain, buffers, &dir.join(WEIGHTS), SavedType::F32, &|name| Some(name.to_owned()))
    }

    fn reads_parts(&self) -> bool {
        true
    }
}

/// Initial weights of a chain from a file that [`SafetensorsWriter`] wrote, or any other with these names: one tensor
/// for each parameter, in `F32`, `F16` or `BF16`, and no others. The counts of batch normalizations are integers, as in PyTorch's
/// files. With [`fresh`](Self::fresh), parts of the model may
/// differ. Cloning is cheap.
///
/// Values are read buffer by buffer. They do not depend on the seed, except for fresh parts.
#[derive(Clone, Debug)]
pub struct SafetensorsSource {
    file: Arc<TensorFile>,
    fresh: Vec<String>,
}

impl SafetensorsSource {
    /// Reads the header of a file, or of the file [`WEIGHTS`] in a directory.
    ///
    /// # Errors
    /// A file that cannot be read or is damaged.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, ModelError> {
        let path = path.as_ref();
        let file = if path.is_dir() { TensorFile::open(&path.join(WEIGHTS)) } else { TensorFile::open(path) };
        Ok(Self { file: Arc::new(file?), fresh: Vec::new() })
    }

    /// Initializes these parts as if there were no file, such as the head of a model that is trained for another task:
    /// a parameter of that name, or whose name continues with a dot after it, is drawn with the task's seed. The file's
    /// tensors under such names are not read, so parts that only the file has can be excluded too.
    ///
    /// ```
    /// # use burn::module::Module;
    /// # use burn::nn::{Linear, LinearConfig};
    /// # use burn::tensor::Device;
    /// # use hydra_core::{Activation, Chain, Forward, Pass};
    /// # use hydra_models::weights::SafetensorsSource;
    /// # use std::path::Path;
    /// # #[derive(Module, Debug)]
    /// # struct Layer {
    /// #     linear: Linear,
    /// # }
    /// # impl Forward for Layer {
    /// #     fn forward(&self, x: Activation, _: &Pass) -> Activation {
    /// #         x
    /// #     }
    /// # }
    /// // A pretrained, frozen body with a new head.
    /// fn tuned(file: &Path, body: Layer, head: Layer) -> Result<Chain, Box<dyn std::error::Error>> {
    ///     let source = SafetensorsSource::open(file)?.fresh(["head"]);
    ///     let chain = Chain::builder("tuned").frozen("body", body).layer("head", head);
    ///     let chain = chain.weights(source.clone()).build()?;
    ///     source.check(&chain)?;
    ///     Ok(chain)
    /// }
    /// # let layer = || Layer { linear: LinearConfig::new(2, 2).init(&Device::flex()) };
    /// # assert!(tuned(Path::new("no such file"), layer(), layer()).is_err());
    /// ```
    pub fn fresh(mut self, parts: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.fresh.extend(parts.into_iter().map(Into::into));
        self
    }

    fn is_fresh(&self, name: &str) -> bool {
        self.fresh.iter().any(|part| is_within(name, part))
    }

    /// Checks that the file has exactly the parameters of `chain`, except for fresh parts. Without this call, a chain
    /// that has this source checks each buffer when its initial weights are read.
    ///
    /// # Errors
    /// A tensor that is missing or has another shape or type, a tensor without a parameter in the chain, or a fresh
    /// part that neither has.
    pub fn check(&self, chain: &Chain) -> Result<(), ModelError> {
        let params = || chain.buffers().iter().flat_map(|buffer| &buffer.params);
        let mut read = params().filter(|param| !self.is_fresh(&param.name));
        read.try_for_each(|param| self.file.check_param(&param.name, param))?;
        let known: BTreeSet<&str> = params().map(|param| param.name.as_str()).collect();
        let tensors = self.file.names();
        let (path, chain) = (|| self.file.path.clone(), || chain.name().to_owned());
        let names = || known.iter().copied().chain(tensors.iter().map(String::as_str));
        if let Some(part) = self.fresh.iter().find(|part| !names().any(|name| is_within(name, part))) {
            return Err(ModelError::PartUnknown { path: path(), part: part.clone(), chain: chain() });
        }
        let unknown =
            tensors.iter().filter(|name| !known.contains(name.as_str()) && !self.is_fresh(name)).min();
        unknown.map_or(Ok(()), |tensor| {
            Err(ModelError::TensorUnknown { path: path(), tensor: tensor.clone(), chain: chain() })
        })
    }
}

/// Returns whether a full name is `part`, or is inside it.
fn is_within(name: &str, part: &str) -> bool {
    name.strip_prefix(part).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

impl WeightSource for SafetensorsSource {
    fn fill(&self, chain: &Chain, buffer: usize, seed: u64, out: &mut [f32]) -> Result<(), WeightError> {
        if buffer == 0 {
            let chain_name = chain.name().to_owned();
            let failed = |source: ModelError| WeightError::ParamBuffer {
                chain: chain_name,
                buffer,
                source: source.into(),
            };
            self.check(chain).map_err(failed)?;
        }
        let params = &chain.buffers()[buffer].params;
        if params.iter().any(|param| self.is_fresh(&param.name)) {
            SeededInit.fill(chain, buffer, seed, out)?;
        }
        for param in params.iter().filter(|param| !self.is_fresh(&param.name)) {
            let read = self.file.check_param(&param.name, param);
            read.and_then(|()| self.file.read_part(&param.name, 0, &mut out[param.range()]))
                .map_err(|source| unread(param, source))?;
        }
        Ok(())
    }

    fn origin(&self, chain: &Chain, buffer: usize, seed: u64) -> Option<String> {
        let fresh = |param: &BufferParam| self.is_fresh(&param.name);
        let fresh: Vec<bool> = chain.buffers()[buffer].params.iter().map(fresh).collect();
        let file = self.file.path.display();
        match fresh.contains(&true) {
            true => Some(format!("{file} but for {fresh:?}: {}", SeededInit.origin(chain, buffer, seed)?)),
            false => Some(file.to_string()),
        }
    }

    fn files_of(&self, _: &Chain, buffer: usize) -> Option<BTreeSet<FileVersion>> {
        // The first buffer is filled after a check of the whole file.
        (buffer > 0).then(|| BTreeSet::from([self.file.version.clone()]))
    }

    fn float_type(&self, chain: &Chain, buffer: usize) -> FloatType {
        let params = chain.buffers()[buffer].params.iter();
        of_all(params.map(|param| match self.is_fresh(&param.name) {
            true => None,
            false => self.file.float_type(&param.name),
        }))
    }

    fn parts<'a>(&'a self, chain: &'a Chain, buffer: usize) -> Option<PartReader<'a>> {
        let params = &chain.buffers()[buffer].params;
        // The first buffer is filled after a check of the whole file.
        let none = buffer == 0 || params.iter().any(|param| self.is_fresh(&param.name));
        (!none).then(|| -> PartReader<'a> {
            Box::new(move |slot, first, out| {
                let param = &params[slot];
                let checked = self.file.check_param(&param.name, param);
                let read = checked.and_then(|()| self.file.read_part(&param.name, first, out));
                read.map_err(|source| unread(param, source))
            })
        })
    }

    fn spans(&self, chain: &Chain, buffer: usize) -> Option<Vec<FileSpan>> {
        self.check(chain).ok()?;
        let float = self.float_type(chain, buffer);
        let span = |param: &BufferParam| {
            let is_of_type = self.file.float_type(&param.name) == Some(float);
            (is_of_type && !self.is_fresh(&param.name)).then(|| self.file.span(&param.name, 0)).flatten()
        };
        chain.buffers()[buffer].params.iter().map(span).collect()
    }
}

/// The type that all of these are, or `F32` if they differ or one is unknown.
pub(crate) fn of_all(types: impl IntoIterator<Item = Option<FloatType>>) -> FloatType {
    let mut types = types.into_iter();
    let first = types.next().flatten().unwrap_or(FloatType::F32);
    if types.all(|other| other == Some(first)) { first } else { FloatType::F32 }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Broken, ParamBuffers};
    use super::*;
    use crate::mlp;
    use burn::module::{Module, Param};
    use burn::tensor::{Device, Tensor};
    use hydra_core::{Activation, Forward, Pass, with_causes};
    use tempfile::TempDir;

    /// A layer with a shared table and a number of its own.
    #[derive(Module, Debug)]
    struct Tied {
        table: Param<Tensor<2>>,
        own: Param<Tensor<1>>,
    }

    impl Forward for Tied {
        fn forward(&self, x: Activation, _: &Pass) -> Activation {
            x
        }
    }

    fn tied(source: Option<SafetensorsSource>) -> Chain {
        let device = Device::flex();
        let table = Param::from_tensor(Tensor::ones([2, 3], &device));
        let layer = |own: f32| Tied {
            table: table.clone(),
            own: Param::from_tensor(Tensor::full([1], own, &device)),
        };
        let chain = Chain::builder("tied").layer("in", layer(0.5)).layer("out", layer(-2.0));
        match source {
            Some(source) => chain.weights(source),
            None => chain,
        }
        .build()
        .unwrap()
    }

    fn written(chain: &Chain, seed: u64) -> (TempDir, ParamBuffers) {
        let (dir, buffers) = (TempDir::new().unwrap(), ParamBuffers::of(chain, seed));
        SafetensorsWriter.write(chain, &buffers, &dir.path().join("model")).unwrap();
        (dir, buffers)
    }

    #[test]
    fn what_was_written_is_read_to_the_same_bits() {
        let chain = tied(None);
        let (dir, buffers) = written(&chain, 1);
        let file = dir.path().join("model").join(WEIGHTS);
        for place in [dir.path().join("model"), file.clone()] {
            let source = SafetensorsSource::open(place).unwrap();
            source.check(&chain).unwrap();
            assert_eq!(ParamBuffers::of(&tied(Some(source)), 9), buffers);
        }
        let bytes = fs::read(&file).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let mut names = tensors.names();
        names.sort_unstable();
        assert_eq!(names, ["in.own", "in.table", "out.own"]);
        assert_eq!(tensors.tensor("in.table").unwrap().shape(), [2, 3]);
        assert_eq!(fs::read_dir(file.parent().unwrap()).unwrap().count(), 1, "no part is left");
    }

    #[test]
    fn what_is_read_depends_on_the_file_and_what_is_fresh_on_the_seed_too() {
        let chain = mlp::chain(&[2, 4], 3).unwrap();
        let (dir, _) = written(&chain, 1);
        let source = || SafetensorsSource::open(dir.path().join("model")).unwrap();
        let origin = |source: &SafetensorsSource, buffer, seed| source.origin(&chain, buffer, seed).unwrap();
        let fresh = source().fresh(["classifier"]);
        assert!(origin(&source(), 0, 1).ends_with(WEIGHTS));
        assert_eq!(origin(&source(), 1, 1), origin(&fresh, 0, 2));
        assert_ne!(origin(&fresh, 1, 1), origin(&fresh, 1, 2));
        assert_ne!(origin(&fresh, 1, 1), origin(&source(), 1, 1));
        let (other, _) = written(&chain, 1);
        let elsewhere = SafetensorsSource::open(other.path().join("model")).unwrap();
        assert_ne!(origin(&elsewhere, 0, 1), origin(&source(), 0, 1));
        // Values held by modules have no known origin.
        let held = tied(None);
        assert_eq!(source().fresh(["in", "out"]).origin(&held, 0, 1), None);
    }

    #[test]
    fn a_buffer_has_the_type_that_all_of_its_tensors_have() {
        let chain = mlp::chain(&[2, 4], 3).unwrap();
        let (dir, buffers) = written(&chain, 1);
        let file = dir.path().join("narrow.safetensors");
        write_tensors(&chain, &buffers, &file, SavedType::Bf16, &|name| Some(name.to_owned())).unwrap();
        let narrow = SafetensorsSource::open(&file).unwrap();
        let wide = SafetensorsSource::open(dir.path().join("model")).unwrap();
        assert_eq!([0, 1].map(|buffer| narrow.float_type(&chain, buffer)), [FloatType::Bf16; 2]);
        assert_eq!([0, 1].map(|buffer| wide.float_type(&chain, buffer)), [FloatType::F32; 2]);
        let fresh = narrow.fresh(["classifier"]);
        let types = [0, 1].map(|buffer| fresh.float_type(&chain, buffer));
        assert_eq!(types, [FloatType::Bf16, FloatType::F32]);
        assert_eq!(of_all([Some(FloatType::Bf16), Some(FloatType::F16)]), FloatType::F32);
    }

    #[test]
    fn a_file_of_another_model_is_refused() {
        let (dir, _) = written(&mlp::chain(&[2, 4], 3).unwrap(), 1);
        let source = SafetensorsSource::open(dir.path().join("model")).unwrap();
        let refusal = |sizes: &[usize], classes| {
            source.check(&mlp::chain(sizes, classes).unwrap()).unwrap_err().to_string()
        };
        let message = refusal(&[2, 4, 4], 3);
        assert!(message.contains("has no tensor `dense.1.linear.weight`"), "{message}");
        let message = refusal(&[2, 4], 5);
        assert!(
            message.contains("`classifier.linear.weight` has shape [4, 3], expected [4, 5]"),
            "{message}"
        );
        let message = refusal(&[4], 3);
        assert!(
            message.contains("has the tensor `dense.0.linear.bias`, but chain `mlp` has no"),
            "{message}"
        );

        let chain = tied(Some(source));
        let mut out = vec![0.0; chain.buffers()[1].elements];
        for buffer in [0, 1] {
            out.resize(chain.buffers()[buffer].elements, 0.0);
            let error = chain.source().fill(&chain, buffer, 1, &mut out).unwrap_err();
            let (message, param) = (with_causes(&error), &chain.buffers()[buffer].params[0].name);
            assert!(message.contains(&format!("has no tensor `{param}`")), "{message}");
        }
    }

    #[test]
    fn what_is_fresh_is_drawn_and_the_rest_is_read() {
        let old = mlp::chain(&[2, 4, 4], 3).unwrap();
        let (dir, buffers) = written(&old, 1);
        let source = SafetensorsSource::open(dir.path().join("model")).unwrap();
        let new = |parts: &[&str], classes| {
            let source = source.clone().fresh(parts.iter().copied());
            let chain = mlp::chain(&[2, 4, 4], classes).unwrap();
            source.check(&chain).map(|()| (source, chain))
        };
        let values = |source: &SafetensorsSource, chain: &Chain, buffer: usize| {
            let mut out = vec![0.0; chain.buffers()[buffer].elements];
            source.fill(chain, buffer, 7, &mut out).unwrap();
            bytes::Bytes::copy_from_slice(bytemuck::cast_slice(&out))
        };
        // The head has another shape; the body is read.
        let (tuned, chain) = new(&["classifier"], 9).unwrap();
        let drawn = ParamBuffers::of(&chain, 7);
        for buffer in 0..3 {
            let expected = if buffer == 2 { &drawn } else { &buffers };
            assert_eq!(values(&tuned, &chain, buffer), expected.0[buffer]);
        }
        // A part of a layer.
        let (tuned, chain) = new(&["dense.1.linear.bias"], 3).unwrap();
        let (half, param) = (values(&tuned, &chain, 1), chain.buffers()[1].params[0].range());
        let bytes = param.start * 4..param.end * 4;
        assert_eq!(half.slice(bytes.clone()), buffers.0[1].slice(bytes));
        // A part that only the file has may be excluded; one that neither has is a mistake.
        let short = mlp::chain(&[2, 4], 3).unwrap();
        source.clone().fresh(["dense.1"]).check(&short).unwrap();
        let said = new(&["dens"], 3).unwrap_err().to_string();
        assert!(said.contains("neither chain `mlp` nor") && said.contains("`dens`"), "{said}");
        // All layers whose names start with this word and a dot.
        assert!(new(&["dense"], 3).unwrap().0.is_fresh("dense.1.linear.weight"));
        assert!(new(&["classifier"], 3).is_ok() && new(&[], 9).is_err());
    }

    #[test]
    fn a_damaged_file_is_refused_and_a_write_that_fails_leaves_the_old_one() {
        let chain = tied(None);
        let (dir, buffers) = written(&chain, 1);
        let model = dir.path().join("model");
        assert!(SafetensorsWriter.write(&chain, &Broken, &model).is_err());
        assert_eq!(ParamBuffers::of(&tied(Some(SafetensorsSource::open(&model).unwrap())), 0), buffers);

        let whole = fs::read(model.join(WEIGHTS)).unwrap();
        fs::write(model.join(WEIGHTS), &whole[..whole.len() - 1]).unwrap();
        assert!(matches!(SafetensorsSource::open(&model), Err(ModelError::Length { .. })));
        assert!(matches!(SafetensorsSource::open(dir.path().join("none")), Err(ModelError::Read { .. })));
    }
}
