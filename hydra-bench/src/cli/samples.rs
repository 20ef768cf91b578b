//! Flags with a list or a range instead of one value, rewritten as lists of a grid or samples of a search.

use hydra_run::settings;
use std::ffi::OsString;

/// The prefixes of ranges.
const RANGES: [&str; 3] = ["int:", "log:", "uniform:"];
/// The prefix of a list in the notation of a search space.
const CHOICE: &str = "choice:";
/// Flags that start a search.
const SEARCHES: [&str; 3] = ["search", "space", "trials-file"];

/// A setting with a list or a range, and its position in the arguments.
struct ListedSetting {
    at: usize,
    /// The number of its arguments: one or two.
    arguments: usize,
    setting: &'static settings::Setting,
    name: String,
    value: String,
    /// True if it is the value of a `--sample`.
    sampled: bool,
}

impl ListedSetting {
    /// The setting at this position, if it has a list or a range, or is the value of a `--sample`.
    fn at(arguments: &[OsString], at: usize) -> Option<Self> {
        let flag = arguments[at].to_str()?.strip_prefix("--")?;
        let (flag, value, count) = match flag.split_once('=') {
            Some((flag, value)) => (flag, value.to_owned(), 1),
            None => (flag, arguments.get(at + 1)?.to_str()?.to_owned(), 2),
        };
        let sampled = flag == "sample";
        let (name, value) = match sampled {
            true => value.split_once('=').map(|(name, value)| (name.trim().to_owned(), value.to_owned()))?,
            false => (flag.to_owned(), value),
        };
        let (arguments, name) = (count, name.replace('-', "_"));
        let setting = settings::Setting::named(&name)?;
        let this = Self { at, arguments, setting, name, value, sampled };
        (sampled || this.is_range() || this.is_list()).then_some(this)
    }

    fn is_range(&self) -> bool {
        RANGES.iter().any(|range| self.value.starts_with(range))
    }

    fn is_list(&self) -> bool {
        self.value.contains(self.setting.separator()) || self.value.starts_with(CHOICE)
    }

    /// The argument that adds it to a search space.
    fn of_search(&self) -> String {
        format!("--sample={}={}", self.name, self.value)
    }

    /// The argument that adds it to a grid.
    fn of_grid(&self) -> String {
        let list = self.value.strip_prefix(CHOICE).unwrap_or(&self.value);
        match self.setting.list_flag() {
            "grid" => format!("--grid={}={list}", self.name),
            own => format!("--{own}={list}"),
        }
    }
}

/// Returns true if an argument is one of these flags.
fn is_flag(argument: &OsString, flags: &[&str]) -> bool {
    let flag = argument.to_str().and_then(|text| text.strip_prefix("--"));
    flag.is_some_and(|flag| flags.contains(&flag.split('=').next().unwrap_or(flag)))
}

/// The arguments with `--weight-decay 0,0.1` rewritten as a list of a grid, `--grid=weight_decay=0,0.1`. If any flag has a range,
/// such as `--lr log:1e-5..1e-2`, or starts a search, lists and ranges become its samples: `--sample=weight_decay=0,0.1`.
pub(super) fn with_lists(arguments: Vec<OsString>) -> Vec<OsString> {
    // Without a subcommand the command is `select`.
    let of_grid = arguments.get(1).is_none_or(|first| {
        let first = first.to_str().unwrap_or_default();
        first == "select" || first == "explain" || first.starts_with('-')
    });
    if !of_grid {
        return arguments;
    }
    let settings: Vec<ListedSetting> =
        (1..arguments.len()).filter_map(|at| ListedSetting::at(&arguments, at)).collect();
    let one_value = |setting: &ListedSetting| setting.sampled && !setting.is_list() && !setting.is_range();
    let searches = settings.iter().any(ListedSetting::is_range)
        || arguments.iter().any(|argument| is_flag(argument, &SEARCHES));
    let mut made = Vec::with_capacity(arguments.len());
    let mut at = 0;
    while at < arguments.len() {
        match settings.iter().find(|setting| setting.at == at && !one_value(setting)) {
            Some(setting) => {
                made.push(OsString::from(if searches { setting.of_search() } else { setting.of_grid() }));
                at += setting.arguments;
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
            with_lists(arguments).into_iter().map(|text| text.into_string().unwrap()).collect();
        made.join(" ")
    }

    #[test]
    fn lists_are_a_grid() {
        for (given, made) in [
            ("hydra select --weight-decay 0,0.1", "hydra select --grid=weight_decay=0,0.1"),
            (
                "hydra --optimizer adamw,sgd --lr 1e-3,3e-4 --epochs 2",
                "hydra --grid=optimizer=adamw,sgd --lr=1e-3,3e-4 --epochs 2",
            ),
            (
                "hydra select --lora 2 --lora-targets q,v;all-linear",
                "hydra select --lora 2 --grid=lora_targets=q,v;all-linear",
            ),
            ("hydra select --batch=choice:8,16 --seed 0,1", "hydra select --batch=8,16 --grid=seed=0,1"),
            (
                "hydra explain --lr 1e-3,3e-4 --warmup 0,9 --dropout=0,0.1",
                "hydra explain --lr=1e-3,3e-4 --grid=warmup=0,9 --grid=dropout=0,0.1",
            ),
            (
                "hydra select --lr 1e-3,3e-4 --sample seed=1,2 --sample=batch=4,8",
                "hydra select --lr=1e-3,3e-4 --grid=seed=1,2 --batch=4,8",
            ),
        ] {
            assert_eq!(of(given), made);
        }
    }

    #[test]
    fn beside_a_range_or_a_search_they_are_samples() {
        for (given, made) in [
            ("hydra --lr log:1e-5..1e-2 --trials 9", "hydra --sample=lr=log:1e-5..1e-2 --trials 9"),
            (
                "hydra select --lr 1e-3,3e-4 --search halving",
                "hydra select --sample=lr=1e-3,3e-4 --search halving",
            ),
            (
                "hydra select --weight-decay 0,0.1 --sample=lr=log:1e-5..1e-2 --trials=9",
                "hydra select --sample=weight_decay=0,0.1 --sample=lr=log:1e-5..1e-2 --trials=9",
            ),
            (
                "hydra select --space space.toml --seed 0,1",
                "hydra select --space space.toml --sample=seed=0,1",
            ),
        ] {
            assert_eq!(of(given), made);
        }
    }

    #[test]
    fn what_has_one_value_stays_as_it_is() {
        for line in [
            "hydra",
            "hydra select --batch 8 --lora 4 --weight-decay 0.1 --seed 3 --sample lr=1e-3",
            "hydra select --model a,b --data x,y --only p,q --eval-at 2,8 --lora-targets q,v --cuts 1,2",
            "hydra train --weight-decay 0,0.1",
            "hydra ctl runs/a fork b8-lr1e-3 --lr 1e-3,1e-4",
            "hydra select --weight-decay",
        ] {
            assert_eq!(of(line), line);
        }
    }
}
