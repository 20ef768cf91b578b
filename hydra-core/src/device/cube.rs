//! Buffers of CubeCL, the runtime of all GPUs, as device memory.

use super::memory::{DeviceBuffer, DeviceBytes, DeviceError, DeviceTensor, sync};
use super::probe::MemoryProbe;
use crate::tensor::{BurnBytes, by_rank};
use crate::{AnyTensor, DeviceId, FloatType, HostTensor};
pub use burn::backend::StreamId;
use burn::backend::{Cube, DispatchDevice};
use burn::tensor::{DType, Device, Int, Shape, Tensor};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::prelude::BufferArg;
use cubecl::server::{Handle, IoError, LaunchError, ServerError};
use cubecl::{MemoryScope, MemoryUsage};
use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A device of CubeCL.
pub type CubeDevice = cubecl::Device;

/// A CubeCL device with its client and stream.
#[derive(Clone)]
pub struct CubeAdapter {
    /// The device for Burn.
    pub burn: Device,
    /// The device for CubeCL.
    pub device: CubeDevice,
    /// Its client.
    pub client: Client,
    /// The CubeCL stream of the thread that opened this adapter and computes on the device. Allocations by
    /// other threads for the device also belong on this stream: CubeCL tracks every use of memory on a stream
    /// other than its own until the device is done with it, and a launch waits if there are too many uses to
    /// track.
    pub stream: StreamId,
}

impl fmt::Debug for CubeAdapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CubeAdapter").field(&self.device).finish()
    }
}

impl CubeAdapter {
    /// Opens the NVIDIA card with this number, in the driver's order.
    ///
    /// CubeCL panics without a driver, the kernel compiler or its headers; check first, as `hydra doctor`
    /// does.
    ///
    /// # Errors
    /// If the machine has no such card.
    #[cfg(feature = "cuda")]
    pub fn cuda(card: usize) -> Result<Self, DeviceError> {
        Self::from_device(CubeDevice::cuda(card).map_err(DeviceError::new)?)
    }

    /// Opens the adapter with this number among those with a Vulkan driver: first discrete GPUs, then
    /// integrated ones, then virtual ones, and last the CPU.
    ///
    /// # Errors
    /// If the machine has no such adapter, or this build lacks the feature.
    #[cfg(not(feature = "wgpu"))]
    pub fn wgpu(index: usize) -> Result<Self, DeviceError> {
        Err(DeviceError::new(format!("cannot open adapter {index}: this build lacks the feature `wgpu`")))
    }

    /// Opens the adapter with this number among those with a Vulkan driver: first discrete GPUs, then
    /// integrated ones, then virtual ones, and last the CPU.
    ///
    /// # Errors
    /// If the machine has no such adapter.
    #[cfg(feature = "wgpu")]
    pub fn wgpu(index: usize) -> Result<Self, DeviceError> {
        use cubecl::device::WgpuDeviceKind::{Cpu, DiscreteGpu, IntegratedGpu, VirtualGpu};
        let all = |kind: fn(usize) -> cubecl::device::WgpuDeviceKind| {
            (0..).map_while(move |i| CubeDevice::vulkan(kind(i)).ok())
        };
        let gpus = all(DiscreteGpu).chain(all(IntegratedGpu)).chain(all(VirtualGpu));
        let mut adapters = gpus.chain(CubeDevice::vulkan(Cpu));
        let missing = || DeviceError::new(format!("no adapter {index} with a Vulkan driver was found"));
        Self::from_device(adapters.nth(index).ok_or_else(missing)?)
    }

    fn from_device(device: CubeDevice) -> Result<Self, DeviceError> {
        let client = device.client();
        Ok(Self { burn: Device::new(device.clone()), device, client, stream: StreamId::current() })
    }

    /// Returns the bytes of a buffer of this device.
    pub fn bytes(&self, handle: Handle) -> CubeBytes {
        CubeBytes { client: self.client.clone(), device: self.device.clone(), handle, lease: None }
    }

    /// Copies bytes of the host to the device, each into its own buffer, and waits for the copies.
    ///
    /// # Errors
    /// The failure that the device's runtime reports, such as insufficient memory.
    pub fn write(&self, host: &[bytes::Bytes]) -> Result<Vec<CubeBytes>, DeviceError> {
        let buffer = |bytes: &bytes::Bytes| self.bytes(self.client.create_from_slice(bytes));
        let buffers: Vec<CubeBytes> = host.iter().map(buffer).collect();
        sync(&self.burn)?;
        self.client.check(buffers.iter().map(|bytes| &bytes.handle)).map_err(from_server_error)?;
        Ok(buffers)
    }
}

/// Returns the CubeCL device if CubeCL computes on `device`.
pub fn place(device: &Device) -> Option<&CubeDevice> {
    let dispatch = match device.as_dispatch() {
        DispatchDevice::Autodiff(inner) => inner,
        dispatch => dispatch,
    };
    match dispatch {
        DispatchDevice::Cube(place) => Some(place),
        _ => None,
    }
}

/// A range of a CubeCL buffer.
#[derive(Clone)]
pub struct CubeBytes {
    client: Client,
    device: CubeDevice,
    handle: Handle,
    /// Dropped with the last clone. Memory with a lease may be reused while views of it exist.
    lease: Option<Arc<dyn Any + Send + Sync>>,
}

impl fmt::Debug for CubeBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CubeBytes").field("device", &self.device).field("handle", &self.handle).finish()
    }
}

impl CubeBytes {
    /// The buffer with the range's offsets.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// The client of the device.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// These bytes, which hold floats of this type, as a kernel argument. Other holders of the bytes see the
    /// kernel's writes.
    pub fn floats(&self, float: FloatType) -> BufferArg {
        let (client, place) = (self.client.clone(), self.device.clone());
        let shape = Shape::new([self.len() / float.bytes()]);
        CubeTensor::new_contiguous(client, place, shape, self.handle.clone(), float.dtype()).into_buffer_arg()
    }

    /// Allocates an uninitialized buffer of `floats` `f32` values on the same device.
    pub fn alloc_floats(&self, floats: usize) -> Self {
        let handle = self.client.empty(floats * size_of::<f32>());
        Self { handle, lease: None, ..self.clone() }
    }

    /// Copies the bytes to the host.
    ///
    /// # Errors
    /// The failure that the device's runtime reports, including a failure of the computation of these bytes.
    pub fn read(&self) -> Result<bytes::Bytes, DeviceError> {
        let read = self.client.read_one(self.handle.clone()).map_err(from_server_error)?;
        Ok(bytes::Bytes::from_owner(BurnBytes(read)))
    }
}

impl DeviceBuffer for CubeBytes {
    fn len(&self) -> usize {
        self.handle.size_in_used() as usize
    }

    fn slice(&self, range: Range<usize>) -> Arc<dyn DeviceBuffer> {
        let behind = self.len() - range.end;
        let handle = self.handle.clone().offset_start(range.start as u64).offset_end(behind as u64);
        Arc::new(Self { handle, ..self.clone() })
    }

    fn overlaps(&self, other: &dyn DeviceBuffer) -> bool {
        let Some(other) = other.as_any().downcast_ref::<Self>() else { return false };
        let range = |of: &Self| {
            let start = of.handle.offset_start.unwrap_or(0);
            start..start + of.handle.size_in_used()
        };
        (self.lease.is_some() || other.lease.is_some())
            && self.handle.memory.descriptor().id == other.handle.memory.descriptor().id
            && range(self).start < range(other).end
            && range(other).start < range(self).end
    }

    fn copied(&self) -> Arc<dyn DeviceBuffer> {
        // Copied through the host: layers rarely return promoted memory.
        let bytes = self.client.read_one_unchecked(self.handle.clone());
        Arc::new(Self { handle: self.client.create(bytes), lease: None, ..self.clone() })
    }

    fn leased(&self, lease: Arc<dyn Any + Send + Sync>) -> Arc<dyn DeviceBuffer> {
        // The existing lease lives as long as the new one.
        Arc::new(Self { lease: Some(Arc::new((self.lease.clone(), lease))), ..self.clone() })
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn tensor(&self, shape: &[usize], dtype: DType, device: &Device) -> AnyTensor {
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

/// Returns the tensor in row-major order, with a buffer that ends at its last element.
///
/// On NVIDIA cards CubeCL pads the rows of an allocation, also a single row, and reports the padded
/// length. Kernels derive the number of elements from the buffer's length, and links copy the whole buffer.
pub fn exact(tensor: CubeTensor) -> CubeTensor {
    let mut tensor = into_contiguous(tensor);
    let bytes = (tensor.meta.num_elements() * tensor.dtype.size()) as u64;
    let behind = tensor.handle.size_in_used().saturating_sub(bytes);
    if behind > 0 {
        tensor.handle = tensor.handle.offset_end(behind);
    }
    tensor
}

/// The tensor's bytes in row-major order, if it is in CubeCL memory.
pub(crate) fn device_tensor(tensor: &AnyTensor) -> Option<DeviceTensor> {
    let primitive = by_rank!(tensor.rank(), D => match tensor.clone().outside_of_the_graph() {
        AnyTensor::Float(t) => Tensor::<D>::from_dispatch(t).try_into_primitive::<Cube>().ok(),
        AnyTensor::Int(t) => Tensor::<D, Int>::from_dispatch(t).try_into_primitive::<Cube>().ok(),
    })?;
    let CubeTensor { client, handle, meta, device, dtype, .. } = exact(primitive);
    let shape = meta.shape().to_vec();
    let bytes = CubeBytes { client, device, handle, lease: None };
    Some(DeviceTensor::view(DeviceBytes::Buffer(Arc::new(bytes)), shape, dtype))
}

/// Copies a host tensor to a CubeCL device, as densely as a promoted one; `None` for other devices.
pub(crate) fn upload(tensor: &HostTensor, device: &Device) -> Option<AnyTensor> {
    let place = place(device)?.clone();
    let client = place.client();
    let handle = client.create_from_slice(&tensor.bytes);
    let bytes = CubeBytes { client, device: place, handle, lease: None };
    Some(bytes.tensor(&tensor.shape, tensor.dtype, device))
}

/// Copies the tensor to the host, if it is in CubeCL memory.
pub(crate) fn read(tensor: &AnyTensor) -> Option<Result<HostTensor, DeviceError>> {
    let tensor = device_tensor(tensor)?;
    let bytes = tensor.bytes.as_buffer::<CubeBytes>()?.read();
    Some(bytes.map(|bytes| HostTensor::view(bytes, tensor.shape, tensor.dtype)))
}

/// Converts a failure that CubeCL reports.
pub fn from_server_error(error: ServerError) -> DeviceError {
    match out_of_memory(&error) {
        Some(bytes) => DeviceError::OutOfMemory { bytes },
        None => DeviceError::new(error),
    }
}

/// The bytes of the failed allocation, if running out of memory is the failure or one of them.
fn out_of_memory(error: &ServerError) -> Option<u64> {
    match error {
        ServerError::Io(IoError::OutOfMemory { size, .. } | IoError::BufferTooBig { size, .. }) => {
            Some(*size)
        }
        ServerError::Launch(LaunchError::OutOfMemory { .. }) => Some(0),
        ServerError::Unwritten { root, .. } => out_of_memory(root),
        ServerError::Several { errors, .. } => errors.iter().find_map(out_of_memory),
        _ => None,
    }
}

/// Checks that these tensors were computed. CubeCL records a failed allocation or launch only in the buffers
/// that lack its result.
pub(crate) fn check(made: &[&DeviceTensor]) -> Result<(), DeviceError> {
    let cubes: Vec<&CubeBytes> = made.iter().filter_map(|tensor| tensor.bytes.as_buffer()).collect();
    let Some(first) = cubes.first() else { return Ok(()) };
    first.client.check(cubes.iter().map(|bytes| &bytes.handle)).map_err(from_server_error)
}

/// Measures a device by CubeCL's report of its pools.
///
/// A report has no peak in bytes. The bytes that the pools reserved since their last cleanup replace it: they
/// are the device memory that was really allocated, including padding, fragments and cached pages. They cover
/// the whole device, for all its users.
pub struct CubeProbe {
    client: Client,
    /// The maximum since the last reset.
    peak: AtomicU64,
    /// Bytes that were idle after the last trim, which could not be released then.
    kept: AtomicU64,
}

/// The usage of a device's pools.
struct Pools(MemoryUsage);

impl Pools {
    /// Bytes reserved and not in use.
    fn idle(&self) -> u64 {
        self.0.bytes_reserved.saturating_sub(self.0.bytes_in_use + self.0.bytes_padding)
    }

    /// Returns whether to release idle pool memory, for a budget of `most` bytes, if the last trim left
    /// `kept` bytes idle. A trim waits for the device and makes the next shard task allocate anew.
    fn should_be_trimmed(&self, most: u64, kept: u64) -> bool {
        self.0.bytes_reserved > most && self.idle() > kept.saturating_add(most / 16)
    }
}

impl CubeProbe {
    /// Returns the probe of this client's device, which it measures for any device id.
    pub fn new(client: Client) -> Self {
        Self { client, peak: AtomicU64::new(0), kept: AtomicU64::new(0) }
    }

    /// The usage of the pools for allocations. CubeCL's internal pools, such as staging for reads, are
    /// usually in host memory and not counted.
    fn pools(&self) -> Pools {
        let report = self.client.memory_report(MemoryScope::Device);
        let pools = report.streams.iter().map(|stream| &stream.pools);
        let all = pools.fold(MemoryUsage::default(), |sum, pools| sum.combine(pools.usage()));
        self.peak.fetch_max(all.bytes_reserved, Relaxed);
        Pools(all)
    }
}

impl MemoryProbe for CubeProbe {
    fn measures(&self) -> bool {
        true
    }

    fn in_use(&self, _: DeviceId) -> u64 {
        let Pools(usage) = self.pools();
        usage.bytes_in_use + usage.bytes_padding
    }

    fn peak(&self, _: DeviceId) -> u64 {
        self.pools();
        self.peak.load(Relaxed)
    }

    fn reset_peak(&self, _: DeviceId) {
        // Fails only while a graph is being recorded, which never happens here.
        let _ = self.client.memory_cleanup();
        self.peak.store(0, Relaxed);
    }

    fn trim(&self, _: DeviceId, most: u64) {
        let pools = self.pools();
        if pools.should_be_trimmed(most, self.kept.load(Relaxed)) {
            let _ = self.client.memory_cleanup();
            self.kept.store(self.pools().idle(), Relaxed);
        }
    }
}

#[cfg(test)]
mod trimming {
    use super::*;

    fn pools(bytes_reserved: u64, bytes_in_use: u64) -> Pools {
        Pools(MemoryUsage { bytes_reserved, bytes_in_use, ..MemoryUsage::default() })
    }

    #[test]
    fn what_is_idle_beyond_the_budget_goes_back() {
        assert!(pools(1700, 1500).should_be_trimmed(1600, 0));
        assert!(!pools(1600, 0).should_be_trimmed(1600, 0), "it is within the budget");
        assert!(!pools(1700, 1650).should_be_trimmed(1600, 0), "nearly all is in use");
    }

    #[test]
    fn what_could_not_be_given_back_is_not_asked_for_again() {
        let fragments = pools(1900, 1500);
        assert!(fragments.should_be_trimmed(1600, 0));
        assert!(!fragments.should_be_trimmed(1600, 400), "the same again");
        assert!(!pools(2000, 1500).should_be_trimmed(1600, 400));
        assert!(pools(2001, 1500).should_be_trimmed(1600, 400), "a sixteenth more has come");
        assert!(pools(1900, 100).should_be_trimmed(1600, 400), "the fragments are free");
    }
}

#[cfg(all(test, feature = "cube"))]
mod tests {
    use super::*;
    use crate::finish;
    use bytes::Bytes;
    use std::sync::{PoisonError, RwLock, RwLockReadGuard};

    /// Device memory is shared by all tests: those that measure it take the write lock, others the read lock.
    static DEVICE: RwLock<()> = RwLock::new(());

    /// Returns a device to test on, or `None` after printing the reason.
    fn open() -> Option<CubeAdapter> {
        let adapter = CubeAdapter::wgpu(0);
        adapter.inspect_err(|error| eprintln!("skipped: {error}")).ok()
    }

    /// Returns the device for a test, shared with other tests for as long as the guard lives.
    fn adapter() -> Option<(RwLockReadGuard<'static, ()>, CubeAdapter)> {
        // A failed test leaves no state behind that affects others.
        let guard = DEVICE.read().unwrap_or_else(PoisonError::into_inner);
        open().map(|adapter| (guard, adapter))
    }

    fn on_device(adapter: &CubeAdapter, tensor: &HostTensor) -> DeviceTensor {
        let bytes = adapter.bytes(adapter.client.create_from_slice(&tensor.bytes));
        DeviceTensor::view(DeviceBytes::Buffer(Arc::new(bytes)), tensor.shape.clone(), tensor.dtype)
    }

    #[test]
    fn tensors_are_views_of_device_memory() {
        let Some((_guard, adapter)) = adapter() else { return };
        let values: Vec<f32> = (0..512).map(|i| i as f32).collect();
        let host = HostTensor::float(values.clone(), [512]);
        let buffer = on_device(&adapter, &host);
        let part = DeviceTensor::view(buffer.bytes.slice(1024..1536), [8, 16], DType::F32);
        assert_eq!((buffer.len_bytes(), part.len_bytes()), (2048, 512));
        for device in [adapter.burn.clone(), adapter.burn.clone().autodiff()] {
            let tensor: Tensor<2> = part.to_device(&device).into_float();
            assert_eq!(tensor.device().is_autodiff(), device.is_autodiff());
            let doubled = AnyTensor::from(tensor.clone() * 2.0).into_host();
            assert!(doubled.as_f32().iter().zip(&values[256..]).all(|(d, v)| *d == v * 2.0));
            // A transposed tensor must be brought into row-major order.
            let turned = AnyTensor::from(tensor.transpose()).into_device_tensor();
            finish(&device, &[&turned]).unwrap();
            assert_eq!((turned.shape.as_slice(), turned.bytes.as_host()), (&[16, 8][..], None));
            assert_eq!(turned.to_device(&device).into_host().as_f32()[1], 272.0);
        }
        let ints = HostTensor::int(vec![3, 4, 5], [3]);
        assert_eq!(on_device(&adapter, &ints).to_device(&adapter.burn).into_host(), ints);
        assert_eq!(buffer.to_device(&adapter.burn).into_host(), host, "promoted memory is unchanged");
    }

    #[test]
    fn a_buffer_that_is_longer_than_its_tensor_is_cut() {
        let Some((_guard, adapter)) = adapter() else { return };
        // CubeCL pads a single-row tensor like this on NVIDIA cards.
        let padded = HostTensor::float((0..128).map(|i| i as f32).collect(), [128]);
        let handle = adapter.client.create_from_slice(&padded.bytes);
        let (client, place) = (adapter.client.clone(), adapter.device.clone());
        let row = CubeTensor::new_contiguous(client, place, Shape::new([1, 100]), handle, DType::F32);
        let tensor = AnyTensor::from(Tensor::<2>::from_primitive::<Cube>(row)).into_device_tensor();
        assert_eq!((tensor.len_bytes(), tensor.shape.as_slice()), (400, &[1, 100][..]));
        let host = tensor.to_device(&adapter.burn).into_host();
        assert_eq!((host.len_bytes(), host.as_f32()), (400, &padded.as_f32()[..100]));
    }

    #[test]
    fn what_is_uploaded_is_as_dense_as_what_is_promoted() {
        let Some((_guard, adapter)) = adapter() else { return };
        let host = HostTensor::float((0..300).map(|i| i as f32).collect(), [3, 100]);
        for device in [adapter.burn.clone(), adapter.burn.clone().autodiff()] {
            let tensor: Tensor<2> = host.to_device(&device).into_float();
            assert_eq!(tensor.device().is_autodiff(), device.is_autodiff());
            let tensor = if device.is_autodiff() { tensor.inner() } else { tensor };
            let primitive = tensor.try_into_primitive::<Cube>().unwrap();
            assert_eq!(primitive.meta.strides().to_vec(), [100, 1]);
            assert_eq!(primitive.handle.size_in_used(), 1200);
        }
    }

    #[test]
    fn only_what_is_on_a_lease_has_to_be_taken_apart() {
        let Some((_guard, adapter)) = adapter() else { return };
        let host = HostTensor::float((0..512).map(|i| i as f32).collect(), [512]);
        let bytes = on_device(&adapter, &host).bytes;
        let lease = Arc::new(());
        let leased = bytes.leased(lease.clone());
        let view = |bytes: &DeviceBytes, range| DeviceTensor::view(bytes.slice(range), [128], DType::F32);
        let passed_on = view(&leased, 0..512).to_device(&adapter.burn).into_device_tensor();
        assert!(leased.overlaps(&passed_on.bytes) && !bytes.overlaps(&passed_on.bytes));
        assert!(!leased.slice(512..1024).overlaps(&passed_on.bytes));
        let copied = passed_on.copied();
        assert!(!leased.overlaps(&copied.bytes));
        assert_eq!(copied.to_device(&adapter.burn).into_host().as_f32(), &host.as_f32()[..128]);
        drop(leased);
        assert_eq!(Arc::strong_count(&lease), 1);
    }

    #[test]
    fn what_no_device_has_memory_for_is_an_error_and_the_device_goes_on() {
        let Some((_guard, adapter)) = adapter() else { return };
        let huge = Tensor::<1>::ones([1_usize << 45], &adapter.burn);
        let made = AnyTensor::from(huge + 1.0).into_device_tensor();
        let error = finish(&adapter.burn, &[&made]).unwrap_err();
        assert!(matches!(error, DeviceError::OutOfMemory { .. }), "{error}");
        let read = || made.to_device(&adapter.burn).into_host();
        let read = std::panic::catch_unwind(std::panic::AssertUnwindSafe(read)).unwrap_err();
        assert_eq!(DeviceError::from_panic(read.as_ref()), Some(&error));
        let small = AnyTensor::from(Tensor::<1>::ones([3], &adapter.burn) + 1.0).into_host();
        assert_eq!(small.as_f32(), [2.0; 3]);
    }

    #[test]
    fn the_probe_sees_what_is_allocated() {
        let _alone = DEVICE.write().unwrap_or_else(PoisonError::into_inner);
        let Some(adapter) = open() else { return };
        let (probe, id) = (CubeProbe::new(adapter.client.clone()), DeviceId(0));
        probe.reset_peak(id);
        let before = probe.in_use(id);
        let bytes = Bytes::from(vec![1; 32 << 20]);
        let held = adapter.client.create_from_slice(&bytes);
        assert!(probe.in_use(id) >= before + (32 << 20) && probe.peak(id) >= probe.in_use(id));
        drop(held);
        assert!(probe.measures() && probe.peak(id) >= before + (32 << 20));
    }
}
