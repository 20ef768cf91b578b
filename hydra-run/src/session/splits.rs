//! What the readers of data for different tasks share: their result, the context, and the notes on what is not used.

use crate::terminal::Usage;
use hydra_models::data::{Content, Context, Counts, Cut, HeldOut, TokenSplits, Unread, WithReference};
use hydra_models::family::{HeadConfig, Model};
use std::path::PathBuf;
use std::sync::Arc;

/// The default context of text blocks and packed rows, if the model has at least that many positions.
const DEFAULT_CONTEXT: usize = 512;

/// Splits of one source, in the requested order.
pub(crate) struct Splits {
    pub(crate) splits: Vec<Arc<dyn Content>>,
    pub(crate) context: Option<usize>,
    pub(crate) items: &'static str,
    pub(crate) notes: Vec<String>,
    /// The splits again, if they have the log-probabilities of a reference.
    pub(crate) references: Vec<Arc<WithReference>>,
}

/// Returns the note on splits taken from the training data.
pub(super) fn note_of_parts(name: &str, held_out: HeldOut) -> Option<String> {
    match held_out {
        HeldOut::Nothing => None,
        HeldOut::Validation => Some(format!(
            "note: `{name}` has no validation data: the last tenth of each class of the training data is used for validation"
        )),
        HeldOut::ValidationAndTest => Some(format!(
            "note: `{name}` has only training data: the last tenth of each class is used for test, and the tenth before \
            it for validation"
        )),
    }
}

/// Returns the notes on files and folders that are not read.
pub(super) fn notes_of_unread(name: &str, unread: &Unread, read: &str) -> Vec<String> {
    let mut notes = Vec::new();
    match unread.files() {
        0 => {}
        1 => notes.push(format!(
            "note: 1 file of `{name}` is not read because its extension is not {read}: {unread}"
        )),
        files => notes.push(format!(
            "note: {files} files of `{name}` are not read because their extensions are not {read}: {unread}"
        )),
    }
    if !unread.folders().is_empty() {
        let folders: Vec<String> = unread.folders().iter().map(|folder| format!("`{folder}`")).collect();
        notes.push(format!(
            "note: these folders of `{name}` are not read because they belong to no split (train; validation, valid, val, dev \
            or eval; test) or to one that another folder provides: {}",
            folders.join(", ")
        ));
    }
    notes
}

/// Returns the note on files of a directory that are not read.
pub(super) fn note_of_unread(name: &str, unread: &[PathBuf]) -> Option<String> {
    let some = unread.iter().take(NAMES).map(|path| format!("`{}`", path.display()));
    let (some, more) = (some.collect::<Vec<_>>(), if unread.len() > NAMES { " .." } else { "" });
    (!unread.is_empty()).then(|| {
        format!(
            "note: `{name}` has files that are not read: {}{more}; a directory has either texts or rows, in files named train, \
            validation or test",
            some.join(", ")
        )
    })
}

/// Returns the notes on what a model does not use of its files and of its configuration.
pub(super) fn notes_of_model(model: &dyn Model) -> impl Iterator<Item = String> + use<> {
    as_notes(model.notes()).chain(notes_of_head(model))
}

/// Returns the notes on what a new head does not use of the model's configuration.
pub(super) fn notes_of_head(model: &dyn Model) -> impl Iterator<Item = String> + use<> {
    as_notes(model.head().map(HeadConfig::notes).unwrap_or_default())
}

fn as_notes(sentences: Vec<String>) -> impl Iterator<Item = String> {
    sentences.into_iter().map(|sentence| format!("note: {sentence}"))
}

/// Returns the note on unused fields of rows.
pub(super) fn note_of_unused(name: &str, unused: &Counts) -> Option<String> {
    let some =
        unused.iter().take(NAMES).map(|(field, rows)| format!("`{field}` ({})", counted(*rows, "row")));
    let (some, more) = (some.collect::<Vec<_>>().join(", "), unused.len().saturating_sub(NAMES));
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    (!unused.is_empty()).then(|| {
        format!(
            "note: unused fields of `{name}`: {some}{more}; --columns FIELD=COLUMN maps a column to a field"
        )
    })
}

/// Returns the note on truncated examples, with the context that would keep them.
pub(super) fn note_of_cut(
    name: &str,
    splits: &TokenSplits,
    context: usize,
    positions: usize,
) -> Option<String> {
    let skipped = match splits.skipped {
        0 => String::new(),
        1 => "; 1 example is skipped because no loss targets remain".to_owned(),
        more => format!("; {more} examples are skipped because no loss targets remain"),
    };
    let what = if splits.items == "examples" || splits.items == "rows" { "example" } else { "text" };
    note_of_truncated((name, what), splits.cut, &skipped, context, positions)
}

/// Returns the note on texts, or examples, that are truncated to a context, with the context that would keep them.
pub(super) fn note_of_truncated(
    (name, what): (&str, &str),
    Cut { examples, tokens, of_examples, of_tokens, longest }: Cut,
    skipped: &str,
    context: usize,
    positions: usize,
) -> Option<String> {
    let keeps = match longest <= positions {
        true => format!("--context {longest} keeps all tokens"),
        false if context < positions => {
            format!(
                "--context {positions}, the model's maximum, keeps more; the longest {what} has {longest} tokens"
            )
        }
        false => format!(
            "this is the model's maximum, and the longest {what} has {longest} tokens: split long {what}s"
        ),
    };
    (examples > 0).then(|| {
        format!(
            "note: {examples} of {} of `{name}` are truncated to {context} tokens, losing {tokens} of {of_tokens} \
            tokens{skipped}: {keeps}",
            counted(of_examples, what)
        )
    })
}

/// Returns the note on ShareGPT roles.
pub(super) fn note_of_sharegpt(name: &str, rows: usize) -> Option<String> {
    (rows > 0).then(|| {
        format!(
            "note: {} of `{name}` have ShareGPT roles: `human` is read as `user`, and `gpt` as `assistant`",
            counted(rows, "conversation")
        )
    })
}

/// Returns the note on prompts whose last token merges with the completion.
pub(super) fn note_of_merged(name: &str, rows: usize) -> Option<String> {
    (rows > 0).then(|| {
        format!(
            "note: in {} of `{name}` the last tokens of the prompt change when the completion follows: the loss starts at \
            the first token that differs, as in TRL",
            counted(rows, "row")
        )
    })
}

pub(super) fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// The maximum number of names in a note.
pub(super) const NAMES: usize = 6;

/// Returns the requested context, if the model has enough positions, or the default: the model's positions for examples, and at
/// most `DEFAULT_CONTEXT` tokens for text blocks.
pub fn context_of(positions: usize, asked: Option<usize>) -> Result<Context, Usage> {
    match asked {
        None => Ok(Context { block: positions.min(DEFAULT_CONTEXT), example: positions }),
        Some(context) if context <= positions => Ok(Context::uniform(context)),
        Some(context) => Err(Usage::new(format!(
            "--context must be at most {positions}, the model's positions, got {context}"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_context_fits_the_positions() {
        let context = |asked, positions| context_of(positions, asked);
        assert_eq!(context(None, 128).unwrap(), Context::uniform(128));
        assert_eq!(context(None, 1024).unwrap(), Context { block: 512, example: 1024 });
        assert_eq!(context(Some(1024), 1024).unwrap(), Context::uniform(1024));
        let error = context(Some(129), 128).unwrap_err().to_string();
        assert!(error.contains("129") && error.contains("128, the model's positions"), "{error}");
    }

    #[test]
    fn what_is_cut_is_said_with_what_keeps_it() {
        let note = |longest, skipped, context| {
            let cut = Cut { examples: 2, tokens: 30, of_examples: 40, of_tokens: 900, longest };
            let (items, tally) = ("examples", hydra_models::data::Tally::default());
            let splits = TokenSplits {
                items,
                context,
                cut,
                skipped,
                unlearned: 0,
                packing: None,
                tally,
                splits: Vec::new(),
            };
            note_of_cut("a.jsonl", &splits, context, 128).unwrap()
        };
        assert_eq!(
            note(100, 0, 64),
            "note: 2 of 40 examples of `a.jsonl` are truncated to 64 tokens, losing 30 of 900 tokens: --context 100 \
             keeps all tokens"
        );
        let note_of_more = note(200, 1, 64);
        assert!(
            note_of_more.contains("1 example is skipped")
                && note_of_more.contains("--context 128, the model's")
        );
        assert!(note(200, 0, 128).ends_with(
            "this is the model's maximum, and the longest example has 200 tokens: split long examples"
        ));
    }

    #[test]
    fn fields_without_a_use_are_said_with_the_number_of_rows() {
        let unused = Counts::from([("id".to_owned(), 40), ("source".to_owned(), 1)]);
        let note = note_of_unused("a.csv", &unused).unwrap();
        assert!(note.contains("`id` (40 rows), `source` (1 row); --columns"), "{note}");
        assert_eq!(note_of_unused("a.csv", &Counts::default()), None);
    }
}
