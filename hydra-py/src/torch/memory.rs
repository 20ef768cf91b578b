//! Tensors in Rust's memory that Python sees without a copy.

use burn::tensor::DType;
use bytes::Bytes;
use hydra_core::HostTensor;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// The alignment of PyTorch's own allocations. The bits of some of its kernels depend on it.
const ALIGN: usize = 64;

/// The element types that travel between layers: Hydra's, PyTorch's name, and NumPy's. A `bool` is a byte.
const TYPES: [(DType, &str, &str); 4] = [
    (DType::F32, "float32", "<f4"),
    (DType::I64, "int64", "<i8"),
    (DType::I32, "int32", "<i4"),
    (DType::U8, "bool", "|b1"),
];

/// A tensor in Rust's memory. NumPy and PyTorch read it in place and keep this object alive.
#[derive(Clone)]
#[pyclass(frozen, module = "hydra_train._native", skip_from_py_object)]
pub(crate) struct Memory {
    tensor: HostTensor,
    address: usize,
}

#[pymethods]
impl Memory {
    /// Returns zeros of this shape and type, which Python fills before it passes them on.
    #[new]
    fn zeros(shape: Vec<usize>, dtype: &str) -> PyResult<Self> {
        let found = TYPES.iter().find(|(_, name, _)| *name == dtype);
        let (dtype, ..) = *found.ok_or_else(|| PyTypeError::new_err(format!("no tensors of {dtype}")))?;
        let bytes = shape.iter().product::<usize>() * dtype.size();
        let mut block = vec![0_u8; bytes + ALIGN];
        // Before the block moves into its owner, which never writes.
        let start = block.as_mut_ptr() as usize;
        let skip = start.next_multiple_of(ALIGN) - start;
        let bytes = Bytes::from_owner(block).slice(skip..skip + bytes);
        Ok(Self { tensor: HostTensor::view(bytes, shape, dtype), address: start + skip })
    }

    #[getter]
    fn shape(&self) -> Vec<usize> {
        self.tensor.shape.clone()
    }

    /// The protocol of NumPy. PyTorch has no read-only tensors, so the guard of a layer's call refuses to write into its inputs.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let found = TYPES.iter().find(|(dtype, ..)| *dtype == self.tensor.dtype);
        let (.., typestr) =
            found.ok_or_else(|| PyTypeError::new_err(format!("no tensors of {:?}", self.tensor.dtype)))?;
        let fields = PyDict::new(py);
        fields.set_item("version", 3)?;
        fields.set_item("data", (self.address, false))?;
        fields.set_item("shape", pyo3::types::PyTuple::new(py, &self.tensor.shape)?)?;
        fields.set_item("typestr", typestr)?;
        Ok(fields)
    }
}

impl Memory {
    /// Returns a view of a tensor.
    pub(super) fn view(tensor: HostTensor) -> Self {
        let address = tensor.bytes.as_ptr() as usize;
        Self { tensor, address }
    }

    /// The tensor.
    pub(super) fn tensor(&self) -> HostTensor {
        self.tensor.clone()
    }
}
