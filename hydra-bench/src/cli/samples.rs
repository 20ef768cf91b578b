//! Flags of a grid that have a list or a range where a task has one value: these are samples of a search.

use crate::settings::SAMPLED;
use std::ffi::OsString;

/// The settings whose lists are a grid already.
const LISTS: [&str; 3] = ["batch", "lora", "lr"];
/// The beginnings of ranges, and of a list by its name.
const RANGES: [&str; 4] = ["choice:", "int:", "log:", "uniform:"];

/// A flag that trials can differ in, and where it stands.
struct Flag {
    at: usize,
    /// Arguments that it takes: one or two.
    arguments: usize,
    name: String,
    value: String,
}

impl Flag {
    /// The flag at a place, if it is one of those and has a value.
    fn at(arguments: &[OsString], at: usize) -> Option<Self> {
        let flag = arguments[at].to_str()?.strip_prefix("--")?;
        let (flag, value, arguments) = match flag.split_once('=') {
            Some((flag, value)) => (flag, value.to_owned(), 1),
            None => (flag, arguments.get(at + 1)?.to_str()?.to_owned(), 2),
        };
        let name = flag.replace('-', "_");
        SAMPLED.contains(&name.as_str()).then_some(Self { at, arguments, name, value })
    }

    fn is_range(&self) -> bool {
        RANGES.iter().any(|range| self.value.starts_with(range))
    }

    fn is_list(&self) -> bool {
        self.value.contains(',')
    }
}

/// The arguments with `--weight-decay 0,0.1` as `--sample weight_decay=0,0.1`, and with `--lr log:1e-5..1e-2` likewise. Lists of
/// `--batch`, `--lora` and `--lr` are a grid, but where anything is sampled they are samples too.
pub(super) fn with_samples(arguments: Vec<OsString>) -> Vec<OsString> {
    let is = |argument: &OsString, text: &str| argument.to_str().is_some_and(|argument| argument == text);
    // Without a subcommand it is `select`.
    let of_grid = arguments.get(1).is_none_or(|first| {
        is(first, "select")
            || is(first, "explain")
            || first.to_str().is_some_and(|first| first.starts_with('-'))
    });
    if !of_grid {
        return arguments;
    }
    let flags: Vec<Flag> = (1..arguments.len()).filter_map(|at| Flag::at(&arguments, at)).collect();
    let is_grid = |flag: &Flag| LISTS.contains(&flag.name.as_str()) && !flag.is_range();
    let samples = |argument: &OsString| {
        let text = argument.to_str().unwrap_or_default();
        ["--sample", "--search"].iter().any(|flag| text == *flag || text.starts_with(&format!("{flag}=")))
    };
    let sampled = flags.iter().any(|flag| (flag.is_list() || flag.is_range()) && !is_grid(flag))
        || arguments.iter().any(samples);
    if !sampled {
        return arguments;
    }
    let mut made = Vec::with_capacity(arguments.len());
    let mut at = 0;
    while at < arguments.len() {
        match flags.iter().find(|flag| flag.at == at && (flag.is_list() || flag.is_range())) {
            Some(flag) => {
                made.push(OsString::from(format!("--sample={}={}", flag.name, flag.value)));
                at += flag.arguments;
            }
            None => {
                made.push(arguments[at].clone());
                at += 1;
            }
        }
    }
    made
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(line: &str) -> String {
        let arguments = line.split_whitespace().map(OsString::from).collect();
        let made: Vec<String> =
            with_samples(arguments).into_iter().map(|text| text.into_string().unwrap()).collect();
        made.join(" ")
    }

    #[test]
    fn lists_and_ranges_are_samples() {
        for (given, made) in [
            ("hydra select --weight-decay 0,0.1", "hydra select --sample=weight_decay=0,0.1"),
            ("hydra --lr log:1e-5..1e-2 --trials 9", "hydra --sample=lr=log:1e-5..1e-2 --trials 9"),
            (
                "hydra select --batch=choice:8,16 --seed 0,1",
                "hydra select --sample=batch=choice:8,16 --sample=seed=0,1",
            ),
            (
                "hydra explain --lr 1e-3,3e-4 --warmup 0,9",
                "hydra explain --sample=lr=1e-3,3e-4 --sample=warmup=0,9",
            ),
            (
                "hydra select --lr 1e-3,3e-4 --search halving",
                "hydra select --sample=lr=1e-3,3e-4 --search halving",
            ),
            (
                "hydra select --lr 1e-3,3e-4 --sample seed=1,2",
                "hydra select --sample=lr=1e-3,3e-4 --sample seed=1,2",
            ),
        ] {
            assert_eq!(of(given), made);
        }
    }

    #[test]
    fn what_is_no_sample_stays_as_it_is() {
        for line in [
            "hydra",
            "hydra select --batch 8,16 --lr 1e-3,3e-4 --lora 4,8 --weight-decay 0.1 --seed 3",
            "hydra select --model a,b --data x,y --only p,q --eval-at 2,8",
            "hydra train --weight-decay 0,0.1",
            "hydra ctl runs/a fork b8-lr1e-3 --lr 1e-3,1e-4",
            "hydra select --weight-decay",
        ] {
            assert_eq!(of(line), line);
        }
    }
}
