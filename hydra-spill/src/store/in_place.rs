//! The tier of frozen buffers that are read in place: their values are in files that someone else has written, such as
//! the checkpoint of a pretrained model, and host memory has no copy of them.
//!
//! A file is opened once and read by position. All of a buffer is read when it is inserted, and a checksum of each piece
//! is kept. Every later read compares them, and the file's length and modification time, so that a file that changes
//! during a run fails the tasks that read it and never changes what they compute. A file that is deleted or replaced by
//! another can still be read through the open handle.

use super::scratch::Positioned;
use super::{PIECE, SpillError};
use crate::{Budget, ParamBufferId, Reservation};
use hydra_core::FloatType;
use std::fs::{File, Metadata};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

/// Elements that are read at a time when a buffer is checked.
const PART: usize = 1 << 16;

/// A file whose values are read in place.
pub struct SourceFile {
    path: PathBuf,
    reads: Box<dyn Positioned>,
    metadata: Box<dyn Fn() -> io::Result<Metadata> + Send + Sync>,
    stamp: Stamp,
}

/// The length and the modification time of a file.
#[derive(Debug, PartialEq)]
struct Stamp(u64, Option<SystemTime>);

impl Stamp {
    fn of(metadata: &Metadata) -> Self {
        Self(metadata.len(), metadata.modified().ok())
    }
}

impl std::fmt::Debug for SourceFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SourceFile").field("path", &self.path).finish_non_exhaustive()
    }
}

impl SourceFile {
    /// Opens a file.
    ///
    /// # Errors
    /// [`SpillError::SourceFile`].
    pub fn open(path: &Path) -> Result<Arc<Self>, SpillError> {
        let open = || {
            let file = File::open(path)?;
            let (stamp, other) = (Stamp::of(&file.metadata()?), file.try_clone()?);
            #[cfg(not(unix))]
            let file = std::sync::Mutex::new(file);
            let metadata = Box::new(move || other.metadata());
            Ok(Arc::new(Self { path: path.to_owned(), reads: Box::new(file), metadata, stamp }))
        };
        open().map_err(|source| SpillError::SourceFile { path: path.to_owned(), source })
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn failed(&self, source: io::Error) -> SpillError {
        match source.kind() {
            // It was not too short when it was opened.
            io::ErrorKind::UnexpectedEof => self.changed(),
            _ => SpillError::SourceFile { path: self.path.clone(), source },
        }
    }

    fn changed(&self) -> SpillError {
        SpillError::SourceChanged { path: self.path.clone() }
    }

    fn read_at(&self, at: u64, out: &mut [u8]) -> Result<(), SpillError> {
        self.reads.read_at(at, out).map_err(|source| self.failed(source))
    }

    /// Compares the file's length and modification time with those at its opening.
    fn check(&self) -> Result<(), SpillError> {
        let now = Stamp::of(&(self.metadata)().map_err(|source| self.failed(source))?);
        if now == self.stamp { Ok(()) } else { Err(self.changed()) }
    }
}

/// The place of a parameter in a file: its elements, one after the other.
#[derive(Clone, Debug)]
pub struct InPlaceParam {
    /// Its elements in the buffer.
    pub elements: Range<usize>,
    /// The file.
    pub file: Arc<SourceFile>,
    /// The offset of its first byte.
    pub offset: u64,
}

/// The parameters of a buffer that is read in place.
#[derive(Debug)]
pub struct InPlaceParams {
    params: Vec<InPlaceParam>,
    elements: usize,
    /// The bytes of an element.
    each: usize,
    /// The checksum of each piece, without the gaps between parameters.
    sums: Vec<u32>,
    /// Host memory for reads that a link cannot direct to its device.
    working: Budget,
}

impl PartialEq for InPlaceParams {
    fn eq(&self, other: &Self) -> bool {
        (self.elements, self.each, &self.sums) == (other.elements, other.each, &other.sums)
    }
}

impl InPlaceParams {
    /// Reads all parameters of a buffer of `elements` elements, in order of their offsets, and keeps checksums of them.
    /// `take` receives the index of each parameter, and its bytes in parts, in order. Later reads that pass through host
    /// memory reserve it in `working`.
    ///
    /// # Errors
    /// A file that cannot be read, and the errors of `take`.
    pub fn check<E: From<SpillError>>(
        params: Vec<InPlaceParam>,
        (elements, float): (usize, FloatType),
        working: Budget,
        mut take: impl FnMut(usize, &[u8]) -> Result<(), E>,
    ) -> Result<Self, E> {
        let mut checked = Self { params, elements, each: float.bytes(), sums: Vec::new(), working };
        let mut bytes = vec![0; PART.min(elements) * checked.each];
        for piece in checked.pieces(0..elements) {
            let mut sum = crc32fast::Hasher::new();
            for (slot, at, part) in checked.parts(piece) {
                for (index, part) in chunks(part, PART).enumerate() {
                    let out = &mut bytes[..part.len() * checked.each];
                    let at = at + (index * PART * checked.each) as u64;
                    checked.params[slot].file.read_at(at, out)?;
                    sum.update(out);
                    take(slot, out)?;
                }
            }
            checked.sums.push(sum.finalize());
        }
        checked.check_files()?;
        Ok(checked)
    }

    /// The number of elements.
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// The bytes of the whole buffer.
    pub fn len_bytes(&self) -> usize {
        self.elements * self.each
    }

    /// Reserves host memory for reading the whole buffer.
    ///
    /// # Errors
    /// [`SpillError::Budget`].
    pub fn reserve(&self, id: ParamBufferId) -> Result<Reservation, SpillError> {
        Ok(self.working.reserve(self.len_bytes() as u64, id.to_string())?)
    }

    /// Reads whole pieces of [`PIECE`] elements, or up to the end, into `out`, whose gaps stay as they are.
    ///
    /// # Errors
    /// [`SpillError::SourceChanged`] if the values are not those of the first read, or the file was modified since;
    /// [`SpillError::SourceFile`] if it cannot be read.
    pub fn read(&self, elements: Range<usize>, out: &mut [u8]) -> Result<(), SpillError> {
        let start = elements.start;
        for piece in self.pieces(elements) {
            let mut sum = crc32fast::Hasher::new();
            let sums = self.sums[piece.start / PIECE];
            let mut last = None;
            for (slot, at, part) in self.parts(piece) {
                let out = &mut out[(part.start - start) * self.each..(part.end - start) * self.each];
                self.params[slot].file.read_at(at, out)?;
                sum.update(out);
                last = Some(slot);
            }
            if let Some(slot) = last.filter(|_| sum.finalize() != sums) {
                return Err(self.params[slot].file.changed());
            }
        }
        self.check_files()
    }

    fn check_files(&self) -> Result<(), SpillError> {
        let mut last: Option<&Arc<SourceFile>> = None;
        for param in &self.params {
            if last.is_none_or(|file| !Arc::ptr_eq(file, &param.file)) {
                param.file.check()?;
            }
            last = Some(&param.file);
        }
        Ok(())
    }

    fn pieces(&self, elements: Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
        chunks(elements, PIECE)
    }

    /// The elements of each parameter in a piece, with its index and the offset of the first byte.
    fn parts(&self, piece: Range<usize>) -> impl Iterator<Item = (usize, u64, Range<usize>)> {
        self.params.iter().enumerate().filter_map(move |(slot, param)| {
            let part = param.elements.start.max(piece.start)..param.elements.end.min(piece.end);
            let before = part.start.saturating_sub(param.elements.start) * self.each;
            (!part.is_empty()).then_some((slot, param.offset + before as u64, part))
        })
    }
}

/// Divides a range into parts of `len`, and a shorter last one.
fn chunks(range: Range<usize>, len: usize) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range.step_by(len).map(move |start| start..end.min(start + len))
}

#[cfg(test)]
mod tests {
    use super::*;
    use hydra_core::{ByteSize, TaskId};
    use std::fs;
    use std::io::{Seek, SeekFrom, Write};

    const BUFFER: usize = PIECE + 1000;

    /// A file of random bytes after a header, and a buffer with two parameters in it, with a gap between them.
    fn in_file(dir: &Path) -> (PathBuf, Vec<u8>, InPlaceParams) {
        let path = dir.join("model.safetensors");
        let bytes: Vec<u8> = (0..2 * BUFFER + 7).map(|i| (i * 31 + i / 251) as u8).collect();
        fs::write(&path, &bytes).unwrap();
        (path.clone(), bytes, open(&path).unwrap())
    }

    fn open(path: &Path) -> Result<InPlaceParams, SpillError> {
        let file = SourceFile::open(path)?;
        let param = |elements, offset| InPlaceParam { elements, file: file.clone(), offset };
        let params = vec![param(0..PIECE - 10, 7 + 2 * 500), param(PIECE - 5..BUFFER, 3)];
        let working = Budget::new("working", ByteSize::mib(1));
        InPlaceParams::check(params, (BUFFER, FloatType::Bf16), working, |_, _| Ok(()))
    }

    #[test]
    fn parameters_are_read_where_they_are() {
        let dir = tempfile::tempdir().unwrap();
        let (_, bytes, params) = in_file(dir.path());
        let mut expected = vec![0; 2 * BUFFER];
        expected[..2 * (PIECE - 10)].copy_from_slice(&bytes[1007..][..2 * (PIECE - 10)]);
        expected[2 * (PIECE - 5)..].copy_from_slice(&bytes[3..][..2 * 1005]);
        let mut out = vec![0; 2 * BUFFER];
        params.read(0..BUFFER, &mut out).unwrap();
        assert!(out == expected && params.len_bytes() == out.len());
        let mut second = vec![0; 2000];
        params.read(PIECE..BUFFER, &mut second).unwrap();
        assert_eq!(second, expected[2 * PIECE..]);
        let mut taken = [Vec::new(), Vec::new()];
        let take = |slot: usize, bytes: &[u8]| {
            taken[slot].extend_from_slice(bytes);
            Ok::<_, SpillError>(())
        };
        let working = Budget::new("working", ByteSize(1));
        InPlaceParams::check(params.params.clone(), (BUFFER, FloatType::Bf16), working, take).unwrap();
        assert_eq!(taken, [&bytes[1007..][..2 * (PIECE - 10)], &bytes[3..][..2 * 1005]]);
    }

    #[test]
    fn a_changed_file_is_refused_and_named() {
        let dir = tempfile::tempdir().unwrap();
        let (path, bytes, params) = in_file(dir.path());
        let modified = fs::metadata(&path).unwrap().modified().unwrap();
        let read = || params.read(0..BUFFER, &mut vec![0; 2 * BUFFER]);
        let refused = |change: &dyn Fn()| {
            read().unwrap();
            change();
            let error = read().unwrap_err();
            assert!(matches!(&error, SpillError::SourceChanged { path: of } if *of == path), "{error}");
            assert!(error.to_string().contains("model.safetensors"));
            fs::write(&path, &bytes).unwrap();
            File::options().write(true).open(&path).unwrap().set_modified(modified).unwrap();
        };
        // One byte of another value, with the modification time of before.
        refused(&|| {
            let mut file = File::options().write(true).open(&path).unwrap();
            file.seek(SeekFrom::Start(2000)).unwrap();
            file.write_all(&[!bytes[2000]]).unwrap();
            file.set_modified(modified).unwrap();
        });
        refused(&|| fs::write(&path, &bytes[..1000]).unwrap());
        refused(&|| File::options().append(true).open(&path).unwrap().write_all(&[0]).unwrap());
        read().unwrap();
    }

    #[test]
    fn a_file_that_is_deleted_can_be_read_until_it_is_closed() {
        let dir = tempfile::tempdir().unwrap();
        let (path, _, params) = in_file(dir.path());
        fs::remove_file(&path).unwrap();
        params.read(0..BUFFER, &mut vec![0; 2 * BUFFER]).unwrap();
        let error = open(&path).unwrap_err();
        assert!(matches!(error, SpillError::SourceFile { .. }), "{error}");
        let id = ParamBufferId::new(TaskId(0), 0);
        assert_eq!(params.reserve(id).unwrap().bytes(), 2 * BUFFER as u64);
    }
}
