//! Metrics of texts.
//!
//! May use: nothing of the crate.

/// The part of the texts that are their references, without white space around either.
pub fn exact_match<'a>(pairs: impl IntoIterator<Item = (&'a str, &'a str)>) -> f64 {
    mean(pairs.into_iter().map(|(text, reference)| f64::from(u8::from(text.trim() == reference.trim()))))
}

/// The mean ROUGE-L F-measure of texts and references: the longest common subsequence of their words (Lin, "ROUGE: A package
/// for automatic evaluation of summaries", 2004). Words are those of the `rouge_score` package without stemming: runs of `a` to
/// `z` and digits of the lowercase text.
pub fn rouge_l<'a>(pairs: impl IntoIterator<Item = (&'a str, &'a str)>) -> f64 {
    mean(pairs.into_iter().map(|(text, reference)| f_measure(&words(text), &words(reference))))
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0_u64), |(sum, count), value| (sum + value, count + 1));
    sum / count.max(1) as f64
}

fn words(text: &str) -> Vec<String> {
    let is_of_word = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let lower = text.to_lowercase();
    lower.split(|c| !is_of_word(c)).filter(|word| !word.is_empty()).map(str::to_owned).collect()
}

fn f_measure(text: &[String], reference: &[String]) -> f64 {
    if text.is_empty() || reference.is_empty() {
        return 0.0;
    }
    let common = common_subsequence(text, reference) as f64;
    let (precision, recall) = (common / text.len() as f64, common / reference.len() as f64);
    if common > 0.0 { 2.0 * precision * recall / (precision + recall) } else { 0.0 }
}

/// The length of the longest common subsequence.
fn common_subsequence(a: &[String], b: &[String]) -> usize {
    // The lengths for the words of `a` so far and each number of words of `b`.
    let mut lengths = vec![0; b.len() + 1];
    for word in a {
        let mut diagonal = 0;
        for (at, other) in b.iter().enumerate() {
            let above = lengths[at + 1];
            lengths[at + 1] = if word == other { diagonal + 1 } else { above.max(lengths[at]) };
            diagonal = above;
        }
    }
    lengths[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_match_without_white_space_around_them() {
        assert_eq!(exact_match([(" four\n", "four"), ("Four", "four"), ("4", "4"), ("", "a")]), 0.5);
        assert_eq!(exact_match([]), 0.0);
    }

    /// The values are those of `rouge_score` 0.1.2.
    #[test]
    fn rouge_is_that_of_its_package() {
        let of = |text: &str, reference: &str| rouge_l([(text, reference)]);
        let quick = of("The quick brown fox", "the quick, brown dog jumps!");
        assert!((quick - 2.0 / 3.0).abs() < 1e-12, "{quick}");
        assert_eq!(of("police kill the gunman", "police killed the gunman"), 0.75);
        assert_eq!(of("the gunman kill police", "police killed the gunman"), 0.5);
        assert_eq!((of("", "a"), of("a", ""), of("b", "a"), of("a1 b", "A1-b")), (0.0, 0.0, 0.0, 1.0));
        assert_eq!(of("Éa b", "a b"), 1.0, "letters beyond a to z divide words");
    }
}
