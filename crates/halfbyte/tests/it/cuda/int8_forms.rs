//! Layers of bytes whose weights have zero points, whose outputs are floats, or whose groups have few channels: every kernel to
//! the bit as the plain one and the CPU have them.

use super::gpus;
use super::int8::{Bench, Random8, TYPES, kernel, same};
use crate::conv_int8::{bytes, forward as on_cpu};
use crate::data::Random;
use halfbyte::Float;
use halfbyte::conv::{Conv2dShape, Geometry, Layout2d};
use halfbyte::cpu::Cpu;
use halfbyte::cuda::int8::{Epilogue, Layer, Problem};
use halfbyte::format::int8::Int8Weight;
use halfbyte::ops::{Activation, Conv2dInt8};

/// Codes, and every type of floats.
pub(super) const OUTPUTS: [Option<Float>; 4] = [None, Some(Float::F32), Some(Float::F16), Some(Float::BF16)];

/// Rests of outputs, pixels and columns, groups, padding; channels of no whole piece.
fn of_tensor_cores() -> Vec<(Geometry, usize, [usize; 2])> {
    let new = Geometry::new;
    vec![
        (new(16, 16, [1, 1]), 1, [1, 1]),
        (new(80, 72, [1, 1]), 300, [1, 1]),
        (Geometry { padding: [1; 4], ..new(48, 65, [3, 3]) }, 2, [9, 11]),
        (Geometry { padding: [1; 4], ..new(128, 132, [3, 3]) }, 3, [14, 13]),
        (Geometry { stride: [2, 2], padding: [2, 1, 0, 3], dilation: [1, 2], ..new(32, 30, [3, 2]) }, 2, [12, 9]),
        (Geometry { padding: [5, 4, 3, 2], ..new(16, 7, [2, 2]) }, 1, [3, 4]),
        (Geometry { padding: [1; 4], groups: 2, ..new(64, 40, [3, 3]) }, 2, [7, 8]),
        (Geometry { padding: [1; 4], groups: 3, ..new(48, 9, [3, 3]) }, 1, [6, 5]),
        (Geometry { stride: [2, 2], padding: [3; 4], ..new(3, 33, [7, 7]) }, 2, [17, 16]),
        (new(100, 24, [1, 1]), 5, [1, 1]),
    ]
}

/// Every number of channels of a group; rests of pixels and of the channels of a block; weights in several chunks.
fn of_few_channels() -> Vec<(Geometry, usize, [usize; 2])> {
    let mut all = Vec::new();
    for channels in [1, 2, 4, 8] {
        let new = |ci: usize, kernel| Geometry { groups: ci / channels, ..Geometry::new(ci, ci, kernel) };
        all.extend([
            (Geometry { padding: [1; 4], ..new(128, [3, 3]) }, 2, [9, 11]),
            (Geometry { padding: [1; 4], stride: [2, 2], ..new(144, [3, 3]) }, 3, [8, 7]),
            (Geometry { padding: [4, 5, 3, 6], ..new(16, [3, 3]) }, 2, [2, 1]),
            (Geometry { padding: [4; 4], dilation: [2, 2], ..new(48, [5, 5]) }, 1, [6, 13]),
            (Geometry { padding: [0, 3, 1, 2], stride: [2, 1], dilation: [1, 2], ..new(16, [4, 3]) }, 2, [9, 8]),
            (new(272, [1, 1]), 1, [3, 1]),
            (Geometry { padding: [5, 6, 6, 5], ..new(32, [12, 11]) }, 1, [10, 9]),
        ]);
    }
    // Kernels of any size that see neighbours: rows in one band and in several, a last column alone, images smaller than a span.
    let depthwise = |ci: usize, kernel| Geometry { groups: ci, ..Geometry::new(ci, ci, kernel) };
    all.extend([
        (Geometry { padding: [1; 4], ..depthwise(256, [3, 3]) }, 60, [29, 5]),
        (Geometry { padding: [3; 4], ..depthwise(96, [7, 7]) }, 2, [15, 14]),
        (Geometry { padding: [2; 4], ..depthwise(80, [5, 5]) }, 3, [8, 9]),
        (Geometry { padding: [0, 3, 1, 2], ..depthwise(48, [4, 3]) }, 2, [9, 8]),
        (Geometry { padding: [3, 0, 1, 9], ..depthwise(16, [2, 9]) }, 1, [1, 20]),
        (Geometry { padding: [15; 4], ..depthwise(32, [31, 31]) }, 1, [6, 5]),
        (Geometry { padding: [2, 0, 3, 1], stride: [1, 2], dilation: [2, 1], ..depthwise(32, [3, 3]) }, 2, [9, 8]),
    ]);
    all
}

#[test]
fn zero_points_floats_and_groups_of_few_channels_have_the_bits_of_the_plain_kernel() {
    let cpu = Cpu::new(4).unwrap();
    let (pixels, planes) = (Layout2d::Nhwc, Layout2d::Nchw);
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let bench = Bench { gpu: &gpu, stream: &stream };
        let mut random = Random(75);
        let names = ["int8_mma", "int8_mma_narrow", "int8_im2col_gemm", "int8_depthwise", "int8_planes"];
        let mut seen = [0; 5];
        for (turn, (geometry, batch, size)) in of_tensor_cores().into_iter().chain(of_few_channels()).enumerate() {
            let shape = Conv2dShape::new(geometry, batch, size).unwrap();
            for (i, y_type) in (0..16).map(|i| (i, OUTPUTS[i / 4])) {
                let (types, symmetric) = (TYPES[i % 4], (i + i / 4) % 2 == 0);
                let data = Random8::new(&mut random, &shape, types, symmetric);
                let w = bytes(types[1], &data.w);
                let w = Int8Weight::new(w, [geometry.co, geometry.k()], &data.scales, &data.zeros).unwrap();
                let float_bias = (y_type.is_some() && turn % 2 == 0).then(|| random.normals(geometry.co));
                let activation = match (y_type, (turn + i) % 5) {
                    (None, turn) => [Activation::None, Activation::Relu][turn % 2],
                    (Some(_), 0) => Activation::Silu,
                    (Some(_), 1) => Activation::Gelu,
                    (Some(_), 2) => Activation::GeluTanh,
                    (Some(_), 3) => Activation::Clamp(-0.25, 0.5),
                    (Some(_), _) => Activation::None,
                };
                let epilogue = Epilogue { bias: Some(&data.bias), float_bias: float_bias.as_deref(), activation };
                let (x_is, y_is) = (data.x_is, y_type.is_none().then_some(data.y_is));
                let layer = Layer::conv2d(&gpu, &stream, &w, geometry, x_is, y_is, epilogue).unwrap();
                for layouts in [[pixels; 2], [planes, pixels], [planes; 2]] {
                    let floats = y_type.is_some();
                    let problem = Problem { shape, x: types[0], symmetric, floats, layouts };
                    let plain = kernel("int8_simt").plan(&gpu.caps(), &problem).unwrap();
                    let want = bench.elements(&plain, &layer, &data.x, y_type);
                    for (name, seen) in names.iter().zip(&mut seen) {
                        for plan in kernel(name).plans(&gpu.caps(), &problem) {
                            let what = format!("{plan:?} {types:?} {y_type:?} {activation:?}");
                            let got = bench.elements(&plan, &layer, &data.x, y_type);
                            let wrong = got.iter().zip(&want).position(|(got, want)| got != want);
                            assert_eq!(wrong, None, "{what}: first byte that is wrong of {}", want.len());
                            *seen += 1;
                        }
                    }
                }
                if let Some(y_is) = y_is {
                    let reference = Conv2dInt8::new(&w, geometry, x_is, y_is).unwrap();
                    let reference =
                        reference.with_bias(data.bias.clone()).unwrap().with_activation(activation).unwrap();
                    let layouts = [pixels; 2];
                    let want = on_cpu(&reference, &cpu, &data.x, &shape, layouts);
                    let problem = Problem { shape, x: types[0], symmetric, floats: false, layouts };
                    for plan in names.iter().filter_map(|name| kernel(name).plan(&gpu.caps(), &problem).ok()) {
                        same(&bench.forward(&plan, &layer, &data.x), &want, &shape, &format!("{plan:?} {types:?}"));
                    }
                }
            }
        }
        assert!(seen.iter().all(|&seen| seen > 100), "{names:?} computed {seen:?}");
    }
}
