//! Reads texts with labels for a sequence classifier.

use super::pairs::padding_of;
use super::splits::{
    NAMES, Splits, context_of, note_of_cut, note_of_parts, note_of_truncated, note_of_unread, note_of_unused,
    notes_of_head, notes_of_model, notes_of_unread,
};
use crate::settings::{ModelSettings, TaskName};
use crate::terminal::Usage;
use anyhow::{Context as _, Result};
use hydra_models::ModelError;
use hydra_models::data::{
    Column, Content as _, InputRows, LabelForm, LabelledFiles, LabelledTexts, LossOn, Split, unlabelled,
};
use hydra_models::family::{Classes, HeadConfig, Labels, Model, Reads, TaskType};
use hydra_models::lora::AdapterDir;
use hydra_models::objective::ProblemType;
use hydra_models::tokenizer::{Conventions, Tokenizer};
use std::path::Path;

/// The task of a model with these settings: the given one, or that of the model's head.
pub(super) fn task_type(model: &dyn Model, spec: &ModelSettings) -> Result<TaskType, Usage> {
    let own = model.task_type();
    let (name, problem) = (spec.name(), spec.problem_type.is_some());
    let task = match (spec.task, own) {
        (Some(TaskName::Classify), TaskType::ImageClassification) | (None, _) => own,
        (Some(TaskName::Classify), _) => TaskType::SequenceClassification,
        (Some(TaskName::Reward), TaskType::CausalLm | TaskType::SequenceClassification) => {
            TaskType::SequenceClassification
        }
        (Some(TaskName::Reward), _) => {
            return Err(Usage::new(format!(
                "--task reward trains a model of texts, and `{name}` reads images: pass another --model"
            )));
        }
        (Some(TaskName::Lm | TaskName::Preference), TaskType::CausalLm) => own,
        (Some(task @ (TaskName::Lm | TaskName::Preference)), _) => {
            let task = if task == TaskName::Lm { "lm" } else { "preference" };
            return Err(Usage::new(format!(
                "--task {task} trains a language model, and `{name}` has no language model head: omit --task, or pass a --model that \
                 has one"
            )));
        }
    };
    if spec.task.is_some_and(TaskName::reads_pairs) && problem {
        return Err(Usage::new("--problem-type applies to classifiers of texts: omit it"));
    }
    match (task, problem) {
        (TaskType::CausalLm, true) => {
            Err(Usage::new("--problem-type applies to classifiers of texts: pass --task classify too"))
        }
        (TaskType::ImageClassification, true) => {
            Err(Usage::new(format!("--problem-type applies to texts, and `{name}` reads images: omit it")))
        }
        _ => Ok(task),
    }
}

/// Reads texts with labels.
pub(super) struct LabelReader {
    pub(super) tokenizer: Tokenizer,
    vocabulary: usize,
    positions: usize,
    context: usize,
    columns: Vec<Column>,
    /// What the labels are: the given type, or that of a trained head.
    problem: Option<ProblemType>,
    /// What the configuration of a head that is not trained states they are.
    configured: Option<ProblemType>,
    /// The names of the model's classes, if its head is trained or its configuration names them.
    classes: Vec<String>,
    /// The adapters whose classes the head has.
    adapter: Option<AdapterDir>,
}

impl LabelReader {
    /// The reader of a model that [reads](Model::reads) tokens.
    pub(super) fn new(model: &dyn Model, tokenizer: Tokenizer, spec: &ModelSettings) -> Result<Self> {
        let Reads::Tokens { positions, vocabulary } = model.reads() else {
            anyhow::bail!("`{}` does not read texts", spec.name());
        };
        check(spec)?;
        let context = context_of(positions, spec.context)?.example;
        let head = model.head().filter(|head| head.is_classifier());
        let problem = spec.problem_type.or_else(|| head?.determined_problem());
        let configured = model.head().and_then(HeadConfig::named_problem);
        let classes = head.map(HeadConfig::classes).or_else(|| model.head()?.named_classes());
        let classes = classes.as_ref().map(Classes::names).unwrap_or_default();
        let columns = spec.columns.clone();
        let adapter = None;
        Ok(Self { tokenizer, vocabulary, positions, context, columns, problem, configured, classes, adapter })
    }

    /// Takes the classes from these adapters of a classifier, if they name them: data may have some of them.
    pub(super) fn take_classes(&mut self, adapter: AdapterDir) {
        self.classes = adapter.classes().map(Classes::names).unwrap_or_default();
        self.adapter = Some(adapter);
    }

    /// The labels of lists of zeros and ones: each place is that of a class of the model, if it has classes.
    fn placed(&self, labels: &Labels, model: &dyn Model) -> Result<Labels, ModelError> {
        let trained = || Some((model.directory()?.to_owned(), model.head()?.classes()));
        let trained = model.head().filter(|head| head.is_classifier()).and_then(|_| trained());
        let of_adapter = |adapter: &AdapterDir| Some((adapter.file(), adapter.classes()?.clone()));
        let count = labels.names.len();
        let classes = match self.adapter.as_ref().and_then(of_adapter).or(trained) {
            Some((model, classes)) if classes.count() != count => {
                let (expected, found) = (classes.names(), labels.names.clone());
                return Err(ModelError::Classes { model, expected, found });
            }
            Some((_, classes)) => Some(classes),
            None => {
                let named = model.head().and_then(HeadConfig::named_classes);
                named.filter(|classes| classes.count() == count)
            }
        };
        Ok(classes.map_or_else(|| labels.clone(), |classes| Labels { names: classes.names(), ..*labels }))
    }

    /// The model's number of each of the labels' names. The model becomes a classifier of the adapters' classes or, without
    /// adapters, of the labels'.
    fn numbers(&self, labels: &Labels, model: &mut dyn Model) -> Result<Vec<i32>, ModelError> {
        let of_adapter = self.adapter.as_ref().and_then(|adapter| Some((adapter, adapter.classes()?)));
        let Some((adapter, classes)) = of_adapter else {
            let named = model.head().and_then(HeadConfig::named_classes);
            let outputs = self.adapter.as_ref().and_then(AdapterDir::outputs);
            if outputs.is_some_and(|outputs| named.is_some_and(|named| named.count() != outputs)) {
                forget_classes(model);
            }
            return model.classify(labels);
        };
        forget_classes(model);
        model.classify(&Labels { names: classes.names(), ..*labels })?;
        classes.numbers_of(&labels.names).ok_or_else(|| ModelError::Classes {
            model: adapter.file(),
            expected: classes.names(),
            found: labels.names.clone(),
        })
    }

    /// Gives a new head of a decoder the padding token of the tokenizer, or its end of texts, so that Transformers reads batches.
    fn pad(&self, model: &mut dyn Model) -> Result<()> {
        if model.padding().is_none() && model.head().is_some_and(|head| !head.is_classifier()) {
            let conventions = Conventions::load(&self.tokenizer, model.directory())?;
            padding_of(&conventions, self.vocabulary).into_iter().for_each(|id| model.set_padding(id));
        }
        Ok(())
    }

    /// Makes the model the classifier that its files and the adapters are, without labels of data, and returns its labels. The
    /// problem type is the given one, or that of the head; several outputs of an unknown meaning are classes.
    pub(super) fn as_trained(&self, model: &mut dyn Model) -> Result<Labels> {
        let head = model.head().filter(|head| head.is_classifier());
        let own = head.map(|head| head.classes().names());
        let named = model.head().and_then(HeadConfig::named_classes);
        let of_adapter = |adapter: &AdapterDir| {
            let counted = || {
                let outputs = adapter.outputs()?;
                let named = named.clone().filter(|classes| classes.count() == outputs);
                Some(named.unwrap_or_else(|| Classes::numbered(outputs)))
            };
            adapter.classes().cloned().or_else(|| if own.is_none() { counted() } else { None })
        };
        let names = self.adapter.as_ref().and_then(of_adapter).map(|classes| classes.names()).or(own);
        let names = names.with_context(|| {
            let place = model
                .directory()
                .map_or_else(|| "the model".to_owned(), |dir| format!("`{}`", dir.display()));
            format!(
                "{place} has no classifier: pass a model that is one, or --adapter with the adapters of one"
            )
        })?;
        let known = self.problem.or_else(|| self.adapter.as_ref()?.problem()).or(self.configured);
        if self.adapter.as_ref().is_some_and(|adapter| adapter.classes().is_some()) {
            forget_classes(model);
        }
        self.pad(model)?;
        let problem = known.unwrap_or(match names.len() {
            1 => ProblemType::Regression,
            _ => ProblemType::SingleLabelClassification,
        });
        let labels = Labels { problem, names };
        model.classify(&labels)?;
        Ok(labels)
    }

    /// The form of the data for a model, which has these numbers of the data's labels.
    fn form<'a>(&'a self, model: &dyn Model, numbers: &'a [i32]) -> LabelForm<'a> {
        LabelForm {
            tokenizer: &self.tokenizer,
            context: self.context,
            vocabulary: self.vocabulary,
            padding: model.padding(),
            token_types: model.has_token_types(),
            numbers,
            outputs: model.classes().map_or(0, |classes| classes.count()),
        }
    }

    /// Reads rows to classify for a model that [is a classifier](Self::as_trained).
    pub(super) fn rows(&self, rows: &InputRows, model: &dyn Model) -> Result<(LabelledTexts, Vec<String>)> {
        let texts = unlabelled(rows, &self.form(model, &[]))?;
        let (name, cut) = (rows.path().display().to_string(), texts.cut_by(self.context));
        let cut = note_of_truncated((&name, "text"), cut, "", self.context, self.positions);
        // Adapters have the weights of the head that the model's files do not have.
        let of_model: Vec<String> = match self.adapter {
            Some(_) => notes_of_head(model).collect(),
            None => notes_of_model(model).collect(),
        };
        Ok((texts, cut.into_iter().chain(of_model).collect()))
    }

    /// The note on labels that are taken to be classes of other names: numbers of named classes, or names of unnamed ones. A
    /// trained head had the classes `before`.
    fn note_of_names(
        data: &str,
        (labels, numbers): (&Labels, &[i32]),
        before: Option<Classes>,
        model: &dyn Model,
    ) -> Option<String> {
        let classes = before.or_else(|| model.classes())?;
        let names = classes.names();
        let of = |number: &i32| usize::try_from(*number).ok().and_then(|class| names.get(class));
        let are_equal = labels.names.iter().eq(numbers.iter().filter_map(of));
        if are_equal || labels.problem == ProblemType::Regression {
            return None;
        }
        let some = |names: Vec<String>| {
            let more = if names.len() > NAMES { ", .." } else { "" };
            let names: Vec<String> = names.iter().take(NAMES).map(|name| format!("`{name}`")).collect();
            names.join(", ") + more
        };
        let are_numbers = labels.names.iter().zip(numbers).all(|(name, number)| *name == number.to_string());
        match (are_numbers, classes.are_unnamed()) {
            (true, true) => None,
            (true, false) => {
                let names = numbers.iter().filter_map(of).cloned().collect();
                Some(format!(
                    "note: the labels of `{data}` are numbers of the model's classes: {}",
                    some(names)
                ))
            }
            (false, _) => Some(format!(
                "note: the model does not name its classes: they are taken to be {}, in this order",
                some(labels.names.clone())
            )),
        }
    }

    /// The note on classes that neither the adapters nor the model's configuration names.
    fn note_of_guess(&self, labels: &Labels, model: &dyn Model) -> Option<String> {
        let unnamed = |adapter: &&AdapterDir| adapter.classes().is_none() && adapter.outputs().is_some();
        let adapter = self.adapter.as_ref().filter(unnamed)?;
        let of_data = model.head().is_some_and(HeadConfig::has_classes_of_data);
        (of_data && labels.problem != ProblemType::Regression).then(|| {
            format!(
                "note: `{}` does not name the classes of its head: they are taken to be those of the data, in this order",
                adapter.file().display()
            )
        })
    }

    /// Opens rows with labels.
    pub(super) fn open(&self, data: &str) -> Result<LabelledFiles> {
        if data == "builtin" {
            return Err(Usage::new(
                "a classifier of texts needs texts with labels, and the built-in text has none: pass --data FILE.csv, .tsv, .jsonl \
                 or .parquet with the columns `text` and `label`, or a directory with a folder of .txt files for each class",
            )
            .into());
        }
        let open = |problem| LabelledFiles::open(Path::new(data), &self.columns, problem, &self.classes);
        let of_adapter = self.adapter.as_ref().and_then(AdapterDir::problem);
        match self.configured.filter(|_| self.problem.or(of_adapter).is_none()) {
            // Labels that do not fit the configuration are what they are without it, which a note states.
            Some(configured) => Ok(open(Some(configured)).or_else(|_| open(None))?),
            None => Ok(open(self.problem)?),
        }
    }

    /// Reads splits for a model, which becomes a classifier of the data's labels.
    pub(super) fn read(
        &self,
        source: &LabelledFiles,
        splits: &[Split],
        model: &mut dyn Model,
    ) -> Result<Splits> {
        let unfit = || format!("the labels of `{}` do not fit the model", source.name());
        let labels = match source.have_indicators() {
            true => &self.placed(source.labels(), model).with_context(unfit)?,
            false => source.labels(),
        };
        let before = model.head().filter(|head| head.is_classifier()).map(HeadConfig::classes);
        self.pad(model)?;
        let numbers = self.numbers(labels, model).with_context(unfit)?;
        let read = source.splits(splits, &self.form(model, &numbers))?;
        let name = source.name();
        let notes = [
            Some(note_of_labels(name, labels.problem, &labels.names)),
            source.have_indicators().then(|| note_of_indicators(name)),
            note_of_parts(name, source.held_out()),
            note_of_unread(name, source.unread()),
            note_of_unused(name, &read.tally.unused),
            note_of_cut(name, &read, self.context, self.positions),
            self.note_of_guess(labels, model),
            Self::note_of_names(name, (labels, &numbers), before, model),
        ];
        let lacking = source.lacking().into_iter().map(|(split, class)| note_of_lacking(name, split, class));
        let of_folders = notes_of_unread(name, source.unread_in_folders(), ".txt");
        let notes = notes.into_iter().flatten().chain(lacking).chain(of_folders).chain(notes_of_model(model));
        Ok(Splits {
            notes: notes.collect(),
            context: Some(read.context),
            items: read.items,
            splits: read.splits,
            references: Vec::new(),
        })
    }
}

/// Makes a head that is not trained forget the classes of its configuration, because adapters name their own.
fn forget_classes(model: &mut dyn Model) {
    if let Some(head) = model.head_mut().filter(|head| !head.is_classifier()) {
        head.id2label = None;
    }
}

/// Refuses settings that apply to language models only.
fn check(spec: &ModelSettings) -> Result<(), Usage> {
    let given = [("--pack", spec.pack), ("--loss-on", spec.loss_on != LossOn::default())];
    match given.into_iter().find(|(_, given)| *given) {
        Some((flag, _)) => Err(Usage::new(format!(
            "{flag} applies to language models, and a classifier of texts is trained: omit it"
        ))),
        None => Ok(()),
    }
}

/// The note on what the labels are taken for.
fn note_of_labels(name: &str, problem: ProblemType, names: &[String]) -> String {
    let some: Vec<String> = names.iter().take(NAMES).map(|name| format!("`{name}`")).collect();
    let more = if names.len() > NAMES { ", .." } else { "" };
    let ending = if names.len() == 1 { "" } else { "es" };
    let classes = format!("{} class{ending}: {}{more}", names.len(), some.join(", "));
    match problem {
        ProblemType::Regression if names.len() == 1 => {
            format!("note: the labels of `{name}` are numbers: regression (mean squared error)")
        }
        ProblemType::Regression => {
            format!(
                "note: the labels of `{name}` are {} numbers each: regression (mean squared error)",
                names.len()
            )
        }
        ProblemType::SingleLabelClassification => {
            format!("note: the labels of `{name}` are {classes}; each text has one")
        }
        ProblemType::MultiLabelClassification => {
            format!("note: the labels of `{name}` are {classes}; a text can have several")
        }
    }
}

fn note_of_indicators(name: &str) -> String {
    format!(
        "note: the labels of `{name}` are lists of zeros and ones: each number states whether the text has the class"
    )
}

fn note_of_lacking(name: &str, split: Split, class: &str) -> String {
    format!(
        "note: the {split} split of `{name}`, which is cut off the end of the file, has no row of the class `{class}`: shuffle the rows if they are \
         sorted"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use hydra_models::family;
    use serde_json::{Value, json};
    use std::fs;
    use tempfile::TempDir;

    /// Reads texts with these labels for a base with these keys in its configuration: the head that they make, and the notes
    /// in which a text occurs.
    fn read_with(keys: Value, labels: &[&str], of: &str) -> (HeadConfig, Vec<String>) {
        let dir = TempDir::new().unwrap();
        let mut config = json!({
            "model_type": "gpt2", "vocab_size": 256, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2,
            "architectures": ["GPT2LMHeadModel"],
        });
        config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        let [file, data] = ["model.json", "data.jsonl"].map(|name| dir.path().join(name));
        fs::write(&file, config.to_string()).unwrap();
        let rows =
            labels.iter().cycle().take(20).map(|label| format!("{{\"text\": \"a\", \"label\": {label}}}\n"));
        fs::write(&data, rows.collect::<String>()).unwrap();
        let mut model = family::load(file.to_str().unwrap()).unwrap();
        let spec: ModelSettings = crate::settings::flags::defaults();
        let reader = LabelReader::new(model.as_ref(), Tokenizer::Bytes, &spec).unwrap();
        let source = reader.open(data.to_str().unwrap()).unwrap();
        let read = reader.read(&source, &[Split::Train], model.as_mut()).unwrap();
        let notes = read.notes.into_iter().filter(|note| note.contains(of)).collect();
        (model.head().unwrap().clone(), notes)
    }

    /// The same: the classes and the problem type of the head, and the notes on its configuration.
    fn read(keys: Value, labels: &[&str]) -> (Vec<String>, ProblemType, Vec<String>) {
        let (head, notes) = read_with(keys, labels, "configuration");
        (head.classes().names(), head.problem(), notes)
    }

    #[test]
    fn labels_of_other_names_than_the_classes_are_noted() {
        let two = json!({"id2label": {"0": "pos", "1": "neg"}});
        let (head, notes) = read_with(two, &["1", "0"], "numbers of");
        let note = "are numbers of the model's classes: `pos`, `neg`";
        assert!(head.classes().names() == ["pos", "neg"] && notes[0].ends_with(note), "{notes:?}");
        assert_eq!(head.padding(), Some(0), "the end of texts of bytes");
        let (head, notes) =
            read_with(json!({"pad_token_id": 7}), &["[0, 1, 1]", "[1, 0, 0]"], "zeros and ones");
        assert_eq!((head.outputs(), head.padding(), notes.len()), (3, Some(7), 1));
        let three = json!({"id2label": {"0": "1", "1": "0", "2": "x"}});
        let lists = ["[0, 1, 1]", "[1, 0, 0]"];
        let (head, notes) = read_with(three, &lists, "numbers of");
        assert!(head.classes().names() == ["1", "0", "x"] && notes.is_empty(), "{notes:?}");
        let five = json!({"id2label": {"0": "a", "1": "b", "2": "c", "3": "d", "4": "e"}});
        let (head, notes) = read_with(five, &lists, "`id2label`");
        assert_eq!((head.outputs(), notes.len()), (3, 1), "a new head of the data");
        let sorted = [&["0"; 12][..], &["1"; 8]].concat();
        let (_, notes) = read_with(json!({}), &sorted, "no row of the class");
        assert!(notes.len() == 2 && notes[0].contains("the validation split of"), "{notes:?}");
        assert!(
            notes[1].contains("the test split of") && notes[1].contains("the class `0`: shuffle"),
            "{notes:?}"
        );

        let model = family::load("bytes-tiny").unwrap();
        let labels = |names: [&str; 2]| Labels {
            problem: ProblemType::SingleLabelClassification,
            names: names.map(str::to_owned).into(),
        };
        let note = |names| {
            let before = Some(Classes::numbered(2));
            LabelReader::note_of_names("d", (&labels(names), &[0, 1]), before, model.as_ref())
        };
        assert_eq!([note(["0", "1"]), note(["LABEL_0", "LABEL_1"])], [None, None]);
        let guessed = note(["bad", "good"]).unwrap();
        assert!(
            guessed.contains("does not name its classes: they are taken to be `bad`, `good`"),
            "{guessed}"
        );
    }

    #[test]
    fn a_new_head_takes_what_its_configuration_says_if_the_labels_fit() {
        let (pos, neg) = (r#""pos""#, r#""neg""#);
        let names = |names: [&str; 2]| names.map(str::to_owned).to_vec();
        let two = json!({"id2label": {"0": "pos", "1": "neg"}});
        let single = ProblemType::SingleLabelClassification;
        assert_eq!(read(two.clone(), &[neg, pos]), (names(["pos", "neg"]), single, vec![]));
        let (classes, problem, notes) = read(two, &[neg, r#""other""#]);
        assert_eq!((classes, problem, notes.len()), (names(["neg", "other"]), single, 1));
        assert!(
            notes[0].starts_with("note: `id2label` of the model's configuration is not used"),
            "{notes:?}"
        );
        let several = json!({"problem_type": "multi_label_classification"});
        let multi = ProblemType::MultiLabelClassification;
        assert_eq!(read(several, &[neg, pos]), (names(["neg", "pos"]), multi, vec![]));
        let (_, problem, notes) = read(json!({"problem_type": "regression"}), &[neg, pos]);
        assert_eq!((problem, notes.len()), (single, 1));
        assert!(
            notes[0].starts_with("note: `problem_type` of the model's configuration is not"),
            "{notes:?}"
        );
    }
}
