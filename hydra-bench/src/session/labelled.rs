//! Reads texts with labels for a sequence classifier.

use super::splits::{
    NAMES, Splits, context_of, note_of_cut, note_of_parts, note_of_truncated, note_of_unread, note_of_unused,
    notes_of_unread,
};
use crate::settings::{ModelSettings, TaskName};
use crate::terminal::Usage;
use anyhow::{Context as _, Result};
use hydra_models::ModelError;
use hydra_models::data::{
    Column, Content as _, InputRows, LabelForm, LabelledFiles, LabelledTexts, LossOn, Split, unlabelled,
};
use hydra_models::family::{Classes, Labels, Model, Reads, TaskType};
use hydra_models::lora::AdapterDir;
use hydra_models::objective::ProblemType;
use hydra_models::tokenizer::Tokenizer;
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
        let columns = spec.columns.clone();
        Ok(Self { tokenizer, vocabulary, positions, context, columns, problem, adapter: None })
    }

    /// Takes the classes from these adapters of a classifier, if they name them: data may have some of them.
    pub(super) fn take_classes(&mut self, adapter: AdapterDir) {
        self.adapter = Some(adapter);
    }

    /// The model's number of each of the labels' names. The model becomes a classifier of the adapters' classes or, without
    /// adapters, of the labels'.
    fn numbers(&self, labels: &Labels, model: &mut dyn Model) -> Result<Vec<i32>, ModelError> {
        let of_adapter = self.adapter.as_ref().and_then(|adapter| Some((adapter, adapter.classes()?)));
        let Some((adapter, classes)) = of_adapter else { return model.classify(labels) };
        model.classify(&Labels { names: classes.names(), ..*labels })?;
        classes.numbers_of(&labels.names).ok_or_else(|| ModelError::Classes {
            model: adapter.file(),
            expected: classes.names(),
            found: labels.names.clone(),
        })
    }

    /// Makes the model the classifier that its files and the adapters are, without labels of data, and returns its labels. The
    /// problem type is the given one, or that of the head; several outputs of an unknown meaning are classes.
    pub(super) fn as_trained(&self, model: &mut dyn Model) -> Result<Labels> {
        let head = model.head().filter(|head| head.is_classifier());
        let own = head.map(|head| head.classes().names());
        let of_adapter = |adapter: &AdapterDir| {
            let counted = || adapter.outputs().map(Classes::numbered);
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
        let known = self.problem.or_else(|| self.adapter.as_ref()?.problem());
        let problem = known.unwrap_or(match names.len() {
            1 => ProblemType::Regression,
            _ => ProblemType::SingleLabelClassification,
        });
        let labels = Labels { problem, names };
        model.classify(&labels)?;
        Ok(labels)
    }

    /// Reads rows to classify for a model that [is a classifier](Self::as_trained).
    pub(super) fn rows(&self, rows: &InputRows, model: &dyn Model) -> Result<(LabelledTexts, Vec<String>)> {
        let form = LabelForm {
            tokenizer: &self.tokenizer,
            context: self.context,
            vocabulary: self.vocabulary,
            padding: model.padding(),
            token_types: model.has_token_types(),
            numbers: &[],
            outputs: model.classes().map_or(0, |classes| classes.count()),
        };
        let texts = unlabelled(rows, &form)?;
        let (name, cut) = (rows.path().display().to_string(), texts.cut_by(self.context));
        let cut = note_of_truncated((&name, "text"), cut, "", self.context, self.positions);
        // Adapters have the weights of the head that the model's files do not have.
        let of_model = model.notes().into_iter().filter(|_| self.adapter.is_none());
        let of_model = of_model.map(|note| format!("note: {note}"));
        Ok((texts, cut.into_iter().chain(of_model).collect()))
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
        Ok(LabelledFiles::open(Path::new(data), &self.columns, self.problem)?)
    }

    /// Reads splits for a model, which becomes a classifier of the data's labels.
    pub(super) fn read(
        &self,
        source: &LabelledFiles,
        splits: &[Split],
        model: &mut dyn Model,
    ) -> Result<Splits> {
        let labels = source.labels();
        let numbers = self
            .numbers(labels, model)
            .with_context(|| format!("the labels of `{}` do not fit the model", source.name()))?;
        let form = LabelForm {
            tokenizer: &self.tokenizer,
            context: self.context,
            vocabulary: self.vocabulary,
            padding: model.padding(),
            token_types: model.has_token_types(),
            numbers: &numbers,
            outputs: model.classes().map_or(0, |classes| classes.count()),
        };
        let read = source.splits(splits, &form)?;
        let name = source.name();
        let unread: Vec<String> =
            source.unread().iter().map(|path| format!("`{}`", path.display())).collect();
        let notes = [
            Some(note_of_labels(name, labels.problem, &labels.names)),
            note_of_parts(name, source.held_out()),
            note_of_unread(name, &unread),
            note_of_unused(name, &read.tally.unused),
            note_of_cut(name, &read, self.context, self.positions),
        ];
        let of_model = model.notes().into_iter().map(|note| format!("note: {note}"));
        let of_folders = notes_of_unread(name, source.unread_in_folders(), ".txt");
        let notes = notes.into_iter().flatten().chain(of_folders).chain(of_model);
        Ok(Splits {
            notes: notes.collect(),
            context: Some(read.context),
            items: read.items,
            splits: read.splits,
            references: Vec::new(),
        })
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
    let classes = format!("{} classes: {}{more}", names.len(), some.join(", "));
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
