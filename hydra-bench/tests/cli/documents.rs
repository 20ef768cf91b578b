//! The documentation site: its table of contents has every page, and the commands of the tutorials run and print what
//! the tutorials show.
//!
//! In a tutorial, a block marked `sh` is run, and a block marked `text` after it is its output. A line `..` in the output
//! stands for any lines. Numbers with a decimal point are not compared: they depend on time and on the processor. Blocks
//! with other marks (`console`, `python`) are not run.

use crate::common::text;
use assert_cmd::Command;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A tutorial that takes longer than this hangs.
const LIMIT: Duration = Duration::from_secs(600);

/// A command block of a tutorial, with the output that the page shows for it.
struct Step {
    line: usize,
    script: String,
    shown: Option<String>,
}

fn docs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("docs")
}

/// The command blocks of a page in their order.
fn steps(page: &str) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    let mut block: Option<(&str, usize, String)> = None;
    for (at, line) in page.lines().enumerate() {
        match (&mut block, line.strip_prefix("```")) {
            (None, Some(mark)) => block = Some((mark, at + 2, String::new())),
            (None, None) => {}
            (Some((_, _, inside)), None) => {
                inside.push_str(line);
                inside.push('\n');
            }
            (Some(_), Some(_)) => match block.take().unwrap() {
                ("sh", line, script) => steps.push(Step { line, script, shown: None }),
                ("text", line, shown) => {
                    let step = steps.last_mut().expect("output without a command before it");
                    assert!(step.shown.is_none(), "line {line}: the second output of one command");
                    step.shown = Some(shown);
                }
                _ => {}
            },
        }
    }
    assert!(block.is_none(), "a block has no end");
    steps
}

/// The words of a line, with `#` for every number that has a decimal point.
fn comparable(line: &str) -> String {
    let mut words = Vec::new();
    for word in line.split_whitespace() {
        let mut out = String::new();
        let mut number = String::new();
        for c in word.chars().chain(['\0']) {
            if c.is_ascii_digit() || c == '.' {
                number.push(c);
                continue;
            }
            // A full stop that ends a sentence belongs to no number.
            let digits = number.trim_end_matches('.');
            let is_fraction = digits.contains('.') && digits.starts_with(|c: char| c.is_ascii_digit());
            out.push_str(if is_fraction { "#" } else { digits });
            out.push_str(&number[digits.len()..]);
            number.clear();
            out.push(c);
        }
        words.push(out.trim_end_matches('\0').to_owned());
    }
    words.join(" ")
}

/// The first line of the shown output that the printed one does not have in its place.
fn missing(shown: &str, printed: &str) -> Option<String> {
    let mut printed = printed.lines().map(comparable).filter(|line| !line.is_empty());
    let mut is_gap = false;
    for line in shown.lines().filter(|line| !line.trim().is_empty()) {
        if line == ".." {
            is_gap = true;
            continue;
        }
        let wanted = comparable(line);
        let found = if is_gap { printed.any(|line| line == wanted) } else { printed.next() == Some(wanted) };
        if !found {
            return Some(line.to_owned());
        }
        is_gap = false;
    }
    let rest = if is_gap { None } else { printed.next() };
    rest.map(|line| format!("nothing more, and not: {line}"))
}

const MARK: &str = "=== block ";

/// Runs the commands of a tutorial in one shell, as a reader does, in an empty directory.
fn run(name: &str) {
    let page = fs::read_to_string(docs().join("tutorials").join(name)).unwrap();
    let steps = steps(&page);
    let last = steps.last().unwrap_or_else(|| panic!("{name} has no commands"));
    assert!(last.script.contains("hydra eval"), "{name}: the last command does not use a model");

    let root = tempfile::tempdir().unwrap();
    let dir = root.path().canonicalize().unwrap().join(name.trim_end_matches(".md"));
    fs::create_dir_all(&dir).unwrap();
    let mut script = String::from("exec 2>&1\n");
    for step in &steps {
        script.push_str(&format!("printf '\\n%s\\n' '{MARK}{}'\n{}", step.line, step.script));
    }
    let file = dir.with_extension("sh");
    fs::write(&file, script).unwrap();

    let bin = Path::new(env!("CARGO_BIN_EXE_hydra")).parent().unwrap();
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let mut shell = Command::new("sh");
    shell.arg("-e").arg(&file).current_dir(&dir).timeout(LIMIT);
    shell.env("PATH", path).env("HYDRA_RESERVATIONS", "").env_remove("HYDRA_LOG").env("NO_COLOR", "1");
    let output = shell.output().unwrap();

    // Paths are absolute in some lines, and the page does not know the directory.
    let printed = text(&output.stdout).replace(&format!("{}/", dir.display()), "");
    let blocks: Vec<(&str, &str)> =
        printed.split(MARK).skip(1).map(|block| block.split_once('\n').unwrap()).collect();
    let (line, end) = blocks.last().copied().unwrap_or(("?", &printed));
    assert!(output.status.success(), "docs/tutorials/{name}, line {line}, fails:\n{end}");
    assert_eq!(blocks.len(), steps.len(), "{name}: {printed}");
    for (step, (_, printed)) in steps.iter().zip(blocks) {
        let Some(shown) = &step.shown else { continue };
        let missing = missing(shown, printed);
        assert_eq!(missing, None, "docs/tutorials/{name}, line {}: the output is\n{printed}", step.line);
    }
}

#[test]
fn the_first_session_runs() {
    run("first-session.md");
}

#[test]
fn a_model_larger_than_the_device_runs() {
    run("larger-than-the-device.md");
}

#[test]
fn a_controlled_search_runs() {
    run("controlled-search.md");
}

#[test]
fn a_grid_on_several_machines_runs() {
    run("several-machines.md");
}

#[test]
fn a_classifier_is_chosen_by_its_metric() {
    run("classifier.md");
}

#[test]
fn every_tutorial_has_a_test() {
    let here = include_str!("documents.rs");
    for entry in fs::read_dir(docs().join("tutorials")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(here.contains(&format!("run(\"{name}\")")), "docs/tutorials/{name} is not run");
    }
}

/// The Markdown files below a folder, as paths from `docs`.
fn pages(folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(pages(&path));
        } else if path.extension().is_some_and(|ending| ending == "md") {
            found.push(path.strip_prefix(docs()).unwrap().to_str().unwrap().to_owned());
        }
    }
    found
}

#[test]
fn every_page_is_in_the_table_of_contents() {
    let summary = fs::read_to_string(docs().join("SUMMARY.md")).unwrap();
    for page in pages(&docs()).iter().filter(|page| *page != "SUMMARY.md") {
        assert!(summary.contains(&format!("]({page})")), "docs/{page} is not in docs/SUMMARY.md");
    }
}

#[test]
fn shown_output_is_compared_without_fractions() {
    assert_eq!(comparable("  loss 0.649, 3 of 4 in 1.5 s. "), "loss #, 3 of 4 in # s.");
    assert_eq!(missing("a 1.5\n..\nd\n", "a 2.5\nb\n\nc\nd\n"), None);
    assert_eq!(missing("a\nc\n", "a\nb\nc\n"), Some("c".into()));
    assert_eq!(missing("a\n", "a\nb\n"), Some("nothing more, and not: b".into()));
    assert_eq!(missing("..\nb 2\n", "b 3\n"), Some("b 2".into()));
    let steps = steps("x\n```sh\nls\n```\n```text\n..\n```\n```console\n$ no\n```\n");
    assert_eq!((steps.len(), steps[0].line, steps[0].script.as_str()), (1, 3, "ls\n"));
    assert_eq!(steps[0].shown.as_deref(), Some("..\n"));
}
