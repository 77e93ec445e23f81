//! Bytes in, bytes out: bit by bit as other software and the reference have it, on every instruction set.

use crate::cpu::with_each_isa;
use crate::data::Random;
use crate::golden::Golden;
use half::{bf16, f16};
use halfbyte::cpu::Cpu;
use halfbyte::format::int8::{Affine, Byte, Bytes, BytesMut, Int8Weight, Mean, multiplier};
use halfbyte::format::reference;
use halfbyte::layout::cpu_int8::CpuInt8;
use halfbyte::ops::{Activation, LinearInt8};
use halfbyte::{Error, FloatsMut};

/// Bytes of either type, as their bits.
#[derive(Clone, Debug, PartialEq)]
struct Data(Byte, Vec<u8>);

impl Data {
    fn get(&self) -> Bytes<'_> {
        match self.0 {
            Byte::U8 => Bytes::U8(&self.1),
            Byte::I8 => Bytes::I8(bytemuck::cast_slice(&self.1)),
        }
    }

    fn of_codes(byte: Byte, codes: impl IntoIterator<Item = i32>) -> Self {
        Self(byte, codes.into_iter().map(|code| code as u8).collect())
    }
}

fn forward(linear: &LinearInt8, cpu: &Cpu, x: &Data, m: usize) -> Data {
    const CANARY: u8 = 0xa5;
    let len = m * linear.n();
    let mut y = vec![CANARY; len + 128];
    let inside = &mut y[64..64 + len];
    let byte = linear.y().unwrap().byte();
    let target = match byte {
        Byte::U8 => BytesMut::U8(inside),
        Byte::I8 => BytesMut::I8(bytemuck::cast_slice_mut(inside)),
    };
    linear.forward(cpu, x.get(), m, target).unwrap();
    assert!(y[..64].iter().chain(&y[64 + len..]).all(|&v| v == CANARY), "wrote outside of its output");
    Data(byte, y[64..64 + len].to_vec())
}

/// Scale, zero point and bytes of a golden tensor, whose zero point has another name if it has one.
fn affine(golden: &Golden, name: &str, byte: Byte) -> Affine {
    Affine::new(byte, golden.f32s(&format!("{name}_scale"))[0], golden.ints(&format!("{name}_zp"))[0]).unwrap()
}

fn data(golden: &Golden, name: &str) -> Data {
    let (signed, bytes) = golden.bytes(name);
    Data(if signed { Byte::I8 } else { Byte::U8 }, bytes)
}

#[test]
fn means_of_sums_that_no_codes_have_lie_at_the_ends() {
    let affine = |zero| Affine::new(Byte::U8, 1.0, zero).unwrap();
    let mean = Mean::new(affine(200), 4, affine(7)).unwrap();
    assert_eq!([i32::MIN, i32::MAX, 800, 804].map(|sum| mean.code(sum)), [0, 255, 7, 8]);
}

#[test]
fn linear_layers_of_other_software() {
    for name in ["1x64x32", "5x100x24", "16x256x48"] {
        let golden = Golden::read(&format!("linear_int8/qlinear_{name}"));
        let (x, w, y) = (data(&golden, "x"), data(&golden, "w"), data(&golden, "y"));
        assert_eq!(y, data(&golden, "y_torch_fbgemm"));
        let (m, shape) = (golden.shape("x")[0], [golden.shape("w")[0], golden.shape("w")[1]]);
        let scales = golden.f32s("w_scale");
        let weight = Int8Weight::new(w.get(), shape, &scales, &[]).unwrap();
        let (x_affine, y_affine) = (affine(&golden, "x", x.0), affine(&golden, "y", y.0));
        let linear = LinearInt8::new(&weight, x_affine, y_affine).unwrap();
        let linear = linear.with_bias(golden.ints("bias_i32")).unwrap();
        let sums = reference::int8_sums(x.get(), m, x_affine.zero(), &weight, None);
        assert_eq!(sums, golden.ints("acc_i32").into_iter().map(i64::from).collect::<Vec<_>>());
        // Products of signed bytes without scales, in floats: exact as far as these sums go.
        let signed = data(&golden, "xs_int8");
        let ones = Int8Weight::new(w.get(), shape, &[1.0], &[]).unwrap();
        let product = LinearInt8::with_float_outputs(&ones, Affine::new(Byte::I8, 1.0, 0).unwrap()).unwrap();
        for cpu in with_each_isa(2) {
            assert_eq!(forward(&linear, &cpu, &x, m), y, "{name} on {:?}", cpu.caps());
            let mut floats = vec![0.0; m * shape[0]];
            product.forward_floats(&cpu, signed.get(), m, FloatsMut::F32(&mut floats)).unwrap();
            assert_eq!(floats.iter().map(|&v| v as i32).collect::<Vec<_>>(), golden.ints("xs_w_i32"));
        }
    }
}

#[test]
fn sums_close_to_halves_round_as_onnxruntime_rounds_them() {
    for kind in ["u8s8", "s8s8", "u8u8"] {
        let golden = Golden::read(&format!("qlinear_matmul/near_ties_{kind}"));
        let (x, w, y) = (data(&golden, "x"), data(&golden, "w"), data(&golden, "y"));
        let (m, shape) = (golden.shape("x")[0], [golden.shape("w")[0], golden.shape("w")[1]]);
        let (scales, zeros) = (golden.f32s("w_scale"), golden.ints("w_zp"));
        let weight = Int8Weight::new(w.get(), shape, &scales, &zeros).unwrap();
        let (x_affine, y_affine) = (affine(&golden, "x", x.0), affine(&golden, "y", y.0));
        let linear = LinearInt8::new(&weight, x_affine, y_affine).unwrap();
        assert_eq!(reference_codes(&x, m, &weight, x_affine, None, y_affine, y_affine.byte().codes()), y);
        for cpu in with_each_isa(2) {
            assert_eq!(forward(&linear, &cpu, &x, m), y, "{kind} on {:?}", cpu.caps());
        }
    }
}

#[test]
fn convolutions_of_other_software_as_products_of_patches() {
    let cases = std::fs::read_to_string(crate::golden::path("conv_int8/cases.json")).unwrap();
    let cases: serde_json::Map<String, serde_json::Value> = serde_json::from_str(&cases).unwrap();
    assert_eq!(cases.len(), 28);
    for (name, case) in &cases {
        let golden = Golden::read(&format!("conv_int8/{name}"));
        let numbers = |key: &str| -> Vec<usize> { serde_json::from_value(case[key].clone()).unwrap() };
        let (stride, padding, dilation) = (numbers("stride"), numbers("pad_tlbr"), numbers("dilation"));
        let groups = case["groups"].as_u64().unwrap() as usize;
        let (x, w, y) = (data(&golden, "x"), data(&golden, "w"), data(&golden, "y_ort"));
        let (x_affine, y_affine) = (affine(&golden, "x", x.0), affine(&golden, "y", y.0));
        let (scales, bias) = (golden.f32s("w_scale"), golden.ints("bias_i32"));
        let zeros = golden.ints("w_zp");
        let &[batch, channels, height, width] = golden.shape("x") else { panic!() };
        let &[outputs, inner, kh, kw] = golden.shape("w") else { panic!() };
        let &[_, _, oh, ow] = golden.shape("y") else { panic!() };
        let (k, per_group, m) = (inner * kh * kw, outputs / groups, batch * oh * ow);

        for group in 0..groups {
            let mut patches = Vec::with_capacity(m * k);
            for row in 0..m {
                let (b, oy, ox) = (row / (oh * ow), row / ow % oh, row % ow);
                for j in 0..k {
                    let (c, ky, kx) = (group * inner + j / (kh * kw), j / kw % kh, j % kw);
                    let (iy, ix) = (oy * stride[0] + ky * dilation[0], ox * stride[1] + kx * dilation[1]);
                    let pixel = (iy.checked_sub(padding[0]).zip(ix.checked_sub(padding[1])))
                        .filter(|&(iy, ix)| iy < height && ix < width);
                    patches.push(match pixel {
                        Some((iy, ix)) => x.1[((b * channels + c) * height + iy) * width + ix],
                        None => x_affine.zero() as u8,
                    });
                }
            }
            let patches = Data(x.0, patches);
            let range = group * per_group..(group + 1) * per_group;
            let codes = Data(w.0, w.1[range.start * k..range.end * k].to_vec());
            let scales = if scales.len() == 1 { &scales[..] } else { &scales[range.clone()] };
            let weight = Int8Weight::new(codes.get(), [per_group, k], scales, &zeros).unwrap();
            let linear = LinearInt8::new(&weight, x_affine, y_affine).unwrap();
            let linear = linear.with_bias(bias[range.clone()].to_vec()).unwrap();
            let relu = linear.clone().with_activation(Activation::Relu).unwrap();
            let of_group = |y: &Data| {
                let at =
                    |i: usize, row: usize| ((row / (oh * ow)) * outputs + range.start + i) * oh * ow + row % (oh * ow);
                Data(y.0, (0..m * per_group).map(|e| y.1[at(e % per_group, e / per_group)]).collect())
            };
            for cpu in with_each_isa(2) {
                assert_eq!(forward(&linear, &cpu, &patches, m), of_group(&y), "{name} on {:?}", cpu.caps());
                if golden.has("y_relu_torch_fbgemm") {
                    let want = of_group(&data(&golden, "y_relu_torch_fbgemm"));
                    assert_eq!(forward(&relu, &cpu, &patches, m), want, "{name} with relu on {:?}", cpu.caps());
                }
            }
        }
    }
}

fn reference_codes(
    x: &Data,
    m: usize,
    w: &Int8Weight<'_>,
    x_affine: Affine,
    bias: Option<&[i32]>,
    y: Affine,
    range: std::ops::RangeInclusive<i32>,
) -> Data {
    let sums = reference::int8_sums(x.get(), m, x_affine.zero(), w, bias);
    let code = |(at, &sum): (usize, &i64)| {
        reference::requantize(sum, multiplier(x_affine, w.scale(at % w.n()), y), y.zero(), range.clone())
    };
    Data::of_codes(y.byte(), sums.iter().enumerate().map(code))
}

/// A random byte; every eighth one of the type's ends.
fn code(random: &mut Random, byte: Byte) -> i32 {
    let (low, high) = byte.codes().into_inner();
    match random.below(16) {
        0 => low,
        1 => high,
        _ => low + random.below(256) as i32,
    }
}

fn codes(random: &mut Random, byte: Byte, len: usize) -> Data {
    Data::of_codes(byte, (0..len).map(|_| code(random, byte)))
}

const TYPES: [Byte; 2] = [Byte::U8, Byte::I8];

/// Rows, outputs, length of the reduction.
const SHAPES: &[[usize; 3]] = &[
    [0, 3, 4],
    [1, 0, 4],
    [3, 5, 0],
    [1, 1, 1],
    [1, 16, 4],
    [2, 17, 3],
    [5, 64, 64],
    [6, 65, 7],
    [7, 48, 130],
    [11, 100, 33],
    [12, 31, 20],
    [13, 33, 129],
    [25, 16, 256],
    [49, 97, 45],
    [100, 80, 12],
    [130, 33, 1025],
    [300, 130, 30],
];

#[test]
fn random_products_are_the_references_on_every_instruction_set() {
    let mut random = Random(21);
    let cpus = with_each_isa(3);
    for (s, &[m, n, k]) in SHAPES.iter().enumerate() {
        for (t, (x_type, w_type)) in TYPES.into_iter().flat_map(|x| TYPES.map(|w| (x, w))).enumerate() {
            let x = codes(&mut random, x_type, m * k);
            let w = codes(&mut random, w_type, n * k);
            let per_output = (s + t) % 2 == 0;
            let scales: Vec<f32> =
                (0..if per_output { n } else { 1 }).map(|_| random.normal().abs() * 0.01 + 1e-3).collect();
            let zeros: Vec<i32> = match (w_type, (s + t) % 3) {
                (Byte::I8, 0) => vec![],
                (_, 1) => vec![code(&mut random, w_type)],
                _ => (0..n).map(|_| code(&mut random, w_type)).collect(),
            };
            let weight = Int8Weight::new(w.get(), [n, k], &scales, &zeros).unwrap();
            let bias: Option<Vec<i32>> =
                ((s + t) % 4 > 0).then(|| (0..n).map(|_| (random.normal() * 5000.0) as i32).collect());
            let y_type = TYPES[(s + t / 2) % 2];
            let x_affine = Affine::new(x_type, 0.05, code(&mut random, x_type)).unwrap();
            // Spreads most sums over the codes, and lets some saturate.
            let y_scale = 0.05 * 0.01 * 7000.0 * (k as f32).sqrt().max(1.0) / 100.0;
            let y_affine = Affine::new(y_type, y_scale, code(&mut random, y_type)).unwrap();
            let mut linear = LinearInt8::new(&weight, x_affine, y_affine).unwrap();
            if let Some(bias) = &bias {
                linear = linear.with_bias(bias.clone()).unwrap();
            }
            let want = reference_codes(&x, m, &weight, x_affine, bias.as_deref(), y_affine, y_type.codes());
            for cpu in &cpus {
                let y = forward(&linear, cpu, &x, m);
                assert_eq!(y, want, "{m}×{n}×{k} {x_type:?} {w_type:?} {y_type:?} on {:?}", cpu.caps());
            }
        }
    }
}

#[test]
fn the_greatest_sums_are_exact() {
    // All of x and w at their ends: products of u8 with any weight leave 15 bits, and the sums come close to 31.
    let (m, n, k) = (3, 18, 33000);
    for (x_type, x_code, x_zero) in [(Byte::U8, 255, 0), (Byte::I8, -128, 127), (Byte::U8, 0, 255)] {
        for (w_type, w_code, w_zero) in [(Byte::I8, -128, 127), (Byte::U8, 255, 0), (Byte::I8, 127, -128)] {
            let x = Data::of_codes(x_type, vec![x_code; m * k]);
            let w = Data::of_codes(w_type, vec![w_code; n * k]);
            let zeros = [w_zero];
            let weight = Int8Weight::new(w.get(), [n, k], &[1.0], &zeros).unwrap();
            let x_affine = Affine::new(x_type, 1.0, x_zero).unwrap();
            let sum = k as i64 * i64::from(x_code - x_zero) * i64::from(w_code - w_zero);
            assert!(sum.abs() > 2_140_000_000);
            let linear = LinearInt8::with_float_outputs(&weight, x_affine).unwrap();
            // A bias that brings the sum down to a number that f32 holds: a wrong last bit shows.
            let linear = linear.with_bias(vec![(-sum.signum() * (sum.abs() - 12345)) as i32; n]).unwrap();
            for cpu in with_each_isa(2) {
                let mut y = vec![0.0; m * n];
                linear.forward_floats(&cpu, x.get(), m, FloatsMut::F32(&mut y)).unwrap();
                assert!(y.iter().all(|&v| v == sum.signum() as f32 * 12345.0), "{y:?} on {:?}", cpu.caps());
            }
        }
    }
}

#[test]
fn halves_round_to_even_and_everything_saturates() {
    // One input of 1 times each weight, halved: sums from −128 to 127 are codes from −64 to 63.5.
    let w: Vec<i8> = (-128..=127).collect();
    let weight = Int8Weight::new(Bytes::I8(&w), [256, 1], &[0.5], &[]).unwrap();
    let x_affine = Affine::new(Byte::U8, 1.0, 0).unwrap();
    for y_type in TYPES {
        let (least, greatest) = y_type.codes().into_inner();
        for zero in [least, least + 1, -3, 100, greatest - 1, greatest] {
            let Ok(y_affine) = Affine::new(y_type, 1.0, zero) else { continue };
            let linear = LinearInt8::new(&weight, x_affine, y_affine).unwrap();
            let want = (-128..=127).map(|sum: i32| {
                let half = sum.div_euclid(2);
                let up = sum.rem_euclid(2) == 1 && half.rem_euclid(2) == 1;
                (half + i32::from(up) + zero).clamp(least, greatest)
            });
            let want = Data::of_codes(y_type, want);
            for cpu in with_each_isa(1) {
                assert_eq!(forward(&linear, &cpu, &Data(Byte::U8, vec![1]), 1), want, "zero {zero} {:?}", cpu.caps());
            }
        }
    }
}

#[test]
fn activations_clamp_codes() {
    let mut random = Random(22);
    let (m, n, k) = (9, 40, 50);
    let x = codes(&mut random, Byte::U8, m * k);
    let w = codes(&mut random, Byte::I8, n * k);
    let weight = Int8Weight::new(w.get(), [n, k], &[0.002], &[]).unwrap();
    let (x_affine, y_affine) = (Affine::new(Byte::U8, 0.02, 120).unwrap(), Affine::new(Byte::I8, 0.11, -20).unwrap());
    let linear = LinearInt8::new(&weight, x_affine, y_affine).unwrap();
    for (activation, range) in [
        (Activation::Relu, -20..=127),
        // 6 / 0.11 = 54.5…
        (Activation::Relu6, -20..=35),
        (Activation::Clamp(-1.0, 1.0), -29..=-11),
        (Activation::Clamp(f32::NEG_INFINITY, 0.5), -128..=-15),
        (Activation::None, -128..=127),
    ] {
        let linear = linear.clone().with_activation(activation).unwrap();
        let want = reference_codes(&x, m, &weight, x_affine, None, y_affine, range);
        for cpu in with_each_isa(2) {
            assert_eq!(forward(&linear, &cpu, &x, m), want, "{activation:?} on {:?}", cpu.caps());
        }
    }
}

#[test]
fn outputs_in_floats() {
    let mut random = Random(23);
    for [m, n, k] in [[1, 20, 30], [13, 65, 77]] {
        let x = codes(&mut random, Byte::I8, m * k);
        let w = codes(&mut random, Byte::I8, n * k);
        let scales: Vec<f32> = (0..n).map(|_| random.normal().abs() * 0.01 + 1e-3).collect();
        let weight = Int8Weight::new(w.get(), [n, k], &scales, &[3]).unwrap();
        let x_affine = Affine::new(Byte::I8, 0.03, -7).unwrap();
        let bias: Vec<i32> = (0..n).map(|_| (random.normal() * 500.0) as i32).collect();
        let float_bias = random.normals(n);
        let sums = reference::int8_sums(x.get(), m, -7, &weight, Some(&bias));
        let linear = LinearInt8::with_float_outputs(&weight, x_affine).unwrap();
        let linear = linear.with_bias(bias).unwrap().with_float_bias(float_bias.clone()).unwrap();
        let linear = linear.with_activation(Activation::Relu).unwrap();
        let want: Vec<f32> = sums
            .iter()
            .enumerate()
            .map(|(at, &sum)| (sum as f32 * (0.03f32 * scales[at % n]) + float_bias[at % n]).max(0.0))
            .collect();
        for cpu in with_each_isa(2) {
            let (mut f32s, mut f16s, mut bf16s) = (vec![-1.0; m * n], vec![f16::NAN; m * n], vec![bf16::NAN; m * n]);
            linear.forward_floats(&cpu, x.get(), m, FloatsMut::F32(&mut f32s)).unwrap();
            linear.forward_floats(&cpu, x.get(), m, FloatsMut::F16(&mut f16s)).unwrap();
            linear.forward_floats(&cpu, x.get(), m, FloatsMut::BF16(&mut bf16s)).unwrap();
            assert_eq!(f32s, want, "{:?}", cpu.caps());
            assert_eq!(f16s, want.iter().map(|&v| f16::from_f32(v)).collect::<Vec<_>>());
            assert_eq!(bf16s, want.iter().map(|&v| bf16::from_f32(v)).collect::<Vec<_>>());
        }
    }
}

#[test]
fn the_same_bits_whatever_the_number_of_threads() {
    let mut random = Random(24);
    // So many multiplications that a team shares them: blocks of rows, chunks of outputs, signed rows that are copied.
    for [m, n, k] in [[1, 700, 800], [30, 300, 200], [500, 70, 90]] {
        for x_type in TYPES {
            let x = codes(&mut random, x_type, m * k);
            let w = codes(&mut random, Byte::U8, n * k);
            let weight = Int8Weight::new(w.get(), [n, k], &[0.003], &[130]).unwrap();
            let linear = LinearInt8::new(
                &weight,
                Affine::new(x_type, 0.02, 5).unwrap(),
                Affine::new(Byte::U8, 0.3, 128).unwrap(),
            )
            .unwrap();
            for (one, many) in with_each_isa(1).iter().zip(&with_each_isa(5)) {
                assert_eq!(forward(&linear, one, &x, m), forward(&linear, many, &x, m), "{m}×{n}×{k} {:?}", one.caps());
            }
        }
    }
}

#[test]
fn packing_is_a_bijection() {
    let mut random = Random(25);
    for [n, k] in [[1, 1], [16, 4], [17, 5], [40, 131], [3, 0], [0, 3]] {
        for byte in TYPES {
            let w = codes(&mut random, byte, n * k);
            let packed = CpuInt8::pack(&Int8Weight::new(w.get(), [n, k], &[1.0], &[]).unwrap()).unwrap();
            let flip = if byte == Byte::U8 { 128u8 } else { 0 };
            assert_eq!(packed.unpack(), w.1.iter().map(|&c| (c ^ flip) as i8).collect::<Vec<_>>());
        }
    }
}

#[test]
fn bad_input_is_an_error_that_says_what() {
    let refused = |result: Result<(), Error>, text: &str| assert_eq!(result.unwrap_err().to_string(), text);
    refused(Affine::new(Byte::U8, 0.0, 0).map(drop), "int8 scale: expected a finite scale above 0, got 0");
    refused(Affine::new(Byte::U8, f32::NAN, 0).map(drop), "int8 scale: expected a finite scale above 0, got NaN");
    refused(Affine::new(Byte::U8, 1.0, -1).map(drop), "int8 zero point: expected a code of u8, got -1");
    refused(Affine::new(Byte::I8, 1.0, 128).map(drop), "int8 zero point: expected a code of i8, got 128");

    let w = [1i8; 6];
    let weight = |n, k, scales: &[f32], zeros: &[i32]| Int8Weight::new(Bytes::I8(&w), [n, k], scales, zeros).map(drop);
    refused(weight(2, 4, &[1.0], &[]), "int8 weight: expected 2 × 4 codes, got 6");
    assert!(weight(usize::MAX, 6, &[1.0], &[]).is_err());
    let endless = Int8Weight::new(Bytes::I8(&[]), [usize::MAX / 8, 0], &[1.0], &[]).map(drop);
    let text = "int8 weight: expected at most 16777216 rows or columns of a weight without elements, got";
    assert!(endless.unwrap_err().to_string().starts_with(text));
    refused(weight(3, 2, &[1.0; 2], &[]), "int8 weight: expected 1 or 3 scales, got 2");
    refused(weight(3, 2, &[1.0; 3], &[0; 2]), "int8 weight: expected no, 1 or 3 zero points, got 2");
    refused(weight(3, 2, &[-1.0], &[]), "int8 weight: expected finite scales of at least 0, got -1");
    refused(weight(3, 2, &[1.0], &[200]), "int8 zero point: expected a code of i8, got 200");

    let weight = Int8Weight::new(Bytes::I8(&w), [3, 2], &[1.0], &[]).unwrap();
    let (u8s, i8s) = (Affine::new(Byte::U8, 1.0, 0).unwrap(), Affine::new(Byte::I8, 1.0, 0).unwrap());
    let linear = LinearInt8::new(&weight, u8s, i8s).unwrap();
    let text = "linear int8: expected a bias of 3, got 2";
    refused(linear.clone().with_bias(vec![0; 2]).map(drop), text);
    let text =
        "linear int8: expected sums within int32 for every input, got sums of 2147483647 to 2147484157 at output 1";
    refused(linear.clone().with_bias(vec![0, i32::MAX, 0]).map(drop), text);
    let text = "linear int8: expected none, relu, relu6 or a clamp for codes of 8 bits, got Gelu";
    refused(linear.clone().with_activation(Activation::Gelu).map(drop), text);
    assert!(linear.clone().with_activation(Activation::Clamp(1.0, 0.0)).is_err());
    assert!(linear.clone().with_activation(Activation::Clamp(f32::NAN, 0.0)).is_err());
    assert!(linear.clone().with_float_bias(vec![0.0; 3]).is_err());
    let tiny = Affine::new(Byte::I8, 1e-38, 0).unwrap();
    let huge = Int8Weight::new(Bytes::I8(&w), [3, 2], &[1e10], &[]).unwrap();
    let text = "linear int8: expected finite multipliers, got inf at output 0";
    refused(LinearInt8::new(&huge, u8s, tiny).map(drop), text);

    let cpu = Cpu::new(1).unwrap();
    let (mut y, mut unsigned) = ([0i8; 6], [0u8; 6]);
    let x = Bytes::U8(&[0; 4]);
    let text = "linear int8: expected x of 3 × 2, got 4 elements";
    refused(linear.forward(&cpu, x, 3, BytesMut::I8(&mut y)), text);
    assert!(linear.forward(&cpu, x, usize::MAX, BytesMut::I8(&mut y)).is_err());
    let text = "linear int8: expected y of 2 × 3, got 5 elements";
    refused(linear.forward(&cpu, x, 2, BytesMut::I8(&mut y[..5])), text);
    let text = "linear int8: expected inputs in u8, got i8";
    refused(linear.forward(&cpu, Bytes::I8(&[0; 4]), 2, BytesMut::I8(&mut y)), text);
    let text = "linear int8: expected outputs in i8, got u8";
    refused(linear.forward(&cpu, x, 2, BytesMut::U8(&mut unsigned)), text);
    let text = "linear int8: expected outputs in bytes, got f32";
    refused(linear.forward_floats(&cpu, x, 2, FloatsMut::F32(&mut [0.0; 6])), text);
    let floats = LinearInt8::with_float_outputs(&weight, u8s).unwrap();
    let text = "linear int8: expected outputs in floats, got i8";
    refused(floats.forward(&cpu, x, 2, BytesMut::I8(&mut y)), text);
    assert!(floats.with_float_bias(vec![0.0; 2]).is_err());
}
