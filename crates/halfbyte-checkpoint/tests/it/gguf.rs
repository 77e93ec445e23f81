//! GGUF: blocks, headers, the translation of a Llama model, the writer.

mod blocks;
mod header;
mod model;
mod products;
mod tokenizer;
mod writer;

use crate::support::{assert_names, testdata, text_of};
use halfbyte_checkpoint::Checkpoint;
use halfbyte_checkpoint::gguf::{Header, parse};

/// The tiny model, and its bytes.
fn tiny() -> (Vec<u8>, Header) {
    let path = testdata("gguf/tiny_llama.gguf");
    let bytes = std::fs::read(&path).unwrap();
    let header = parse(&bytes, &path).unwrap();
    (bytes, header)
}

/// A file is told by what it begins with, and found in a folder by its ending.
#[test]
fn a_file_is_read_under_any_name() {
    let (bytes, _) = tiny();
    let dir = tempfile::tempdir().unwrap();
    let other = dir.path().join("weights.bin");
    std::fs::write(&other, &bytes).unwrap();
    let tensors = |path: &std::path::Path| Checkpoint::open(path).map(|c| c.tensors().count());
    let count = tensors(&testdata("gguf/tiny_llama.gguf")).unwrap();
    assert_eq!((tensors(&other).unwrap(), count > 20), (count, true));
    let folder = dir.path().join("folder");
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("Tiny-Llama-Q8_0.GGUF"), &bytes).unwrap();
    assert_eq!(tensors(&folder).unwrap(), count);
    std::fs::write(folder.join("another.gguf"), &bytes).unwrap();
    assert_names(&text_of(tensors(&folder)), &["several"]);
}
