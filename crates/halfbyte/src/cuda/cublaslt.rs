//! cuBLASLt, opened at run time: dense products, as a baseline and for what no kernel here does better.
//!
//! Where it is looked for: [`super::library`], `HALFBYTE_CUBLASLT`. Of the algorithms that it proposes for a shape the first
//! is taken. Source: the headers `cublasLt.h` and `library_types.h`, whose numbers stand below.

use super::Gpu;
use super::driver::{Buffer, FloatView, FloatViewMut, Stream, beside_capture};
use super::library::{self, CUBLASLT, Opened};
use crate::error::{Error, Result};
use crate::tensor::Float;
use std::ffi::{c_int, c_void};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

const OP: &str = "cuBLASLt";

type Handle = *mut c_void;
type Status = c_int;

const COMPUTE_32F: c_int = 68;
const R_32F: c_int = 0;
const R_16F: c_int = 2;
const R_16BF: c_int = 14;
const TRANSPOSE_A: c_int = 3;
const TRANSPOSED: c_int = 1;
const MOST_WORKSPACE: c_int = 1;
const REDUCTIONS: c_int = 3;
const LEAST_ALIGNMENTS: [c_int; 4] = [5, 6, 7, 8];

/// How sums of parts of k may be joined: in any way, or only in f32 and in a step of its own, which rounds nothing to the
/// type of y and has one order.
const ANY_REDUCTION: u32 = 7;
const REDUCTION_IN_F32: u32 = 2;

/// Bytes that an algorithm may work in, where they are to be had: what NVIDIA advises for Hopper.
pub(super) const WORKSPACE_BYTES: usize = 32 << 20;

/// Where matrices of a [`Plan`] must begin, and the most that an algorithm asks for.
const ALIGNMENT: u32 = 16;

/// Products that a device keeps prepared.
const KEPT: usize = 64;

/// An algorithm as the library proposes it.
#[derive(Clone, Copy)]
#[repr(C)]
struct Proposal {
    algorithm: [u64; 8],
    workspace_bytes: usize,
    state: Status,
    waves: f32,
    reserved: [c_int; 4],
}

type Destroy = unsafe extern "C" fn(Handle) -> Status;
type Set = unsafe extern "C" fn(Handle, c_int, *const c_void, usize) -> Status;

struct Functions {
    create: unsafe extern "C" fn(*mut Handle) -> Status,
    destroy: Destroy,
    product_create: unsafe extern "C" fn(*mut Handle, c_int, c_int) -> Status,
    product_destroy: Destroy,
    product_set: Set,
    layout_create: unsafe extern "C" fn(*mut Handle, c_int, u64, u64, i64) -> Status,
    layout_destroy: Destroy,
    preference_create: unsafe extern "C" fn(*mut Handle) -> Status,
    preference_destroy: Destroy,
    preference_set: Set,
    propose: unsafe extern "C" fn(
        Handle,
        Handle,
        Handle,
        Handle,
        Handle,
        Handle,
        Handle,
        c_int,
        *mut Proposal,
        *mut c_int,
    ) -> Status,
    multiply: unsafe extern "C" fn(
        Handle,
        Handle,
        *const c_void,
        u64,
        Handle,
        u64,
        Handle,
        *const c_void,
        u64,
        Handle,
        u64,
        Handle,
        *const [u64; 8],
        u64,
        usize,
        *mut c_void,
    ) -> Status,
}

/// The library with a handle on one device.
pub struct CublasLt {
    functions: Functions,
    handle: Handle,
    library: Opened,
}

// SAFETY: the library says that a handle may be used by several threads at once.
unsafe impl Send for CublasLt {}
// SAFETY: as above.
unsafe impl Sync for CublasLt {}

impl std::fmt::Debug for CublasLt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "cuBLASLt of {}", self.library.path().display())
    }
}

fn check(status: Status) -> Result<()> {
    match status {
        0 => Ok(()),
        3 => Err(Error::Device { op: OP, cause: "CUBLAS_STATUS_ALLOC_FAILED: memory is short".into() }),
        15 => Err(Error::Device { op: OP, cause: "CUBLAS_STATUS_NOT_SUPPORTED: no algorithm for this product".into() }),
        status => Err(Error::Device { op: OP, cause: format!("status {status}") }),
    }
}

impl CublasLt {
    /// Opens the library for a device. Errors: it is in none of the places, or is not whole, or does not start.
    pub fn open(gpu: &Gpu) -> Result<Arc<Self>> {
        let library = library::open(&CUBLASLT, Some(gpu.context().driver().version().major))?;
        // SAFETY: the types are those of cublasLt.h, and the library is kept beside the functions.
        let functions = unsafe {
            Functions {
                create: library.function("cublasLtCreate")?,
                destroy: library.function("cublasLtDestroy")?,
                product_create: library.function("cublasLtMatmulDescCreate")?,
                product_destroy: library.function("cublasLtMatmulDescDestroy")?,
                product_set: library.function("cublasLtMatmulDescSetAttribute")?,
                layout_create: library.function("cublasLtMatrixLayoutCreate")?,
                layout_destroy: library.function("cublasLtMatrixLayoutDestroy")?,
                preference_create: library.function("cublasLtMatmulPreferenceCreate")?,
                preference_destroy: library.function("cublasLtMatmulPreferenceDestroy")?,
                preference_set: library.function("cublasLtMatmulPreferenceSetAttribute")?,
                propose: library.function("cublasLtMatmulAlgoGetHeuristic")?,
                multiply: library.function("cublasLtMatmul")?,
            }
        };
        let mut handle = std::ptr::null_mut();
        // The handle belongs to the context that is current.
        // SAFETY: room for one handle; a context is current.
        beside_capture(gpu.context(), || check(unsafe { (functions.create)(&mut handle) }))?;
        Ok(Arc::new(Self { functions, handle, library }))
    }

    /// The file that was opened.
    pub fn path(&self) -> &Path {
        self.library.path()
    }

    /// Prepares y = x · wᵀ for x `[m, k]` and w `[n, k]` of one type of 16 bits and y `[m, n]` of a type, with sums in f32.
    ///
    /// Errors: an empty matrix, sizes or types that the library does not take, memory that is short.
    pub fn plan(self: &Arc<Self>, gpu: &Gpu, [m, n, k]: [usize; 3], input: Float, out: Float) -> Result<Plan> {
        if m == 0 || n == 0 || k == 0 || input == Float::F32 {
            let got = format!("m={m} n={n} k={k} in {input}");
            return Err(Error::invalid(OP, "matrices of 16 bits that are not empty", got));
        }
        let alignments = [ALIGNMENT; 3];
        let workspace_bytes = WORKSPACE_BYTES;
        let matrices = Matrices { shape: [m, n, k], input, out, w_pitch: k, y_pitch: n, alignments, workspace_bytes };
        let prepared = self.prepare(matrices, ANY_REDUCTION)?;
        let workspace = gpu.context().allocate(prepared.workspace_bytes)?;
        Ok(Plan { prepared, workspace })
    }

    fn prepare(self: &Arc<Self>, matrices: Matrices, reductions: u32) -> Result<Prepared> {
        let Matrices { shape: [m, n, k], input, out, w_pitch, y_pitch, .. } = matrices;
        let [x_at, w_at, y_at] = matrices.alignments;
        let f = &self.functions;
        let mut product = Owned::new(self, f.product_destroy);
        // SAFETY: as all calls below, it creates into room for one handle, or reads an attribute of the size given.
        check(unsafe { (f.product_create)(&mut product.handle, COMPUTE_32F, R_32F) })?;
        let transposed = std::ptr::from_ref(&TRANSPOSED).cast();
        // SAFETY: as above.
        check(unsafe { (f.product_set)(product.handle, TRANSPOSE_A, transposed, size_of::<c_int>()) })?;
        let number = |dtype: Float| match dtype {
            Float::F16 => R_16F,
            Float::BF16 => R_16BF,
            Float::F32 => R_32F,
        };
        // The library counts matrices by columns: w is k × n and taken transposed, x is k × m, y is n × m.
        let layout = |dtype: Float, rows: usize, columns: usize, pitch: usize| -> Result<Owned> {
            let mut layout = Owned::new(self, f.layout_destroy);
            // SAFETY: as above.
            let status = unsafe {
                (f.layout_create)(&mut layout.handle, number(dtype), rows as u64, columns as u64, pitch as i64)
            };
            check(status).map(|()| layout)
        };
        let (w, x, y) = (layout(input, k, n, w_pitch)?, layout(input, k, m, k)?, layout(out, n, m, y_pitch)?);
        let mut preference = Owned::new(self, f.preference_destroy);
        // SAFETY: as above.
        check(unsafe { (f.preference_create)(&mut preference.handle) })?;
        let set = |attribute: c_int, value: *const c_void, bytes: usize| {
            // SAFETY: as above.
            check(unsafe { (f.preference_set)(preference.handle, attribute, value, bytes) })
        };
        set(MOST_WORKSPACE, std::ptr::from_ref(&matrices.workspace_bytes).cast(), size_of::<usize>())?;
        set(REDUCTIONS, std::ptr::from_ref(&reductions).cast(), size_of::<u32>())?;
        for (attribute, bytes) in LEAST_ALIGNMENTS.into_iter().zip([w_at, x_at, y_at, y_at]) {
            set(attribute, std::ptr::from_ref(&bytes).cast(), size_of::<u32>())?;
        }
        let empty = Proposal { algorithm: [0; 8], workspace_bytes: 0, state: 0, waves: 0.0, reserved: [0; 4] };
        let (mut proposal, mut count) = (empty, 0);
        // SAFETY: room for one proposal, as asked for.
        check(unsafe {
            (f.propose)(
                self.handle,
                product.handle,
                w.handle,
                x.handle,
                y.handle,
                y.handle,
                preference.handle,
                1,
                &mut proposal,
                &mut count,
            )
        })?;
        if count < 1 || proposal.state != 0 {
            return Err(Error::Device { op: OP, cause: format!("no algorithm for m={m} n={n} k={k}") });
        }
        let Proposal { algorithm, workspace_bytes, .. } = proposal;
        Ok(Prepared { matrices, product, w, x, y, algorithm, workspace_bytes })
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed here once.
        let _ = unsafe { (self.functions.destroy)(self.handle) };
    }
}

/// A description of the library's, destroyed when dropped.
struct Owned {
    library: Arc<CublasLt>,
    handle: Handle,
    destroy: Destroy,
}

impl Owned {
    fn new(library: &Arc<CublasLt>, destroy: Destroy) -> Self {
        Self { library: library.clone(), handle: std::ptr::null_mut(), destroy }
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            // SAFETY: created once, destroyed here once.
            let _ = unsafe { (self.destroy)(self.handle) };
        }
    }
}

/// What is multiplied, and how it lies: x `[m, k]` and w `[n, k]` of one type, y `[m, n]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Matrices {
    /// m, n, k; none is 0.
    pub shape: [usize; 3],
    /// Type of x and w.
    pub input: Float,
    /// Type of y: that of x, or f32.
    pub out: Float,
    /// Elements from row to row of w.
    pub w_pitch: usize,
    /// Elements from row to row of y.
    pub y_pitch: usize,
    /// Bytes of which the addresses of x, w and y are multiples.
    pub alignments: [u32; 3],
    /// What an algorithm may work in.
    pub workspace_bytes: usize,
}

/// Bytes of which an address is a multiple, as far as algorithms ask.
pub(super) fn alignment(address: u64) -> u32 {
    1 << address.trailing_zeros().min(ALIGNMENT.trailing_zeros())
}

/// A product as it was prepared.
struct Prepared {
    matrices: Matrices,
    product: Owned,
    w: Owned,
    x: Owned,
    y: Owned,
    algorithm: [u64; 8],
    workspace_bytes: usize,
}

// SAFETY: the descriptions are only read after `prepare`.
unsafe impl Send for Prepared {}
// SAFETY: as above.
unsafe impl Sync for Prepared {}

impl Prepared {
    /// Puts the product into a stream; the addresses are those of matrices and memory as they were described.
    fn run(&self, stream: &Stream, [x, w, y]: [u64; 3], workspace: u64) -> Result<()> {
        stream.context().bind()?;
        let library = &self.product.library;
        let (one, zero) = (1f32, 0f32);
        // SAFETY: the caller vouches for the addresses; the workspace has what the algorithm asked for.
        check(unsafe {
            (library.functions.multiply)(
                library.handle,
                self.product.handle,
                std::ptr::from_ref(&one).cast(),
                w,
                self.w.handle,
                x,
                self.x.handle,
                std::ptr::from_ref(&zero).cast(),
                y,
                self.y.handle,
                y,
                self.y.handle,
                &self.algorithm,
                workspace,
                self.workspace_bytes,
                stream.raw(),
            )
        })
    }
}

/// The library with the products that a device has prepared.
pub(super) struct Products {
    library: Arc<CublasLt>,
    kept: Mutex<Vec<Arc<Prepared>>>,
}

impl std::fmt::Debug for Products {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.library.fmt(f)
    }
}

impl Products {
    /// Opens the library. Errors: those of [`CublasLt::open`].
    pub(super) fn open(gpu: &Gpu) -> Result<Self> {
        Ok(Self { library: CublasLt::open(gpu)?, kept: Mutex::default() })
    }

    /// Puts y = x · wᵀ into a stream, with sums in f32 that no part rounds earlier, the same bits each time. What is
    /// prepared for matrices is kept.
    ///
    /// Also into a stream that is being recorded: what is prepared is prepared beside it. The caller vouches for the addresses: of
    /// x, w and y as described, and of as many bytes to work in. Errors: sizes that the library does not take.
    pub(super) fn run(&self, stream: &Stream, matrices: Matrices, addresses: [u64; 3], workspace: u64) -> Result<()> {
        self.prepared(stream, matrices)?.run(stream, addresses, workspace)
    }

    fn prepared(&self, stream: &Stream, matrices: Matrices) -> Result<Arc<Prepared>> {
        let kept = || self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(prepared) = kept().iter().find(|prepared| prepared.matrices == matrices) {
            return Ok(prepared.clone());
        }
        let prepare = || self.library.prepare(matrices, REDUCTION_IN_F32);
        let prepared = Arc::new(beside_capture(stream.context(), prepare)?);
        let mut kept = kept();
        if kept.len() == KEPT {
            kept.remove(0);
        }
        kept.push(prepared.clone());
        Ok(prepared)
    }
}

/// A product with memory to work in, ready to be put into a stream; launches of one plan must be in one stream, or wait for
/// each other.
pub struct Plan {
    prepared: Prepared,
    workspace: Buffer<u8>,
}

impl std::fmt::Debug for Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [m, n, k] = self.prepared.matrices.shape;
        write!(f, "cuBLASLt m={m} n={n} k={k}")
    }
}

impl Plan {
    /// Puts the product into a stream. Errors: lengths, types or addresses that do not fit the plan.
    pub fn run(&self, stream: &Stream, x: FloatView<'_>, w: FloatView<'_>, y: &FloatViewMut<'_>) -> Result<()> {
        let Matrices { shape: [m, n, k], input, out, .. } = self.prepared.matrices;
        let got = [(x.dtype(), x.len()), (w.dtype(), w.len()), (y.dtype(), y.len())];
        let expected = [(input, m * k), (input, n * k), (out, m * n)];
        let addresses = [x.pointer(), w.pointer(), y.pointer()];
        if got != expected || !addresses.iter().all(|address| address.is_multiple_of(u64::from(ALIGNMENT))) {
            return Err(Error::invalid(OP, format!("x, w, y of {expected:?} at multiples of 16"), format!("{got:?}")));
        }
        self.prepared.run(stream, addresses, self.workspace.pointer())
    }
}
