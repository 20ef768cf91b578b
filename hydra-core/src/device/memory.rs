//! Bytes and tensors in device memory.
//!
//! A CPU device computes on host memory in place, so there both are [`bytes::Bytes`]. Only the kernels and
//! copies of a GPU can access its memory, which is behind the trait [`DeviceBuffer`].

use crate::{AnyTensor, ByteSize, HostTensor};
use burn::tensor::{DType, Device};
use bytes::Bytes;
use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// A range of memory that only its device can read.
pub trait DeviceBuffer: fmt::Debug + Send + Sync {
    /// The number of bytes.
    fn len(&self) -> usize;

    /// Returns whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the bytes in `range`, which must be within these.
    fn slice(&self, range: Range<usize>) -> Arc<dyn DeviceBuffer>;

    /// Returns whether the two share bytes in memory that may be reused while views of it exist.
    fn overlaps(&self, other: &dyn DeviceBuffer) -> bool;

    /// Returns the bytes as a Burn tensor, without a copy.
    fn tensor(&self, shape: &[usize], dtype: DType, device: &Device) -> AnyTensor;

    /// Copies these bytes on the same device, into memory that is kept as long as views of it exist.
    fn copied(&self) -> Arc<dyn DeviceBuffer>;

    /// Attaches a lease to these bytes, which is dropped with the last clone and slice of the result, also
    /// while tensors view them. Their memory may be reused while views of it exist.
    fn leased(&self, lease: Arc<dyn Any + Send + Sync>) -> Arc<dyn DeviceBuffer>;

    /// Returns the buffer for a downcast to its type.
    fn as_any(&self) -> &dyn Any;
}

/// Immutable bytes in device memory; clones and slices share them.
#[derive(Clone, Debug)]
pub enum DeviceBytes {
    /// Host memory, on which a CPU device computes in place.
    Host(Bytes),
    /// Memory that the host cannot read.
    Buffer(Arc<dyn DeviceBuffer>),
}

impl Default for DeviceBytes {
    fn default() -> Self {
        Self::Host(Bytes::new())
    }
}

impl DeviceBytes {
    /// The number of bytes.
    pub fn len(&self) -> usize {
        match self {
            Self::Host(bytes) => bytes.len(),
            Self::Buffer(buffer) => buffer.len(),
        }
    }

    /// Returns whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the bytes in `range`; the slice keeps the whole allocation alive.
    ///
    /// # Panics
    /// If the range ends beyond the bytes.
    #[track_caller]
    pub fn slice(&self, range: Range<usize>) -> Self {
        let len = self.len();
        assert!(range.start <= range.end && range.end <= len, "bytes {range:?} of {len}");
        match self {
            Self::Host(bytes) => Self::Host(bytes.slice(range)),
            Self::Buffer(buffer) => Self::Buffer(buffer.slice(range)),
        }
    }

    /// Attaches a lease to these bytes; see [`DeviceBuffer::leased`].
    pub fn leased(&self, lease: Arc<dyn Any + Send + Sync>) -> Self {
        match self {
            Self::Host(bytes) => Self::Host(leased(bytes.clone(), lease)),
            Self::Buffer(buffer) => Self::Buffer(buffer.leased(lease)),
        }
    }

    /// Returns the bytes if they are in host memory.
    pub fn as_host(&self) -> Option<&Bytes> {
        match self {
            Self::Host(bytes) => Some(bytes),
            Self::Buffer(_) => None,
        }
    }

    /// Returns the bytes as a buffer of this type, if they are one.
    pub fn as_buffer<B: DeviceBuffer + 'static>(&self) -> Option<&B> {
        match self {
            Self::Host(_) => None,
            Self::Buffer(buffer) => buffer.as_any().downcast_ref(),
        }
    }

    /// Returns whether the two share bytes in memory that may be reused while views of it exist.
    pub fn overlaps(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Host(a), Self::Host(b)) => {
                let range = |bytes: &Bytes| bytes.as_ptr().addr()..bytes.as_ptr().addr() + bytes.len();
                range(a).start < range(b).end && range(b).start < range(a).end
            }
            (Self::Buffer(a), Self::Buffer(b)) => a.overlaps(b.as_ref()),
            _ => false,
        }
    }
}

/// Attaches a lease to bytes. It is dropped after them, with the last clone and slice of the result.
pub fn leased(bytes: Bytes, lease: Arc<dyn Any + Send + Sync>) -> Bytes {
    Bytes::from_owner(Leased { bytes, _lease: lease })
}

struct Leased {
    bytes: Bytes,
    _lease: Arc<dyn Any + Send + Sync>,
}

impl AsRef<[u8]> for Leased {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl From<Bytes> for DeviceBytes {
    fn from(bytes: Bytes) -> Self {
        Self::Host(bytes)
    }
}

/// A tensor in device memory, as shard tasks receive and return it: immutable bytes, shared by clones.
#[derive(Clone, Debug)]
pub struct DeviceTensor {
    /// The elements in row-major order.
    pub bytes: DeviceBytes,
    /// The sizes of the dimensions.
    pub shape: Vec<usize>,
    /// The type of an element: that of a [`FloatType`](crate::FloatType), or an integer type.
    pub dtype: DType,
}

impl DeviceTensor {
    /// Returns a view of bytes, such as a slice of a buffer.
    pub fn view(bytes: DeviceBytes, shape: impl Into<Vec<usize>>, dtype: DType) -> Self {
        Self { bytes, shape: shape.into(), dtype }
    }

    /// The number of bytes.
    pub fn len_bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// Returns whether the elements are floats.
    pub fn is_float(&self) -> bool {
        self.dtype.is_float()
    }

    /// Copies the tensor into its own memory on the same device.
    pub fn copied(self) -> Self {
        let bytes = match self.bytes {
            DeviceBytes::Host(bytes) => {
                DeviceBytes::Host(HostTensor::view(bytes, self.shape.clone(), self.dtype).copied().bytes)
            }
            DeviceBytes::Buffer(buffer) => DeviceBytes::Buffer(buffer.copied()),
        };
        Self { bytes, ..self }
    }
}

impl From<HostTensor> for DeviceTensor {
    fn from(tensor: HostTensor) -> Self {
        Self { bytes: tensor.bytes.into(), shape: tensor.shape, dtype: tensor.dtype }
    }
}

/// An error of a device.
///
/// A tensor that could not be computed panics when it is read, with this as the panic's payload.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the error messages describe the fields")]
pub enum DeviceError {
    /// An allocation failed.
    #[error("the device is out of memory: an allocation of {} failed", ByteSize(*bytes))]
    OutOfMemory {
        /// The bytes of the failed allocation; zero if the runtime does not report them.
        bytes: u64,
    },
    /// Another failure.
    #[error("the device failed: {message}")]
    Failed { message: String },
}

impl DeviceError {
    /// Returns the error with a runtime's message, without stack traces.
    pub fn new(message: impl fmt::Display) -> Self {
        let message = message.to_string();
        let trace = |line: &&str| line.starts_with("Backtrace") || line.starts_with("No backtrace");
        let lines: Vec<&str> = message.lines().take_while(|line| !trace(line)).map(str::trim).collect();
        Self::Failed { message: lines.join(" ") }
    }

    /// Returns the device error that a panic carries, if any.
    pub fn from_panic(panic: &dyn Any) -> Option<&Self> {
        panic.downcast_ref()
    }
}

/// Returns the message of a caught panic: its text, or the message of the device error that it carries.
pub fn panic_message(panic: &dyn Any) -> String {
    let device = DeviceError::from_panic(panic).map(ToString::to_string);
    let text = device.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".to_owned())
}

/// Waits until `device` has finished all work that the calling thread submitted.
pub(super) fn sync(device: &Device) -> Result<(), DeviceError> {
    device.sync().map_err(|error| DeviceError::new(format!("{error:?}")))
}
