//! Names of settings in Transformers, TRL, PEFT and similar programs, with their replacements in Hydra.
//!
//! Foreign names are not accepted: they are refused, and the error names the replacement.

use hydra_core::{OptimizerSpec, Schedule};
use hydra_run::settings::values::any_of;

/// A setting from a command line or a keyword: its name with `_` between its words, and its value, if it has one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NamedValue {
    pub(crate) name: String,
    pub(crate) value: Option<String>,
}

impl NamedValue {
    pub(crate) fn new(name: &str, value: Option<&str>) -> Self {
        Self { name: name.to_owned(), value: value.map(str::to_owned) }
    }
}

/// The replacement of a foreign setting.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Suggestion {
    /// The settings to write; none if the foreign setting has no counterpart or needs none.
    pub(crate) settings: Vec<NamedValue>,
    /// The differences from the foreign setting, or the reason why there is no replacement.
    pub(crate) why: String,
}

impl Suggestion {
    fn of(settings: &[(&str, Option<&str>)], why: impl Into<String>) -> Self {
        Self {
            settings: settings.iter().map(|(name, value)| NamedValue::new(name, *value)).collect(),
            why: why.into(),
        }
    }

    fn nothing(why: impl Into<String>) -> Self {
        Self::of(&[], why)
    }
}

/// Settings with the same meaning under another name.
const RENAMED: &[(&str, &[&str])] = &[
    (
        "model",
        &[
            "model_name_or_path",
            "model_name",
            "model_id",
            "model_path",
            "base_model",
            "pretrained_model_name_or_path",
        ],
    ),
    (
        "data",
        &[
            "dataset",
            "dataset_name",
            "dataset_path",
            "dataset_dir",
            "data_path",
            "train_file",
            "train_files",
            "train_data",
        ],
    ),
    ("lr", &["learning_rate", "max_lr"]),
    ("epochs", &["num_train_epochs", "num_epochs", "n_epochs", "max_epochs", "epoch", "train_epochs"]),
    (
        "steps",
        &[
            "max_steps",
            "max_train_steps",
            "num_train_steps",
            "num_steps",
            "total_steps",
            "training_steps",
            "max_iters",
        ],
    ),
    ("batch", &["batch_size", "train_batch_size", "global_batch_size"]),
    (
        "context",
        &[
            "max_seq_length",
            "max_seq_len",
            "max_length",
            "model_max_length",
            "sequence_len",
            "seq_length",
            "sequence_length",
            "block_size",
            "cutoff_len",
            "context_length",
            "max_source_length",
        ],
    ),
    ("warmup", &["warmup_steps", "warmup_ratio", "num_warmup_steps", "lr_warmup_steps", "warmup_iters"]),
    (
        "clip",
        &[
            "max_grad_norm",
            "gradient_clip_val",
            "grad_clip",
            "clip_grad_norm",
            "gradient_clipping",
            "clip_grad",
        ],
    ),
    ("weight_decay", &["wd", "decay"]),
    ("seed", &["data_seed", "random_seed", "random_state"]),
    ("out", &["output_dir", "out_dir", "output", "save_dir"]),
    ("eval_every", &["eval_steps", "eval_interval", "val_check_interval", "evaluation_steps"]),
    ("patience", &["early_stopping_patience"]),
    ("checkpoint_every", &["save_steps", "save_interval", "checkpointing_steps"]),
    ("lora", &["lora_r", "lora_rank", "lora_dim", "r", "rank"]),
    ("lora_targets", &["lora_target_modules", "target_modules", "lora_target"]),
    ("adapter", &["adapter_name_or_path", "peft_model", "peft_model_path", "lora_weights", "lora_model_dir"]),
    ("train", &["trainable_layers", "unfreeze_layers"]),
    ("sample_prompts", &["eval_prompts", "sample_prompts_file"]),
    ("sample_tokens", &["max_new_tokens", "generation_max_length"]),
    ("eval_limit", &["max_eval_samples", "eval_batches", "eval_iters"]),
    ("tensorboard", &["logging_dir"]),
    ("dropout", &["hidden_dropout", "attention_dropout", "resid_pdrop", "dropout_rate", "drop_rate"]),
    ("devices", &["device"]),
    ("device_memory", &["max_memory", "gpu_memory", "max_memory_mb"]),
    ("trials", &["n_trials", "num_trials", "num_samples"]),
];

/// Settings that need no replacement, or have none.
const SKIPPED: &[(&[&str], &str)] = &[
    (
        &["logging_steps", "logging_strategy", "logging_first_step", "log_level", "disable_tqdm"],
        "leave it out: metrics.jsonl in the run directory has every minibatch",
    ),
    (
        &["save_total_limit", "save_only_model", "save_safetensors"],
        "leave it out: a run keeps one checkpoint of each task, and each trained model as safetensors",
    ),
    (
        &["gradient_checkpointing", "gradient_checkpointing_kwargs", "use_gradient_checkpointing"],
        "leave it out: activations within a shard are always recomputed",
    ),
    (
        &[
            "per_device_eval_batch_size",
            "eval_batch_size",
            "eval_accumulation_steps",
            "per_gpu_eval_batch_size",
        ],
        "leave it out: evaluations use the training's batch size",
    ),
    (
        &[
            "dataloader_num_workers",
            "dataset_num_proc",
            "preprocessing_num_workers",
            "num_proc",
            "num_workers",
            "dataloader_pin_memory",
            "dataloader_drop_last",
            "remove_unused_columns",
            "overwrite_cache",
        ],
        "leave it out: background threads prefetch batches",
    ),
    (
        &["do_train", "do_eval", "do_predict", "trust_remote_code", "low_cpu_mem_usage", "use_cache"],
        "leave it out",
    ),
    (
        &[
            "deepspeed",
            "fsdp",
            "fsdp_config",
            "accelerator_config",
            "device_map",
            "ddp_find_unused_parameters",
            "ddp_timeout",
            "local_rank",
            "offload_folder",
            "cpu_offload",
        ],
        "leave it out: models are cut into shards that fit --device-memory, and offloaded to --host-memory",
    ),
    (
        &["load_in_8bit", "quantization_config", "bnb_4bit_compute_dtype", "bits"],
        "leave it out: --lora R --base nf4 quantizes frozen weights to 4 bits, and --dtype sets the type of the computation",
    ),
    (
        &["adam_beta1", "adam_beta2", "adam_epsilon", "beta1", "beta2", "eps", "adam_eps"],
        "leave it out: AdamW has betas 0.9 and 0.999 and epsilon 1e-8",
    ),
    (&["momentum"], "leave it out: SGD has momentum 0.9"),
    (&["load_best_model_at_end"], "leave it out: with --eval-every the best weights are tested and written"),
    (
        &["metric_for_best_model", "greater_is_better"],
        "leave it out: the best weights are those of the lowest validation loss",
    ),
    (
        &[
            "label_smoothing_factor",
            "label_smoothing",
            "neftune_noise_alpha",
            "use_liger_kernel",
            "torch_compile",
            "group_by_length",
            "length_column_name",
        ],
        "leave it out: it is not supported",
    ),
    (
        &["push_to_hub", "hub_model_id", "hub_token", "hub_strategy"],
        "leave it out: trained models are Hugging Face directories, which `hf upload` takes",
    ),
    (&["run_name", "experiment_name", "project"], "leave it out, or name the run directory: --out DIR"),
    (&["fp16", "half"], "fp16 is not supported; --dtype bf16 has the same size and needs no loss scaling"),
    (
        &[
            "validation_file",
            "eval_file",
            "test_file",
            "eval_dataset",
            "eval_data",
            "validation_split_percentage",
            "val_set_size",
            "test_size",
        ],
        "pass --data a directory with train, validation and test files, or one file, whose last two tenths become the \
         validation and test splits",
    ),
    (
        &["padding_side", "pad_to_max_length", "pad_to_multiple_of", "pad_token", "padding", "padding_free"],
        "leave it out: batches need no padding, and examples do not attend to each other",
    ),
];

/// Other programs' names for microbatch sizes, numbers of microbatches and minibatch sizes.
const MICROBATCH: [&str; 5] = [
    "per_device_train_batch_size",
    "per_gpu_train_batch_size",
    "micro_batch_size",
    "train_micro_batch_size_per_gpu",
    "device_train_batch_size",
];
const ACCUMULATION: [&str; 5] = [
    "gradient_accumulation_steps",
    "gradient_accumulation",
    "accumulate_grad_batches",
    "grad_accum",
    "grad_accum_steps",
];
const WHOLE_BATCH: [&str; 4] = ["batch", "batch_size", "train_batch_size", "global_batch_size"];
/// The default microbatch size of `TrainingArguments` of Transformers.
const DEFAULT_MICROBATCH: usize = 8;

/// The replacement of a foreign setting, which may depend on the other settings; none for an unknown name.
pub(crate) fn suggestion(given: &NamedValue, all: &[NamedValue], command: &str) -> Option<Suggestion> {
    let (name, value) = (given.name.as_str(), given.value.as_deref());
    if MICROBATCH.contains(&name) || ACCUMULATION.contains(&name) {
        return Some(batches(all));
    }
    if command == "eval" && ["per_device_eval_batch_size", "eval_batch_size"].contains(&name) {
        return Some(Suggestion::of(&[("batch", value)], ""));
    }
    let renamed = RENAMED.iter().find(|(_, names)| names.contains(&name));
    let renamed = renamed.map(|(name, _)| switched(name, value));
    let skipped =
        || SKIPPED.iter().find(|(names, _)| names.contains(&name)).map(|(_, why)| Suggestion::nothing(*why));
    renamed.or_else(|| converted(name, value, all)).or_else(skipped)
}

/// A setting under its current name, or none if its value is a foreign notation for the default.
fn switched(name: &str, value: Option<&str>) -> Suggestion {
    match (name, value) {
        ("steps", Some("-1")) => Suggestion::nothing("leave it out: --epochs sets the length"),
        ("clip" | "patience" | "eval_every", Some("0" | "0.0")) => {
            Suggestion::nothing("leave it out: that is the default")
        }
        ("devices", Some(kind)) => {
            let kind = match kind.split_once(':') {
                Some((kind, card)) => format!("{kind}:{card}"),
                None if kind == "cuda" => "cuda:0".to_owned(),
                None => "cpu:1".to_owned(),
            };
            Suggestion::of(&[("devices", Some(&kind))], "")
        }
        _ => Suggestion::of(&[(name, value)], ""),
    }
}

/// Returns true for a value that switches a setting off.
fn is_off(value: Option<&str>) -> bool {
    value.is_some_and(|value| {
        ["false", "no", "none", "0", "off"].contains(&value.to_ascii_lowercase().as_str())
    })
}

/// Settings whose values have another notation, too.
fn converted(name: &str, value: Option<&str>, all: &[NamedValue]) -> Option<Suggestion> {
    let unless_off = |suggested: Suggestion| {
        if is_off(value) { Suggestion::nothing("leave it out: that is the default") } else { suggested }
    };
    Some(match name {
        "bf16" | "bf16_full_eval" => unless_off(Suggestion::of(
            &[("dtype", Some("bf16"))],
            "master weights and optimizer state stay f32",
        )),
        "tf32" => unless_off(Suggestion::of(&[("precision", Some("tf32"))], "")),
        "torch_dtype" | "mixed_precision" | "model_dtype" => dtype(value),
        "lr_scheduler_type" | "lr_scheduler" | "lr_schedule" | "scheduler" | "lr_decay_style" => {
            schedule(value)
        }
        "optim" | "optimizer_type" | "optimizer_name" => optimizer(value),
        "packing" | "sample_packing" => unless_off(Suggestion::of(&[("pack", None)], "")),
        "overwrite_output_dir" => unless_off(Suggestion::of(&[("force", None)], "")),
        "resume_from_checkpoint" | "resume" | "auto_resume" => resumed(value),
        "use_lora" | "use_peft" | "peft" => {
            unless_off(Suggestion::of(&[("lora", Some("16"))], "--lora sets the rank"))
        }
        "load_in_4bit" | "use_4bit" => unless_off(Suggestion::of(
            &[("base", Some("nf4"))],
            "it quantizes the frozen model below adapters (--lora)",
        )),
        "bnb_4bit_quant_type" => match value {
            Some("nf4") => Suggestion::of(&[("base", Some("nf4"))], ""),
            _ => Suggestion::nothing("fp4 is not supported: write --base nf4"),
        },
        "assistant_only_loss" | "completion_only_loss" => match is_off(value) {
            true => Suggestion::of(&[("loss_on", Some("all"))], ""),
            false => Suggestion::nothing("leave it out: the loss is of completions by default"),
        },
        "train_on_inputs" | "train_on_prompt" => match is_off(value) {
            true => Suggestion::nothing("leave it out: the loss is of completions by default"),
            false => Suggestion::of(&[("loss_on", Some("all"))], ""),
        },
        "no_cuda" | "use_cpu" => unless_off(Suggestion::of(&[("devices", Some("cpu:1"))], "")),
        "num_gpus" | "gpus" | "n_gpu" | "num_processes" | "nproc_per_node" => devices(value),
        "eval_strategy" | "evaluation_strategy" => evaluated(value, all),
        "save_strategy" => match value {
            Some("no") => Suggestion::of(&[("checkpoint_every", Some("never"))], ""),
            _ => Suggestion::nothing(
                "leave it out: --checkpoint-every sets the interval of checkpoints, by default from their cost",
            ),
        },
        "report_to" => match value {
            Some(to @ ("tensorboard" | "all")) => Suggestion::of(
                &[("tensorboard", None)],
                if to == "all" { "and --mlflow URI for MLflow" } else { "" },
            ),
            Some("mlflow") => Suggestion::nothing("write --mlflow with the server's address"),
            Some("none") => Suggestion::nothing("leave it out: that is the default"),
            _ => Suggestion::nothing("use --tensorboard or --mlflow URI, or --serve for the dashboard"),
        },
        _ => return None,
    })
}

/// The whole minibatch and its number of microbatches, from other programs' sizes per device.
fn batches(all: &[NamedValue]) -> Suggestion {
    let number = |names: &[&str]| -> Option<usize> {
        all.iter().find(|given| names.contains(&given.name.as_str()))?.value.as_deref()?.parse().ok()
    };
    let (micro, accumulated) = (number(&MICROBATCH), number(&ACCUMULATION).or(number(&["accumulate"])));
    let parts = accumulated.unwrap_or(1).max(1);
    let whole =
        all.iter().find(|given| WHOLE_BATCH.contains(&given.name.as_str())).filter(|_| micro.is_none());
    let accumulate = parts.to_string();
    if let Some(whole) = whole.and_then(|whole| whole.value.as_deref()) {
        let why = format!("--batch {whole} is the whole minibatch, in {parts} microbatches");
        return Suggestion::of(&[("accumulate", Some(&accumulate))], why);
    }
    let items = micro.unwrap_or(DEFAULT_MICROBATCH);
    let batch = items.saturating_mul(parts).to_string();
    let of = if micro.is_some() { "" } else { ", the default of Transformers" };
    let why = match parts {
        1 => "--batch is the whole minibatch, over all devices".to_owned(),
        _ => format!("--batch is the whole minibatch, over all devices: {parts} microbatches of {items}{of}"),
    };
    let settings = [("batch", Some(&*batch)), ("accumulate", Some(&*accumulate))];
    Suggestion::of(&settings[..if parts > 1 { 2 } else { 1 }], why)
}

fn dtype(value: Option<&str>) -> Suggestion {
    match value.map(|value| value.trim_start_matches("torch.")) {
        Some("bfloat16" | "bf16") => {
            Suggestion::of(&[("dtype", Some("bf16"))], "master weights and optimizer state stay f32")
        }
        Some("float32" | "fp32" | "no") => Suggestion::of(&[("dtype", Some("f32"))], ""),
        _ => Suggestion::nothing("--dtype is f32 (the default) or bf16"),
    }
}

fn schedule(value: Option<&str>) -> Suggestion {
    let names: Vec<&str> = Schedule::names().collect();
    match value {
        Some("constant_with_warmup") => Suggestion::of(&[("schedule", Some("constant"))], "with --warmup"),
        Some("warmup_stable_decay") => Suggestion::of(&[("schedule", Some("wsd"))], "with --decay-steps"),
        Some(known) if names.contains(&known) => Suggestion::of(&[("schedule", value)], ""),
        _ => Suggestion::nothing(format!("write --schedule with {}", any_of(&names))),
    }
}

fn optimizer(value: Option<&str>) -> Suggestion {
    let names: Vec<&str> = OptimizerSpec::names().collect();
    let found = value.and_then(|value| names.iter().find(|name| value.split('_').any(|part| part == **name)));
    match (found, value) {
        (Some(name), Some(value)) if value.contains("8bit") => {
            match names.iter().find(|of| **of == format!("{name}8bit")) {
                Some(name) => Suggestion::of(&[("optimizer", Some(name))], ""),
                None => Suggestion::of(&[("optimizer", Some(name))], "its moments are f32"),
            }
        }
        (Some(name), _) => Suggestion::of(&[("optimizer", Some(name))], ""),
        (None, _) => Suggestion::nothing(format!("write --optimizer with {}", any_of(&names))),
    }
}

fn devices(value: Option<&str>) -> Suggestion {
    match value.and_then(|value| value.parse::<usize>().ok()) {
        Some(0) => Suggestion::of(&[("devices", Some("cpu:1"))], ""),
        Some(count @ 1..=64) => {
            let cards: Vec<String> = (0..count).map(|card| card.to_string()).collect();
            Suggestion::of(&[("devices", Some(&format!("cuda:{}", cards.join(","))))], "")
        }
        _ => Suggestion::of(&[("devices", Some("cuda:0,1"))], "--devices names the cards"),
    }
}

fn evaluated(value: Option<&str>, all: &[NamedValue]) -> Suggestion {
    let every = all.iter().find(|given| ["eval_steps", "eval_every"].contains(&given.name.as_str()));
    match (value, every.and_then(|every| every.value.as_deref())) {
        (Some("no"), _) => Suggestion::nothing("leave it out: that is the default"),
        (Some("steps"), Some(every)) => Suggestion::of(&[("eval_every", Some(every))], ""),
        _ => Suggestion::nothing("write --eval-every N, which counts minibatches"),
    }
}

/// The command that resumes the run directory of a checkpoint.
fn resumed(value: Option<&str>) -> Suggestion {
    if is_off(value) {
        return Suggestion::nothing("leave it out: that is the default");
    }
    let is_path = |value: &&str| !["true", "last", "latest"].contains(&value.to_ascii_lowercase().as_str());
    let directory = value.filter(is_path).map_or("RUN-DIRECTORY", |path| match path.find("/checkpoint") {
        Some(end) => &path[..end],
        None => path,
    });
    Suggestion::nothing(format!("resume the run, with all its tasks, with hydra resume {directory}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use clap::CommandFactory;

    /// The settings to write for those of a line, and why.
    fn of(line: &str) -> Vec<(String, String)> {
        let all: Vec<NamedValue> = line
            .split(' ')
            .map(|word| match word.split_once('=') {
                Some((name, value)) => NamedValue::new(name, Some(value)),
                None => NamedValue::new(word, None),
            })
            .collect();
        let text = |given: &NamedValue| match &given.value {
            Some(value) => format!("{}={value}", given.name),
            None => given.name.clone(),
        };
        let said = |given| {
            suggestion(given, &all, "train").map(|suggested: Suggestion| {
                (suggested.settings.iter().map(text).collect::<Vec<_>>().join(" "), suggested.why)
            })
        };
        all.iter().filter_map(said).collect()
    }

    #[test]
    fn names_and_values_are_those_of_this_program() {
        for (line, expected) in [
            ("learning_rate=2e-5", "lr=2e-5"),
            ("num_train_epochs=3", "epochs=3"),
            ("max_seq_length=2048", "context=2048"),
            ("max_length=512", "context=512"),
            ("warmup_ratio=0.1", "warmup=0.1"),
            ("warmup_steps=100", "warmup=100"),
            ("output_dir=out", "out=out"),
            ("model_name_or_path=gpt2", "model=gpt2"),
            ("lora_r=16", "lora=16"),
            ("max_grad_norm=1.0", "clip=1.0"),
            ("max_grad_norm=0", ""),
            ("lr_scheduler_type=cosine", "schedule=cosine"),
            ("lr_scheduler_type=constant_with_warmup", "schedule=constant"),
            ("lr_scheduler_type=polynomial", ""),
            ("bf16", "dtype=bf16"),
            ("bf16=True", "dtype=bf16"),
            ("bf16=False", ""),
            ("torch_dtype=bfloat16", "dtype=bf16"),
            ("optim=adamw_torch_fused", "optimizer=adamw"),
            ("optim=paged_adamw_8bit", "optimizer=adamw8bit"),
            ("optim=adamw_bnb_8bit", "optimizer=adamw8bit"),
            ("optim=paged_adamw_32bit", "optimizer=adamw"),
            ("optim=lion_8bit", "optimizer=lion"),
            ("optim=adafactor", ""),
            ("max_steps=-1", ""),
            ("max_steps=100", "steps=100"),
            ("packing=True", "pack"),
            ("num_gpus=2", "devices=cuda:0,1"),
            ("device=cuda", "devices=cuda:0"),
            ("eval_strategy=steps eval_every=50", "eval_every=50"),
            ("logging_steps=10", ""),
            ("report_to=tensorboard", "tensorboard"),
            ("save_strategy=no", "checkpoint_every=never"),
        ] {
            assert_eq!(of(line)[0].0, expected, "{line}");
        }
        assert!(of("no_such_thing=1").is_empty());
        assert!(of("resume_from_checkpoint=runs/a/checkpoint-500")[0].1.ends_with("hydra resume runs/a"));
        assert!(of("resume_from_checkpoint=True")[0].1.ends_with("hydra resume RUN-DIRECTORY"));
    }

    #[test]
    fn a_minibatch_is_counted_whole() {
        let whole = "batch=16 accumulate=4";
        for (line, expected) in [
            ("per_device_train_batch_size=4 gradient_accumulation_steps=4", whole),
            ("gradient_accumulation_steps=4 per_device_train_batch_size=4", whole),
            ("micro_batch_size=4 accumulate=4", whole),
            ("per_device_train_batch_size=4", "batch=4"),
            ("per_device_train_batch_size=4 gradient_accumulation_steps=1", "batch=4"),
            ("gradient_accumulation_steps=4", "batch=32 accumulate=4"),
            ("gradient_accumulation_steps=4 batch=16", "accumulate=4"),
            ("gradient_accumulation_steps=4 batch=8,16", "accumulate=4"),
        ] {
            assert_eq!(of(line)[0].0, expected, "{line}");
        }
        assert!(of("gradient_accumulation_steps=4")[0].1.contains("of 8, the default of Transformers"));
    }

    /// No foreign name is a flag, and every replacement is one.
    #[test]
    fn the_tables_name_flags_that_there_are() {
        let hydra = Cli::command();
        let flags: Vec<String> = ["select", "train", "eval"]
            .iter()
            .flat_map(|name| hydra.find_subcommand(name).unwrap().get_arguments())
            .filter_map(|flag| Some(flag.get_long()?.replace('-', "_")))
            .collect();
        let foreign = RENAMED.iter().flat_map(|(name, names)| {
            assert!(flags.iter().any(|flag| flag == name), "{name}");
            names.iter()
        });
        let foreign = foreign.chain(SKIPPED.iter().flat_map(|(names, _)| names.iter()));
        let mut foreign: Vec<&&str> = foreign.chain(&MICROBATCH).chain(&ACCUMULATION).collect();
        for name in &foreign {
            assert!(flags.iter().all(|flag| flag != **name), "{name}");
        }
        let count = foreign.len();
        foreign.sort_unstable();
        foreign.dedup();
        assert_eq!(foreign.len(), count, "a name stands twice");
    }
}
