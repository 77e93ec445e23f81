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

/// A value of an option, with what the option takes. Errors: ValueError where a number of it is too small or too large for its type, or
/// there are too few or too many; TypeError: bytes, whose elements Python takes for numbers, or another type.
fn read<'a, 'py, T>(value: &'a Bound<'py, PyAny>, option: &str, expected: &str) -> PyResult<T>
where
    T: FromPyObject<'a, 'py>,
{
    let py = value.py();
    // What is refused here, and below, does not know the option.
    let named = |error: PyErr| match error.value(py).to_string() {
        text if error.is_instance_of::<PyTypeError>(py) && text.starts_with("expected ") => {
            PyTypeError::new_err(format!("{option}: {text}"))
        }
        _ => error,
    };
    refuse_bytes(value, expected).map_err(named)?;
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

/// Token ids, or indices. TypeError: truth values among them, which Python takes for numbers.
pub struct Ids(pub Vec<u32>);

impl<'py> FromPyObject<'_, 'py> for Ids {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let ids = value.extract()?;
        for id in value.try_iter()? {
            if id?.is_instance_of::<PyBool>() {
                return Err(PyTypeError::new_err(format!("expected {INDICES}, got a bool")));
            }
        }
        Ok(Self(ids))
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

options! {
    bits: Option<u32>, "0 or more, in 32 bits";
    dilation: Pair, PAIR;
    group: Option<i64>, "-1 or a number above 0";
    group_index: Option<Ids>, INDICES;
    groups: usize, COUNT;
    k: usize, COUNT;
    m: usize, COUNT;
    max_tokens: usize, COUNT;
    padding: Pair, "one number of 0 or more, two or four";
    prompt: Prompt, PROMPT;
    seed: u64, COUNT;
    start: usize, COUNT;
    stop: Option<usize>, COUNT;
    stride: Pair, PAIR;
    threads: Option<usize>, "1 to 4096 threads";
    tokens: Ids, INDICES;
    top_k: usize, COUNT;
    weight_scale: Scales, "a scale, or one for each output, of float32";
    weight_zero: Option<PerOutput<i32>>, ZERO_POINT;
    x_zero: i32, ZERO_POINT;
    y_zero: i32, ZERO_POINT;
}
