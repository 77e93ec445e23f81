//! Layers on any device, called as a user calls them, against the reference. Tests of the GPU part call what is public here.

use crate::conv::{cases, laid_out, planes};
use crate::data::{Random, parse, rounded};
use half::{bf16, f16};
use halfbyte::conv::{Conv2dShape, Geometry, Layout2d};
use halfbyte::format::int8::{Affine, Byte, Bytes, BytesMut, Int8Weight};
use halfbyte::format::reference::{self, Bound, Product};
use halfbyte::ops::Device;
use halfbyte::{
    Activation, Conv2d, Conv2dInt8, Cpu, Cuda, Error, Float, Floats, FloatsMut, Linear, LinearInt8, StoredTensor,
    Weight,
};

pub const TYPES: [Float; 3] = [Float::F16, Float::BF16, Float::F32];

const ACTIVATIONS: [Activation; 4] =
    [Activation::None, Activation::Relu, Activation::Clamp(-1.5, 2.0), Activation::Silu];

/// Floats in one of the types.
pub struct Typed {
    pub f16s: Vec<f16>,
    pub bf16s: Vec<bf16>,
    pub f32s: Vec<f32>,
    dtype: Float,
}

impl Typed {
    pub fn new(values: &[f32], dtype: Float) -> Self {
        let (f16s, bf16s) = match dtype {
            Float::F16 => (values.iter().map(|&v| f16::from_f32(v)).collect(), Vec::new()),
            Float::BF16 => (Vec::new(), values.iter().map(|&v| bf16::from_f32(v)).collect()),
            Float::F32 => (Vec::new(), Vec::new()),
        };
        Self { f16s, bf16s, f32s: if dtype == Float::F32 { values.to_vec() } else { Vec::new() }, dtype }
    }

    pub fn get(&self) -> Floats<'_> {
        match self.dtype {
            Float::F16 => (&self.f16s).into(),
            Float::BF16 => (&self.bf16s).into(),
            Float::F32 => (&self.f32s).into(),
        }
    }

    pub fn get_mut(&mut self) -> FloatsMut<'_> {
        match self.dtype {
            Float::F16 => (&mut self.f16s).into(),
            Float::BF16 => (&mut self.bf16s).into(),
            Float::F32 => (&mut self.f32s).into(),
        }
    }
}

/// Compares results of a layer with bias and activation with sums of the reference.
fn check(y: &Typed, sums: &Product, bias: impl Fn(usize) -> f32, activation: Activation, bound: Bound, what: &str) {
    for (i, y) in y.get().to_f32().into_iter().enumerate() {
        let (sum, bias) = (sums.value[i], f64::from(bias(i)));
        let want = f64::from(activation.apply((sum + bias) as f32));
        // No activation brings numbers farther apart than 1.1 times, and none is larger than what it is of.
        let slope = if activation == Activation::Silu { 1.1 } else { 1.0 };
        let allowed = slope * bound.allowed(sums.magnitude[i] + bias.abs()) + 1e-6 * want.abs();
        let off = (f64::from(y) - want).abs();
        assert!(off <= allowed, "{what}: element {i} is {y}, expected {want} ± {allowed:e}, off by {off:e}");
    }
}

/// Products of every kind of weight, on tensors of the host.
pub fn products<D: Device>(device: &D) {
    let mut random = Random(77);
    let names = [
        "w4a16-g128",
        "w8a16-g32-asym",
        "w4a16-sbf16",
        "w4a8-g128",
        "w8a8",
        "w4a8-g32-asym",
        "w8a8-g64-xasym",
        "w3a16-g32-asym",
        "w2a16-float",
        "w4a32-g64-float-sf32",
    ];
    for (i, name) in names.into_iter().enumerate() {
        let format = parse(name);
        for (s, [n, k]) in [[37, 256], [130, 384], [256, 128]].into_iter().enumerate() {
            let w = random.qtensor(format.weight, [n, k], false);
            let stored: StoredTensor<'_> = (&w).into();
            let stored = [&stored];
            let weight = if s == 1 { Weight::Stored(&stored, format.act) } else { Weight::Quantized(&w, format.act) };
            let (x_type, y_type) = (TYPES[(i + s) % 3], TYPES[(i + s / 2 + 1) % 3]);
            let (bias, activation) = (random.normals(n), ACTIVATIONS[(i + s) % 4]);
            let linear = Linear::for_inputs(device, weight, x_type).unwrap().with_activation(activation);
            let biased = (i + s) % 2 == 0;
            let linear = if biased { linear.with_bias(bias.clone()).unwrap() } else { linear };
            assert_eq!(([linear.n(), linear.k()], linear.format()), ([n, k], Some(format)));
            for m in [1, 5, 33, 200] {
                let x = Typed::new(&random.activations(m * k), x_type);
                let mut y = Typed::new(&vec![f32::NAN; m * n], y_type);
                linear.forward(device, x.get(), m, y.get_mut()).unwrap();
                let sums = reference::linear(&x.get().to_f32(), m, &w, format.act);
                let what = format!(
                    "{} {name} {m} × {n} × {k}, x {x_type}, y {y_type}",
                    linear.kernel(device, m, x_type, y_type).unwrap()
                );
                let bound = linear.bound(device, m, x_type, y_type).unwrap();
                check(&y, &sums, |i| if biased { bias[i % n] } else { 0.0 }, activation, bound, &what);
            }
        }
    }
    // Dense weights.
    let [n, k] = [70, 100];
    for (i, dtype) in TYPES.into_iter().enumerate() {
        let w = Typed::new(&random.normals(n * k), dtype);
        let (bias, activation, y_type) = (random.normals(n), ACTIVATIONS[i + 1], TYPES[(i + 1) % 3]);
        let linear = Linear::on(device, Weight::Dense(w.get(), [n, k])).unwrap();
        let linear = linear.with_bias(bias.clone()).unwrap().with_activation(activation);
        let wide = |v: &[f32]| v.iter().map(|&v| f64::from(v)).collect::<Vec<_>>();
        for m in [1, 6, 40] {
            let x = Typed::new(&random.normals(m * k), Float::F16);
            let mut y = Typed::new(&vec![f32::NAN; m * n], y_type);
            linear.forward(device, x.get(), m, y.get_mut()).unwrap();
            let sums = reference::matmul(&wide(&x.get().to_f32()), &wide(&w.get().to_f32()), [m, n, k]);
            let bound = linear.bound(device, m, Float::F16, y_type).unwrap();
            check(&y, &sums, |i| bias[i % n], activation, bound, &format!("dense {dtype} {m} rows, y {y_type}"));
        }
    }
}

/// Convolutions of every geometry, with quantised and dense weights.
pub fn convolutions<D: Device>(device: &D) {
    let mut random = Random(78);
    for (i, (geometry, batch, size)) in cases().into_iter().enumerate() {
        let shape = Conv2dShape::new(geometry, batch, size).unwrap();
        let (co, k) = (geometry.co, geometry.k());
        for (j, name) in ["w4a16", "w8a16-asym", "w8a8", "w4a8-asym", "dense"].into_iter().enumerate() {
            let turn = i + j;
            let (x_type, y_type) = (TYPES[turn % 3], TYPES[(turn / 2 + 1) % 3]);
            let [x_layout, y_layout] = [Layout2d::Nchw, Layout2d::Nhwc].map(|layout| match turn % 4 {
                0 => Layout2d::Nhwc,
                1 => Layout2d::Nchw,
                _ => layout,
            });
            let (bias, activation) = (random.normals(co), ACTIVATIONS[turn % 4]);
            let x = rounded(&random.activations(shape.x_len()), x_type);
            let (conv, sums) = if name == "dense" {
                let w = random.normals(co * k);
                let wide = |v: &[f32]| v.iter().map(|&v| f64::from(v)).collect::<Vec<_>>();
                let sums = reference::conv2d(&wide(&x), &wide(&w), &shape);
                (Conv2d::on(device, Weight::Dense((&w).into(), [co, k]), geometry), sums)
            } else {
                let format = parse(name);
                let w = random.qtensor(format.weight, [co, k], false);
                let sums = reference::conv2d_linear(&x, &w, format.act, &shape).unwrap();
                (Conv2d::for_inputs(device, Weight::Quantized(&w, format.act), geometry, x_type), sums)
            };
            let conv = conv.unwrap().with_bias(bias.clone()).unwrap().with_activation(activation);
            let conv = conv.with_layouts(x_layout, y_layout);
            let pixels = |[h, w]: [usize; 2]| h * w;
            let x = laid_out(&x, [batch, geometry.ci, pixels(size)], x_layout);
            let (x, mut y) = (Typed::new(&x, x_type), Typed::new(&vec![f32::NAN; shape.y_len()], y_type));
            conv.forward(device, x.get(), batch, size, y.get_mut()).unwrap();
            let outputs = [batch, co, pixels(shape.output())];
            let y = Typed::new(&planes(&y.get().to_f32(), outputs, y_layout), y_type);
            let bound = conv.bound(device, batch, size, x_type, y_type).unwrap();
            let kernel = conv.kernel(device, batch, size, x_type, y_type).unwrap();
            let what = format!("{kernel} {name} {geometry:?} {batch} of {size:?}, x {x_type}, y {y_type}");
            check(&y, &sums, |i| bias[i / outputs[2] % co], activation, bound, &what);
        }
    }
}

/// What a byte layer gives on a device, and on a CPU.
pub fn bytes<D: Device>(device: &D) {
    let (cpu, mut random) = (Cpu::new(1).unwrap(), Random(79));
    for (i, (geometry, batch, size)) in cases().into_iter().enumerate() {
        let shape = Conv2dShape::new(geometry, batch, size).unwrap();
        let (n, k) = (geometry.co, geometry.k());
        let mut codes = |len: usize| (0..len).map(|_| random.bits() as u8).collect::<Vec<u8>>();
        let (w, x) = (codes(n * k), codes(shape.x_len()));
        let w: Vec<i8> = w.into_iter().map(|v| v as i8).collect();
        let scales: Vec<f32> = (0..n).map(|_| random.normal().abs() * 0.01 + 0.001).collect();
        let weight = Int8Weight::new((&w).into(), [n, k], &scales, if i % 3 == 0 { &[3] } else { &[] }).unwrap();
        let of_x = Affine::new(Byte::U8, 0.02, 120).unwrap();
        let of_y = Affine::new(Byte::I8, 0.4, -3).unwrap();
        let bias: Vec<i32> = (0..n).map(|_| random.below(2000) as i32 - 1000).collect();
        let float_bias = random.normals(n);
        let layouts = if i % 2 == 0 { [Layout2d::Nhwc; 2] } else { [Layout2d::Nchw, Layout2d::Nhwc] };

        let mut here = vec![0i8; shape.y_len()];
        let mut there = vec![1i8; shape.y_len()];
        let conv = Conv2dInt8::new(&weight, geometry, of_x, of_y).unwrap().with_bias(bias.clone()).unwrap();
        let conv = conv.with_activation(Activation::Relu).unwrap().with_layouts(layouts[0], layouts[1]);
        conv.forward(&cpu, &x, batch, size, &mut here).unwrap();
        let conv = Conv2dInt8::on(device, &weight, geometry, of_x, Some(of_y)).unwrap();
        let conv = conv.with_bias(bias.clone()).unwrap().with_activation(Activation::Relu).unwrap();
        let conv = conv.with_layouts(layouts[0], layouts[1]);
        conv.forward(device, Bytes::U8(&x), batch, size, BytesMut::I8(&mut there)).unwrap();
        assert_eq!(here, there, "{geometry:?} {batch} of {size:?}");

        let (mut here, mut there) = (vec![0f32; shape.y_len()], vec![f32::NAN; shape.y_len()]);
        let conv = Conv2dInt8::with_float_outputs(&weight, geometry, of_x).unwrap();
        let conv = conv.with_float_bias(float_bias.clone()).unwrap().with_layouts(layouts[0], layouts[1]);
        conv.forward_floats(&cpu, &x, batch, size, &mut here).unwrap();
        let conv = Conv2dInt8::on(device, &weight, geometry, of_x, None).unwrap();
        let conv = conv.with_float_bias(float_bias).unwrap().with_layouts(layouts[0], layouts[1]);
        conv.forward_floats(device, Bytes::U8(&x), batch, size, FloatsMut::F32(&mut there)).unwrap();
        assert_eq!(bits(&here), bits(&there), "{geometry:?} {batch} of {size:?}, to floats");
    }
    for (m, [n, k]) in [(1, [40, 64]), (7, [33, 100]), (65, [128, 192])] {
        let mut codes = |len: usize| (0..len).map(|_| random.bits() as u8).collect::<Vec<u8>>();
        let (w, x) = (codes(n * k), codes(m * k));
        let weight = Int8Weight::new((&w).into(), [n, k], &[0.003], &[130]).unwrap();
        let (of_x, of_y) = (Affine::new(Byte::U8, 0.02, 7).unwrap(), Affine::new(Byte::U8, 0.1, 99).unwrap());
        let bias: Vec<i32> = (0..n).map(|_| random.below(2000) as i32 - 1000).collect();
        let (mut here, mut there) = (vec![0u8; m * n], vec![1u8; m * n]);
        let linear = LinearInt8::new(&weight, of_x, of_y).unwrap().with_bias(bias.clone()).unwrap();
        linear.forward(&cpu, &x, m, &mut here).unwrap();
        let linear = LinearInt8::on(device, &weight, of_x, Some(of_y)).unwrap().with_bias(bias.clone()).unwrap();
        linear.forward(device, Bytes::U8(&x), m, BytesMut::U8(&mut there)).unwrap();
        assert_eq!(here, there, "{m} × {n} × {k}");
        let (mut here, mut there) = (vec![0f32; m * n], vec![f32::NAN; m * n]);
        let linear = LinearInt8::with_float_outputs(&weight, of_x).unwrap().with_bias(bias.clone()).unwrap();
        linear.forward_floats(&cpu, &x, m, &mut here).unwrap();
        let linear = LinearInt8::on(device, &weight, of_x, None).unwrap().with_bias(bias).unwrap();
        linear.forward_floats(device, Bytes::U8(&x), m, FloatsMut::F32(&mut there)).unwrap();
        assert_eq!(bits(&here), bits(&there), "{m} × {n} × {k}, to floats");
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// What is said of wrong calls begins with the operation that was called.
pub fn refusals<D: Device>(device: &D) {
    let mut random = Random(80);
    let format = parse("w4a16-g32");
    let w = random.qtensor(format.weight, [8, 64], false);
    let linear = || Linear::on(device, Weight::Quantized(&w, format.act)).unwrap();
    let (x, mut y) = (vec![f16::ONE; 128], vec![f16::ONE; 16]);
    let (x, y) = (&x[..], &mut y[..]);
    let said = |result: Result<(), Error>, text: &str| {
        let why = result.unwrap_err().to_string();
        assert!(why.starts_with(text) && !why.contains("matmul"), "{why}, expected {text}");
    };
    said(linear().forward(device, Floats::F16(&x[1..]), 2, FloatsMut::F16(y)), "linear: expected x of 2 × 64, got 127");
    said(
        linear().forward(device, Floats::F16(x), 2, FloatsMut::F16(&mut y[1..])),
        "linear: expected y of 2 × 8, got 15",
    );
    said(linear().forward(device, Floats::F16(x), usize::MAX, FloatsMut::F16(y)), "linear: expected x of");
    said(linear().with_bias(vec![0.0; 7]).map(drop), "linear: expected a bias of 8, got 7");
    said(Linear::on(device, Weight::Stored(&[], format.act)).map(drop), "linear: expected");
    let exchanged = [Activation::Clamp(5.0, -5.0), Activation::Clamp(f32::NAN, 0.0), Activation::Clamp(0.0, f32::NAN)];
    let to_nothing = |result: Result<(), Error>, op: &str| {
        said(result, &format!("{op}: expected a clamp whose low is at most its high, got "));
    };
    for clamp in exchanged {
        let linear = linear().with_activation(clamp);
        to_nothing(linear.forward(device, Floats::F16(x), 2, FloatsMut::F16(y)), "linear");
    }
    said(Linear::on(device, Weight::Dense(Floats::F16(x), [3, 5])).map(drop), "linear: expected a weight of 3 × 5");

    let geometry = Geometry::new(64, 8, [1, 1]);
    let conv = || Conv2d::on(device, Weight::Quantized(&w, format.act), geometry).unwrap();
    let run = |x: &[f16], y: &mut [f16]| conv().forward(device, Floats::F16(x), 1, [1, 2], FloatsMut::F16(y));
    said(run(&x[1..], y), "conv2d: expected x of 1 × 64 × 1 × 2, got 127");
    said(run(x, &mut y[1..]), "conv2d: expected y of 1 × 8 × 1 × 2, got 15");
    said(conv().with_bias(vec![0.0; 7]).map(drop), "conv2d: expected a bias of 8, got 7");
    for clamp in exchanged {
        let conv = conv().with_activation(clamp);
        to_nothing(conv.forward(device, Floats::F16(x), 1, [1, 2], FloatsMut::F16(y)), "conv2d");
    }
    let other = Geometry::new(64, 8, [1, 2]);
    said(
        Conv2d::on(device, Weight::Quantized(&w, format.act), other).map(drop),
        "conv2d: expected a weight of 8 × 128",
    );
    said(Conv2d::on(device, Weight::Stored(&[], format.act), geometry).map(drop), "conv2d: expected one stored tensor");

    let codes = [1i8; 512];
    let weight = Int8Weight::new((&codes).into(), [8, 64], &[0.5], &[]).unwrap();
    let of_x = Affine::new(Byte::U8, 0.02, 7).unwrap();
    let huge = Int8Weight::new((&codes).into(), [8, 64], &[3e38], &[]).unwrap();
    let (bytes, mut outputs) = ([1u8; 128], [0u8; 16]);
    let linear = || LinearInt8::on(device, &weight, of_x, Some(of_x)).unwrap();
    said(
        linear().forward(device, Bytes::U8(&bytes[1..]), 2, BytesMut::U8(&mut outputs)),
        "linear int8: expected x of 2",
    );
    said(
        linear().forward(device, Bytes::I8(&[0; 128]), 2, BytesMut::U8(&mut outputs)),
        "linear int8: expected inputs in u8, got i8",
    );
    said(
        linear().forward_floats(device, Bytes::U8(&bytes), 2, FloatsMut::F16(y)),
        "linear int8: expected outputs in bytes, got f16",
    );
    said(linear().with_bias(vec![i32::MAX; 8]).map(drop), "linear int8: expected sums within int32");
    said(linear().with_activation(Activation::Gelu).map(drop), "linear int8: expected none, relu");
    said(
        LinearInt8::on(device, &huge, of_x, Some(Affine::new(Byte::U8, 1e-3, 0).unwrap())).map(drop),
        "linear int8: expected finite multipliers",
    );
    let conv = || Conv2dInt8::on(device, &weight, geometry, of_x, Some(of_x)).unwrap();
    let run = |x: Bytes<'_>, y: &mut [u8]| conv().forward(device, x, 1, [1, 2], BytesMut::U8(y));
    said(run(Bytes::U8(&bytes[1..]), &mut outputs), "conv2d int8: expected x of 1 × 64 × 1 × 2, got 127");
    said(run(Bytes::U8(&bytes), &mut outputs[1..]), "conv2d int8: expected y of 1 × 8 × 1 × 2, got 15");
    said(run(Bytes::I8(&[0; 128]), &mut outputs), "conv2d int8: expected inputs in u8, got i8");
    said(conv().with_bias(vec![i32::MAX; 8]).map(drop), "conv2d int8: expected sums within int32");
    said(conv().with_activation(Activation::Gelu).map(drop), "conv2d int8: expected none, relu");
    for (clamp, y) in exchanged.into_iter().flat_map(|clamp| [(clamp, None), (clamp, Some(of_x))]) {
        let linear = LinearInt8::on(device, &weight, of_x, y).unwrap();
        to_nothing(linear.with_activation(clamp).map(drop), "linear int8");
        let conv = Conv2dInt8::on(device, &weight, geometry, of_x, y).unwrap();
        to_nothing(conv.with_activation(clamp).map(drop), "conv2d int8");
    }
    said(
        Conv2dInt8::on(device, &weight, Geometry { stride: [0, 1], ..geometry }, of_x, None).map(drop),
        "conv2d int8: expected at least 1 pixel of stride down",
    );
}

#[test]
fn layers_on_a_cpu_are_those_of_the_reference() {
    let cpu = Cpu::new(2).unwrap();
    products(&cpu);
    convolutions(&cpu);
    bytes(&cpu);
    refusals(&cpu);
}

#[test]
fn slices_vectors_and_arrays_become_tensors() {
    let (cpu, w) = (Cpu::new(1).unwrap(), [1.0f32, 2.0, 3.0, 4.0]);
    let linear = Linear::on(&cpu, Weight::Dense((&w).into(), [2, 2])).unwrap();
    let (x, mut y) = (vec![f16::ONE; 2], vec![bf16::ZERO; 2]);
    linear.forward(&cpu, &x, 1, &mut y).unwrap();
    assert_eq!(y, [3.0, 7.0].map(bf16::from_f32));
    let mut y = [0.0f32; 2];
    linear.forward(&cpu, &x[..], 1, &mut y).unwrap();
    linear.forward(&cpu, &[1.0f32, -1.0], 1, &mut y[..]).unwrap();
    assert_eq!(y, [-1.0, -1.0]);
}

#[test]
fn layers_go_from_thread_to_thread() {
    fn check<T: Send + Sync>() {}
    check::<(Linear, Conv2d, LinearInt8, Conv2dInt8)>();
    check::<(Linear<Cuda>, Conv2d<Cuda>, LinearInt8<Cuda>, Conv2dInt8<Cuda>, Cuda)>();
}
