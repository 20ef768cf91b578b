//! Plain-text files.

use std::fs;
use std::path::Path;

use super::DataError;

/// Reads a UTF-8 file with at least one line that is not blank.
pub(super) fn read(path: &Path) -> Result<String, DataError> {
    let bytes = fs::read(path).map_err(|source| DataError::Read { path: path.to_owned(), source })?;
    let text = utf8(path, bytes)?;
    if text.trim().is_empty() {
        return Err(DataError::Empty { path: path.to_owned() });
    }
    Ok(text)
}

/// Decodes the bytes of a file.
pub(super) fn utf8(path: &Path, bytes: Vec<u8>) -> Result<String, DataError> {
    String::from_utf8(bytes).map_err(|error| DataError::NotUtf8 {
        path: path.to_owned(),
        offset: error.utf8_error().valid_up_to(),
    })
}

/// Cuts a text into train, validation and test: eight tenths, a tenth and a tenth of the bytes, each part starting at
/// the next line. Three lines with text are in a part each.
pub(super) fn parts(mut text: String) -> [String; 3] {
    let lines = |text: &str| text.lines().filter(|line| !line.trim().is_empty()).take(3).count();
    let at = last_part(&text, 10);
    // The last tenth may have all lines but one.
    let is_short = lines(&text[..at]) < 2 && lines(&text) > 2;
    let test = text.split_off(last_line(&text).filter(|_| is_short).unwrap_or(at));
    let validation = text.split_off(last_part(&text, 9));
    [text, validation, test]
}

/// The start of the last `parts`th of `text`.
///
/// This is the first line that starts in that part of the bytes. If no line with text does, it is the last line of the
/// text, and in a text of one line the first character of the part.
fn last_part(text: &str, parts: usize) -> usize {
    let mark = ceil_char(text, text.len() - text.len() / parts);
    let next = text[..mark]
        .ends_with('\n')
        .then_some(mark)
        .or_else(|| text[mark..].find('\n').map(|at| mark + at + 1));
    let last = last_line(text);
    let has_text = |&at: &usize| !text[at..].trim().is_empty();
    let is_cut = |&at: &usize| !text[..at].trim().is_empty();
    next.filter(has_text).filter(is_cut).or(last.filter(is_cut)).unwrap_or(mark)
}

/// The start of the last line with text, if another line precedes it.
fn last_line(text: &str) -> Option<usize> {
    text.trim_end().rfind('\n').map(|at| at + 1)
}

fn ceil_char(text: &str, mut at: usize) -> usize {
    while !text.is_char_boundary(at) {
        at += 1;
    }
    at
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn cut(text: &str) -> (&str, &str) {
        text.split_at(last_part(text, 10))
    }

    #[test]
    fn the_last_tenth_begins_with_a_line() {
        let text: String = (0..100).map(|i| format!("line {i:03}\n")).collect();
        let (train, held) = cut(&text);
        assert_eq!(train.lines().count(), 90);
        assert!(held.starts_with("line 090\n"));
        let text: String = (0..95).map(|i| format!("line {i:03}\n")).collect();
        let (train, held) = cut(&text);
        assert!(train.ends_with("line 085\n") && held.starts_with("line 086\n"), "{held}");
    }

    #[test]
    fn a_long_last_line_is_held_out_whole() {
        let text = format!("first\nsecond\n{}\n", "x".repeat(100));
        assert_eq!(cut(&text).0, "first\nsecond\n");
        let text = format!("first\n{}\n\n \n", "x".repeat(100));
        assert_eq!(cut(&text).0, "first\n");
    }

    #[test]
    fn one_line_is_cut_at_a_character() {
        let text = "é".repeat(101);
        let (train, held) = cut(&text);
        assert_eq!(train.chars().count(), 91);
        assert_eq!(held.chars().count(), 10);
        assert_eq!(cut("short").1, "");
    }

    #[test]
    fn two_short_lines_after_a_long_one_are_a_part_each() {
        let blank = "\n".repeat(40);
        let [train, ..] = parts(format!("{blank}a\nb\nc"));
        assert_eq!(train, format!("{blank}a\n"));
        let long = "x".repeat(45);
        assert_eq!(
            parts(format!("{long}\n \né\na")),
            [format!("{long}\n"), " \né\n".to_owned(), "a".to_owned()]
        );
    }

    proptest! {
        #[test]
        fn any_text_can_be_cut(text in "[a-cé\u{1F600} \n]{0,60}") {
            let (train, held) = cut(&text);
            prop_assert_eq!(format!("{train}{held}"), text.clone());
            let lines = text.lines().filter(|line| !line.trim().is_empty()).count();
            if lines > 1 {
                prop_assert!(!train.trim().is_empty() && !held.trim().is_empty());
                prop_assert!(train.ends_with('\n'));
            }
        }

        #[test]
        fn any_text_has_three_parts_that_share_nothing(text in "[a-cé\u{1F600} \n]{0,90}") {
            let parts = parts(text.clone());
            prop_assert_eq!(parts.concat(), text.clone());
            let lines = text.lines().filter(|line| !line.trim().is_empty()).count();
            if lines > 2 {
                prop_assert!(parts.iter().all(|part| !part.trim().is_empty()));
                prop_assert!(parts[..2].iter().all(|part| part.ends_with('\n')));
            }
        }
    }
}
