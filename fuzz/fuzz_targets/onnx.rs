//! An ONNX model of these bytes: described, every module loaded.
#![no_main]

use halfbyte_fuzz::{bounded, use_weights, write};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let path = write("model.onnx", input);
    bounded(input, || use_weights(&path, input.len()));
});
