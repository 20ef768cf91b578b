//! Texts that tasks generate at their evaluations: continuations of sample prompts, and answers to the validation rows, with
//! their metrics.

use super::generation::{Asked, Given, Prompts, Reading, Request, prompts_of};
use super::model::Model;
use crate::control::TextMetric;
use crate::settings::{AdapterSettings, TEXT_METRICS, TrainingSettings};
use crate::terminal::Usage;
use anyhow::{Result, bail};
use hydra_core::{ByteSize, Chain, Dataset, Metric, Rounds};
use hydra_models::generation::{Ended, Generated, Judged, Sequences};
use hydra_models::metrics::{exact_match, rouge_l};
use serde_json::json;
use std::error::Error;
use std::sync::Arc;

/// The new tokens of a sequence, if neither the settings nor longer references ask for more.
const NEW_TOKENS: usize = 64;

/// The sequences that the tasks of a model generate at each evaluation.
pub(crate) struct Samples {
    request: Request,
    judge: Arc<Judge>,
    /// The largest key-value cache of a task.
    cache_bytes: u64,
}

/// What generated texts are compared with.
struct Judge {
    reading: Arc<Reading>,
    /// The prompts of the validation rows.
    asked: Vec<String>,
    /// A metric of the embedding program.
    own: Option<TextMetric>,
    /// The texts of the sample prompts, which are the first prompts.
    shown: Vec<String>,
    /// The answers of the validation rows, whose prompts follow.
    references: Vec<String>,
}

/// A validation row: its prompt and its answer, as tokens.
struct SampleRow {
    prompt: Vec<u32>,
    answer: Vec<u32>,
}

impl Samples {
    /// The sequences that the settings ask for, if any: those of `--sample-prompts`, and for a metric of [`TEXT_METRICS`] those of
    /// the validation rows.
    ///
    /// # Errors
    /// A model that generates no text, prompts that cannot be read, or rows without a prompt and an answer.
    pub(crate) fn new(
        model: &Model,
        settings: &TrainingSettings,
        validation: Option<&Arc<dyn Dataset>>,
        (cache_bytes, own): (u64, Option<&TextMetric>),
    ) -> Result<Option<Self>> {
        if let Some(own) = own.filter(|own| settings.metric.as_ref() != Some(&own.name)) {
            bail!(Usage::new(format!(
                "the metric is the function `{}`, and the run is selected by {}: pass the function of the run, or none",
                own.name,
                settings.metric.as_deref().unwrap_or("the loss")
            )));
        }
        let metric =
            settings.metric.as_deref().filter(|metric| TEXT_METRICS.contains(metric) || own.is_some());
        let flag = match (metric, &settings.sample_prompts) {
            (Some(metric), _) => format!("--metric {metric}"),
            (None, Some(_)) => "--sample-prompts".to_owned(),
            (None, None) if settings.sample_tokens.is_some() => bail!(Usage::new(
                "--sample-tokens limits the texts that are generated at evaluations: pass --sample-prompts FILE or --metric \
                 exact_match too, or omit it"
            )),
            (None, None) => return Ok(None),
        };
        let Some(validation) = validation else {
            bail!(Usage::new(format!(
                "{flag} generates texts at evaluations on validation data, and the data has none: pass --data with a validation \
                 split"
            )));
        };
        if !model.is_language_model_alone() {
            bail!(Usage::new(format!(
                "{flag} needs a language model whose vocabulary is in one part, and `{}` is trained for another task or cut: omit \
                 it, or omit --task and --vocabulary-parts",
                model.name()
            )));
        }
        if !model.has_tokenizer() {
            bail!(Usage::new(format!(
                "{flag} generates texts, and `{}` has no tokenizer: pass --tokenizer",
                model.name()
            )));
        }
        let rows = metric.map(|metric| rows(validation.as_ref(), metric)).transpose()?.unwrap_or_default();
        let longest = rows.iter().map(|row| row.answer.len() + 1).fold(NEW_TOKENS, usize::max);
        let asked = Asked::greedy(settings.sample_prompts.clone(), settings.sample_tokens.unwrap_or(longest));
        // Items of few sequences, whatever the device memory: larger ones could change how a task is cut.
        let request = Request::of(model, &asked, ByteSize(0), None, |conventions| {
            let mut prompts = match asked.has_prompts() {
                true => prompts_of(&asked, conventions)?,
                false => Prompts::default(),
            };
            prompts.given.extend(rows.iter().map(|row| Given::Tokens(row.prompt.clone())));
            Ok(prompts)
        })?;
        let reading = request.reading();
        let mut shown: Vec<String> = request.texts().map(Option::unwrap_or_default).collect();
        let asked = shown.split_off(shown.len() - rows.len());
        let references = rows.iter().map(|row| reading.answer(&row.answer)).collect::<Result<_>>()?;
        let judge = Arc::new(Judge { reading, asked, own: own.cloned(), shown, references });
        Ok(Some(Self { request, judge, cache_bytes }))
    }

    /// Notes on what is not used.
    pub(crate) fn notes(&self) -> &[String] {
        self.request.notes()
    }

    /// The chain and the sequences of a task with these adapters, or with new ones of this rank.
    pub(crate) fn of_task(
        &self,
        model: &mut Model,
        adapters: &AdapterSettings,
        rank: Option<usize>,
    ) -> Result<(Arc<Chain>, Arc<dyn Rounds>)> {
        let (cache, sequences) = self.request.sequences(model, self.cache_bytes, |_, _| false)?;
        let judge = self.judge.clone();
        let sequences = sequences.judged(self.judge.metrics(), move |made| judge.judge(made));
        let sequences: Arc<Sequences> = Arc::new(sequences);
        let chain = model.generating((adapters, rank), cache, &sequences)?;
        Ok((chain, sequences))
    }
}

impl Judge {
    fn metrics(&self) -> Vec<Metric> {
        let has = !self.references.is_empty();
        let built_in = TEXT_METRICS.into_iter().filter(|_| has).map(Metric::higher);
        let own = self.own.iter().map(|own| match own.higher_is_better {
            true => Metric::higher(&own.name),
            false => Metric::lower(&own.name),
        });
        built_in.chain(own).collect()
    }

    /// The values of the metrics, and the continuations of the sample prompts as a report.
    fn judge(&self, made: &[Generated]) -> Result<Judged, Box<dyn Error + Send + Sync>> {
        let text = |at: usize| self.reading.text(at, &made[at].ids).map(|(text, _)| text);
        let answers = (self.shown.len()..made.len()).map(text).collect::<Result<Vec<_>>>()?;
        let pairs = || answers.iter().map(String::as_str).zip(self.references.iter().map(String::as_str));
        let mut values = match self.references.is_empty() {
            true => Vec::new(),
            false => vec![exact_match(pairs()), rouge_l(pairs())],
        };
        if let Some(own) = &self.own {
            let mut sum = 0.0;
            for (prompt, (text, answer)) in self.asked.iter().zip(pairs()) {
                sum += (own.score)(prompt, text, answer)?;
            }
            values.push(sum / answers.len() as f64);
        }
        let shown = self.shown.iter().enumerate().map(|(at, prompt)| -> Result<_> {
            let Generated { logprob, ended, .. } = &made[at];
            let reason = if *ended == Some(Ended::Length) { "length" } else { "stop" };
            Ok(json!({ "prompt": prompt, "text": text(at)?, "logprob": logprob, "finish_reason": reason }))
        });
        let shown = shown.collect::<Result<Vec<_>>>()?;
        Ok((values, (!shown.is_empty()).then(|| json!(shown).to_string())))
    }
}

/// The rows of validation data of examples.
fn rows(data: &dyn Dataset, metric: &str) -> Result<Vec<SampleRow>> {
    let mut rows = Vec::new();
    for item in 0..data.len() {
        let batch = data.batch(&[item])?;
        let [ids, positions] = batch.inputs.parts.as_slice() else { bail!(no_answers(metric)) };
        let [targets] = batch.targets.parts.as_slice() else { bail!(no_answers(metric)) };
        let starts = positions.as_i32().iter().enumerate().filter(|(_, position)| **position == 0);
        let mut starts: Vec<usize> = starts.map(|(at, _)| at).collect();
        starts.push(ids.as_i32().len());
        for range in starts.windows(2).map(|pair| pair[0]..pair[1]) {
            let (ids, targets) = (&ids.as_i32()[range.clone()], &targets.as_i32()[range]);
            rows.push(row(ids, targets).ok_or_else(|| no_answers(metric))?);
        }
    }
    Ok(rows)
}

/// The last answer of an example, whose tokens are its last loss targets, and what precedes it.
fn row(ids: &[i32], targets: &[i32]) -> Option<SampleRow> {
    let end = targets.iter().rposition(|target| *target >= 0)? + 1;
    let first = targets[..end].iter().rposition(|target| *target < 0)? + 1;
    let tokens = |ids: &[i32]| ids.iter().map(|id| *id as u32).collect();
    // The first token of an example is never a target, so a text alone has a prompt of one token.
    (first > 1).then(|| SampleRow { prompt: tokens(&ids[..first]), answer: tokens(&ids[first..end]) })
}

fn no_answers(metric: &str) -> Usage {
    Usage::new(format!(
        "--metric {metric} compares generated answers with those of the validation rows, and the data has texts without prompts: \
         pass --data with rows of `prompt` and `completion`, or of `messages`, and omit --loss-on all"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_example_ends_in_its_last_answer() {
        let of = |targets: &[i32]| row(&[1, 2, 3, 4, 5, 6], targets).map(|row| (row.prompt, row.answer));
        assert_eq!(of(&[-1, -1, 3, 4, 5, 6]), Some((vec![1, 2], vec![3, 4, 5, 6])));
        assert_eq!(of(&[-1, -1, 3, -1, 5, -1]), Some((vec![1, 2, 3, 4], vec![5])));
        assert_eq!(of(&[-1, 2, 3, 4, 5, 6]), None, "a text without a prompt");
        assert_eq!(of(&[-1; 6]), None);
    }
}
