//! Rows of token ids, with labels and masks.

use super::record::{Fields, Record, kind};
use super::tally::Tally;
use serde_json::Value;

/// The label that excludes a token from the loss, as in Transformers.
const NOT_LEARNED: i64 = -100;

/// Loss masks.
const MASKS: [&str; 2] = ["completion_mask", "assistant_masks"];

/// Reads a row of token ids. As in TRL, `labels` selects the loss targets, otherwise all masks combined do. Padding
/// according to `attention_mask` is dropped.
pub(super) fn read(row: &mut Fields, tally: &mut Tally) -> Result<Record, String> {
    let ids = whole(row.required("input_ids")?, "input_ids")?;
    if ids.is_empty() {
        return Err("`input_ids` is empty".to_owned());
    }
    let mut learned = vec![true; ids.len()];
    if let Some(labels) = row.take("labels") {
        learned = of_labels(&ids, whole(labels, "labels")?)?;
        tally.mask("labels");
    } else {
        for name in MASKS {
            let Some(mask) = row.take(name) else { continue };
            let mask = bits(mask, name, ids.len())?;
            learned.iter_mut().zip(mask).for_each(|(learned, bit)| *learned &= bit);
            tally.mask(name);
        }
    }
    let id = |id: &i64| u32::try_from(*id).map_err(|_| format!("{id} in `input_ids` is not a token id"));
    let ids = ids.iter().map(id).collect::<Result<Vec<u32>, _>>()?;
    let real = match row.take("attention_mask") {
        Some(mask) => real(&bits(mask, "attention_mask", ids.len())?)?,
        None => 0..ids.len(),
    };
    if let Some(positions) = row.take("position_ids") {
        check_positions(&whole(positions, "position_ids")?, &real, ids.len())?;
    }
    Ok(Record::Tokens { ids: ids[real.clone()].to_vec(), learned: learned[real].to_vec() })
}

fn whole(value: Value, name: &str) -> Result<Vec<i64>, String> {
    let Value::Array(list) = value else {
        return Err(format!("`{name}` must be a list of integers, found {}", kind(&value)));
    };
    let number = |value: &Value| {
        let wrong = || format!("`{name}` must be a list of integers, but contains {}", kind(value));
        value.as_i64().ok_or_else(wrong)
    };
    list.iter().map(number).collect()
}

/// Reads a mask of this many tokens.
fn bits(value: Value, name: &str, tokens: usize) -> Result<Vec<bool>, String> {
    let Value::Array(list) = value else {
        return Err(format!("`{name}` must be a list of zeros and ones, found {}", kind(&value)));
    };
    if list.len() != tokens {
        return Err(format!("`{name}` has {} entries for {tokens} tokens", list.len()));
    }
    let bit = |value: &Value| match (value.as_i64(), value) {
        (Some(0), _) | (_, Value::Bool(false)) => Ok(false),
        (Some(1), _) | (_, Value::Bool(true)) => Ok(true),
        _ => Err(format!("`{name}` must be a list of zeros and ones, but contains {value}")),
    };
    list.iter().map(bit).collect()
}

/// The tokens whose label is their own id.
fn of_labels(ids: &[i64], labels: Vec<i64>) -> Result<Vec<bool>, String> {
    if labels.len() != ids.len() {
        return Err(format!("`labels` has {} entries for {} tokens", labels.len(), ids.len()));
    }
    if let Some(at) = (0..ids.len()).find(|&at| labels[at] != ids[at] && labels[at] != NOT_LEARNED) {
        let (label, id) = (labels[at], ids[at]);
        return Err(format!("label {label} of token {id}: expected the token's own id or {NOT_LEARNED}"));
    }
    Ok(labels.iter().map(|label| *label != NOT_LEARNED).collect())
}

/// The range of tokens without padding at either end.
fn real(mask: &[bool]) -> Result<std::ops::Range<usize>, String> {
    let Some(first) = mask.iter().position(|bit| *bit) else { return Ok(0..0) };
    let end = mask.len() - mask.iter().rev().take_while(|bit| !**bit).count();
    match mask[first..end].iter().position(|bit| !bit) {
        None => Ok(first..end),
        Some(at) => Err(format!(
            "`attention_mask` has a zero between ones at token {}: padding is supported at either end only",
            first + at + 1
        )),
    }
}

/// Rejects positions that do not count from zero.
fn check_positions(positions: &[i64], real: &std::ops::Range<usize>, tokens: usize) -> Result<(), String> {
    if positions.len() != tokens {
        return Err(format!("`position_ids` has {} entries for {tokens} tokens", positions.len()));
    }
    match (0..).zip(&positions[real.clone()]).find(|(at, position)| at != *position) {
        None => Ok(()),
        Some((at, position)) => Err(format!(
            "`position_ids` has {position} where {at} is expected: put each example in its own row, without `position_ids`"
        )),
    }
}
