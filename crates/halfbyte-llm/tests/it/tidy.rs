//! An architecture is data: its file names no device, rank or format, and is short.

use halfbyte_llm::arch::ARCHITECTURES;
use std::path::Path;

/// What an architecture knows nothing of.
const UNKNOWN: &[&str] = &[
    "cuda",
    "cpu::",
    "Cpu",
    "Gpu",
    "device",
    "shard",
    "Shard",
    "comm",
    "rank",
    "Format",
    "QTensor",
    "crate::decoder",
    "load",
];

/// Files of the folder that are not one of an architecture.
const SHARED: &[&str] = &["mod", "experts", "rename", "rope", "sizes", "spec", "windows"];

const MOST_LINES: usize = 120;

#[test]
fn architectures_name_no_device_rank_or_format() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/arch");
    let mut architectures = 0;
    for entry in std::fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
        for (line, word) in code.flat_map(|line| UNKNOWN.iter().map(move |word| (line, word))) {
            assert!(!line.contains(word), "{}: {line}", path.display());
        }
        if !SHARED.contains(&path.file_stem().unwrap().to_str().unwrap()) {
            architectures += 1;
            let lines = text.lines().count();
            assert!(lines <= MOST_LINES, "{}: {lines} lines", path.display());
        }
    }
    assert_eq!(architectures, ARCHITECTURES.len());
}
