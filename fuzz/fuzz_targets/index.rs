//! An index of these bytes beside two shards.
#![no_main]

use halfbyte_checkpoint::Checkpoint;
use halfbyte_fuzz::{bounded, folder, safetensors, write};
use libfuzzer_sys::fuzz_target;

fuzz_target!(
    init: {
        for name in ["a", "b"] {
            let header = format!(r#"{{"{name}":{{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}}}"#);
            write(&format!("{name}.safetensors"), &safetensors(header.as_bytes(), &[1, 2]));
        }
    },
    |input: &[u8]| {
        write("model.safetensors.index.json", input);
        bounded(input, || {
            if let Ok(checkpoint) = Checkpoint::open(folder()) {
                // Nothing but the two shards can have been opened.
                assert!(checkpoint.files().all(|file| file.parent() == Some(folder())));
                assert!(checkpoint.tensor_names().all(|name| name == "a" || name == "b"));
            }
        });
    }
);
