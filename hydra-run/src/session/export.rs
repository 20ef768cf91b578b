//! Writes what an export makes under a temporary name, so that its final name has a complete model or nothing.

use crate::run_dir::paths::could_not;
use crate::terminal::Usage;
use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use hydra_core::{Chain, ParamBufferReader, UNFINISHED, WeightError};
use hydra_engine::StopFlag;
use hydra_models::weights::StoredWeights;
use std::fs;
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The stored weights of a chain, until a stop is requested: then they cannot be read, so that the writer of the model ends.
pub struct UntilStopped<'a> {
    chain: &'a Chain,
    weights: StoredWeights<'a>,
    stop: &'a StopFlag,
}

impl<'a> UntilStopped<'a> {
    /// The weights of `chain`, which cannot be read after the flag is set.
    pub fn new(chain: &'a Chain, stop: &'a StopFlag) -> Self {
        Self { chain, weights: StoredWeights::new(chain, 0), stop }
    }

    fn check(&self, buffer: usize) -> Result<(), WeightError> {
        if !self.stop.is_stopped() {
            return Ok(());
        }
        let (chain, source) = (self.chain.name().to_owned(), io::Error::other("the export was interrupted"));
        Err(WeightError::ParamBuffer { chain, buffer, source: source.into() })
    }
}

impl ParamBufferReader for UntilStopped<'_> {
    fn buffer(&self, buffer: usize) -> Result<Bytes, WeightError> {
        self.check(buffer)?;
        self.weights.buffer(buffer)
    }

    fn part(&self, buffer: usize, elements: Range<usize>) -> Result<Bytes, WeightError> {
        self.check(buffer)?;
        self.weights.part(buffer, elements)
    }
}

/// Calls `write` with a directory of a temporary name, and renames it to `out` when that succeeds. If it fails, nothing remains.
/// `out` does not exist, or is an empty directory.
pub fn new_directory(out: &Path, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let out = &plain(out)?;
    check_new(out)?;
    let parent = out.parent().filter(|parent| !parent.as_os_str().is_empty());
    parent.map_or(Ok(()), fs::create_dir_all).with_context(|| could_not(out, "written"))?;
    let mut name = out.as_os_str().to_owned();
    name.push(UNFINISHED);
    let path = PathBuf::from(name);
    match fs::create_dir(&path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => bail!(
            "`{}` is left over from an export that was killed, or another export writes it: remove it, or pass another --out",
            path.display()
        ),
        made => made.with_context(|| could_not(&path, "created"))?,
    }
    let part = Unfinished { path, renamed: false };
    write(&part.path)?;
    part.rename(out).with_context(|| could_not(out, "written"))
}

/// The path without a slash at its end and without links, to which the suffix of a temporary name can be added.
fn plain(out: &Path) -> Result<PathBuf> {
    let path = if out.exists() { fs::canonicalize(out) } else { std::path::absolute(out) };
    let path: PathBuf = path.with_context(|| could_not(out, "written"))?.components().collect();
    match path.file_name() {
        Some(_) => Ok(path),
        None => {
            bail!(Usage::new(format!("--out `{}` must name a directory that does not exist", out.display())))
        }
    }
}

/// Refuses a directory that has files, and a file.
fn check_new(out: &Path) -> Result<()> {
    let shown = out.display();
    match fs::read_dir(out) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(_) if out.is_file() => {
            bail!(Usage::new(format!("--out `{shown}` is a file: pass a directory that does not exist")))
        }
        Err(error) => Err(error).with_context(|| could_not(out, "read")),
        Ok(mut entries) => match entries.next() {
            None => Ok(()),
            Some(_) => bail!(Usage::new(format!(
                "--out `{shown}` is not empty: pass a directory that does not exist, or remove its files"
            ))),
        },
    }
}

/// A directory that is removed when dropped, also by a panic, unless it was renamed.
struct Unfinished {
    path: PathBuf,
    renamed: bool,
}

impl Unfinished {
    fn rename(mut self, to: &Path) -> std::io::Result<()> {
        // Only Unix replaces an empty directory.
        if to.is_dir() {
            fs::remove_dir(to)?;
        }
        fs::rename(&self.path, to)?;
        self.renamed = true;
        Ok(())
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if !self.renamed {
            // The error that is returned matters more than one of this.
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tempfile::TempDir;

    #[test]
    fn an_export_that_fails_leaves_nothing() {
        let root = TempDir::new().unwrap();
        let out = root.path().join("a/b");
        let half = |dir: &Path| {
            fs::write(dir.join("one"), "1")?;
            bail!("the disk is full")
        };
        assert_eq!(new_directory(&out, half).unwrap_err().to_string(), "the disk is full");
        let panics = || new_directory(&out, |_| panic!("a writer's"));
        std::panic::catch_unwind(panics).unwrap_err();
        assert_eq!(fs::read_dir(root.path().join("a")).unwrap().count(), 0);
        fs::create_dir(&out).unwrap();
        new_directory(&out, |dir| Ok(fs::write(dir.join("one"), "1")?)).unwrap();
        assert_eq!(fs::read_to_string(out.join("one")).unwrap(), "1");
        let slash = PathBuf::from(format!("{}/", root.path().join("new").display()));
        new_directory(&slash, |dir| Ok(fs::write(dir.join("one"), "1")?)).unwrap();
        assert!(slash.join("one").exists());
        let error = new_directory(&out, |_| Ok(())).unwrap_err();
        assert!(error.is::<Usage>() && error.to_string().contains("is not empty"), "{error}");
        let other = root.path().join("c");
        fs::create_dir(root.path().join("c.part")).unwrap();
        let error = new_directory(&other, |_| Ok(())).unwrap_err().to_string();
        assert!(error.contains("c.part` is left over") && root.path().join("c.part").is_dir(), "{error}");
        let error = new_directory(&out.join("one"), |_| Ok(())).unwrap_err().to_string();
        assert!(error.contains("is a file"), "{error}");
    }
}
