//! Our own form: every format, there and back; labels against tensors; what lies.

use crate::support::{
    Random, Tensor, assert_names, format, listing, quantized, same, tensor, text_of, write_folder, write_layers,
};
use half::f16;
use halfbyte::format::FORMATS;
use halfbyte::format::reference::dequantize;
use halfbyte::{Float, Format, QTensor, StoredTensor, WeightFormat, Zeros};
use halfbyte_checkpoint::folder::check_target;
use halfbyte_checkpoint::safetensors::DType;
use halfbyte_checkpoint::{
    Conversion, Cut, GptqVersion, Job, LinearWeight, Part, Quantization, QuantizationConfig, Target, Weights, convert,
    inspect, verify, write_dense, write_model, write_part,
};
use std::path::Path;

const LAYERS: [&str; 2] = ["model.layers.0.mlp.up_proj", "model.layers.0.mlp.gate_proj"];
const SHAPE: [usize; 2] = [35, 101];

/// A tensor of every code, zero points to their limits, and an order of columns of its own if asked for.
fn random(seed: u64, format: WeightFormat, shape: [usize; 2], act_order: bool) -> QTensor {
    quantized(&mut Random(seed), format, shape, 0..=format.max_code() as usize + 1, act_order)
}

/// Writes a model of these layers, one of them dense if there is one only.
fn write(dir: &Path, layers: &[QTensor], target: Target) -> halfbyte_checkpoint::Result<()> {
    let [n, k] = [layers[0].n(), layers[0].k()];
    let tensors: Vec<Tensor> = LAYERS
        .iter()
        .map(|name| tensor(&format!("{name}.weight"), DType::F16, &[n, k], &vec![f16::ONE; n * k]))
        .chain([tensor("lm_head.weight", DType::F16, &[2, 3], &[f16::ONE; 6])])
        .collect();
    write_layers(dir, &tensors, &LAYERS.into_iter().zip(layers).collect::<Vec<_>>(), target)
}

fn read(dir: &Path, name: &str) -> halfbyte_checkpoint::Result<QTensor> {
    match Weights::open(dir)?.load_linear(name)?.weight {
        LinearWeight::Quantized(q) => Ok(q),
        LinearWeight::Dense { .. } => panic!("{name} is dense"),
    }
}

fn change(from: &Path, to: &Path, target: Target, channel_scale: Option<Float>) -> halfbyte_checkpoint::Result<()> {
    let conversion = Conversion { target, bits: None, group: None, channel_scale, requantize: false };
    convert(Job::new(&Weights::open(from)?, to), conversion).map(|_| ())
}

#[test]
fn every_format_is_read_as_it_was_written() {
    let dir = tempfile::tempdir().unwrap();
    for (i, name) in FORMATS.iter().enumerate() {
        let weight = format(name);
        let layers = [false, true].map(|act_order| random(i as u64, weight, SHAPE, act_order));
        let path = dir.path().join(name);
        write(&path, &layers, Target::Native).unwrap();
        for (layer, want) in LAYERS.iter().zip(&layers) {
            assert!(read(&path, layer).unwrap() == *want, "{name}: {layer}");
        }
        let weights = Weights::open(&path).unwrap();
        let inspection = inspect(&weights).unwrap();
        assert_eq!(inspection.findings, [], "{name}");
        let module = inspection.modules.iter().find(|module| module.name == LAYERS[1]).unwrap();
        let grouped = weight.group.count(SHAPE[1]) > 1;
        assert_eq!((module.scheme, module.shape, module.act_order), ("halfbyte", Some(SHAPE), grouped), "{name}");
        assert_eq!(module.format, Format { weight, act: halfbyte::Act::A16 }.to_string());
        // The same model from the same model is the same file.
        let again = dir.path().join(format!("{name}-again"));
        change(&path, &again, Target::Native, None).unwrap();
        assert_eq!(listing(&path), listing(&again));
        for file in listing(&path) {
            assert!(std::fs::read(path.join(&file)).unwrap() == std::fs::read(again.join(&file)).unwrap(), "{file}");
        }
    }
}

#[test]
fn the_config_names_what_differs_and_what_is_dense() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("both");
    let layers = ["w4a16-g32-si8", "w8a16"].map(|name| random(1, format(name), SHAPE, false));
    write(&path, &layers, Target::Native).unwrap();
    let weights = Weights::open(&path).unwrap();
    let Some(QuantizationConfig::Halfbyte(config)) = weights.quantization() else { panic!() };
    assert_eq!(config.format, "w4a16-g32-si8");
    assert_eq!(config.modules.iter().collect::<Vec<_>>(), [(&LAYERS[1].to_owned(), &"w8a16".to_owned())]);
    assert!(config.dense.is_empty());
    let path = dir.path().join("one");
    write(&path, &layers[..1], Target::Native).unwrap();
    let weights = Weights::open(&path).unwrap();
    let Some(QuantizationConfig::Halfbyte(config)) = weights.quantization() else { panic!() };
    assert_eq!(config.dense, [LAYERS[1]]);
    assert_eq!(inspect(&weights).unwrap().findings, []);
}

#[test]
fn labels_that_contradict_the_tensors_are_found_and_the_tensors_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m");
    let q = random(2, format("w4a16-g32"), SHAPE, false);
    write(&path, std::slice::from_ref(&q), Target::Native).unwrap();
    let config = std::fs::read_to_string(path.join("config.json")).unwrap();
    for (from, to, text) in [
        ("w4a16-g32", "w4a16-g64", "the config says w4a16-g64, but its tensors have w4a16-g32; read as w4a16-g32"),
        ("\"dense\": [", "\"dense\": [\"model.layers.0.mlp.up_proj\",", "the config's dense has it"),
        (LAYERS[1], "model.layers.7.x", "but its weight is stored as floats"),
    ] {
        let changed = config.replace(from, to);
        assert_ne!(changed, config);
        std::fs::write(path.join("config.json"), changed).unwrap();
        let findings = inspect(&Weights::open(&path).unwrap()).unwrap().findings;
        assert!(findings.len() == 1 && findings[0].text.contains(text), "{findings:?}");
        assert!(read(&path, LAYERS[0]).unwrap() == q);
    }
    for (from, to, parts) in [
        ("\"version\": 1", "\"version\": 2", ["quantization_config.version", "expected 1, got 2"]),
        ("w4a16-g32", "w5a16", ["quantization_config.format", "w5a16"]),
        ("\"modules\": {}", "\"modules\": {\"a\": 3}", ["quantization_config.modules.a", "got 3"]),
        ("\"modules\": {}", "\"modules\": [3]", ["quantization_config.modules", "expected an object"]),
        ("\"dense\": [", "\"dense\": [3, ", ["quantization_config.dense", "list of strings"]),
    ] {
        let changed = config.replace(from, to);
        assert_ne!(changed, config, "{from}");
        std::fs::write(path.join("config.json"), changed).unwrap();
        assert_names(&text_of(Weights::open(&path)), &parts);
    }
}

#[test]
fn a_part_of_every_format_has_the_numbers_of_the_whole() {
    let (dir, mut random_cuts) = (tempfile::tempdir().unwrap(), Random(7));
    let mut not_full = 0;
    for (i, name) in FORMATS.iter().enumerate() {
        let weight = format(name);
        let layers = [false, true].map(|act_order| random(i as u64, weight, SHAPE, act_order));
        let (path, part_path) = (dir.path().join(name), dir.path().join(format!("{name}-part")));
        write(&path, &layers, Target::Native).unwrap();
        // Two ranges, the second before the first.
        let mut ranges = |end: usize| {
            let middle = 1 + random_cuts.below(end - 2);
            vec![middle..end - random_cuts.below(end - middle), random_cuts.below(middle)..middle]
        };
        let cuts = [0, 1].map(|_| Cut { rows: ranges(SHAPE[0]), columns: ranges(SHAPE[1]), bias: true });
        let cut = |module: &str| LAYERS.iter().position(|layer| *layer == module).map(|at| cuts[at].clone());
        let (whole, part) = (Weights::open(&path).unwrap(), Part { rank: 1, size: 3, model: "m".to_owned() });
        write_part(Job::new(&whole, &part_path), &part, &cut).unwrap();
        let written = Weights::open(&part_path).unwrap();
        assert_eq!(written.part().unwrap(), Some(part), "{name}");
        assert_eq!(inspect(&written).unwrap().findings, [], "{name}");
        for ((layer, whole), Cut { rows, columns, .. }) in LAYERS.iter().zip(&layers).zip(&cuts) {
            let want = StoredTensor::from(whole).part(rows, columns).unwrap();
            not_full += usize::from(want.groups() > weight.group.count(want.k()));
            assert!(read(&part_path, layer).unwrap() == want, "{name}: {layer}");
        }
    }
    assert!(not_full > 10, "{not_full}");
}

#[test]
fn a_part_is_looked_at_and_made_into_nothing_else() {
    let (dir, weight) = (tempfile::tempdir().unwrap(), format("w4a16-g32"));
    let path = |name: &str| dir.path().join(name);
    write(&path("whole"), &[false, true].map(|act_order| random(1, weight, SHAPE, act_order)), Target::Native).unwrap();
    let (whole, part) = (Weights::open(path("whole")).unwrap(), Part { rank: 1, size: 3, model: "m".to_owned() });
    write_part(Job::new(&whole, &path("part")), &part, &|_| None).unwrap();
    let (source, to) = (Weights::open(path("part")).unwrap(), path("to"));
    let quantization = Quantization {
        target: Target::Native,
        format: &mut |_| Some(weight),
        quantize: &mut |_, _, _| Ok(random(1, weight, SHAPE, false)),
        dense: &mut |_| None,
        untied: None,
    };
    let conversion =
        Conversion { target: Target::Native, bits: None, group: None, channel_scale: None, requantize: false };
    let refusals = [
        text_of(write_model(Job::new(&source, &to), quantization)),
        text_of(write_dense(Job::new(&source, &to), Float::F32)),
        text_of(convert(Job::new(&source, &to), conversion)),
        text_of(write_part(Job::new(&source, &to), &part, &|_| None)),
        text_of(check_target(&source, &to, Target::Native, false)),
    ];
    for refusal in refusals {
        assert_names(&refusal, &["expected a whole model", "the part of rank 1 of 3", "give the whole model"]);
    }
    assert!(!to.exists());
    assert_eq!(inspect(&source).unwrap().findings, []);
    assert!(verify(&whole, &source, &mut |_, _, _| true).unwrap().equal());
}

/// A module with one lie each: errors name the tensor and what was expected, and nothing panics.
#[test]
fn modules_that_lie_are_errors_that_say_where() {
    let i64s = |name: &str, values: &[i64]| tensor(&format!("m.{name}"), DType::I64, &[values.len()], values);
    let u8s = |name: &str, shape: &[usize], values: &[u8]| tensor(&format!("m.{name}"), DType::U8, shape, values);
    let codes = |shape: &[usize], words: &[i32]| tensor("m.codes", DType::I32, shape, words);
    let halfs = |name: &str, shape: &[usize], v: f32| {
        let count = shape.iter().product();
        tensor(&format!("m.{name}"), DType::F16, shape, &vec![f16::from_f32(v); count])
    };
    // Two rows of ten codes in groups of 5, on two levels with zero points.
    let good = || {
        vec![
            codes(&[2, 2], &[0x7654_3210, 0x98, -1, 0x12]),
            i64s("layout", &[2, 10, 4, 5]),
            halfs("scales", &[2], 0.5),
            u8s("factors", &[2, 2], &[1, 2, 8, 8]),
            u8s("zero_points", &[2, 2], &[8, 8, 0, 16]),
        ]
    };
    let load = |tensors: &[Tensor]| {
        let dir = tempfile::tempdir().unwrap();
        write_folder(dir.path(), tensors, "{}");
        read(dir.path(), "m")
    };
    let q = load(&good()).unwrap();
    assert_eq!((q.scales(), q.factors()), ([0.5, 1.0, 4.0, 4.0].as_slice(), Some([1, 2, 1, 1].as_slice())));
    assert_eq!(dequantize(&q)[..2], [-4.0, -3.5]);
    const SIZES: &str = "outputs and inputs from 1 on";
    let replaced: Vec<(Tensor, &[&str])> = vec![
        (i64s("layout", &[2, 10, 4]), &["m.layout", SIZES]),
        (i64s("layout", &[0, 10, 4, 5]), &["m.layout", SIZES, "[0, 10, 4, 5]"]),
        (i64s("layout", &[2, -10, 4, 5]), &["m.layout", SIZES]),
        (i64s("layout", &[2, i64::MAX, 4, 5]), &["m.layout", SIZES]),
        (i64s("layout", &[2, 10, 5, 5]), &["m.layout", "2, 3, 4 or 8 bits"]),
        (i64s("layout", &[2, 10, 4, -2]), &["m.layout", "-1 or 0"]),
        (i64s("layout", &[2, 10, 4, i64::MAX]), &["m.layout", "-1 or 0"]),
        (i64s("layout", &[3, 10, 4, 5]), &["m.codes", "[3, 2] by `layout`"]),
        (i64s("layout", &[2, 4_000_000_000, 4, 5]), &["m.codes", "[2, 500000000] by `layout`"]),
        (i64s("layout", &[2, 10, 4, 4]), &["m.factors", "[2, 3] by `layout`"]),
        (i64s("layout", &[2, 10, 4, -1]), &["m.factors", "[2, 1] by `layout`"]),
        (i64s("layout", &[2, 8, 8, 4]), &["m.zero_points", "U16 [2, 2] by `layout`"]),
        (i64s("layout", &[2, 10, 4, 5, 2]), &["m.layout", "more groups than the inputs would fill"]),
        (i64s("layout", &[2, 10, 4, 5, 11]), &["m.layout", "at most as many as inputs"]),
        (i64s("layout", &[2, 10, 4, -1, 3]), &["m.layout", SIZES]),
        (i64s("layout", &[2, 10, 4, 5, 3]), &["m.factors", "[2, 3] by `layout`"]),
        (i64s("layout", &[2, 10, 4, 5, 3, 3]), &["m.layout", "[6]"]),
        (tensor("m.layout", DType::I32, &[4], &[2i32, 10, 4, 5]), &["m.layout", "I64 [4]"]),
        (codes(&[2, 2], &[0, 0x198, 0, 0]), &["m.codes", "0 in the bits that hold no code"]),
        (tensor("m.codes", DType::U8, &[2, 2], &[0u8; 4]), &["m.codes", "I32"]),
        (halfs("scales", &[2, 2], 0.5), &["m.scales", "F16 or BF16 [2] by `layout`"]),
        (tensor("m.scales", DType::F32, &[2], &[0.5f32; 2]), &["m.scales", "F16 or BF16 [2]"]),
        (halfs("scales", &[2], f32::NAN), &["m", "finite"]),
        (u8s("factors", &[2, 2], &[1, 0, 1, 1]), &["m.factors", "from 1 to 16, not 0"]),
        (u8s("factors", &[2, 2], &[1, 17, 1, 1]), &["m.factors", "from 1 to 16, not 17"]),
        (u8s("factors", &[2, 2], &[1, 2, 9, 1]), &["m", "whole multiples", "row 1"]),
        (u8s("factors", &[4], &[1; 4]), &["m.factors", "[2, 2] by `layout`"]),
        (u8s("zero_points", &[2, 2], &[8, 17, 8, 8]), &["m", "zero points up to 16, got 17"]),
        (u8s("zero_points", &[2, 1], &[8, 8]), &["m.zero_points", "[2, 2] by `layout`"]),
        (tensor("m.zero_points", DType::U16, &[2, 2], &[8u16; 4]), &["m.zero_points", "U8 [2, 2]"]),
    ];
    for (changed, parts) in replaced {
        let mut tensors = good();
        let at = tensors.iter().position(|t| t.0 == changed.0).unwrap();
        tensors[at] = changed;
        assert_names(&text_of(load(&tensors)), parts);
    }
    let added: Vec<(Tensor, &[&str])> = vec![
        (halfs("offsets", &[2, 2], 0.5), &["m.offsets", "not both"]),
        (tensor("m.group_index", DType::I32, &[9], &[0i32; 9]), &["m.group_index", "I32 [10]"]),
        (tensor("m.group_index", DType::I32, &[10], &[2i32; 10]), &["m.group_index", "from 0 to 1, not 2 at 0"]),
        (tensor("m.group_index", DType::I32, &[10], &[-1i32; 10]), &["m.group_index", "not -1 at 0"]),
        (tensor("m.weight", DType::F16, &[2, 10], &[f16::ONE; 20]), &["either `weight` or `codes`"]),
    ];
    for (more, parts) in added {
        let mut tensors = good();
        tensors.push(more);
        assert_names(&text_of(load(&tensors)), parts);
    }
    // Without factors the scales are those of groups; with offsets instead of zero points factors have no meaning.
    let mut tensors = good();
    tensors.remove(3);
    assert_names(&text_of(load(&tensors)), &["m.scales", "[2, 2] by `layout`"]);
    let mut tensors = good();
    tensors[4] = tensor("m.offsets", DType::F16, &[2, 2], &[f16::ONE; 4]);
    assert_names(&text_of(load(&tensors)), &["m", "float offsets"]);
    let mut tensors = good();
    tensors.truncate(4);
    tensors[1] = i64s("layout", &[2, 8, 8, 4]);
    assert_names(&text_of(load(&tensors)), &["m", "two levels", "4 bits"]);
    // Groups that are not full, and nothing that says which columns they have.
    let partial = [codes(&[2, 2], &[0; 4]), i64s("layout", &[2, 10, 4, 5, 3]), halfs("scales", &[2, 3], 0.5)];
    assert_names(&text_of(load(&partial)), &["m.layout", "`group_index` beside groups that are not full"]);
    // A scale of the tensor that is not one.
    let mut tensors = good();
    tensors.truncate(2);
    tensors[1] = i64s("layout", &[2, 10, 4, 0]);
    tensors.push(tensor("m.scales", DType::F16, &[2, 1], &[f16::ONE, f16::ZERO]));
    assert_names(&text_of(load(&tensors)), &["m.scales", "the same scale throughout"]);
    for missing in ["scales", "layout"] {
        let tensors: Vec<Tensor> = good().into_iter().filter(|t| t.0 != format!("m.{missing}")).collect();
        assert!(load(&tensors).is_err(), "{missing}");
    }
}

#[test]
fn other_forms_become_ours_and_are_the_same_files_again() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let v2 = Target::Gptq(Some(GptqVersion::V2));
    for (name, target) in [
        ("w4a16-g32-asym", v2),
        ("w8a16-g64", v2),
        ("w3a16-g128", Target::CompressedTensors),
        ("w4a16-g32", Target::Onnx),
    ] {
        let layers = [3, 4].map(|seed| {
            let q = random(seed, format(name), [64, 128], false);
            // GPTQ's newer files hold zero points up to 15.
            let zeros = match q.zeros() {
                Zeros::Integer(z) => Zeros::Integer(z.iter().map(|&z| z.min(15)).collect()),
                other => other.clone(),
            };
            QTensor::new(q.format(), [64, 128], q.codes().to_vec(), q.scales().to_vec(), zeros, None).unwrap()
        });
        let [from, ours, back] = ["from", "ours", "back"].map(|step| path(&format!("{name}-{step}")));
        write(&from, &layers, target).unwrap();
        change(&from, &ours, Target::Native, None).unwrap();
        assert!(same(&from, &ours), "{name}");
        change(&ours, &back, target, None).unwrap();
        for file in listing(&from) {
            assert!(
                std::fs::read(from.join(&file)).unwrap() == std::fs::read(back.join(&file)).unwrap(),
                "{name}: {file}"
            );
        }
    }
}

/// To two levels where every scale is a multiple, from there to forms with f32 scales; else a refusal that says where.
#[test]
fn two_levels_come_and_go_without_loss_or_not_at_all() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let v2 = Target::Gptq(Some(GptqVersion::V2));
    let two = random(5, format("w4a16-g32-si8"), [64, 128], false);
    // Channel scales of few bits, so that the products are halfs too.
    let scales: Vec<f32> =
        (0..64 * 4).map(|at| (at / 4 + 1) as f32 / 64.0 * f32::from(two.factors().unwrap()[at])).collect();
    let one = |scales: Vec<f32>| {
        let codes = two.codes().to_vec();
        QTensor::new(format("w4a16-g32"), [64, 128], codes, scales, Zeros::Symmetric, None).unwrap()
    };
    write(&path("gptq"), &[one(scales.clone())], v2).unwrap();
    change(&path("gptq"), &path("ours"), Target::Native, Some(Float::F16)).unwrap();
    assert!(same(&path("gptq"), &path("ours")));
    let q = read(&path("ours"), LAYERS[0]).unwrap();
    assert_eq!((q.format(), q.scales()), (format("w4a16-g32-si8"), scales.as_slice()));
    for (name, target) in [("ct", Target::CompressedTensors), ("onnx", Target::Onnx), ("back", v2)] {
        change(&path("ours"), &path(name), target, None).unwrap();
        assert!(same(&path("ours"), &path(name)), "{name}");
    }
    // Products of 15 bits are no halfs.
    let odd: Vec<f32> = (0..64 * 4).map(|at| (1.0 + 2f32.powi(-10)) * (1 + at % 4) as f32).collect();
    let two =
        QTensor::new(format("w4a16-g32-si8"), [64, 128], two.codes().to_vec(), odd, Zeros::Symmetric, None).unwrap();
    write(&path("odd"), std::slice::from_ref(&two), Target::Native).unwrap();
    assert_names(&text_of(change(&path("odd"), &path("to"), v2, None)), &["up_proj", "exact in f16", "row 0"]);
    change(&path("odd"), &path("odd-ct"), Target::CompressedTensors, None).unwrap();
    assert!(same(&path("odd"), &path("odd-ct")));
    change(&path("odd-ct"), &path("odd-ours"), Target::Native, Some(Float::F16)).unwrap();
    assert!(read(&path("odd-ours"), LAYERS[0]).unwrap() == two);
    // No multiple of one scale in row 9.
    let mut scales = scales;
    scales[9 * 4 + 2] = 0.377;
    scales.iter_mut().for_each(|s| *s = Float::F16.round(*s));
    write(&path("free"), &[one(scales)], v2).unwrap();
    let text = text_of(change(&path("free"), &path("to"), Target::Native, Some(Float::F16)));
    assert_names(&text, &["up_proj", "whole multiples of one f16 number", "row 9"]);
    assert_names(
        &text_of(change(&path("gptq"), &path("to"), v2, Some(Float::F16))),
        &["up_proj", "one level, not two"],
    );
}
