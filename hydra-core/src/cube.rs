//! Buffers of CubeCL, the runtime of all GPUs, as the memory of devices.

use crate::activation::by_rank;
use crate::{AnyTensor, DeviceBytes, DeviceError, DeviceId, DeviceTensor, MemoryProbe};
use burn::backend::Cube;
use burn::tensor::{DType, Device, Int, Shape, Tensor};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::MemoryScope;
use cubecl::client::Client;
use cubecl::server::Handle;
use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// A device of CubeCL.
pub type CubeDevice = cubecl::Device;

/// A range of a buffer of CubeCL.
#[derive(Clone)]
pub struct CubeBytes {
    client: Client,
    device: CubeDevice,
    handle: Handle,
    /// Dropped with the last clone. The memory of what has a lease does not stay for whoever views it.
    lease: Option<Arc<dyn Any + Send + Sync>>,
}

impl fmt::Debug for CubeBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CubeBytes").field("device", &self.device).field("handle", &self.handle).finish()
    }
}

impl CubeBytes {
    /// All bytes of a buffer, which stay for as long as anybody views them.
    pub fn new(client: Client, device: CubeDevice, handle: Handle) -> Self {
        Self { client, device, handle, lease: None }
    }

    /// These bytes on a lease: `lease` is dropped with the last clone and slice, also while tensors view the
    /// bytes, and whoever gave it may then write others there.
    pub fn on_lease(self, lease: Arc<dyn Any + Send + Sync>) -> Self {
        Self { lease: Some(lease), ..self }
    }

    /// The number of bytes.
    pub fn len(&self) -> usize {
        self.handle.size_in_used() as usize
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The buffer with the range's offsets.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// The client of the device.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// The bytes in `range`.
    ///
    /// # Panics
    /// If the range ends beyond the bytes.
    #[track_caller]
    pub fn slice(&self, range: Range<usize>) -> Self {
        let len = self.len();
        assert!(range.start <= range.end && range.end <= len, "bytes {range:?} of {len}");
        let handle = self.handle.clone().offset_start(range.start as u64);
        Self { handle: handle.offset_end((len - range.end) as u64), ..self.clone() }
    }

    /// Whether some of these bytes are some of the others, of which one is on a lease.
    pub fn overlaps(&self, other: &Self) -> bool {
        let range = |of: &Self| {
            let start = of.handle.offset_start.unwrap_or(0);
            start..start + of.handle.size_in_used()
        };
        (self.lease.is_some() || other.lease.is_some())
            && self.handle.memory.descriptor().id == other.handle.memory.descriptor().id
            && range(self).start < range(other).end
            && range(other).start < range(self).end
    }

    /// A copy of these bytes in a buffer of its own. They travel through the host: layers seldom pass on what
    /// was promoted.
    pub(crate) fn apart(&self) -> Self {
        let bytes = self.client.read_one_unchecked(self.handle.clone());
        Self { handle: self.client.create(bytes), lease: None, ..self.clone() }
    }

    /// The tensor of these bytes on the plain or the autodiff device.
    pub(crate) fn tensor(&self, shape: &[usize], dtype: DType, device: &Device) -> AnyTensor {
        let (client, place) = (self.client.clone(), self.device.clone());
        let shape = Shape::from(shape.to_vec());
        let primitive = CubeTensor::new_contiguous(client, place, shape, self.handle.clone(), dtype);
        by_rank!(primitive.meta.shape().num_dims(), D => if dtype.is_float() {
            let tensor = Tensor::<D>::from_primitive::<Cube>(primitive);
            if device.is_autodiff() { tensor.autodiff().into() } else { tensor.into() }
        } else {
            let tensor = Tensor::<D, Int>::from_primitive::<Cube>(primitive);
            if device.is_autodiff() { tensor.autodiff().into() } else { tensor.into() }
        })
    }
}

/// The tensor's bytes, in row-major order, if CubeCL has them.
pub(crate) fn resident(tensor: &AnyTensor) -> Option<DeviceTensor> {
    let primitive = by_rank!(tensor.rank(), D => match tensor.clone() {
        AnyTensor::Float(t) => {
            let t = Tensor::<D>::from_dispatch(t);
            let t = if t.device().is_autodiff() { t.inner() } else { t };
            t.try_into_primitive::<Cube>().ok()
        }
        AnyTensor::Int(t) => {
            let t = Tensor::<D, Int>::from_dispatch(t);
            let t = if t.device().is_autodiff() { t.inner() } else { t };
            t.try_into_primitive::<Cube>().ok()
        }
    })?;
    let CubeTensor { client, handle, meta, device, dtype, .. } = into_contiguous(primitive);
    let shape = meta.shape().to_vec();
    Some(DeviceTensor::view(DeviceBytes::Cube(CubeBytes::new(client, device, handle)), shape, dtype))
}

/// Asks for what could not be computed: a failed allocation or launch is known to the buffers that lack its
/// result, and to nothing else.
pub(crate) fn check(made: &[&DeviceTensor]) -> Result<(), DeviceError> {
    let cubes = made.iter().filter_map(|tensor| match &tensor.bytes {
        DeviceBytes::Cube(bytes) => Some(bytes),
        DeviceBytes::Host(_) => None,
    });
    let cubes: Vec<&CubeBytes> = cubes.collect();
    let Some(first) = cubes.first() else { return Ok(()) };
    first.client.check(cubes.iter().map(|bytes| &bytes.handle)).map_err(DeviceError::new)
}

/// Measures a device by CubeCL's own report of its pools.
///
/// A report has no peak in bytes. What the pools have reserved since they were last cleaned up stands for it:
/// it is what the device really gave, padding and fragments included.
pub struct CubeProbe {
    client: Client,
}

impl CubeProbe {
    /// The probe of the device of this client, whatever identity it is asked for.
    pub fn new(client: Client) -> Self {
        Self { client }
    }
}

impl MemoryProbe for CubeProbe {
    fn measures(&self) -> bool {
        true
    }

    fn in_use(&self, _: DeviceId) -> u64 {
        let usage = self.client.memory_report(MemoryScope::Device).usage();
        usage.bytes_in_use + usage.bytes_padding
    }

    fn peak(&self, _: DeviceId) -> u64 {
        self.client.memory_report(MemoryScope::Device).usage().bytes_reserved
    }

    fn reset_peak(&self, _: DeviceId) {
        // Refused only while a graph is recorded, which nobody does.
        let _ = self.client.memory_cleanup();
    }
}
