//! NCCL, opened at run time: sums and gathers of ranks whose GPUs do not reach each other's memory, on one host or several.
//!
//! Where it is looked for: [`super::library`], `HALFBYTE_NCCL`. It adds up in an order of its own; all ranks have the same bits. What is
//! called may be recorded. A rank that ends while others wait leaves them waiting on their devices until [`Nccl::abort`]. Source: the header
//! `nccl.h`, whose numbers stand below.

use super::Gpu;
use super::driver::{Stream, View, ViewMut};
use super::library::{self, NCCL, Opened};
use crate::error::{Error, Result};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

const OP: &str = "NCCL";

/// How long ranks have to meet.
const MEET: Duration = Duration::from_secs(25);

type Handle = *mut c_void;
type Status = c_int;

const IN_PROGRESS: Status = 7;
const FLOAT32: c_int = 7;
const SUM: c_int = 0;

/// What ranks find each other by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct NcclId([u8; NcclId::BYTES]);

impl NcclId {
    /// Its length.
    pub const BYTES: usize = 128;

    /// As [`NcclId::of`] reads it.
    pub fn bytes(&self) -> [u8; NcclId::BYTES] {
        self.0
    }

    /// Of bytes that another rank has sent.
    pub fn of(bytes: [u8; NcclId::BYTES]) -> Self {
        Self(bytes)
    }
}

#[derive(Clone, Copy)]
struct Functions {
    version: unsafe extern "C" fn(*mut c_int) -> Status,
    id: unsafe extern "C" fn(*mut NcclId) -> Status,
    init: unsafe extern "C" fn(*mut Handle, c_int, NcclId, c_int) -> Status,
    abort: unsafe extern "C" fn(Handle) -> Status,
    state: unsafe extern "C" fn(Handle, *mut Status) -> Status,
    text: unsafe extern "C" fn(Status) -> *const c_char,
    group_start: unsafe extern "C" fn() -> Status,
    group_end: unsafe extern "C" fn() -> Status,
    all_reduce: unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Handle, *mut c_void) -> Status,
    broadcast: unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Handle, *mut c_void) -> Status,
}

impl Functions {
    fn check(&self, status: Status) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: a text that stays, for every number.
        let text = unsafe { CStr::from_ptr((self.text)(status)) };
        Err(Error::Device { op: OP, cause: format!("{} (status {status})", text.to_string_lossy()) })
    }
}

/// The library, open.
#[derive(Debug)]
pub struct NcclLibrary {
    functions: Functions,
    library: Opened,
}

impl std::fmt::Debug for Functions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("NCCL's functions")
    }
}

impl NcclLibrary {
    /// Opens it, once in a process: it has threads of its own, and is never closed. Errors: it is in none of the places, or is not whole.
    pub fn open() -> Result<&'static Self> {
        static OPENED: OnceLock<NcclLibrary> = OnceLock::new();
        if let Some(library) = OPENED.get() {
            return Ok(library);
        }
        let library = library::open(&NCCL, None)?;
        // SAFETY: the types are those of nccl.h, and the library is kept beside the functions.
        let functions = unsafe {
            Functions {
                version: library.function("ncclGetVersion")?,
                id: library.function("ncclGetUniqueId")?,
                init: library.function("ncclCommInitRank")?,
                abort: library.function("ncclCommAbort")?,
                state: library.function("ncclCommGetAsyncError")?,
                text: library.function("ncclGetErrorString")?,
                group_start: library.function("ncclGroupStart")?,
                group_end: library.function("ncclGroupEnd")?,
                all_reduce: library.function("ncclAllReduce")?,
                broadcast: library.function("ncclBroadcast")?,
            }
        };
        Ok(OPENED.get_or_init(|| Self { functions, library }))
    }

    /// Its version, as 22707 for 2.27.7.
    pub fn version(&self) -> Result<u32> {
        let mut version = 0;
        // SAFETY: it writes one number.
        self.functions.check(unsafe { (self.functions.version)(&mut version) })?;
        Ok(version as u32)
    }

    /// Where it was found.
    pub fn path(&self) -> &std::path::Path {
        self.library.path()
    }

    /// What ranks meet by that one of them tells it.
    pub fn id(&self) -> Result<NcclId> {
        let mut id = NcclId([0; NcclId::BYTES]);
        // SAFETY: it writes one id.
        self.functions.check(unsafe { (self.functions.id)(&mut id) })?;
        Ok(id)
    }
}

/// This rank among others that NCCL connects. Every rank makes the same calls in the same order.
#[derive(Debug)]
pub struct Nccl {
    library: &'static NcclLibrary,
    /// Null once it is aborted.
    handle: AtomicPtr<c_void>,
    rank: usize,
    size: usize,
}

/// A handle on its way from the thread that made it.
struct Made(Handle);

// SAFETY: a handle belongs to no thread.
unsafe impl Send for Made {}

impl Nccl {
    /// Meets the others. Errors: a rank that does not come within 25 s, two ranks on one device, the library's own.
    pub fn meet(gpu: &Gpu, library: &'static NcclLibrary, id: NcclId, rank: usize, size: usize) -> Result<Self> {
        let (context, functions) = (gpu.context().clone(), library.functions);
        let [number, of] = [rank, size].map(|number| number as c_int);
        let (made, done) = channel();
        // It waits for the others without end: a thread waits for it, and is left behind where they do not come.
        let waits = std::thread::Builder::new().name("halfbyte-nccl".into()).spawn(move || {
            let meet = || {
                context.bind()?;
                let mut handle = std::ptr::null_mut();
                // SAFETY: the context is current, and ranks are numbered as they are.
                functions.check(unsafe { (functions.init)(&mut handle, of, id, number) })?;
                Ok(Made(handle))
            };
            drop(made.send(meet()));
        });
        waits.map_err(|why| Error::Device { op: OP, cause: why.to_string() })?;
        let Made(handle) = done.recv_timeout(MEET).map_err(|_| Error::Device {
            op: OP,
            cause: format!("the {size} ranks have not met within {} s", MEET.as_secs()),
        })??;
        Ok(Self { library, handle: AtomicPtr::new(handle), rank, size })
    }

    fn handle(&self) -> Result<Handle> {
        let handle = self.handle.load(Ordering::Acquire);
        if handle.is_null() {
            return Err(Error::Device { op: OP, cause: "ranks were given up before".to_owned() });
        }
        Ok(handle)
    }

    /// Adds up the ranks' values, element by element. *Errors:* the library's.
    pub fn all_reduce(&self, stream: &Stream, values: ViewMut<'_, f32>) -> Result<()> {
        let (handle, at) = (self.handle()?, values.pointer());
        stream.context().bind()?;
        let functions = &self.library.functions;
        // SAFETY: the memory is this device's and `values.len()` floats long; the stream is of its context.
        functions.check(unsafe {
            (functions.all_reduce)(at as *const _, at as *mut _, values.len(), FLOAT32, SUM, handle, stream.raw())
        })
    }

    /// Lays the ranks' columns side by side. *Shapes:* own `[m, widths[rank]]`, all `[m, sum of widths]`, which the caller has checked.
    /// *Errors:* the library's.
    pub(super) fn all_gather(
        &self,
        stream: &Stream,
        own: View<'_, f32>,
        widths: &[usize],
        all: ViewMut<'_, f32>,
    ) -> Result<()> {
        let (handle, functions) = (self.handle()?, &self.library.functions);
        stream.context().bind()?;
        let row: usize = widths.iter().sum();
        // SAFETY: a group is ended below, whatever happens in between.
        functions.check(unsafe { (functions.group_start)() })?;
        let mut done = Ok(());
        for m in 0..all.len() / row.max(1) {
            let mut first = m * row;
            for (root, &width) in widths.iter().enumerate() {
                let to = all.pointer() + 4 * first as u64;
                let from = if root == self.rank { own.pointer() + 4 * (m * width) as u64 } else { to };
                // SAFETY: both places are this device's, `width` floats long; the stream is of its context.
                let status = unsafe {
                    let (from, to, root) = (from as *const _, to as *mut _, root as c_int);
                    (functions.broadcast)(from, to, width, FLOAT32, root, handle, stream.raw())
                };
                done = done.and(functions.check(status));
                first += width;
            }
        }
        // SAFETY: the group was begun above.
        let ended = functions.check(unsafe { (functions.group_end)() });
        done.and(ended)
    }

    /// This one's number.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.size
    }

    /// What has failed meanwhile, as a connection that broke. Nothing is waited for.
    pub fn state(&self) -> Result<()> {
        let (handle, functions) = (self.handle()?, &self.library.functions);
        let mut state = 0;
        // SAFETY: it writes one number.
        functions.check(unsafe { (functions.state)(handle, &mut state) })?;
        if state == IN_PROGRESS { Ok(()) } else { functions.check(state) }
    }

    /// Ends what waits for other ranks on this device; every later call is an error.
    ///
    /// The library frees what it holds when no recording has a call of it any more, and waits for that: on a thread of its own.
    pub fn abort(&self) {
        let (handle, functions) = (Made(self.taken()), self.library.functions);
        if handle.0.is_null() {
            return;
        }
        let abort = move || {
            let Made(handle) = { handle };
            // SAFETY: made in `meet`, given up once.
            let _ = unsafe { (functions.abort)(handle) };
        };
        // Without a thread it stays until the process ends.
        drop(std::thread::Builder::new().name("halfbyte-nccl-abort".into()).spawn(abort));
    }

    /// The handle, which nobody has any more then.
    fn taken(&self) -> Handle {
        self.handle.swap(std::ptr::null_mut(), Ordering::AcqRel)
    }
}

impl Drop for Nccl {
    /// Recordings that call it are dropped before.
    fn drop(&mut self) {
        let handle = self.taken();
        if !handle.is_null() {
            // SAFETY: made in `meet`, given up once. All ranks have ended what they had begun, or this one waits for none.
            let _ = unsafe { (self.library.functions.abort)(handle) };
        }
    }
}
