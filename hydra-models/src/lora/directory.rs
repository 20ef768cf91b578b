//! Adapters in a directory, as PEFT writes it.

use super::{Lora, is_adapter, peft_name};
use crate::ModelError;
use crate::weights::{TensorFile, in_file, read_json};
use hydra_core::{Chain, WeightError, WeightSource};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The file that says what is adapted.
pub(super) const CONFIG: &str = "adapter_config.json";
/// The file with the values.
pub(super) const WEIGHTS: &str = "adapter_model.safetensors";

/// Adapters whose values are read image by image. Cloning it is cheap.
#[derive(Clone, Debug)]
pub struct AdapterDir {
    path: PathBuf,
    lora: Lora,
    file: Arc<TensorFile>,
    /// The name that transformers gives a parameter.
    name: fn(&str) -> String,
}

/// The part of PEFT's configuration that decides what is computed.
#[derive(Deserialize)]
struct Config {
    peft_type: String,
    r: usize,
    #[serde(default = "default_alpha")]
    lora_alpha: f64,
    #[serde(default)]
    lora_dropout: f64,
    target_modules: Value,
    #[serde(flatten)]
    other: Map<String, Value>,
}

fn default_alpha() -> f64 {
    Lora::ALPHA
}

/// Keys of further kinds of adapters, which must be absent, empty or false.
const REFUSED: [&str; 14] = [
    "alora_invocation_tokens",
    "alpha_pattern",
    "exclude_modules",
    "layer_replication",
    "layers_pattern",
    "layers_to_transform",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_dora",
    "use_qalora",
    "use_rslora",
];

impl AdapterDir {
    /// Reads the configuration and the header of the weights.
    ///
    /// # Errors
    /// A file that is missing or damaged, and adapters of another kind than [`Lora`].
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, ModelError> {
        let path = path.into();
        let config = path.join(CONFIG);
        let lora = read_json::<Config>(&config)?.lora().map_err(|error| in_file(&config, error))?;
        let file = Arc::new(TensorFile::open(&path.join(WEIGHTS))?);
        Ok(Self { path, lora, file, name: str::to_owned })
    }

    /// What is adapted.
    pub fn lora(&self) -> &Lora {
        &self.lora
    }

    /// The file that the values are in.
    pub fn file(&self) -> PathBuf {
        self.path.join(WEIGHTS)
    }

    /// Returns whether the name of a tensor has this part.
    pub(crate) fn names(&self, part: &str) -> bool {
        self.file.names().iter().any(|name| name.contains(part))
    }

    /// These adapters for a chain whose parameters have these names in transformers.
    ///
    /// # Errors
    /// A tensor that is missing, of another shape than the chain says, or of a map that it does not adapt.
    pub(crate) fn of(mut self, chain: &Chain, name: fn(&str) -> String) -> Result<Self, ModelError> {
        self.name = name;
        let params = chain.images().iter().flat_map(|image| &image.params);
        let mut unknown = self.file.names();
        unknown.sort_unstable();
        for param in params.filter(|param| is_adapter(&param.name)) {
            let tensor = self.tensor(&param.name);
            self.file.check(&tensor, &param.shape)?;
            unknown.retain(|name| *name != tensor);
        }
        match unknown.into_iter().next() {
            Some(tensor) => {
                let (path, chain) = (self.file(), chain.name().to_owned());
                Err(ModelError::TensorUnknown { path, tensor, chain })
            }
            None => Ok(self),
        }
    }

    fn tensor(&self, param: &str) -> String {
        peft_name(&(self.name)(param))
    }
}

impl WeightSource for AdapterDir {
    fn fill(&self, chain: &Chain, image: usize, _: u64, out: &mut [f32]) -> Result<(), WeightError> {
        for param in &chain.images()[image].params {
            self.file
                .read(&self.tensor(&param.name), &mut out[param.range()])
                .map_err(|source| WeightError::Read { param: param.name.clone(), source: source.into() })?;
        }
        Ok(())
    }
}

impl Config {
    fn lora(self) -> Result<Lora, ModelError> {
        let refuse = |name: &'static str, found: String, expected: &str| {
            Err(ModelError::Config { name, found, expected: expected.to_owned() })
        };
        if self.peft_type != "LORA" {
            return refuse("peft_type", self.peft_type, "LORA");
        }
        let is_set = |name: &&str| self.other.get(*name).is_some_and(says_something);
        if let Some(name) = REFUSED.into_iter().find(|name| is_set(name)) {
            return refuse(name, self.other[name].to_string(), "nothing: this kind is not supported");
        }
        if let Some(bias) = self.other.get("bias").filter(|bias| *bias != "none") {
            return refuse("bias", bias.to_string(), "none: biases are not trained");
        }
        let targets =
            self.target_modules.as_array().map(|names| names.iter().map(|name| name.as_str()).collect());
        let Some(Some(targets)) = targets.map(|names: Option<Vec<&str>>| names) else {
            return refuse("target_modules", self.target_modules.to_string(), "a list of names");
        };
        let mut targets: Vec<String> = targets.into_iter().map(str::to_owned).collect();
        // PEFT writes a set, in whatever order.
        targets.sort_unstable();
        Ok(Lora { rank: self.r, alpha: self.lora_alpha, dropout: self.lora_dropout, targets })
    }
}

/// Returns whether a key asks for something.
fn says_something(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => false,
        Value::Array(items) => !items.is_empty(),
        Value::Object(fields) => !fields.is_empty(),
        _ => true,
    }
}

/// The directory's path, for messages and for what is written.
impl AsRef<Path> for AdapterDir {
    fn as_ref(&self) -> &Path {
        &self.path
    }
}
