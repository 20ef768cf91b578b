//! Images with classes, for models that read them.
//!
//! A [`ImageSource`] is a directory with a folder for each split and in it one for each class, or CIFAR-10's binary
//! files. A [`Preprocessor`] makes a model's input of an image, as the `preprocessor_config.json` of its directory says, and
//! [`Images`] is the dataset of a split.

mod cifar;
mod dataset;
mod decode;
mod folder;
mod jpeg;
mod memory;
mod orientation;
mod png;
mod preprocessor;
mod resample;
mod source;

pub use dataset::Images;
pub use folder::Unread;
pub use jpeg::JpegError;
pub use memory::DecodeMemory;
pub use preprocessor::{PREPROCESSOR, Preprocessor};
pub use source::{ImageSource, Parted};
