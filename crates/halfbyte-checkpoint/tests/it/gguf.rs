//! GGUF: blocks, headers, the translation of a Llama model, the writer.

mod blocks;
mod header;
mod model;
mod tokenizer;
mod writer;

use crate::support::testdata;
use halfbyte_checkpoint::gguf::{Header, parse};

/// The tiny model, and its bytes.
fn tiny() -> (Vec<u8>, Header) {
    let path = testdata("gguf/tiny_llama.gguf");
    let bytes = std::fs::read(&path).unwrap();
    let header = parse(&bytes, &path).unwrap();
    (bytes, header)
}
