//! What a command line that is refused was probably meant to say.

use super::Cli;
use super::foreign::{Given, Ours, ours};
use crate::settings::{SAMPLED, is_varied};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, Command, CommandFactory};
use std::error::Error;
use std::ffi::OsString;

/// The commands whose arguments are flags with their values.
const COMMANDS: [&str; 7] = ["select", "train", "eval", "explain", "partition", "step", "resume"];
/// Those of them that train a grid.
const GRIDS: [&str; 2] = ["select", "explain"];

/// A flag as it stands in a command line, with all that stands behind it.
#[derive(Clone, Debug)]
struct Item {
    /// As it was typed, without a value.
    typed: String,
    values: Vec<String>,
}

impl Item {
    fn name(&self) -> String {
        self.typed.trim_start_matches('-').replace('-', "_").to_ascii_lowercase()
    }

    /// Returns true if a flag of the command is typed like this.
    fn is_of(&self, command: &Command) -> bool {
        flag_of(command, &self.name())
            .is_some_and(|flag| flag.get_long().is_some_and(|long| self.typed == format!("--{long}")))
    }

    /// The setting, with several values as one that commas separate.
    fn given(&self) -> Given {
        let value = (!self.values.is_empty()).then(|| self.values.join(","));
        Given { name: self.name(), value }
    }

    fn text(&self) -> String {
        std::iter::once(&self.typed)
            .chain(&self.values)
            .map(|word| quoted(word))
            .collect::<Vec<_>>()
            .join(" ")
    }
}

/// A command line, read without knowing its flags.
#[derive(Clone, Debug)]
struct Line {
    command: &'static str,
    /// The program and the command, as they were typed, and what stands before the first flag.
    before: Vec<String>,
    items: Vec<Item>,
}

impl Line {
    fn read(arguments: &[OsString]) -> Option<Self> {
        let mut words = arguments.iter().map(|word| word.to_string_lossy().into_owned()).peekable();
        words.next()?;
        let mut before = vec!["hydra".to_owned()];
        let command = match words.peek() {
            Some(word) if word.starts_with('-') => "select",
            Some(word) => COMMANDS.into_iter().find(|name| name == word)?,
            None => return None,
        };
        let mut items: Vec<Item> = Vec::new();
        for word in words {
            let is_flag =
                word.starts_with("--") || word.starts_with('-') && word[1..].starts_with(char::is_alphabetic);
            match (is_flag, items.last_mut()) {
                (true, _) => {
                    let (typed, value) =
                        word.split_once('=').map_or((&*word, None), |(flag, value)| (flag, Some(value)));
                    let values = value.map(str::to_owned).into_iter().collect();
                    items.push(Item { typed: typed.to_owned(), values });
                }
                (false, Some(item)) => item.values.push(word),
                (false, None) => before.push(word),
            }
        }
        Some(Self { command, before, items })
    }

    /// The whole of it with other settings in place of the flags that the command does not have.
    fn written(&self, command: &Command) -> String {
        let all = self.given();
        let mut words = self.before.clone();
        let mut written: Vec<String> = Vec::new();
        let own = |item: &Item| item.is_of(command);
        let kept: Vec<String> = self.items.iter().filter(|item| own(item)).map(Item::name).collect();
        for item in &self.items {
            match meant(item, &all, command) {
                Some(ours) if !own(item) => {
                    for given in ours.settings.iter().filter(|given| !kept.contains(&given.name)) {
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

    fn given(&self) -> Vec<Given> {
        self.items.iter().map(Item::given).collect()
    }
}

/// The flag of this name, as keywords are called.
fn flag_of<'a>(command: &'a Command, name: &str) -> Option<&'a Arg> {
    let long = name.replace('_', "-");
    command.get_arguments().find(|flag| flag.get_long() == Some(&*long) && !flag.is_hide_set())
}

/// What to write in place of a flag that the command does not have.
fn meant(item: &Item, all: &[Given], command: &Command) -> Option<Ours> {
    let given = item.given();
    if flag_of(command, &given.name).is_some() {
        return Some(Ours { settings: vec![given], why: String::new() });
    }
    known_to(command, ours(&given, all, command.get_name())?)
}

/// The settings that the command has; where it has none of them, that is said.
fn known_to(command: &Command, ours: Ours) -> Option<Ours> {
    let Ours { settings, why } = ours;
    let named: Vec<String> = settings.iter().map(|given| given.name.replace('_', "-")).collect();
    let is_known = |given: &Given| flag_of(command, &given.name).is_some();
    let had: Vec<Given> = settings.into_iter().filter(is_known).collect();
    if had.is_empty() && !named.is_empty() {
        let why = format!(
            "that is --{} of hydra train, and hydra {} has no such flag",
            named[0],
            command.get_name()
        );
        return Some(Ours { settings: had, why });
    }
    Some(Ours { settings: had, why })
}

/// A word as a shell reads it.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "-_./,:=+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}

fn as_flag(given: &Given) -> String {
    let flag = format!("--{}", given.name.replace('_', "-"));
    match &given.value {
        Some(value) => format!("{flag} {}", quoted(value)),
        None => flag,
    }
}

/// A sentence about what is to be written.
fn sentence(ours: &Ours, write: impl Fn(&Given) -> String, between: &str) -> String {
    let settings: Vec<String> = ours.settings.iter().map(write).collect();
    match (settings.is_empty(), ours.why.is_empty()) {
        (true, _) => ours.why.clone(),
        (false, true) => format!("write {}", settings.join(between)),
        (false, false) => format!("write {} ({})", settings.join(between), ours.why),
    }
}

/// The error with a message that says what to write, where that is known.
pub(super) fn explained(error: clap::Error, arguments: &[OsString]) -> clap::Error {
    let Some(line) = Line::read(arguments) else { return error };
    let mut hydra = Cli::command();
    hydra.build();
    let Some(command) = hydra.find_subcommand_mut(line.command) else { return error };
    let said = match error.kind() {
        ErrorKind::UnknownArgument | ErrorKind::InvalidSubcommand => {
            foreign_flags(&line, command).or_else(|| several_values(&line, command))
        }
        // What stands behind a value of bare `hydra` is taken for a command.
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

/// What to write for flags of other programs, and for our own with `_`.
fn foreign_flags(line: &Line, command: &Command) -> Option<(String, String)> {
    let all = line.given();
    let foreign = line.items.iter().filter(|item| !item.is_of(command));
    let foreign = foreign.filter_map(|item| Some((item, meant(item, &all, command)?)));
    let foreign: Vec<(&Item, Ours)> = foreign.collect();
    let (first, _) = foreign.first()?;
    let said = |(item, ours): &(&Item, Ours)| {
        format!("there is no flag {}: {}", item.typed, sentence(ours, as_flag, " "))
    };
    let mut lines: Vec<String> = foreign.iter().map(said).collect();
    if foreign.len() > 1 {
        lines.push(format!("all of it: {}", line.written(command)));
    }
    Some((first.typed.clone(), lines.join("\n  ")))
}

/// Values that spaces separate where commas do.
fn several_values(line: &Line, command: &Command) -> Option<(String, String)> {
    let item = line.items.iter().find(|item| item.values.len() > 1 && item.is_of(command))?;
    let name = item.name();
    let flag = flag_of(command, &name).filter(|flag| flag.get_action().takes_values())?;
    let list = format!("{} {}", item.typed, quoted(&item.values.join(",")));
    let in_grid = SAMPLED.contains(&name.as_str()) || is_varied(&name);
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

/// A value of a list, which was written behind the flag of its setting.
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

/// A value that other programs have, or a list where one value is trained.
fn other_value(error: &clap::Error, line: &Line, command: &Command) -> Option<(String, String)> {
    let Some(ContextValue::String(flag)) = error.get(ContextKind::InvalidArg) else { return None };
    let typed = flag.split([' ', '=']).next()?.to_owned();
    let item = line.items.iter().find(|item| item.typed == typed)?;
    let (name, value) = (item.name(), item.values.first()?);
    if value.contains(',')
        && !GRIDS.contains(&line.command)
        && (SAMPLED.contains(&name.as_str()) || is_varied(&name))
    {
        let said = error.render().to_string();
        let said = said.split("\n\n").next().unwrap_or_default().trim_start_matches("error: ");
        let message = format!(
            "{said}\n  hydra {} has one configuration: hydra select compares those of a list",
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
    let ours = known_to(command, ours(&Given::new(foreign, Some(value)), &[], line.command)?)?;
    let is_other = ours.settings.iter().all(|given| given.value.as_ref() != Some(value));
    let message = format!("invalid value '{value}' for {typed}: {}", sentence(&ours, as_flag, " "));
    (is_other && !ours.settings.is_empty()).then_some((typed, message))
}

/// What a program that names settings by keywords is told of one that a command does not have.
pub(crate) fn of_keyword(command: &str, keyword: &str, all: &[Given]) -> Option<(Option<String>, String)> {
    let mut hydra = Cli::command();
    hydra.build();
    let command = hydra.find_subcommand(command)?;
    let given = all.iter().find(|given| given.name == keyword)?;
    let ours = known_to(
        command,
        ours(&Given { name: keyword.to_ascii_lowercase(), ..given.clone() }, all, command.get_name())?,
    )?;
    let keyword = |given: &Given| {
        let value = given.value.as_deref().unwrap_or("True");
        let plain = value.parse::<f64>().is_ok() || value == "True";
        if plain { format!("{}={value}", given.name) } else { format!("{}={value:?}", given.name) }
    };
    Some((ours.settings.first().map(|given| given.name.clone()), sentence(&ours, keyword, ", ")))
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
        assert!(said.starts_with("error: there is no flag --learning-rate: write --lr 2e-5\n"), "{said}");
        let said = says(
            "hydra train --model gpt2 --per-device-train-batch-size 4 --gradient-accumulation-steps=4 --bf16 True",
        );
        assert!(
            said.contains(
                "no flag --per-device-train-batch-size: write --batch 16 --accumulate 4 (--batch counts"
            ),
            "{said}"
        );
        assert!(
            said.contains("\n  all of it: hydra train --model gpt2 --batch 16 --accumulate 4 --dtype bf16\n"),
            "{said}"
        );
        let said = says("hydra select --lr 1e-3,1e-4 --gradient_accumulation_steps 2 --batch 8");
        assert!(said.contains("write --accumulate 2 (--batch 8 is the whole minibatch"), "{said}");
        let said = says("hydra --weight_decay 0.1");
        assert!(said.contains("there is no flag --weight_decay: write --weight-decay 0.1\n"), "{said}");
        let said = says("hydra train --target-modules q_proj v_proj --lora 4");
        assert!(said.contains("write --lora-targets q_proj,v_proj\n"), "{said}");
        let said = says("hydra train --resume-from-checkpoint runs/train-1/checkpoints");
        assert!(said.contains("by the command hydra resume runs/train-1\n"), "{said}");
        let said = says("hydra eval --num-train-epochs 3");
        assert!(said.contains("that is --epochs of hydra train, and hydra eval has no such flag"), "{said}");
        let said = says("hydra resume runs/a --output-dir b");
        assert!(said.contains("that is --out of hydra train"), "{said}");
        assert!(says("hydra train --no-such-flag 1").contains("unexpected argument '--no-such-flag'"));
    }

    #[test]
    fn lists_are_separated_by_commas() {
        for (line, expected) in [
            ("hydra --lr 1e-3 1e-4", "the values of --lr are separated by commas: write --lr 1e-3,1e-4\n"),
            ("hydra select --batch 8 --lr 1e-3 1e-4 --steps 2", "write --lr 1e-3,1e-4\n"),
            ("hydra select --weight-decay 0 0.1", "write --weight-decay 0,0.1\n"),
            ("hydra train --lr 1e-3 1e-4", "write hydra select --lr 1e-3,1e-4 to compare several\n"),
            ("hydra train --weight-decay 0,0.1", "hydra train has one configuration: hydra select compares"),
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
        let all = all.map(|(name, value)| Given::new(name, Some(value)));
        let of = |keyword: &str| of_keyword("train", keyword, &all).unwrap();
        assert_eq!(of("learning_rate"), (Some("lr".to_owned()), "write lr=2e-5".to_owned()));
        assert!(of("per_device_train_batch_size").1.starts_with("write batch=4 ("));
        assert_eq!(of("optim").1, "write optimizer=\"adamw\"");
    }
}
