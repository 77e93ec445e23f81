//! What several tests need: golden files, folders of tensors, random numbers.

use halfbyte_checkpoint::Checkpoint;
use halfbyte_checkpoint::safetensors::{DType, TensorSpec, create};
use std::path::{Path, PathBuf};

/// The repository, or what `HALFBYTE_ROOT` names instead: what of it was brought to another machine.
fn root() -> PathBuf {
    let brought = std::env::var_os("HALFBYTE_ROOT").map(PathBuf::from);
    brought.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../.."))
}

/// A path in the crate's test data.
pub fn testdata(name: &str) -> PathBuf {
    root().join("crates/halfbyte-checkpoint/testdata").join(name)
}

/// The model that ships with the project.
pub fn model() -> PathBuf {
    root().join("models/stdlib-11m")
}

/// The golden GPTQ files of complete modules.
pub fn goldens() -> Vec<(String, Checkpoint)> {
    let mut found: Vec<PathBuf> = std::fs::read_dir(testdata("gptq"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "safetensors"))
        .filter(|path| !path.to_string_lossy().contains("informative"))
        .collect();
    found.sort();
    assert_eq!(found.len(), 20);
    found
        .into_iter()
        .map(|path| (path.file_stem().unwrap().to_string_lossy().into_owned(), Checkpoint::open(&path).unwrap()))
        .collect()
}

/// A tensor with its data.
pub type Tensor = (String, DType, Vec<usize>, Vec<u8>);

/// A tensor of a golden file, under another name.
pub fn taken(from: &Checkpoint, name: &str, new_name: &str) -> Tensor {
    let info = from.info(name).unwrap();
    (new_name.to_owned(), info.dtype, info.shape.to_vec(), from.bytes(name).unwrap().to_vec())
}

/// A tensor of these elements.
pub fn tensor<T: bytemuck::NoUninit>(name: &str, dtype: DType, shape: &[usize], elements: &[T]) -> Tensor {
    (name.to_owned(), dtype, shape.to_vec(), bytemuck::cast_slice(elements).to_vec())
}

/// Writes tensors, and a config.json unless it is empty.
pub fn write_folder(dir: &Path, tensors: &[Tensor], config: &str) {
    let specs: Vec<TensorSpec> = tensors
        .iter()
        .map(|(name, dtype, shape, _)| TensorSpec { name: name.clone(), dtype: *dtype, shape: shape.clone() })
        .collect();
    let mut writer = create(dir, &specs, u64::MAX).unwrap();
    for (name, _, _, data) in tensors {
        writer.write(name, data).unwrap();
    }
    writer.finish().unwrap();
    if !config.is_empty() {
        std::fs::write(dir.join("config.json"), config).unwrap();
    }
}

/// Names of everything in a folder, sorted.
pub fn listing(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// A small generator of reproducible numbers.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as u32
    }

    pub fn below(&mut self, bound: usize) -> usize {
        self.next() as usize % bound
    }
}

/// The text of an error, and of its causes.
pub fn text_of<T>(result: halfbyte_checkpoint::Result<T>) -> String {
    match result {
        Ok(_) => panic!("expected an error"),
        Err(e) => e.to_string(),
    }
}

/// Asserts that a text has all of these in it.
#[track_caller]
pub fn assert_names(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "expected `{part}` in: {text}");
    }
}
