//! The tokenizer of a Hugging Face directory.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use serde_json::Value;
use tokenizers::decoders::wordpiece::WordPiece as WordPieceDecoder;
use tokenizers::models::ModelWrapper;
use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::models::wordpiece::WordPiece;
use tokenizers::normalizers::bert::BertNormalizer;
use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::metaspace::{Metaspace, PrependScheme};
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::processors::roberta::RobertaProcessing;
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::utils::truncation::TruncationDirection;
use tokenizers::{AddedToken, Encoding, NormalizerWrapper, PostProcessor, SplitDelimiterBehavior, Tokenizer};

use super::sequence::kept;
use super::special::{ADDED_TOKENS, CONFIG, Special};
use super::{TokenSequence, TokenizerError};

pub(super) const END_OF_TEXT: &str = "<|endoftext|>";

/// A tokenizer read from `tokenizer.json`, from `vocab.json` and `merges.txt`, or from `vocab.txt`, with the tokens
/// that its other files add. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct HuggingFaceTokenizer {
    inner: Arc<Tokenizer>,
    name: Arc<str>,
    vocab_size: usize,
    /// The end at which long texts are truncated.
    truncated_at: TruncationDirection,
    /// Whether Transformers passes the type of each token to the model.
    gives_types: bool,
}

/// Files of unsupported tokenizers, each with its description.
const OTHERS: [(&str, &str); 6] = [
    ("tekken.json", "a tekken tokenizer (`tekken.json`)"),
    ("tokenizer.model", "a SentencePiece or tiktoken tokenizer (`tokenizer.model`)"),
    ("spiece.model", "a SentencePiece tokenizer (`spiece.model`)"),
    ("sentencepiece.bpe.model", "a SentencePiece tokenizer (`sentencepiece.bpe.model`)"),
    ("tiktoken.model", "a tiktoken tokenizer (`tiktoken.model`)"),
    ("qwen.tiktoken", "a tiktoken tokenizer (`qwen.tiktoken`)"),
];

impl HuggingFaceTokenizer {
    /// Reads the directory's tokenizer; `None` if it has none.
    ///
    /// Disables truncation, padding and merge dropout in `tokenizer.json`, because a text must yield all its tokens,
    /// and the same ones every time.
    ///
    /// # Errors
    /// `dir` is not a directory, or its tokenizer files are unreadable, invalid, incomplete or in an unsupported
    /// format.
    pub fn open(dir: &Path) -> Result<Option<Self>, TokenizerError> {
        if !dir.is_dir() {
            return Err(TokenizerError::NotADirectory { directory: dir.to_owned() });
        }
        let special = Special::read(dir)?;
        let files = ["tokenizer.json", "vocab.json", "merges.txt", "vocab.txt"].map(|name| dir.join(name));
        let [json, vocab, merges, words] = &files;
        let other = OTHERS.iter().find(|(name, _)| dir.join(name).exists());
        let not_read =
            |found: String| TokenizerError::NoTokenizer { directory: dir.to_owned(), found: Some(found) };
        let incomplete =
            |found, missing| TokenizerError::Incomplete { directory: dir.to_owned(), found, missing };
        let class = special.class.as_deref();
        let (mut inner, path) = match (json.exists(), vocab.exists(), merges.exists(), words.exists(), other)
        {
            (true, ..) => (read_json(json, &special)?, json),
            (_, _, _, _, Some((_, what))) => return Err(not_read((*what).to_owned())),
            (_, true, true, _, _) => match class {
                None | Some("TokenizersBackend" | "PreTrainedTokenizer") => {
                    (read_pair(vocab, merges, &special)?, vocab)
                }
                Some("GPT2Tokenizer") => (as_gpt2(read_pair(vocab, merges, &special)?, &special), vocab),
                Some("Qwen2Tokenizer") => (as_qwen2(read_pair(vocab, merges, &special)?, &special), vocab),
                Some("RobertaTokenizer") => {
                    (as_roberta(read_pair(vocab, merges, &special)?, &special), vocab)
                }
                Some(class) => return Err(not_read(format!("`vocab.json` of a {class}"))),
            },
            (_, true, false, _, _) => return Err(incomplete("vocab.json", "merges.txt")),
            (_, false, true, _, _) => return Err(incomplete("merges.txt", "vocab.json")),
            (_, _, _, true, _) => match class {
                None | Some("BertTokenizer") => (read_words(words, &special)?, words),
                Some(class) => return Err(not_read(format!("`vocab.txt` of a {class}"))),
            },
            _ if !special.config.is_empty() => return Err(not_read(format!("`{CONFIG}`"))),
            _ => return Ok(None),
        };
        add_tokens(&mut inner, &special, dir)?;
        let mut tokenizer = Self::new(inner, path)?;
        match special.config.get("truncation_side").and_then(Value::as_str) {
            Some("left") => tokenizer.truncated_at = TruncationDirection::Left,
            Some("right") => tokenizer.truncated_at = TruncationDirection::Right,
            _ => {}
        }
        tokenizer.gives_types = match special.config.get("model_input_names").and_then(Value::as_array) {
            Some(names) => names.iter().any(|name| name == "token_type_ids"),
            // Among the classes that are read, BERT's alone does by default.
            None => class.is_none_or(|class| class == "BertTokenizer"),
        };
        Ok(Some(tokenizer))
    }

    fn new(mut inner: Tokenizer, path: &Path) -> Result<Self, TokenizerError> {
        let truncated_at = inner.get_truncation().map_or_else(Default::default, |params| params.direction);
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
        let (inner, name) = (Arc::new(inner), path.display().to_string().into());
        Ok(Self { inner, name, vocab_size, truncated_at, gives_types: true })
    }

    /// A byte-level tokenizer, with a name for error messages.
    pub(super) fn byte_level(name: &Path, vocab: Vocab, merges: Merges) -> Result<Self, TokenizerError> {
        Self::new(byte_level(vocab, merges).map_err(|source| broken(name, source))?, name)
    }

    pub(super) fn encode(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        self.encode_with(text, false)
    }

    /// Like `encode`, with the tokens that the tokenizer adds before and after every text.
    pub(super) fn encode_whole(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        self.encode_with(text, true)
    }

    pub(super) fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    fn encode_with(&self, text: &str, special: bool) -> Result<Vec<u32>, TokenizerError> {
        let encoding = self.inner.encode_fast(text, special).map_err(|source| self.refused(text, source))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// A text, or a text and its pair, with the added tokens, truncated to `most` tokens. All types are zero if Transformers
    /// passes none.
    pub(super) fn encode_sequence(
        &self,
        text: &str,
        pair: Option<&str>,
        most: usize,
    ) -> Result<TokenSequence, TokenizerError> {
        let added = self.inner.get_post_processor().map_or(0, |post| post.added_tokens(pair.is_some()));
        let space = most.checked_sub(added).filter(|space| *space > 0);
        let space = space.ok_or(TokenizerError::ContextTooShort { most, added })?;
        let encode =
            |text: &str| self.inner.encode_fast(text, false).map_err(|source| self.refused(text, source));
        let (mut first, mut second) = (encode(text)?, pair.map(encode).transpose()?);
        let lengths = [first.len(), second.as_ref().map_or(0, Encoding::len)];
        let [of_first, of_second] = kept(lengths, space);
        for (encoding, most) in [(Some(&mut first), of_first), (second.as_mut(), of_second)] {
            let Some(encoding) = encoding else { continue };
            encoding.truncate(most, 0, self.truncated_at);
            // What is cut off is not needed, and a post-processor would combine all of it.
            encoding.take_overflowing();
        }
        second.iter_mut().for_each(|second| second.set_type_ids(vec![1; second.len()]));
        let whole = self.inner.post_process(first, second, true);
        let whole = whole.map_err(|source| self.refused(text, source))?;
        let ids = whole.get_ids().to_vec();
        let types = if self.gives_types { whole.get_type_ids().to_vec() } else { vec![0; ids.len()] };
        Ok(TokenSequence { ids, types, tokens: lengths[0] + lengths[1] + added })
    }

    /// The ids of a text, each with its byte range.
    pub(super) fn encode_places(&self, text: &str) -> Result<Vec<(u32, Range<usize>)>, TokenizerError> {
        let encoding = self.inner.encode(text, false).map_err(|source| self.refused(text, source))?;
        let places = encoding.get_offsets().iter().map(|(from, to)| *from..*to);
        Ok(encoding.get_ids().iter().copied().zip(places).collect())
    }

    fn refused(&self, text: &str, source: tokenizers::Error) -> TokenizerError {
        let start = text.chars().take(40).collect();
        TokenizerError::Encode { tokenizer: self.name.to_string(), start, source }
    }

    /// Adds a special token, which must get the next id, `id`.
    pub(super) fn with_special(&self, id: usize, token: &str) -> Result<Self, TokenizerError> {
        let mut inner = Tokenizer::clone(&self.inner);
        inner.add_special_tokens(&[AddedToken::from(token, true)]);
        let path = Path::new(self.name());
        match inner.token_to_id(token) {
            Some(given) if given as usize == id => {
                Ok(Self { truncated_at: self.truncated_at, ..Self::new(inner, path)? })
            }
            given => Err(broken(path, format!("`{token}` has the id {given:?}, expected {id}"))),
        }
    }

    /// Serializes the tokenizer as a `tokenizer.json`.
    pub(super) fn to_json(&self) -> Result<String, TokenizerError> {
        self.inner.to_string(true).map_err(|source| broken(Path::new(self.name()), source))
    }

    pub(super) fn decode(&self, ids: &[u32], skips_special: bool) -> Result<String, TokenizerError> {
        self.inner.decode(ids, skips_special).map_err(|source| TokenizerError::Decode {
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

fn read_json(path: &Path, special: &Special) -> Result<Tokenizer, TokenizerError> {
    let text = read(path)?;
    let mut tokenizer: Tokenizer = text.parse().map_err(|source: tokenizers::Error| broken(path, source))?;
    let is_pairs = matches!(tokenizer.get_model(), ModelWrapper::BPE(_));
    let is_words = matches!(tokenizer.get_model(), ModelWrapper::WordPiece(_));
    match special.class.as_deref() {
        Some("LlamaTokenizer") if !text.contains("\"ByteLevel\"") => as_llama(&mut tokenizer, special),
        Some("GPT2Tokenizer") if is_pairs => tokenizer = as_gpt2(tokenizer, special),
        Some("RobertaTokenizer") if is_pairs => tokenizer = as_roberta(tokenizer, special),
        Some("Qwen2Tokenizer") if is_pairs => tokenizer = as_qwen2(tokenizer, special),
        Some("BertTokenizer") if is_words => {
            let vocab = tokenizer.get_vocab(false).into_iter().collect();
            tokenizer = as_bert(tokenizer, vocab, special, path)?;
        }
        _ => {}
    }
    Ok(tokenizer)
}

/// Turns a tokenizer into one of the Llama class. Transformers takes only the vocabulary from its file;
/// `add_prefix_space` and `legacy` decide whether a space is added before a text and after special tokens.
fn as_llama(tokenizer: &mut Tokenizer, special: &Special) {
    let ModelWrapper::BPE(bpe) = tokenizer.get_model() else { return };
    let mut bpe = bpe.clone();
    (bpe.fuse_unk, bpe.byte_fallback, bpe.unk_token) = (true, true, None);
    let scheme = match (special.flag("add_prefix_space", true), special.flag("legacy", false)) {
        (false, _) => PrependScheme::Never,
        (true, true) => PrependScheme::Always,
        (true, false) => PrependScheme::First,
    };
    tokenizer.with_model(bpe);
    tokenizer
        .with_normalizer(None::<NormalizerWrapper>)
        .with_pre_tokenizer(Some(Metaspace::new('\u{2581}', scheme, false)));
}

/// Reads the id of each token in a file.
fn read_ids(path: &Path) -> Result<BTreeMap<String, u32>, TokenizerError> {
    serde_json::from_str(&read(path)?).map_err(|source| broken(path, source))
}

/// Builds GPT-2's tokenizer from these two files as Transformers does: byte-level, without an added prefix space, and
/// `<|endoftext|>` is a special token if the vocabulary has it.
fn read_pair(vocab_path: &Path, merges_path: &Path, special: &Special) -> Result<Tokenizer, TokenizerError> {
    let vocab = read_ids(vocab_path)?;
    let end = vocab.contains_key(END_OF_TEXT);
    let merges = parse_merges(&read(merges_path)?, merges_path)?;
    let mut tokenizer =
        byte_level(vocab.into_iter().collect(), merges).map_err(|e| broken(merges_path, e))?;
    if end {
        tokenizer.add_special_tokens(&[AddedToken::from(END_OF_TEXT, true)]);
    }
    let begin = special.named.get("bos_token").and_then(Value::as_str);
    let begins = special.flag("add_bos_token", false);
    if let Some((begin, id)) =
        begin.filter(|_| begins).and_then(|begin| Some((begin, tokenizer.token_to_id(begin)?)))
    {
        let tokens = vec![(begin.to_owned(), id)];
        let pair = format!("{begin}:0 $A:0 {begin}:1 $B:1");
        tokenizer.with_post_processor(Some(around(format!("{begin}:0 $A:0"), pair, tokens, vocab_path)?));
    }
    Ok(tokenizer)
}

/// A post-processor that adds tokens around a text, or around two.
fn around(
    single: String,
    pair: String,
    tokens: Vec<(String, u32)>,
    path: &Path,
) -> Result<TemplateProcessing, TokenizerError> {
    let mut builder = TemplateProcessing::builder();
    let builder = builder.try_single(single).and_then(|builder| builder.try_pair(pair));
    let builder = builder.map_err(|error| broken(path, error))?;
    builder.special_tokens(tokens).build().map_err(|error| broken(path, error.to_string()))
}

/// Qwen2's regular expression for splitting a text into words.
const QWEN2_WORDS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Turns a byte-level tokenizer into one of Qwen2's class, which has the normalizer and the pre-tokenizer of Qwen2 whatever its
/// file has.
fn as_qwen2(tokenizer: Tokenizer, special: &Special) -> Tokenizer {
    let mut tokenizer = as_gpt2(tokenizer, special);
    let words =
        Split::new(SplitPattern::Regex(QWEN2_WORDS.to_owned()), SplitDelimiterBehavior::Isolated, false);
    if let Ok(words) = words {
        let space = special.flag("add_prefix_space", false);
        let bytes = ByteLevel::default().add_prefix_space(space).use_regex(false);
        tokenizer
            .with_normalizer(Some(NFC))
            .with_pre_tokenizer(Some(Sequence::new(vec![words.into(), bytes.into()])));
    }
    tokenizer
}

/// Turns a byte-level tokenizer into one of GPT-2's class. Transformers takes the vocabulary, the merges, the added tokens
/// and the post-processor from its file; `add_prefix_space` decides whether a space is added before a text.
fn as_gpt2(mut tokenizer: Tokenizer, special: &Special) -> Tokenizer {
    if let ModelWrapper::BPE(bpe) = tokenizer.get_model() {
        let mut bpe = bpe.clone();
        (bpe.fuse_unk, bpe.byte_fallback, bpe.ignore_merges, bpe.unk_token) = (false, false, false, None);
        tokenizer.with_model(bpe);
    }
    let bytes = ByteLevel::default().add_prefix_space(special.flag("add_prefix_space", false));
    tokenizer
        .with_normalizer(None::<NormalizerWrapper>)
        .with_pre_tokenizer(Some(bytes))
        .with_decoder(Some(bytes));
    let named = special.named.values().filter_map(Value::as_str).map(str::to_owned);
    add_known(&mut tokenizer, named.collect());
    tokenizer
}

/// Turns a byte-level tokenizer into one of RoBERTa's class, whose special tokens are at the ends of texts.
fn as_roberta(tokenizer: Tokenizer, special: &Special) -> Tokenizer {
    let mut tokenizer = as_gpt2(tokenizer, special);
    let place = |name: &str| {
        let token = special.named.get(name)?.as_str()?;
        Some((token.to_owned(), tokenizer.token_to_id(token)?))
    };
    if let (Some(first), Some(last)) = (place("cls_token"), place("sep_token")) {
        let space = special.flag("add_prefix_space", false);
        let around = RobertaProcessing::new(last, first).add_prefix_space(space);
        tokenizer.with_post_processor(Some(around));
    }
    tokenizer
}

/// Makes those of these tokens special that the vocabulary has. Tokens that a file has added keep its settings. Added tokens
/// are matched with the tokenizer's normalizer from now on.
fn add_known(tokenizer: &mut Tokenizer, tokens: Vec<String>) {
    let added = tokenizer.get_added_vocabulary().get_vocab();
    let is_new = |token: &String| tokenizer.token_to_id(token).is_some() && !added.contains_key(token);
    let known = tokens.into_iter().filter(is_new).map(|token| AddedToken::from(token, true));
    let known: Vec<AddedToken> = known.collect();
    tokenizer.add_special_tokens(&known);
}

/// Builds BERT's tokenizer from a word list as Transformers does.
fn read_words(path: &Path, special: &Special) -> Result<Tokenizer, TokenizerError> {
    let text = read(path)?;
    let vocab: Vocab = text.lines().zip(0..).map(|(word, id)| (word.to_owned(), id)).collect();
    as_bert(Tokenizer::new(WordPiece::default()), vocab, special, path)
}

/// Turns a tokenizer of words into one of BERT's class. Transformers takes the vocabulary and the added tokens from its file;
/// `do_lower_case`, `strip_accents` and `tokenize_chinese_chars` decide how a text is normalized.
fn as_bert(
    mut tokenizer: Tokenizer,
    vocab: Vocab,
    special: &Special,
    path: &Path,
) -> Result<Tokenizer, TokenizerError> {
    let named = |name: &str, default: &str| -> String {
        special.named.get(name).and_then(Value::as_str).unwrap_or(default).to_owned()
    };
    let model = WordPiece::builder().vocab(vocab).unk_token(named("unk_token", "[UNK]")).build();
    tokenizer.with_model(model.map_err(|error| broken(path, error))?);
    let lower = special.flag("do_lower_case", true);
    let chinese = special.flag("tokenize_chinese_chars", true);
    let accents = special.config.get("strip_accents").and_then(Value::as_bool);
    let [first, last] = [named("cls_token", "[CLS]"), named("sep_token", "[SEP]")];
    let id = |token: &str, default: u32| tokenizer.token_to_id(token).unwrap_or(default);
    let tokens = vec![(first.clone(), id(&first, 2)), (last.clone(), id(&last, 3))];
    let [single, pair] =
        [format!("{first}:0 $A:0 {last}:0"), format!("{first}:0 $A:0 {last}:0 $B:1 {last}:1")];
    let whole = around(single, pair, tokens, path)?;
    tokenizer
        .with_normalizer(Some(BertNormalizer::new(true, chinese, accents, lower)))
        .with_pre_tokenizer(Some(BertPreTokenizer))
        .with_decoder(Some(WordPieceDecoder::default()))
        .with_post_processor(Some(whole));
    let specials = ["pad_token", "unk_token", "cls_token", "sep_token", "mask_token"].map(|name| {
        let default = format!("[{}]", name.trim_end_matches("_token").to_uppercase());
        named(name, &default)
    });
    add_known(&mut tokenizer, specials.into());
    Ok(tokenizer)
}

fn byte_level(vocab: Vocab, merges: Merges) -> tokenizers::Result<Tokenizer> {
    let mut tokenizer = Tokenizer::new(BPE::builder().vocab_and_merges(vocab, merges).build()?);
    let bytes = ByteLevel::default().add_prefix_space(false);
    tokenizer.with_pre_tokenizer(Some(bytes)).with_decoder(Some(bytes));
    Ok(tokenizer)
}

/// Adds the tokens of a directory's other files. A token in the vocabulary keeps its id; the library numbers the others
/// consecutively after the vocabulary. An end-of-text token that is in no vocabulary is not added.
fn add_tokens(tokenizer: &mut Tokenizer, special: &Special, directory: &Path) -> Result<(), TokenizerError> {
    for (id, token) in &special.added {
        let known = tokenizer.token_to_id(&token.content);
        if known.is_none() && id.is_none() && special.end.as_ref() == Some(&token.content) {
            continue;
        }
        let one = std::slice::from_ref(token);
        if token.special {
            tokenizer.add_special_tokens(one)
        } else {
            tokenizer.add_tokens(one)
        };
        let given = tokenizer.token_to_id(&token.content);
        if let Some(id) = id.filter(|id| known.is_none() && given != Some(*id)) {
            let file =
                if special.config.contains_key("added_tokens_decoder") { CONFIG } else { ADDED_TOKENS };
            let given = given.map_or("none".to_owned(), |id| id.to_string());
            let token = &token.content;
            let found =
                format!("`{token}` has the id {id}, expected {given}, the next id after the vocabulary");
            return Err(broken(&directory.join(file), found));
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

    /// A Llama tokenizer as written by Transformers 4. Expected ids are from Transformers 5.24.
    #[test]
    fn a_llama_tokenizer_puts_spaces_where_its_configuration_says() {
        let json = json!({
            "version": "1.0", "truncation": null, "padding": null, "pre_tokenizer": null, "post_processor": null,
            "added_tokens": [{"id": 0, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false,
                              "normalized": false, "special": true}],
            "normalizer": {"type": "Sequence", "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
            "decoder": null,
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                      "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true,
                      "vocab": {"<s>": 0, "a": 1, "▁": 2, "▁a": 3}, "merges": ["▁ a"]}
        });
        let ids = |config: serde_json::Value| {
            let files = [("tokenizer.json", json.to_string()), ("tokenizer_config.json", config.to_string())];
            let files: Vec<(&str, &str)> = files.iter().map(|(name, text)| (*name, text.as_str())).collect();
            open(&dir(&files)).encode("a a<s>a").unwrap()
        };
        assert_eq!(ids(json!({})), [3, 3, 0, 3]);
        assert_eq!(ids(json!({"tokenizer_class": "LlamaTokenizerFast"})), [3, 3, 0, 1]);
        assert_eq!(ids(json!({"tokenizer_class": "LlamaTokenizer", "legacy": true})), [3, 3, 0, 3]);
        assert_eq!(
            ids(json!({"tokenizer_class": "LlamaTokenizer", "add_prefix_space": false})),
            [1, 3, 0, 1]
        );
    }

    #[test]
    fn tokens_of_the_configuration_are_added() {
        let (vocab, merges) = (small_vocab().to_string(), MERGES);
        let with = |config: serde_json::Value| {
            let config = config.to_string();
            Any::from_dir(
                dir(&[("vocab.json", &vocab), ("merges.txt", merges), ("tokenizer_config.json", &config)])
                    .path(),
            )
        };
        let decoder = json!({"7": {"content": "<|begin|>", "special": true}, "8": {"content": "<t>", "special": false}});
        let tokenizer =
            with(json!({"added_tokens_decoder": decoder, "pad_token": "<pad>", "sep_token": "ab"}));
        assert_eq!(tokenizer.unwrap().unwrap().encode("ab<|begin|><t><pad> ab").unwrap(), [4, 7, 8, 9, 2, 4]);
        let error = with(json!({"added_tokens_decoder": {"9": {"content": "<t>"}}})).unwrap_err();
        assert!(error.to_string().contains("tokenizer_config.json"), "{error}");
    }

    /// An added token of a `tokenizer.json`.
    fn added(id: usize, content: &str, lstrip: bool, special: bool) -> serde_json::Value {
        json!({"id": id, "content": content, "single_word": false, "lstrip": lstrip, "rstrip": false,
               "normalized": !special, "special": special})
    }

    /// Expected ids are from Transformers 5.24.
    #[test]
    fn a_bert_normalizes_as_its_configuration_says_whatever_its_file_has() {
        let words =
            ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "Hello", "e", "\u{e9}", "\u{4e2d}", "!"];
        let vocab: BTreeMap<&str, usize> = words.into_iter().zip(0..).collect();
        let ids = |lower: bool, config: serde_json::Value, kind: &str| {
            let json = json!({
                "version": "1.0", "truncation": null, "padding": null, "post_processor": null, "decoder": null,
                "added_tokens": [added(3, "[SEP]", false, true), added(11, "AB", false, false)],
                "normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
                               "strip_accents": null, "lowercase": lower},
                "pre_tokenizer": {"type": "BertPreTokenizer"},
                "model": {"type": "WordPiece", "unk_token": "!", "continuing_subword_prefix": "##",
                          "max_input_chars_per_word": 3, "vocab": vocab}
            });
            let files = [
                ("tokenizer.json", json.to_string()),
                ("tokenizer_config.json", config.to_string()),
                ("config.json", json!({"model_type": kind}).to_string()),
            ];
            let files: Vec<(&str, &str)> = files.iter().map(|(name, text)| (*name, text.as_str())).collect();
            open(&dir(&files)).encode_whole("Hello hello \u{e9} \u{4e2d}\u{4e2d}! x AB ab[SEP]").unwrap()
        };
        let uncased: [u32; 12] = [2, 5, 5, 7, 9, 9, 10, 1, 11, 11, 3, 3];
        let cased: [u32; 12] = [2, 6, 5, 8, 9, 9, 10, 1, 11, 1, 3, 3];
        let class = "BertTokenizer";
        for lower in [true, false] {
            let of = |config| ids(lower, config, "");
            assert_eq!(of(json!({"tokenizer_class": class})), uncased);
            assert_eq!(of(json!({"tokenizer_class": class, "do_lower_case": false})), cased);
            let fast = json!({"tokenizer_class": "BertTokenizerFast", "do_lower_case": false});
            assert_eq!(of(fast), cased);
            let distil = json!({"tokenizer_class": "DistilBertTokenizerFast", "do_lower_case": true});
            assert_eq!(of(distil), uncased);
            let accents = json!({"tokenizer_class": class, "strip_accents": false});
            assert_eq!(of(accents), [2, 5, 5, 8, 9, 9, 10, 1, 11, 11, 3, 3]);
            let accents = json!({"tokenizer_class": class, "do_lower_case": false, "strip_accents": true});
            assert_eq!(of(accents), [2, 6, 5, 7, 9, 9, 10, 1, 11, 1, 3, 3]);
            let chinese = json!({"tokenizer_class": class, "tokenize_chinese_chars": false});
            assert_eq!(of(chinese), [2, 5, 5, 7, 1, 10, 1, 11, 11, 3, 3]);
            assert_eq!(ids(lower, json!({}), "bert"), uncased, "the model's type names the class");
        }
        let ends = json!({"tokenizer_class": class, "cls_token": "hello", "sep_token": "!"});
        assert_eq!(ids(false, ends, ""), [5, 5, 5, 7, 9, 9, 10, 1, 11, 11, 3, 10]);
        // Transformers reads the file of a ModernBERT unchanged.
        let ids_of_modern = ids(false, json!({"tokenizer_class": class}), "modernbert");
        assert_ne!(ids_of_modern[0], 2);
    }

    /// Expected ids are from Transformers 5.24.
    #[test]
    fn a_gpt2_and_a_roberta_put_spaces_where_their_configuration_says() {
        let vocab = json!({
            "<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "a": 4, "b": 5, "\u{120}": 6, "ab": 7, "\u{120}ab": 8,
            "<mask>": 9, "abab": 14,
        });
        let ids = |space: bool, config: serde_json::Value| {
            let level = json!({"type": "ByteLevel", "add_prefix_space": space, "trim_offsets": true, "use_regex": true});
            let json = json!({
                "version": "1.0", "truncation": null, "padding": null, "normalizer": {"type": "Lowercase"},
                "added_tokens": [added(9, "<mask>", true, true)], "pre_tokenizer": level, "post_processor": null,
                "decoder": level,
                "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": "",
                          "end_of_word_suffix": "", "fuse_unk": false, "byte_fallback": false,
                          "ignore_merges": true, "vocab": vocab, "merges": [["a", "b"], ["\u{120}", "ab"]]}
            });
            let files = [("tokenizer.json", json.to_string()), ("tokenizer_config.json", config.to_string())];
            let files: Vec<(&str, &str)> = files.iter().map(|(name, text)| (*name, text.as_str())).collect();
            open(&dir(&files)).encode_whole("ab abab A <mask>ab").unwrap()
        };
        let (plain, spaced): ([u32; 6], [u32; 6]) = ([7, 8, 7, 6, 9, 7], [8, 8, 7, 6, 9, 8]);
        let around = |ids: &[u32]| [&[0][..], ids, &[2]].concat();
        for space in [true, false] {
            for end in ["", "Fast"] {
                let of = |name: &str, config: Option<bool>| {
                    let mut keys = json!({"tokenizer_class": format!("{name}Tokenizer{end}")});
                    config.into_iter().for_each(|space| keys["add_prefix_space"] = space.into());
                    ids(space, keys)
                };
                for (config, expected) in [(None, plain), (Some(false), plain), (Some(true), spaced)] {
                    assert_eq!(of("GPT2", config), expected, "{space} in the file, {config:?}");
                    assert_eq!(of("Roberta", config), around(&expected), "{space} in the file, {config:?}");
                }
            }
        }
        let (vocab, merges) = (small_vocab().to_string(), MERGES);
        let config = json!({"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": true}).to_string();
        let pair = dir(&[("vocab.json", &vocab), ("merges.txt", merges), ("tokenizer_config.json", &config)]);
        assert_eq!(open(&pair).encode("ab ab").unwrap(), [5, 5]);
    }

    /// Expected ids are from `BertTokenizer` of Transformers 5.24.
    #[test]
    fn a_list_of_words_is_a_tokenizer_of_bert() {
        let words = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nhello\nwor\n##ld\n中\n!\n";
        let text = "Hello, World! 中 [SEP]";
        let tokenizer = open(&dir(&[("vocab.txt", words)]));
        assert_eq!(tokenizer.encode(text).unwrap(), [5, 1, 6, 7, 9, 8, 3]);
        assert_eq!(tokenizer.encode_whole("hello").unwrap(), [2, 5, 3]);
        let cased =
            open(&dir(&[("vocab.txt", words), ("tokenizer_config.json", "{\"do_lower_case\": false}")]));
        assert_eq!(cased.encode("Hello hello").unwrap(), [1, 5]);
    }

    /// The ids and types of a text or a pair within a number of tokens, and the number before truncation.
    fn sequence(
        tokenizer: &Any,
        (text, pair): (&str, Option<&str>),
        most: usize,
    ) -> (Vec<u32>, Vec<u32>, usize) {
        let TokenSequence { ids, types, tokens } = tokenizer.encode_sequence(text, pair, most).unwrap();
        (ids, types, tokens)
    }

    /// Expected ids and types are from Transformers 5.24 with `truncation=True`, of the same files.
    #[test]
    fn texts_and_pairs_are_those_of_bert() {
        let json = tempfile::tempdir().unwrap();
        super::super::testing::wordpiece(json.path());
        let words = "[PAD] [UNK] [CLS] [SEP] [MASK] a b c hello wor ##ld good bad film ##s , ! . the was ";
        let words = dir(&[("vocab.txt", &words.replace(' ', "\n"))]);
        let film = ("the film was good", Some("a b"));
        let both = ("a b c", Some("the film was good, the film was bad."));
        for (texts, most, ids, of_second, tokens) in [
            (("Hello, world!", None), 99, &[2, 8, 15, 9, 10, 16, 3][..], 0, 7),
            (("Hello, world!", None), 5, &[2, 8, 15, 9, 3], 0, 7),
            (("", None), 4, &[2, 3], 0, 2),
            (("a b c [SEP] films", None), 6, &[2, 5, 6, 7, 3, 3], 0, 8),
            (film, 99, &[2, 18, 13, 19, 11, 3, 5, 6, 3], 3, 9),
            (film, 8, &[2, 18, 13, 19, 3, 5, 6, 3], 3, 9),
            (film, 6, &[2, 18, 13, 3, 5, 3], 2, 9),
            (film, 5, &[2, 18, 3, 5, 3], 2, 9),
            (film, 4, &[2, 18, 3, 3], 1, 9),
            (both, 8, &[2, 5, 6, 3, 18, 13, 19, 3], 4, 16),
            (both, 4, &[2, 3, 18, 3], 2, 16),
            (("", Some("b")), 99, &[2, 3, 6, 3], 2, 4),
            (("a b c hello world", Some("a b c the")), 8, &[2, 5, 6, 7, 3, 5, 6, 3], 3, 13),
        ] {
            let types = [vec![0; ids.len() - of_second], vec![1; of_second]].concat();
            for directory in [&json, &words] {
                let found = sequence(&open(directory), texts, most);
                assert_eq!(found, (ids.to_vec(), types.clone(), tokens), "{texts:?} within {most}");
            }
        }
    }

    /// Expected ids are from Transformers 5.24.
    #[test]
    fn a_qwen2_splits_texts_in_its_way_whatever_its_file_has() {
        let vocab = json!({
            "1": 0, "2": 1, "12": 2, "Ġ": 3, "a": 4, "Ġa": 5, "<|im_end|>": 6, "e": 7, "Ì": 8, "ģ": 9, "Ã": 10, "©": 11, "Ã©": 12
        });
        let level = |space: bool| json!({"type": "ByteLevel", "add_prefix_space": space, "trim_offsets": true, "use_regex": true});
        let file = json!({
            "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
            "pre_tokenizer": level(false), "decoder": level(true),
            "added_tokens": [{"id": 6, "content": "<|im_end|>", "single_word": false, "lstrip": false, "rstrip": false,
                              "normalized": false, "special": true}],
            "model": {"type": "BPE", "vocab": vocab, "merges": ["1 2", "Ġ a", "Ã ©"]}
        });
        let with = |config: serde_json::Value, kind: &str| {
            open(&dir(&[
                ("tokenizer.json", &file.to_string()),
                ("tokenizer_config.json", &config.to_string()),
                ("config.json", &json!({"model_type": kind}).to_string()),
            ]))
        };
        let of_qwen2 = json!({"tokenizer_class": "Qwen2Tokenizer"});
        for (config, kind, ids) in [
            (json!({}), "qwen2", &[0, 1, 5, 12, 6][..]),
            (json!({"tokenizer_class": "LlamaTokenizerFast"}), "qwen2", &[0, 1, 5, 12, 6]),
            (of_qwen2, "qwen3", &[0, 1, 5, 12, 6]),
            (json!({"add_prefix_space": true}), "qwen2", &[3, 0, 3, 1, 5, 12, 6]),
            (json!({"tokenizer_class": "PreTrainedTokenizerFast"}), "qwen3", &[2, 5, 7, 8, 9, 6]),
        ] {
            let tokenizer = with(config.clone(), kind);
            assert_eq!(tokenizer.encode("12 ae\u{301}<|im_end|>").unwrap(), ids, "{config} {kind}");
            assert_eq!(tokenizer.decode(&[4, 6, 5]).unwrap(), "a<|im_end|> a");
            assert_eq!(tokenizer.decode_text(&[4, 6, 5]).unwrap(), "a a");
        }
        assert_eq!(Any::Gpt2.decode_text(&[64, 50256, 65]).unwrap(), "ab");
    }

    /// Expected types are from Transformers 5.24.
    #[test]
    fn token_types_are_those_that_a_model_gets() {
        let types = |config: serde_json::Value| {
            let dir = dir(&[("tokenizer_config.json", &config.to_string())]);
            super::super::testing::wordpiece(dir.path());
            sequence(&open(&dir), ("a", Some("b")), 9).1
        };
        let (given, none) = ([0, 0, 0, 1, 1], [0; 5]);
        for class in ["BertTokenizer", "BertTokenizerFast"] {
            assert_eq!(types(json!({"tokenizer_class": class})), given);
            let names = ["input_ids", "attention_mask"];
            assert_eq!(types(json!({"tokenizer_class": class, "model_input_names": names})), none);
        }
        for class in ["TokenizersBackend", "PreTrainedTokenizerFast"] {
            assert_eq!(types(json!({"tokenizer_class": class})), none);
            let names = ["input_ids", "token_type_ids"];
            assert_eq!(types(json!({"tokenizer_class": class, "model_input_names": names})), given);
        }
    }

    /// Expected ids are from Transformers 5.24.
    #[test]
    fn texts_are_truncated_at_the_side_that_the_files_name() {
        let with = |config: &str| {
            let dir = dir(&[("tokenizer_config.json", config)]);
            super::super::testing::wordpiece(dir.path());
            dir
        };
        let left = with("{\"truncation_side\": \"left\"}");
        let texts = ("a b c hello world", None);
        assert_eq!(sequence(&open(&left), texts, 5).0, [2, 8, 9, 10, 3]);
        let pair = ("a b c", Some("hello world good bad"));
        assert_eq!(sequence(&open(&left), pair, 7).0, [2, 6, 7, 3, 11, 12, 3]);
        let none = with("{}");
        let path = none.path().join("tokenizer.json");
        let text = fs::read_to_string(&path).unwrap();
        let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
        json["truncation"] =
            json!({"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Left"});
        fs::write(&path, json.to_string()).unwrap();
        assert_eq!(sequence(&open(&none), texts, 5).0, [2, 8, 9, 10, 3]);
        fs::write(none.path().join("tokenizer_config.json"), "{\"truncation_side\": \"right\"}").unwrap();
        assert_eq!(sequence(&open(&none), texts, 5).0, [2, 5, 6, 7, 3]);
    }

    /// Expected ids and types are from Transformers 5.24.
    #[test]
    fn texts_and_pairs_are_those_of_gpt2_and_roberta() {
        let pair = ("ab ab", Some("ab\n"));
        assert_eq!(sequence(&open(&small()), pair, 99), (vec![4, 5, 4, 3], vec![0, 0, 1, 1], 4));
        assert_eq!(sequence(&open(&small()), pair, 3), (vec![4, 4, 3], vec![0, 1, 1], 4));
        assert_eq!(sequence(&open(&small()), ("", None), 3), (vec![], vec![], 0));
        let begins =
            [("tokenizer_config.json", "{\"add_bos_token\": true, \"bos_token\": \"<|endoftext|>\"}")];
        let vocab = small_vocab().to_string();
        let begins = dir(&[&begins[..], &[("vocab.json", &vocab), ("merges.txt", MERGES)]].concat());
        assert_eq!(sequence(&open(&begins), pair, 99), (vec![6, 4, 5, 6, 4, 3], vec![0, 0, 0, 1, 1, 1], 6));
        assert_eq!(sequence(&open(&begins), pair, 4), (vec![6, 4, 6, 4], vec![0, 0, 1, 1], 6));

        let vocab =
            json!({"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "a": 4, "b": 5, "Ġ": 6, "ab": 7, "Ġab": 8});
        let json = json!({
            "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "added_tokens": [],
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
            "post_processor": {"type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 0],
                               "trim_offsets": true, "add_prefix_space": false},
            "decoder": null,
            "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
                      "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                      "vocab": vocab, "merges": ["a b", "Ġ ab"]}
        });
        let roberta = open(&dir(&[("tokenizer.json", &json.to_string())]));
        assert_eq!(sequence(&roberta, ("ab ab", None), 3), (vec![0, 7, 2], vec![0; 3], 4));
        let pair = ("ab ab a", Some("ab b"));
        assert_eq!(sequence(&roberta, pair, 99).0, [0, 7, 8, 6, 4, 2, 2, 7, 6, 5, 2]);
        assert_eq!(sequence(&roberta, pair, 7), (vec![0, 7, 8, 2, 2, 7, 2], vec![0; 7], 11));
    }

    #[test]
    fn a_context_that_added_tokens_fill_is_refused() {
        let json = tempfile::tempdir().unwrap();
        super::super::testing::wordpiece(json.path());
        let error = |pair, most| open(&json).encode_sequence("a", pair, most).unwrap_err().to_string();
        assert!(error(None, 2).contains("a context of 2 has no space for a text"), "{}", error(None, 2));
        assert!(error(Some("b"), 3).contains("adds 3 tokens: use at least 4"), "{}", error(Some("b"), 3));
        for tokenizer in [Any::Bytes, Any::Gpt2, open(&small())] {
            assert!(tokenizer.encode_sequence("a", None, 0).is_err());
        }
    }

    /// Expected ids are from Transformers 5.24.
    #[test]
    fn a_vocabulary_with_merges_may_be_that_of_roberta() {
        let vocab = json!({
            "<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "a": 4, "b": 5, "Ġ": 6, "ab": 7, "Ġab": 8, "<mask>": 9,
        });
        let with = |config: serde_json::Value| {
            let (vocab, config) = (vocab.to_string(), config.to_string());
            open(&dir(&[
                ("vocab.json", &vocab),
                ("merges.txt", MERGES),
                ("tokenizer_config.json", &config),
                ("config.json", r#"{"model_type": "roberta"}"#),
            ]))
        };
        let plain = with(json!({}));
        assert_eq!(plain.encode_whole("ab ab<mask>").unwrap(), [0, 7, 8, 9, 2]);
        assert_eq!(plain.encode("ab ab").unwrap(), [7, 8]);
        let spaced = with(json!({"tokenizer_class": "RobertaTokenizer", "add_prefix_space": true}));
        assert_eq!(spaced.encode_whole("ab ab<mask>").unwrap(), [0, 8, 8, 9, 2]);
    }

    /// A tokenizer of XLM-RoBERTa's form. Expected ids are from Transformers 5.24.
    #[test]
    fn a_unigram_vocabulary_with_a_map_of_characters_is_read() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizers/unigram");
        let tokenizer = Any::from_dir(&folder).unwrap().unwrap();
        for (text, expected) in [
            ("ab ab film", &[0, 8, 8, 11, 2][..]),
            ("\u{FF21}\u{2460} ab", &[0, 4, 9, 10, 8, 2]),
            ("x  ab ", &[0, 4, 3, 8, 2]),
            ("a<mask>b", &[0, 4, 5, 12, 4, 6, 2]),
            ("", &[0, 2]),
        ] {
            assert_eq!(tokenizer.encode_whole(text).unwrap(), expected, "{text}");
        }
        assert_eq!((tokenizer.id("<pad>"), tokenizer.vocab_size()), (Some(1), 13));
    }

    #[test]
    fn the_words_of_a_distilbert_are_those_of_a_bert() {
        let config = "{\"tokenizer_class\": \"DistilBertTokenizer\"}";
        let words = dir(&[
            ("vocab.txt", "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nhello\n"),
            ("tokenizer_config.json", config),
        ]);
        assert_eq!(open(&words).encode_whole("Hello").unwrap(), [2, 5, 3]);
    }

    #[test]
    fn what_is_not_read_is_named_with_the_way_out() {
        for (name, found) in [
            ("tokenizer.model", "SentencePiece"),
            ("tekken.json", "tekken"),
            ("tokenizer_config.json", "`tokenizer_config.json`"),
        ] {
            let files = dir(&[(name, "{\"x\": 1}")]);
            let error = Any::from_dir(files.path()).unwrap_err().to_string();
            assert!(
                error.contains(found) && error.contains("save_pretrained") && error.contains("--tokenizer"),
                "{error}"
            );
            // Rows of token ids require no tokenizer.
            let missing = Any::for_model(Some(files.path()), 256).unwrap();
            assert_eq!(missing.encode("a").unwrap_err().to_string(), error);
        }
        let empty = Any::for_model(Some(dir(&[]).path()), 50_257).unwrap();
        assert!(empty.encode("a").unwrap_err().to_string().contains("has weights and no `tokenizer.json`"));
        let other = dir(&[
            ("vocab.json", "{}"),
            ("merges.txt", ""),
            ("tokenizer_config.json", "{\"tokenizer_class\": \"BartTokenizer\"}"),
        ]);
        let error = Any::from_dir(other.path()).unwrap_err().to_string();
        assert!(error.contains("`vocab.json` of a BartTokenizer"), "{error}");
    }

    #[test]
    fn places_are_those_of_the_text() {
        let tokenizer = open(&small());
        let places = tokenizer.encode_places("ab ab\n").unwrap();
        assert_eq!(places, [(4, 0..2), (5, 2..5), (3, 5..6)]);
        let of = |tokenizer: Any, text: &str| -> Vec<String> {
            tokenizer
                .encode_places(text)
                .unwrap()
                .iter()
                .map(|(_, place)| text[place.clone()].to_owned())
                .collect()
        };
        assert_eq!(of(Any::Gpt2, "Hello world"), ["Hello", " world"]);
        assert_eq!(of(Any::Bytes, "ab"), ["a", "b"]);
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
