//! Holds the rooms of a crate to their floors. A room is a folder or a file right below `src`.
//!
//! A room imports rooms of lower floors alone, and the files within a room import each other in no circle. Read are paths
//! that begin with `crate` or `super`, in code that is not a test: what a `mod.rs` takes from its own files by their bare
//! names is not, so that a folder's face and what is behind it make no circle.

use super::{code_only, read, sources, workspace_root};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The rooms of the crates that have some, floor by floor from the ground up; rooms of one floor do not know each other.
const FLOORS: &[(&str, &[&[&str]])] = &[
    ("hydra-sched", &[&["policy"], &["simulator"]]),
    ("hydra-search", &[&["key", "names", "rank"], &["space"], &["spec", "tree"], &["searcher"], &["search"]]),
    (
        "hydra-engine",
        &[
            &["error", "stages", "weights"],
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
        "hydra-bench",
        &[
            &["control", "control_socket", "terminal"],
            &["machine", "plots"],
            &["settings"],
            &["run_dir"],
            &["dashboard", "terminal_dashboard", "trackers"],
            &["simulator", "session"],
            &["checklist"],
            &["commands"],
            &["cli"],
            &["embedded"],
        ],
    ),
];

/// The path of a module from its crate's root, by its file below `src`.
fn module_of(file: &Path) -> Vec<String> {
    let mut path: Vec<String> =
        file.with_extension("").iter().map(|part| part.to_string_lossy().into_owned()).collect();
    path.pop_if(|last| matches!(last.as_str(), "mod" | "lib" | "main"));
    path
}

/// The modules that a source file names, as paths from its crate's root.
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

/// The code without its modules of tests. One that is only declared is a file of its own; one that is written out stands
/// last.
fn without_tests(code: &str) -> String {
    let mut parts = code.split("#[cfg(test)]\nmod ");
    let first = parts.next();
    let declared = parts.map_while(|part| part.split_once(';').filter(|(name, _)| !name.contains('{')));
    first.into_iter().chain(declared.map(|(_, rest)| rest)).collect()
}

/// The paths that stand behind `from`, also those within braces.
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

/// The members of a group whose opening brace has been read.
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

/// The faults of a crate's imports: `files` are its modules, with what each names.
fn broken_rooms(floors: &[&[&str]], files: &[(Vec<String>, BTreeSet<Vec<String>>)]) -> Vec<String> {
    let floor = |room: &str| floors.iter().position(|floor| floor.contains(&room));
    let mut broken = Vec::new();
    for (module, names) in files {
        let Some(room) = module.first() else { continue };
        let Some(own) = floor(room) else {
            broken.push(format!("`{room}` has no floor: give it one in FLOORS"));
            continue;
        };
        for path in names {
            let other = &path[0];
            match floor(other) {
                _ if other == room => {}
                Some(other) if other < own => {}
                Some(_) => broken.push(format!(
                    "`{}` imports `{}`, which is no lower floor",
                    module.join("::"),
                    path.join("::")
                )),
                None => broken.push(format!(
                    "`{}` imports `{other}` from the crate's root: name its room",
                    module.join("::")
                )),
            }
        }
    }
    broken.extend(circles(files));
    broken
}

/// The circles of files within rooms.
fn circles(files: &[(Vec<String>, BTreeSet<Vec<String>>)]) -> Vec<String> {
    let modules: BTreeSet<&[String]> = files.iter().map(|(module, _)| module.as_slice()).collect();
    // The file that a path leads into, not through a folder's face.
    let file_of = |path: &[String]| {
        (2..=path.len()).rev().map(|end| path[..end].to_vec()).find(|path| modules.contains(path.as_slice()))
    };
    let imports: BTreeMap<&[String], BTreeSet<Vec<String>>> = files
        .iter()
        .filter(|(module, _)| module.len() > 1)
        .map(|(module, names)| {
            let same_room = |path: &&Vec<String>| path.first() == module.first();
            let others = names.iter().filter(same_room).filter_map(|path| file_of(path));
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
    let circular = imports.keys().filter(|module| reaches(module, module));
    circular.map(|module| format!("`{}` is in a circle of files", module.join("::"))).collect()
}

fn files_of(name: &str) -> Vec<(Vec<String>, BTreeSet<Vec<String>>)> {
    let src = workspace_root().join(name).join("src");
    let of = |path: &Path| {
        let module = module_of(path.strip_prefix(&src).expect("a source lies in the crate"));
        let names = named(&module, &read(path));
        (module, names)
    };
    sources(&src).iter().map(|path| of(path)).collect()
}

#[test]
fn rooms_import_lower_floors_alone() {
    for (name, floors) in FLOORS {
        let files = files_of(name);
        let broken = broken_rooms(floors, &files);
        assert!(broken.is_empty(), "{name}: {broken:#?}");
        let rooms: BTreeSet<&str> =
            files.iter().filter_map(|(module, _)| Some(module.first()?.as_str())).collect();
        let drawn: BTreeSet<&str> = floors.iter().flat_map(|floor| floor.iter().copied()).collect();
        assert_eq!(rooms, drawn, "{name}");
    }
}

#[test]
fn an_import_that_runs_up_is_found_wherever_it_hides() {
    let floors: &[&[&str]] = &[&["ground", "beside"], &["attic"]];
    let broken = |file: &str, source: &str| {
        let module = module_of(Path::new(file));
        let names = named(&module, source);
        broken_rooms(floors, &[(module, names)]).len()
    };
    for up in [
        "use crate::attic::Thing;",
        "use crate::{ground::A, attic::{B, C}};",
        "fn f() -> crate::attic::Thing { made() }",
        "use crate::beside::Neighbour;",
        "use crate::Exported;",
        "#[cfg(test)]\nmod tests;\nuse crate::attic::Thing;",
    ] {
        assert!(broken("ground/mod.rs", up) > 0, "{up}");
        assert!(broken("ground/inner/deep.rs", up) > 0, "{up}");
    }
    assert_eq!(broken("ground/mod.rs", "use super::attic::Thing;"), 1);
    assert!(broken("ground/inner.rs", "use super::super::{attic, ground};") > 0);
    assert_eq!(broken("cellar.rs", ""), 1);
    let down = "use crate::ground::A;\nuse super::ground::B;\n// crate::roof\nlet s = \"crate::roof\";";
    assert_eq!(broken("attic.rs", down), 0);
    let tests =
        "#[cfg(test)]\nmod cases;\nuse super::other::A;\n#[cfg(test)]\nmod tests { use crate::attic::B; }";
    assert_eq!(broken("ground/inner.rs", tests), 0);
}

#[test]
fn a_circle_of_files_is_found() {
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
    let found = circles(&files);
    assert_eq!(found.len(), 3, "{found:?}");
    assert!(circles(&files[..3]).is_empty());
}
