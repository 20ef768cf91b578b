//! The flags of a command, as data.

use crate::cli::{Cli, Given, of_keyword};
use crate::settings::is_varied;
use clap::{ArgAction, CommandFactory};

/// A flag of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keyword {
    /// Its name, with `_` in place of `-`.
    pub name: String,
    /// The form of its value: `RATE,..` of several that commas separate, `NAME=RANGE ..` of a flag that is repeated; none if it
    /// takes no value.
    pub value: Option<String>,
    /// What it is for, in a line.
    pub help: String,
}

/// The flags of a command in the order of its help; none of a command that does not exist.
pub fn keywords(command: &str) -> Vec<Keyword> {
    let cli = Cli::command();
    let found = cli.find_subcommand(command).into_iter();
    // Of a program that is not a terminal's: help, the version and the form of results are none of a user's choice.
    let hidden = ["help", "version", "json"];
    let flags = found.flat_map(clap::Command::get_arguments);
    let lists = ["select", "explain"].contains(&command);
    let flags = flags.filter(|flag| !flag.is_hide_set());
    let flags = flags.filter_map(|flag| Some((flag, flag.get_long().filter(|long| !hidden.contains(long))?)));
    let keyword = |(flag, long): (&clap::Arg, &str)| Keyword {
        name: long.replace('-', "_"),
        value: flag
            .get_action()
            .takes_values()
            .then(|| value_of(flag, lists && is_varied(&long.replace('-', "_")))),
        help: flag.get_help().map(ToString::to_string).unwrap_or_default(),
    };
    flags.map(keyword).collect()
}

fn value_of(flag: &clap::Arg, is_varied: bool) -> String {
    let names: Vec<&str> = flag.get_value_names().into_iter().flatten().map(|name| name.as_str()).collect();
    let repeated = matches!(flag.get_action(), ArgAction::Append) && flag.get_value_delimiter().is_none();
    names.join(" ")
        + if repeated {
            " .."
        } else if is_varied {
            ",.."
        } else {
            ""
        }
}

/// What to write in place of a keyword that a command does not have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hint {
    /// The keyword of the command that means it, if there is one.
    pub keyword: Option<String>,
    /// What to write, or why there is nothing to write.
    pub says: String,
}

/// What a keyword of another program, such as `learning_rate`, is in a command, by the names and the texts of all that were
/// given; none of a keyword that no other program is known to have.
pub fn hint(command: &str, keyword: &str, given: &[(String, Option<String>)]) -> Option<Hint> {
    let given: Vec<Given> = given.iter().map(|(name, value)| Given::new(name, value.as_deref())).collect();
    of_keyword(command, keyword, &given).map(|(keyword, says)| Hint { keyword, says })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_named_as_keywords_and_say_what_they_take() {
        let select = keywords("select");
        let of = |name: &str| select.iter().find(|keyword| keyword.name == name).unwrap();
        assert_eq!(of("lr").value.as_deref(), Some("RATE,.."));
        assert_eq!(of("sample").value.as_deref(), Some("NAME=RANGE .."));
        assert_eq!(of("device_memory").value.as_deref(), Some("SIZE"));
        assert_eq!(of("weight_decay").value.as_deref(), Some("X,.."), "a grid takes lists of it");
        assert!(
            keywords("train")
                .iter()
                .any(|flag| flag.name == "weight_decay" && flag.value.as_deref() == Some("X"))
        );
        assert!(select.iter().all(|keyword| keyword.name != "grid"));
        assert_eq!((of("force").value.as_ref(), of("no_shuffle").value.as_ref()), (None, None));
        assert!(select.iter().all(|keyword| !keyword.help.is_empty() && keyword.name != "json"));
        assert!(keywords("selectt").is_empty());
    }
}
