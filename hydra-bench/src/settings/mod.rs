//! The settings of commands: each group of flags is one struct, which the command line and `spec.toml` read alike.
//! It may touch the library's types that settings name, and `machine` for what follows from it.
//! It never opens a device, a model or a run directory.

pub(crate) mod args;
pub(crate) mod values;
