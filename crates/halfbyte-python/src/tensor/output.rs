//! A tensor that is written, in the library that the input is of.

use super::dlpack::{CPU, CUDA, DataType, Device, DlTensor, ExchangeApi, Held, ManagedVersioned};
use super::input::Source;
use super::{Input, Place, Shape, Tensor, exchange, float_of, wrong_type};
use crate::device;
use crate::error::{Failure, invalid};
use bytemuck::Pod;
use half::{bf16, f16};
use halfbyte::cuda::driver::{FloatViewMut, ViewMut};
use halfbyte::format::int8::BytesMut;
use halfbyte::{Float, FloatsMut};
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyTuple};
use std::ptr::null_mut;

/// A tensor that nobody else has yet, or that the caller gave to be written.
#[derive(Debug)]
pub struct Output<'py> {
    address: usize,
    place: Place,
    dtype: DataType,
    shape: Shape,
    made: Made<'py>,
}

#[derive(Debug)]
enum Made<'py> {
    /// By a table of functions: becomes a Python tensor at the end.
    Exchange(&'static ExchangeApi, *mut ManagedVersioned, Option<Held>),
    /// A Python tensor already.
    Object(Bound<'py, PyAny>),
    /// Ours, which the library takes at the end.
    Ours(Bound<'py, Tensor>, Option<Bound<'py, PyAny>>),
}

impl<'py> Output<'py> {
    /// A new tensor of x's library, where x lies. *Errors:* memory is short; what the library raises.
    pub fn like(x: &Input<'py>, shape: Shape, dtype: DataType) -> PyResult<Self> {
        let py = x.object().py();
        let place = x.place();
        if let Source::Exchange(api) = x.source() {
            let device = match place {
                Place::Cpu => Device { kind: CPU, index: 0 },
                Place::Cuda(index) => Device { kind: CUDA, index: index as i32 },
            };
            let mut sizes = [0; super::MOST_DIMENSIONS];
            let mut strides = [1; super::MOST_DIMENSIONS];
            for i in (0..shape.len()).rev() {
                sizes[i] = shape[i] as i64;
                if i + 1 < shape.len() {
                    strides[i] = strides[i + 1] * sizes[i + 1].max(1);
                }
            }
            let prototype = DlTensor {
                data: null_mut(),
                device,
                ndim: shape.len() as i32,
                dtype,
                shape: sizes.as_mut_ptr(),
                strides: strides.as_mut_ptr(),
                byte_offset: 0,
            };
            let managed = exchange::allocate(py, api, prototype)?;
            // SAFETY: a tensor that was made for us, whose claim is ours.
            let (held, tensor) = unsafe { (Held::versioned(managed), (*managed).tensor) };
            let address = tensor.data.addr() + tensor.byte_offset as usize;
            return Ok(Self { address, place, dtype, shape, made: Made::Exchange(api, managed, Some(held)) });
        }
        let kind = x.object().get_type().module()?;
        let library = kind.to_str()?.split('.').next().unwrap_or_default().to_owned();
        match library.as_str() {
            "numpy" | "ml_dtypes" => Self::of_module(py, "numpy", x, shape, dtype),
            "cupy" => Self::of_module(py, "cupy", x, shape, dtype),
            _ => {
                let queue = match place {
                    Place::Cpu => None,
                    Place::Cuda(index) => Some(device::queue(py, index, x.stream())?),
                };
                let tensor = Bound::new(py, Tensor::new(shape, dtype, queue)?)?;
                let address = tensor.get().address();
                let taker = taker(x.object(), &library)?;
                Ok(Self { address, place, dtype, shape, made: Made::Ours(tensor, taker) })
            }
        }
    }

    /// Of numpy, or of cupy, which is alike.
    fn of_module(py: Python<'py>, name: &str, x: &Input<'py>, shape: Shape, dtype: DataType) -> PyResult<Self> {
        if dtype == DataType::BF16 {
            return Err(wrong_type("result", &format!("a type that {name} has, or an out of {dtype}"), dtype));
        }
        let module = py.import(name)?;
        let sizes = PyTuple::new(py, shape.iter())?;
        let dtype_name = dtype.to_string();
        let array = match x.place() {
            Place::Cpu => module.call_method1(intern!(py, "empty"), (sizes, dtype_name))?,
            Place::Cuda(_) => {
                // On the device of x, whichever is the current one.
                let device = x.object().getattr("device")?;
                device.call_method0("__enter__")?;
                let made = module.call_method1(intern!(py, "empty"), (sizes, dtype_name));
                device.call_method1("__exit__", (py.None(), py.None(), py.None()))?;
                made?
            }
        };
        let as_input = Input::writable(&array, "result")?;
        let (address, place) = (as_input.address(), as_input.place());
        Ok(Self { address, place, dtype, shape, made: Made::Object(array) })
    }

    /// A tensor of the caller's. *Errors:* TypeError: another type; ValueError: another shape or place, read-only, strides, memory
    /// that x has too.
    pub fn given(op: &str, out: &Bound<'py, PyAny>, x: &Input<'py>, shape: Shape, dtype: DataType) -> PyResult<Self> {
        let out = Input::writable(out, "out")?;
        if out.dtype() != dtype {
            return Err(wrong_type(op, &format!("an out of {dtype}"), out.dtype()));
        }
        if *out.shape() != shape {
            return invalid(op, format_args!("an out of shape {shape}"), out.shape());
        }
        if out.place() != x.place() {
            return invalid(op, format_args!("an out on {}", x.place()), format_args!("one on {}", out.place()));
        }
        let (a, b) = (out.address()..out.address() + out.bytes_len(), x.address()..x.address() + x.bytes_len());
        if a.start < b.end && b.start < a.end {
            return invalid(op, "an out with memory of its own", "one that shares memory with x");
        }
        let (address, place, object) = (out.address(), out.place(), out.object().clone());
        Ok(Self { address, place, dtype, shape, made: Made::Object(object) })
    }

    /// [`Output::given`] if there is one, else [`Output::like`].
    pub fn new(
        op: &str,
        out: Option<&Bound<'py, PyAny>>,
        x: &Input<'py>,
        shape: Shape,
        dtype: DataType,
    ) -> PyResult<Self> {
        match out.filter(|out| !out.is_none()) {
            Some(out) => Self::given(op, out, x, shape, dtype),
            None => Self::like(x, shape, dtype),
        }
    }

    /// The Python tensor, once its elements are written, or the work that writes them is in x's stream.
    pub fn finish(mut self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        match &mut self.made {
            Made::Exchange(api, managed, held) => {
                // The claim goes to the library.
                std::mem::forget(held.take());
                // SAFETY: the claim was ours.
                unsafe { exchange::to_object(py, api, *managed) }
            }
            Made::Object(object) => Ok(object.clone()),
            Made::Ours(tensor, Some(taker)) => taker.call1((&*tensor,)),
            Made::Ours(tensor, None) => Ok(tensor.clone().into_any()),
        }
    }

    /// Elements of memory of the host, to be written.
    fn slice_mut<T: Pod>(&mut self) -> &mut [T] {
        assert!(self.place == Place::Cpu && self.dtype.bytes() == size_of::<T>(), "{} on {}", self.dtype, self.place);
        let len = self.shape.elements();
        if len == 0 {
            return &mut [];
        }
        // SAFETY: the tensor has this many elements of this type, and is ours, or the caller's, who gave it to be written.
        unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(self.address), len) }
    }

    /// Floats of memory of the host. Error: another type.
    pub fn floats_mut(&mut self) -> PyResult<FloatsMut<'_>> {
        Ok(match self.float()? {
            Float::F16 => FloatsMut::F16(self.slice_mut()),
            Float::BF16 => FloatsMut::BF16(self.slice_mut()),
            Float::F32 => FloatsMut::F32(self.slice_mut()),
        })
    }

    /// Bytes of memory of the host. Error: another type.
    pub fn bytes_mut(&mut self) -> PyResult<BytesMut<'_>> {
        match self.dtype {
            DataType::U8 => Ok(BytesMut::U8(self.slice_mut())),
            DataType::I8 => Ok(BytesMut::I8(self.slice_mut())),
            other => Err(wrong_type("result", "uint8 or int8", other)),
        }
    }

    /// Elements in memory of a GPU, to be written in x's stream.
    pub fn view_mut<T: Pod>(&mut self) -> ViewMut<'_, T> {
        assert!(self.place != Place::Cpu && self.dtype.bytes() == size_of::<T>(), "{} on {}", self.dtype, self.place);
        // SAFETY: as of `slice_mut`; the library frees it in the order of x's stream.
        unsafe { ViewMut::from_raw(self.address as u64, self.shape.elements()) }
    }

    /// Floats in memory of a GPU. Error: another type.
    pub fn float_view_mut(&mut self) -> PyResult<FloatViewMut<'_>> {
        Ok(match self.float()? {
            Float::F16 => self.view_mut::<f16>().into(),
            Float::BF16 => self.view_mut::<bf16>().into(),
            Float::F32 => self.view_mut::<f32>().into(),
        })
    }

    fn float(&self) -> PyResult<Float> {
        float_of(self.dtype).ok_or_else(|| wrong_type("result", "float16, bfloat16 or float32", self.dtype))
    }
}

/// What makes a tensor of a library from one of ours; None where nothing is known that does.
fn taker<'py>(x: &Bound<'py, PyAny>, library: &str) -> PyResult<Option<Bound<'py, PyAny>>> {
    let py = x.py();
    if library == "paddle" {
        return py.import("paddle")?.getattr_opt("from_dlpack");
    }
    match x.getattr_opt(intern!(py, "__array_namespace__"))? {
        Some(namespace) => namespace.call0()?.getattr_opt("from_dlpack"),
        None => Ok(None),
    }
}

/// A numpy array with these elements.
pub fn numpy_array<'py, T: Pod>(
    py: Python<'py>,
    elements: &[T],
    shape: &[usize],
    dtype: DataType,
) -> PyResult<Bound<'py, PyAny>> {
    if dtype == DataType::BF16 {
        return Err(PyTypeError::new_err("numpy has no bfloat16"));
    }
    let numpy = py.import(intern!(py, "numpy"))?;
    let options = [("dtype", dtype.to_string())].into_py_dict(py)?;
    let array = numpy.call_method("empty", (PyTuple::new(py, shape)?,), Some(&options))?;
    let target = Input::writable(&array, "result").map_err(Failure::from)?;
    let shape = Shape::new(shape)?;
    let (address, place) = (target.address(), target.place());
    let mut output = Output { address, place, dtype, shape, made: Made::Object(array) };
    output.slice_mut::<T>().copy_from_slice(elements);
    output.finish(py)
}
