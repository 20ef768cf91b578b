//! Built-in tokenizers, for models without files, and their Hugging Face files.

use super::gpt2::{for_long_words, letter};
use super::huggingface::END_OF_TEXT;
use super::{BYTE_VOCAB, GPT2_VOCAB, Tokenizer, TokenizerError};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::path::Path;

/// A tokenizer that needs no files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BuiltIn {
    /// One token per byte.
    Bytes,
    /// GPT-2's tokenizer.
    Gpt2,
}

impl BuiltIn {
    /// The names in flags.
    pub const NAMES: [&str; 2] = ["bytes", "gpt2"];

    /// Builds the tokenizer for a model with `vocab_size` ids.
    ///
    /// # Errors
    /// The model has fewer ids than the tokenizer.
    pub fn tokenizer(self, vocab_size: usize) -> Result<Tokenizer, TokenizerError> {
        let (tokenizer, smallest) = match self {
            Self::Bytes => (Tokenizer::Bytes, BYTE_VOCAB),
            Self::Gpt2 => (Tokenizer::Gpt2, GPT2_VOCAB),
        };
        if vocab_size < smallest {
            let name = tokenizer.name().to_owned();
            return Err(TokenizerError::TooFewIds { name, vocab_size, smallest });
        }
        Ok(tokenizer)
    }
}

/// Byte 0, the end-of-text token of the byte tokenizer.
const NUL: &str = "\0";

/// The `tokenizer.json` of the byte tokenizer.
///
/// The vocabulary spells bytes as letters, as GPT-2's does, except byte 0: as the end-of-text token it needs a name of
/// its own, so it is a special token, which tokenizers match in a text before the byte-level encoding.
fn bytes() -> Value {
    let spell = |byte: u8| if byte == 0 { NUL.to_owned() } else { letter(byte).to_string() };
    let vocab: Map<String, Value> = (0..=u8::MAX).map(|byte| (spell(byte), byte.into())).collect();
    let level = |regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": regex});
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [added(0, NUL)], "normalizer": null,
        "pre_tokenizer": level(false), "post_processor": null, "decoder": level(true),
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": []
        }
    })
}

fn added(id: usize, token: &str) -> Value {
    json!({
        "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
        "special": true
    })
}

/// Returns whether a directory's tokenizer is the byte tokenizer as written here.
pub(super) fn are_bytes_in(directory: &Path) -> bool {
    let text = std::fs::read_to_string(directory.join("tokenizer.json")).unwrap_or_default();
    // A trained vocabulary is much longer.
    text.len() < 1 << 16 && serde_json::from_str::<Value>(&text).is_ok_and(|found| found == bytes())
}

/// The contents of `tokenizer.json` and `tokenizer_config.json` of a built-in tokenizer.
pub(super) fn files(which: BuiltIn) -> Result<[(&'static str, String); 2], TokenizerError> {
    let (json, id, end) = match which {
        BuiltIn::Bytes => (format!("{:#}", bytes()), 0, NUL),
        BuiltIn::Gpt2 => (gpt2()?, GPT2_VOCAB - 1, END_OF_TEXT),
    };
    let mut token = added(id, end);
    token.as_object_mut().into_iter().for_each(|token| drop(token.remove("id")));
    let mut decoder = Map::new();
    decoder.insert(id.to_string(), token);
    let config = json!({
        "added_tokens_decoder": decoder, "bos_token": end, "eos_token": end, "unk_token": end,
        "clean_up_tokenization_spaces": false, "tokenizer_class": "PreTrainedTokenizerFast"
    });
    Ok([("tokenizer.json", json), ("tokenizer_config.json", format!("{config:#}\n"))])
}

/// The `tokenizer.json` of GPT-2's tokenizer.
fn gpt2() -> Result<String, TokenizerError> {
    for_long_words()?.with_special(GPT2_VOCAB - 1, END_OF_TEXT)?.to_json()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::fs;
    use tempfile::TempDir;

    fn written(which: BuiltIn) -> TempDir {
        let dir = tempfile::tempdir().unwrap();
        files(which).unwrap().iter().for_each(|(name, text)| fs::write(dir.path().join(name), text).unwrap());
        dir
    }

    /// Reads the tokenizer's files like those of any other directory.
    fn read(dir: &TempDir) -> Tokenizer {
        Tokenizer::HuggingFace(super::super::HuggingFaceTokenizer::open(dir.path()).unwrap().unwrap())
    }

    #[test]
    fn bytes_are_known_again() {
        let dir = written(BuiltIn::Bytes);
        assert!(are_bytes_in(dir.path()));
        assert_eq!(Tokenizer::from_dir(dir.path()).unwrap().unwrap().name(), "bytes");
        let every: String = ('\0'..='\u{7ff}').collect();
        assert_eq!(read(&dir).encode(&every).unwrap(), Tokenizer::Bytes.encode(&every).unwrap());
        let conventions = super::super::Conventions::load(&read(&dir), Some(dir.path())).unwrap();
        assert_eq!((conventions.end, read(&dir).vocab_size()), (Some(0), 256));
    }

    #[test]
    fn gpt2_has_its_ids_and_its_end() {
        let dir = written(BuiltIn::Gpt2);
        let tokenizer = read(&dir);
        assert_eq!(tokenizer.vocab_size(), GPT2_VOCAB);
        let text = "Hello world, don't \u{e9}\n\n  x";
        assert_eq!(tokenizer.encode(text).unwrap(), Tokenizer::Gpt2.encode(text).unwrap());
        assert_eq!(tokenizer.encode("a<|endoftext|>").unwrap(), [64, 50_256]);
        assert_eq!(super::super::Conventions::load(&tokenizer, Some(dir.path())).unwrap().end, Some(50_256));
    }

    #[test]
    fn a_built_in_tokenizer_needs_its_ids() {
        assert_eq!(BuiltIn::Bytes.tokenizer(256).unwrap().name(), "bytes");
        let error = BuiltIn::Gpt2.tokenizer(256).unwrap_err().to_string();
        assert!(error.contains("`gpt2`") && error.contains("50257"), "{error}");
    }

    proptest! {
        #[test]
        fn the_files_of_bytes_encode_any_text_alike(text in "[\\PC\\x00-\\x1f]{0,60}") {
            let dir = written(BuiltIn::Bytes);
            let (files, bytes) = (read(&dir), Tokenizer::Bytes.encode(&text).unwrap());
            prop_assert_eq!(files.encode(&text).unwrap(), bytes.clone());
            prop_assert_eq!(files.decode(&bytes).unwrap(), text);
        }
    }
}
