//! A `tokenizer.json` of these bytes: read, and used.
#![no_main]

use halfbyte_fuzz::{bounded, write};
use halfbyte_llm::Tokenizer;
use libfuzzer_sys::fuzz_target;

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
        bounded(input, || {
            let Ok(tokenizer) = Tokenizer::from_file(&path) else { return };
            let _ = tokenizer.vocab_size();
            let ids = tokenizer.encode(TEXT).unwrap_or_else(|_| (0..300).collect());
            let _ = tokenizer.decode(&ids);
            let mut stream = tokenizer.stream();
            for &id in &ids {
                let _ = stream.push(id);
            }
            let _ = stream.finish();
        });
    }
);
