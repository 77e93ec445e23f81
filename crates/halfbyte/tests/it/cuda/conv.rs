//! Convolutions: every kernel × geometry × format against the f64 reference, element by element, and against other software.

use super::convolutions::{Bench, Images, TYPES, check, implicit_cases, kernel, prepare};
use super::gpus;
use crate::conv::{LAYOUTS, cases, formats, golden_cases, golden_shape};
use crate::data::{Random, parse, rounded, with_zeros_in_bytes};
use crate::golden::Golden;
use halfbyte::conv::{Conv2dShape, Geometry, Layout2d};
use halfbyte::cuda::Workspace;
use halfbyte::cuda::conv::{self, Call, KERNELS, Plan, Problem, Weights};
use halfbyte::cuda::matmul::Epilogue;
use halfbyte::format::reference::{self, Bound};
use halfbyte::kernel::Activation;
use halfbyte::{Float, Floats, Format};

#[test]
fn the_plain_kernel_is_within_the_bound_for_every_geometry_format_layout_and_type() {
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let bench = Bench { gpu: &gpu, stream: &stream, kernel: kernel("simt") };
        let mut random = Random(61);
        for (g, (geometry, batch, size)) in cases().into_iter().enumerate() {
            let shape = Conv2dShape::new(geometry, batch, size).unwrap();
            for (i, name) in formats(&geometry).iter().enumerate() {
                let (format, turn) = (parse(name), g + i);
                let w = random.qtensor(format.weight, [geometry.co, geometry.k()], false);
                let types = [TYPES[turn % 3], TYPES[turn / 3 % 3]];
                let x = rounded(&random.activations(shape.x_len()), types[0]);
                let reference = reference::conv2d_linear(&x, &w, format.act, &shape).unwrap();
                let layouts = [LAYOUTS[turn % 2], LAYOUTS[turn / 2 % 2]];
                let images = Images { shape: &shape, x: &x, types, layouts };
                let w = Weights::pack(&gpu, &stream, &w, format.act, geometry, types[0]).unwrap();
                let plan = bench.kernel.plan(&gpu.caps(), &images.problem(&w)).unwrap();
                let y = bench.forward_by(&plan, &w, &images, Epilogue::default());
                check(&y, &reference, plan.bound(), &format!("{plan:?} on {}", w.layout()));
            }
        }
    }
}

#[test]
fn products_of_patches_are_within_the_bound_for_every_geometry() {
    let patches = kernel("im2col_gemm");
    let formats =
        ["w4a16", "w8a16-asym", "w4a16-asym", "w8a16-sbf16", "w8a8", "w8a8-xasym", "w4a8-asym", "w4a8-g32-xasym"];
    for gpu in gpus().into_iter().filter(|gpu| (patches.serves)(gpu.caps().arch)) {
        let stream = gpu.stream().unwrap();
        let bench = Bench { gpu: &gpu, stream: &stream, kernel: patches };
        let (mut random, mut served) = (Random(67), [0; 2]);
        // Quantised on the fly, x is of any type; else of that of the scales.
        let types_of = |format: Format, turn: usize| {
            let x = if format.act.is_quantized() { TYPES[turn % 3] } else { format.weight.scale };
            [x, TYPES[turn / 2 % 3]]
        };
        let mut needed = Vec::new();
        for (g, (geometry, batch, size)) in cases().into_iter().chain(implicit_cases()).enumerate() {
            let shape = Conv2dShape::new(geometry, batch, size).unwrap();
            for (i, format) in formats.into_iter().map(parse).enumerate() {
                let ([x, y], layouts) = (types_of(format, g + i), [Layout2d::Nhwc; 2]);
                let problem = Problem { format: Some(format), shape, x, y, layouts, packed: "cuda_wna16" };
                if let Ok(plan) = patches.plan(&gpu.caps(), &problem) {
                    needed.extend(plan.instances());
                }
            }
        }
        prepare(&gpu, needed);
        for (g, (geometry, batch, size)) in cases().into_iter().chain(implicit_cases()).enumerate() {
            let shape = Conv2dShape::new(geometry, batch, size).unwrap();
            for (i, name) in formats.into_iter().enumerate() {
                let (format, turn) = (parse(name), g + i);
                if geometry.scale_channels(format.weight.group).is_err() {
                    continue;
                }
                let w = with_zeros_in_bytes(random.qtensor(format.weight, [geometry.co, geometry.k()], false));
                let (quantized, types) = (format.act.is_quantized(), types_of(format, turn));
                let x_type = types[0];
                let x = rounded(&random.activations(shape.x_len()), x_type);
                let reference = reference::conv2d_linear(&x, &w, format.act, &shape).unwrap();
                let w = Weights::pack(&gpu, &stream, &w, format.act, geometry, x_type).unwrap();
                assert_eq!(w.format(), Some(format));
                for x_layout in LAYOUTS {
                    let layouts = [x_layout, Layout2d::Nhwc];
                    let images = Images { shape: &shape, x: &x, types, layouts };
                    let Ok(plan) = patches.plan(&gpu.caps(), &images.problem(&w)) else { continue };
                    served[usize::from(quantized)] += 1;
                    let y = bench.forward_by(&plan, &w, &images, Epilogue::default());
                    check(&y, &reference, plan.bound(), &format!("{plan:?}"));
                }
            }
        }
        // On Hopper few weights of small groups are packed for patches.
        let least = if (kernel("implicit_gemm_sm90").serves)(gpu.caps().arch) { [50, 20] } else { [100, 0] };
        assert!(served[0] >= least[0] && served[1] >= least[1], "{served:?} served on {}", gpu.caps().arch);
    }
}

#[test]
fn images_in_planes_are_within_the_bound_for_every_geometry() {
    let planes = kernel("planes");
    for gpu in gpus().into_iter().filter(|gpu| (planes.serves)(gpu.caps().arch)) {
        let stream = gpu.stream().unwrap();
        let bench = Bench { gpu: &gpu, stream: &stream, kernel: planes };
        let (mut random, mut served) = (Random(69), 0);
        for (g, (geometry, batch, size)) in cases().into_iter().chain(implicit_cases()).enumerate() {
            let shape = Conv2dShape::new(geometry, batch, size).unwrap();
            for (i, name) in ["w4a16", "w8a16-asym", "w8a8", "w4a8-g32-xasym"].into_iter().enumerate() {
                let (format, turn) = (parse(name), g + i);
                if geometry.scale_channels(format.weight.group).is_err() {
                    continue;
                }
                let w = with_zeros_in_bytes(random.qtensor(format.weight, [geometry.co, geometry.k()], false));
                let x_type = if format.act.is_quantized() { TYPES[turn % 3] } else { Float::F16 };
                let types = [x_type, TYPES[turn / 2 % 3]];
                let x = rounded(&random.activations(shape.x_len()), x_type);
                let reference = reference::conv2d_linear(&x, &w, format.act, &shape).unwrap();
                let w = Weights::pack(&gpu, &stream, &w, format.act, geometry, x_type).unwrap();
                for layouts in [[Layout2d::Nchw; 2], [Layout2d::Nhwc, Layout2d::Nchw], LAYOUTS] {
                    let images = Images { shape: &shape, x: &x, types, layouts };
                    let Ok(plan) = planes.plan(&gpu.caps(), &images.problem(&w)) else { continue };
                    served += 1;
                    let y = bench.forward_by(&plan, &w, &images, Epilogue::default());
                    check(&y, &reference, plan.bound(), &format!("{plan:?}"));
                }
            }
        }
        assert!(served > 100, "{served} served on {}", gpu.caps().arch);
    }
}

#[test]
fn many_windows_of_few_channels_agree_with_the_plain_kernel() {
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let stem = Geometry { stride: [2, 2], padding: [3; 4], ..Geometry::new(3, 64, [7, 7]) };
        // Scales of another type than x are for patches everywhere.
        for (name, format) in [("implicit_gemm_rows_sm90", "w8a16"), ("im2col_gemm", "w8a16-sbf16")] {
            let (geometry, shape) = (stem, Conv2dShape::new(stem, 5, [224, 224]).unwrap());
            let (mut random, format) = (Random(68), parse(format));
            let w = random.qtensor(format.weight, [64, geometry.k()], false);
            let x = rounded(&random.normals(shape.x_len()), Float::F16);
            let packed = Weights::pack(&gpu, &stream, &w, format.act, geometry, Float::F16).unwrap();
            for layouts in [[Layout2d::Nhwc; 2], LAYOUTS] {
                let images = Images { shape: &shape, x: &x, types: [Float::F16, Float::F32], layouts };
                let Ok(plan) = kernel(name).plan(&gpu.caps(), &images.problem(&packed)) else {
                    assert!(!(kernel(name).serves)(gpu.caps().arch), "{name}: {}", images.problem(&packed));
                    continue;
                };
                let by = |name| {
                    let bench = Bench { gpu: &gpu, stream: &stream, kernel: kernel(name) };
                    bench.forward(&packed, &images, Epilogue::default())
                };
                let (got, want) = (by(name), by("simt"));
                let bound = plan.bound();
                // |x| · |w| is at most this for any pixel; the error of both kernels is a small part of it.
                let weights = reference::dequantize(&w);
                let row = |i: usize| weights[i * 147..(i + 1) * 147].iter().map(|v| v.abs()).sum::<f64>();
                let largest = f64::from(x.iter().fold(0.0f32, |most, v| most.max(v.abs())));
                for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                    let magnitude = largest * row(i / 112 / 112 % 64);
                    let allowed = bound.allowed(magnitude) + Bound::new(Float::F32, 147).allowed(magnitude);
                    let error = f64::from((got - want).abs());
                    assert!(error <= allowed, "{name} {layouts:?}: element {i} is {got}, plain {want}");
                }
            }
        }
    }
}

#[test]
fn bias_and_activation_come_last_in_every_kernel() {
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let mut random = Random(64);
        for geometry in [
            Geometry { padding: [1; 4], groups: 2, ..Geometry::new(128, 48, [3, 3]) },
            Geometry::new(64, 24, [1, 1]),
            Geometry { padding: [1; 4], groups: 48, ..Geometry::new(48, 48, [3, 3]) },
            Geometry { padding: [1; 4], groups: 6, ..Geometry::new(24, 24, [3, 3]) },
        ] {
            let shape = Conv2dShape::new(geometry, 2, [5, 6]).unwrap();
            let format = parse("w8a16");
            let w = random.qtensor(format.weight, [geometry.co, geometry.k()], false);
            let x = rounded(&random.normals(shape.x_len()), Float::F16);
            let bias = random.normals(geometry.co);
            let plain = reference::conv2d_linear(&x, &w, format.act, &shape).unwrap();
            let w = Weights::pack(&gpu, &stream, &w, format.act, geometry, Float::F16).unwrap();
            for activation in [Activation::None, Activation::Relu6, Activation::Clamp(-0.5, 0.25), Activation::Silu] {
                let images =
                    Images { shape: &shape, x: &x, types: [Float::F16, Float::F32], layouts: [Layout2d::Nhwc; 2] };
                let problem = images.problem(&w);
                for kernel in KERNELS.iter().filter(|k| k.supports(&gpu.caps(), &problem).is_ok()) {
                    let bench = Bench { gpu: &gpu, stream: &stream, kernel };
                    let on_device = bench.upload(&bias);
                    let epilogue = Epilogue { bias: Some(on_device.view()), activation };
                    for (i, y) in bench.forward(&w, &images, epilogue).into_iter().enumerate() {
                        let v = plain.value[i] + f64::from(bias[i / 30 % geometry.co]);
                        let want = match activation {
                            Activation::Relu => v.max(0.0),
                            Activation::Relu6 => v.clamp(0.0, 6.0),
                            Activation::Clamp(low, high) => v.clamp(low.into(), high.into()),
                            Activation::Silu => v / (1.0 + (-v).exp()),
                            _ => v,
                        };
                        let error = (f64::from(y) - want).abs();
                        assert!(error < 1e-3 + 1e-4 * want.abs(), "{} {activation:?}: {y} and {want}", kernel.name);
                    }
                }
            }
        }
    }
}

#[test]
fn nan_and_infinity_reach_every_pixel_that_sees_them_and_no_other() {
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let mut random = Random(65);
        let wide = Geometry { padding: [1; 4], ..Geometry::new(64, 16, [3, 3]) };
        // Boxes of whose rows hold pixels that a window does not see.
        let narrow = Geometry { ci: 5, ..wide };
        for (name, geometry) in [
            ("w4a16", wide),
            ("w8a16-asym", wide),
            ("w8a8", wide),
            ("w4a8-g64-asym-xasym", wide),
            ("w4a16", narrow),
            ("w8a16-asym", narrow),
            ("w8a8", narrow),
        ] {
            let format = parse(name);
            let shape = Conv2dShape::new(geometry, 1, [6, 7]).unwrap();
            let w = random.qtensor(format.weight, [16, geometry.k()], false);
            let w = Weights::pack(&gpu, &stream, &w, format.act, geometry, Float::F16).unwrap();
            for bad in [f32::NAN, f32::INFINITY] {
                let mut x = rounded(&random.normals(shape.x_len()), Float::F16);
                // Channel 3 of row 2, column 4.
                x[3 * 42 + 2 * 7 + 4] = bad;
                let images =
                    Images { shape: &shape, x: &x, types: [Float::F16, Float::F32], layouts: [Layout2d::Nhwc; 2] };
                let kernel = Plan::of(&gpu.caps(), &images.problem(&w)).unwrap().kernel();
                let bench = Bench { gpu: &gpu, stream: &stream, kernel };
                let mut spoilt = 0;
                for (i, y) in bench.forward(&w, &images, Epilogue::default()).iter().enumerate() {
                    let (row, column) = (i / 7 % 6, i % 7);
                    let sees = row.abs_diff(2) <= 1 && column.abs_diff(4) <= 1;
                    assert!(sees || y.is_finite(), "{} {name} {bad}: leaked to {row}, {column}", kernel.name);
                    spoilt += usize::from(!y.is_finite());
                }
                assert!(spoilt > 0, "{} {name} {bad}", kernel.name);
            }
        }
    }
}

#[test]
fn dense_convolutions_of_other_software() {
    let cases = golden_cases("conv_fp32");
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let bench = Bench { gpu: &gpu, stream: &stream, kernel: kernel("simt") };
        for (name, case) in &cases {
            let golden = Golden::read(&format!("conv_fp32/{name}"));
            let shape = golden_shape(&golden, case);
            let geometry = *shape.geometry();
            let (x, bias, want) = (golden.f32s("x"), bench.upload(&golden.f32s("bias")), golden.f64s("y_f64"));
            let w = geometry.weight_rows(&golden.f32s("w")).unwrap();
            let w = Weights::dense(&gpu, &stream, Floats::F32(&w), geometry).unwrap();
            for layouts in LAYOUTS.iter().flat_map(|&x| LAYOUTS.map(|y| [x, y])) {
                let images = Images { shape: &shape, x: &x, types: [Float::F32; 2], layouts };
                let epilogue = Epilogue { bias: Some(bias.view()), activation: Activation::None };
                for (i, (y, &want)) in bench.forward(&w, &images, epilogue).iter().zip(&want).enumerate() {
                    let error = (f64::from(*y) - want).abs();
                    assert!(error <= 2e-6 + 1e-5 * want.abs(), "{name} {layouts:?}: {y} and {want} at {i}");
                }
            }
        }
    }
}

#[test]
fn wrong_weights_lengths_and_workspaces_are_errors() {
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let mut random = Random(66);
        let geometry = Geometry::new(8, 4, [3, 3]);
        let format = parse("w8a8");
        let w = random.qtensor(format.weight, [4, 72], false);
        let pack = |w: &_, geometry| Weights::pack(&gpu, &stream, w, format.act, geometry, Float::F32);
        let error = pack(&w, Geometry::new(9, 4, [3, 3])).unwrap_err().to_string();
        assert_eq!(error, "conv2d: expected a weight of 4 × 81, got 4 × 72");
        assert!(pack(&w, Geometry { groups: 0, ..geometry }).is_err());
        let across = random.qtensor(parse("w4a16-g9").weight, [4, 72], false);
        assert!(pack(&across, geometry).unwrap_err().to_string().contains("groups of 9"));
        let shuffled = random.qtensor(parse("w4a16-g8").weight, [4, 72], true);
        assert!(pack(&shuffled, geometry).unwrap_err().to_string().contains("act-order"));
        assert!(Weights::dense(&gpu, &stream, Floats::F32(&[0.0; 287]), geometry).is_err());

        let packed = pack(&w, geometry).unwrap();
        let x = gpu.context().allocate::<f32>(128).unwrap();
        let bias = gpu.context().allocate::<f32>(5).unwrap();
        let forward = |x_len: usize, y_len: usize, batch: usize, bias_len: usize, bytes: usize| {
            let mut y = gpu.context().allocate::<f32>(y_len).unwrap();
            let mut workspace = Workspace::new(&gpu, &stream, bytes).unwrap();
            let layout = Layout2d::Nchw;
            let epilogue = Epilogue { bias: Some(bias.view().slice(0..bias_len)), activation: Activation::None };
            let (x, y, workspace) = (x.view().slice(0..x_len).into(), y.view_mut().into(), Some(&mut workspace));
            let (x_layout, y_layout, size, w) = (layout, layout, [4, 4], &packed);
            let call = Call { x, x_layout, batch, size, w, epilogue, y, y_layout, workspace };
            conv::run(&gpu, &stream, call).map_err(|e| e.to_string())
        };
        let shape = Conv2dShape::new(geometry, 1, [4, 4]).unwrap();
        let layouts = [Layout2d::Nchw; 2];
        let (format, packed_as) = (packed.format(), packed.layout());
        let problem = Problem { format, shape, x: Float::F32, y: Float::F32, layouts, packed: packed_as };
        let bytes = conv::plan(&gpu, &packed, problem).unwrap().workspace_bytes();
        assert!(bytes > Workspace::COUNTER_BYTES);
        assert_eq!(forward(128, 16, 1, 4, bytes), Ok(()));
        let refused = |result: Result<(), String>, text: &str| assert_eq!(result.unwrap_err(), text);
        refused(forward(127, 16, 1, 4, bytes), "conv2d: expected x of 1 × 8 × 4 × 4, got 127 elements");
        refused(forward(128, 15, 1, 4, bytes), "conv2d: expected y of 1 × 4 × 2 × 2, got 15 elements");
        refused(forward(128, 16, 1, 5, bytes), "conv2d: expected a bias of 4, got 5");
        let short = format!("conv2d: expected a workspace of {bytes} bytes, got {}", bytes - 1);
        refused(forward(128, 16, 1, 4, bytes - 1), &short);
        assert!(forward(128, 16, usize::MAX, 4, bytes).is_err());
        stream.synchronize().unwrap();
    }
}
