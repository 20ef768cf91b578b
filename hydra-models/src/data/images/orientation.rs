//! The orientation of an image, from Exif and XMP data.

use super::decode::Rgb;
use image::metadata::Orientation;

/// Reads the orientation from Exif data, which may start with its segment marker: 1 (upright) to 8.
pub(super) fn of_exif(exif: &[u8]) -> Option<u8> {
    let exif = exif.strip_prefix(b"Exif\0\0").unwrap_or(exif);
    Orientation::from_exif_chunk(exif).map(Orientation::to_exif)
}

/// Reads the orientation from XMP data, as Pillow does.
pub(super) fn of_xmp(xmp: &[u8]) -> Option<u8> {
    const NAME: &[u8] = b"tiff:Orientation";
    let digit = |at: usize| match &xmp[at..] {
        [b'=', b'"', digit @ b'0'..=b'9', ..] | [b'>', digit @ b'0'..=b'9', ..] => Some(digit - b'0'),
        _ => None,
    };
    let ends = xmp.windows(NAME.len()).enumerate().filter(|(_, found)| *found == NAME);
    ends.filter_map(|(at, _)| digit(at + NAME.len())).next()
}

/// Rotates or mirrors the image upright.
pub(super) fn turned(image: Rgb, orientation: u8) -> Rgb {
    if !(2..=8).contains(&orientation) {
        return image;
    }
    let Rgb { width, height, bytes } = image;
    let (right, bottom) = (width - 1, height - 1);
    let size = if orientation < 5 { [width, height] } else { [height, width] };
    let from = |x: usize, y: usize| match orientation {
        2 => (right - x, y),
        3 => (right - x, bottom - y),
        4 => (x, bottom - y),
        5 => (y, x),
        6 => (y, bottom - x),
        7 => (right - y, bottom - x),
        _ => (right - y, x),
    };
    let mut turned = Vec::with_capacity(bytes.len());
    for y in 0..size[1] {
        for x in 0..size[0] {
            let (x, y) = from(x, y);
            turned.extend_from_slice(&bytes[3 * (y * width + x)..][..3]);
        }
    }
    Rgb { width: size[0], height: size[1], bytes: turned }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_turned_as_exif_transpose_of_pillow_does() {
        // Three by two pixels; the expected values are from Pillow 13.
        let image = || Rgb { width: 3, height: 2, bytes: (0..6).flat_map(|pixel| [pixel; 3]).collect() };
        for (orientation, expected) in [
            (1, [0, 1, 2, 3, 4, 5]),
            (2, [2, 1, 0, 5, 4, 3]),
            (3, [5, 4, 3, 2, 1, 0]),
            (4, [3, 4, 5, 0, 1, 2]),
            (5, [0, 3, 1, 4, 2, 5]),
            (6, [3, 0, 4, 1, 5, 2]),
            (7, [5, 2, 4, 1, 3, 0]),
            (8, [2, 5, 1, 4, 0, 3]),
            (9, [0, 1, 2, 3, 4, 5]),
        ] {
            let turned = turned(image(), orientation);
            let pixels: Vec<u8> = turned.bytes.iter().step_by(3).copied().collect();
            assert_eq!(pixels, expected, "orientation {orientation}");
            let sides = if (5..9).contains(&orientation) { (2, 3) } else { (3, 2) };
            assert_eq!((turned.width, turned.height), sides);
        }
    }

    #[test]
    fn orientations_are_found_in_exif_and_xmp() {
        let exif =
            [b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0".as_slice()].concat();
        assert_eq!((of_exif(&exif), of_exif(&exif[6..]), of_exif(b"Exif\0\0")), (Some(6), Some(6), None));
        assert_eq!(of_xmp(br#"<x tiff:Orientation="8"/>"#), Some(8));
        assert_eq!(of_xmp(b"<tiff:Orientation>3</tiff:Orientation>"), Some(3));
        assert_eq!(of_xmp(b"nothing"), None);
    }
}
