//! Refusals for lack of memory: the run fits with every suggestion.

use crate::common::{hydra, notes, text};
use std::fs;

/// Merges flags with their values; later ones replace earlier ones.
fn merged(flags: &str, more: &str) -> Vec<String> {
    let mut all: Vec<(String, String)> = Vec::new();
    let words: Vec<&str> = flags.split_whitespace().chain(more.split_whitespace()).collect();
    for pair in words.chunks(2) {
        let [flag, value] = <[&str; 2]>::try_from(pair).unwrap().map(str::to_owned);
        all.retain(|(other, _)| *other != flag);
        all.push((flag, value));
    }
    all.into_iter().flat_map(|(flag, value)| [flag, value]).collect()
}

/// Returns the refusal of a run with these flags, and its suggestions, each with its memory.
fn refused(flags: &str) -> (String, Vec<(String, String)>) {
    let words = ["select", "--strict", "--dry-run"].into_iter().chain(flags.split_whitespace());
    let output = hydra(&words.collect::<Vec<_>>()).output().unwrap();
    let said = notes(&text(&output.stderr));
    assert_eq!(output.status.code(), Some(1), "{said}");
    let first = said.lines().find(|line| line.starts_with("error: ")).unwrap_or_default();
    let ways = first.split("it fits with one of these (each was planned): ").nth(1).unwrap_or_default();
    let ways = ways.split("; still too large").next().unwrap_or_default();
    let ways = ways.split("; ").filter(|way| !way.is_empty()).map(|way| match way.split_once(" (") {
        Some((flags, needs)) => (flags.to_owned(), needs.trim_end_matches(')').to_owned()),
        None => (way.to_owned(), String::new()),
    });
    let ways = ways.collect();
    (said, ways)
}

fn check(flags: &str, ways: &[(String, String)]) {
    for (way, _) in ways {
        let flags = merged(flags, way);
        let words = ["select", "--strict", "--dry-run"].into_iter().chain(flags.iter().map(String::as_str));
        let output = hydra(&words.collect::<Vec<_>>()).output().unwrap();
        assert!(output.status.success(), "{way}: {}", text(&output.stderr));
    }
}

fn names(ways: &[(String, String)]) -> Vec<&str> {
    ways.iter().filter_map(|(way, _)| way.split_whitespace().next()).collect()
}

#[test]
fn what_a_device_has_no_room_for_is_refused_with_settings_that_fit() {
    let flags = "--model bytes-tiny --batch 512 --lr 1e-3 --context 32 --steps 2 --devices cpu:1x1 --device-memory 8MiB --eval-limit 4";
    let (said, ways) = refused(flags);
    let named = names(&ways);
    assert_eq!(named[..3], ["--device-memory", "--batch", "--batch"], "{said}");
    assert!(ways[2].0.starts_with("--batch 512 --accumulate "), "{said}");
    assert!(ways[1].1.starts_with("requires "), "with the figure: {said}");
    check(flags, &ways);
}

#[test]
fn what_the_host_has_no_room_for_is_refused_with_settings_that_fit() {
    let root = tempfile::tempdir().unwrap();
    let flags = format!(
        "--batch 4 --lr 1e-3 --context 32 --steps 2 --devices cpu:1x1 --device-memory 4MiB --eval-limit 4 --host-memory 2.5MiB \
         --out {}",
        root.path().join("run").display()
    );
    let (said, ways) = refused(&flags);
    assert_eq!(names(&ways), ["--host-memory", "--disk-memory"], "{said}");
    check(&flags, &ways);
}

#[test]
fn a_frozen_base_that_the_host_has_no_room_for_is_stored_in_16_bits() {
    let flags = "--model bytes-small --lora 2 --batch 1 --lr 1e-3 --context 16 --steps 2 --devices cpu:1x1 --device-memory 64MiB \
                 --eval-limit 4 --host-memory 10MiB";
    let (said, ways) = refused(flags);
    assert_eq!(names(&ways)[..2], ["--host-memory", "--frozen-dtype"], "{said}");
    check(flags, &ways);
}

#[test]
fn a_context_for_examples_that_are_too_long_is_named_with_what_it_cuts() {
    let root = tempfile::tempdir().unwrap();
    let data = root.path().join("long.jsonl");
    let line =
        |length: usize| format!("{{\"prompt\": \"say \", \"completion\": \"{}\"}}\n", "a".repeat(length));
    fs::write(&data, (0..40).map(|item| line(if item % 10 == 3 { 100 } else { 10 })).collect::<String>())
        .unwrap();
    let flags = format!(
        "--model bytes-tiny --batch 64 --lr 1e-3 --steps 2 --devices cpu:1x1 --device-memory 8MiB --eval-limit 4 --data {}",
        data.display()
    );
    let (said, ways) = refused(&flags);
    let context =
        ways.iter().find(|(way, _)| way.starts_with("--context ")).unwrap_or_else(|| panic!("{said}"));
    assert!(context.1.contains("truncates ") && context.1.contains(" training examples, losing "), "{said}");
    check(&flags, &ways);
}
