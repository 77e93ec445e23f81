//! Tests of models on a CPU, one binary; `cuda` has those on a GPU, and `bounds` those that limit the memory of their process.

mod architectures;
mod calibrate;
mod chat;
mod config;
mod config_fields;
mod config_of_each;
mod every_architecture;
mod gguf;
mod gguf_read_only;
mod gpt_oss;
mod kl;
mod malicious;
mod random;
mod reference_model;
mod tensor_parallel;
mod text;
mod tidy;
mod weights;

use std::path::{Path, PathBuf};

/// The tiny model of an architecture.
fn architecture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/architectures").join(name)
}

/// The small real model.
fn stdlib() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/stdlib-11m")
}
