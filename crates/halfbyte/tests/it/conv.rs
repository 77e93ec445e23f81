//! Convolutions: geometry, the reference against other software, every kernel against the reference.

mod geometry;

use crate::cpu::{that_run_here, with_each_caps};
use crate::data::{Random, parse, rounded};
use crate::golden::{self, Golden};
use half::{bf16, f16};
use halfbyte::conv::{Conv2dShape, Geometry, Layout2d};
use halfbyte::cpu::Cpu;
use halfbyte::cpu::isa::Isa;
use halfbyte::format::reference::{self, Bound, Product};
use halfbyte::ops::{Activation, Conv2d, Weight};
use halfbyte::quantize::{Rtn, rtn, rtn_conv2d};
use halfbyte::{Act, Float, Floats, FloatsMut};

/// What stands before and after every output, to see that a kernel writes nothing else.
const CANARY: f32 = -7.25e8;

const TYPES: [Float; 3] = [Float::F32, Float::F16, Float::BF16];
pub const LAYOUTS: [Layout2d; 2] = [Layout2d::Nchw, Layout2d::Nhwc];

/// Values `[batch, channels, pixels]` in a layout.
pub fn laid_out<T: Copy>(values: &[T], [batch, channels, pixels]: [usize; 3], layout: Layout2d) -> Vec<T> {
    match layout {
        Layout2d::Nchw => values.to_vec(),
        Layout2d::Nhwc => (0..batch * pixels * channels)
            .map(|i| (i / channels / pixels, i / channels % pixels, i % channels))
            .map(|(b, p, c)| values[(b * channels + c) * pixels + p])
            .collect(),
    }
}

/// The same backwards.
pub fn planes<T: Copy>(values: &[T], [batch, channels, pixels]: [usize; 3], layout: Layout2d) -> Vec<T> {
    // Channels last of [batch, channels, pixels] is channels first of [batch, pixels, channels].
    laid_out(values, [batch, pixels, channels], layout)
}

/// A convolution to be computed.
#[derive(Clone, Copy)]
struct Case<'a> {
    shape: &'a Conv2dShape,
    /// `[batch, ci, h, w]`, of the type `x_type`.
    x: &'a [f32],
    x_type: Float,
    x_layout: Layout2d,
    y_type: Float,
    y_layout: Layout2d,
}

impl Case<'_> {
    /// y `[batch, co, oh, ow]`.
    fn forward(&self, conv: Conv2d, cpu: &Cpu) -> Vec<f32> {
        let (shape, geometry) = (self.shape, self.shape.geometry());
        let conv = conv.with_layouts(self.x_layout, self.y_layout);
        let [h, w] = shape.input();
        let x = laid_out(self.x, [shape.batch(), geometry.ci, h * w], self.x_layout);
        let f16s: Vec<f16> = x.iter().map(|&v| f16::from_f32(v)).collect();
        let bf16s: Vec<bf16> = x.iter().map(|&v| bf16::from_f32(v)).collect();
        let x = match self.x_type {
            Float::F16 => Floats::F16(&f16s),
            Float::BF16 => Floats::BF16(&bf16s),
            Float::F32 => Floats::F32(&x),
        };
        let len = shape.y_len();
        macro_rules! guarded {
            ($variant:ident, $canary:expr, $widen:expr) => {{
                let mut y = vec![$canary; len + 64];
                let out = FloatsMut::$variant(&mut y[32..32 + len]);
                conv.forward(cpu, x, shape.batch(), shape.input(), out).unwrap();
                let intact = |v: &[_]| v.iter().all(|&v| v == $canary);
                assert!(intact(&y[..32]) && intact(&y[32 + len..]), "wrote outside of its output");
                y[32..32 + len].iter().map($widen).collect::<Vec<f32>>()
            }};
        }
        let y = match self.y_type {
            Float::F32 => guarded!(F32, CANARY, |&v| v),
            Float::F16 => guarded!(F16, f16::from_f32(-31744.0), |v| v.to_f32()),
            Float::BF16 => guarded!(BF16, bf16::from_f32(CANARY), |v| v.to_f32()),
        };
        planes(&y, [shape.batch(), geometry.co, shape.output().iter().product()], self.y_layout)
    }
}

fn check(y: &[f32], reference: &Product, k: usize, out: Float, what: &str) {
    let bound = Bound::new(out, k);
    assert_eq!(y.len(), reference.value.len(), "{what}");
    for (i, &y) in y.iter().enumerate() {
        let (want, magnitude) = (reference.value[i], reference.magnitude[i]);
        let error = (f64::from(y) - want).abs();
        let allowed = bound.allowed(magnitude);
        assert!(error <= allowed, "{what}: element {i} is {y}, expected {want} ± {allowed:e}, off by {error:e}");
    }
}

/// Geometries with batch and size of the input: kernels of every kind, padding and strides larger than the kernel, channels
/// that fill no tile, groups.
pub fn cases() -> Vec<(Geometry, usize, [usize; 2])> {
    let new = Geometry::new;
    vec![
        (new(16, 24, [1, 1]), 2, [5, 7]),
        (Geometry { padding: [1; 4], ..new(16, 33, [3, 3]) }, 1, [6, 5]),
        (Geometry { padding: [1; 4], ..new(32, 32, [3, 3]) }, 3, [9, 8]),
        (Geometry { stride: [2, 2], padding: [3; 4], ..new(3, 20, [7, 7]) }, 1, [17, 16]),
        (Geometry { padding: [0, 3, 0, 2], ..new(8, 5, [1, 6]) }, 2, [3, 9]),
        (Geometry { padding: [4, 0, 1, 0], dilation: [2, 1], ..new(8, 17, [5, 1]) }, 1, [11, 3]),
        (Geometry { padding: [5, 4, 3, 2], ..new(4, 6, [2, 2]) }, 1, [3, 4]),
        (Geometry { stride: [5, 4], ..new(8, 8, [2, 3]) }, 2, [13, 12]),
        (Geometry { stride: [4, 3], padding: [6, 7, 5, 8], dilation: [3, 2], ..new(8, 9, [3, 2]) }, 1, [5, 6]),
        (Geometry { dilation: [2, 3], padding: [2, 3, 2, 3], groups: 2, ..new(16, 10, [3, 3]) }, 2, [7, 8]),
        (Geometry { padding: [1; 4], groups: 4, ..new(16, 8, [3, 3]) }, 1, [6, 6]),
        (Geometry { groups: 3, ..new(24, 9, [1, 1]) }, 2, [4, 5]),
        (Geometry { stride: [3, 3], ..new(17, 9, [1, 1]) }, 1, [8, 7]),
        (Geometry { padding: [1; 4], groups: 12, ..new(12, 12, [3, 3]) }, 2, [9, 10]),
        (Geometry { padding: [1; 4], stride: [2, 1], groups: 70, ..new(70, 140, [3, 3]) }, 1, [5, 4]),
        (Geometry { padding: [2; 4], groups: 2, ..new(2, 40, [3, 3]) }, 1, [5, 6]),
        (Geometry { padding: [1; 4], ..new(1, 18, [3, 3]) }, 1, [7, 7]),
        (Geometry { padding: [1; 4], ..new(8, 8, [3, 3]) }, 0, [4, 4]),
        (new(8, 4, [4, 4]), 1, [4, 4]),
        // Many outputs, and sums of more columns than are added up at once.
        (Geometry { padding: [1; 4], ..new(32, 200, [3, 3]) }, 1, [6, 7]),
        (Geometry { padding: [1; 4], ..new(1400, 3, [3, 3]) }, 1, [3, 4]),
    ]
}

/// Formats whose groups of a scale divide the channels of a group.
pub fn formats(geometry: &Geometry) -> Vec<String> {
    let channels = geometry.channels();
    let mut names: Vec<String> = [
        "w4a16",
        "w8a16",
        "w8a16-asym",
        "w8a8",
        "w8a8-xasym",
        "w8a8-tensor",
        "w4a8-asym",
        "w4a8-float-xasym",
        "w3a8-asym",
        "w2a16-float",
        "w3a16-asym",
        "w8a32-sf32",
    ]
    .map(str::to_owned)
    .into();
    for group in [1, 2, 4, 8, 16, 32].into_iter().filter(|&group| channels.is_multiple_of(group)) {
        for name in ["w4a16-gN", "w4a16-gN-float", "w4a8-gN-asym", "w8a8-gN-asym-xasym", "w2a8-gN"] {
            names.push(name.replace('N', &group.to_string()));
        }
    }
    names
}

#[test]
fn every_geometry_format_layout_and_type_is_within_the_bound() {
    let cpus = with_each_caps(2);
    let mut random = Random(31);
    let mut seen = std::collections::BTreeSet::new();
    for (g, (geometry, batch, size)) in cases().into_iter().enumerate() {
        let shape = Conv2dShape::new(geometry, batch, size).unwrap();
        let of_3_bits =
            formats(&geometry).into_iter().filter(|name| name.contains("-g")).map(|name| format!("w3{}", &name[2..]));
        for (i, name) in formats(&geometry).into_iter().chain(of_3_bits).enumerate() {
            let format = parse(&name);
            let w = random.qtensor(format.weight, [geometry.co, geometry.k()], false);
            let turn = g + i;
            let x_type = TYPES[turn % 3];
            let x = rounded(&random.activations(shape.x_len()), x_type);
            let reference = reference::conv2d_linear(&x, &w, format.act, &shape).unwrap();
            for (c, cpu) in cpus.iter().enumerate() {
                let case = Case {
                    shape: &shape,
                    x: &x,
                    x_type,
                    x_layout: LAYOUTS[(turn + c) % 2],
                    y_type: TYPES[(turn / 3 + c) % 3],
                    y_layout: LAYOUTS[(turn / 2 + c) % 2],
                };
                let conv = Conv2d::new(Weight::Quantized(&w, format.act), geometry).unwrap();
                assert_eq!(conv.format(), Some(format));
                let kernel = conv.kernel(cpu, batch, size, x_type, case.y_type).unwrap();
                seen.insert(kernel);
                let y = case.forward(conv, cpu);
                let what = format!(
                    "{kernel}: {name} {geometry:?} batch {batch} {size:?}, x {x_type} {}, y {} {}",
                    case.x_layout, case.y_type, case.y_layout
                );
                check(&y, &reference, geometry.k(), case.y_type, &what);
            }
        }
    }
    let all = that_run_here(halfbyte::cpu::matmul::KERNELS.iter().map(|k| k.name).chain(["depthwise"]));
    assert!(all.iter().all(|name| seen.contains(name)), "kernels that no case reached: {all:?} but {seen:?}");
}

#[test]
fn many_pixels_and_channels_cross_every_slab() {
    let mut random = Random(32);
    for (name, geometry, batch, size) in [
        ("w4a16-g32", Geometry { padding: [1; 4], ..Geometry::new(64, 40, [3, 3]) }, 2, [20, 23]),
        ("w8a8", Geometry { padding: [1; 4], ..Geometry::new(64, 40, [3, 3]) }, 2, [20, 23]),
        ("w8a8", Geometry::new(200, 70, [1, 1]), 3, [15, 14]),
        ("w4a8-g100-asym-xasym", Geometry { padding: [1; 4], groups: 2, ..Geometry::new(200, 6, [3, 3]) }, 2, [17, 16]),
        ("w8a16", Geometry { padding: [1; 4], groups: 100, ..Geometry::new(100, 200, [3, 3]) }, 3, [20, 19]),
    ] {
        let format = parse(name);
        let shape = Conv2dShape::new(geometry, batch, size).unwrap();
        let w = random.qtensor(format.weight, [geometry.co, geometry.k()], false);
        for (i, &x_type) in TYPES.iter().enumerate() {
            let x = rounded(&random.activations(shape.x_len()), x_type);
            let reference = reference::conv2d_linear(&x, &w, format.act, &shape).unwrap();
            for cpu in with_each_caps(3).iter().filter(|cpu| cpu.caps().isa != Isa::Plain) {
                let (x_layout, y_layout) = (LAYOUTS[i % 2], LAYOUTS[i / 2]);
                let case = Case { shape: &shape, x: &x, x_type, x_layout, y_type: Float::F32, y_layout };
                let y = case.forward(Conv2d::new(Weight::Quantized(&w, format.act), geometry).unwrap(), cpu);
                check(&y, &reference, geometry.k(), Float::F32, &format!("{name} {geometry:?} on {:?}", cpu.caps()));
            }
        }
    }
}

#[test]
fn dense_weights_of_every_type() {
    let cpus = with_each_caps(2);
    let mut random = Random(33);
    for (i, (geometry, batch, size)) in cases().into_iter().enumerate() {
        let shape = Conv2dShape::new(geometry, batch, size).unwrap();
        let (dtype, x_type) = (TYPES[i % 3], TYPES[i / 3 % 3]);
        let w = rounded(&random.normals(geometry.co * geometry.k()), dtype);
        let f16s: Vec<f16> = w.iter().map(|&v| f16::from_f32(v)).collect();
        let bf16s: Vec<bf16> = w.iter().map(|&v| bf16::from_f32(v)).collect();
        let floats = match dtype {
            Float::F16 => Floats::F16(&f16s),
            Float::BF16 => Floats::BF16(&bf16s),
            Float::F32 => Floats::F32(&w),
        };
        let x = rounded(&random.activations(shape.x_len()), x_type);
        let wide = |v: &[f32]| v.iter().map(|&v| f64::from(v)).collect::<Vec<_>>();
        let reference = reference::conv2d(&wide(&x), &wide(&w), &shape);
        for cpu in &cpus {
            for (x_layout, y_layout) in LAYOUTS.iter().flat_map(|&x| LAYOUTS.map(|y| (x, y))) {
                let case = Case { shape: &shape, x: &x, x_type, x_layout, y_type: Float::F32, y_layout };
                let y = case
                    .forward(Conv2d::new(Weight::Dense(floats, [geometry.co, geometry.k()]), geometry).unwrap(), cpu);
                check(&y, &reference, geometry.k(), Float::F32, &format!("dense {dtype} {geometry:?} {size:?}"));
            }
        }
    }
}

/// Geometry of a golden convolution, with its weights' and images' shapes.
pub fn golden_shape(golden: &Golden, case: &serde_json::Value) -> Conv2dShape {
    fn numbers<const N: usize>(value: &serde_json::Value) -> [usize; N] {
        serde_json::from_value::<Vec<usize>>(value.clone()).unwrap().try_into().unwrap()
    }
    let &[batch, ci, h, w] = golden.shape("x") else { panic!() };
    let &[co, _, kh, kw] = golden.shape("w") else { panic!() };
    let geometry = Geometry {
        stride: numbers(&case["stride"]),
        padding: numbers(&case["pad_tlbr"]),
        dilation: numbers(&case["dilation"]),
        groups: case["groups"].as_u64().unwrap() as usize,
        ..Geometry::new(ci, co, [kh, kw])
    };
    Conv2dShape::new(geometry, batch, [h, w]).unwrap()
}

/// The cases of a folder of goldens.
pub fn golden_cases(folder: &str) -> serde_json::Map<String, serde_json::Value> {
    serde_json::from_str(&std::fs::read_to_string(golden::path(&format!("{folder}/cases.json"))).unwrap()).unwrap()
}

#[test]
fn convolutions_of_other_software() {
    let (cpus, cases) = (with_each_caps(2), golden_cases("conv_fp32"));
    assert_eq!(cases.len(), 11);
    for (name, case) in &cases {
        let golden = Golden::read(&format!("conv_fp32/{name}"));
        let shape = golden_shape(&golden, case);
        let geometry = *shape.geometry();
        let &[_, _, oh, ow] = golden.shape("y_f64") else { panic!() };
        assert_eq!(shape.output(), [oh, ow], "{name}");
        let (x, bias, want) = (golden.f32s("x"), golden.f32s("bias"), golden.f64s("y_f64"));
        let w = geometry.weight_rows(&golden.f32s("w")).unwrap();
        let wide = |v: &[f32]| v.iter().map(|&v| f64::from(v)).collect::<Vec<_>>();
        let reference = reference::conv2d(&wide(&x), &wide(&w), &shape);
        let with_bias = |i: usize| reference.value[i] + f64::from(bias[i / (oh * ow) % geometry.co]);
        for (i, &want) in want.iter().enumerate() {
            assert!((with_bias(i) - want).abs() <= 1e-12, "{name}: {} and {want} at {i}", with_bias(i));
        }
        for cpu in &cpus {
            for (x_layout, y_layout) in LAYOUTS.iter().flat_map(|&x| LAYOUTS.map(|y| (x, y))) {
                let conv = Conv2d::new(Weight::Dense(Floats::F32(&w), [geometry.co, geometry.k()]), geometry)
                    .unwrap()
                    .with_bias(bias.clone())
                    .unwrap();
                let case = Case { shape: &shape, x: &x, x_type: Float::F32, x_layout, y_type: Float::F32, y_layout };
                for (i, (y, &want)) in case.forward(conv, cpu).iter().zip(&want).enumerate() {
                    let error = (f64::from(*y) - want).abs();
                    assert!(error <= 2e-6 + 1e-5 * want.abs(), "{name}: {y} and {want} at {i}");
                }
            }
        }
    }
}

#[test]
fn the_same_bits_whatever_the_number_of_threads() {
    let mut random = Random(34);
    for (name, geometry, size) in [
        ("w4a8-g32", Geometry { padding: [1; 4], ..Geometry::new(32, 40, [3, 3]) }, [21, 20]),
        ("w8a8-xasym", Geometry { padding: [1; 4], ..Geometry::new(32, 500, [3, 3]) }, [4, 5]),
        ("w4a16-g16-asym", Geometry { padding: [1; 4], groups: 2, ..Geometry::new(32, 40, [3, 3]) }, [21, 20]),
        ("w8a16", Geometry { padding: [1; 4], groups: 32, ..Geometry::new(32, 32, [3, 3]) }, [21, 20]),
        // Threads share the outputs of a strip; of few pixels windows are copied.
        ("w4a16-g16-float", Geometry { padding: [1; 4], ..Geometry::new(32, 150, [3, 3]) }, [4, 5]),
        ("w3a16-asym", Geometry::new(32, 70, [3, 3]), [4, 3]),
    ] {
        let format = parse(name);
        let shape = Conv2dShape::new(geometry, 2, size).unwrap();
        let w = random.qtensor(format.weight, [geometry.co, geometry.k()], false);
        for x_type in [Float::F32, Float::BF16] {
            let x = rounded(&random.activations(shape.x_len()), x_type);
            let [x_layout, y_layout] = LAYOUTS;
            let case = Case { shape: &shape, x: &x, x_type, x_layout, y_type: Float::F32, y_layout };
            let conv = || Conv2d::new(Weight::Quantized(&w, format.act), geometry).unwrap();
            for (a, b) in with_each_caps(1).iter().zip(&with_each_caps(5)) {
                let one = case.forward(conv(), a);
                assert_eq!(one, case.forward(conv(), b), "{name} {:?}", a.caps());
                assert_eq!(one, case.forward(conv(), a), "{name}: twice");
            }
        }
    }
}

#[test]
fn the_greatest_activations_have_finite_codes() {
    let geometry = Geometry { groups: 2, ..Geometry::new(2, 2, [1, 1]) };
    for name in ["w8a8-sf32", "w8a8-xasym-sf32", "w8a16-sf32"] {
        let format = parse(name);
        let w = rtn(Floats::F32(&[1e-6, 2e-6]), [2, 1], format.weight, Rtn::default()).unwrap();
        for cpu in with_each_caps(1) {
            let layer = Conv2d::on(&cpu, halfbyte::Weight::Quantized(&w, format.act), geometry).unwrap();
            let mut y = [0f32; 2];
            layer.forward(&cpu, &[f32::MAX, -f32::MAX], 1, [1, 1], &mut y).unwrap();
            let far = (y[0] / 3.402_823_5e32 - 1.0).abs().max((y[1] / -6.805_647e32 - 1.0).abs());
            assert!(far < 1e-6, "{name}: {y:?}");
        }
    }
}

#[test]
fn an_image_has_the_same_codes_wherever_it_is_seen() {
    // One position of the kernel is 1, all others 0: y is what the codes of x stand for, shifted.
    let mut random = Random(35);
    let format = parse("w8a8");
    let geometry = Geometry { padding: [1; 4], ..Geometry::new(1, 1, [3, 3]) };
    let shape = Conv2dShape::new(geometry, 1, [6, 7]).unwrap();
    let x = random.activations(42);
    let cpu = Cpu::new(2).unwrap();
    for position in 0..9 {
        let w: Vec<f32> = (0..9).map(|p| f32::from(u8::from(p == position))).collect();
        let w = rtn_conv2d(Floats::F32(&w), &geometry, format.weight, Rtn::default()).unwrap();
        let case = Case {
            shape: &shape,
            x: &x,
            x_type: Float::F32,
            x_layout: Layout2d::Nchw,
            y_type: Float::F32,
            y_layout: Layout2d::Nchw,
        };
        let y = case.forward(Conv2d::new(Weight::Quantized(&w, Act::A8), geometry).unwrap(), &cpu);
        let scale = 127.0 * w.scales()[0];
        for (i, y) in y.iter().enumerate() {
            let (row, column) = ((i / 7 + position / 3).wrapping_sub(1), (i % 7 + position % 3).wrapping_sub(1));
            let want = if row < 6 && column < 7 { x[row * 7 + column] * scale } else { 0.0 };
            assert!((y - want).abs() <= want.abs() * 1e-6, "position {position}, pixel {i}: {y} and {want}");
        }
    }
}

#[test]
fn bias_and_activation_come_last() {
    let mut random = Random(36);
    let cpu = Cpu::new(2).unwrap();
    for groups in [1, 8] {
        let geometry = Geometry { padding: [1; 4], groups, ..Geometry::new(8, 24, [3, 3]) };
        let shape = Conv2dShape::new(geometry, 2, [5, 6]).unwrap();
        let format = parse("w8a16");
        let w = random.qtensor(format.weight, [24, geometry.k()], false);
        let (x, bias) = (random.normals(shape.x_len()), random.normals(24));
        let plain = reference::conv2d_linear(&x, &w, format.act, &shape).unwrap();
        for activation in
            [Activation::None, Activation::Relu, Activation::Relu6, Activation::Clamp(-0.5, 0.25), Activation::Silu]
        {
            for y_layout in LAYOUTS {
                let conv = Conv2d::new(Weight::Quantized(&w, format.act), geometry).unwrap();
                let conv = conv.with_bias(bias.clone()).unwrap().with_activation(activation);
                let (x_type, x_layout) = (Float::F32, Layout2d::Nhwc);
                let case = Case { shape: &shape, x: &x, x_type, x_layout, y_type: Float::F32, y_layout };
                for (i, &y) in case.forward(conv, &cpu).iter().enumerate() {
                    let v = plain.value[i] + f64::from(bias[i / 30 % 24]);
                    let want = match activation {
                        Activation::Relu => v.max(0.0),
                        Activation::Relu6 => v.clamp(0.0, 6.0),
                        Activation::Clamp(low, high) => v.clamp(low.into(), high.into()),
                        Activation::Silu => v / (1.0 + (-v).exp()),
                        _ => v,
                    };
                    assert!((f64::from(y) - want).abs() < 1e-4, "{activation:?}: {y} and {want}");
                }
            }
        }
    }
}

#[test]
fn nan_and_infinity_reach_every_pixel_that_sees_them_and_no_other() {
    let mut random = Random(37);
    for (name, groups) in
        [("w8a8", 1), ("w4a8-g8-asym-xasym", 1), ("w8a16", 1), ("w8a8", 16), ("w8a16", 16), ("w8a8-xasym", 16)]
    {
        let format = parse(name);
        let geometry = Geometry { padding: [1; 4], groups, ..Geometry::new(16, 16, [3, 3]) };
        let shape = Conv2dShape::new(geometry, 1, [6, 7]).unwrap();
        let w = random.qtensor(format.weight, [16, geometry.k()], false);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = random.normals(shape.x_len());
            // Channel 3 of row 2, column 4.
            x[3 * 42 + 2 * 7 + 4] = bad;
            for (cpu, x_type) in with_each_caps(2).iter().flat_map(|cpu| [(cpu, Float::F32), (cpu, Float::BF16)]) {
                let [x_layout, y_layout] = LAYOUTS;
                let case = Case { shape: &shape, x: &x, x_type, x_layout, y_type: Float::F32, y_layout };
                let y = case.forward(Conv2d::new(Weight::Quantized(&w, format.act), geometry).unwrap(), cpu);
                let mut spoilt = 0;
                for (i, y) in y.iter().enumerate() {
                    let (channel, row, column) = (i / 42, i / 7 % 6, i % 7);
                    let sees = row.abs_diff(2) <= 1 && column.abs_diff(4) <= 1 && (groups == 1 || channel == 3);
                    assert!(sees || y.is_finite(), "{name} {bad}: leaked to {channel}, {row}, {column}");
                    assert!(!sees || !format.act.is_quantized() || y.is_nan(), "{name} {bad}: {y} at {row}, {column}");
                    spoilt += usize::from(!y.is_finite());
                }
                assert!(spoilt > 0, "{name} {bad}");
            }
        }
    }
}

#[test]
fn weights_come_in_the_order_of_positions() {
    let geometry = Geometry { groups: 2, ..Geometry::new(4, 6, [2, 3]) };
    let w: Vec<f32> = (0..6 * 2 * 2 * 3).map(|v| v as f32).collect();
    let rows = geometry.weight_rows(&w).unwrap();
    for (i, &value) in rows.iter().enumerate() {
        let (o, ky, kx, c) = (i / 12, i / 6 % 2, i / 2 % 3, i % 2);
        assert_eq!(value, (((o * 2 + c) * 2 + ky) * 3 + kx) as f32);
    }
    let format = parse("w4a16-g2-asym").weight;
    let quantized = rtn_conv2d(Floats::F32(&w), &geometry, format, Rtn::default()).unwrap();
    assert_eq!(quantized, rtn(Floats::F32(&rows), [6, 12], format, Rtn::default()).unwrap());
    let halves: Vec<f16> = w.iter().map(|&v| f16::from_f32(v)).collect();
    assert_eq!(quantized, rtn_conv2d(Floats::F16(&halves), &geometry, format, Rtn::default()).unwrap());
    let error = rtn_conv2d(Floats::F32(&w), &geometry, parse("w4a16-g3").weight, Rtn::default()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "conv2d: expected one scale a row, or groups that divide 2 channels, got groups of 3"
    );
    assert!(rtn_conv2d(Floats::F32(&w[1..]), &geometry, format, Rtn::default()).is_err());
}
