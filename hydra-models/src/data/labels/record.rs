//! Rows of texts with labels.

use super::label::Label;
use crate::data::examples::{Column, Fields, Tally};

/// The fields that a label may be in.
const LABELS: [&str; 2] = ["label", "labels"];

/// A row: `{"text": .., "text_pair": .., "label": ..}`.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct LabelRecord {
    /// The text.
    pub(super) text: String,
    /// The second text, if the row has one.
    pub(super) pair: Option<String>,
    /// The field that the label is in.
    pub(super) field: &'static str,
    /// The label.
    pub(super) label: Label,
}

impl LabelRecord {
    /// Reads the fields of a row and counts unused ones. An empty cell of a table is an empty text.
    pub(super) fn from_fields(
        mut row: Fields,
        is_table: bool,
        columns: &[Column],
        tally: &mut Tally,
    ) -> Result<Self, String> {
        let (text, pair) = texts(&mut row, is_table)?;
        let field = label_field(&row, columns)?;
        let label = Label::read(field, row.required(field)?, is_table)?;
        tally.unused(row.names());
        Ok(Self { text, pair, field, label })
    }
}

/// Takes the text of a row, and the second one if there is one. An empty cell of a table is an empty text.
pub(super) fn texts(row: &mut Fields, is_table: bool) -> Result<(String, Option<String>), String> {
    let text = match is_table && row.is_null("text") {
        true => String::new(),
        false => row.text("text")?,
    };
    let pair = match is_table && row.is_null("text_pair") {
        true => Some(String::new()),
        false => row.has("text_pair").then(|| row.text("text_pair")).transpose()?,
    };
    Ok((text, pair))
}

/// The field that holds the label: the one that `columns` names, or the one that the row has.
fn label_field(row: &Fields, columns: &[Column]) -> Result<&'static str, String> {
    let named = |name: &&str| columns.iter().any(|column| column.field == **name);
    let (named, there): (Vec<&str>, Vec<&str>) = (
        LABELS.into_iter().filter(named).collect(),
        LABELS.into_iter().filter(|name| row.has(name)).collect(),
    );
    match (named.as_slice(), there.as_slice()) {
        ([field], _) | ([], [field]) => Ok(field),
        ([], []) => Ok(LABELS.into_iter().find(|name| row.is_null(name)).unwrap_or(LABELS[0])),
        _ => Err(
            "the row has both `label` and `labels`: remove one, or choose one with --columns label=label or \
                  --columns labels=labels"
                .to_owned(),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::label::Entry;
    use super::*;
    use serde_json::{Value, json};

    fn read(row: Value, is_table: bool, columns: &[&str]) -> Result<(LabelRecord, Tally), String> {
        let columns: Vec<Column> = columns.iter().map(|column| column.parse().unwrap()).collect();
        let Value::Object(row) = row else { panic!("a row is an object") };
        let mut tally = Tally::default();
        let record = LabelRecord::from_fields(Fields::new(row, &columns), is_table, &columns, &mut tally)?;
        Ok((record, tally))
    }

    #[test]
    fn a_row_has_one_text_or_two_and_a_label() {
        let (record, tally) =
            read(json!({"text": " a\n", "label": 1, "id": 7, "none": null}), false, &[]).unwrap();
        let label = Label::One(Entry::Integer(1));
        assert_eq!(record, LabelRecord { text: " a\n".to_owned(), pair: None, field: "label", label });
        assert_eq!(tally.unused.into_keys().collect::<Vec<_>>(), ["id"]);
        let of = |row, is_table| read(row, is_table, &[]).unwrap().0;
        let pair = of(json!({"text": "a", "text_pair": "b", "labels": ["x"]}), false);
        assert_eq!((pair.pair.as_deref(), pair.field), (Some("b"), "labels"));
        assert_eq!(of(json!({"text": "a", "text_pair": null, "label": 1}), false).pair, None);
        let empty = of(json!({"text": null, "text_pair": null, "label": "1"}), true);
        assert_eq!((empty.text.as_str(), empty.pair.as_deref()), ("", Some("")), "a cell is text");
    }

    #[test]
    fn the_named_one_of_two_labels_counts() {
        let row = json!({"text": "a", "label": 1, "labels": [2]});
        let (record, tally) = read(row, false, &["labels=labels"]).unwrap();
        assert_eq!((record.field, tally.unused["label"]), ("labels", 1));
    }

    #[test]
    fn what_a_row_lacks_is_named() {
        for (row, found) in [
            (json!({"text": "a"}), "the row has no `label`: add it"),
            (
                json!({"text": "a", "stars": 4}),
                "the row has no `label`, but `stars`: add it, or map another column to it, for example --columns label=stars",
            ),
            (json!({"text": "a", "label": null}), "`label` is null or empty: fill it in"),
            (json!({"text": "a", "labels": null}), "`labels` is null or empty: fill it in"),
            (json!({"text": "a", "label": ""}), "`label` has an empty name"),
            (json!({"text": "a", "label": 1, "labels": [1]}), "both `label` and `labels`"),
            (json!({"text": null, "label": 1}), "`text` is null or empty"),
            (json!({"text": 3, "label": 1}), "`text` must be text, found a number"),
            (json!({"text": "a", "text_pair": 3, "label": 1}), "`text_pair` must be text, found a number"),
            (
                json!({"review": "a", "label": 1}),
                "has no `text`, but `review`, `label`: add it, or map another column to it, for example --columns text=review",
            ),
            (
                json!({"premise": "a", "hypothesis": "b", "label": 1}),
                "--columns text=premise,text_pair=hypothesis",
            ),
        ] {
            let error = read(row.clone(), false, &[]).unwrap_err();
            assert!(error.contains(found), "{error} for {row}");
        }
    }
}
