//! The last line of a run with failures: what failed, which models are written, and what to do.

use crate::run_dir::{MODELS, Report, RunDir};

/// Messages of operating systems for a full disk, an exhausted quota or a file size limit.
const NO_SPACE: [&str; 4] =
    ["No space left on device", "not enough space", "quota exceeded", "File too large"];

/// Returns the last line, if something failed.
pub(super) fn last_line(report: &Report, errors: &[anyhow::Error], dir: &RunDir) -> Option<String> {
    let failures = report.failures();
    let texts = failures.iter().cloned().chain(errors.iter().map(|error| format!("{error:#}")));
    let is_full = texts
        .map(|text| text.to_ascii_lowercase())
        .any(|text| NO_SPACE.iter().any(|message| text.contains(&message.to_ascii_lowercase())));
    let counts = (failures.len(), report.task_count(), report.written());
    (!failures.is_empty() || !errors.is_empty())
        .then(|| line(counts, is_full, &dir.path().display().to_string()))
}

/// Returns the line for the numbers of failed tasks, all tasks, and written models.
fn line((failed, all, written): (usize, usize, usize), is_full: bool, dir: &str) -> String {
    let what = match failed {
        0 => "some files could not be written".to_owned(),
        _ => format!("{failed} of {all} tasks failed"),
    };
    let why = if is_full { " because the disk is full" } else { "" };
    let models = match written {
        0 => "no model is written".to_owned(),
        1 => format!("1 model is written, in {dir}/{MODELS}"),
        _ => format!("{written} models are written, in {dir}/{MODELS}"),
    };
    let next = if is_full {
        format!("; free disk space, then continue with: hydra resume {dir}")
    } else {
        String::new()
    };
    format!("{what}{why}; {models}{next}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_says_what_failed_what_is_there_and_what_to_do() {
        assert_eq!(
            line((1, 3, 2), true, "runs/a"),
            "1 of 3 tasks failed because the disk is full; 2 models are written, in runs/a/models; free disk space, then \
             continue with: hydra resume runs/a"
        );
        assert_eq!(line((1, 1, 0), false, "a"), "1 of 1 tasks failed; no model is written");
        assert_eq!(
            line((0, 1, 1), false, "a"),
            "some files could not be written; 1 model is written, in a/models"
        );
    }
}
