//! A `tokenizer.json` of these bytes: read, and used.
#![no_main]

use halfbyte_fuzz::{bounded_by, write};
use halfbyte_llm::Tokenizer;
use libfuzzer_sys::fuzz_target;
use std::time::{Duration, Instant};

const TEXT: &str = "def read(self):\n\treturn  'Grüße, 東京 🙂' + \u{0}\u{301}<|endoftext|> aaaaaaaaaaaaaaaaaaaaaaaa";

fuzz_target!(
    init: {
        // The crate turns panics of the one that it builds on into errors: only what passes it is a finding.
        std::panic::set_hook(Box::new(|panic| {
            if panic.location().is_some_and(|place| place.file().contains("crates/halfbyte")) {
                eprintln!("{panic}");
            }
        }));
    },
    |input: &[u8]| {
        let path = write("tokenizer.json", input);
        let begun = Instant::now();
        // What a file may make of a text of a hundred bytes is bounded for itself.
        bounded_by(64 * input.len() + (64 << 20), || {
            let Ok(tokenizer) = Tokenizer::from_file(&path) else { return };
            let _ = tokenizer.vocab_size();
            let ids = tokenizer.encode(TEXT).unwrap_or_else(|_| (0..300).collect());
            let _ = tokenizer.decode(&ids);
            let mut stream = tokenizer.stream();
            for &id in &ids {
                let _ = stream.push(id);
            }
            let _ = stream.finish();
            let _ = tokenizer.encode_prompt_within(TEXT, Some(0), 8);
        });
        assert!(begun.elapsed() < Duration::from_secs(2), "took {:?}", begun.elapsed());
    }
);
