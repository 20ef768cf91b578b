//! Checks the layers of a crate's top-level modules, the folders and files directly below `src`.
//!
//! A module may import only modules of lower layers, and the files within a module must not import each other
//! in a cycle. The test reads paths that begin with `crate` or `super`, outside tests. Re-exports of a
//! `mod.rs` from its own files use bare names and are not read, so that a folder's public API and its files
//! do not count as a cycle.

use super::{code_only, read, sources, workspace_root};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The layers of the crates that declare some, lowest first; modules of one layer must not import each other.
const LAYERS: &[(&str, &[&[&str]])] = &[
    ("hydra-sched", &[&["policy"], &["program"], &["simulator"]]),
    ("hydra-search", &[&["key", "names", "rank"], &["space"], &["spec", "tree"], &["searcher"], &["search"]]),
    (
        "hydra-engine",
        &[
            &["error", "weights"],
            &["protocol"],
            &["checkpoint"],
            &["io", "train_task"],
            &["control", "ahead_of_time"],
            &["optimizer"],
            &["device", "plain"],
            &["admission"],
            &["observer", "report", "task"],
            &["run"],
            &["orchestrator"],
        ],
    ),
    (
        "hydra-run",
        &[
            &["control", "control_socket", "terminal"],
            &["machine", "plots"],
            &["settings"],
            &["run_dir"],
            &["dashboard", "trackers"],
            &["session"],
            &["embedded"],
        ],
    ),
    (
        "hydra-bench",
        &[&["simulator", "terminal_dashboard"], &["checklist"], &["commands"], &["cli"], &["embedded"]],
    ),
];

/// Returns the path of a module from its crate's root, given its file below `src`.
fn module_of(file: &Path) -> Vec<String> {
    let mut path: Vec<String> =
        file.with_extension("").iter().map(|part| part.to_string_lossy().into_owned()).collect();
    path.pop_if(|last| matches!(last.as_str(), "mod" | "lib" | "main"));
    path
}

/// Returns the modules that a source file imports, as paths from its crate's root.
fn named(module: &[String], source: &str) -> BTreeSet<Vec<String>> {
    let code = without_tests(&code_only(source));
    let mut found = BTreeSet::new();
    let boundary = |at: usize| !code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
    for (at, _) in code.match_indices("crate::").filter(|(at, _)| boundary(*at)) {
        tails(&code[at + "crate::".len()..], &[], &mut found);
    }
    for (at, _) in
        code.match_indices("super::").filter(|(at, _)| boundary(*at) && !code[..*at].ends_with("::"))
    {
        let mut rest = &code[at..];
        let mut from = module;
        while let Some(further) = rest.strip_prefix("super::") {
            (rest, from) = (further, &from[..from.len().saturating_sub(1)]);
        }
        tails(rest, from, &mut found);
    }
    found
}

/// Returns the code without its test modules. A declared test module is a separate file; an inline one comes
/// last.
fn without_tests(code: &str) -> String {
    let mut parts = code.split("#[cfg(test)]\nmod ");
    let first = parts.next();
    let declared = parts.map_while(|part| part.split_once(';').filter(|(name, _)| !name.contains('{')));
    first.into_iter().chain(declared.map(|(_, rest)| rest)).collect()
}

/// Collects the paths that follow `from`, also those within braces.
fn tails(text: &str, from: &[String], found: &mut BTreeSet<Vec<String>>) {
    let text = text.trim_start();
    if let Some(group) = text.strip_prefix('{') {
        return members(group).into_iter().for_each(|member| tails(member, from, found));
    }
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
    let path: Vec<String> = from.iter().cloned().chain([text[..end].to_owned()]).collect();
    match text[end..].strip_prefix("::") {
        Some(rest) => tails(rest, &path, found),
        None => drop(found.insert(path)),
    }
}

/// Returns the members of a group after its opening brace.
fn members(group: &str) -> Vec<&str> {
    let (mut depth, mut start, mut members) = (0, 0, Vec::new());
    for (at, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth > 0 => depth -= 1,
            ',' if depth == 0 => {
                members.push(&group[start..at]);
                start = at + 1;
            }
            '}' => {
                members.push(&group[start..at]);
                break;
            }
            _ => {}
        }
    }
    members.retain(|member| !member.trim().is_empty());
    members
}

/// Returns the violations in a crate's imports: `files` are its modules with the paths that each imports.
fn violations(layers: &[&[&str]], files: &[(Vec<String>, BTreeSet<Vec<String>>)]) -> Vec<String> {
    let layer = |top: &str| layers.iter().position(|layer| layer.contains(&top));
    let mut broken = Vec::new();
    for (module, names) in files {
        let Some(top) = module.first() else { continue };
        let Some(own) = layer(top) else {
            broken.push(format!("`{top}` has no layer: add it to LAYERS"));
            continue;
        };
        for path in names {
            let other = &path[0];
            match layer(other) {
                _ if other == top => {}
                Some(other) if other < own => {}
                Some(_) => broken.push(format!(
                    "`{}` imports `{}`, which is not in a lower layer",
                    module.join("::"),
                    path.join("::")
                )),
                None => broken.push(format!(
                    "`{}` imports `{other}` from the crate's root: import it from its module",
                    module.join("::")
                )),
            }
        }
    }
    broken.extend(cycles(files));
    broken
}

/// Returns the files that are in an import cycle within a module.
fn cycles(files: &[(Vec<String>, BTreeSet<Vec<String>>)]) -> Vec<String> {
    let modules: BTreeSet<&[String]> = files.iter().map(|(module, _)| module.as_slice()).collect();
    // The file that a path refers to; a path through a folder's public API has none.
    let file_of = |path: &[String]| {
        (2..=path.len()).rev().map(|end| path[..end].to_vec()).find(|path| modules.contains(path.as_slice()))
    };
    let imports: BTreeMap<&[String], BTreeSet<Vec<String>>> = files
        .iter()
        .filter(|(module, _)| module.len() > 1)
        .map(|(module, names)| {
            let same_module = |path: &&Vec<String>| path.first() == module.first();
            let others = names.iter().filter(same_module).filter_map(|path| file_of(path));
            (module.as_slice(), others.filter(|other| other != module).collect())
        })
        .collect();
    let reaches = |from: &[String], to: &[String]| {
        let (mut seen, mut next) = (BTreeSet::new(), vec![from.to_vec()]);
        while let Some(module) = next.pop() {
            for other in imports.get(module.as_slice()).into_iter().flatten() {
                if other == to {
                    return true;
                }
                if seen.insert(other.clone()) {
                    next.push(other.clone());
                }
            }
        }
        false
    };
    let in_cycles = imports.keys().filter(|module| reaches(module, module));
    in_cycles.map(|module| format!("`{}` is in a cycle of imports", module.join("::"))).collect()
}

fn files_of(name: &str) -> Vec<(Vec<String>, BTreeSet<Vec<String>>)> {
    let src = workspace_root().join(name).join("src");
    let of = |path: &Path| {
        let module = module_of(path.strip_prefix(&src).expect("a source is in the crate"));
        let names = named(&module, &read(path));
        (module, names)
    };
    sources(&src).iter().map(|path| of(path)).collect()
}

#[test]
fn modules_import_only_lower_layers() {
    for (name, layers) in LAYERS {
        let files = files_of(name);
        let broken = violations(layers, &files);
        assert!(broken.is_empty(), "{name}: {broken:#?}");
        let modules: BTreeSet<&str> =
            files.iter().filter_map(|(module, _)| Some(module.first()?.as_str())).collect();
        let listed: BTreeSet<&str> = layers.iter().flat_map(|layer| layer.iter().copied()).collect();
        assert_eq!(modules, listed, "{name}");
    }
}

#[test]
fn an_import_of_a_higher_layer_is_found_in_every_form() {
    let layers: &[&[&str]] = &[&["base", "sibling"], &["upper"]];
    let broken = |file: &str, source: &str| {
        let module = module_of(Path::new(file));
        let names = named(&module, source);
        violations(layers, &[(module, names)]).len()
    };
    for up in [
        "use crate::upper::Thing;",
        "use crate::{base::A, upper::{B, C}};",
        "fn f() -> crate::upper::Thing { made() }",
        "use crate::sibling::Peer;",
        "use crate::Exported;",
        "#[cfg(test)]\nmod tests;\nuse crate::upper::Thing;",
    ] {
        assert!(broken("base/mod.rs", up) > 0, "{up}");
        assert!(broken("base/inner/deep.rs", up) > 0, "{up}");
    }
    assert_eq!(broken("base/mod.rs", "use super::upper::Thing;"), 1);
    assert!(broken("base/inner.rs", "use super::super::{upper, base};") > 0);
    assert_eq!(broken("unlisted.rs", ""), 1);
    let down = "use crate::base::A;\nuse super::base::B;\n// crate::missing\nlet s = \"crate::missing\";";
    assert_eq!(broken("upper.rs", down), 0);
    let tests =
        "#[cfg(test)]\nmod cases;\nuse super::other::A;\n#[cfg(test)]\nmod tests { use crate::upper::B; }";
    assert_eq!(broken("base/inner.rs", tests), 0);
}

#[test]
fn a_cycle_of_files_is_found() {
    let file = |path: &str, source: &str| {
        let module = module_of(Path::new(path));
        let names = named(&module, source);
        (module, names)
    };
    let files = [
        file("a/mod.rs", "pub use one::One;"),
        file("a/one.rs", "use super::two::Two;"),
        file("a/two.rs", "use crate::a::three::Three;"),
        file("a/three.rs", "use super::one::{self, One};"),
        file("a/four.rs", "use super::one::One;"),
    ];
    let found = cycles(&files);
    assert_eq!(found.len(), 3, "{found:?}");
    assert!(cycles(&files[..3]).is_empty());
}
