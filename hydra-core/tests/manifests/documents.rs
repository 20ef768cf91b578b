//! Every relative link of the documents has a target: a file, and a heading of it where the link names one.

use std::fs;
use std::path::{Path, PathBuf};

/// Folders whose Markdown is not ours to check: what is built, what a run writes, and version control.
const SKIPPED: [&str; 4] = ["target", "runs", ".git", "node_modules"];

/// The Markdown files below a folder.
fn pages(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        let (path, name) = (entry.path(), entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            // The kept runs of `hydra-bench` are documents; a `runs` folder elsewhere is what a run wrote.
            let is_left_out = SKIPPED.iter().any(|skipped| name == *skipped);
            if !is_left_out || path.ends_with("hydra-bench/runs") {
                found.extend(pages(&path));
            }
        } else if path.extension().is_some_and(|ending| ending == "md") {
            found.push(path);
        }
    }
    found
}

/// The text without blocks of code.
fn prose(text: &str) -> String {
    let mut in_code = false;
    let kept = text.lines().filter(|line| {
        let fence = line.trim_start().starts_with("```");
        in_code ^= fence;
        !fence && !in_code
    });
    kept.flat_map(|line| [line, "\n"]).collect()
}

/// The targets of the links of a page.
fn links(text: &str) -> Vec<&str> {
    let ends = text.match_indices("](").map(|(at, _)| &text[at + 2..]);
    ends.filter_map(|rest| rest.split_once(')')).map(|(target, _)| target).collect()
}

/// The name by which a link addresses a heading.
fn anchor(heading: &str) -> String {
    let text = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = text.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

fn has_heading(page: &Path, wanted: &str) -> bool {
    let text = prose(&fs::read_to_string(page).unwrap());
    text.lines().filter(|line| line.starts_with('#')).any(|line| anchor(line) == wanted)
}

/// Why a link of a page leads nowhere.
fn broken(page: &Path, target: &str) -> Option<String> {
    if target.contains("://") || target.starts_with("mailto:") || target.contains(char::is_whitespace) {
        return None;
    }
    let (path, heading) = target.split_once('#').unwrap_or((target, ""));
    let to = if path.is_empty() { page.to_owned() } else { page.parent().unwrap().join(path) };
    if !to.exists() {
        return Some(format!("{}: `{target}` is not there", page.display()));
    }
    let is_named = heading.is_empty() || to.is_dir() || has_heading(&to, heading);
    (!is_named).then(|| format!("{}: `{target}` names no heading", page.display()))
}

#[test]
fn links_between_documents_have_targets() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut wrong = Vec::new();
    let mut checked = 0;
    for page in pages(root) {
        let text = prose(&fs::read_to_string(&page).unwrap());
        checked += links(&text).len();
        wrong.extend(links(&text).into_iter().filter_map(|target| broken(&page, target)));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(checked > 100, "{checked} links");
}

#[test]
fn a_link_without_a_target_is_found() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let page = folder.join("README.md");
    assert!(broken(&page, "docs/nowhere.md").unwrap().contains("is not there"));
    assert!(broken(&page, "docs/cli.md#no-such-heading").unwrap().contains("names no heading"));
    assert_eq!(broken(&page, "docs/cli.md#the-demo"), None);
    assert_eq!(anchor("## `hydra doctor`, and more"), "hydra-doctor-and-more");
    assert_eq!(links("[a](b.md) and [c](d#e)"), ["b.md", "d#e"]);
    assert_eq!(prose("a\n```sh\n[x](y)\n```\nb\n"), "a\nb\n");
}
