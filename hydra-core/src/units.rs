//! Human-readable sizes and bandwidths.

use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// A number of bytes that is parsed and displayed with binary units (`64MiB`). Serde writes the number, and
/// reads a number or a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "NumberOrText<u64>")]
pub struct ByteSize(pub u64);

/// The bytes per second of a link (`8GiB/s`). Serde writes the number, and reads a number or a text.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(try_from = "NumberOrText<f64>")]
pub struct Bandwidth(pub f64);

/// A size or a bandwidth as a number or a text.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a number of bytes, or a text such as 64MiB")]
enum NumberOrText<N> {
    Number(N),
    Text(String),
}

impl TryFrom<NumberOrText<u64>> for ByteSize {
    type Error = UnitError;

    fn try_from(written: NumberOrText<u64>) -> Result<Self, UnitError> {
        match written {
            NumberOrText::Number(bytes) => Ok(Self(bytes)),
            NumberOrText::Text(text) => text.parse(),
        }
    }
}

impl TryFrom<NumberOrText<f64>> for Bandwidth {
    type Error = UnitError;

    fn try_from(written: NumberOrText<f64>) -> Result<Self, UnitError> {
        match written {
            NumberOrText::Number(bytes_per_s) => Ok(Self(bytes_per_s)),
            NumberOrText::Text(text) => text.parse(),
        }
    }
}

/// An error of parsing a size or a bandwidth.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[allow(missing_docs, reason = "the error messages describe the fields")]
pub enum UnitError {
    /// The text is not a number followed by a unit.
    #[error(
        "`{found}` is not a size: expected a positive number with a unit, B, KB, MB, GB, TB, KiB, MiB, GiB or TiB, such as 64MiB"
    )]
    Size { found: String },
    /// A number without a unit that is too small to be plausible as bytes.
    #[error(
        "`{found}` has no unit: write {found}GB or {found}GiB, {found}MB or {found}MiB, or {found}B for bytes"
    )]
    NoUnit { found: String },
    /// The text is not a size followed by `/s`.
    #[error("`{found}` is not a bandwidth: expected a size per second, such as 8GiB/s")]
    Bandwidth { found: String },
}

/// The units, in lower case.
const UNITS: [(&str, f64); 10] = [
    ("kib", 1024.0),
    ("mib", 1_048_576.0),
    ("gib", 1_073_741_824.0),
    ("tib", 1_099_511_627_776.0),
    ("kb", 1e3),
    ("mb", 1e6),
    ("gb", 1e9),
    ("tb", 1e12),
    ("b", 1.0),
    ("", 1.0),
];

/// From this value on, a number without a unit is accepted as bytes.
const LEAST_WITHOUT_UNIT: f64 = 1_048_576.0;

/// Returns the bytes that a text denotes, and whether it has a unit. `4G` is `4GB`, and `4Gi` is `4GiB`.
fn parse_bytes(text: &str) -> Option<(f64, bool)> {
    let text = text.trim().to_ascii_lowercase();
    let whole = match text.chars().last() {
        Some('k' | 'm' | 'g' | 't' | 'i') => text + "b",
        _ => text,
    };
    let (number, scale, unit) = UNITS.iter().find_map(|(unit, scale)| {
        let head = whole.strip_suffix(unit)?;
        head.trim().parse::<f64>().ok().map(|n| (n, *scale, *unit))
    })?;
    let bytes = number * scale;
    (bytes.is_finite() && bytes > 0.0 && bytes < u64::MAX as f64).then_some((bytes, !unit.is_empty()))
}

impl ByteSize {
    /// The number of bytes.
    pub fn bytes(self) -> u64 {
        self.0
    }

    /// Returns a size of `n` mebibytes, saturating.
    pub const fn mib(n: u64) -> Self {
        Self(n.saturating_mul(1 << 20))
    }

    /// Formats a minimum size: rounded up, while other sizes are rounded to nearest, so that parsing the text
    /// yields at least this size.
    pub fn at_least(self) -> String {
        let Some((unit, scale)) = unit(self.0) else { return self.to_string() };
        let hundredths = (u128::from(self.0) * 100).div_ceil(u128::from(scale));
        format!("{}.{:02} {unit}", hundredths / 100, hundredths % 100)
    }
}

/// The unit in which a size is displayed and its bytes; `None` for one that is displayed in bytes.
fn unit(bytes: u64) -> Option<(&'static str, u64)> {
    match bytes {
        0..1024 => None,
        1024..1_048_576 => Some(("KiB", 1 << 10)),
        1_048_576..1_073_741_824 => Some(("MiB", 1 << 20)),
        _ => Some(("GiB", 1 << 30)),
    }
}

impl FromStr for ByteSize {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        match parse_bytes(text) {
            Some((bytes, false)) if bytes < LEAST_WITHOUT_UNIT => {
                Err(UnitError::NoUnit { found: text.trim().to_owned() })
            }
            Some((bytes, _)) if bytes >= 1.0 => Ok(Self(bytes as u64)),
            _ => Err(UnitError::Size { found: text.to_owned() }),
        }
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match unit(self.0) {
            None => write!(f, "{} B", self.0),
            Some((unit, scale)) => write!(f, "{:.2} {unit}", self.0 as f64 / scale as f64),
        }
    }
}

impl FromStr for Bandwidth {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        text.trim()
            .strip_suffix("/s")
            .and_then(parse_bytes)
            .filter(|(bytes, has_unit)| *has_unit || *bytes >= LEAST_WITHOUT_UNIT)
            .map(|(bytes, _)| Self(bytes))
            .ok_or_else(|| UnitError::Bandwidth { found: text.to_owned() })
    }
}

impl fmt::Display for Bandwidth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/s", ByteSize(self.0 as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn sizes_read_and_print() {
        assert_eq!("64MiB".parse(), Ok(ByteSize(64 << 20)));
        assert_eq!("1.5 GiB".parse(), Ok(ByteSize(3 << 29)));
        assert_eq!("2MB".parse(), Ok(ByteSize(2_000_000)));
        assert_eq!("67108864".parse(), Ok(ByteSize::mib(64)));
        assert_eq!((ByteSize::mib(3), ByteSize::mib(1 << 44)), (ByteSize(3 << 20), ByteSize(u64::MAX)));
        let binary =
            ["1B", "1KiB", "1MiB", "1GiB", "1TiB"].map(|text| text.parse::<ByteSize>().unwrap().bytes());
        assert_eq!(binary, [1, 1 << 10, 1 << 20, 1 << 30, 1 << 40]);
        let decimal = ["1KB", "1MB", "1GB", "1TB"].map(|text| text.parse::<ByteSize>().unwrap().bytes());
        assert_eq!(decimal, [1000, 1_000_000, 1_000_000_000, 1_000_000_000_000]);
        assert_eq!(ByteSize(3 << 29).to_string(), "1.50 GiB");
        let printed = [1023, 1024, (1 << 20) - 1, 1 << 20, 1 << 30].map(|bytes| ByteSize(bytes).to_string());
        assert_eq!(printed, ["1023 B", "1.00 KiB", "1024.00 KiB", "1.00 MiB", "1.00 GiB"]);
        assert_eq!("8GiB/s".parse(), Ok(Bandwidth(8.0 * 1_073_741_824.0)));
    }

    #[test]
    fn units_go_by_their_first_letters_and_in_any_case() {
        for (text, bytes) in [
            ("4G", 4_000_000_000),
            ("4g", 4_000_000_000),
            ("4 gb", 4_000_000_000),
            ("4Gi", 4 << 30),
            ("4gib", 4 << 30),
            ("512M", 512_000_000),
            ("1.5k", 1500),
            ("2T", 2_000_000_000_000),
        ] {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
        assert_eq!("8G/s".parse(), Ok(Bandwidth(8e9)));
    }

    #[test]
    fn a_small_number_without_a_unit_is_refused_with_the_units() {
        for text in ["4", "16", "24000", "0.5", "1048575"] {
            let said = text.parse::<ByteSize>().unwrap_err().to_string();
            let expected = format!("`{text}` has no unit: write {text}GB or {text}GiB, ");
            assert!(
                said.starts_with(&expected) && said.ends_with(&format!("or {text}B for bytes")),
                "{said}"
            );
        }
        assert_eq!("1048576".parse(), Ok(ByteSize::mib(1)));
        assert_eq!("4B".parse(), Ok(ByteSize(4)));
        assert!("4/s".parse::<Bandwidth>().is_err());
    }

    #[test]
    fn what_is_needed_at_least_is_enough_when_it_is_read_back() {
        assert_eq!(ByteSize(2_296_478).at_least(), "2.20 MiB");
        assert_eq!(ByteSize(2_296_478).to_string(), "2.19 MiB");
        assert_eq!(ByteSize(3 << 29).at_least(), "1.50 GiB");
        assert_eq!(ByteSize(1023).at_least(), "1023 B");
        assert_eq!(ByteSize((1 << 20) - 1).at_least(), "1024.00 KiB");
        for bytes in
            (0..64).flat_map(|shift| [(1_u64 << shift) - 1, 1 << shift, (1 << shift) + 1, 5 << shift >> 2])
        {
            let shown = ByteSize(bytes.clamp(1, 1 << 52)).at_least();
            assert!(
                shown.parse::<ByteSize>().unwrap().0 >= bytes.min(1 << 52),
                "{shown} is less than {bytes}"
            );
        }
    }

    #[test]
    fn what_is_no_size_is_named() {
        for bad in ["", "MiB", "-1MiB", "0", "nanMiB", "12 parsecs", "infGiB", "0.2B", "4i", "G"] {
            let error = bad.parse::<ByteSize>().unwrap_err();
            assert!(error.to_string().contains(&format!("`{bad}`")), "{error}");
        }
        assert!("8GiB".parse::<Bandwidth>().is_err());
    }

    #[test]
    fn serde_reads_numbers_and_texts_and_writes_numbers() {
        let read = |line: &str| toml::from_str::<BTreeMap<String, ByteSize>>(line);
        let size = |line| read(line).map(|sizes| sizes["size"]).map_err(|error| error.to_string());
        assert_eq!(size("size = 65536"), Ok(ByteSize(65_536)));
        assert_eq!(size("size = '64KiB'"), Ok(ByteSize(65_536)));
        assert!(size("size = 'much'").unwrap_err().contains("`much` is not a size"));
        assert!(size("size = -1").unwrap_err().contains("expected a number of bytes"));
        let link: BTreeMap<String, [Bandwidth; 2]> = toml::from_str("link = [2048.0, '2KiB/s']").unwrap();
        assert_eq!(link["link"], [Bandwidth(2048.0); 2]);
        let written = BTreeMap::from([("link", Bandwidth(0.5))]);
        assert_eq!(toml::to_string(&written).unwrap(), "link = 0.5\n");
    }
}
