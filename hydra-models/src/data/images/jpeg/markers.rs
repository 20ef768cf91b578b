//! Parses the marker segments between scans.

use super::JpegError;
use super::entropy::Bits;
use super::huffman::Huffman;
use super::scan::Scan;
use super::transform::ORDER;

/// The four table slots of a kind.
pub(super) type Tables<T> = [Option<T>; 4];

/// The result of parsing segments.
pub(super) enum Event {
    Scan(Scan),
    End,
}

/// The colour space of an image.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Colours {
    Grey,
    Rgb,
    YCbCr,
    Cmyk,
    Ycck,
}

/// Decoder state.
pub(super) struct Decoder<'a> {
    bytes: &'a [u8],
    pub at: usize,
    /// The marker that ended a scan.
    pub marker: Option<u8>,
    pub quantizers: Tables<[u16; 64]>,
    pub dc: Tables<Huffman>,
    pub ac: Tables<Huffman>,
    pub restart_interval: usize,
    is_jfif: bool,
    /// The colour transform flag of the Adobe marker.
    adobe: Option<u8>,
    /// Exif and XMP data.
    pub exif: Option<&'a [u8]>,
    pub xmp: Option<&'a [u8]>,
    pub frame: Option<Frame>,
}

/// The frame header and its components.
pub(super) struct Frame {
    pub progressive: bool,
    /// Width and height in pixels.
    pub size: [usize; 2],
    pub components: Vec<Component>,
    /// The largest horizontal and vertical sampling factors.
    pub most: [usize; 2],
}

/// A colour component.
pub(super) struct Component {
    pub id: u8,
    /// Horizontal and vertical sampling factors.
    pub sampling: [usize; 2],
    pub quantizer: usize,
    /// The quantization table at the component's first scan.
    pub latched: Option<[u16; 64]>,
    /// Columns and rows of samples within the image, and of blocks.
    pub samples: [usize; 2],
    pub blocks: [usize; 2],
    /// Columns and rows of blocks, padded to whole MCUs of interleaved scans.
    pub padded: [usize; 2],
    /// The coefficients `[padded rows, padded columns, 64]`, in natural order.
    pub coefficients: Vec<i16>,
    /// The lowest known bit of each coefficient in zigzag order; -1 if none.
    pub known: [i8; 64],
}

impl Component {
    /// The number of decoded samples.
    pub fn samples(&self) -> u64 {
        64 * self.padded.iter().map(|side| *side as u64).product::<u64>()
    }
}

impl<'a> Decoder<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self {
            bytes,
            at: 2,
            marker: None,
            quantizers: [None; 4],
            dc: Default::default(),
            ac: Default::default(),
            restart_interval: 0,
            is_jfif: false,
            adobe: None,
            exif: None,
            xmp: None,
            frame: None,
        }
    }

    pub fn bits(&self) -> Bits<'a> {
        Bits::new(self.bytes, self.at, self.marker)
    }

    pub fn damaged(&self, what: &'static str) -> JpegError {
        JpegError::Damaged { what }
    }

    pub fn frame(&self) -> Result<&Frame, JpegError> {
        self.frame.as_ref().ok_or_else(|| self.damaged("a scan without a frame"))
    }

    pub fn frame_mut(&mut self) -> Result<&mut Frame, JpegError> {
        let error = self.damaged("a scan without a frame");
        self.frame.as_mut().ok_or(error)
    }

    /// Parses segments up to the next scan or the end of the image.
    pub fn next(&mut self) -> Result<Event, JpegError> {
        loop {
            let mut bits = self.bits();
            let marker = self.marker.take().map_or_else(|| bits.next_marker(), Ok)?;
            self.at = bits.at;
            match marker {
                0xD9 => return Ok(Event::End),
                0x01 | 0xD0..=0xD7 => continue,
                0xC0..=0xFE => {}
                _ => return Err(self.damaged("an unknown marker")),
            }
            let segment = self.segment()?;
            match marker {
                0xC0..=0xC2 => self.start_of_frame(segment, marker == 0xC2)?,
                0xC4 => self.huffman_tables(segment)?,
                0xC9 | 0xCA | 0xCC => {
                    return Err(JpegError::Unsupported { what: "a JPEG with arithmetic coding" });
                }
                0xC3..=0xCF => {
                    return Err(JpegError::Unsupported { what: "a lossless or hierarchical JPEG" });
                }
                0xD8 => return Err(self.damaged("a second start-of-image marker")),
                0xDA => return Scan::read(segment, self).map(Event::Scan),
                0xDB => self.quantizers(segment)?,
                0xDD => self.restarts(segment)?,
                0xE0 => self.is_jfif |= segment.len() >= 14 && segment.starts_with(b"JFIF\0"),
                0xE1 if segment.starts_with(b"Exif\0\0") => self.exif = self.exif.or(Some(segment)),
                0xE1 if segment.starts_with(b"http://ns.adobe.com/xap/1.0/\0") => self.xmp = Some(segment),
                0xEE if segment.len() >= 12 && segment.starts_with(b"Adobe") => {
                    self.adobe = Some(segment[11])
                }
                _ => {}
            }
        }
    }

    /// Rejects segments that may not follow the only scan of an image; a missing end marker is accepted.
    pub fn check_end(&mut self) -> Result<(), JpegError> {
        match self.next() {
            Ok(Event::End) | Err(JpegError::Truncated { .. }) => Ok(()),
            Ok(Event::Scan(_)) => Err(self.damaged("a scan after the last one")),
            Err(error) => Err(error),
        }
    }

    /// The payload of a segment.
    fn segment(&mut self) -> Result<&'a [u8], JpegError> {
        let truncated = || JpegError::Truncated { bytes: self.bytes.len() };
        let length = self.bytes.get(self.at..self.at + 2).ok_or_else(truncated)?;
        let length = usize::from(u16::from_be_bytes([length[0], length[1]]));
        if length < 2 {
            return Err(self.damaged("a segment without a length"));
        }
        let segment = self.bytes.get(self.at + 2..self.at + length).ok_or_else(truncated)?;
        self.at += length;
        Ok(segment)
    }

    fn start_of_frame(&mut self, segment: &[u8], progressive: bool) -> Result<(), JpegError> {
        if self.frame.is_some() {
            return Err(self.damaged("a second frame"));
        }
        let [precision, h1, h2, w1, w2, count, rest @ ..] = segment else {
            return Err(self.damaged("a frame header of the wrong length"));
        };
        if *precision != 8 {
            return Err(JpegError::Unsupported { what: "a JPEG with other than 8-bit samples" });
        }
        let size = [u16::from_be_bytes([*w1, *w2]), u16::from_be_bytes([*h1, *h2])].map(usize::from);
        if size.contains(&0) || *count == 0 || rest.len() != 3 * usize::from(*count) {
            return Err(self.damaged("a frame header without pixels or of the wrong length"));
        }
        let (chunks, _) = rest.as_chunks::<3>();
        let sampling = |of: u8| [of >> 4, of & 15].map(usize::from);
        if chunks.iter().any(|[_, of, _]| sampling(*of).iter().any(|factor| !(1..=4).contains(factor))) {
            return Err(self.damaged("a sampling factor outside 1 to 4"));
        }
        let most = [0, 1].map(|axis| chunks.iter().map(|c| sampling(c[1])[axis]).max().unwrap_or(1));
        let component =
            |[id, of, quantizer]: &[u8; 3]| Component::new([*id, *quantizer], sampling(*of), size, most);
        let components = chunks.iter().map(component).collect();
        self.frame = Some(Frame { progressive, size, components, most });
        Ok(())
    }

    fn huffman_tables(&mut self, mut segment: &[u8]) -> Result<(), JpegError> {
        while let [index, rest @ ..] = segment {
            let Some((counts, rest)) = rest.split_first_chunk::<16>() else { break };
            let count: usize = counts.iter().map(|count| usize::from(*count)).sum();
            if count > 256 || count > rest.len() {
                return Err(self.damaged("a Huffman table with too many codes"));
            }
            let mut values = [0; 256];
            values[..count].copy_from_slice(&rest[..count]);
            let is_details = index & 0x10 != 0;
            let table =
                Huffman::new(*counts, values).filter(|table| is_details || table.is_valid_for_dc(count));
            let tables = if is_details { &mut self.ac } else { &mut self.dc };
            match tables.get_mut(usize::from(index & !0x10)) {
                // An invalid table is an error only if a scan uses it.
                Some(entry) => *entry = table,
                None => return Err(self.damaged("a Huffman table with an invalid index")),
            }
            segment = &rest[count..];
        }
        if segment.is_empty() { Ok(()) } else { Err(self.damaged("Huffman tables of the wrong length")) }
    }

    fn quantizers(&mut self, mut segment: &[u8]) -> Result<(), JpegError> {
        while let [first, rest @ ..] = segment {
            let (number, wide) = (usize::from(first & 15), first >> 4 != 0);
            let length = if wide { 128 } else { 64 };
            if number >= 4 || rest.len() < length {
                return Err(self.damaged("a quantization table with an invalid index or length"));
            }
            let mut table = [0; 64];
            for (index, at) in ORDER[..64].iter().enumerate() {
                table[usize::from(*at)] = match wide {
                    true => u16::from_be_bytes([rest[2 * index], rest[2 * index + 1]]),
                    false => u16::from(rest[index]),
                };
            }
            self.quantizers[number] = Some(table);
            segment = &rest[length..];
        }
        Ok(())
    }

    fn restarts(&mut self, segment: &[u8]) -> Result<(), JpegError> {
        let [high, low] = segment else {
            return Err(self.damaged("a restart interval segment of the wrong length"));
        };
        self.restart_interval = usize::from(u16::from_be_bytes([*high, *low]));
        Ok(())
    }

    /// Determines the colour space by libjpeg's rules.
    pub fn colours(&self) -> Result<Colours, JpegError> {
        let ids: Vec<u8> = self.frame()?.components.iter().map(|component| component.id).collect();
        Ok(match (ids.as_slice(), self.is_jfif, self.adobe) {
            ([_], ..) => Colours::Grey,
            ([_, _, _], false, Some(0)) => Colours::Rgb,
            (b"RGB", false, None) => Colours::Rgb,
            ([_, _, _], ..) => Colours::YCbCr,
            (_, _, None | Some(0)) => Colours::Cmyk,
            _ => Colours::Ycck,
        })
    }
}

impl Component {
    fn new([id, quantizer]: [u8; 2], sampling: [usize; 2], size: [usize; 2], most: [usize; 2]) -> Self {
        let along = |axis: usize, unit: usize| (size[axis] * sampling[axis]).div_ceil(most[axis] * unit);
        let padded = |axis: usize| size[axis].div_ceil(8 * most[axis]) * sampling[axis];
        Self {
            id,
            sampling,
            quantizer: usize::from(quantizer),
            latched: None,
            samples: [along(0, 1), along(1, 1)],
            blocks: [along(0, 8), along(1, 8)],
            padded: [padded(0), padded(1)],
            coefficients: Vec::new(),
            known: [-1; 64],
        }
    }
}

impl Frame {
    /// Allocates the coefficients.
    pub fn allocate(&mut self) {
        for component in &mut self.components {
            component.coefficients = vec![0; component.samples() as usize];
        }
    }

    /// Rejects an unsupported number of components.
    pub fn check_colours(&self) -> Result<(), JpegError> {
        match self.components.len() {
            1 | 3 | 4 => Ok(()),
            _ => Err(JpegError::Unsupported {
                what: "a JPEG with other than one, three or four colour components",
            }),
        }
    }

    /// Rejects a progressive image without its last scans; libjpeg would estimate them from neighbouring blocks.
    pub fn check_complete(&self) -> Result<(), JpegError> {
        let is_partial = |component: &Component| component.known[1..10].iter().any(|bit| *bit != 0);
        match self.progressive && self.components.iter().any(is_partial) {
            true => Err(JpegError::Damaged { what: "the last scans of a progressive image are missing" }),
            false => Ok(()),
        }
    }
}
