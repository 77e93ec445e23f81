//! What callers call: shapes are checked here, once, and errors returned.

mod conv2d;
mod linear;

pub use conv2d::Conv2d;
pub use linear::{Activation, Linear, Weight};
