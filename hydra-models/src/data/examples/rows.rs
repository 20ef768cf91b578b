//! Row files: JSON Lines, JSON arrays, CSV, TSV and Parquet.

use super::columns::LEARNED;
use super::{parquet, table};
use crate::data::{DataError, RowPosition};
use flate2::read::MultiGzDecoder;
use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};
use serde_json::{Map, Value};
use std::fmt;
use std::fs;
use std::io::Read;
use std::path::Path;

/// A row and its position in the file.
pub(in crate::data) type Row = (RowPosition, Map<String, Value>);

/// The formats of row files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// One JSON object per line.
    Lines,
    /// An array of JSON objects, or concatenated objects.
    Json,
    /// A text table with this separator.
    Table(u8),
    Parquet,
}

/// File name extensions; all except the last may be followed by `.gz`.
const ENDINGS: [(&str, Format); 7] = [
    ("jsonl", Format::Lines),
    ("ndjson", Format::Lines),
    ("json", Format::Json),
    ("csv", Format::Table(b',')),
    ("tsv", Format::Table(b'\t')),
    ("tab", Format::Table(b'\t')),
    ("parquet", Format::Parquet),
];

/// Extensions of unsupported compressions, and the command that unpacks them.
const PACKED: [(&str, &str); 4] = [("zst", "zstd -d"), ("bz2", "bunzip2"), ("xz", "unxz"), ("zip", "unzip")];

/// The extension of the supported compression.
const GZIP: &str = "gz";

/// A file's format by its name, the name without the format's extension, and the unpacking command if its compression
/// is not supported.
pub(super) struct FileName<'a> {
    pub(super) format: Format,
    pub(super) stem: &'a str,
    pub(super) unpack: Option<&'static str>,
}

/// Determines a file's format from its name; `None` if it is not a row file.
pub(super) fn named(name: &str) -> Option<FileName<'_>> {
    let cut = |name: &str, ending: &str| {
        let stem = name.len().checked_sub(ending.len() + 1)?;
        let fits = name.is_char_boundary(stem) && name[stem..].starts_with('.');
        (fits && name[stem + 1..].eq_ignore_ascii_case(ending)).then_some(stem)
    };
    let packed = PACKED.iter().find_map(|(ending, command)| Some((cut(name, ending)?, Some(*command))));
    let gzip = cut(name, GZIP).map(|end| (end, None));
    let (end, unpack) = packed.or(gzip).unwrap_or((name.len(), None));
    let (ending, format) = ENDINGS.iter().find(|(ending, _)| cut(&name[..end], ending).is_some())?;
    Some(FileName { format: *format, stem: &name[..end - ending.len() - 1], unpack })
}

/// Reads the rows of a file.
///
/// # Errors
/// A file that does not match the format of its name, or has no rows.
pub(super) fn read(path: &Path) -> Result<Vec<Row>, DataError> {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let FileName { format, unpack, .. } =
        named(name).ok_or_else(|| DataError::NoRows { path: path.to_owned() })?;
    if let Some(unpack) = unpack {
        return Err(DataError::Compressed { path: path.to_owned(), unpack });
    }
    if format == Format::Parquet {
        return parquet::read(path);
    }
    let text = read_text(path)?;
    let text = text.trim_start_matches('\u{FEFF}');
    let rows = match format {
        Format::Table(separator) => table::read(path, text, separator)?,
        Format::Json => json(path, text)?,
        Format::Lines | Format::Parquet => lines(path, text)?,
    };
    match rows.is_empty() {
        true => Err(DataError::NoRows { path: path.to_owned() }),
        false => Ok(rows),
    }
}

/// Reads the text of a file that may be compressed.
fn read_text(path: &Path) -> Result<String, DataError> {
    let failed = |source| DataError::Read { path: path.to_owned(), source };
    let mut bytes = fs::read(path).map_err(failed)?;
    if path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case(GZIP)) {
        let mut unpacked = Vec::new();
        MultiGzDecoder::new(bytes.as_slice()).read_to_end(&mut unpacked).map_err(failed)?;
        bytes = unpacked;
    }
    crate::data::text::utf8(path, bytes)
}

fn lines(path: &Path, text: &str) -> Result<Vec<Row>, DataError> {
    let lines = (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty());
    let row = |(line, text): (usize, &str)| {
        let Object(object) = serde_json::from_str(text)
            .map_err(|error| wrong(path, RowPosition::Line(line), format!("{error} (in this line)")))?;
        Ok((RowPosition::Line(line), object))
    };
    lines.map(row).collect()
}

/// Reads an array of objects, or concatenated objects.
fn json(path: &Path, text: &str) -> Result<Vec<Row>, DataError> {
    let failed = |error: serde_json::Error| wrong(path, RowPosition::Line(error.line()), error.to_string());
    let objects = match text.trim_start().starts_with('[') {
        true => serde_json::from_str::<Vec<Object>>(text).map_err(failed)?,
        false => serde_json::Deserializer::from_str(text)
            .into_iter()
            .collect::<Result<Vec<Object>, _>>()
            .map_err(failed)?,
    };
    if let [Object(object)] = objects.as_slice()
        && !object.keys().any(|name| LEARNED.contains(&name.as_str()))
        && let Some((name, _)) = object.iter().find(|(_, value)| is_rows(value))
    {
        return Err(DataError::RowsWithin { path: path.to_owned(), field: name.clone() });
    }
    Ok((1..).zip(objects).map(|(at, Object(object))| (RowPosition::Row(at), object)).collect())
}

/// Returns whether a value is a list of objects.
fn is_rows(value: &Value) -> bool {
    value.as_array().is_some_and(|list| !list.is_empty() && list.iter().all(Value::is_object))
}

fn wrong(path: &Path, place: RowPosition, found: String) -> DataError {
    DataError::Record { path: path.to_owned(), place, found: format!("not a JSON object: {found}") }
}

/// A JSON object without duplicate keys.
struct Object(Map<String, Value>);

impl<'de> Deserialize<'de> for Object {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields;
        impl<'de> Visitor<'de> for Fields {
            type Value = Object;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Object, A::Error> {
                let mut object = Map::new();
                while let Some((name, value)) = fields.next_entry::<String, Value>()? {
                    if object.contains_key(&name) {
                        return Err(A::Error::custom(format!("duplicate field `{name}`: remove one")));
                    }
                    object.insert(name, value);
                }
                Ok(Object(object))
            }
        }
        deserializer.deserialize_map(Fields)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::Compression;
    use flate2::write::GzEncoder;
    use serde_json::json;
    use std::io::Write;

    fn rows(name: &str, bytes: &[u8]) -> Result<Vec<Row>, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        read(&path).map_err(|error| error.to_string())
    }

    fn values(name: &str, bytes: &[u8]) -> Value {
        rows(name, bytes).unwrap().into_iter().map(|(_, row)| Value::Object(row)).collect()
    }

    #[test]
    fn all_forms_of_json_have_the_same_rows() {
        let expected = json!([{"text": "a", "n": 1}, {"text": "b\n", "n": null}]);
        let lines = b"{\"text\": \"a\", \"n\": 1}\r\n\r\n{\"text\": \"b\\n\", \"n\": null}\r\n";
        assert_eq!(values("a.jsonl", lines), expected);
        assert_eq!(values("a.NDJSON", &[b"\xEF\xBB\xBF", &lines[..]].concat()), expected);
        assert_eq!(values("a.json", lines), expected);
        assert_eq!(values("a.json", format!("{expected:#}").as_bytes()), expected);
        let mut gzip = GzEncoder::new(Vec::new(), Compression::default());
        gzip.write_all(lines).unwrap();
        assert_eq!(values("a.jsonl.gz", &gzip.finish().unwrap()), expected);
        let places: Vec<String> =
            rows("a.jsonl", lines).unwrap().iter().map(|row| row.0.to_string()).collect();
        assert_eq!(places, ["line 1", "line 3"]);
    }

    #[test]
    fn what_has_no_rows_is_named() {
        for (name, text, parts) in [
            (
                "a.jsonl",
                "{\"text\": 1}\n[1]\n",
                &["line 2 of", "not a JSON object", "expected an object"][..],
            ),
            ("a.jsonl", "{\"text\": \"a\", \"text\": \"b\"}\n", &["line 1", "duplicate field `text`"]),
            ("a.jsonl", "{\"text\": \"a\"", &["line 1", "EOF"]),
            ("a.jsonl", "\n \n", &["has no rows"]),
            ("a.json", "[]", &["has no rows"]),
            ("a.json", "[{\"text\": \"a\"},\n\"b\"]", &["line 2", "expected an object"]),
            (
                "a.json",
                "{\"version\": 1, \"data\": [{\"text\": \"a\"}]}",
                &["`data`", "jq -c '.[\"data\"][]'"],
            ),
            ("a.jsonl.zst", "", &["zstd -d", "a.jsonl.zst"]),
            ("a.csv.gz", "no gzip", &["a.csv.gz` could not be read"]),
        ] {
            let error = rows(name, text.as_bytes()).unwrap_err();
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        }
    }

    #[test]
    fn names_say_the_form() {
        let of = |name| named(name).map(|named| (named.format, named.stem.to_owned(), named.unpack));
        assert_eq!(of("train.csv"), Some((Format::Table(b','), "train".to_owned(), None)));
        assert_eq!(of("train.TSV.gz"), Some((Format::Table(b'\t'), "train".to_owned(), None)));
        assert_eq!(of("a.b.jsonl.xz"), Some((Format::Lines, "a.b".to_owned(), Some("unxz"))));
        for other in ["train.txt", "train", "jsonl", "é", "a.gz", "train.csvx"] {
            assert_eq!(of(other), None, "{other}");
        }
    }
}
