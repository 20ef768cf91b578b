//! Checks that every relative link of the documents has a target: a file, and in it the heading that the link
//! names.

use std::fs;
use std::path::{Path, PathBuf};

/// Folders without documents of the project: build outputs, run directories and version control.
const SKIPPED: [&str; 4] = ["target", "runs", ".git", "node_modules"];

/// Returns the Markdown files below a folder.
fn markdown_files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        let (path, name) = (entry.path(), entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            // The committed runs of `hydra-bench` are documents; a `runs` folder elsewhere is an output.
            let is_skipped = SKIPPED.iter().any(|skipped| name == *skipped);
            if !is_skipped || path.ends_with("hydra-bench/runs") {
                found.extend(markdown_files(&path));
            }
        } else if path.extension().is_some_and(|ending| ending == "md") {
            found.push(path);
        }
    }
    found
}

/// Returns the text without code blocks.
fn prose(text: &str) -> String {
    let mut in_code = false;
    let kept = text.lines().filter(|line| {
        let fence = line.trim_start().starts_with("```");
        in_code ^= fence;
        !fence && !in_code
    });
    kept.flat_map(|line| [line, "\n"]).collect()
}

/// Returns the link targets in a document.
fn links(text: &str) -> Vec<&str> {
    let ends = text.match_indices("](").map(|(at, _)| &text[at + 2..]);
    ends.filter_map(|rest| rest.split_once(')')).map(|(target, _)| target).collect()
}

/// Returns the anchor of a heading.
fn anchor(heading: &str) -> String {
    let text = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = text.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

fn has_heading(file: &Path, wanted: &str) -> bool {
    let text = prose(&fs::read_to_string(file).unwrap());
    text.lines().filter(|line| line.starts_with('#')).any(|line| anchor(line) == wanted)
}

/// Returns why a link is broken, or `None` if it is not.
fn broken(file: &Path, target: &str) -> Option<String> {
    if target.contains("://") || target.starts_with("mailto:") || target.contains(char::is_whitespace) {
        return None;
    }
    let (path, heading) = target.split_once('#').unwrap_or((target, ""));
    let to = if path.is_empty() { file.to_owned() } else { file.parent().unwrap().join(path) };
    if !to.exists() {
        return Some(format!("{}: `{target}` does not exist", file.display()));
    }
    let is_named = heading.is_empty() || to.is_dir() || has_heading(&to, heading);
    (!is_named).then(|| format!("{}: `{target}` has no such heading", file.display()))
}

#[test]
fn links_between_documents_have_targets() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut wrong = Vec::new();
    let mut checked = 0;
    for file in markdown_files(root) {
        let text = prose(&fs::read_to_string(&file).unwrap());
        checked += links(&text).len();
        wrong.extend(links(&text).into_iter().filter_map(|target| broken(&file, target)));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(checked > 100, "{checked} links");
}

#[test]
fn a_link_without_a_target_is_found() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let file = folder.join("README.md");
    assert!(broken(&file, "docs/nowhere.md").unwrap().contains("does not exist"));
    assert!(broken(&file, "docs/cli.md#no-such-heading").unwrap().contains("has no such heading"));
    assert_eq!(broken(&file, "docs/cli.md#the-demo"), None);
    assert_eq!(anchor("## `hydra doctor`, and more"), "hydra-doctor-and-more");
    assert_eq!(links("[a](b.md) and [c](d#e)"), ["b.md", "d#e"]);
    assert_eq!(prose("a\n```sh\n[x](y)\n```\nb\n"), "a\nb\n");
}
