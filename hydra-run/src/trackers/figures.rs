//! The figures of an event, which each tracker names in its own way.

use crate::run_dir::{LoggedEvent, Number};
use hydra_engine::EvaluationKind;

/// A figure of a task at a step.
#[derive(Debug, PartialEq)]
pub(super) struct Figure<'a> {
    /// `loss`, `learning_rate`, or another metric of the model, such as `accuracy`.
    pub(super) name: &'a str,
    /// The data that it was measured on: `training`, `validation` or `test`; `None` for a learning rate.
    pub(super) on: Option<&'static str>,
    /// The value; NaN for `null`.
    pub(super) value: f64,
}

/// Returns the step of an event and its figures; `None` for events of other kinds.
pub(super) fn figures(event: &LoggedEvent) -> Option<(u64, Vec<Figure<'_>>)> {
    let of = |name, on, value: Number| Figure { name, on, value: value.0 };
    match event {
        LoggedEvent::Minibatch { step, loss, rate, .. } => {
            let rate = of("learning_rate", None, *rate);
            Some((*step, vec![of("loss", Some("training"), *loss), rate]))
        }
        LoggedEvent::Evaluation { kind, step, result, .. } => {
            let on = Some(if *kind == EvaluationKind::Test { "test" } else { "validation" });
            let metrics = result.metrics.iter().map(|(name, value)| of(name.as_str(), on, *value));
            Some((*step, std::iter::once(of("loss", on, result.loss)).chain(metrics).collect()))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run_dir::LogLine;
    use serde_json::json;

    #[test]
    fn evaluations_have_what_a_model_measures() {
        let found = |kind: &str| {
            let line = json!({ "event": "evaluation", "task": "a", "kind": kind, "step": 3, "loss": 0.5, "metrics": { "accuracy": 0.75 } });
            let line: LogLine = serde_json::from_value(line).unwrap();
            let named = |figure: &Figure<'_>| (figure.name.to_owned(), figure.on, figure.value);
            let (step, figures) = figures(&line.event).unwrap();
            (step, figures.iter().map(named).collect::<Vec<_>>())
        };
        let expected =
            |on| (3, vec![("loss".to_owned(), Some(on), 0.5), ("accuracy".to_owned(), Some(on), 0.75)]);
        assert_eq!((found("periodic"), found("test")), (expected("validation"), expected("test")));
        assert!(figures(&LoggedEvent::Stopping).is_none());
    }
}
