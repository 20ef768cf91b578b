//! Parquet tables.

use super::rows::Row;
use crate::data::{DataError, RowPosition};
use ::parquet::errors::ParquetError;
use ::parquet::file::reader::{FileReader, SerializedFileReader};
use ::parquet::record::{Field, Row as Columns};
use serde_json::{Map, Value, json};
use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

/// Reads the rows of a file.
pub(super) fn read(path: &Path) -> Result<Vec<Row>, DataError> {
    // The reader panics on some damaged files.
    let read = catch_unwind(AssertUnwindSafe(|| rows(path)));
    read.unwrap_or_else(|_| {
        Err(damaged(path, ParquetError::General("its contents are inconsistent".to_owned())))
    })
}

fn damaged(path: &Path, source: ParquetError) -> DataError {
    let path = path.to_owned();
    match &source {
        ParquetError::General(text) if text.starts_with("Disabled feature at compile time: ") => {
            let codec = text.rsplit(' ').next().unwrap_or_default().to_owned();
            DataError::ParquetCodec { path, codec }
        }
        _ => DataError::ParquetFile { path, source: source.into() },
    }
}

fn rows(path: &Path) -> Result<Vec<Row>, DataError> {
    let damaged = |source| damaged(path, source);
    let file = File::open(path).map_err(|source| DataError::Read { path: path.to_owned(), source })?;
    let reader = SerializedFileReader::new(file).map_err(damaged)?;
    let mut rows = Vec::new();
    for (row, at) in reader.get_row_iter(None).map_err(damaged)?.zip(1..) {
        rows.push((RowPosition::Row(at), object(row.map_err(damaged)?)));
    }
    match rows.is_empty() {
        true => Err(DataError::NoRows { path: path.to_owned() }),
        false => Ok(rows),
    }
}

/// Converts the columns of a row to JSON.
fn object(row: Columns) -> Map<String, Value> {
    row.into_columns().into_iter().map(|(name, field)| (name, value(field))).collect()
}

fn value(field: Field) -> Value {
    match field {
        Field::Null => Value::Null,
        Field::Bool(value) => value.into(),
        Field::Str(text) => text.into(),
        Field::Byte(n) => n.into(),
        Field::Short(n) => n.into(),
        Field::Int(n) => n.into(),
        Field::Long(n) => n.into(),
        Field::UByte(n) => n.into(),
        Field::UShort(n) => n.into(),
        Field::UInt(n) => n.into(),
        Field::ULong(n) => n.into(),
        Field::Float(n) => n.into(),
        Field::Double(n) => n.into(),
        // A schema has every field that any row has; those a row lacks are null.
        Field::Group(row) => object(row).into_iter().filter(|(_, value)| !value.is_null()).collect(),
        Field::ListInternal(list) => list.elements().iter().cloned().map(value).collect(),
        Field::MapInternal(map) => {
            let entries = map.entries().iter();
            entries
                .map(|(key, field)| (key.to_string().trim_matches('"').to_owned(), value(field.clone())))
                .collect()
        }
        // Binary values are not trained on.
        Field::Bytes(bytes) => json!({ "bytes": bytes.len() }),
        Field::Float16(_)
        | Field::Decimal(_)
        | Field::Date(_)
        | Field::TimeMillis(_)
        | Field::TimeMicros(_)
        | Field::TimestampMillis(_)
        | Field::TimestampMicros(_) => field.to_string().into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::ExampleFiles;
    use std::fs;
    use std::path::PathBuf;

    /// A fixture file written by pyarrow.
    fn fixture(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/parquet").join(name)
    }

    #[test]
    fn rows_are_the_same_lines() {
        for name in ["text", "completions", "chat", "tokens"] {
            let rows = read(&fixture(&format!("{name}.parquet"))).unwrap();
            let lines = fs::read_to_string(fixture(&format!("{name}.jsonl"))).unwrap();
            let lines = lines.lines().map(|line| serde_json::from_str(line).unwrap());
            let lines: Vec<Row> = (1..).map(RowPosition::Row).zip(lines).collect();
            assert!(rows.len() > 5 && rows == lines, "{name}: {rows:?}");
        }
    }

    #[test]
    fn other_compressions_are_read_and_an_unsupported_one_is_named() {
        let zstandard = read(&fixture("zstandard.parquet")).unwrap();
        assert!(zstandard.len() == 5 && read(&fixture("gzip.parquet")).unwrap() == zstandard);
        let error = read(&fixture("brotli.parquet")).unwrap_err().to_string();
        assert!(error.contains("brotli.parquet` uses the Parquet compression brotli"), "{error}");
        assert!(error.contains("compression='snappy'"), "{error}");
    }

    #[test]
    fn a_directory_has_a_file_a_split() {
        let dir = tempfile::tempdir().unwrap();
        fs::copy(fixture("text.parquet"), dir.path().join("train.parquet")).unwrap();
        fs::copy(fixture("text.jsonl"), dir.path().join("test.jsonl")).unwrap();
        assert!(ExampleFiles::are_at(dir.path()) && ExampleFiles::are_at(&fixture("text.parquet")));
        let files = ExampleFiles::open(dir.path(), &[]).unwrap();
        let has = |split| files.has(split);
        assert_eq!(crate::data::Split::ALL.map(has), [true, false, true]);
    }

    #[test]
    fn what_is_no_record_is_named_with_its_row_and_column() {
        let refused = |name: &str| ExampleFiles::open(&fixture(name), &[]).unwrap_err().to_string();
        let columns = refused("columns.parquet");
        assert!(columns.contains("columns.parquet` has the columns `question`, `answer`"), "{columns}");
        assert!(columns.contains("--columns prompt=question,completion=answer"), "{columns}");
        let missing = refused("missing.parquet");
        assert!(missing.contains("row 3 of `") && missing.contains("`completion` is null"), "{missing}");
        let numbers = refused("numbers.parquet");
        assert!(
            numbers.contains("row 1 of `") && numbers.contains("`text` must be text, found a number"),
            "{numbers}"
        );
        let bytes = refused("bytes.parquet");
        assert!(
            bytes.contains("row 1 of `") && bytes.contains("`text` must be text, found an object"),
            "{bytes}"
        );
        let roles = refused("roles.parquet");
        assert!(roles.contains("row 2 of `") && roles.contains("message 1 of `messages`: "), "{roles}");
    }

    #[test]
    fn a_damaged_file_is_an_error_and_no_panic() {
        let dir = tempfile::tempdir().unwrap();
        let (path, whole) = (dir.path().join("a.parquet"), fs::read(fixture("chat.parquet")).unwrap());
        let read_of = |bytes: &[u8]| {
            fs::write(&path, bytes).unwrap();
            read(&path)
        };
        for cut in [0, 1, 4, 100, whole.len() / 2, whole.len() - 1] {
            let error = read_of(&whole[..cut]).unwrap_err().to_string();
            assert!(error.contains("a.parquet` is not a readable Parquet file"), "{error}");
        }
        // Some of these changes alter a value or nothing; any result without a panic is accepted.
        for at in (0..whole.len()).step_by(7) {
            let mut bytes = whole.clone();
            bytes[at] ^= 0x55;
            if let Err(error) = read_of(&bytes) {
                assert!(error.to_string().contains("a.parquet"), "{error}");
            }
        }
    }
}
