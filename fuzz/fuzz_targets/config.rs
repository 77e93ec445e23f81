//! A `config.json` of these bytes beside modules in each scheme, and as a language model's configuration; then the same
//! bytes as the configs of their own that AutoGPTQ and AutoAWQ write.
#![no_main]

use halfbyte_checkpoint::config;
use halfbyte_fuzz::{bounded, folder, write};
use halfbyte_llm::{Config, KvType};
use halfbyte_llm::arch::spec::Positions;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    for name in ["config.json", "quantize_config.json", "quant_config.json", "generation_config.json"] {
        let path = write(name, input);
        bounded(input, || {
            let _ = config::read(folder());
            if let Ok(config) = Config::from_folder(folder()) {
                let spec = &config.spec;
                assert!(spec.heads.heads % spec.heads.kv_heads == 0 && spec.kv_bytes_per_token(KvType::F32) > 0);
                assert!(config.bos.iter().chain(&config.eos).all(|&id| (id as usize) < spec.vocab));
                for layer in &spec.layers {
                    if let Positions::Rope(rope) = &layer.attention.positions {
                        assert!(rope.frequencies.iter().all(|f| f.is_finite()));
                    }
                }
            }
        });
        if name != "config.json" {
            std::fs::remove_file(path).expect("it was just written");
        }
    }
    std::fs::remove_file(folder().join("config.json")).expect("it was written");
});
