//! Generation: the tokens of Transformers, equal to the bit whole and cut, resident and spilled, alone and in company.

use crate::common::{fails, noted};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const WHOLE: &str = "--devices cpu:1x2 --device-memory 256MiB";
/// A device for each part of the sequences, each too small for two layers of the model and what they compute.
const CUT: &str = "--devices cpu:2x1 --device-memory 16MiB --no-cache";

/// The directory of a model that Transformers generated with.
fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../hydra-models/tests/fixtures/generation").join(name)
}

/// What Transformers generated: the file of a model.
fn expected(name: &str) -> Value {
    serde_json::from_slice(&fs::read(fixture(name).join("expected.json")).unwrap()).unwrap()
}

/// A file with the prompts of cases.
fn prompts(dir: &TempDir, cases: &Value) -> PathBuf {
    let file = dir.path().join("prompts.jsonl");
    let row = |case: &Value| json!({"input_ids": case["prompt"]}).to_string() + "\n";
    fs::write(&file, cases.as_array().unwrap().iter().map(row).collect::<String>()).unwrap();
    file
}

fn rows(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The rows of `hydra generate`.
fn generate(model: &str, prompts: &Path, more: &str) -> Vec<Value> {
    let model = fixture(model);
    let [out, _] =
        noted(&format!("generate --json --model {} --prompts {} {more}", model.display(), prompts.display()));
    rows(&out)
}

fn tokens<'a>(rows: &'a [Value], key: &str) -> Vec<&'a Value> {
    rows.iter().map(|row| &row[key]).collect()
}

const MODELS: [&str; 6] = ["gpt2", "llama", "llama3", "mistral", "qwen2", "qwen3"];

#[test]
fn greedy_tokens_are_those_of_transformers_in_one_piece_and_cut() {
    for model in MODELS {
        let dir = TempDir::new().unwrap();
        let expected = expected(model);
        let cases = expected["cases"].as_array().unwrap();
        let prompts = prompts(&dir, &expected["cases"]);
        for more in [WHOLE, CUT] {
            let found = generate(model, &prompts, &format!("--max-new-tokens 24 {more}"));
            assert_eq!(tokens(&found, "token_ids"), tokens(cases, "tokens"), "{model} {more}");
            assert!(found.iter().all(|row| row["finish_reason"] == "length" && row["text"].is_null()));
        }
        let penalized =
            generate(model, &prompts, &format!("--max-new-tokens 24 --repetition-penalty 1.3 {WHOLE}"));
        assert_eq!(tokens(&penalized, "token_ids"), tokens(cases, "penalized"), "{model}");
    }
}

#[test]
fn several_adapters_generate_at_once() {
    let dir = TempDir::new().unwrap();
    let (expected, adapter) = (expected("llama"), fixture("llama/adapter"));
    // The cases of the model and of its adapter have other prompts.
    let of_adapter = expected["adapter"].as_array().unwrap();
    let file = prompts(&dir, &expected["adapter"]);
    let other = dir.path().join("other");
    fs::create_dir(&other).unwrap();
    for name in ["adapter_config.json", "adapter_model.safetensors"] {
        fs::copy(adapter.join(name), other.join(name)).unwrap();
    }
    let both = format!("--max-new-tokens 24 --adapter {},{}", adapter.display(), other.display());
    for more in [WHOLE, CUT] {
        let found = generate("llama", &file, &format!("{both} {more}"));
        let (first, second) = found.split_at(of_adapter.len());
        assert_eq!(tokens(first, "token_ids"), tokens(of_adapter, "tokens"));
        assert_eq!(tokens(first, "logprob"), tokens(second, "logprob"));
        assert_eq!(second[0]["adapter"], other.to_str().unwrap());
    }
}

#[test]
fn bits_depend_neither_on_cuts_nor_on_devices_nor_on_company() {
    for (model, more) in [("mistral", ""), ("gpt2", ""), ("llama", "--dtype bf16")] {
        let dir = TempDir::new().unwrap();
        let ids = |length: usize, seed: usize| -> Vec<usize> {
            (0..length).map(|i| (i * i + seed * 7) % 64).collect()
        };
        // More sequences than tokens of one whose products are computed by row.
        let cases: Vec<Value> = (0..70).map(|at| json!({"prompt": ids(1 + at % 30, at)})).collect();
        let some: Vec<Value> = [4, 20, 11].map(|at: usize| cases[at].clone()).into();
        let sampled = format!("--max-new-tokens 12 --temperature 1.2 --top-k 20 --top-p 0.9 --seed 3 {more}");
        let all = generate(model, &prompts(&dir, &json!(cases)), &format!("{sampled} {WHOLE}"));
        for devices in [CUT, "--devices cpu:2x1 --device-memory 64MiB --cache-memory 64KiB --cuts 1"] {
            let found = generate(model, &prompts(&dir, &json!(cases)), &format!("{sampled} {devices}"));
            assert_eq!(found, all, "{model} {devices}");
        }
        let few = generate(model, &prompts(&dir, &json!(some)), &format!("{sampled} {WHOLE}"));
        assert_eq!(few, [4, 20, 11].map(|at: usize| all[at].clone()), "{model}");
        let again = generate(
            model,
            &prompts(&dir, &json!(some)),
            &format!("{} {WHOLE}", sampled.replace("--seed 3", "--seed 4")),
        );
        assert_ne!(tokens(&few, "token_ids"), tokens(&again, "token_ids"));
    }
}

#[test]
fn samples_differ_and_texts_end_where_they_are_asked_to() {
    let sampled = "generate --model bytes-llama-tiny --prompt ab --temperature 2 --max-new-tokens 40 --json";
    let [out, notes] = noted(&format!("{sampled} --samples 3"));
    let samples = rows(&out);
    assert!(notes.is_empty(), "{notes}");
    assert_eq!(tokens(&samples, "sample"), [&json!(0), &json!(1), &json!(2)]);
    assert!(
        samples[0]["token_ids"] != samples[1]["token_ids"]
            && samples[1]["token_ids"] != samples[2]["token_ids"]
    );
    let text = samples[0]["text"].as_str().unwrap();
    let (at, stop) = text.char_indices().find(|(at, c)| *at > 0 && c.is_ascii_alphanumeric()).unwrap();
    let [out, _] = noted(&format!("{sampled} --stop {stop}"));
    let stopped = &rows(&out)[0];
    assert_eq!((&stopped["text"], &stopped["finish_reason"]), (&json!(text[..at]), &json!("stop")));
    assert!(stopped["token_ids"].as_array().unwrap().len() < 40);
    let [out, notes] = noted("generate --model bytes-tiny --prompt abc --max-new-tokens 200 --json");
    assert_eq!(rows(&out)[0]["token_ids"].as_array().unwrap().len(), 125);
    assert!(
        notes.contains("1 of 1 sequences end before 200 new tokens, because the model has 128 positions"),
        "{notes}"
    );
}

#[test]
fn the_models_own_settings_are_used_or_named() {
    let dir = TempDir::new().unwrap();
    let [model, expected] = [fixture("qwen2"), fixture("qwen2").join("expected.json")];
    for name in ["config.json", "model.safetensors"] {
        fs::copy(model.join(name), dir.path().join(name)).unwrap();
    }
    let expected: Value = serde_json::from_slice(&fs::read(expected).unwrap()).unwrap();
    let case = &expected["cases"][1];
    let end = &case["tokens"][3];
    let config = json!({"eos_token_id": [end, 63], "max_new_tokens": 9, "num_beams": 2, "min_length": 0});
    fs::write(dir.path().join("generation_config.json"), config.to_string()).unwrap();
    let file = prompts(&dir, &json!([case]));
    let generate = format!("generate --json --model {} --prompts {}", dir.path().display(), file.display());
    let [out, notes] = noted(&generate);
    let found = &rows(&out)[0];
    assert_eq!(found["token_ids"], json!(case["tokens"].as_array().unwrap()[..4]));
    assert_eq!(found["finish_reason"], "stop");
    assert!(notes.contains("not used of generation_config.json: num_beams\n"), "{notes}");
    for (key, value) in [
        ("max_new_tokens", json!(0)),
        ("temperature", json!(-1)),
        ("top_k", json!(1.5)),
        ("eos_token_id", json!("a")),
        ("do_sample", json!("yes")),
    ] {
        let config = json!({"do_sample": true, key: value});
        fs::write(dir.path().join("generation_config.json"), config.to_string()).unwrap();
        fails(
            &generate.split_whitespace().collect::<Vec<_>>(),
            2,
            &[&format!("`{key}`"), &value.to_string()],
        );
    }
    let config = json!({"do_sample": true, "temperature": 3.0, "max_new_tokens": 9});
    fs::write(dir.path().join("generation_config.json"), config.to_string()).unwrap();
    let [own, _] = noted(&generate);
    assert_ne!(rows(&own)[0]["token_ids"], json!(case["tokens"].as_array().unwrap()[..9]));
    let [given, _] = noted(&format!("{generate} --temperature 3 --top-k 50 --top-p 1"));
    assert_eq!(own, given);
    let [greedy, _] = noted(&format!("{generate} --temperature 0"));
    assert_eq!(rows(&greedy)[0]["token_ids"], json!(case["tokens"].as_array().unwrap()[..9]));
    // As in Transformers, `config.json` ends texts only if there is no other file.
    let mut config: Value = serde_json::from_slice(&fs::read(model.join("config.json")).unwrap()).unwrap();
    config["eos_token_id"] = end.clone();
    fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    fs::write(dir.path().join("generation_config.json"), "{\"max_new_tokens\": 9}").unwrap();
    let [whole, notes] = noted(&generate);
    assert_eq!(rows(&whole)[0]["token_ids"], json!(case["tokens"].as_array().unwrap()[..9]));
    assert!(notes.contains("`generation_config.json` names no end token"), "{notes}");
    fs::remove_file(dir.path().join("generation_config.json")).unwrap();
    let [ended, _] = noted(&format!("{generate} --max-new-tokens 9"));
    assert_eq!(rows(&ended)[0]["token_ids"], json!(case["tokens"].as_array().unwrap()[..4]));
}

#[test]
#[cfg(target_os = "linux")]
fn a_file_is_replaced_by_what_was_generated_alone() {
    let dir = TempDir::new().unwrap();
    let [file, link] = ["kept.jsonl", "link.jsonl"].map(|name| dir.path().join(name));
    let generate = |more: &str, out: &Path| {
        format!("generate --model bytes-tiny --prompt a --max-new-tokens 3 {more} --out {}", out.display())
    };
    noted(&generate("", &file));
    let kept = fs::read(&file).unwrap();
    let refused = |command: String, status: i32, parts: &[&str]| {
        fails(&command.split_whitespace().collect::<Vec<_>>(), status, parts);
    };
    let parts = ["error: `bytes-tiny` could not generate texts\n  caused by: layer `", "budget"];
    refused(generate("--device-memory 64KiB", &file), 1, &parts);
    assert_eq!(fs::read(&file).unwrap(), kept);
    refused(generate("", Path::new("/dev/full")), 2, &["`/dev/full` is no regular file", "omit --out"]);
    std::os::unix::fs::symlink(&file, &link).unwrap();
    noted(&generate("--seed 1", &link));
    assert!(link.is_symlink() && fs::read(&file).unwrap() == kept);
}

#[test]
fn rows_are_prompts_in_several_forms() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("prompts.jsonl");
    let row = |row: Value| row.to_string() + "\n";
    fs::write(&file, row(json!({"prompt": "ab", "id": 7})) + &row(json!({"input_ids": [97, 98]}))).unwrap();
    let command =
        format!("generate --model bytes-llama-tiny --max-new-tokens 3 --json --prompts {}", file.display());
    let [out, notes] = noted(&command);
    let found = rows(&out);
    assert_eq!((&found[0], found.len()), (&found[1], 2));
    assert!(notes.contains("note: not used of the prompts' rows: id\n"), "{notes}");
    let lines = dir.path().join("prompts.txt");
    fs::write(&lines, "ab\n\n").unwrap();
    let [of_lines, _] = noted(&command.replace("prompts.jsonl", "prompts.txt"));
    assert_eq!(rows(&of_lines), found[..1]);
    let chat = json!({"messages": [{"role": "user", "content": "Praise the film"}]});
    fs::write(&file, row(chat)).unwrap();
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/preferences/llama");
    let [of_messages, of_text] =
        [format!("--prompts {}", file.display()), "--chat".to_owned()].map(|given| {
            let command = format!("generate --model {} --max-new-tokens 3 --json {given}", model.display());
            let mut words: Vec<&str> = command.split_whitespace().collect();
            words
                .extend((given == "--chat").then_some(["--prompt", "Praise the film"]).into_iter().flatten());
            let output = crate::common::hydra(&words).output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            rows(&String::from_utf8_lossy(&output.stdout))
        });
    assert_eq!((&of_messages, of_messages.len()), (&of_text, 1));
    assert_ne!(of_messages[0]["prompt"], "Praise the film", "the template adds to it");
    let out = dir.path().join("out.jsonl");
    fs::write(&file, row(json!({"prompt": "ab"})) + &row(json!({"input_ids": [97, 98]}))).unwrap();
    let [printed, _] = noted(&format!("{} --out {}", command.replace("--json ", ""), out.display()));
    assert_eq!((printed.as_str(), rows(&fs::read_to_string(out).unwrap())), ("", found));
}

#[test]
fn weights_that_are_not_finite_are_named() {
    let dir = TempDir::new().unwrap();
    fs::copy(fixture("gpt2").join("config.json"), dir.path().join("config.json")).unwrap();
    let mut weights = fs::read(fixture("gpt2").join("model.safetensors")).unwrap();
    let end = weights.len();
    weights[end - 64..].fill(0xff);
    fs::write(dir.path().join("model.safetensors"), weights).unwrap();
    let file = prompts(&dir, &json!([{"prompt": [1, 2]}]));
    for more in ["", "--temperature 1"] {
        let command =
            format!("generate --json --model {} --prompts {} {more}", dir.path().display(), file.display());
        let output = crate::common::hydra(&command.split_whitespace().collect::<Vec<_>>()).output().unwrap();
        let err = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{err}");
        assert!(err.contains("logits that are not finite") && !err.contains("panicked"), "{err}");
    }
}

#[test]
fn flags_that_change_nothing_are_named() {
    let generate = "generate --model bytes-llama-tiny --prompt ab --max-new-tokens 3 --json";
    let [plain, said] = noted(generate);
    assert_eq!(said, "");
    let [given, said] =
        noted(&format!("{generate} --seed 3 --optimizer-placement host --microbatch-group 2"));
    assert_eq!(given, plain);
    let unused = "note: hydra generate does not use --optimizer-placement, --microbatch-group\n";
    let seed = "note: --seed is not used: a temperature of 0 takes the most likely token\n";
    assert_eq!(said, format!("{unused}{seed}"));
}

#[test]
fn bad_requests_are_refused() {
    let dir = TempDir::new().unwrap();
    let refused = |command: &str, parts: &[&str]| {
        fails(&command.split_whitespace().collect::<Vec<_>>(), 2, parts);
    };
    refused("generate --model bytes-tiny", &["pass --prompt TEXT, or --prompts FILE"]);
    let long = "x".repeat(128);
    let parts = ["prompt 1 has 128 tokens, and the model has 128 positions", "shorten the prompt"];
    refused(&format!("generate --model bytes-tiny --prompt {long}"), &parts);
    refused(
        "generate --model bytes-tiny --prompt a --top-p 0.5",
        &["--top-p applies to sampling", "--temperature 1"],
    );
    refused(
        "generate --model bytes-tiny --prompt a --samples 2",
        &["all samples of the most likely tokens are equal"],
    );
    refused("generate --model bytes-tiny --prompt a --chat", &["has no chat template"]);
    refused(
        "generate --model bytes-llama-tiny --prompt a --base nf4",
        &["--base quantizes the model below adapters"],
    );
    for model in ["vit-tiny", "bytes-bert-tiny"] {
        refused(
            &format!("generate --model {model} --prompt a"),
            &["is no language model that generates text"],
        );
    }
    refused(
        "generate --model bytes-tiny --prompt a --max-new-tokens 9 --cache-memory 1KiB",
        &["--cache-memory 1.00 KiB has no room", "takes"],
    );
    let file = dir.path().join("prompts.jsonl");
    fs::write(&file, "{\"prompt\": \"a\"}\n{\"question\": \"b\"}\n").unwrap();
    let command = format!("generate --model bytes-tiny --prompts {}", file.display());
    fails(&command.split_whitespace().collect::<Vec<_>>(), 1, &["row 2 of", "has no prompt"]);
    fs::write(&file, json!({"input_ids": [1, 999]}).to_string()).unwrap();
    refused(&command, &["prompt 1 has the token 999, and the model has 256 tokens"]);
    refused(
        "generate --model bytes-tiny --prompt a --max-new-tokens 9 --host-memory 16KiB",
        &["the key-value cache of", "--host-memory"],
    );
    let lacks =
        format!("generate --model {} --prompts {} --stop x", fixture("qwen2").display(), file.display());
    refused(&lacks, &["--stop compares texts", "has no tokenizer"]);
    let adapter = fixture("llama/adapter");
    let of_adapter = |more: &str| {
        format!(
            "generate --model {} --prompts {} {more} --adapter {}",
            fixture("llama").display(),
            file.display(),
            adapter.display()
        )
    };
    fs::write(&file, json!({"input_ids": [1, 2]}).to_string()).unwrap();
    let small = of_adapter("--device-memory 64KiB");
    let output = crate::common::hydra(&small.split_whitespace().collect::<Vec<_>>()).output().unwrap();
    let could_not = format!("error: `{}` could not generate texts\n  caused by: layer `", adapter.display());
    let err = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(err.contains(&could_not), "{err}");
    refused(
        &format!("{},{}", of_adapter(""), adapter.display()),
        &["is given twice; give each directory once"],
    );
    let command = format!(
        "generate --model bytes-llama-tiny --prompt a --max-new-tokens 9 --adapter {}",
        adapter.display()
    );
    fails(&command.split_whitespace().collect::<Vec<_>>(), 1, &["adapter"]);
}
