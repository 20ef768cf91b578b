//! Reads the bits of a scan.

use super::JpegError;
use super::huffman::{Huffman, LOOKAHEAD};

/// The minimum number of bits in a filled buffer.
const FULL: u32 = 57;

/// Reads bits up to the next marker, then zeros, as libjpeg does.
pub(super) struct Bits<'a> {
    bytes: &'a [u8],
    /// The next byte.
    pub at: usize,
    /// A marker that was reached but not yet consumed.
    pub marker: Option<u8>,
    buffer: u64,
    left: u32,
    /// Whether zeros were read past a marker.
    pub starved: bool,
}

impl<'a> Bits<'a> {
    pub fn new(bytes: &'a [u8], at: usize, marker: Option<u8>) -> Self {
        Self { bytes, at, marker, buffer: 0, left: 0, starved: false }
    }

    /// Drops the rest of the segment.
    pub fn clear(&mut self) {
        self.left = 0;
    }

    pub fn byte(&mut self) -> Result<u8, JpegError> {
        let byte = self.bytes.get(self.at).ok_or(JpegError::Truncated { bytes: self.bytes.len() })?;
        self.at += 1;
        Ok(*byte)
    }

    /// Skips to the next marker.
    pub fn next_marker(&mut self) -> Result<u8, JpegError> {
        loop {
            while self.byte()? != 0xFF {}
            let mut byte = self.byte()?;
            while byte == 0xFF {
                byte = self.byte()?;
            }
            if byte != 0 {
                self.marker = Some(byte);
                return Ok(byte);
            }
        }
    }

    /// Fills the buffer to at least this many bits.
    fn fill(&mut self, needed: u32) -> Result<(), JpegError> {
        while self.marker.is_none() && self.left < FULL {
            let mut byte = self.byte()?;
            if byte == 0xFF {
                while byte == 0xFF {
                    byte = self.byte()?;
                }
                if byte != 0 {
                    self.marker = Some(byte);
                    break;
                }
                byte = 0xFF;
            }
            self.buffer = self.buffer << 8 | u64::from(byte);
            self.left += 8;
        }
        if needed > self.left {
            self.starved = true;
            self.buffer <<= FULL - self.left;
            self.left = FULL;
        }
        Ok(())
    }

    /// Reads up to 16 bits.
    pub fn get(&mut self, count: u32) -> Result<i32, JpegError> {
        if self.left < count {
            self.fill(count)?;
        }
        self.left -= count;
        Ok((self.buffer >> self.left) as i32 & ((1 << count) - 1))
    }

    /// Reads a signed number of this many bits.
    pub fn signed(&mut self, count: u32) -> Result<i32, JpegError> {
        let value = self.get(count)?;
        Ok(if count > 0 && value < 1 << (count - 1) { value - (1 << count) + 1 } else { value })
    }

    /// Decodes the next Huffman code; zero for a code that is not in the table.
    pub fn code(&mut self, table: &Huffman) -> Result<u8, JpegError> {
        let mut length = 1;
        if self.left < LOOKAHEAD {
            self.fill(0)?;
        }
        if self.left >= LOOKAHEAD {
            if let Some((length, value)) = table.short((self.buffer >> (self.left - LOOKAHEAD)) as u32) {
                self.left -= length;
                return Ok(value);
            }
            length = LOOKAHEAD + 1;
        }
        let mut code = self.get(length)?;
        while table.is_longer(code, length) {
            code = code << 1 | self.get(1)?;
            length += 1;
        }
        Ok(if length > 16 { 0 } else { table.value(code, length) })
    }
}
