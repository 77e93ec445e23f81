//! compressed-tensors modules against files of another program, and against a packer of the tests' own.

use crate::support::{Tensor, assert_names, model, taken, tensor, testdata, text_of, write_folder};
use half::{bf16, f16};
use halfbyte::format::reference::dequantize;
use halfbyte::quantize::{Rtn, rtn};
use halfbyte::{Float, Floats, Group, QTensor, WeightFormat, Zero, Zeros};
use halfbyte_checkpoint::Checkpoint;
use halfbyte_checkpoint::config::{CompressedTensorsStrategy, read};
use halfbyte_checkpoint::safetensors::DType;
use halfbyte_checkpoint::{
    CompressedTensorsConfig, Error, Finding, Job, LinearWeight, ModuleKind, QuantizationConfig, Weights, inspect,
    linears, write_dense,
};
use std::path::PathBuf;

/// A `quantization_config` of one group with these weights' settings.
fn config(weights: &str) -> String {
    with_groups(&format!(r#"{{"group_0": {{"targets": ["Linear"], "weights": {weights}}}}}"#))
}

pub fn with_groups(groups: &str) -> String {
    format!(
        r#"{{"quantization_config": {{"quant_method": "compressed-tensors", "format": "pack-quantized", "version": "0.9.0",
        "ignore": ["lm_head"], "config_groups": {groups}}}}}"#
    )
}

fn load(tensors: &[Tensor], config: &str) -> (QTensor, Vec<Finding>) {
    let dir = tempfile::tempdir().unwrap();
    write_folder(dir.path(), tensors, config);
    let weights = Weights::open(dir.path()).unwrap();
    let loaded = weights.load_linear("m").unwrap();
    let LinearWeight::Quantized(q) = loaded.weight else { panic!("expected a quantised weight") };
    (q, loaded.findings)
}

fn refusal(tensors: &[Tensor], config: &str) -> Error {
    let dir = tempfile::tempdir().unwrap();
    write_folder(dir.path(), tensors, config);
    Weights::open(dir.path()).and_then(|weights| weights.load_linear("m").map(drop)).unwrap_err()
}

#[track_caller]
fn finds(findings: &[Finding], parts: &[&str]) {
    assert_eq!(findings.len(), 1, "{findings:?}");
    assert_eq!(findings[0].subject, "m");
    assert_names(&findings[0].text, parts);
}

// ---- Files of compressed-tensors 0.20.0 ----

pub struct Golden {
    pub name: String,
    pub file: Checkpoint,
    pub bits: u32,
    sym: bool,
    pub group: Group,
    pub dtype: Float,
}

pub fn goldens() -> Vec<Golden> {
    let mut paths: Vec<PathBuf> =
        std::fs::read_dir(testdata("compressed_tensors")).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.file_name().unwrap().to_string_lossy().starts_with("ct_"));
    paths.sort();
    assert_eq!(paths.len(), 16);
    let golden = |path: &PathBuf| {
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        let parts: Vec<&str> = name.split('_').collect();
        let &["ct", width, symmetry, group, dtype] = parts.as_slice() else { panic!("{name}") };
        Golden {
            file: Checkpoint::open(path).unwrap(),
            bits: width[1..].parse().unwrap(),
            sym: symmetry == "sym",
            group: if group == "ch" { Group::Channel } else { Group::Size(group[1..].parse().unwrap()) },
            dtype: match dtype {
                "fp16" => Float::F16,
                "bf16" => Float::BF16,
                _ => Float::F32,
            },
            name,
        }
    };
    paths.iter().map(golden).collect()
}

impl Golden {
    pub fn tensors(&self) -> Vec<Tensor> {
        let parts = ["weight_packed", "weight_scale", "weight_shape", "weight_zero_point"];
        let present = parts.into_iter().filter(|part| self.file.contains(part));
        present.map(|part| taken(&self.file, part, &format!("m.{part}"))).collect()
    }

    pub fn config(&self) -> String {
        let (strategy, size) = match self.group {
            Group::Size(size) => ("group", size.to_string()),
            _ => ("channel", "null".to_owned()),
        };
        config(&format!(
            r#"{{"num_bits": {}, "type": "int", "symmetric": {}, "strategy": "{strategy}", "group_size": {size}}}"#,
            self.bits, self.sym
        ))
    }

    /// The file's signed values, with `2^(b−1)` added.
    fn biased(&self, name: &str) -> Vec<u8> {
        let middle = 1i16 << (self.bits - 1);
        self.file.bytes(name).unwrap().iter().map(|&v| (i16::from(v as i8) + middle) as u8).collect()
    }

    fn check(&self, q: &QTensor, bits: u32, context: &str) {
        let shift = (1i16 << (bits - 1)) - (1i16 << (self.bits - 1));
        let shifted = |name: &str| -> Vec<i16> { self.biased(name).iter().map(|&c| i16::from(c) + shift).collect() };
        let codes: Vec<i16> = q.codes().iter().map(|&c| i16::from(c)).collect();
        assert_eq!(codes, shifted("q"), "{context}");
        let zero = if self.sym { Zero::Symmetric } else { Zero::Integer };
        assert_eq!(
            q.format(),
            WeightFormat { bits, group: self.group, zero, scale: self.dtype, channel_scale: None },
            "{context}"
        );
        assert_eq!(q.scales(), self.file.floats("weight_scale").unwrap().to_f32(), "{context}");
        let zeros = shifted("zero_point");
        assert_eq!(zeros.len(), q.n() * q.groups());
        for (at, &zero) in zeros.iter().enumerate() {
            assert_eq!(q.zero_point(at / q.groups(), at % q.groups()), Some(zero as u32), "{context}");
        }
        // (q − zero) · scale, rounded once to the scale's type.
        let expected = self.file.floats("decompressed").unwrap().to_f32();
        for (at, (&value, &expected)) in dequantize(q).iter().zip(&expected).enumerate() {
            let got = match self.dtype {
                Float::F16 => f16::from_f64(value).to_f32(),
                Float::BF16 => bf16::from_f64(value).to_f32(),
                Float::F32 => value as f32,
            };
            assert_eq!(got, expected, "{context} at {at}");
        }
        assert_eq!(expected.len(), q.n() * q.k());
    }
}

#[test]
fn files_of_another_program_are_read_to_their_exact_values() {
    for golden in goldens() {
        let (q, findings) = load(&golden.tensors(), &golden.config());
        assert_eq!(findings, [], "{}", golden.name);
        golden.check(&q, golden.bits, &golden.name);
        // The tensors tell all of it.
        let (without, findings) = load(&golden.tensors(), "");
        assert_eq!((without, findings.as_slice()), (q, [].as_slice()), "{}", golden.name);
    }
}

#[test]
fn signed_bytes_are_read_as_8_bits() {
    for golden in goldens() {
        let file = &golden.file;
        let mut tensors = vec![taken(file, "q", "m.weight"), taken(file, "weight_scale", "m.weight_scale")];
        // Symmetric ones may hold zero points too: 0 throughout.
        tensors.push(taken(file, "zero_point", "m.weight_zero_point"));
        let config = golden.config().replace("pack-quantized", "int-quantized");
        let (q, findings) = load(&tensors, &config);
        golden.check(&q, 8, &golden.name);
        if golden.bits == 8 {
            assert_eq!(findings, [], "{}", golden.name);
        } else {
            finds(&findings, &["the config says 4 bits", "`weight` holds 8", "read as 8 bits"]);
        }
        if golden.sym {
            let (without, _) = load(&tensors[..2], &config);
            assert_eq!(without, q, "{}", golden.name);
        }
    }
}

#[test]
fn every_width_and_length_is_unpacked_along_both_dimensions() {
    let file = Checkpoint::open(testdata("compressed_tensors/pack_to_int32_all_widths.safetensors")).unwrap();
    for bits in 1..=8u32 {
        for length in [7usize, 32, 40, 64] {
            let settings = format!(r#"{{"num_bits": {bits}, "symmetric": false, "strategy": "channel"}}"#);
            let signed = |name: &str| -> Vec<u16> {
                let middle = 1i16 << (bits - 1);
                file.bytes(name).unwrap().iter().map(|&v| (i16::from(v as i8) + middle) as u16).collect()
            };
            // Codes, along the second.
            let name = format!("b{bits}.dim1.n{length}");
            let tensors = [
                taken(&file, &format!("{name}.packed"), "m.weight_packed"),
                tensor("m.weight_shape", DType::I64, &[2], &[5i64, length as i64]),
                tensor("m.weight_scale", DType::F32, &[5, 1], &[1f32; 5]),
            ];
            if !matches!(bits, 2 | 3 | 4 | 8) {
                let error = refusal(&tensors, &config(&settings));
                assert!(matches!(error, Error::Unsupported { .. }), "{error}");
                assert_names(
                    &error.to_string(),
                    &["`m.weight_packed`", &format!("codes of {bits} bits"), "2, 3, 4, 8"],
                );
                continue;
            }
            let (q, findings) = load(&tensors, &config(&settings));
            // 40 codes of 3 bits take four words in either packing.
            let either = bits == 3 && length == 40;
            if either {
                finds(&findings[..1], &["two packings", "as a dense stream"]);
            }
            finds(&findings[usize::from(either)..], &["not symmetric, but there are none", "read as symmetric"]);
            let codes: Vec<u16> = q.codes().iter().map(|&c| u16::from(c)).collect();
            assert_eq!(codes, signed(&format!("{name}.values")), "{name}");

            // Zero points, along the first.
            let name = format!("b{bits}.dim0.n{length}");
            let settings =
                format!(r#"{{"num_bits": {bits}, "symmetric": false, "strategy": "group", "group_size": 32}}"#);
            let words = 5 * bits as usize;
            let tensors = [
                tensor("m.weight_packed", DType::I32, &[length, words], &vec![0i32; length * words]),
                tensor("m.weight_shape", DType::I64, &[2], &[length as i64, 160]),
                tensor("m.weight_scale", DType::F32, &[length, 5], &vec![1f32; length * 5]),
                taken(&file, &format!("{name}.packed"), "m.weight_zero_point"),
            ];
            let (q, findings) = load(&tensors, &config(&settings));
            assert_eq!(findings, [], "{name}");
            assert_eq!(*q.zeros(), Zeros::Integer(signed(&format!("{name}.values"))), "{name}");
        }
    }
}

// ---- A packer of the tests' own ----

/// Codes `[rows, columns]` to words along the columns: code `j` at bit `j·b`, or whole codes in each word.
fn packed(codes: &[u8], columns: usize, bits: usize, whole: bool) -> (usize, Vec<i32>) {
    let per_word = 32 / bits;
    let words = if whole { columns.div_ceil(per_word) } else { (columns * bits).div_ceil(32) };
    let mut out = Vec::new();
    for row in codes.chunks(columns) {
        let mut line = vec![0u32; words];
        for (j, &code) in row.iter().enumerate() {
            for bit in 0..bits {
                let at = if whole { j / per_word * 32 + j % per_word * bits + bit } else { j * bits + bit };
                line[at / 32] |= u32::from(code >> bit & 1) << (at % 32);
            }
        }
        out.extend(line.into_iter().map(|word| word as i32));
    }
    (words, out)
}

fn transposed<T: Copy>(values: &[T], rows: usize, columns: usize) -> Vec<T> {
    (0..columns).flat_map(|c| (0..rows).map(move |r| values[r * columns + c])).collect()
}

/// A module's tensors, packed.
pub fn pack(name: &str, q: &QTensor, whole: bool) -> Vec<Tensor> {
    let (n, k, groups, bits) = (q.n(), q.k(), q.groups(), q.format().bits as usize);
    let part = |part: &str| format!("{name}.{part}");
    let (words, stream) = packed(q.codes(), k, bits, whole);
    let shape: &[usize] = if q.format().group == Group::Tensor { &[1] } else { &[n, groups] };
    let scales = &q.scales()[..shape.iter().product()];
    let f16s: Vec<f16> = scales.iter().map(|&s| f16::from_f32(s)).collect();
    let bf16s: Vec<bf16> = scales.iter().map(|&s| bf16::from_f32(s)).collect();
    let mut tensors = vec![
        tensor(&part("weight_packed"), DType::I32, &[n, words], &stream),
        tensor(&part("weight_shape"), DType::I64, &[2], &[n as i64, k as i64]),
        match q.format().scale {
            Float::F16 => tensor(&part("weight_scale"), DType::F16, shape, &f16s),
            Float::BF16 => tensor(&part("weight_scale"), DType::BF16, shape, &bf16s),
            Float::F32 => tensor(&part("weight_scale"), DType::F32, shape, scales),
        },
    ];
    if let Zeros::Integer(zeros) = q.zeros() {
        let zeros: Vec<u8> = zeros.iter().map(|&z| u8::try_from(z).unwrap()).collect();
        let part = part("weight_zero_point");
        if shape == [1] {
            let signed = i16::from(zeros[0]) - (1 << (bits - 1));
            tensors.push(tensor(&part, DType::I8, shape, &[signed as i8]));
        } else {
            let (words, stream) = packed(&transposed(&zeros, n, groups), n, bits, whole);
            tensors.push(tensor(&part, DType::I32, &[words, groups], &transposed(&stream, groups, words)));
        }
    }
    if let Some(index) = q.group_index() {
        let index: Vec<i32> = index.iter().map(|&g| g as i32).collect();
        tensors.push(tensor(&part("weight_g_idx"), DType::I32, &[k], &index));
    }
    tensors
}

/// A quantised matrix with something to see in every row.
fn quantized(format: WeightFormat, [n, k]: [usize; 2]) -> QTensor {
    let w: Vec<f32> = (0..n * k).map(|i| ((i * 37 % 101) as f32 - 41.0) * (1 + i / k) as f32 / 64.0).collect();
    rtn(Floats::F32(&w), [n, k], format, Rtn::default()).unwrap()
}

/// The 4-bit module that most tests take apart.
pub fn four_bits() -> QTensor {
    let format =
        WeightFormat { bits: 4, group: Group::Size(32), zero: Zero::Integer, scale: Float::F16, channel_scale: None };
    quantized(format, [16, 96])
}

pub const FOUR_BITS: &str = r#"{"num_bits": 4, "symmetric": false, "strategy": "group", "group_size": 32}"#;

#[test]
fn every_format_comes_back_in_both_packings() {
    for bits in [2, 3, 4, 8] {
        for group in [Group::Tensor, Group::Channel, Group::Size(32), Group::Size(100)] {
            for zero in [Zero::Symmetric, Zero::Integer] {
                for scale in [Float::F16, Float::BF16, Float::F32] {
                    for whole in [false, true] {
                        let q = quantized(WeightFormat { bits, group, zero, scale, channel_scale: None }, [13, 330]);
                        let strategy = match group {
                            Group::Tensor => r#""strategy": "tensor""#.to_owned(),
                            Group::Channel => r#""strategy": "channel", "group_size": -1"#.to_owned(),
                            Group::Size(size) => format!(r#""strategy": "group", "group_size": {size}"#),
                        };
                        let symmetric = zero == Zero::Symmetric;
                        let config =
                            config(&format!(r#"{{"num_bits": {bits}, "symmetric": {symmetric}, {strategy}}}"#));
                        let (got, findings) = load(&pack("m", &q, whole), &config);
                        assert_eq!(findings, [], "{config}");
                        assert_eq!(got, q, "{config}");
                    }
                }
            }
        }
    }
}

#[test]
fn the_spare_bits_tell_the_packings_of_short_rows_apart() {
    let format =
        WeightFormat { bits: 3, group: Group::Channel, zero: Zero::Symmetric, scale: Float::F16, channel_scale: None };
    let q = quantized(format, [16, 19]);
    let settings = config(r#"{"num_bits": 3, "strategy": "channel"}"#);
    for (whole, reading) in [(false, "as a dense stream"), (true, "with whole codes in each word")] {
        let (got, findings) = load(&pack("m", &q, whole), &settings);
        assert_eq!(got, q);
        finds(&findings, &["two packings", reading]);
    }
    let mut tensors = pack("m", &q, true);
    tensors[0].3.fill(0xff);
    assert_names(&refusal(&tensors, &settings).to_string(), &["`m.weight_packed`", "hold no code", "[16, 2]"]);
    // Rows so short that several widths fit need a config.
    assert_names(&refusal(&pack("m", &q, false), "").to_string(), &["`m.weight_packed`", "[2, 3] bits"]);
}

#[test]
fn a_group_index_is_followed() {
    let q = four_bits();
    let index: Vec<u32> = (0..96).map(|j| j * 7 % 3).collect();
    let reordered =
        QTensor::new(q.format(), [16, 96], q.codes().into(), q.scales().into(), q.zeros().clone(), Some(index))
            .unwrap();
    let act_order = config(&FOUR_BITS.replace('}', r#", "actorder": "group"}"#));
    assert_eq!(load(&pack("m", &reordered, false), &act_order), (reordered.clone(), vec![]));
    let (got, findings) = load(&pack("m", &reordered, false), &config(FOUR_BITS));
    assert_eq!(got, reordered);
    finds(&findings, &["actorder", "weight_g_idx", "followed"]);

    let with = |index: &[i32]| {
        let mut tensors = pack("m", &q, false);
        tensors.push(tensor("m.weight_g_idx", DType::I32, &[index.len()], index));
        tensors
    };
    let in_order: Vec<i32> = (0..96).map(|j| j / 32).collect();
    for (index, config) in [(vec![-1; 96], config(FOUR_BITS)), (in_order, act_order.clone())] {
        assert_eq!(load(&with(&index), &config), (q.clone(), vec![]));
    }
    for (index, parts) in [
        (vec![0; 95], ["expected I32 [96]", "[95]"]),
        (vec![3; 96], ["from 0 to 2", "got 3 at 0"]),
        (vec![-2; 96], ["from 0 to 2", "got -2 at 0"]),
        (vec![-1; 96], ["actorder `group`", "not -1"]),
    ] {
        let text = refusal(&with(&index), &act_order).to_string();
        assert_names(&text, &["`m.weight_g_idx`"]);
        assert_names(&text, &parts);
    }
    let error = refusal(&pack("m", &q, false), &act_order);
    assert!(matches!(error, Error::Missing { .. }));
    assert_names(&error.to_string(), &["`m.weight_g_idx`", "order of columns is unknown"]);
}

#[test]
fn what_the_config_gets_wrong_is_found_and_the_tensors_are_followed() {
    let q = four_bits();
    let tensors = pack("m", &q, false);
    let cases: &[(&str, &str, &[&str])] = &[
        (
            "\"num_bits\": 4",
            "\"num_bits\": 8",
            &["the config says 8 bits", "`weight_packed` holds 4", "read as 4 bits"],
        ),
        ("\"group_size\": 32", "\"group_size\": 24", &["groups of 24", "groups of 32", "read as groups of 32"]),
        (r#""group", "group_size": 32"#, r#""channel""#, &["says one scale a channel", "read as groups of 32"]),
        ("\"symmetric\": false", "\"symmetric\": true", &["symmetric, but others are stored", "followed"]),
        ("\"group_size\": 32", "\"group_size\": 32, \"actorder\": \"weight\"", &[]),
    ];
    for (from, to, parts) in cases {
        let (got, findings) = load(&tensors, &config(&FOUR_BITS.replace(from, to)));
        assert_eq!(got, q, "{to}");
        if parts.is_empty() {
            assert_eq!(findings, [], "{to}");
        } else {
            finds(&findings, parts);
        }
    }
    let plain = config(FOUR_BITS);
    let (got, findings) = load(&tensors, &plain.replace("lm_head", "m"));
    assert_eq!(got, q);
    finds(&findings, &["ignore", "read as quantised"]);
    let (got, findings) = load(&tensors, &plain.replace("pack-quantized", "int-quantized"));
    assert_eq!(got, q);
    finds(&findings, &["says int-quantized", "read as pack-quantized"]);
}

#[test]
fn of_several_groups_the_one_that_names_the_module_or_fits_it_counts() {
    let q = four_bits();
    let tensors = pack("m", &q, false);
    let group = |targets: &str, weights: &str| format!(r#"{{"targets": {targets}, "weights": {weights}}}"#);
    let eight = r#"{"num_bits": 8, "strategy": "channel"}"#;
    let both = |first: &str, second: &str| with_groups(&format!(r#"{{"a": {first}, "b": {second}}}"#));
    let pattern = r#"["re:m"]"#;
    let fits = group(pattern, FOUR_BITS);
    assert_eq!(load(&tensors, &both(&group(r#"["Linear"]"#, eight), &fits)), (q.clone(), vec![]));
    assert_eq!(load(&tensors, &both(&fits, &group(pattern, eight))), (q.clone(), vec![]));
    // Named, it is what the config says of the module.
    let (got, findings) = load(&tensors, &both(&fits, &group(r#"["x", "m"]"#, eight)));
    assert_eq!(got, q);
    let texts: Vec<&str> = findings.iter().map(|f| f.text.as_str()).collect();
    assert_eq!(texts.len(), 3, "{texts:?}");
    assert_names(texts[0], &["says 8 bits"]);
    assert_names(texts[1], &["one scale a channel"]);
    assert_names(texts[2], &["symmetric"]);
    // Of two for all layers, the one that fits.
    let linear = |weights: &str| group(r#"["Linear"]"#, weights);
    assert_eq!(load(&tensors, &both(&linear(eight), &linear(FOUR_BITS))), (q.clone(), vec![]));
    // For another module: no group is meant for this one, and the tensors are followed.
    let (got, findings) =
        load(&tensors, &both(&group(r#"["re:.*x", "xm"]"#, FOUR_BITS), &group(r#"["re:mm"]"#, eight)));
    assert_eq!(got, q);
    finds(&findings, &["no group of the config targets it", "read as quantised"]);
}

#[test]
fn presets_are_read_by_their_names() {
    let parsed = |name: &str| {
        let dir = tempfile::tempdir().unwrap();
        let groups = format!(r#"{{"{name}": ["Linear", "re:.*x"]}}"#);
        std::fs::write(dir.path().join("config.json"), with_groups(&groups)).unwrap();
        match read(dir.path()) {
            Ok(Some(QuantizationConfig::CompressedTensors(config))) => Ok(config.groups),
            Ok(other) => panic!("{other:?}"),
            Err(e) => Err(e),
        }
    };
    // Name, bits, symmetric, group, bits of activations: as compressed-tensors 0.20 has them.
    let presets = [
        ("W2A16", 2, true, Some(128), None),
        ("W3A8", 3, true, Some(128), Some(8)),
        ("w4a16", 4, true, Some(128), None),
        ("W4A4", 4, true, Some(128), Some(4)),
        ("W4A16_ASYM", 4, false, Some(128), None),
        ("W4AFP8", 4, true, Some(128), Some(8)),
        ("W8A16", 8, true, Some(128), None),
        ("W8A8", 8, true, None, Some(8)),
        ("INT8", 8, true, None, Some(8)),
    ];
    for (name, bits, symmetric, group, activations) in presets {
        let groups = parsed(name).unwrap();
        let [only] = groups.as_slice() else { panic!("{name}: {groups:?}") };
        let strategy = group.map_or(CompressedTensorsStrategy::Channel, CompressedTensorsStrategy::Group);
        assert_eq!((only.bits, only.symmetric, only.strategy), (bits, symmetric, strategy), "{name}");
        assert_eq!((only.activation_bits, only.name.as_str(), only.act_order), (activations, name, false));
        assert_eq!(only.targets.texts(), ["Linear", "re:.*x"]);
    }
    assert_eq!(parsed("UNQUANTIZED").unwrap(), []);
    for (name, parts) in [("NVFP4", ["NVFP4", "preset of floats"]), ("FP8_DYNAMIC", ["FP8_DYNAMIC", "W4A16"])] {
        let error = parsed(name).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        assert_names(&error.to_string(), &parts);
    }
    // Weights wider than activations are none; nor is an invented name.
    for name in ["W8A4", "W9A16", "group_0"] {
        let error = parsed(name).unwrap_err();
        assert!(matches!(error, Error::Malformed { .. }), "{error}");
        assert_names(&error.to_string(), &["quantization_config.config_groups", &format!("no preset `{name}`")]);
    }
    // The tensors are held against them as against settings.
    let q = four_bits();
    let (got, findings) = load(&pack("m", &q, false), &with_groups(r#"{"W4A16": ["Linear"]}"#));
    assert_eq!(got, q);
    let texts: Vec<&str> = findings.iter().map(|f| f.text.as_str()).collect();
    assert_eq!(texts.len(), 2, "{texts:?}");
    assert_names(texts[0], &["says groups of 128", "groups of 32"]);
    assert_names(texts[1], &["symmetric"]);
}

#[test]
fn tensors_that_do_not_fit_each_other_are_errors_that_name_them() {
    let q = four_bits();
    let replaced = |part: &str, new: Option<Tensor>| {
        let mut tensors = pack("m", &q, false);
        tensors.retain(|t| t.0 != format!("m.{part}"));
        tensors.extend(new);
        tensors
    };
    let i32s = |part: &str, shape: &[usize]| {
        let zeros = vec![0i32; shape.iter().product()];
        replaced(part, Some(tensor(&format!("m.{part}"), DType::I32, shape, &zeros)))
    };
    let shape = |of: &[i64]| replaced("weight_shape", Some(tensor("m.weight_shape", DType::I64, &[of.len()], of)));
    let scales = |shape: &[usize]| {
        let ones = vec![1f32; shape.iter().product()];
        replaced("weight_scale", Some(tensor("m.weight_scale", DType::F32, shape, &ones)))
    };
    let i8s = |shape: &[usize], value: i8| {
        let values = vec![value; shape.iter().product()];
        replaced("weight_zero_point", Some(tensor("m.weight_zero_point", DType::I8, shape, &values)))
    };
    let f64s = tensor("m.weight_scale", DType::F64, &[16, 3], &[1f64; 48]);
    let nan = tensor("m.weight_scale", DType::F32, &[16, 3], &[f32::NAN; 48]);
    let bytes = tensor("m.weight_packed", DType::U8, &[16, 48], &[0u8; 768]);
    let dense = tensor("m.weight", DType::F32, &[16, 96], &[0f32; 1536]);
    let cases: Vec<(Vec<Tensor>, &[&str])> = vec![
        (i32s("weight_packed", &[16, 13]), &["`m.weight_packed`", "96 inputs", "I32 [16, 13]"]),
        (i32s("weight_packed", &[15, 12]), &["`m.weight_shape`", "15 outputs", "[16, 96]"]),
        (i32s("weight_packed", &[16, 0]), &["`m.weight_packed`", "[16, 0]"]),
        (i32s("weight_packed", &[16, 3, 4]), &["`m.weight_packed`", "a matrix of I32", "[16, 3, 4]"]),
        (replaced("weight_packed", Some(bytes)), &["`m.weight_packed`", "a matrix of I32", "U8"]),
        (replaced("weight_shape", None), &["there is no tensor `m.weight_shape`"]),
        (shape(&[16]), &["`m.weight_shape`", "I64 [2]", "[1]"]),
        (shape(&[16, -96]), &["`m.weight_shape`", "neither negative"]),
        (shape(&[16, 0]), &["`m.weight_packed`", "neither dimension 0"]),
        (shape(&[16, i64::MAX]), &["`m.weight_packed`", "inputs"]),
        (shape(&[i64::MAX, 96]), &["`m.weight_shape`", "16 outputs"]),
        (replaced("weight_scale", None), &["there is no tensor `m.weight_scale`"]),
        (scales(&[15, 3]), &["`m.weight_scale`", "[16, groups]", "[15, 3]"]),
        (scales(&[1, 3]), &["`m.weight_scale`", "block", "[1, 3]"]),
        (scales(&[16]), &["`m.weight_scale`", "[16]"]),
        (scales(&[16, 0]), &["`m.weight_scale`", "[16, 0]"]),
        (scales(&[16, 5]), &["`m.weight_scale`", "divides the 96 inputs", "groups of 32", "[16, 5]"]),
        (scales(&[16, 4]), &["`m.weight_zero_point`", "[ceil(16·4 / 32), 4]", "[2, 3]"]),
        (replaced("weight_scale", Some(f64s)), &["`m.weight_scale`", "F16, BF16 or F32", "F64"]),
        (replaced("weight_scale", Some(nan)), &["`m`", "finite", "NaN"]),
        (i32s("weight_zero_point", &[3, 3]), &["`m.weight_zero_point`", "[ceil(16·4 / 32), 3]", "[3, 3]"]),
        (i32s("weight_zero_point", &[2, 2]), &["`m.weight_zero_point`", "[ceil(16·4 / 32), 3]", "[2, 2]"]),
        (i8s(&[16, 1], 0), &["`m.weight_zero_point`", "I8 [16, 3]", "[16, 1]"]),
        (i8s(&[16, 3], 8), &["`m.weight_zero_point`", "from -8 to 7", "8"]),
        (replaced("", Some(dense)), &["module `m`", "either `weight` or `weight_packed`"]),
    ];
    for (tensors, parts) in &cases {
        assert_names(&refusal(tensors, &config(FOUR_BITS)).to_string(), parts);
        refusal(tensors, "");
    }
    // Zero points that are not packed, as older files have them.
    let Zeros::Integer(zeros) = q.zeros() else { panic!() };
    let signed: Vec<i8> = zeros.iter().map(|&z| z as i8 - 8).collect();
    let tensors = replaced("weight_zero_point", Some(tensor("m.weight_zero_point", DType::I8, &[16, 3], &signed)));
    assert_eq!(load(&tensors, &config(FOUR_BITS)), (q.clone(), vec![]));

    let int8 = |scales: &[usize]| {
        let ones = vec![1f32; scales.iter().product()];
        [
            tensor("m.weight", DType::I8, &[4, 8], &[1i8; 32]),
            tensor("m.weight_scale", DType::F32, scales, &ones),
            tensor("m.weight_zero_point", DType::I32, &[1, 1], &[0i32]),
        ]
    };
    assert_names(&refusal(&int8(&[4, 3])[..2], "").to_string(), &["`m.weight_scale`", "divides the 8 inputs"]);
    assert_names(&refusal(&int8(&[8, 1])[..2], "").to_string(), &["`m.weight_scale`", "[4, groups]"]);
    assert_names(&refusal(&int8(&[4, 1]), "").to_string(), &["`m.weight_zero_point`", "I8 [4, 1]", "I32 [1, 1]"]);
}

// ---- Configs ----

fn parse(fields: &str) -> halfbyte_checkpoint::Result<CompressedTensorsConfig> {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), fields).unwrap();
    match halfbyte_checkpoint::config::read(dir.path())? {
        Some(QuantizationConfig::CompressedTensors(config)) => Ok(config),
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_spelling_of_a_config_is_read() {
    let config = parse(
        r#"{"quantization_config": {"quant_method": "compressed-tensors", "format": "mixed-precision", "version": "0.13.0",
        "quantization_status": "compressed", "global_compression_ratio": 1.2, "kv_cache_scheme": null,
        "sparsity_config": {"format": "dense"}, "transform_config": {}, "ignore": ["lm_head", "re:.*gate$"],
        "config_groups": {
            "group_0": {"targets": ["Linear", "re:.*q_proj"], "format": "pack-quantized", "output_activations": null,
                "weights": {"num_bits": 4, "type": "int", "symmetric": false, "strategy": "group", "group_size": 64,
                    "block_structure": null, "dynamic": false, "actorder": "group", "observer": "minmax"}},
            "group_1": {"targets": ["model.layers.0.mlp.down_proj"], "format": "int-quantized",
                "input_activations": {"num_bits": 8, "dynamic": true, "strategy": "token"}, "weights": {}},
            "activations": {"targets": ["Attention"], "input_activations": {"num_bits": 8}, "weights": null}
        }}}"#,
    )
    .unwrap();
    let json = serde_json::to_value(QuantizationConfig::CompressedTensors(config)).unwrap();
    assert_eq!(json["quant_method"], "compressed-tensors");
    assert_eq!(json["ignore"], serde_json::json!(["lm_head", "re:.*gate$"]));
    assert_eq!(
        json["groups"],
        serde_json::json!([
            {"name": "group_0", "targets": ["Linear", "re:.*q_proj"], "format": "pack-quantized", "bits": 4,
                "symmetric": false, "strategy": {"group": 64}, "act_order": true, "activation_bits": null},
            {"name": "group_1", "targets": ["model.layers.0.mlp.down_proj"], "format": "int-quantized", "bits": 8,
                "symmetric": true, "strategy": "tensor", "act_order": false, "activation_bits": 8},
        ])
    );
    // The method may be told by its groups, and the older name of the field.
    for fields in [
        r#"{"compression_config": {"config_groups": {"a": {"targets": [], "weights": {"group_size": -1}}}}}"#,
        r#"{"quantization_config": {"config_groups": {"a": {"targets": [], "weights": {"strategy": "channel", "actorder": "static"}}}}}"#,
    ] {
        let config = parse(fields).unwrap();
        assert_eq!(serde_json::to_value(config.groups[0].strategy).unwrap(), "channel");
        assert!(!config.groups[0].act_order);
    }
}

#[test]
fn configs_that_are_wrong_or_not_read_are_errors_that_name_the_field() {
    let of = |rest: &str| format!(r#"{{"quantization_config": {{"quant_method": "compressed-tensors", {rest}}}}}"#);
    let path = "quantization_config.config_groups.group_0.weights";
    for format in
        ["float-quantized", "naive-quantized", "marlin-24", "nvfp4-pack-quantized", "sparse-24-bitmask", "pack"]
    {
        let error = parse(&of(&format!(r#""format": "{format}""#))).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }));
        assert_names(&error.to_string(), &["quantization_config.format", &format!("`{format}`"), "int-quantized"]);
    }
    let unread: &[(&str, &[&str])] = &[
        (r#"{"type": "float"}"#, &["type `float`"]),
        (r#"{"strategy": "block", "block_structure": [128, 128]}"#, &["strategy `block`", "tensor, channel, group"]),
        (r#"{"strategy": "tensor_group", "group_size": 16}"#, &["strategy `tensor_group`"]),
        (r#"{"actorder": "mystery"}"#, &["actorder `mystery`"]),
    ];
    for (weights, parts) in unread {
        let error = parse(&config(weights)).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        assert_names(&error.to_string(), &[path]);
        assert_names(&error.to_string(), parts);
    }
    let wrong: &[(&str, &[&str])] = &[
        (r#"{"num_bits": 0}"#, &["num_bits", "got 0"]),
        (r#"{"num_bits": "4"}"#, &["num_bits", "an integer"]),
        (r#"{"symmetric": 1}"#, &["symmetric", "true or false"]),
        (r#"{"strategy": "group"}"#, &["group_size", "none"]),
        (r#"{"strategy": "group", "group_size": -1}"#, &["group_size", "got -1"]),
        (r#"{"strategy": "channel", "group_size": 128}"#, &["group_size", "`channel`", "got 128"]),
        (r#"{"group_size": 0}"#, &["group_size", "got 0"]),
        (r#"{"actorder": 3}"#, &["actorder", "got 3"]),
        ("7", &["an object", "got 7"]),
    ];
    for (weights, parts) in wrong {
        let text = text_of(parse(&config(weights)));
        assert_names(&text, &[path, "config.json"]);
        assert_names(&text, parts);
    }
    for (rest, parts) in [
        (r#""sparsity_config": {"format": "sparse-bitmask"}"#, ["sparsity_config.format", "`sparse-bitmask`"]),
        (r#""transform_config": {"config_groups": {"R1": {}}}"#, ["transform_config.config_groups", "rotations"]),
        (r#""ignore": "lm_head""#, ["quantization_config.ignore", "a list of strings"]),
        (r#""config_groups": ["Linear"]"#, ["quantization_config.config_groups", "an object"]),
        (r#""config_groups": {"W4A16": [4]}"#, ["config_groups.W4A16", "a list of strings"]),
        (r#""config_groups": {"W4A16": "Linear"}"#, ["config_groups.W4A16", "an object"]),
        (r#""config_groups": {"a": {"targets": [1]}}"#, ["config_groups.a.targets", "a list of strings"]),
    ] {
        assert_names(&text_of(parse(&of(rest))), &parts);
    }
}

// ---- A whole model ----

#[test]
fn a_whole_model_reads_back_module_by_module() {
    let source = Weights::open(model()).unwrap();
    let format =
        WeightFormat { bits: 4, group: Group::Size(128), zero: Zero::Integer, scale: Float::F16, channel_scale: None };
    let mut expected = Vec::new();
    let mut tensors = Vec::new();
    let modules = linears(&source).unwrap();
    for info in source.checkpoint().tensors() {
        let module = modules.iter().find(|module| module.in_block() && info.name == format!("{}.weight", module.name));
        let Some(module) = module else {
            tensors.push(taken(source.checkpoint(), info.name, info.name));
            continue;
        };
        let floats = source.checkpoint().floats(info.name).unwrap();
        let q = rtn(floats.as_floats(), module.shape, format, Rtn::default()).unwrap();
        tensors.extend(pack(module.name, &q, false));
        expected.push((module.name, q));
    }
    assert!(expected.len() > 10);
    let dir = tempfile::tempdir().unwrap();
    let packed = dir.path().join("packed");
    std::fs::create_dir(&packed).unwrap();
    let text = std::fs::read_to_string(model().join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
    let settings = FOUR_BITS.replace("32", "128");
    let declared: serde_json::Value = serde_json::from_str(&self::config(&settings)).unwrap();
    config["quantization_config"] = declared["quantization_config"].clone();
    write_folder(&packed, &tensors, &config.to_string());
    std::fs::copy(model().join("tokenizer.json"), packed.join("tokenizer.json")).unwrap();

    let weights = Weights::open(&packed).unwrap();
    for (name, q) in &expected {
        let loaded = weights.load_linear(name).unwrap();
        assert_eq!(loaded.findings, [], "{name}");
        let LinearWeight::Quantized(got) = loaded.weight else { panic!("{name} is dense") };
        assert_eq!(got, *q, "{name}");
        weights.release(name);
    }
    let inspection = inspect(&weights).unwrap();
    assert_eq!(inspection.findings, []);
    let summaries: Vec<_> = inspection.modules.iter().filter(|m| m.scheme == "compressed-tensors").collect();
    assert_eq!(summaries.len(), expected.len());
    assert!(summaries.iter().all(|m| m.format == "w4a16-g128-asym" && m.shape.is_some()));
    assert_eq!(inspection.parameters, inspect(&source).unwrap().parameters);

    let dense = dir.path().join("dense");
    write_dense(Job::new(&weights, &dense), Float::F32).unwrap();
    let dense = Weights::open(&dense).unwrap();
    assert_eq!(dense.checkpoint().tensors().count(), source.checkpoint().tensors().count());
    for (name, q) in &expected {
        let got = dense.checkpoint().floats(&format!("{name}.weight")).unwrap().to_f32();
        assert!(got.iter().zip(dequantize(q)).all(|(&got, value)| f64::from(got) == value), "{name}");
    }
}

#[test]
fn a_folder_of_signed_bytes_is_listed_and_made_dense() {
    let format =
        WeightFormat { bits: 8, group: Group::Channel, zero: Zero::Symmetric, scale: Float::F32, channel_scale: None };
    let q = quantized(format, [4, 24]);
    let codes: Vec<i8> = q.codes().iter().map(|&c| (c ^ 0x80) as i8).collect();
    let tensors = [
        tensor("norm.weight", DType::F32, &[24], &[1f32; 24]),
        tensor("a.0.m.weight", DType::I8, &[4, 24], &codes),
        tensor("a.0.m.weight_scale", DType::F32, &[4, 1], q.scales()),
        tensor("a.0.m.input_scale", DType::F32, &[1], &[0.5f32]),
        tensor("a.0.m.bias", DType::F32, &[4], &[1f32; 4]),
    ];
    let dir = tempfile::tempdir().unwrap();
    let (source, target) = (dir.path().join("int8"), dir.path().join("dense"));
    std::fs::create_dir(&source).unwrap();
    let config = config(r#"{"strategy": "channel"}"#).replace("pack-quantized", "int-quantized");
    write_folder(&source, &tensors, &config);
    let weights = Weights::open(&source).unwrap();
    assert_eq!(weights.modules(), ["a.0.m"]);
    assert!(matches!(weights.kind("a.0.m").unwrap(), ModuleKind::Quantized(_)));
    assert_eq!(weights.load_linear("a.0.m").unwrap().bias, Some(vec![1.0; 4]));
    assert_eq!(inspect(&weights).unwrap().modules[0].format, "w8a16-sf32");
    write_dense(Job::new(&weights, &target), Float::F32).unwrap();
    let dense = Weights::open(&target).unwrap();
    let names: Vec<&str> = dense.checkpoint().tensor_names().collect();
    assert_eq!(names, ["norm.weight", "a.0.m.weight", "a.0.m.bias"]);
    let got = dense.checkpoint().floats("a.0.m.weight").unwrap().to_f32();
    assert!(got.iter().zip(dequantize(&q)).all(|(&got, value)| got == value as f32));
}
