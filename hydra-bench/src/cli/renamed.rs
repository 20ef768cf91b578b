//! Flags that were renamed. An old spelling works for one more version, with a note; help, completions and manual pages do
//! not show it.
//!
//! Files have the old names as aliases of their keys: see `settings/devices.rs`. None of these settings can have a list in a
//! grid or a range in a search, so `--sample`, `[grid]` and `[space]` have no old names.

use super::Cli;
use clap::{Command, CommandFactory};
use std::ffi::OsString;

/// The flags with their old and their current names.
const RENAMED: [(&str, &str); 4] = [
    ("visit", "microbatch-group"),
    ("devices-per-model", "replicas"),
    ("room-for-forks", "reserve-for-forks"),
    ("pictures", "plots"),
];

/// The version that no longer has the old names.
const REMOVED_IN: &str = "0.3";

/// The current name of an old flag.
fn current(old: &str) -> Option<&'static str> {
    RENAMED.iter().find(|(name, _)| *name == old).map(|(_, current)| *current)
}

/// The arguments with the current spellings of the command's renamed flags, and one note for each flag. `--visit 2` becomes
/// `--microbatch-group 2`, and `--visit=2` `--microbatch-group=2`.
pub(super) fn with_current_flags(mut arguments: Vec<OsString>) -> (Vec<OsString>, Vec<String>) {
    let mut notes = Vec::new();
    let flags = 1..arguments.iter().position(|word| word == "--").unwrap_or(arguments.len()).max(1);
    for at in flags {
        let Some((old, current, value)) = renamed(&arguments[at]) else { continue };
        if !has_flag(command_of(&arguments), current) {
            continue;
        }
        let note = format!("note: --{old} is now --{current}; the old spelling goes away in {REMOVED_IN}");
        if !notes.contains(&note) {
            notes.push(note);
        }
        arguments[at] = format!("--{current}{value}").into();
    }
    (arguments, notes)
}

/// The old name of a flag, its current name, and `=VALUE` or nothing.
fn renamed(argument: &OsString) -> Option<(String, &'static str, String)> {
    let flag = argument.to_str()?.strip_prefix("--")?;
    let (old, value) = flag.split_at(flag.find('=').unwrap_or(flag.len()));
    Some((old.to_owned(), current(old)?, value.to_owned()))
}

/// The name of the command in the arguments; none without a subcommand.
fn command_of(arguments: &[OsString]) -> Option<&str> {
    arguments.get(1)?.to_str().filter(|word| !word.starts_with('-'))
}

fn has_flag(command: Option<&str>, flag: &str) -> bool {
    let hydra = Cli::command();
    let command = command.map_or(Some(&hydra), |name| hydra.find_subcommand(name));
    command.is_some_and(|command: &Command| command.get_arguments().any(|of| of.get_long() == Some(flag)))
}

/// The current name of a keyword that a command had under an old name, and a note about it.
pub(crate) fn current_keyword(command: &str, keyword: &str) -> Option<(String, String)> {
    let current = current(&keyword.replace('_', "-")).filter(|flag| has_flag(Some(command), flag))?;
    let current = current.replace('-', "_");
    let note = format!("`{keyword}` is now `{current}`; the old name goes away in {REMOVED_IN}");
    Some((current, note))
}

#[cfg(test)]
mod tests {
    use super::*;
    use hydra_run::settings::Setting;

    fn read(line: &str) -> (String, Vec<String>) {
        let (made, notes) = with_current_flags(line.split_whitespace().map(OsString::from).collect());
        (made.into_iter().map(|word| word.into_string().unwrap()).collect::<Vec<_>>().join(" "), notes)
    }

    #[test]
    fn old_spellings_are_replaced_in_every_command_that_has_the_flag() {
        let hydra = Cli::command();
        for (old, current) in RENAMED {
            let names = hydra.get_subcommands().filter(|of| has_flag(Some(of.get_name()), current));
            let names: Vec<&str> = names.map(Command::get_name).collect();
            assert!(names.contains(&if old == "pictures" { "report" } else { "select" }), "{current}");
            for name in names {
                assert!(!has_flag(Some(name), old), "{name} --{old}");
                let (made, notes) = read(&format!("hydra {name} --{old}=2 --{old} 3"));
                assert_eq!(made, format!("hydra {name} --{current}=2 --{current} 3"));
                assert_eq!(
                    notes,
                    [format!("note: --{old} is now --{current}; the old spelling goes away in 0.3")]
                );
            }
        }
        assert_eq!(read("hydra --visit 2").0, "hydra --microbatch-group 2");
        assert_eq!(read("hydra --visit 2 --devices-per-model=1").1.len(), 2);
    }

    #[test]
    fn other_arguments_stay_as_they_are() {
        for line in [
            "hydra",
            "hydra report DIR --visit 2",
            "hydra select --visits 2 --out plots",
            "hydra nonsense --visit",
        ] {
            assert_eq!(read(line), (line.to_owned(), Vec::new()));
        }
        assert_eq!(read("hydra select -- --visit").0, "hydra select -- --visit");
    }

    #[test]
    fn keywords_have_old_names_too() {
        let (current, note) = current_keyword("select", "devices_per_model").unwrap();
        assert_eq!(current, "replicas");
        assert_eq!(note, "`devices_per_model` is now `replicas`; the old name goes away in 0.3");
        assert_eq!(current_keyword("report", "visit"), None);
        assert_eq!(current_keyword("select", "lr"), None);
    }

    #[test]
    fn none_of_the_renamed_settings_can_vary() {
        for name in RENAMED.into_iter().flat_map(|(old, current)| [old, current]) {
            let name = name.replace('-', "_");
            assert!(Setting::named(&name).is_none(), "{name}");
        }
    }
}
