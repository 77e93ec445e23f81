//! Convolutions of groups of few channels: forms, formats and types of `depthwise` against the f64 reference.

use super::convolutions::{Bench, Images, TYPES, check, kernel, prepare};
use super::gpus;
use crate::conv::formats;
use crate::data::{Random, parse, rounded};
use halfbyte::conv::{Conv2dShape, Geometry, Layout2d};
use halfbyte::cuda::Workspace;
use halfbyte::cuda::conv::{Call, Weights};
use halfbyte::cuda::driver::{FloatView, FloatViewMut};
use halfbyte::cuda::matmul::Epilogue;
use halfbyte::format::reference;
use halfbyte::{Act, Float, Floats};

const NHWC: [Layout2d; 2] = [Layout2d::Nhwc; 2];

/// So many groups of so many channels and outputs.
fn grouped(groups: usize, channels: usize, kernel: [usize; 2]) -> Geometry {
    Geometry { groups, ..Geometry::new(groups * channels, groups * channels, kernel) }
}

/// Geometries with batch and size of the input: every number of channels and form, tiles and rows of pixels that leave rests, padding
/// and strides larger than the kernel, kernels whose weights are more than shared memory holds, several steps of a block.
fn cases() -> Vec<(Geometry, usize, [usize; 2])> {
    vec![
        (Geometry { padding: [1; 4], ..grouped(8, 1, [3, 3]) }, 2, [5, 4]),
        (Geometry { padding: [1; 4], ..grouped(72, 1, [3, 3]) }, 3, [9, 11]),
        (Geometry { padding: [1; 4], stride: [2, 2], ..grouped(64, 1, [3, 3]) }, 2, [11, 14]),
        (Geometry { padding: [0, 1, 2, 3], stride: [1, 2], dilation: [2, 1], ..grouped(200, 1, [3, 3]) }, 1, [8, 7]),
        (Geometry { padding: [4, 5, 4, 5], stride: [3, 1], ..grouped(16, 1, [3, 3]) }, 2, [4, 3]),
        (Geometry { padding: [2; 4], dilation: [1, 2], ..grouped(24, 1, [3, 3]) }, 1, [7, 9]),
        (Geometry { stride: [4, 3], ..grouped(40, 1, [3, 3]) }, 1, [13, 14]),
        (Geometry { padding: [2; 4], ..grouped(96, 1, [5, 5]) }, 2, [9, 6]),
        (Geometry { padding: [2; 4], stride: [2, 2], ..grouped(144, 1, [5, 5]) }, 2, [11, 14]),
        (Geometry { padding: [1, 3, 2, 4], stride: [3, 1], dilation: [2, 1], ..grouped(24, 1, [4, 5]) }, 1, [13, 9]),
        (Geometry { padding: [0, 7, 0, 6], stride: [1, 2], dilation: [3, 1], ..grouped(8, 1, [2, 5]) }, 2, [7, 3]),
        (Geometry { padding: [2; 4], dilation: [1, 2], stride: [1, 2], ..grouped(16, 1, [5, 5]) }, 1, [9, 13]),
        (Geometry { padding: [3; 4], ..grouped(96, 1, [7, 7]) }, 2, [8, 11]),
        (Geometry { padding: [3; 4], stride: [2, 2], ..grouped(40, 1, [7, 7]) }, 2, [11, 17]),
        (Geometry { padding: [8, 9, 8, 10], stride: [2, 1], dilation: [2, 1], ..grouped(8, 1, [5, 7]) }, 1, [3, 2]),
        (Geometry { padding: [27, 3, 27, 3], ..grouped(64, 1, [55, 7]) }, 2, [10, 9]),
        (Geometry { padding: [40, 2, 40, 2], stride: [1, 2], ..grouped(72, 1, [80, 5]) }, 1, [9, 10]),
        (Geometry { padding: [15; 4], ..grouped(72, 1, [31, 31]) }, 2, [9, 10]),
        (Geometry { padding: [0, 20, 0, 19], ..grouped(32, 1, [2, 40]) }, 2, [3, 30]),
        (grouped(48, 1, [1, 1]), 2, [5, 6]),
        (Geometry { padding: [3, 0, 0, 0], ..grouped(32, 1, [4, 1]) }, 2, [9, 1]),
        (Geometry { padding: [1; 4], ..grouped(8, 1, [3, 3]) }, 40, [33, 35]),
        (Geometry { padding: [1; 4], ..grouped(12, 2, [3, 3]) }, 3, [6, 7]),
        (Geometry { padding: [1, 2, 3, 4], stride: [2, 3], dilation: [3, 2], ..grouped(36, 2, [2, 4]) }, 2, [8, 9]),
        (Geometry { padding: [1; 4], ..grouped(32, 4, [3, 3]) }, 2, [7, 6]),
        (Geometry { padding: [1; 4], stride: [2, 2], ..grouped(6, 4, [3, 3]) }, 2, [9, 8]),
        (Geometry { padding: [4, 2, 3, 2], stride: [2, 1], dilation: [2, 1], ..grouped(68, 2, [5, 3]) }, 2, [7, 9]),
        (Geometry { padding: [4, 5, 4, 5], dilation: [3, 1], ..grouped(20, 4, [2, 3]) }, 2, [5, 3]),
        (Geometry { padding: [20, 1, 20, 1], ..grouped(16, 4, [41, 3]) }, 1, [6, 9]),
        (Geometry { padding: [1; 4], ..grouped(9, 8, [3, 3]) }, 2, [5, 7]),
        (Geometry { padding: [4; 4], stride: [2, 1], ..grouped(16, 8, [9, 9]) }, 2, [8, 7]),
        (Geometry { padding: [0, 14, 0, 14], ..grouped(4, 8, [3, 29]) }, 1, [6, 19]),
        (Geometry { padding: [1; 4], ..grouped(8, 1, [3, 3]) }, 0, [4, 4]),
    ]
}

#[test]
fn groups_of_few_channels_are_within_the_bound_for_every_geometry_format_and_type() {
    let kernel = kernel("depthwise");
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let bench = Bench { gpu: &gpu, stream: &stream, kernel };
        prepare(&gpu, (kernel.instances)());
        let mut random = Random(81);
        for (g, (geometry, batch, size)) in cases().into_iter().enumerate() {
            let shape = Conv2dShape::new(geometry, batch, size).unwrap();
            let channels = geometry.channels();
            let mut names = formats(&geometry);
            let more = ["w4a16-sf32", "w8a16-asym-sbf16", "w3a16-gN", "w4a8-gN-si8", "w4a8-gN-xasym-sbf16-si8"];
            names.extend(more.map(|name| name.replace('N', &channels.to_string())));
            for (i, name) in names.iter().enumerate() {
                let (format, turn) = (parse(name), g + i);
                let w = random.qtensor(format.weight, [geometry.co, geometry.k()], false);
                let types = [TYPES[turn % 3], TYPES[turn / 3 % 3]];
                let x = rounded(&random.activations(shape.x_len()), types[0]);
                let reference = reference::conv2d_linear(&x, &w, format.act, &shape).unwrap();
                let images = Images { shape: &shape, x: &x, types, layouts: NHWC };
                let w = Weights::pack(&gpu, &stream, &w, format.act, geometry, types[0]).unwrap();
                let plan = kernel.plan(&gpu.caps(), &images.problem(&w)).unwrap();
                let y = bench.forward_by(&plan, &w, &images, Epilogue::default());
                check(&y, &reference, plan.bound(), &format!("{plan:?}"));
            }
        }
    }
}

#[test]
fn dense_weights_of_every_type_are_multiplied_as_quantised_ones_that_stand_for_them() {
    let kernel = kernel("depthwise");
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let bench = Bench { gpu: &gpu, stream: &stream, kernel };
        let mut random = Random(82);
        for (g, (geometry, batch, size)) in cases().into_iter().enumerate() {
            let shape = Conv2dShape::new(geometry, batch, size).unwrap();
            // Codes of 8 bits times a power of two are exact in every type.
            let codes: Vec<f32> =
                random.normals(geometry.co * geometry.k()).iter().map(|v| (v * 40.0).round()).collect();
            let scale = 2.0f32.powi(-6);
            let values: Vec<f32> = codes.iter().map(|code| code.clamp(-127.0, 127.0) * scale).collect();
            let format = parse("w8a16");
            let stored = codes.iter().map(|code| (code.clamp(-127.0, 127.0) + 128.0) as u8).collect();
            let scales = vec![scale; geometry.co];
            let size = [geometry.co, geometry.k()];
            let q = halfbyte::QTensor::new(format.weight, size, stored, scales, halfbyte::Zeros::Symmetric, None);
            let types = [TYPES[g % 3], TYPES[g / 3 % 3]];
            let x = rounded(&random.normals(shape.x_len()), types[0]);
            let images = Images { shape: &shape, x: &x, types, layouts: NHWC };
            let packed = Weights::pack(&gpu, &stream, &q.unwrap(), Act::A16, geometry, types[0]).unwrap();
            let want = bench.forward(&packed, &images, Epilogue::default());
            let halfs: Vec<_> = values.iter().map(|&v| half::f16::from_f32(v)).collect();
            let brains: Vec<_> = values.iter().map(|&v| half::bf16::from_f32(v)).collect();
            for floats in [Floats::F16(&halfs), Floats::BF16(&brains), Floats::F32(&values)] {
                let w = Weights::dense(&gpu, &stream, floats, geometry).unwrap();
                assert_eq!(bench.forward(&w, &images, Epilogue::default()), want, "{}", images.problem(&w));
            }
        }
    }
}

#[test]
fn an_image_has_the_same_bits_alone_and_in_a_batch() {
    let kernel = kernel("depthwise");
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let bench = Bench { gpu: &gpu, stream: &stream, kernel };
        let mut random = Random(83);
        for (name, geometry) in [
            ("w4a16", Geometry { padding: [1; 4], ..grouped(72, 1, [3, 3]) }),
            ("w8a16-asym", Geometry { padding: [1; 4], stride: [2, 2], ..grouped(64, 1, [3, 3]) }),
            ("w8a8", Geometry { padding: [3; 4], ..grouped(24, 1, [7, 7]) }),
            ("w4a16", Geometry { padding: [2; 4], stride: [2, 2], ..grouped(40, 1, [5, 5]) }),
            ("w4a16-g4", Geometry { padding: [1; 4], ..grouped(32, 4, [3, 3]) }),
        ] {
            let format = parse(name);
            let w = random.qtensor(format.weight, [geometry.co, geometry.k()], false);
            let w = Weights::pack(&gpu, &stream, &w, format.act, geometry, Float::F16).unwrap();
            let (size, batch) = ([19, 22], 7);
            let forward = |x: &[f32], batch: usize| {
                let shape = Conv2dShape::new(geometry, batch, size).unwrap();
                let images = Images { shape: &shape, x, types: [Float::F16, Float::F32], layouts: NHWC };
                bench.forward(&w, &images, Epilogue::default())
            };
            let one = geometry.ci * size[0] * size[1];
            let x = rounded(&random.normals(batch * one), Float::F16);
            let all = forward(&x, batch);
            for (i, (x, want)) in x.chunks(one).zip(all.chunks(all.len() / batch)).enumerate() {
                assert_eq!(forward(x, 1), want, "{name}: image {i}");
            }
        }
    }
}

/// Images in planes are quantised by a thread a scale, pixels by vectors where there are any.
#[test]
fn quantised_images_are_the_same_however_they_lie() {
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let bench = Bench { gpu: &gpu, stream: &stream, kernel: kernel("simt") };
        let mut random = Random(84);
        for (turn, share) in [1, 2, 3, 4, 8, 12, 20, 24, 64, 260, 1000].into_iter().enumerate() {
            for (groups, size) in [(1, [3, 5]), (3, [5, 7]), (8, [4, 6])] {
                for name in ["w8a8", "w8a8-xasym"] {
                    let geometry = Geometry { groups, ..Geometry::new(groups * share, groups, [1, 2]) };
                    let shape = Conv2dShape::new(geometry, 2, size).unwrap();
                    let format = parse(name);
                    let w = random.qtensor(format.weight, [geometry.co, geometry.k()], false);
                    let types = [TYPES[(turn + groups) % 3], Float::F32];
                    let x = rounded(&random.activations(shape.x_len()), types[0]);
                    let w = Weights::pack(&gpu, &stream, &w, format.act, geometry, types[0]).unwrap();
                    let [pixels, planes] = [Layout2d::Nhwc, Layout2d::Nchw].map(|of_x| {
                        let images = Images { shape: &shape, x: &x, types, layouts: [of_x, Layout2d::Nhwc] };
                        bench.forward(&w, &images, Epilogue::default())
                    });
                    assert_eq!(pixels, planes, "{name}: {groups} groups of {share}");
                }
            }
        }
    }
}

#[test]
fn images_at_odd_addresses_are_an_error() {
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let bench = Bench { gpu: &gpu, stream: &stream, kernel: kernel("depthwise") };
        let geometry = Geometry { padding: [1; 4], ..grouped(8, 1, [3, 3]) };
        let w = Weights::dense(&gpu, &stream, Floats::F32(&[1.0; 72]), geometry).unwrap();
        let (x, mut y) = (bench.upload(&[1.0f32; 8 * 16 + 1]), bench.upload(&[1.0f32; 8 * 16 + 1]));
        for [of_x, of_y] in [[1, 0], [0, 1]] {
            let mut workspace = Workspace::new(&gpu, &stream, 0).unwrap();
            let call = Call {
                x: FloatView::F32(x.view().slice(of_x..of_x + 128)),
                x_layout: Layout2d::Nhwc,
                batch: 1,
                size: [4, 4],
                w: &w,
                epilogue: Epilogue::default(),
                y: FloatViewMut::F32(y.view_mut().slice(of_y..of_y + 128)),
                y_layout: Layout2d::Nhwc,
                workspace: Some(&mut workspace),
            };
            let plan = bench.kernel.plan(&gpu.caps(), &call.problem().unwrap()).unwrap();
            let error = plan.run(&gpu, &stream, call).unwrap_err().to_string();
            assert!(error.contains("multiples of 16 bytes"), "{error}");
        }
    }
}
