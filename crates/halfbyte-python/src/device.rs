//! What computes: the team of threads, and GPUs with a queue for each stream that callers work in. After a fork a process has its own.

use crate::error::{Failure, Result, invalid};
use crate::number;
use crate::tensor::Place;
use halfbyte::cuda::Gpu;
use halfbyte::cuda::driver::Stream;
use halfbyte::{Cpu, Cuda};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use std::collections::{BTreeMap, HashMap};
use std::ptr::without_provenance_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// All that lives as long as the process.
#[derive(Default)]
struct Devices {
    cpu: Option<Arc<Cpu>>,
    gpus: HashMap<u32, Opened>,
    /// By GPU and stream. None is ever let go of: work that a caller has recorded goes on using the memory of its queue.
    queues: BTreeMap<(u32, usize), Cuda>,
    forked: Forked,
    /// The threads of long work that is not a layer's: as many as were asked for, or of a process that was forked, in which those that
    /// all libraries share are not there.
    pool: Option<Arc<rayon::ThreadPool>>,
}

struct Opened {
    gpu: Arc<Gpu>,
    /// For libraries that do not say in which stream they work.
    own: Cuda,
}

/// What a process that was forked must not use.
#[derive(Clone, Copy, Default)]
struct Forked {
    /// A GPU was open in the process that this one was forked from.
    cuda: bool,
    /// How often processes were forked on the way to this one.
    generation: u32,
}

/// Taken under Python's lock and let go of before that is: a fork finds it free.
static DEVICES: Mutex<Option<Devices>> = Mutex::new(None);

/// The table, for as long as the result lives; `py` says that Python's lock is held.
fn devices(_: Python<'_>) -> MutexGuard<'static, Option<Devices>> {
    DEVICES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The team of threads.
pub fn cpu(py: Python<'_>) -> Result<Arc<Cpu>> {
    let mut devices = devices(py);
    let cpu = &mut devices.get_or_insert_default().cpu;
    if let Some(cpu) = cpu {
        return Ok(cpu.clone());
    }
    Ok(cpu.insert(Arc::new(Cpu::all_threads()?)).clone())
}

/// A layer on the device that its weight was packed for; a GPU by its number.
#[derive(Debug)]
pub enum On<C, G> {
    Cpu(C),
    Cuda(u32, G),
}

impl<C, G> On<C, G> {
    pub fn place(&self) -> Place {
        match self {
            Self::Cpu(_) => Place::Cpu,
            Self::Cuda(index, _) => Place::Cuda(*index),
        }
    }
}

/// Packs a layer for a device.
pub fn pack<C: Send, G: Send>(
    py: Python<'_>,
    place: Place,
    on_cpu: impl FnOnce(&Cpu) -> halfbyte::Result<C> + Send,
    on_gpu: impl FnOnce(&Cuda) -> halfbyte::Result<G> + Send,
) -> Result<On<C, G>> {
    Ok(match place {
        Place::Cpu => {
            let cpu = cpu(py)?;
            On::Cpu(compute(py, || on_cpu(&cpu))?)
        }
        Place::Cuda(index) => {
            let queue = own_queue(py, index)?;
            let pack = || {
                let layer = on_gpu(&queue)?;
                // Whoever uses it next works in another stream.
                queue.synchronize()?;
                Ok::<_, halfbyte::Error>(layer)
            };
            On::Cuda(index, compute(py, pack)?)
        }
    })
}

/// What a layer on either device says.
macro_rules! of_layer {
    ($on:expr, $layer:ident => $says:expr) => {
        match $on {
            $crate::device::On::Cpu($layer) => $says,
            $crate::device::On::Cuda(_, $layer) => $says,
        }
    };
}
pub(crate) use of_layer;

/// Multiplies x to y where a layer lies: on the CPU, or in the stream that x's library works in. Without Python's lock, but where what is
/// done on a CPU is brief: handing the lock over and back would take longer. `$arguments` are what `$forward` takes between x and y.
macro_rules! forward {
    ($py:ident, $on:expr, $of:ident, brief $brief:expr, $forward:ident($($argument:expr),*), cpu $x:expr => $y:expr, gpu $gpu_x:expr => $gpu_y:expr) => {
        match $on {
            $crate::device::On::Cpu(layer) => {
                let cpu = $crate::device::cpu($py)?;
                let (x, y) = ($x, $y);
                let forward = || layer.$forward(&*cpu, x, $($argument,)* y);
                (if $brief { forward() } else { $py.detach(forward) }).map_err($crate::error::Failure::from)?;
            }
            $crate::device::On::Cuda(index, layer) => {
                let queue = $crate::device::queue($py, *index, $of.stream())?;
                let (x, y) = ($gpu_x, $gpu_y);
                $py.detach(|| layer.$forward(&queue, x, $($argument,)* y)).map_err($crate::error::Failure::from)?;
                $of.settle(&queue).map_err($crate::error::Failure::from)?;
            }
        }
    };
}
pub(crate) use forward;

/// GPU `index` with a caller's stream.
pub fn queue(py: Python<'_>, index: u32, stream: usize) -> Result<Cuda> {
    // A process that was forked has none.
    if let Some(queue) = devices(py).as_ref().and_then(|devices| devices.queues.get(&(index, stream))) {
        return Ok(queue.clone());
    }
    alive(py)?;
    let gpu = opened(py, index)?.0;
    // SAFETY: a stream that a tensor library says it works in, on this device; libraries keep theirs as long as work goes there.
    let of_caller = unsafe { Stream::from_raw(gpu.context(), without_provenance_mut(stream)) };
    let queue = Cuda::new(gpu, of_caller)?;
    let mut devices = devices(py);
    Ok(devices.get_or_insert_default().queues.entry((index, stream)).or_insert(queue).clone())
}

/// A GPU, opened when it is first needed, and our own queue of it.
fn opened(py: Python<'_>, index: u32) -> Result<(Arc<Gpu>, Cuda)> {
    alive(py)?;
    let known = |devices: &Devices| devices.gpus.get(&index).map(|found| (found.gpu.clone(), found.own.clone()));
    if let Some(found) = devices(py).as_ref().and_then(known) {
        return Ok(found);
    }
    let (gpu, own) = py.detach(|| -> halfbyte::Result<_> {
        let gpu = Arc::new(Gpu::open(index)?);
        let own = Cuda::new(gpu.clone(), gpu.stream()?)?;
        Ok((gpu, own))
    })?;
    let mut devices = devices(py);
    let found = devices.get_or_insert_default().gpus.entry(index).or_insert(Opened { gpu, own });
    Ok((found.gpu.clone(), found.own.clone()))
}

/// A GPU.
pub fn gpu(py: Python<'_>, index: u32) -> Result<Arc<Gpu>> {
    Ok(opened(py, index)?.0)
}

/// Our own queue of a GPU.
pub fn own_queue(py: Python<'_>, index: u32) -> Result<Cuda> {
    Ok(opened(py, index)?.1)
}

/// The stream of our own queue, as its handle.
pub fn own_stream(py: Python<'_>, index: u32) -> PyResult<usize> {
    let queue = own_queue(py, index)?;
    let stream = queue.stream().raw().addr();
    devices(py).get_or_insert_default().queues.entry((index, stream)).or_insert(queue);
    Ok(stream)
}

/// Error: GPUs were in use before this process was forked from another, which ends their use here.
pub fn alive(py: Python<'_>) -> Result<()> {
    match devices(py).as_ref().is_some_and(|devices| devices.forked.cuda) {
        true => Err(PyRuntimeError::new_err(
            "cuda: expected a process of its own, got one that was forked after a GPU was in use; start processes with \
             multiprocessing.get_context(\"spawn\")",
        )
        .into()),
        false => Ok(()),
    }
}

/// How often processes were forked on the way to this one.
pub fn generation(py: Python<'_>) -> u32 {
    devices(py).as_ref().map_or(0, |devices| devices.forked.generation)
}

/// Does long work without Python's lock, with threads that this process has.
pub fn compute<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> T {
    let pool = devices(py).as_ref().and_then(|devices| devices.pool.clone());
    py.detach(|| match pool {
        Some(pool) => pool.install(work),
        None => work(),
    })
}

/// The same with what a lock holds. The calling thread takes it, and no thread of a pool: such a thread may do another task while it
/// waits for its own, and would wait there for what it holds.
pub fn compute_holding<H: Send, T: Send>(py: Python<'_>, lock: &Mutex<H>, work: impl FnOnce(&mut H) -> T + Send) -> T {
    let pool = devices(py).as_ref().and_then(|devices| devices.pool.clone());
    py.detach(|| {
        let mut held = lock.lock().unwrap_or_else(PoisonError::into_inner);
        let held = &mut *held;
        match pool {
            Some(pool) => pool.install(|| work(held)),
            None => work(held),
        }
    })
}

/// The same on a thread of its own, while this one, which may be the only one that Python tells of signals, looks for them.
pub fn compute_watching<T: Send>(py: Python<'_>, signals: &Signals, work: impl FnOnce() -> T + Send) -> T {
    const LOOK: Duration = Duration::from_millis(100);
    /// Tells the thread that waits, also where the work panics.
    struct Done<'a>(&'a AtomicBool, std::thread::Thread);
    impl Drop for Done<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Release);
            self.1.unpark();
        }
    }
    let pool = devices(py).as_ref().and_then(|devices| devices.pool.clone());
    let (done, waits) = (AtomicBool::new(false), std::thread::current());
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            let _done = Done(&done, waits);
            match pool {
                Some(pool) => pool.install(work),
                None => work(),
            }
        });
        while !done.load(Ordering::Acquire) {
            py.detach(|| std::thread::park_timeout(LOOK));
            signals.look(py);
        }
        py.detach(|| worker.join()).unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Ctrl-C in long work, which has let go of Python's lock.
#[derive(Default)]
pub struct Signals {
    came: AtomicBool,
    raised: Mutex<Option<PyErr>>,
}

impl Signals {
    /// Whether there was one.
    pub fn came(&self) -> bool {
        self.came.load(Ordering::Relaxed)
    }

    fn look(&self, py: Python<'_>) {
        if let Err(error) = py.check_signals() {
            *self.raised.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            self.came.store(true, Ordering::Relaxed);
        }
    }

    /// A result, or the exception that a signal raised.
    pub fn first<T, E: Into<Failure>>(&self, result: std::result::Result<T, E>) -> Result<T> {
        match self.raised.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(error) => Err(error.into()),
            None => result.map_err(Into::into),
        }
    }
}

/// Called in each process that was forked, before anything else: its threads and GPUs stayed behind.
#[pyfunction]
pub fn _after_fork(py: Python<'_>) {
    let mut devices = devices(py);
    let before = devices.take().unwrap_or_default();
    let cuda = before.forked.cuda || !before.gpus.is_empty();
    let generation = before.forked.generation + 1;
    // Their threads are not there to be waited for, and their driver takes no calls.
    std::mem::forget(before);
    let pool = rayon::ThreadPoolBuilder::new().build().ok().map(Arc::new);
    *devices = Some(Devices { forked: Forked { cuda, generation }, pool, ..Devices::default() });
}

/// Sets how many threads compute on the CPU, quantise and pack; None: as many as the system offers.
#[pyfunction]
#[pyo3(signature = (threads=None))]
pub fn set_num_threads(py: Python<'_>, #[pyo3(from_py_with = number::threads)] threads: Option<usize>) -> Result<()> {
    let cpu = match threads {
        None => Cpu::all_threads()?,
        Some(threads @ 1..=4096) => Cpu::new(threads)?,
        Some(other) => return Ok(invalid("set_num_threads", "1 to 4096 threads", other)?),
    };
    let pool = rayon::ThreadPoolBuilder::new().num_threads(cpu.threads().count()).build();
    let pool = pool.map_err(|error| {
        let cause = format!("expected a team of {} threads, got {error}", cpu.threads().count());
        halfbyte::Error::Device { op: "set_num_threads", cause }
    })?;
    let before = {
        let mut devices = devices(py);
        let devices = devices.get_or_insert_default();
        (devices.cpu.replace(Arc::new(cpu)), devices.pool.replace(Arc::new(pool)))
    };
    // Threads that end are waited for by whoever needs neither the table nor Python's lock.
    py.detach(|| drop(before));
    Ok(())
}

/// How many threads compute on the CPU.
#[pyfunction]
pub fn get_num_threads(py: Python<'_>) -> Result<usize> {
    Ok(cpu(py)?.threads().count())
}

/// Number of GPUs that this process sees; 0 also where there is no driver.
#[pyfunction]
pub fn cuda_device_count() -> usize {
    Gpu::count()
}

/// `cpu`, `cuda` or `cuda:N` as text, or what torch calls a device. *Error:* anything else.
pub fn place_of(device: &Bound<'_, PyAny>) -> PyResult<Place> {
    let text = device.str()?.to_string();
    let index = match text.as_str() {
        "cpu" => return Ok(Place::Cpu),
        "cuda" => Some(0),
        other => other.strip_prefix("cuda:").and_then(|index| index.parse().ok()),
    };
    match index {
        Some(index) => Ok(Place::Cuda(index)),
        None => invalid("device", "cpu, cuda or cuda:N", format_args!("\"{text}\"")),
    }
}
