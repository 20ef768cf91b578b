//! Decodes image files to RGB bytes.

use super::jpeg::Jpeg;
use super::memory::DecodeMemory;
use super::orientation::{of_exif, of_xmp, turned};
use super::png::closed;
use crate::data::DataError;
use image::codecs::png::PngDecoder;
use image::{ColorType, DynamicImage, ImageDecoder, ImageFormat, Limits};
use std::fs;
use std::io::Cursor;
use std::path::Path;

/// Maximum number of pixels; Pillow rejects a larger file as a decompression bomb.
const MOST_PIXELS: u64 = 178_956_970;

/// An image: rows of pixels, three bytes each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Rgb {
    pub width: usize,
    pub height: usize,
    pub bytes: Vec<u8>,
}

/// Reads a PNG or JPEG file, regardless of its name's extension, as Pillow's
/// `exif_transpose(Image.open(..)).convert("RGB")`: greyscale, palette and CMYK become RGB, alpha is dropped, of 16-bit
/// colours the upper eight bits are kept, and the image is rotated according to its Exif or XMP orientation.
pub(super) fn decode(path: &Path, memory: &DecodeMemory) -> Result<Rgb, DataError> {
    let unread = |source| DataError::Read { path: path.to_owned(), source };
    let length = fs::metadata(path).map_err(unread)?.len();
    memory.check(length, || (path.to_owned(), None))?;
    let bytes = fs::read(path).map_err(unread)?;
    match image::guess_format(&bytes).ok() {
        Some(ImageFormat::Jpeg) => jpeg(path, &bytes, memory),
        Some(ImageFormat::Png) => png(path, &bytes, memory),
        other => {
            let found = other.map_or("neither".to_owned(), |format| format!("{format:?}"));
            Err(DataError::ImageKind { path: path.to_owned(), found })
        }
    }
}

fn jpeg(path: &Path, bytes: &[u8], memory: &DecodeMemory) -> Result<Rgb, DataError> {
    let failed = |source| DataError::Jpeg { path: path.to_owned(), source };
    let jpeg = Jpeg::open(bytes).map_err(failed)?;
    let size = jpeg.size();
    let orientation = jpeg.orientation();
    let needed = bytes.len() as u64 + jpeg.decode_bytes().max(turn_bytes(size, orientation));
    let _memory = memory.take(needed, || (path.to_owned(), Some(size)))?;
    check_pixels(path, size)?;
    Ok(turned(jpeg.decode().map_err(failed)?, orientation))
}

fn png(path: &Path, bytes: &[u8], memory: &DecodeMemory) -> Result<Rgb, DataError> {
    let failed = |source| DataError::Image { path: path.to_owned(), source };
    let closed = closed(bytes);
    let bytes = closed.as_deref().unwrap_or(bytes);
    let mut limits = Limits::no_limits();
    limits.max_alloc = Some(memory.limit());
    let mut decoder = PngDecoder::with_limits(Cursor::new(bytes), limits.clone()).map_err(failed)?;
    let size = [decoder.dimensions().0, decoder.dimensions().1].map(|side| side as usize);
    let colours = decoder.color_type();
    if colours == ColorType::L16 {
        return Err(DataError::ImageMode { path: path.to_owned(), found: "16-bit greyscale" });
    }
    let exif = decoder.exif_metadata().map_err(failed)?.and_then(|exif| of_exif(&exif));
    let xmp = || decoder.xmp_metadata().map(|xmp| xmp.and_then(|xmp| of_xmp(&xmp)));
    let orientation = exif.map_or_else(xmp, |exif| Ok(Some(exif))).map_err(failed)?.unwrap_or(1);
    let pixels = size[0] as u64 * size[1] as u64;
    let converted = if colours == ColorType::Rgb8 { 0 } else { 4 * pixels };
    let decoded = pixels * u64::from(colours.bytes_per_pixel()) + converted;
    let files = 1 + u64::from(closed.is_some());
    let needed = files * bytes.len() as u64 + decoded.max(turn_bytes(size, orientation));
    let _memory = memory.take(needed, || (path.to_owned(), Some(size)))?;
    check_pixels(path, size)?;
    decoder.set_limits(limits).map_err(failed)?;
    Ok(turned(rgb(DynamicImage::from_decoder(decoder).map_err(failed)?), orientation))
}

/// The bytes that rotating an image of this size takes.
fn turn_bytes(size: [usize; 2], orientation: u8) -> u64 {
    if orientation == 1 { 0 } else { 6 * size[0] as u64 * size[1] as u64 }
}

fn check_pixels(path: &Path, [width, height]: [usize; 2]) -> Result<(), DataError> {
    match width as u64 * height as u64 > MOST_PIXELS {
        true => Err(DataError::ImagePixels { path: path.to_owned(), width, height, most: MOST_PIXELS }),
        false => Ok(()),
    }
}

/// Returns whether the path has an extension of a supported image format.
pub(super) fn is_read(path: &Path) -> bool {
    has_ending(path, &["png", "jpg", "jpeg", "jpe", "jfif"])
}

/// Returns whether the path has an extension of an image format that Transformers reads but Hydra does not.
pub(super) fn is_other_image(path: &Path) -> bool {
    has_ending(path, &["gif", "bmp", "webp", "tif", "tiff", "ppm", "pgm", "avif"])
}

fn has_ending(path: &Path, names: &[&str]) -> bool {
    path.extension().is_some_and(|ending| names.iter().any(|name| ending.eq_ignore_ascii_case(name)))
}

fn rgb(image: DynamicImage) -> Rgb {
    let (width, height) = (image.width() as usize, image.height() as usize);
    let upper = |values: &[u16]| values.iter().map(|value| (value >> 8) as u8).collect::<Vec<u8>>();
    let bytes = match image {
        DynamicImage::ImageRgb16(wide) => upper(&wide),
        DynamicImage::ImageRgba16(wide) => wide
            .as_chunks::<4>()
            .0
            .iter()
            .flat_map(|[r, g, b, _]| [r, g, b].map(|c| (c >> 8) as u8))
            .collect(),
        DynamicImage::ImageLumaA16(wide) => {
            wide.as_chunks::<2>().0.iter().flat_map(|[grey, _]| [(grey >> 8) as u8; 3]).collect()
        }
        other => other.into_rgb8().into_raw(),
    };
    Rgb { width, height, bytes }
}
