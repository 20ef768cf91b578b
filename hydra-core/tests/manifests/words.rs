//! Holds names, comments, messages and documents to the vocabulary of the field: `.ci/words.toml` lists the
//! words that this project had of its own, where each is forbidden, and what to write instead.

use super::{code_only, comment, quoted, raw_string, read, workspace_root};
use regex::Regex;
use serde::Deserialize;
use std::path::{Path, PathBuf};

/// A part of the repository's text, by what a reader takes it for.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
enum Zone {
    /// Comments and documentation of Rust code, which are the help texts of flags too.
    Comments,
    /// Strings of Rust code outside its tests, and the whole text of Python and JavaScript files.
    Strings,
    /// Identifiers of Rust code outside its tests.
    Names,
    /// Markdown outside of code.
    Documents,
}

/// An entry of the list.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Word {
    /// Matches the word in a text, without regard to case; empty for none.
    #[serde(default)]
    text: String,
    /// The parts of an identifier that it may not have: `old` forbids `old_name` and `OldName`.
    #[serde(default)]
    names: Vec<String>,
    /// Where it is forbidden.
    #[serde(rename = "in")]
    zones: Vec<Zone>,
    /// What to write instead.
    instead: String,
    /// Paths, by their beginnings, where the word has its standard meaning.
    #[serde(default)]
    except: Vec<String>,
    /// Matches lines on which the word has its standard meaning.
    #[serde(default)]
    unless: String,
}

#[derive(Deserialize)]
struct List {
    word: Vec<Word>,
}

/// A rule, ready to search.
struct Rule {
    word: Word,
    text: Option<Regex>,
    unless: Option<Regex>,
}

impl Rule {
    fn new(word: Word) -> Self {
        let regex = |pattern: &str| {
            let compiled = Regex::new(&format!("(?i){pattern}"));
            (!pattern.is_empty()).then(|| compiled.unwrap_or_else(|error| panic!("`{pattern}`: {error}")))
        };
        Self { text: regex(&word.text), unless: regex(&word.unless), word }
    }

    /// The forbidden word on a line of a zone, if there is one; `whole` is the line with all zones.
    fn find(&self, zone: Zone, path: &str, line: &str, whole: &str) -> Option<String> {
        let holds_here = self.word.zones.contains(&zone)
            && !self.word.except.iter().any(|prefix| path.starts_with(prefix.as_str()))
            && !self.unless.as_ref().is_some_and(|unless| unless.is_match(whole));
        match zone {
            _ if !holds_here => None,
            Zone::Names => identifiers(line).find(|name| self.forbids(name)).map(str::to_owned),
            _ => Some(self.text.as_ref()?.find(line)?.as_str().to_owned()),
        }
    }

    fn forbids(&self, identifier: &str) -> bool {
        parts(identifier).iter().any(|part| self.word.names.iter().any(|name| name == part))
    }
}

fn rules() -> Vec<Rule> {
    let list: List = toml::from_str(&read(&workspace_root().join(".ci/words.toml"))).unwrap();
    list.word.into_iter().map(Rule::new).collect()
}

fn identifiers(line: &str) -> impl Iterator<Item = &str> {
    line.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|name| !name.is_empty())
}

/// The parts of an identifier in lower case: of `ParamBuffer_id` they are `param`, `buffer` and `id`.
fn parts(identifier: &str) -> Vec<String> {
    let mut found = vec![String::new()];
    let mut before = '_';
    for c in identifier.chars() {
        if c == '_' || (c.is_uppercase() && !before.is_uppercase()) {
            found.push(String::new());
        }
        if c != '_' {
            found.last_mut().expect("one part at least").extend(c.to_lowercase());
        }
        before = c;
    }
    found.retain(|part| !part.is_empty());
    found
}

/// The source with blanks in place of everything but comments, or everything but strings.
fn only(source: &str, wanted: Zone) -> String {
    let mut text = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(next) = rest.chars().next() {
        let (comment, string) = (comment(rest), raw_string(rest).or_else(|| quoted(rest)));
        let (taken, left) = rest.split_at(comment.or(string).unwrap_or(next.len_utf8()));
        let keeps =
            if wanted == Zone::Comments { comment.is_some() } else { comment.is_none() && string.is_some() };
        text.extend(taken.chars().map(|c| if keeps || c == '\n' { c } else { ' ' }));
        rest = left;
    }
    text
}

/// The source up to its module of tests, which stands last.
fn without_tests(source: &str) -> &str {
    let tests = source.find("\n#[cfg(test)]\nmod ").or_else(|| source.find("\n#[cfg(all(test"));
    tests.map_or(source, |at| &source[..at])
}

/// Markdown with blanks in place of blocks of code and of code in lines.
fn prose(text: &str) -> String {
    let mut in_block = false;
    let line = |line: &str| {
        let fence = line.trim_start().starts_with("```");
        in_block ^= fence;
        let pieces = line.split('`').enumerate().filter(|(index, _)| index % 2 == 0).map(|(_, piece)| piece);
        if fence || in_block { "\n".to_owned() } else { pieces.collect::<Vec<_>>().join(" ") + "\n" }
    };
    text.lines().map(line).collect()
}

/// The zones of a file, each as a text with the file's lines.
fn zones(path: &str, text: &str) -> Vec<(Zone, String)> {
    match path.rsplit_once('.').map_or("", |(_, ending)| ending) {
        "md" => vec![(Zone::Documents, prose(text))],
        "py" | "js" | "html" => vec![(Zone::Strings, text.to_owned())],
        "rs" if path.contains("/src/") && !path.ends_with("tests.rs") => {
            let source = without_tests(text);
            vec![
                (Zone::Comments, only(text, Zone::Comments)),
                (Zone::Strings, only(source, Zone::Strings)),
                (Zone::Names, code_only(source)),
            ]
        }
        "rs" => vec![(Zone::Comments, only(text, Zone::Comments))],
        _ => Vec::new(),
    }
}

/// The forbidden words of a file: its line, the word, and what to write instead.
fn forbidden(rules: &[Rule], path: &str, text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (zone, part) in zones(path, text) {
        for ((line, whole), number) in part.lines().zip(text.lines()).zip(1..) {
            let words = rules
                .iter()
                .filter_map(|rule| Some((rule.find(zone, path, line, whole)?, &rule.word.instead)));
            found.extend(words.map(|(word, instead)| format!("{path}:{number}: `{word}`; write {instead}")));
        }
    }
    found
}

/// The files of the repository that people read: sources, scripts and documents.
fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    const BUILT: [&str; 7] = ["target", "runs", "node_modules", "uplot", "fixtures", "assets/corpus", "dist"];
    let mut entries: Vec<PathBuf> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    entries.sort_unstable();
    for path in entries {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_symlink() || name.starts_with('.') || BUILT.iter().any(|built| path.ends_with(built)) {
            continue;
        }
        if path.is_dir() {
            files(&path, found);
        } else if path
            .extension()
            .is_some_and(|e| ["rs", "py", "js", "html", "md"].iter().any(|kind| e == *kind))
        {
            found.push(path);
        }
    }
}

#[test]
fn old_words_stay_out() {
    let (root, rules) = (workspace_root(), rules());
    let mut paths = Vec::new();
    files(&root, &mut paths);
    assert!(paths.len() > 500, "only {} files were found below {}", paths.len(), root.display());
    let mut found = Vec::new();
    for path in paths {
        let name = path.strip_prefix(&root).unwrap().to_string_lossy().into_owned();
        // The changelog names what was renamed, and this file has examples.
        if name != "CHANGELOG.md" && !name.ends_with("manifests/words.rs") {
            found.extend(forbidden(&rules, &name, &read(&path)));
        }
    }
    assert!(found.is_empty(), "{} words that .ci/words.toml forbids:\n{}", found.len(), found.join("\n"));
}

#[test]
fn a_word_is_found_in_its_zone_alone() {
    let toml = r#"
        [[word]]
        text = '\blanes?\b'
        names = ["lane"]
        in = ["comments", "strings", "names"]
        instead = "replica"
        except = ["hydra-models/"]
        unless = "SIMD"
    "#;
    let list: List = toml::from_str(toml).unwrap();
    let rules: Vec<Rule> = list.word.into_iter().map(Rule::new).collect();
    let count = |path: &str, text: &str| forbidden(&rules, path, text).len();
    let source =
        "/// A Lane.\nstruct BestLane { airplane: usize }\nconst NAME: &str = \"two lanes\";\n// SIMD lane\n";
    assert_eq!(count("hydra-engine/src/a.rs", source), 3);
    assert_eq!(count("hydra-models/src/a.rs", source), 0);
    assert_eq!(count("hydra-engine/tests/a.rs", source), 1);
    assert_eq!(count("docs/a.md", "A lane."), 0);
    let tested = "fn a() {}\n#[cfg(test)]\nmod tests {\n    fn lane() {}\n}\n";
    assert_eq!(count("hydra-engine/src/a.rs", tested), 0);
}

#[test]
fn code_in_documents_is_not_prose() {
    assert_eq!(prose("a `b` c\n```sh\nd\n```\ne"), "a   c\n\n\n\ne\n");
    assert_eq!(parts("ParamBuffer_idOf"), ["param", "buffer", "id", "of"]);
    assert_eq!(parts("MAX_VISITS"), ["max", "visits"]);
}
