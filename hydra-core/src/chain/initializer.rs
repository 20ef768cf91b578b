//! Recognizes the distribution of a Burn module's initializer from one call of it.
//!
//! A lazy parameter holds a closure that can be called once and that draws from a process-wide generator. The
//! initial values of a task are a function of its seed instead, so only the closure's distribution is needed.
//! The closure is called under a known seed, and its values are compared with standard uniform and standard
//! normal draws of the same generator under the same seed: draws from any other uniform or normal
//! distribution are a linear function of them. This yields the distribution's parameters for any formula or
//! closure; the values are then discarded.

use crate::{AnyTensor, HostTensor, Init, Key};
use burn::module::{Module, Param};
use burn::tensor::{DType, Device, Distribution, Tensor};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The initial values that the initializer of a lazy parameter produces.
#[derive(Clone, Debug, PartialEq)]
pub enum OwnInit {
    /// Draws from a distribution, or one constant value.
    Drawn(Init),
    /// Values that are not random, such as a table of sines.
    Fixed(HostTensor),
    /// Draws from a distribution that is not recognized.
    Unknown,
}

/// The memory layout of a parameter: a module may store it transposed and transpose it when it initializes
/// it, as Burn's `Linear` does with `LinearLayout::Col`.
#[derive(Clone, Debug)]
pub(crate) struct ParameterForm {
    /// The shape that forwards see.
    pub shape: Vec<usize>,
    /// The position of each dimension in the shape that the initializer draws.
    order: Vec<usize>,
    /// Whether Burn trains it.
    pub trained: bool,
}

impl ParameterForm {
    /// Returns the form of a parameter without initializing it, or `None` if the module's load mapper does
    /// more than permute dimensions.
    pub fn from_param<const D: usize>(param: &Param<Tensor<D>>) -> Option<Self> {
        // Applies the load mapper to a tensor whose dimensions are distinguishable. The mapper also sets the
        // parameter's `require_grad` flag, which Burn does not expose before a lazy parameter is initialized.
        let dims: [usize; D] = std::array::from_fn(|i| i + 1);
        let loaded = param.clone().transform_for_load(Tensor::zeros(dims, &Device::flex()), param.id);
        let order: Vec<usize> = loaded.shape().to_vec().into_iter().map(|dim| dim.wrapping_sub(1)).collect();
        let mut sorted = order.clone();
        sorted.sort_unstable();
        if sorted.into_iter().ne(0..D) {
            return None;
        }
        let trained = match loaded.device().is_autodiff() {
            true => loaded.is_require_grad(),
            false => loaded.train().is_require_grad(),
        };
        let declared = param.lazy_shape().to_vec();
        let shape = match param.is_initialized() {
            true => declared,
            false => order.iter().map(|&at| declared[at]).collect(),
        };
        Some(Self { shape, order, trained })
    }

    /// The axes that permute the shape that forwards see into the shape that the initializer drew.
    fn inverse<const D: usize>(&self) -> [isize; D] {
        let mut inverse = [0; D];
        for (at, &from) in self.order.iter().enumerate() {
            inverse[from] = at as isize;
        }
        inverse
    }
}

/// A guess at an initializer from the values of one parameter.
#[derive(Clone, Debug)]
enum Guess {
    Is(OwnInit),
    /// One draw from a distribution around zero with one of these bounds or deviations. If none is confirmed,
    /// the value is kept if the parameter held it.
    Single {
        scales: Scales,
        held: bool,
    },
    /// A parameter that held values that no initializer produced here before.
    Held,
}

#[derive(Clone, Copy, Debug)]
struct Scales {
    uniform: f64,
    normal: f64,
}

/// Guesses at the initializers of one layer's parameters.
#[derive(Debug, Default)]
pub(crate) struct Guesses(Vec<Option<Guess>>);

impl Guesses {
    /// Skips a parameter.
    pub fn skip(&mut self) {
        self.0.push(None);
    }

    /// Initializes a lazy parameter and recognizes its distribution. A parameter that already holds values is
    /// also recognized if they were produced here: clones of a lazy parameter share its values.
    pub fn add<const D: usize>(&mut self, param: Param<Tensor<D>>) {
        self.0.push(Some(guess(param)));
    }

    /// Returns the recognized initializers; `None` for skipped parameters and for values to keep.
    pub fn resolve(self) -> Vec<Option<OwnInit>> {
        let known = |guess: &Guess| match guess {
            Guess::Is(OwnInit::Drawn(init)) => Some(*init),
            _ => None,
        };
        let known: Vec<Init> = self.0.iter().flatten().filter_map(known).collect();
        let single = |(at, guess): (usize, &Option<Guess>)| match guess {
            Some(Guess::Single { scales, .. }) => Some((at, *scales)),
            _ => None,
        };
        let singles: Vec<(usize, Scales)> = self.0.iter().enumerate().filter_map(single).collect();
        let resolved = self.0.into_iter().enumerate().map(|(at, guess)| match guess? {
            Guess::Is(own) => Some(own),
            Guess::Held => None,
            Guess::Single { scales, held } => {
                let others = singles.iter().filter(|(other, _)| *other != at).map(|(_, scales)| *scales);
                let drawn = scales.confirmed(&known, others).map(OwnInit::Drawn);
                drawn.or((!held).then_some(OwnInit::Unknown))
            }
        });
        resolved.collect()
    }
}

impl Scales {
    /// Resolves a guess from a single number, which fits any distribution around zero. It takes the
    /// distribution of another parameter of the same layer: the bias of a linear layer with one output is
    /// drawn like its weights.
    fn confirmed(self, known: &[Init], mut singles: impl Iterator<Item = Self> + Clone) -> Option<Init> {
        let same = |init: &&Init| match **init {
            Init::Uniform(bound) => close(bound, self.uniform.abs(), bound),
            Init::Normal(deviation) => close(deviation, self.normal.abs(), deviation),
            _ => false,
        };
        if let Some(init) = known.iter().find(same) {
            return Some(*init);
        }
        if singles.clone().any(|other| close(self.uniform, other.uniform, self.uniform)) {
            return Some(Init::Uniform(self.uniform.abs()));
        }
        let normal = singles.any(|other| close(self.normal, other.normal, self.normal));
        normal.then(|| Init::Normal(self.normal.abs()))
    }
}

fn close(a: f64, b: f64, scale: f64) -> bool {
    (a - b).abs() <= 1e-5 * scale.abs()
}

fn guess<const D: usize>(param: Param<Tensor<D>>) -> Guess {
    let unknown = Guess::Is(OwnInit::Unknown);
    let Some(form) = ParameterForm::from_param(&param) else { return unknown };
    let held = param.is_initialized();
    let mut drawn: Vec<usize> = vec![0; D];
    form.order.iter().zip(&form.shape).for_each(|(&at, &size)| drawn[at] = size);
    let generator = Generator::seeded(&drawn);
    let first = generator.draw(StandardDraw::Uniform, 1)[0];
    generator.restart();
    let value = Module::to_device(param, &Device::flex()).into_value();
    let drew = !held && generator.draw(StandardDraw::Uniform, 1)[0] != first;
    if value.shape().to_vec() != form.shape || value.dtype() != DType::F32 {
        return unknown;
    }
    let host = AnyTensor::from(value.clone().permute(form.inverse::<D>())).into_host();
    let values = host.as_f32();
    let constant = values.iter().all(|x| x.to_bits() == values[0].to_bits());
    match values {
        // A constant is the same with any seed.
        [] | [_, _, ..] if held && constant => Guess::Held,
        _ if held => generator.recognise(values, held).unwrap_or(Guess::Held),
        _ if drew && !(constant && values.len() > 1) => generator.recognise(values, held).unwrap_or(unknown),
        _ if constant => {
            let value = values.first().copied().unwrap_or_default();
            Guess::Is(OwnInit::Drawn(Init::constant(value)))
        }
        _ => Guess::Is(OwnInit::Fixed(AnyTensor::from(value).into_host())),
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum StandardDraw {
    Uniform,
    Normal,
}

impl StandardDraw {
    fn distribution(self) -> Distribution {
        match self {
            Self::Uniform => Distribution::Uniform(0.0, 1.0),
            Self::Normal => Distribution::Normal(0.0, 1.0),
        }
    }

    /// The distribution of `at + slope` times a standard draw.
    fn init(self, line: LineFit) -> Init {
        let LineFit { at, slope } = line;
        match self {
            Self::Uniform => {
                let (low, high) = (at.min(at + slope), at.max(at + slope));
                match close(low, -high, high - low) {
                    true => Init::Uniform((high - low) / 2.0),
                    false => Init::UniformIn { low, high },
                }
            }
            Self::Normal if close(at, 0.0, slope) => Init::Normal(slope.abs()),
            Self::Normal => Init::NormalAround { mean: at, deviation: slope.abs() },
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct LineFit {
    at: f64,
    slope: f64,
}

impl LineFit {
    /// Returns the line through the smallest and the largest of the standard draws. With only two draws any
    /// two-parameter distribution would fit, so the line then passes through the origin (a distribution
    /// around zero).
    fn through(kind: StandardDraw, draws: &[f32], values: &[f32]) -> Self {
        let order = |a: &usize, b: &usize| draws[*a].total_cmp(&draws[*b]);
        let least = (0..draws.len()).min_by(order).unwrap_or_default();
        let most = (0..draws.len()).max_by(order).unwrap_or_default();
        let at = |i: usize| (f64::from(draws[i]), f64::from(values[i]));
        let ((x, y), (x2, y2)) = (at(least), at(most));
        match (draws.len(), kind) {
            (3.., _) => {
                let slope = (y2 - y) / (x2 - x);
                Self { at: y - slope * x, slope }
            }
            (_, StandardDraw::Uniform) => {
                let bound = y / (2.0 * x - 1.0);
                Self { at: -bound, slope: 2.0 * bound }
            }
            (_, StandardDraw::Normal) => Self { at: 0.0, slope: y / x },
        }
    }

    fn fits(self, draws: &[f32], values: &[f32]) -> bool {
        let scale = self.at.abs() + self.slope.abs();
        let fits = |(x, y): (&f32, &f32)| close(self.at + self.slope * f64::from(*x), f64::from(*y), scale);
        scale.is_finite() && draws.iter().zip(values).all(fits)
    }
}

/// The number of elements that are drawn and compared per iteration.
const PIECE: usize = 1 << 16;

/// Exclusive use of Burn's process-wide CPU random generator, for as long as this value lives. Code that
/// draws from the generator concurrently without this lock can make a parameter unrecognizable, but never
/// cause a wrong recognition.
struct Generator {
    device: Device,
    seed: u64,
    /// The seed that the generator continues from afterwards, which it drew itself: a program that seeded the
    /// generator sees the same numbers in every run, and one that did not sees different numbers.
    after: u64,
    _lock: MutexGuard<'static, ()>,
}

static LOCK: Mutex<()> = Mutex::new(());

impl Generator {
    /// Seeds the generator by the shape of the parameter, so that a parameter is recognized wherever it
    /// appears and the parameters of one layer are drawn differently.
    fn seeded(shape: &[usize]) -> Self {
        let lock = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
        let device = Device::flex();
        let words = draw(&device, StandardDraw::Uniform, 4).into_iter().map(|x| u64::from(x.to_bits()));
        let after = words.fold(Key::new(0), Key::fold).number();
        let root = Key::new(0x6F77_6E69_6E69_7421).fold(shape.len() as u64);
        let seed = shape.iter().fold(root, |key, &size| key.fold(size as u64)).number();
        let generator = Self { device, seed, after, _lock: lock };
        generator.restart();
        generator
    }

    fn restart(&self) {
        seed(&self.device, self.seed);
    }

    fn draw(&self, kind: StandardDraw, count: usize) -> Vec<f32> {
        draw(&self.device, kind, count)
    }

    /// Recognizes the distribution of values drawn from the start of the generator.
    fn recognise(&self, values: &[f32], held: bool) -> Option<Guess> {
        if let [value] = values {
            let scale = |kind: StandardDraw| {
                self.restart();
                LineFit::through(kind, &self.draw(kind, 1), &[*value])
            };
            let (uniform, normal) =
                (scale(StandardDraw::Uniform).slope / 2.0, scale(StandardDraw::Normal).slope);
            return Some(Guess::Single { scales: Scales { uniform, normal }, held });
        }
        let kinds = [StandardDraw::Uniform, StandardDraw::Normal].into_iter();
        let line = kinds.filter_map(|kind| self.line(kind, values).map(|line| (kind, line))).next();
        line.map(|(kind, line)| Guess::Is(OwnInit::Drawn(kind.init(line))))
    }

    fn line(&self, kind: StandardDraw, values: &[f32]) -> Option<LineFit> {
        self.restart();
        let mut line = None;
        for values in values.chunks(PIECE) {
            let draws = self.draw(kind, values.len());
            let line = *line.get_or_insert_with(|| LineFit::through(kind, &draws, values));
            if !line.fits(&draws, values) {
                return None;
            }
        }
        line
    }
}

impl Drop for Generator {
    fn drop(&mut self) {
        seed(&self.device, self.after);
    }
}

#[expect(clippy::disallowed_methods, reason = "no task uses these draws")]
fn seed(device: &Device, seed: u64) {
    device.seed(seed);
}

#[expect(clippy::disallowed_methods, reason = "no task uses these draws")]
fn draw(device: &Device, kind: StandardDraw, count: usize) -> Vec<f32> {
    let draws = Tensor::<1>::random([count], kind.distribution(), (device, DType::F32));
    AnyTensor::from(draws).into_host().as_f32().to_vec()
}
