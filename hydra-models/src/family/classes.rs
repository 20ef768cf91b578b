//! The classes of a classifier, as in its configuration.

use crate::ModelError;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::path::Path;

/// The classes in a Transformers `config.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Classes {
    /// Class names by number.
    pub id2label: Map<String, Value>,
    /// Class numbers by name.
    pub label2id: Map<String, Value>,
}

impl Default for Classes {
    fn default() -> Self {
        Self::numbered(2)
    }
}

impl Classes {
    /// This many classes with Transformers' default names, such as `LABEL_0`.
    pub fn numbered(count: usize) -> Self {
        let name = |class: usize| format!("LABEL_{class}");
        let names = (0..count).map(|class| (class.to_string(), json!(name(class))));
        Self {
            id2label: names.collect(),
            label2id: (0..count).map(|class| (name(class), json!(class))).collect(),
        }
    }

    /// Classes of these names, numbered in order.
    pub fn named(names: &[String]) -> Self {
        let numbered = || names.iter().enumerate();
        Self {
            id2label: numbered().map(|(class, name)| (class.to_string(), json!(name))).collect(),
            label2id: numbered().map(|(class, name)| (name.clone(), json!(class))).collect(),
        }
    }

    /// The number of classes.
    pub fn count(&self) -> usize {
        self.id2label.len()
    }

    /// The class names by number; a class without a name is named by its number.
    pub fn names(&self) -> Vec<String> {
        let name = |class: usize| {
            let number = class.to_string();
            self.id2label.get(&number).and_then(Value::as_str).map(str::to_owned).unwrap_or(number)
        };
        (0..self.count()).map(name).collect()
    }

    /// Returns whether all classes have Transformers' default names.
    pub fn are_unnamed(&self) -> bool {
        self.id2label == Self::numbered(self.count()).id2label
    }

    /// The numbers of the classes of these names, if all exist; or the integers themselves, if all names are numbers of classes,
    /// as in Transformers; for other names of unnamed classes, the numbers in order if the count matches.
    pub fn numbers_of(&self, names: &[String]) -> Option<Vec<i32>> {
        let (known, count) = (self.names(), self.count() as i32);
        let number = |name: &String| known.iter().position(|known| known == name).map(|at| at as i32);
        let integer = |name: &String| {
            name.parse().ok().filter(|class: &i32| (0..count).contains(class) && class.to_string() == *name)
        };
        let all =
            |number: &dyn Fn(&String) -> Option<i32>| names.iter().map(number).collect::<Option<Vec<i32>>>();
        let unnamed = self.are_unnamed() && names.len() == self.count();
        all(&number).or_else(|| all(&integer)).or_else(|| unnamed.then(|| (0..count).collect()))
    }

    /// The numbers of a dataset's classes. A model without a directory takes these classes; the weights of a directory
    /// determine its own.
    ///
    /// # Errors
    /// Classes that the weights do not have.
    pub(crate) fn number(
        &mut self,
        directory: Option<&Path>,
        names: &[String],
    ) -> Result<Vec<i32>, ModelError> {
        let numbers: Vec<i32> = match directory {
            None => (0..names.len() as i32).collect(),
            Some(directory) => self.numbers_of(names).ok_or_else(|| ModelError::Classes {
                model: directory.to_owned(),
                expected: self.names(),
                found: names.to_vec(),
            })?,
        };
        let in_order = numbers.iter().copied().eq(0..self.count() as i32);
        if directory.is_none() || self.are_unnamed() && in_order {
            *self = Self::named(names);
        }
        Ok(numbers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_have_names_and_numbers() {
        let classes = Classes::numbered(3);
        assert_eq!((classes.count(), &classes.label2id["LABEL_2"]), (3, &json!(2)));
        assert!(classes.are_unnamed());
        let names: Vec<String> = ["owl", "cat"].map(str::to_owned).into();
        let named = Classes::named(&names);
        assert!(!named.are_unnamed() && named.names() == names && named.label2id["cat"] == 1);
        assert_eq!(named.numbers_of(&["cat".to_owned()]), Some(vec![1]));
        assert_eq!(named.numbers_of(&["dog".to_owned()]), None);
        let numbers = |classes: &Classes, names: &[&str]| {
            classes.numbers_of(&names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>())
        };
        assert_eq!(numbers(&named, &["1"]), Some(vec![1]), "an integer is a class's number");
        assert_eq!(
            (numbers(&named, &["2"]), numbers(&named, &["01"]), numbers(&named, &["1", "owl"])),
            (None, None, None)
        );
        assert_eq!((numbers(&classes, &["2"]), numbers(&classes, &["3"])), (Some(vec![2]), None));
        assert_eq!(numbers(&classes, &["1", "2", "3"]), Some(vec![0, 1, 2]), "names in their order");
        let mut cats = Classes::numbered(2);
        cats.id2label.insert("0".to_owned(), json!("cat"));
        assert!(!cats.are_unnamed());
        cats.id2label.insert("7".to_owned(), json!("far"));
        assert_eq!(cats.names(), ["cat", "LABEL_1", "2"], "a number without a name is its own");
    }

    #[test]
    fn a_name_that_the_weights_do_not_have_is_refused_with_the_directory() {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let mut classes = Classes::named(&names(&["owl", "cat"]));
        let directory = Path::new("a/model");
        assert_eq!(classes.number(Some(directory), &names(&["cat", "owl"])).unwrap(), [1, 0]);
        let said = classes.number(Some(directory), &names(&["fox"])).unwrap_err().to_string();
        assert!(said.contains("a/model") && said.contains("fox") && said.contains("owl, cat"), "{said}");
        assert_eq!(classes.number(None, &names(&["fox"])).unwrap(), [0]);
        assert_eq!(classes.names(), ["fox"]);
    }
}
