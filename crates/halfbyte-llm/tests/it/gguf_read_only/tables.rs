//! Codes of 4 bits that stand for 16 values: models compute what the same values in f32 do.

use super::files::*;
use crate::tensor_parallel::compare_with;
use half::f16;
use halfbyte_checkpoint::gguf::{GgmlType, TensorSpec, Value, create, load};
use halfbyte_checkpoint::{Checkpoint, Weights};
use halfbyte_llm::check::contradictions;
use halfbyte_llm::{Config, LoadOptions};
use std::path::Path;

const IQ4: [f32; 16] = [-127., -104., -83., -65., -49., -35., -22., -10., 1., 13., 25., 38., 53., 69., 89., 113.];
pub const E2M1: [f32; 16] = [0., 0.5, 1., 1.5, 2., 3., 4., 6., -0., -0.5, -1., -1.5, -2., -3., -4., -6.];

const KINDS: [GgmlType; 4] = [GgmlType::IQ4_NL, GgmlType::IQ4_XS, GgmlType::MXFP4, GgmlType::NVFP4];

fn most(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |most: f32, v| most.max(v.abs()))
}

fn nearest(table: &[f32; 16], value: f32) -> u8 {
    let distance = |number: &u8| (table[usize::from(*number)] - value).abs();
    (0..16).min_by(|a, b| distance(a).total_cmp(&distance(b))).unwrap()
}

/// The exponent of a group's scale in MXFP4, and the codes of its values.
pub fn mxfp4(values: &[f32]) -> (u8, Vec<u8>) {
    let exponent = most(values).log2().floor().max(-100.0) as i32 - 2 + 127;
    let scale = 2f32.powi(exponent - 127);
    (exponent as u8, values.iter().map(|v| nearest(&E2M1, v / scale)).collect())
}

/// Scale of a byte of NVFP4.
fn ue4m3(byte: u8) -> f32 {
    let (exponent, fraction) = (i32::from(byte >> 3), f32::from(byte & 7) / 8.0);
    if exponent == 0 { fraction / 64.0 } else { (1.0 + fraction) * 2f32.powi(exponent - 7) }
}

/// Nibbles of codes, the second half of each run in the upper ones.
fn nibbles(codes: &[u8], run: usize) -> Vec<u8> {
    codes.chunks(2 * run).flat_map(|codes| (0..run).map(|j| codes[j] | codes[j + run] << 4)).collect()
}

/// Values as blocks of a type, rounded to the nearest that there are.
fn encode(kind: GgmlType, values: &[f32]) -> Vec<u8> {
    let block = |values: &[f32]| -> Vec<u8> {
        let codes = |values: &[f32], table, scale: f32| -> Vec<u8> {
            values.iter().map(|v| nearest(table, if scale == 0.0 { 0.0 } else { v / scale })).collect()
        };
        match kind {
            GgmlType::IQ4_NL => {
                let d = f16::from_f32(most(values) / 127.0);
                [d.to_le_bytes().to_vec(), nibbles(&codes(values, &IQ4, d.to_f32()), 16)].concat()
            }
            GgmlType::IQ4_XS => {
                let d = f16::from_f32(most(values) / 127.0 / 31.0);
                let (mut upper, mut lower, mut all) = (0u16, [0u8; 4], Vec::new());
                for (i, values) in values.chunks(32).enumerate() {
                    // Every other one with the other sign.
                    let factor = (most(values) / 127.0 / d.to_f32()).round().clamp(1.0, 31.0) as i32;
                    let factor = if i % 2 == 0 { factor } else { -factor };
                    let bits = (factor + 32) as u16;
                    (upper, lower[i / 2]) =
                        (upper | bits >> 4 << (2 * i), lower[i / 2] | (bits as u8 & 15) << (4 * (i % 2)));
                    all.extend(codes(values, &IQ4, d.to_f32() * factor as f32));
                }
                let head = [d.to_le_bytes().to_vec(), upper.to_le_bytes().to_vec(), lower.to_vec()].concat();
                [head, nibbles(&all, 16)].concat()
            }
            GgmlType::MXFP4 => {
                let (exponent, codes) = mxfp4(values);
                [vec![exponent], nibbles(&codes, 16)].concat()
            }
            GgmlType::NVFP4 => {
                let (mut scales, mut all) = (Vec::new(), Vec::new());
                for values in values.chunks(16) {
                    let distance = |byte: &u8| (ue4m3(*byte) - most(values) / 6.0).abs();
                    let scale = (0..0x7f).min_by(|a, b| distance(a).total_cmp(&distance(b))).unwrap();
                    scales.push(scale);
                    all.extend(codes(values, &E2M1, ue4m3(scale)));
                }
                [scales, nibbles(&all, 8)].concat()
            }
            other => panic!("{other}"),
        }
    };
    values.chunks(kind.block_len()).flat_map(block).collect()
}

/// Tensors of a type and f32, and the same all in f32, as two files; gives how many are of the type. `scale`: what the scales of those
/// of NVFP4 are multiplied by.
fn write_both(
    paths: [&Path; 2],
    metadata: &[(String, Value)],
    (tensors, kind): (Vec<Tensor>, GgmlType),
    of_kind: impl Fn(&Tensor) -> bool,
    scale: Option<f32>,
) -> usize {
    let mut specs: [Vec<TensorSpec>; 2] = Default::default();
    let mut data: [Vec<(String, Vec<u8>)>; 2] = Default::default();
    let mut count = 0;
    let floats = |values: &[f32]| bytemuck::cast_slice::<f32, u8>(values).to_vec();
    for Tensor { name, shape, values } in tensors {
        let mut put = |file: usize, name: &str, ggml_type, shape: &[usize], bytes: Vec<u8>| {
            specs[file].push(TensorSpec { name: name.to_owned(), ggml_type, shape: shape.to_vec() });
            data[file].push((name.to_owned(), bytes));
        };
        let tensor = Tensor { name, shape, values };
        let (name, shape) = (tensor.name.as_str(), tensor.shape.as_slice());
        if !of_kind(&tensor) {
            (0..2).for_each(|file| put(file, name, GgmlType::F32, shape, floats(&tensor.values)));
            continue;
        }
        count += 1;
        let by = scale.unwrap_or(1.0);
        let blocks = encode(kind, &tensor.values.iter().map(|v| v / by).collect::<Vec<_>>());
        let k = *shape.last().unwrap();
        let read = load(name, kind, blocks.as_slice(), [tensor.values.len() / k, k]).unwrap().values().unwrap();
        let read: Vec<f32> = read.iter().map(|v| v * by).collect();
        let (near, all) = (most(&read.iter().zip(&tensor.values).map(|(a, b)| a - b).collect::<Vec<_>>()), most(&read));
        assert!(near < 0.35 * all, "{name} in {kind}: {near} of {all}");
        put(0, name, kind, shape, blocks);
        put(1, name, GgmlType::F32, shape, floats(&read));
        if scale.is_some() {
            let module = name.strip_suffix(".weight").unwrap();
            let count = if shape.len() == 3 { shape[0] } else { 1 };
            put(0, &format!("{module}.scale"), GgmlType::F32, &[count], floats(&vec![by; count]));
            put(0, &format!("{module}.input_scale"), GgmlType::F32, &[count], floats(&vec![0.125; count]));
        }
    }
    for ((path, specs), data) in paths.into_iter().zip(specs).zip(data) {
        let _ = std::fs::remove_file(path);
        let mut writer = create(path, metadata, &specs).unwrap();
        data.iter().for_each(|(name, bytes)| writer.write(name, bytes).unwrap());
        writer.finish().unwrap();
    }
    count
}

fn assert_same(name: &str, paths: [&Path; 2]) {
    let weights = Weights::open(paths[0]).unwrap();
    let config = Config::from_weights(&weights).unwrap();
    let findings = contradictions(&config, &weights).into_findings();
    assert!(findings.is_empty(), "{name}: {findings:?}");
    assert_near(name, &logits(paths[0]), &logits(paths[1]));
    // Cut for ranks, within blocks and between them.
    assert!(compare_with(false, paths[0], &LoadOptions::default(), 1e-4, name) >= 1, "{name}");
}

#[test]
fn models_of_every_table_compute_what_their_values_do() {
    let dir = tempfile::tempdir().unwrap();
    let paths = [dir.path().join("tables.gguf"), dir.path().join("floats.gguf")];
    let paths = [paths[0].as_path(), &paths[1]];
    let metadata = metadata("llama", "llama", &[("feed_forward_length", Value::U32(256))]);
    for (kind, scale) in KINDS.map(|kind| (kind, None)).into_iter().chain([(GgmlType::NVFP4, Some(0.0371))]) {
        let mut tensors = tensors("llama", LLAMA_DENSE);
        paired(&mut tensors, Config::from_folder(&crate::architecture("llama")).unwrap().spec.heads.head_size);
        let fits = |tensor: &Tensor| tensor.shape.len() == 2 && tensor.shape[1].is_multiple_of(kind.block_len());
        let count = write_both(paths, &metadata, (tensors, kind), fits, scale);
        // Rows of 128 are no whole blocks of 256, but the layers' `down` has some.
        assert!(count >= if kind == GgmlType::IQ4_XS { 2 } else { 15 }, "{kind}: {count}");
        assert_same(kind.name(), paths);
    }
}

/// As the converter writes it: experts alone in MXFP4; and in NVFP4, with a scale of each expert.
#[test]
fn experts_in_mxfp4_and_nvfp4_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let paths = [dir.path().join("tables.gguf"), dir.path().join("floats.gguf")];
    let paths = [paths[0].as_path(), &paths[1]];
    let more = [
        ("feed_forward_length", Value::U32(256)),
        ("expert_used_count", Value::U32(2)),
        ("expert_count", Value::U32(4)),
        ("attention.key_length", Value::U32(32)),
        ("attention.sliding_window", Value::U32(16)),
    ];
    let metadata = metadata("gpt-oss", "gpt-oss", &more);
    let experts = |tensor: &Tensor| tensor.name.ends_with("_exps.weight");
    for (kind, scale) in [(GgmlType::MXFP4, None), (GgmlType::NVFP4, None), (GgmlType::NVFP4, Some(0.25))] {
        let count = write_both(paths, &metadata, (tensors("gpt-oss", GPT_OSS), kind), experts, scale);
        assert_eq!(count, 6);
        assert_same(kind.name(), paths);
    }
}

/// A scale beside another type would be left out; one that is no number is none.
#[test]
fn scales_beside_other_types_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let metadata = metadata("llama", "llama", &[("feed_forward_length", Value::U32(256))]);
    let tensors = |shape: Vec<usize>, value: f32| {
        let mut tensors = tensors("llama", LLAMA_DENSE);
        let values = vec![value; shape.iter().product()];
        tensors.push(Tensor { name: "blk.1.ffn_up.scale".into(), shape, values });
        tensors
    };
    write(&path, &metadata, &tensors(vec![1], 0.5).iter().collect::<Vec<_>>());
    let error = Checkpoint::open(&path).unwrap_err().to_string();
    assert!(error.contains("blk.1.ffn_up.scale") && error.contains("NVFP4, got one beside F32"), "{error}");
    // Beside NVFP4 two numbers, and none.
    let other = dir.path().join("other.gguf");
    let up = |tensor: &Tensor| tensor.name == "blk.1.ffn_up.weight";
    for (shape, value, told) in
        [(vec![2], 0.5, "one number of F32, got F32 [2]"), (vec![1], f32::NAN, "of 1 values 1 are NaN")]
    {
        write_both([&path, &other], &metadata, (tensors(shape, value), GgmlType::NVFP4), up, None);
        let weights = Weights::open(&path).unwrap();
        let error = weights.stored_linear("model.layers.1.mlp.up_proj").unwrap_err().to_string();
        assert!(error.contains("model.layers.1.mlp.up_proj.scale") && error.contains(told), "{error}");
    }
}
