//! The best model of a run, with the commands that evaluate and load it.

use super::group::TaskGroup;
use super::leaderboard::Report;
use super::task::ReportTask;
use serde_json::Value;
use std::path::Path;

/// The configuration file of a directory in the PEFT format.
const ADAPTER: &str = "adapter_config.json";

impl Report {
    /// Returns one line for the best model of each group (measure and data) that the run in `dir` has written, with the command
    /// that evaluates it. Every line ends with a newline.
    pub(crate) fn best_lines(&self, dir: &Path) -> String {
        self.groups().iter().filter_map(|group| best(group, dir)).collect()
    }
}

fn best(group: &TaskGroup<'_>, dir: &Path) -> Option<String> {
    let is_written = |task: &&ReportTask| task.model_dir.as_deref().is_some_and(|at| Path::new(at).is_dir());
    let first = group.ranked().into_iter().find(|(rank, _)| *rank == Some(1));
    let task = first.map(|(_, task)| task).filter(is_written)?;
    let written = Path::new(task.model_dir.as_deref()?);
    // A model inside the run directory is shown relative to the path that the user gave.
    let inside = written.file_name().map(|name| dir.join("models").join(name));
    let shown = inside.filter(|path| path.is_dir()).unwrap_or_else(|| written.to_owned());
    let path = quoted(&shown.display().to_string());
    let score = task.validated().map(|(_, score)| {
        let value = score.measure().shown(score.value(), |value| format!("{value:.4}"));
        format!(" (validation {} {value})", score.measure().name())
    });
    let model = task.config["model"].as_str().map_or_else(|| "BASE".to_owned(), quoted);
    let is_adapter = written.join(ADAPTER).is_file();
    let (which, load) = match is_adapter {
        true => (
            format!("{model} --adapter {path}"),
            format!("PeftModel.from_pretrained(base, \"{}\")", shown.display()),
        ),
        false => {
            let class = class(written, task.unit.as_deref());
            let load = format!("AutoModelFor{class}.from_pretrained(\"{}\")", shown.display());
            (path.clone(), load)
        }
    };
    let data = task.config["data"].as_str().filter(|data| *data != "builtin");
    let data = data.map(|data| format!(" --data {}", quoted(data))).unwrap_or_default();
    let columns = task.config["columns"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let columns = columns.collect::<Vec<_>>().join(",");
    let setting = |flag: &str| match &task.config[flag.replace('-', "_").as_str()] {
        Value::String(text) => text.clone(),
        Value::Null => String::new(),
        other => other.to_string(),
    };
    let flags = ["tokenizer", "task", "problem-type", "loss", "beta", "gamma", "base"];
    let flags = flags.map(|flag| (flag, setting(flag)));
    let read_as = [("columns", columns)].into_iter().chain(flags).filter(|(_, value)| !value.is_empty());
    let read_as: String = read_as.map(|(flag, value)| format!(" --{flag} {}", quoted(&value))).collect();
    let context = task.config["context"].as_u64().filter(|_| task.unit.as_deref() != Some("images"));
    let context = context.map(|context| format!(" --context {context}")).unwrap_or_default();
    let evaluate = match is_adapter || !has_reference(task) {
        true => format!("; evaluate it: hydra eval --model {which}{data}{read_as}{context}"),
        // Nothing names the model that it is compared with.
        false => String::new(),
    };
    Some(format!("best: {path}{}{evaluate}; load it: {load}\n", score.unwrap_or_default()))
}

/// Returns whether the task's loss compares the model with the one before training.
fn has_reference(task: &ReportTask) -> bool {
    let loss = task.config["loss"].as_str().unwrap_or("dpo");
    task.config["task"] == "preference" && ["dpo", "ipo", "kto"].contains(&loss)
}

/// The end of the name of the Transformers class that loads a model directory, by the architecture in its configuration or,
/// without one, by the unit of its data.
fn class(directory: &Path, unit: Option<&str>) -> &'static str {
    let config = std::fs::read_to_string(directory.join("config.json")).unwrap_or_default();
    let config: Value = serde_json::from_str(&config).unwrap_or_default();
    let architecture = config["architectures"][0].as_str().unwrap_or_default();
    let classifiers = ["ImageClassification", "SequenceClassification"];
    let of_unit = if unit == Some("images") { classifiers[0] } else { "CausalLM" };
    classifiers.into_iter().find(|class| architecture.ends_with(class)).unwrap_or(of_unit)
}

/// Quotes a word for a POSIX shell.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "/._-+:@,=".contains(c);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::fs;

    #[test]
    fn the_best_model_is_named_with_what_evaluates_it() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("a run");
        let task = |name: &str, loss: f64, config: Value| {
            let at = dir.join("models").join(name);
            fs::create_dir_all(&at).unwrap();
            json!({
                "name": name, "config": config, "state": "done", "steps": 1, "losses": [5.0], "unit": "tokens",
                "validation": { "loss": loss, "perplexity": 2.0 * loss, "predicted_tokens": 9 }, "model_dir": at,
            })
        };
        let config = json!({ "model": "gpt2-mini", "data": "a.csv", "columns": ["text=a b"], "context": 64 });
        let report = |tasks: Vec<Value>| Report::so_far(tasks).unwrap().best_lines(&dir);
        let two = vec![task("a", 4.0, config.clone()), task("b", 3.0, config.clone())];
        let shown = dir.join("models/b").display().to_string();
        assert_eq!(
            report(two.clone()),
            format!(
                "best: '{shown}' (validation perplexity 6.0000); evaluate it: hydra eval --model '{shown}' --data a.csv \
                 --columns 'text=a b' --context 64; load it: AutoModelForCausalLM.from_pretrained(\"{shown}\")\n"
            )
        );
        let classes = json!({ "architectures": ["GPT2ForSequenceClassification"] });
        fs::write(dir.join("models/b/config.json"), classes.to_string()).unwrap();
        let mut classifiers = two.clone();
        classifiers.iter_mut().for_each(|task| task["config"]["task"] = "classify".into());
        let classifier = report(classifiers);
        assert!(classifier.contains(" --task classify --context 64; "), "{classifier}");
        assert!(classifier.contains("AutoModelForSequenceClassification.from_pretrained"), "{classifier}");
        let preferring = |loss: &str| {
            let mut tasks = two.clone();
            let settings = json!({ "task": "preference", "loss": loss, "beta": 0.5 });
            let settings = settings.as_object().unwrap();
            tasks
                .iter_mut()
                .for_each(|task| task["config"].as_object_mut().unwrap().extend(settings.clone()));
            report(tasks)
        };
        assert!(preferring("orpo").contains(" --task preference --loss orpo --beta 0.5 "));
        assert!(!preferring("ipo").contains("hydra eval"), "{}", preferring("ipo"));
        fs::write(dir.join("models/b").join(ADAPTER), "{}").unwrap();
        assert!(preferring("ipo").contains(" --task preference --loss ipo --beta 0.5 "));
        let adapter = report(two.clone());
        assert!(
            adapter.contains(&format!("hydra eval --model gpt2-mini --adapter '{shown}' --data a.csv")),
            "{adapter}"
        );
        assert!(adapter.contains("PeftModel.from_pretrained(base, "), "{adapter}");
        fs::remove_dir_all(dir.join("models/b")).unwrap();
        assert_eq!(report(two), "", "what was not written is not named");
    }

    #[test]
    fn words_are_quoted_as_a_shell_reads_them() {
        assert_eq!(["runs/a-1", "a b", "it's", ""].map(quoted), ["runs/a-1", "'a b'", "'it'\\''s'", "''"]);
    }
}
