//! How the initializer of a Burn module draws, recognised from what it gives once.
//!
//! A lazy parameter holds a closure that can be called once and that draws from a generator of the whole process.
//! First values of a task are a function of its seed instead, so what is wanted of the closure is only its
//! distribution. It is called under a known seed, and its values are compared with those that the same generator gives
//! under the same seed for the standard uniform and the standard normal distribution: those of another uniform or
//! normal distribution are a linear function of them. So the distribution's numbers are found, whatever formula or
//! closure they come from, and the values are thrown away.

use crate::{AnyTensor, HostTensor, Init, Key};
use burn::module::{Module, Param};
use burn::tensor::{DType, Device, Distribution, Tensor};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The first values that the initializer of a lazy parameter gives.
#[derive(Clone, Debug, PartialEq)]
pub enum OwnInit {
    /// Draws of a distribution, or one value everywhere.
    Drawn(Init),
    /// Values that are no draws, such as a table of sines.
    Fixed(HostTensor),
    /// Draws of a distribution that is not recognised.
    Unknown,
}

/// How a parameter lies: a module may keep it transposed and turn it when it initializes it, as Burn's `Linear` does
/// with `LinearLayout::Col`.
#[derive(Clone, Debug)]
pub(crate) struct Form {
    /// The shape that forwards see.
    pub shape: Vec<usize>,
    /// The place of each of its dimensions in the shape that the initializer draws.
    order: Vec<usize>,
    /// True if Burn trains it.
    pub trained: bool,
}

impl Form {
    /// The form of a parameter, which is not initialized for it; `None` if the module does something else with what it
    /// loads than to permute its dimensions.
    pub fn of<const D: usize>(param: &Param<Tensor<D>>) -> Option<Self> {
        // What a load does to a tensor whose dimensions can be told apart. It also gives it the parameter's wish for
        // gradients, which Burn shows nobody before a lazy parameter is initialized.
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

    /// The axes that turn what forwards see into what the initializer drew.
    fn inverse<const D: usize>(&self) -> [isize; D] {
        let mut inverse = [0; D];
        for (at, &from) in self.order.iter().enumerate() {
            inverse[from] = at as isize;
        }
        inverse
    }
}

/// A guess at an initializer from one parameter's values.
#[derive(Clone, Debug)]
enum Guess {
    Is(OwnInit),
    /// One draw, of a distribution around zero with one of these bounds or deviations. Where it is none after all, the
    /// value is kept if the parameter held it.
    Single {
        scales: Scales,
        held: bool,
    },
    /// A parameter that held values, which are not what an initializer gave here before.
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
    /// Passes over a parameter.
    pub fn skip(&mut self) {
        self.0.push(None);
    }

    /// Initializes a lazy parameter and recognises what it gives. One that holds values already is recognised too, if
    /// they are those that it was given here: clones of a lazy parameter share its values.
    pub fn add<const D: usize>(&mut self, param: Param<Tensor<D>>) {
        self.0.push(Some(guess(param)));
    }

    /// Returns the recognised initializers; `None` where nothing was asked, or where values are to be kept.
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
    /// One draw fits any distribution around zero. It is taken for that of another parameter of its layer: the bias of
    /// a linear layer with one output is drawn as its weights are.
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
    let Some(form) = Form::of(&param) else { return unknown };
    let held = param.is_initialized();
    let mut drawn: Vec<usize> = vec![0; D];
    form.order.iter().zip(&form.shape).for_each(|(&at, &size)| drawn[at] = size);
    let generator = Generator::seeded(&drawn);
    let first = generator.draw(Kind::Uniform, 1)[0];
    generator.restart();
    let value = Module::to_device(param, &Device::flex()).into_value();
    let drew = !held && generator.draw(Kind::Uniform, 1)[0] != first;
    if value.shape().to_vec() != form.shape || value.dtype() != DType::F32 {
        return unknown;
    }
    let host = AnyTensor::from(value.clone().permute(form.inverse::<D>())).into_host();
    let values = host.as_f32();
    let constant = values.iter().all(|x| x.to_bits() == values[0].to_bits());
    match values {
        // The same value everywhere is the same value with any seed.
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
enum Kind {
    Uniform,
    Normal,
}

impl Kind {
    fn distribution(self) -> Distribution {
        match self {
            Self::Uniform => Distribution::Uniform(0.0, 1.0),
            Self::Normal => Distribution::Normal(0.0, 1.0),
        }
    }

    /// The distribution of `at + slope` times a standard draw.
    fn init(self, line: Line) -> Init {
        let Line { at, slope } = line;
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
struct Line {
    at: f64,
    slope: f64,
}

impl Line {
    /// The line through the smallest and the largest of the standard draws, or through the origin of a distribution
    /// around zero, where there are only two draws and two unknown numbers would fit any.
    fn through(kind: Kind, draws: &[f32], values: &[f32]) -> Self {
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
            (_, Kind::Uniform) => {
                let bound = y / (2.0 * x - 1.0);
                Self { at: -bound, slope: 2.0 * bound }
            }
            (_, Kind::Normal) => Self { at: 0.0, slope: y / x },
        }
    }

    fn fits(self, draws: &[f32], values: &[f32]) -> bool {
        let scale = self.at.abs() + self.slope.abs();
        let fits = |(x, y): (&f32, &f32)| close(self.at + self.slope * f64::from(*x), f64::from(*y), scale);
        scale.is_finite() && draws.iter().zip(values).all(fits)
    }
}

/// Elements that are drawn and compared at a time.
const PIECE: usize = 1 << 16;

/// Burn's generator of random numbers on the CPU, of which a process has one, for as long as this lives. Others that
/// draw from it meanwhile without asking make a parameter unrecognisable, and never recognised wrongly.
struct Generator {
    device: Device,
    seed: u64,
    /// The number that the generator goes on from afterwards, which it gave itself: who seeded it before finds the same
    /// numbers in every run, and who did not, others.
    after: u64,
    _lock: MutexGuard<'static, ()>,
}

static LOCK: Mutex<()> = Mutex::new(());

impl Generator {
    /// The generator with a seed that belongs to the shape of what is drawn, so that a parameter is recognised
    /// wherever it turns up, and those of one layer are drawn differently.
    fn seeded(shape: &[usize]) -> Self {
        let lock = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
        let device = Device::flex();
        let words = draw(&device, Kind::Uniform, 4).into_iter().map(|x| u64::from(x.to_bits()));
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

    fn draw(&self, kind: Kind, count: usize) -> Vec<f32> {
        draw(&self.device, kind, count)
    }

    /// The distribution of what was drawn from the beginning.
    fn recognise(&self, values: &[f32], held: bool) -> Option<Guess> {
        if let [value] = values {
            let scale = |kind: Kind| {
                self.restart();
                Line::through(kind, &self.draw(kind, 1), &[*value])
            };
            let (uniform, normal) = (scale(Kind::Uniform).slope / 2.0, scale(Kind::Normal).slope);
            return Some(Guess::Single { scales: Scales { uniform, normal }, held });
        }
        let kinds = [Kind::Uniform, Kind::Normal].into_iter();
        let line = kinds.filter_map(|kind| self.line(kind, values).map(|line| (kind, line))).next();
        line.map(|(kind, line)| Guess::Is(OwnInit::Drawn(kind.init(line))))
    }

    fn line(&self, kind: Kind, values: &[f32]) -> Option<Line> {
        self.restart();
        let mut line = None;
        for values in values.chunks(PIECE) {
            let draws = self.draw(kind, values.len());
            let line = *line.get_or_insert_with(|| Line::through(kind, &draws, values));
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

#[expect(clippy::disallowed_methods, reason = "no task uses what is drawn")]
fn seed(device: &Device, seed: u64) {
    device.seed(seed);
}

#[expect(clippy::disallowed_methods, reason = "no task uses what is drawn")]
fn draw(device: &Device, kind: Kind, count: usize) -> Vec<f32> {
    let draws = Tensor::<1>::random([count], kind.distribution(), (device, DType::F32));
    AnyTensor::from(draws).into_host().as_f32().to_vec()
}
