//! One text or two as the input of a sequence classifier.

/// The tokens of a text, or of two, with the tokens that the tokenizer adds around them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenSequence {
    /// The ids.
    pub ids: Vec<u32>,
    /// The type of each token: by default 0 in the first text and 1 in the second.
    pub types: Vec<u32>,
    /// The number of tokens before truncation.
    pub tokens: usize,
}

impl TokenSequence {
    /// The tokens of texts that no token is added to, truncated to `most` tokens.
    pub(super) fn plain(mut first: Vec<u32>, mut second: Vec<u32>, most: usize) -> Self {
        let tokens = first.len() + second.len();
        let [of_first, of_second] = kept([first.len(), second.len()], most);
        first.truncate(of_first);
        second.truncate(of_second);
        let types = [vec![0; of_first], vec![1; of_second]].concat();
        first.append(&mut second);
        Self { ids: first, types, tokens }
    }
}

/// The lengths that remain of two texts within `most` tokens: the longer text is truncated first, as Transformers'
/// `truncation=True` does. If both are truncated, they share the tokens equally, and an odd one goes to the longer
/// text, or to the second of equal ones.
pub(super) fn kept([first, second]: [usize; 2], most: usize) -> [usize; 2] {
    if first + second <= most {
        return [first, second];
    }
    let short = first.min(second).min(most / 2);
    if first <= second { [short, most - short] } else { [most - short, short] }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenizers::utils::truncation::{TruncationParams, truncate_encodings};
    use tokenizers::{Encoding, Token};

    fn encoding(tokens: usize) -> Encoding {
        Encoding::from_tokens(vec![Token::new(0, String::new(), (0, 0)); tokens], 0)
    }

    #[test]
    fn lengths_are_those_of_the_library() {
        for (first, second, most) in (0..9)
            .flat_map(|first| (0..9).flat_map(move |second| (0..20).map(move |most| (first, second, most))))
        {
            let params = TruncationParams { max_length: most, ..TruncationParams::default() };
            let (one, other) = truncate_encodings(encoding(first), Some(encoding(second)), &params).unwrap();
            let expected = [one.len(), other.unwrap().len()];
            assert_eq!(kept([first, second], most), expected, "{first} and {second} tokens within {most}");
        }
    }

    #[test]
    fn two_texts_have_two_types() {
        let sequence = TokenSequence::plain(vec![1, 2, 3], vec![4], 3);
        assert_eq!(sequence, TokenSequence { ids: vec![1, 2, 4], types: vec![0, 0, 1], tokens: 4 });
        assert_eq!(TokenSequence::plain(vec![1, 2], Vec::new(), 9).types, [0, 0]);
    }
}
