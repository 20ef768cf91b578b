//! Datasets and samplers: batches as functions of (seed, step).

use crate::{FloatType, HostActivation, HostTensor, Key, Metric};
use std::sync::Arc;

/// One batch on the host.
#[derive(Clone, Debug)]
pub struct Batch {
    /// The input of the first layer. The first dimension of every tensor is the number of items. It may be 1
    /// in inputs and targets if the items are concatenated in one row; in inputs alone if they are integers.
    pub inputs: HostActivation,
    /// The targets of the loss; layers read them through [`Pass::targets`](crate::Pass::targets).
    pub targets: HostActivation,
    /// The number of items (sequences, images) in the batch.
    pub items: usize,
    /// The number of loss targets that the loss averages over (predicted tokens, images). Batches are
    /// weighted by it.
    pub loss_targets: usize,
    /// The amount of data that throughput counts: tokens, images.
    pub units: usize,
}

impl Batch {
    /// Returns the batch for a chain with floats of this type. Targets are unchanged, because losses are
    /// `f32`.
    pub fn in_type(self, float: FloatType) -> Self {
        Self { inputs: self.inputs.in_type(float), ..self }
    }
}

/// A fixed collection of items. Equal indices give equal batches.
pub trait Dataset: Send + Sync {
    /// A name for messages.
    fn name(&self) -> &str;

    /// The number of items. A shuffled epoch keeps its order in memory, 8 bytes per item.
    fn len(&self) -> usize;

    /// Returns whether there are no items.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Gathers these items, in this order, into a batch.
    ///
    /// The engine prefetches batches on a separate thread while it computes the preceding minibatch; if host
    /// memory does not suffice for that, it reads between two shard tasks, and all tasks wait. Neither
    /// stopping a task nor ending a run waits for a prefetch in progress: its thread continues until this
    /// method returns, and holds the dataset until then.
    ///
    /// # Errors
    /// Any error that prevents the items from being read.
    fn batch(&self, items: &[usize]) -> Result<Batch, DatasetError>;

    /// Returns a batch of `items` items, at most all, whose tensors are at least as large as those of any
    /// other batch. Memory is planned with it, so all datasets of a task must agree in its shapes; its
    /// [units](Batch::units) are the mean over batches. The default takes the first items; override it if
    /// items differ in length.
    ///
    /// # Errors
    /// Those of [`batch`](Self::batch).
    fn largest(&self, items: usize) -> Result<Batch, DatasetError> {
        self.batch(&(0..items.min(self.len())).collect::<Vec<_>>())
    }

    /// The mean size of a batch as a fraction of the [largest](Self::largest), above 0 and at most 1. A mean
    /// batch takes about that fraction of the time.
    fn mean_part(&self) -> f64 {
        1.0
    }

    /// The plural name of the unit that [`Batch::units`] counts.
    fn unit(&self) -> &'static str {
        "items"
    }
}

/// Data of an evaluation that goes on in rounds: what the items of a round are depends on the results of the rounds before,
/// as in the generation of text. A batch is one item.
///
/// An evaluation may take place several times. After its last round the data is at the first round again, whose number of
/// items is always the same.
pub trait Rounds: Dataset {
    /// Receives the rows of a round's items, in their order, and returns whether there is another round.
    /// [`len`](Dataset::len) and [`batch`](Dataset::batch) then give its items, until this is called again.
    ///
    /// # Errors
    /// [`DatasetError::Round`] if the results cannot be processed. The task then fails.
    fn next_round(&self, rows: &[f32]) -> Result<bool, DatasetError>;

    /// The estimated number of items of all rounds after the current one, by which tasks are scheduled: whatever it is, the results are
    /// the same.
    fn later_items(&self) -> usize {
        0
    }

    /// Frees what earlier rounds have computed: the evaluation has ended, early or not. The next one begins with the first round.
    fn release(&self) {}

    /// The largest number of bytes of host memory that the data keeps between two rounds, such as a key-value cache, until
    /// [`release`](Self::release).
    fn kept_bytes(&self) -> u64 {
        0
    }

    /// A report on the last evaluation for those who observe the run, as JSON.
    fn report(&self) -> Option<String> {
        None
    }

    /// The metrics of an evaluation, with the values of the last one; NaN before the first.
    fn metrics(&self) -> Vec<(Metric, f64)> {
        Vec::new()
    }
}

/// The first items of a dataset, for evaluation on a part of it.
pub struct FirstItems {
    data: Arc<dyn Dataset>,
    items: usize,
}

impl FirstItems {
    /// Returns the first `items` items of `data`, or all if there are fewer.
    pub fn new(data: Arc<dyn Dataset>, items: usize) -> Self {
        Self { items: items.min(data.len()), data }
    }
}

impl Dataset for FirstItems {
    fn name(&self) -> &str {
        self.data.name()
    }

    fn len(&self) -> usize {
        self.items
    }

    fn batch(&self, items: &[usize]) -> Result<Batch, DatasetError> {
        self.data.batch(items)
    }

    fn largest(&self, items: usize) -> Result<Batch, DatasetError> {
        self.data.largest(items.min(self.items))
    }

    fn mean_part(&self) -> f64 {
        self.data.mean_part()
    }

    fn unit(&self) -> &'static str {
        self.data.unit()
    }
}

/// Gathers these items as [`gather_items`] does, for training or evaluation, and refuses a batch without loss
/// targets.
///
/// # Errors
/// Those of [`gather_items`], and [`DatasetError::Contract`] if there is no loss target.
pub fn gather(data: &dyn Dataset, items: &[usize]) -> Result<Batch, DatasetError> {
    with_loss_targets(data, items, gather_items(data, items)?)
}

/// Gathers the [largest](Dataset::largest) batch of `items` items, with the checks of [`gather`].
///
/// # Errors
/// Those of [`gather`].
pub fn gather_largest(data: &dyn Dataset, items: usize) -> Result<Batch, DatasetError> {
    let first: Vec<usize> = (0..items.min(data.len())).collect();
    with_loss_targets(data, &first, checked(data, &first, data.largest(items)?)?)
}

/// Gathers these items as [`Dataset::batch`] does, and checks the batch.
///
/// # Errors
/// Those of [`Dataset::batch`], and [`DatasetError::Contract`] if the batch does not have the requested
/// items.
pub fn gather_items(data: &dyn Dataset, items: &[usize]) -> Result<Batch, DatasetError> {
    checked(data, items, data.batch(items)?)
}

fn with_loss_targets(data: &dyn Dataset, items: &[usize], batch: Batch) -> Result<Batch, DatasetError> {
    match batch.loss_targets {
        0 => Err(broken(data, items, "has no targets for the loss to average over".to_owned())),
        _ => Ok(batch),
    }
}

fn checked(data: &dyn Dataset, items: &[usize], batch: Batch) -> Result<Batch, DatasetError> {
    let asked = items.len();
    let rows = |of: &HostTensor| of.shape.first().copied().unwrap_or(0);
    let inputs = || batch.inputs.parts.iter();
    // Token ids of several sequences in one row can have a label for each sequence.
    let are_ids = inputs().all(|part| !part.is_float());
    let of_targets = |part: &HostTensor| rows(part) == 1 || are_ids && rows(part) == asked;
    let in_one_row = inputs().all(|part| rows(part) == 1) && batch.targets.parts.iter().all(of_targets);
    let other_rows = inputs().map(rows).find(|rows| *rows != asked && !in_one_row);
    let found = match other_rows {
        _ if batch.items != asked => format!("has `items` = {}", batch.items),
        Some(rows) => format!("has inputs of {rows} items"),
        None => match other_type(&batch.inputs).or_else(|| other_length(&batch)) {
            Some(found) => found,
            None => return Ok(batch),
        },
    };
    Err(broken(data, items, found))
}

/// Describes float inputs that cannot be converted to a chain's type.
fn other_type(inputs: &HostActivation) -> Option<String> {
    let other =
        inputs.parts.iter().find(|part| part.is_float() && FloatType::from_dtype(part.dtype).is_none());
    other.map(|part| format!("has inputs of {:?}", part.dtype))
}

/// Describes a tensor whose bytes do not match its shape.
fn other_length(batch: &Batch) -> Option<String> {
    let whole = |HostTensor { bytes, shape, dtype }: &HostTensor| {
        shape.iter().try_fold(dtype.size(), |bytes, size| bytes.checked_mul(*size)) == Some(bytes.len())
    };
    let mut parts = batch.inputs.parts.iter().chain(&batch.targets.parts);
    parts.find(|part| !whole(part)).map(|HostTensor { bytes, shape, dtype }| {
        format!("has a tensor of {dtype:?} and shape {shape:?} in {} bytes", bytes.len())
    })
}

fn broken(data: &dyn Dataset, items: &[usize], found: String) -> DatasetError {
    let (dataset, first) = (data.name().to_owned(), items.first().copied().unwrap_or(0));
    DatasetError::Contract { dataset, asked: items.len(), first, found }
}

/// An error of gathering a batch.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the error messages describe the fields")]
pub enum DatasetError {
    /// An index beyond the dataset.
    #[error("dataset `{dataset}` has {len} items; item {index} was requested")]
    OutOfRange { dataset: String, index: usize, len: usize },
    /// A batch does not match the request.
    #[error(
        "dataset `{dataset}` was asked for {asked} items, starting with item {first}, and its batch {found}: the \
         first dimension of every input (and `Batch::items`) must equal the number of items, or inputs are one row and targets one row (for integers also one for each item), \
         the loss averages over at least one target (`Batch::loss_targets`, or `loss_targets` of a chain in Python), inputs are integers or floats of 32 or 16 bits, and tensors have the bytes of their shapes"
    )]
    Contract {
        dataset: String,
        asked: usize,
        /// The first requested item.
        first: usize,
        found: String,
    },
    /// The results of a round could not be processed.
    #[error("the results of an evaluation of dataset `{dataset}` could not be processed")]
    Round { dataset: String, source: Box<dyn std::error::Error + Send + Sync> },
    /// The items could not be read.
    #[error("dataset `{dataset}` could not be read")]
    Read { dataset: String, source: Box<dyn std::error::Error + Send + Sync> },
}

/// Selects the items of each step: a pure function of (seed, step).
///
/// Every epoch visits every item once; with shuffling, each epoch has its own order. The last batch of an
/// epoch is smaller if the batch size does not divide the number of items.
#[derive(Clone, Debug)]
pub struct Sampler {
    items: usize,
    batch: usize,
    order: Option<Key>,
    cached: Option<(usize, Vec<usize>)>,
}

impl Sampler {
    /// Returns a sampler over `items` items in batches of `batch`, shuffled by `seed` if `shuffle`.
    /// Zero counts are raised to one to avoid a division by zero; specs are validated before.
    pub fn new(items: usize, batch: usize, seed: u64, shuffle: bool) -> Self {
        let order = shuffle.then(|| Key::new(seed).fold(0x6F_7264_6572));
        Self { items: items.max(1), batch: batch.max(1), order, cached: None }
    }

    /// The number of steps of one epoch.
    pub fn steps_per_epoch(&self) -> usize {
        self.items.div_ceil(self.batch)
    }

    /// The items of `step`, counted from zero over all epochs.
    pub fn items(&mut self, step: usize) -> Vec<usize> {
        let (epoch, step) = (step / self.steps_per_epoch(), step % self.steps_per_epoch());
        let first = step * self.batch;
        let range = first..first.saturating_add(self.batch).min(self.items);
        let Some(key) = self.order else { return range.collect() };
        if self.cached.as_ref().is_none_or(|(cached, _)| *cached != epoch) {
            self.cached = Some((epoch, key.fold(epoch as u64).permutation(self.items)));
        }
        self.cached.as_ref().map(|(_, order)| order[range].to_vec()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::DType;

    #[test]
    fn an_epoch_visits_every_item_once_and_ends_in_a_smaller_batch() {
        let mut sampler = Sampler::new(10, 4, 1, true);
        assert_eq!(sampler.steps_per_epoch(), 3);
        let mut seen: Vec<usize> = (0..3).flat_map(|s| sampler.items(s)).collect();
        assert_eq!(sampler.items(2).len(), 2);
        seen.sort_unstable();
        assert_eq!(seen, (0..10).collect::<Vec<_>>());
    }

    #[test]
    fn batches_at_the_ends_of_what_can_be_counted() {
        let mut one = Sampler::new(1, usize::MAX, 1, true);
        assert_eq!((one.steps_per_epoch(), one.items(0), one.items(9)), (1, vec![0], vec![0]));
        assert_eq!(Sampler::new(3, 3, 1, false).items(5), [0, 1, 2]);
        let mut most = Sampler::new(usize::MAX, usize::MAX - 2, 1, false);
        assert_eq!((most.steps_per_epoch(), most.items(1)), (2, vec![usize::MAX - 2, usize::MAX - 1]));
        assert_eq!(Sampler::new(0, 0, 1, false).items(0), [0], "the dataset reports the missing item");
    }

    #[test]
    fn the_order_stays_what_it_was() {
        // Interrupted runs resume with the same items.
        let mut sampler = Sampler::new(10, 4, 7, true);
        assert_eq!(
            (0..4).map(|step| sampler.items(step)).collect::<Vec<_>>(),
            [&[2, 9, 5, 4][..], &[3, 8, 6, 1], &[7, 0], &[6, 9, 4, 2]]
        );
    }

    #[test]
    fn the_first_items_are_those_of_the_dataset() {
        struct Numbers;
        impl Dataset for Numbers {
            fn name(&self) -> &str {
                "numbers"
            }

            fn len(&self) -> usize {
                5
            }

            fn batch(&self, items: &[usize]) -> Result<Batch, DatasetError> {
                let x = HostTensor::float(items.iter().map(|i| *i as f32).collect(), [items.len(), 1]);
                let (x, n) = (HostActivation::of(x), items.len());
                Ok(Batch { inputs: x.clone(), targets: x, items: n, loss_targets: n, units: n })
            }

            fn unit(&self) -> &'static str {
                "points"
            }
        }
        let first = |items| FirstItems::new(Arc::new(Numbers), items);
        assert_eq!([3, 5, 9].map(|items| first(items).len()), [3, 5, 5]);
        let (three, unit) = (gather(&first(3), &[2, 0]).unwrap(), first(3).unit());
        assert_eq!((three.inputs, unit), (gather(&Numbers, &[2, 0]).unwrap().inputs, "points"));
        let largest = |items| gather_largest(&first(3), items).unwrap().inputs;
        let numbers = |items: &[usize]| gather(&Numbers, items).unwrap().inputs;
        assert_eq!([largest(2), largest(9)], [numbers(&[0, 1]), numbers(&[0, 1, 2])]);
        assert_eq!(first(3).mean_part(), 1.0);
    }

    #[test]
    fn what_breaks_the_contract_is_named() {
        struct One(Batch);
        impl Dataset for One {
            fn name(&self) -> &str {
                "one"
            }

            fn len(&self) -> usize {
                2
            }

            fn batch(&self, _: &[usize]) -> Result<Batch, DatasetError> {
                Ok(self.0.clone())
            }
        }
        let floats = || HostActivation::of(HostTensor::float(vec![0.5; 6], [2, 3]));
        let good = || Batch { inputs: floats(), targets: floats(), items: 2, loss_targets: 2, units: 2 };
        let view = |len: usize, shape: Vec<usize>, dtype| {
            HostActivation::of(HostTensor::view(vec![0_u8; len].into(), shape, dtype))
        };
        let narrow = gather(&One(good()), &[0, 1]).unwrap().in_type(FloatType::Bf16);
        let types = (narrow.inputs.parts[0].dtype, narrow.targets.parts[0].dtype);
        assert_eq!(types, (DType::BF16, DType::F32), "losses are f32");
        assert!(gather_items(&One(Batch { loss_targets: 0, ..good() }), &[0, 1]).is_ok());
        let in_one_row = view(20, vec![1, 5], DType::F32);
        let [inputs, targets] = [(); 2].map(|()| in_one_row.clone());
        assert!(gather(&One(Batch { inputs, targets, ..good() }), &[0, 1]).is_ok());
        let one_and_two = HostActivation { parts: [in_one_row.clone(), floats()].map(|x| x.parts).concat() };
        let doubles = view(48, vec![2, 3], DType::F64);
        assert!(
            gather(&One(Batch { targets: doubles.clone(), ..good() }), &[0, 1]).is_ok(),
            "losses may cast"
        );
        let cases = [
            (Batch { items: 3, ..good() }, "has `items` = 3"),
            (Batch { loss_targets: 0, ..good() }, "has no targets"),
            (Batch { inputs: view(12, vec![3], DType::F32), ..good() }, "has inputs of 3 items"),
            (Batch { inputs: in_one_row.clone(), ..good() }, "has inputs of 1 items"),
            (Batch { inputs: one_and_two, targets: in_one_row, ..good() }, "has inputs of 1 items"),
            (Batch { inputs: view(4, vec![], DType::F32), ..good() }, "has inputs of 0 items"),
            (Batch { inputs: doubles, ..good() }, "has inputs of F64"),
            (Batch { inputs: view(20, vec![2, 3], DType::F32), ..good() }, "shape [2, 3] in 20 bytes"),
            (Batch { targets: view(2, vec![usize::MAX, 9], DType::I32), ..good() }, "in 2 bytes"),
        ];
        for (batch, found) in cases {
            let message = gather(&One(batch), &[0, 1]).unwrap_err().to_string();
            assert!(message.contains("`one`") && message.contains(found), "{message}");
        }
    }

    #[test]
    fn the_order_is_a_function_of_seed_and_step() {
        let mut one = Sampler::new(50, 8, 9, true);
        let mut two = Sampler::new(50, 8, 9, true);
        let late = two.items(20);
        let _ = two.items(3);
        assert_eq!(one.items(20), late);
        assert_eq!(one.items(3), two.items(3));
        assert_ne!(one.items(0), one.items(7), "epochs have orders of their own");
        assert_ne!(one.items(0), Sampler::new(50, 8, 10, true).items(0));
        assert_eq!(Sampler::new(50, 8, 9, false).items(1), (8..16).collect::<Vec<_>>());
    }
}
