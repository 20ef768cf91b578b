//! A JPEG decoder, bit-identical to libjpeg-turbo and therefore to Pillow.
//!
//! Supports baseline, extended and progressive 8-bit files with Huffman coding. A truncated file is an error, as in
//! Pillow; damage that libjpeg only warns about yields the same bytes as libjpeg.

mod entropy;
mod huffman;
mod markers;
mod pixels;
mod scan;
mod transform;

use super::decode::Rgb;
use super::orientation::{of_exif, of_xmp};
use markers::{Decoder, Event};
use pixels::Planes;

/// A JPEG that cannot be decoded.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the fields")]
pub enum JpegError {
    /// The file ends early.
    #[error("the file is truncated: it ends after {bytes} bytes, before the image is complete")]
    Truncated { bytes: usize },
    /// The file violates the format.
    #[error("the file is damaged: {what}")]
    Damaged { what: &'static str },
    /// An unsupported kind of JPEG.
    #[error("{what} is not supported: save the image again as a baseline or progressive JPEG, or as PNG")]
    Unsupported { what: &'static str },
}

/// A JPEG whose headers have been parsed.
pub(super) struct Jpeg<'a> {
    decoder: Decoder<'a>,
    first: scan::Scan,
}

impl<'a> Jpeg<'a> {
    /// Parses the headers.
    pub fn open(bytes: &'a [u8]) -> Result<Self, JpegError> {
        let mut decoder = Decoder::new(bytes);
        match decoder.next()? {
            Event::Scan(first) => {
                decoder.frame()?.check_colours()?;
                Ok(Self { decoder, first })
            }
            Event::End => Err(decoder.damaged("it has no image")),
        }
    }

    /// Width and height in pixels.
    pub fn size(&self) -> [usize; 2] {
        self.decoder.frame.as_ref().map_or([0; 2], |frame| frame.size)
    }

    /// The orientation from Exif and XMP data; 1 is upright.
    pub fn orientation(&self) -> u8 {
        let exif = self.decoder.exif.and_then(of_exif);
        exif.or_else(|| self.decoder.xmp.and_then(of_xmp)).unwrap_or(1)
    }

    /// The bytes of host memory that decoding takes in addition to the file.
    pub fn decode_bytes(&self) -> u64 {
        let pixels: u64 = self.size().iter().map(|side| *side as u64).product();
        let components = self.decoder.frame.iter().flat_map(|frame| &frame.components);
        let samples: u64 = components.map(|component| component.samples()).sum();
        // The peak is either samples and two-byte coefficients, or later samples and pixels.
        samples + (2 * samples).max(3 * pixels)
    }

    /// Decodes the image.
    pub fn decode(self) -> Result<Rgb, JpegError> {
        let Self { mut decoder, first } = self;
        let all = decoder.frame()?.components.len();
        let several = decoder.frame()?.progressive || first.components.len() < all;
        decoder.frame_mut()?.allocate();
        decoder.scan(&first)?;
        while several && let Event::Scan(scan) = decoder.next()? {
            decoder.scan(&scan)?;
        }
        if !several {
            decoder.check_end()?;
        }
        let colours = decoder.colours()?;
        let frame = decoder.frame.take().ok_or(decoder.damaged("it has no frame"))?;
        frame.check_complete()?;
        Planes::of(frame)?.rgb(colours)
    }
}

#[cfg(test)]
mod tests {
    use super::super::orientation::turned;
    use super::*;
    use std::fs;
    use std::path::PathBuf;

    /// A file that `make.py` in its folder wrote with Pillow 13.0.
    fn fixture(name: &str) -> PathBuf {
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/jpeg").join(name)
    }

    fn decode(bytes: &[u8]) -> Result<Rgb, JpegError> {
        let jpeg = Jpeg::open(bytes)?;
        let orientation = jpeg.orientation();
        Ok(turned(jpeg.decode()?, orientation))
    }

    const NAMES: [&str; 14] = [
        "444",
        "422",
        "420",
        "progressive",
        "restarts",
        "rgb",
        "grey",
        "cmyk",
        "ycck",
        "turned",
        "440",
        "cut",
        "flipped",
        "garbage",
    ];

    #[test]
    fn pixels_are_those_of_pillow() {
        for name in NAMES {
            let found = decode(&fs::read(fixture(&format!("{name}.jpg"))).unwrap()).unwrap();
            let expected = image::open(fixture(&format!("{name}.png"))).unwrap().into_rgb8();
            assert_eq!([found.width as u32, found.height as u32], [expected.width(), expected.height()]);
            assert!(found.bytes == expected.into_raw(), "{name}");
        }
    }

    #[test]
    fn a_file_that_ends_early_is_refused_wherever_it_does() {
        for name in &NAMES[..10] {
            let whole = fs::read(fixture(&format!("{name}.jpg"))).unwrap();
            for end in 3..whole.len() - 2 {
                let refused = decode(&whole[..end]).is_err_and(|e| matches!(e, JpegError::Truncated { .. }));
                assert!(refused, "{name} after {end} of {} bytes", whole.len());
            }
        }
    }

    #[test]
    fn files_that_break_the_format_are_refused_without_a_panic() {
        let whole = fs::read(fixture("progressive.jpg")).unwrap();
        let scan = whole.windows(2).position(|two| two == [0xFF, 0xDA]).unwrap();
        let without = |from: &[u8]| whole.windows(from.len()).position(|part| part == from).unwrap();
        let said = |bytes: &[u8]| decode(bytes).unwrap_err().to_string();
        // The file without its last scan.
        let last = whole.windows(2).rposition(|two| two == [0xFF, 0xDA]).unwrap();
        let partial = [&whole[..last], &[0xFF, 0xD9]].concat();
        assert!(
            said(&partial).contains("the last scans of a progressive image are missing"),
            "{}",
            said(&partial)
        );
        assert!(said(&[&whole[..scan], &[0xFF, 0xD9]].concat()).contains("it has no image"));
        let arithmetic = without(&[0xFF, 0xC2]);
        let mut other = whole.clone();
        other[arithmetic + 1] = 0xCA;
        assert!(said(&other).contains("arithmetic coding"));
        for at in 2..whole.len() {
            for value in [0, 1, 0x80, 0xFF] {
                let mut broken = whole.clone();
                broken[at] = value;
                drop(decode(&broken));
            }
        }
    }

    #[test]
    fn the_memory_that_decoding_takes_is_known_before() {
        let whole = fs::read(fixture("444.jpg")).unwrap();
        // Five by three blocks of three components: samples and coefficients exceed samples and pixels.
        assert_eq!(Jpeg::open(&whole).unwrap().decode_bytes(), 3 * 3 * 64 * 15);
    }
}
