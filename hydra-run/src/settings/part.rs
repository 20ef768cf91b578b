//! Parts of a grid, which several runs train.

use super::{Configuration, SettingGroup, TrainingSettings, flags};
use crate::machine::text_in_files;
use crate::terminal::Usage;
use clap::Args;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The tasks of a grid that a run trains; all of them by default.
#[derive(Clone, Debug, PartialEq, Args, Serialize, Deserialize)]
#[command(next_help_heading = "Part of a grid")]
#[serde(default = "flags::defaults", deny_unknown_fields)]
pub struct PartSettings {
    /// Train one part of the grid: 3/8 is the third of eight parts of about equal duration; `hydra report DIR..` ranks the parts
    /// together
    #[arg(long, value_name = "K/N", allow_hyphen_values = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub part: Option<Part>,
    /// Train only these tasks of the grid: their names, separated by commas
    #[arg(long, value_name = "TASK,..", value_delimiter = ',', conflicts_with = "part")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub only: Vec<String>,
}

impl PartSettings {
    /// Returns true if the run trains the whole grid.
    pub fn is_none(&self) -> bool {
        self.part.is_none() && self.only.is_empty()
    }

    /// The configurations of `grid` that belong to this part, in their order.
    pub(crate) fn of(
        &self,
        grid: Vec<Configuration>,
        training: &TrainingSettings,
    ) -> Result<Vec<Configuration>, Usage> {
        if let Some(unknown) = self.only.iter().find(|name| grid.iter().all(|one| one.name != **name)) {
            let names: Vec<&str> = grid.iter().map(|one| one.name.as_str()).collect();
            let names = names.join(", ");
            return Err(Usage::new(format!(
                "--only: the grid has no task `{unknown}`; its tasks are {names}"
            )));
        }
        if self.is_none() {
            return Ok(grid);
        }
        let count = grid.len();
        let parts = self.part.map(|part| (part, divided(&grid, training, part.parts)));
        let is_in = |(index, one): &(usize, Configuration)| match &parts {
            Some((part, of)) => of[*index] == part.number,
            None => self.only.contains(&one.name),
        };
        let part: Vec<Configuration> =
            grid.into_iter().enumerate().filter(is_in).map(|(_, one)| one).collect();
        match self.part.filter(|_| part.is_empty()) {
            Some(empty) => Err(Usage::new(format!(
                "--part {empty} is empty: the grid has {count} tasks; divide it into at most {count} parts"
            ))),
            None => Ok(part),
        }
    }
}

/// The number of the part of each configuration, from one. The configurations are taken longest first, and each goes to the
/// part with the least work so far.
///
/// Parts do not communicate, so work is counted from the spec alone: in examples, and in minibatches where these are equal. It
/// depends neither on the speed of a machine nor on the number of examples.
pub(crate) fn divided(grid: &[Configuration], training: &TrainingSettings, parts: usize) -> Vec<usize> {
    let work: Vec<(f64, f64)> = grid.iter().map(|one| work(one, training)).collect();
    let more = |a: (f64, f64), b: (f64, f64)| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1));
    let mut longest: Vec<usize> = (0..grid.len()).collect();
    longest.sort_by(|a, b| more(work[*b], work[*a]));
    let mut loads = vec![(0.0, 0.0); parts.min(grid.len())];
    let mut of = vec![0; grid.len()];
    for task in longest {
        let least = (0..loads.len()).min_by(|a, b| more(loads[*a], loads[*b])).unwrap_or(0);
        of[task] = least + 1;
        loads[least] = (loads[least].0 + work[task].0, loads[least].1 + work[task].1);
    }
    of
}

/// The examples of a configuration (in epochs, if the spec has no number of steps) and its minibatches.
fn work(one: &Configuration, training: &TrainingSettings) -> (f64, f64) {
    let batch = one.batch as f64;
    // Settings that cannot be read are refused where a task is made.
    let own = one.changed(training, SettingGroup::Training).unwrap_or_else(|_| training.clone());
    match (own.steps, own.epochs.unwrap_or(1) as f64) {
        (Some(steps), _) => (steps as f64 * batch, steps as f64),
        (None, epochs) => (epochs, epochs / batch),
    }
}

/// `--part`: the part of this number, counted from one, of `parts` parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Part {
    pub(crate) number: usize,
    pub(crate) parts: usize,
}

text_in_files!(Part);

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.number, self.parts)
    }
}

impl FromStr for Part {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = "expected K/N, part K of N, such as 3/8";
        let count = |text: &str| text.parse::<u32>().ok().map(|count| count as usize);
        let read =
            text.trim().split_once('/').and_then(|(number, parts)| Some((count(number)?, count(parts)?)));
        match read {
            Some((number, parts)) if (1..=parts).contains(&number) => Ok(Self { number, parts }),
            Some((_, 0)) => Err(format!("`{text}` has no parts: {expected}")),
            Some((_, parts)) => Err(format!(
                "`{text}` is out of range, the parts are 1/{parts} to {parts}/{parts}: {expected}"
            )),
            None => Err(format!("`{text}` is not a part: {expected}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::Grid;

    fn all(training: &TrainingSettings) -> Vec<Configuration> {
        Grid::default().of(training, &flags::defaults()).unwrap()
    }

    fn training(batch: &[usize], rates: usize) -> TrainingSettings {
        let lr = (1..=rates).map(|rate| rate as f64 * 1e-4).collect();
        TrainingSettings { batch: batch.to_vec(), lr, ..flags::defaults() }.resolve()
    }

    #[test]
    fn every_task_is_in_one_part_and_parts_are_even() {
        for (training, evenly) in [
            (training(&[16, 8], 6), true),
            (TrainingSettings { steps: Some(40), epochs: None, ..training(&[32, 8, 4], 7) }, true),
            (training(&[8], 5), false),
        ] {
            let grid = all(&training);
            for parts in 1..=grid.len() {
                let of = divided(&grid, &training, parts);
                let loads: Vec<f64> = (1..=parts)
                    .map(|part| {
                        let part =
                            PartSettings { part: Some(Part { number: part, parts }), only: Vec::new() };
                        part.of(grid.clone(), &training)
                            .unwrap()
                            .iter()
                            .map(|one| work(one, &training).0)
                            .sum()
                    })
                    .collect();
                assert!(of.iter().all(|part| (1..=parts).contains(part)));
                let all: f64 = grid.iter().map(|one| work(one, &training).0).sum();
                assert_eq!(loads.iter().sum::<f64>(), all, "{parts}");
                let longest = grid.iter().map(|one| work(one, &training).0).fold(0.0, f64::max);
                let most = loads.iter().copied().fold(0.0, f64::max);
                assert!(most <= all / parts as f64 + longest, "{loads:?}");
                assert!(!evenly || parts > 3 || most < 1.2 * all / parts as f64, "{loads:?}");
            }
        }
    }

    #[test]
    fn tasks_that_see_as_many_examples_are_mixed() {
        // By epochs, a batch of 4 and one of 16 see as much: each part has both.
        let training = training(&[16, 4], 2);
        let grid = all(&training);
        assert_eq!(divided(&grid, &training, 2), [1, 2, 1, 2]);
    }

    #[test]
    fn parts_are_read_as_they_are_written() {
        assert_eq!("3/8".parse(), Ok(Part { number: 3, parts: 8 }));
        assert_eq!(Part { number: 3, parts: 8 }.to_string(), "3/8");
        for (text, why) in [
            ("0/8", "1/8 to 8/8"),
            ("9/8", "1/8 to 8/8"),
            ("1/0", "has no parts"),
            ("3/", "is not a part: expected K/N"),
            ("x", "is not a part: expected K/N"),
            ("-1/8", "is not a part: expected K/N"),
            ("1/2/3", "is not a part: expected K/N"),
        ] {
            let said = text.parse::<Part>().unwrap_err();
            assert!(said.starts_with(&format!("`{text}`")) && said.contains(why), "{said}");
        }
    }

    #[test]
    fn tasks_by_name_and_parts_without_tasks() {
        let training = training(&[8], 2);
        let grid = all(&training);
        let only = |name: &str| PartSettings { part: None, only: vec![name.to_owned()] };
        let found = only("b8-lr2e-4").of(grid.clone(), &training).unwrap();
        assert_eq!(found, grid[1..]);
        let said = only("b9").of(grid.clone(), &training).unwrap_err().to_string();
        assert!(said.ends_with("the grid has no task `b9`; its tasks are b8-lr1e-4, b8-lr2e-4"), "{said}");
        let part = PartSettings { part: Some(Part { number: 3, parts: 3 }), only: Vec::new() };
        let said = part.of(grid, &training).unwrap_err().to_string();
        assert!(said.contains("--part 3/3 is empty") && said.contains("at most 2 parts"), "{said}");
    }
}
