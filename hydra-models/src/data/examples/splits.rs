//! Finds a directory's row files by split.

use super::rows::named;
use crate::data::{DataError, Split, wikitext};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Metadata files with the extension of a row file.
const OTHERS: [&str; 5] =
    ["config.json", "dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json"];

/// The data folder of a Hugging Face Hub repository.
const HUB: &str = "data";

/// The row files of a directory.
pub(super) struct SplitFiles {
    /// The files of each split; the shards of one are in order.
    pub(super) splits: [Vec<PathBuf>; 3],
    /// Row files that belong to no split, and texts of a split.
    pub(super) unread: Vec<PathBuf>,
}

/// A shard of a split: its index, counted from zero, and the number of shards.
type Shard = (usize, usize);

/// A split's files that belong together: their folder, and their names without shard numbers.
type FileGroup = (PathBuf, String);

/// A split's files by group.
type FileGroups = BTreeMap<FileGroup, Vec<(Option<Shard>, PathBuf)>>;

/// Finds the row files in a directory and in its folder `data`.
///
/// # Errors
/// Several files match one split, or a shard is missing.
pub(super) fn find(directory: &Path) -> Result<SplitFiles, DataError> {
    let mut groups: [FileGroups; 3] = Default::default();
    let mut unread = Vec::new();
    for path in files_in(directory).into_iter().chain(files_in(&directory.join(HUB))) {
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
        let Some(found) = named(name).filter(|_| !OTHERS.contains(&name)) else { continue };
        let (stem, shard) = shard_of(found.stem);
        match Split::ALL.into_iter().find(|split| split.stems().contains(&stem)) {
            Some(split) => {
                let group = format!("{stem}{}{}", &name[found.stem.len()..], shard.map_or(0, |(_, of)| of));
                let folder = path.parent().unwrap_or(directory).to_owned();
                groups[split as usize].entry((folder, group)).or_default().push((shard, path));
            }
            None => unread.push(path),
        }
    }
    let mut splits: [Vec<PathBuf>; 3] = Default::default();
    for (split, groups) in Split::ALL.into_iter().zip(groups) {
        splits[split as usize] = one_of(directory, split, groups.into_values().collect())?;
    }
    if splits.iter().any(|files| !files.is_empty()) {
        let texts = Split::ALL.into_iter().flat_map(wikitext::file_names);
        unread.extend(texts.map(|name| directory.join(name)).filter(|path| path.is_file()));
    }
    Ok(SplitFiles { splits, unread })
}

/// The files of a split's single group.
fn one_of(
    directory: &Path,
    split: Split,
    groups: Vec<Vec<(Option<Shard>, PathBuf)>>,
) -> Result<Vec<PathBuf>, DataError> {
    let texts = split.stems().iter().map(|stem| directory.join(format!("{stem}.txt")));
    let texts = texts.filter(|path| path.is_file() && !groups.is_empty());
    let found: Vec<PathBuf> = groups.iter().map(|group| group[0].1.clone()).chain(texts).collect();
    if found.len() > 1 {
        return Err(DataError::SplitTwice { split, found });
    }
    let Some(mut group) = groups.into_iter().next() else { return Ok(Vec::new()) };
    group.sort();
    if let (Some((_, count)), path) = group[0].clone() {
        let there: Vec<usize> = group.iter().filter_map(|(shard, _)| Some(shard.as_ref()?.0)).collect();
        if let Some(missing) = (0..count).find(|part| !there.contains(part)) {
            return Err(DataError::ShardMissing { path, count, missing });
        }
        if group.len() > count {
            let found = group.into_iter().map(|(_, path)| path).collect();
            return Err(DataError::SplitTwice { split, found });
        }
    }
    Ok(group.into_iter().map(|(_, path)| path).collect())
}

/// The files of a folder, sorted by name.
pub(in crate::data) fn files_in(folder: &Path) -> Vec<PathBuf> {
    let entries = folder.read_dir().into_iter().flatten().flatten();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(|path| path.is_file()).collect();
    files.sort();
    files
}

/// The name of a shard without its number, as in `train-00000-of-00002` or, with a hash appended,
/// `train-00000-of-00002-0123456789abcdef`.
fn shard_of(stem: &str) -> (&str, Option<Shard>) {
    let parts: Vec<&str> = stem.rsplitn(5, '-').collect();
    let of = |from: usize| {
        let [count, "of", part, ..] = parts.get(from..)? else { return None };
        let number = |text: &str| (text.len() == 5).then(|| text.parse::<usize>().ok()).flatten();
        let (part, count) = (number(part)?, number(count)?);
        let behind: usize = parts[..from + 3].iter().map(|part| part.len() + 1).sum();
        Some((stem.get(..stem.len() - behind)?, Some((part, count))))
    };
    of(0).or_else(|| of(1)).unwrap_or((stem, None))
}

/// The row files in a directory that belong to no split.
pub(in crate::data) fn in_no_split(directory: &Path) -> Vec<PathBuf> {
    find(directory).map_or_else(|_| Vec::new(), |files| files.unread)
}

/// The file names that a split may have, for messages.
pub(in crate::data) fn looked_for(split: Split) -> Vec<&'static str> {
    let names: &[&str] = match split {
        Split::Train => &["train.jsonl"],
        Split::Validation => &["validation.jsonl", "valid.jsonl", "val.jsonl", "dev.jsonl", "eval.jsonl"],
        Split::Test => &["test.jsonl"],
    };
    [names, &["or with the ending json, csv, tsv or parquet"]].concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn found(names: &[&str]) -> Result<SplitFiles, String> {
        let dir = tempfile::tempdir().unwrap();
        for name in names {
            fs::create_dir_all(dir.path().join(name).parent().unwrap()).unwrap();
            fs::write(dir.path().join(name), "").unwrap();
        }
        let found = find(dir.path()).map_err(|error| error.to_string())?;
        let short = |path: &PathBuf| path.strip_prefix(dir.path()).unwrap().to_owned();
        let splits = found.splits.map(|files| files.iter().map(short).collect());
        Ok(SplitFiles { splits, unread: found.unread.iter().map(short).collect() })
    }

    #[test]
    fn splits_have_several_names() {
        for name in ["validation", "valid", "val", "dev", "eval"] {
            for ending in ["jsonl", "json", "csv", "tsv", "parquet", "jsonl.gz", "ndjson"] {
                let name = format!("{name}.{ending}");
                let files =
                    found(&["train.csv", &name, "test.json", "notes.md", "dataset_info.json"]).unwrap();
                assert_eq!(files.splits.map(|files| files.len()), [1, 1, 1], "{name}");
                assert!(files.unread.is_empty());
            }
        }
        let files = found(&["train.jsonl", "extra.jsonl", "data/valdation.csv"]).unwrap();
        assert_eq!(files.unread, [Path::new("extra.jsonl"), Path::new("data/valdation.csv")]);
    }

    #[test]
    fn texts_of_a_split_beside_rows_are_unread() {
        let files = found(&["train.jsonl", "validation.txt", "wiki.train.raw", "notes.txt"]).unwrap();
        assert_eq!(files.unread, [Path::new("wiki.train.raw"), Path::new("validation.txt")]);
        assert!(found(&["train.txt", "validation.txt"]).unwrap().unread.is_empty(), "without rows");
    }

    #[test]
    fn parts_are_in_order_as_the_hub_names_them() {
        let files = found(&[
            "data/train-00001-of-00002-0123456789abcdef.parquet",
            "data/train-00000-of-00002-fedcba9876543210.parquet",
            "data/test-00000-of-00001.parquet",
        ]);
        let files = files.unwrap().splits;
        let first = files[0][0].to_str().unwrap();
        assert!(files[0].len() == 2 && first.starts_with("data/train-00000-of-00002"), "{first}");
        assert_eq!(files[2], [Path::new("data/test-00000-of-00001.parquet")]);
        let error = found(&["train-00000-of-00003.parquet", "train-00002-of-00003.parquet"]).err().unwrap();
        assert!(
            error.contains("one of 3 files of a split") && error.contains("file 1 is missing"),
            "{error}"
        );
    }

    #[test]
    fn a_split_that_could_be_several_files_is_refused() {
        for names in [
            ["train.csv", "train.jsonl"],
            ["train.jsonl", "data/train.jsonl"],
            ["train.jsonl", "train.txt"],
            ["val.jsonl", "dev.jsonl"],
            ["train-00000-of-00001.parquet", "train-00000-of-00001-0123456789abcdef.parquet"],
        ] {
            let error = found(&names).err().unwrap();
            assert!(error.contains("several files match the") && error.contains(names[1]), "{error}");
        }
    }
}
