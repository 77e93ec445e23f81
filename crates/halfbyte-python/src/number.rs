//! Whole numbers that Python gives as options: one that is out of range is a ValueError that names the option, as other wrong options are.

use crate::conv2d::Pair;
use crate::int8::{PerOutput, Scales};
use crate::model::Prompt;
use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyByteArray, PyBytes, PyMemoryView};

/// What counts and sizes may be.
const COUNT: &str = "0 or more, in 64 bits";

/// What strides and dilations may be.
const PAIR: &str = "one number of 1 or more, or two";

/// What group indices and token ids may be.
const INDICES: &str = "numbers from 0 on, in 32 bits";

/// What a prompt may be.
const PROMPT: &str = "text of whole characters, or numbers from 0 on, in 32 bits";

/// What zero points may be.
const ZERO_POINT: &str = "a zero point of 32 bits";

/// What scales and the like may be.
const NUMBER: &str = "a number";

/// A value of an option, with what the option takes. Errors: ValueError where a number of it is too small or too large for its type, or
/// there are too few or too many; TypeError: bytes, whose elements Python takes for numbers, a truth value, which it takes for one, or
/// another type.
fn read<'a, 'py, T>(value: &'a Bound<'py, PyAny>, option: &str, expected: &str) -> PyResult<T>
where
    T: FromPyObject<'a, 'py>,
{
    let py = value.py();
    // What is refused here, and below, does not know the option.
    let named = |error: PyErr| match error.value(py).to_string() {
        _ if !error.is_instance_of::<PyTypeError>(py) => error,
        text if text.starts_with("expected ") => PyTypeError::new_err(format!("{option}: {text}")),
        _ => match value.get_type().name() {
            Ok(got) => PyTypeError::new_err(format!("{option}: expected {expected}, got {got}")),
            Err(error) => error,
        },
    };
    refuse_bytes(value, expected).map_err(named)?;
    if is_truth_value(value) {
        return Err(PyTypeError::new_err(format!("{option}: expected {expected}, got a bool")));
    }
    value.extract().map_err(|error: T::Error| {
        let error = named(error.into());
        if !error.is_instance_of::<PyOverflowError>(py) && !error.is_instance_of::<PyValueError>(py) {
            return error;
        }
        // Python writes out no number of thousands of digits.
        let got = value.repr().map_or_else(|_| "one of too many digits".to_owned(), |text| text.to_string());
        PyValueError::new_err(format!("{option}: expected {expected}, got {got}"))
    })
}

/// TypeError: bytes of any kind.
pub fn refuse_bytes(value: &Bound<'_, PyAny>, expected: &str) -> PyResult<()> {
    let (bytes, array) = (value.is_instance_of::<PyBytes>(), value.is_instance_of::<PyByteArray>());
    if !bytes && !array && !value.is_instance_of::<PyMemoryView>() {
        return Ok(());
    }
    Err(PyTypeError::new_err(format!("expected {expected}, got {}", value.get_type().name()?)))
}

/// A truth value of Python or numpy.
fn is_truth_value(value: &Bound<'_, PyAny>) -> bool {
    value.is_instance_of::<PyBool>() || value.get_type().name().is_ok_and(|name| name == "bool" || name == "bool_")
}

/// Numbers of a list, at most: memory for all is taken at once, and a length is what an object says it is.
const MOST: usize = 1 << 28;

/// TypeError: truth values among the elements of what has some; ValueError: more than there can be.
pub fn refuse_truth_values(value: &Bound<'_, PyAny>, expected: &str) -> PyResult<()> {
    if let Ok(len) = value.len()
        && len > MOST
    {
        return Err(PyValueError::new_err(format!("expected at most {MOST} numbers, got {len}")));
    }
    // What has no length may have no end.
    let elements = value.len().and_then(|_| value.try_iter());
    for element in elements.into_iter().flatten() {
        if is_truth_value(&element?) {
            return Err(PyTypeError::new_err(format!("expected {expected}, got a bool")));
        }
    }
    Ok(())
}

/// An option that is switched on or off. TypeError: anything but True and False.
fn switch(value: &Bound<'_, PyAny>, option: &str) -> PyResult<bool> {
    let got = |_| match value.get_type().name() {
        Ok(got) => PyTypeError::new_err(format!("{option}: expected True or False, got {got}")),
        Err(error) => error,
    };
    value.extract().map_err(got)
}

/// Token ids, or indices. TypeError: truth values among them, which Python takes for numbers.
pub struct Ids(pub Vec<u32>);

impl<'py> FromPyObject<'_, 'py> for Ids {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        refuse_truth_values(&value, INDICES)?;
        Ok(Self(value.extract()?))
    }
}

/// The first reading, or else the second, unless what the first found is a number out of range.
pub fn either<T>(py: Python<'_>, first: PyResult<T>, second: impl FnOnce() -> PyResult<T>) -> PyResult<T> {
    match first {
        Err(error) if !error.is_instance_of::<PyOverflowError>(py) => second(),
        read => read,
    }
}

/// Functions that read an option, for `#[pyo3(from_py_with = number::OPTION)]`.
macro_rules! options {
    ($($option:ident: $type:ty, $expected:expr;)*) => {$(
        #[doc = concat!("The option `", stringify!($option), "`.")]
        pub fn $option(value: &Bound<'_, PyAny>) -> PyResult<$type> {
            read(value, stringify!($option), $expected)
        }
    )*};
}

macro_rules! switches {
    ($($option:ident)*) => {$(
        #[doc = concat!("The option `", stringify!($option), "`.")]
        pub fn $option(value: &Bound<'_, PyAny>) -> PyResult<bool> {
            switch(value, stringify!($option))
        }
    )*};
}

switches! { act_order ignore_end overwrite requantize search static_groups two_level }

options! {
    bits: Option<u32>, "0 or more, in 32 bits";
    damping: Option<f64>, NUMBER;
    dilation: Pair, PAIR;
    frequency_penalty: f32, NUMBER;
    group: Option<i64>, "-1 or a number above 0";
    group_index: Option<Ids>, INDICES;
    groups: usize, COUNT;
    k: usize, COUNT;
    m: usize, COUNT;
    magnitude: f64, NUMBER;
    max_tokens: usize, COUNT;
    min_p: f32, NUMBER;
    padding: Pair, "one number of 0 or more, two or four";
    presence_penalty: f32, NUMBER;
    prompt: Prompt, PROMPT;
    repetition_penalty: f32, NUMBER;
    seed: u64, COUNT;
    start: usize, COUNT;
    stop: Option<usize>, COUNT;
    stride: Pair, PAIR;
    temperature: f32, NUMBER;
    threads: Option<usize>, "1 to 4096 threads";
    tokens: Ids, INDICES;
    top_k: usize, COUNT;
    top_p: f32, NUMBER;
    weight_scale: Scales, "a scale, or one for each output, of float32";
    weight_zero: Option<PerOutput<i32>>, ZERO_POINT;
    x_scale: f32, NUMBER;
    x_zero: i32, ZERO_POINT;
    y_scale: Option<f32>, NUMBER;
    y_zero: i32, ZERO_POINT;
}
