//! Turns samples into pixels: upsampling and colour conversion as in libjpeg, CMYK as in Pillow.

use super::JpegError;
use super::markers::{Colours, Component, Frame};
use super::transform;
use crate::data::images::decode::Rgb;

/// The samples of an image.
pub(super) struct Planes {
    size: [usize; 2],
    planes: Vec<Plane>,
}

/// The samples of a component.
struct Plane {
    bytes: Vec<u8>,
    stride: usize,
    samples: [usize; 2],
    upsampling: Upsampling,
}

/// How a component's rows are upsampled to the image.
enum Upsampling {
    /// Interpolated between neighbours, horizontally, vertically or both.
    Smooth([bool; 2]),
    /// Each sample repeated horizontally and vertically.
    Repeated([usize; 2]),
}

impl Planes {
    /// Transforms the blocks of an image and frees its coefficients.
    pub fn of(frame: Frame) -> Result<Self, JpegError> {
        let Frame { size, components, most, .. } = frame;
        let planes =
            components.into_iter().map(|component| Plane::of(component, most)).collect::<Result<_, _>>()?;
        Ok(Self { size, planes })
    }

    /// The pixels of the image.
    pub fn rgb(&self, colours: Colours) -> Result<Rgb, JpegError> {
        let [width, height] = self.size;
        let mut bytes = Vec::with_capacity(3 * width * height);
        let mut rows = vec![Vec::new(); self.planes.len()];
        for y in 0..height {
            self.planes.iter().zip(&mut rows).for_each(|(plane, row)| plane.row(y, row));
            let at = |plane: usize, x: usize| rows[plane][x];
            for x in 0..width {
                bytes.extend(match colours {
                    Colours::Grey => [at(0, x); 3],
                    Colours::Rgb => [at(0, x), at(1, x), at(2, x)],
                    Colours::YCbCr => of_luminance(at(0, x), at(1, x), at(2, x)),
                    // Adobe's programs write CMYK inverted; Pillow assumes this for all files.
                    Colours::Cmyk => of_inks([at(0, x), at(1, x), at(2, x)].map(|ink| !ink), !at(3, x)),
                    Colours::Ycck => of_inks(of_luminance(at(0, x), at(1, x), at(2, x)), !at(3, x)),
                });
            }
        }
        Ok(Rgb { width, height, bytes })
    }
}

impl Plane {
    fn of(component: Component, most: [usize; 2]) -> Result<Self, JpegError> {
        let Component { sampling, samples, blocks, padded, coefficients, latched, .. } = component;
        let stride = 8 * blocks[0];
        let mut bytes = vec![128; stride * 8 * blocks[1]];
        let quantizer = latched.unwrap_or([0; 64]);
        for row in 0..blocks[1] {
            for column in 0..blocks[0] {
                let from = 64 * (row * padded[0] + column);
                let block = transform::samples(&coefficients[from..from + 64], &quantizer);
                let block =
                    block.ok_or(JpegError::Damaged { what: "a block with out-of-range coefficients" })?;
                for (y, line) in block.as_chunks::<8>().0.iter().enumerate() {
                    bytes[(8 * row + y) * stride + 8 * column..][..8].copy_from_slice(line);
                }
            }
        }
        if (0..2).any(|axis| !most[axis].is_multiple_of(sampling[axis])) {
            return Err(JpegError::Unsupported { what: "a JPEG with non-integral sampling ratios" });
        }
        let upsampling = match [0, 1].map(|axis| most[axis] / sampling[axis]) {
            [2, down @ (1 | 2)] if samples[0] > 2 => Upsampling::Smooth([true, down == 2]),
            [1, 2] => Upsampling::Smooth([false, true]),
            times => Upsampling::Repeated(times),
        };
        Ok(Self { bytes, stride, samples, upsampling })
    }

    fn samples_of(&self, row: usize) -> &[u8] {
        &self.bytes[row.min(self.samples[1] - 1) * self.stride..][..self.samples[0]]
    }

    /// Appends row `y` of the image; it may be longer than the image is wide.
    fn row(&self, y: usize, out: &mut Vec<u8>) {
        out.clear();
        match self.upsampling {
            Upsampling::Repeated([across, down]) => {
                let row = self.samples_of(y / down).iter();
                out.extend(row.flat_map(|sample| std::iter::repeat_n(*sample, across)));
            }
            Upsampling::Smooth([true, false]) => across(self.samples_of(y), out),
            Upsampling::Smooth([across, _]) => {
                let (near, other) = self.neighbours(y);
                let sums = near.iter().zip(other).map(|(near, far)| 3 * u16::from(*near) + u16::from(*far));
                match across {
                    true => across_sums(&sums.collect::<Vec<_>>(), out),
                    false => out.extend(sums.map(|sum| ((sum + 1 + (y as u16 & 1)) >> 2) as u8)),
                }
            }
        }
    }

    /// The nearest row of samples to row `y` of the image, and the one on its other side.
    fn neighbours(&self, y: usize) -> (&[u8], &[u8]) {
        let near = y / 2;
        let other = if y.is_multiple_of(2) { near.saturating_sub(1) } else { near + 1 };
        (self.samples_of(near), self.samples_of(other))
    }
}

/// Upsamples a row by two: three quarters of a sample and a quarter of its neighbour.
fn across(row: &[u8], out: &mut Vec<u8>) {
    let last = row.len() - 1;
    for (at, sample) in row.iter().enumerate() {
        let of = |other: u8, bias: u16| ((3 * u16::from(*sample) + u16::from(other) + bias) >> 2) as u8;
        out.push(if at == 0 { *sample } else { of(row[at - 1], 1) });
        out.push(if at == last { *sample } else { of(row[at + 1], 2) });
    }
}

/// The same for sums scaled by four.
fn across_sums(row: &[u16], out: &mut Vec<u8>) {
    let last = row.len() - 1;
    for (at, sum) in row.iter().enumerate() {
        let of = |other: u16, bias: u16| ((3 * sum + other + bias) >> 4) as u8;
        out.push(of(row[at.saturating_sub(1)], 8));
        out.push(of(row[(at + 1).min(last)], 7));
    }
}

/// Converts YCbCr to RGB in 16-bit fixed point.
fn of_luminance(y: u8, blue: u8, red: u8) -> [u8; 3] {
    let (y, blue, red) = (i32::from(y), i32::from(blue) - 128, i32::from(red) - 128);
    let half = 1 << 15;
    let colours = [
        y + ((91_881 * red + half) >> 16),
        y + ((-22_554 * blue - 46_802 * red + half) >> 16),
        y + ((116_130 * blue + half) >> 16),
    ];
    colours.map(|colour| colour.clamp(0, 255) as u8)
}

/// Converts CMYK to RGB as Pillow's `convert("RGB")` does.
fn of_inks(inks: [u8; 3], black: u8) -> [u8; 3] {
    let left = 255 - u32::from(black);
    inks.map(|ink| {
        let product = u32::from(ink) * left + 128;
        (left - ((product + (product >> 8)) >> 8)) as u8
    })
}
