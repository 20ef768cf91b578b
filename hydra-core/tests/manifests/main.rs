//! Checks the workspace's architecture: the allowed dependencies between crates and between the modules of a
//! crate, and the locations of `unsafe`.
//!
//! `docs/architecture.md` states the rules. They are checked by functions over text, so that the
//! tests can verify with made-up manifests and sources that a violation is found.

mod documents;
mod layers;
mod words;

use std::path::{Path, PathBuf};
use toml::{Table, Value};

/// The crates and their allowed dependencies within the workspace. Dev-dependencies are not restricted.
const DEPENDENCIES: &[(&str, &[&str])] = &[
    ("hydra-sched", &[]),
    ("hydra-search", &[]),
    ("hydra-core", &[]),
    ("hydra-partition", &["hydra-core"]),
    ("hydra-spill", &["hydra-core"]),
    ("hydra-models", &["hydra-core"]),
    ("hydra-engine", &["hydra-core", "hydra-partition", "hydra-spill", "hydra-sched"]),
    (
        "hydra-train",
        &["hydra-core", "hydra-partition", "hydra-spill", "hydra-sched", "hydra-models", "hydra-engine"],
    ),
    (
        "hydra-run",
        &[
            "hydra-core",
            "hydra-partition",
            "hydra-spill",
            "hydra-sched",
            "hydra-search",
            "hydra-models",
            "hydra-engine",
        ],
    ),
    (
        "hydra-bench",
        &[
            "hydra-core",
            "hydra-partition",
            "hydra-spill",
            "hydra-sched",
            "hydra-models",
            "hydra-engine",
            "hydra-run",
        ],
    ),
    ("hydra-py", &["hydra-core", "hydra-models", "hydra-run", "hydra-bench", "hydra-spill"]),
];

/// External crates that a crate must not depend on, by name prefix: the scheduler and the search use
/// neither tensors nor threads, runs need no command line, and the command line is built without Python.
const FORBIDDEN: &[(&str, &[&str])] = &[
    ("hydra-sched", &["burn", "rayon", "crossbeam"]),
    ("hydra-search", &["burn", "rayon", "crossbeam"]),
    ("hydra-run", &["pyo3", "clap_complete", "clap_mangen", "ratatui"]),
    ("hydra-bench", &["pyo3", "axum", "ureq", "plotters"]),
];

/// The crates that forbid unsafe code.
const SAFE: &[&str] = &[
    "hydra-core",
    "hydra-partition",
    "hydra-sched",
    "hydra-search",
    "hydra-engine",
    "hydra-train",
    "hydra-run",
    "hydra-bench",
    "hydra-py",
];

/// The modules of the other crates that may hold unsafe code.
const UNSAFE_MODULES: &[&str] = &["kernels", "alloc", "cuda"];

/// Returns the violations in the manifest of `name`, given the workspace's dependencies.
fn forbidden_dependencies(name: &str, manifest: &Table, workspace: &Table) -> Vec<String> {
    let Some((_, allowed)) = DEPENDENCIES.iter().find(|(of, _)| *of == name) else {
        return vec![format!("`{name}` is not in DEPENDENCIES: add it there and in docs/architecture.md")];
    };
    let forbidden = FORBIDDEN.iter().filter(|(of, _)| *of == name).flat_map(|(_, names)| *names);
    let forbidden: Vec<&str> = forbidden.copied().collect();
    let refused = |package: &String| match package.starts_with("hydra-") {
        true => !allowed.contains(&package.as_str()),
        false => forbidden.iter().any(|prefix| package.starts_with(prefix)),
    };
    let imported = imports(manifest, workspace).into_iter().filter(refused);
    imported.map(|package| format!("`{name}` depends on `{package}`; allowed are {allowed:?}")).collect()
}

/// Returns the packages that a manifest depends on outside tests: dependencies and build dependencies, on
/// every target, under their real names.
fn imports(manifest: &Table, workspace: &Table) -> Vec<String> {
    let targets = manifest.get("target").and_then(Value::as_table).into_iter().flatten();
    let targets = targets.filter_map(|(_, target)| target.as_table());
    let mut packages: Vec<String> = std::iter::once(manifest)
        .chain(targets)
        .flat_map(|table| [table.get("dependencies"), table.get("build-dependencies")])
        .filter_map(|dependencies| dependencies?.as_table())
        .flatten()
        .map(|(key, dependency)| package(key, dependency, workspace))
        .collect();
    packages.sort_unstable();
    packages.dedup();
    packages
}

/// Returns the package of a dependency's key, which a `package` field there or in the workspace may rename.
fn package(key: &str, dependency: &Value, workspace: &Table) -> String {
    let inherited = dependency.get("workspace").and_then(Value::as_bool).unwrap_or(false);
    let definition = if inherited { workspace.get(key) } else { Some(dependency) };
    let renamed = definition.and_then(|definition| definition.get("package")).and_then(Value::as_str);
    renamed.unwrap_or(key).to_owned()
}

/// Returns the lines of a source file with the keyword `unsafe`, counted from one; none if the file is, or is
/// in, a module that may contain it.
fn misplaced_unsafe(file: &Path, source: &str) -> Vec<usize> {
    let names = file.iter().filter_map(|part| Path::new(part).file_stem()?.to_str());
    if names.into_iter().any(|name| UNSAFE_MODULES.contains(&name)) {
        return Vec::new();
    }
    let word = |c: char| c.is_alphanumeric() || c == '_';
    let holds = |line: &str| line.split(|c| !word(c)).any(|word| word == "unsafe");
    let lines = code_only(source);
    lines.lines().zip(1..).filter(|(line, _)| holds(line)).map(|(_, number)| number).collect()
}

/// Returns whether the root of a crate forbids unsafe code.
fn forbids_unsafe(source: &str) -> bool {
    let code: String = code_only(source).split_whitespace().collect();
    code.contains("#![forbid(unsafe_code)]")
}

/// Returns the source with comments, strings and characters replaced by blanks; lines keep their positions.
fn code_only(source: &str) -> String {
    let mut code = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(next) = rest.chars().next() {
        let skip = comment(rest).or_else(|| raw_string(rest)).or_else(|| quoted(rest));
        let (taken, left) = rest.split_at(skip.unwrap_or(next.len_utf8()));
        code.extend(taken.chars().map(|c| if skip.is_none() || c == '\n' { c } else { ' ' }));
        rest = left;
    }
    code
}

/// Returns the length of the comment at the start of the text.
fn comment(text: &str) -> Option<usize> {
    if text.starts_with("//") {
        return Some(text.find('\n').unwrap_or(text.len()));
    }
    let (mut depth, mut at) = (0, 0);
    while at < text.len() {
        match text.as_bytes().get(at..at + 2) {
            Some(b"/*") => (depth, at) = (depth + 1, at + 2),
            _ if depth == 0 => return None,
            Some(b"*/") => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            return Some(at);
        }
    }
    Some(text.len())
}

/// Returns the length of the raw string at the start of the text.
fn raw_string(text: &str) -> Option<usize> {
    let body = text.strip_prefix('r')?;
    let hashes = body.bytes().take_while(|b| *b == b'#').count();
    let body = body[hashes..].strip_prefix('"')?;
    let end = format!("\"{}", "#".repeat(hashes));
    let start = text.len() - body.len();
    Some(body.find(&end).map_or(text.len(), |at| start + at + end.len()))
}

/// Returns the length of the string or character literal at the start of the text; a lifetime is neither.
fn quoted(text: &str) -> Option<usize> {
    let quote = text.chars().next().filter(|c| matches!(c, '"' | '\''))?;
    let mut inner = text[1..].chars();
    let (first, second) = (inner.next()?, inner.next());
    if quote == '\'' && first != '\\' {
        return (second == Some('\'')).then_some(2 + first.len_utf8());
    }
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            _ if c == quote => return Some(at + 1),
            _ => {}
        }
    }
    Some(text.len())
}

fn workspace_root() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
    root.expect("hydra-core is in the workspace's root").to_owned()
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn manifest(path: &Path) -> Table {
    read(path).parse().unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn workspace_dependencies() -> Table {
    let manifest = manifest(&workspace_root().join("Cargo.toml"));
    manifest["workspace"]["dependencies"].as_table().expect("a table of dependencies").clone()
}

/// Returns every Rust source file in `dir`, sorted by name.
fn sources(dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("a directory entry").path()).collect();
    paths.sort_unstable();
    let nested = |path: PathBuf| match path.is_dir() {
        true => sources(&path),
        false => Vec::from_iter(path.extension().is_some_and(|e| e == "rs").then_some(path)),
    };
    paths.into_iter().flat_map(nested).collect()
}

#[test]
fn every_member_has_dependencies_and_the_workspace_lints() {
    let root = workspace_root();
    let workspace = manifest(&root.join("Cargo.toml"));
    let members = workspace["workspace"]["members"].as_array().expect("a list of members");
    let mut members: Vec<&str> = members.iter().filter_map(Value::as_str).collect();
    let mut listed: Vec<&str> = DEPENDENCIES.iter().map(|(name, _)| *name).collect();
    members.sort_unstable();
    listed.sort_unstable();
    assert_eq!(members, listed);
    for name in members {
        let manifest = manifest(&root.join(name).join("Cargo.toml"));
        let inherits = manifest.get("lints").and_then(|lints| lints.get("workspace")?.as_bool());
        assert_eq!(inherits, Some(true), "`{name}` needs `lints.workspace = true`");
    }
}

#[test]
fn the_manifests_have_only_allowed_dependencies() {
    let (root, workspace) = (workspace_root(), workspace_dependencies());
    let of =
        |name: &str| forbidden_dependencies(name, &manifest(&root.join(name).join("Cargo.toml")), &workspace);
    let broken: Vec<String> = DEPENDENCIES.iter().flat_map(|(name, _)| of(name)).collect();
    assert!(broken.is_empty(), "{broken:#?}");
}

#[test]
fn the_dependencies_have_no_cycle() {
    // Each crate depends only on crates that are listed before it.
    let mut reached: Vec<&str> = Vec::new();
    for (name, imports) in DEPENDENCIES {
        let missing: Vec<_> = imports.iter().filter(|import| !reached.contains(import)).collect();
        assert!(missing.is_empty(), "`{name}` is listed before {missing:?}");
        reached.push(name);
    }
}

#[test]
fn a_forbidden_dependency_is_found_in_every_form() {
    let workspace: Table = r#"
        hydra-engine = { path = "hydra-engine" }
        driver = { path = "hydra-engine", package = "hydra-engine" }
    "#
    .parse()
    .unwrap();
    let hidden = [
        "[dependencies]\nhydra-engine.workspace = true",
        "[dependencies]\nhydra-engine = { path = \"../hydra-engine\", optional = true }",
        "[dependencies]\ndriver = { path = \"../hydra-engine\", package = \"hydra-engine\" }",
        "[dependencies]\ndriver.workspace = true",
        "[build-dependencies]\nhydra-engine.workspace = true",
        "[target.'cfg(unix)'.dependencies]\nhydra-engine.workspace = true",
    ];
    for text in hidden {
        let broken = forbidden_dependencies("hydra-core", &text.parse().unwrap(), &workspace);
        assert_eq!(broken.len(), 1, "{text}");
        assert!(broken[0].starts_with("`hydra-core` depends on `hydra-engine`"), "{}", broken[0]);
        assert!(
            forbidden_dependencies("hydra-bench", &text.parse().unwrap(), &workspace).is_empty(),
            "{text}"
        );
    }
}

#[test]
fn dev_dependencies_are_free_and_unknown_crates_are_not() {
    let text = "[dependencies]\nserde = \"1\"\n[dev-dependencies]\nhydra-engine = { path = \"..\" }";
    let free: Table = text.parse().unwrap();
    assert!(forbidden_dependencies("hydra-core", &free, &Table::new()).is_empty());
    assert_eq!(forbidden_dependencies("hydra-new", &free, &Table::new()).len(), 1);
}

#[test]
fn scheduler_and_search_know_neither_tensors_nor_threads() {
    for forbidden in ["burn", "burn-flex", "rayon", "crossbeam-channel"] {
        let text: Table = format!("[dependencies]\n{forbidden} = \"1\"").parse().unwrap();
        assert_eq!(forbidden_dependencies("hydra-sched", &text, &Table::new()).len(), 1, "{forbidden}");
        assert_eq!(forbidden_dependencies("hydra-search", &text, &Table::new()).len(), 1, "{forbidden}");
        assert!(forbidden_dependencies("hydra-engine", &text, &Table::new()).is_empty(), "{forbidden}");
    }
}

#[test]
fn the_command_line_knows_no_python() {
    let text: Table = "[dependencies]\npyo3 = \"1\"".parse().unwrap();
    assert_eq!(forbidden_dependencies("hydra-bench", &text, &Table::new()).len(), 1);
    assert!(forbidden_dependencies("hydra-py", &text, &Table::new()).is_empty());
}

#[test]
fn the_safe_crates_forbid_unsafe_code() {
    for name in SAFE {
        let src = workspace_root().join(name).join("src");
        let roots = ["lib.rs", "main.rs"].map(|root| src.join(root));
        let roots: Vec<&PathBuf> = roots.iter().filter(|root| root.is_file()).collect();
        assert!(!roots.is_empty(), "`{name}` has neither a lib.rs nor a main.rs");
        for root in roots {
            assert!(forbids_unsafe(&read(root)), "{} lacks `#![forbid(unsafe_code)]`", root.display());
        }
    }
}

#[test]
fn unsafe_stands_only_in_modules_named_for_it() {
    let root = workspace_root();
    let mut seen = 0;
    for (name, _) in DEPENDENCIES {
        for path in sources(&root.join(name)) {
            let file = path.strip_prefix(&root).expect("a source is in the workspace");
            let lines = misplaced_unsafe(file, &read(&path));
            assert!(lines.is_empty(), "{}: `unsafe` in lines {lines:?}", file.display());
            seen += 1;
        }
    }
    assert!(seen > DEPENDENCIES.len(), "only {seen} source files were found");
}

#[test]
fn misplaced_unsafe_code_is_found_and_words_are_not() {
    let found = |source: &str| misplaced_unsafe(Path::new("hydra-spill/src/store.rs"), source);
    assert_eq!(found("fn a() {}\nunsafe fn b() {}\n"), [2]);
    assert_eq!(found("/* one\n two */ let x = unsafe { y };"), [2]);
    assert_eq!(found("let c = '\"'; unsafe { f::<'static>() } // '"), [1]);
    assert_eq!(found("let s = \"\\\"\"; unsafe {}"), [1]);
    assert_eq!(found("let s = r#\"a \" b\"#; unsafe {}"), [1]);
    assert_eq!(found("let s = b'\\''; unsafe {}"), [1]);
    assert!(found("// unsafe\n/* /* unsafe */ unsafe */\nlet s = \"unsafe\";").is_empty());
    assert!(found("let s = r##\"\"# unsafe\"##; let unsafe_code = 'é';").is_empty());
}

#[test]
fn unsafe_modules_are_recognised_by_their_path() {
    let lines = |file: &str| misplaced_unsafe(Path::new(file), "unsafe {}").len();
    assert_eq!(lines("hydra-spill/src/alloc.rs"), 0);
    assert_eq!(lines("hydra-spill/src/link/cuda.rs"), 0);
    assert_eq!(lines("hydra-models/src/ops/kernels/gelu.rs"), 0);
    assert_eq!(lines("hydra-models/src/ops/gelu.rs"), 1);
    assert_eq!(lines("hydra-spill/src/allocate.rs"), 1);
}

#[test]
fn a_forbidding_attribute_counts_only_as_code() {
    assert!(forbids_unsafe("//! Docs.\n#![forbid( unsafe_code )]\nmod a;"));
    assert!(!forbids_unsafe("//! Docs say #![forbid(unsafe_code)].\nmod a;"));
    assert!(!forbids_unsafe("#![deny(unsafe_code)]"));
}
