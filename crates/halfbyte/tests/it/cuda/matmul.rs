//! Every GPU kernel × format × edge shape against the f64 reference, element by element.

use super::{gpus, in_child, is_child};
use crate::data::{Random, parse, rounded};
use bytemuck::Pod;
use half::{bf16, f16};
use halfbyte::cuda::cache::Cache;
use halfbyte::cuda::compile::Compiler;
use halfbyte::cuda::driver::{Buffer, FloatView, FloatViewMut, Stream, ViewMut};
use halfbyte::cuda::matmul::{self, Call, Epilogue, KERNELS, Kernel, Packed};
use halfbyte::cuda::{Caps, Gpu, Workspace};
use halfbyte::format::FORMATS;
use halfbyte::format::reference::{self, Bound, Product};
use halfbyte::kernel::{Activation, Problem};
use halfbyte::{Act, Error, Float};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// Elements before and after every output, to see that a kernel writes nothing else.
const GUARD: usize = 64;

/// Every byte of outputs and guards before the kernel runs: NaN in all three types.
const POISON: u8 = 0xff;

const TYPES: [Float; 3] = [Float::F16, Float::BF16, Float::F32];

struct Bench<'a> {
    kernel: &'static Kernel,
    gpu: &'a Gpu,
    stream: &'a Stream,
}

impl Bench<'_> {
    fn upload<T: Pod>(&self, values: &[T]) -> Buffer<T> {
        let mut buffer = self.gpu.context().allocate(values.len()).unwrap();
        self.stream.upload(values, buffer.view_mut()).unwrap();
        buffer
    }

    /// The product twice, whose bits must agree, with guards round the output that must stay as they were.
    fn forward(&self, w: &Packed, x: &[f32], [x_type, out]: [Float; 2], m: usize, epilogue: Epilogue<'_>) -> Vec<f32> {
        let halfs =
            (x_type == Float::F16).then(|| self.upload(&x.iter().map(|&v| f16::from_f32(v)).collect::<Vec<_>>()));
        let brains =
            (x_type == Float::BF16).then(|| self.upload(&x.iter().map(|&v| bf16::from_f32(v)).collect::<Vec<_>>()));
        let singles = self.upload(x);
        let x = match (&halfs, &brains) {
            (Some(x), _) => FloatView::F16(x.view()),
            (_, Some(x)) => FloatView::BF16(x.view()),
            _ => FloatView::F32(singles.view()),
        };
        macro_rules! twice {
            ($type:ty, $widen:expr) => {{
                let once: Vec<$type> = self.guarded(w, x, m, epilogue);
                let again: Vec<$type> = self.guarded(w, x, m, epilogue);
                let bits = |y: &[$type]| bytemuck::cast_slice::<$type, u8>(y).to_vec();
                assert_eq!(bits(&once), bits(&again), "{}: not the same bits twice", self.kernel.name);
                once.into_iter().map($widen).collect()
            }};
        }
        match out {
            Float::F16 => twice!(f16, |v| v.to_f32()),
            Float::BF16 => twice!(bf16, |v| v.to_f32()),
            Float::F32 => twice!(f32, |v| v),
        }
    }

    fn guarded<T: Pod>(&self, w: &Packed, x: FloatView<'_>, m: usize, epilogue: Epilogue<'_>) -> Vec<T>
    where
        for<'a> FloatViewMut<'a>: From<ViewMut<'a, T>>,
    {
        let len = m * w.shape()[0];
        let mut y = self.gpu.context().allocate::<T>(len + 2 * GUARD).unwrap();
        self.stream.fill(y.view_mut(), POISON).unwrap();
        let problem = Problem { format: Some(w.format()), x: x.dtype(), m, n: w.shape()[0], k: w.shape()[1] };
        let bytes = matmul::workspace_bytes(&self.gpu.caps(), &problem, w.layout()).unwrap();
        let mut workspace = Workspace::new(self.gpu, self.stream, bytes).unwrap();
        let y_view = y.view_mut().slice(GUARD..GUARD + len).into();
        let call = Call { x, m, w, epilogue, y: y_view, workspace: Some(&mut workspace) };
        matmul::run_with(self.kernel, self.gpu, self.stream, call).unwrap();
        let mut all = vec![T::zeroed(); len + 2 * GUARD];
        self.stream.download(y.view(), &mut all).unwrap();
        let intact = |guard: &[T]| bytemuck::cast_slice::<T, u8>(guard).iter().all(|&byte| byte == POISON);
        assert!(intact(&all[..GUARD]) && intact(&all[GUARD + len..]), "{}: wrote outside", self.kernel.name);
        all[GUARD..GUARD + len].to_vec()
    }
}

fn check(y: &[f32], reference: &Product, k: usize, out: Float, what: &str) {
    let bound = Bound { out, k };
    for (i, &y) in y.iter().enumerate() {
        let (want, magnitude) = (reference.value[i], reference.magnitude[i]);
        let error = (f64::from(y) - want).abs();
        let allowed = bound.allowed(magnitude);
        assert!(error <= allowed, "{what}: element {i} is {y}, expected {want} ± {allowed:e}, off by {error:e}");
    }
}

/// What a device of this processor would offer, for tests of the choice without one.
fn caps(arch: &str) -> Caps {
    Caps { arch: arch.parse().unwrap(), multiprocessors: 132, shared_bytes: 232_448, l2_bytes: 60 << 20 }
}

/// The table and the formats that its kernels are tested with.
fn cases() -> Vec<(&'static Kernel, &'static str)> {
    let exact = FORMATS.iter().copied().filter(|name| !parse(name).act.is_quantized());
    exact.flat_map(|name| KERNELS.iter().map(move |kernel| (kernel, name))).collect()
}

const SHAPES: &[[usize; 2]] = &[[1, 1], [16, 128], [17, 33], [48, 256], [130, 300], [37, 20], [5, 0], [80, 129]];

#[test]
fn every_kernel_format_and_edge_shape_is_within_the_bound() {
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let served: Vec<_> = KERNELS.iter().filter(|kernel| (kernel.serves)(gpu.caps().arch)).collect();
        let instances: Vec<_> = served.iter().flat_map(|kernel| (kernel.instances)()).collect();
        gpu.prepare(&instances, |_| ()).unwrap();
        let (mut random, mut seen) = (Random(1), std::collections::BTreeSet::new());
        for (i, (kernel, name)) in cases().into_iter().enumerate() {
            let format = parse(name);
            for (s, &[n, k]) in SHAPES.iter().enumerate() {
                let act_order = (i + s) % 3 == 0;
                let w = random.qtensor(format.weight, [n, k], act_order);
                let mut packed = None;
                for m in [0, 1, 2, 3, 4, 5, 7, 8, 16, 17, 31, 32, 33, 63, 64, 65] {
                    let (x_type, out) = (TYPES[(i + m) % 3], TYPES[(i + m / 2 + s) % 3]);
                    let problem = Problem { format: Some(format), x: x_type, m, n, k };
                    if kernel.supports(&gpu.caps(), &problem).is_err() {
                        continue;
                    }
                    seen.insert(kernel.name);
                    let packed =
                        packed.get_or_insert_with(|| matmul::pack_for(kernel, &gpu, &stream, &w, format.act).unwrap());
                    let x = rounded(&random.activations(m * k), x_type);
                    let bench = Bench { kernel, gpu: &gpu, stream: &stream };
                    let y = bench.forward(packed, &x, [x_type, out], m, Epilogue::default());
                    let reference = reference::linear(&x, m, &w, format.act);
                    let what = format!("{}: {problem} to {out}, act-order {act_order}", kernel.name);
                    check(&y, &reference, k, out, &what);
                }
            }
        }
        let all: Vec<_> = served.iter().map(|kernel| kernel.name).collect();
        assert!(all.iter().all(|name| seen.contains(name)), "kernels that no case reached: {all:?} but {seen:?}");
    }
}

#[test]
fn kernels_that_are_kept_are_there_at_once_and_without_a_compiler() {
    const TEST: &str = "cuda::matmul::kernels_that_are_kept_are_there_at_once_and_without_a_compiler";
    let instances = |gpu: &Gpu| -> Vec<_> {
        let served = KERNELS.iter().filter(|kernel| (kernel.serves)(gpu.caps().arch));
        served.flat_map(|kernel| (kernel.instances)()).collect()
    };
    if !is_child() {
        let folder = tempfile::tempdir().unwrap();
        for gpu in gpus() {
            let driver = gpu.context().driver().version();
            let compiler = Compiler::with_cache(gpu.caps().arch, driver, Some(Cache::at(folder.path())));
            let gpu = Gpu::with_compiler(gpu.context().clone(), compiler);
            let (instances, most) = (instances(&gpu), AtomicUsize::new(0));
            let progress = |done| {
                most.fetch_max(done, Ordering::Relaxed);
            };
            gpu.prepare(&instances, progress).unwrap();
            assert_eq!(most.into_inner(), instances.len());
            assert_eq!(gpu.compiler().refusal(), None);
            let folder = folder.path().to_str().unwrap();
            in_child(TEST, &[("HALFBYTE_NVRTC", "/nonexistent"), ("HALFBYTE_CACHE", folder)]);
        }
        return;
    }
    for gpu in gpus() {
        let start = Instant::now();
        gpu.prepare(&instances(&gpu), |_| ()).unwrap();
        let seconds = start.elapsed().as_secs_f64();
        println!("loaded in {:.1} ms", seconds * 1e3);
        assert!(seconds < 0.05, "{seconds} s");
    }
}

#[test]
fn long_reductions_and_many_rows_cross_every_block() {
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let mut random = Random(2);
        for (name, n, k, m) in [
            ("w4a16-g128-asym", 300, 1400, 100),
            ("w4a16", 40, 9001, 50),
            ("w8a16-g32-asym", 70, 1100, 300),
            ("w2a16-g32-float", 530, 700, 130),
            ("w3a16-g128", 1000, 384, 70),
        ] {
            let format = parse(name);
            let w = random.qtensor(format.weight, [n, k], false);
            for (kernel, x_type) in KERNELS.iter().zip(TYPES.into_iter().cycle()) {
                let problem = Problem { format: Some(format), x: x_type, m, n, k };
                if kernel.supports(&gpu.caps(), &problem).is_err() {
                    continue;
                }
                let packed = matmul::pack_for(kernel, &gpu, &stream, &w, format.act).unwrap();
                let bench = Bench { kernel, gpu: &gpu, stream: &stream };
                let x = rounded(&random.activations(m * k), x_type);
                let y = bench.forward(&packed, &x, [x_type, Float::F32], m, Epilogue::default());
                check(
                    &y,
                    &reference::linear(&x, m, &w, format.act),
                    k,
                    Float::F32,
                    &format!("{}: {problem}", kernel.name),
                );
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_whatever_m_is() {
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let mut random = Random(3);
        let format = parse("w4a16-g128");
        let w = random.qtensor(format.weight, [100, 640], false);
        let x = rounded(&random.activations(70 * 640), Float::F16);
        let kernel = KERNELS.iter().find(|kernel| kernel.name == "plain").unwrap();
        let packed = matmul::pack_for(kernel, &gpu, &stream, &w, format.act).unwrap();
        let bench = Bench { kernel, gpu: &gpu, stream: &stream };
        let types = [Float::F16, Float::F32];
        let all = bench.forward(&packed, &x, types, 70, Epilogue::default());
        for m in [1, 4, 5, 33] {
            assert_eq!(bench.forward(&packed, &x[..m * 640], types, m, Epilogue::default()), all[..m * 100]);
        }
    }
}

#[test]
fn bias_and_activation_come_last() {
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let mut random = Random(5);
        let format = parse("w4a16-g32-asym");
        let w = random.qtensor(format.weight, [21, 64], false);
        let (bias, x) = (random.normals(21), random.normals(6 * 64));
        let plain = reference::linear(&x, 6, &w, format.act);
        for kernel in KERNELS {
            let problem = Problem { format: Some(format), x: Float::F32, m: 6, n: 21, k: 64 };
            if kernel.supports(&gpu.caps(), &problem).is_err() {
                continue;
            }
            let bench = Bench { kernel, gpu: &gpu, stream: &stream };
            let packed = matmul::pack_for(kernel, &gpu, &stream, &w, format.act).unwrap();
            let on_device = bench.upload(&bias);
            for activation in [
                Activation::None,
                Activation::Relu,
                Activation::Relu6,
                Activation::Clamp(-0.5, 0.25),
                Activation::Gelu,
                Activation::GeluTanh,
                Activation::Silu,
            ] {
                let epilogue = Epilogue { bias: Some(on_device.view()), activation };
                let y = bench.forward(&packed, &x, [Float::F32; 2], 6, epilogue);
                for (i, &y) in y.iter().enumerate() {
                    let v = (plain.value[i] + f64::from(bias[i % 21])) as f32;
                    let want = activation.apply(v);
                    assert!((y - want).abs() < 2e-5, "{} {activation:?}: {y} and {want}", kernel.name);
                }
            }
        }
    }
}

#[test]
fn nan_and_infinity_in_x_reach_y_and_only_their_row() {
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let mut random = Random(6);
        for (kernel, name) in cases().into_iter().filter(|(_, name)| name.contains("g32")) {
            let format = parse(name);
            let w = random.qtensor(format.weight, [33, 96], false);
            let problem = Problem { format: Some(format), x: Float::BF16, m: 20, n: 33, k: 96 };
            if kernel.supports(&gpu.caps(), &problem).is_err() {
                continue;
            }
            let bench = Bench { kernel, gpu: &gpu, stream: &stream };
            let packed = matmul::pack_for(kernel, &gpu, &stream, &w, format.act).unwrap();
            for bad in [f32::NAN, f32::INFINITY] {
                for m in [1, 20] {
                    let mut x = rounded(&random.normals(m * 96), Float::BF16);
                    x[(m - 1) * 96 + 40] = bad;
                    for out in TYPES {
                        let epilogue = Epilogue { bias: None, activation: Activation::Relu };
                        let y = bench.forward(&packed, &x, [Float::BF16, out], m, epilogue);
                        let (others, row) = y.split_at((m - 1) * 33);
                        let what = format!("{} {name} {bad} to {out}", kernel.name);
                        assert!(others.iter().all(|v| v.is_finite()), "{what}: leaked into other rows");
                        if bad.is_nan() {
                            assert!(row.iter().all(|v| v.is_nan()), "{what}: {row:?}");
                        } else {
                            assert!(row.iter().any(|v| !v.is_finite()), "{what}: {row:?}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn wrong_lengths_and_problems_are_errors() {
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let mut random = Random(7);
        let format = parse("w4a16-g32");
        let w = random.qtensor(format.weight, [4, 32], false);
        let packed = matmul::pack(&gpu, &stream, &w, format.act, Float::F32).unwrap();
        assert!(packed.bytes() >= 4 * 32 / 2);
        let x = gpu.context().allocate::<f32>(64).unwrap();
        let mut y = gpu.context().allocate::<f32>(8).unwrap();
        let bias = gpu.context().allocate::<f32>(3).unwrap();
        let mut run = |x_len: usize, m: usize, y_len: usize, bias| {
            let (x, y) = (FloatView::F32(x.view().slice(0..x_len)), FloatViewMut::F32(y.view_mut().slice(0..y_len)));
            let epilogue = Epilogue { bias, activation: Activation::None };
            matmul::run(&gpu, &stream, Call { x, m, w: &packed, epilogue, y, workspace: None })
        };
        run(64, 2, 8, None).unwrap();
        run(0, 0, 0, None).unwrap();
        assert_eq!(run(63, 2, 8, None).unwrap_err().to_string(), "matmul: expected x of 2 × 32, got 63 elements");
        assert_eq!(run(64, 2, 7, None).unwrap_err().to_string(), "matmul: expected y of 2 × 4, got 7 elements");
        let error = run(64, 2, 8, Some(bias.view())).unwrap_err().to_string();
        assert_eq!(error, "matmul: expected a bias of 1 × 4, got 3 elements");
        assert!(run(64, usize::MAX, 8, None).is_err());
        let error = matmul::pack(&gpu, &stream, &w, Act::A8, Float::F32).unwrap_err();
        assert!(matches!(error, Error::NoKernel { .. }), "{error}");
        stream.synchronize().unwrap();
    }
}

#[test]
fn the_choice_is_pure_and_explained() {
    let problem = |name: &str, m| Problem { format: Some(parse(name)), x: Float::F16, m, n: 4096, k: 4096 };
    for arch in ["sm_75", "sm_80", "sm_89", "sm_90a", "sm_120a"] {
        for name in FORMATS.iter().filter(|name| !parse(name).act.is_quantized()) {
            for m in [0, 1, 16, 4096] {
                let chosen = matmul::select(&caps(arch), &problem(name, m), None).unwrap();
                let reasons = matmul::explain(&caps(arch), &problem(name, m), None);
                assert_eq!(reasons.len(), KERNELS.len());
                assert_eq!(reasons.iter().find(|(_, reason)| reason.is_none()).unwrap().0.name, chosen.name);
                // Weights packed for one row are multiplied by thousands.
                let layout = matmul::select(&caps(arch), &problem(name, 1), None).unwrap().layout;
                matmul::select(&caps(arch), &problem(name, m), Some(layout)).unwrap();
            }
        }
        let error = matmul::select(&caps(arch), &problem("w4a8", 1), None).err().unwrap();
        assert!(error.to_string().contains("plain: multiplies exact activations"), "{error}");
        let dense = Problem { format: None, ..problem("w4a16", 1) };
        assert!(matmul::select(&caps(arch), &dense, None).is_err());
        let huge = Problem { n: usize::MAX / 2, ..problem("w4a16", 1) };
        assert!(matmul::select(&caps(arch), &huge, None).is_err());
        assert!(matmul::select(&caps(arch), &problem("w4a16", 1), Some("of nobody")).is_err());
    }
    assert!(matmul::select(&caps("sm_70"), &problem("w4a16", 1), None).is_err());
}
