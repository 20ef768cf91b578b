//! Suggestions for misspelt names.

/// The known name nearest to a misspelt one, if one is near (Jaro-Winkler similarity of 0.8 or more).
pub(crate) fn nearest<'a>(found: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let near = known.into_iter().map(|name| (strsim::jaro_winkler(found, name), name));
    let near = near.filter(|(likeness, _)| *likeness >= 0.8);
    near.max_by(|(a, _), (b, _)| a.total_cmp(b)).map(|(_, name)| name)
}

/// The end of an error message about an unknown name: the nearest known name, or all of them.
pub fn suggestion(found: &str, known: &[&str]) -> String {
    match nearest(found, known.iter().copied()) {
        Some(name) => format!("did you mean `{name}`?"),
        None if known.is_empty() => "there are none".to_owned(),
        None => format!("there are: {}", known.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_near_name_is_suggested_and_a_far_one_is_not() {
        let known = ["batch", "lr", "weight_decay"];
        assert_eq!(nearest("weight-decay", known), Some("weight_decay"));
        assert_eq!(suggestion("bacth", &known), "did you mean `batch`?");
        assert_eq!(suggestion("dropout", &known), "there are: batch, lr, weight_decay");
        assert_eq!(suggestion("dropout", &[]), "there are none");
    }
}
