//! A Python tensor that is read, or written where the caller says so.

use super::dlpack::{
    self, CPU, CUDA, CUDA_HOST, DataType, DlTensor, ExchangeApi, Held, Managed, ManagedVersioned, READ_ONLY, VERSION,
};
use super::elements::{copied, downloaded, host_slice, widened};
use super::exchange::Kind;
use super::{Place, Shape, exchange, float_of, wrong_type};
use crate::device;
use crate::error::{Failure, invalid};
use bytemuck::Pod;
use half::{bf16, f16};
use halfbyte::cuda::driver::{FloatView, View};
use halfbyte::format::int8::Bytes;
use halfbyte::{Float, Floats};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict, PyTuple};
use pyo3::{ffi, intern};
use std::ffi::CStr;

/// How a tensor came in, which is how its library is known.
#[derive(Clone, Copy, Debug)]
pub enum Source {
    /// By a table of functions.
    Exchange(&'static ExchangeApi),
    /// By methods of the object.
    Methods,
}

/// A Python tensor: its elements lie densely, row by row, and stay where they are while this lives.
#[derive(Debug)]
pub struct Input<'py> {
    object: Bound<'py, PyAny>,
    address: usize,
    place: Place,
    dtype: DataType,
    shape: Shape,
    read_only: bool,
    source: Source,
    /// The stream in which it may be used; 0 is the default one.
    stream: usize,
    /// Whether that is one of ours, of which its library knows nothing.
    own_stream: bool,
    _held: Option<Held>,
}

impl<'py> Input<'py> {
    /// A tensor to be read. One whose elements do not lie row by row, or not aligned, is copied by its own library first.
    ///
    /// *Errors:* TypeError: no tensor; ValueError: one that needs a gradient, lies on another kind of device, or that its library
    /// does not hand out.
    pub fn of(object: &Bound<'py, PyAny>, what: &str) -> PyResult<Self> {
        match Self::read(object, what, exchange::kind_of(object)?.api, true)? {
            Some(input) => Ok(input),
            None => {
                let dense = dense_copy(object, what)?;
                let refuse = || PyValueError::new_err(format!("{what}: expected elements that lie row by row"));
                Self::read(&dense, what, exchange::kind_of(&dense)?.api, true)?.ok_or_else(refuse)
            }
        }
    }

    /// A tensor to be written where it lies, in the stream of another one. *Errors:* those of [`Input::of`]; ValueError: one that is
    /// read-only, or whose elements do not lie row by row.
    pub fn writable(object: &Bound<'py, PyAny>, what: &str) -> PyResult<Self> {
        let Kind { api, constant } = exchange::kind_of(object)?;
        match Self::read(object, what, api, false)? {
            None => invalid(what, "a tensor whose elements lie row by row", "one with other strides"),
            Some(input) if input.read_only || constant => {
                invalid(what, "a tensor that may be written", "a read-only one")
            }
            Some(input) => Ok(input),
        }
    }

    /// By the table of its type, if there is one, which is asked for its stream or not. None: the elements do not lie row by row.
    fn read(
        object: &Bound<'py, PyAny>,
        what: &str,
        api: Option<&'static ExchangeApi>,
        asks_stream: bool,
    ) -> PyResult<Option<Self>> {
        let py = object.py();
        if let Some(api) = api {
            refuse_gradient(object, what)?;
            refuse_negatives(object, what)?;
            let (tensor, flags, held) = exchange::tensor_of(api, object)?;
            let stream = match tensor.device.kind {
                CUDA if asks_stream => exchange::current_stream(py, api, CUDA, tensor.device.index)?,
                _ => 0,
            };
            return Self::of_tensor(object, what, tensor, flags, held, Source::Exchange(api), (stream, false));
        }
        if let Some(method) = object.getattr_opt(intern!(py, "__dlpack__"))? {
            match by_method(object, &method) {
                Ok((tensor, flags, held, stream)) => {
                    return Self::of_tensor(object, what, tensor, flags, Some(held), Source::Methods, stream);
                }
                // numpy before 2.1 does not hand out what is read-only.
                Err(error) => match object.getattr_opt(intern!(py, "__array_interface__"))? {
                    Some(interface) => return Self::of_interface(object, what, &interface),
                    None => return Err(exchange::as_value_error(py, error)),
                },
            }
        }
        match object.getattr_opt(intern!(py, "__array_interface__"))? {
            Some(interface) => Self::of_interface(object, what, &interface),
            None => {
                let got = object.get_type().fully_qualified_name()?;
                let expected = "a tensor with __dlpack__, as of torch, numpy, cupy, jax or paddle";
                Err(PyTypeError::new_err(format!("{what}: expected {expected}, got {got}")))
            }
        }
    }

    fn of_tensor(
        object: &Bound<'py, PyAny>,
        what: &str,
        tensor: DlTensor,
        flags: u64,
        held: Option<Held>,
        source: Source,
        (stream, own_stream): (usize, bool),
    ) -> PyResult<Option<Self>> {
        let place = match tensor.device.kind {
            CPU | CUDA_HOST => Place::Cpu,
            CUDA => Place::Cuda(u32::try_from(tensor.device.index).unwrap_or(0)),
            other => {
                return invalid(what, "a tensor on a CPU or a CUDA device", format_args!("DLPack's device {other}"));
            }
        };
        let dimensions = usize::try_from(tensor.ndim).unwrap_or(usize::MAX);
        let mut sizes = [0; super::MOST_DIMENSIONS];
        if dimensions > sizes.len() {
            return invalid(what, format_args!("at most {} dimensions", sizes.len()), tensor.ndim);
        }
        if dimensions > 0 && tensor.shape.is_null() {
            return invalid(what, format_args!("sizes of {dimensions} dimensions"), "null");
        }
        // SAFETY: a tensor has as many sizes, and as many strides unless there are none, as it says that it has dimensions; they
        // stay as long as the object.
        let at = |pointer: *mut i64, i: usize| unsafe { *pointer.add(i) };
        for (i, size) in sizes[..dimensions].iter_mut().enumerate() {
            let given = at(tensor.shape, i);
            *size = usize::try_from(given).or_else(|_| invalid(what, "sizes of 0 or more", given))?;
        }
        let shape = Shape::new(&sizes[..dimensions])?;
        if !tensor.strides.is_null() && !is_dense(&shape, |i| at(tensor.strides, i)) {
            return Ok(None);
        }
        let address = tensor.data.addr().wrapping_add(usize::try_from(tensor.byte_offset).unwrap_or(0));
        let read_only = flags & READ_ONLY != 0;
        let dtype = tensor.dtype;
        let object = object.clone();
        Self { object, address, place, dtype, shape, read_only, source, stream, own_stream, _held: held }.checked(what)
    }

    /// numpy's own description of an array.
    fn of_interface(object: &Bound<'py, PyAny>, what: &str, interface: &Bound<'py, PyAny>) -> PyResult<Option<Self>> {
        let item = |name: &str| interface.get_item(name);
        let (address, read_only): (usize, bool) = item("data")?.extract()?;
        let (signed, text): (Vec<i64>, String) = (item("shape")?.extract()?, item("typestr")?.extract()?);
        let size = |&size: &i64| usize::try_from(size).or_else(|_| invalid(what, "sizes of 0 or more", size));
        let sizes = signed.iter().map(size).collect::<PyResult<Vec<usize>>>()?;
        let Some(dtype) = of_typestr(&text) else {
            let got =
                object.getattr_opt("dtype")?.map_or(Ok(text), |dtype| dtype.str().map(|name| name.to_string()))?;
            return Err(PyTypeError::new_err(format!(
                "{what}: expected numbers in the machine's byte order, got {got}"
            )));
        };
        let shape = Shape::new(&sizes)?;
        // They may be left out, and are None where elements lie row by row.
        let strides = interface.call_method1("get", ("strides",))?.extract::<Option<Vec<i64>>>()?;
        if let Some(strides) = strides {
            if strides.len() != sizes.len() {
                return invalid(what, format_args!("{} strides", sizes.len()), strides.len());
            }
            let bytes = dtype.bytes() as i64;
            if !is_dense(&shape, |i| if strides[i] % bytes == 0 { strides[i] / bytes } else { -1 }) {
                return Ok(None);
            }
        }
        let (object, place, source) = (object.clone(), Place::Cpu, Source::Methods);
        Self { object, address, place, dtype, shape, read_only, source, stream: 0, own_stream: false, _held: None }
            .checked(what)
    }

    /// None: elements that are not aligned. Error: a tensor without memory, as those that only stand for one.
    fn checked(self, what: &str) -> PyResult<Option<Self>> {
        if self.address == 0 && self.shape.elements() > 0 {
            return invalid(what, "a tensor with elements", "one that has no memory, as of a meta device");
        }
        Ok(self.address.is_multiple_of(self.dtype.bytes().clamp(1, 8)).then_some(self))
    }

    /// The Python tensor.
    pub fn object(&self) -> &Bound<'py, PyAny> {
        &self.object
    }

    /// Where it lies.
    pub fn place(&self) -> Place {
        self.place
    }

    /// The stream in which it may be used.
    pub fn stream(&self) -> usize {
        self.stream
    }

    /// Waits for what was put in `queue`, where the library of this tensor would not: it may take the memory back.
    pub fn settle(&self, queue: &halfbyte::Cuda) -> halfbyte::Result<()> {
        if self.own_stream { queue.synchronize() } else { Ok(()) }
    }

    /// Type of the elements.
    pub fn dtype(&self) -> DataType {
        self.dtype
    }

    /// Its sizes.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// How it came in.
    pub fn source(&self) -> Source {
        self.source
    }

    /// Address of the first element.
    pub fn address(&self) -> usize {
        self.address
    }

    /// Bytes of all elements.
    pub fn bytes_len(&self) -> usize {
        self.shape.elements() * self.dtype.bytes()
    }

    /// Error: another type than a float that layers take.
    pub fn float(&self, what: &str) -> PyResult<Float> {
        float_of(self.dtype).ok_or_else(|| wrong_type(what, "float16, bfloat16 or float32", self.dtype))
    }

    /// Elements of memory of the host. Errors: another type; it lies elsewhere.
    pub fn slice<T: Pod>(&self, what: &str, dtype: DataType) -> PyResult<&[T]> {
        if self.dtype != dtype || dtype.bytes() != size_of::<T>() {
            return Err(wrong_type(what, &dtype.to_string(), self.dtype));
        }
        if self.place != Place::Cpu {
            return invalid(what, "a tensor on the CPU", format_args!("one on {}", self.place));
        }
        // SAFETY: of this type.
        Ok(unsafe { host_slice(self.address, self.shape.elements()) })
    }

    /// Floats of memory of the host. Errors: no floats; it lies elsewhere.
    pub fn floats(&self, what: &str) -> PyResult<Floats<'_>> {
        Ok(match self.float(what)? {
            Float::F16 => Floats::F16(self.slice(what, DataType::F16)?),
            Float::BF16 => Floats::BF16(self.slice(what, DataType::BF16)?),
            Float::F32 => Floats::F32(self.slice(what, DataType::F32)?),
        })
    }

    /// Bytes of memory of the host. Errors: no bytes; it lies elsewhere.
    pub fn bytes(&self, what: &str) -> PyResult<Bytes<'_>> {
        Ok(match self.dtype {
            DataType::U8 => Bytes::U8(self.slice(what, DataType::U8)?),
            DataType::I8 => Bytes::I8(self.slice(what, DataType::I8)?),
            other => return Err(wrong_type(what, "uint8 or int8", other)),
        })
    }

    /// Elements in memory of a GPU. The caller has looked at where it lies, and what type it is of.
    pub fn view<T: Pod>(&self) -> View<'_, T> {
        assert!(self.place != Place::Cpu && self.dtype.bytes() == size_of::<T>(), "{} on {}", self.dtype, self.place);
        // SAFETY: the tensor is alive and in device memory, aligned, and used in the stream that its library works in.
        unsafe { View::from_raw(self.address as u64, self.shape.elements()) }
    }

    /// Floats in memory of a GPU. As of [`Input::view`]; error: no floats.
    pub fn float_view(&self, what: &str) -> PyResult<FloatView<'_>> {
        Ok(match self.float(what)? {
            Float::F16 => self.view::<f16>().into(),
            Float::BF16 => self.view::<bf16>().into(),
            Float::F32 => self.view::<f32>().into(),
        })
    }

    /// All floats widened, wherever they lie. Errors: no floats; no GPU.
    pub fn to_f32(&self, what: &str) -> PyResult<Vec<f32>> {
        let Place::Cuda(index) = self.place else { return widened(self.floats(what)?) };
        let queue = device::queue(self.object.py(), index, self.stream)?;
        let download = |view: FloatView<'_>| -> halfbyte::Result<Vec<f32>> {
            Ok(match view {
                FloatView::F32(view) => downloaded(&queue, view)?,
                FloatView::F16(view) => downloaded(&queue, view)?.into_iter().map(f16::to_f32).collect(),
                FloatView::BF16(view) => downloaded(&queue, view)?.into_iter().map(bf16::to_f32).collect(),
            })
        };
        Ok(download(self.float_view(what)?).map_err(Failure::from)?)
    }

    /// The bytes of all elements, wherever they lie. Error: no GPU.
    pub fn to_bytes(&self) -> PyResult<Vec<u8>> {
        let len = self.bytes_len();
        match self.place {
            // SAFETY: every element is bytes.
            Place::Cpu => copied(unsafe { host_slice::<u8>(self.address, len) }),
            Place::Cuda(index) => {
                let queue = device::queue(self.object.py(), index, self.stream)?;
                // SAFETY: as of `view`.
                let view = unsafe { View::<u8>::from_raw(self.address as u64, len) };
                Ok(downloaded(&queue, view).map_err(Failure::from)?)
            }
        }
    }
}

/// Whether elements lie row by row without gaps.
fn is_dense(shape: &Shape, stride: impl Fn(usize) -> i64) -> bool {
    if shape.elements() == 0 {
        return true;
    }
    let mut next = 1;
    (0..shape.len()).rev().all(|i| {
        let here = shape[i] == 1 || stride(i) == next;
        next *= shape[i] as i64;
        here
    })
}

/// ValueError: a tensor that autograd watches; through here its gradient would be lost.
fn refuse_gradient(object: &Bound<'_, PyAny>, what: &str) -> PyResult<()> {
    match object.getattr_opt(intern!(object.py(), "requires_grad"))? {
        Some(flag) if flag.is_truthy()? => invalid(
            what,
            "a tensor without gradient: halfbyte.torch.Linear computes gradients, x.detach() goes without",
            "one that requires a gradient",
        ),
        _ => Ok(()),
    }
}

/// ValueError: a view of torch's whose numbers are the negatives of what lies in memory, which DLPack does not say.
fn refuse_negatives(object: &Bound<'_, PyAny>, what: &str) -> PyResult<()> {
    match object.getattr_opt(intern!(object.py(), "is_neg"))? {
        Some(is_neg) if is_neg.call0()?.is_truthy()? => {
            invalid(what, "a tensor whose numbers lie in memory: x.resolve_neg() makes one", "one of their negatives")
        }
        _ => Ok(()),
    }
}

/// A copy whose elements lie row by row, made by the library that the tensor is of.
fn dense_copy<'py>(object: &Bound<'py, PyAny>, what: &str) -> PyResult<Bound<'py, PyAny>> {
    let py = object.py();
    if let Some(contiguous) = object.getattr_opt(intern!(py, "contiguous"))? {
        return contiguous.call0();
    }
    match object.getattr_opt(intern!(py, "copy"))? {
        Some(copy) => copy.call((), Some(&[("order", "C")].into_py_dict(py)?)),
        None => invalid(what, "a tensor whose elements lie row by row", "one with other strides"),
    }
}

/// The stream that an object without C exchange may be used in, and whether it is ours; None on a CPU.
fn stream_for(object: &Bound<'_, PyAny>) -> PyResult<Option<(usize, bool)>> {
    let py = object.py();
    let (kind, index): (i32, i32) = object.call_method0(intern!(py, "__dlpack_device__"))?.extract()?;
    if kind != CUDA {
        return Ok(None);
    }
    let index = u32::try_from(index).unwrap_or(0);
    let name = object.get_type().module()?;
    let stream = match name.to_str()?.split('.').next() {
        // Each device has a current stream of its own; without a device both libraries tell that of the current one.
        Some("cupy") => {
            let cuda = py.import("cupy")?.getattr("cuda")?;
            let device = cuda.call_method1("Device", (index,))?;
            device.call_method0("__enter__")?;
            let current = cuda.call_method0("get_current_stream");
            let none = py.None();
            device.call_method1("__exit__", (&none, &none, &none))?;
            current?.getattr("ptr")?.extract()?
        }
        Some("paddle") => {
            let device = py.import("paddle")?.getattr("device")?;
            let current = device.call_method1("current_stream", (format!("gpu:{index}"),))?;
            current.getattr("stream_base")?.getattr("raw_stream")?.extract()?
        }
        // No library says which: a stream of ours, which the producer makes wait for its own.
        _ => return Ok(Some((device::own_stream(py, index)?, true))),
    };
    Ok(Some((stream, false)))
}

/// A tensor by `__dlpack__`.
fn by_method(object: &Bound<'_, PyAny>, method: &Bound<'_, PyAny>) -> PyResult<(DlTensor, u64, Held, (usize, bool))> {
    let py = object.py();
    let is_numpy = object.get_type().module()?.to_str()?.starts_with("numpy");
    let stream = if is_numpy { None } else { stream_for(object)? };
    let options = PyDict::new(py);
    options.set_item(intern!(py, "max_version"), (VERSION.major, VERSION.minor))?;
    if let Some((stream, _)) = stream {
        // 1 is DLPack's number of the default stream.
        options.set_item(intern!(py, "stream"), stream.max(1))?;
    }
    let capsule = match method.call((), Some(&options)) {
        Err(error) if error.is_instance_of::<PyTypeError>(py) => {
            options.del_item(intern!(py, "max_version"))?;
            method.call(PyTuple::empty(py), Some(&options))?
        }
        other => other?,
    };
    let stream = stream.unwrap_or((0, false));
    if let Some(pointer) = taken(&capsule, c"dltensor_versioned", c"used_dltensor_versioned") {
        let managed = pointer.cast::<ManagedVersioned>();
        // SAFETY: the capsule held a tensor of this form and has given up its claim.
        let held = unsafe { Held::versioned(managed) };
        // SAFETY: the version lies at the same place in every version.
        let version = unsafe { (*managed).version };
        if version.major != VERSION.major {
            return invalid("__dlpack__", "a tensor of DLPack 1", format_args!("one of DLPack {}", version.major));
        }
        // SAFETY: it is of this version.
        let (tensor, flags) = unsafe { ((*managed).tensor, (*managed).flags) };
        return Ok((tensor, flags, held, stream));
    }
    if let Some(pointer) = taken(&capsule, c"dltensor", c"used_dltensor") {
        let managed = pointer.cast::<Managed>();
        // SAFETY: as above.
        let (held, tensor) = unsafe { (Held::old(managed), (*managed).tensor) };
        return Ok((tensor, 0, held, stream));
    }
    Err(PyTypeError::new_err("__dlpack__: expected a capsule with a tensor, got something else, or one that was used"))
}

/// What a capsule of a name holds, whose claim is then ours: it gets the other name.
fn taken(capsule: &Bound<'_, PyAny>, name: &CStr, used: &'static CStr) -> Option<*mut std::ffi::c_void> {
    let object = capsule.as_ptr();
    // SAFETY: the object lives; anything else than a capsule of this name is refused.
    if unsafe { ffi::PyCapsule_IsValid(object, name.as_ptr()) } == 0 {
        return None;
    }
    // SAFETY: it is a capsule of this name.
    let pointer = unsafe { ffi::PyCapsule_GetPointer(object, name.as_ptr()) };
    // SAFETY: as above; the new name lives as long as the program.
    let renamed = unsafe { ffi::PyCapsule_SetName(object, used.as_ptr()) };
    (renamed == 0 && !pointer.is_null()).then_some(pointer)
}

/// A type as numpy's description writes it.
fn of_typestr(text: &str) -> Option<DataType> {
    let (order, kind) = text.split_at_checked(1)?;
    let (kind, bytes) = kind.split_at_checked(1)?;
    let bytes: u8 = bytes.parse().ok().filter(|&bytes| bytes > 0)?;
    let code = match kind {
        "i" => 0,
        "u" => 1,
        "f" => 2,
        "b" => 6,
        _ => return None,
    };
    let native = order == "|" || bytes == 1 || (order == "<") == cfg!(target_endian = "little");
    native.then(|| dlpack::DataType::new(code, bytes.saturating_mul(8)))
}
