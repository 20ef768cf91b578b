//! Tables of Parquet as records.

use super::Record;
use super::files::Line;
use crate::data::DataError;
use ::parquet::errors::ParquetError;
use ::parquet::file::reader::{FileReader, SerializedFileReader};
use ::parquet::record::{Field, Row};
use ::parquet::schema::types::Type;
use serde_json::{Map, Value};
use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

/// The columns that records are made of; all others are left alone.
const COLUMNS: [&str; 6] = ["messages", "prompt", "completion", "input_ids", "labels", "text"];

/// The records of a file's rows, each with its row, counted from one.
pub(super) fn read(path: &Path) -> Result<Vec<Line>, DataError> {
    let damaged =
        |source: ParquetError| DataError::ParquetFile { path: path.to_owned(), source: source.into() };
    // A damaged file may say what the reader does not expect of any.
    let read = catch_unwind(AssertUnwindSafe(|| records(path)));
    read.unwrap_or_else(|_| Err(damaged(ParquetError::General("it contradicts itself".to_owned()))))
}

fn records(path: &Path) -> Result<Vec<Line>, DataError> {
    let damaged =
        |source: ParquetError| DataError::ParquetFile { path: path.to_owned(), source: source.into() };
    let file = File::open(path).map_err(|source| DataError::Read { path: path.to_owned(), source })?;
    let reader = SerializedFileReader::new(file).map_err(damaged)?;
    let schema = reader.metadata().file_metadata().schema();
    let known = schema.get_fields().iter().filter(|column| COLUMNS.contains(&column.name()));
    let known: Vec<_> = known.cloned().collect();
    if known.is_empty() {
        let found = schema.get_fields().iter().map(|column| column.name().to_owned()).collect();
        return Err(DataError::ParquetColumns { path: path.to_owned(), found });
    }
    let read = Type::group_type_builder(schema.name()).with_fields(known).build().map_err(damaged)?;
    let mut lines = Vec::new();
    for (row, at) in reader.get_row_iter(Some(read)).map_err(damaged)?.zip(1..) {
        let wrong = |found| DataError::ParquetRow { path: path.to_owned(), row: at, found };
        let record = object(row.map_err(damaged)?).and_then(|row| Record::of(&row)).map_err(wrong)?;
        lines.push((at, record));
    }
    match lines.is_empty() {
        true => Err(DataError::Empty { path: path.to_owned() }),
        false => Ok(lines),
    }
}

/// The fields of a row that are not null, as JSON has them.
fn object(row: Row) -> Result<Map<String, Value>, String> {
    let fields = row.into_columns().into_iter().filter(|(_, field)| !matches!(field, Field::Null));
    fields.map(|(name, field)| Ok((name.clone(), value(field, &name)?))).collect()
}

fn value(field: Field, column: &str) -> Result<Value, String> {
    Ok(match field {
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
        Field::Group(row) => object(row)?.into(),
        Field::ListInternal(list) => {
            list.elements().iter().map(|item| value(item.clone(), column)).collect::<Result<_, _>>()?
        }
        _ => return Err(format!("a kind of value in the column `{column}` that no record has")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::ExampleFiles;
    use std::fs;
    use std::path::PathBuf;

    /// A file in the repository that pyarrow wrote.
    fn fixture(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/parquet").join(name)
    }

    #[test]
    fn rows_are_the_records_of_the_same_lines() {
        for name in ["text", "completions", "chat", "tokens"] {
            let rows = read(&fixture(&format!("{name}.parquet"))).unwrap();
            let lines = fs::read_to_string(fixture(&format!("{name}.jsonl"))).unwrap();
            let lines: Vec<Line> =
                (1..).zip(lines.lines().map(|line| Record::parse(line).unwrap())).collect();
            assert!(rows.len() > 5 && rows == lines, "{name}: {rows:?}");
        }
    }

    #[test]
    fn a_directory_has_a_file_a_split() {
        let dir = tempfile::tempdir().unwrap();
        fs::copy(fixture("text.parquet"), dir.path().join("train.parquet")).unwrap();
        fs::copy(fixture("text.jsonl"), dir.path().join("test.jsonl")).unwrap();
        assert!(ExampleFiles::are_at(dir.path()) && ExampleFiles::are_at(&fixture("text.parquet")));
        let files = ExampleFiles::open(dir.path()).unwrap();
        let has = |split| files.has(split);
        assert_eq!(crate::data::Split::ALL.map(has), [true, false, true]);
    }

    #[test]
    fn what_is_no_record_is_named_with_its_row_and_column() {
        let refused = |name: &str| read(&fixture(name)).unwrap_err().to_string();
        let columns = refused("columns.parquet");
        assert!(columns.contains("columns.parquet` has the columns `question`, `answer`"), "{columns}");
        let missing = refused("missing.parquet");
        assert!(missing.contains("row 3 of `") && missing.contains("without `completion`"), "{missing}");
        let numbers = refused("numbers.parquet");
        assert!(numbers.contains("row 1 of `") && numbers.contains("a number as `text`"), "{numbers}");
        let bytes = refused("bytes.parquet");
        assert!(bytes.contains("row 1 of `") && bytes.contains("the column `text`"), "{bytes}");
        let roles = refused("roles.parquet");
        assert!(roles.contains("row 2 of `") && roles.contains("in message 1 of `messages`"), "{roles}");
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
            assert!(error.contains("a.parquet` could not be read as Parquet"), "{error}");
        }
        // Some of these change what is said in it, or nothing; whichever, it is an answer.
        for at in (0..whole.len()).step_by(7) {
            let mut bytes = whole.clone();
            bytes[at] ^= 0x55;
            if let Err(error) = read_of(&bytes) {
                assert!(error.to_string().contains("a.parquet"), "{error}");
            }
        }
    }
}
