//! The values that a parameter may have.

use super::{SpaceError, Value};
use crate::key::Key;

/// The values that a parameter may have.
#[derive(Clone, Debug, PartialEq)]
pub enum Range {
    /// One value of a list, uniformly.
    Choice(Vec<Value>),
    /// A number from `low` to `high`.
    Uniform {
        /// The lower end.
        low: f64,
        /// The upper end.
        high: f64,
    },
    /// A number from `low` to `high` whose logarithm is uniform.
    Log {
        /// The least, above zero.
        low: f64,
        /// The largest.
        high: f64,
    },
    /// An integer from `low` to `high`, both included.
    Int {
        /// The lower end.
        low: i64,
        /// The upper end.
        high: i64,
    },
}

impl Range {
    /// Checks that the range is not empty.
    ///
    /// # Errors
    /// [`SpaceError`], with the name of the parameter.
    pub(crate) fn check(&self, name: &str) -> Result<(), SpaceError> {
        let named = || name.to_owned();
        match self {
            Self::Choice(values) if values.is_empty() => Err(SpaceError::Empty { name: named() }),
            Self::Choice(values) => match values.iter().find_map(Value::not_finite) {
                Some(found) => Err(SpaceError::NotFinite { name: named(), found }),
                None => Ok(()),
            },
            Self::Log { low, .. } if *low <= 0.0 => Err(SpaceError::Logarithm { name: named(), low: *low }),
            Self::Uniform { low, high } | Self::Log { low, high } => {
                match (high - low).is_finite() && low < high {
                    true => Ok(()),
                    false => Err(SpaceError::Ends { name: named(), low: *low, high: *high }),
                }
            }
            Self::Int { low, high } if low > high => {
                Err(SpaceError::Ends { name: named(), low: *low as f64, high: *high as f64 })
            }
            Self::Int { .. } => Ok(()),
        }
    }

    /// The value that a key draws.
    pub(crate) fn draw(&self, key: Key) -> Value {
        match self {
            Self::Choice(values) => values[key.below(0, values.len() as u64) as usize].clone(),
            Self::Uniform { low, high } => {
                Value::Number((low + (high - low) * key.unit(0)).clamp(*low, *high))
            }
            Self::Log { low, high } => {
                let (from, to) = (libm::log(*low), libm::log(*high));
                Value::Number(libm::exp(from + (to - from) * key.unit(0)).clamp(*low, *high))
            }
            Self::Int { low, high } => {
                // The span of all integers does not fit in a `u64`; saturating drops one value.
                let span = high.abs_diff(*low).saturating_add(1);
                Value::Whole(low.wrapping_add_unsigned(key.below(0, span)))
            }
        }
    }

    /// The values, if they can be enumerated in a grid.
    pub(crate) fn values(&self) -> Option<Vec<Value>> {
        const MOST: u64 = 1 << 16;
        match self {
            Self::Choice(values) => Some(values.clone()),
            Self::Int { low, high } if high.abs_diff(*low) < MOST => {
                Some((*low..=*high).map(Value::Whole).collect())
            }
            Self::Int { .. } | Self::Uniform { .. } | Self::Log { .. } => None,
        }
    }

    /// True if a parameter with this range may have this value.
    pub(crate) fn contains(&self, value: &Value) -> bool {
        match self {
            Self::Choice(values) => values.iter().any(|other| other.identity() == value.identity()),
            Self::Uniform { low, high } | Self::Log { low, high } => {
                value.number().is_some_and(|number| (*low..=*high).contains(&number))
            }
            Self::Int { low, high } => {
                let inside =
                    |number: f64| number.trunc() == number && *low as f64 <= number && number <= *high as f64;
                value.number().is_some_and(inside)
            }
        }
    }

    /// A neighbouring value: a number times `factor` (at least the next integer), or the next of a list, upwards if
    /// the factor is above one. It stays in the range; a value outside the range is returned unchanged.
    pub(crate) fn neighbour(&self, value: &Value, factor: f64) -> Value {
        let up = factor > 1.0;
        match (self, value.number()) {
            (Self::Choice(values), _) => {
                let at = values.iter().position(|other| other.identity() == value.identity());
                let Some(at) = at else { return value.clone() };
                let next = if up { at + 1 } else { at.saturating_sub(1) };
                values[next.min(values.len() - 1)].clone()
            }
            (Self::Uniform { low, high } | Self::Log { low, high }, Some(number)) => {
                Value::Number((number * factor).clamp(*low, *high))
            }
            (Self::Int { low, high }, Some(number)) => {
                let whole = number as i64;
                let scaled = (number * factor).round() as i64;
                let step = if up { whole.saturating_add(1) } else { whole.saturating_sub(1) };
                Value::Whole(if scaled == whole { step } else { scaled }.clamp(*low, *high))
            }
            (_, None) => value.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draws(range: &Range, count: u64) -> Vec<f64> {
        (0..count).map(|index| range.draw(Key::new(1).fold(index)).number().unwrap()).collect()
    }

    #[test]
    fn draws_have_the_distribution_of_their_kind() {
        let uniform = draws(&Range::Uniform { low: -1.0, high: 3.0 }, 4_000);
        assert!(uniform.iter().all(|x| (-1.0..=3.0).contains(x)));
        assert!((uniform.iter().sum::<f64>() / 4e3 - 1.0).abs() < 0.06);
        let log = draws(&Range::Log { low: 1e-5, high: 1e-1 }, 4_000);
        assert!(log.iter().all(|x| (1e-5..=1e-1).contains(x)));
        let below = log.iter().filter(|x| **x < 1e-3).count();
        assert!((1_900..2_100).contains(&below), "half of the decades are below: {below}");
        let int = draws(&Range::Int { low: -2, high: 2 }, 4_000);
        for whole in -2..=2 {
            let count = int.iter().filter(|x| **x == f64::from(whole)).count();
            assert!((700..900).contains(&count), "{whole}: {count}");
        }
        let all = Range::Int { low: i64::MIN, high: i64::MAX };
        assert!(draws(&all, 100).iter().any(|x| *x < 0.0));
    }

    /// A draw belongs to a seed: these bits must not change between versions or machines.
    #[test]
    fn draws_are_pinned() {
        let key = Key::new(7).fold(3).fold_name("lr");
        let log = Range::Log { low: 1e-5, high: 1e-2 }.draw(key).number().unwrap();
        let uniform = Range::Uniform { low: 0.0, high: 0.3 }.draw(key).number().unwrap();
        let int = Range::Int { low: 1, high: 8 }.draw(key);
        assert_eq!((log.to_bits(), uniform.to_bits(), int), PINNED);
    }

    const PINNED: (u64, u64, Value) = (4_540_718_433_272_052_482, 4_588_500_512_719_651_276, Value::Whole(2));

    #[test]
    fn ranges_with_nothing_in_them_are_refused() {
        let refused = |range: Range| range.check("x").unwrap_err().to_string();
        assert!(refused(Range::Choice(vec![])).starts_with("`x` has no values"));
        assert!(refused(Range::Choice(vec![f64::NAN.into()])).starts_with("`x` has the value NaN"));
        assert!(refused(Range::Uniform { low: 1.0, high: 1.0 }).starts_with("`x` goes from 1 to 1"));
        assert!(refused(Range::Uniform { low: f64::MIN, high: f64::MAX }).starts_with("`x` goes from"));
        assert!(
            refused(Range::Log { low: 0.0, high: 1.0 }).starts_with("`x` is logarithmic and starts at 0")
        );
        assert!(refused(Range::Log { low: f64::NAN, high: 1.0 }).starts_with("`x` goes from NaN"));
        assert!(refused(Range::Int { low: 3, high: 2 }).starts_with("`x` goes from 3 to 2"));
        assert!(Range::Int { low: 3, high: 3 }.check("x").is_ok());
    }

    #[test]
    fn neighbours_stay_in_the_range() {
        let choice = Range::Choice(vec![8.into(), 16.into(), 32.into()]);
        assert_eq!(choice.neighbour(&16.into(), 1.2), 32.into());
        assert_eq!(choice.neighbour(&32.into(), 1.2), 32.into());
        assert_eq!(choice.neighbour(&8.into(), 0.8), 8.into());
        let int = Range::Int { low: 1, high: 20 };
        assert_eq!([int.neighbour(&2.into(), 1.2), int.neighbour(&2.into(), 0.8)], [3, 1].map(Value::Whole));
        assert_eq!(
            [int.neighbour(&1.into(), 0.8), int.neighbour(&15.into(), 1.2)],
            [1, 18].map(Value::Whole)
        );
        let log = Range::Log { low: 0.1, high: 1.0 };
        assert_eq!(log.neighbour(&0.9.into(), 1.2), 1.0.into());
        assert_eq!(log.neighbour(&"word".into(), 1.2), "word".into());
    }
}
