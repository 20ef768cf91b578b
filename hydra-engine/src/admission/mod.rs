//! Admission: decides before a run starts how much memory it takes and where everything is stored. Tasks are
//! measured, cut, placed and, if they fit, admitted.
//!
//! May touch: devices, for their pilot passes; tasks as they were submitted; memory as numbers.
//! Never: trains, starts a thread of a run, or changes its inputs.

mod admit;
mod alike;
mod buffers;
mod check;
mod cut;
mod disk;
mod division;
mod gradients;
mod host_memory;
mod identities;
mod in_place;
mod measure;
mod microbatch_group;
mod partial;
mod placement;
mod plan;
mod running;
mod search;
mod settings;
mod shared;
mod sizes;
mod skipped;
mod sums;
mod timing;
mod traffic;

pub(crate) use admit::admit;
pub use admit::{Admission, AdmittedTask, Estimate, MinibatchMemory, Storage, TrainingData};
pub(crate) use buffers::{ShardBuffers, best_bytes, initial_bytes, is_narrowed, stepped_bytes, stored_bytes};
pub(crate) use disk::DiskTier;
pub(crate) use division::groups;
pub(crate) use gradients::{GradientBytes, Window};
pub(crate) use host_memory::DiskSpec;
pub(crate) use identities::{check as check_identity, identities};
pub use in_place::FrozenWeights;
pub use measure::Measurements;
pub use placement::{OptimizerPlacement, Place, Placement};
pub(crate) use running::RunningTasks;
pub(crate) use settings::AdmissionSettings;
pub(crate) use shared::{SharedBuffer, bytes_once};
pub use skipped::Skipped;
pub(crate) use timing::timed_plans;
pub(crate) use traffic::{Boundaries, gradient_bytes};
