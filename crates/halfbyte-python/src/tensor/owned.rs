//! A tensor of our own, for libraries that take one by `from_dlpack`.

use super::dlpack::{CPU, CUDA, DataType, Device, DlTensor, Managed, ManagedVersioned, VERSION};
use super::{Place, Shape, type_of};
use crate::device;
use crate::error::{Failure, Result};
use bytemuck::allocation::try_zeroed_vec;
use bytemuck::{Pod, Zeroable};
use halfbyte::Cuda;
use halfbyte::cuda::driver::{Buffer, Event, Stream};
use halfbyte::cuda::nn::FloatBuffer;
use pyo3::exceptions::{PyBufferError, PyMemoryError};
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use pyo3::{IntoPyObjectExt, ffi};
use std::ffi::c_void;
use std::ptr::{null_mut, with_exposed_provenance_mut, without_provenance_mut};
use std::sync::Arc;

/// Libraries take memory without a copy where it is aligned so.
#[repr(C, align(64))]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Line([u8; 64]);

#[derive(Debug)]
enum Memory {
    Host(Vec<Line>),
    Cuda(Buffer<u8>),
    Floats(FloatBuffer),
}

impl std::fmt::Debug for Line {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// Elements in memory of our own, which `from_dlpack` of any library takes without a copy.
#[pyclass(frozen, module = "halfbyte")]
#[derive(Debug)]
pub struct Tensor {
    memory: Arc<Memory>,
    dtype: DataType,
    shape: Shape,
    place: Place,
    /// The queue that writes it.
    queue: Option<Cuda>,
}

impl Tensor {
    /// Zeros on the CPU; on a GPU whatever lies there, to be written in `queue`.
    pub fn new(shape: Shape, dtype: DataType, queue: Option<Cuda>) -> Result<Self> {
        let bytes = shape.elements() * dtype.bytes();
        let (memory, place) = match &queue {
            None => {
                let lines = try_zeroed_vec(bytes.div_ceil(size_of::<Line>()));
                let short = |()| PyMemoryError::new_err(format!("tensor: expected {bytes} bytes of memory, got less"));
                (Memory::Host(lines.map_err(short)?), Place::Cpu)
            }
            Some(queue) => {
                let context = queue.gpu().context();
                (Memory::Cuda(context.allocate(bytes)?), Place::Cuda(context.info().index))
            }
        };
        Ok(Self { memory: Arc::new(memory), dtype, shape, place, queue })
    }

    /// Floats on a GPU, which `queue` writes.
    pub fn of_floats(shape: Shape, floats: FloatBuffer, queue: Cuda) -> Self {
        let (dtype, place) = (type_of(floats.dtype()), Place::Cuda(queue.gpu().context().info().index));
        Self { memory: Arc::new(Memory::Floats(floats)), dtype, shape, place, queue: Some(queue) }
    }

    /// Address of the first element.
    pub fn address(&self) -> usize {
        match &*self.memory {
            Memory::Host(lines) => lines.as_ptr().expose_provenance(),
            Memory::Cuda(buffer) => buffer.pointer() as usize,
            Memory::Floats(buffer) => buffer.view(0..buffer.len()).pointer() as usize,
        }
    }

    fn dlpack_device(&self) -> Device {
        match self.place {
            Place::Cpu => Device { kind: CPU, index: 0 },
            Place::Cuda(index) => Device { kind: CUDA, index: index as i32 },
        }
    }
}

/// A tensor that was handed out: its claim on the memory, and its sizes.
struct Out<M> {
    managed: M,
    _memory: Arc<Memory>,
    shape: Box<[i64]>,
    strides: Box<[i64]>,
}

#[pymethods]
impl Tensor {
    /// Sizes, outermost first.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.shape.iter())
    }

    /// Name of the type of the elements.
    #[getter]
    fn dtype(&self) -> String {
        self.dtype.to_string()
    }

    /// `cpu` or `cuda:N`.
    #[getter]
    fn device(&self) -> String {
        self.place.to_string()
    }

    fn __repr__(&self) -> String {
        format!("halfbyte.Tensor(shape={}, dtype={}, device={})", self.shape, self.dtype, self.place)
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        let Device { kind, index } = self.dlpack_device();
        (kind, index)
    }

    /// A capsule with the tensor. `stream`: where the consumer works; it waits for what writes the tensor.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<i64>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> Result<Bound<'py, PyAny>> {
        let refuse = |what: &str| Err(Failure::from(PyBufferError::new_err(format!("halfbyte.Tensor: {what}"))));
        let device = self.dlpack_device();
        if dl_device.is_some_and(|wanted| wanted != (device.kind, device.index)) {
            return refuse("it cannot be handed out on another device");
        }
        if copy == Some(true) {
            return refuse("it is not copied");
        }
        if let Some(queue) = &self.queue {
            device::alive(py)?;
            order_before(queue, stream)?;
        }
        let shape: Box<[i64]> = self.shape.iter().map(|&size| size as i64).collect();
        let mut strides = vec![1i64; shape.len()].into_boxed_slice();
        for i in (1..shape.len()).rev() {
            strides[i - 1] = strides[i] * shape[i].max(1);
        }
        let data: *mut c_void = with_exposed_provenance_mut(self.address());
        let (ndim, dtype) = (shape.len() as i32, self.dtype);
        let tensor = DlTensor { data, device, ndim, dtype, shape: null_mut(), strides: null_mut(), byte_offset: 0 };
        let memory = self.memory.clone();
        if max_version.is_some_and(|(major, _)| major >= 1) {
            let managed = ManagedVersioned {
                version: VERSION,
                manager_ctx: null_mut(),
                deleter: Some(delete_versioned),
                flags: 0,
                tensor,
            };
            let out = Box::into_raw(Box::new(Out { managed, _memory: memory, shape, strides }));
            // SAFETY: `out` was made above and is nobody else's.
            let managed = unsafe {
                (*out).managed.tensor.shape = (*out).shape.as_mut_ptr();
                (*out).managed.tensor.strides = (*out).strides.as_mut_ptr();
                (*out).managed.manager_ctx = out.cast();
                &raw mut (*out).managed
            };
            // SAFETY: the capsule has the claim; its end deletes the tensor where nobody has taken it.
            let capsule =
                unsafe { ffi::PyCapsule_New(managed.cast(), c"dltensor_versioned".as_ptr(), Some(drop_versioned)) };
            // SAFETY: a new reference, or none with an exception.
            return Ok(unsafe { Bound::from_owned_ptr_or_err(py, capsule) }?);
        }
        let managed = Managed { tensor, manager_ctx: null_mut(), deleter: Some(delete_old) };
        let out = Box::into_raw(Box::new(Out { managed, _memory: memory, shape, strides }));
        // SAFETY: as above.
        let managed = unsafe {
            (*out).managed.tensor.shape = (*out).shape.as_mut_ptr();
            (*out).managed.tensor.strides = (*out).strides.as_mut_ptr();
            (*out).managed.manager_ctx = out.cast();
            &raw mut (*out).managed
        };
        // SAFETY: as above.
        let capsule = unsafe { ffi::PyCapsule_New(managed.cast(), c"dltensor".as_ptr(), Some(drop_old)) };
        // SAFETY: as above.
        Ok(unsafe { Bound::from_owned_ptr_or_err(py, capsule) }?)
    }

    /// Elements as nested lists (of the CPU, small ones: to look at).
    fn tolist<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let numpy = slf.py().import("numpy")?;
        numpy.call_method1("from_dlpack", (slf,))?.call_method0("tolist")?.into_bound_py_any(slf.py())
    }
}

/// Makes a consumer's stream wait for what was put in ours; without one, or where it is not said, waits here.
fn order_before(queue: &Cuda, stream: Option<i64>) -> Result<()> {
    let raw = match stream {
        Some(-1) => return Ok(()),
        // DLPack's number of the default stream.
        Some(0 | 1) => null_mut(),
        Some(raw) => without_provenance_mut::<c_void>(raw as usize),
        None => return Ok(queue.synchronize()?),
    };
    let context = queue.gpu().context();
    // SAFETY: the consumer gives a stream of this device that is open.
    let theirs = unsafe { Stream::from_raw(context, raw) };
    let written = Event::new(context)?;
    queue.stream().record(&written)?;
    Ok(theirs.wait(&written)?)
}

unsafe extern "C" fn delete_versioned(managed: *mut ManagedVersioned) {
    // SAFETY: made by `Box::into_raw` above; the consumer deletes once.
    drop(unsafe { Box::from_raw((*managed).manager_ctx.cast::<Out<ManagedVersioned>>()) });
}

unsafe extern "C" fn delete_old(managed: *mut Managed) {
    // SAFETY: as above.
    drop(unsafe { Box::from_raw((*managed).manager_ctx.cast::<Out<Managed>>()) });
}

unsafe extern "C" fn drop_versioned(capsule: *mut ffi::PyObject) {
    let name = c"dltensor_versioned".as_ptr();
    // SAFETY: called by Python with the capsule; one of the first name still has its claim.
    if unsafe { ffi::PyCapsule_IsValid(capsule, name) } != 0 {
        // SAFETY: as above.
        unsafe { delete_versioned(ffi::PyCapsule_GetPointer(capsule, name).cast()) }
    }
}

unsafe extern "C" fn drop_old(capsule: *mut ffi::PyObject) {
    let name = c"dltensor".as_ptr();
    // SAFETY: as above.
    if unsafe { ffi::PyCapsule_IsValid(capsule, name) } != 0 {
        // SAFETY: as above.
        unsafe { delete_old(ffi::PyCapsule_GetPointer(capsule, name).cast()) }
    }
}
