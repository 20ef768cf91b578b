//! Helpers of the synthetic datasets.

use hydra_core::{Batch, DatasetError, HostActivation, HostTensor};

/// The initial weights of recorded runs, for an `impl Forward`.
macro_rules! recorded_init {
    () => {
        fn init(&self, name: &str, shape: &[usize]) -> hydra_core::Init {
            hydra_core::Init::default_for(name, shape)
        }
    };
}
pub(crate) use recorded_init;

/// A batch of `items`; `item` produces each one's array of `shape` and its class.
pub(crate) fn batch(
    dataset: &str,
    len: usize,
    shape: &[usize],
    items: &[usize],
    mut item: impl FnMut(usize, &mut Vec<f32>) -> i32,
) -> Result<Batch, DatasetError> {
    let mut values = Vec::with_capacity(items.len() * shape.iter().product::<usize>());
    let mut classes = Vec::with_capacity(items.len());
    for &index in items {
        if index >= len {
            return Err(DatasetError::OutOfRange { dataset: dataset.to_owned(), index, len });
        }
        classes.push(item(index, &mut values));
    }
    let n = items.len();
    let shape: Vec<usize> = [&[n], shape].concat();
    Ok(Batch {
        inputs: HostActivation::of(HostTensor::float(values, shape)),
        targets: HostActivation::of(HostTensor::int(classes, [n])),
        items: n,
        loss_targets: n,
        units: n,
    })
}

/// Runs a chain whole or cut, for the tests of small chains.
#[cfg(test)]
pub(crate) mod testing {
    use crate::ops;
    use crate::weights::WEIGHTS;
    use burn::tensor::Device;
    use hydra_core::{
        BackwardFrom, Batch, BufferParam, Chain, Dataset, FloatType, HostActivation, HostTensor,
        LayerGradients, Pass, backward_range, forward_range, promote_layers,
    };
    use std::collections::BTreeSet;
    use std::ops::Range;
    use std::path::Path;

    type Bytes = Vec<bytes::Bytes>;

    /// Runs `f` in a pool of this many threads.
    pub fn with_threads<T: Send>(threads: usize, f: impl FnOnce() -> T + Send) -> T {
        rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(f)
    }

    fn masters(chain: &Chain) -> Vec<Vec<f32>> {
        let fill = |index: usize| {
            let mut out = vec![0.0; chain.buffers()[index].elements];
            chain.source().fill(chain, index, 3, &mut out).unwrap();
            out
        };
        (0..chain.buffers().len()).map(fill).collect()
    }

    fn frozen(chain: &Chain, masters: &[Vec<f32>]) -> Bytes {
        let buffer = |m: &Vec<f32>| HostTensor::float(m.clone(), [m.len()]).in_type(chain.float_type()).bytes;
        masters.iter().map(buffer).collect()
    }

    /// The gradients as `f32` values.
    fn values(chain: &Chain, gradients: Vec<LayerGradients>) -> Vec<Vec<f32>> {
        // Frozen parameters have none.
        let gradients = gradients.into_iter().flatten().flatten().map(|g| g.into_host());
        let gradients = gradients.inspect(|g| assert_eq!(g.dtype, chain.float_type().dtype()));
        gradients.map(|g| g.in_type(FloatType::F32).as_f32().to_vec()).collect()
    }

    /// Loss and gradients with the chain cut before the layers `cuts` and at its ends. Boundaries pass through the
    /// host.
    fn cut(
        plain: &Device,
        chain: &Chain,
        buffers: &Bytes,
        batch: &Batch,
        cuts: &[usize],
    ) -> (f32, Vec<Vec<f32>>) {
        let buffer = |i: usize| buffers[i].clone().into();
        let device = plain.clone().autodiff();
        let pass = Pass::train(Pass::key_of(1, 0, 0), batch.targets.to_device(&device));
        let shards: Vec<Range<usize>> = cuts.windows(2).map(|w| w[0]..w[1]).collect();
        let mut boundaries = vec![batch.inputs.clone().in_type(chain.float_type())];
        for shard in &shards[..shards.len() - 1] {
            let layers = promote_layers(chain, shard.clone(), &buffer, plain, false);
            let x = boundaries.last().unwrap().to_device(&device);
            boundaries.push(forward_range(&layers, shard.start, x, &pass).into_host());
        }
        let (mut from, mut loss, mut gradients) = (BackwardFrom::Loss { weight: 1.0 }, None, Vec::new());
        for (shard, x) in shards.iter().zip(&boundaries).rev() {
            let layers = promote_layers(chain, shard.clone(), &buffer, plain, true);
            let x = x.to_device(&device);
            let done = backward_range(layers, shard.start, x, from, &pass, shard.start > 0);
            loss = loss.or(done.loss);
            gradients.splice(0..0, values(chain, done.layers));
            let inputs = done.inputs.into_iter();
            from =
                BackwardFrom::Gradient(inputs.map(|g| g.map(|g| g.into_host().to_device(plain))).collect());
        }
        (loss.expect("a loss"), gradients)
    }

    /// Loss and gradients of the whole chain on a plain device.
    pub fn backward_on(plain: &Device, chain: &Chain, batch: &Batch) -> (f32, Vec<Vec<f32>>) {
        cut(plain, chain, &frozen(chain, &masters(chain)), batch, &[0, chain.len()])
    }

    /// The same on the CPU.
    pub fn backward(chain: &Chain, batch: &Batch) -> (f32, Vec<Vec<f32>>) {
        backward_on(&Device::flex(), chain, batch)
    }

    /// Asserts that the whole and the cut chain give the same bits on the CPU.
    pub fn shards_agree(chain: &Chain, batch: &Batch, cuts: &[usize]) {
        shards_agree_on(&Device::flex(), chain, batch, cuts);
    }

    /// The same on a plain device.
    pub fn shards_agree_on(plain: &Device, chain: &Chain, batch: &Batch, cuts: &[usize]) {
        let cut = cut(plain, chain, &frozen(chain, &masters(chain)), batch, cuts);
        let whole = backward_on(plain, chain, batch);
        assert_eq!(cut.0, whole.0);
        let pairs = cut.1.iter().zip(&whole.1).enumerate();
        let different: Vec<usize> = pairs.filter(|(_, (a, b))| a != b).map(|(i, _)| i).collect();
        assert!(different.is_empty(), "the gradients of parameters {different:?} differ");
    }

    /// Asserts that a chain in `bf16` has nearly the loss and gradients of the same chain in `f32`, and the same bits
    /// for any cuts and number of threads.
    pub fn bf16_agrees(chain: impl Fn() -> Chain, batch: &Batch, cuts: &[usize]) {
        bf16_agrees_except(chain, batch, cuts, |_| false);
    }

    /// The same except for the gradients of parameters that are rounding noise.
    pub fn bf16_agrees_except(
        chain: impl Fn() -> Chain,
        batch: &Batch,
        cuts: &[usize],
        is_noise: impl Fn(&str) -> bool,
    ) {
        let (wide, chain) = (backward(&chain(), batch), chain().with_float_type(FloatType::Bf16));
        let narrow = with_threads(1, || backward(&chain, batch));
        assert_eq!(narrow, with_threads(3, || backward(&chain, batch)));
        shards_agree(&chain, batch, cuts);
        let params = chain.layers().iter().flat_map(|l| &l.params);
        let names = params.map(|p| &chain.buffers()[p.buffer].params[p.slot].name);
        let cosines = wide.1.iter().zip(&narrow.1).map(|(a, b)| cosine(a, b));
        let known = names.zip(cosines).filter(|(name, _)| !is_noise(name));
        let (name, worst) = known.min_by(|a, b| a.1.total_cmp(&b.1)).expect("a parameter");
        println!("{}: loss {} for {}, worst cosine {worst} of {name}", chain.name(), narrow.0, wide.0);
        assert!((narrow.0 - wide.0).abs() < 0.01 * wide.0, "a loss of {} for {}", narrow.0, wide.0);
        assert!(worst > 0.99, "the gradients of {name} have a cosine of {worst}");
    }

    /// Asserts that the root mean square of each parameter's initial values is the expected one, or nearly: `expected` returns it for
    /// a parameter with the relative tolerance.
    pub fn assert_deviations(chain: &Chain, expected: impl Fn(&BufferParam) -> (f64, f64)) {
        for (buffer, values) in chain.buffers().iter().zip(masters(chain)) {
            for param in &buffer.params {
                let ((expected, tolerance), values) = (expected(param), &values[param.range()]);
                let sum: f64 = values.iter().map(|&x| f64::from(x).powi(2)).sum();
                let found = (sum / values.len() as f64).sqrt();
                let near = (found - expected).abs() <= tolerance * expected;
                assert!(near, "{}, {}: {found} for {expected}", chain.name(), param.name);
            }
        }
    }

    /// Three sequences of 40 ids of a vocabulary of 256; some targets are ignored.
    pub fn ids_of_256() -> Batch {
        let ids: Vec<i32> = (0..3 * 40).map(|i| (i * 37 + i / 7) % 256).collect();
        let targets =
            ids.iter().zip(0..).map(|(id, i)| if i % 5 == 3 { ops::IGNORED } else { *id }).collect();
        let of = |ids| HostActivation::of(HostTensor::int(ids, [3, 40]));
        Batch { inputs: of(ids), targets: of(targets), items: 3, loss_targets: 3 * 39, units: 3 * 40 }
    }

    /// The same with two examples in each sequence.
    pub fn packed_ids_of_256() -> Batch {
        let mut packed = ids_of_256();
        let positions = (0..3).flat_map(|_| (0..25).chain(0..15)).collect();
        packed.inputs.parts.push(HostTensor::int(positions, [3, 40]));
        packed
    }

    /// Asserts that a chain of a vocabulary in three parts and of two blocks has the same bits however it is cut, and on
    /// one and on three threads.
    pub fn split_vocabulary_agrees(chain: &Chain, batch: &Batch) {
        assert_eq!((chain.len(), chain.targets_from()), (3 + 2 + 3, 5));
        for cuts in [&[0, 1, 2, 3, 4, 5, 6, 7, 8][..], &[0, 2, 6, 8], &[0, 5, 8], &[0, 3, 7, 8]] {
            shards_agree(chain, batch, cuts);
        }
        let one = with_threads(1, || backward(chain, batch));
        assert_eq!(one, with_threads(3, || backward(chain, batch)));
    }

    /// The names, shapes and bytes of the tensors in a written model.
    pub fn tensors_in(dir: &Path) -> BTreeSet<(String, Vec<usize>, Vec<u8>)> {
        let bytes = std::fs::read(dir.join(WEIGHTS)).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let tensors = file.tensors().into_iter();
        tensors.map(|(name, of)| (name, of.shape().to_vec(), of.data().to_vec())).collect()
    }

    /// A batch of labelled sequences of tokens in one row, with their positions.
    pub fn texts(items: &[(i32, Vec<i32>)]) -> Batch {
        let tokens: Vec<i32> = items.iter().flat_map(|(_, tokens)| tokens.iter().copied()).collect();
        let positions = items.iter().flat_map(|(_, tokens)| 0..tokens.len() as i32);
        let lengths: Vec<i32> = items.iter().map(|(_, tokens)| tokens.len() as i32).collect();
        let ends = lengths.iter().scan(0, |end, length| {
            *end += length;
            Some(*end)
        });
        let ends: Vec<i32> = ends.collect();
        let (n, count) = (items.len(), tokens.len());
        let row = |values: Vec<i32>| HostTensor::int(values, [1, count]);
        let each = |values: Vec<i32>| HostTensor::int(values, [n]);
        let firsts = ends.iter().zip(&lengths).map(|(end, length)| end - length).collect();
        let labels = items.iter().map(|(label, _)| *label).collect();
        let lasts = ends.iter().map(|end| end - 1).collect();
        Batch {
            inputs: HostActivation { parts: vec![row(tokens), row(positions.collect())] },
            targets: HostActivation {
                parts: [labels, firsts, lengths, lasts].into_iter().map(each).collect(),
            },
            items: n,
            loss_targets: n,
            units: count,
        }
    }

    fn cosine(a: &[f32], b: &[f32]) -> f64 {
        let dot = |a: &[f32], b: &[f32]| -> f64 {
            a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
        };
        dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
    }

    /// A batch of sequences of these lengths over bytes in one row, with labels. The last token of the last sequence is
    /// the padding.
    pub fn sequences(lengths: &[i32], labels: HostTensor) -> Batch {
        let (items, tokens) = (lengths.len(), lengths.iter().sum::<i32>());
        let ids = (0..tokens).map(|at| (at * 37 + at / 7) % 256).collect();
        let positions = lengths.iter().flat_map(|length| 0..*length).collect();
        let firsts: Vec<i32> =
            lengths.iter().scan(0, |at, length| Some(std::mem::replace(at, *at + length))).collect();
        let mut lasts: Vec<i32> =
            firsts.iter().zip(lengths).map(|(first, length)| first + length - 1).collect();
        lasts.iter_mut().last().into_iter().for_each(|last| *last -= 1);
        let row = |values| HostTensor::int(values, [1, tokens as usize]);
        let places = [firsts, lengths.to_vec(), lasts].map(|values| HostTensor::int(values, [items]));
        Batch {
            inputs: HostActivation { parts: vec![row(ids), row(positions)] },
            targets: HostActivation { parts: std::iter::once(labels).chain(places).collect() },
            items,
            loss_targets: items,
            units: tokens as usize,
        }
    }

    /// The losses before and after `steps` of gradient descent over the whole dataset.
    pub fn descend(chain: &Chain, data: &dyn Dataset, steps: usize, rate: f32) -> (f32, f32) {
        let batch = data.batch(&(0..data.len()).collect::<Vec<_>>()).unwrap();
        let mut masters = masters(chain);
        let mut losses = Vec::new();
        for _ in 0..steps {
            let (loss, gradients) =
                cut(&Device::flex(), chain, &frozen(chain, &masters), &batch, &[0, chain.len()]);
            losses.push(loss);
            let refs = chain.layers().iter().flat_map(|l| &l.params);
            for (place, gradient) in refs.zip(&gradients) {
                let range = chain.buffers()[place.buffer].params[place.slot].range();
                masters[place.buffer][range].iter_mut().zip(gradient).for_each(|(w, g)| *w -= rate * g);
            }
        }
        (losses[0], *losses.last().unwrap())
    }
}
