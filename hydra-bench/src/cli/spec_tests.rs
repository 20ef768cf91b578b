//! Tests of specs: made from flags, written to files and read back.

use super::{Cli, Command};
use crate::commands::select::SelectArgs;
use anyhow::Result;
use clap::Parser;
use hydra_core::optimizer::AdamW;
use hydra_core::schedule::Linear;
use hydra_core::{ByteSize, Decay, Length, Schedule};
use hydra_engine::OptimizerPlacement;
use hydra_run::machine::{DevicesArg, Machine};
use hydra_run::run_dir::{CommandName, RunSpec};
use hydra_run::settings::Configuration;
use hydra_run::terminal::Usage;
use hydra_sched::PolicyKind;
use toml::Table;

const MACHINE: Machine = Machine {
    cores: 4,
    bf16_products: "emulated",
    free: MEMORY,
    available: MEMORY,
    limited: false,
    others: Vec::new(),
    cpu_device_bytes: None,
};
const MEMORY: Option<ByteSize> = Some(ByteSize(10_000_000_000));

/// Specs that an earlier version wrote.
const ALL_SETTINGS: &str = include_str!("../../tests/specs/all-settings.toml");
const DEFAULTS: &str = include_str!("../../tests/specs/defaults.toml");

fn spec(line: &str) -> Result<RunSpec> {
    let cli = Cli::try_parse_from(["hydra"].into_iter().chain(line.split_whitespace())).unwrap();
    let select = |args: SelectArgs| {
        RunSpec::new(CommandName::Select, args.settings.with_defaults().0, &MACHINE)
            .map(|spec| spec.checkpointed(args.out.checkpoints))
    };
    match cli.command {
        None => select(cli.select),
        Some(Command::Select(args)) => select(*args),
        Some(Command::Train(args)) => RunSpec::new(CommandName::Train, args.settings, &MACHINE),
        _ => panic!("no spec"),
    }
}

/// Reads a spec that a file has.
fn load(text: &str) -> Result<RunSpec> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), text).unwrap();
    RunSpec::load(file.path(), &MACHINE)
}

fn refused(text: &str) -> String {
    format!("{:#}", load(text).unwrap_err())
}

#[test]
fn the_default_is_twelve_configurations_on_two_small_devices() {
    let spec = spec("--steps 3").unwrap();
    let grid = spec.grid().unwrap();
    assert_eq!(grid.len(), 12);
    assert_eq!(
        grid[0],
        Configuration {
            name: "b12-lr3e-3".into(),
            model: 0,
            batch: 12,
            lr: 3e-3,
            lora: None,
            seed: None,
            changes: Table::new()
        }
    );
    assert_eq!(grid[11].name, "b8-lr3e-5");
    assert_eq!(spec.devices.devices().to_string(), "cpu:2x1");
    assert_eq!(spec.devices.memory(), ByteSize::mib(12));
}

#[test]
fn a_flag_that_says_what_to_train_ends_the_demo() {
    for line in
        ["--model gpt2-mini", "--data builtin", "--batch 16,8", "--lr 1e-3", "--optimizer lion", "train"]
    {
        let spec = spec(line).unwrap();
        assert_eq!(spec.devices.devices().to_string(), "cpu:1");
        assert_eq!(spec.devices.memory(), ByteSize(4_000_000_000));
        assert_eq!(spec.grid().unwrap().len(), if line.contains(',') { 2 } else { 1 }, "{line}");
    }
    let one = spec("--model gpt2-mini").unwrap().training;
    assert_eq!((one.batch, one.lr), (vec![8], vec![3e-4]));
    let memory = spec("--device-memory 64MiB").unwrap();
    assert_eq!((memory.devices.devices(), memory.devices.memory()), (DevicesArg::ONE_CPU, ByteSize::mib(64)));
    assert_eq!(memory.grid().unwrap().len(), 12);
    assert_eq!(spec("--devices cpu:1 --seed 3").unwrap().grid().unwrap().len(), 12);
}

fn names(line: &str) -> Vec<String> {
    spec(line).unwrap().grid().unwrap().into_iter().map(|one| one.name).collect()
}

#[test]
fn tasks_are_named_by_the_settings_in_which_they_differ() {
    assert_eq!(names("select --batch 8 --lr 1e-3,3e-4"), ["lr1e-3", "lr3e-4"]);
    assert_eq!(names("select --batch 8,4 --lr 1e-3"), ["b8", "b4"]);
    assert_eq!(names("select --batch 8,4 --lr 1e-3,0.00012345678")[1], "b8-lr1.235e-4");
    assert_eq!(names("select --batch 8 --lr 1e-3 --lora 2,4"), ["r2", "r4"]);
    // One task differs from no other.
    assert_eq!(names("train --batch 8 --lr 1e-3"), ["b8-lr1e-3"]);
    assert_eq!(names("train --batch 8 --lr 1e-3 --lora 4"), ["b8-lr1e-3-r4"]);
    let models = "select --batch 8 --model bytes-tiny,bytes-small";
    assert_eq!(names(&format!("{models} --lr 1e-3")), ["bytes-tiny", "bytes-small"]);
    assert_eq!(names(&format!("{models} --lr 1e-3,3e-4"))[3], "bytes-small-lr3e-4");
    let data = "select --batch 8 --lr 1e-3 --model gpt2-mini,gpt2-mini --data";
    assert_eq!(names(&format!("{data} texts/one.txt,texts/two")), ["one.txt", "two"]);
    assert_eq!(names(&format!("{data} a/same,b/same")), ["gpt2-mini-same", "gpt2-mini-same-2"]);
    let part = spec("select --batch 8,4 --lr 1e-3").unwrap();
    let only = hydra_run::settings::PartSettings { part: None, only: vec!["b4".to_owned()] };
    assert_eq!(
        part.of_part(only).unwrap().grid().unwrap()[0].name,
        "b4",
        "a part has the names of the whole"
    );
}

#[test]
fn trials_have_the_notation_of_a_grid() {
    let grid = "select --batch 12 --steps 9 --sample lr=3e-3 --sample optimizer=adamw,sgd --sample weight_decay=0,0.1";
    assert_eq!(names(grid), ["adamw-wd0", "adamw-wd0.1", "sgd-wd0", "sgd-wd0.1"]);
    let seeds = "select --batch 12 --lr 1e-3 --steps 9 --sample seed=0,1 --sample warmup=0,3 --sample no_decay_norms=true,false";
    assert_eq!(names(seeds)[0], "no-decay-norms-warmup0-seed0");
    assert!(names(seeds).contains(&"decay-norms-warmup3-seed1".to_owned()));
    let drawn = names("select --batch 4 --steps 9 --search random --trials 40 --sample lr=log:1e-5..1e-2");
    assert_eq!(drawn.iter().collect::<std::collections::BTreeSet<_>>().len(), 40);
    assert!(drawn.iter().all(|name| name.starts_with("lr") && name.len() <= 12), "{drawn:?}");
    // Equal short forms are numbered.
    let near =
        names("select --batch 4 --steps 9 --search random --trials 3 --sample lr=uniform:1e-3..1.0000001e-3");
    assert_eq!(near, ["lr1e-3", "lr1e-3-2", "lr1e-3-3"]);
    let schedules = "select --batch 4 --lr 1e-3 --steps 9 --sample schedule=constant,wsd --decay-steps 3 --sample clip=0.5,1";
    assert_eq!(names(schedules)[3], "clip1-wsd");
}

#[test]
fn a_run_of_an_earlier_version_keeps_the_names_of_its_tasks() {
    let new = spec("select --batch 8 --lr 1e-3,3e-4").unwrap().to_toml().unwrap();
    assert!(new.contains("\nnames = \"differences\"\n"), "{new}");
    let old = new.replace("names = \"differences\"\n", "");
    let names =
        |text: &str| load(text).unwrap().grid().unwrap().into_iter().map(|one| one.name).collect::<Vec<_>>();
    assert_eq!(names(&old), ["b8-lr1e-3", "b8-lr3e-4"]);
    assert_eq!(names(&new), ["lr1e-3", "lr3e-4"]);
    assert_eq!(load(&old).unwrap().to_toml().unwrap(), old);
    let search = spec("select --batch 8 --steps 2 --sample lr=1e-3,3e-4").unwrap().to_toml().unwrap();
    assert_eq!(
        names(&search.replace("names = \"differences\"\n", "")),
        ["t00-b8-lr1.0e-3", "t01-b8-lr3.0e-4"]
    );
}

#[test]
fn a_spec_comes_back_from_its_file() {
    let line = "select --model gpt2-mini --batch 4 --lr 1e-3,3e-4 --cuts 1,3 --link 8GiB/s --clip 1.5 \
                --steps 9 --epochs 2 --optimizer sgd --schedule cosine --policy srtf --no-shuffle --seed 12 \
                --dropout 0.1 --plan plans --no-decay-norms --eval-every 4 --eval-at 3,5 --host-memory 1GiB --dtype bf16 \
                --disk-memory 4GiB --disk . --optimizer-placement host --checkpoint-every 90s --concurrent 3 --strict \
                --eval-limit 7 --no-initial-validation";
    let lists = "select --batch 4 --lr 1e-3 --grid=optimizer=adamw,lion --grid=warmup=0.1,5 --grid=seed=0,1";
    for line in [line, lists, "", "train"] {
        let spec = spec(line).unwrap();
        assert_eq!(load(&spec.to_toml().unwrap()).unwrap(), spec);
    }
}

#[test]
fn specs_that_an_earlier_version_wrote_are_read_and_written_alike() {
    for text in [ALL_SETTINGS, DEFAULTS] {
        assert_eq!(load(text).unwrap().to_toml().unwrap(), text);
    }
    // Policies that runs do not take any more.
    for name in ["sharded-lrtf-patient", "sharded-lrtf-local"] {
        assert!(load(&DEFAULTS.replace("\"sharded-lrtf\"", &format!("\"{name}\""))).is_ok(), "{name}");
    }
}

#[test]
fn a_spec_with_old_names_of_settings_is_read() {
    let line = "train --accumulate 2 --microbatch-group 2 --replicas 2 --reserve-for-forks";
    let spec = spec(line).unwrap();
    let mut text = spec.to_toml().unwrap();
    for (current, old) in [
        ("microbatch_group = 2", "visit = 2"), // alias
        ("replicas = 2", "devices_per_model = 2"),
        ("reserve_for_forks = true", "room_for_forks = true"),
    ] {
        assert!(text.contains(current), "{current} in {text}");
        text = text.replace(current, old);
    }
    assert_eq!(load(&text).unwrap(), spec);
}

#[test]
fn what_is_given_when_a_run_goes_on_wins_over_what_it_began_with() {
    let resumed = |text: &str, line: &str| {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("spec.toml"), text).unwrap();
        std::fs::create_dir(dir.path().join("plans")).unwrap();
        let line = ["hydra", "resume", "DIR"].into_iter().chain(line.split_whitespace());
        let Some(Command::Resume(args)) = Cli::try_parse_from(line).unwrap().command else {
            panic!("not resume")
        };
        RunSpec::resume(dir.path(), &args.devices, &MACHINE).unwrap().devices
    };
    let begun = resumed(ALL_SETTINGS, "");
    assert_eq!((begun.memory(), begun.prefetch, begun.policy), (ByteSize::mib(64), false, PolicyKind::Srtf));
    assert!(begun.link.is_some() && begun.plan.is_some() && !begun.zero_copy);
    let changed = resumed(
        ALL_SETTINGS,
        "--devices cpu:2 --host-memory 2GiB --policy fifo --cuts 2 --optimizer-placement auto",
    );
    assert_eq!((changed.devices().to_string().as_str(), changed.memory()), ("cpu:2", ByteSize::mib(64)));
    assert_eq!((changed.host_memory, changed.policy), (Some(ByteSize::mib(2048)), PolicyKind::Fifo));
    assert_eq!((changed.cuts, changed.prefetch), (Some(vec![2]), false));
    assert_eq!(changed.optimizer_placement, OptimizerPlacement::Auto);
    // Devices that read the host's memory in place take a share of what is free now.
    let shared = resumed(DEFAULTS, "--no-prefetch");
    assert_eq!((shared.memory(), shared.zero_copy, shared.prefetch), (ByteSize(4_000_000_000), true, false));
}

#[test]
fn a_broken_spec_is_told_from_a_missing_one() {
    let missing = RunSpec::load("there/is/none".as_ref(), &MACHINE).unwrap_err();
    assert!(missing.to_string().contains("could not be read"), "{missing:#}");
    assert!(refused("model = 3").contains("is not a spec"));
    let good = spec("").unwrap().to_toml().unwrap();
    assert!(refused(&good.replace("cpu:2x1", "tpu:2")).contains("`tpu:2`"));
    assert!(refused(&good.replace("lr = [0.003", "lr = [-0.003")).contains("learning rate"));
    assert!(refused(&good.replace("format = 1", "format = 9")).contains("format 9"));
}

#[test]
fn a_spec_in_a_file_has_the_limits_of_the_flags() {
    let good = "train --steps 3 --epochs 2 --cuts 1,2 --clip 1 --context 8 --dropout 0.5 --eval-every 2 --patience 3 \
                --device-memory 16MiB --link 1KiB/s";
    let good = spec(good).unwrap().to_toml().unwrap();
    for (line, changed, says) in [
        ("epochs = 2", "epochs = 4611686018427387904", "epochs: `4611686018427387904` is not a whole number"),
        ("steps = 3", "steps = 4294967296", "steps: `4294967296`"),
        ("eval_every = 2", "eval_every = 0", "eval_every: `0`"),
        ("patience = 3", "patience = 0", "patience: `0`"),
        ("eval_every = 2", "", "pass --eval-every N"),
        ("warmup = 0", "warmup = 4294967296", "warmup: `4294967296`"),
        ("accumulate = 1", "accumulate = 0", "accumulate: `0`"),
        ("batch = [8]", "batch = [65537]", "batch: `65537` is not a batch size"),
        ("lr = [0.0003]", "lr = [nan]", "lr: `NaN` is out of range"),
        ("clip = 1.0", "clip = 0.0", "clip: `0` is out of range"),
        ("weight_decay = 0.01", "weight_decay = -1.0", "weight_decay: `-1`"),
        ("context = 8", "context = 1", "context: `1`"),
        ("dropout = 0.5", "dropout = 1.0", "dropout: `1`"),
        (
            "device_memory_bytes = 16777216",
            "device_memory_bytes = 0",
            "device_memory_bytes: `0` is not a size",
        ),
        ("link_bytes_per_s = 1024.0", "link_bytes_per_s = -1.0", "link_bytes_per_s: `-1` is not a bandwidth"),
        ("cuts = [1, 2]", "cuts = [0, 2]", "cuts: `0` is not a cut-point"),
    ] {
        assert!(good.contains(line), "{line} in {good}");
        let error = refused(&good.replace(line, changed));
        assert!(error.contains("cannot be run") && error.contains(says), "{changed}: {error}");
    }
}

#[test]
fn combinations_that_make_no_sense_are_usage_errors() {
    for (line, says) in [
        ("--lr 1e-3,0.001", "given twice"),
        ("--batch 8,4 --accumulate 5", "--accumulate must be between 1 and --batch (4), got 5"),
        ("--devices cuda:0 --link 8GiB/s", "--devices cuda:0 have a real one"),
        ("--disk .", "pass --disk-memory SIZE too"),
        ("--disk-memory 1GiB --disk there/is/none", "--disk `there/is/none`: there is no such directory"),
        ("--devices cpu:2 --optimizer-placement device", "needs a GPU, and --devices cpu:2 names none"),
        ("train --lr 1 --batch 2 --steps 9 --schedule wsd", "pass --decay-steps N too"),
        ("train --lr 1 --batch 2 --steps 9 --decay-steps 4", "--decay-steps needs --schedule wsd"),
    ] {
        let error = spec(line).unwrap_err();
        assert!(error.downcast_ref::<Usage>().is_some(), "{error:#}");
        assert!(format!("{error:#}").contains(says), "{error:#}");
    }
}

#[cfg(not(feature = "cuda"))]
#[test]
fn devices_that_are_not_in_the_build_are_refused_in_flags_and_in_files() {
    let says = |error: anyhow::Error| {
        assert!(error.downcast_ref::<Usage>().is_none(), "{error:#}");
        format!("{error:#}")
    };
    let refused = says(spec("--devices cuda:0/2 --device-memory 1GiB").unwrap_err());
    assert!(refused.contains("`--devices cuda:0/2` cannot be used here"), "{refused}");
    assert!(refused.contains("this build has no CUDA"), "{refused}");
    let good = spec("").unwrap().to_toml().unwrap();
    assert!(says(load(&good.replace("cpu:2x1", "cuda:0/2")).unwrap_err()).ends_with(&refused));
}

#[test]
fn steps_and_epochs_make_the_length() {
    let length = |line: &str| {
        let spec = spec(line).unwrap();
        let configuration = Configuration {
            name: "x".into(),
            model: 0,
            batch: 4,
            lr: 1e-3,
            lora: None,
            seed: None,
            changes: Table::new(),
        };
        spec.training.of(&configuration, 0, 10).unwrap().length
    };
    assert_eq!(length(""), Length::Epochs(1));
    assert_eq!(length("--epochs 3"), Length::Epochs(3));
    assert_eq!(length("--steps 7"), Length::Steps(7));
    assert_eq!(length("--steps 7 --epochs 2"), Length::Steps(6));
    assert_eq!(length("--steps 5 --epochs 2"), Length::Steps(5));
}

#[test]
fn flags_reach_the_training_spec() {
    let spec = spec("train --lr 0.5 --batch 6 --accumulate 2 --weight-decay 0.2 --no-decay-norms --warmup 4 --schedule linear --seed 3 --no-shuffle").unwrap();
    let configuration = &spec.grid().unwrap()[0];
    let train = spec.training.of(configuration, spec.model.seed, 60).unwrap();
    let Some(&AdamW { lr, weight_decay, .. }) = train.optimizer.downcast_ref() else { panic!("not AdamW") };
    assert_eq!((lr, weight_decay), (0.5, 0.2));
    assert_eq!((train.batch, train.accumulate, train.seed, train.shuffle), (6, 2, 3, false));
    assert_eq!(train.decay, Decay::Matrices);
    assert_eq!(train.schedule, Schedule::new(Linear, 4));
    assert_eq!(train.steps(60), 10);
}

#[test]
fn a_schedule_that_decays_last_says_how_long() {
    let spec = |line: &str| spec(&format!("train --lr 1 --batch 2 --steps 9 {line}"));
    let wsd = spec("--schedule wsd --decay-steps 4 --warmup 2").unwrap();
    let train = wsd.training.of(&wsd.grid().unwrap()[0], 0, 60).unwrap();
    assert_eq!([2, 5, 7].map(|step| train.rate(step, 9)), [1.0, 1.0, 0.5]);
    let text = wsd.to_toml().unwrap();
    assert!(text.contains("schedule = \"wsd\"") && text.contains("decay_steps = 4\n"), "{text}");
    assert!(!spec("--schedule linear").unwrap().to_toml().unwrap().contains("decay_steps"));
}
