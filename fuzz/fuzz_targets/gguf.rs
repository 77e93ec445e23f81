//! A GGUF file of these bytes: its header translated into the terms of Hugging Face, every module loaded.
#![no_main]

use halfbyte_checkpoint::gguf;
use halfbyte_fuzz::{bounded_by, use_weights, write};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let path = write("model.gguf", input);
    // Metadata of a few bytes may announce 4,096 layers, a kilobyte of names each.
    bounded_by(64 * input.len() + (8 << 20), || {
        let Ok(header) = gguf::parse(input, &path) else { return };
        assert!(header.tensors.iter().all(|tensor| tensor.range.end <= input.len()));
        let _ = gguf::config_json(&header, input);
        let _ = gguf::tokenizer_json(&header);
        use_weights(&path, input.len());
    });
});
