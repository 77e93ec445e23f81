//! Blocks: what they stand for is what gguf's Python package says, bit by bit.

use super::tiny;
use crate::support::{Random, assert_names, testdata, text_of};
use half::f16;
use halfbyte::format::reference::dequantize;
use halfbyte::layout::codes::Codes;
use halfbyte::{Float, Group, QTensor, WeightFormat, Zero, Zeros};
use halfbyte_checkpoint::gguf::{GgmlType, TensorSpec, create, load, pack, unpack_rows};
use halfbyte_checkpoint::{Checkpoint, Error, Result, Weights, linears};

const PACKED: [GgmlType; 3] = [GgmlType::Q4_0, GgmlType::Q4_1, GgmlType::Q8_0];

/// The numbers of a tensor of blocks.
fn unpack(tensor: &str, kind: GgmlType, bytes: &[u8], shape: [usize; 2]) -> Result<QTensor> {
    Ok(load(tensor, kind, bytes, shape)?.to_qtensor().unwrap())
}

/// The types that are unpacked, by name of their golden file.
pub fn unpacked() -> Vec<(String, GgmlType)> {
    let types = GgmlType::ALL.iter().filter(|kind| kind.weight_format().is_some());
    types.map(|kind| (kind.name().to_lowercase(), *kind)).collect()
}

fn golden(name: &str) -> (Vec<u8>, [usize; 2], Vec<f32>) {
    let file = Checkpoint::open(testdata(&format!("gguf/{name}.safetensors"))).unwrap();
    let &[n, k] = file.info("dequant").unwrap().shape else { panic!("a matrix") };
    (file.bytes("blocks").unwrap().to_vec(), [n, k], file.floats("dequant").unwrap().to_f32())
}

/// gguf computes in singles, with one rounding at most: `d·q` and `d·sc·q` have at most 21 bits, and where an offset is
/// subtracted, the difference is rounded. In f64 the difference is exact (its terms are multiples of 2⁻²⁴ below 2²⁸), so
/// that rounding it to f32 gives gguf's bits.
#[test]
fn every_golden_dequantizes_to_the_same_bits() {
    let types = unpacked();
    assert_eq!(types.len(), 14);
    for (name, kind) in types {
        let (bytes, shape, expected) = golden(&name);
        let tensor = unpack(&name, kind, &bytes, shape).unwrap();
        assert_eq!(Some(tensor.format()), kind.weight_format());
        let got = dequantize(&tensor);
        assert_eq!(got.len(), expected.len(), "{name}");
        for (i, (got, want)) in got.iter().zip(&expected).enumerate() {
            assert_eq!((*got as f32).to_bits(), want.to_bits(), "{name}, element {i}: {got} and {want}");
            let symmetric = tensor.format().zero == Zero::Symmetric;
            // The largest scales of MXFP4 make numbers beyond f32, which are infinite there.
            let exact = *got == f64::from(*want) || *want == (got * f64::INFINITY) as f32 && kind == GgmlType::MXFP4;
            assert!(!symmetric || exact, "{name}, element {i}: nothing is rounded");
        }
    }
}

#[test]
fn the_tiny_models_tensors_are_what_it_was_made_of() {
    let (bytes, header) = tiny();
    let expected = Checkpoint::open(testdata("gguf/tiny_llama.safetensors")).unwrap();
    let mut quantized = 0;
    for tensor in header.tensors.iter().filter(|t| t.name != "token_embd.weight") {
        let want = expected.floats(&tensor.name).unwrap().to_f32();
        assert_eq!(tensor.shape, expected.info(&tensor.name).unwrap().shape, "{}", tensor.name);
        let data = &bytes[tensor.range.clone()];
        let got: Vec<f32> = match tensor.ggml_type {
            GgmlType::F32 => bytemuck::pod_collect_to_vec(data),
            GgmlType::F16 => bytemuck::pod_collect_to_vec::<u8, f16>(data).into_iter().map(f32::from).collect(),
            kind => {
                quantized += 1;
                let &[n, k] = tensor.shape.as_slice() else { panic!("a matrix") };
                let tensor = unpack(&tensor.name, kind, data, [n, k]).unwrap();
                dequantize(&tensor).into_iter().map(|v| v as f32).collect()
            }
        };
        assert_eq!(got, want, "{}", tensor.name);
    }
    assert_eq!(quantized, 10);
}

#[test]
fn packing_what_was_unpacked_gives_the_same_bytes() {
    for kind in PACKED {
        let name = kind.name().to_lowercase();
        let (bytes, shape, _) = golden(&name);
        let tensor = unpack(&name, kind, &bytes, shape).unwrap();
        assert_eq!(pack(&name, kind, &tensor).unwrap(), bytes, "{name}");
    }
}

/// Codes of every value, and scales that are negative, subnormal, the largest, or zero of either sign.
#[test]
fn odd_scales_keep_their_bits() {
    let mut random = Random(5);
    let odd = [0x0000u16, 0x8000, 0x0001, 0x8001, 0x03ff, 0x7bff, 0xfbff, 0x3c00, 0xb800];
    for kind in PACKED {
        let (n, k) = (7, 96);
        let mut bytes: Vec<u8> = (0..n * k / 32 * kind.block_bytes()).map(|_| random.next() as u8).collect();
        for block in bytes.chunks_mut(kind.block_bytes()) {
            block[..2].copy_from_slice(&odd[random.below(odd.len())].to_le_bytes());
            if kind == GgmlType::Q4_1 {
                block[2..4].copy_from_slice(&odd[random.below(odd.len())].to_le_bytes());
            }
        }
        let tensor = unpack("w", kind, &bytes, [n, k]).unwrap();
        assert_eq!(pack("w", kind, &tensor).unwrap(), bytes, "{kind}");
    }
}

/// Blocks of anything, but that no scale is NaN or infinite, or beyond what f32 multiplies.
pub fn random_blocks(random: &mut Random, kind: GgmlType, [n, k]: [usize; 2]) -> Vec<u8> {
    let len = n * k / kind.block_len() * kind.block_bytes();
    let mut bytes: Vec<u8> = (0..len).map(|_| random.next() as u8).collect();
    match kind {
        GgmlType::MXFP4 => bytes.chunks_mut(17).for_each(|block| block[0] = 100 + block[0] % 50),
        GgmlType::NVFP4 => bytes.chunks_mut(36).for_each(|block| block[..4].iter_mut().for_each(|s| *s %= 0x7f)),
        _ => bytes.chunks_mut(2).for_each(|bytes| bytes[1] &= 0xbf),
    }
    bytes
}

/// Every type as the description of its blocks, by which GPUs unpack them, says.
#[test]
fn descriptions_of_blocks_say_what_their_codes_are() {
    let mut random = Random(12);
    for (_, kind) in unpacked() {
        let (n, k) = (3, 512);
        let bytes = random_blocks(&mut random, kind, [n, k]);
        let tensor = load("w", kind, bytes.as_slice(), [n, k]).unwrap();
        let Codes::Blocks { bytes: blocks, form } = tensor.codes() else { panic!("{kind}: no blocks") };
        assert_eq!((blocks.as_ref(), form.bytes, form.codes), (&bytes[..], kind.block_bytes(), kind.block_len()));
        let described = blocks.chunks(form.bytes).flat_map(|block| (0..form.codes).map(|at| form.code(block, at)));
        assert_eq!(described.collect::<Vec<_>>(), tensor.to_qtensor().unwrap().codes(), "{kind}");
    }
}

/// A tensor of more than one task, against its parts.
#[test]
fn tasks_do_not_change_what_is_unpacked() {
    let mut random = Random(11);
    for (_, kind) in unpacked() {
        let (n, k) = (1100, 512);
        let groups = kind.weight_format().unwrap().group.count(k);
        let bytes = random_blocks(&mut random, kind, [n, k]);
        let whole = unpack("w", kind, &bytes, [n, k]).unwrap();
        let row_bytes = bytes.len() / n;
        for i in (0..n).step_by(97) {
            let (mut codes, mut scales) = (vec![0; k], vec![0.0; groups]);
            let mut offsets = vec![0.0; if let Zeros::Float(_) = whole.zeros() { groups } else { 0 }];
            let row = &bytes[i * row_bytes..][..row_bytes];
            unpack_rows(kind, row, k, &mut codes, &mut scales, &mut offsets).unwrap();
            assert_eq!(codes, whole.codes()[i * k..][..k], "{kind}, row {i}");
            assert_eq!(scales, whole.scales()[i * groups..][..groups], "{kind}, row {i}");
            if let Zeros::Float(all) = whole.zeros() {
                assert_eq!(offsets, all[i * groups..][..groups], "{kind}, row {i}");
            }
        }
    }
}

#[test]
fn groups_of_any_reach_are_packed_if_no_block_is_parted() {
    let tensor = |bits, group: Group, zero, k: usize| {
        let n = 3;
        let groups = group.count(k);
        let of = |i: usize| if group == Group::Tensor { 0.5 } else { 0.5 + i as f32 };
        let scales: Vec<f32> = (0..n * groups).map(of).collect();
        let zeros =
            if zero == Zero::Float { Zeros::Float(scales.iter().map(|s| -s).collect()) } else { Zeros::Symmetric };
        let codes = (0..n * k).map(|i| (i % (1usize << bits)) as u8).collect();
        let format = WeightFormat { bits, group, zero, scale: Float::F16, channel_scale: None };
        QTensor::new(format, [n, k], codes, scales, zeros, None).unwrap()
    };
    for (kind, bits, zero) in
        [(GgmlType::Q4_0, 4, Zero::Symmetric), (GgmlType::Q4_1, 4, Zero::Float), (GgmlType::Q8_0, 8, Zero::Symmetric)]
    {
        // The last of 160 columns in groups of 64 is a shorter group.
        for (group, k) in [
            (Group::Size(32), 96),
            (Group::Size(64), 128),
            (Group::Size(64), 160),
            (Group::Size(1024), 64),
            (Group::Channel, 96),
            (Group::Tensor, 96),
        ] {
            let before = tensor(bits, group, zero, k);
            let after = unpack("w", kind, &pack("w", kind, &before).unwrap(), [3, k]).unwrap();
            assert_eq!(dequantize(&before), dequantize(&after), "{kind} {group:?} {k}");
        }
        for (group, k, reason) in [
            (Group::Size(16), 96, "columns 0 and 16"),
            (Group::Size(48), 96, "columns 32 and 48"),
            (Group::Channel, 40, "rows of 40"),
        ] {
            let text = text_of(pack("layer.w", kind, &tensor(bits, group, zero, k)));
            assert_names(&text, &["layer.w", kind.name(), reason]);
        }
    }
}

#[test]
fn what_blocks_cannot_hold_is_refused_with_the_reason() {
    let tensor = |bits, zero, scale, value: f32, offset: f32, index: Option<Vec<u32>>| {
        let format = WeightFormat { bits, group: Group::Size(32), zero, scale, channel_scale: None };
        let zeros = match zero {
            Zero::Symmetric => Zeros::Symmetric,
            Zero::Integer => Zeros::Integer(vec![3; 2]),
            Zero::Float => Zeros::Float(vec![offset; 2]),
        };
        QTensor::new(format, [1, 64], vec![1; 64], vec![value; 2], zeros, index).unwrap()
    };
    let (symmetric, float) = (Zero::Symmetric, Zero::Float);
    let interleaved = Some((0..64).map(|j| j % 2).collect());
    let cases = [
        (GgmlType::Q4_0, tensor(8, symmetric, Float::F16, 1.0, 0.0, None), "it takes 4 bits"),
        (GgmlType::Q8_0, tensor(4, symmetric, Float::F16, 1.0, 0.0, None), "it takes 8 bits"),
        (GgmlType::Q4_0, tensor(4, Zero::Integer, Float::F16, 1.0, 0.0, None), "integer zero points"),
        (GgmlType::Q4_1, tensor(4, symmetric, Float::F16, 1.0, 0.0, None), "with float offsets"),
        (GgmlType::Q4_0, tensor(4, symmetric, Float::F32, 0.1, 0.0, None), "scale 0.1 is not exact"),
        (GgmlType::Q4_0, tensor(4, symmetric, Float::F32, 1e6, 0.0, None), "scale 1000000 is not exact"),
        (GgmlType::Q4_1, tensor(4, float, Float::F32, 0.5, 1e-9, None), "offset 0.000000001 is not exact"),
        (GgmlType::Q4_0, tensor(4, symmetric, Float::F16, 1.0, 0.0, interleaved), "columns 0 and 1"),
    ];
    for (kind, tensor, reason) in cases {
        let result = pack("layer.w", kind, &tensor);
        assert!(matches!(result, Err(Error::Unrepresentable { .. })), "{result:?}");
        assert_names(&text_of(result), &["layer.w", kind.name(), reason]);
    }
    let plain = tensor(4, symmetric, Float::F16, 1.0, 0.0, None);
    assert!(matches!(pack("w", GgmlType::Q4_K, &plain), Err(Error::Invalid { .. })));
    // A bf16 scale that f16 has too is no obstacle.
    pack("w", GgmlType::Q4_0, &tensor(4, symmetric, Float::BF16, 0.5, 0.0, None)).unwrap();
}

#[test]
fn blocks_that_do_not_fit_are_refused() {
    let q4_0 = |bytes: &[u8], shape| unpack("layer.w", GgmlType::Q4_0, bytes, shape);
    for (result, part) in [
        (q4_0(&[0; 17], [1, 32]), "17 bytes of Q4_0"),
        (q4_0(&[0; 19], [1, 32]), "19 bytes of Q4_0"),
        (q4_0(&[0; 18], [1, 31]), "whole blocks of 32"),
        (q4_0(&[0; 18], [2, 16]), "whole blocks of 32"),
        (q4_0(&[], [4, 0]), "[4, 0]"),
        (q4_0(&[0; 18], [usize::MAX, 32]), "18 bytes of Q4_0"),
        (unpack("layer.w", GgmlType::IQ2_S, &[0; 82], [1, 256]), "codes with scales, got IQ2_S"),
        (unpack("layer.w", GgmlType::MXFP4, &[0; 18], [1, 32]), "18 bytes of MXFP4"),
        (unpack("layer.w", GgmlType::NVFP4, &[0; 36], [1, 32]), "whole blocks of 64"),
        (unpack("layer.w", GgmlType::IQ4_XS, &[0; 135], [1, 256]), "135 bytes of IQ4_XS"),
        (unpack("layer.w", GgmlType::F16, &[0; 2], [1, 1]), "codes with scales, got F16"),
    ] {
        assert!(matches!(result, Err(Error::Numbers { .. })), "{result:?}");
        assert_names(&text_of(result), &["layer.w", part]);
    }
    assert_eq!(q4_0(&[], [0, 32]).unwrap().n(), 0);
    let rows = |codes: usize, scales: usize, offsets: usize| {
        let (mut codes, mut scales, mut offsets) = (vec![0; codes], vec![0.0; scales], vec![0.0; offsets]);
        unpack_rows(GgmlType::Q4_1, &[0; 40], 32, &mut codes, &mut scales, &mut offsets)
    };
    assert!(rows(64, 2, 2).is_ok());
    for (codes, scales, offsets) in [(32, 2, 2), (96, 2, 2), (64, 1, 2), (64, 2, 1), (64, 2, 0), (48, 2, 2)] {
        assert!(rows(codes, scales, offsets).is_err(), "{codes} {scales} {offsets}");
    }
}

/// A matrix of a type that has a name here and no more is no damage, whatever it is for.
#[test]
fn types_that_are_not_read_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    for kind in [GgmlType::IQ1_S, GgmlType::IQ2_XXS, GgmlType::TQ1_0] {
        for name in ["blk.0.ffn_down.weight", "token_embd.weight"] {
            let spec = TensorSpec { name: name.into(), ggml_type: kind, shape: vec![2, 256] };
            let mut writer = create(&path, &[], &[spec]).unwrap();
            writer.write(name, &vec![0; 2 * kind.block_bytes()]).unwrap();
            writer.finish().unwrap();
            let result = linears(&Weights::open(&path).unwrap()).map(drop);
            assert!(matches!(result, Err(Error::Unsupported { .. })), "{result:?}");
            assert_names(&text_of(result), &[name, &format!("blocks of {kind}, which is not read")]);
            std::fs::remove_file(&path).unwrap();
        }
    }
}

#[test]
fn scales_that_are_no_numbers_are_refused() {
    // Where the halves of each type lie.
    let halves: [(GgmlType, &[usize]); 12] = [
        (GgmlType::Q4_0, &[0]),
        (GgmlType::Q4_1, &[0, 2]),
        (GgmlType::Q5_0, &[0]),
        (GgmlType::Q5_1, &[0, 2]),
        (GgmlType::Q8_0, &[0]),
        (GgmlType::Q2_K, &[80, 82]),
        (GgmlType::Q3_K, &[108]),
        (GgmlType::Q4_K, &[0, 2]),
        (GgmlType::Q5_K, &[0, 2]),
        (GgmlType::Q6_K, &[208]),
        (GgmlType::IQ4_NL, &[0]),
        (GgmlType::IQ4_XS, &[0]),
    ];
    for (kind, places) in halves {
        let bytes = vec![0x11; 2 * kind.block_bytes()];
        let shape = [2, kind.block_len()];
        unpack("w", kind, &bytes, shape).unwrap();
        for (&at, half) in places.iter().flat_map(|at| [0x7c00u16, 0xfc00, 0x7e00].map(|half| (at, half))) {
            let mut bytes = bytes.clone();
            bytes[kind.block_bytes() + at..][..2].copy_from_slice(&half.to_le_bytes());
            let result = unpack("layer.w", kind, &bytes, shape);
            assert!(matches!(result, Err(Error::Numbers { .. })), "{kind} {at} {half:x}");
            assert_names(&text_of(result), &["layer.w", "finite"]);
        }
    } // Bytes that are no scales: E8M0 has one, E4M3 without a sign all from 0x7f on.
    for (kind, places, bad) in
        [(GgmlType::MXFP4, 0..1, [255].as_slice()), (GgmlType::NVFP4, 0..4, &[0x7f, 0x80, 0xb8, 0xff])]
    {
        let (bytes, shape) = (vec![0x11; 2 * kind.block_bytes()], [2, kind.block_len()]);
        unpack("w", kind, &bytes, shape).unwrap();
        for (at, &scale) in places.flat_map(|at| bad.iter().map(move |scale| (at, scale))) {
            let mut bytes = bytes.clone();
            bytes[kind.block_bytes() + at] = scale;
            let result = unpack("layer.w", kind, &bytes, shape);
            assert!(matches!(result, Err(Error::Numbers { .. })), "{kind} {at} {scale:x}");
            assert_names(&text_of(result), &["layer.w", "finite", "NaN"]);
            let groups = kind.weight_format().unwrap().group.count(shape[1]);
            let (mut codes, mut scales) = (vec![0; 2 * shape[1]], vec![0.0; 2 * groups]);
            unpack_rows(kind, &bytes, shape[1], &mut codes, &mut scales, &mut []).unwrap();
            assert_eq!(scales.iter().position(|scale| scale.is_nan()), Some(groups + at), "as the file has them");
        }
    }
}
