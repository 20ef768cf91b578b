//! The built-in corpus; `assets/corpus/README.md` describes how it was made.

/// The texts of train, validation and test.
pub(super) const TEXTS: [&str; 3] = [
    include_str!("../../assets/corpus/train.txt"),
    include_str!("../../assets/corpus/validation.txt"),
    include_str!("../../assets/corpus/test.txt"),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::super::builtin_text::generate;
    use super::TEXTS;

    const SEED: u64 = 7;

    fn sentences(text: &str) -> BTreeSet<&str> {
        text.lines().flat_map(|line| line.split(". ")).filter(|sentence| !sentence.is_empty()).collect()
    }

    #[test]
    fn the_texts_are_what_the_grammar_gives() {
        let made = generate(SEED);
        if std::env::var_os("HYDRA_WRITE_CORPUS").is_some() {
            let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/corpus");
            for (name, text) in ["train.txt", "validation.txt", "test.txt"].iter().zip(&made) {
                std::fs::write(dir.join(name), text).unwrap();
            }
            return;
        }
        for (made, committed) in made.iter().zip(TEXTS) {
            assert!(made == committed, "run with HYDRA_WRITE_CORPUS=1 after a change of the grammar");
        }
    }

    #[test]
    fn the_texts_are_plain_and_of_the_promised_sizes() {
        let [train, validation, test] = TEXTS.map(str::len);
        assert!((150_000..200_000).contains(&train), "{train}");
        assert!(
            (12_000..14_000).contains(&validation) && (12_000..14_000).contains(&test),
            "{validation} {test}"
        );
        for text in TEXTS {
            assert!(text.bytes().all(|byte| byte == b'\n' || (b' '..=b'~').contains(&byte)));
            assert!(!text.contains(['{', '}', '[', ']', '|', '\\']), "an unexpanded part of the grammar");
            assert!(!text.contains("  ") && text.ends_with("\n\n"));
        }
    }

    #[test]
    fn validation_and_test_are_fresh() {
        let [train, validation, test] = TEXTS;
        let mut seen = BTreeSet::new();
        for line in TEXTS.iter().flat_map(|text| text.lines()).filter(|line| !line.is_empty()) {
            assert!(seen.insert(line), "`{line}` stands in the corpus twice");
        }
        for held_out in [validation, test] {
            let (held_out, train) = (sentences(held_out), sentences(train));
            let known = held_out.intersection(&train).count();
            assert!(
                known * 5 < held_out.len(),
                "{known} of {} sentences are known from train",
                held_out.len()
            );
        }
    }

    #[test]
    fn every_kind_of_article_is_in_every_split() {
        for text in TEXTS {
            for mark in ["History of", "The log of", "The weather book of", " counts ", "A letter from"] {
                assert!(text.contains(mark), "no `{mark}`");
            }
        }
    }
}
