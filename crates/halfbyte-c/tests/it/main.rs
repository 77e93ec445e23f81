//! One binary for all tests.

mod conversions;
mod tidy;
