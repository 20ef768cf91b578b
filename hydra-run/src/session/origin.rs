//! Texts on the origin of initial weights, tokenizer and adapters.

use crate::settings::AdapterSettings;
use hydra_models::tokenizer::Tokenizer;
use std::path::{Path, PathBuf};

/// The hint for a preset, whose weights are random rather than pretrained.
pub(super) const WAY_OUT: &str = "for pretrained weights pass a Hugging Face directory as --model";

/// Tokenizer files; the first one that exists is shown.
const TOKENIZERS: [&str; 5] = ["tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt"];

/// Returns the origin of a model's weights.
pub(super) fn weights(files: &[PathBuf], seeds: &[u64]) -> String {
    match files {
        [] => format!("random ({})", drawn(seeds)),
        [file] => shown(file),
        [first, ..] => {
            let dir = first.parent().map_or_else(|| shown(first), shown);
            format!("{dir} ({} files)", files.len())
        }
    }
}

/// Returns the origin of a model's tokenizer.
pub(super) fn tokenizer(tokenizer: &Tokenizer, directory: Option<&Path>) -> String {
    let file = || {
        TOKENIZERS
            .iter()
            .map(|name| directory.map(|dir| dir.join(name)))
            .find_map(|file| file.filter(|file| file.is_file()))
    };
    match tokenizer {
        Tokenizer::Bytes => "bytes".to_owned(),
        Tokenizer::Gpt2 => "built-in GPT-2".to_owned(),
        _ => file().map_or_else(|| "the model's own".to_owned(), |file| shown(&file)),
    }
}

/// Returns the origin of adapters, if there are any.
pub(super) fn adapters(settings: &AdapterSettings, seeds: &[u64]) -> Option<String> {
    match (&settings.adapter, settings.lora.is_empty()) {
        (Some(dir), _) => Some(shown(Path::new(dir))),
        (None, false) => Some(format!("new ({})", drawn(seeds))),
        (None, true) => None,
    }
}

fn drawn(seeds: &[u64]) -> String {
    let all: Vec<String> = seeds.iter().map(u64::to_string).collect();
    format!("seed{} {}", if all.len() == 1 { "" } else { "s" }, all.join(", "))
}

/// Returns a path, relative to the current directory if it is inside.
fn shown(path: &Path) -> String {
    let here = std::env::current_dir().unwrap_or_default();
    path.strip_prefix(&here).unwrap_or(path).display().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::flags;

    #[test]
    fn files_are_named_and_what_is_drawn_has_its_seed() {
        let here = std::env::current_dir().unwrap();
        assert_eq!(weights(&[], &[0]), "random (seed 0)");
        assert_eq!(weights(&[], &[0, 7]), "random (seeds 0, 7)");
        assert_eq!(weights(&[here.join("m/model.safetensors")], &[0]), "m/model.safetensors");
        let parts = ["a", "b"].map(|name| here.join("m").join(name));
        assert_eq!(weights(&parts, &[0]), "m (2 files)");
        assert_eq!(tokenizer(&Tokenizer::Bytes, None), "bytes");
        let none: AdapterSettings = flags::defaults();
        assert_eq!(adapters(&none, &[0]), None);
        let lora = AdapterSettings { lora: vec![4], ..none.clone() };
        assert_eq!(adapters(&lora, &[3]).as_deref(), Some("new (seed 3)"));
        let read = AdapterSettings { adapter: Some("/x/adapter".to_owned()), ..none };
        assert_eq!(adapters(&read, &[3]).as_deref(), Some("/x/adapter"));
    }
}
