//! What callers call: shapes are checked here, once, and errors returned.

mod conv2d;
mod conv2d_int8;
mod linear;
mod linear_int8;

pub use conv2d::Conv2d;
pub use conv2d_int8::Conv2dInt8;
pub use linear::{Activation, Linear, Weight};
pub use linear_int8::LinearInt8;
