//! cuBLASLt, opened at run time: dense products, as a baseline and for what no kernel here does better.
//!
//! Where it is looked for: [`super::library`], `HALFBYTE_CUBLASLT`. Of the algorithms that it proposes for a shape the first
//! is taken. Source: the headers `cublasLt.h` and `library_types.h`, whose numbers stand below.

use super::Gpu;
use super::driver::{Buffer, FloatView, FloatViewMut, Stream};
use super::library::{self, CUBLASLT, Opened};
use crate::error::{Error, Result};
use crate::tensor::Float;
use std::ffi::{c_int, c_void};
use std::path::Path;
use std::sync::Arc;

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
const LEAST_ALIGNMENTS: [c_int; 4] = [5, 6, 7, 8];

/// Bytes that an algorithm may work in.
const WORKSPACE_BYTES: usize = 32 << 20;

/// Where matrices must begin.
const ALIGNMENT: u32 = 16;

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
        // The handle belongs to the context that is current.
        gpu.context().bind()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: room for one handle; a context is current.
        check(unsafe { (functions.create)(&mut handle) })?;
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
        let layout = |dtype: Float, rows: usize, columns: usize| -> Result<Owned> {
            let mut layout = Owned::new(self, f.layout_destroy);
            // SAFETY: as above.
            let status = unsafe {
                (f.layout_create)(&mut layout.handle, number(dtype), rows as u64, columns as u64, rows as i64)
            };
            check(status).map(|()| layout)
        };
        let (w, x, y) = (layout(input, k, n)?, layout(input, k, m)?, layout(out, n, m)?);
        let mut preference = Owned::new(self, f.preference_destroy);
        // SAFETY: as above.
        check(unsafe { (f.preference_create)(&mut preference.handle) })?;
        let set = |attribute: c_int, value: *const c_void, bytes: usize| {
            // SAFETY: as above.
            check(unsafe { (f.preference_set)(preference.handle, attribute, value, bytes) })
        };
        set(MOST_WORKSPACE, std::ptr::from_ref(&WORKSPACE_BYTES).cast(), size_of::<usize>())?;
        for attribute in LEAST_ALIGNMENTS {
            set(attribute, std::ptr::from_ref(&ALIGNMENT).cast(), size_of::<u32>())?;
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
        let workspace = gpu.context().allocate(proposal.workspace_bytes)?;
        let algorithm = proposal.algorithm;
        Ok(Plan { shape: [m, n, k], input, out, product, w, x, y, algorithm, workspace })
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

/// A product, ready to be put into a stream; launches of one plan must be in one stream, or wait for each other.
pub struct Plan {
    shape: [usize; 3],
    input: Float,
    out: Float,
    product: Owned,
    w: Owned,
    x: Owned,
    y: Owned,
    algorithm: [u64; 8],
    workspace: Buffer<u8>,
}

impl std::fmt::Debug for Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "cuBLASLt m={} n={} k={}", self.shape[0], self.shape[1], self.shape[2])
    }
}

// SAFETY: the descriptions are only read after `plan`.
unsafe impl Send for Plan {}

impl Plan {
    /// Puts the product into a stream. Errors: lengths, types or addresses that do not fit the plan.
    pub fn run(&self, stream: &Stream, x: FloatView<'_>, w: FloatView<'_>, y: &FloatViewMut<'_>) -> Result<()> {
        let [m, n, k] = self.shape;
        let got = [(x.dtype(), x.len()), (w.dtype(), w.len()), (y.dtype(), y.len())];
        let expected = [(self.input, m * k), (self.input, n * k), (self.out, m * n)];
        let aligned = |pointer: u64| pointer.is_multiple_of(u64::from(ALIGNMENT));
        if got != expected || ![x.pointer(), w.pointer(), y.pointer()].into_iter().all(aligned) {
            return Err(Error::invalid(OP, format!("x, w, y of {expected:?} at multiples of 16"), format!("{got:?}")));
        }
        stream.context().bind()?;
        let library = &self.product.library;
        let (one, zero) = (1f32, 0f32);
        // SAFETY: the descriptions are those of the matrices, whose lengths were checked; the workspace has what the
        // algorithm asked for, and lives as long as the plan.
        check(unsafe {
            (library.functions.multiply)(
                library.handle,
                self.product.handle,
                std::ptr::from_ref(&one).cast(),
                w.pointer(),
                self.w.handle,
                x.pointer(),
                self.x.handle,
                std::ptr::from_ref(&zero).cast(),
                y.pointer(),
                self.y.handle,
                y.pointer(),
                self.y.handle,
                &self.algorithm,
                self.workspace.pointer(),
                self.workspace.bytes(),
                stream.raw(),
            )
        })
    }
}
