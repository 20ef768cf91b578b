//! Checks of configurations, common to all families.

use crate::ModelError;
use crate::parts::Activate;
use crate::weights::{in_file, read_json};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use std::ops::RangeInclusive;
use std::path::Path;

/// The maximum number of ids, positions and classes, which are 32-bit.
pub(crate) const MOST_IDS: usize = i32::MAX as usize;

/// The maximum width and number of blocks. They keep the bytes of all parameters and their optimizer state within 64 bits.
pub(crate) const WIDEST: usize = 1 << 20;
pub(crate) const DEEPEST: usize = 1 << 12;

/// The maximum number of stages of a convolutional network.
pub(crate) const MOST_STAGES: usize = 1 << 4;

/// Reads and validates a `config.json`.
///
/// # Errors
/// A file that cannot be read or is not such JSON, or a model that is not supported.
pub(crate) fn read_config<C: DeserializeOwned>(
    path: &Path,
    validate: impl FnOnce(&C) -> Result<(), ModelError>,
) -> Result<C, ModelError> {
    let config: C = read_json(path)?;
    validate(&config).map_err(|source| in_file(path, source))?;
    Ok(config)
}

/// The error for a configuration value.
pub(crate) fn refuse(name: &'static str, found: impl ToString, expected: impl Into<String>) -> ModelError {
    ModelError::Config { name, found: found.to_string(), expected: expected.into() }
}

/// Rejects another `model_type`.
pub(crate) fn check_type(found: &str, expected: &str) -> Result<(), ModelError> {
    match found {
        found if found == expected => Ok(()),
        "" => Err(refuse("model_type", "missing", expected)),
        found => Err(refuse("model_type", found, expected)),
    }
}

/// Rejects weights that are of none of these Transformers classes.
pub(crate) fn check_architectures(found: Option<&[String]>, known: &[&str]) -> Result<(), ModelError> {
    match found {
        Some(found) if !found.is_empty() && !found.iter().any(|a| known.contains(&a.as_str())) => {
            Err(refuse("architectures", found.join(", "), known.join(" or ")))
        }
        _ => Ok(()),
    }
}

/// Rejects quantized weights, by the keys of a configuration.
pub(crate) fn check_not_quantized(keys: &Map<String, Value>) -> Result<(), ModelError> {
    let Some(found) = keys.get(QUANTIZATION).filter(|found| !found.is_null()) else { return Ok(()) };
    let method = found.get("quant_method").and_then(Value::as_str).unwrap_or("an unnamed method");
    let expected = "unquantized weights in F32, F16 or BF16: use the original model";
    Err(refuse(QUANTIZATION, method, expected))
}

/// Accepts matrices that bitsandbytes has quantized to NF4, and rejects other quantized weights, by the keys of a configuration.
pub(crate) fn check_quantization(keys: &Map<String, Value>) -> Result<(), ModelError> {
    let found = keys.get(QUANTIZATION).and_then(Value::as_object);
    let text = |name: &str| found.and_then(|found| found.get(name)).and_then(Value::as_str);
    if text("quant_method") != Some("bitsandbytes") {
        return check_not_quantized(keys);
    }
    // Without a type, bitsandbytes quantizes to FP4.
    let is_4_bit = found.is_some_and(|found| found.get("load_in_4bit") == Some(&Value::Bool(true)));
    match text("bnb_4bit_quant_type").unwrap_or("fp4") {
        "nf4" if is_4_bit => Ok(()),
        found => {
            let found =
                if is_4_bit { format!("bitsandbytes {found}") } else { "bitsandbytes in 8 bits".to_owned() };
            let expected =
                "bitsandbytes nf4, or unquantized weights: quantize the original model with --base nf4";
            Err(refuse(QUANTIZATION, found, expected))
        }
    }
}

/// The key of the configuration of quantized weights.
pub(crate) const QUANTIZATION: &str = "quantization_config";

/// Rejects an activation function that is not supported.
pub(crate) fn check_activation(name: &'static str, found: &str) -> Result<(), ModelError> {
    match Activate::named(found) {
        Some(_) => Ok(()),
        None => Err(refuse(name, found, Activate::NAMES.join(", "))),
    }
}

/// Rejects a size that does not divide the size `whole`, which the key `of` gives.
pub(crate) fn check_divisor(
    (name, part): (&'static str, usize),
    (of, whole): (&str, usize),
) -> Result<(), ModelError> {
    match whole.is_multiple_of(part) {
        true => Ok(()),
        false => Err(refuse(name, part, format!("a divisor of {of} ({whole})"))),
    }
}

/// Rejects sizes of zero and those above the maximum.
pub(crate) fn check_sizes(sizes: &[(&'static str, usize, usize)]) -> Result<(), ModelError> {
    match sizes.iter().find(|(_, size, most)| !(1..=*most).contains(size)) {
        Some((name, 0, _)) => Err(refuse(name, 0, "at least 1")),
        Some((name, size, most)) => Err(refuse(name, size, format!("at most {most}"))),
        None => Ok(()),
    }
}

/// Rejects lists that do not have a size within its bounds for each of the stages, whose number the key `number` gives.
pub(crate) fn check_stages(
    (stages, number): (usize, &str),
    lists: [(&'static str, &[usize], RangeInclusive<usize>); 2],
) -> Result<(), ModelError> {
    for (name, list, bounds) in lists {
        if list.len() != stages {
            let expected = format!("one for each of the {stages} stages ({number})");
            return Err(refuse(name, format!("a list of {}", list.len()), expected));
        }
        if let Some(size) = list.iter().find(|size| !bounds.contains(size)) {
            let expected = format!("numbers from {} to {}", bounds.start(), bounds.end());
            return Err(refuse(name, format!("a list with {size}"), expected));
        }
    }
    Ok(())
}

/// Rejects dropout probabilities outside `[0, 1)`.
pub(crate) fn check_dropouts(dropouts: &[(&'static str, f64)]) -> Result<(), ModelError> {
    match dropouts.iter().find(|(_, p)| !(0.0..1.0).contains(p)) {
        Some((name, found)) => Err(refuse(name, found, "at least 0 and below 1")),
        None => Ok(()),
    }
}

/// Rejects anything except positive numbers.
pub(crate) fn check_positive(numbers: &[(&'static str, f64)]) -> Result<(), ModelError> {
    match numbers.iter().find(|(_, x)| !(x.is_finite() && *x > 0.0)) {
        Some((name, found)) => Err(refuse(name, found, "a number above 0")),
        None => Ok(()),
    }
}

/// Rejects splitting a vocabulary into more parts than it has tokens.
pub(crate) fn check_parts(parts: usize, vocabulary: usize) -> Result<(), ModelError> {
    match (1..=vocabulary).contains(&parts) {
        true => Ok(()),
        false => {
            Err(refuse("vocabulary_parts", parts, format!("between 1 and the model's {vocabulary} tokens")))
        }
    }
}

/// Rejects a split vocabulary of a model without vocabulary tables.
pub(crate) fn check_uncut(parts: usize) -> Result<(), ModelError> {
    let expected = "1: only language models have tables that can be split";
    if parts == 1 { Ok(()) } else { Err(refuse("vocabulary_parts", parts, expected)) }
}
