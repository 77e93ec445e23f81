//! A safetensors file of these bytes: opened, described, every tensor read.
#![no_main]

use halfbyte_checkpoint::Checkpoint;
use halfbyte_fuzz::{bounded, write};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let path = write("input.safetensors", input);
    bounded(input, || {
        let Ok(checkpoint) = Checkpoint::open(&path) else { return };
        let mut bytes = 0;
        for info in checkpoint.tensors() {
            let data = checkpoint.bytes(info.name).expect("a listed tensor has bytes");
            assert_eq!(data.len(), info.bytes);
            assert_eq!(info.dtype.bytes_of(info.shape), Some(info.bytes));
            bytes += info.bytes;
            if let Ok(floats) = checkpoint.floats(info.name) {
                assert_eq!(floats.to_f32().len(), info.shape.iter().product::<usize>());
            }
            if let Ok(ints) = checkpoint.ints(info.name) {
                assert_eq!(ints.len(), info.shape.iter().product::<usize>());
            }
            checkpoint.release(info.name);
        }
        assert!(bytes <= input.len());
    });
});
