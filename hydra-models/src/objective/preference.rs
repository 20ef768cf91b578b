//! Preferences: the losses of pairs of a chosen and a rejected answer.

use super::numbers;
use burn::tensor::{FloatDType, Tensor, activation};
use hydra_core::{Activation, HostActivation, Measures, Metric, Objective, Pass, Statistic};
use serde::{Deserialize, Serialize};

/// A loss of preference pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PreferenceLoss {
    /// Direct preference optimization (Rafailov et al., "Direct Preference Optimization", arXiv 2305.18290).
    Dpo,
    /// Identity preference optimization, with log-ratios per token as in TRL (Azar et al., "A General Theoretical Paradigm
    /// to Understand Learning from Human Preferences", arXiv 2310.12036).
    Ipo,
    /// Odds ratios and the cross-entropy of the chosen text (Hong et al., "ORPO: Monolithic Preference Optimization without
    /// Reference Model", arXiv 2403.07691).
    Orpo,
    /// Mean log-probabilities with a margin (Meng et al., "SimPO: Simple Preference Optimization with a Reference-Free
    /// Reward", arXiv 2405.14734).
    Simpo,
    /// Single answers that are desirable or not (Ethayarajh et al., "KTO: Model Alignment as Prospect Theoretic
    /// Optimization", arXiv 2402.01306).
    Kto,
}

impl PreferenceLoss {
    /// The names in flags and files.
    pub const NAMES: [&str; 5] = ["dpo", "ipo", "orpo", "simpo", "kto"];

    /// The name in flags and files.
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }

    /// Whether it compares the model with a reference: the model before training.
    pub fn has_reference(self) -> bool {
        matches!(self, Self::Dpo | Self::Ipo | Self::Kto)
    }

    /// Whether it covers the chosen prompt too.
    pub fn reads_prompts(self) -> bool {
        self == Self::Orpo
    }
}

/// The columns of the head's log-probabilities and of the lengths of their segments.
const CHOSEN: usize = 0;
const REJECTED: usize = 1;
const PROMPT: usize = 2;

/// The number of segments of a pair: the chosen answer, the rejected one, and the prompt before the chosen answer.
pub const SEGMENTS: usize = 3;

/// The loss of preference pairs. The last layer returns the log-probabilities `[pairs, 3]` of the chosen answers, the
/// rejected ones and the prompts. Parts 1 and 2 of the targets hold their tokens' segments and the numbers of tokens, and the last part
/// holds the reference's log-probabilities of both answers, `[pairs, 2]`, if the loss has a reference.
///
/// For KTO an item is one answer, and what is rejected is the answer of another item after the same prompt. Part 3 of the
/// targets is 1 for desirable answers and 0 for others, `[items]`. The baseline is the mean log-ratio of mismatched answers,
/// but at least 0.
///
/// Means are over the minibatch, whatever its microbatches: also the baseline of KTO and the cross-entropy of ORPO, which
/// is a mean over tokens. An evaluation takes both from each of its batches.
///
/// Every pair has the same weight. Definitions and defaults are those of TRL 1.16; for SimPO with `cpo_alpha` 0.
///
/// Metrics: `reward_accuracy`, the fraction of pairs whose chosen answer has the larger reward; `reward_margin`, the mean
/// difference of rewards; `chosen_reward` and `rejected_reward`. For KTO the latter are means over the desirable answers and
/// over the others, the margin is their difference, and there is no accuracy. A reward is `beta` times the log-ratio of the model and the
/// reference, or times the mean log-probability of the answer's tokens where there is no reference.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Preference {
    /// The loss.
    pub loss: PreferenceLoss,
    /// The strength: of the reference for DPO and IPO, of the odds ratio for ORPO, of the reward for SimPO.
    pub beta: f64,
    /// The margin of SimPO.
    pub gamma: f64,
}

impl Preference {
    /// The answers' log-probabilities, or their log-ratios where there is a reference: `[pairs]` each, chosen first.
    fn scores(&self, outputs: &Activation, pass: &Pass) -> [Tensor<1>; 2] {
        let log_probs: Tensor<2> = outputs.part(0).into_float();
        let scores = [CHOSEN, REJECTED].map(|answer| column(&log_probs, answer));
        if !self.loss.has_reference() {
            return scores;
        }
        let targets = pass.targets();
        let reference: Tensor<2> = targets.part(targets.parts().len() - 1).into_float();
        let [chosen, rejected] = scores;
        [chosen - column(&reference, CHOSEN), rejected - column(&reference, REJECTED)]
    }

    /// The rewards of both answers, `[pairs]` each.
    fn rewards(&self, outputs: &Activation, pass: &Pass) -> [Tensor<1>; 2] {
        let scores = self.scores(outputs, pass);
        let scores = if self.loss.has_reference() { scores } else { per_token(scores, pass) };
        scores.map(|score| score * self.beta)
    }

    /// KTO: how far the reward of an answer is on the wrong side of the baseline.
    fn kto(&self, outputs: &Activation, pass: &Pass) -> Tensor<1> {
        let [answers, mismatched] = self.scores(outputs, pass);
        let above = match pass.statistic() {
            Some(baseline) => answers - baseline,
            None => answers - mismatched.detach().mean_dim(0).clamp_min(0.0),
        };
        // 1 for desirable answers, and -1 for others.
        let sign = desirable(pass) * 2.0 - 1.0;
        mean(activation::sigmoid(above * sign * -self.beta))
    }

    /// ORPO: the cross-entropy of all tokens of the chosen texts, and the log odds ratio of the answers.
    fn orpo(&self, outputs: &Activation, pass: &Pass) -> Tensor<1> {
        let [chosen, rejected] = per_token(self.scores(outputs, pass), pass);
        let odds = chosen.clone() - rejected.clone() - (log1m_exp(chosen) - log1m_exp(rejected));
        let (log_probs, lengths) = (outputs.part(0).into_float::<2>(), lengths(pass));
        let texts = |of: &Tensor<2>| (column(of, CHOSEN) + column(of, PROMPT)).sum_dim(0);
        let log_probs = texts(&log_probs).neg();
        let cross_entropy = match pass.statistic() {
            // So that the mean over pairs, to which a microbatch contributes in proportion to them, is that over tokens.
            Some(tokens_per_pair) => log_probs / (lengths.dims()[0] as f64 * tokens_per_pair),
            None => log_probs / texts(&lengths),
        };
        cross_entropy + mean(softplus(odds.neg())) * self.beta
    }
}

impl Objective for Preference {
    fn name(&self) -> String {
        let gamma = if self.loss == PreferenceLoss::Simpo {
            format!(", gamma {}", self.gamma)
        } else {
            String::new()
        };
        format!("{} with beta {}{gamma}", self.loss.name(), self.beta)
    }

    fn loss(&self, outputs: &Activation, pass: &Pass) -> Tensor<1> {
        let difference = |[chosen, rejected]: [Tensor<1>; 2]| chosen - rejected;
        let scores = || self.scores(outputs, pass);
        match self.loss {
            PreferenceLoss::Dpo => mean(softplus(difference(scores()) * -self.beta)),
            PreferenceLoss::Ipo => {
                let distance = difference(per_token(scores(), pass)) - 1.0 / (2.0 * self.beta);
                mean(distance.clone() * distance)
            }
            PreferenceLoss::Orpo => self.orpo(outputs, pass),
            PreferenceLoss::Simpo => {
                mean(softplus(difference(per_token(scores(), pass)) * -self.beta + self.gamma))
            }
            PreferenceLoss::Kto => self.kto(outputs, pass),
        }
    }

    fn metrics(&self) -> Vec<Metric> {
        let metrics = reward_metrics();
        if self.loss == PreferenceLoss::Kto { metrics[1..].to_vec() } else { metrics }
    }

    fn measure(&self, outputs: &Activation, pass: &Pass) -> Measures {
        let [rewards, other] = self.rewards(outputs, pass);
        if self.loss != PreferenceLoss::Kto {
            return measure([rewards, other]);
        }
        let [_, mismatched] = self.scores(outputs, pass);
        let chosen = desirable(pass);
        let rejected = chosen.clone().neg() + 1.0;
        let sums =
            [rewards.clone() * chosen.clone(), chosen, rewards * rejected.clone(), rejected, mismatched];
        Measures { sums: Some(Tensor::cat(sums.map(|of| of.sum_dim(0)).to_vec(), 0)), rows: None }
    }

    fn values(&self, sums: &[f64], _: &[f32], pairs: u64) -> Vec<f64> {
        match *sums {
            [chosen, count, rejected, others, _] if self.loss == PreferenceLoss::Kto => {
                let (chosen, rejected) = (chosen / count, rejected / others);
                vec![chosen - rejected, chosen, rejected]
            }
            _ => sums.iter().map(|sum| sum / pairs.max(1) as f64).collect(),
        }
    }

    fn statistic(&self) -> Statistic {
        match self.loss {
            PreferenceLoss::Kto => Statistic::OfOutputs,
            PreferenceLoss::Orpo => Statistic::OfTargets,
            PreferenceLoss::Dpo | PreferenceLoss::Ipo | PreferenceLoss::Simpo => Statistic::Nothing,
        }
    }

    fn measure_targets(&self, targets: &HostActivation) -> Vec<f64> {
        let lengths = targets.parts[2].as_f32().chunks_exact(SEGMENTS);
        vec![lengths.map(|of| f64::from(of[CHOSEN] + of[PROMPT])).sum()]
    }

    /// The baseline of KTO, or the tokens of a chosen text with its prompt, on average, for ORPO.
    fn statistic_of(&self, sums: &[f64], loss_targets: u64) -> f64 {
        let mean = sums.last().copied().unwrap_or_default() / loss_targets.max(1) as f64;
        if self.loss == PreferenceLoss::Kto { mean.max(0.0) } else { mean }
    }
}

/// 1 for each desirable answer of a batch, and 0 for others.
fn desirable(pass: &Pass) -> Tensor<1> {
    pass.targets().part(3).into_float()
}

/// The loss of a reward model: a sequence classifier with one number, the reward. The last layer returns the rewards
/// `[2 * pairs, 1]`, for each pair that of the chosen text and that of the rejected one. The loss is the negative
/// log-likelihood of the preferences (Bradley and Terry, Biometrika 39, 1952), where the chosen text must be better by the pair's
/// margin, part 0 of the targets, `F32` `[pairs]` (Touvron et al., Llama 2, 2023, section 3.2.2). The metrics are those of
/// [`Preference`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RewardModel;

impl RewardModel {
    fn rewards(outputs: &Activation) -> [Tensor<1>; 2] {
        let rewards = outputs.part(0).into_float::<2>().cast(FloatDType::F32);
        let [texts, numbers] = rewards.dims();
        assert!(
            numbers == 1 && texts % 2 == 0,
            "expected a reward for each text of pairs, found {:?}",
            [texts, numbers]
        );
        let rewards = rewards.reshape([texts / 2, 2]);
        [CHOSEN, REJECTED].map(|text| column(&rewards, text))
    }
}

impl Objective for RewardModel {
    fn name(&self) -> String {
        "reward model".to_owned()
    }

    fn loss(&self, outputs: &Activation, pass: &Pass) -> Tensor<1> {
        let [chosen, rejected] = Self::rewards(outputs);
        mean(softplus(rejected - chosen + pass.targets().part(0).into_float()))
    }

    fn metrics(&self) -> Vec<Metric> {
        reward_metrics()
    }

    fn measure(&self, outputs: &Activation, _: &Pass) -> Measures {
        measure(Self::rewards(outputs))
    }
}

/// The log-probabilities of both answers of preference pairs, in rows, for a reference: of what [`Preference`] takes.
/// There is nothing to train: the loss is the mean negative log-probability of both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogProbabilities;

impl Objective for LogProbabilities {
    fn name(&self) -> String {
        "log-probabilities of answers".to_owned()
    }

    fn loss(&self, outputs: &Activation, _: &Pass) -> Tensor<1> {
        let log_probs = outputs.part(0).into_float::<2>();
        mean(column(&log_probs, CHOSEN) + column(&log_probs, REJECTED)).neg()
    }

    fn measure(&self, outputs: &Activation, _: &Pass) -> Measures {
        Measures { sums: None, rows: Some(outputs.part(0).into_float::<2>().narrow(1, CHOSEN, 2)) }
    }

    fn keeps_rows(&self) -> bool {
        true
    }
}

fn reward_metrics() -> Vec<Metric> {
    let higher = ["reward_accuracy", "reward_margin", "chosen_reward"].map(Metric::higher);
    higher.into_iter().chain([Metric::lower("rejected_reward")]).collect()
}

fn measure([chosen, rejected]: [Tensor<1>; 2]) -> Measures {
    let wins = numbers(chosen.clone().greater(rejected.clone()));
    let margin = chosen.clone() - rejected.clone();
    let sums = [wins, margin, chosen, rejected].map(|of| of.sum_dim(0));
    Measures { sums: Some(Tensor::cat(sums.to_vec(), 0)), rows: None }
}

/// The numbers of loss targets of the segments of each pair, `[pairs, 3]`.
fn lengths(pass: &Pass) -> Tensor<2> {
    pass.targets().part(2).into_float()
}

/// Scores of both answers divided by their numbers of tokens.
fn per_token([chosen, rejected]: [Tensor<1>; 2], pass: &Pass) -> [Tensor<1>; 2] {
    let lengths = lengths(pass);
    [chosen / column(&lengths, CHOSEN), rejected / column(&lengths, REJECTED)]
}

fn column(of: &Tensor<2>, column: usize) -> Tensor<1> {
    let [rows, _] = of.dims();
    of.clone().narrow(1, column, 1).reshape([rows])
}

/// The mean, of shape `[1]`. Along a dimension, Burn sums in a fixed order.
fn mean(of: Tensor<1>) -> Tensor<1> {
    of.mean_dim(0)
}

/// `log(1 + exp(x))`, the negative log-sigmoid of `-x`.
fn softplus(x: Tensor<1>) -> Tensor<1> {
    // The sign is a constant, so that the gradient at 0 is one half.
    let positive = numbers(x.clone().greater_equal_elem(0.0));
    let sign = positive.clone() * 2.0 - 1.0;
    x.clone() * positive + (x * sign).neg().exp().log1p()
}

/// `log(1 - exp(x))` of a log-probability.
fn log1m_exp(x: Tensor<1>) -> Tensor<1> {
    // Close to 0, `1 - exp(x)` has no digits; with `t = tanh(-x / 2)` it is `2 * t / (1 + t)`.
    let t = (x * -0.5).tanh();
    (t.clone() * 2.0 / (t + 1.0)).log()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{gradient, values};
    use burn::tensor::{Device, TensorData};

    const LOG_PROBS: [[f32; 3]; 2] = [[-6.0, -8.5, -2.0], [-3.0, -2.0, -4.0]];
    const LENGTHS: [[f32; 3]; 2] = [[4.0, 5.0, 2.0], [3.0, 1.0, 4.0]];
    const REFERENCE: [[f32; 2]; 2] = [[-6.5, -8.0], [-3.5, -2.5]];
    const BETA: f64 = 0.3;

    fn table<const N: usize>(rows: [[f32; N]; 2]) -> Tensor<2> {
        let values: Vec<f32> = rows.as_flattened().to_vec();
        Tensor::from_data(TensorData::new(values, [2, N]), &Device::flex().autodiff())
    }

    fn pass(reference: [[f32; 2]; 2]) -> Pass {
        let targets = Activation::of(table(LENGTHS)).and(table(LENGTHS)).and(table(LENGTHS));
        Pass::evaluate(targets.and(table(reference)))
    }

    fn preference(loss: PreferenceLoss) -> Preference {
        Preference { loss, beta: BETA, gamma: 0.5 }
    }

    /// The loss of the pairs above, and its gradient.
    fn run(loss: PreferenceLoss) -> (f64, Vec<f32>) {
        let log_probs = table(LOG_PROBS).require_grad();
        let loss = preference(loss).loss(&Activation::of(log_probs.clone()), &pass(REFERENCE));
        (f64::from(values(&loss)[0]), gradient(&log_probs, &loss.backward()))
    }

    fn log_sigmoid(x: f64) -> f64 {
        -(-x).exp().ln_1p()
    }

    /// The same, from the definitions.
    fn exact(loss: PreferenceLoss, log_probs: [[f64; 3]; 2]) -> f64 {
        let of = |pair: usize, answer: usize| log_probs[pair][answer];
        let mean = |pair: usize, answer: usize| of(pair, answer) / f64::from(LENGTHS[pair][answer]);
        let ratio = |pair: usize, answer: usize| of(pair, answer) - f64::from(REFERENCE[pair][answer]);
        let pairs = |term: &dyn Fn(usize) -> f64| (term(0) + term(1)) / 2.0;
        match loss {
            PreferenceLoss::Dpo => pairs(&|pair| -log_sigmoid(BETA * (ratio(pair, 0) - ratio(pair, 1)))),
            PreferenceLoss::Ipo => pairs(&|pair| {
                let ratio = |answer: usize| ratio(pair, answer) / f64::from(LENGTHS[pair][answer]);
                (ratio(0) - ratio(1) - 0.5 / BETA).powi(2)
            }),
            PreferenceLoss::Orpo => {
                let odds = |pair, answer| mean(pair, answer) - (1.0 - mean(pair, answer).exp()).ln();
                let texts = (of(0, 0) + of(0, 2) + of(1, 0) + of(1, 2)) / 13.0;
                -texts - BETA * pairs(&|pair| log_sigmoid(odds(pair, 0) - odds(pair, 1)))
            }
            PreferenceLoss::Simpo => {
                pairs(&|pair| -log_sigmoid(BETA * (mean(pair, 0) - mean(pair, 1)) - 0.5))
            }
            PreferenceLoss::Kto => f64::NAN,
        }
    }

    #[test]
    fn losses_and_gradients_are_those_of_the_definitions() {
        for loss in [PreferenceLoss::Dpo, PreferenceLoss::Ipo, PreferenceLoss::Orpo, PreferenceLoss::Simpo] {
            let (found, gradient) = run(loss);
            let at = LOG_PROBS.map(|pair| pair.map(f64::from));
            assert!((found - exact(loss, at)).abs() < 1e-6, "{loss:?}: {found}");
            for (index, found) in gradient.iter().enumerate() {
                let moved = |by: f64| {
                    let mut moved = at;
                    moved[index / 3][index % 3] += by;
                    exact(loss, moved)
                };
                let slope = (moved(1e-5) - moved(-1e-5)) / 2e-5;
                assert!((f64::from(*found) - slope).abs() < 1e-5, "{loss:?}, {index}: {found} for {slope}");
            }
        }
    }

    #[test]
    fn single_answers_are_compared_with_the_mean_of_mismatched_ones() {
        let device = Device::flex().autodiff();
        let labels: Tensor<1> = Tensor::from_data([1.0, 0.0], &device);
        let targets = Activation::of(table(LENGTHS)).and(table(LENGTHS)).and(table(LENGTHS)).and(labels);
        let pass = Pass::evaluate(targets.and(table(REFERENCE)));
        let log_probs = table(LOG_PROBS).require_grad();
        let (kto, outputs) = (preference(PreferenceLoss::Kto), Activation::of(log_probs.clone()));
        // Log-ratios are 0.5 and 0.5; those of mismatched answers -0.5 and 0.5, with the mean 0.
        let loss = kto.loss(&outputs, &pass);
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let expected = (sigmoid(-0.15) + sigmoid(0.15)) / 2.0;
        assert!((f64::from(values(&loss)[0]) - expected).abs() < 1e-6);
        let slope = (BETA * sigmoid(0.15) * sigmoid(-0.15) / 2.0) as f32;
        let slopes = gradient(&log_probs, &loss.backward());
        let expected = [-slope, 0.0, 0.0, slope, 0.0, 0.0];
        assert!(slopes.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-7), "{slopes:?}");
        let sums: Vec<f64> =
            values(&kto.measure(&outputs, &pass).sums.unwrap()).into_iter().map(f64::from).collect();
        let figures = kto.values(&sums, &[], 2);
        assert!(figures.iter().zip([0.0, 0.15, 0.15]).all(|(a, b)| (a - b).abs() < 1e-6), "{figures:?}");
        let names: Vec<String> = kto.metrics().into_iter().map(|metric| metric.name).collect();
        assert_eq!(names, ["reward_margin", "chosen_reward", "rejected_reward"]);
    }

    #[test]
    fn the_model_itself_as_reference_has_the_logarithm_of_two() {
        let log_probs = table(LOG_PROBS).require_grad();
        let reference = LOG_PROBS.map(|[chosen, rejected, _]| [chosen, rejected]);
        let outputs = Activation::of(log_probs.clone());
        let dpo = preference(PreferenceLoss::Dpo);
        let loss = dpo.loss(&outputs, &pass(reference));
        assert_eq!(values(&loss), [std::f32::consts::LN_2]);
        let slopes = gradient(&log_probs, &loss.backward());
        let half = (BETA / 4.0) as f32;
        assert_eq!(slopes, [-half, half, 0.0, -half, half, 0.0]);
        let sums = values(&dpo.measure(&outputs, &pass(reference)).sums.unwrap());
        assert_eq!(sums, [0.0; 4], "equal rewards are no win");
    }

    #[test]
    fn rewards_are_scaled_log_ratios_or_means() {
        let outputs = Activation::of(table(LOG_PROBS));
        let sums = |loss| values(&preference(loss).measure(&outputs, &pass(REFERENCE)).sums.unwrap());
        let close = |found: Vec<f32>, expected: [f64; 4]| {
            let close = found.iter().zip(expected).all(|(a, b)| (f64::from(*a) - b).abs() < 1e-6);
            assert!(close, "{found:?} for {expected:?}");
        };
        // Log-ratios are 0.5 and -0.5, 0.5 and 0.5.
        close(sums(PreferenceLoss::Dpo), [1.0, 0.3, 0.3, 0.0]);
        close(sums(PreferenceLoss::Ipo), [1.0, 0.3, 0.3, 0.0]);
        // Means are -1.5 and -1.7, -1 and -2.
        close(sums(PreferenceLoss::Simpo), [2.0, 0.36, -0.75, -1.11]);
        let rows = LogProbabilities.measure(&outputs, &pass(REFERENCE)).rows.unwrap();
        assert_eq!(values(&rows), [-6.0, -8.5, -3.0, -2.0]);
    }

    #[test]
    fn a_reward_model_compares_the_texts_of_a_pair() {
        let device = Device::flex().autodiff();
        let rewards: Tensor<2> = Tensor::from_data([[2.0], [1.0], [-1.0], [0.5]], &device).require_grad();
        let outputs = Activation::of(rewards.clone());
        let with_margins = |margins: [f32; 2]| {
            let margins: Tensor<1> = Tensor::from_data(margins, &device);
            RewardModel.loss(&outputs, &Pass::train(Pass::key_of(0, 0, 0), Activation::of(margins)))
        };
        let expected = -(log_sigmoid(1.0 - 0.25) + log_sigmoid(-1.5 - 2.0)) / 2.0;
        assert!((f64::from(values(&with_margins([0.25, 2.0]))[0]) - expected).abs() < 1e-6);
        let loss = with_margins([0.0, 0.0]);
        let expected = -(log_sigmoid(1.0) + log_sigmoid(-1.5)) / 2.0;
        assert!((f64::from(values(&loss)[0]) - expected).abs() < 1e-6);
        let slopes = gradient(&rewards, &loss.backward());
        assert!(slopes[0] < 0.0 && slopes[1] == -slopes[0] && slopes[2] < slopes[0]);
        let sums = values(&RewardModel.measure(&outputs, &pass(REFERENCE)).sums.unwrap());
        assert_eq!(sums, [1.0, -0.5, 1.0, 1.5]);
        let names: Vec<String> = RewardModel.metrics().into_iter().map(|metric| metric.name).collect();
        assert_eq!(names, ["reward_accuracy", "reward_margin", "chosen_reward", "rejected_reward"]);
    }
}
