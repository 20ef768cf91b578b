//! Tokenizers for tests.

use std::path::Path;
use tokenizers::models::bpe::Vocab;
use tokenizers::models::wordpiece::WordPiece;
use tokenizers::normalizers::bert::BertNormalizer;
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::{AddedToken, Tokenizer};

/// The vocabulary of [`wordpiece`]; a word's id is its index.
const WORDS: [&str; 20] = [
    "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c", "hello", "wor", "##ld", "good", "bad",
    "film", "##s", ",", "!", ".", "the", "was",
];

/// Writes a small `tokenizer.json` of BERT's kind to a directory.
pub(crate) fn wordpiece(directory: &Path) {
    let vocab: Vocab = WORDS.iter().zip(0..).map(|(word, id)| ((*word).to_owned(), id)).collect();
    let model = WordPiece::builder().vocab(vocab).unk_token("[UNK]".to_owned()).build().unwrap();
    let around = TemplateProcessing::builder()
        .try_single("[CLS]:0 $A:0 [SEP]:0")
        .unwrap()
        .try_pair("[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1")
        .unwrap()
        .special_tokens(vec![("[CLS]", 2), ("[SEP]", 3)])
        .build()
        .unwrap();
    let mut tokenizer = Tokenizer::new(model);
    tokenizer
        .with_normalizer(Some(BertNormalizer::default()))
        .with_pre_tokenizer(Some(BertPreTokenizer))
        .with_post_processor(Some(around));
    let special = WORDS[..5].iter().map(|word| AddedToken::from(*word, true)).collect::<Vec<_>>();
    tokenizer.add_special_tokens(&special);
    tokenizer.save(directory.join("tokenizer.json"), true).unwrap();
}
