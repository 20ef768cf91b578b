//! The scratch file of a task's buffers: they are stored consecutively, with checksums of the pieces of their
//! parts, so that a piece can be read and written on its own.

use crate::memory::aligned::AlignedBytes;
use crate::store::covering;
use crate::{Budget, Floats, Masters, MastersPart, Moment, NarrowFloats, ParamBufferId, SpillError};
use hydra_core::FloatType;
use hydra_core::optimizer::MomentLayout;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The layout of a buffer as consecutive parts: the rounded copy if there is one, the parameters, the
/// moments.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Shape {
    pub elements: u64,
    pub narrow: Option<FloatType>,
    /// Whether the parameters are there as `f32`; frozen ones may be there as `narrow` alone.
    pub wide: bool,
    pub moments: Vec<MomentLayout>,
}

/// The shape and checksums of a written buffer.
#[derive(Clone, Debug)]
pub(super) struct Stored {
    pub shape: Shape,
    /// The checksums of the pieces of each part: of the rounded copy if there is one, of the parameters, of
    /// each moment.
    pub sums: Arc<[Vec<u32>]>,
}

/// A part of a buffer in the file.
#[derive(Clone, Debug)]
pub(super) struct BufferPart {
    /// The index of the part.
    pub index: usize,
    /// The number of bytes before it.
    pub offset: u64,
    layout: PartLayout,
}

/// Where the elements of a part are.
#[derive(Clone, Debug)]
enum PartLayout {
    /// The bytes per element.
    Each(usize),
    Moment(MomentLayout),
}

impl BufferPart {
    /// The bytes of some elements, which begin and end with a piece or with the buffer unless each has its own bytes.
    pub fn bytes_of(&self, elements: Range<usize>) -> Range<usize> {
        match &self.layout {
            PartLayout::Each(each) => elements.start * each..elements.end * each,
            PartLayout::Moment(layout) => layout.bytes_of(elements),
        }
    }
}

/// The position of a buffer in a file.
#[derive(Clone)]
pub(super) struct FileSlot {
    pub scratch: Arc<Scratch>,
    pub offset: u64,
    pub bytes: u64,
}

/// The file of a task. Its space is freed when the last of its buffers is removed.
pub(super) struct Scratch {
    pub file: Box<dyn Positioned>,
    pub dir: PathBuf,
    /// Host memory for bytes in transfer.
    pub working: Budget,
    /// The number of elements of a piece.
    pub piece: usize,
    pub moved: Arc<DiskTraffic>,
}

#[derive(Default)]
pub(super) struct DiskTraffic {
    pub read: AtomicU64,
    pub written: AtomicU64,
}

/// A file that several threads can read and write concurrently.
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

/// On systems whose files have one position, access is serialized.
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

/// Creates an unnamed file of this many bytes in a directory.
pub(super) fn scratch_file(dir: &Path, bytes: u64) -> io::Result<Box<dyn Positioned>> {
    let file = tempfile::tempfile_in(dir)?;
    allocate(&file, bytes)?;
    #[cfg(not(unix))]
    let file = std::sync::Mutex::new(file);
    Ok(Box::new(file))
}

/// Allocates the space of a file if the file system can; otherwise a full disk is reported when it is
/// written.
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
        let elements = masters.elements();
        let wide = masters.params.len() == elements;
        let moments = masters.moments.iter().map(|moment| moment.layout.clone()).collect();
        Self { elements: elements as u64, narrow, wide, moments }
    }

    fn narrow_bytes(&self) -> u64 {
        self.narrow.map_or(0, |float| float.bytes() as u64 * self.elements)
    }

    fn param_bytes(&self) -> u64 {
        self.elements * size_of::<f32>() as u64
    }

    /// A part of the masters.
    pub fn part(&self, part: MastersPart) -> BufferPart {
        let first = usize::from(self.narrow.is_some());
        let MastersPart::Moment(moment) = part else {
            let layout = PartLayout::Each(size_of::<f32>());
            return BufferPart { index: first, offset: self.narrow_bytes(), layout };
        };
        let bytes = |layout: &MomentLayout| layout.bytes_of(0..self.len()).len() as u64;
        BufferPart {
            index: first + 1 + moment,
            offset: self.narrow_bytes()
                + self.param_bytes()
                + self.moments[..moment].iter().map(bytes).sum::<u64>(),
            layout: PartLayout::Moment(self.moments[moment].clone()),
        }
    }

    /// The part that a promotion reads.
    pub fn moving(&self) -> BufferPart {
        match self.narrow {
            Some(float) => BufferPart { index: 0, offset: 0, layout: PartLayout::Each(float.bytes()) },
            None => self.part(MastersPart::Params),
        }
    }

    /// All parts, in the order of the file.
    fn parts(&self) -> impl Iterator<Item = BufferPart> + use<> {
        let narrow = self.narrow.map(|_| self.moving());
        let moments = (0..self.moments.len()).map(MastersPart::Moment);
        let wide = self.wide.then_some(MastersPart::Params).into_iter().chain(moments);
        narrow.into_iter().chain(wide.map(|part| self.part(part)).collect::<Vec<_>>())
    }

    /// The bytes of some elements of all parts.
    pub fn bytes_of(&self, elements: &Range<usize>) -> u64 {
        self.parts().map(|part| part.bytes_of(elements.clone()).len() as u64).sum()
    }

    pub fn bytes(&self) -> u64 {
        self.bytes_of(&(0..self.len()))
    }

    pub fn len(&self) -> usize {
        self.elements as usize
    }

    /// Returns zeros for some elements.
    pub fn zeros(&self, elements: Range<usize>) -> Masters {
        let moments = self.moments.iter().map(|layout| Moment::zeros(layout, elements.clone())).collect();
        let narrow = self.narrow.map(|float| NarrowFloats::zeros(elements.len(), float));
        let params = vec![0.0; if self.wide { elements.len() } else { 0 }];
        Masters { narrow, moments, ..Masters::new(params, Vec::new()) }
    }

    /// Returns whether `masters` have the lengths of some elements.
    pub fn fits(&self, masters: &Masters, elements: &Range<usize>) -> bool {
        let moments = || masters.moments.iter().zip(&self.moments);
        masters.elements() == elements.len()
            && masters.moments.len() == self.moments.len()
            && moments().all(|(moment, layout)| moment.words.len() == layout.words_of(elements.clone()).len())
    }
}

impl Stored {
    /// Returns master weights of this shape that were never written.
    pub fn nothing(shape: Shape, piece: usize) -> Self {
        let sums = shape.parts().map(|_| vec![0; shape.len().div_ceil(piece)]).collect();
        Self { shape, sums }
    }
}

impl FileSlot {
    pub fn failed(&self, buffer: ParamBufferId, done: &'static str) -> impl FnOnce(io::Error) -> SpillError {
        let dir = self.scratch.dir.clone();
        move |source| SpillError::Disk { buffer, done, dir, source }
    }

    /// The whole pieces that these elements consist of, including a shorter last one.
    pub fn pieces(&self, elements: Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
        let (piece, end) = (self.scratch.piece, elements.end);
        elements.step_by(piece).map(move |start| start..end.min(start + piece))
    }

    /// The elements of all pieces that contain some of these elements.
    pub fn covering(&self, elements: &Range<usize>, shape: &Shape) -> Range<usize> {
        covering(elements, shape.len(), self.scratch.piece)
    }

    /// Panics if these elements are not whole pieces of the buffer.
    pub fn check_pieces(&self, stored: &Stored, elements: Range<usize>) {
        let whole = self.covering(&elements, &stored.shape);
        assert!(whole == elements, "a write of elements {elements:?} does not cover whole pieces, {whole:?}");
    }

    /// Reads whole pieces of a part.
    fn read_part(
        &self,
        stored: &Stored,
        part: &BufferPart,
        elements: Range<usize>,
        out: &mut [u8],
    ) -> io::Result<()> {
        let mut rest = out;
        for piece in self.pieces(elements) {
            let bytes = part.bytes_of(piece.clone());
            let out = rest.split_off_mut(..bytes.len()).expect("its own bytes");
            self.scratch.file.read_at(self.offset + part.offset + bytes.start as u64, out)?;
            self.scratch.moved.read.fetch_add(out.len() as u64, Relaxed);
            verify(out, stored.sums[part.index][piece.start / self.scratch.piece])?;
        }
        Ok(())
    }

    pub fn view(
        &self,
        id: ParamBufferId,
        stored: &Stored,
        part: &BufferPart,
        elements: Range<usize>,
    ) -> Result<AlignedBytes, SpillError> {
        let read = || {
            let mut bytes = AlignedBytes::zeros(part.bytes_of(elements.clone()).len())?;
            self.read_part(stored, part, elements, bytes.as_mut())?;
            Ok(bytes)
        };
        read().map_err(self.failed(id, "read"))
    }

    /// Reads whole pieces of master weights.
    pub fn load(
        &self,
        id: ParamBufferId,
        stored: &Stored,
        elements: Range<usize>,
        masters: &mut Masters,
    ) -> Result<(), SpillError> {
        let mut parts = stored.shape.parts().zip(parts_mut(masters));
        let read = parts.try_for_each(|(part, out)| self.read_part(stored, &part, elements.clone(), out));
        read.map_err(self.failed(id, "read"))
    }

    /// Writes whole pieces of master weights, starting at this element; empty moments are written as zeros.
    pub fn save(
        &self,
        id: ParamBufferId,
        (stored, start): (&mut Stored, usize),
        masters: &Masters,
    ) -> Result<(), SpillError> {
        let all = start..start + masters.elements();
        let is_empty = masters.moments.iter().any(|moment| moment.words.is_empty());
        // No encoding has more bytes than `f32`.
        let zeros = if is_empty { self.scratch.piece.min(all.len()) } else { 0 };
        let zeros = vec![0; zeros * size_of::<f32>()];
        let mut parts = stored.shape.parts().zip(parts(masters));
        let written = parts.try_for_each(|(part, bytes)| match bytes.is_empty() {
            true => self.pieces(all.clone()).try_for_each(|piece| {
                let zeros = &zeros[..part.bytes_of(piece.clone()).len()];
                self.write_part(stored, &part, piece, zeros)
            }),
            false => self.write_part(stored, &part, all.clone(), bytes),
        });
        written.map_err(self.failed(id, "written"))
    }

    /// Writes whole pieces of a part of the master weights.
    pub fn overwrite(
        &self,
        id: ParamBufferId,
        stored: &mut Stored,
        (part, elements): (MastersPart, Range<usize>),
        words: &[f32],
    ) -> Result<(), SpillError> {
        let write = || {
            let of = stored.shape.part(part);
            self.write_part(stored, &of, elements.clone(), bytemuck::cast_slice(words))?;
            let Some(float) = stored.shape.narrow.filter(|_| part == MastersPart::Params) else {
                return Ok(());
            };
            let (of, narrow) = (stored.shape.moving(), NarrowFloats::of(words, float, Floats::from));
            self.write_part(stored, &of, elements, bytemuck::cast_slice(&narrow))
        };
        write().map_err(self.failed(id, "written"))
    }

    /// Writes whole pieces of a part.
    fn write_part(
        &self,
        stored: &mut Stored,
        part: &BufferPart,
        elements: Range<usize>,
        mut bytes: &[u8],
    ) -> io::Result<()> {
        let sums = &mut Arc::make_mut(&mut stored.sums)[part.index];
        for piece in self.pieces(elements) {
            let at = part.bytes_of(piece.clone());
            let bytes = bytes.split_off(..at.len()).expect("its own bytes");
            self.scratch.file.write_at(self.offset + part.offset + at.start as u64, bytes)?;
            self.scratch.moved.written.fetch_add(bytes.len() as u64, Relaxed);
            sums[piece.start / self.scratch.piece] = crc32fast::hash(bytes);
        }
        Ok(())
    }
}

/// Returns an error if the bytes are not those that were written.
fn verify(bytes: &[u8], sum: u32) -> io::Result<()> {
    match crc32fast::hash(bytes) == sum {
        true => Ok(()),
        false => {
            Err(io::Error::new(io::ErrorKind::InvalidData, "the bytes read are not those that were written"))
        }
    }
}

/// The bytes of master weights in the order of the file.
fn parts(masters: &Masters) -> impl Iterator<Item = &[u8]> {
    let narrow = masters.narrow.iter().map(|narrow| bytemuck::cast_slice(narrow));
    let moments = masters.moments.iter().map(|moment| bytemuck::cast_slice(&moment.words));
    let params = (!masters.params.is_empty()).then(|| bytemuck::cast_slice(&masters.params));
    narrow.chain(params).chain(moments)
}

fn parts_mut(masters: &mut Masters) -> impl Iterator<Item = &mut [u8]> {
    let Masters { params, narrow, moments, .. } = masters;
    let narrow = narrow.iter_mut().map(|narrow| bytemuck::cast_slice_mut(narrow));
    let moments = moments.iter_mut().map(|moment| bytemuck::cast_slice_mut(&mut moment.words));
    let params = (!params.is_empty()).then(|| bytemuck::cast_slice_mut(params));
    narrow.chain(params).chain(moments)
}
