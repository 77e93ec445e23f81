//! Convolutions: every kernel × geometry × format against the f64 reference, element by element, and against other software.

use super::gpus;
use crate::conv::{LAYOUTS, cases, formats, golden_cases, golden_shape, laid_out, planes};
use crate::data::{Random, parse, rounded, with_zeros_in_bytes};
use crate::golden::Golden;
use bytemuck::Pod;
use half::{bf16, f16};
use halfbyte::conv::{Conv2dShape, Geometry, Layout2d};
use halfbyte::cuda::conv::{self, Call, KERNELS, Kernel, Problem, Weights};
use halfbyte::cuda::conv::{implicit_gemm_a8_sm90, implicit_gemm_rows_sm90, implicit_gemm_sm90};
use halfbyte::cuda::driver::{Buffer, FloatView, FloatViewMut, Stream, ViewMut};
use halfbyte::cuda::matmul::Epilogue;
use halfbyte::cuda::sources::{Arch, Instance};
use halfbyte::cuda::{Caps, Gpu, Workspace};
use halfbyte::format::reference::{self, Bound, Product};
use halfbyte::kernel::Activation;
use halfbyte::{Float, Floats, Format};

/// Elements before and after every output, to see that a kernel writes nothing else.
const GUARD: usize = 64;

/// Every byte of outputs and guards before the kernel runs: NaN in all three types.
const POISON: u8 = 0xff;

pub(super) const TYPES: [Float; 3] = [Float::F16, Float::BF16, Float::F32];

pub(super) fn kernel(name: &str) -> &'static Kernel {
    KERNELS.iter().find(|kernel| kernel.name == name).unwrap()
}

/// One device, and what is computed there.
pub(super) struct Bench<'a> {
    pub gpu: &'a Gpu,
    pub stream: &'a Stream,
    pub kernel: &'static Kernel,
    /// Of an implicit product, if not the one that it chooses.
    pub plan: Option<Plan>,
}

/// A plan of an implicit product: of pixels, of rows of windows, of quantised activations.
#[derive(Clone, Copy)]
pub(super) enum Plan {
    Exact(implicit_gemm_sm90::config::Plan),
    Rows(implicit_gemm_sm90::config::Plan),
    Quantized(implicit_gemm_a8_sm90::config::Plan),
}

/// Images and their result.
pub(super) struct Images<'a> {
    pub shape: &'a Conv2dShape,
    /// `[batch, ci, h, w]`, of the type.
    pub x: &'a [f32],
    pub types: [Float; 2],
    pub layouts: [Layout2d; 2],
}

impl Bench<'_> {
    fn upload<T: Pod>(&self, values: &[T]) -> Buffer<T> {
        let mut buffer = self.gpu.context().allocate(values.len()).unwrap();
        self.stream.upload(values, buffer.view_mut()).unwrap();
        buffer
    }

    /// y `[batch, co, oh, ow]`, computed twice with the same bits, and nothing else written.
    pub fn forward(&self, w: &Weights, images: &Images<'_>, epilogue: Epilogue<'_>) -> Vec<f32> {
        let Images { shape, x, types: [x_type, y_type], layouts } = *images;
        let pixels = |size: [usize; 2]| size[0] * size[1];
        let x = laid_out(x, [shape.batch(), shape.geometry().ci, pixels(shape.input())], layouts[0]);
        let halfs = self.upload(&x.iter().map(|&v| f16::from_f32(v)).collect::<Vec<_>>());
        let brains = self.upload(&x.iter().map(|&v| bf16::from_f32(v)).collect::<Vec<_>>());
        let singles = self.upload(&x);
        let x = match x_type {
            Float::F16 => FloatView::F16(halfs.view()),
            Float::BF16 => FloatView::BF16(brains.view()),
            Float::F32 => FloatView::F32(singles.view()),
        };
        macro_rules! twice {
            ($type:ty, $widen:expr) => {{
                let once: Vec<$type> = self.guarded(w, x, images, epilogue);
                let again: Vec<$type> = self.guarded(w, x, images, epilogue);
                let bits = |y: &[$type]| bytemuck::cast_slice::<$type, u8>(y).to_vec();
                assert_eq!(bits(&once), bits(&again), "{}: not the same bits twice", self.kernel.name);
                once.into_iter().map($widen).collect::<Vec<f32>>()
            }};
        }
        let y = match y_type {
            Float::F16 => twice!(f16, |v| v.to_f32()),
            Float::BF16 => twice!(bf16, |v| v.to_f32()),
            Float::F32 => twice!(f32, |v| v),
        };
        planes(&y, [shape.batch(), shape.geometry().co, pixels(shape.output())], layouts[1])
    }

    fn guarded<T: Pod>(&self, w: &Weights, x: FloatView<'_>, images: &Images<'_>, epilogue: Epilogue<'_>) -> Vec<T>
    where
        for<'a> FloatViewMut<'a>: From<ViewMut<'a, T>>,
    {
        let (shape, [x_layout, y_layout]) = (images.shape, images.layouts);
        let len = shape.y_len();
        let mut y = self.gpu.context().allocate::<T>(len + 2 * GUARD).unwrap();
        self.stream.fill(y.view_mut(), POISON).unwrap();
        let problem = images.problem(w);
        let bytes = match &self.plan {
            None => self.kernel.workspace_bytes(&self.gpu.caps(), &problem, w.layout()),
            Some(Plan::Exact(plan)) => implicit_gemm_sm90::workspace_bytes_as(plan),
            Some(Plan::Rows(plan)) => implicit_gemm_rows_sm90::workspace_bytes_as(plan, &problem).unwrap(),
            Some(Plan::Quantized(plan)) => implicit_gemm_a8_sm90::workspace_bytes_as(plan, &problem).unwrap(),
        };
        let mut workspace = Workspace::new(self.gpu, self.stream, bytes).unwrap();
        let counters = bytes.min(Workspace::COUNTER_BYTES);
        self.stream.fill(workspace.view_mut().slice(counters..bytes), POISON).unwrap();
        let y_view = y.view_mut().slice(GUARD..GUARD + len).into();
        let (batch, size, workspace_view) = (shape.batch(), shape.input(), Some(&mut workspace));
        let call = Call { x, x_layout, batch, size, w, epilogue, y: y_view, y_layout, workspace: workspace_view };
        match self.plan {
            None => conv::run_with(self.kernel, self.gpu, self.stream, call).unwrap(),
            Some(Plan::Exact(plan)) => implicit_gemm_sm90::run_as(plan, self.gpu, self.stream, call).unwrap(),
            Some(Plan::Rows(plan)) => implicit_gemm_rows_sm90::run_as(plan, self.gpu, self.stream, call).unwrap(),
            Some(Plan::Quantized(plan)) => implicit_gemm_a8_sm90::run_as(plan, self.gpu, self.stream, call).unwrap(),
        }
        let mut left = vec![1u8; counters];
        self.stream.download(workspace.view().slice(0..counters), &mut left).unwrap();
        assert!(left.iter().all(|&byte| byte == 0), "{}: counters left behind", self.kernel.name);
        let mut all = vec![T::zeroed(); len + 2 * GUARD];
        self.stream.download(y.view(), &mut all).unwrap();
        let intact = |guard: &[T]| bytemuck::cast_slice::<T, u8>(guard).iter().all(|&byte| byte == POISON);
        assert!(intact(&all[..GUARD]) && intact(&all[GUARD + len..]), "{}: wrote outside", self.kernel.name);
        all[GUARD..GUARD + len].to_vec()
    }
}

impl Images<'_> {
    pub fn problem(&self, w: &Weights) -> Problem {
        let ([x, y], layouts) = (self.types, self.layouts);
        Problem { format: w.format(), shape: *self.shape, x, y, layouts }
    }
}

/// Compiles what is needed, several at once.
pub(super) fn prepare(gpu: &Gpu, instances: impl IntoIterator<Item = Instance>) {
    let mut instances: Vec<Instance> = instances.into_iter().collect();
    instances.sort_by_cached_key(Instance::to_string);
    instances.dedup_by_key(|instance| instance.to_string());
    gpu.prepare(&instances, |_| ()).unwrap();
}

pub(super) fn check(y: &[f32], reference: &Product, bound: Bound, what: &str) {
    assert_eq!(y.len(), reference.value.len(), "{what}");
    for (i, &y) in y.iter().enumerate() {
        let (want, magnitude) = (reference.value[i], reference.magnitude[i]);
        let error = (f64::from(y) - want).abs();
        let allowed = bound.allowed(magnitude);
        assert!(error <= allowed, "{what}: element {i} is {y}, expected {want} ± {allowed:e}, off by {error:e}");
    }
}

/// Geometries of the implicit product with batch and size of the input: channels of one box and several, an odd number of boxes,
/// every parameter by itself and together, outputs that fill no strip, groups.
pub(super) fn implicit_cases() -> Vec<(Geometry, usize, [usize; 2])> {
    let new = Geometry::new;
    vec![
        (Geometry { padding: [1; 4], ..new(64, 64, [3, 3]) }, 3, [9, 8]),
        (Geometry { padding: [1; 4], ..new(128, 72, [3, 3]) }, 2, [7, 7]),
        (Geometry { padding: [1; 4], stride: [2, 2], ..new(64, 130, [3, 3]) }, 2, [11, 10]),
        (Geometry { stride: [2, 3], ..new(192, 40, [1, 1]) }, 2, [9, 11]),
        (Geometry { stride: [2, 2], padding: [3; 4], ..new(64, 33, [7, 7]) }, 1, [13, 12]),
        (Geometry { padding: [0, 3, 0, 2], ..new(64, 20, [1, 6]) }, 2, [3, 9]),
        (Geometry { padding: [4, 0, 1, 0], dilation: [2, 1], ..new(128, 17, [5, 1]) }, 1, [11, 3]),
        (Geometry { padding: [5, 4, 3, 2], ..new(64, 65, [2, 2]) }, 1, [3, 4]),
        (Geometry { stride: [5, 4], ..new(64, 8, [2, 3]) }, 2, [13, 12]),
        (Geometry { stride: [4, 3], padding: [6, 7, 5, 8], dilation: [3, 2], ..new(64, 9, [3, 2]) }, 1, [5, 6]),
        (Geometry { dilation: [2, 3], padding: [2, 3, 2, 3], groups: 2, ..new(256, 80, [3, 3]) }, 2, [7, 8]),
        (Geometry { padding: [1; 4], groups: 3, ..new(192, 24, [3, 3]) }, 1, [6, 6]),
        (Geometry { padding: [1; 4], groups: 2, ..new(128, 10, [3, 3]) }, 1, [5, 6]),
        (Geometry { padding: [1; 4], ..new(64, 264, [3, 3]) }, 1, [4, 300]),
        (Geometry { padding: [1; 4], ..new(64, 64, [3, 3]) }, 0, [4, 4]),
    ]
}
#[test]
fn the_plain_kernel_is_within_the_bound_for_every_geometry_format_layout_and_type() {
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let bench = Bench { gpu: &gpu, stream: &stream, kernel: kernel("simt"), plan: None };
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
                let (problem, caps) = (images.problem(&w), gpu.caps());
                let y = bench.forward(&w, &images, Epilogue::default());
                let bound = bench.kernel.bound(&caps, &problem, w.layout());
                check(&y, &reference, bound, &format!("plain on {}: {problem}", w.layout()));
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
        let bench = Bench { gpu: &gpu, stream: &stream, kernel: patches, plan: None };
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
                let problem = Problem { format: Some(format), shape, x, y, layouts };
                if patches.supports(&gpu.caps(), &problem, "cuda_wna16").is_ok() {
                    needed.extend(patches.instances_of(&gpu.caps(), &problem, "cuda_wna16"));
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
                    let (problem, caps) = (images.problem(&w), gpu.caps());
                    if patches.supports(&caps, &problem, w.layout()).is_err() {
                        continue;
                    }
                    served[usize::from(quantized)] += 1;
                    let y = bench.forward(&w, &images, Epilogue::default());
                    let bound = patches.bound(&caps, &problem, w.layout());
                    check(&y, &reference, bound, &format!("patches: {problem}"));
                }
            }
        }
        // On Hopper few weights of small groups are packed for patches.
        let least = if (kernel("implicit_gemm_sm90").serves)(gpu.caps().arch) { [50, 20] } else { [100, 0] };
        assert!(served[0] >= least[0] && served[1] >= least[1], "{served:?} served on {}", gpu.caps().arch);
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
                let kernel_of = kernel(name);
                if kernel_of.supports(&gpu.caps(), &images.problem(&packed), packed.layout()).is_err() {
                    assert!(!(kernel_of.serves)(gpu.caps().arch), "{name}: {}", images.problem(&packed));
                    continue;
                }
                let by = |name| {
                    let bench = Bench { gpu: &gpu, stream: &stream, kernel: kernel(name), plan: None };
                    bench.forward(&packed, &images, Epilogue::default())
                };
                let (got, want) = (by(name), by("simt"));
                let bound = kernel_of.bound(&gpu.caps(), &images.problem(&packed), packed.layout());
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
        for geometry in
            [Geometry { padding: [1; 4], groups: 2, ..Geometry::new(128, 48, [3, 3]) }, Geometry::new(64, 24, [1, 1])]
        {
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
                for kernel in KERNELS.iter().filter(|k| k.supports(&gpu.caps(), &problem, w.layout()).is_ok()) {
                    let bench = Bench { gpu: &gpu, stream: &stream, kernel, plan: None };
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
                let kernel = conv::select(&gpu.caps(), &images.problem(&w), w.layout()).unwrap();
                let bench = Bench { gpu: &gpu, stream: &stream, kernel, plan: None };
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
        let bench = Bench { gpu: &gpu, stream: &stream, kernel: kernel("simt"), plan: None };
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
        let bytes = Workspace::COUNTER_BYTES + 512;
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

/// A device that is not there: the choice needs none.
pub(super) fn caps(number: u32) -> Caps {
    let arch = Arch { number, specific: number >= 90 };
    Caps { arch, l2_bytes: 50 << 20, cublaslt: false, ..super::products::caps("sm_90a") }
}

#[test]
fn the_choice_is_the_first_kernel_that_can_and_the_others_say_why_not() {
    let wide = Geometry { padding: [1; 4], ..Geometry::new(64, 64, [3, 3]) };
    let pointwise = Geometry::new(64, 64, [1, 1]);
    let narrow = Geometry { stride: [2, 2], padding: [3; 4], ..Geometry::new(3, 64, [7, 7]) };
    let nhwc = [Layout2d::Nhwc; 2];
    let problem = |name: &str, geometry, x, layouts| {
        let shape = Conv2dShape::new(geometry, 32, [56, 56]).unwrap();
        Problem { format: Some(parse(name)), shape, x, y: Float::F16, layouts }
    };
    let chosen = |number, problem: &Problem, layout| conv::select(&caps(number), problem, layout).unwrap().name;
    let half = Float::F16;
    assert_eq!(chosen(90, &problem("w4a16", wide, half, nhwc), "cuda_wna16"), "implicit_gemm_sm90");
    assert_eq!(chosen(90, &problem("w4a16", wide, half, nhwc), "cuda_plain"), "simt");
    assert_eq!(chosen(80, &problem("w4a16", wide, half, nhwc), "cuda_wna16"), "im2col_gemm");
    assert_eq!(chosen(75, &problem("w4a16", wide, half, nhwc), "cuda_wna16"), "simt");
    assert_eq!(chosen(90, &problem("w4a16", wide, half, LAYOUTS), "cuda_wna16"), "implicit_gemm_rows_sm90");
    assert_eq!(chosen(90, &problem("w4a16", narrow, half, nhwc), "cuda_wna16_filled"), "implicit_gemm_rows_sm90");
    assert_eq!(chosen(90, &problem("w4a16", narrow, half, LAYOUTS), "cuda_wna16_filled"), "implicit_gemm_rows_sm90");
    assert_eq!(chosen(90, &problem("w4a16", narrow, Float::BF16, nhwc), "cuda_wna16_filled"), "simt");
    assert_eq!(chosen(90, &problem("w4a16", wide, half, [Layout2d::Nchw; 2]), "cuda_wna16"), "simt");
    assert_eq!(chosen(90, &problem("w4a16", narrow, half, nhwc), "cuda_wna16"), "im2col_gemm");
    assert_eq!(chosen(90, &problem("w8a8", wide, half, nhwc), "cuda_wna16"), "implicit_gemm_a8_sm90");
    assert_eq!(chosen(90, &problem("w8a8", wide, Float::F32, nhwc), "cuda_wna16"), "implicit_gemm_a8_sm90");
    assert_eq!(chosen(90, &problem("w8a8", narrow, half, nhwc), "cuda_wna16_filled"), "implicit_gemm_a8_sm90");
    assert_eq!(chosen(80, &problem("w8a8", wide, half, nhwc), "cuda_wna16"), "im2col_gemm");
    assert_eq!(chosen(90, &problem("w4a16", wide, Float::F32, nhwc), "cuda_wna16"), "simt");
    assert_eq!(chosen(90, &problem("w8a8", wide, half, nhwc), "cuda_plain"), "simt");
    assert_eq!(chosen(90, &problem("w4a16", narrow, half, nhwc), "cuda_plain"), "simt");
    assert_eq!(chosen(90, &problem("w4a16", pointwise, half, nhwc), "cuda_wna16"), "implicit_gemm_sm90");
    let several = Geometry { co: 65, ..pointwise };
    assert_eq!(chosen(90, &problem("w4a16", several, half, nhwc), "cuda_wna16"), "gemm_1x1");
    assert_eq!(chosen(90, &problem("w8a8", pointwise, half, nhwc), "cuda_wna16"), "gemm_1x1");
    assert_eq!(chosen(80, &problem("w4a16", pointwise, half, nhwc), "cuda_wna16"), "gemm_1x1");
    for (geometry, why) in [
        (Geometry { groups: 2, ..wide }, "brings 64 channels of a group at a time, a group has 32"),
        (Geometry { stride: [9, 1], ..wide }, "strides up to 8"),
        (Geometry { padding: [129, 1, 1, 1], ..wide }, "at most 128 pixels outside"),
        (Geometry { dilation: [128, 1], padding: [120, 1, 120, 1], ..wide }, "at most 255 pixels apart"),
    ] {
        let problem = problem("w4a16", geometry, half, nhwc);
        let all = conv::explain(&caps(90), &problem, "cuda_wna16");
        let reasons: Vec<String> =
            all.iter().map(|(_, reason)| reason.as_ref().map_or_else(String::new, |r| r.0.clone())).collect();
        assert!(reasons[1].contains(why), "{problem}: {reasons:?}");
        let chosen = all.iter().filter(|(_, reason)| reason.is_none()).map(|(kernel, _)| kernel.name);
        let expected = if geometry.groups == 1 { "im2col_gemm" } else { "simt" };
        assert_eq!(chosen.collect::<Vec<_>>(), [expected], "{problem}");
    }
    assert_eq!(
        problem("w4a16", narrow, half, nhwc).to_string(),
        "w4a16 with x f16 nhwc, y f16 nhwc at 32 × 3 × 56 × 56, 7 × 7 to 64, stride [2, 2] padding [3, 3, 3, 3] dilation [1, 1] groups 1"
    );
}
