//! The pilot pass with real memory: a counting allocator, real layers, shards that fit as predicted.

use burn::module::Module;
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::Device;
use bytes::Bytes;
use hydra_core::{
    Activation, Batch, Chain, DeviceId, Forward, HostActivation, HostTensor, MemoryProbe, Pass,
};
use hydra_partition::{
    Fingerprint, InitialValues, PartitionError, PilotDevice, PilotPartitioner, Rules, choose_reserve,
};
use hydra_spill::alloc::{AllocatorProbe, CountingAllocator, TagLease, tag_thread, with_tag};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new(std::alloc::System);

/// One thread with counted memory.
struct Cpu {
    tag: TagLease,
    pool: rayon::ThreadPool,
}

impl Cpu {
    fn new() -> Self {
        let tag = TagLease::take();
        let id = tag.device();
        let pool =
            rayon::ThreadPoolBuilder::new().num_threads(1).start_handler(move |_| tag_thread(Some(id)));
        Self { tag, pool: pool.build().expect("a thread") }
    }
}

impl PilotDevice for Cpu {
    fn id(&self) -> DeviceId {
        self.tag.device()
    }

    fn burn(&self) -> Device {
        Device::flex()
    }

    fn probe(&self) -> &dyn MemoryProbe {
        &AllocatorProbe
    }

    fn run(&self, job: &mut (dyn FnMut() + Send)) -> Result<(), PartitionError> {
        self.pool.install(job);
        Ok(())
    }

    fn upload(&self, bytes: &Bytes) -> Result<hydra_core::DeviceBytes, hydra_core::DeviceError> {
        let words: &[f32] = bytemuck::cast_slice(bytes);
        Ok(with_tag(Some(self.id()), || HostTensor::float(words.to_vec(), [words.len()]).bytes).into())
    }
}

/// A residual block like those of the workloads: norm, up, nonlinearity, down.
#[derive(Module, Debug)]
struct Block {
    norm: LayerNorm,
    up: Linear,
    down: Linear,
}

impl Forward for Block {
    fn forward(&self, x: Activation, pass: &Pass) -> Activation {
        let x = x.into_float::<2>();
        let y = self.down.forward(self.up.forward(self.norm.forward(x.clone())).tanh());
        Activation::of(x + pass.site(0).dropout(y, 0.1))
    }
}

#[derive(Module, Debug)]
struct Distance {
    project: Linear,
}

impl Forward for Distance {
    fn forward(&self, x: Activation, pass: &Pass) -> Activation {
        let away = self.project.forward(x.into_float::<2>()) - pass.targets().part(0).into_float::<2>();
        Activation::of((away.clone() * away).mean())
    }
}

const WIDTH: usize = 192;
const ITEMS: usize = 160;

fn chain() -> Chain {
    let device = Device::flex();
    let linear = |from, to| LinearConfig::new(from, to).init(&device);
    let block = || Block {
        norm: LayerNormConfig::new(WIDTH).init(&device),
        up: linear(WIDTH, 3 * WIDTH),
        down: linear(3 * WIDTH, WIDTH),
    };
    let builder = (0..6).fold(Chain::builder("blocks"), |b, k| b.layer(format!("block{k}"), block()));
    builder.layer("loss", Distance { project: linear(WIDTH, WIDTH) }).build().unwrap()
}

fn batch() -> Batch {
    let values = (0..ITEMS * WIDTH).map(|i| (i % 17) as f32 * 0.1 - 0.8).collect();
    let x = HostActivation::of(HostTensor::float(values, [ITEMS, WIDTH]));
    Batch { inputs: x.clone(), targets: x, items: ITEMS, loss_targets: ITEMS, units: ITEMS }
}

#[test]
fn what_is_predicted_for_a_shard_is_what_it_takes() {
    let (chain, batch) = (chain(), batch());
    let cpu = Cpu::new();
    let buffers = InitialValues::new(&chain, 0);
    let partitioner = PilotPartitioner::new(&buffers);
    let profile = partitioner.measure(&chain, &batch, &cpu).unwrap();
    let boundary = (ITEMS * WIDTH * 4) as u64;
    // The tanh alone saves its output, three times as wide as the boundary.
    assert!(profile.layers[0].saved_bytes >= 3 * boundary, "{:?}", profile.layers[0]);
    assert!(profile.layers[0].saved_bytes <= 40 * boundary, "{:?}", profile.layers[0]);

    let fingerprint = Fingerprint::new(&chain, &batch, "");
    let least = hydra_partition::min_device_memory_bytes(&profile);
    let whole = hydra_partition::single_shard_bytes(&profile);
    let mut counts = Vec::new();
    for budget in [least, (least + whole) / 2, whole] {
        let reserve = choose_reserve(&[(&profile).into()], budget).unwrap();
        let rules = Rules::new(budget, reserve, profile.measured);
        let mut plan = partitioner.plan(&profile, fingerprint.clone(), rules, None).unwrap();
        let cuts = plan.cut_points.clone();
        partitioner.verify(&mut plan, &chain, &batch, &cpu).unwrap();
        println!("{plan}standing {}", profile.standing_bytes);
        assert_eq!(plan.cut_points, cuts, "no shard needed to be rolled back");
        for shard in &plan.shards {
            let verified = shard.verified_bytes.unwrap();
            assert!(verified <= shard.peak_bytes + rules.margin, "{shard:?}");
            assert!(verified as f64 > 0.9 * shard.peak_bytes as f64, "{shard:?}");
        }
        counts.push(plan.shards.len());
    }
    assert_eq!(counts[2], 1);
    assert!(counts[0] > counts[1] && counts[1] > 1, "{counts:?}");
}
