//! What the targets share: a folder in memory, and a bound on what an input may allocate.

use cap::Cap;
use halfbyte_checkpoint::{Weights, inspect, linears};
use halfbyte_llm::Config;
use halfbyte_llm::check::contradictions;
use std::alloc::System;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use tempfile::TempDir;

#[global_allocator]
static ALLOCATOR: Cap<System> = Cap::new(System, usize::MAX);

/// Runs `read` with at most `64 · input + 2 MiB` of new memory. More is refused, which ends the process: a finding. The
/// constant has room for the cache of words that every BPE tokenizer begins with, 1.2 MB.
pub fn bounded<T>(input: &[u8], read: impl FnOnce() -> T) -> T {
    bounded_by(64 * input.len() + (2 << 20), read)
}

/// Runs `read` with at most so many bytes of new memory.
pub fn bounded_by<T>(room: usize, read: impl FnOnce() -> T) -> T {
    ALLOCATOR.set_limit(ALLOCATOR.allocated() + room).expect("there is room");
    let result = read();
    ALLOCATOR.set_limit(usize::MAX).expect("there is room");
    result
}

/// The folder of this process, made once where the system keeps temporary files.
pub fn folder() -> &'static Path {
    static FOLDER: OnceLock<TempDir> = OnceLock::new();
    FOLDER.get_or_init(|| TempDir::new().expect("a folder for the inputs")).path()
}

/// Writes a file of the folder.
pub fn write(name: &str, content: &[u8]) -> PathBuf {
    let path = folder().join(name);
    // Another file than the one before, which may still be mapped.
    let _ = std::fs::remove_file(&path);
    std::fs::write(&path, content).expect("the folder takes files");
    path
}

/// A safetensors file: the length of its header, the header, the data.
pub fn safetensors(header: &[u8], data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header, data].concat()
}

/// A zip archive of these entries, stored as they are.
pub fn zip(entries: &[(&str, &[u8])]) -> Vec<u8> {
    let (mut file, mut directory) = (Vec::new(), Vec::new());
    for (name, data) in entries {
        let offset = file.len() as u32;
        let sizes = [0, data.len() as u32, data.len() as u32].map(u32::to_le_bytes).concat();
        let name_bytes = (name.len() as u16).to_le_bytes();
        file.extend([b"PK\x03\x04", &[0; 10][..], &sizes, &name_bytes, &[0; 2], name.as_bytes(), data].concat());
        let places = [&name_bytes[..], &[0; 12], &offset.to_le_bytes()].concat();
        directory.extend([b"PK\x01\x02", &[0; 12][..], &sizes, &places, name.as_bytes()].concat());
    }
    let (start, count) = (file.len() as u32, (entries.len() as u16).to_le_bytes());
    let sizes = [directory.len() as u32, start].map(u32::to_le_bytes).concat();
    [&file, &directory, &b"PK\x05\x06\0\0\0\0"[..], &count, &count, &sizes, &[0; 2]].concat()
}

/// Opens a model, describes it, and loads every module.
pub fn use_weights(path: &Path, input_bytes: usize) {
    let Ok(weights) = Weights::open(path) else { return };
    let _ = inspect(&weights);
    let _ = weights.values(|_, _| true);
    if let Ok(config) = Config::from_weights(&weights) {
        let found = contradictions(&config, &weights);
        assert!(found.into_findings().iter().all(|finding| !finding.subject.is_empty() && !finding.text.is_empty()));
    }
    let _ = linears(&weights);
    for name in weights.modules() {
        if let Ok(linear) = weights.load_linear(name) {
            let [n, k] = linear.weight.shape();
            // A weight takes two bits at least.
            assert!(n.checked_mul(k).is_some_and(|elements| elements <= 4 * input_bytes));
        }
        weights.release(name);
    }
}
