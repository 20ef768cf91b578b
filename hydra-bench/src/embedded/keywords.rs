//! The flags of a command as data, for programs that pass them as keyword arguments.

use crate::cli::{Cli, NamedValue, current_keyword, keyword_suggestion};
use clap::{ArgAction, CommandFactory};
use hydra_run::settings::Setting;

/// A flag of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keyword {
    /// The name of the flag, with `_` for `-`.
    pub name: String,
    /// The form of the value: `RATE,..` for several values separated by commas, `NAME=RANGE ..` for a flag that is repeated;
    /// none for a flag without a value.
    pub value: Option<String>,
    /// The help text, in one line.
    pub help: String,
}

/// The flags of a command, in the order of its help; none for an unknown command.
pub fn keywords(command: &str) -> Vec<Keyword> {
    let cli = Cli::command();
    let found = cli.find_subcommand(command).into_iter();
    // An embedding program has no use for help and version, and sets the format of results itself.
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
            .then(|| value_of(flag, lists && Setting::named(&long.replace('-', "_")).is_some())),
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
        } else if is_varied && flag.get_value_delimiter().is_none() {
            ",.."
        } else {
            ""
        }
}

/// The replacement of a keyword that a command does not have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hint {
    /// The keyword of the command with the same meaning, if there is one.
    pub keyword: Option<String>,
    /// The replacement in words, or the reason why there is none.
    pub says: String,
}

/// The replacement in `command` of a keyword of another program, such as `learning_rate`. `given` has the names and values of
/// all keywords of the call. None for a keyword that no other program is known to have.
pub fn hint(command: &str, keyword: &str, given: &[(String, Option<String>)]) -> Option<Hint> {
    let given: Vec<NamedValue> =
        given.iter().map(|(name, value)| NamedValue::new(name, value.as_deref())).collect();
    keyword_suggestion(command, keyword, &given).map(|(keyword, says)| Hint { keyword, says })
}

/// The current name of a keyword that `command` had under an old name, and a note about it; none for any other keyword.
pub fn renamed(command: &str, keyword: &str) -> Option<(String, String)> {
    current_keyword(command, keyword)
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
