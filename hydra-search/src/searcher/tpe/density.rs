//! Densities of the values of a parameter.
//!
//! A value is a point: a number is its position in the range, from 0 to 1, on a logarithmic axis for a logarithmic
//! range; an integer is the middle of its share of the range; a choice is its index in the list.

use crate::key::Key;
use crate::space::{Range, Value};
use std::f64::consts::{PI, SQRT_2};

/// The estimated density of the points of a parameter.
#[derive(Clone, Debug)]
pub(super) enum Density {
    /// Weights of the indices of a list: one each, plus one for each observed value.
    Places(Vec<f64>),
    /// A mixture of normal distributions with equal weights, each truncated to [0, 1]: one over the whole range, and
    /// one around each point.
    Mixture(Vec<Normal>),
}

/// A normal distribution truncated to [0, 1].
#[derive(Clone, Copy, Debug)]
pub(super) struct Normal {
    mean: f64,
    deviation: f64,
}

impl Density {
    /// The density of these values; values outside the range are ignored.
    pub(super) fn of(range: &Range, values: &[&Value]) -> Self {
        let points =
            values.iter().filter(|value| range.contains(value)).filter_map(|value| point(range, value));
        match range {
            Range::Choice(list) => {
                let mut weights = vec![1.0; list.len()];
                points.for_each(|point| weights[point as usize] += 1.0);
                Self::Places(weights)
            }
            _ => Self::Mixture(mixture(points.collect())),
        }
    }

    /// The point that a key draws.
    pub(super) fn draw(&self, key: Key) -> f64 {
        match self {
            Self::Places(weights) => {
                let mut left = key.unit(0) * weights.iter().sum::<f64>();
                let inside = |weight: &f64| {
                    left -= weight;
                    left < 0.0
                };
                weights.iter().position(inside).unwrap_or(weights.len() - 1) as f64
            }
            Self::Mixture(parts) => {
                let part = parts[key.below(0, parts.len() as u64) as usize];
                // At least a third of the draws is within the range: the mean is, and the deviation is at most one.
                let drawn = (1..1_000).map(|index| part.draw(key, index));
                drawn.into_iter().find(|point| (0.0..=1.0).contains(point)).unwrap_or(part.mean)
            }
        }
    }

    /// The logarithm of the density at a point.
    pub(super) fn log(&self, point: f64) -> f64 {
        match self {
            Self::Places(weights) => libm::log(weights[point as usize] / weights.iter().sum::<f64>()),
            Self::Mixture(parts) => {
                let sum: f64 = parts.iter().map(|part| part.density(point)).sum();
                libm::log(sum / parts.len() as f64)
            }
        }
    }

    /// The value at a point.
    pub(super) fn value(range: &Range, point: f64) -> Value {
        match range {
            Range::Choice(values) => values[(point as usize).min(values.len() - 1)].clone(),
            Range::Uniform { low, high } => Value::Number((low + (high - low) * point).clamp(*low, *high)),
            Range::Log { low, high } => {
                let (from, to) = (libm::log(*low), libm::log(*high));
                Value::Number(libm::exp(from + (to - from) * point).clamp(*low, *high))
            }
            Range::Int { low, high } => {
                let from = *low as f64 - 0.5;
                Value::Whole(((from + (*high as f64 + 0.5 - from) * point).round() as i64).clamp(*low, *high))
            }
        }
    }
}

/// The point of a value that is in the range.
fn point(range: &Range, value: &Value) -> Option<f64> {
    let place = |low: f64, high: f64, number: f64| (number - low) / (high - low);
    match range {
        Range::Choice(values) => {
            values.iter().position(|other| other.identity() == value.identity()).map(|place| place as f64)
        }
        Range::Uniform { low, high } => Some(place(*low, *high, value.number()?)),
        Range::Log { low, high } => {
            Some(place(libm::log(*low), libm::log(*high), libm::log(value.number()?)))
        }
        Range::Int { low, high } => Some(place(*low as f64 - 0.5, *high as f64 + 0.5, value.number()?)),
    }
}

/// Bergstra et al. 2011, section 4.2: the deviation of a point is the larger of the distances to its neighbours,
/// clipped, and the prior is one part among the others.
fn mixture(mut points: Vec<f64>) -> Vec<Normal> {
    points.sort_by(f64::total_cmp);
    let least = 1.0 / (1.0 + points.len() as f64).min(100.0);
    let neighbour = |at: Option<usize>, end: f64| at.and_then(|at| points.get(at)).copied().unwrap_or(end);
    let part = |(at, mean): (usize, &f64)| {
        let (left, right) = (neighbour(at.checked_sub(1), 0.0), neighbour(Some(at + 1), 1.0));
        Normal { mean: *mean, deviation: (mean - left).max(right - mean).clamp(least, 1.0) }
    };
    let prior = Normal { mean: 0.5, deviation: 1.0 };
    points.iter().enumerate().map(part).chain([prior]).collect()
}

impl Normal {
    /// Box and Muller, 1958.
    fn draw(self, key: Key, index: u64) -> f64 {
        let (u, v) = (1.0 - key.unit(2 * index), key.unit(2 * index + 1));
        self.mean + self.deviation * libm::sqrt(-2.0 * libm::log(u)) * libm::cos(2.0 * PI * v)
    }

    fn density(self, point: f64) -> f64 {
        let z = (point - self.mean) / self.deviation;
        let normal = libm::exp(-0.5 * z * z) / (self.deviation * libm::sqrt(2.0 * PI));
        normal / (self.below(1.0) - self.below(0.0))
    }

    /// The share of the untruncated distribution below a point.
    fn below(self, point: f64) -> f64 {
        0.5 * (1.0 + libm::erf((point - self.mean) / (self.deviation * SQRT_2)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WIDE: Range = Range::Uniform { low: 0.0, high: 1.0 };

    fn integral(density: &Density) -> f64 {
        (0..1_000).map(|at| density.log((f64::from(at) + 0.5) / 1e3).exp() / 1e3).sum()
    }

    #[test]
    fn densities_add_up_to_one_and_follow_their_points() {
        let values: Vec<Value> = [0.2, 0.21, 0.25, 0.9].map(Value::from).to_vec();
        let density = Density::of(&WIDE, &values.iter().collect::<Vec<_>>());
        assert!((integral(&density) - 1.0).abs() < 1e-4);
        assert!(density.log(0.21) > density.log(0.6));
        let none = Density::of(&WIDE, &[]);
        assert!((integral(&none) - 1.0).abs() < 1e-4);
        let drawn: Vec<f64> = (0..2_000).map(|draw| density.draw(Key::new(1).fold(draw))).collect();
        assert!(drawn.iter().all(|point| (0.0..=1.0).contains(point)));
        // The draws have the computed density.
        let below = drawn.iter().filter(|point| **point < 0.4).count() as f64 / 2e3;
        let expected: f64 = (0..400).map(|at| density.log((f64::from(at) + 0.5) / 1e3).exp() / 1e3).sum();
        assert!((below - expected).abs() < 0.03, "{below} against {expected}");
    }

    #[test]
    fn places_have_the_weights_of_what_was_seen() {
        let range = Range::Choice(vec!["a".into(), "b".into(), "c".into()]);
        let (seen, strange) = (Value::from("b"), Value::from("x"));
        let density = Density::of(&range, &[&seen, &seen, &seen, &strange]);
        assert!((density.log(1.0).exp() - 4.0 / 6.0).abs() < 1e-12);
        let drawn = (0..3_000).filter(|draw| density.draw(Key::new(2).fold(*draw)) == 1.0).count();
        assert!((1_900..2_100).contains(&drawn), "{drawn}");
    }

    #[test]
    fn values_and_points_belong_together() {
        let log = Range::Log { low: 1e-4, high: 1.0 };
        let int = Range::Int { low: -1, high: 3 };
        for (range, value) in
            [(&WIDE, 0.3.into()), (&log, 1e-2.into()), (&int, Value::Whole(2)), (&int, (-1).into())]
        {
            let back = Density::value(range, point(range, &value).unwrap());
            assert!((back.number().unwrap() - value.number().unwrap()).abs() < 1e-12, "{value}");
        }
        assert!((point(&log, &1e-2.into()).unwrap() - 0.5).abs() < 1e-12);
        assert_eq!([0.0, 0.1, 0.3, 1.0].map(|at| Density::value(&int, at)), [-1, -1, 0, 3].map(Value::Whole));
    }
}
