//! Bytes and tensors in the memory of a device.
//!
//! A CPU device computes on host memory in place, so there both are [`bytes::Bytes`]. A GPU has memory that
//! only its kernels and its copies reach: behind the port [`DeviceBuffer`].

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

    /// The bytes in `range`, which is within these.
    fn slice(&self, range: Range<usize>) -> Arc<dyn DeviceBuffer>;

    /// Returns whether some of these bytes are some of the others, in memory that does not stay for whoever views it.
    fn overlaps(&self, other: &dyn DeviceBuffer) -> bool;

    /// The bytes as a tensor for Burn, without a copy.
    fn tensor(&self, shape: &[usize], dtype: DType, device: &Device) -> AnyTensor;

    /// A copy of these bytes on the same device, in memory that stays for whoever views it.
    fn copied(&self) -> Arc<dyn DeviceBuffer>;

    /// These bytes on a lease, which is dropped with the last clone and slice of what is given, also while tensors
    /// view them. Their memory does not stay for whoever views it.
    fn leased(&self, lease: Arc<dyn Any + Send + Sync>) -> Arc<dyn DeviceBuffer>;

    /// The buffer, for those who know its type.
    fn as_any(&self) -> &dyn Any;
}

/// Bytes in the memory of a device: shared when cloned or sliced, and never written again.
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

    /// The bytes in `range`; they keep all of them in memory.
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

    /// These bytes on a lease; see [`DeviceBuffer::leased`].
    pub fn leased(&self, lease: Arc<dyn Any + Send + Sync>) -> Self {
        match self {
            Self::Host(bytes) => Self::Host(leased(bytes.clone(), lease)),
            Self::Buffer(buffer) => Self::Buffer(buffer.leased(lease)),
        }
    }

    /// The bytes as host memory, where they are.
    pub fn as_host(&self) -> Option<&Bytes> {
        match self {
            Self::Host(bytes) => Some(bytes),
            Self::Buffer(_) => None,
        }
    }

    /// The bytes as a buffer of this type, where they are.
    pub fn as_buffer<B: DeviceBuffer + 'static>(&self) -> Option<&B> {
        match self {
            Self::Host(_) => None,
            Self::Buffer(buffer) => buffer.as_any().downcast_ref(),
        }
    }

    /// Returns whether some of these bytes are some of the others, in memory that does not stay for whoever views it.
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

/// Bytes on a lease, which is dropped behind them with the last clone and slice of what is given.
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

/// A tensor in the memory of a device, as shard tasks take and leave it: bytes that are shared when cloned
/// and never written.
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
    /// A view of bytes, such as a slice of a buffer.
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

    /// A copy of memory that is its own, on the same device.
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

/// Why a device could not finish what it was given.
///
/// A tensor that could not be computed panics when it is read, with this as the panic's payload.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "each field is what the message says of it")]
pub enum DeviceError {
    /// There was no memory for what had to be computed.
    #[error("the device had no memory left for {}", ByteSize(*bytes))]
    OutOfMemory {
        /// The bytes of the allocation that failed; zero if the runtime does not tell.
        bytes: u64,
    },
    /// Something else went wrong.
    #[error("the device could not finish its work: {message}")]
    Failed { message: String },
}

impl DeviceError {
    /// The error with what a runtime says, as far as that is for people: traces of its stack are left out.
    pub fn new(message: impl fmt::Display) -> Self {
        let message = message.to_string();
        let trace = |line: &&str| line.starts_with("Backtrace") || line.starts_with("No backtrace");
        let lines: Vec<&str> = message.lines().take_while(|line| !trace(line)).map(str::trim).collect();
        Self::Failed { message: lines.join(" ") }
    }

    /// The device error that a panic carries, if it was about a device.
    pub fn of_panic(panic: &dyn Any) -> Option<&Self> {
        panic.downcast_ref()
    }
}

/// The message of a caught panic: its text, or what the device said, if it was about one.
pub fn panic_message(panic: &dyn Any) -> String {
    let device = DeviceError::of_panic(panic).map(ToString::to_string);
    let text = device.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".to_owned())
}

/// Waits until `device` has finished all that the calling thread gave it.
pub(super) fn sync(device: &Device) -> Result<(), DeviceError> {
    device.sync().map_err(|error| DeviceError::new(format!("{error:?}")))
}
