//! Activations, which flow between layers: one or several tensors of any rank, on a device or on the host.

use burn::backend::TensorMetadata;
use burn::tensor::{
    AllocationProperty, Bytes, DType, Device, DispatchTensor, Gradients, Int, Tensor, TensorData,
};

/// A float or integer tensor whose rank is known at run time only.
#[derive(Clone, Debug)]
pub enum AnyTensor {
    /// Floats; they carry gradients.
    Float(DispatchTensor),
    /// Integers, such as token ids.
    Int(DispatchTensor),
}

/// Runs an expression with `D` bound to the rank as a constant.
macro_rules! by_rank {
    ($rank:expr, $d:ident => $body:expr) => {
        match $rank {
            1 => by_rank!(@ $d, 1, $body),
            2 => by_rank!(@ $d, 2, $body),
            3 => by_rank!(@ $d, 3, $body),
            4 => by_rank!(@ $d, 4, $body),
            5 => by_rank!(@ $d, 5, $body),
            6 => by_rank!(@ $d, 6, $body),
            7 => by_rank!(@ $d, 7, $body),
            8 => by_rank!(@ $d, 8, $body),
            rank => panic!("tensors have 1 to 8 dimensions, found {rank}"),
        }
    };
    (@ $d:ident, $n:literal, $body:expr) => {{
        const $d: usize = $n;
        $body
    }};
}
pub(crate) use by_rank;

impl AnyTensor {
    /// The sizes of the dimensions.
    pub fn shape(&self) -> Vec<usize> {
        let (Self::Float(t) | Self::Int(t)) = self;
        t.shape().to_vec()
    }

    /// The number of dimensions.
    pub fn rank(&self) -> usize {
        self.shape().len()
    }

    /// Returns whether the elements are floats.
    pub fn is_float(&self) -> bool {
        matches!(self, Self::Float(_))
    }

    /// The tensor as a float tensor of rank `D`.
    ///
    /// # Panics
    /// If it holds integers or has another rank: the layer was given what it does not take.
    #[track_caller]
    pub fn into_float<const D: usize>(self) -> Tensor<D> {
        let shape = self.shape();
        assert!(
            self.is_float() && shape.len() == D,
            "expected a float tensor of rank {D}, found {} of shape {shape:?}",
            self.kind()
        );
        let (Self::Float(t) | Self::Int(t)) = self;
        Tensor::from_dispatch(t)
    }

    /// The tensor as an integer tensor of rank `D`.
    ///
    /// # Panics
    /// If it holds floats or has another rank.
    #[track_caller]
    pub fn into_int<const D: usize>(self) -> Tensor<D, Int> {
        let shape = self.shape();
        assert!(
            !self.is_float() && shape.len() == D,
            "expected an integer tensor of rank {D}, found {} of shape {shape:?}",
            self.kind()
        );
        let (Self::Float(t) | Self::Int(t)) = self;
        Tensor::from_dispatch(t)
    }

    /// The device of a float tensor.
    pub(crate) fn float_device(&self) -> Option<Device> {
        match self {
            Self::Float(t) => Some(Tensor::<1>::from_dispatch(t.clone()).device()),
            Self::Int(_) => None,
        }
    }

    fn kind(&self) -> &'static str {
        if self.is_float() { "floats" } else { "integers" }
    }

    /// A float tensor becomes a leaf that gathers its gradient; integers stay what they are.
    /// The tensor must be on an autodiff device.
    pub fn into_leaf(self) -> Self {
        match self {
            Self::Float(t) => by_rank!(t.shape().num_dims(), D => {
                Tensor::<D>::from_dispatch(t).require_grad().into()
            }),
            int => int,
        }
    }

    /// The gradient that was gathered for this leaf, outside of the graph.
    pub fn take_gradient(&self, gradients: &mut Gradients) -> Option<AnyTensor> {
        match self {
            Self::Float(t) => by_rank!(t.shape().num_dims(), D => {
                Tensor::<D>::from_dispatch(t.clone()).grad_remove(gradients).map(Into::into)
            }),
            Self::Int(_) => None,
        }
    }

    /// Copies the tensor to the host (without a copy where the device is the host and the buffer its own).
    ///
    /// # Panics
    /// With a [`DeviceError`](crate::DeviceError) if the device could not compute the tensor.
    pub fn into_host(self) -> HostTensor {
        #[cfg(feature = "cube")]
        if let Some(host) = crate::cube::read(&self) {
            return host.unwrap_or_else(|error| std::panic::panic_any(error));
        }
        let data = match self {
            Self::Float(t) => by_rank!(t.shape().num_dims(), D => {
                let t = Tensor::<D>::from_dispatch(t);
                if t.device().is_autodiff() { t.inner().into_data() } else { t.into_data() }
            }),
            Self::Int(t) => by_rank!(t.shape().num_dims(), D => {
                let t = Tensor::<D, Int>::from_dispatch(t);
                if t.device().is_autodiff() { t.inner().into_data() } else { t.into_data() }
            }),
        };
        data.into()
    }
}

impl<const D: usize> From<Tensor<D>> for AnyTensor {
    fn from(tensor: Tensor<D>) -> Self {
        Self::Float(tensor.into_dispatch())
    }
}

impl<const D: usize> From<Tensor<D, Int>> for AnyTensor {
    fn from(tensor: Tensor<D, Int>) -> Self {
        Self::Int(tensor.into_dispatch())
    }
}

/// The input or output of a layer: one or several tensors on a device.
#[derive(Clone, Debug, Default)]
pub struct Activation {
    parts: Vec<AnyTensor>,
}

impl Activation {
    /// An activation of one tensor.
    pub fn of(tensor: impl Into<AnyTensor>) -> Self {
        Self { parts: vec![tensor.into()] }
    }

    /// This activation with one more tensor.
    pub fn and(mut self, tensor: impl Into<AnyTensor>) -> Self {
        self.parts.push(tensor.into());
        self
    }

    /// The tensors.
    pub fn parts(&self) -> &[AnyTensor] {
        &self.parts
    }

    /// The tensors, owned.
    pub fn into_parts(self) -> Vec<AnyTensor> {
        self.parts
    }

    /// The only tensor, as floats of rank `D`.
    ///
    /// # Panics
    /// If there is not exactly one tensor, or it is not of that kind and rank.
    #[track_caller]
    pub fn into_float<const D: usize>(self) -> Tensor<D> {
        self.into_single().into_float()
    }

    /// The only tensor, as integers of rank `D`.
    ///
    /// # Panics
    /// If there is not exactly one tensor, or it is not of that kind and rank.
    #[track_caller]
    pub fn into_int<const D: usize>(self) -> Tensor<D, Int> {
        self.into_single().into_int()
    }

    #[track_caller]
    fn into_single(mut self) -> AnyTensor {
        match (self.parts.pop(), self.parts.len()) {
            (Some(part), 0) => part,
            (part, rest) => {
                panic!("expected an activation of one tensor, found {}", rest + usize::from(part.is_some()))
            }
        }
    }

    /// The tensor at `index`, kept in the activation.
    ///
    /// # Panics
    /// If there are not so many tensors.
    #[track_caller]
    pub fn part(&self, index: usize) -> AnyTensor {
        let parts = self.parts.len();
        assert!(index < parts, "expected at least {} tensors in the activation, found {parts}", index + 1);
        self.parts[index].clone()
    }

    /// Every float tensor becomes a leaf that gathers its gradient.
    pub fn into_leaves(self) -> Self {
        self.parts.into_iter().map(AnyTensor::into_leaf).collect()
    }

    /// Copies all tensors to the host.
    pub fn into_host(self) -> HostActivation {
        HostActivation { parts: self.parts.into_iter().map(AnyTensor::into_host).collect() }
    }
}

impl FromIterator<AnyTensor> for Activation {
    fn from_iter<I: IntoIterator<Item = AnyTensor>>(parts: I) -> Self {
        Self { parts: parts.into_iter().collect() }
    }
}

/// A tensor on the host: bytes that are shared when cloned and never written.
#[derive(Clone, Debug, PartialEq)]
pub struct HostTensor {
    /// The elements in row-major order.
    pub bytes: bytes::Bytes,
    /// The sizes of the dimensions.
    pub shape: Vec<usize>,
    /// The type of an element: that of a [`FloatType`](crate::FloatType), or an integer type.
    pub dtype: DType,
}

struct Owner<T>(Vec<T>);

impl<T: bytemuck::NoUninit> AsRef<[u8]> for Owner<T> {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}

pub(crate) struct BurnBytes(pub Bytes);

impl AsRef<[u8]> for BurnBytes {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl HostTensor {
    /// A float tensor of `shape` that owns `values`.
    ///
    /// # Panics
    /// If the number of values is not the product of the shape.
    pub fn float(values: Vec<f32>, shape: impl Into<Vec<usize>>) -> Self {
        Self::own(values, shape.into(), DType::F32)
    }

    /// An integer tensor of `shape` that owns `values`.
    ///
    /// # Panics
    /// If the number of values is not the product of the shape.
    pub fn int(values: Vec<i32>, shape: impl Into<Vec<usize>>) -> Self {
        Self::own(values, shape.into(), DType::I32)
    }

    pub(crate) fn own<T: bytemuck::NoUninit + Send>(values: Vec<T>, shape: Vec<usize>, dtype: DType) -> Self {
        assert_eq!(values.len(), shape.iter().product::<usize>(), "values for shape {shape:?}");
        Self { bytes: bytes::Bytes::from_owner(Owner(values)), shape, dtype }
    }

    /// A view of bytes that someone else owns, such as a slice of an image.
    pub fn view(bytes: bytes::Bytes, shape: impl Into<Vec<usize>>, dtype: DType) -> Self {
        Self { bytes, shape: shape.into(), dtype }
    }

    /// The number of bytes.
    pub fn len_bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// A copy in memory that the calling thread asks for, aligned for the elements.
    pub fn copied(&self) -> Self {
        fn owned<T: bytemuck::NoUninit + bytemuck::AnyBitPattern + Send>(bytes: &[u8]) -> bytes::Bytes {
            bytes::Bytes::from_owner(Owner(bytemuck::pod_collect_to_vec::<u8, T>(bytes)))
        }
        let bytes = match self.dtype.size() {
            8 => owned::<u64>(&self.bytes),
            4 => owned::<u32>(&self.bytes),
            2 => owned::<u16>(&self.bytes),
            _ => owned::<u8>(&self.bytes),
        };
        Self::view(bytes, self.shape.clone(), self.dtype)
    }

    /// Returns whether the elements are floats.
    pub fn is_float(&self) -> bool {
        self.dtype.is_float()
    }

    /// The elements of an `F32` tensor.
    ///
    /// # Panics
    /// If the elements are of another type, or a [`view`](Self::view) is not aligned for them.
    pub fn as_f32(&self) -> &[f32] {
        assert_eq!(self.dtype, DType::F32, "a host tensor of another type was read as f32");
        bytemuck::cast_slice(&self.bytes)
    }

    /// The elements of an `I32` tensor.
    ///
    /// # Panics
    /// If the elements are of another type, or a [`view`](Self::view) is not aligned for them.
    pub fn as_i32(&self) -> &[i32] {
        assert_eq!(self.dtype, DType::I32, "a host tensor of another type was read as i32");
        bytemuck::cast_slice(&self.bytes)
    }

    /// The tensor on `device`. On a CPU the bytes are shared, not copied, and a write to the tensor copies.
    pub fn to_device(&self, device: &Device) -> AnyTensor {
        #[cfg(feature = "cube")]
        if let Some(tensor) = crate::cube::upload(self, device) {
            return tensor;
        }
        let bytes = Bytes::from_shared(self.bytes.clone(), AllocationProperty::Native);
        let data = TensorData::from_bytes(bytes, self.shape.clone(), self.dtype);
        by_rank!(self.shape.len(), D => if self.is_float() {
            Tensor::<D>::from_data(data, (device, self.dtype)).into()
        } else {
            Tensor::<D, Int>::from_data(data, (device, self.dtype)).into()
        })
    }
}

impl From<TensorData> for HostTensor {
    fn from(data: TensorData) -> Self {
        let (bytes, shape, dtype) = data.into_parts();
        Self { bytes: bytes::Bytes::from_owner(BurnBytes(bytes)), shape: shape.to_vec(), dtype }
    }
}

/// An activation on the host, as it lies at a cut-point between two shard tasks.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HostActivation {
    /// The tensors, in the activation's order.
    pub parts: Vec<HostTensor>,
}

impl HostActivation {
    /// An activation of one tensor.
    pub fn of(tensor: HostTensor) -> Self {
        Self { parts: vec![tensor] }
    }

    /// The number of bytes of all tensors.
    pub fn len_bytes(&self) -> u64 {
        self.parts.iter().map(HostTensor::len_bytes).sum()
    }

    /// The activation on `device`.
    pub fn to_device(&self, device: &Device) -> Activation {
        self.parts.iter().map(|part| part.to_device(device)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn writing_to_a_promoted_tensor_leaves_the_host_copy_alone() {
        let host = HostTensor::float(vec![1.0, 2.0], [2]);
        let tensor: Tensor<1> = host.to_device(&Device::flex()).into_float();
        let doubled = tensor.mul_scalar(2.0);
        assert_eq!(AnyTensor::from(doubled).into_host().as_f32(), [2.0, 4.0]);
        assert_eq!(host.as_f32(), [1.0, 2.0]);
    }

    #[test]
    #[should_panic(expected = "expected a float tensor of rank 3, found integers of shape [2]")]
    fn a_wrong_kind_is_named() {
        let int = HostTensor::int(vec![1, 2], [2]).to_device(&Device::flex());
        let _ = Activation::of(int.into_int::<1>()).into_float::<3>();
    }
}
