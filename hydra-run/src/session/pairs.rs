//! Reads pairs of a chosen and a rejected answer, for preference losses and reward models.

use super::splits::{
    Splits, context_of, note_of_cut, note_of_merged, note_of_sharegpt, note_of_unread, note_of_unused,
    notes_of_model,
};
use crate::settings::{ModelSettings, TaskName};
use crate::terminal::Usage;
use anyhow::{Context as _, Result};
use hydra_core::{Chain, CoreError};
use hydra_models::data::{
    Column, Content, Cut, LossOn, PairForm, PreferenceFiles, Split, TokenSplits, WithReference,
};
use hydra_models::family::{Labels, Model, Reads};
use hydra_models::objective::{LogProbabilities, Preference, PreferenceLoss, ProblemType, RewardModel};
use hydra_models::tokenizer::{Conventions, Tokenizer};
use std::path::Path;
use std::sync::Arc;

/// The default strength and margin, those of TRL.
const BETA: f64 = 0.1;
const GAMMA: f64 = 0.5;

/// The name of a reward model's only output.
const REWARD: &str = "reward";

/// What pairs are trained for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum PairObjective {
    /// A language model's preferences.
    Preference(Preference),
    /// A reward model.
    Reward,
}

impl PairObjective {
    /// The objective of a spec, if it trains on pairs.
    pub(super) fn of(spec: &ModelSettings) -> Option<Self> {
        match spec.task? {
            TaskName::Preference => Some(Self::Preference(Preference {
                loss: spec.loss.unwrap_or(PreferenceLoss::Dpo),
                beta: spec.beta.unwrap_or(BETA),
                gamma: spec.gamma.unwrap_or(GAMMA),
            })),
            TaskName::Reward => Some(Self::Reward),
            TaskName::Lm | TaskName::Classify => None,
        }
    }

    /// The loss, if it is one of a language model.
    fn loss(self) -> Option<PreferenceLoss> {
        match self {
            Self::Preference(Preference { loss, .. }) => Some(loss),
            Self::Reward => None,
        }
    }

    /// Whether it compares the model with a reference.
    pub(super) fn has_reference(self) -> bool {
        self.loss().is_some_and(PreferenceLoss::has_reference)
    }

    /// The chain of a model with this objective.
    pub(super) fn on(self, chain: Chain) -> Result<Chain, CoreError> {
        match self {
            Self::Preference(preference) => chain.with_objective(preference),
            Self::Reward => chain.with_objective(RewardModel),
        }
    }
}

/// The chain of a language model with the log-probabilities of answers as outputs.
pub(super) fn scoring(chain: Chain) -> Result<Chain, CoreError> {
    chain.with_objective(LogProbabilities)
}

/// Refuses settings of preference losses for other tasks and losses.
pub(super) fn check_settings(spec: &ModelSettings) -> Result<(), Usage> {
    let given =
        [("--loss", spec.loss.is_some()), ("--beta", spec.beta.is_some()), ("--gamma", spec.gamma.is_some())];
    let given = given.into_iter().find(|(_, given)| *given);
    match (spec.task, given, spec.gamma.is_some()) {
        (Some(TaskName::Preference), _, true) if spec.loss != Some(PreferenceLoss::Simpo) => {
            Err(Usage::new("--gamma applies to the loss simpo: pass --loss simpo too, or omit --gamma"))
        }
        (Some(TaskName::Preference), ..) | (_, None, _) => Ok(()),
        (_, Some((flag, _)), _) => Err(Usage::new(format!(
            "{flag} applies to preferences: pass --task preference too, or omit {flag}"
        ))),
    }
}

/// Reads preference data.
pub(crate) struct PairReader {
    pub(super) tokenizer: Tokenizer,
    vocabulary: usize,
    positions: usize,
    context: usize,
    columns: Vec<Column>,
    objective: PairObjective,
}

/// The padding token of a new head: the tokenizer's, or else its end-of-text token, if the vocabulary has it.
pub(super) fn padding_of(conventions: &Conventions, vocabulary: usize) -> Option<u32> {
    let tokens = [conventions.padding, conventions.end];
    tokens.into_iter().flatten().find(|id| (*id as usize) < vocabulary)
}

impl PairReader {
    /// The reader of a model that [reads](Model::reads) tokens.
    pub(super) fn new(model: &dyn Model, tokenizer: Tokenizer, spec: &ModelSettings) -> Result<Self> {
        let (Reads::Tokens { positions, vocabulary }, Some(objective)) =
            (model.reads(), PairObjective::of(spec))
        else {
            anyhow::bail!("`{}` is not trained on pairs of texts", spec.name());
        };
        let given = [("--pack", spec.pack), ("--loss-on", spec.loss_on != LossOn::default())];
        if let Some((flag, _)) = given.into_iter().find(|(_, given)| *given) {
            return Err(Usage::new(format!(
                "{flag} applies to --task lm, and pairs of answers are trained on: omit it"
            ))
            .into());
        }
        if model.has_token_types() {
            return Err(Usage::new(format!(
                "--task reward reads texts without token types, and `{}` has them: pass another --model, or train it with \
                 --task classify",
                spec.name()
            ))
            .into());
        }
        let context = context_of(positions, spec.context)?.example;
        let columns = spec.columns.clone();
        Ok(Self { tokenizer, vocabulary, positions, context, columns, objective })
    }

    /// Opens rows of preference data.
    pub(super) fn open(&self, data: &str) -> Result<PreferenceFiles> {
        if data == "builtin" {
            return Err(Usage::new(
                "preferences need pairs of answers, and the built-in text has none: pass --data FILE.jsonl, .json, .csv, .tsv or \
                 .parquet with the columns `prompt`, `chosen` and `rejected`, or `prompt`, `completion` and `label` for --loss kto",
            )
            .into());
        }
        Ok(PreferenceFiles::open(Path::new(data), &self.columns, self.objective.loss())?)
    }

    /// Reads splits for a model. For a reward model, it becomes a classifier with one number.
    pub(super) fn read(
        &self,
        source: &PreferenceFiles,
        splits: &[Split],
        model: &mut dyn Model,
    ) -> Result<Splits> {
        let conventions = Conventions::load(&self.tokenizer, model.directory())?;
        if self.objective == PairObjective::Reward {
            // As in TRL, the tokenizer's padding token is not read, or the end of a text where there is none.
            padding_of(&conventions, self.vocabulary).into_iter().for_each(|id| model.set_padding(id));
            let labels = Labels { problem: ProblemType::Regression, names: vec![REWARD.to_owned()] };
            model.classify(&labels).context("the model cannot become a reward model")?;
        }
        let form = PairForm {
            tokenizer: &self.tokenizer,
            conventions: &conventions,
            context: self.context,
            vocabulary: self.vocabulary,
            loss: self.objective.loss(),
            padding: model.padding(),
        };
        let read = source.splits(splits, &form)?;
        let notes = self.notes(source, &read).chain(notes_of_model(model)).collect();
        let TokenSplits { splits, context, items, .. } = read;
        let references: Vec<Arc<WithReference>> = match self.objective.has_reference() {
            true => splits.iter().map(|split| Arc::new(WithReference::new(Arc::clone(split)))).collect(),
            false => Vec::new(),
        };
        let splits = match references.is_empty() {
            true => splits,
            false => references.iter().map(|split| Arc::clone(split) as Arc<dyn Content>).collect(),
        };
        Ok(Splits { splits, context: Some(context), items, notes, references })
    }

    /// The notes on what is not used and what is decided.
    fn notes(&self, source: &PreferenceFiles, read: &TokenSplits) -> impl Iterator<Item = String> + use<> {
        let name = source.name();
        let cut = match self.objective {
            PairObjective::Preference(_) => {
                let cut = TokenSplits { skipped: 0, ..read.clone() };
                note_of_cut(name, &cut, self.context, self.positions)
            }
            // Nothing is truncated.
            PairObjective::Reward => None,
        };
        let notes = [
            note_of_unread(name, source.unread()),
            note_of_unused(name, &read.tally.unused),
            note_of_sharegpt(name, read.tally.sharegpt),
            note_of_merged(name, read.tally.merged),
            note_of_skipped(name, read, self.objective, [self.context, self.positions]),
            cut,
            note_of_equal(name, read),
        ];
        notes.into_iter().flatten().chain(read.tally.remarks.notes())
    }
}

/// The note on pairs whose texts are equal within the context.
fn note_of_equal(name: &str, read: &TokenSplits) -> Option<String> {
    let (equal, items) = (read.unlearned, read.items);
    (equal > 0).then(|| {
        format!("note: the texts of {equal} {items} of `{name}` are equal in their tokens: they are trained on and prefer nothing")
    })
}

/// The note on items that the context leaves out.
fn note_of_skipped(
    name: &str,
    read: &TokenSplits,
    objective: PairObjective,
    [context, positions]: [usize; 2],
) -> Option<String> {
    let (Cut { longest, .. }, skipped, items) = (read.cut, read.skipped, read.items);
    let why = match objective {
        PairObjective::Preference(_) => "have an answer that begins beyond the context of",
        PairObjective::Reward => "have a text that is longer than the context of",
    };
    let keeps = match longest <= positions {
        true => format!("--context {longest} keeps all"),
        false => format!("the model has {positions} positions, and the longest text {longest} tokens"),
    };
    (skipped > 0).then(|| {
        format!(
            "note: {skipped} {items} of `{name}` {why} {context} tokens and are left out, as in TRL: {keeps}"
        )
    })
}
