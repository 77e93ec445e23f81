//! Layouts of fpA_intB kernels against streams that Paddle and FasterTransformer wrote; rules of quantisers; LLM.int8().

pub mod llm_int8;

use crate::data::Random;
use crate::golden::Golden;
use halfbyte::layout::codes::{FpaIntB, Pairs};
use halfbyte::quantize::{WeightOnlyRule, weight_only};
use halfbyte::{Float, Floats, Group, QTensor, WeightFormat, Zero};

fn format(bits: u32, group: Option<usize>, scale: Float) -> WeightFormat {
    let group = group.map_or(Group::Channel, Group::Size);
    WeightFormat { bits, group, zero: Zero::Symmetric, scale, channel_scale: None }
}

/// Signed codes `[k, n]` as unsigned ones `[n, k]`.
fn unsigned(signed: &[i32], [n, k]: [usize; 2], bits: u32) -> Vec<u8> {
    let middle = 1 << (bits - 1);
    (0..n * k).map(|at| (signed[at % k * n + at / k] + middle) as u8).collect()
}

/// Scales `[groups, n]` of a tensor.
fn scales(q: &QTensor) -> Vec<f32> {
    let groups = q.groups();
    (0..q.n() * groups).map(|at| q.scales()[at % q.n() * groups + at / q.n()]).collect()
}

/// By its definition: where the code of an output and an input lies among the codes of the stream.
fn place(layout: FpaIntB, bits: usize, [n, k]: [usize; 2], i: usize, j: usize) -> usize {
    let a = 16 / bits;
    match layout {
        FpaIntB::RowMajor => {
            let fields = 32 / bits;
            let of_field: Vec<usize> = (0..fields).step_by(2).chain((1..fields).step_by(2)).collect();
            let field = of_field.iter().position(|&output| output == i % fields).unwrap();
            j * n + i / fields * fields + field
        }
        FpaIntB::Interleaved => {
            let kk = j - j % (8 * a) + a * (j % 8) + j / 8 % a;
            i / a * (a * k) + kk / 64 * (64 * a) + i % a * 64 + kk % 64
        }
    }
}

#[test]
fn random_shapes_lie_where_the_definition_says_and_come_back() {
    let mut random = Random(11);
    for round in 0..60 {
        let bits = [4u32, 8][round % 2];
        let layout = [FpaIntB::RowMajor, FpaIntB::Interleaved][round / 2 % 2];
        let [outputs, inputs] = match layout {
            FpaIntB::RowMajor => [32 / bits as usize, 1],
            FpaIntB::Interleaved => [16 / bits as usize, 64],
        };
        let [n, k] = [outputs * (1 + random.below(40)), inputs * (1 + random.below(5))];
        let codes: Vec<u8> = (0..n * k).map(|_| (random.bits() as u8) & ((1u16 << bits) - 1) as u8).collect();
        let stream = layout.pack(&codes, [n, k], bits).unwrap();
        assert_eq!(stream.len(), layout.bytes([n, k], bits).unwrap());
        for (at, &code) in codes.iter().enumerate() {
            let place = place(layout, bits as usize, [n, k], at / k, at % k);
            let stored = match bits {
                8 => stream[place],
                _ => stream[place / 2] >> (4 * (place % 2)) & 15,
            };
            assert_eq!(stored, code, "{layout:?} {bits} bits [{n}, {k}] at {at}");
        }
        assert_eq!(layout.unpack(&stream, [n, k], bits).unwrap(), codes);
        // Any outputs by themselves.
        let first = random.below(n);
        let rows = first..first + 1 + random.below(n - first);
        let mut out = vec![0; rows.len() * k];
        layout.rows(&stream, rows.clone(), [n, k], bits, &mut out);
        assert_eq!(out, codes[rows.start * k..rows.end * k]);
    }
}

#[test]
fn pairs_are_those_of_the_definition_and_come_back() {
    let mut random = Random(12);
    for _ in 0..20 {
        let [n, k] = [2 * (1 + random.below(20)), 2 * (1 + random.below(20))];
        let codes: Vec<u8> = (0..n * k).map(|_| random.below(16) as u8).collect();
        for pairs in [Pairs::Outputs, Pairs::Inputs] {
            let bytes = pairs.pack(&codes, [n, k]).unwrap();
            for (at, &code) in codes.iter().enumerate() {
                let (i, j) = (at / k, at % k);
                let (byte, high) = match pairs {
                    Pairs::Outputs => (j * (n / 2) + i / 2, i % 2),
                    Pairs::Inputs => (j / 2 * n + i, j % 2),
                };
                // Sign extended.
                let signed = ((bytes[byte] >> (4 * high) << 4) as i8) >> 4;
                assert_eq!(i32::from(signed) + 8, i32::from(code));
            }
            assert_eq!(pairs.unpack(&bytes, [n, k]).unwrap(), codes);
        }
    }
    assert!(Pairs::Outputs.pack(&[0; 3], [3, 1]).is_err());
    assert!(Pairs::Inputs.pack(&[0; 3], [1, 3]).is_err());
    assert!(Pairs::Inputs.pack(&[16, 0], [1, 2]).is_err());
    assert!(Pairs::Inputs.unpack(&[0; 2], [1, 2]).is_err());
    let error = Pairs::Outputs.pack(&[], [usize::MAX - 1, 2]).unwrap_err().to_string();
    assert!(error.contains("expected a matrix that fits memory"), "{error}");
}

#[test]
fn what_no_layout_holds_is_an_error() {
    for (layout, shape, bits) in [
        (FpaIntB::Interleaved, [4, 63], 4),
        (FpaIntB::Interleaved, [3, 64], 4),
        (FpaIntB::Interleaved, [3, 64], 8),
        (FpaIntB::RowMajor, [7, 64], 4),
        (FpaIntB::RowMajor, [6, 64], 8),
        (FpaIntB::Interleaved, [16, 64], 3),
        (FpaIntB::Interleaved, [usize::MAX - 3, 64], 4),
    ] {
        assert!(layout.bytes(shape, bits).is_err(), "{layout:?} {shape:?} {bits}");
    }
    let layout = FpaIntB::Interleaved;
    assert!(layout.pack(&[0; 255], [4, 64], 4).is_err());
    assert!(layout.pack(&[16; 256], [4, 64], 4).is_err());
    assert!(layout.unpack(&[0; 127], [4, 64], 4).is_err());
    assert!(layout.pack(&[], [0, 64], 4).unwrap().is_empty());
    // Nothing is allocated for matrices that are not there.
    for shape in [[1 << 31; 2], [1 << 20, 1 << 40]] {
        assert!(FpaIntB::RowMajor.pack(&[], shape, 8).is_err() && FpaIntB::Interleaved.pack(&[], shape, 4).is_err());
        assert!(FpaIntB::RowMajor.unpack(&[], shape, 8).is_err());
        assert!(Pairs::Outputs.pack(&[], shape).is_err() && Pairs::Inputs.pack(&[], shape).is_err());
        assert!(Pairs::Outputs.unpack(&[], shape).is_err());
    }
    assert!(FpaIntB::RowMajor.unpack(&[], [0, usize::MAX], 4).unwrap().is_empty());
    assert!(layout.unpack(&[], [4, 0], 8).unwrap().is_empty());
    for arch in FpaIntB::ARCHS {
        assert_eq!(FpaIntB::of_arch(arch).unwrap() == FpaIntB::RowMajor, arch == 70);
    }
    assert!(FpaIntB::of_arch(60).is_err() && FpaIntB::of_arch(0).is_err());
}

#[test]
fn streams_of_fastertransformer_are_read_and_written() {
    for (bits, name) in [(8, "int8"), (4, "int4")] {
        for [k, n] in [[64, 64], [128, 64], [64, 192]] {
            let file = Golden::read(&format!("ft_mixed_gemm/layout_{name}_{k}x{n}"));
            let codes = unsigned(&file.ints("q"), [n, k], bits);
            for (arch, tensor) in [(70, "sm70_bytes"), (75, "sm80_bytes"), (80, "sm80_bytes"), (89, "sm80_bytes")] {
                let (layout, stream) = (FpaIntB::of_arch(arch).unwrap(), file.bytes(tensor).1);
                assert_eq!(layout.pack(&codes, [n, k], bits).unwrap(), stream, "{name} {k}x{n} sm_{arch}");
                assert_eq!(layout.unpack(&stream, [n, k], bits).unwrap(), codes, "{name} {k}x{n} sm_{arch}");
            }
            let row_major = file.bytes("rowmajor_bytes").1;
            if bits == 4 {
                assert_eq!(Pairs::Outputs.pack(&codes, [n, k]).unwrap(), row_major);
                assert_eq!(Pairs::Outputs.unpack(&row_major, [n, k]).unwrap(), codes);
            }
        }
    }
}

/// Registers as the kernels of these layouts convert them: what comes out in order are the outputs of a row-major word.
#[test]
fn words_are_the_registers_of_fast_conversions() {
    for (name, bits, values) in [("int4", 4u32, "ft_fp16"), ("int8", 8, "fp16_interleaved")] {
        let file = Golden::read(&format!("fast_dequant/{name}_registers"));
        let (words, values) = (file.bits("reg"), file.floats(values).to_f32());
        let [n, k] = [32 / bits as usize, words.len() / 4];
        let codes = FpaIntB::RowMajor.unpack(words, [n, k], bits).unwrap();
        let middle = (1 << (bits - 1)) as f32;
        for (at, &code) in codes.iter().enumerate() {
            assert_eq!(f32::from(code) - middle, values[at % k * n + at / k], "{name} at {at}");
        }
        assert_eq!(FpaIntB::RowMajor.pack(&codes, [n, k], bits).unwrap(), words);
    }
}

#[test]
fn codes_scales_and_streams_are_those_of_paddle() {
    let mut streams = 0;
    for name in [
        "wq_64x16_fp16",
        "wq_64x16_bf16",
        "wq_128x64_fp16",
        "wq_128x64_bf16",
        "wq_192x48_fp16",
        "wq_256x32_fp16",
        "ties_fp16",
    ] {
        let file = Golden::read(&format!("paddle_weight_quantize/{name}"));
        let &[k, n] = file.shape("w") else { panic!("a matrix") };
        let w = file.floats("w");
        for (algorithm, bits) in [("int8", 8), ("int4", 4), ("llm_int8", 8)] {
            for (groups, group) in [(".pc", None), (".g64", Some(64)), (".g128", Some(128)), ("", None)] {
                let part = |what: &str| format!("{algorithm}{groups}.{what}");
                if !file.has(&part("scale")) {
                    continue;
                }
                let stored = file.floats(&part("scale"));
                let scale = if algorithm == "llm_int8" { Float::F32 } else { w.as_floats().dtype() };
                assert_eq!(stored.as_floats().dtype(), scale);
                let q = weight_only(w.as_floats(), [k, n], format(bits, group, scale), WeightOnlyRule::Paddle).unwrap();
                let expected: Vec<u32> = stored.to_f32().iter().map(|s| s.to_bits()).collect();
                assert_eq!(scales(&q).iter().map(|s| s.to_bits()).collect::<Vec<_>>(), expected, "{name} {}", part(""));
                assert_eq!(q.codes(), unsigned(&file.ints(&part("q_rowmajor")), [n, k], bits), "{name} {}", part(""));
                for arch in FpaIntB::ARCHS {
                    let out = part(if arch == 70 { "sm70.out" } else { "sm80.out" });
                    if !file.has(&out) {
                        continue;
                    }
                    let (layout, stream) = (FpaIntB::of_arch(arch).unwrap(), file.bytes(&out).1);
                    assert_eq!(layout.pack(q.codes(), [n, k], bits).unwrap(), stream, "{name} {out}");
                    assert_eq!(layout.unpack(&stream, [n, k], bits).unwrap(), q.codes(), "{name} {out}");
                    streams += 1;
                }
                if algorithm == "llm_int8" {
                    let out: Vec<u8> = file.bytes(&part("out")).1.iter().map(|code| code ^ 0x80).collect();
                    assert_eq!(q.codes(), out, "{name} {}", part("out"));
                    streams += 1;
                }
            }
        }
    }
    assert_eq!(streams, 6 * (2 * (3 * 7 + 1) + 3) + 2 * 8);
}

/// Columns of ±0, of one number, of subnormal and of the largest numbers; those with NaN and infinity are errors.
#[test]
fn odd_columns_have_the_codes_of_paddle() {
    let file = Golden::read("paddle_weight_quantize/special_fp16");
    let ([k, n], w) = ([64, 16], file.floats("w").to_f32());
    let finite: Vec<usize> = (0..n).filter(|i| (0..k).all(|j| w[j * n + i].is_finite())).collect();
    assert!(finite.starts_with(&[0, 1, 2, 3, 4]) && finite.len() < n);
    let columns: Vec<half::f16> = (0..k)
        .flat_map(|j| finite.iter().map(move |i| (j, i)))
        .map(|(j, i)| half::f16::from_f32(w[j * n + i]))
        .collect();
    for (algorithm, bits, scale) in [("int8", 8, Float::F16), ("int4", 4, Float::F16), ("llm_int8", 8, Float::F32)] {
        let (format, shape) = (format(bits, None, scale), [k, finite.len()]);
        let q = weight_only(Floats::from(&columns), shape, format, WeightOnlyRule::Paddle).unwrap();
        let codes = file.ints(&format!("{algorithm}.q_rowmajor"));
        let stored = file.floats(&format!("{algorithm}.scale")).to_f32();
        for (own, &i) in finite.iter().enumerate() {
            assert_eq!(q.scales()[own].to_bits(), stored[i].to_bits(), "{algorithm} column {i}");
            let expected: Vec<u8> = (0..k).map(|j| (codes[j * n + i] + (1 << (bits - 1))) as u8).collect();
            assert_eq!(q.codes()[own * k..][..k], expected, "{algorithm} column {i}");
        }
        let whole = weight_only(file.floats("w").as_floats(), [k, n], format, WeightOnlyRule::Paddle);
        assert!(matches!(whole, Err(halfbyte::Error::NotFinite { .. })));
    }
}

#[test]
fn codes_and_scales_are_those_of_fastertransformer() {
    for (name, dtype) in [("fp16", Float::F16), ("bf16", Float::BF16)] {
        let file = Golden::read(&format!("ft_mixed_gemm/symmetric_quantize_128x64_{name}"));
        let (w, [k, n]) = (file.floats("w"), [128, 64]);
        for (codes, bits) in [("int8", 8), ("int4", 4)] {
            let rule = WeightOnlyRule::FasterTransformer;
            let q = weight_only(w.as_floats(), [k, n], format(bits, None, dtype), rule).unwrap();
            assert_eq!(q.codes(), unsigned(&file.ints(&format!("{codes}.q")), [n, k], bits), "{name} {codes}");
            assert_eq!(scales(&q), file.floats(&format!("{codes}.scale")).to_f32(), "{name} {codes}");
            let stream = FpaIntB::Interleaved.pack(q.codes(), [n, k], bits).unwrap();
            assert_eq!(stream, file.bytes(&format!("{codes}.sm80_bytes")).1, "{name} {codes}");
        }
    }
}

#[test]
fn weights_that_are_none_are_errors() {
    let w = [1f32; 128];
    let refused = |len: usize, shape, format| {
        weight_only(Floats::from(&w[..len]), shape, format, WeightOnlyRule::Paddle).is_err()
    };
    assert!(refused(127, [64, 2], format(8, None, Float::F16)));
    assert!(refused(128, [64, 2], format(3, None, Float::F16)));
    assert!(refused(128, [64, 2], format(4, Some(0), Float::F16)));
    assert!(refused(128, [64, 2], WeightFormat { zero: Zero::Integer, ..format(4, None, Float::F16) }));
    assert!(refused(128, [64, 2], WeightFormat { group: Group::Tensor, ..format(4, None, Float::F16) }));
    assert!(!refused(0, [0, 2], format(4, None, Float::F16)) && !refused(0, [64, 0], format(4, Some(64), Float::F16)));
    // No outputs of any length: a tensor or an error.
    let _ = refused(0, [usize::MAX, 0], format(4, None, Float::F16));
    let _ = refused(0, [usize::MAX, 0], format(8, Some(64), Float::F16));
    assert!(refused(0, [0, usize::MAX], format(4, None, Float::F16)));
    let large = [1e30f32; 64];
    assert!(weight_only(Floats::from(&large), [64, 1], format(8, None, Float::F16), WeightOnlyRule::Paddle).is_err());
}
