//! The log on standard error, filtered by `HYDRA_LOG`.

use crate::terminal::error::tell;
use crate::terminal::progress;
use std::env::{self, VarError};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

const VARIABLE: &str = "HYDRA_LOG";

/// Starts logging to standard error with the filter in `HYDRA_LOG`; by default warnings on a terminal and errors in a pipe.
pub fn to(terminal: &indicatif::MultiProgress) {
    let default = if progress::interactive() { "warn" } else { "error" };
    let (filter, note) = filter(env::var(VARIABLE), default);
    note.iter().for_each(|note| tell(note));
    let colours = env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let writer = progress::LogWriter(terminal.clone());
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .without_time()
        .with_target(false)
        .with_ansi(progress::interactive() && colours)
        .with_writer(move || writer.clone());
    // This fails if a program that calls `run` has a logger already.
    let _ = subscriber.try_init();
}

/// The filter of `HYDRA_LOG`, or the default; and a note about a filter that is probably a mistake.
fn filter(asked: Result<String, VarError>, default: &str) -> (EnvFilter, Option<String>) {
    let levels = "error, warn, info, debug, trace or off";
    let ignored = |text: &str, why: &str| {
        format!("note: {VARIABLE}=`{text}` is ignored: {why}; expected {levels}, or TARGET=LEVEL,..")
    };
    let taken = |name: &str| {
        format!(
            "note: `{name}` in {VARIABLE} is not a level ({levels}); it is taken for the name of a module"
        )
    };
    match asked {
        Err(VarError::NotPresent) => (EnvFilter::new(default), None),
        Err(VarError::NotUnicode(text)) => {
            (EnvFilter::new(default), Some(ignored(&text.to_string_lossy(), "it is not UTF-8")))
        }
        Ok(text) => match EnvFilter::builder().parse(&text) {
            Err(error) => (EnvFilter::new(default), Some(ignored(&text, &error.to_string()))),
            Ok(filter) => (filter, strange_module(&text).map(taken)),
        },
    }
}

/// The first word that is not a level and not a module of Hydra, such as a misspelt level. A filter takes it for a module.
fn strange_module(text: &str) -> Option<&str> {
    let is_name = |word: &&str| !word.is_empty() && !word.contains(['=', '[', ':']);
    let mut names = text.split(',').map(str::trim).filter(is_name);
    names.find(|name| name.parse::<LevelFilter>().is_err() && !name.starts_with("hydra"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(asked: &str) -> (String, Option<String>) {
        let (filter, note) = filter(Ok(asked.to_owned()), "warn");
        (filter.to_string(), note)
    }

    #[test]
    fn a_filter_that_is_one_is_taken_without_a_word() {
        for asked in "info|DEBUG|off|hydra_engine=debug,warn|hydra_run|hydra_engine::run=info".split('|') {
            assert_eq!(of(asked).1, None, "{asked}");
        }
        assert_eq!(of("debug").0, "debug");
        let (default, note) = filter(Err(VarError::NotPresent), "warn");
        assert_eq!((default.to_string().as_str(), note), ("warn", None));
    }

    #[test]
    fn a_misspelt_filter_is_said() {
        let (filter, note) = of("hydra_engine=inof");
        let note = note.unwrap();
        assert_eq!(filter, "warn");
        assert!(note.starts_with("note: HYDRA_LOG=`hydra_engine=inof` is ignored: "), "{note}");
        assert!(note.contains("expected error, warn, info"), "{note}");
        let note = of("hydra_engine=debug, inof").1.unwrap();
        assert!(note.starts_with("note: `inof` in HYDRA_LOG is not a level"), "{note}");
    }
}
