//! The texts that the tasks of a run generated last, as text.

use super::journal::Journal;
use serde_json::Value;
use std::fmt::Write as _;

/// Returns each sample prompt with its continuations by the tasks; empty without samples.
pub fn samples(journal: &Journal) -> String {
    let of_tasks = || journal.tasks.iter().filter_map(|task| Some((&task.name, task.samples()?)));
    let prompts = of_tasks().map(|(_, (_, samples))| samples.len()).max().unwrap_or(0);
    let width = of_tasks().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
    let text = |sample: &Value, key: &str| sample[key].as_str().unwrap_or_default().to_owned();
    let mut shown = String::new();
    for prompt in 0..prompts {
        let mut given = None;
        for (name, (step, samples)) in of_tasks() {
            let Some(sample) = samples.get(prompt) else { continue };
            if given.replace(prompt).is_none() {
                let _ = writeln!(shown, "\nprompt {:?}", text(sample, "prompt"));
            }
            let _ = writeln!(shown, "  {name:width$}  after {step}: {:?}", text(sample, "text"));
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_last_texts_of_tasks_are_below_each_other() {
        let mut journal = Journal::default();
        let line = |task: &str, step: u64, text: &str| json!({ "event": "samples", "task": task, "step": step, "samples": [{ "prompt": "a\n", "text": text }] });
        assert_eq!(samples(&journal), "");
        for line in [line("b8", 2, "x"), line("b12", 2, "y"), line("b8", 4, "z \"é\"")] {
            journal.note(serde_json::from_value(line).unwrap());
        }
        let expected = "\nprompt \"a\\n\"\n  b8   after 4: \"z \\\"é\\\"\"\n  b12  after 2: \"y\"\n";
        assert_eq!(samples(&journal), expected);
    }
}
