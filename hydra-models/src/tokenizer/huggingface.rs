//! The tokenizer of a Hugging Face directory.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use tokenizers::models::ModelWrapper;
use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, Tokenizer};

use super::TokenizerError;

pub(super) const END_OF_TEXT: &str = "<|endoftext|>";

/// A tokenizer read from `tokenizer.json`, or from `vocab.json`, `merges.txt` and, where it is there,
/// `added_tokens.json`; cloning it is cheap.
#[derive(Clone, Debug)]
pub struct HuggingFaceTokenizer {
    inner: Arc<Tokenizer>,
    name: Arc<str>,
    vocab_size: usize,
}

impl HuggingFaceTokenizer {
    /// The directory's tokenizer, `None` where it has none.
    ///
    /// Truncation, padding and merge dropout that a `tokenizer.json` may ask for are turned off, because a text
    /// must give all of its tokens, and the same ones each time.
    ///
    /// # Errors
    /// `dir` is no directory, or its tokenizer files are unreadable, broken or incomplete.
    pub fn open(dir: &Path) -> Result<Option<Self>, TokenizerError> {
        if !dir.is_dir() {
            return Err(TokenizerError::NotADirectory { directory: dir.to_owned() });
        }
        let [json, vocab, merges] = ["tokenizer.json", "vocab.json", "merges.txt"].map(|name| dir.join(name));
        let incomplete =
            |found, missing| TokenizerError::Incomplete { directory: dir.to_owned(), found, missing };
        match (json.exists(), vocab.exists(), merges.exists()) {
            (true, _, _) => Self::new(read_json(&json)?, &json).map(Some),
            (_, true, true) => Self::new(read_pair(&vocab, &merges)?, &vocab).map(Some),
            (_, true, false) => Err(incomplete("vocab.json", "merges.txt")),
            (_, false, true) => Err(incomplete("merges.txt", "vocab.json")),
            (_, false, false) => Ok(None),
        }
    }

    fn new(mut inner: Tokenizer, path: &Path) -> Result<Self, TokenizerError> {
        inner.with_truncation(None).map_err(|source| broken(path, source))?;
        inner.with_padding(None);
        if let ModelWrapper::BPE(bpe) = inner.get_model()
            && bpe.dropout.is_some()
        {
            let mut bpe = bpe.clone();
            bpe.dropout = None;
            inner.with_model(bpe);
        }
        let vocab_size = inner.get_vocab(true).into_values().max().map_or(0, |id| id as usize + 1);
        Ok(Self { inner: Arc::new(inner), name: path.display().to_string().into(), vocab_size })
    }

    /// A tokenizer of bytes spelled as letters, with a name for messages.
    pub(super) fn byte_level(name: &Path, vocab: Vocab, merges: Merges) -> Result<Self, TokenizerError> {
        Self::new(byte_level(vocab, merges).map_err(|source| broken(name, source))?, name)
    }

    pub(super) fn encode(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        self.encode_with(text, false)
    }

    /// The same with what the tokenizer puts before and after every text.
    pub(super) fn encode_whole(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        self.encode_with(text, true)
    }

    pub(super) fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    fn encode_with(&self, text: &str, special: bool) -> Result<Vec<u32>, TokenizerError> {
        let encoding = self.inner.encode_fast(text, special).map_err(|source| TokenizerError::Encode {
            tokenizer: self.name.to_string(),
            start: text.chars().take(40).collect(),
            source,
        })?;
        Ok(encoding.get_ids().to_vec())
    }

    pub(super) fn decode(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        self.inner.decode(ids, false).map_err(|source| TokenizerError::Decode {
            tokenizer: self.name.to_string(),
            ids: ids.len(),
            source,
        })
    }

    pub(super) fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }
}

pub(super) fn read(path: &Path) -> Result<String, TokenizerError> {
    std::fs::read_to_string(path).map_err(|source| TokenizerError::Read { path: path.to_owned(), source })
}

fn broken(path: &Path, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> TokenizerError {
    TokenizerError::Parse { path: path.to_owned(), source: source.into() }
}

fn read_json(path: &Path) -> Result<Tokenizer, TokenizerError> {
    read(path)?.parse().map_err(|source: tokenizers::Error| broken(path, source))
}

/// The id of each token of a file.
fn read_ids(path: &Path) -> Result<BTreeMap<String, u32>, TokenizerError> {
    serde_json::from_str(&read(path)?).map_err(|source| broken(path, source))
}

/// GPT-2's tokenizer of these two files, as Hugging Face builds it: byte-level, without a space put in front,
/// and `<|endoftext|>` is one token if the vocabulary has it, and so is each of `added_tokens.json`.
fn read_pair(vocab_path: &Path, merges_path: &Path) -> Result<Tokenizer, TokenizerError> {
    let vocab = read_ids(vocab_path)?;
    let special = vocab.contains_key(END_OF_TEXT);
    let merges = parse_merges(&read(merges_path)?, merges_path)?;
    let mut tokenizer =
        byte_level(vocab.into_iter().collect(), merges).map_err(|e| broken(merges_path, e))?;
    if special {
        tokenizer.add_special_tokens(&[AddedToken::from(END_OF_TEXT, true)]);
    }
    let added = vocab_path.with_file_name("added_tokens.json");
    if added.exists() {
        add_tokens(&mut tokenizer, &added)?
    }
    Ok(tokenizer)
}

fn byte_level(vocab: Vocab, merges: Merges) -> tokenizers::Result<Tokenizer> {
    let mut tokenizer = Tokenizer::new(BPE::builder().vocab_and_merges(vocab, merges).build()?);
    let bytes = ByteLevel::default().add_prefix_space(false);
    tokenizer.with_pre_tokenizer(Some(bytes)).with_decoder(Some(bytes));
    Ok(tokenizer)
}

/// Adds the tokens of a file that gives ids to further strings.
fn add_tokens(tokenizer: &mut Tokenizer, path: &Path) -> Result<(), TokenizerError> {
    let mut added: Vec<(u32, String)> = read_ids(path)?.into_iter().map(|(token, id)| (id, token)).collect();
    added.sort();
    for (id, token) in added {
        // The library gives the ids after the vocabulary's, one after the other.
        tokenizer.add_special_tokens(&[AddedToken::from(token.as_str(), true)]);
        let given = tokenizer.token_to_id(&token);
        if given != Some(id) {
            let given = given.map_or("none".to_owned(), |id| id.to_string());
            let found =
                format!("`{token}` has the id {id}, expected {given}, which follows on the vocabulary");
            return Err(broken(path, found));
        }
    }
    Ok(())
}

fn parse_merges(text: &str, path: &Path) -> Result<Merges, TokenizerError> {
    let mut merges = Merges::new();
    for (index, line) in text.lines().enumerate() {
        if line.is_empty() || line.starts_with("#version") {
            continue;
        }
        let wrong =
            || TokenizerError::Merge { path: path.to_owned(), line: index + 1, found: line.to_owned() };
        let (left, right) = line.split_once(' ').ok_or_else(wrong)?;
        if left.is_empty() || right.is_empty() || right.contains(' ') {
            return Err(wrong());
        }
        merges.push((left.to_owned(), right.to_owned()));
    }
    Ok(merges)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;
    use tempfile::TempDir;

    use super::super::Tokenizer as Any;
    use super::*;

    /// The byte-level alphabet spells a space `Ġ` and a newline `Ċ`.
    fn small_vocab() -> serde_json::Value {
        json!({"a": 0, "b": 1, "Ġ": 2, "Ċ": 3, "ab": 4, "Ġab": 5, "<|endoftext|>": 6})
    }

    const MERGES: &str = "#version: 0.2\na b\nĠ ab\n";

    fn dir(files: &[(&str, &str)]) -> TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(dir.path().join(name), text).unwrap();
        }
        dir
    }

    fn small() -> TempDir {
        dir(&[("vocab.json", &small_vocab().to_string()), ("merges.txt", MERGES)])
    }

    fn open(dir: &TempDir) -> Any {
        Any::from_dir(dir.path()).unwrap().unwrap()
    }

    fn failure(files: &[(&str, &str)]) -> TokenizerError {
        Any::from_dir(dir(files).path()).unwrap_err()
    }

    #[test]
    fn a_vocabulary_with_merges_is_a_byte_level_tokenizer() {
        let dir = small();
        let tokenizer = open(&dir);
        assert_eq!(tokenizer.encode("ab ab\n").unwrap(), [4, 5, 3]);
        assert_eq!(tokenizer.decode(&[4, 5, 3]).unwrap(), "ab ab\n");
        assert_eq!(tokenizer.vocab_size(), 7);
        assert!(tokenizer.name().ends_with("vocab.json"));
        assert_eq!(
            Any::for_model(Some(dir.path()), 50257).unwrap().vocab_size(),
            7,
            "the directory's own comes first"
        );
    }

    #[test]
    fn a_directory_keeps_its_special_tokens() {
        assert_eq!(open(&small()).encode("ab<|endoftext|>").unwrap(), [4, 6]);
    }

    #[test]
    fn added_tokens_have_the_ids_of_their_file() {
        let (vocab, merges) = (small_vocab().to_string(), MERGES);
        let with = |added: &str| {
            dir(&[("vocab.json", vocab.as_str()), ("merges.txt", merges), ("added_tokens.json", added)])
        };
        let tokenizer = open(&with(r#"{"<sep>": 8, "<pad>": 7, "<|endoftext|>": 6}"#));
        assert_eq!(tokenizer.encode("ab<sep>ab<pad>").unwrap(), [4, 8, 4, 7]);
        assert_eq!((tokenizer.decode(&[4, 8]).unwrap().as_str(), tokenizer.vocab_size()), ("ab<sep>", 9));
        let error = Any::from_dir(with(r#"{"<pad>": 9}"#).path()).unwrap_err();
        let reason = std::error::Error::source(&error).unwrap().to_string();
        assert!(error.to_string().contains("added_tokens.json") && reason.contains("expected 7"), "{reason}");
    }

    #[test]
    fn merges_may_have_the_line_ends_of_windows() {
        let merges = MERGES.replace('\n', "\r\n");
        let dir = dir(&[("vocab.json", &small_vocab().to_string()), ("merges.txt", &merges)]);
        assert_eq!(open(&dir).encode("ab ab\n").unwrap(), [4, 5, 3]);
    }

    #[test]
    fn tokenizer_json_comes_first_and_neither_cuts_nor_pads_nor_drops() {
        let vocab = small_vocab();
        let json = json!({
            "version": "1.0",
            "truncation": {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
            "padding": {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": null,
                        "pad_id": 0, "pad_type_id": 0, "pad_token": "a"},
            "added_tokens": [{"id": 9, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false,
                              "normalized": false, "special": true}],
            "normalizer": null,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
            "post_processor": {"type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [9], "tokens": ["<s>"]}}},
            "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
            "model": {"type": "BPE", "dropout": 0.9, "unk_token": null, "continuing_subword_prefix": null,
                      "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                      "vocab": vocab, "merges": ["a b", "Ġ ab"]}
        });
        let dir = dir(&[("tokenizer.json", &json.to_string()), ("vocab.json", "{")]);
        let tokenizer = open(&dir);
        for _ in 0..20 {
            assert_eq!(tokenizer.encode("ab ab ab\n").unwrap(), [4, 5, 5, 3]);
        }
        assert!(tokenizer.vocab_size() >= 7);
        assert!(tokenizer.name().ends_with("tokenizer.json"));
    }

    #[test]
    fn the_embedded_vocabulary_and_the_files_of_it_agree() {
        // A vocabulary of GPT-2's own single-byte tokens and a few merges, with GPT-2's ids.
        let vocab =
            json!({"H": 39, "e": 68, "l": 75, "o": 78, "He": 1544, "ll": 297, "llo": 18798, "Hello": 15496});
        let dir = dir(&[("vocab.json", &vocab.to_string()), ("merges.txt", "H e\nl l\nll o\nHe llo\n")]);
        assert_eq!(open(&dir).encode("Hello").unwrap(), Any::Gpt2.encode("Hello").unwrap());
    }

    #[test]
    fn half_a_tokenizer_is_named() {
        let error = failure(&[("vocab.json", "{}")]);
        assert!(matches!(error, TokenizerError::Incomplete { missing: "merges.txt", .. }), "{error}");
        let error = failure(&[("merges.txt", MERGES)]);
        assert!(matches!(error, TokenizerError::Incomplete { missing: "vocab.json", .. }), "{error}");
    }

    #[test]
    fn broken_files_are_named() {
        let names = |file: &str, files: &[(&str, &str)]| {
            let error = failure(files);
            assert!(matches!(&error, TokenizerError::Parse { path, .. } if path.ends_with(file)), "{error}");
        };
        names("tokenizer.json", &[("tokenizer.json", "{\"model\": 3}")]);
        names("vocab.json", &[("vocab.json", "[1]"), ("merges.txt", "")]);
        let vocab = small_vocab().to_string();
        let error = failure(&[("vocab.json", &vocab), ("merges.txt", "#version: 0.2\na b\nab\n")]);
        assert!(matches!(error, TokenizerError::Merge { line: 3, .. }), "{error}");
        names("merges.txt", &[("vocab.json", &vocab), ("merges.txt", "a unknown\n")]);
    }

    #[test]
    fn a_missing_directory_and_an_unreadable_file_are_errors() {
        let empty = dir(&[]);
        let error = Any::from_dir(&empty.path().join("nothing")).unwrap_err();
        assert!(matches!(error, TokenizerError::NotADirectory { .. }), "{error}");
        fs::create_dir(empty.path().join("tokenizer.json")).unwrap();
        let error = Any::from_dir(empty.path()).unwrap_err();
        assert!(matches!(error, TokenizerError::Read { .. }), "{error}");
    }

    #[test]
    fn a_text_without_an_id_is_an_error() {
        let json = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
            "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
            "model": {"type": "WordLevel", "vocab": {"known": 0}, "unk_token": "[UNK]"}
        });
        let dir = dir(&[("tokenizer.json", &json.to_string())]);
        assert_eq!(open(&dir).encode("known known").unwrap(), [0, 0]);
        let error = open(&dir).encode("strange").unwrap_err();
        assert!(matches!(error, TokenizerError::Encode { .. }), "{error}");
    }
}
