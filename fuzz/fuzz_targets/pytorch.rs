//! A state dict of PyTorch's of these bytes, an archive or a legacy file: described, every tensor read, every module loaded.
//!
//! Mutations seldom leave an archive's directory whole. Bytes that begin with neither `P` nor a pickle's mark are taken for the
//! pickle of an archive that is made around them.
#![no_main]

use halfbyte_checkpoint::Checkpoint;
use halfbyte_fuzz::{bounded, use_weights, write, zip};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let made;
    let file = match input.first() {
        Some(b'P' | 0x80) => input,
        _ => {
            made =
                zip(&[("m/data.pkl", &[b"\x80\x02", input].concat()), ("m/data/0", &[0; 64]), ("m/data/1", &[1; 64])]);
            &made
        }
    };
    let path = write("model.pt", file);
    bounded(file, || {
        if let Ok(checkpoint) = Checkpoint::open(&path) {
            for info in checkpoint.tensors() {
                assert!(info.bytes <= file.len());
                assert_eq!(checkpoint.data(info.name).map(|data| data.len()).ok(), Some(info.bytes));
            }
        }
        use_weights(&path, file.len());
    });
});
