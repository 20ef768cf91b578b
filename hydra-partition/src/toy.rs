//! Test fixtures: small chains, a device that runs inline, and a probe with scripted layers.

use crate::{PartitionError, PilotDevice};
use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, FloatDType, Tensor};
use bytes::Bytes;
use hydra_core::{
    Activation, Batch, Chain, DeviceError, DeviceId, Forward, HostActivation, HostTensor, MemoryProbe, Pass,
};
use hydra_spill::alloc::AllocatorProbe;
use std::cell::Cell;

thread_local! {
    static FORWARDS: Cell<usize> = Cell::default();
    /// Worst-case passes through a loss, and others.
    static PASSES: Cell<[usize; 2]> = Cell::default();
}

/// The passes through a [`Distance`] since the last call: worst-case ones, and others.
pub fn passes() -> [usize; 2] {
    PASSES.take()
}

/// A layer whose output depends on how often it ran.
#[derive(Module, Debug)]
pub struct Counting {
    #[module(skip)]
    unused: usize,
}

impl Forward for Counting {
    fn forward(&self, x: Activation, _: &Pass) -> Activation {
        FORWARDS.set(FORWARDS.get() + 1);
        Activation::of(x.into_float::<2>() + FORWARDS.get() as f32)
    }
}

/// A layer, one that counts its forwards, and a loss.
pub fn counting_chain() -> Chain {
    Chain::builder("counting")
        .layer("l0", dense(1, 1))
        .layer("counts", Counting { unused: 0 })
        .layer("loss", Distance { hold: 0 })
        .build()
        .unwrap()
}

/// Features in and out of a layer.
pub const WIDTH: usize = 4;

/// Simulated memory in use.
#[derive(Clone, Copy, Default)]
struct AllocationLog {
    live: u64,
    peak: u64,
    forwards: usize,
    /// Every layer after the first since the last reset takes this many bytes more.
    crowd: u64,
    /// The number of bytes that are always in use.
    standing: u64,
    /// The maximum number of layers that the device can run together; zero for any number.
    max_layers: usize,
}

thread_local! {
    static ALLOCATION_LOG: Cell<AllocationLog> = Cell::default();
}

impl AllocationLog {
    fn start(crowd: u64, standing: u64) {
        let max_layers = ALLOCATION_LOG.get().max_layers;
        ALLOCATION_LOG.set(Self { live: standing, peak: standing, forwards: 0, crowd, standing, max_layers });
    }
}

/// Makes each layer after the first of a shard take this many bytes more.
pub fn crowd(bytes: u64) {
    AllocationLog::start(bytes, ALLOCATION_LOG.get().standing);
}

/// Sets the bytes that are always in use, and resets [`crowd`].
pub fn set_standing_bytes(bytes: u64) {
    AllocationLog::start(0, bytes);
}

/// Limits the number of layers that the device can run together, regardless of budgets.
pub fn limit_layers(layers: usize) {
    ALLOCATION_LOG.set(AllocationLog { max_layers: layers, ..ALLOCATION_LOG.get() });
}

fn run_layer(hold: u64, bump: u64) {
    let mut log = ALLOCATION_LOG.get();
    log.forwards += 1;
    if log.max_layers > 0 && log.forwards > log.max_layers {
        std::panic::panic_any(DeviceError::OutOfMemory { bytes: hold });
    }
    log.live += hold + if log.forwards > 1 { log.crowd } else { 0 };
    log.peak = log.peak.max(log.live + bump);
    ALLOCATION_LOG.set(log);
}

/// Reads the thread's allocation log, which is cleared at every reset.
#[derive(Clone, Copy)]
pub struct LogProbe;

impl MemoryProbe for LogProbe {
    fn measures(&self) -> bool {
        true
    }

    fn in_use(&self, _: DeviceId) -> u64 {
        ALLOCATION_LOG.get().live
    }

    fn peak(&self, _: DeviceId) -> u64 {
        ALLOCATION_LOG.get().peak
    }

    fn reset_peak(&self, _: DeviceId) {
        crowd(ALLOCATION_LOG.get().crowd);
    }
}

/// A device that runs jobs in the calling thread.
pub struct Inline<P>(pub P);

/// A device whose probe does not measure, because no counting allocator is installed.
pub const BLIND: Inline<AllocatorProbe> = Inline(AllocatorProbe);

impl<P: MemoryProbe> PilotDevice for Inline<P> {
    fn id(&self) -> DeviceId {
        DeviceId(0)
    }

    fn burn(&self) -> Device {
        Device::flex()
    }

    fn probe(&self) -> &dyn MemoryProbe {
        &self.0
    }

    fn run(&self, job: &mut (dyn FnMut() + Send)) -> Result<(), PartitionError> {
        job();
        // A job leaves no memory in use.
        crowd(ALLOCATION_LOG.get().crowd);
        Ok(())
    }

    fn upload(&self, bytes: &Bytes) -> Result<hydra_core::DeviceBytes, DeviceError> {
        Ok(bytes.clone().into())
    }
}

/// A linear layer that simulates holding `hold` bytes after its forward and `bump` more within it.
#[derive(Module, Debug)]
pub struct Dense {
    linear: Linear,
    hold: usize,
    bump: usize,
    working: usize,
    breaks: bool,
    #[module(skip)]
    note: Option<&'static str>,
}

impl Forward for Dense {
    fn forward(&self, x: Activation, _: &Pass) -> Activation {
        assert!(!self.breaks, "this layer is broken");
        run_layer(self.hold as u64, self.bump as u64);
        Activation::of(self.linear.forward(x.into_float::<2>()))
    }

    fn working_bytes(&self, inputs: &[Vec<usize>]) -> Option<u64> {
        assert_eq!(inputs[0][1], WIDTH);
        (self.working > 0).then_some(self.working as u64)
    }

    fn cost_key(&self) -> Option<String> {
        self.note.map(str::to_owned)
    }
}

/// A linear layer with these `hold` and `bump` bytes.
pub fn dense(hold: usize, bump: usize) -> Dense {
    let linear = LinearConfig::new(WIDTH, WIDTH).init(&Device::flex());
    Dense { linear, hold, bump, working: 0, breaks: false, note: None }
}

/// The mean squared distance to the targets.
#[derive(Module, Debug)]
pub struct Distance {
    hold: usize,
}

impl Forward for Distance {
    fn forward(&self, x: Activation, pass: &Pass) -> Activation {
        run_layer(self.hold as u64, 0);
        let [full, other] = PASSES.get();
        PASSES.set(if pass.is_worst_case() { [full + 1, other] } else { [full, other + 1] });
        let away = x.into_float::<2>().cast(FloatDType::F32) - pass.targets().part(0).into_float::<2>();
        Activation::of((away.clone() * away).mean())
    }
}

/// A loss with a metric that takes 9000 bytes more.
#[derive(Module, Debug)]
struct Measuring {
    loss: Distance,
}

impl Forward for Measuring {
    fn forward(&self, x: Activation, pass: &Pass) -> Activation {
        let loss = self.loss.forward(x, pass);
        if pass.is_training() {
            return loss;
        }
        run_layer(9000, 0);
        Activation::of(loss.part(0)).and(loss.part(0))
    }
}

/// A linear layer, and a loss with a metric.
pub fn measuring_chain() -> Chain {
    let builder = Chain::builder("measuring").layer("l0", dense(0, 0));
    builder.layer("loss", Measuring { loss: Distance { hold: 500 } }).metrics(["twice"]).build().unwrap()
}

/// `layers` linear layers that hold 1000 bytes and bump 5000, and a loss.
pub fn chain(layers: usize) -> Chain {
    chain_of(layers, 5000)
}

/// The same with layers that bump this many bytes.
pub fn chain_of(layers: usize, bump: usize) -> Chain {
    let builder = (0..layers).fold(Chain::builder("toy"), |b, k| b.layer(format!("l{k}"), dense(1000, bump)));
    builder.layer("loss", Distance { hold: 500 }).build().unwrap()
}

/// Another layer with the parameters of [`Dense`].
#[derive(Module, Debug)]
struct Bent {
    linear: Linear,
}

impl Forward for Bent {
    fn forward(&self, x: Activation, _: &Pass) -> Activation {
        run_layer(1000, 5000);
        Activation::of(self.linear.forward(x.into_float::<2>()).tanh())
    }

    fn cost_key(&self) -> Option<String> {
        Some(String::new())
    }
}

/// The layers of [`chain`], each with its cost key, and a loss. A layer with key `!` is frozen, one with `%`
/// partly frozen, and one with `~` has another type; all of these have an empty cost key.
pub fn keyed_chain(notes: &[Option<&'static str>]) -> Chain {
    let layer = |note| Dense { note, ..dense(1000, 5000) };
    let linear = || LinearConfig::new(WIDTH, WIDTH).init(&Device::flex());
    let builder = notes.iter().enumerate().fold(Chain::builder("toy"), |builder, (k, note)| match note {
        Some("!") => builder.frozen(format!("l{k}"), layer(Some(""))),
        Some("%") => {
            let Linear { weight, bias } = linear();
            let linear = Linear { weight: weight.set_require_grad(false), bias };
            builder.layer(format!("l{k}"), Dense { linear, ..layer(Some("")) })
        }
        Some("~") => builder.layer(format!("l{k}"), Bent { linear: linear() }),
        note => builder.layer(format!("l{k}"), layer(*note)),
    });
    builder.layer("loss", Distance { hold: 500 }).build().unwrap()
}

/// A frozen layer, a trained one, and a loss.
pub fn frozen_chain() -> Chain {
    let builder = Chain::builder("frozen").frozen("f", dense(1000, 0)).layer("l", dense(1000, 0));
    builder.layer("loss", Distance { hold: 500 }).build().unwrap()
}

/// A layer that declares its working bytes, one that does not, and a loss.
pub fn working_bytes_chain() -> Chain {
    let telling = Dense { working: 12_345, ..dense(0, 0) };
    let builder = Chain::builder("telling").layer("telling", telling).layer("mute", dense(0, 0));
    builder.layer("loss", Distance { hold: 0 }).build().unwrap()
}

/// A good layer, one that panics, and a loss.
pub fn broken_chain() -> Chain {
    let broken = Dense { breaks: true, ..dense(0, 0) };
    let builder = Chain::builder("broken").layer("good", dense(0, 0)).layer("bad", broken);
    builder.layer("loss", Distance { hold: 0 }).build().unwrap()
}

/// A linear layer that passes integers through with its floats, or drops them.
#[derive(Module, Debug)]
struct Carry {
    linear: Linear,
    drops: bool,
}

impl Forward for Carry {
    fn forward(&self, x: Activation, _: &Pass) -> Activation {
        let y = Activation::of(self.linear.forward(x.part(0).into_float::<2>()));
        if self.drops { y } else { y.and(x.part(1)) }
    }
}

/// Two layers that pass integers through, a layer that drops them, and a loss.
pub fn carrying_chain() -> Chain {
    let layer = |drops| Carry { linear: LinearConfig::new(WIDTH, WIDTH).init(&Device::flex()), drops };
    let builder = Chain::builder("carrying").layer("a", layer(false));
    let builder = builder.layer("b", layer(false)).layer("c", layer(true));
    builder.layer("loss", Distance { hold: 0 }).build().unwrap()
}

/// A batch of floats with an integer for each item.
pub fn carrying_batch(items: usize) -> Batch {
    let mut batch = batch(items);
    batch.inputs.parts.push(HostTensor::int((0..items as i32).collect(), [items]));
    batch
}

/// A layer with a matrix and a bias, whose matrix another layer may share.
#[derive(Module, Debug)]
struct TableLayer {
    table: Param<Tensor<2>>,
    bias: Param<Tensor<1>>,
}

impl Forward for TableLayer {
    fn forward(&self, x: Activation, _: &Pass) -> Activation {
        Activation::of(x.into_float::<2>().matmul(self.table.val()) + self.bias.val().unsqueeze())
    }
}

/// The first and the third layer share a matrix; a loss follows.
pub fn tied_chain() -> Chain {
    let device = Device::flex();
    let table = Param::from_tensor(Tensor::ones([WIDTH, WIDTH], &device));
    let use_of =
        || TableLayer { table: table.clone(), bias: Param::from_tensor(Tensor::ones([WIDTH], &device)) };
    let builder = Chain::builder("tied").layer("in", use_of()).layer("between", dense(0, 0));
    builder.layer("out", use_of()).layer("loss", Distance { hold: 0 }).build().unwrap()
}

/// A batch of `items` items.
pub fn batch(items: usize) -> Batch {
    let x = HostTensor::float((0..items * WIDTH).map(|i| i as f32 * 0.1).collect(), [items, WIDTH]);
    Batch {
        inputs: HostActivation::of(x.clone()),
        targets: HostActivation::of(x),
        items,
        loss_targets: items,
        units: items,
    }
}
