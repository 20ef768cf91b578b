//! The threads that read batches and write models and checkpoints.
//!
//! May touch: the protocol, checkpoints, and the store that it receives.
//! Never: decides the content or the time of a read or write.

pub(crate) mod loader;
pub(crate) mod writer;
