//! Tokenizers: the GPT-2 byte-pair vocabulary, bytes, or that of a Hugging Face directory.

mod builtin;
mod chat;
mod conventions;
mod error;
mod files;
mod gpt2;
mod huggingface;
mod sequence;
mod special;
#[cfg(test)]
pub(crate) mod testing;

use std::ops::Range;
use std::path::{Path, PathBuf};

use rayon::prelude::*;

pub use builtin::BuiltIn;
pub use chat::{Chat, ChatTemplate, Rendered};
pub use conventions::Conventions;
pub(crate) use conventions::{special_tokens, templates};
pub use error::TokenizerError;
pub use files::{TokenizerWriter, replace_tokenizer, tokenizer_files};
pub(crate) use files::{copy_files, copy_tokenizer, tokenizer_json};
pub use gpt2::GPT2_VOCAB;
pub use huggingface::HuggingFaceTokenizer;
pub use sequence::TokenSequence;

/// The number of ids of the byte tokenizer.
pub const BYTE_VOCAB: usize = 256;

/// The longest run of white space in a text, in bytes. The libraries' regular expressions keep a state per character
/// and fail at a million, with a panic or wrong tokens.
const MAX_WHITESPACE_RUN: usize = 500_000;

/// Lines per parallel work item.
const LINES_PER_CHUNK: usize = 64;

/// A tokenizer. Cloning is cheap.
#[derive(Clone, Debug)]
pub enum Tokenizer {
    /// GPT-2's byte-pair encoding with an embedded vocabulary. Special tokens in a text are encoded as plain text.
    Gpt2,
    /// One token per byte; the id is the byte's value.
    Bytes,
    /// The tokenizer of a Hugging Face directory. Special tokens in a text are encoded as their ids.
    HuggingFace(HuggingFaceTokenizer),
    /// A directory without a supported tokenizer. Rows of token ids work without one; every other use is an error.
    Missing(Missing),
}

/// A directory without a supported tokenizer.
#[derive(Clone, Debug)]
pub struct Missing {
    directory: PathBuf,
    /// A description of its unsupported tokenizer.
    found: Option<String>,
}

impl Missing {
    fn error(&self) -> TokenizerError {
        TokenizerError::NoTokenizer { directory: self.directory.clone(), found: self.found.clone() }
    }
}

impl Tokenizer {
    /// The tokenizer of a model with `vocab_size` ids. A model directory's own is used, or [`Missing`](Self::Missing)
    /// if it has no supported one; without a directory, GPT-2's for 50257 ids, and bytes for any other vocabulary of at
    /// least 256.
    ///
    /// # Errors
    /// An invalid tokenizer in `dir`, or a vocabulary too small for bytes.
    pub fn for_model(dir: Option<&Path>, vocab_size: usize) -> Result<Self, TokenizerError> {
        if let Some(dir) = dir {
            return match Self::from_dir(dir) {
                Ok(Some(tokenizer)) => Ok(tokenizer),
                Ok(None) => Ok(Self::Missing(Missing { directory: dir.to_owned(), found: None })),
                Err(TokenizerError::NoTokenizer { directory, found }) => {
                    Ok(Self::Missing(Missing { directory, found }))
                }
                Err(error) => Err(error),
            };
        }
        match vocab_size {
            GPT2_VOCAB => Ok(Self::Gpt2),
            BYTE_VOCAB.. => Ok(Self::Bytes),
            _ => Err(TokenizerError::VocabularyTooSmall { vocab_size, smallest: BYTE_VOCAB }),
        }
    }

    /// Reads the tokenizer of a Hugging Face directory: `tokenizer.json`, else `vocab.json` with `merges.txt`, else
    /// `vocab.txt`, else `None`.
    ///
    /// # Errors
    /// `dir` is not a directory, or its tokenizer files are unreadable, invalid, incomplete or in an unsupported
    /// format.
    pub fn from_dir(dir: &Path) -> Result<Option<Self>, TokenizerError> {
        match builtin::are_bytes_in(dir) {
            true => Ok(Some(Self::Bytes)),
            false => Ok(HuggingFaceTokenizer::open(dir)?.map(Self::HuggingFace)),
        }
    }

    /// Encodes `text` as one piece, without adding tokens before or after it.
    ///
    /// # Errors
    /// A run of more than half a million bytes of white space, or a text that a directory's tokenizer has no ids for.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        if let Self::Bytes = self {
            return Ok(text.bytes().map(u32::from).collect());
        }
        check_whitespace(text)?;
        match self {
            Self::HuggingFace(tokenizer) => tokenizer.encode(text),
            Self::Missing(missing) => Err(missing.error()),
            _ => gpt2::encode(text),
        }
    }

    /// Like [`encode`](Self::encode), with the byte range of each id in the text.
    ///
    /// # Errors
    /// Those of [`encode`](Self::encode).
    pub fn encode_places(&self, text: &str) -> Result<Vec<(u32, Range<usize>)>, TokenizerError> {
        if let Self::HuggingFace(tokenizer) = self {
            check_whitespace(text)?;
            return tokenizer.encode_places(text);
        }
        let mut end = 0;
        let place = |id: u32| {
            let length = if let Self::Gpt2 = self { gpt2::token(id).len() } else { 1 };
            end += length;
            (id, end - length..end)
        };
        Ok(self.encode(text)?.into_iter().map(place).collect())
    }

    /// Encodes `text` with the tokens that the tokenizer adds before and after every text, as calling it in
    /// Transformers does. Errors are those of [`encode`](Self::encode).
    pub fn encode_whole(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        match self {
            Self::HuggingFace(tokenizer) => {
                check_whitespace(text)?;
                tokenizer.encode_whole(text)
            }
            _ => self.encode(text),
        }
    }

    /// Encodes a text, or a text and its pair, with the tokens that the tokenizer adds around them and the type of each
    /// token, truncated to `most` tokens, as Transformers does with `truncation=True` and this `max_length`: the texts
    /// are truncated, the longer one first, and all added tokens stay. GPT-2's and the byte tokenizer add none.
    ///
    /// # Errors
    /// Those of [`encode`](Self::encode), and a `most` that the added tokens leave nothing of.
    pub fn encode_sequence(
        &self,
        text: &str,
        pair: Option<&str>,
        most: usize,
    ) -> Result<TokenSequence, TokenizerError> {
        let second = pair.unwrap_or_default();
        match self {
            Self::HuggingFace(tokenizer) => {
                [text, second].into_iter().try_for_each(check_whitespace)?;
                tokenizer.encode_sequence(text, pair, most)
            }
            _ if most == 0 => Err(TokenizerError::ContextTooShort { most, added: 0 }),
            _ => Ok(TokenSequence::plain(self.encode(text)?, self.encode(second)?, most)),
        }
    }

    /// The id of a token by its text, if it exists.
    pub fn id(&self, token: &str) -> Option<u32> {
        match self {
            Self::Gpt2 => gpt2::id(token),
            Self::Bytes | Self::Missing(_) => None,
            Self::HuggingFace(tokenizer) => tokenizer.id(token),
        }
    }

    /// Encodes every non-blank line of `text` separately, with its newline, and concatenates the ids. Lines are encoded
    /// in parallel; the result does not depend on the number of threads. Errors are those of [`encode`](Self::encode).
    pub fn encode_lines(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let lines: Vec<&str> = text.split_inclusive('\n').filter(|line| !line.trim().is_empty()).collect();
        let chunks = lines.par_chunks(LINES_PER_CHUNK).map(|lines| self.encode_each(lines));
        Ok(chunks.collect::<Result<Vec<_>, _>>()?.concat())
    }

    fn encode_each(&self, lines: &[&str]) -> Result<Vec<u32>, TokenizerError> {
        let mut ids = Vec::new();
        for line in lines {
            ids.extend(self.encode(line)?);
        }
        Ok(ids)
    }

    /// Decodes `ids`. An id without a token, and bytes that are not valid UTF-8 together, become U+FFFD; a directory's
    /// tokenizer skips unknown ids.
    ///
    /// # Errors
    /// A directory's tokenizer fails to decode.
    pub fn decode(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        match self {
            Self::Gpt2 => Ok(gpt2::decode(ids)),
            Self::Bytes => Ok(decode_bytes(ids)),
            Self::HuggingFace(tokenizer) => tokenizer.decode(ids, false),
            Self::Missing(missing) => Err(missing.error()),
        }
    }

    /// Decodes ids without special tokens, as Transformers with `skip_special_tokens=True`. Errors are those of
    /// [`decode`](Self::decode).
    pub fn decode_text(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        match self {
            Self::Gpt2 => {
                let end = self.id(huggingface::END_OF_TEXT);
                Ok(gpt2::decode(&ids.iter().copied().filter(|id| Some(*id) != end).collect::<Vec<_>>()))
            }
            Self::HuggingFace(tokenizer) => tokenizer.decode(ids, true),
            _ => self.decode(ids),
        }
    }

    /// The vocabulary size that this tokenizer requires of a model: its largest id plus one.
    pub fn vocab_size(&self) -> usize {
        match self {
            Self::Gpt2 => GPT2_VOCAB,
            Self::Bytes => BYTE_VOCAB,
            Self::HuggingFace(tokenizer) => tokenizer.vocab_size(),
            Self::Missing(_) => 0,
        }
    }

    /// A name for logs: `gpt2`, `bytes`, the file the tokenizer was read from, or `none`.
    pub fn name(&self) -> &str {
        match self {
            Self::Gpt2 => "gpt2",
            Self::Bytes => "bytes",
            Self::HuggingFace(tokenizer) => tokenizer.name(),
            Self::Missing(_) => "none",
        }
    }
}

fn decode_bytes(ids: &[u32]) -> String {
    let mut bytes = Vec::with_capacity(ids.len());
    for &id in ids {
        match u8::try_from(id) {
            Ok(byte) => bytes.push(byte),
            Err(_) => bytes.extend("\u{FFFD}".bytes()),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn check_whitespace(text: &str) -> Result<(), TokenizerError> {
    if text.len() <= MAX_WHITESPACE_RUN {
        return Ok(());
    }
    let longest = text.split(|c: char| !c.is_whitespace()).map(str::len).max().unwrap_or(0);
    if longest <= MAX_WHITESPACE_RUN {
        return Ok(());
    }
    Err(TokenizerError::WhitespaceRun { found: longest, limit: MAX_WHITESPACE_RUN })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn round_trip(tokenizer: &Tokenizer, text: &str) -> String {
        tokenizer.decode(&tokenizer.encode(text).unwrap()).unwrap()
    }

    /// Expected ids are from the published GPT-2 encoder.
    #[test]
    fn gpt2_gives_the_published_ids() {
        let ids = |text| Tokenizer::Gpt2.encode(text).unwrap();
        assert_eq!(ids("Hello world"), [15496, 995]);
        assert_eq!(ids("Hello, world!"), [15496, 11, 995, 0]);
        assert_eq!(ids("\n"), [198]);
        assert_eq!(ids(" <unk> \n"), [1279, 2954, 29, 220, 198]);
        assert_eq!(ids(""), [0_u32; 0]);
        assert_eq!(Tokenizer::Gpt2.vocab_size(), 50257);
    }

    #[test]
    fn gpt2_takes_special_strings_as_text() {
        let ids = Tokenizer::Gpt2.encode("a<|endoftext|>b").unwrap();
        assert!(!ids.contains(&50256) && ids.len() > 3);
        assert_eq!(Tokenizer::Gpt2.decode(&[50256]).unwrap(), "<|endoftext|>");
    }

    #[test]
    fn bytes_are_their_own_ids() {
        assert_eq!(Tokenizer::Bytes.encode("A\né").unwrap(), [65, 10, 0xC3, 0xA9]);
        assert_eq!(Tokenizer::Bytes.vocab_size(), 256);
        assert_eq!(Tokenizer::Bytes.name(), "bytes");
    }

    #[test]
    fn ids_without_text_decode_to_the_replacement_character() {
        assert_eq!(Tokenizer::Bytes.decode(&[65, 256, 66, 0xC3]).unwrap(), "A\u{FFFD}B\u{FFFD}");
        assert_eq!(Tokenizer::Gpt2.decode(&[15496, 50257, u32::MAX]).unwrap(), "Hello\u{FFFD}\u{FFFD}");
    }

    #[test]
    fn lines_are_encoded_one_by_one_and_blank_ones_give_nothing() {
        let text = " \n = Title = \n \t\nHello world\r\n\n\nlast line";
        for tokenizer in [Tokenizer::Gpt2, Tokenizer::Bytes] {
            let expected =
                [" = Title = \n", "Hello world\r\n", "last line"].map(|line| tokenizer.encode(line).unwrap());
            assert_eq!(tokenizer.encode_lines(text).unwrap(), expected.concat());
        }
        assert!(Tokenizer::Gpt2.encode_lines("\n \n\t").unwrap().is_empty());
    }

    /// Encoded as one text, the newline and the space after it would be split differently.
    #[test]
    fn a_line_does_not_see_the_next() {
        let apart = Tokenizer::Gpt2.encode_lines("a \n b\n").unwrap();
        assert_eq!(apart, [64, 220, 198, 275, 198]);
    }

    #[test]
    fn many_lines_keep_their_order() {
        let text: String = (0..1000).map(|i| format!("line {i} of many\n")).collect();
        let ids = Tokenizer::Gpt2.encode_lines(&text).unwrap();
        assert_eq!(Tokenizer::Gpt2.decode(&ids).unwrap(), text);
        let one = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        assert_eq!(one.install(|| Tokenizer::Gpt2.encode_lines(&text).unwrap()), ids);
    }

    #[test]
    fn a_huge_run_of_white_space_is_an_error_and_no_panic() {
        let text = format!("a{}b", " ".repeat(1_200_000));
        let error = Tokenizer::Gpt2.encode(&text).unwrap_err();
        assert!(matches!(error, TokenizerError::WhitespaceRun { found: 1_200_000, .. }), "{error}");
        assert_eq!(Tokenizer::Bytes.encode(&text).unwrap().len(), text.len());
        assert!(check_whitespace(&"word ".repeat(200_000)).is_ok());
    }

    #[test]
    fn the_vocabulary_decides_where_no_directory_does() {
        let name = |size| Tokenizer::for_model(None, size).map(|t| t.name().to_owned());
        assert_eq!(name(50257).unwrap(), "gpt2");
        assert_eq!(name(256).unwrap(), "bytes");
        assert_eq!(name(257).unwrap(), "bytes");
        let error = name(255).unwrap_err();
        assert!(error.to_string().contains("255") && error.to_string().contains("256"), "{error}");
        let empty = tempfile::tempdir().unwrap();
        assert_eq!(Tokenizer::for_model(Some(empty.path()), 50257).unwrap().name(), "none");
    }

    proptest! {
        #[test]
        fn any_text_comes_back(text in "\\PC{0,40}[ \\n\\t]{0,5}\\PC{0,20}") {
            prop_assert_eq!(round_trip(&Tokenizer::Gpt2, &text), text.clone());
            prop_assert_eq!(round_trip(&Tokenizer::Bytes, &text), text.clone());
            let ids = Tokenizer::Gpt2.encode(&text).unwrap();
            prop_assert!(ids.iter().all(|&id| (id as usize) < GPT2_VOCAB));
        }
    }
}
