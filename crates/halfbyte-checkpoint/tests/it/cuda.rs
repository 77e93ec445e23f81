//! Golden modules of other software, multiplied on a GPU: packed there for each kernel that serves them, and compared with
//! products of the numbers that their origin says they stand for.
//!
//! Modules go side by side, for compiling kernels takes most of the time. Without a GPU this test says so and passes; `HALFBYTE_REQUIRE_CUDA=1` makes it fail instead.

use crate::support::{Random, Tensor, testdata, write_folder};
use crate::{awq, compressed_tensors, gptq};
use bytemuck::Pod;
use half::{bf16, f16};
use halfbyte::cuda::driver::{Buffer, FloatView, Stream, View};
use halfbyte::cuda::matmul::{self, Call, Epilogue, KERNELS, Kernel, Packed, Packer};
use halfbyte::cuda::{Gpu, Workspace};
use halfbyte::format::reference::{dequantize, matmul as product};
use halfbyte::kernel::Problem;
use halfbyte::layout::cuda_plain::{CudaPlain, PlainZeros};
use halfbyte::layout::cuda_wna16::CudaWna16;
use halfbyte::{Act, Float, FloatData, Format, Group, QTensor, StoredTensor, WeightFormat, Zero, Zeros};
use halfbyte_checkpoint::gguf::{GgmlType, load};
use halfbyte_checkpoint::{Checkpoint, StoredWeight, Weights};
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::sync::Mutex;

const TYPES: [Float; 3] = [Float::F16, Float::BF16, Float::F32];

/// Rows of random activations: for every kind of tile.
const ROWS: [usize; 6] = [1, 3, 16, 17, 64, 200];

fn gpu() -> Option<Gpu> {
    match Gpu::open(0) {
        Ok(gpu) => Some(gpu),
        Err(why) => {
            assert!(std::env::var("HALFBYTE_REQUIRE_CUDA").map_or(true, |v| v != "1"), "no GPU: {why}");
            eprintln!("skipped: no GPU: {}", why.to_string().lines().next().unwrap_or_default());
            None
        }
    }
}

/// A product that the origin made.
struct Given {
    x: Vec<f32>,
    bias: Vec<f32>,
    y: Vec<f64>,
    /// The type that the origin rounded weights to.
    weights: Option<Float>,
    /// Error of the origin's own, relative to 1 + |y|.
    tolerance: f64,
}

/// Tensors that each kernel multiplied.
type Served = Mutex<BTreeMap<&'static str, usize>>;

struct Bench<'a> {
    gpu: &'a Gpu,
    stream: Stream,
    served: &'a Served,
}

impl<'a> Bench<'a> {
    fn new(gpu: &'a Gpu, served: &'a Served) -> Self {
        Self { gpu, stream: gpu.stream().unwrap(), served }
    }

    fn upload<T: Pod>(&self, values: &[T]) -> Buffer<T> {
        let mut buffer = self.gpu.context().allocate(values.len()).unwrap();
        self.stream.upload(values, buffer.view_mut()).unwrap();
        buffer
    }

    /// `x · Wᵀ + bias` in f32.
    fn forward(&self, kernel: &Kernel, w: &Packed, x: &[f32], x_type: Float, bias: &[f32]) -> Vec<f32> {
        let [n, k] = w.shape();
        let m = x.len() / k;
        let problem = Problem { format: Some(w.format()), x: x_type, y: Float::F32, m, n, k };
        let bytes = kernel.workspace_bytes(&self.gpu.caps(), &problem);
        let mut workspace = Workspace::new(self.gpu, &self.stream, bytes).unwrap();
        let halfs = self.upload(&x.iter().map(|&v| f16::from_f32(v)).collect::<Vec<_>>());
        let brains = self.upload(&x.iter().map(|&v| bf16::from_f32(v)).collect::<Vec<_>>());
        let singles = self.upload(x);
        let x = match x_type {
            Float::F16 => FloatView::F16(halfs.view()),
            Float::BF16 => FloatView::BF16(brains.view()),
            Float::F32 => FloatView::F32(singles.view()),
        };
        let (bias, mut y) = (self.upload(bias), self.upload(&vec![f32::NAN; m * n]));
        let epilogue = Epilogue { bias: (!bias.is_empty()).then(|| bias.view()), ..Epilogue::default() };
        let call =
            Call { x, m, w, epilogue, y: y.view_mut().into(), workspace: Some(&mut workspace), batch_invariant: false };
        matmul::run_with(kernel, self.gpu, &self.stream, call).unwrap();
        let mut out = vec![0.0; m * n];
        self.stream.download(y.view(), &mut out).unwrap();
        out
    }

    /// What lies on the device.
    fn image_of(&self, packed: &Packed) -> Vec<Vec<u8>> {
        let download = |view: View<'_, u8>| {
            let mut bytes = vec![0u8; view.len()];
            self.stream.download(view, &mut bytes).unwrap();
            bytes
        };
        packed.memory().into_iter().map(download).collect()
    }

    /// Multiplies a tensor that stands for `dense` `[n, k]` by every kernel that takes it.
    fn check(&self, name: &str, stored: &StoredTensor<'_>, dense: &[f64], given: &[Given]) {
        let (n, k, act) = (stored.n(), stored.k(), Act::A16);
        assert_eq!(dense.len(), n * k);
        let (mut packer, mut random) = (Packer::new(self.gpu, &self.stream), Random(7));
        let q = stored.to_qtensor().unwrap();
        let (values, mut got) = (packer.values(stored).unwrap(), vec![0f32; n * k]);
        self.stream.download(values.view(), &mut got).unwrap();
        same(name, dense, &got, Float::F32);
        for (kernel, x_type) in KERNELS.iter().flat_map(|kernel| TYPES.map(|x_type| (kernel, x_type))) {
            let format = Some(Format { weight: stored.format(), act });
            let problem = |m| Problem { format, x: x_type, y: Float::F32, m, n, k };
            let caps = self.gpu.caps();
            if kernel.supports(&caps, &problem(1)).is_err() || kernel.holds(stored, act).is_err() {
                continue;
            }
            *self.served.lock().unwrap().entry(kernel.name).or_default() += 1;
            let packed = packer.pack_for(kernel, &[stored], act).unwrap();
            assert_eq!(self.image_of(&packed), image(&q, act, packed.layout()), "{name} for {}", kernel.name);
            let bound = |m| kernel.bound(&caps, &problem(m));
            for m in ROWS {
                let x: Vec<f32> = (0..m * k).map(|_| x_type.round(random.below(2001) as f32 / 500.0 - 2.0)).collect();
                let y = self.forward(kernel, &packed, &x, x_type, &[]);
                let wide: Vec<f64> = x.iter().map(|&x| x.into()).collect();
                let reference = product(&wide, dense, [m, n, k]);
                for (at, (&y, &want)) in y.iter().zip(&reference.value).enumerate() {
                    let magnitude = reference.magnitude[at];
                    let allowed = bound(m).allowed(magnitude);
                    let error = (f64::from(y) - want).abs();
                    assert!(error <= allowed, "{name} by {} at {at}: {y}, not {want} ± {allowed:e}", problem(m));
                }
            }
            for given in given.iter().filter(|given| given.x.iter().all(|&x| x_type.round(x) == x)) {
                let m = given.x.len() / k;
                let y = self.forward(kernel, &packed, &given.x, x_type, &given.bias);
                let wide: Vec<f64> = given.x.iter().map(|&x| x.into()).collect();
                let magnitudes = product(&wide, dense, [m, n, k]).magnitude;
                assert_eq!((y.len(), given.y.len()), (m * n, m * n), "{name}");
                for (at, (&y, &want)) in y.iter().zip(&given.y).enumerate() {
                    let of_weights = given.weights.map_or(0.0, Float::unit_roundoff);
                    let magnitude = magnitudes[at] + f64::from(given.bias.get(at % n).map_or(0.0, |b| b.abs()));
                    let allowed =
                        bound(m).allowed(magnitude) + of_weights * magnitude + given.tolerance * (1.0 + want.abs());
                    let error = (f64::from(y) - want).abs();
                    assert!(
                        error <= allowed,
                        "{name} by {}, its own, at {at}: {y}, not {want} ± {allowed:e}",
                        problem(m)
                    );
                }
            }
        }
    }

    /// The same for the module `m` of a folder.
    fn check_module(&self, name: &str, tensors: &[Tensor], config: &str, dense: &[f64], given: &[Given]) {
        let folder = tempfile::tempdir().unwrap();
        write_folder(folder.path(), tensors, config);
        let weights = Weights::open(folder.path()).unwrap();
        let StoredWeight::Quantized(stored) = weights.stored_linear("m").unwrap().weight else { panic!("{name}") };
        self.check(name, &stored, dense, given);
    }
}

/// What a tensor is on the device, packed on the CPU.
fn image(q: &QTensor, act: Act, layout: &str) -> Vec<Vec<u8>> {
    fn bytes<T: Pod>(values: &[T]) -> Vec<u8> {
        bytemuck::cast_slice(values).to_vec()
    }
    let floats = |values: &FloatData<'_>| match values {
        FloatData::F16(v) => bytes(v),
        FloatData::BF16(v) => bytes(v),
        FloatData::F32(v) => bytes(v),
    };
    if layout == "cuda_wna16" {
        let packed = CudaWna16::pack(q, act).unwrap();
        let parts = [packed.atoms().to_vec(), packed.rows().to_vec()].into_iter();
        return parts.chain(packed.order().map(bytes)).collect();
    }
    assert_eq!(layout, "cuda_plain");
    let packed = CudaPlain::pack(q).unwrap();
    let zeros = match packed.zeros() {
        PlainZeros::Symmetric => None,
        PlainZeros::Integer(z) => Some(bytes(z)),
        PlainZeros::Float(o) => Some(floats(o)),
    };
    let parts = [bytes(packed.codes()), floats(packed.scales())].into_iter();
    parts.chain(zeros).chain(packed.group_of().map(bytes)).collect()
}

fn f64s(file: &Checkpoint, name: &str) -> Vec<f64> {
    bytemuck::pod_collect_to_vec(file.bytes(name).unwrap())
}

fn f32s(file: &Checkpoint, name: &str) -> Vec<f32> {
    file.floats(name).unwrap().to_f32()
}

/// `[n, k]` from a function of output and column.
fn matrix(n: usize, k: usize, of: impl Fn(usize, usize) -> f64) -> Vec<f64> {
    (0..n).flat_map(|i| (0..k).map(move |j| (i, j))).map(|(i, j)| of(i, j)).collect()
}

/// What the origin made of a module is what the golden's numbers say, rounded to its type.
fn same(name: &str, dense: &[f64], made: &[f32], dtype: Float) {
    assert_eq!(dense.len(), made.len(), "{name}");
    for (at, (&value, &made)) in dense.iter().zip(made).enumerate() {
        let rounded = match dtype {
            Float::F16 => f16::from_f64(value).to_f32(),
            Float::BF16 => bf16::from_f64(value).to_f32(),
            Float::F32 => value as f32,
        };
        assert_eq!(rounded, made, "{name} at {at}");
    }
}

#[test]
fn goldens_of_other_software_multiply_to_their_products() {
    let Some(gpu) = gpu() else { return };
    let served = Served::default();
    of_gptq(&gpu, &served);
    of_awq(&gpu, &served);
    of_compressed_tensors(&gpu, &served);
    of_paddle(&gpu, &served);
    of_gguf(&gpu, &served);
    let served = served.into_inner().unwrap();
    println!("{served:?}");
    let format = "w4a16-g128".parse().unwrap();
    let exact = Problem { format: Some(format), x: Float::F16, y: Float::F32, m: 1, n: 128, k: 128 };
    for kernel in KERNELS.iter().filter(|kernel| kernel.packs && kernel.supports(&gpu.caps(), &exact).is_ok()) {
        assert!(served.get(kernel.name).is_some_and(|&tensors| tensors >= 40), "{served:?}");
    }
}

fn of_gptq(gpu: &Gpu, served: &Served) {
    gptq::all().into_par_iter().for_each(|golden| {
        let bench = Bench::new(gpu, served);
        let gptq::Golden { name, file, n, k, .. } = &golden;
        let (n, k) = (*n, *k);
        let (q, zeros, index) = (file.bytes("q").unwrap(), file.ints("zeros").unwrap(), file.ints("g_idx").unwrap());
        let scales = f32s(file, "scales");
        let dense = matrix(n, k, |i, j| {
            let g = index[j] as usize * n + i;
            f64::from(scales[g]) * (f64::from(q[j * n + i]) - zeros[g] as f64)
        });
        if file.contains("w_dequant_gptqmodel") {
            let made = f32s(file, "w_dequant_gptqmodel");
            let made: Vec<f32> = (0..n).flat_map(|i| made[i..].iter().step_by(n).copied()).collect();
            same(name, &dense, &made, Float::F16);
        }
        let y = f32s(file, "y").into_iter().map(f64::from).collect();
        let given = Given { x: f32s(file, "x"), bias: f32s(file, "bias"), y, weights: None, tolerance: 1e-5 };
        for (version, qzeros) in gptq::VERSIONS {
            let (tensors, config) = (golden.tensors(qzeros), golden.config(version.name(), golden.sym));
            bench.check_module(name, &tensors, &config, &dense, std::slice::from_ref(&given));
        }
    });
}

fn of_awq(gpu: &Gpu, served: &Served) {
    awq::goldens().into_par_iter().for_each(|(file, group)| {
        let bench = Bench::new(gpu, served);
        let [k, n] = file.info("q").unwrap().shape.to_vec()[..] else { panic!("q is no matrix") };
        let (q, zeros, scales) = (file.bytes("q").unwrap(), file.ints("zeros").unwrap(), f32s(&file, "scales"));
        let dense = matrix(n, k, |i, j| {
            let g = j / group * n + i;
            f64::from(scales[g]) * (f64::from(q[j * n + i]) - zeros[g] as f64)
        });
        let made = f32s(&file, "gemm.w_dequant_fp16");
        let made: Vec<f32> = (0..n).flat_map(|i| made[i..].iter().step_by(n).copied()).collect();
        same("awq", &dense, &made, Float::F16);
        for layout in awq::LAYOUTS {
            let given = Given {
                x: f32s(&file, "x"),
                bias: f32s(&file, "bias"),
                y: f64s(&file, "y_f64"),
                weights: Some(Float::F16),
                tolerance: 0.0,
            };
            let (tensors, config) = (awq::packed(&file, layout), awq::config_of(layout, group));
            bench.check_module(&format!("awq {layout}, groups of {group}"), &tensors, &config, &dense, &[given]);
        }
    });
}

fn of_compressed_tensors(gpu: &Gpu, served: &Served) {
    compressed_tensors::goldens().into_par_iter().for_each(|golden| {
        let bench = Bench::new(gpu, served);
        let file = &golden.file;
        let [n, k] = file.info("q").unwrap().shape.to_vec()[..] else { panic!("q is no matrix") };
        let groups = golden.group.count(k);
        let signed = |name: &str| -> Vec<i8> { file.bytes(name).unwrap().iter().map(|&v| v as i8).collect() };
        let (q, zeros, scales) = (signed("q"), signed("zero_point"), f32s(file, "weight_scale"));
        let dense = matrix(n, k, |i, j| {
            let g = i * groups + j / golden.group.len(k);
            f64::from(scales[g]) * (f64::from(q[i * k + j]) - f64::from(zeros[g]))
        });
        same(&golden.name, &dense, &f32s(file, "decompressed"), golden.dtype);
        bench.check_module(&golden.name, &golden.tensors(), &golden.config(), &dense, &[]);
    });
}

/// Every type of blocks, whose numbers gguf's own package says.
fn of_gguf(gpu: &Gpu, served: &Served) {
    let types: Vec<GgmlType> = GgmlType::ALL.iter().copied().filter(|kind| kind.weight_format().is_some()).collect();
    types.into_par_iter().for_each(|kind| {
        let file = Checkpoint::open(testdata(&format!("gguf/{}.safetensors", kind.name().to_lowercase()))).unwrap();
        let &[n, k] = file.info("dequant").unwrap().shape else { panic!("a matrix") };
        let stored = load(kind.name(), kind, file.bytes("blocks").unwrap(), [n, k]).unwrap();
        // Numbers with offsets are rounded there, and not here.
        let dense = dequantize(&stored.to_qtensor().unwrap());
        same(kind.name(), &dense, &f32s(&file, "dequant"), Float::F32);
        Bench::new(gpu, served).check(kind.name(), &stored, &dense, &[]);
    });
}

/// Weights in the layout that Paddle makes for its mixed products, whose codes the manifest says where to find.
fn of_paddle(gpu: &Gpu, served: &Served) {
    let shapes = ["1x128x64", "3x256x48", "4x192x32"];
    let files: Vec<_> = shapes.iter().flat_map(|shape| [(shape, Float::F16), (shape, Float::BF16)]).collect();
    files.into_par_iter().for_each(|(shape, dtype)| {
        let bench = Bench::new(gpu, served);
        let dtype_name = if dtype == Float::F16 { "fp16" } else { "bf16" };
        let file = format!("weight_only_linear/wol_{shape}_{dtype_name}.safetensors");
        let file = &Checkpoint::open(testdata(&file)).unwrap();
        let [k, n] = file.info("w").unwrap().shape.to_vec()[..] else { panic!("w is no matrix") };
        for (bits, config) in [4, 8].into_iter().flat_map(|bits| ["pc", "g64", "g128"].map(|config| (bits, config))) {
            let part = |name: &str| format!("int{bits}.{config}.{name}");
            let group = config.strip_prefix('g').map_or(Group::Channel, |g| Group::Size(g.parse().unwrap()));
            let (groups, scales) = (group.count(k), f32s(file, &part("scale")));
            let bytes = file.bytes(&part("sm80_bytes")).unwrap();
            let each = 16 / bits;
            let code = |i: usize, j: usize| {
                let column = j / (8 * each) * (8 * each) + each * (j % 8) + j / 8 % each;
                let at = i / each * each * k + column / 64 * 64 * each + i % each * 64 + column % 64;
                if bits == 8 { bytes[at] } else { bytes[at / 2] >> (at % 2 * 4) & 15 }
            };
            let codes: Vec<u8> = (0..n).flat_map(|i| (0..k).map(move |j| (i, j))).map(|(i, j)| code(i, j)).collect();
            let by_output: Vec<f32> =
                (0..n).flat_map(|i| (0..groups).map(move |g| g * n + i)).map(|at| scales[at]).collect();
            let middle = f64::from(1 << (bits - 1));
            let dense =
                matrix(n, k, |i, j| f64::from(scales[j / group.len(k) * n + i]) * (f64::from(code(i, j)) - middle));
            let format =
                WeightFormat { bits: bits as u32, group, zero: Zero::Symmetric, scale: dtype, channel_scale: None };
            let q = QTensor::new(format, [n, k], codes, by_output, Zeros::Symmetric, None).unwrap();
            let given = |y: Vec<f64>, tolerance| Given {
                x: f32s(file, "x"),
                bias: f32s(file, "bias"),
                y,
                weights: None,
                tolerance,
            };
            let exact = given(f64s(file, &part("y_f64")), 0.0);
            let by_ort = given(f32s(file, &part("y_ort_f32")).into_iter().map(f64::from).collect(), 1e-4);
            let name = format!("{shape} {dtype_name} {}", part("weights"));
            bench.check(&name, &(&q).into(), &dense, &[exact, by_ort]);
        }
    });
}
