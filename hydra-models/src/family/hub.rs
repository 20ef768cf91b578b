//! Finds models in the local Hugging Face cache by their names on the hub: `org/name`, or `org/name@revision`.
//!
//! The layout is that of `huggingface_hub`: `models--org--name/refs/REVISION` holds a commit, and `snapshots/COMMIT`
//! the files. Nothing is downloaded.

use crate::ModelError;
use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

/// The default revision.
const MAIN: &str = "main";
/// The hub's maximum length of a repository name.
const LONGEST: usize = 96;

/// The directory of a model: `name` if it is a directory, else the snapshot in the Hugging Face cache of the repository
/// `org/name`, or of its revision `org/name@revision` (a branch, a tag or a commit).
///
/// The cache is located as by `huggingface_hub`: `HF_HUB_CACHE`, else `HUGGINGFACE_HUB_CACHE`, else `hub` in `HF_HOME`,
/// which is `~/.cache/huggingface` by default.
///
/// # Errors
/// [`ModelError::NotCached`], with the command that downloads the model, or [`ModelError::NoDirectory`] if the name
/// cannot be a repository either.
pub fn directory(name: &str) -> Result<PathBuf, ModelError> {
    let path = Path::new(name);
    if path.is_dir() {
        return Ok(path.to_owned());
    }
    let unknown = || ModelError::NoDirectory { found: name.to_owned() };
    let repository = if path.exists() { None } else { Repository::named(name) };
    Cache::of_machine().snapshot(&repository.ok_or_else(unknown)?)
}

/// A repository on the hub, at a revision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Repository {
    name: String,
    revision: Option<String>,
}

impl Repository {
    /// Parses a repository name; `None` if it cannot be one.
    pub(super) fn named(text: &str) -> Option<Self> {
        let (name, revision) = match text.split_once('@') {
            Some((name, revision)) => (name, Some(revision)),
            None => (text, None),
        };
        let is_part = |part: &str| {
            let inner = |c: char| c.is_alphanumeric() || "_-.".contains(c);
            let outer = |c: char| c.is_alphanumeric() || c == '_';
            part.chars().all(inner) && part.starts_with(outer) && part.ends_with(outer)
        };
        let parts: Vec<&str> = name.split('/').collect();
        let fits = parts.len() <= 2 && parts.iter().all(|part| is_part(part)) && name.len() <= LONGEST;
        let is_step = |step: &str| !step.is_empty() && step != "." && step != ".." && !step.contains('\\');
        let has_revision = revision.is_none_or(|revision| revision.split('/').all(is_step));
        (fits && has_revision && !name.contains("--") && !name.contains(".."))
            .then(|| Self { name: name.to_owned(), revision: revision.map(str::to_owned) })
    }

    /// Returns whether the name has an owner (organization or user), unlike presets and local files.
    pub(super) fn has_owner(&self) -> bool {
        self.name.contains('/')
    }

    /// The command that downloads the repository into the cache.
    pub(super) fn download(&self) -> String {
        let revision = self.revision.iter().map(|revision| format!(" --revision {revision}"));
        format!("hf download {}{}", self.name, revision.collect::<String>())
    }

    /// Converts an error of its snapshot; if files are missing, adds the command that downloads them.
    pub(super) fn error(&self, directory: &Path, error: ModelError) -> ModelError {
        let is_missing = match &error {
            ModelError::NoWeights { .. } | ModelError::ShardMissing { .. } => true,
            ModelError::Read { source, .. } => source.kind() == std::io::ErrorKind::NotFound,
            _ => false,
        };
        if !is_missing {
            return error;
        }
        ModelError::Incomplete {
            name: self.name.clone(),
            directory: directory.to_owned(),
            download: self.download(),
            source: Box::new(error),
        }
    }
}

/// The directory of the Hugging Face cache; `None` if the system has no home directory.
#[derive(Debug)]
pub(super) struct Cache(Option<PathBuf>);

impl Cache {
    /// The current user's cache.
    pub(super) fn of_machine() -> Self {
        Self::of(&|name| env::var_os(name))
    }

    /// Locates the cache by environment variables, in the order of `huggingface_hub`.
    fn of(variable: &dyn Fn(&str) -> Option<OsString>) -> Self {
        let given = |name: &str| variable(name).filter(|value| !value.is_empty());
        let path = |name: &str| given(name).map(|value| expanded(value, variable));
        let cache = || path("XDG_CACHE_HOME").or_else(|| Some(home(variable)?.join(".cache")));
        let in_home = || path("HF_HOME").or_else(|| Some(cache()?.join("huggingface")));
        let hub = path("HF_HUB_CACHE").or_else(|| path("HUGGINGFACE_HUB_CACHE"));
        Self(hub.or_else(|| Some(in_home()?.join("hub"))))
    }

    /// The cache in this directory.
    #[cfg(test)]
    pub(super) fn at(directory: &Path) -> Self {
        Self(Some(directory.to_owned()))
    }

    /// The directory of a repository's files.
    ///
    /// # Errors
    /// [`ModelError::NotCached`].
    pub(super) fn snapshot(&self, of: &Repository) -> Result<PathBuf, ModelError> {
        let cache = self.0.clone().unwrap_or_default();
        let of_model = cache.join(format!("models--{}", of.name.replace('/', "--")));
        let revision = of.revision.as_deref().unwrap_or(MAIN);
        let commit = fs::read_to_string(of_model.join("refs").join(revision));
        let commit = commit.map_or_else(|_| revision.to_owned(), |commit| commit.trim().to_owned());
        let snapshots = of_model.join("snapshots");
        let directory = snapshots.join(&commit);
        if !commit.is_empty() && !commit.contains("..") && directory.is_dir() {
            return Ok(directory);
        }
        let entries = fs::read_dir(snapshots).into_iter().flatten().flatten();
        let mut commits: Vec<String> =
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        commits.sort_unstable();
        Err(ModelError::NotCached {
            name: of.name.clone(),
            revision: revision.to_owned(),
            cache,
            commits: commits.into(),
            download: of.download(),
        })
    }
}

fn home(variable: &dyn Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    variable("HOME").filter(|home| !home.is_empty()).map(PathBuf::from)
}

/// Expands a leading `~` and environment variables in a path.
fn expanded(path: OsString, variable: &dyn Fn(&str) -> Option<OsString>) -> PathBuf {
    let Ok(text) = path.clone().into_string() else { return path.into() };
    let (mut rest, mut out) = (text.as_str(), String::new());
    while let Some((before, after)) = rest.split_once('$') {
        out += before;
        let (name, end) = match after.strip_prefix('{').and_then(|after| after.split_once('}')) {
            Some(named) => named,
            None => {
                after.split_at(after.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(after.len()))
            }
        };
        match variable(name).and_then(|value| value.into_string().ok()) {
            Some(value) => out += &value,
            // An unknown variable is left unexpanded.
            None => out += &rest[before.len()..rest.len() - end.len()],
        }
        rest = end;
    }
    out += rest;
    let below = out.strip_prefix('~').filter(|below| below.is_empty() || below.starts_with('/'));
    match below.zip(home(variable)) {
        Some((below, home)) => home.join(below.trim_start_matches('/')),
        None => out.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The cache for these variables.
    fn cache(variables: &[(&str, &str)]) -> PathBuf {
        let find = |name: &str| {
            let found = variables.iter().find(|(of, _)| *of == name);
            found.map(|(_, value)| OsString::from(value))
        };
        Cache::of(&find).0.unwrap()
    }

    /// The order of `huggingface_hub/constants.py`, version 2.4.
    #[test]
    fn the_cache_is_where_huggingface_hub_has_it() {
        let home = ("HOME", "/home/me");
        let of = |more: &[(&str, &str)]| cache(&[&[home], more].concat()).display().to_string();
        assert_eq!(of(&[]), "/home/me/.cache/huggingface/hub");
        assert_eq!(of(&[("XDG_CACHE_HOME", "/x")]), "/x/huggingface/hub");
        assert_eq!(of(&[("XDG_CACHE_HOME", "/x"), ("HF_HOME", "/hf")]), "/hf/hub");
        assert_eq!(of(&[("HF_HOME", "/hf"), ("HUGGINGFACE_HUB_CACHE", "/old")]), "/old");
        assert_eq!(of(&[("HF_HUB_CACHE", "/new"), ("HUGGINGFACE_HUB_CACHE", "/old")]), "/new");
        assert_eq!(of(&[("HF_HOME", "~/hf")]), "/home/me/hf/hub");
        assert_eq!(of(&[("HF_HUB_CACHE", "$HOME/a/${NONE}/b")]), "/home/me/a/${NONE}/b");
        assert_eq!(of(&[("HF_HOME", "")]), "/home/me/.cache/huggingface/hub");
        assert!(Cache::of(&|_| None).0.is_none());
    }

    #[test]
    fn names_of_repositories_are_those_of_the_hub() {
        let named = |text: &str| Repository::named(text).map(|of| (of.name, of.revision));
        let of = |name: &str, revision: Option<&str>| Some((name.to_owned(), revision.map(str::to_owned)));
        assert_eq!(named("org/name"), of("org/name", None));
        assert_eq!(named("gpt2"), of("gpt2", None));
        assert_eq!(named("Qwen/Qwen2.5-0.5B@refs/pr/3"), of("Qwen/Qwen2.5-0.5B", Some("refs/pr/3")));
        for none in [
            "",
            "a/b/c",
            "./a",
            "../a",
            "/a",
            "a/",
            "a--b/c",
            "a/b..c",
            "-a/b",
            "a/b@",
            "a/b@../../x",
            "a b/c",
        ] {
            assert_eq!(named(none), None, "{none}");
        }
    }

    #[test]
    fn a_snapshot_is_found_by_branch_tag_and_commit() {
        let root = tempfile::tempdir().unwrap();
        let of_model = root.path().join("models--org--name");
        let [one, two] = ["1".repeat(40), "2".repeat(40)];
        for (path, text) in [
            ("refs/main", &one),
            ("refs/refs/pr/3", &two),
            ("refs/gone", &"3".repeat(40)),
            ("refs/up", &"..".to_owned()),
        ] {
            let file = of_model.join(path);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, format!("{text}\n")).unwrap();
        }
        for commit in [&one, &two] {
            fs::create_dir_all(of_model.join("snapshots").join(commit)).unwrap();
        }
        let cache = Cache(Some(root.path().to_owned()));
        let found = |name: &str| cache.snapshot(&Repository::named(name).unwrap());
        let commit = |name: &str| found(name).unwrap().file_name().unwrap().to_str().unwrap().to_owned();
        assert_eq!(commit("org/name"), one);
        assert_eq!(
            [commit("org/name@refs/pr/3"), commit(&format!("org/name@{two}"))],
            [two.clone(), two.clone()]
        );
        for (name, part) in [
            ("org/name@gone", "hf download org/name --revision gone"),
            ("org/name@up", "hf download org/name --revision up"),
            ("org/other", "`hf download org/other`"),
        ] {
            let error = found(name).unwrap_err().to_string();
            assert!(error.contains(part) && error.contains(root.path().to_str().unwrap()), "{error}");
            assert_eq!(error.contains(&one), name.starts_with("org/name"), "what there is: {error}");
        }
    }

    #[test]
    fn a_directory_wins_over_the_cache() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(directory(root.path().to_str().unwrap()).unwrap(), root.path());
        let error = directory("no/such/path").unwrap_err().to_string();
        assert!(error.contains("`no/such/path`"), "{error}");
        let file = root.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(matches!(directory(file.to_str().unwrap()), Err(ModelError::NoDirectory { .. })));
    }
}
