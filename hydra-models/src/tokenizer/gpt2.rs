//! GPT-2's byte-pair encoding, with its vocabulary embedded.

use super::{HuggingFaceTokenizer, TokenizerError};
use std::sync::OnceLock;
use tiktoken_rs::{CoreBPE, r50k_base_singleton};
use tokenizers::models::bpe::{Merges, Vocab};

/// The number of ids of the GPT-2 vocabulary, including `<|endoftext|>`.
pub const GPT2_VOCAB: usize = 50_257;

/// The longest word in bytes that `tiktoken` encodes. Its time is quadratic in the length of a word, so a line of
/// base64 or of a genome would take hours.
const LONG_WORD: usize = 1 << 12;

fn bpe() -> &'static CoreBPE {
    r50k_base_singleton()
}

pub(super) fn encode(text: &str) -> Result<Vec<u32>, TokenizerError> {
    match has_long_word(text) {
        false => Ok(bpe().encode_ordinary(text)),
        true => for_long_words()?.encode(text),
    }
}

pub(super) fn decode(ids: &[u32]) -> String {
    let mut bytes = Vec::new();
    for &id in ids {
        match usize::try_from(id) {
            Ok(known) if known < GPT2_VOCAB => bytes.extend(token(id)),
            _ => bytes.extend("\u{FFFD}".bytes()),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The id of a special token by its text; GPT-2 has only the end-of-text token.
pub(super) fn id(token: &str) -> Option<u32> {
    let only = bpe().encode_with_special_tokens(token);
    if let [id] = only.as_slice() { Some(*id) } else { None }
}

pub(super) fn token(id: u32) -> Vec<u8> {
    bpe()._decode_native_and_split(vec![id]).flatten().collect()
}

/// Returns whether the text has a long stretch that may be one word for the splitter: without white space, or only
/// white space.
fn has_long_word(text: &str) -> bool {
    let long = |of_space: bool| {
        text.split(|c: char| c.is_whitespace() != of_space).any(|stretch| stretch.len() > LONG_WORD)
    };
    text.len() > LONG_WORD && (long(false) || long(true))
}

/// The same encoding by the `tokenizers` library, whose time is nearly linear in the length of a word. It is slower on
/// ordinary text.
pub(super) fn for_long_words() -> Result<&'static HuggingFaceTokenizer, TokenizerError> {
    static MADE: OnceLock<HuggingFaceTokenizer> = OnceLock::new();
    match MADE.get() {
        Some(made) => Ok(made),
        None => {
            let made = made()?;
            Ok(MADE.get_or_init(|| made))
        }
    }
}

fn made() -> Result<HuggingFaceTokenizer, TokenizerError> {
    let tokens: Vec<Vec<u8>> = (0..GPT2_VOCAB as u32 - 1).map(token).collect();
    let ids: std::collections::HashMap<&[u8], usize> =
        tokens.iter().enumerate().map(|(id, token)| (token.as_slice(), id)).collect();
    let spelled = |bytes: &[u8]| bytes.iter().map(|&byte| letter(byte)).collect::<String>();
    // Ids are in the order of the merges.
    let merges: Merges = tokens
        .iter()
        .enumerate()
        .filter_map(|(id, token)| {
            let (left, right) =
                token.split_at(merged_at(token, |part| ids.get(part).copied().filter(|&x| x < id))?);
            Some((spelled(left), spelled(right)))
        })
        .collect();
    let vocab: Vocab = tokens.iter().zip(0..).map(|(token, id)| (spelled(token), id)).collect();
    HuggingFaceTokenizer::byte_level("gpt2".as_ref(), vocab, merges)
}

/// The index at which the last merge that makes a token joins its two parts, given the earlier merges; `None` for a
/// single byte.
fn merged_at(token: &[u8], earlier: impl Fn(&[u8]) -> Option<usize>) -> Option<usize> {
    let mut cuts: Vec<usize> = (0..=token.len()).collect();
    while cuts.len() > 3 {
        let merge = |i: usize| Some((earlier(&token[cuts[i]..cuts[i + 2]])?, i));
        let (_, first) = (0..cuts.len() - 2).filter_map(merge).min()?;
        cuts.remove(first + 1);
    }
    (cuts.len() == 3).then(|| cuts[1])
}

/// The letter for a byte in GPT-2's kind of vocabulary: the byte itself if printable in Latin-1, else the next of those
/// from `U+0100` on.
pub(super) fn letter(byte: u8) -> char {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    if printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&b| !printable(b)).count() as u32;
    char::from_u32(0x100 + before).expect("a letter of the block Latin Extended-A")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn both(text: &str) -> (Vec<u32>, Vec<u32>) {
        (bpe().encode_ordinary(text), for_long_words().unwrap().encode(text).unwrap())
    }

    /// With quadratic time a word of 2 MB takes an hour.
    #[test]
    fn words_and_white_space_of_any_length_are_encoded() {
        let genome: String =
            (0..2_000_000u64).map(|i| char::from(b"acgt"[(i * i / 7 + i / 3) as usize % 4])).collect();
        for text in [genome, " ".repeat(400_000), "x".repeat(1_000_000), "数".repeat(300_000)] {
            let ids = encode(&text).unwrap();
            assert!(decode(&ids) == text && ids.len() <= text.len());
        }
    }

    #[test]
    fn the_limit_of_a_word_changes_no_id() {
        for word in ["acgt", "Zürich", "  ", "a b", "!?", "1234", "e\u{301}", "👩‍👩‍👧‍👦", "don't", "\t\n"]
        {
            let text = word.repeat(2 * LONG_WORD / word.len());
            let (one, other) = both(&text);
            assert_eq!(one, other, "{word}");
            assert_eq!(encode(&text).unwrap(), one);
        }
        assert!(!has_long_word(&"word ".repeat(LONG_WORD)));
        let (under, over) = ("a".repeat(LONG_WORD), "a".repeat(LONG_WORD + 1));
        assert!(!has_long_word(&format!("{under} {under}")) && has_long_word(&format!("b {over} b")));
        assert!(has_long_word(&" ".repeat(LONG_WORD + 1)));
    }

    /// Expected ids are from an independent implementation of the published encoder.
    #[test]
    fn hard_text_has_the_ids_of_the_published_encoder() {
        let cases: [(&str, &[u32]); 13] = [
            (
                "don't we'll I'VE it\u{2019}s 'tis",
                &[9099, 470, 356, 1183, 314, 6, 6089, 340, 447, 247, 82, 705, 48010],
            ),
            (
                "e\u{301}te\u{301} n\u{303}o \u{e01}\u{e33}",
                &[68, 136, 223, 660, 136, 223, 299, 136, 225, 78, 220, 19567, 223, 19567, 111],
            ),
            (
                "\u{1f469}\u{200d}\u{1f469}\u{200d}\u{1f467}\u{200d}\u{1f466} \u{1f1e9}\u{1f1ea} \u{1f44d}\u{1f3fd}",
                &[
                    41840, 102, 447, 235, 41840, 102, 447, 235, 41840, 100, 447, 235, 41840, 99, 12520, 229,
                    102, 8582, 229, 103, 50169, 235, 8582, 237, 121,
                ],
            ),
            ("\u{9}\u{9}a\u{a}\u{a}  b \u{d}\u{a}", &[197, 197, 64, 628, 220, 275, 220, 201, 198]),
            ("x  y   z ", &[87, 220, 331, 220, 220, 1976, 220]),
            (
                "na\u{ef}ve \u{2167} \u{bd} \u{b2} \u{663}",
                &[2616, 38776, 2343, 227, 100, 25208, 1587, 110, 18923, 96],
            ),
            (
                "\u{645}\u{631}\u{62d}\u{628}\u{627} \u{5e9}\u{5dc}\u{5d5}\u{5dd} \u{928}\u{92e}\u{938}\u{94d}\u{924}\u{947}",
                &[
                    25405, 26897, 148, 255, 39848, 12919, 14360, 102, 40010, 27072, 147, 251, 28225, 101,
                    11976, 106, 11976, 116, 24231, 235, 11976, 97, 24231, 229,
                ],
            ),
            (
                "\u{65e5}\u{672c}\u{8a9e}\u{306e}\u{30c6}\u{30ad}\u{30b9}\u{30c8}\u{3001}\u{6f22}\u{5b57}\u{3002}",
                &[
                    33768, 98, 17312, 105, 45739, 252, 5641, 24336, 25084, 43302, 23513, 162, 120, 95, 27764,
                    245, 16764,
                ],
            ),
            (
                "a\u{a0}b\u{2003}c\u{200b}d\u{feff}e",
                &[64, 1849, 65, 447, 225, 66, 9525, 67, 171, 119, 123, 68],
            ),
            ("<|endoftext|> <unk> @-@", &[27, 91, 437, 1659, 5239, 91, 29, 1279, 2954, 29, 2488, 12, 31]),
            ("\u{0}\u{1c}\u{7f}\u{85}", &[188, 216, 221, 126, 227]),
            ("\u{fb01} \u{1c5} \u{df} \u{130}", &[171, 105, 223, 220, 131, 227, 6184, 253, 34754, 108]),
            ("________====!!!!", &[2602, 1421, 13896]),
        ];
        for (text, ids) in cases {
            assert_eq!(both(text), (ids.to_vec(), ids.to_vec()), "{text:?}");
            assert_eq!(decode(ids), text);
        }
    }

    proptest! {
        #[test]
        fn both_libraries_encode_any_text_alike(
            text in "(\\PC{0,12}[ \\n\\t\\r'’\u{a0}]{0,3}|[a-zA-Z]{1,30}|('s|'LL|'re)?|[acgt]{1,40}){0,8}",
        ) {
            let (one, other) = both(&text);
            prop_assert_eq!(one, other);
        }
    }
}
