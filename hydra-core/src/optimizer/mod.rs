//! The port of optimizers, and those that come with Hydra, each in a file of its own.
//!
//! An [`Optimizer`] says by what name and settings files know it, how many moments it keeps for each parameter, and
//! how one element moves. Everything else is the same for all of them and is none of its business: where masters
//! and moments live, who adds gradients up, clipping, threads, rounding to 16 bits, checkpoints.
//!
//! The rule is handed [`Elements`] and can do one thing with them: [`Elements::update`] by a function of one
//! element's own parameter, gradient and moments. So no rule can make its bits depend on how a buffer is cut into
//! pieces or on how many threads step it, and none can forget the factor that clips the gradient. The price is that
//! a rule which looks at a whole matrix at once (LAMB, Muon) does not fit this port.
//!
//! The call through the trait object is made once for some thousands of elements; the loop over them is compiled
//! with the formula in it, for the widest vectors of the processor.
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
mod elements;
mod lion;
mod sgd;
mod spec;

pub use adamw::{AdamW, AdamWConstants};
pub use elements::Elements;
pub use lion::Lion;
pub use sgd::{Sgd, SgdConstants};
pub use spec::OptimizerSpec;

use crate::{CoreError, Settings};
use std::any::Any;
use std::fmt;

/// The optimizers that files and command lines may name without a task that brings them.
const REGISTERED: &[Registered] = &[adamw::REGISTERED, sgd::REGISTERED, lion::REGISTERED];

/// An optimizer by its name.
struct Registered {
    name: &'static str,
    /// One with this learning rate and weight decay, and what is usual otherwise.
    new: fn(f64, f64) -> OptimizerSpec,
    /// One with the settings of a file.
    read: fn(&Settings) -> Result<OptimizerSpec, CoreError>,
}

/// A rule by which parameters follow their gradients.
///
/// See [the module](self) for what it may and may not do, and for an example.
pub trait Optimizer: Any + fmt::Debug + Send + Sync {
    /// The name that files and checkpoints know it by, which no other optimizer has.
    fn name(&self) -> &str;

    /// Everything that its steps depend on beside the [`Step`]. Two optimizers of one name and equal settings are the
    /// same one: a task goes on from the other's checkpoint.
    fn settings(&self) -> Settings;

    /// The base learning rate, which the schedule scales.
    fn lr(&self) -> f64;

    /// How many moments it keeps for each parameter: `f32`, zero before the first step, in checkpoints as
    /// `moment1/NAME`, `moment2/NAME` and so on.
    fn moments(&self) -> usize;

    /// Checks every setting against its range; the learning rate has been checked.
    ///
    /// # Errors
    /// [`CoreError::Spec`] with the first one that is out of it.
    fn validate(&self) -> Result<(), CoreError> {
        Ok(())
    }

    /// Takes one step of some elements of a parameter.
    fn update(&self, step: &Step, elements: Elements<'_, '_>);
}

impl dyn Optimizer {
    /// The rule, if it is of this type.
    pub fn downcast_ref<R: Optimizer>(&self) -> Option<&R> {
        (self as &dyn Any).downcast_ref()
    }
}

/// One step, as far as it is the same for all elements of a parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// The minibatch, from zero.
    pub index: usize,
    /// The learning rate, scheduled.
    pub rate: f64,
    /// True if the parameter is one of those that decay.
    pub decays: bool,
}
