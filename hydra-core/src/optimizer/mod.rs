//! The optimizer interface, and the built-in optimizers, each in its own file.
//!
//! An [`Optimizer`] defines its name and settings in files, the number of moments per parameter, and the
//! update of one element. It can name an [encoding](MomentEncoding) of its moments. Everything else is common to all optimizers and implemented elsewhere: the location
//! of master weights and moments, gradient accumulation, clipping, threading, rounding to 16 bits,
//! checkpoints.
//!
//! An optimizer receives [`Elements`], whose only operation is [`Elements::update`] with a function of one
//! element's own parameter, gradient and moments. Therefore its results cannot depend on how a buffer is
//! split or on the number of threads, and it cannot omit gradient clipping. The limitation is that an
//! optimizer that needs a whole matrix (LAMB, Muon) does not fit this interface.
//!
//! The trait object is called once per some thousands of elements; the loop over them is compiled
//! together with the formula, for the processor's widest vector instructions.
//!
//! ```
//! use hydra_core::optimizer::{Elements, Optimizer, Step};
//! use hydra_core::{Settings, TrainSpec};
//!
//! /// Gradient descent by the sign alone (Bernstein et al., "signSGD", ICML 2018).
//! #[derive(Debug)]
//! struct SignSgd {
//!     lr: f64,
//! }
//!
//! impl Optimizer for SignSgd {
//!     fn name(&self) -> &str {
//!         "sign-sgd"
//!     }
//!     fn settings(&self) -> Settings {
//!         Settings::new().with("lr", self.lr)
//!     }
//!     fn lr(&self) -> f64 {
//!         self.lr
//!     }
//!     fn moments(&self) -> usize {
//!         0
//!     }
//!     fn update(&self, step: &Step, elements: Elements<'_, '_>) {
//!         let rate = step.rate as f32;
//!         elements.update(|p, g, []| (p - rate * g.signum(), []));
//!     }
//! }
//!
//! let spec = TrainSpec::new(SignSgd { lr: 1e-3 }, 8);
//! assert_eq!(spec.optimizer.name(), "sign-sgd");
//! ```

mod adamw;
mod adamw8bit;
pub mod dynamic8;
mod elements;
mod lion;
mod moments;
mod sgd;
mod spec;

pub use adamw::{AdamW, AdamWConstants};
pub use adamw8bit::AdamW8bit;
pub use elements::Elements;
pub use lion::Lion;
pub use moments::{MomentEncoding, MomentLayout, MomentMut};
pub use sgd::{Sgd, SgdConstants};
pub use spec::OptimizerSpec;

use crate::{CoreError, ParamBufferLayout, Settings};
use std::any::Any;
use std::fmt;

/// The optimizers that files and command lines can select by name.
const REGISTERED: &[Registered] =
    &[adamw::REGISTERED, adamw8bit::REGISTERED, sgd::REGISTERED, lion::REGISTERED];

/// A built-in optimizer.
struct Registered {
    name: &'static str,
    /// Creates it with this learning rate and weight decay, and default settings otherwise.
    new: fn(f64, f64) -> OptimizerSpec,
    /// Creates it from the settings in a file.
    read: fn(&Settings) -> Result<OptimizerSpec, CoreError>,
}

/// An optimizer: the rule that updates parameters from their gradients.
///
/// See [the module](self) for its limits and an example.
pub trait Optimizer: Any + fmt::Debug + Send + Sync {
    /// The unique name of the optimizer in files and checkpoints.
    fn name(&self) -> &str;

    /// Everything that its steps depend on besides the [`Step`]. Two optimizers with the same name and equal
    /// settings are equal: a task can resume from the other's checkpoint.
    fn settings(&self) -> Settings;

    /// The base learning rate, which the schedule scales.
    fn lr(&self) -> f64;

    /// The number of moments per parameter: zero before the first step, stored in checkpoints as
    /// `moment1/NAME`, `moment2/NAME` and so on.
    fn moments(&self) -> usize;

    /// How the moment of this index is stored between steps. Steps compute with its `f32` values.
    fn encoding(&self, _moment: usize) -> MomentEncoding {
        MomentEncoding::F32
    }

    /// Checks every setting against its range, except the learning rate, which is already checked.
    ///
    /// # Errors
    /// [`CoreError::Spec`] with the first setting that is out of range.
    fn validate(&self) -> Result<(), CoreError> {
        Ok(())
    }

    /// Updates some elements of a parameter by one step.
    fn update(&self, step: &Step, elements: Elements<'_, '_>);
}

impl dyn Optimizer {
    /// Returns the optimizer as the type `R`, if it is one.
    pub fn downcast_ref<R: Optimizer>(&self) -> Option<&R> {
        (self as &dyn Any).downcast_ref()
    }

    /// The encodings of all moments: two optimizers with equal ones have the same states in memory.
    pub fn encodings(&self) -> Vec<MomentEncoding> {
        (0..self.moments()).map(|moment| self.encoding(moment)).collect()
    }

    /// Where a store has the elements of each moment of a buffer; a buffer that no optimizer steps has no moments.
    pub fn moment_layouts(&self, buffer: &ParamBufferLayout) -> Vec<MomentLayout> {
        let encodings = if buffer.is_optimized() { self.encodings() } else { Vec::new() };
        encodings.into_iter().map(|encoding| MomentLayout::new(encoding, buffer)).collect()
    }
}

/// The arguments of one step that are the same for all elements of a parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// The minibatch, from zero.
    pub index: usize,
    /// The learning rate from the schedule.
    pub rate: f64,
    /// Whether weight decay applies to the parameter.
    pub decays: bool,
}
