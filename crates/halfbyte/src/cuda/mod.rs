//! Who multiplies on a GPU: the driver, the run-time compiler with its cache, and the kernels.
//!
//! Nothing of CUDA is needed to build this crate, and nothing is linked: the driver and the libraries are opened when a
//! [`Gpu`] is, and where one is missing the error says where it was looked for ([`library`]). Kernels are C++ sources in
//! this folder, compiled for the device at hand by [`nvrtc`] and kept by [`cache`].
//!
//! | variable | what it does |
//! |---|---|
//! | `HALFBYTE_NVRTC`, `HALFBYTE_CUBLASLT`, `HALFBYTE_NCCL` | file or folder of a library |
//! | `HALFBYTE_CACHE` | folder of compiled kernels |
//! | `HALFBYTE_CUDA_SOURCES` | folder of sources to read instead of those compiled in |
//! | `HALFBYTE_CUDA_ARCH` | older processor whose kernels run, as PTX: `compute_75` |
//!
//! A layer times activations that another library has on the device, in that library's stream:
//!
//! ```no_run
//! use half::f16;
//! use halfbyte::cuda::driver::{Stream, View, ViewMut};
//! use halfbyte::cuda::{Cuda, Gpu};
//! use halfbyte::{Act, Linear, QTensor, Weight};
//! use std::sync::Arc;
//!
//! fn multiply(w: &QTensor, x: u64, y: u64, m: usize, stream: *mut std::ffi::c_void) -> halfbyte::Result<()> {
//!     let gpu = Arc::new(Gpu::open(0)?);
//!     // SAFETY: the caller's stream is of this device and stays open.
//!     let stream = unsafe { Stream::from_raw(gpu.context(), stream) };
//!     let device = Cuda::new(gpu, stream)?;
//!     let linear = Linear::on(&device, Weight::Quantized(w, Act::A16))?;
//!     let [n, k] = [linear.n(), linear.k()];
//!     // SAFETY: x holds m rows of k halfs and y has room for m rows of n, and nothing else uses them meanwhile.
//!     let (x, y) = unsafe { (View::<f16>::from_raw(x, m * k), ViewMut::<f16>::from_raw(y, m * n)) };
//!     linear.forward(&device, x, m, y)?;
//!     device.synchronize()
//! }
//! ```

#[doc(hidden)]
pub mod cache;
#[doc(hidden)]
pub mod compile;
pub mod conv;
#[doc(hidden)]
pub mod cublaslt;
#[doc(hidden)]
pub mod dispatch;
pub mod driver;
mod halfs;
pub mod int8;
#[doc(hidden)]
pub mod inventory;
mod kept;
#[doc(hidden)]
pub mod library;
pub mod matmul;
pub mod nccl;
pub mod nn;
#[doc(hidden)]
pub mod nvrtc;
#[doc(hidden)]
pub mod parameters;
mod queue;
#[doc(hidden)]
pub mod roofline;
#[doc(hidden)]
pub mod schedule;
#[doc(hidden)]
pub mod sources;
mod tensor;
#[doc(hidden)]
pub mod tiled;

pub use queue::Cuda;
pub use tensor::{AnyBytes, AnyBytesMut, AnyFloats, AnyFloatsMut};

use crate::error::Result;
use crate::layout::cuda_wna16::Atom;
use compile::Compiler;
use cublaslt::Products;
use driver::{Buffer, Context, Driver, Function, Launch, Module, Stream, View, ViewMut};
use library::CUBLASLT;
use matmul::KeptPlans;
use nn::Gate;
use rayon::prelude::*;
use sources::{Arch, Instance};
use std::collections::HashMap;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// What a device offers to kernels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Caps {
    /// The processor.
    pub arch: Arch,
    /// Multiprocessors (SMs).
    pub multiprocessors: u32,
    /// Shared memory that one block may have at most.
    pub shared_bytes: u32,
    /// Size of the second-level cache.
    pub l2_bytes: u32,
    /// Megabytes (10⁶) a second from memory, as the data sheet has it; 0: unknown.
    pub memory_mb_per_s: u32,
    /// Clock of the multiprocessors at most; 0: unknown.
    pub clock_khz: u32,
    /// Whether cuBLASLt was found.
    pub cublaslt: bool,
    /// Whether products may round weights to the type of x where y is finer, and f16 holds them: a property of the weight
    /// ([`Packed::allow_rounded_weights`](matmul::Packed::allow_rounded_weights)), not of the device.
    pub rounded_weights: bool,
    /// The form of the weight's atoms in layout `cuda_wna16`; None: what its format alone says. Of the weight as well.
    pub atom: Option<Atom>,
    /// What becomes of the weight's rows of gates and of what they let through, which take turns; None: rows are outputs. Of the weight
    /// as well.
    pub gate: Option<Gate>,
}

impl Caps {
    /// An H200: the device whose measurements choices follow.
    pub const H200: Self = Self {
        arch: Arch { number: 90, specific: true, ptx: false },
        multiprocessors: 132,
        shared_bytes: 232_448,
        l2_bytes: 60 << 20,
        memory_mb_per_s: 4_916_736,
        clock_khz: 1_980_000,
        cublaslt: true,
        rounded_weights: false,
        atom: None,
        gate: None,
    };

    /// Itself, or an H200 where bandwidth or clock are unknown: what models of time go by.
    pub(crate) fn or_known(&self) -> &Self {
        if self.memory_mb_per_s == 0 || self.clock_khz == 0 { &Self::H200 } else { self }
    }

    /// Clocks that memory takes to bring so many bytes to each multiprocessor; 0: unknown.
    pub fn clocks_of_memory(&self, bytes: usize) -> f64 {
        match self.memory_mb_per_s {
            0 => 0.0,
            // kHz · bytes / (MB/s): thousandths of a clock.
            rate => bytes as f64 * f64::from(self.multiprocessors) * f64::from(self.clock_khz) / f64::from(rate) * 1e-3,
        }
    }

    /// A processor of which nothing else is known: to enumerate what is compiled for it.
    pub(crate) fn of_arch(arch: Arch) -> Self {
        let (multiprocessors, shared_bytes) = (108, arch.shared_bytes());
        let (l2_bytes, memory_mb_per_s, clock_khz, cublaslt, rounded_weights, atom) = (0, 0, 0, false, false, None);
        Self {
            arch,
            multiprocessors,
            shared_bytes,
            l2_bytes,
            memory_mb_per_s,
            clock_khz,
            cublaslt,
            rounded_weights,
            atom,
            gate: None,
        }
    }
}

/// A GPU as a device: its context, its capabilities, and the kernels loaded on it.
#[derive(Debug)]
pub struct Gpu {
    /// cuBLASLt, once it was needed; it goes before the context that it works in.
    products: Mutex<Option<Arc<Products>>>,
    context: Context,
    caps: Caps,
    compiler: Compiler,
    /// Each locked while it is loaded.
    functions: Mutex<HashMap<String, Arc<Mutex<Option<Function>>>>>,
    /// Those that are launched beside products, by a key that takes no formatting.
    functions_by_key: Mutex<HashMap<Key, Function>>,
    plans: KeptPlans,
}

/// A kernel's name, and the numbers of its instance.
type Key = (&'static str, [u32; 2]);

impl Gpu {
    /// Device `index`. Errors: no driver, one too old, no such device, an `HALFBYTE_CUDA_ARCH` that it cannot run.
    pub fn open(index: u32) -> Result<Self> {
        let context = Context::open(index)?;
        let arch = Arch::of_device(context.info().compute)?;
        let compiler = Compiler::new(arch, context.driver().version());
        Ok(Self::with_compiler(context, compiler))
    }

    /// A device with a compiler of its own, as for another cache.
    pub fn with_compiler(context: Context, compiler: Compiler) -> Self {
        let info = context.info();
        let caps = Caps {
            arch: compiler.arch(),
            multiprocessors: info.multiprocessors,
            shared_bytes: info.shared_bytes.min(compiler.arch().shared_bytes()),
            l2_bytes: info.l2_bytes,
            memory_mb_per_s: info.memory_mb_per_s(),
            clock_khz: info.clock_khz,
            cublaslt: library::is_there(&CUBLASLT, Some(context.driver().version().major)),
            rounded_weights: false,
            atom: None,
            gate: None,
        };
        Self {
            products: Mutex::default(),
            context,
            caps,
            compiler,
            functions: Mutex::default(),
            functions_by_key: Mutex::default(),
            plans: KeptPlans::default(),
        }
    }

    /// Number of devices; 0 also if there is no driver.
    pub fn count() -> usize {
        Driver::open().and_then(Driver::devices).map_or(0, |devices| devices.len())
    }

    /// The context: memory, and streams of callers.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Its name, and the processor whose code it runs if that is not its own.
    pub fn name(&self) -> String {
        let (name, arch) = (&self.context.info().name, self.caps.arch);
        if arch.ptx { format!("{name} as {arch}") } else { name.clone() }
    }

    /// What kernels may use.
    pub fn caps(&self) -> Caps {
        self.caps
    }

    /// The same launch, which begins while the kernel before it ends, of code for a processor that can (programmatic dependent
    /// launch, from compute capability 9.0 on): the kernel waits for that one itself. Code for others cannot wait so.
    fn overlapping(&self, form: Launch) -> Launch {
        Launch { programmatic: self.caps.arch.number >= 90, ..form }
    }

    /// The compiler, and why it keeps nothing if it does not.
    pub fn compiler(&self) -> &Compiler {
        &self.compiler
    }

    /// cuBLASLt, opened when it is first needed. Errors: those of [`cublaslt::CublasLt::open`].
    fn products(&self) -> Result<Arc<Products>> {
        // Under the lock: the library is opened once.
        let mut products = self.products.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(products) = &*products {
            return Ok(products.clone());
        }
        let opened = Arc::new(Products::open(self)?);
        *products = Some(opened.clone());
        Ok(opened)
    }

    /// A new queue of work.
    pub fn stream(&self) -> Result<Stream> {
        Stream::new(&self.context)
    }

    /// A kernel, loaded: from this device's table, the cache, or the compiler; a launcher in a hurry keeps it. Errors: those of [`Compiler::get`] and
    /// [`Module::load`].
    pub fn function(&self, instance: &Instance) -> Result<Function> {
        let mut table = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        let place = table.entry(instance.to_string()).or_default().clone();
        drop(table);
        // Under the lock of this one alone: another kernel can be had meanwhile, and who comes second waits for the first.
        let mut place = place.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = &*place {
            return Ok(function.clone());
        }
        let compiled = self.compiler.get(instance)?;
        let function = Module::load(&self.context, &compiled.code)?.function(&compiled.name)?;
        Ok(place.insert(function).clone())
    }

    /// As [`Gpu::function`], for launchers that know an instance by a name and numbers: nothing is formatted but once.
    fn function_once(&self, key: Key, instance: impl FnOnce() -> Instance) -> Result<Function> {
        let table = || self.functions_by_key.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = table().get(&key) {
            return Ok(function.clone());
        }
        let function = self.function(&instance())?;
        Ok(table().entry(key).or_insert(function).clone())
    }

    /// The plans of products with weights of some form, which every weight of that form shares.
    fn plans(&self) -> &KeptPlans {
        &self.plans
    }

    /// Loads kernels before they are needed, several at once; `progress` is told how many are there.
    pub fn prepare(&self, instances: &[Instance], progress: impl Fn(usize) + Sync) -> Result<()> {
        let done = AtomicUsize::new(0);
        instances.par_iter().try_for_each(|instance| {
            self.function(instance)?;
            progress(done.fetch_add(1, Ordering::Relaxed) + 1);
            Ok(())
        })
    }
}

/// Memory that kernels leave partial results and counters in, for one stream.
///
/// It begins as zeros. Its first [`Workspace::COUNTER_BYTES`] are counters, which every kernel that uses them leaves at zero;
/// behind them lies what a kernel finds and leaves as it will. Products that share a workspace must be in one stream, or wait
/// for each other.
#[derive(Debug)]
pub struct Workspace {
    buffer: Buffer<u8>,
}

impl Workspace {
    /// Bytes at the beginning that are counters.
    pub const COUNTER_BYTES: usize = 64 << 10;

    /// Zeroed memory. Error: it is short.
    pub fn new(gpu: &Gpu, stream: &Stream, bytes: usize) -> Result<Self> {
        let mut buffer = gpu.context.allocate(bytes)?;
        stream.fill(buffer.view_mut(), 0)?;
        stream.synchronize()?;
        Ok(Self { buffer })
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.buffer.len()
    }

    /// All of it.
    pub fn view(&self) -> View<'_, u8> {
        self.buffer.view()
    }

    /// All of it, to be written.
    pub fn view_mut(&mut self) -> ViewMut<'_, u8> {
        self.buffer.view_mut()
    }

    /// Its first bytes as a workspace, for one that has it in no other way; panics if there are fewer.
    fn first(&self, bytes: usize) -> Part<'_> {
        Part { workspace: Self { buffer: self.buffer.first(bytes) }, life: PhantomData }
    }

    /// Its first bytes as a workspace, and the others; panics if there are fewer.
    fn split_at(&mut self, bytes: usize) -> (Part<'_>, View<'_, u8>) {
        let (buffer, others) = self.buffer.split_at(bytes);
        (Part { workspace: Self { buffer }, life: PhantomData }, others)
    }

    /// The same with others that are written.
    fn split_at_mut(&mut self, bytes: usize) -> (Part<'_>, ViewMut<'_, u8>) {
        let (buffer, _) = self.buffer.split_at(bytes);
        let len = self.buffer.len();
        (Part { workspace: Self { buffer }, life: PhantomData }, self.buffer.view_mut().slice(bytes..len))
    }
}

/// The first bytes of a workspace.
struct Part<'a> {
    workspace: Workspace,
    life: PhantomData<&'a mut Workspace>,
}

impl Part<'_> {
    fn get(&mut self) -> &mut Workspace {
        &mut self.workspace
    }
}
