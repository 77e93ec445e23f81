//! What callers call: shapes are checked here, once, and errors returned.

mod linear;
mod linear_int8;

pub use linear::{Activation, Linear, Weight};
pub use linear_int8::LinearInt8;
