//! A model folder: `config.json`, the header of `model.safetensors`, and its data, with a zero byte between them. The
//! length in front of the header is right, so that the fuzzer spends its time behind it.
#![no_main]

use halfbyte_fuzz::{bounded, folder, safetensors, use_weights, write};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let mut parts = input.splitn(3, |&byte| byte == 0);
    let [config, header, data] = [(); 3].map(|()| parts.next().unwrap_or_default());
    write("config.json", config);
    write("model.safetensors", &safetensors(header, data));
    bounded(input, || use_weights(folder(), input.len()));
});
