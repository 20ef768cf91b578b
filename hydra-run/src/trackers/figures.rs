//! The figures in a line of `metrics.jsonl`, which each tracker names in its own way.

use serde_json::Value;

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

/// Returns the figures of a line; none for lines of other kinds.
pub(super) fn figures(line: &Value) -> Vec<Figure<'_>> {
    let of = |name, on, value: &Value| Figure { name, on, value: value.as_f64().unwrap_or(f64::NAN) };
    let on = match (line["event"].as_str(), line["kind"].as_str()) {
        (Some("minibatch"), _) => {
            let rate = of("learning_rate", None, &line["rate"]);
            return vec![of("loss", Some("training"), &line["loss"]), rate];
        }
        (Some("evaluation"), Some("initial" | "periodic" | "validation")) => Some("validation"),
        (Some("evaluation"), Some("test")) => Some("test"),
        _ => return Vec::new(),
    };
    let metrics = line["metrics"].as_object().into_iter().flatten();
    let metrics = metrics.map(|(name, value)| of(name, on, value));
    std::iter::once(of("loss", on, &line["loss"])).chain(metrics).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn evaluations_have_what_a_model_measures() {
        let found = |kind: &str| {
            let line =
                json!({ "event": "evaluation", "kind": kind, "loss": 0.5, "metrics": { "accuracy": 0.75 } });
            let named = |figure: &Figure<'_>| (figure.name.to_owned(), figure.on, figure.value);
            figures(&line).iter().map(named).collect::<Vec<_>>()
        };
        let expected = |on| vec![("loss".to_owned(), Some(on), 0.5), ("accuracy".to_owned(), Some(on), 0.75)];
        assert_eq!((found("periodic"), found("test")), (expected("validation"), expected("test")));
        assert!(found("unheard").is_empty() && figures(&json!({ "event": "end" })).is_empty());
    }
}
