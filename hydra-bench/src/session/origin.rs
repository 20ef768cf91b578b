//! What a run begins with, in words: where weights, tokenizer and adapters come from.

use crate::settings::AdapterSettings;
use hydra_models::tokenizer::Tokenizer;
use std::path::{Path, PathBuf};

/// What to do where the weights are drawn, and somebody meant those of the model that has the preset's name.
pub(super) const WAY_OUT: &str = "for trained weights give --model a Hugging Face directory";

/// Files that make a tokenizer, of which the first that is there names it.
const TOKENIZERS: [&str; 5] = ["tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt"];

/// Where the weights of a model are from.
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

/// Where the tokenizer of a model is from.
pub(super) fn tokenizer(tokenizer: &Tokenizer, directory: Option<&Path>) -> String {
    let file = || {
        TOKENIZERS
            .iter()
            .map(|name| directory.map(|dir| dir.join(name)))
            .find_map(|file| file.filter(|file| file.is_file()))
    };
    match tokenizer {
        Tokenizer::Bytes => "bytes".to_owned(),
        Tokenizer::Gpt2 => "GPT-2's, which is built in".to_owned(),
        _ => file().map_or_else(|| "the model's own".to_owned(), |file| shown(&file)),
    }
}

/// Where adapters are from, if there are some.
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

/// A path, from here if it is below.
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
