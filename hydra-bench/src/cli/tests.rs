//! Tests of the command line, its help and the documents about it.

use super::*;
use clap::CommandFactory;
use clap::error::ErrorKind;
use hydra_core::ByteSize;
use hydra_models::family;
use hydra_run::settings::values::any_of;
use hydra_run::settings::{OUTPUT, model_help, policy_help};
use hydra_sched::PolicyKind;

fn fails(arguments: &[&str]) -> clap::Error {
    Cli::try_parse_from([&["hydra"], arguments].concat()).unwrap_err()
}

#[test]
fn the_definition_is_consistent() {
    Cli::command().debug_assert();
}

#[test]
fn without_a_subcommand_it_selects() {
    let bare = Cli::try_parse_from(["hydra", "--steps", "3", "--batch", "4,2"]).unwrap();
    assert!(bare.command.is_none());
    assert_eq!(bare.select.settings.training.steps, Some(3));
    assert_eq!(bare.select.settings.training.batch, [4, 2]);
    let named = Cli::try_parse_from(["hydra", "select", "--steps", "3"]).unwrap();
    assert!(matches!(named.command, Some(Command::Select(args)) if args.settings.training.steps == Some(3)));
}

#[test]
fn beside_a_spec_stand_only_output_flags() {
    let mut command = Cli::command();
    command.build();
    let spec = command.get_arguments().find(|flag| flag.get_id() == "spec").unwrap();
    let conflicts = command.get_arg_conflicts_with(spec);
    let conflicts: Vec<&str> = conflicts.iter().map(|flag| flag.get_id().as_str()).collect();
    let allowed = [
        "spec",
        "part",
        "only",
        "replay",
        "out",
        "force",
        "dry_run",
        "record",
        "json",
        "progress",
        "serve",
        "tensorboard",
        "mlflow",
        "checkpoint_every",
        "help",
        "version",
    ];
    for flag in command.get_arguments() {
        let id = flag.get_id().as_str();
        assert_ne!(conflicts.contains(&id), allowed.contains(&id), "--{id} is in neither or both");
    }
    assert_eq!(fails(&["--spec", "s.toml", "--lr", "1"]).kind(), ErrorKind::ArgumentConflict);
    assert!(Cli::try_parse_from(["hydra", "--spec", "s.toml", "--out", "d", "--force"]).is_ok());
}

#[test]
fn wrong_values_name_the_flag_and_what_was_given() {
    let cases: [(&[&str], &str, &str); 18] = [
        (&["--lr", "fast"], "--lr", "`fast` is not a number"),
        (&["--lr", "1e-3,nan"], "--lr", "`nan`"),
        (&["--lr", "-1"], "--lr", "`-1`"),
        (&["--lr", "1e-3,"], "--lr", "is empty"),
        (&["--batch", "0"], "--batch", "`0`"),
        (&["--batch", "8,1000000"], "--batch", "`1000000`"),
        (&["--context", "1"], "--context", "`1`"),
        (&["--context", "99999999"], "--context", "`99999999`"),
        (&["--devices", "cuda:0x2"], "--devices", "`cuda:0x2` has an invalid GPU number"),
        (&["--devices", "cpu:0"], "--devices", "`cpu:0`"),
        (&["--device-memory", "much"], "--device-memory", "`much` is not a size"),
        (&["--link", "8GiB"], "--link", "`8GiB` is not a bandwidth"),
        (&["--policy", "lifo"], "--policy", "sharded-lrtf, sharded-lrtf-eager, fifo, srtf, random"),
        (&["--dropout", "1"], "--dropout", "`1`"),
        (&["--steps", "0"], "--steps", "`0`"),
        (&["--clip", "0"], "--clip", "`0`"),
        (&["--checkpoint-every", "0"], "--checkpoint-every", "`0`"),
        (&["--checkpoint-every", "5d"], "--checkpoint-every", "`5d`"),
    ];
    for (arguments, flag, says) in cases {
        let error = fails(arguments);
        let message = error.to_string();
        assert_eq!(error.exit_code(), 2, "{message}");
        assert!(message.contains(flag) && message.contains(says), "{arguments:?}: {message}");
    }
    for flag in ["--model", "--data", "--out"] {
        let error = fails(&["train", flag, ""]);
        assert!(error.exit_code() == 2 && error.to_string().contains(flag), "{error}");
    }
    assert_eq!(fails(&["train", "--lr", "1e-3,1e-4"]).exit_code(), 2);
    assert_eq!(fails(&["report"]).exit_code(), 2);
    assert!(
        fails(&["eval", "--split", "training"]).to_string().contains("expected train, validation or test")
    );
}

#[test]
fn every_policy_is_in_the_help_and_in_the_manual() {
    let mut hydra = Cli::command();
    let help = |of: &mut clap::Command| {
        of.render_long_help().to_string().split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let list = policy_help(&PolicyKind::ALL);
    for of in ["train", "simulate"] {
        let help = help(hydra.find_subcommand_mut(of).unwrap());
        assert!(help.contains(&list), "{list} in\n{help}");
    }
    let list = any_of(&PolicyKind::ALL.map(|kind| format!("`{kind}`")));
    for page in [include_str!("../../../docs/cli.md"), include_str!("../../../docs/report.md")] {
        assert!(page.contains(&list), "{list} in\n{page}");
    }
}

#[test]
fn every_preset_is_in_the_help_and_in_the_manual() {
    let page = include_str!("../../../docs/cli.md");
    for preset in family::presets() {
        assert!(model_help().contains(preset.name), "{}", preset.name);
        let row = format!("| `{}` | {} |", preset.name, preset.description);
        assert!(page.contains(&row), "{row}");
    }
}

#[test]
fn the_commands_of_the_manuals_are_understood() {
    let mut commands = 0;
    let pages = [
        include_str!("../../../README.md"),
        include_str!("../../../docs/cli.md"),
        include_str!("../../../docs/paper-grid.md"),
    ];
    for page in pages {
        for line in page.lines() {
            let line = line.split('#').next().unwrap_or_default();
            let arguments = line.strip_prefix("cargo run -p hydra-bench -- ").or(line.strip_prefix("hydra "));
            let Some(arguments) = arguments else { continue };
            let words = ["hydra"].into_iter().chain(arguments.split_whitespace()).map(OsString::from);
            let read = Cli::read(words);
            assert!(read.is_ok(), "{line}: {}", read.unwrap_err());
            commands += 1;
        }
    }
    assert!(commands >= 12, "{commands}");
}

#[test]
fn flags_stand_where_they_belong_in_the_help() {
    let mut command = Cli::command();
    for (name, flag, heading) in [
        ("train", "batch", "Training"),
        ("select", "lr", "Training"),
        ("eval", "json", OUTPUT),
        ("explain", "json", OUTPUT),
        ("partition", "out", OUTPUT),
        ("step", "json", OUTPUT),
        ("resume", "record", OUTPUT),
    ] {
        let subcommand = command.find_subcommand_mut(name).unwrap();
        let found = subcommand.get_arguments().find(|argument| argument.get_id() == flag).unwrap();
        assert_eq!(found.get_help_heading(), Some(heading), "{name} --{flag}");
    }
}

#[test]
fn values_as_the_manual_writes_them() {
    let line = "hydra train --devices cpu:2x1 --device-memory 64MiB --link 8GiB/s --cuts 1,3,5 --policy srtf \
                --optimizer sgd --schedule cosine --warmup 3 --dropout 0 --seed 7 --lr 3e-4 --batch 8";
    let cli = Cli::try_parse_from(line.split_whitespace()).unwrap();
    let Some(Command::Train(train)) = cli.command else { panic!("not train") };
    assert_eq!(train.settings.devices.cuts, Some(vec![1, 3, 5]));
    assert_eq!(train.settings.devices.device_memory, Some(ByteSize::mib(64)));
    assert_eq!(train.settings.devices.policy, PolicyKind::Srtf);
    let training = &train.settings.training;
    assert_eq!((training.lr.as_slice(), training.batch.as_slice()), (&[3e-4][..], &[8][..]));
    assert_eq!(training.optimizer, "sgd");
}
