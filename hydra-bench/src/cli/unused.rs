//! Flags that a command takes because it shares them with training, and does not use. They are not refused, so that the
//! flags of a run can be given to the commands that use its models.

use clap::ArgMatches;
use clap::parser::ValueSource;

/// Flags that change how models are trained.
const TRAINING: [&str; 5] =
    ["train", "dropout", "reserve_for_forks", "optimizer_placement", "microbatch_group"];
/// Flags that change how several tasks share devices and memory.
const TASKS: [&str; 3] = ["concurrent", "strict", "policy"];
/// Flags of GPUs.
const GPUS: [&str; 1] = ["pinned_memory"];

/// The commands that take flags without using them, with these flags. `hydra generate` has a task for each adapter, and
/// computes on CPUs.
const UNUSED: [(&str, [&[&str]; 2]); 3] =
    [("eval", [&TRAINING, &TASKS]), ("predict", [&TRAINING, &TASKS]), ("generate", [&TRAINING, &GPUS])];

/// The note on the given flags that the command does not use.
pub(super) fn note(matches: &ArgMatches) -> Option<String> {
    let (command, matches) = matches.subcommand()?;
    let (_, unused) = UNUSED.iter().find(|(name, _)| *name == command)?;
    let is_given = |name: &&&str| {
        let is_there = matches.try_contains_id(name).is_ok_and(|is_there| is_there);
        is_there && matches.value_source(name) == Some(ValueSource::CommandLine)
    };
    let given = unused.iter().copied().flatten().filter(is_given);
    let given: Vec<String> = given.map(|name| format!("--{}", name.replace('_', "-"))).collect();
    (!given.is_empty()).then(|| format!("note: hydra {command} does not use {}", given.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use clap::CommandFactory;

    fn of(line: &str) -> Option<String> {
        note(&Cli::command().try_get_matches_from(line.split_whitespace()).unwrap())
    }

    #[test]
    fn given_flags_that_are_not_used_are_named_in_one_note() {
        assert_eq!(
            of("hydra predict --train last:1 --policy fifo --dropout=0.1 --cuts 1,2 --strict").unwrap(),
            "note: hydra predict does not use --train, --dropout, --strict, --policy"
        );
        assert_eq!(of("hydra eval --seed 3 --optimizer-placement host").unwrap().matches("--").count(), 1);
        let several = "hydra generate --concurrent 1 --strict --policy fifo --replicas 1";
        assert_eq!(of(several), None);
        assert_eq!(
            of(&format!("{several} --pinned-memory 1MiB")).unwrap(),
            "note: hydra generate does not use --pinned-memory"
        );
        for line in ["hydra", "hydra eval", "hydra train --dropout 0.1 --policy fifo", "hydra --dropout 0.1"]
        {
            assert_eq!(of(line), None, "{line}");
        }
    }

    #[test]
    fn every_flag_is_one_of_its_command() {
        let hydra = Cli::command();
        for (command, unused) in UNUSED {
            let command = hydra.find_subcommand(command).unwrap();
            let has = |name: &&&str| command.get_arguments().any(|flag| flag.get_id() == **name);
            let missing: Vec<&&str> = unused.into_iter().flatten().filter(|name| !has(name)).collect();
            let of_models = ["train", "dropout"];
            assert!(missing.iter().all(|name| command.get_name() == "generate" && of_models.contains(name)));
        }
    }
}
