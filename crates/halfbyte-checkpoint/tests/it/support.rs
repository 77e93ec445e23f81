//! What several tests need: golden files, folders of tensors, random numbers.

use halfbyte::random::splitmix64;
use halfbyte::{Format, Group, QTensor, WeightFormat, Zero, Zeros};
use halfbyte_checkpoint::config::{self, QuantizationConfig};
use halfbyte_checkpoint::safetensors::{DType, TensorSpec, create};
use halfbyte_checkpoint::verify::verify;
use halfbyte_checkpoint::{Checkpoint, Finding, Job, LinearWeight, Quantization, Target, Weights, write_model};
use serde_json::{Map, Value};
use std::ops::RangeInclusive;
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

/// Random numbers of a seed.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u32 {
        (splitmix64(&mut self.0) >> 32) as u32
    }

    pub fn below(&mut self, bound: usize) -> usize {
        self.next() as usize % bound
    }
}

/// A tensor whose codes take every value and whose zero points lie between these, with an order of columns of its own if asked for.
pub fn quantized(
    random: &mut Random,
    format: WeightFormat,
    [n, k]: [usize; 2],
    points: RangeInclusive<usize>,
    act_order: bool,
) -> QTensor {
    let groups = format.group.count(k);
    let codes = (0..n * k).map(|_| random.below(format.max_code() as usize + 1) as u8).collect();
    let exact = |v: usize, by: f32| format.scale.round(v as f32 / by);
    let width = points.end() - points.start() + 1;
    let mut points: Vec<u16> = (0..n * groups).map(|_| (points.start() + random.below(width)) as u16).collect();
    let mut scales: Vec<f32> = (0..n * groups).map(|_| exact(1 + random.below(999), 1e4)).collect();
    if format.group == Group::Tensor {
        let (scale, point) = (scales[0], points[0]);
        scales.fill(scale);
        points.fill(point);
    }
    if let Some(channel) = format.channel_scale {
        // Up to 8 fits every zero point.
        let of_row = |i: usize| channel.round((i + 1) as f32 / 1e3);
        scales = (0..n * groups).map(|at| of_row(at / groups) * (1 + random.below(8)) as f32).collect();
    }
    let zeros = match format.zero {
        Zero::Symmetric => Zeros::Symmetric,
        Zero::Integer => Zeros::Integer(points),
        Zero::Float => Zeros::Float((0..n * groups).map(|_| exact(random.below(999), 7e3)).collect()),
    };
    let index = act_order.then(|| {
        let mut index: Vec<u32> = (0..k).map(|j| (j / format.group.len(k)) as u32).collect();
        (1..k).rev().for_each(|j| index.swap(j, random.below(j + 1)));
        index
    });
    QTensor::new(format, [n, k], codes, scales, zeros, index).unwrap()
}

/// Writes a model of these tensors in a form, some of which become these layers.
pub fn write_layers(
    dir: &Path,
    tensors: &[Tensor],
    layers: &[(&str, &QTensor)],
    target: Target,
) -> halfbyte_checkpoint::Result<()> {
    let dense = dir.with_extension("dense");
    std::fs::create_dir(&dense).unwrap();
    write_folder(&dense, tensors, r#"{"model_type": "llama"}"#);
    let layer = |name: &str| layers.iter().find(|(layer, _)| *layer == name).map(|(_, q)| *q);
    let quantization = Quantization {
        target,
        format: &mut |module| layer(module.name).map(QTensor::format),
        quantize: &mut |module, _, _| Ok(layer(module.name).unwrap().clone()),
        dense: &mut |_| None,
        untied: None,
    };
    write_model(Job::new(&Weights::open(&dense).unwrap(), dir), quantization).map(|_| ())
}

/// The format of weights by its name.
pub fn format(name: &str) -> WeightFormat {
    name.parse::<Format>().unwrap().weight
}

/// Writes a folder and loads its module `m`.
pub fn load(tensors: &[Tensor], config: &str) -> (QTensor, Vec<f32>, Vec<Finding>) {
    let dir = tempfile::tempdir().unwrap();
    write_folder(dir.path(), tensors, config);
    let weights = Weights::open(dir.path()).unwrap();
    let loaded = weights.load_linear("m").unwrap();
    let LinearWeight::Quantized(q) = loaded.weight else { panic!("expected a quantised weight") };
    (q, loaded.bias.unwrap_or_default(), loaded.findings)
}

/// The error of loading the module `m` of such a folder.
pub fn refusal(tensors: &[Tensor], config: &str) -> halfbyte_checkpoint::Error {
    let dir = tempfile::tempdir().unwrap();
    write_folder(dir.path(), tensors, config);
    Weights::open(dir.path()).and_then(|weights| weights.load_linear("m").map(drop)).unwrap_err()
}

/// A config with this quantisation, read.
pub fn parse_config(fields: &str) -> halfbyte_checkpoint::Result<Option<QuantizationConfig>> {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), format!("{{\"quantization_config\": {fields}}}")).unwrap();
    config::read(dir.path())
}

/// A file in JSON.
pub fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// The config of the model that ships with the project.
pub fn model_config() -> Map<String, Value> {
    let Value::Object(config) = read_json(&model().join("config.json")) else { panic!("an object") };
    config
}

/// Whether two models have the same weights.
pub fn same(a: &Path, b: &Path) -> bool {
    verify(&Weights::open(a).unwrap(), &Weights::open(b).unwrap(), &mut |_, _, _| true).unwrap().equal()
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
pub fn assert_names(text: &(impl std::fmt::Display + ?Sized), parts: &[&str]) {
    let text = text.to_string();
    for part in parts {
        assert!(text.contains(part), "expected `{part}` in: {text}");
    }
}
