//! Layers of bytes: every kernel to the bit as the CPU and other software have them.

use super::convolutions::implicit_cases;
use super::gpus;
use crate::conv::{LAYOUTS, cases, golden_cases, golden_shape, laid_out, planes};
use crate::conv_int8::{bytes, forward as on_cpu, type_of};
use crate::data::Random;
use crate::golden::Golden;
use bytemuck::Pod;
use half::{bf16, f16};
use halfbyte::conv::{Conv2dShape, Geometry, Layout2d};
use halfbyte::cpu::Cpu;
use halfbyte::cuda::driver::{Buffer, Stream};
use halfbyte::cuda::int8::{self, Call, Epilogue, KERNELS, Kernel, Layer, Plan, Problem, Target};
use halfbyte::cuda::{Gpu, Workspace};
use halfbyte::format::int8::{Affine, Byte, Bytes, Int8Weight};
use halfbyte::layout::cuda_int8::CudaInt8;
use halfbyte::ops::{Activation, Conv2dInt8, LinearInt8};
use halfbyte::{Float, FloatsMut};

/// Bytes before and after every output, to see that a kernel writes nothing else.
const GUARD: usize = 64;

/// Every byte of outputs and guards before the kernel runs.
const POISON: u8 = 0xa5;

pub(super) fn kernel(name: &str) -> &'static Kernel {
    KERNELS.iter().find(|kernel| kernel.name == name).unwrap()
}

pub(super) struct Bench<'a> {
    pub gpu: &'a Gpu,
    pub stream: &'a Stream,
}

impl Bench<'_> {
    fn upload<T: Pod>(&self, values: &[T]) -> Buffer<T> {
        let mut buffer = self.gpu.context().allocate(values.len()).unwrap();
        self.stream.upload(values, buffer.view_mut()).unwrap();
        buffer
    }

    /// y `[batch, co, oh, ow]` of x `[batch, ci, h, w]`, twice with the same bits.
    pub fn forward(&self, plan: &Plan, layer: &Layer, x: &[u8]) -> Vec<u8> {
        let Problem { shape, layouts, .. } = *plan.problem();
        let y = self.elements(plan, layer, x, None);
        planes(&y, [shape.batch(), shape.geometry().co, shape.output().iter().product()], layouts[1])
    }

    /// Bytes of y in its layout, codes or floats of a type, of x `[batch, ci, h, w]`, twice the same.
    pub fn elements(&self, plan: &Plan, layer: &Layer, x: &[u8], floats: Option<Float>) -> Vec<u8> {
        let Problem { shape, layouts, .. } = *plan.problem();
        let pixels = |size: [usize; 2]| size[0] * size[1];
        let x = self.upload(&laid_out(x, [shape.batch(), shape.geometry().ci, pixels(shape.input())], layouts[0]));
        let len = shape.y_len() * floats.map_or(1, Float::size_bytes);
        let once = || {
            let mut y = self.gpu.context().allocate::<u8>(len + 2 * GUARD).unwrap();
            self.stream.fill(y.view_mut(), POISON).unwrap();
            let mut workspace = Workspace::new(self.gpu, self.stream, plan.workspace_bytes()).unwrap();
            let bytes = y.view_mut().slice(GUARD..GUARD + len);
            let target = match floats {
                None => Target::Bytes(bytes),
                Some(Float::F16) => Target::Floats(bytes.cast::<f16>().into()),
                Some(Float::BF16) => Target::Floats(bytes.cast::<bf16>().into()),
                Some(Float::F32) => Target::Floats(bytes.cast::<f32>().into()),
            };
            let call = Call {
                layer,
                x: x.view(),
                x_layout: layouts[0],
                batch: shape.batch(),
                size: shape.input(),
                y: target,
                y_layout: layouts[1],
                workspace: Some(&mut workspace),
            };
            plan.run(self.gpu, self.stream, call).unwrap();
            let mut counters = vec![1; plan.workspace_bytes().min(Workspace::COUNTER_BYTES)];
            self.stream.download(workspace.view().slice(0..counters.len()), &mut counters).unwrap();
            assert!(counters.iter().all(|&byte| byte == 0), "{plan:?}: counters left behind");
            let mut all = vec![0; len + 2 * GUARD];
            self.stream.download(y.view(), &mut all).unwrap();
            let intact = |guard: &[u8]| guard.iter().all(|&byte| byte == POISON);
            assert!(intact(&all[..GUARD]) && intact(&all[GUARD + len..]), "{plan:?}: wrote outside");
            all[GUARD..GUARD + len].to_vec()
        };
        let y = once();
        assert_eq!(y, once(), "{plan:?}: not the same twice");
        y
    }
}

/// A problem of a layer that writes bytes.
fn problem_of(layer: &Layer, shape: Conv2dShape, layouts: [Layout2d; 2]) -> Problem {
    Problem { shape, x: layer.x().byte(), symmetric: layer.is_symmetric(), floats: false, layouts }
}

/// What every kernel that supports a problem would do.
fn plans(gpu: &Gpu, problem: &Problem) -> Vec<Plan> {
    KERNELS.iter().filter_map(|kernel| kernel.plan(&gpu.caps(), problem).ok()).collect()
}

/// Asserts equal codes, and says which is the first that is not.
pub(super) fn same(got: &[u8], want: &[u8], shape: &Conv2dShape, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    let Some(i) = got.iter().zip(want).position(|(a, b)| a != b) else { return };
    let ([rows, columns], co) = (shape.output(), shape.geometry().co);
    let (image, o, row, column) = (i / columns / rows / co, i / columns / rows % co, i / columns % rows, i % columns);
    let wrong = got.iter().zip(want).filter(|(a, b)| a != b).count();
    panic!(
        "{what}: image {image} output {o} row {row} column {column} is {}, expected {}; {wrong} of {} are wrong",
        got[i],
        want[i],
        got.len()
    );
}

#[test]
fn the_layout_holds_every_code_in_its_place() {
    let mut random = Random(71);
    for (groups, outputs, k) in [(1, 1, 1), (1, 64, 128), (3, 65, 130), (2, 200, 77)] {
        let n = groups * outputs;
        let codes: Vec<u8> = (0..n * k).map(|_| random.bits() as u8).collect();
        for byte in [Byte::U8, Byte::I8] {
            let weight = Int8Weight::new(bytes(byte, &codes), [n, k], &[0.5], &[3]).unwrap();
            let packed = CudaInt8::pack(&weight, groups).unwrap();
            let shift = if byte == Byte::U8 { 128 } else { 0 };
            assert_eq!(packed.zeros(), vec![3 - shift; n]);
            for (row, j) in (0..n).flat_map(|row| (0..k).map(move |j| (row, j))) {
                let want = weight.codes().get(row * k + j) - shift;
                assert_eq!(i32::from(packed.code(row, j)), want, "{row} {j}");
            }
            // Row 1 of the first atom: piece 1 stands in the first place.
            if outputs > 1 && k >= 32 {
                assert_eq!(packed.codes()[128], packed.code(1, 16));
            }
            let sum: i64 = packed.codes().iter().map(|&code| i64::from(code)).sum();
            let want: i64 = (0..n * k).map(|i| i64::from(weight.codes().get(i) - shift)).sum();
            assert_eq!(sum, want, "what is padded is 0");
        }
        assert!(CudaInt8::pack(&Int8Weight::new(Bytes::U8(&codes), [n, k], &[0.5], &[]).unwrap(), n + 1).is_err());
    }
}

#[test]
fn convolutions_of_other_software() {
    let cases = golden_cases("conv_int8");
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let bench = Bench { gpu: &gpu, stream: &stream };
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
            let (scales, zeros, bias) = (golden.f32s("w_scale"), golden.ints("w_zp"), golden.ints("bias_i32"));
            let weight = bytes(type_of(signed), &w);
            let weight = Int8Weight::new(weight, [geometry.co, geometry.k()], &scales, &zeros).unwrap();
            let layer = |activation| {
                let epilogue = Epilogue { bias: Some(&bias), activation, ..Epilogue::default() };
                Layer::conv2d(&gpu, &stream, &weight, geometry, affine("x"), Some(affine("y")), epilogue).unwrap()
            };
            let (plain, relu) = (layer(Activation::None), layer(Activation::Relu));
            let x = golden.bytes("x").1;
            for layouts in LAYOUTS.iter().flat_map(|&x| LAYOUTS.map(|y| [x, y])) {
                for plan in plans(&gpu, &problem_of(&plain, shape, layouts)) {
                    let what = format!("{name}: {plan:?}");
                    let y = bench.forward(&plan, &plain, &x);
                    same(&y, &golden.bytes("y_ort").1, &shape, &what);
                    if golden.has("y_relu_torch_fbgemm") {
                        let y = bench.forward(&plan, &relu, &x);
                        same(&y, &golden.bytes("y_relu_torch_fbgemm").1, &shape, &format!("{what} with relu"));
                    }
                }
            }
        }
    }
}

#[test]
fn linear_layers_of_other_software() {
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let bench = Bench { gpu: &gpu, stream: &stream };
        for name in ["1x64x32", "5x100x24", "16x256x48"] {
            let golden = Golden::read(&format!("linear_int8/qlinear_{name}"));
            let affine = |name: &str| {
                let (scale, zero) = (golden.f32s(&format!("{name}_scale"))[0], golden.ints(&format!("{name}_zp"))[0]);
                Affine::new(type_of(golden.bytes(name).0), scale, zero).unwrap()
            };
            let (signed, w) = golden.bytes("w");
            let (m, [n, k]) = (golden.shape("x")[0], [golden.shape("w")[0], golden.shape("w")[1]]);
            let (scales, bias) = (golden.f32s("w_scale"), golden.ints("bias_i32"));
            let weight = Int8Weight::new(bytes(type_of(signed), &w), [n, k], &scales, &[]).unwrap();
            let epilogue = Epilogue { bias: Some(&bias), ..Epilogue::default() };
            let layer = Layer::linear(&gpu, &stream, &weight, affine("x"), Some(affine("y")), epilogue).unwrap();
            let shape = Conv2dShape::new(*layer.geometry(), m, [1, 1]).unwrap();
            let layouts = [Layout2d::Nhwc; 2];
            for plan in plans(&gpu, &problem_of(&layer, shape, layouts)) {
                let y = bench.forward(&plan, &layer, &golden.bytes("x").1);
                same(&y, &golden.bytes("y").1, &shape, &format!("{name}: {plan:?}"));
            }
            // Products of signed bytes without scales, in floats: exact as far as these sums go.
            let ones = Int8Weight::new(bytes(type_of(signed), &w), [n, k], &[1.0], &[]).unwrap();
            let one = Affine::new(Byte::I8, 1.0, 0).unwrap();
            let layer = Layer::linear(&gpu, &stream, &ones, one, None, Epilogue::default()).unwrap();
            let x = bench.upload(&golden.bytes("xs_int8").1);
            let mut y = gpu.context().allocate::<f32>(m * n).unwrap();
            let (x_layout, y_layout, batch, size) = (Layout2d::Nhwc, Layout2d::Nhwc, m, [1, 1]);
            let target = Target::Floats(y.view_mut().into());
            let mut workspace = Workspace::new(&gpu, &stream, 1 << 20).unwrap();
            let workspace = Some(&mut workspace);
            let call = Call { layer: &layer, x: x.view(), x_layout, batch, size, y: target, y_layout, workspace };
            int8::run(&gpu, &stream, call).unwrap();
            let mut floats = vec![0.0f32; m * n];
            stream.download(y.view(), &mut floats).unwrap();
            assert_eq!(floats.iter().map(|&v| v as i32).collect::<Vec<_>>(), golden.ints("xs_w_i32"), "{name}");
        }
    }
}

/// Bytes of a convolution, with what makes a layer of them.
pub(super) struct Random8 {
    pub x: Vec<u8>,
    pub w: Vec<u8>,
    pub scales: Vec<f32>,
    pub zeros: Vec<i32>,
    pub bias: Vec<i32>,
    pub x_is: Affine,
    pub y_is: Affine,
}

impl Random8 {
    pub fn new(random: &mut Random, shape: &Conv2dShape, [x, w, y]: [Byte; 3], symmetric: bool) -> Self {
        let geometry = shape.geometry();
        let mut bits = |len: usize| -> Vec<u8> { (0..len).map(|_| random.bits() as u8).collect() };
        let (x_bits, w_bits) = (bits(shape.x_len()), bits(geometry.co * geometry.k()));
        let zero = |byte: Byte, random: &mut Random| byte.codes().start() + 96 + random.below(64) as i32;
        let middle = w.codes().start() + 128;
        let zeros = (0..geometry.co).map(|_| if symmetric { middle } else { zero(w, random) }).collect();
        let scales = (0..geometry.co).map(|_| 0.001 + 0.001 * random.normal().abs()).collect();
        let bias = (0..geometry.co).map(|_| random.below(20001) as i32 - 10000).collect();
        // So that few codes are clamped.
        let y_scale = 0.002 * 0.02 * 74.0 * 74.0 * (geometry.k() as f32).sqrt() / 40.0;
        let x_is = Affine::new(x, 0.02, zero(x, random)).unwrap();
        let y_is = Affine::new(y, y_scale, zero(y, random)).unwrap();
        Self { x: x_bits, w: w_bits, scales, zeros, bias, x_is, y_is }
    }
}

pub(super) const TYPES: [[Byte; 3]; 4] = [
    [Byte::U8, Byte::I8, Byte::U8],
    [Byte::I8, Byte::I8, Byte::I8],
    [Byte::U8, Byte::U8, Byte::I8],
    [Byte::I8, Byte::U8, Byte::U8],
];

#[test]
fn every_kernel_and_form_has_the_bits_of_the_cpu_for_every_geometry_and_type() {
    let cpu = Cpu::new(4).unwrap();
    let new = Geometry::new;
    let pointwise = [
        (new(16, 16, [1, 1]), 1, [1, 1]),
        (new(80, 72, [1, 1]), 300, [1, 1]),
        (new(256, 65, [1, 1]), 3, [9, 11]),
        (Geometry { stride: [2, 2], padding: [1; 4], ..new(48, 144, [1, 1]) }, 2, [9, 11]),
    ];
    let direct = [
        (Geometry { padding: [1; 4], ..new(256, 130, [3, 3]) }, 3, [14, 13]),
        (Geometry { padding: [1, 2, 0, 3], dilation: [2, 1], ..new(32, 48, [3, 4]) }, 4, [9, 30]),
        (Geometry { padding: [0, 1, 1, 0], ..new(96, 320, [2, 3]) }, 2, [12, 11]),
        (Geometry { padding: [2; 4], ..new(160, 16, [5, 5]) }, 1, [20, 19]),
        (Geometry { stride: [2, 2], padding: [3; 4], ..new(3, 64, [7, 7]) }, 3, [33, 34]),
        (Geometry { stride: [2, 2], ..new(4, 80, [2, 2]) }, 2, [25, 24]),
        (Geometry { stride: [2, 2], padding: [2, 1, 0, 3], ..new(1, 20, [5, 4]) }, 2, [18, 26]),
        (Geometry { stride: [2, 2], padding: [1, 0, 2, 1], ..new(2, 33, [3, 3]) }, 3, [15, 14]),
    ];
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let bench = Bench { gpu: &gpu, stream: &stream };
        let mut random = Random(72);
        let (mut forms, mut copied, mut planes) = ([0; 4], 0, 0);
        let all = cases().into_iter().chain(implicit_cases()).chain(pointwise).chain(direct);
        for (turn, (geometry, batch, size)) in all.enumerate() {
            let shape = Conv2dShape::new(geometry, batch, size).unwrap();
            for (i, types) in TYPES.into_iter().enumerate() {
                let symmetric = (turn + i) % 4 != 0;
                let data = Random8::new(&mut random, &shape, types, symmetric);
                let w = bytes(types[1], &data.w);
                let w = Int8Weight::new(w, [geometry.co, geometry.k()], &data.scales, &data.zeros).unwrap();
                let activation = if turn % 2 == 0 { Activation::None } else { Activation::Relu };
                let layouts = [LAYOUTS[(turn + i) % 2], LAYOUTS[(turn + i) / 2 % 2]];
                let reference = Conv2dInt8::new(&w, geometry, data.x_is, data.y_is).unwrap();
                let reference = reference.with_bias(data.bias.clone()).unwrap().with_activation(activation).unwrap();
                let want = on_cpu(&reference, &cpu, &data.x, &shape, layouts);
                let epilogue = Epilogue { bias: Some(&data.bias), activation, ..Epilogue::default() };
                let (x_is, y_is) = (data.x_is, Some(data.y_is));
                let layer = Layer::conv2d(&gpu, &stream, &w, geometry, x_is, y_is, epilogue).unwrap();
                assert_eq!(layer.is_symmetric(), symmetric);
                let check = |plan: &Plan| {
                    same(&bench.forward(plan, &layer, &data.x), &want, &shape, &format!("{plan:?} {types:?}"));
                };
                let problem = problem_of(&layer, shape, layouts);
                check(&kernel("int8_simt").plan(&gpu.caps(), &problem).unwrap());
                for x_layout in LAYOUTS {
                    let problem = Problem { layouts: [x_layout, Layout2d::Nhwc], ..problem };
                    if let Ok(plan) = kernel("int8_im2col_gemm").plan(&gpu.caps(), &problem) {
                        check(&plan);
                        copied += 1;
                    }
                }
                for layouts in [[Layout2d::Nchw; 2], [Layout2d::Nhwc, Layout2d::Nchw], LAYOUTS] {
                    let problem = Problem { layouts, ..problem };
                    let Ok(plan) = kernel("int8_planes").plan(&gpu.caps(), &problem) else { continue };
                    let want = on_cpu(&reference, &cpu, &data.x, &shape, layouts);
                    same(&bench.forward(&plan, &layer, &data.x), &want, &shape, &format!("{plan:?} {types:?}"));
                    planes += 1;
                }
                let problem = Problem { layouts: [Layout2d::Nhwc; 2], ..problem };
                let names = ["int8_mma", "int8_mma_narrow", "int8_sm90", "int8_direct_sm90"];
                for (at, name) in names.into_iter().enumerate() {
                    for plan in kernel(name).plans(&gpu.caps(), &problem) {
                        check(&plan);
                        forms[at] += 1;
                    }
                    kernel(name).plan(&gpu.caps(), &problem).iter().for_each(check);
                }
            }
        }
        let served = if gpu.caps().arch.is_hopper() { 4 } else { 2 };
        let tested = forms[..served].iter().all(|&forms| forms > 100) && copied > 100 && planes > 200;
        assert!(
            tested,
            "{forms:?} forms, by mma.sync, of narrow pieces, implicit and direct, {copied} of patches, {planes} of planes"
        );
    }
}

#[test]
fn many_pixels_have_the_bits_of_the_cpu() {
    let (cpu, gpus) = (Cpu::new(4).unwrap(), gpus());
    if gpus.is_empty() {
        return;
    }
    for (geometry, batch, size) in [
        (Geometry { padding: [1; 4], ..Geometry::new(128, 192, [3, 3]) }, 8, [56, 55]),
        // More than one slab of patches.
        (Geometry { stride: [2, 2], padding: [3; 4], ..Geometry::new(3, 32, [7, 7]) }, 9, [225, 224]),
    ] {
        let shape = Conv2dShape::new(geometry, batch, size).unwrap();
        let data = Random8::new(&mut Random(73), &shape, TYPES[0], true);
        let (n, k) = (geometry.co, geometry.k());
        let w = Int8Weight::new(bytes(Byte::I8, &data.w), [n, k], &data.scales, &data.zeros).unwrap();
        let (x_is, y_is) = (data.x_is, data.y_is);
        let layouts = [Layout2d::Nhwc; 2];
        let reference = Conv2dInt8::new(&w, geometry, x_is, y_is).unwrap();
        let want = on_cpu(&reference, &cpu, &data.x, &shape, layouts);
        for gpu in &gpus {
            let stream = gpu.stream().unwrap();
            let bench = Bench { gpu, stream: &stream };
            let layer = Layer::conv2d(gpu, &stream, &w, geometry, x_is, Some(y_is), Epilogue::default()).unwrap();
            for plan in plans(gpu, &problem_of(&layer, shape, layouts)) {
                same(&bench.forward(&plan, &layer, &data.x), &want, &shape, plan.kernel().name);
            }
        }
    }
}

#[test]
fn outputs_in_floats_are_those_of_the_cpu() {
    let cpu = Cpu::new(2).unwrap();
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let bench = Bench { gpu: &gpu, stream: &stream };
        let shape = Conv2dShape::new(Geometry::new(96, 40, [1, 1]), 9, [1, 1]).unwrap();
        let mut random = Random(74);
        let data = Random8::new(&mut random, &shape, TYPES[2], false);
        let w = Int8Weight::new(bytes(Byte::U8, &data.w), [40, 96], &data.scales, &data.zeros).unwrap();
        let float_bias = random.normals(40);
        for activation in [Activation::None, Activation::Clamp(-0.25, 0.5), Activation::Silu] {
            let linear = LinearInt8::with_float_outputs(&w, data.x_is).unwrap();
            let linear = linear.with_bias(data.bias.clone()).unwrap().with_float_bias(float_bias.clone()).unwrap();
            let linear = linear.with_activation(activation).unwrap();
            let mut want = vec![0.0f32; 360];
            linear.forward_floats(&cpu, Bytes::U8(&data.x), 9, FloatsMut::F32(&mut want)).unwrap();
            let epilogue = Epilogue { bias: Some(&data.bias), float_bias: Some(&float_bias), activation };
            let layer = Layer::linear(&gpu, &stream, &w, data.x_is, None, epilogue).unwrap();
            let x = bench.upload(&data.x);
            let layout = Layout2d::Nhwc;
            for y_type in [Float::F32, Float::F16] {
                let mut singles = gpu.context().allocate::<f32>(360).unwrap();
                let mut halfs = gpu.context().allocate::<f16>(360).unwrap();
                let y = match y_type {
                    Float::F16 => Target::Floats(halfs.view_mut().into()),
                    _ => Target::Floats(singles.view_mut().into()),
                };
                let (x_layout, y_layout, batch, size) = (layout, layout, 9, [1, 1]);
                int8::run(
                    &gpu,
                    &stream,
                    Call { layer: &layer, x: x.view(), x_layout, batch, size, y, y_layout, workspace: None },
                )
                .unwrap();
                let mut got = vec![0.0f32; 360];
                if y_type == Float::F32 {
                    stream.download(singles.view(), &mut got).unwrap();
                } else {
                    let mut narrow = vec![f16::ZERO; 360];
                    stream.download(halfs.view(), &mut narrow).unwrap();
                    got = narrow.into_iter().map(f16::to_f32).collect();
                }
                let allowed = if y_type == Float::F32 { 1e-6 } else { 1e-3 };
                for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                    let error = (got - want).abs();
                    assert!(error <= allowed * (1.0 + want.abs()), "{activation:?} {y_type}: {got} and {want} at {i}");
                }
            }
        }
    }
}

#[test]
fn wrong_types_shapes_and_lengths_are_errors() {
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let geometry = Geometry::new(2, 3, [3, 3]);
        let codes = [1i8; 54];
        let weight = |shape| Int8Weight::new(Bytes::I8(&codes), shape, &[0.1], &[]).unwrap();
        let (x_is, y_is) = (Affine::new(Byte::U8, 0.1, 3).unwrap(), Affine::new(Byte::I8, 0.5, 0).unwrap());
        let layer = |shape, geometry, y, epilogue| {
            Layer::conv2d(&gpu, &stream, &weight(shape), geometry, x_is, y, epilogue).map_err(|e| e.to_string())
        };
        let none = Epilogue::default();
        let made = layer([3, 18], geometry, Some(y_is), none).unwrap();
        let mut workspace = Workspace::new(&gpu, &stream, 1 << 20).unwrap();
        let mut forward = |x_len: usize, y_len: usize, floats: bool| {
            let x = gpu.context().allocate::<u8>(x_len).unwrap();
            let mut y = gpu.context().allocate::<f32>(y_len).unwrap();
            let y = match floats {
                true => Target::Floats(y.view_mut().into()),
                false => Target::Bytes(y.view_mut().cast::<u8>().slice(0..y_len)),
            };
            let (x_layout, y_layout, batch, size) = (Layout2d::Nchw, Layout2d::Nchw, 1, [4, 4]);
            let workspace = Some(&mut workspace);
            let call = Call { layer: &made, x: x.view(), x_layout, batch, size, y, y_layout, workspace };
            let result = int8::run(&gpu, &stream, call).map_err(|e| e.to_string());
            stream.synchronize().unwrap();
            result
        };
        assert_eq!(forward(32, 12, false), Ok(()));
        let refused = |result: Result<(), String>, text: &str| assert_eq!(result.unwrap_err(), text);
        refused(forward(31, 12, false), "int8: expected x of 1 × 2 × 4 × 4, got 31 elements");
        refused(forward(32, 11, false), "int8: expected y of 1 × 3 × 2 × 2, got 11 elements");
        refused(forward(32, 12, true), "int8: expected outputs in bytes, got outputs in floats");
        let is_refused = |shape, geometry, y, epilogue| layer(shape, geometry, y, epilogue).unwrap_err();
        assert!(is_refused([6, 9], geometry, Some(y_is), none).contains("a weight of 3 × 18"));
        let two = Geometry { groups: 2, ..geometry };
        assert!(is_refused([3, 18], two, Some(y_is), none).contains("groups that divide"));
        let short = Epilogue { bias: Some(&[0; 2]), ..none };
        assert!(is_refused([3, 18], geometry, Some(y_is), short).contains("a bias of 3"));
        let large = Epilogue { bias: Some(&[i32::MAX; 3]), ..none };
        assert!(is_refused([3, 18], geometry, Some(y_is), large).contains("sums within int32"));
        let floats = Epilogue { float_bias: Some(&[0.0; 3]), ..none };
        assert!(is_refused([3, 18], geometry, Some(y_is), floats).contains("for y in bytes"));
        let gelu = Epilogue { activation: Activation::Gelu, ..none };
        assert!(is_refused([3, 18], geometry, Some(y_is), gelu).contains("a clamp for codes of 8 bits"));
        assert!(layer([3, 18], geometry, None, gelu).is_ok());
        let tiny = Affine::new(Byte::I8, 1e-38, 0).unwrap();
        let wide = Affine::new(Byte::U8, 1e38, 3).unwrap();
        let apart = Layer::conv2d(&gpu, &stream, &weight([3, 18]), geometry, wide, Some(tiny), none);
        assert!(apart.unwrap_err().to_string().contains("finite multipliers"));
    }
}
