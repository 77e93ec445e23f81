//! A model folder: `config.json`, the header of `model.safetensors`, and its data, with a zero byte between them. The
//! length in front of the header is right, so that the fuzzer spends its time behind it.
#![no_main]

use halfbyte_checkpoint::{Weights, inspect, linears};
use halfbyte_fuzz::{bounded, folder, safetensors, write};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let mut parts = input.splitn(3, |&byte| byte == 0);
    let [config, header, data] = [(); 3].map(|()| parts.next().unwrap_or_default());
    write("config.json", config);
    write("model.safetensors", &safetensors(header, data));
    bounded(input, || {
        let Ok(weights) = Weights::open(folder()) else { return };
        let _ = inspect(&weights);
        let _ = linears(&weights);
        for name in weights.modules() {
            if let Ok(linear) = weights.load_linear(name) {
                let [n, k] = linear.weight.shape();
                // A weight takes two bits at least.
                assert!(n.checked_mul(k).is_some_and(|elements| elements <= 4 * input.len()));
            }
            weights.release(name);
        }
    });
});
