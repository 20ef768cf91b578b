//! Pixels of the samples of all components: upsampled and converted as libjpeg does it, and inks as Pillow does.

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

/// How the rows of a component become those of the image.
enum Upsampling {
    /// Between neighbours, horizontally, vertically or both ways.
    Smooth([bool; 2]),
    /// Each sample so often across and down.
    Repeated([usize; 2]),
}

impl Planes {
    /// Transforms the blocks of an image, whose coefficients go.
    pub fn of(frame: Frame) -> Result<Self, JpegError> {
        let Frame { size, components, most, .. } = frame;
        let planes =
            components.into_iter().map(|component| Plane::of(component, most)).collect::<Result<_, _>>()?;
        Ok(Self { size, planes })
    }

    /// The pixels.
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
                    // Adobe's programs write inks inverted, which Pillow takes to be so in all files.
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
                let block = block.ok_or(JpegError::Damaged { what: "a block of impossible coefficients" })?;
                for (y, line) in block.as_chunks::<8>().0.iter().enumerate() {
                    bytes[(8 * row + y) * stride + 8 * column..][..8].copy_from_slice(line);
                }
            }
        }
        if (0..2).any(|axis| !most[axis].is_multiple_of(sampling[axis])) {
            return Err(JpegError::Unsupported { what: "a JPEG of uneven sampling factors" });
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

    /// Row `y` of the image; it may be longer than that is wide.
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

    /// The nearest row of samples, and the one on the other side of row `y` of the image.
    fn neighbours(&self, y: usize) -> (&[u8], &[u8]) {
        let near = y / 2;
        let other = if y.is_multiple_of(2) { near.saturating_sub(1) } else { near + 1 };
        (self.samples_of(near), self.samples_of(other))
    }
}

/// Two pixels for each sample: three quarters of it, and a quarter of the neighbour.
fn across(row: &[u8], out: &mut Vec<u8>) {
    let last = row.len() - 1;
    for (at, sample) in row.iter().enumerate() {
        let of = |other: u8, bias: u16| ((3 * u16::from(*sample) + u16::from(other) + bias) >> 2) as u8;
        out.push(if at == 0 { *sample } else { of(row[at - 1], 1) });
        out.push(if at == last { *sample } else { of(row[at + 1], 2) });
    }
}

/// The same for sums that are four times as large.
fn across_sums(row: &[u16], out: &mut Vec<u8>) {
    let last = row.len() - 1;
    for (at, sum) in row.iter().enumerate() {
        let of = |other: u16, bias: u16| ((3 * sum + other + bias) >> 4) as u8;
        out.push(of(row[at.saturating_sub(1)], 8));
        out.push(of(row[(at + 1).min(last)], 7));
    }
}

/// Red, green and blue of a luminance and two differences, with 16 bits behind the point.
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

/// Red, green and blue of inks on white paper, as `convert("RGB")` of Pillow makes them.
fn of_inks(inks: [u8; 3], black: u8) -> [u8; 3] {
    let left = 255 - u32::from(black);
    inks.map(|ink| {
        let product = u32::from(ink) * left + 128;
        (left - ((product + (product >> 8)) >> 8)) as u8
    })
}
