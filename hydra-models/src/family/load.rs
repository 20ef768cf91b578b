//! Loads a model by name.

use super::hub::{Cache, Repository};
use super::{FAMILIES, Family, Model, presets};
use crate::ModelError;
use crate::weights::read_json;
use serde::Deserialize;
use std::path::Path;

/// The configuration of a Hugging Face directory.
const CONFIG: &str = "config.json";

/// Loads a model by name: a Hugging Face directory with its weights, a configuration file `NAME.json` (with weights
/// initialized at random), a preset, or a repository `org/name` in the local Hugging Face cache
/// ([`directory`](super::directory)).
///
/// # Errors
/// A name that is none of these, an unsupported `model_type`, or an incomplete file or directory.
pub fn load(name: &str) -> Result<Box<dyn Model>, ModelError> {
    load_from(name, &Cache::of_machine())
}

fn load_from(name: &str, cache: &Cache) -> Result<Box<dyn Model>, ModelError> {
    let path = Path::new(name);
    if path.is_dir() {
        return open(path);
    }
    if path.extension().is_some_and(|extension| extension == "json") {
        return (family_of(path)?.configured)(path);
    }
    let has = |family: &&Family| (family.presets)().iter().any(|preset| preset.name == name);
    if let Some(family) = FAMILIES.iter().find(has) {
        return (family.preset)(name);
    }
    let unknown = || ModelError::UnknownPreset {
        found: name.to_owned(),
        known: presets().map(|preset| preset.name).collect(),
    };
    let repository = if path.exists() { None } else { Repository::named(name) };
    let repository = repository.ok_or_else(unknown)?;
    match cache.snapshot(&repository) {
        Ok(directory) => open(&directory).map_err(|error| repository.error(&directory, error)),
        Err(error) if repository.has_owner() => Err(error),
        Err(_) => Err(unknown()),
    }
}

/// Opens a Hugging Face directory.
fn open(directory: &Path) -> Result<Box<dyn Model>, ModelError> {
    (family_of(&directory.join(CONFIG))?.open)(directory)
}

/// The keys of a configuration that determine its family.
#[derive(Default, Deserialize)]
#[serde(default)]
struct OfFamily {
    model_type: String,
}

/// The family that reads a configuration file.
fn family_of(file: &Path) -> Result<&'static Family, ModelError> {
    let OfFamily { model_type } = read_json(file)?;
    let family = FAMILIES.iter().find(|family| family.model_types.contains(&model_type.as_str()));
    family.ok_or_else(|| ModelError::ConfigFile {
        path: file.to_owned(),
        source: Box::new(unknown(&model_type)),
    })
}

fn unknown(model_type: &str) -> ModelError {
    let known: Vec<&str> = FAMILIES.iter().flat_map(|family| family.model_types).copied().collect();
    let found = if model_type.is_empty() { "missing" } else { model_type };
    ModelError::Config { name: "model_type", found: found.to_owned(), expected: known.join(" or ") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpt2::{Gpt2Config, Gpt2Writer, chain};
    use crate::weights::testing::ParamBuffers;
    use hydra_core::ModelWriter;
    use std::error::Error;
    use std::fs;

    /// The messages of an error and its sources.
    fn refusal(name: &Path) -> String {
        let Err(error) = load(name.to_str().unwrap()) else { panic!("{} is a model", name.display()) };
        error.source().map_or(error.to_string(), |source| format!("{error}: {source}"))
    }

    #[test]
    fn a_name_is_a_preset_a_configuration_or_a_directory() {
        let dir = tempfile::tempdir().unwrap();
        let config = Gpt2Config::preset("bytes-tiny").unwrap();
        let chain = chain(&config, None).unwrap();
        Gpt2Writer::new(config).write(&chain, &ParamBuffers::of(&chain, 1), dir.path()).unwrap();
        let named = |path: &Path| load(path.to_str().unwrap()).unwrap();
        let (whole, file) = (named(dir.path()), named(&dir.path().join(CONFIG)));
        assert_eq!(whole.description().unwrap(), file.description().unwrap());
        assert_eq!((whole.directory(), file.directory()), (Some(dir.path()), None));
        assert_eq!((whole.files().len(), file.files().len()), (1, 0), "a file gives no weights");
        assert_eq!(load("bytes-tiny").unwrap().chain().unwrap().len(), 6);
    }

    #[test]
    fn a_repository_in_the_cache_is_a_model() {
        let root = tempfile::tempdir().unwrap();
        let cache = Cache::at(root.path());
        let commit = "0123456789abcdef0123456789abcdef01234567";
        let config = Gpt2Config::preset("bytes-tiny").unwrap();
        let chain = chain(&config, None).unwrap();
        for name in ["models--org--name", "models--bytes-tiny", "models--alone"] {
            let of_model = root.path().join(name);
            let snapshot = of_model.join("snapshots").join(commit);
            fs::create_dir_all(of_model.join("refs")).unwrap();
            fs::create_dir_all(&snapshot).unwrap();
            fs::write(of_model.join("refs/main"), commit).unwrap();
            Gpt2Writer::new(config.clone()).write(&chain, &ParamBuffers::of(&chain, 1), &snapshot).unwrap();
        }
        let snapshot = root.path().join("models--org--name/snapshots").join(commit);
        let files = |name: &str| load_from(name, &cache).unwrap().files();
        assert_eq!(files("org/name"), [snapshot.join("model.safetensors")]);
        assert_eq!(files(&format!("org/name@{commit}")), files("org/name"));
        assert_eq!(files("alone").len(), 1, "older repositories have no owner");
        assert_eq!(files("bytes-tiny").len(), 0, "a preset wins");
        let refused = |name: &str| load_from(name, &cache).map(|_| ()).unwrap_err().to_string();
        assert!(refused("org/none").contains("`hf download org/none`"), "{}", refused("org/none"));
        assert!(refused("none").starts_with("`none` is not a model: expected gpt2,"));
        fs::remove_file(snapshot.join("model.safetensors")).unwrap();
        assert!(refused("org/name").contains(": download the rest with `hf download org/name`"));
        fs::remove_file(snapshot.join("config.json")).unwrap();
        assert!(refused("org/name").contains(": download the rest with `hf download org/name`"));
    }

    #[test]
    fn what_is_no_model_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let preset = refusal(Path::new("gpt3"));
        assert!(preset.starts_with("`gpt3` is not a model: expected gpt2,"), "{preset}");
        assert!(preset.contains("a configuration `FILE.json`"), "{preset}");
        assert!(refusal(&dir.path().join("none.json")).contains("none.json"));
        let file = dir.path().join("other.json");
        for (text, found) in [
            ("{", "is not valid"),
            ("{}", "`model_type` is missing, expected gpt2"),
            (r#"{"model_type": "mamba"}"#, "`model_type` is mamba, expected gpt2"),
        ] {
            fs::write(&file, text).unwrap();
            let refusal = refusal(&file);
            assert!(refusal.contains(found) && refusal.contains("other.json"), "{refusal}");
        }
    }
}
