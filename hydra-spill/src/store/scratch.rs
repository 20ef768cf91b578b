//! The file that images of a task lie in: one after the other, each with a checksum of its parts.

use crate::memory::aligned::AlignedBytes;
use crate::{Budget, ImageId, Masters, NarrowFloats, SpillError};
use hydra_core::FloatType;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The layout of an image, one part after the other: what moves if it is narrower than the parameters, the parameters,
/// the moments.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Shape {
    pub elements: u64,
    pub narrow: Option<FloatType>,
    pub moments: usize,
}

/// The shape and checksums of a written image.
#[derive(Clone, Debug)]
pub(super) struct Stored {
    pub shape: Shape,
    /// The checksum of each part: of what moves if it is narrower, of the parameters, of each moment.
    pub sums: Arc<[u32]>,
}

/// A part of an image: where it lies, and which of the parts it is.
pub(super) type PartOf = fn(&Shape) -> (Range<u64>, usize);

/// The place of an image in a file.
#[derive(Clone)]
pub(super) struct Place {
    pub scratch: Arc<Scratch>,
    pub offset: u64,
    pub bytes: u64,
}

/// The file of a task. Its space is free again when the last of its images is gone.
pub(super) struct Scratch {
    pub file: Box<dyn Positioned>,
    pub dir: PathBuf,
    /// Host memory for what is on its way.
    pub working: Budget,
    pub moved: Arc<Moved>,
}

#[derive(Default)]
pub(super) struct Moved {
    pub read: AtomicU64,
    pub written: AtomicU64,
}

/// A file that several threads read and write at once.
pub(super) trait Positioned: Send + Sync {
    fn read_at(&self, at: u64, out: &mut [u8]) -> io::Result<()>;

    fn write_at(&self, at: u64, bytes: &[u8]) -> io::Result<()>;
}

#[cfg(unix)]
impl Positioned for File {
    fn read_at(&self, at: u64, out: &mut [u8]) -> io::Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(self, out, at)
    }

    fn write_at(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        std::os::unix::fs::FileExt::write_all_at(self, bytes, at)
    }
}

/// Systems whose files have one position take turns.
#[cfg(not(unix))]
impl Positioned for std::sync::Mutex<File> {
    fn read_at(&self, at: u64, out: &mut [u8]) -> io::Result<()> {
        use io::{Read, Seek};
        let mut file = self.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        file.seek(io::SeekFrom::Start(at))?;
        file.read_exact(out)
    }

    fn write_at(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        use io::{Seek, Write};
        let mut file = self.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        file.seek(io::SeekFrom::Start(at))?;
        file.write_all(bytes)
    }
}

/// A file of so many bytes in a directory, without a name there.
pub(super) fn scratch_file(dir: &Path, bytes: u64) -> io::Result<Box<dyn Positioned>> {
    let file = tempfile::tempfile_in(dir)?;
    allocate(&file, bytes)?;
    #[cfg(not(unix))]
    let file = std::sync::Mutex::new(file);
    Ok(Box::new(file))
}

/// Takes the space of a file where the file system can; elsewhere a full disk shows when it is written.
#[cfg(target_os = "linux")]
fn allocate(file: &File, bytes: u64) -> io::Result<()> {
    use rustix::fs::{FallocateFlags, fallocate};
    use rustix::io::{Errno, retry_on_intr};
    match retry_on_intr(|| fallocate(file, FallocateFlags::empty(), 0, bytes.max(1))) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => file.set_len(bytes),
        result => Ok(result?),
    }
}

#[cfg(not(target_os = "linux"))]
fn allocate(file: &File, bytes: u64) -> io::Result<()> {
    file.set_len(bytes)
}

impl Shape {
    pub fn of(masters: &Masters) -> Self {
        let narrow = masters.narrow.as_ref().map(NarrowFloats::float_type);
        Self { elements: masters.params.len() as u64, narrow, moments: masters.moments.len() }
    }

    fn narrow_bytes(&self) -> u64 {
        self.narrow.map_or(0, |float| float.bytes() as u64 * self.elements)
    }

    fn param_bytes(&self) -> u64 {
        self.elements * size_of::<f32>() as u64
    }

    pub fn params(&self) -> (Range<u64>, usize) {
        let start = self.narrow_bytes();
        (start..start + self.param_bytes(), usize::from(self.narrow.is_some()))
    }

    /// The part that a promotion reads.
    pub fn moving(&self) -> (Range<u64>, usize) {
        match self.narrow {
            Some(_) => (0..self.narrow_bytes(), 0),
            None => self.params(),
        }
    }

    pub fn bytes(&self) -> u64 {
        self.params().0.end + self.moments as u64 * self.param_bytes()
    }

    /// Masters of zeros.
    fn masters(&self) -> Masters {
        let elements = self.elements as usize;
        let moments = (0..self.moments).map(|_| vec![0.0; elements]).collect();
        let narrow = self.narrow.map(|float| NarrowFloats::zeros(elements, float));
        Masters { narrow, ..Masters::new(vec![0.0; elements], moments) }
    }
}

impl Place {
    pub fn failed(&self, image: ImageId, done: &'static str) -> impl FnOnce(io::Error) -> SpillError {
        let dir = self.scratch.dir.clone();
        move |source| SpillError::Disk { image, done, dir, source }
    }

    fn read_into(&self, at: u64, out: &mut [u8]) -> io::Result<()> {
        self.scratch.file.read_at(self.offset + at, out)?;
        self.scratch.moved.read.fetch_add(out.len() as u64, Relaxed);
        Ok(())
    }

    pub fn view(&self, id: ImageId, range: Range<u64>, sum: u32) -> Result<AlignedBytes, SpillError> {
        let len = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
        let read = || {
            let mut bytes = AlignedBytes::zeros(len)?;
            self.read_into(range.start, bytes.as_mut())?;
            verify(bytes.as_ref(), sum).map(|()| bytes)
        };
        read().map_err(self.failed(id, "read"))
    }

    pub fn load(&self, id: ImageId, stored: &Stored) -> Result<Masters, SpillError> {
        let mut masters = stored.shape.masters();
        let mut at = 0;
        let read = parts_mut(&mut masters).zip(stored.sums.iter()).try_for_each(|(part, sum)| {
            self.read_into(at, part)?;
            at += part.len() as u64;
            verify(part, *sum)
        });
        read.map_err(self.failed(id, "read"))?;
        Ok(masters)
    }

    pub fn save(&self, id: ImageId, masters: &Masters) -> Result<Stored, SpillError> {
        let mut at = self.offset;
        let written = parts(masters).map(|part| {
            self.scratch.file.write_at(at, part)?;
            at += part.len() as u64;
            self.scratch.moved.written.fetch_add(part.len() as u64, Relaxed);
            Ok(crc32fast::hash(part))
        });
        let sums = written.collect::<io::Result<_>>().map_err(self.failed(id, "written"))?;
        Ok(Stored { shape: Shape::of(masters), sums })
    }
}

/// Refuses bytes that are not those that were written.
fn verify(bytes: &[u8], sum: u32) -> io::Result<()> {
    match crc32fast::hash(bytes) == sum {
        true => Ok(()),
        false => Err(io::Error::new(io::ErrorKind::InvalidData, "what is there is not what was written")),
    }
}

/// The bytes of masters in the order of the file.
fn parts(masters: &Masters) -> impl Iterator<Item = &[u8]> {
    let narrow = masters.narrow.iter().map(|narrow| bytemuck::cast_slice(narrow));
    let moments = masters.moments.iter().map(|moment| bytemuck::cast_slice(moment));
    narrow.chain(std::iter::once(bytemuck::cast_slice(&masters.params))).chain(moments)
}

fn parts_mut(masters: &mut Masters) -> impl Iterator<Item = &mut [u8]> {
    let Masters { params, narrow, moments } = masters;
    let narrow = narrow.iter_mut().map(|narrow| bytemuck::cast_slice_mut(narrow));
    let moments = moments.iter_mut().map(|moment| bytemuck::cast_slice_mut(moment));
    narrow.chain(std::iter::once(bytemuck::cast_slice_mut(params))).chain(moments)
}
