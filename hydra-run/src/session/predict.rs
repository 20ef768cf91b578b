//! Predictions: the outputs of a model for rows, as fields that are added to the rows.

use anyhow::{Result, ensure};
use hydra_models::family::Labels;
use hydra_models::objective::ProblemType;
use serde_json::{Map, Number, Value, json};

/// What the outputs of a model mean.
pub enum Predicts {
    /// The outputs of a classifier of texts, one for each label.
    Labels(Labels),
    /// The mean loss of a language model over this many tokens of each row. A row without such tokens has no outputs.
    Tokens(Vec<usize>),
}

impl Predicts {
    /// The names of the fields.
    pub fn names(&self) -> &'static [&'static str] {
        match self {
            Self::Labels(Labels { problem: ProblemType::Regression, .. }) => &["prediction"],
            Self::Labels(_) => &["prediction", "probabilities"],
            Self::Tokens(_) => &["logprob", "tokens", "perplexity"],
        }
    }

    /// The fields of each row, given the outputs of all items.
    pub fn fields(&self, outputs: &[f32]) -> Result<Vec<Map<String, Value>>> {
        if let Some(at) = outputs.iter().position(|output| !output.is_finite()) {
            anyhow::bail!("the model gives {} instead of a finite output: check its weights", outputs[at]);
        }
        let values: Vec<Vec<Value>> = match self {
            Self::Labels(labels) => {
                outputs.chunks(labels.names.len()).map(|row| of_row(labels, row)).collect()
            }
            Self::Tokens(targets) => {
                let mut outputs = outputs.iter();
                let mut row = |tokens: &usize| match tokens {
                    0 => None,
                    _ => outputs.next().map(|loss| of_text(f64::from(*loss), *tokens)),
                };
                let none = || vec![Value::Null, json!(0), Value::Null];
                let rows = targets.iter().map(|tokens| row(tokens).unwrap_or_else(none)).collect();
                ensure!(outputs.next().is_none(), "the model gave more outputs than the rows have texts");
                rows
            }
        };
        let names = self.names();
        let named = |row: Vec<Value>| names.iter().map(|name| (*name).to_owned()).zip(row).collect();
        Ok(values.into_iter().map(named).collect())
    }
}

/// The values of a classifier's row. They are computed in `f64` on the host, in the order of the labels.
fn of_row(labels: &Labels, outputs: &[f32]) -> Vec<Value> {
    let outputs: Vec<f64> = outputs.iter().map(|output| f64::from(*output)).collect();
    let named = |values: Vec<f64>| -> Value {
        Value::Object(labels.names.iter().cloned().zip(values.into_iter().map(number)).collect())
    };
    match labels.problem {
        ProblemType::Regression => match outputs.as_slice() {
            [one] => vec![number(*one)],
            _ => vec![named(outputs)],
        },
        ProblemType::SingleLabelClassification => {
            let best =
                (0..outputs.len()).fold(0, |best, at| if outputs[at] > outputs[best] { at } else { best });
            let powers: Vec<f64> = outputs.iter().map(|output| (output - outputs[best]).exp()).collect();
            let sum: f64 = powers.iter().sum();
            vec![json!(labels.names[best]), named(powers.iter().map(|power| power / sum).collect())]
        }
        ProblemType::MultiLabelClassification => {
            let predicted = labels.names.iter().zip(&outputs).filter(|(_, output)| **output > 0.0);
            let predicted: Vec<&String> = predicted.map(|(name, _)| name).collect();
            vec![
                json!(predicted),
                named(outputs.iter().map(|output| 1.0 / (1.0 + (-output).exp())).collect()),
            ]
        }
    }
}

/// The values of a text with a mean loss over some tokens.
fn of_text(loss: f64, tokens: usize) -> Vec<Value> {
    vec![number(-loss * tokens as f64), json!(tokens), number(loss.exp())]
}

/// A number; `null` if it is infinite, as the perplexity of a very large loss is.
fn number(value: f64) -> Value {
    Number::from_f64(value).map_or(Value::Null, Value::Number)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(problem: ProblemType, names: &[&str]) -> Predicts {
        Predicts::Labels(Labels { problem, names: names.iter().map(|name| (*name).to_owned()).collect() })
    }

    fn fields(predicts: &Predicts, outputs: &[f32]) -> Vec<Value> {
        predicts.fields(outputs).unwrap().into_iter().map(Value::Object).collect()
    }

    #[test]
    fn outputs_are_classes_with_probabilities_or_numbers() {
        let ln3 = 3_f32.ln();
        let rows =
            fields(&labels(ProblemType::SingleLabelClassification, &["a", "b"]), &[0.0, ln3, 7.0, 7.0]);
        assert_eq!((&rows[0]["prediction"], &rows[1]["prediction"]), (&json!("b"), &json!("a")));
        let probability = |row: usize, name: &str| rows[row]["probabilities"][name].as_f64().unwrap();
        assert!((probability(0, "b") - 0.75).abs() < 1e-7 && (probability(0, "a") - 0.25).abs() < 1e-7);
        assert_eq!((probability(1, "a"), probability(1, "b")), (0.5, 0.5), "the first of equal classes");
        let large = fields(&labels(ProblemType::SingleLabelClassification, &["a", "b"]), &[1e4, -1e4]);
        assert_eq!(large[0]["probabilities"], json!({"a": 1.0, "b": 0.0}));
        let rows = fields(&labels(ProblemType::MultiLabelClassification, &["a", "b", "c"]), &[ln3, 0.0, 2.0]);
        assert_eq!(rows[0]["prediction"], json!(["a", "c"]));
        assert_eq!(rows[0]["probabilities"]["b"], 0.5);
        assert!((rows[0]["probabilities"]["a"].as_f64().unwrap() - 0.75).abs() < 1e-7);
        let rows = fields(&labels(ProblemType::Regression, &["x"]), &[0.5, -2.0]);
        assert_eq!(rows, [json!({"prediction": 0.5}), json!({"prediction": -2.0})]);
        let rows = fields(&labels(ProblemType::Regression, &["x", "y"]), &[0.5, -2.0]);
        assert_eq!(rows, [json!({"prediction": {"x": 0.5, "y": -2.0}})]);
    }

    #[test]
    fn texts_without_tokens_have_no_probability() {
        let rows = fields(&Predicts::Tokens(vec![3, 0, 2]), &[0.5, 1.0]);
        let expected = json!({"logprob": -1.5, "tokens": 3, "perplexity": 0.5_f64.exp()});
        assert_eq!((&rows[0], rows[2]["logprob"].as_f64()), (&expected, Some(-2.0)));
        assert_eq!(rows[1], json!({"logprob": null, "tokens": 0, "perplexity": null}));
        assert!(Predicts::Tokens(vec![1]).fields(&[f32::NAN]).is_err());
        assert!(Predicts::Tokens(vec![1]).fields(&[1.0, 1.0]).is_err());
    }
}
