//! One binary for all tests.

mod conversions;
