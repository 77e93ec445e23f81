//! What callers call: shapes are checked here, once, and errors returned.
//!
//! A layer is made for a [`Device`] and runs on it: `Linear::on(&device, weight)?.forward(&device, x, m, y)`. On a CPU a weight
//! can be packed before there is a device: `Linear::new(weight)`.

mod conv2d;
mod conv2d_int8;
mod device;
mod linear;
mod linear_int8;
mod llm_int8;
mod on_cpu;
mod on_cuda;

pub use conv2d::Conv2d;
pub use conv2d_int8::Conv2dInt8;
pub use device::{Device, Tensor};
pub use linear::{Activation, Linear, Weight};
pub use linear_int8::LinearInt8;
pub use llm_int8::LlmInt8Linear;

use crate::error::{Error, Result};

/// Error: a matrix of another length than its rows and columns.
fn check_matrix(op: &'static str, what: &str, [rows, columns]: [usize; 2], len: usize) -> Result<()> {
    if rows.checked_mul(columns) == Some(len) {
        return Ok(());
    }
    Err(Error::invalid(op, format!("{what} of {rows} × {columns}"), format!("{len} elements")))
}

/// Error: a bias of another length.
fn check_bias(op: &'static str, n: usize, len: usize) -> Result<()> {
    if len == n { Ok(()) } else { Err(Error::invalid(op, format!("a bias of {n}"), len.to_string())) }
}
