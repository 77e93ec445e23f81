//! DLPack's C exchange: a table of functions that a type of tensors has.

use super::dlpack::{DlTensor, EXCHANGE_NAME, ExchangeApi, Held, ManagedVersioned, VERSION};
use pyo3::exceptions::{PyBufferError, PyMemoryError, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::{ffi, intern};
use std::ffi::{CStr, c_char, c_void};
use std::ptr::{null_mut, without_provenance_mut};
use std::sync::{Mutex, PoisonError};

/// Types that are remembered: programs have a handful.
const MOST_TYPES: usize = 32;

/// What is known of a type of tensors.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    /// Its table, if it has one of this version.
    pub api: Option<&'static ExchangeApi>,
    /// Its tensors never change, though it may hand them out as if they might.
    pub constant: bool,
}

/// A type by its address.
type Known = (usize, Kind);

/// The types seen so far. Each is kept alive, so that its address is its own.
static KNOWN: Mutex<Vec<Known>> = Mutex::new(Vec::new());

/// What is known of an object's type.
pub fn kind_of(object: &Bound<'_, PyAny>) -> PyResult<Kind> {
    let address = object.get_type_ptr().addr();
    let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, kind)) = known().iter().find(|(of, _)| *of == address) {
        return Ok(*kind);
    }
    let of = object.get_type();
    // A static type's attribute: what an instance says of itself does not count.
    let api = match of.getattr_opt(intern!(object.py(), "__dlpack_c_exchange_api__"))? {
        Some(capsule) => of_capsule(&capsule),
        None => None,
    };
    let constant = matches!(of.module()?.to_str()?.split('.').next(), Some("jax" | "jaxlib"));
    let kind = Kind { api, constant };
    let mut known = known();
    if known.len() < MOST_TYPES && known.iter().all(|(of, _)| *of != address) {
        known.push((address, kind));
        // Never let go of.
        let _ = of.into_ptr();
    }
    Ok(kind)
}

fn of_capsule(capsule: &Bound<'_, PyAny>) -> Option<&'static ExchangeApi> {
    let (object, name) = (capsule.as_ptr(), EXCHANGE_NAME.as_ptr());
    // SAFETY: `object` is a live object and `name` a text; anything else than a capsule of this name is refused.
    if unsafe { ffi::PyCapsule_IsValid(object, name) } == 0 {
        return None;
    }
    // SAFETY: it is a capsule of this name.
    let mut table = unsafe { ffi::PyCapsule_GetPointer(object, name) }.cast::<ExchangeApi>().cast_const();
    loop {
        // SAFETY: a capsule of this name holds a table that stays until the process ends; its version and the older table lie at
        // the same places in every version, and an older table is null or one like it.
        let api = unsafe { table.as_ref() }?;
        if api.version.major == VERSION.major {
            return Some(api);
        }
        table = api.previous;
    }
}

/// What a function of a table raised. A tensor that DLPack cannot say is a wrong value.
fn raised(py: Python<'_>) -> PyErr {
    let error = PyErr::take(py)
        .unwrap_or_else(|| PyRuntimeError::new_err("a function of DLPack's exchange failed and did not say why"));
    as_value_error(py, error)
}

/// BufferError, which is how libraries refuse to hand out a tensor, as ValueError.
pub fn as_value_error(py: Python<'_>, error: PyErr) -> PyErr {
    match error.is_instance_of::<PyBufferError>(py) {
        true => pyo3::exceptions::PyValueError::new_err(format!("tensor: cannot be handed out: {}", error.value(py))),
        false => error,
    }
}

/// Where an object's elements are, for as long as it lives; and a claim on them where only that is to be had.
pub fn tensor_of(api: &ExchangeApi, object: &Bound<'_, PyAny>) -> PyResult<(DlTensor, u64, Option<Held>)> {
    if let Some(function) = api.from_object {
        let mut tensor = std::mem::MaybeUninit::<DlTensor>::uninit();
        // SAFETY: the table is of the object's type, and Python's lock is held.
        return match unsafe { function(object.as_ptr().cast(), tensor.as_mut_ptr()) } {
            // SAFETY: the function has filled it in.
            0 => Ok((unsafe { tensor.assume_init() }, 0, None)),
            _ => Err(raised(object.py())),
        };
    }
    let missing = || PyRuntimeError::new_err("DLPack's exchange lacks a function that it must have");
    let function = api.managed_from_object.ok_or_else(missing)?;
    let mut managed = null_mut();
    // SAFETY: as above.
    if unsafe { function(object.as_ptr().cast(), &mut managed) } != 0 {
        return Err(raised(object.py()));
    }
    // SAFETY: the function gave a tensor, whose claim is ours.
    let held = unsafe { Held::versioned(managed) };
    // SAFETY: as above; the claim keeps it.
    let (tensor, flags) = unsafe { ((*managed).tensor, (*managed).flags) };
    Ok((tensor, flags, Some(held)))
}

/// The stream that the library works in now on a GPU.
pub fn current_stream(py: Python<'_>, api: &ExchangeApi, kind: i32, index: i32) -> PyResult<usize> {
    let Some(function) = api.current_stream else { return Ok(0) };
    let mut stream = null_mut();
    // SAFETY: `stream` takes one pointer, and Python's lock is held.
    match unsafe { function(kind, index, &mut stream) } {
        0 => Ok(stream.addr()),
        _ => Err(raised(py)),
    }
}

/// The first thing that a function says went wrong.
type Said = Option<(String, String)>;

unsafe extern "C" fn note(said: *mut c_void, kind: *const c_char, text: *const c_char) {
    let string = |text: *const c_char| match text.is_null() {
        true => String::new(),
        // SAFETY: the library gives texts that end with a zero.
        false => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
    };
    // SAFETY: the context is the one that `allocate` gave, which waits for the call.
    if let Some(said) = unsafe { said.cast::<Said>().as_mut() } {
        said.get_or_insert((string(kind), string(text)));
    }
}

/// A new tensor of a library's own.
pub fn allocate(py: Python<'_>, api: &ExchangeApi, mut prototype: DlTensor) -> PyResult<*mut ManagedVersioned> {
    let Some(function) = api.allocate else {
        return Err(PyRuntimeError::new_err("DLPack's exchange has no function that makes tensors"));
    };
    let (mut managed, mut said): (_, Said) = (null_mut(), None);
    // SAFETY: the prototype's shape and strides are the caller's and live; `note` takes the context that it is given here.
    let status = unsafe { function(&mut prototype, &mut managed, (&raw mut said).cast(), note) };
    if status == 0 && !managed.is_null() {
        return Ok(managed);
    }
    let raised = PyErr::take(py);
    let (kind, text) = said.unwrap_or_default();
    let no_memory = kind == "MemoryError" || kind.contains("OutOfMemory") || text.contains("out of memory");
    Err(match raised {
        Some(error) => error,
        None if no_memory => PyMemoryError::new_err(text),
        None => PyRuntimeError::new_err(format!("a tensor cannot be made: {text}")),
    })
}

/// The Python tensor of a library that is made of one; takes the claim.
///
/// # Safety
/// `managed` is a tensor whose claim is the caller's.
pub unsafe fn to_object<'py>(
    py: Python<'py>,
    api: &ExchangeApi,
    managed: *mut ManagedVersioned,
) -> PyResult<Bound<'py, PyAny>> {
    let Some(function) = api.managed_to_object else {
        // SAFETY: the claim is ours.
        drop(unsafe { Held::versioned(managed) });
        return Err(PyRuntimeError::new_err("DLPack's exchange has no function that takes tensors"));
    };
    let mut object: *mut c_void = without_provenance_mut(0);
    // SAFETY: the claim goes to the function, and Python's lock is held.
    match unsafe { function(managed, &mut object) } {
        // SAFETY: the function gave a new reference.
        0 => unsafe { Bound::from_owned_ptr_or_err(py, object.cast()) },
        _ => Err(raised(py)),
    }
}
