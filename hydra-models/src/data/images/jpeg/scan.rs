//! Decodes a scan.

use super::JpegError;
use super::entropy::Bits;
use super::huffman::Huffman;
use super::markers::{Component, Decoder, Tables};
use super::transform::ORDER;

/// The maximum number of blocks in an MCU.
const MAX_BLOCKS: usize = 10;

/// A scan header.
pub(super) struct Scan {
    /// Component indices, each with the indices of its DC and AC Huffman tables.
    pub components: Vec<(usize, [usize; 2])>,
    /// The first and the last coefficient in zigzag order (spectral selection).
    band: [usize; 2],
    /// The lowest bit known before and after this scan (successive approximation).
    bits: [u8; 2],
}

/// How the blocks of a scan are coded.
#[derive(Clone, Copy, PartialEq)]
enum Coding {
    Sequential,
    DcFirst,
    DcRefined,
    AcFirst,
    AcRefined,
}

/// The decoding state of a component.
struct ComponentState<'t> {
    dc: Option<&'t Huffman>,
    ac: Option<&'t Huffman>,
    /// The DC value of the previous block.
    last_dc: i32,
}

/// A scan in progress.
struct ScanState<'a, 't> {
    scan: &'t Scan,
    coding: Coding,
    bits: Bits<'a>,
    parts: Vec<ComponentState<'t>>,
    /// Remaining blocks of an end-of-band run.
    run: i32,
    interval: usize,
    /// MCUs until the next restart, and the restart's number.
    until: usize,
    restart: u8,
}

impl Scan {
    pub fn read(segment: &[u8], decoder: &Decoder) -> Result<Self, JpegError> {
        let wrong = || decoder.damaged("a scan header of the wrong length");
        let (count, rest) = segment.split_first().ok_or_else(wrong)?;
        let count = usize::from(*count);
        if !(1..=4).contains(&count) || rest.len() != 2 * count + 3 {
            return Err(wrong());
        }
        let mut components: Vec<(usize, [usize; 2])> = Vec::new();
        for [id, tables] in rest[..2 * count].as_chunks::<2>().0 {
            let known = decoder.frame()?.components.iter().position(|known| known.id == *id);
            let at = known.filter(|at| components.iter().all(|(other, _)| other != at));
            let at = at.ok_or_else(|| decoder.damaged("a scan of an unknown component"))?;
            components.push((at, [tables >> 4, tables & 15].map(usize::from)));
        }
        let [first, last, bits] = rest[2 * count..] else { return Err(wrong()) };
        let scan = Self { components, band: [first, last].map(usize::from), bits: [bits >> 4, bits & 15] };
        scan.check(decoder)?;
        Ok(scan)
    }

    fn check(&self, decoder: &Decoder) -> Result<(), JpegError> {
        let frame = decoder.frame()?;
        let ([first, last], [high, low]) = (self.band, self.bits);
        let bad_band =
            if first == 0 { last != 0 } else { first > last || last > 63 || self.components.len() != 1 };
        if frame.progressive && (bad_band || high != 0 && low + 1 != high || low > 13) {
            return Err(decoder.damaged("a scan of invalid coefficients"));
        }
        let blocks =
            self.components.iter().map(|(at, _)| frame.components[*at].sampling.iter().product::<usize>());
        match self.components.len() > 1 && blocks.sum::<usize>() > MAX_BLOCKS {
            true => Err(decoder.damaged("an MCU with too many blocks")),
            false => Ok(()),
        }
    }

    fn coding(&self, progressive: bool) -> Coding {
        match (progressive, self.band[0] == 0, self.bits[0] == 0) {
            (false, ..) => Coding::Sequential,
            (true, true, true) => Coding::DcFirst,
            (true, true, false) => Coding::DcRefined,
            (true, false, true) => Coding::AcFirst,
            (true, false, false) => Coding::AcRefined,
        }
    }
}

impl Decoder<'_> {
    /// Decodes the blocks of a scan.
    pub fn scan(&mut self, scan: &Scan) -> Result<(), JpegError> {
        let coding = scan.coding(self.frame()?.progressive);
        self.latch(scan, coding)?;
        let mut frame = self.frame.take().ok_or_else(|| self.damaged("a scan without a frame"))?;
        let parts = scan.components.iter().map(|(_, tables)| self.part(*tables, coding));
        let parts = parts.collect::<Result<_, _>>()?;
        let (bits, interval) = (self.bits(), self.restart_interval);
        let mut reading =
            ScanState { scan, coding, bits, parts, run: 0, interval, until: interval, restart: 0 };
        let units = match scan.components.as_slice() {
            [(one, _)] => frame.components[*one].blocks,
            _ => [0, 1].map(|axis| frame.size[axis].div_ceil(8 * frame.most[axis])),
        };
        for row in 0..units[1] {
            for column in 0..units[0] {
                reading.unit(&mut frame.components, [column, row])?;
            }
        }
        let (at, marker) = (reading.bits.at, reading.bits.marker);
        (self.at, self.marker, self.frame) = (at, marker, Some(frame));
        Ok(())
    }

    /// Latches the quantization tables of components at their first scan, and updates the known bits.
    fn latch(&mut self, scan: &Scan, coding: Coding) -> Result<(), JpegError> {
        let (tables, missing) = (self.quantizers, self.damaged("a scan without its quantization table"));
        let frame = self.frame_mut()?;
        for (at, _) in &scan.components {
            let component = &mut frame.components[*at];
            if component.latched.is_none() {
                component.latched = tables.get(component.quantizer).copied().flatten();
            }
            if component.latched.is_none() {
                return Err(missing);
            }
            if coding != Coding::Sequential {
                component.known[scan.band[0]..=scan.band[1]].fill(scan.bits[1] as i8);
            }
        }
        Ok(())
    }

    fn part(&self, [dc, ac]: [usize; 2], coding: Coding) -> Result<ComponentState<'_>, JpegError> {
        let table = |tables: &'_ Tables<Huffman>, number: usize| {
            tables.get(number).and_then(Option::as_ref).is_some()
        };
        let needs_dc = matches!(coding, Coding::Sequential | Coding::DcFirst);
        let needs_ac = !matches!(coding, Coding::DcFirst | Coding::DcRefined);
        if needs_dc && !table(&self.dc, dc) || needs_ac && !table(&self.ac, ac) {
            return Err(self.damaged("a scan without its Huffman table"));
        }
        let (dc, ac) = (self.dc.get(dc), self.ac.get(ac));
        Ok(ComponentState { dc: dc.and_then(Option::as_ref), ac: ac.and_then(Option::as_ref), last_dc: 0 })
    }
}

impl ScanState<'_, '_> {
    /// Decodes the MCU in this column and row.
    fn unit(&mut self, components: &mut [Component], [column, row]: [usize; 2]) -> Result<(), JpegError> {
        if self.interval > 0 {
            if self.until == 0 {
                self.restart()?;
            }
            self.until -= 1;
        }
        // Bits past a marker are zero, and refining by zeros changes nothing.
        if self.bits.starved && self.coding != Coding::DcRefined {
            return Ok(());
        }
        if let [(at, _)] = self.scan.components.as_slice() {
            return self.block(&mut components[*at], 0, [column, row]);
        }
        for part in 0..self.parts.len() {
            let component = &mut components[self.scan.components[part].0];
            let [across, down] = component.sampling;
            for y in 0..down {
                for x in 0..across {
                    self.block(component, part, [column * across + x, row * down + y])?;
                }
            }
        }
        Ok(())
    }

    /// Resumes after a restart marker, or resynchronizes as libjpeg does if another marker is found.
    fn restart(&mut self) -> Result<(), JpegError> {
        self.bits.clear();
        let mut marker = self.bits.marker.map_or_else(|| self.bits.next_marker(), Ok)?;
        let number = |marker: u8| marker.wrapping_sub(0xD0);
        loop {
            let ahead = number(marker).wrapping_sub(self.restart) & 7;
            match (marker, ahead) {
                (0xD0..=0xD7, 0 | 3..=5) => {
                    self.bits.marker = None;
                    break;
                }
                // The marker belongs to a later segment; this one is empty.
                (0xD0..=0xD7, 1 | 2) | (0xC0..=0xCF | 0xD8..=0xFF, _) => break,
                _ => marker = self.bits.next_marker()?,
            }
        }
        self.restart = (self.restart + 1) & 7;
        self.parts.iter_mut().for_each(|part| part.last_dc = 0);
        (self.run, self.until) = (0, self.interval);
        if self.bits.marker.is_none() {
            self.bits.starved = false;
        }
        Ok(())
    }

    fn block(
        &mut self,
        component: &mut Component,
        part: usize,
        [column, row]: [usize; 2],
    ) -> Result<(), JpegError> {
        let from = 64 * (row * component.padded[0] + column);
        let block = &mut component.coefficients[from..from + 64];
        match self.coding {
            Coding::Sequential => {
                block[0] = self.dc_value(part)? as i16;
                self.ac(part, block, [1, 63])
            }
            Coding::DcFirst => {
                block[0] = (self.dc_value(part)? << self.scan.bits[1]) as i16;
                Ok(())
            }
            Coding::DcRefined => {
                block[0] |= (self.bits.get(1)? << self.scan.bits[1]) as i16;
                Ok(())
            }
            Coding::AcFirst if self.run > 0 => {
                self.run -= 1;
                Ok(())
            }
            Coding::AcFirst => self.ac(part, block, self.scan.band),
            Coding::AcRefined => self.refine(part, block),
        }
    }

    fn dc_value(&mut self, part: usize) -> Result<i32, JpegError> {
        let Some(table) = self.parts[part].dc else { return Ok(0) };
        let size = u32::from(self.bits.code(table)?);
        let difference = self.bits.signed(size)?;
        self.parts[part].last_dc = self.parts[part].last_dc.wrapping_add(difference);
        Ok(self.parts[part].last_dc)
    }

    /// Decodes the first bits of a band of AC coefficients.
    fn ac(&mut self, part: usize, block: &mut [i16], [first, last]: [usize; 2]) -> Result<(), JpegError> {
        let Some(table) = self.parts[part].ac else { return Ok(()) };
        let sequential = self.coding == Coding::Sequential;
        let shift = if sequential { 0 } else { self.scan.bits[1] };
        let mut at = first;
        while at <= last {
            let code = self.bits.code(table)?;
            let (zeros, size) = (usize::from(code >> 4), u32::from(code & 15));
            at += zeros;
            match size {
                0 if zeros == 15 => {}
                0 if sequential => break,
                0 => {
                    self.run = (1 << zeros) - 1 + self.bits.get(zeros as u32)?;
                    break;
                }
                _ => block[usize::from(ORDER[at])] = (self.bits.signed(size)? << shift) as i16,
            }
            at += 1;
        }
        Ok(())
    }

    /// Decodes one more bit of a band of AC coefficients.
    fn refine(&mut self, part: usize, block: &mut [i16]) -> Result<(), JpegError> {
        let Some(table) = self.parts[part].ac else { return Ok(()) };
        let ([first, last], one) = (self.scan.band, 1_i16 << self.scan.bits[1]);
        let mut at = first;
        while self.run == 0 && at <= last {
            let code = self.bits.code(table)?;
            let (zeros, size) = (i32::from(code >> 4), code & 15);
            let new = match size {
                0 if zeros < 15 => {
                    self.run = (1 << zeros) + self.bits.get(zeros as u32)?;
                    break;
                }
                0 => 0,
                _ if self.bits.get(1)? == 1 => one,
                _ => -one,
            };
            at = self.refine_until(block, at, zeros)?;
            if new != 0 {
                block[usize::from(ORDER[at])] = new;
            }
            at += 1;
        }
        if self.run > 0 {
            self.refine_until(block, at, i32::MAX)?;
            self.run -= 1;
        }
        Ok(())
    }

    /// Refines each known coefficient up to the zero after this many zeros; returns its index.
    fn refine_until(&mut self, block: &mut [i16], mut at: usize, mut zeros: i32) -> Result<usize, JpegError> {
        let one = 1_i16 << self.scan.bits[1];
        while at <= self.scan.band[1] {
            let value = &mut block[usize::from(ORDER[at])];
            if *value == 0 {
                if zeros == 0 {
                    break;
                }
                zeros -= 1;
            } else if self.bits.get(1)? == 1 && *value & one == 0 {
                *value += if *value >= 0 { one } else { -one };
            }
            at += 1;
        }
        Ok(at)
    }
}
