//! The threads that read batches and write models and checkpoints.
//!
//! May touch: the protocol, checkpoints, and the store that it is given.
//! Never: decides what is read or written, or when.

pub(crate) mod loader;
pub(crate) mod writer;
