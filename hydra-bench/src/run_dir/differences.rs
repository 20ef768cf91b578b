//! The settings in which tasks differ, beside batch size and learning rate, which have columns of their own.

use serde_json::Value;
use std::collections::BTreeMap;

/// The settings of a configuration's `training` by their names, as in flags.
fn settings(config: &Value) -> BTreeMap<String, &Value> {
    let fields = config["training"].as_object().into_iter().flatten();
    let named = fields.flat_map(|(name, value)| match value.as_object() {
        Some(parts) => parts
            .iter()
            .map(|(part, value)| match part.as_str() {
                // What an optimizer or a schedule is called.
                "name" | "kind" => (name.clone(), value),
                _ => (part.clone(), value),
            })
            .collect(),
        None => vec![(name.clone(), value)],
    });
    named.filter(|(name, _)| !matches!(name.as_str(), "batch" | "lr")).collect()
}

/// Of each configuration the settings that not all of them have; nothing if there is none.
pub(super) fn differences(configs: &[&Value]) -> Option<Vec<String>> {
    let all: Vec<BTreeMap<String, &Value>> = configs.iter().map(|config| settings(config)).collect();
    let is_common =
        |name: &str, value: &Value| all.iter().all(|of| of.get(name).is_some_and(|other| *other == value));
    let own = |of: &BTreeMap<String, &Value>| {
        let own = of.iter().filter(|(name, value)| !value.is_null() && !is_common(name, value));
        own.map(|(name, value)| format!("{name} {}", shown(value))).collect::<Vec<_>>().join(", ")
    };
    let own: Vec<String> = all.iter().map(own).collect();
    own.iter().any(|text| !text.is_empty()).then_some(own)
}

fn shown(value: &Value) -> String {
    match (value.as_str(), value.as_f64()) {
        (Some(text), _) => text.to_owned(),
        (_, Some(number)) if value.is_f64() && (number != 0.0 && number.abs() < 1e-2) => {
            format!("{number:e}")
        }
        _ => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn tasks_show_what_not_all_of_them_have() {
        let config = |lr: f64, decay: f64, schedule: Value, clip: Value| {
            let optimizer = json!({ "name": "adamw", "lr": lr, "weight_decay": decay });
            let training =
                json!({ "batch": 8, "seed": 0, "optimizer": optimizer, "schedule": schedule, "clip": clip });
            json!({ "batch": 8, "lr": lr, "training": training })
        };
        let constant = json!({ "kind": "constant", "warmup": 0 });
        let wsd = json!({ "kind": "wsd", "warmup": 0, "decay_steps": 20 });
        let tasks = [
            config(1e-3, 0.0, constant.clone(), Value::Null),
            config(1e-4, 0.001, wsd, json!(0.5)),
            json!({ "batch": 8, "lr": 1e-3 }),
        ];
        let of = |tasks: &[Value]| differences(&tasks.iter().collect::<Vec<_>>());
        let found = of(&tasks[..2]).unwrap();
        assert_eq!(
            found,
            [
                "schedule constant, weight_decay 0.0",
                "clip 0.5, decay_steps 20, schedule wsd, weight_decay 1e-3"
            ]
        );
        assert_eq!(of(&tasks[..1]), None);
        let rates =
            [config(1e-3, 0.0, constant.clone(), Value::Null), config(1e-4, 0.0, constant, Value::Null)];
        assert_eq!(of(&rates), None, "they have columns");
        assert_eq!(of(&[tasks[2].clone(), tasks[2].clone()]), None);
    }
}
