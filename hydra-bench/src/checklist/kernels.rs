//! Benchmarks of kernels: matrix products, and attention and head by context.

use super::found::{Finding, Verdict, best_of, guarded};
use super::subject::{Subject, Workers, pattern, sync, tensor, values};
use anyhow::{Result, ensure};
use burn::tensor::{DType, Device, Int, Tensor};
use hydra_core::{Activation, HostTensor, Key, Pass};
use hydra_engine::OpenDevice;
use hydra_models::ops::{Attention, causal_attention, head_loss, linear};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// A number that TF32, with a mantissa of ten bits, cannot represent.
const FINE: f32 = 1.0 + 1.0 / 4096.0;

/// An implementation of the product of two matrices.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Product {
    /// The product of GPT-2's layers.
    Gpt2(DType),
    /// Burn's product, which other models use.
    Burn(DType),
}

impl Product {
    const ALL: [Self; 4] =
        [Self::Gpt2(DType::F32), Self::Gpt2(DType::BF16), Self::Burn(DType::F32), Self::Burn(DType::BF16)];

    fn name(self) -> &'static str {
        match self {
            Self::Gpt2(DType::F32) => "GPT-2's f32",
            Self::Gpt2(_) => "GPT-2's bf16",
            Self::Burn(DType::F32) => "Burn's f32",
            Self::Burn(_) => "Burn's bf16",
        }
    }

    fn dtype(self) -> DType {
        let (Self::Gpt2(dtype) | Self::Burn(dtype)) = self;
        dtype
    }

    fn of(self, a: Tensor<2>, b: Tensor<2>) -> Tensor<2> {
        if let Self::Burn(_) = self {
            return a.matmul(b);
        }
        let ([rows, inner], [_, columns]) = (a.dims(), b.dims());
        let bias = Tensor::<1>::zeros([columns], &a.device()).cast(a.dtype());
        linear(a.reshape([1, rows, inner]), b, bias).reshape([rows, columns])
    }
}

/// Measures products of square matrices.
pub(super) fn products(subject: &Subject) -> Result<Finding> {
    let device = subject.open()?;
    let workers = Workers::new(subject, &device)?;
    let sides = subject.pick(&[1024, 2048, 4096][..], &[128, 256]);
    let (mut rows, mut wrong, mut best) = (Vec::new(), Vec::new(), Vec::new());
    for product in Product::ALL {
        let mut fastest: Option<f64> = None;
        for &side in sides {
            match guarded(|| workers.run(|| rate(subject, &device.burn, side, product))) {
                Ok(rate) => {
                    fastest = Some(fastest.map_or(rate, |fastest| fastest.max(rate)));
                    rows.push(json!({"side": side, "product": product.name(), "tflops": rate}));
                }
                Err(error) => {
                    let problem = format!("{error:#}");
                    rows.push(json!({"side": side, "product": product.name(), "problem": problem}));
                    // bf16 is optional, but its products must be correct.
                    let needed = product.dtype() == DType::F32 || error.is::<WrongElement>();
                    wrong.extend(needed.then(|| format!("{} at {side}: {problem}", product.name())));
                }
            }
        }
        best.extend(fastest.map(|fastest| (product, fastest)));
    }
    let keeps = |product| guarded(|| workers.run(|| keeps_f32(&device.burn, product)));
    let keeps = [keeps(Product::Gpt2(DType::F32))?, keeps(Product::Burn(DType::F32))?];
    rows.push(json!({"gpt2_keeps_f32": keeps[0], "burn_keeps_f32": keeps[1]}));
    Ok(judge_products(&best, keeps, &wrong, rows))
}

fn judge_products(best: &[(Product, f64)], keeps: [bool; 2], wrong: &[String], rows: Vec<Value>) -> Finding {
    let figure: Vec<String> =
        best.iter().map(|(product, rate)| format!("{} {rate:.3}", product.name())).collect();
    let figure = format!("{} TFLOP/s", figure.join(", "));
    let burn = if keeps[1] { "and so do Burn's" } else { "Burn's use less, such as TF32" };
    let (verdict, says) = match (wrong, keeps[0]) {
        ([], true) => {
            (Verdict::Pass, format!("the values are correct; GPT-2's products have f32 precision, {burn}"))
        }
        ([], false) => (
            Verdict::Fails,
            "GPT-2's f32 products use less precision, such as TF32, without being requested".to_owned(),
        ),
        _ => (Verdict::Fails, format!("wrong or failed: {}", wrong.join("; "))),
    };
    Finding::new(verdict, figure, says, rows)
}

/// An incorrect product.
#[derive(Debug, thiserror::Error)]
#[error("element {at:?} is {found}, not {exact}")]
struct WrongElement {
    at: [usize; 2],
    found: f32,
    exact: f32,
}

/// Measures one product in TFLOP/s, after comparing one element with the exact value.
fn rate(subject: &Subject, device: &Device, side: usize, product: Product) -> Result<f64> {
    let matrix = |salt| pattern(salt, side * side).into_iter().map(|value| value - 3.0).collect::<Vec<f32>>();
    let (a, b) = (matrix(1), matrix(2));
    let (row, column) = (side / 3, side / 5);
    let exact: f32 = (0..side).map(|k| a[row * side + k] * b[k * side + column]).sum();
    let upload = |values| tensor(device, values, [side, side]).cast(product.dtype());
    let (a, b) = (upload(a), upload(b));
    let made = product.of(a.clone(), b.clone()).slice([row..row + 1, column..column + 1]);
    let found = values(made)[0];
    // The sum is exact; bf16 rounds it to eight bits.
    let near = if product.dtype() == DType::F32 { 0.0 } else { exact.abs() / 128.0 };
    ensure!((found - exact).abs() <= near, WrongElement { at: [row, column], found, exact });
    let times = if subject.is_cuda() { 10 } else { 1 };
    let run = || {
        (0..times).for_each(|_| drop(product.of(a.clone(), b.clone())));
        sync(device)
    };
    // An idle GPU has low clock rates.
    let since = Instant::now();
    while subject.is_cuda() && since.elapsed() < WARMING {
        run()?;
    }
    let seconds = best_of(subject.pick(5, 2), run)?;
    Ok(2.0 * (side as f64).powi(3) * f64::from(times) / seconds * 1e-12)
}

/// The warmup time of a GPU.
const WARMING: Duration = Duration::from_millis(300);

/// Returns true if f32 products have more precision than TF32.
fn keeps_f32(device: &Device, product: Product) -> Result<bool> {
    let side = 512;
    let fine = tensor(device, vec![FINE; side * side], [side, side]);
    let found = values(product.of(fine, Tensor::ones([side, side], device)).slice([0..1, 0..1]))[0];
    Ok(found == side as f32 * FINE)
}

/// The shape of the measured layers.
struct LayerShape {
    width: usize,
    heads: usize,
    vocabulary: usize,
    chunk_rows: usize,
}

/// Measures time and memory of attention and of the head, forward and backward, at several contexts.
pub(super) fn contexts(subject: &Subject) -> Result<Finding> {
    let device = subject.open()?;
    let workers = Workers::new(subject, &device)?;
    let contexts = subject.pick(&[512, 1024, 2048][..], &[64, 128]);
    let shape = match subject.quick {
        false => LayerShape { width: 768, heads: 12, vocabulary: 50_257, chunk_rows: 256 },
        true => LayerShape { width: 64, heads: 4, vocabulary: 1000, chunk_rows: 64 },
    };
    let (mut rows, mut problems, mut figures) = (Vec::new(), Vec::new(), Vec::new());
    for (op, make) in [("attention", attention as Op), ("head", head as Op)] {
        for &context in contexts {
            let run = || measured(subject, &device, make(&device.burn, context, &shape));
            match guarded(|| workers.run(run)) {
                Ok((seconds, peak)) => {
                    rows.push(json!({"op": op, "context": context, "seconds": seconds, "peak_bytes": peak}));
                    let last = context == contexts[contexts.len() - 1];
                    figures.extend(last.then(|| format!("{op} {:.2} ms", seconds * 1e3)));
                }
                Err(error) => {
                    let problem = format!("{error:#}");
                    problems.push(format!("{op} at {context}: {problem}"));
                    rows.push(json!({"op": op, "context": context, "problem": problem}));
                }
            }
        }
    }
    let figure = if figures.is_empty() { "-".to_owned() } else { figures.join(", ") };
    let LayerShape { width, heads, vocabulary, .. } = shape;
    let good = format!(
        "forward and backward, batch 1, width {width}, {heads} heads, vocabulary {vocabulary}; the figure is for the \
        longest context"
    );
    Ok(Finding::of(&problems, figure, good, rows))
}

/// Runs a forward and a backward pass, and reads the gradient's first value.
type Run = Box<dyn Fn() -> Result<f32>>;

/// Uploads the inputs for a context.
type Op = fn(&Device, usize, &LayerShape) -> Run;

/// Returns the seconds, and the peak bytes in addition to the inputs.
fn measured(subject: &Subject, device: &OpenDevice, run: Run) -> Result<(f64, u64)> {
    let (probe, id) = (device.probe.as_ref(), device.measured_as());
    // The warmup compiles kernels and allocates thread-local buffers.
    let value = run()?;
    ensure!(value.is_finite(), "the gradient is {value}");
    probe.reset_peak(id);
    let before = probe.in_use(id);
    run()?;
    let peak = probe.peak(id).saturating_sub(before);
    let seconds = best_of(subject.pick(5, 2), || run().map(drop))?;
    Ok((seconds, peak))
}

fn small(salt: usize, elements: usize) -> Vec<f32> {
    pattern(salt, elements).into_iter().map(|value| (value - 3.5) * 0.1).collect()
}

fn attention(device: &Device, context: usize, shape: &LayerShape) -> Run {
    let device = device.clone().autodiff();
    let qkv = small(1, context * 3 * shape.width);
    let qkv = tensor(&device, qkv, [1, context, 3 * shape.width]).require_grad();
    let scale = 1.0 / ((shape.width / shape.heads) as f64).sqrt();
    let options = Attention { heads: shape.heads, scale, dropout: 0.0, site: 0 };
    let pass = Pass::train(Key::new(0), std::iter::empty().collect::<Activation>());
    Box::new(move || first_gradient(&qkv, causal_attention(qkv.clone(), options, &pass).sum()))
}

fn head(device: &Device, context: usize, shape: &LayerShape) -> Run {
    let device = device.clone().autodiff();
    let hidden = tensor(&device, small(1, context * shape.width), [context, shape.width]).require_grad();
    let table = small(2, shape.vocabulary * shape.width);
    let table = tensor(&device, table, [shape.vocabulary, shape.width]).require_grad();
    let targets = (0..context).map(|i| (i * 7 % shape.vocabulary) as i32).collect();
    let targets: Tensor<1, Int> = HostTensor::int(targets, [context]).to_device(&device).into_int();
    let (chunk, of) = (shape.chunk_rows, hidden.clone());
    let pass = Pass::train(Key::new(0), std::iter::empty().collect::<Activation>());
    let loss = move || head_loss(hidden.clone(), table.clone(), targets.clone(), chunk, &pass);
    Box::new(move || first_gradient(&of, loss()))
}

/// Returns the first value of the gradient. Reading it waits for the device.
fn first_gradient<const D: usize>(of: &Tensor<D>, loss: Tensor<1>) -> Result<f32> {
    let gradients = loss.backward();
    let gradient = of.grad(&gradients).ok_or_else(|| anyhow::anyhow!("the gradient is missing"))?;
    let elements = gradient.shape().num_elements();
    Ok(values(gradient.reshape([elements]).narrow(0, 0, 1))[0])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tf32_cannot_hold_what_tells_it_apart() {
        let tf32 = f32::from_bits(FINE.to_bits() & !0x1fff);
        assert_eq!(tf32, 1.0);
        assert!(keeps_f32(&Device::flex(), Product::Gpt2(DType::F32)).unwrap());
        assert!(keeps_f32(&Device::flex(), Product::Burn(DType::F32)).unwrap());
    }

    #[test]
    fn a_wrong_value_fails_and_a_missing_bf16_does_not() {
        let best = [(Product::Gpt2(DType::F32), 1.0), (Product::Burn(DType::F32), 2.0)];
        let found = |keeps, wrong: &[String]| judge_products(&best, keeps, wrong, Vec::new());
        assert_eq!(found([true, true], &[]).verdict, Verdict::Pass);
        assert_eq!(found([true, false], &[]).verdict, Verdict::Pass, "Burn's choice is its own");
        assert_eq!(found([false, false], &[]).verdict, Verdict::Fails);
        assert_eq!(found([true, true], &["128: no".to_owned()]).verdict, Verdict::Fails);
        assert_eq!(found([true, true], &[]).figure, "GPT-2's f32 1.000, Burn's f32 2.000 TFLOP/s");
    }
}
