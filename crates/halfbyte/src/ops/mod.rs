//! What callers call: shapes are checked here, once, and errors returned.

mod linear;

pub use linear::{Activation, Linear, Weight};
