//! Tensors on the host.

use burn::tensor::{AllocationProperty, Bytes, DType, TensorData};

/// A tensor on the host: immutable bytes, shared by clones.
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
    /// Returns a float tensor of `shape` that owns `values`.
    ///
    /// # Panics
    /// If the number of values is not the product of the shape.
    pub fn float(values: Vec<f32>, shape: impl Into<Vec<usize>>) -> Self {
        Self::own(values, shape.into(), DType::F32)
    }

    /// Returns an integer tensor of `shape` that owns `values`.
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

    /// Returns a view of shared bytes, such as a slice of a buffer.
    pub fn view(bytes: bytes::Bytes, shape: impl Into<Vec<usize>>, dtype: DType) -> Self {
        Self { bytes, shape: shape.into(), dtype }
    }

    /// The number of bytes.
    pub fn len_bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// Copies the tensor into memory that the calling thread allocates, aligned for the elements.
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
}

impl From<TensorData> for HostTensor {
    fn from(data: TensorData) -> Self {
        let (bytes, shape, dtype) = data.into_parts();
        Self { bytes: alone(bytes), shape: shape.to_vec(), dtype }
    }
}

/// The bytes for Burn, without a copy; the first write to them copies.
pub(crate) fn shared(bytes: bytes::Bytes) -> Bytes {
    // By this kind, which CPU devices do not read, `alone` knows them.
    Bytes::from_shared(bytes, AllocationProperty::Other)
}

/// Bytes from Burn, which keep no other memory in use: shared bytes that were written to are a copy that keeps the original.
fn alone(bytes: Bytes) -> bytes::Bytes {
    let is_copy = bytes.property() == AllocationProperty::Other && bytes.view(0, bytes.len()).is_err();
    if !is_copy {
        return bytes::Bytes::from_owner(BurnBytes(bytes));
    }
    // The copy has the alignment of this type. It is taken out if its length is that of whole elements.
    match bytes.try_into_vec::<u128>() {
        Ok(copy) => bytes::Bytes::from_owner(Owner(copy)),
        Err(bytes) => bytes::Bytes::from_owner(BurnBytes(bytes.clone())),
    }
}
