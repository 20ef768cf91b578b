//! A text in up to three splits.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use super::{BlockSpec, DataError, Records, TokenBlocks, builtin, text, wikitext};
use crate::tokenizer::Tokenizer;

/// A part of a corpus.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Split {
    /// Training data.
    Train,
    /// Data for comparing configurations.
    Validation,
    /// Data for measuring the chosen configuration.
    Test,
}

impl Split {
    /// All splits, in order.
    pub const ALL: [Self; 3] = [Self::Train, Self::Validation, Self::Test];

    /// `train`, `validation` or `test`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::Validation => "validation",
            Self::Test => "test",
        }
    }

    /// Converts what each split has, in order.
    ///
    /// # Errors
    /// The first one of `convert`.
    pub(super) fn try_each<T, U, E>(
        [train, validation, test]: [T; 3],
        mut convert: impl FnMut(T) -> Result<U, E>,
    ) -> Result<[U; 3], E> {
        Ok([convert(train)?, convert(validation)?, convert(test)?])
    }

    /// File stems accepted for this split.
    pub(super) fn stems(self) -> &'static [&'static str] {
        match self {
            Self::Train => &["train"],
            Self::Validation => &["validation", "valid", "val", "dev", "eval"],
            Self::Test => &["test"],
        }
    }
}

impl fmt::Display for Split {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Split {
    type Err = DataError;

    /// Parses any accepted name of a split.
    fn from_str(text: &str) -> Result<Self, DataError> {
        let named = Self::ALL.into_iter().find(|split| split.stems().contains(&text));
        named.ok_or_else(|| DataError::UnknownSplit { found: text.to_owned() })
    }
}

/// The origin of a corpus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CorpusKind {
    /// The built-in corpus.
    Builtin,
    /// A directory with one file per split.
    WikiText,
    /// One file, cut into train, validation and test.
    PlainText,
}

/// A text in up to three splits, held in memory.
#[derive(Clone)]
pub struct Corpus {
    name: String,
    kind: CorpusKind,
    splits: [Option<Cow<'static, str>>; 3],
    /// The file of each split.
    files: [Option<PathBuf>; 3],
    unread: Vec<PathBuf>,
}

impl Corpus {
    /// The built-in corpus: 180 KB of simple English for training, 12 KB each for validation and test.
    pub fn builtin() -> Self {
        let splits = builtin::TEXTS.map(|text| Some(Cow::Borrowed(text)));
        let (name, files, unread) = ("builtin".to_owned(), Default::default(), Vec::new());
        Self { name, kind: CorpusKind::Builtin, splits, files, unread }
    }

    /// Loads the corpus of a `--data` value: `builtin`, or a path. Errors are those of [`open`](Self::open).
    pub fn load(data: &str) -> Result<Self, DataError> {
        if data == "builtin" { Ok(Self::builtin()) } else { Self::open(Path::new(data)) }
    }

    /// Opens a WikiText directory or a plain-text file.
    ///
    /// A directory has `wiki.{train,valid,test}.tokens`, `wiki.{train,valid,test}.raw` or `{train,validation,test}.txt`
    /// (also `valid`, `val`, `dev` and `eval`), in this order of preference. A missing split is an error only when it
    /// is requested. The last tenth of a file's bytes, from the next line on, is the test text, and the tenth before it
    /// is the validation text, so a configuration chosen on one is not tested on it.
    ///
    /// # Errors
    /// A missing path, a directory without any split, or a file that is unreadable, blank or not UTF-8.
    pub fn open(path: &Path) -> Result<Self, DataError> {
        if !path.exists() {
            return Err(DataError::Missing { path: path.to_owned() });
        }
        let (kind, files, unread) = if path.is_dir() {
            let (files, unread) = wikitext::find(path)?;
            (CorpusKind::WikiText, files, unread)
        } else {
            (CorpusKind::PlainText, [(); 3].map(|()| Some(path.to_owned())), Vec::new())
        };
        let splits = match kind {
            CorpusKind::PlainText => text::parts(text::read(path)?).map(Some),
            _ => {
                let read = |file: &Option<PathBuf>| file.as_deref().map(text::read).transpose();
                let [train, validation, test] = files.each_ref().map(read);
                [train?, validation?, test?]
            }
        };
        let splits = splits.map(|text| text.map(Cow::Owned));
        Ok(Self { name: path.display().to_string(), kind, splits, files, unread })
    }

    /// `builtin`, or the path as given.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The origin of the corpus.
    pub fn kind(&self) -> CorpusKind {
        self.kind
    }

    /// Other texts and row files in the directory, which are not read.
    pub fn unread(&self) -> &[PathBuf] {
        &self.unread
    }

    /// The number of blank lines in each file of these splits, which yield no tokens. It omits the built-in corpus and
    /// WikiText's own files, whose convention they are.
    pub fn blank_lines(&self, splits: &[Split]) -> BTreeMap<&Path, usize> {
        let mut counts = BTreeMap::<&Path, usize>::new();
        for split in splits.iter().map(|split| *split as usize) {
            let (Some(file), Some(text)) = (&self.files[split], &self.splits[split]) else { continue };
            let blank = text.lines().filter(|line| line.trim().is_empty()).count();
            if blank > 0 && !wikitext::is_original(file) {
                *counts.entry(file.as_path()).or_default() += blank;
            }
        }
        counts
    }

    /// Returns whether the corpus has this split.
    pub fn has(&self, split: Split) -> bool {
        self.splits[split as usize].is_some()
    }

    /// The records in the text if it is a data file rather than plain text; blocks would then contain their punctuation
    /// and field names too.
    pub fn records(&self) -> Option<Records> {
        let text = self.splits.iter().flatten().next()?;
        Records::found(text)
    }

    /// The text of a split.
    ///
    /// # Errors
    /// The corpus does not have the split.
    pub fn text(&self, split: Split) -> Result<&str, DataError> {
        self.splits[split as usize].as_deref().ok_or_else(|| DataError::SplitMissing {
            corpus: self.name.clone(),
            split,
            looked_for: wikitext::file_names(split).to_vec(),
        })
    }

    /// Tokenizes a split: every line that is not blank is encoded separately, with its newline.
    ///
    /// # Errors
    /// The corpus does not have the split, or its text cannot be tokenized.
    pub fn tokens(&self, split: Split, tokenizer: &Tokenizer) -> Result<Arc<[u32]>, DataError> {
        let tokens = tokenizer.encode_lines(self.text(split)?);
        let tokens =
            tokens.map_err(|source| DataError::Tokenize { corpus: self.name.clone(), split, source })?;
        Ok(tokens.into())
    }

    /// The blocks of a split.
    ///
    /// # Errors
    /// Those of [`tokens`](Self::tokens) and [`TokenBlocks::new`].
    pub fn blocks(
        &self,
        split: Split,
        tokenizer: &Tokenizer,
        spec: BlockSpec,
    ) -> Result<TokenBlocks, DataError> {
        let name = format!("the {split} split of `{}`", self.name);
        TokenBlocks::named(name, self.tokens(split, tokenizer)?, spec)
    }
}

impl fmt::Debug for Corpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.splits.each_ref().map(|text| text.as_ref().map(|text| text.len()));
        f.debug_struct("Corpus")
            .field("name", &self.name)
            .field("kind", &self.kind)
            .field("bytes", &bytes)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error;
    use std::fs;

    use super::*;

    fn dir(files: &[(&str, &[u8])]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, bytes) in files {
            fs::write(dir.path().join(name), bytes).unwrap();
        }
        dir
    }

    fn blocks(corpus: &Corpus, split: Split, context: usize) -> TokenBlocks {
        corpus.blocks(split, &Tokenizer::Bytes, BlockSpec { context, vocab_size: 256 }).unwrap()
    }

    #[test]
    fn the_forms_of_a_directory() {
        for names in [
            ["wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"],
            ["wiki.train.raw", "wiki.valid.raw", "wiki.test.raw"],
            ["train.txt", "valid.txt", "test.txt"],
            ["train.txt", "validation.txt", "test.txt"],
            ["train.txt", "val.txt", "test.txt"],
            ["train.txt", "dev.txt", "test.txt"],
            ["train.txt", "eval.txt", "test.txt"],
        ] {
            let dir = dir(&[(names[0], b"one\n"), (names[1], b"two\n"), (names[2], b"three\n")]);
            let corpus = Corpus::open(dir.path()).unwrap();
            assert_eq!(corpus.kind(), CorpusKind::WikiText);
            assert_eq!(Split::ALL.map(|split| corpus.text(split).unwrap()), ["one\n", "two\n", "three\n"]);
        }
    }

    #[test]
    fn other_data_in_a_directory_is_unread() {
        let unread = |files: &[&str]| {
            let files: Vec<(&str, &[u8])> = files.iter().map(|name| (*name, &b"text\n"[..])).collect();
            let dir = dir(&files);
            let corpus = Corpus::open(dir.path()).unwrap();
            let short = |path: &PathBuf| path.strip_prefix(dir.path()).unwrap().display().to_string();
            corpus.unread().iter().map(short).collect::<Vec<_>>()
        };
        assert_eq!(
            unread(&["train.txt", "train-2.txt", "README.md", "readme.txt", "LICENSE"]),
            ["train-2.txt"]
        );
        assert_eq!(unread(&["train.txt", "val.txt", "extra.jsonl", "config.json"]), ["extra.jsonl"]);
        assert_eq!(unread(&["wiki.train.raw", "train.txt"]), ["train.txt"]);
        assert_eq!(Corpus::builtin().unread().len(), 0);
    }

    #[test]
    fn blank_lines_are_counted_by_file() {
        let dir = dir(&[
            ("train.txt", b"a\n\n \t\nb\n"),
            ("val.txt", b"a\n"),
            ("wiki.test.tokens", b"\n = A = \n\n"),
            ("novel", b"\none\n\ntwo\n\nthree\n\nfour\n"),
        ]);
        let count = |corpus: Corpus, splits: &[Split]| {
            let name = |path: &Path| path.file_name().unwrap().to_str().unwrap().to_owned();
            corpus
                .blank_lines(splits)
                .into_iter()
                .map(|(path, count)| (name(path), count))
                .collect::<Vec<_>>()
        };
        let open = |name: &str| Corpus::open(&dir.path().join(name)).unwrap();
        assert_eq!(count(open(""), &Split::ALL), [("train.txt".to_owned(), 2)]);
        assert!(count(open(""), &[Split::Validation]).is_empty());
        assert_eq!(count(open("novel"), &Split::ALL), [("novel".to_owned(), 4)], "of all parts");
        assert!(count(open("wiki.test.tokens"), &Split::ALL).is_empty());
        assert!(count(Corpus::builtin(), &Split::ALL).is_empty());
    }

    #[test]
    fn an_absent_split_is_an_error_when_it_is_asked_for() {
        let dir = dir(&[("wiki.test.raw", b"only a test\n")]);
        let corpus = Corpus::open(dir.path()).unwrap();
        assert_eq!(Split::ALL.map(|split| corpus.has(split)), [false, false, true]);
        assert_eq!(blocks(&corpus, Split::Test, 4).len(), 3);
        let error = corpus.text(Split::Train).unwrap_err();
        assert!(matches!(error, DataError::SplitMissing { split: Split::Train, .. }));
        assert!(
            error.to_string().contains("no train split") && error.to_string().contains("wiki.train.tokens"),
            "{error}"
        );
    }

    #[test]
    fn missing_and_empty_places_are_named() {
        let dir = dir(&[("notes.md", b"no data")]);
        let missing = dir.path().join("missing");
        let error = Corpus::open(&missing).unwrap_err();
        assert!(matches!(&error, DataError::Missing { path } if *path == missing), "{error}");
        let error = Corpus::load(missing.to_str().unwrap()).unwrap_err();
        assert!(error.to_string().contains("missing") && error.to_string().contains("builtin"), "{error}");
        let error = Corpus::open(dir.path()).unwrap_err();
        assert!(matches!(error, DataError::NoSplits { .. }));
        for split in Split::ALL {
            for name in wikitext::file_names(split) {
                assert!(error.to_string().contains(name), "{error}");
            }
        }
    }

    #[test]
    fn files_without_text_are_named() {
        for blank in [&b""[..], b"\n \n\t\n"] {
            let dir = dir(&[("train.txt", b"text\n"), ("test.txt", blank)]);
            let error = Corpus::open(dir.path()).unwrap_err();
            assert!(matches!(&error, DataError::Empty { path } if path.ends_with("test.txt")), "{error}");
            let error = Corpus::open(&dir.path().join("test.txt")).unwrap_err();
            assert!(matches!(error, DataError::Empty { .. }), "{error}");
        }
    }

    #[test]
    fn files_that_are_no_text_are_named_with_the_offset() {
        let dir = dir(&[("train.txt", b"ab\xC3\xA9\xFFcd")]);
        let error = Corpus::open(dir.path()).unwrap_err();
        assert!(
            matches!(&error, DataError::NotUtf8 { path, offset: 4 } if path.ends_with("train.txt")),
            "{error}"
        );
        assert!(error.to_string().contains("offset 4"), "{error}");
    }

    #[test]
    fn an_unreadable_file_is_an_error_with_its_cause() {
        let dir = dir(&[]);
        fs::create_dir(dir.path().join("train.txt")).unwrap();
        let error = Corpus::open(dir.path()).unwrap_err();
        assert!(matches!(&error, DataError::Read { path, .. } if path.ends_with("train.txt")), "{error}");
        assert!(error.source().is_some());
    }

    #[test]
    fn a_plain_file_is_cut_into_three_parts_that_share_nothing() {
        let text: String = (0..200).map(|i| format!("line {i:03}\n")).collect();
        let dir = dir(&[("novel", text.as_bytes())]);
        let corpus = Corpus::open(&dir.path().join("novel")).unwrap();
        assert_eq!(corpus.kind(), CorpusKind::PlainText);
        let [train, validation, test] = Split::ALL.map(|split| corpus.text(split).unwrap());
        assert_eq!(format!("{train}{validation}{test}"), text);
        assert_eq!([train, validation, test].map(|part| part.lines().count()), [160, 20, 20]);
    }

    #[test]
    fn a_text_that_cannot_be_tokenized_names_its_split() {
        let blanks = format!("a{}b\n", " ".repeat(600_000));
        let dir = dir(&[("valid.txt", blanks.as_bytes())]);
        let corpus = Corpus::open(dir.path()).unwrap();
        let error = corpus.tokens(Split::Validation, &Tokenizer::Gpt2).unwrap_err();
        assert!(matches!(error, DataError::Tokenize { split: Split::Validation, .. }), "{error}");
    }

    #[test]
    fn the_builtin_corpus_gives_blocks_in_every_split() {
        let corpus = Corpus::load("builtin").unwrap();
        for split in Split::ALL {
            let blocks = blocks(&corpus, split, 64);
            let lines = corpus.text(split).unwrap().lines().filter(|line| !line.is_empty());
            let bytes: usize = lines.map(|line| line.len() + 1).sum();
            assert_eq!((blocks.tokens().len(), blocks.len()), (bytes, bytes / 64));
        }
    }

    #[test]
    fn splits_have_names() {
        for split in Split::ALL {
            assert_eq!(split.to_string().parse::<Split>().unwrap(), split);
        }
        for name in ["valid", "val", "dev", "eval"] {
            assert_eq!(name.parse::<Split>().unwrap(), Split::Validation);
        }
        assert!("held".parse::<Split>().unwrap_err().to_string().contains("held"));
    }

    /// The ids must decode to the file without its blank lines.
    #[test]
    fn real_wikitext_opens_and_comes_back() {
        let path: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/wikitext-2");
        if !path.is_dir() {
            println!("skipped: {} is missing", path.display());
            return;
        }
        let corpus = Corpus::open(&path).unwrap();
        for split in Split::ALL {
            let tokens = corpus.tokens(split, &Tokenizer::Gpt2).unwrap();
            let text: String = corpus
                .text(split)
                .unwrap()
                .split_inclusive('\n')
                .filter(|line| !line.trim().is_empty())
                .collect();
            assert_eq!(Tokenizer::Gpt2.decode(&tokens).unwrap(), text);
            let blocks = corpus
                .blocks(split, &Tokenizer::Gpt2, BlockSpec { context: 512, vocab_size: 50257 })
                .unwrap();
            assert_eq!(blocks.len(), tokens.len() / 512);
        }
    }
}
