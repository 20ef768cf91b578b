//! Matrix products by cuBLASLt, NVIDIA's library, on CubeCL's stream.
//!
//! The library is opened when the first product runs; without it, CubeCL's kernels multiply. It chooses a kernel by the
//! shapes and layouts of a product, so a product has the same bits on every card of a model: reductions by atomics are
//! excluded, and the alignment that it may rely on is a constant.

use super::matmul::Terms;
use crate::ops::precision::Precision;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::device_handle::DeviceHandle;
use cubecl::server::{BufferBinding, IoError, ServerError};
use cubecl_cuda::CudaRuntime;
use cubecl_environment::backtrace::BackTrace;
use cubecl_server::runtime::Runtime;
use cubecl_server::server::ServerStorage;
use cubecl_server::stream::{ExecuteScope, WriteScoped, failed_writing};
use cudarc::cublaslt::result::{self as lt, CublasError};
use cudarc::cublaslt::sys;
use cudarc::driver::CudaContext;
use hydra_core::cube::StreamId;
use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

type CudaServer = <CudaRuntime as Runtime>::Server;

/// The alignment in bytes that the library may rely on. The buffers of tensors have more of it.
const ALIGNMENT: u32 = 16;
/// The memory of partial sums that the library may use, in bytes: as much as its documentation recommends for
/// capability 9.0.
const WORKSPACE: usize = 32 << 20;

/// A factor or the output of a product: matrices at equal distances.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Operand {
    rows: u64,
    columns: u64,
    /// The distance between rows, or between columns if `transposed`.
    stride: i64,
    /// Whether the elements of a column are adjacent, not those of a row.
    transposed: bool,
    matrices: i32,
    /// The distance between matrices.
    distance: i64,
}

impl Operand {
    /// `None` for a layout that the library does not support.
    fn of(shape: &[usize], strides: &[usize]) -> Option<Self> {
        let [outer @ .., rows, columns] = shape else { return None };
        let [outer_strides @ .., by_row, by_column] = strides else { return None };
        if shape.contains(&0) {
            return None;
        }
        let transposed = match (*by_column == 1 || *columns == 1, *by_row == 1 || *rows == 1) {
            (true, _) => false,
            (false, true) => true,
            (false, false) => return None,
        };
        // The number of vectors of adjacent elements, their length, and the distance between them.
        let [count, len, by] = if transposed { [columns, rows, by_column] } else { [rows, columns, by_row] };
        // Vectors that overlap, as in an expanded tensor.
        if *count > 1 && by < len {
            return None;
        }
        let stride = by.max(len);
        let (mut matrices, mut distance) = (1, 0);
        for (&count, &by) in outer.iter().zip(outer_strides).rev().filter(|(count, _)| **count != 1) {
            match matrices {
                1 => (matrices, distance) = (count, by),
                _ if by == matrices * distance => matrices *= count,
                _ => return None,
            }
        }
        Some(Self {
            rows: *rows as u64,
            columns: *columns as u64,
            stride: *stride as i64,
            transposed,
            matrices: i32::try_from(matrices).ok()?,
            distance: distance as i64,
        })
    }

    fn of_tensor(tensor: &CubeTensor) -> Option<Self> {
        is_aligned(tensor).then(|| Self::of(tensor.meta.shape(), tensor.meta.strides())).flatten()
    }
}

/// Returns whether a tensor begins at a multiple of [`ALIGNMENT`] of its buffer, which begins at a multiple of more.
fn is_aligned(tensor: &CubeTensor) -> bool {
    tensor.handle.offset_start.unwrap_or(0).is_multiple_of(u64::from(ALIGNMENT))
}

/// All that the library's choice of a kernel depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Problem {
    lhs: Operand,
    rhs: Operand,
    out: Operand,
    factor: sys::cudaDataType_t,
    sum: sys::cudaDataType_t,
    compute: sys::cublasComputeType_t,
    has_bias: bool,
    adds: bool,
}

/// A kernel for a problem.
#[derive(Clone, Copy)]
struct KernelPlan {
    algorithm: sys::cublasLtMatmulAlgo_t,
    workspace: usize,
}

/// A card with its handle of the library.
struct Card {
    context: Arc<CudaContext>,
    server: DeviceHandle<CudaServer>,
    library: Library,
    plans: Mutex<HashMap<Problem, Option<KernelPlan>>>,
}

/// A handle of the library. Any thread may use it.
#[derive(Clone, Copy)]
struct Library(sys::cublasLtHandle_t);

// SAFETY: the library's handles may be used by several threads at once; it is never destroyed.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

/// Returns whether the library can be opened on this machine.
fn is_present() -> bool {
    static PRESENT: OnceLock<bool> = OnceLock::new();
    // SAFETY: opening the library runs only its own initializers.
    *PRESENT.get_or_init(|| unsafe { sys::is_culib_present() })
}

/// The name of the library and its version, if it can be opened on this machine.
pub(super) fn version() -> Option<String> {
    // SAFETY: the library is present, and the function only reads a constant.
    let number = is_present().then(|| unsafe { sys::cublasLtGetVersion() })?;
    // 130100 is 13.1.0.
    Some(format!("cuBLASLt {}.{}.{}", number / 10_000, number / 100 % 100, number % 100))
}

/// Returns whether the library multiplies on the device of a tensor.
pub(super) fn multiplies(tensor: &CubeTensor) -> bool {
    card(tensor).is_some()
}

fn card(tensor: &CubeTensor) -> Option<Arc<Card>> {
    static CARDS: Mutex<Vec<Option<Option<Arc<Card>>>>> = Mutex::new(Vec::new());
    let cubecl::Device::Cuda(device) = &tensor.device else { return None };
    if !is_present() {
        return None;
    }
    let mut cards = CARDS.lock().unwrap_or_else(PoisonError::into_inner);
    if cards.len() <= device.index {
        cards.resize(device.index + 1, None);
    }
    cards[device.index].get_or_insert_with(|| Card::open(device.index, tensor).map(Arc::new)).clone()
}

impl Card {
    /// `None` if the library does not support the card. Another failure may pass, and other kernels would change the bits
    /// then, so it is a panic.
    fn open(index: usize, tensor: &CubeTensor) -> Option<Self> {
        let context = CudaContext::new(index);
        let context = context.unwrap_or_else(|error| panic!("card {index} cannot be opened: {error}"));
        let library = Library(supported(lt::create_handle())?);
        let server = DeviceHandle::new(tensor.client.service_id().device);
        Some(Self { context, server, library, plans: Mutex::default() })
    }

    /// The library's first choice for a problem; `None` if it has no kernel.
    fn plan(&self, problem: &Problem) -> Option<KernelPlan> {
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        *plans.entry(*problem).or_insert_with(|| {
            let bound = self.context.bind_to_thread();
            bound.unwrap_or_else(|error| panic!("a card's context cannot be used: {error}"));
            supported(choose(self.library, problem))
        })
    }
}

/// `None` if the library reports that it does not support this.
///
/// # Panics
/// With every other error of it.
fn supported<T>(result: Result<T, CublasError>) -> Option<T> {
    use sys::cublasStatus_t::{
        CUBLAS_STATUS_ARCH_MISMATCH, CUBLAS_STATUS_INVALID_VALUE, CUBLAS_STATUS_NOT_SUPPORTED,
    };
    match result {
        Ok(value) => Some(value),
        Err(CublasError(
            CUBLAS_STATUS_ARCH_MISMATCH | CUBLAS_STATUS_INVALID_VALUE | CUBLAS_STATUS_NOT_SUPPORTED,
        )) => None,
        Err(error) => panic!("cuBLASLt failed with {error}"),
    }
}

/// Computes `lhs @ rhs` plus `terms` into `out`, or returns `false` if the library cannot, before anything is launched.
/// A factor with one matrix is broadcast.
pub(super) fn multiply(
    precision: Precision,
    lhs: &CubeTensor,
    rhs: &CubeTensor,
    out: &CubeTensor,
    terms: Terms<'_>,
) -> bool {
    let Some(card) = card(out) else { return false };
    let Some(problem) = problem(precision, lhs, rhs, out, terms) else { return false };
    let Some(plan) = card.plan(&problem) else { return false };
    let workspace = (plan.workspace > 0).then(|| out.client.empty(plan.workspace).binding());
    let added = terms.onto.unwrap_or(out);
    let binding = |tensor: &CubeTensor| tensor.handle.clone().binding();
    let operands = [lhs, rhs, added, out].map(binding);
    let extra = [terms.bias.map(binding), workspace];
    let (library, stream) = (card.library, StreamId::current());
    card.server.submit(move |server| enqueue(server, stream, library, (problem, plan), operands, extra));
    true
}

fn problem(
    precision: Precision,
    lhs: &CubeTensor,
    rhs: &CubeTensor,
    out: &CubeTensor,
    terms: Terms<'_>,
) -> Option<Problem> {
    (lhs.dtype == rhs.dtype).then_some(())?;
    let [factor, sum] = [data_type(lhs.dtype)?, data_type(out.dtype)?];
    let compute = match (lhs.dtype, precision) {
        (DType::F32, Precision::Tf32) => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
        _ => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
    };
    let [of_lhs, of_rhs, of_out] = [lhs, rhs, out].map(Operand::of_tensor);
    let (of_lhs, of_rhs, of_out) = (of_lhs?, of_rhs?, of_out?);
    let fits = |factor: Operand| factor.matrices == 1 || factor.matrices == of_out.matrices;
    if of_out.transposed || !fits(of_lhs) || !fits(of_rhs) {
        return None;
    }
    if let Some(onto) = terms.onto {
        (Operand::of_tensor(onto)? == of_out && onto.dtype == out.dtype).then_some(())?;
    }
    if let Some(bias) = terms.bias {
        (bias.dtype == out.dtype && of_out.matrices == 1 && is_aligned(bias)).then_some(())?;
    }
    let (has_bias, adds) = (terms.bias.is_some(), terms.onto.is_some());
    Some(Problem { lhs: of_lhs, rhs: of_rhs, out: of_out, factor, sum, compute, has_bias, adds })
}

fn data_type(dtype: DType) -> Option<sys::cudaDataType_t> {
    match dtype {
        DType::F32 => Some(sys::cudaDataType_t::CUDA_R_32F),
        DType::BF16 => Some(sys::cudaDataType_t::CUDA_R_16BF),
        DType::F16 => Some(sys::cudaDataType_t::CUDA_R_16F),
        _ => None,
    }
}

/// Launches a product on the stream, on the device's thread. If an operand carries a failure, the output carries it too.
fn enqueue(
    server: &mut CudaServer,
    stream: StreamId,
    library: Library,
    (problem, plan): (Problem, KernelPlan),
    operands: [BufferBinding; 4],
    extra: [Option<BufferBinding>; 2],
) {
    let written = vec![operands[3].clone()];
    let held =
        |server: &mut CudaServer, binding: &BufferBinding| server.get_resource(binding.clone(), stream);
    let operand_memory = operands.iter().map(|binding| held(server, binding)).collect::<Result<Vec<_>, _>>();
    let extra_memory =
        extra.each_ref().map(|binding| binding.as_ref().map(|binding| held(server, binding)).transpose());
    let memory = operand_memory.and_then(|operands| {
        let [bias, workspace] = extra_memory;
        Ok((operands, bias?, workspace?))
    });
    let (operand_memory, bias, workspace) = match memory {
        Ok(memory) => memory,
        Err(error) => return failed_writing(server, stream, written, error),
    };
    let all = operands.iter().chain(extra.iter().flatten());
    ExecuteScope::over(server, stream, written).execute(|server| {
        let mut streams = server.write_streams().resolve(stream, all)?;
        let cuda_stream = streams.current().sys;
        let address = |at: usize| operand_memory[at].resource().ptr;
        let addresses = [address(0), address(1), address(2), address(3)];
        let [bias, workspace] =
            [bias, workspace].map(|memory| memory.map_or(0, |memory| memory.resource().ptr));
        if addresses.iter().any(|address| !address.is_multiple_of(u64::from(ALIGNMENT))) {
            return Err(failed("the memory of a factor is not aligned"));
        }
        // SAFETY: the lengths of the operands are those of the problem's layouts. Their bindings, and those of other
        // streams that `streams` holds, live until the product is launched; CubeCL reuses memory in the order of its
        // stream, and frees it after a wait.
        let launched =
            unsafe { launch(library, &problem, &plan, addresses, [bias, workspace], cuda_stream.cast()) };
        launched.map_err(|error| match error.0 {
            // It loads a kernel into the card's memory when it is first launched.
            sys::cublasStatus_t::CUBLAS_STATUS_ALLOC_FAILED => {
                IoError::OutOfMemory { size: 0, backtrace: BackTrace::capture() }.into()
            }
            _ => failed(&format!("cuBLASLt failed with {error}")),
        })
    });
}

fn failed(reason: &str) -> ServerError {
    ServerError::Generic { reason: reason.to_owned(), backtrace: BackTrace::capture() }
}

/// # Safety
/// The addresses, of the factors, the added tensor and the output, must be those of tensors with the problem's layouts;
/// the others those of a row and of the plan's workspace, or zero if it has none; and the memory must stay until the
/// stream has run the product.
unsafe fn launch(
    library: Library,
    problem: &Problem,
    plan: &KernelPlan,
    [lhs, rhs, added, out]: [u64; 4],
    [bias, workspace]: [u64; 2],
    stream: sys::cudaStream_t,
) -> Result<(), CublasError> {
    let described = Described::new(problem, bias)?;
    let (alpha, beta) = (1.0_f32, if problem.adds { 1.0_f32 } else { 0.0 });
    let [first, second, into] = described.layouts.each_ref().map(|layout| layout.0);
    // SAFETY: the descriptors live until the call returns; for the addresses see above. The library reads its matrices
    // column by column: it computes the transposed product, whose first factor is ours on the right.
    unsafe {
        lt::matmul(
            library.0,
            described.operation.0,
            (&raw const alpha).cast(),
            (&raw const beta).cast(),
            rhs as *const c_void,
            first,
            lhs as *const c_void,
            second,
            added as *const c_void,
            into,
            out as *mut c_void,
            into,
            &raw const plan.algorithm,
            workspace as *mut c_void,
            plan.workspace,
            stream,
        )
    }
}

fn choose(library: Library, problem: &Problem) -> Result<KernelPlan, CublasError> {
    use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
    use sys::cublasLtReductionScheme_t as Reduction;
    let described = Described::new(problem, 0)?;
    let preference = Preference(lt::create_matmul_pref()?);
    let reductions = Reduction::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
    preference.set(Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &WORKSPACE)?;
    preference.set(Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reductions)?;
    for alignment in [
        Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
        Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
        Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
    ] {
        preference.set(alignment, &ALIGNMENT)?;
    }
    let [first, second, into] = described.layouts.each_ref().map(|layout| layout.0);
    // SAFETY: the descriptors live until the call returns.
    let found = unsafe {
        lt::get_matmul_algo_heuristic(
            library.0,
            described.operation.0,
            first,
            second,
            into,
            into,
            preference.0,
        )
    }?;
    Ok(KernelPlan { algorithm: found.algo, workspace: found.workspaceSize })
}

/// The library's descriptors of a problem, of the transposed product.
struct Described {
    operation: Operation,
    /// Those of our right factor, our left factor and the output.
    layouts: [MatrixLayout; 3],
}

impl Described {
    fn new(problem: &Problem, bias: u64) -> Result<Self, CublasError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let scale = sys::cudaDataType_t::CUDA_R_32F;
        let operation = Operation(lt::create_matmul_desc(problem.compute, scale)?);
        // `CUBLAS_OP_N` is 0, `CUBLAS_OP_T` is 1.
        operation.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &i32::from(problem.rhs.transposed))?;
        operation.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &i32::from(problem.lhs.transposed))?;
        if problem.has_bias {
            let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
            operation.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
            operation.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias)?;
        }
        let matrices = problem.out.matrices;
        Ok(Self {
            operation,
            layouts: [
                MatrixLayout::new(problem.rhs, problem.factor, matrices)?,
                MatrixLayout::new(problem.lhs, problem.factor, matrices)?,
                MatrixLayout::new(problem.out, problem.sum, matrices)?,
            ],
        })
    }
}

struct Operation(sys::cublasLtMatmulDesc_t);

impl Operation {
    fn set<T>(&self, attribute: sys::cublasLtMatmulDescAttributes_t, value: &T) -> Result<(), CublasError> {
        // SAFETY: the descriptor was created and not destroyed; the library copies the value.
        unsafe {
            lt::set_matmul_desc_attribute(self.0, attribute, ptr::from_ref(value).cast(), size_of::<T>())
        }
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        let _ = unsafe { lt::destroy_matmul_desc(self.0) };
    }
}

struct MatrixLayout(sys::cublasLtMatrixLayout_t);

impl MatrixLayout {
    fn new(operand: Operand, of: sys::cudaDataType_t, matrices: i32) -> Result<Self, CublasError> {
        use sys::cublasLtMatrixLayoutAttribute_t as Attribute;
        let Operand { rows, columns, stride, transposed, distance, .. } = operand;
        // Column by column, as the library reads, a row is a column.
        let [rows, columns] = if transposed { [rows, columns] } else { [columns, rows] };
        let layout = Self(lt::create_matrix_layout(of, rows, columns, stride)?);
        if matrices > 1 {
            layout.set(Attribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &matrices)?;
            layout.set(Attribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &distance)?;
        }
        Ok(layout)
    }

    fn set<T>(&self, attribute: sys::cublasLtMatrixLayoutAttribute_t, value: &T) -> Result<(), CublasError> {
        // SAFETY: the layout was created and not destroyed; the library copies the value.
        unsafe {
            lt::set_matrix_layout_attribute(self.0, attribute, ptr::from_ref(value).cast(), size_of::<T>())
        }
    }
}

impl Drop for MatrixLayout {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        let _ = unsafe { lt::destroy_matrix_layout(self.0) };
    }
}

struct Preference(sys::cublasLtMatmulPreference_t);

impl Preference {
    fn set<T>(
        &self,
        attribute: sys::cublasLtMatmulPreferenceAttributes_t,
        value: &T,
    ) -> Result<(), CublasError> {
        // SAFETY: the preference was created and not destroyed; the library copies the value.
        unsafe {
            lt::set_matmul_pref_attribute(self.0, attribute, ptr::from_ref(value).cast(), size_of::<T>())
        }
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        let _ = unsafe { lt::destroy_matmul_pref(self.0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operand(shape: &[usize], strides: &[usize]) -> Option<(i64, bool, i32, i64)> {
        let Operand { stride, transposed, matrices, distance, .. } = Operand::of(shape, strides)?;
        Some((stride, transposed, matrices, distance))
    }

    #[test]
    fn layouts_are_those_of_the_library() {
        assert_eq!(operand(&[3, 4], &[4, 1]), Some((4, false, 1, 0)));
        assert_eq!(operand(&[3, 4], &[1, 3]), Some((3, true, 1, 0)), "transposed");
        assert_eq!(operand(&[3, 4], &[128, 1]), Some((128, false, 1, 0)), "padded rows");
        assert_eq!(operand(&[2, 5, 3, 4], &[60, 12, 4, 1]), Some((4, false, 10, 12)));
        assert_eq!(operand(&[1, 5, 3, 4], &[7, 12, 1, 3]), Some((3, true, 5, 12)));
        assert_eq!(operand(&[5, 1, 4], &[4, 1, 1]), Some((4, false, 5, 4)), "rows of one element each");
        assert_eq!(operand(&[3, 1], &[1, 1]), Some((1, false, 1, 0)));
        assert_eq!(operand(&[2, 3, 4], &[0, 4, 1]), Some((4, false, 2, 0)), "one matrix for all");
    }

    #[test]
    fn other_layouts_are_left_to_cubecl() {
        assert_eq!(operand(&[3, 4], &[8, 2]), None, "every second element");
        assert_eq!(operand(&[2, 5, 3, 4], &[100, 12, 4, 1]), None, "a gap between batches");
        assert_eq!(operand(&[4], &[1]), None);
        assert_eq!(operand(&[3, 4], &[0, 1]), None, "one row, three times");
        assert_eq!(operand(&[3, 4], &[1, 2]), None, "columns that overlap");
        assert_eq!(operand(&[0, 3, 4], &[12, 4, 1]), None, "no matrix");
    }
}
