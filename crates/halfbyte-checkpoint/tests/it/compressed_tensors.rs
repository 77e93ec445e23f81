//! compressed-tensors modules against files of another program, and against a packer of the tests' own.

mod config;
mod folder;
mod fp4;
mod labels;

use crate::support::{self, Tensor, assert_names, model, refusal, taken, tensor, testdata, text_of, write_folder};
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
    let (q, _, findings) = support::load(tensors, config);
    (q, findings)
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
