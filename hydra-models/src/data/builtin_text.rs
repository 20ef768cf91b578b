//! The generator of the built-in corpus: expands `assets/corpus/grammar.txt` into its three splits.
//!
//! Compiled for tests only. A test checks that the committed texts equal the generator's output, and rewrites them if
//! the environment variable `HYDRA_WRITE_CORPUS` is set.

use std::collections::{BTreeMap, BTreeSet};

const GRAMMAR: &str = include_str!("../../assets/corpus/grammar.txt");

/// The smallest sizes of train, validation and test in bytes; each ends with a whole article.
const SIZES: [usize; 3] = [180_000, 12_000, 12_000];

/// Redraws of a name that equals another name of the article.
const REDRAWS: usize = 40;

/// Generates the texts of train, validation and test. No line except blank ones occurs twice.
pub(super) fn generate(seed: u64) -> [String; 3] {
    let grammar = parse(GRAMMAR);
    let kinds = grammar["article"].len();
    let mut writer = Writer { grammar, state: seed, names: BTreeMap::new() };
    let mut seen = BTreeSet::new();
    let mut kind = 0;
    SIZES.map(|size| {
        let mut text = String::new();
        while text.len() < size {
            text += &writer.fresh_article(kind % kinds, &mut seen);
            kind += 1;
        }
        text
    })
}

/// `:symbol` starts a symbol; every further line is one of its alternatives; `#` starts a comment.
fn parse(grammar: &str) -> BTreeMap<&str, Vec<&str>> {
    let mut symbols: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    let mut current = "";
    for line in grammar.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        match line.strip_prefix(':') {
            Some(symbol) => current = symbol,
            None => symbols.entry(current).or_default().push(line),
        }
    }
    symbols
}

struct Writer<'g> {
    grammar: BTreeMap<&'g str, Vec<&'g str>>,
    state: u64,
    /// The words that this article's names stand for.
    names: BTreeMap<&'g str, String>,
}

impl<'g> Writer<'g> {
    fn fresh_article(&mut self, kind: usize, seen: &mut BTreeSet<String>) -> String {
        loop {
            self.names.clear();
            let raw = self.expand(self.grammar["article"][kind]).replace("\\n", "\n");
            let article: String = raw.split('\n').map(|line| polish(line) + "\n").collect();
            let lines: Vec<&str> = article.lines().filter(|line| !line.is_empty()).collect();
            let unique: BTreeSet<&str> = lines.iter().copied().collect();
            if unique.len() == lines.len() && !lines.iter().any(|line| seen.contains(*line)) {
                seen.extend(lines.into_iter().map(str::to_owned));
                return article;
            }
        }
    }

    /// Replaces `{symbol}` and `{name}`, and picks one alternative of `[one|another]`.
    fn expand(&mut self, template: &'g str) -> String {
        let mut text = String::new();
        let mut rest = template;
        while let Some(at) = rest.find(['{', '[']) {
            text += &rest[..at];
            let (open, close) = if rest[at..].starts_with('{') { ('{', '}') } else { ('[', ']') };
            let end = closing(&rest[at..], open, close) + at;
            let inside = &rest[at + 1..end];
            text += &if open == '{' { self.reference(inside) } else { self.choice(inside) };
            rest = &rest[end + 1..];
        }
        text + rest
    }

    fn choice(&mut self, inside: &'g str) -> String {
        let options = options(inside);
        let option = options[self.below(options.len())];
        self.expand(option)
    }

    /// Expands a reference. `{name=symbol}` also binds the expansion to a name in this article; `{!name=symbol}` binds
    /// it without output.
    fn reference(&mut self, inside: &'g str) -> String {
        let (silent, inside) = inside.strip_prefix('!').map_or((false, inside), |inside| (true, inside));
        let Some((name, symbol)) = inside.split_once('=') else {
            return self.names.get(inside).cloned().unwrap_or_else(|| self.symbol(inside));
        };
        let mut value = self.symbol(symbol);
        for _ in 0..REDRAWS {
            if !self.names.values().any(|other| *other == value) {
                break;
            }
            value = self.symbol(symbol);
        }
        self.names.insert(name, value.clone());
        if silent { String::new() } else { value }
    }

    fn symbol(&mut self, symbol: &str) -> String {
        let count = self.grammar.get(symbol).unwrap_or_else(|| panic!("no symbol `{symbol}`")).len();
        let chosen = self.below(count);
        let alternative = self.grammar[symbol][chosen];
        self.expand(alternative)
    }

    /// A number below `bound`, from SplitMix64.
    fn below(&mut self, bound: usize) -> usize {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % bound as u64) as usize
    }
}

/// Splits a choice into its alternatives; a nested choice stays whole.
fn options(inside: &str) -> Vec<&str> {
    let mut depth = 0;
    let split = |c: char| {
        depth += i32::from(c == '[') - i32::from(c == ']');
        c == '|' && depth == 0
    };
    inside.split(split).collect()
}

/// The index of the bracket that closes the one at the start of `text`.
fn closing(text: &str, open: char, close: char) -> usize {
    let mut depth = 0;
    for (at, c) in text.char_indices() {
        depth += i32::from(c == open) - i32::from(c == close);
        if depth == 0 {
            return at;
        }
    }
    panic!("`{text}` is not closed");
}

/// Capitalizes sentences and turns `a` into `an` before a vowel.
fn polish(line: &str) -> String {
    let words: Vec<&str> = line.split(' ').collect();
    let mut text = String::new();
    for (i, word) in words.iter().enumerate() {
        let vowel =
            words.get(i + 1).is_some_and(|next| next.starts_with(['a', 'e', 'i', 'o', 'A', 'E', 'I', 'O']));
        let begins = i == 0 || words[i - 1].ends_with(['.', '?', '!']) || words[i - 1] == "=";
        let word = if *word == "a" && vowel { "an" } else { word };
        text += &if begins { capital(word) } else { word.to_owned() };
        text += if i + 1 < words.len() { " " } else { "" };
    }
    text
}

fn capital(word: &str) -> String {
    let letter = word.find(|c: char| c != '"').unwrap_or(0);
    let mut word = word.to_owned();
    if let Some(first) = word.get_mut(letter..letter + 1) {
        first.make_ascii_uppercase();
    }
    word
}
