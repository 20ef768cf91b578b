//! Class folders: a directory with one per class, or with a folder per split that contains them.

use super::{DataError, Split};
use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

/// The files that class folders contain.
#[derive(Clone, Copy)]
pub(super) struct ItemFiles {
    /// Their plural name in messages.
    pub(super) name: &'static str,
    /// Returns whether a file is one.
    pub(super) include: fn(&Path) -> bool,
    /// Whether one outside the class folders is an error; otherwise it is not read.
    pub(super) only_in_classes: bool,
    /// The error for a folder without class folders.
    pub(super) missing: fn(PathBuf) -> DataError,
}

/// The items of each class.
pub(super) type ByClass<T> = Vec<Vec<T>>;

/// The splits that were taken from the training data, a tenth of each class, because the data lacks them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeldOut {
    /// None.
    Nothing,
    /// Validation: the last tenth.
    Validation,
    /// Test: the last tenth; validation: the tenth before it.
    ValidationAndTest,
}

/// Files and folders in a directory of class folders that are not read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unread {
    /// The number of files by extension.
    endings: BTreeMap<String, usize>,
    first: Option<PathBuf>,
    /// Folders other than those of the splits.
    folders: Vec<String>,
}

impl Unread {
    /// The number of files that are not read because their extension is another one.
    pub fn files(&self) -> usize {
        self.endings.values().sum()
    }

    /// Folders that match no split, or a split that already has another folder.
    pub fn folders(&self) -> &[String] {
        &self.folders
    }

    /// Records the directory's entries other than the splits' folders.
    fn record_extra_entries(&mut self, directory: &Path) -> Result<(), DataError> {
        let splits = Split::ALL.map(|split| of_split(directory, split));
        for path in entries(directory)? {
            if !path.is_dir() {
                self.add(path);
            } else if !splits.iter().flatten().any(|split| *split == path) {
                self.folders.extend(path.file_name().map(|name| name.to_string_lossy().into_owned()));
            }
        }
        Ok(())
    }

    fn add(&mut self, path: PathBuf) {
        let ending = path.extension().map(|ending| format!(".{}", ending.to_string_lossy().to_lowercase()));
        *self.endings.entry(ending.unwrap_or_else(|| "without an extension".to_owned())).or_default() += 1;
        self.first.get_or_insert(path);
    }
}

/// Counts by extension, with an example.
impl fmt::Display for Unread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts: Vec<String> =
            self.endings.iter().map(|(ending, count)| format!("{count} {ending}")).collect();
        write!(f, "{}", counts.join(", "))?;
        self.first.iter().try_for_each(|first| write!(f, ", such as `{}`", first.display()))
    }
}

/// Folder names accepted for a split.
pub(super) fn names(split: Split) -> &'static [&'static str] {
    match split {
        Split::Train => &["train"],
        Split::Validation => &["validation", "valid", "val", "dev", "eval"],
        Split::Test => &["test"],
    }
}

/// The folder of a split, if it exists.
pub(super) fn of_split(directory: &Path, split: Split) -> Option<PathBuf> {
    names(split).iter().map(|name| directory.join(name)).find(|path| path.is_dir())
}

/// The items in the class folders of a folder by class name, sorted by file name within a class; other files are
/// recorded in `unread`.
pub(super) fn classes(
    folder: &Path,
    items: &ItemFiles,
    unread: &mut Unread,
) -> Result<BTreeMap<String, Vec<PathBuf>>, DataError> {
    let mut classes = BTreeMap::new();
    for path in entries(folder)? {
        if !path.is_dir() {
            if items.only_in_classes && (items.include)(&path) {
                return Err(DataError::NoClass { path });
            }
            unread.add(path);
            continue;
        }
        let name = path.file_name().and_then(|name| name.to_str()).map(str::to_owned);
        let name = name.ok_or_else(|| DataError::ClassName { path: path.clone() })?;
        classes.insert(name, of_class(&path, items, unread)?);
    }
    match classes.is_empty() {
        true => Err((items.missing)(folder.to_owned())),
        false => Ok(classes),
    }
}

/// The class names, and the items of each split by class.
pub(super) type BySplit = (Vec<String>, [Option<ByClass<PathBuf>>; 3]);

/// Lists the folders of the splits; the classes are those of the training data, or of the first existing split.
pub(super) fn splits(directory: &Path, items: &ItemFiles, unread: &mut Unread) -> Result<BySplit, DataError> {
    unread.record_extra_entries(directory)?;
    let mut names: Option<Vec<String>> = None;
    let splits = Split::try_each(Split::ALL, |split| {
        let Some(path) = of_split(directory, split) else { return Ok(None) };
        let found = classes(&path, items, unread)?;
        let names = names.get_or_insert_with(|| found.keys().cloned().collect());
        numbered(&path, found, names).map(Some)
    })?;
    Ok((names.unwrap_or_default(), splits))
}

/// The items of each class in `names`; some may have none here.
///
/// # Errors
/// A class that is not in `names`.
fn numbered(
    split: &Path,
    mut found: BTreeMap<String, Vec<PathBuf>>,
    names: &[String],
) -> Result<ByClass<PathBuf>, DataError> {
    let numbered = names.iter().map(|name| found.remove(name).unwrap_or_default()).collect();
    match found.into_keys().next() {
        Some(class) => Err(DataError::ClassUnknown { path: split.join(class), known: names.to_vec() }),
        None => Ok(numbered),
    }
}

fn of_class(class: &Path, items: &ItemFiles, unread: &mut Unread) -> Result<Vec<PathBuf>, DataError> {
    let mut found = Vec::new();
    for path in entries(class)? {
        if path.is_dir() {
            return Err(DataError::ClassWithin { path });
        }
        match (items.include)(&path) {
            true => found.push(path),
            false => unread.add(path),
        }
    }
    match found.is_empty() {
        true => Err(DataError::ClassEmpty { path: class.to_owned(), items: items.name }),
        false => Ok(found),
    }
}

/// The entries of a directory, sorted by name, without hidden ones.
fn entries(directory: &Path) -> Result<Vec<PathBuf>, DataError> {
    let failed = |source| DataError::Read { path: directory.to_owned(), source };
    let all = fs::read_dir(directory).map_err(failed)?.map(|entry| entry.map(|entry| entry.path()));
    let mut all = all.collect::<Result<Vec<_>, _>>().map_err(failed)?;
    all.retain(|path| !path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b".")));
    all.sort();
    Ok(all)
}

/// Fills in missing splits from the last training items of each class: a tenth, but at least one if enough remain for
/// training.
pub(super) fn hold_out<T>(
    [train, validation, test]: [Option<ByClass<T>>; 3],
) -> ([Option<ByClass<T>>; 3], HeldOut) {
    let mut classes = match (train, &validation) {
        (Some(classes), None) => classes,
        (train, _) => return ([train, validation, test], HeldOut::Nothing),
    };
    let taken = if test.is_some() { 1 } else { 2 };
    let tenths: Vec<usize> = classes
        .iter()
        .map(|class| (class.len() / 10).max(1).min(class.len().saturating_sub(1) / taken))
        .collect();
    let mut take = || {
        let of_class = |(class, tenth): (&mut Vec<T>, &usize)| class.split_off(class.len() - tenth);
        let part: ByClass<T> = classes.iter_mut().zip(&tenths).map(of_class).collect();
        part.iter().any(|class| !class.is_empty()).then_some(part)
    };
    let test_of_train = (taken == 2).then(&mut take).flatten();
    let validation = take();
    let held_out = match (&validation, taken) {
        (None, _) => HeldOut::Nothing,
        (_, 1) => HeldOut::Validation,
        _ => HeldOut::ValidationAndTest,
    };
    ([Some(classes), validation, test.or(test_of_train)], held_out)
}

/// The items with the index of their class, alternating between classes: one item of each comes first, then a second of
/// each, so that the first items cover all classes.
pub(super) fn alternate<T: Clone>(classes: &[Vec<T>]) -> impl Iterator<Item = (T, usize)> {
    let most = classes.iter().map(Vec::len).max().unwrap_or(0);
    (0..most).flat_map(move |at| {
        (0..).zip(classes).filter_map(move |(class, items)| Some((items.get(at)?.clone(), class)))
    })
}
