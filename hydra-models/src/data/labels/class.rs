//! What the labels of all rows mean: classes or numbers.

use super::label::{Entry, Label};
use crate::data::examples::RecordOrigin;
use crate::data::{DataError, Split};
use crate::objective::{Labels, ProblemType};
use std::collections::{BTreeMap, BTreeSet};

/// A label and its position.
#[derive(Clone, Copy)]
pub(super) struct Located<'a> {
    pub(super) origin: RecordOrigin<'a>,
    pub(super) field: &'static str,
    pub(super) label: &'a Label,
    /// Whether the label is a cell of a text table.
    pub(super) is_cell: bool,
}

/// The label of a row as indices of the data's [`Labels`], or as numbers.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Target {
    /// The class.
    Class(u32),
    /// The classes, in ascending order.
    Classes(Vec<u32>),
    /// The numbers.
    Numbers(Vec<f32>),
}

/// The labels of each split.
type BySplit<'a> = [Vec<Located<'a>>; 3];

/// The meaning of all labels.
#[derive(Debug)]
pub(super) struct Meaning {
    /// The problem and the names of the classes.
    pub(super) labels: Labels,
    /// The targets of each split.
    pub(super) targets: [Vec<Target>; 3],
    /// Whether each label is a list of zeros and ones, one for each class.
    pub(super) indicators: bool,
}

/// The meaning of the labels: `problem`, or what their form states. The classes are those of the training data, and in other
/// splits also the `classes` of the model.
///
/// # Errors
/// A label that does not fit the problem or that neither the training data nor the model has, or training data of one class.
pub(super) fn resolve(
    name: &str,
    splits: &BySplit<'_>,
    problem: Option<ProblemType>,
    classes: &[String],
) -> Result<Meaning, DataError> {
    let multi_label = ProblemType::MultiLabelClassification;
    if problem.is_none_or(|problem| problem == multi_label)
        && let Some(count) = indicated(splits)
    {
        let names = (0..count).map(|class| format!("LABEL_{class}")).collect();
        let targets = each(splits, |label| Ok(label.indicated()))?;
        return Meaning { labels: Labels { problem: multi_label, names }, targets, indicators: true }
            .checked(name);
    }
    // The labels are those of the training data, or of the first split if there is none.
    let known = splits.iter().find(|split| !split.is_empty()).map_or(&[][..], Vec::as_slice);
    let labels = match problem.unwrap_or_else(|| inferred(splits)) {
        ProblemType::Regression => {
            let numbers = known.first().map_or(0, |first| first.entries().len());
            let names = (0..numbers).map(|number| format!("LABEL_{number}")).collect();
            let labels = Labels { problem: ProblemType::Regression, names };
            let targets =
                each(splits, |label| label.numbers(numbers, problem.is_some()).map(Target::Numbers))?;
            return Ok(Meaning { labels, targets, indicators: false });
        }
        problem => Labels { problem, names: class_names(splits, known, problem, classes)? },
    };
    let numbers: BTreeMap<&str, u32> = labels.names.iter().map(String::as_str).zip(0..).collect();
    let single = labels.problem == ProblemType::SingleLabelClassification;
    let targets = each(splits, |label| {
        let classes = label.classes(&numbers)?;
        Ok(if single { Target::Class(classes[0]) } else { Target::Classes(classes) })
    })?;
    Meaning { labels, targets, indicators: false }.checked(name)
}

impl Meaning {
    /// Refuses training data of one class.
    fn checked(self, name: &str) -> Result<Self, DataError> {
        let Self { labels, targets: [train, ..], .. } = &self;
        let is_constant = !train.is_empty() && train.iter().all(|target| *target == train[0]);
        if !is_constant && !labels.names.is_empty() {
            return Ok(self);
        }
        let all = &labels.names;
        let classes = match (self.indicators, &train[..]) {
            (true, [Target::Classes(classes), ..]) => {
                classes.iter().map(|class| all[*class as usize].clone()).collect()
            }
            _ => all.clone(),
        };
        Err(DataError::OneClass { name: name.to_owned(), classes })
    }
}

/// The number of classes if all labels are lists of as many zeros and ones, at least two: the form in which Transformers takes
/// several labels. (As lists of classes they would all be equal.)
fn indicated(splits: &BySplit<'_>) -> Option<usize> {
    let mut labels = splits.iter().flatten();
    let count = labels.clone().next()?.entries().len();
    let is_indicator = |entry: &Entry| matches!(entry.number(false), Some(0.0 | 1.0));
    let fits = |located: &Located<'_>| {
        let entries = located.entries();
        matches!(located.label, Label::List(_)) && entries.len() == count && entries.iter().all(is_indicator)
    };
    (count > 1 && labels.all(fits)).then_some(count)
}

/// The problem of labels of this form: numbers with fractions are a regression, lists are several classes for each item.
fn inferred(splits: &BySplit<'_>) -> ProblemType {
    let mut labels = splits.iter().flatten().map(|located| located.label);
    let is_fraction = |entry: &Entry| matches!(entry, Entry::Fraction(_));
    if labels.clone().any(|label| label.entries().iter().any(is_fraction)) {
        return ProblemType::Regression;
    }
    match labels.any(|label| matches!(label, Label::List(_))) {
        true => ProblemType::MultiLabelClassification,
        false => ProblemType::SingleLabelClassification,
    }
}

/// The names of all classes in `known`, sorted: integers by value, other names by text. If all are names of the model's classes, or
/// all are their numbers, those that other splits have are added. The labels of all splits are checked to be classes.
fn class_names(
    splits: &BySplit<'_>,
    known: &[Located<'_>],
    problem: ProblemType,
    of_model: &[String],
) -> Result<Vec<String>, DataError> {
    let integers = |entry: &Entry| matches!(entry, Entry::Integer(_) | Entry::Fraction(_));
    let all_numbers = splits
        .iter()
        .flatten()
        .flat_map(Located::entries)
        .all(|entry| integers(entry) || entry.is_not_finite());
    for located in splits.iter().flatten() {
        located.check_classes(problem, all_numbers)?;
    }
    let mut names: BTreeSet<String> =
        known.iter().flat_map(Located::entries).filter_map(Entry::class).collect();
    let numbers: Vec<String> = (0..of_model.len()).map(|class| class.to_string()).collect();
    let is_of = |classes: &[String]| names.iter().all(|name| classes.contains(name));
    if let Some(classes) = [of_model, &numbers].into_iter().find(|classes| is_of(classes)) {
        let all = splits.iter().flatten().flat_map(Located::entries).filter_map(Entry::class);
        names.extend(all.filter(|name| classes.contains(name)));
    }
    let mut names: Vec<String> = names.into_iter().collect();
    let integer = |name: &String| name.parse::<i64>().ok().filter(|integer| integer.to_string() == *name);
    if names.iter().all(|name| integer(name).is_some()) {
        names.sort_by_key(integer);
    }
    Ok(names)
}

/// Converts every label.
fn each(
    splits: &BySplit<'_>,
    target: impl Fn(&Located<'_>) -> Result<Target, DataError>,
) -> Result<[Vec<Target>; 3], DataError> {
    Split::try_each(splits.each_ref(), |split| split.iter().map(&target).collect())
}

impl<'a> Located<'a> {
    /// The classes or numbers of the label.
    fn entries(&self) -> &'a [Entry] {
        self.label.entries()
    }

    fn wrong(&self, found: String) -> DataError {
        self.origin.wrong(format!("`{}` {found}", self.field))
    }

    /// Rejects what is not a class. If all labels are numbers, so are those that are not finite.
    fn check_classes(&self, problem: ProblemType, all_numbers: bool) -> Result<(), DataError> {
        if problem == ProblemType::SingleLabelClassification && matches!(self.label, Label::List(_)) {
            let advice = "write one name or integer, or train a multi-label classification";
            return Err(self.wrong(format!("is a list, expected one class: {advice}")));
        }
        let mut entries = self.entries().iter();
        match entries.find(|entry| entry.class().is_none() || all_numbers && entry.is_not_finite()) {
            None => Ok(()),
            Some(entry) if entry.is_not_finite() => Err(self.not_finite(entry)),
            Some(entry) => Err(self.wrong(format!(
                "is {}, expected a class: write a name or an integer, or train a regression",
                entry.shown()
            ))),
        }
    }

    fn not_finite(&self, entry: &Entry) -> DataError {
        self.wrong(format!("is {}, expected a finite number: correct or remove the row", entry.shown()))
    }

    /// The classes whose places in the list have a one.
    fn indicated(&self) -> Target {
        let ones = (0..).zip(self.entries()).filter(|(_, entry)| entry.number(false) == Some(1.0));
        Target::Classes(ones.map(|(class, _)| class).collect())
    }

    /// The indices of the classes, in ascending order; each class once.
    fn classes(&self, numbers: &BTreeMap<&str, u32>) -> Result<Vec<u32>, DataError> {
        let mut classes = BTreeSet::new();
        for entry in self.entries() {
            let class = entry.class().unwrap_or_default();
            let Some(number) = numbers.get(class.as_str()) else {
                return Err(self.unknown(class, numbers));
            };
            if !classes.insert(*number) {
                let advice = "name each class of the row once; lists of zeros and ones have one number for each class, as many in \
                              each row";
                return Err(self.wrong(format!("has {} twice: {advice}", entry.shown())));
            }
        }
        Ok(classes.into_iter().collect())
    }

    fn unknown(&self, label: String, numbers: &BTreeMap<&str, u32>) -> DataError {
        let mut known: Vec<(&str, u32)> = numbers.iter().map(|(name, number)| (*name, *number)).collect();
        known.sort_by_key(|(_, number)| *number);
        DataError::LabelUnknown {
            path: self.origin.path.to_owned(),
            place: self.origin.place,
            field: self.field,
            label,
            known: known.into_iter().map(|(name, _)| name.to_owned()).collect(),
        }
    }

    /// The numbers, `count` of them. `is_given` states that the user asked for a regression.
    fn numbers(&self, count: usize, is_given: bool) -> Result<Vec<f32>, DataError> {
        let entries = self.entries();
        if entries.is_empty() || entries.len() != count {
            return Err(self.wrong(format!(
                "has {} numbers, expected {} as in the first row",
                entries.len(),
                count.max(1)
            )));
        }
        let number = |entry: &Entry| {
            let number = entry.number(self.is_cell).ok_or_else(|| {
                let advice = match is_given {
                    true => "correct it, or train a classification",
                    false => "the labels of other rows have fractions, so all must be numbers",
                };
                self.wrong(format!("is {}, expected a number: {advice}", entry.shown()))
            })?;
            // Labels are 32-bit numbers.
            Some(number as f32).filter(|number| number.is_finite()).ok_or_else(|| self.not_finite(entry))
        };
        entries.iter().map(number).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::RowPosition;
    use ProblemType::{MultiLabelClassification, Regression, SingleLabelClassification};
    use serde_json::{Value, json};
    use std::path::Path;

    /// Resolves the labels of training rows and of test rows, which stand in the lines from 2 on.
    fn of(
        train: Value,
        test: Value,
        problem: Option<ProblemType>,
        is_cell: bool,
    ) -> Result<(Labels, [Vec<Target>; 3]), String> {
        let read = |rows: Value| -> Vec<Label> {
            let rows = rows.as_array().unwrap().clone();
            rows.into_iter().map(|row| Label::read("label", row, is_cell).unwrap()).collect()
        };
        let (train, test) = (read(train), read(test));
        let path = Path::new("a.csv");
        let locate = |(line, label)| {
            let origin = RecordOrigin { path, place: RowPosition::Line(line) };
            Located { origin, field: "label", label, is_cell }
        };
        let [train, test] = [&train, &test].map(|labels| (2..).zip(labels).map(locate).collect());
        let classes = ["a", "b", "m"].map(str::to_owned);
        let found = resolve("data", &[train, Vec::new(), test], problem, &classes);
        found.map(|Meaning { labels, targets, .. }| (labels, targets)).map_err(|error| error.to_string())
    }

    fn names(train: Value) -> (ProblemType, String) {
        let (labels, _) = of(train, json!([]), None, false).unwrap();
        (labels.problem, labels.names.join(" "))
    }

    fn refused(train: Value, test: Value, problem: Option<ProblemType>, is_cell: bool) -> String {
        of(train, test, problem, is_cell).map(|found| format!("{found:?}")).unwrap_err()
    }

    #[test]
    fn the_form_of_the_labels_decides_the_problem() {
        let (single, multi) = (SingleLabelClassification, MultiLabelClassification);
        for (train, problem, expected) in [
            (json!([10, 9, 10, -1]), single, "-1 9 10"),
            (json!(["10", "9"]), single, "9 10"),
            (json!(["pos", "neg", "neu"]), single, "neg neu pos"),
            (json!(["b", 10, 9]), single, "10 9 b"),
            (json!([true, false]), single, "false true"),
            (json!([["b", "a"], [], ["c"]]), multi, "a b c"),
            (json!([[10, 2], [3]]), multi, "2 3 10"),
            (json!([[1], 2]), multi, "1 2"),
            (json!([[0, 1, 0], [1, 1, 0]]), multi, "LABEL_0 LABEL_1 LABEL_2"),
            (json!([[0.0, 1.0], [1.0, 0.0]]), multi, "LABEL_0 LABEL_1"),
            (json!([1, 0.5]), Regression, "LABEL_0"),
            (json!([1.0, 2.0]), Regression, "LABEL_0"),
            (json!([[0.5, 1], [2, 3]]), Regression, "LABEL_0 LABEL_1"),
        ] {
            assert_eq!(names(train.clone()), (problem, expected.to_owned()), "{train}");
        }
        let (labels, _) = of(json!([1, 2]), json!([0.5]), None, false).unwrap();
        assert_eq!(labels.problem, Regression, "the labels of all splits decide");
    }

    #[test]
    fn a_given_problem_reads_labels_in_its_way() {
        let given = |train: Value, problem| {
            let (labels, [train, ..]) = of(train, json!([]), Some(problem), false).unwrap();
            (labels.names.join(" "), train)
        };
        let numbers = |numbers: &[f32]| Target::Numbers(numbers.to_vec());
        let regression = given(json!([3, -1]), Regression);
        assert_eq!(regression, ("LABEL_0".to_owned(), vec![numbers(&[3.0]), numbers(&[-1.0])]));
        let several = given(json!(["b", "a"]), MultiLabelClassification);
        assert_eq!(several, ("a b".to_owned(), vec![Target::Classes(vec![1]), Target::Classes(vec![0])]));
        let floats = given(json!([1.0, 0]), SingleLabelClassification);
        assert_eq!(floats, ("0 1".to_owned(), vec![Target::Class(1), Target::Class(0)]));
    }

    #[test]
    fn cells_of_a_table_are_numbers_where_they_look_like_one() {
        let (labels, [train, _, test]) = of(json!(["0.5", "007"]), json!(["+1"]), None, true).unwrap();
        assert_eq!(labels.problem, Regression);
        assert_eq!([&train[1], &test[0]], [&Target::Numbers(vec![7.0]), &Target::Numbers(vec![1.0])]);
        let (labels, _) = of(json!(["7", "007"]), json!([]), None, true).unwrap();
        assert_eq!(labels.names, ["007", "7"], "different texts are different classes");
    }

    #[test]
    fn classes_are_those_of_the_training_data() {
        let (labels, [train, _, test]) =
            of(json!([["b"], ["a", "c"]]), json!([["c", "b"]]), None, false).unwrap();
        assert_eq!(labels.names, ["a", "b", "c"]);
        assert_eq!(
            [&train[0], &train[1], &test[0]].map(Target::clone),
            [vec![1], vec![0, 2], vec![1, 2]].map(Target::Classes)
        );
        let error = refused(json!(["b", "a"]), json!(["a", "c"]), None, false);
        assert!(
            error.contains("line 3 of `a.csv`: `label` is `c`") && error.contains("only `a`, `b`"),
            "{error}"
        );
        let (labels, [.., test]) = of(json!(["b", "a"]), json!(["m"]), None, false).unwrap();
        assert_eq!(
            (labels.names.join(" "), test),
            ("a b m".to_owned(), vec![Target::Class(2)]),
            "the model's class"
        );
        let (labels, _) = of(json!([0, 2]), json!([1]), None, false).unwrap();
        assert_eq!(labels.names, ["0", "1", "2"], "a number of the model's classes");
        for (train, test) in
            [(json!(["b", "c"]), json!(["m"])), (json!(["b", "a"]), json!([1])), (json!([5, 6]), json!([1]))]
        {
            let error = refused(train, test, None, false);
            assert!(error.contains("which no training row has"), "{error}");
        }
        let (_, [train, _, test]) =
            of(json!([[0, 1, 1], [1, 0, 0]]), json!([[0, 0, 0]]), None, false).unwrap();
        assert_eq!(
            [&train[0], &train[1], &test[0]].map(Target::clone),
            [vec![1, 2], vec![0], vec![]].map(Target::Classes),
            "zeros and ones"
        );
        let numbers = of(json!([[0, 1], [1, 0]]), json!([]), Some(Regression), false).unwrap();
        assert_eq!(numbers.1[0][1], Target::Numbers(vec![1.0, 0.0]));
        let (labels, _) = of(json!([]), json!(["x"]), None, false).unwrap();
        assert_eq!(labels.names, ["x"], "data without a training split has the classes of the test split");
    }

    #[test]
    fn training_rows_of_one_class_are_refused() {
        for (train, found) in [
            (json!(["x", "x"]), "has the label `x`"),
            (json!([1]), "has the label `1`"),
            (json!([["a", "b"], ["b", "a"]]), "has the label `a`, `b`"),
            (json!([[], []]), "has the label none"),
            (json!([[0, 1], [0, 1]]), "has the label `LABEL_1`"),
        ] {
            let error = refused(train, json!([]), None, false);
            assert!(error.contains("every training row of `data`") && error.contains(found), "{error}");
        }
        assert!(of(json!([0.5, 0.5]), json!([]), None, false).is_ok());
    }

    #[test]
    fn a_label_that_does_not_fit_is_named() {
        let (single, multi) = (Some(SingleLabelClassification), Some(MultiLabelClassification));
        for (train, problem, is_cell, line, found) in [
            (json!([0, 0.5]), single, false, 3, "is 0.5, expected a class"),
            (json!(["a", "0.5"]), single, true, 3, "is 0.5, expected a class"),
            (json!([["a"], [1.5]]), multi, false, 3, "is 1.5, expected a class"),
            (json!([["a"], "b"]), single, false, 2, "is a list, expected one class"),
            (
                json!([0.5, "good"]),
                None,
                false,
                3,
                "is `good`, expected a number: the labels of other rows have fractions",
            ),
            (json!(["0.5", "good"]), None, true, 3, "is `good`, expected a number"),
            (json!(["1", "2"]), Some(Regression), false, 2, "is `1`, expected a number: correct it"),
            (json!([1, true]), Some(Regression), false, 3, "is `true`, expected a number"),
            (json!(["0.5", "nan"]), None, true, 3, "is `nan`, expected a finite number"),
            (json!(["1", "inf"]), None, true, 3, "is `inf`, expected a finite number"),
            (json!(["0.5", "1e999"]), None, true, 3, "is `1e999`, expected a finite number"),
            (json!([0.5, 1e39]), None, false, 3, "is 1e39, expected a finite number"),
            (json!([[0.5, 1.0], [0.5]]), None, false, 3, "has 1 numbers, expected 2 as in the first row"),
            (json!([[], [0.5]]), None, false, 2, "has 0 numbers, expected 1"),
            (json!([[0, 1, 0], [1]]), None, false, 2, "has 0 twice: name each class of the row once"),
        ] {
            let error = refused(train.clone(), json!([]), problem, is_cell);
            let place = format!("line {line} of `a.csv`: `label` {found}");
            assert!(error.contains(&place), "{error} for {train}");
        }
        let (labels, _) = of(json!(["inf", "fin"]), json!([]), None, true).unwrap();
        assert_eq!(labels.names, ["fin", "inf"], "names among names");
    }
}
