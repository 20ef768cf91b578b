//! Images with classes.
//!
//! An [`ImageSource`] is a directory with a folder per split and in it one per class, or CIFAR-10's binary files. A
//! [`Preprocessor`] turns an image into a model's input, as the model's `preprocessor_config.json` specifies.
//! [`Images`] is the dataset of a split.

mod cifar;
mod dataset;
mod decode;
mod jpeg;
mod memory;
mod orientation;
mod png;
mod preprocessor;
mod resample;
mod source;

pub use dataset::Images;
pub use jpeg::JpegError;
pub use memory::DecodeMemory;
pub(crate) use preprocessor::preprocessed_side;
pub use preprocessor::{PREPROCESSOR, Preprocessor};
pub use source::ImageSource;
