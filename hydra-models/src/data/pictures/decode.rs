//! Files of pictures as bytes of red, green and blue.

use crate::data::DataError;
use image::{ColorType, DynamicImage, ExtendedColorType, ImageDecoder, ImageFormat, ImageReader};
use std::fs;
use std::io::Cursor;
use std::path::Path;

/// A picture: rows of pixels, each three bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Rgb {
    pub width: usize,
    pub height: usize,
    pub bytes: Vec<u8>,
}

/// Reads a PNG or a JPEG, whatever its name ends with. Greys become equal colours, palettes what they stand for, what is
/// transparent loses that, and of colours of 16 bits the upper eight are kept, as `Image.open(..).convert("RGB")` of Pillow does.
pub(super) fn decode(path: &Path) -> Result<Rgb, DataError> {
    let failed = |source| DataError::Picture { path: path.to_owned(), source };
    let bytes = fs::read(path).map_err(|source| DataError::Read { path: path.to_owned(), source })?;
    let format = image::guess_format(&bytes).ok();
    let Some(format) = format.filter(|format| matches!(format, ImageFormat::Png | ImageFormat::Jpeg)) else {
        let found = format.map_or("neither".to_owned(), |format| format!("{format:?}"));
        return Err(DataError::PictureKind { path: path.to_owned(), found });
    };
    let reader = ImageReader::with_format(Cursor::new(bytes), format);
    let mut decoder = reader.into_decoder().map_err(failed)?;
    let mode = decoder.original_color_type();
    let is_grey = decoder.color_type() == ColorType::L16;
    if is_grey || matches!(mode, ExtendedColorType::Cmyk8 | ExtendedColorType::Cmyk16) {
        let found = if is_grey { "greys of 16 bits" } else { "the inks of print (CMYK)" };
        return Err(DataError::PictureMode { path: path.to_owned(), found });
    }
    decoder.set_limits(image::Limits::default()).map_err(failed)?;
    Ok(rgb(DynamicImage::from_decoder(decoder).map_err(failed)?))
}

/// The kinds of files that are pictures by their names, of which the first are read.
pub(super) fn is_picture(path: &Path) -> bool {
    const NAMES: [&str; 12] =
        ["png", "jpg", "jpeg", "jpe", "jfif", "gif", "bmp", "webp", "tif", "tiff", "ppm", "pgm"];
    path.extension().is_some_and(|ending| NAMES.iter().any(|name| ending.eq_ignore_ascii_case(name)))
}

fn rgb(picture: DynamicImage) -> Rgb {
    let (width, height) = (picture.width() as usize, picture.height() as usize);
    let upper = |values: &[u16]| values.iter().map(|value| (value >> 8) as u8).collect::<Vec<u8>>();
    let bytes = match picture {
        DynamicImage::ImageRgb16(wide) => upper(&wide),
        DynamicImage::ImageRgba16(wide) => {
            upper(&wide).chunks_exact(4).flat_map(|pixel| [pixel[0], pixel[1], pixel[2]]).collect()
        }
        DynamicImage::ImageLumaA16(wide) => {
            upper(&wide).chunks_exact(2).flat_map(|pixel| [pixel[0]; 3]).collect()
        }
        other => other.into_rgb8().into_raw(),
    };
    Rgb { width, height, bytes }
}
