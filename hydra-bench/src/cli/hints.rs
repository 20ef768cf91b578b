//! Suggestions for command lines that are refused.

use super::Cli;
use super::foreign::{NamedValue, Suggestion, suggestion};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, Command, CommandFactory};
use hydra_run::settings::Setting;
use std::error::Error;
use std::ffi::OsString;

/// The commands whose arguments are flags with values.
const COMMANDS: [&str; 7] = ["select", "train", "eval", "explain", "partition", "step", "resume"];
/// The commands that train a grid.
const GRIDS: [&str; 2] = ["select", "explain"];

/// A flag of a command line, with all words up to the next flag.
#[derive(Clone, Debug)]
struct GivenFlag {
    /// The flag as it was typed, without a value.
    typed: String,
    values: Vec<String>,
}

impl GivenFlag {
    fn name(&self) -> String {
        self.typed.trim_start_matches('-').replace('-', "_").to_ascii_lowercase()
    }

    /// Returns true if the command has this flag in this spelling.
    fn is_of(&self, command: &Command) -> bool {
        flag_of(command, &self.name())
            .is_some_and(|flag| flag.get_long().is_some_and(|long| self.typed == format!("--{long}")))
    }

    /// The setting; several values are joined by commas.
    fn given(&self) -> NamedValue {
        let value = (!self.values.is_empty()).then(|| self.values.join(","));
        NamedValue { name: self.name(), value }
    }

    fn text(&self) -> String {
        std::iter::once(&self.typed)
            .chain(&self.values)
            .map(|word| quoted(word))
            .collect::<Vec<_>>()
            .join(" ")
    }
}

/// A command line, split without knowledge of the command's flags.
#[derive(Clone, Debug)]
struct SplitLine {
    command: &'static str,
    /// The program's name, the command and all other words before the first flag.
    before: Vec<String>,
    items: Vec<GivenFlag>,
}

impl SplitLine {
    fn read(arguments: &[OsString]) -> Option<Self> {
        let mut words = arguments.iter().map(|word| word.to_string_lossy().into_owned()).peekable();
        words.next()?;
        let mut before = vec!["hydra".to_owned()];
        let command = match words.peek() {
            Some(word) if word.starts_with('-') => "select",
            Some(word) => COMMANDS.into_iter().find(|name| name == word)?,
            None => return None,
        };
        let mut items: Vec<GivenFlag> = Vec::new();
        for word in words {
            let is_flag =
                word.starts_with("--") || word.starts_with('-') && word[1..].starts_with(char::is_alphabetic);
            match (is_flag, items.last_mut()) {
                (true, _) => {
                    let (typed, value) =
                        word.split_once('=').map_or((&*word, None), |(flag, value)| (flag, Some(value)));
                    let values = value.map(str::to_owned).into_iter().collect();
                    items.push(GivenFlag { typed: typed.to_owned(), values });
                }
                (false, Some(item)) => item.values.push(word),
                (false, None) => before.push(word),
            }
        }
        Some(Self { command, before, items })
    }

    /// The command line with replacements for the flags that the command does not have.
    fn written(&self, command: &Command) -> String {
        let all = self.given();
        let mut words = self.before.clone();
        let mut written: Vec<String> = Vec::new();
        let own = |item: &GivenFlag| item.is_of(command);
        let kept: Vec<String> = self.items.iter().filter(|item| own(item)).map(GivenFlag::name).collect();
        for item in &self.items {
            match meant(item, &all, command) {
                Some(suggested) if !own(item) => {
                    for given in suggested.settings.iter().filter(|given| !kept.contains(&given.name)) {
                        if !written.contains(&given.name) {
                            written.push(given.name.clone());
                            words.push(as_flag(given));
                        }
                    }
                }
                _ => words.push(item.text()),
            }
        }
        words.join(" ")
    }

    fn given(&self) -> Vec<NamedValue> {
        self.items.iter().map(GivenFlag::given).collect()
    }
}

/// The flag with this name, in the spelling of keywords.
fn flag_of<'a>(command: &'a Command, name: &str) -> Option<&'a Arg> {
    let long = name.replace('_', "-");
    command.get_arguments().find(|flag| flag.get_long() == Some(&*long) && !flag.is_hide_set())
}

/// The replacement of a flag that the command does not have.
fn meant(item: &GivenFlag, all: &[NamedValue], command: &Command) -> Option<Suggestion> {
    let given = item.given();
    if flag_of(command, &given.name).is_some() {
        return Some(Suggestion { settings: vec![given], why: String::new() });
    }
    known_to(command, suggestion(&given, all, command.get_name())?)
}

/// The settings of a replacement that the command has, or a sentence that it has none of them.
fn known_to(command: &Command, suggested: Suggestion) -> Option<Suggestion> {
    let Suggestion { settings, why } = suggested;
    let named: Vec<String> = settings.iter().map(|given| given.name.replace('_', "-")).collect();
    let is_known = |given: &NamedValue| flag_of(command, &given.name).is_some();
    let had: Vec<NamedValue> = settings.into_iter().filter(is_known).collect();
    if had.is_empty() && !named.is_empty() {
        let why =
            format!("it is --{} of hydra train, and hydra {} has no such flag", named[0], command.get_name());
        return Some(Suggestion { settings: had, why });
    }
    Some(Suggestion { settings: had, why })
}

/// A word quoted for a shell.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "-_./,:=+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}

fn as_flag(given: &NamedValue) -> String {
    let flag = format!("--{}", given.name.replace('_', "-"));
    match &given.value {
        Some(value) => format!("{flag} {}", quoted(value)),
        None => flag,
    }
}

/// A sentence that names the replacement.
fn sentence(suggested: &Suggestion, write: impl Fn(&NamedValue) -> String, between: &str) -> String {
    let settings: Vec<String> = suggested.settings.iter().map(write).collect();
    match (settings.is_empty(), suggested.why.is_empty()) {
        (true, _) => suggested.why.clone(),
        (false, true) => format!("write {}", settings.join(between)),
        (false, false) => format!("write {} ({})", settings.join(between), suggested.why),
    }
}

/// The error with a message that suggests a correction, if one is known.
pub(super) fn explained(error: clap::Error, arguments: &[OsString]) -> clap::Error {
    let Some(line) = SplitLine::read(arguments) else { return error };
    let mut hydra = Cli::command();
    hydra.build();
    let Some(command) = hydra.find_subcommand_mut(line.command) else { return error };
    let said = match error.kind() {
        ErrorKind::UnknownArgument | ErrorKind::InvalidSubcommand => {
            foreign_flags(&line, command).or_else(|| several_values(&line, command))
        }
        // The parser takes a second value without a subcommand for a command.
        ErrorKind::ArgumentConflict => several_values(&line, command),
        ErrorKind::ValueValidation | ErrorKind::InvalidValue => {
            value_of_list(&error).or_else(|| other_value(&error, &line, command))
        }
        _ => None,
    };
    let Some((flag, message)) = said else { return error };
    let mut explained = command.error(error.kind(), message);
    explained.insert(ContextKind::InvalidArg, ContextValue::String(flag));
    explained
}

/// Replacements of flags of other programs, and of flags with `_` instead of `-`.
fn foreign_flags(line: &SplitLine, command: &Command) -> Option<(String, String)> {
    let all = line.given();
    let foreign = line.items.iter().filter(|item| !item.is_of(command));
    let foreign = foreign.filter_map(|item| Some((item, meant(item, &all, command)?)));
    let foreign: Vec<(&GivenFlag, Suggestion)> = foreign.collect();
    let (first, _) = foreign.first()?;
    let said = |(item, suggested): &(&GivenFlag, Suggestion)| {
        format!("unknown flag {}: {}", item.typed, sentence(suggested, as_flag, " "))
    };
    let mut lines: Vec<String> = foreign.iter().map(said).collect();
    if foreign.len() > 1 {
        lines.push(format!("corrected: {}", line.written(command)));
    }
    Some((first.typed.clone(), lines.join("\n  ")))
}

/// A correction of values that are separated by spaces instead of commas.
fn several_values(line: &SplitLine, command: &Command) -> Option<(String, String)> {
    let item = line.items.iter().find(|item| item.values.len() > 1 && item.is_of(command))?;
    let name = item.name();
    let flag = flag_of(command, &name).filter(|flag| flag.get_action().takes_values())?;
    let list = format!("{} {}", item.typed, quoted(&item.values.join(",")));
    let in_grid = Setting::named(&name).is_some();
    let takes_list = flag.get_value_delimiter().is_some() || in_grid && GRIDS.contains(&line.command);
    let message = match (takes_list, in_grid) {
        (true, _) => format!("the values of {} are separated by commas: write {list}", item.typed),
        (false, true) => format!(
            "{} takes one value in hydra {}: write hydra select {list} to compare several",
            item.typed, line.command
        ),
        (false, false) => return None,
    };
    Some((item.typed.clone(), message))
}

/// The error about a value in a list, with the flag that the list was given to.
fn value_of_list(error: &clap::Error) -> Option<(String, String)> {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    let is_list = text(ContextKind::InvalidArg)?.starts_with("--grid");
    let (name, list) = text(ContextKind::InvalidValue)?.split_once('=')?;
    let flag = format!("--{}", name.replace('_', "-"));
    let why = error.source().map(ToString::to_string).unwrap_or_default();
    let why = why.strip_prefix(&format!("{name}: ")).unwrap_or(&why);
    is_list.then(|| (flag.clone(), format!("invalid value '{list}' for {flag}: {why}")))
}

/// A correction of a value in the notation of another program, or of a list for a command that trains one configuration.
fn other_value(error: &clap::Error, line: &SplitLine, command: &Command) -> Option<(String, String)> {
    let Some(ContextValue::String(flag)) = error.get(ContextKind::InvalidArg) else { return None };
    let typed = flag.split([' ', '=']).next()?.to_owned();
    let item = line.items.iter().find(|item| item.typed == typed)?;
    let (name, value) = (item.name(), item.values.first()?);
    if value.contains(',') && !GRIDS.contains(&line.command) && Setting::named(&name).is_some() {
        let said = error.render().to_string();
        let said = said.split("\n\n").next().unwrap_or_default().trim_start_matches("error: ");
        let message = format!(
            "{said}\n  hydra {} trains one configuration; use hydra select to compare several",
            line.command
        );
        return Some((typed, message));
    }
    let foreign = match name.as_str() {
        "dtype" => "torch_dtype",
        "schedule" => "lr_scheduler_type",
        "optimizer" => "optim",
        _ => return None,
    };
    let suggested =
        known_to(command, suggestion(&NamedValue::new(foreign, Some(value)), &[], line.command)?)?;
    let is_other = suggested.settings.iter().all(|given| given.value.as_ref() != Some(value));
    let message = format!("invalid value '{value}' for {typed}: {}", sentence(&suggested, as_flag, " "));
    (is_other && !suggested.settings.is_empty()).then_some((typed, message))
}

/// The replacement of a keyword that `command` does not have: a keyword of the command, if there is one, and a sentence.
pub(crate) fn keyword_suggestion(
    command: &str,
    keyword: &str,
    all: &[NamedValue],
) -> Option<(Option<String>, String)> {
    let mut hydra = Cli::command();
    hydra.build();
    let command = hydra.find_subcommand(command)?;
    let given = all.iter().find(|given| given.name == keyword)?;
    let suggested = known_to(
        command,
        suggestion(
            &NamedValue { name: keyword.to_ascii_lowercase(), ..given.clone() },
            all,
            command.get_name(),
        )?,
    )?;
    let keyword = |given: &NamedValue| {
        let value = given.value.as_deref().unwrap_or("True");
        let plain = value.parse::<f64>().is_ok() || value == "True";
        if plain { format!("{}={value}", given.name) } else { format!("{}={value:?}", given.name) }
    };
    Some((suggested.settings.first().map(|given| given.name.clone()), sentence(&suggested, keyword, ", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn says(line: &str) -> String {
        let error = Cli::read(line.split_whitespace().map(OsString::from)).unwrap_err();
        assert_eq!(error.exit_code(), 2, "{line}");
        error.render().to_string()
    }

    #[test]
    fn flags_of_other_programs_name_ours_with_the_values_of_the_line() {
        let said = says("hydra train --learning-rate 2e-5");
        assert!(said.starts_with("error: unknown flag --learning-rate: write --lr 2e-5\n"), "{said}");
        let said = says(
            "hydra train --model gpt2 --per-device-train-batch-size 4 --gradient-accumulation-steps=4 --bf16 True",
        );
        assert!(
            said.contains(
                "unknown flag --per-device-train-batch-size: write --batch 16 --accumulate 4 (--batch is"
            ),
            "{said}"
        );
        assert!(
            said.contains("\n  corrected: hydra train --model gpt2 --batch 16 --accumulate 4 --dtype bf16\n"),
            "{said}"
        );
        let said = says("hydra select --lr 1e-3,1e-4 --gradient_accumulation_steps 2 --batch 8");
        assert!(said.contains("write --accumulate 2 (--batch 8 is the whole minibatch"), "{said}");
        let said = says("hydra --weight_decay 0.1");
        assert!(said.contains("unknown flag --weight_decay: write --weight-decay 0.1\n"), "{said}");
        let said = says("hydra train --target-modules q_proj v_proj --lora 4");
        assert!(said.contains("write --lora-targets q_proj,v_proj\n"), "{said}");
        let said = says("hydra train --resume-from-checkpoint runs/train-1/checkpoints");
        assert!(said.contains("with hydra resume runs/train-1\n"), "{said}");
        let said = says("hydra eval --num-train-epochs 3");
        assert!(said.contains("it is --epochs of hydra train, and hydra eval has no such flag"), "{said}");
        let said = says("hydra resume runs/a --output-dir b");
        assert!(said.contains("it is --out of hydra train"), "{said}");
        assert!(says("hydra train --no-such-flag 1").contains("unexpected argument '--no-such-flag'"));
    }

    #[test]
    fn lists_are_separated_by_commas() {
        for (line, expected) in [
            ("hydra --lr 1e-3 1e-4", "the values of --lr are separated by commas: write --lr 1e-3,1e-4\n"),
            ("hydra select --batch 8 --lr 1e-3 1e-4 --steps 2", "write --lr 1e-3,1e-4\n"),
            ("hydra select --weight-decay 0 0.1", "write --weight-decay 0,0.1\n"),
            ("hydra train --lr 1e-3 1e-4", "write hydra select --lr 1e-3,1e-4 to compare several\n"),
            ("hydra train --weight-decay 0,0.1", "hydra train trains one configuration; use hydra select"),
            ("hydra train --lr 1e-3,1e-4", "`1e-3,1e-4` is not a number"),
            (
                "hydra --weight-decay 0,x",
                "error: invalid value '0,x' for --weight-decay: `x` is not a number",
            ),
        ] {
            let said = says(line);
            assert!(said.contains(expected), "{line}: {said}");
        }
    }

    #[test]
    fn values_of_other_programs_name_ours() {
        for (line, expected) in [
            ("hydra train --dtype bfloat16", "write --dtype bf16"),
            ("hydra train --optimizer adamw_torch", "write --optimizer adamw\n"),
            ("hydra train --schedule constant_with_warmup", "write --schedule constant (with --warmup)"),
        ] {
            let said = says(line);
            assert!(said.contains(expected), "{line}: {said}");
        }
        assert!(says("hydra train --optimizer adam").contains("possible values: adamw"));
    }

    #[test]
    fn keywords_are_written_as_keywords() {
        let all = [("learning_rate", "2e-5"), ("per_device_train_batch_size", "4"), ("optim", "adamw_torch")];
        let all = all.map(|(name, value)| NamedValue::new(name, Some(value)));
        let of = |keyword: &str| keyword_suggestion("train", keyword, &all).unwrap();
        assert_eq!(of("learning_rate"), (Some("lr".to_owned()), "write lr=2e-5".to_owned()));
        assert!(of("per_device_train_batch_size").1.starts_with("write batch=4 ("));
        assert_eq!(of("optim").1, "write optimizer=\"adamw\"");
    }
}
