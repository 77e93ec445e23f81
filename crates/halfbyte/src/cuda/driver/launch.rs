//! Modules of machine code, their functions, and launches.

use super::{Context, Stream, TensorMap, check};
use crate::cuda::parameters::Parameters;
use crate::error::{Error, Result};
use cudarc::driver::sys::{self, CUfunction_attribute as Attribute, CUresult};
use std::ffi::{CString, c_int, c_void};
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, PoisonError};

/// Machine code on a device.
#[derive(Clone, Debug)]
pub struct Module(Arc<Loaded>);

#[derive(Debug)]
struct Loaded {
    context: Context,
    handle: sys::CUmodule,
}

// SAFETY: the driver takes calls on a module from every thread; each call makes the context current first.
unsafe impl Send for Loaded {}
// SAFETY: as above.
unsafe impl Sync for Loaded {}

impl Module {
    /// Loads a cubin, or PTX that ends with a zero. Errors: code for another processor or a newer driver, no memory.
    pub fn load(context: &Context, code: &[u8]) -> Result<Self> {
        const OP: &str = "load a module";
        // The driver reads a length from the header and then that many bytes: it must not be led beyond the end.
        let is_whole = elf_bytes(code).is_some_and(|bytes| bytes <= code.len() as u64);
        let is_text = || code.iter().position(|&byte| byte == 0) == code.len().checked_sub(1);
        if !is_whole && !is_text() {
            return Err(Error::invalid(OP, "a whole ELF file or PTX", format!("{} bytes", code.len())));
        }
        context.bind()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the image is a whole ELF file or a text that ends with a zero (checked above), which the driver copies.
        let result = unsafe { sys::cuModuleLoadData(&mut handle, code.as_ptr().cast()) };
        let info = context.info();
        match result {
            CUresult::CUDA_ERROR_INVALID_IMAGE
            | CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU
            | CUresult::CUDA_ERROR_INVALID_SOURCE
            | CUresult::CUDA_ERROR_INVALID_PTX
            | CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION => {
                let driver = context.driver().version();
                let cause = format!(
                    "{result:?}: the code is not for {} (compute capability {}.{}) with a driver for CUDA {driver}",
                    info.name, info.compute[0], info.compute[1]
                );
                return Err(Error::Device { op: OP, cause });
            }
            _ => check(OP, result)?,
        }
        Ok(Self(Arc::new(Loaded { context: context.clone(), handle })))
    }

    /// A function by the name that the compiler gave it. Error: there is none.
    pub fn function(&self, name: &str) -> Result<Function> {
        let c_name = CString::new(name)
            .map_err(|_| Error::invalid("function", "a name without zero bytes", format!("{name:?}")))?;
        self.0.context.bind()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the module is loaded, the name ends with a zero.
        let result = unsafe { sys::cuModuleGetFunction(&mut handle, self.0.handle, c_name.as_ptr()) };
        if result == CUresult::CUDA_ERROR_NOT_FOUND {
            return Err(Error::invalid("function", "a function of the module", format!("\"{name}\"")));
        }
        check("function", result)?;
        Ok(Function { module: self.0.clone(), handle, shared_bytes: Arc::default() })
    }
}

/// Bytes that an ELF file of 64 bits says it has: the end of its section headers or of its program headers, whichever is
/// last; the driver looks at nothing beyond. None: not such a file.
fn elf_bytes(image: &[u8]) -> Option<u64> {
    let field = |at: usize, len: usize| -> Option<u64> {
        let bytes = image.get(at..at + len)?;
        Some(bytes.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte)))
    };
    if image.get(..5)? != [0x7f, b'E', b'L', b'F', 2] {
        return None;
    }
    let end = |offset: usize, size: usize, count: usize| -> Option<u64> {
        field(offset, 8)?.checked_add(field(size, 2)?.checked_mul(field(count, 2)?)?)
    };
    let (sections, programs) = (end(0x28, 0x3a, 0x3c)?, end(0x20, 0x36, 0x38)?);
    let first = field(0x28, 8)?;
    // Bodies of sections.
    let bodies = (0..field(0x3c, 2)?).map(|index| -> Option<u64> {
        let header = usize::try_from(first.checked_add(index.checked_mul(field(0x3a, 2)?)?)?).ok()?;
        let no_bits = field(header.checked_add(4)?, 4)? == 8;
        if no_bits { Some(0) } else { field(header + 0x18, 8)?.checked_add(field(header + 0x20, 8)?) }
    });
    bodies.chain([Some(sections), Some(programs)]).try_fold(0, |last: u64, end| Some(last.max(end?)))
}

impl Drop for Loaded {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: loaded in `load`, unloaded here once; functions hold the module.
            let _ = unsafe { sys::cuModuleUnload(self.handle) };
        }
    }
}

/// A kernel on a device.
#[derive(Clone, Debug)]
pub struct Function {
    module: Arc<Loaded>,
    handle: sys::CUfunction,
    /// Dynamic shared memory that launches may have so far. It is held while the driver is told of more: what it was told last counts.
    shared_bytes: Arc<Mutex<u32>>,
}

// SAFETY: as for the module.
unsafe impl Send for Function {}
// SAFETY: as for the module.
unsafe impl Sync for Function {}

/// What a kernel takes of a multiprocessor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resources {
    /// Registers a thread.
    pub registers: u32,
    /// Local memory a thread: what does not fit into registers.
    pub local_bytes: u32,
    /// Shared memory a block, without what a launch adds.
    pub shared_bytes: u32,
    /// Threads that a block may have at most.
    pub threads: u32,
}

/// The form of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Blocks in x, y, z.
    pub grid: [u32; 3],
    /// Threads a block in x, y, z.
    pub block: [u32; 3],
    /// Dynamic shared memory a block, up to what the device has.
    pub shared_bytes: u32,
    /// Blocks a cluster in x, y, z; all 1: no clusters.
    pub cluster: [u32; 3],
    /// Programmatic dependent launch: blocks may start while the kernel before in the stream still runs, and wait for it by
    /// `griddepcontrol.wait`.
    pub programmatic: bool,
    /// All blocks are there at once, so that they may wait for each other. Error of the launch where there is no room for all.
    pub cooperative: bool,
}

impl Launch {
    /// One-dimensional, without anything else.
    pub fn linear(blocks: u32, threads: u32) -> Self {
        let (grid, block) = ([blocks, 1, 1], [threads, 1, 1]);
        Self { grid, block, shared_bytes: 0, cluster: [1; 3], programmatic: false, cooperative: false }
    }
}

/// A parameter of a kernel: the bytes of a plain value. A slice of them is what the driver takes.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct Arg<'a> {
    value: *mut c_void,
    life: PhantomData<&'a ()>,
}

impl<'a> Arg<'a> {
    /// The value; its type must be the parameter's.
    pub fn new<T: Copy>(value: &'a T) -> Self {
        Self { value: std::ptr::from_ref(value).cast_mut().cast(), life: PhantomData }
    }
}

/// Parameters of a kernel at most.
const MOST_PARAMETERS: usize = 16;

impl Function {
    /// What it takes.
    pub fn resources(&self) -> Result<Resources> {
        Ok(Resources {
            registers: self.attribute(Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?,
            local_bytes: self.attribute(Attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
            shared_bytes: self.attribute(Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?,
            threads: self.attribute(Attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
        })
    }

    fn attribute(&self, attribute: Attribute) -> Result<u32> {
        self.module.context.bind()?;
        let mut value: c_int = 0;
        // SAFETY: the function is loaded, `value` takes one number.
        check("function", unsafe { sys::cuFuncGetAttribute(&mut value, attribute, self.handle) })?;
        Ok(u32::try_from(value).unwrap_or(0))
    }

    /// Allows launches this much dynamic shared memory; more than 48 KB must be asked for.
    fn allow_shared(&self, bytes: u32) -> Result<()> {
        let mut allowed = self.shared_bytes.lock().unwrap_or_else(PoisonError::into_inner);
        if bytes <= *allowed {
            return Ok(());
        }
        let most = self.module.context.info().shared_bytes;
        if bytes > most {
            return Err(Error::invalid("launch", format!("at most {most} bytes of shared memory"), bytes.to_string()));
        }
        let attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function is loaded; the value is within what the device has.
        check("launch", unsafe { sys::cuFuncSetAttribute(self.handle, attribute, bytes as c_int) })?;
        *allowed = bytes;
        Ok(())
    }

    /// Blocks of this size that a multiprocessor holds at once.
    pub fn blocks_per_multiprocessor(&self, threads: u32, shared_bytes: u32) -> Result<u32> {
        self.module.context.bind()?;
        self.allow_shared(shared_bytes)?;
        let mut blocks: c_int = 0;
        let threads = c_int::try_from(threads).unwrap_or(c_int::MAX);
        // SAFETY: the function is loaded, `blocks` takes one number.
        let result = unsafe {
            sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(&mut blocks, self.handle, threads, shared_bytes as usize)
        };
        check("occupancy", result)?;
        Ok(u32::try_from(blocks).unwrap_or(0))
    }

    /// Puts a launch into a stream. Error: a form that the device or the kernel does not take.
    ///
    /// # Safety
    /// `args` are the kernel's parameters in number, order and type, and what they point to holds what the kernel reads and
    /// writes, is not used by anything else meanwhile, and stays until the kernel is done.
    pub unsafe fn launch(&self, stream: &Stream, launch: &Launch, args: &[Arg<'_>]) -> Result<()> {
        use sys::CUlaunchAttributeID as Id;
        stream.context().bind()?;
        self.allow_shared(launch.shared_bytes)?;
        let mut attributes = [sys::CUlaunchAttribute {
            id: Id::CU_LAUNCH_ATTRIBUTE_IGNORE,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { pad: [0; 64] },
        }; 3];
        let mut count = 0;
        if launch.cluster != [1; 3] {
            attributes[count].id = Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
            let [x, y, z] = launch.cluster;
            attributes[count].value.clusterDim = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x, y, z };
            count += 1;
        }
        if launch.programmatic {
            attributes[count].id = Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            attributes[count].value.programmaticStreamSerializationAllowed = 1;
            count += 1;
        }
        if launch.cooperative {
            attributes[count].id = Id::CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
            attributes[count].value.cooperative = 1;
            count += 1;
        }
        let config = sys::CUlaunchConfig {
            gridDimX: launch.grid[0],
            gridDimY: launch.grid[1],
            gridDimZ: launch.grid[2],
            blockDimX: launch.block[0],
            blockDimY: launch.block[1],
            blockDimZ: launch.block[2],
            sharedMemBytes: launch.shared_bytes,
            hStream: stream.handle(),
            attrs: attributes.as_mut_ptr(),
            numAttrs: count as u32,
        };
        let values = args.as_ptr().cast_mut().cast::<*mut c_void>();
        // SAFETY: function and stream are open, the attributes live through the call, and the caller vouches for the
        // parameters: the driver copies what they point to and writes nothing.
        let result = unsafe { sys::cuLaunchKernelEx(&config, self.handle, values, std::ptr::null_mut()) };
        check("launch", result)
    }

    /// Puts a kernel that takes one struct, and tensor maps behind it, into a stream. Error: as for [`Function::launch`].
    pub(in crate::cuda) fn launch_typed<P: Parameters>(
        &self,
        stream: &Stream,
        launch: &Launch,
        parameters: &P,
        maps: &[TensorMap],
    ) -> Result<()> {
        let mut args = [Arg::new(parameters); MOST_PARAMETERS];
        let Some(of_maps) = args.get_mut(1..1 + maps.len()) else {
            return Err(Error::invalid("launch", format!("fewer than {MOST_PARAMETERS} maps"), maps.len().to_string()));
        };
        of_maps.iter_mut().zip(maps).for_each(|(arg, map)| *arg = Arg::new(map));
        // SAFETY: the struct is laid out as the source's, whose kernel takes it and these maps; whoever made it has checked its
        // addresses.
        unsafe { self.launch(stream, launch, &args[..1 + maps.len()]) }
    }
}
