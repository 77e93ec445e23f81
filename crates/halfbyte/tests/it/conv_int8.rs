//! Convolutions of bytes: bit by bit as other software and the reference have it, on every instruction set.

use crate::conv::{LAYOUTS, cases, golden_cases, golden_shape, laid_out, planes};
use crate::cpu::with_each_isa;
use crate::data::{Random, rounded};
use crate::golden::Golden;
use half::{bf16, f16};
use halfbyte::conv::{Conv2dShape, Geometry, Layout2d};
use halfbyte::cpu::Cpu;
use halfbyte::format::int8::{Affine, Byte, Bytes, BytesMut, Int8Weight, multiplier};
use halfbyte::format::reference;
use halfbyte::ops::{Activation, Conv2dInt8};
use halfbyte::{Float, FloatsMut};

/// Bytes of a type, from their bits.
pub fn bytes(byte: Byte, bits: &[u8]) -> Bytes<'_> {
    match byte {
        Byte::U8 => Bytes::U8(bits),
        Byte::I8 => Bytes::I8(bytemuck::cast_slice(bits)),
    }
}

pub fn type_of(signed: bool) -> Byte {
    if signed { Byte::I8 } else { Byte::U8 }
}

/// y `[batch, co, oh, ow]` of x `[batch, ci, h, w]`, as bits.
pub fn forward(conv: &Conv2dInt8, cpu: &Cpu, x: &[u8], shape: &Conv2dShape, layouts: [Layout2d; 2]) -> Vec<u8> {
    const CANARY: u8 = 0xa5;
    let conv = conv.clone().with_layouts(layouts[0], layouts[1]);
    let geometry = shape.geometry();
    let x = laid_out(x, [shape.batch(), geometry.ci, shape.input().iter().product()], layouts[0]);
    let mut y = vec![CANARY; shape.y_len() + 64];
    let out = &mut y[32..32 + shape.y_len()];
    let out = match conv.y().unwrap().byte() {
        Byte::U8 => BytesMut::U8(out),
        Byte::I8 => BytesMut::I8(bytemuck::cast_slice_mut(out)),
    };
    conv.forward(cpu, bytes(conv.x().byte(), &x), shape.batch(), shape.input(), out).unwrap();
    let (before, rest) = y.split_at(32);
    let (y, after) = rest.split_at(shape.y_len());
    assert!(before.iter().chain(after).all(|&v| v == CANARY), "wrote outside of its output");
    planes(y, [shape.batch(), geometry.co, shape.output().iter().product()], layouts[1])
}

#[test]
fn convolutions_of_other_software() {
    let (cpus, cases) = (with_each_isa(2), golden_cases("conv_int8"));
    assert_eq!(cases.len(), 28);
    let mut with_relu = 0;
    for (name, case) in &cases {
        let golden = Golden::read(&format!("conv_int8/{name}"));
        let shape = golden_shape(&golden, case);
        let geometry = *shape.geometry();
        let affine = |name: &str| {
            let (scale, zero) = (golden.f32s(&format!("{name}_scale"))[0], golden.ints(&format!("{name}_zp"))[0]);
            Affine::new(type_of(golden.bytes(name).0), scale, zero).unwrap()
        };
        let (signed, w) = golden.bytes("w");
        let w = geometry.weight_rows(&w).unwrap();
        let (scales, zeros) = (golden.f32s("w_scale"), golden.ints("w_zp"));
        let weight = bytes(type_of(signed), &w);
        let weight = Int8Weight::new(weight, [geometry.co, geometry.k()], &scales, &zeros).unwrap();
        let conv = Conv2dInt8::new(&weight, geometry, affine("x"), affine("y")).unwrap();
        let conv = conv.with_bias(golden.ints("bias_i32")).unwrap();
        let relu = conv.clone().with_activation(Activation::Relu).unwrap();
        let x = golden.bytes("x").1;
        for cpu in &cpus {
            for layouts in LAYOUTS.iter().flat_map(|&x| LAYOUTS.map(|y| [x, y])) {
                let y = forward(&conv, cpu, &x, &shape, layouts);
                assert_eq!(y, golden.bytes("y_ort").1, "{name} {layouts:?} on {:?}", cpu.caps());
                if golden.has("y_relu_torch_fbgemm") {
                    let y = forward(&relu, cpu, &x, &shape, layouts);
                    assert_eq!(y, golden.bytes("y_relu_torch_fbgemm").1, "{name} with relu {layouts:?}");
                    with_relu += 1;
                }
            }
        }
    }
    assert!(with_relu > 0);
}

/// y `[batch, co, oh, ow]` by the f64 reference, whose sums of integers are exact.
fn expected(x: &[u8], w: &Int8Weight<'_>, bias: &[i32], [x_is, y_is]: [Affine; 2], shape: &Conv2dShape) -> Vec<u8> {
    let values: Vec<f64> = (0..x.len()).map(|i| f64::from(bytes(x_is.byte(), x).get(i) - x_is.zero())).collect();
    let weights: Vec<f64> = (0..w.n() * w.k()).map(|i| f64::from(w.codes().get(i) - w.zero(i / w.k()))).collect();
    let sums = reference::conv2d(&values, &weights, shape).value;
    let pixels = shape.output().iter().product::<usize>();
    let code = |(i, sum): (usize, &f64)| {
        let o = i / pixels % w.n();
        let sum = *sum as i64 + i64::from(bias[o]);
        reference::requantize(sum, multiplier(x_is, w.scale(o), y_is), y_is.zero(), y_is.byte().codes()) as u8
    };
    sums.iter().enumerate().map(code).collect()
}

#[test]
fn every_geometry_and_type_is_exact() {
    let cpus = with_each_isa(3);
    let mut random = Random(41);
    let large = (Geometry { padding: [1; 4], ..Geometry::new(24, 40, [3, 3]) }, 2, [23, 20]);
    let many = (Geometry { padding: [1; 4], groups: 33, ..Geometry::new(33, 66, [3, 3]) }, 2, [23, 20]);
    // Padding so wide that the image is not brought into it; the middle one of 3 × 3 windows sees the image.
    let far = Geometry { stride: [1 << 30; 2], padding: [1 << 30; 4], ..Geometry::new(4, 6, [3, 3]) };
    let far = (far, 1, [4, 5]);
    let (mut codes, mut clamped) = (0, 0);
    for (turn, (geometry, batch, size)) in cases().into_iter().chain([large, many, far]).enumerate() {
        let shape = Conv2dShape::new(geometry, batch, size).unwrap();
        for (x_byte, w_byte, y_byte) in [
            (Byte::U8, Byte::I8, Byte::U8),
            (Byte::I8, Byte::I8, Byte::I8),
            (Byte::U8, Byte::U8, Byte::I8),
            (Byte::I8, Byte::U8, Byte::U8),
        ] {
            let mut bits = |len: usize| -> Vec<u8> { (0..len).map(|_| random.bits() as u8).collect() };
            let (x, w) = (bits(shape.x_len()), bits(geometry.co * geometry.k()));
            let zero = |byte: Byte, random: &mut Random| byte.codes().start() + 96 + random.below(64) as i32;
            let zeros: Vec<i32> = (0..geometry.co).map(|_| zero(w_byte, &mut random)).collect();
            let scales: Vec<f32> = (0..geometry.co).map(|_| 0.001 + 0.001 * random.normal().abs()).collect();
            let bias: Vec<i32> = (0..geometry.co).map(|_| random.below(20001) as i32 - 10000).collect();
            let zeros = if turn % 3 == 0 { &[] } else { &zeros[..] };
            let weight = Int8Weight::new(bytes(w_byte, &w), [geometry.co, geometry.k()], &scales, zeros).unwrap();
            let x_is = Affine::new(x_byte, 0.02, zero(x_byte, &mut random)).unwrap();
            // So that few codes are clamped.
            let spread = 0.02 * 0.002 * 5000.0 * (geometry.k() as f32).sqrt() / 60.0;
            let y_is = Affine::new(y_byte, spread, zero(y_byte, &mut random)).unwrap();
            let want = expected(&x, &weight, &bias, [x_is, y_is], &shape);
            let ends = y_byte.codes().into_inner();
            codes += want.len();
            clamped += want.iter().filter(|&&code| code == ends.0 as u8 || code == ends.1 as u8).count();
            let conv = Conv2dInt8::new(&weight, geometry, x_is, y_is).unwrap().with_bias(bias.clone()).unwrap();
            for (c, cpu) in cpus.iter().enumerate() {
                let layouts = [LAYOUTS[(turn + c) % 2], LAYOUTS[(turn / 2 + c) % 2]];
                let y = forward(&conv, cpu, &x, &shape, layouts);
                assert!(y == want, "{geometry:?} {size:?} {x_byte:?} {w_byte:?} {layouts:?} on {:?}", cpu.caps());
            }
        }
    }
    assert!(clamped < codes / 2, "{clamped} of {codes} codes are clamped");
}

/// y `[batch, co, oh, ow]` in floats of a type.
fn forward_floats(
    conv: &Conv2dInt8,
    cpu: &Cpu,
    x: &[u8],
    shape: &Conv2dShape,
    layouts: [Layout2d; 2],
    dtype: Float,
) -> Vec<f32> {
    let conv = conv.clone().with_layouts(layouts[0], layouts[1]);
    let (batch, [h, w], geometry) = (shape.batch(), shape.input(), shape.geometry());
    let x = laid_out(x, [batch, geometry.ci, h * w], layouts[0]);
    let (x, len) = (bytes(conv.x().byte(), &x), shape.y_len());
    let run = |y: FloatsMut<'_>| conv.forward_floats(cpu, x, batch, [h, w], y).unwrap();
    let y: Vec<f32> = match dtype {
        Float::F32 => {
            let mut y = vec![f32::NAN; len];
            run(FloatsMut::F32(&mut y));
            y
        }
        Float::F16 => {
            let mut y = vec![f16::NAN; len];
            run(FloatsMut::F16(&mut y));
            y.into_iter().map(f16::to_f32).collect()
        }
        Float::BF16 => {
            let mut y = vec![bf16::NAN; len];
            run(FloatsMut::BF16(&mut y));
            y.into_iter().map(bf16::to_f32).collect()
        }
    };
    planes(&y, [batch, geometry.co, shape.output().iter().product()], layouts[1])
}

#[test]
fn outputs_in_floats_are_exact_sums_times_their_scales() {
    let cpus = with_each_isa(3);
    let mut random = Random(43);
    let many = (Geometry { padding: [1; 4], groups: 33, ..Geometry::new(33, 66, [3, 3]) }, 2, [23, 20]);
    for (turn, (geometry, batch, size)) in cases().into_iter().chain([many]).enumerate() {
        let shape = Conv2dShape::new(geometry, batch, size).unwrap();
        let (x_byte, w_byte) = (type_of(turn % 2 == 0), type_of(turn % 4 < 2));
        let mut bits = |len: usize| -> Vec<u8> { (0..len).map(|_| random.bits() as u8).collect() };
        let (x, w) = (bits(shape.x_len()), bits(geometry.co * geometry.k()));
        let middle = |byte: Byte| byte.codes().start() + 120;
        let zeros = vec![middle(w_byte); geometry.co];
        let scales: Vec<f32> = (0..geometry.co).map(|_| 0.001 + 0.001 * random.normal().abs()).collect();
        let bias: Vec<i32> = (0..geometry.co).map(|_| random.below(20001) as i32 - 10000).collect();
        let float_bias = random.normals(geometry.co);
        let zeros = if turn % 3 == 0 { &[] } else { &zeros[..] };
        let weight = Int8Weight::new(bytes(w_byte, &w), [geometry.co, geometry.k()], &scales, zeros).unwrap();
        let x_is = Affine::new(x_byte, 0.02, middle(x_byte) + 5).unwrap();

        let values: Vec<f64> = (0..x.len()).map(|i| f64::from(bytes(x_byte, &x).get(i) - x_is.zero())).collect();
        let weights: Vec<f64> =
            (0..w.len()).map(|i| f64::from(weight.codes().get(i) - weight.zero(i / weight.k()))).collect();
        let sums = reference::conv2d(&values, &weights, &shape).value;
        let pixels = shape.output().iter().product::<usize>();
        let activation = [Activation::None, Activation::Relu][turn % 2];
        let value = |(i, sum): (usize, &f64)| {
            let o = i / pixels % geometry.co;
            let sum = (*sum as i64 + i64::from(bias[o])) as f32 * (x_is.scale() * scales[o]) + float_bias[o];
            if activation == Activation::Relu { sum.max(0.0) } else { sum }
        };
        let want: Vec<f32> = sums.iter().enumerate().map(value).collect();
        let conv = Conv2dInt8::with_float_outputs(&weight, geometry, x_is).unwrap().with_bias(bias.clone()).unwrap();
        let conv = conv.with_float_bias(float_bias.clone()).unwrap().with_activation(activation).unwrap();
        assert_eq!(conv.y(), None);
        for (c, cpu) in cpus.iter().enumerate() {
            let layouts = [LAYOUTS[(turn + c) % 2], LAYOUTS[(turn / 2 + c) % 2]];
            let dtype = [Float::F32, Float::F16, Float::BF16][(turn + c) % 3];
            let y = forward_floats(&conv, cpu, &x, &shape, layouts, dtype);
            let what = format!("{geometry:?} {size:?} {x_byte:?} {w_byte:?} {layouts:?} {dtype} on {:?}", cpu.caps());
            assert!(y == rounded(&want, dtype), "{what}");
        }
    }
}

/// Without the zero point of x, which is taken off at the end, sums of 40,000 products are beyond int32.
#[test]
fn depthwise_sums_may_leave_int32_on_the_way() {
    for channels in [3, 65] {
        let geometry = Geometry { groups: channels, ..Geometry::new(channels, channels, [200, 200]) };
        let shape = Conv2dShape::new(geometry, 1, [200, 200]).unwrap();
        let (w, x) = (vec![255; channels * geometry.k()], vec![255; shape.x_len()]);
        let weight = Int8Weight::new(Bytes::U8(&w), [channels, geometry.k()], &[1.0], &[]).unwrap();
        let (x_is, y_is) = (Affine::new(Byte::U8, 1.0, 128).unwrap(), Affine::new(Byte::U8, 1e7, 0).unwrap());
        let want = expected(&x, &weight, &vec![0; channels], [x_is, y_is], &shape);
        assert_eq!(want, vec![130; channels]);
        let conv = Conv2dInt8::new(&weight, geometry, x_is, y_is).unwrap();
        for cpu in with_each_isa(1) {
            assert_eq!(forward(&conv, &cpu, &x, &shape, [Layout2d::Nhwc; 2]), want, "{:?}", cpu.caps());
        }
    }
}

#[test]
fn wrong_types_shapes_and_lengths_are_errors() {
    let geometry = Geometry::new(2, 3, [3, 3]);
    let (codes, x) = ([1i8; 54], [0u8; 32]);
    let cpu = Cpu::new(1).unwrap();
    let weight = |shape| Int8Weight::new(Bytes::I8(&codes), shape, &[0.1], &[]).unwrap();
    let (x_is, y_is) = (Affine::new(Byte::U8, 0.1, 3).unwrap(), Affine::new(Byte::I8, 0.5, 0).unwrap());
    let conv = Conv2dInt8::new(&weight([3, 18]), geometry, x_is, y_is).unwrap();
    let forward = |x: Bytes<'_>, y: BytesMut<'_>| conv.forward(&cpu, x, 1, [4, 4], y).map_err(|e| e.to_string());
    let mut y = [0i8; 12];
    assert_eq!(forward(Bytes::U8(&x), BytesMut::I8(&mut y)), Ok(()));
    let refused = |result: Result<(), String>, text: &str| assert_eq!(result.unwrap_err(), text);
    let short = forward(Bytes::U8(&x[1..]), BytesMut::I8(&mut y));
    refused(short, "conv2d int8: expected x of 1 × 2 × 4 × 4, got 31 elements");
    let short = forward(Bytes::U8(&x), BytesMut::I8(&mut y[1..]));
    refused(short, "conv2d int8: expected y of 1 × 3 × 2 × 2, got 11 elements");
    refused(forward(Bytes::I8(&[0; 32]), BytesMut::I8(&mut y)), "conv2d int8: expected inputs in u8, got i8");
    refused(forward(Bytes::U8(&x), BytesMut::U8(&mut [0; 12])), "conv2d int8: expected outputs in i8, got u8");
    assert!(Conv2dInt8::new(&weight([6, 9]), geometry, x_is, y_is).is_err());
    assert!(Conv2dInt8::new(&weight([3, 18]), Geometry { groups: 2, ..geometry }, x_is, y_is).is_err());
    assert!(conv.clone().with_bias(vec![0; 2]).is_err());
    assert!(conv.clone().with_bias(vec![i32::MAX; 3]).is_err());
    assert!(conv.clone().with_activation(Activation::Gelu).is_err());
    assert!(conv.clone().with_float_bias(vec![0.0; 3]).is_err());
    let mut y = [0.0; 12];
    let to_floats =
        |conv: &Conv2dInt8, y: &mut [f32]| conv.forward_floats(&cpu, Bytes::U8(&x), 1, [4, 4], FloatsMut::F32(y));
    let of_bytes = to_floats(&conv, &mut y).unwrap_err().to_string();
    assert_eq!(of_bytes, "conv2d int8: expected outputs in bytes, got f32");
    let floats = Conv2dInt8::with_float_outputs(&weight([3, 18]), geometry, x_is).unwrap();
    let floats = floats.with_activation(Activation::Gelu).unwrap();
    assert!(to_floats(&floats, &mut y).is_ok() && to_floats(&floats, &mut y[1..]).is_err());
    assert!(floats.clone().with_float_bias(vec![0.0; 2]).is_err());
    let of_floats = floats.forward(&cpu, Bytes::U8(&x), 1, [4, 4], BytesMut::I8(&mut [0; 12])).unwrap_err();
    assert_eq!(of_floats.to_string(), "conv2d int8: expected outputs in floats, got i8");
}
