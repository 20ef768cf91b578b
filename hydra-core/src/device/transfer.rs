//! Transfers of tensors between host and device: shared if a CPU computes on host memory, copied otherwise.

#[cfg(feature = "cube")]
use super::cube;
use super::memory::{DeviceBytes, DeviceError, DeviceTensor, sync};
use crate::tensor::{by_rank, shared};
use crate::{Activation, AnyTensor, FloatType, HostActivation, HostTensor};
use burn::backend::TensorMetadata;
use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};

impl AnyTensor {
    /// Copies the tensor to the host. Nothing is copied if the device is the host and the tensor owns its
    /// buffer.
    ///
    /// # Panics
    /// With a [`DeviceError`](crate::DeviceError) if the device could not compute the tensor.
    pub fn into_host(self) -> HostTensor {
        #[cfg(feature = "cube")]
        if let Some(host) = cube::read(&self) {
            return host.unwrap_or_else(|error| std::panic::panic_any(error));
        }
        let data = match self.outside_of_the_graph() {
            Self::Float(t) => by_rank!(t.shape().num_dims(), D => Tensor::<D>::from_dispatch(t).into_data()),
            Self::Int(t) => {
                by_rank!(t.shape().num_dims(), D => Tensor::<D, Int>::from_dispatch(t).into_data())
            }
        };
        data.into()
    }

    /// Returns the tensor's bytes in place: host memory on a CPU, device memory elsewhere.
    pub fn into_device_tensor(self) -> DeviceTensor {
        #[cfg(feature = "cube")]
        if let Some(tensor) = cube::device_tensor(&self) {
            return tensor;
        }
        self.into_host().into()
    }
}

impl Activation {
    /// Copies all tensors to the host.
    pub fn into_host(self) -> HostActivation {
        HostActivation { parts: self.into_parts().into_iter().map(AnyTensor::into_host).collect() }
    }

    /// Returns an activation of tensors in the memory of `device`; see [`DeviceTensor::to_device`].
    pub fn from_device_tensors(parts: &[DeviceTensor], device: &Device) -> Self {
        parts.iter().map(|part| part.to_device(device)).collect()
    }
}

impl HostTensor {
    /// Returns the tensor on `device`. On a CPU the bytes are shared, not copied, and a write to the tensor
    /// copies them.
    pub fn to_device(&self, device: &Device) -> AnyTensor {
        #[cfg(feature = "cube")]
        if let Some(tensor) = cube::upload(self, device) {
            return tensor;
        }
        let data = TensorData::from_bytes(shared(self.bytes.clone()), self.shape.clone(), self.dtype);
        by_rank!(self.shape.len(), D => if self.is_float() {
            Tensor::<D>::from_data(data, (device, self.dtype)).into()
        } else {
            Tensor::<D, Int>::from_data(data, (device, self.dtype)).into()
        })
    }
}

impl HostActivation {
    /// Returns the activation on `device`.
    pub fn to_device(&self, device: &Device) -> Activation {
        self.parts.iter().map(|part| part.to_device(device)).collect()
    }
}

impl DeviceTensor {
    /// Returns the tensor for Burn, without a copy; a write to it copies. `device` is the plain or the
    /// autodiff device that holds the bytes.
    ///
    /// # Panics
    /// If the bytes are in memory that `device` cannot read.
    pub fn to_device(&self, device: &Device) -> AnyTensor {
        match &self.bytes {
            DeviceBytes::Host(bytes) => {
                HostTensor::view(bytes.clone(), self.shape.clone(), self.dtype).to_device(device)
            }
            DeviceBytes::Buffer(buffer) => buffer.tensor(&self.shape, self.dtype, device),
        }
    }

    /// The values as `f32`, in memory of their own on the device. `device` is the plain or the autodiff device that holds the
    /// bytes.
    ///
    /// # Panics
    /// If the tensor holds integers, or if the bytes are in memory that `device` cannot read.
    pub(crate) fn widened(&self, device: &Device) -> Self {
        if let DeviceBytes::Host(bytes) = &self.bytes {
            let host = HostTensor::view(bytes.clone(), self.shape.clone(), self.dtype);
            return host.in_type(FloatType::F32).into();
        }
        let tensor = self.to_device(device).outside_of_the_graph();
        let wide: AnyTensor =
            by_rank!(tensor.rank(), D => tensor.into_float::<D>().cast(FloatDType::F32).into());
        wide.into_device_tensor()
    }
}

/// Waits until `device` has finished all work that the calling thread submitted, and checks that `made` was
/// computed. A CPU device computes synchronously.
///
/// # Errors
/// The failure that the device's runtime reports, such as insufficient memory for one of `made`.
pub fn finish(device: &Device, made: &[&DeviceTensor]) -> Result<(), DeviceError> {
    sync(device)?;
    #[cfg(feature = "cube")]
    cube::check(made)?;
    let _ = made;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::panic_message;
    use bytes::Bytes;
    use std::any::Any;
    use std::sync::Arc;

    #[test]
    fn tensors_of_every_rank_travel_to_a_device_and_back() {
        let device = Device::flex();
        for rank in 1..=8 {
            let mut shape = vec![1; rank];
            shape[0] = 2;
            shape[rank - 1] *= 3;
            let n = shape.iter().product::<usize>();
            let float = HostTensor::float((0..n).map(|i| i as f32).collect(), shape.clone());
            let int = HostTensor::int((0..n as i32).collect(), shape.clone());
            for host in [float, int] {
                let tensor = host.to_device(&device);
                assert_eq!(tensor.shape(), shape);
                assert_eq!(tensor.is_float(), host.is_float());
                assert_eq!(tensor.into_host(), host);
            }
        }
    }

    #[test]
    fn writing_to_a_promoted_tensor_leaves_the_host_copy_alone_and_does_not_keep_it() {
        // Of 8 and of 16 bytes.
        for len in [2, 4] {
            let (host, lease) = (HostTensor::float(vec![1.5; len], [len]), Arc::new(()));
            let bytes = DeviceBytes::from(host.bytes.clone()).leased(lease.clone());
            let tensor = DeviceTensor { bytes, ..host.clone().into() }.to_device(&Device::flex());
            let doubled = AnyTensor::from(tensor.into_float::<1>().mul_scalar(2.0)).into_host();
            assert_eq!((doubled.as_f32(), host.as_f32()), (&vec![3.0; len][..], &vec![1.5; len][..]));
            assert_eq!(Arc::strong_count(&lease), 1, "{len}");
        }
    }

    #[test]
    #[should_panic(expected = "expected a float tensor of rank 3, found integers of shape [2]")]
    fn a_wrong_kind_is_named() {
        let int = HostTensor::int(vec![1, 2], [2]).to_device(&Device::flex());
        let _ = Activation::of(int.into_int::<1>()).into_float::<3>();
    }

    #[test]
    fn bytes_of_a_cpu_device_are_the_hosts() {
        let host = HostTensor::float(vec![1.0, 2.0, 3.0, 4.0], [2, 2]);
        let device_tensor = DeviceTensor::from(host.clone());
        let tensor = device_tensor.to_device(&Device::flex());
        let back = tensor.into_device_tensor();
        assert_eq!(back.bytes.as_host().unwrap().as_ptr(), host.bytes.as_ptr());
        assert!(back.bytes.overlaps(&device_tensor.bytes));
        let copied = back.copied();
        assert!(!copied.bytes.overlaps(&device_tensor.bytes));
        assert_eq!(copied.bytes.as_host(), Some(&host.bytes));
        finish(&Device::flex(), &[&copied]).unwrap();
    }

    #[test]
    fn what_a_runtime_says_loses_its_traces() {
        let error = DeviceError::new("it failed\n  badly\nBacktrace:\n  0: main");
        assert_eq!(error.to_string(), "the device failed: it failed badly");
        let panic: Box<dyn Any + Send> = Box::new(DeviceError::OutOfMemory { bytes: 3 << 30 });
        let error = DeviceError::from_panic(panic.as_ref()).unwrap();
        assert_eq!(error.to_string(), "the device is out of memory: an allocation of 3.00 GiB failed");
        assert_eq!(panic_message(panic.as_ref()), error.to_string());
        let says = |panic: Box<dyn Any + Send>| panic_message(panic.as_ref());
        assert_eq!((says(Box::new("so")), says(Box::new("so".to_owned()))), ("so".into(), "so".into()));
        assert_eq!(says(Box::new(5)), "a panic without a message");
    }

    #[test]
    fn a_lease_lasts_as_long_as_any_slice() {
        let (bytes, lease) = (DeviceBytes::from(Bytes::from(vec![7_u8; 16])), Arc::new(()));
        let leased = bytes.leased(lease.clone());
        let part = leased.slice(4..8);
        drop(leased);
        assert!(Arc::strong_count(&lease) == 2 && part.overlaps(&bytes));
        drop(part);
        assert_eq!(Arc::strong_count(&lease), 1);
    }

    #[test]
    fn slices_overlap_only_where_they_do() {
        let bytes = DeviceBytes::from(Bytes::from(vec![0_u8; 16]));
        let (a, b, c) = (bytes.slice(0..8), bytes.slice(8..16), bytes.slice(4..12));
        assert!(!a.overlaps(&b) && !b.overlaps(&a) && a.overlaps(&c) && c.overlaps(&b) && bytes.overlaps(&a));
        assert_eq!((a.len(), bytes.slice(3..3).is_empty()), (8, true));
    }
}
