//! Numbers and times as they are printed.

/// Numbers from this one on are printed in scientific notation.
const LARGE: f64 = 1e9;

/// The common unit of times that are compared with each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Thousandths of a second.
    Milliseconds,
    /// Seconds.
    Seconds,
    /// Hours.
    Hours,
}

impl Unit {
    /// The unit that suits the longest of the times.
    pub fn of(longest_s: f64) -> Self {
        match longest_s {
            s if s < 1.0 => Self::Milliseconds,
            s if s < 7200.0 => Self::Seconds,
            _ => Self::Hours,
        }
    }

    /// Returns a time in this unit, with its symbol.
    pub fn show(self, seconds: f64) -> String {
        match self {
            Self::Milliseconds => format!("{} ms", fixed(1e3 * seconds, 3)),
            Self::Seconds => format!("{} s", fixed(seconds, 2)),
            Self::Hours => format!("{} h", fixed(seconds / 3600.0, 3)),
        }
    }
}

/// A number with `decimals` decimals, or with four significant digits if it is large.
pub fn fixed(number: f64, decimals: usize) -> String {
    if number.abs() < LARGE { format!("{number:.decimals$}") } else { format!("{number:.3e}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_share_a_unit() {
        assert_eq!(Unit::of(0.25).show(0.25), "250.000 ms");
        assert_eq!(Unit::of(100.0).show(0.25), "0.25 s");
        assert_eq!(Unit::of(7200.0).show(1800.0), "0.500 h");
        assert_eq!(Unit::of(1e300).show(3.6e303), "1.000e300 h");
        let fixed = [0.5, 999_999_999.0, 1e9, -1e9].map(|x| fixed(x, 1));
        assert_eq!(fixed, ["0.5", "999999999.0", "1.000e9", "-1.000e9"]);
    }
}
