//! Huffman tables.

/// The number of bits looked up in one step.
pub(super) const LOOKAHEAD: u32 = 8;

/// A Huffman table.
#[derive(Clone)]
pub(super) struct Huffman {
    /// Code length and value for each prefix of [`LOOKAHEAD`] bits; zero if the code is longer.
    lookup: [(u8, u8); 1 << LOOKAHEAD],
    /// The largest code of each length, -1 if there is none; the last entry is above any code.
    largest: [i32; 18],
    /// The offset from a code of each length to the index of its value.
    offset: [i32; 17],
    values: [u8; 256],
}

impl Huffman {
    /// Builds a table from the number of codes of each length, 1 to 16 bits. Returns `None` if the codes do not fit
    /// their lengths.
    pub fn new(counts: [u8; 16], values: [u8; 256]) -> Option<Self> {
        let mut table = Self { lookup: [(0, 0); 256], largest: [-1; 18], offset: [0; 17], values };
        table.largest[17] = i32::MAX;
        let (mut code, mut at) = (0_i32, 0_usize);
        for length in 1..=16_usize {
            let count = usize::from(counts[length - 1]);
            table.offset[length] = at as i32 - code;
            for value in values.get(at..at + count)? {
                if code >= 1 << length {
                    return None;
                }
                table.enter(length as u32, code, *value);
                code += 1;
            }
            at += count;
            table.largest[length] = if count == 0 { -1 } else { code - 1 };
            code <<= 1;
        }
        Some(table)
    }

    /// Returns whether every value is valid for DC differences.
    pub fn is_valid_for_dc(&self, count: usize) -> bool {
        self.values[..count].iter().all(|value| *value <= 15)
    }

    fn enter(&mut self, length: u32, code: i32, value: u8) {
        if length <= LOOKAHEAD {
            let from = (code as usize) << (LOOKAHEAD - length);
            self.lookup[from..from + (1 << (LOOKAHEAD - length))].fill((length as u8, value));
        }
    }

    /// Length and value of the code that starts these bits, if it has at most [`LOOKAHEAD`] bits.
    pub fn short(&self, bits: u32) -> Option<(u32, u8)> {
        let (length, value) = self.lookup[bits as usize & 0xFF];
        (length > 0).then_some((u32::from(length), value))
    }

    /// Returns whether the bits exceed every code of this length.
    pub fn is_longer(&self, bits: i32, length: u32) -> bool {
        bits > self.largest[length as usize]
    }

    /// The value of a code of this length.
    pub fn value(&self, code: i32, length: u32) -> u8 {
        self.values[(code + self.offset[length as usize]) as usize & 0xFF]
    }
}
