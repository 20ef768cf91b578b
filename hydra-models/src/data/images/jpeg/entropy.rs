//! The bits of a scan.

use super::JpegError;
use super::huffman::{Huffman, LOOKAHEAD};

/// The fewest bits that the buffer has when it is full.
const FULL: u32 = 57;

/// Reads bits up to the next marker, and zeros behind it, as libjpeg does.
pub(super) struct Bits<'a> {
    bytes: &'a [u8],
    /// The next byte.
    pub at: usize,
    /// The marker that was met and not read yet.
    pub marker: Option<u8>,
    buffer: u64,
    left: u32,
    /// True if zeros were read behind a marker.
    pub starved: bool,
}

impl<'a> Bits<'a> {
    pub fn new(bytes: &'a [u8], at: usize, marker: Option<u8>) -> Self {
        Self { bytes, at, marker, buffer: 0, left: 0, starved: false }
    }

    /// Drops what is left of the segment.
    pub fn clear(&mut self) {
        self.left = 0;
    }

    pub fn byte(&mut self) -> Result<u8, JpegError> {
        let byte = self.bytes.get(self.at).ok_or(JpegError::Truncated { bytes: self.bytes.len() })?;
        self.at += 1;
        Ok(*byte)
    }

    /// Goes to the next marker.
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

    /// Fills the buffer, so that it has at least so many bits.
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

    /// The next so many bits, at most 16.
    pub fn get(&mut self, count: u32) -> Result<i32, JpegError> {
        if self.left < count {
            self.fill(count)?;
        }
        self.left -= count;
        Ok((self.buffer >> self.left) as i32 & ((1 << count) - 1))
    }

    /// A signed number of so many bits.
    pub fn signed(&mut self, count: u32) -> Result<i32, JpegError> {
        let value = self.get(count)?;
        Ok(if count > 0 && value < 1 << (count - 1) { value - (1 << count) + 1 } else { value })
    }

    /// The value of the next code; zero for one that the table does not have.
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
