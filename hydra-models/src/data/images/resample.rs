//! Resizing, bit-identical to Pillow: two passes in fixed point, each rounded to bytes.

use super::decode::Rgb;

/// A resampling filter, with Pillow's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filter {
    /// 0.
    Nearest,
    /// 1.
    Lanczos,
    /// 2.
    Bilinear,
    /// 3.
    Bicubic,
    /// 4.
    Box,
    /// 5.
    Hamming,
}

/// Fractional bits of a weight.
const PRECISION: u32 = 32 - 8 - 2;
/// Bytes per pixel.
const COLOURS: usize = 3;

impl Filter {
    /// The filter with this Pillow number.
    pub fn numbered(number: u64) -> Option<Self> {
        let all = [Self::Nearest, Self::Lanczos, Self::Bilinear, Self::Bicubic, Self::Box, Self::Hamming];
        all.get(usize::try_from(number).ok()?).copied()
    }

    /// The filter's radius in source pixels at a scale of one.
    fn support(self) -> f64 {
        match self {
            Self::Nearest | Self::Box => 0.5,
            Self::Bilinear | Self::Hamming => 1.0,
            Self::Bicubic => 2.0,
            Self::Lanczos => 3.0,
        }
    }

    fn weight(self, x: f64) -> f64 {
        let sinc = |x: f64| {
            if x == 0.0 { 1.0 } else { (x * std::f64::consts::PI).sin() / (x * std::f64::consts::PI) }
        };
        let away = x.abs();
        match self {
            Self::Nearest | Self::Box => f64::from(u8::from(x > -0.5 && x <= 0.5)),
            Self::Bilinear => (1.0 - away).max(0.0),
            Self::Hamming if away == 0.0 => 1.0,
            Self::Hamming if away >= 1.0 => 0.0,
            Self::Hamming => sinc(away) * (0.54 + 0.46 * (away * std::f64::consts::PI).cos()),
            Self::Bicubic => cubic(away),
            Self::Lanczos if (-3.0..3.0).contains(&x) => sinc(x) * sinc(x / 3.0),
            Self::Lanczos => 0.0,
        }
    }
}

/// The Keys cubic kernel with Pillow's parameter.
fn cubic(x: f64) -> f64 {
    const A: f64 = -0.5;
    match x {
        x if x < 1.0 => ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0,
        x if x < 2.0 => (((x - 5.0) * x + 8.0) * x - 4.0) * A,
        _ => 0.0,
    }
}

/// Resizes the image to this width and height.
pub(super) fn resize(image: &Rgb, width: usize, height: usize, filter: Filter) -> Rgb {
    if filter == Filter::Nearest {
        return nearest(image, width, height);
    }
    let across = |image: &Rgb| rows(image, &taps(image.width, width, filter));
    let down = |image: &Rgb| columns(image, &taps(image.height, height, filter));
    match (image.width != width, image.height != height) {
        (false, false) => image.clone(),
        (true, false) => across(image),
        (false, true) => down(image),
        (true, true) => match columns_come_first([image.width, image.height], [width, height]) {
            true => across(&down(image)),
            false => down(&across(image)),
        },
    }
}

/// Returns whether Pillow 13 resizes columns before rows (rounding in between): the height shrinks, and by more than
/// twice as many pixels as the width.
fn columns_come_first(from: [usize; 2], to: [usize; 2]) -> bool {
    let [across, down] = [0, 1].map(|axis| from[axis] as i64 - to[axis] as i64);
    down > 0 && down > 2 * across
}

/// The source pixels of an output pixel: the index of the first, and all weights.
struct Taps {
    first: usize,
    weights: Vec<i32>,
}

fn taps(from: usize, to: usize, filter: Filter) -> Vec<Taps> {
    let scale = from as f64 / to as f64;
    let wider = scale.max(1.0);
    let support = filter.support() * wider;
    let of = |index: usize| {
        let center = (index as f64 + 0.5) * scale;
        let first = (center - support + 0.5).max(0.0) as usize;
        let end = ((center + support + 0.5) as usize).min(from);
        let weight = |at: usize| filter.weight((at as f64 - center + 0.5) * (1.0 / wider));
        let weights: Vec<f64> = (first..end).map(weight).collect();
        let mut sum = 0.0;
        weights.iter().for_each(|weight| sum += weight);
        let fixed = |weight: &f64| {
            let weight = if sum == 0.0 { *weight } else { weight / sum };
            (weight * f64::from(1 << PRECISION) + 0.5_f64.copysign(weight)) as i32
        };
        Taps { first, weights: weights.iter().map(fixed).collect() }
    };
    (0..to).map(of).collect()
}

/// The weighted sum of source pixels; `at` maps an index to its byte offset.
fn weighed(bytes: &[u8], weights: &[i32], at: impl Fn(usize) -> usize) -> u8 {
    let half = 1_i32 << (PRECISION - 1);
    let sum =
        weights.iter().enumerate().fold(half, |sum, (tap, weight)| sum + i32::from(bytes[at(tap)]) * weight);
    (sum >> PRECISION).clamp(0, 255) as u8
}

fn rows(image: &Rgb, taps: &[Taps]) -> Rgb {
    let mut bytes = Vec::with_capacity(image.height * taps.len() * COLOURS);
    for row in image.bytes.chunks_exact(image.width * COLOURS) {
        for Taps { first, weights } in taps {
            bytes.extend(
                (0..COLOURS).map(|colour| weighed(row, weights, |tap| (first + tap) * COLOURS + colour)),
            );
        }
    }
    Rgb { width: taps.len(), height: image.height, bytes }
}

fn columns(image: &Rgb, taps: &[Taps]) -> Rgb {
    let row = image.width * COLOURS;
    let mut bytes = Vec::with_capacity(taps.len() * row);
    for Taps { first, weights } in taps {
        bytes.extend((0..row).map(|x| weighed(&image.bytes, weights, |tap| (first + tap) * row + x)));
    }
    Rgb { width: image.width, height: taps.len(), bytes }
}

fn nearest(image: &Rgb, width: usize, height: usize) -> Rgb {
    let place = |index: usize, from: usize, to: usize| {
        (((index as f64 + 0.5) * (from as f64 / to as f64)) as usize).min(from - 1)
    };
    let mut bytes = Vec::with_capacity(width * height * COLOURS);
    for y in 0..height {
        let row = place(y, image.height, height) * image.width;
        for x in 0..width {
            let at = (row + place(x, image.width, width)) * COLOURS;
            bytes.extend(&image.bytes[at..at + COLOURS]);
        }
    }
    Rgb { width, height, bytes }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An image of one row with these red values; green is the reversed row, blue half the row.
    fn row(values: &[u8]) -> Rgb {
        let bytes = values.iter().flat_map(|value| [*value, 255 - value, value / 2]).collect();
        Rgb { width: values.len(), height: 1, bytes }
    }

    fn reds(image: &Rgb) -> Vec<u8> {
        image.bytes.chunks(3).map(|pixel| pixel[0]).collect()
    }

    /// A hash of the bytes.
    fn hash(bytes: &[u8]) -> u64 {
        bytes.iter().fold(0, |hash: u64, byte| hash.wrapping_mul(31).wrapping_add(u64::from(*byte) + 1))
    }

    #[test]
    fn bytes_are_those_of_pillow() {
        // From `Image.resize` of Pillow 13.0 for filters 0 to 5. The last one resizes columns first.
        let expected = [
            [0x60f3_5eb6_ca75_9dc0, 0xc95b_435f_2368_ef00, 0x8384_52de_9b4b_69a8, 0x1798_4b52_89dc_5168],
            [0x06b6_e7d5_5ab8_db12, 0x2b21_a719_2068_a2c3, 0xe5c3_24d2_7a51_bde0, 0x3dfd_cc2b_5210_8864],
            [0x38ad_e25c_bb55_1955, 0xdb3c_acb4_85b1_cd76, 0xbe16_8cff_bdb8_f4a5, 0x9df3_b47b_281e_d6f6],
            [0x1364_7f28_2c05_86c3, 0x0a2a_175f_478a_004b, 0xca7f_a45e_7b8b_106f, 0x2312_2578_09c5_a804],
            [0x7d04_5cb5_27fc_503e, 0xc95b_435f_2368_ef00, 0x8300_9aa6_f45e_a9fa, 0xe6d2_e951_117b_2c47],
            [0x14d0_be92_1408_4374, 0xbb0e_4b2d_2da4_99ad, 0x5ba8_60c4_e485_cbb4, 0x4e1f_10ed_fa50_e307],
        ];
        let (width, height) = (17, 11);
        let byte = |at: usize| ((at * at * 7 + at * 29 + at / 51 * 13) % 256) as u8;
        let image = Rgb { width, height, bytes: (0..width * height * 3).map(byte).collect() };
        for (number, expected) in (0..).zip(expected) {
            let filter = Filter::numbered(number).unwrap();
            let resized = [(8, 8), (32, 32), (17, 5), (40, 3)]
                .map(|(width, height)| hash(&resize(&image, width, height, filter).bytes));
            assert_eq!(resized, expected, "{filter:?}");
        }
    }

    #[test]
    fn sizes_that_are_there_stay_as_they_are() {
        let image = row(&[1, 2, 3]);
        for number in 0..6 {
            assert_eq!(resize(&image, 3, 1, Filter::numbered(number).unwrap()), image);
        }
        assert_eq!(Filter::numbered(6), None);
    }

    #[test]
    fn a_line_is_weighed_as_the_formula_says() {
        // Halved: three tenths and a half of the two pixels inside, an eighth of each existing neighbour.
        let halved = reds(&resize(&row(&[0, 80, 160, 240]), 2, 1, Filter::Bilinear));
        let (inner, outer) = (0.75 / 2.0, 0.25 / 2.0);
        let first = (inner * 80.0 + outer * 160.0) / (2.0 * inner + outer);
        assert_eq!(halved, [(first + 0.5) as u8, (240.0 - first + 0.5) as u8]);
        // Doubled: a quarter of the neighbour.
        assert_eq!(reds(&resize(&row(&[0, 100]), 4, 1, Filter::Bilinear)), [0, 25, 75, 100]);
        assert_eq!(reds(&resize(&row(&[0, 80, 160, 240]), 2, 1, Filter::Box)), [40, 200]);
        assert_eq!(reds(&resize(&row(&[0, 80, 160, 240]), 2, 1, Filter::Nearest)), [80, 240]);
    }

    #[test]
    fn edges_overshoot_and_are_clamped() {
        for filter in [Filter::Bicubic, Filter::Lanczos] {
            let edge = reds(&resize(&row(&[0, 0, 0, 255, 255, 255]), 12, 1, filter));
            assert_eq!((edge[0], edge[11]), (0, 255));
            assert!(
                edge.windows(2).all(|pair| pair[0] <= pair[1] || pair[1] > 240 || pair[0] < 15),
                "{edge:?}"
            );
        }
        let edge = reds(&resize(&row(&[50, 50, 50, 200, 200, 200]), 12, 1, Filter::Bicubic));
        assert!(edge.iter().any(|value| *value < 50) && edge.iter().any(|value| *value > 200), "{edge:?}");
    }

    #[test]
    fn rows_and_columns_are_treated_alike() {
        let image = row(&[9, 200, 31, 7, 90]);
        let upright = Rgb { width: 1, height: 5, bytes: image.bytes.clone() };
        for number in 0..6 {
            let filter = Filter::numbered(number).unwrap();
            let (across, down) = (resize(&image, 3, 1, filter), resize(&upright, 1, 3, filter));
            assert_eq!(across.bytes, down.bytes, "{filter:?}");
        }
        let grey = Rgb { width: 5, height: 4, bytes: vec![77; 60] };
        assert_eq!(resize(&grey, 3, 7, Filter::Lanczos).bytes, vec![77; 63]);
    }
}
