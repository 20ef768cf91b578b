//! Repairs a PNG whose last chunks are truncated.

/// The length of the file signature, and of a chunk's length and type.
const MARK: usize = 8;
const AROUND: usize = 12;

/// Closes the last chunk of a file that ends within its image data or lacks the end chunk; Pillow reads such a file if
/// all pixels are present. Returns `None` if the file is complete or broken elsewhere.
pub(super) fn closed(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut at = MARK;
    loop {
        let length = bytes
            .get(at..at + 4)
            .map(|length| u32::from_be_bytes([length[0], length[1], length[2], length[3]]));
        let kind = bytes.get(at + 4..at + 8);
        match (length, kind) {
            (Some(length), Some(kind)) if at + AROUND + length as usize <= bytes.len() => {
                if kind == b"IEND" {
                    return None;
                }
                at += AROUND + length as usize;
            }
            (_, Some(b"IDAT")) => {
                let data = &bytes[at + 8..];
                let data = &data[..data.len().min(length.unwrap_or(0) as usize)];
                return Some([&bytes[..at], &chunk(b"IDAT", data), &chunk(b"IEND", &[])].concat());
            }
            _ => return Some([&bytes[..at.min(bytes.len())], &chunk(b"IEND", &[])].concat()),
        }
    }
}

/// Builds a chunk of this type.
fn chunk(kind: &[u8; 4], data: &[u8]) -> Vec<u8> {
    let checked = [kind, data].concat();
    let sum = crc32(&checked).to_be_bytes();
    [&(data.len() as u32).to_be_bytes()[..], &checked, &sum].concat()
}

/// The CRC-32 of a chunk.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |sum, byte| {
        (0..8).fold(sum ^ u32::from(*byte), |sum, _| (sum >> 1) ^ (0xEDB8_8320 & (sum & 1).wrapping_neg()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_of_png() {
        // The end chunk, the same in every file.
        let end = [0, 0, 0, 0, b'I', b'E', b'N', b'D', 0xAE, 0x42, 0x60, 0x82];
        assert_eq!(chunk(b"IEND", &[]), end);
        let whole = [&[0_u8; MARK][..], &chunk(b"IDAT", b"data"), &end].concat();
        assert_eq!(closed(&whole), None);
        for cut in 1..=16 {
            assert_eq!(closed(&whole[..whole.len() - cut]), Some(whole.clone()), "{cut} bytes short");
        }
        let shorter = closed(&whole[..whole.len() - 17]).unwrap();
        assert_eq!(shorter, [&[0_u8; MARK][..], &chunk(b"IDAT", b"dat"), &end].concat());
    }
}
