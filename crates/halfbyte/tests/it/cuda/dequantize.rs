//! Weights as floats bit for bit, and products of them by cuBLASLt against the f64 reference.

use super::gpus;
use crate::data::{ACTIVATIONS, Random, parse, rounded, with_zeros_in_bytes};
use half::{bf16, f16};
use halfbyte::cuda::driver::{Buffer, FloatView, FloatViewMut, Stream};
use halfbyte::cuda::matmul::dequantize_cublaslt::{self as floor, SLAB_BYTES};
use halfbyte::cuda::matmul::{self, Call, Epilogue, KERNELS, Packed, dequantize};
use halfbyte::cuda::nn::{self, Table};
use halfbyte::cuda::{Caps, Gpu, Workspace};
use halfbyte::format::FORMATS;
use halfbyte::format::reference::{self, Bound};
use halfbyte::kernel::{Activation, Problem};
use halfbyte::{Float, QTensor};

const TYPES: [Float; 3] = [Float::F16, Float::BF16, Float::F32];

/// Elements round what is written, which must stay as they were.
const GUARD: usize = 64;

/// NaN in all three types.
const POISON: u8 = 0xff;

/// Bits of floats on the device: y or weights.
struct Floats {
    dtype: Float,
    bytes: Buffer<u8>,
}

impl Floats {
    fn new(gpu: &Gpu, stream: &Stream, dtype: Float, len: usize) -> Self {
        let mut bytes = gpu.context().allocate((len + 2 * GUARD) * dtype.size_bytes()).unwrap();
        stream.fill(bytes.view_mut(), POISON).unwrap();
        Self { dtype, bytes }
    }

    fn of(gpu: &Gpu, stream: &Stream, dtype: Float, values: &[f32]) -> Self {
        let mut floats = Self::new(gpu, stream, dtype, values.len());
        let guard = GUARD * dtype.size_bytes();
        let bits: Vec<u8> = values.iter().flat_map(|&v| bits(dtype, f64::from(v))).collect();
        stream.upload(&bits, floats.bytes.view_mut().slice(guard..guard + bits.len())).unwrap();
        floats
    }

    /// Elements from `offset` on, which may lie in the guard.
    fn view(&self, offset: usize, len: usize) -> FloatView<'_> {
        let size = self.dtype.size_bytes();
        let bytes = self.bytes.view().slice((GUARD + offset) * size..(GUARD + offset + len) * size);
        match self.dtype {
            Float::F16 => bytes.cast::<f16>().into(),
            Float::BF16 => bytes.cast::<bf16>().into(),
            Float::F32 => bytes.cast::<f32>().into(),
        }
    }

    fn view_mut(&mut self, len: usize) -> FloatViewMut<'_> {
        let size = self.dtype.size_bytes();
        let bytes = self.bytes.view_mut().slice(GUARD * size..(GUARD + len) * size);
        match self.dtype {
            Float::F16 => bytes.cast::<f16>().into(),
            Float::BF16 => bytes.cast::<bf16>().into(),
            Float::F32 => bytes.cast::<f32>().into(),
        }
    }

    /// What was written, within guards that are intact.
    fn read(&self, stream: &Stream, what: &str) -> Vec<f32> {
        let mut all = vec![0u8; self.bytes.len()];
        stream.download(self.bytes.view(), &mut all).unwrap();
        let (size, guard) = (self.dtype.size_bytes(), GUARD * self.dtype.size_bytes());
        let end = all.len() - guard;
        assert!(all[..guard].iter().chain(&all[end..]).all(|&byte| byte == POISON), "{what}: wrote outside");
        let value = |bits: &[u8]| match self.dtype {
            Float::F16 => f16::from_le_bytes([bits[0], bits[1]]).to_f32(),
            Float::BF16 => bf16::from_le_bytes([bits[0], bits[1]]).to_f32(),
            Float::F32 => f32::from_le_bytes([bits[0], bits[1], bits[2], bits[3]]),
        };
        all[guard..end].chunks_exact(size).map(value).collect()
    }
}

/// A value rounded once: to f32 with a last bit that says whether anything was cut off, then to halfs. (`from_f64` of the
/// halfs looks at the upper 32 bits only.)
fn bits(dtype: Float, value: f64) -> Vec<u8> {
    let nearest = value as f32;
    let cut = match f64::from(nearest).abs() > value.abs() {
        true => f32::from_bits(nearest.to_bits() - 1),
        false => nearest,
    };
    let odd = if f64::from(cut) == value { cut } else { f32::from_bits(cut.to_bits() | 1) };
    match dtype {
        Float::F16 => f16::from_f32(odd).to_le_bytes().to_vec(),
        Float::BF16 => bf16::from_f32(odd).to_le_bytes().to_vec(),
        Float::F32 => nearest.to_le_bytes().to_vec(),
    }
}

/// The tensor in every layout that holds it on this device.
fn packed(gpu: &Gpu, stream: &Stream, w: &QTensor, name: &str) -> Vec<Packed> {
    let act = parse(name).act;
    let problem = |x, k| Problem { format: Some(parse(name)), x, y: x, m: 1, n: w.n(), k };
    let mut all: Vec<Packed> = Vec::new();
    for kernel in KERNELS.iter().filter(|kernel| kernel.packs && kernel.holds(&w.into(), act).is_ok()) {
        let serves = TYPES.iter().any(|&x| kernel.supports(&gpu.caps(), &problem(x, w.k())).is_ok());
        if serves && all.iter().all(|packed| packed.layout() != kernel.layout) {
            all.push(matmul::pack_for(kernel, gpu, stream, w, act).unwrap());
        }
    }
    all
}

/// Formats of the table with exact activations, and other forms of scales.
fn formats() -> Vec<String> {
    let more = [
        "w4a16-g64-asym-sbf16",
        "w8a16-g32-sbf16",
        "w8a16-asym",
        "w3a16-g32-float-sf32",
        "w8a16-g128-asym-sf32",
        "w2a16-g64-asym",
        "w2a16",
        "w3a16-g128-sbf16",
    ];
    let table = FORMATS.iter().filter(|name| !parse(name).act.is_quantized());
    table.chain(&more).map(|&name| name.to_owned()).collect()
}

#[test]
fn weights_are_those_of_the_reference_rounded_once() {
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let mut random = Random(20);
        let mut layouts = std::collections::BTreeSet::new();
        // The last has more columns than a window where they were sorted.
        let shapes = [[130, 300], [64, 128], [37, 20], [5, 1], [330, 1032], [70, 30_001]];
        for (i, name) in formats().iter().enumerate() {
            for (s, [n, k]) in shapes.into_iter().enumerate() {
                for act_order in [false, true] {
                    if k > 2000 && i % 4 != s % 4 {
                        continue;
                    }
                    let w = with_zeros_in_bytes(random.qtensor(parse(name).weight, [n, k], act_order));
                    let expected = reference::dequantize(&w);
                    let pitch = k.next_multiple_of(8);
                    for (packed, to) in packed(&gpu, &stream, &w, name).iter().flat_map(|p| TYPES.map(|to| (p, to))) {
                        layouts.insert(packed.layout());
                        for rows in [0..n, n / 2 / 64 * 64..n] {
                            let what = format!(
                                "{name} {n} × {k} of {}, rows {rows:?} to {to}, act-order {act_order}",
                                packed.layout()
                            );
                            let mut floats = Floats::new(&gpu, &stream, to, rows.len() * pitch);
                            let mut view = floats.view_mut(rows.len() * pitch);
                            dequantize::run(&gpu, &stream, packed, rows.clone(), &mut view).unwrap();
                            let got = floats.read(&stream, &what);
                            for (row, got) in rows.zip(got.chunks_exact(pitch)) {
                                for (column, &got) in got[..k].iter().enumerate() {
                                    let want = expected[row * k + column];
                                    let same = bits(to, f64::from(got)) == bits(to, want);
                                    assert!(same, "{what}: ({row}, {column}) is {got}, expected {want}");
                                }
                            }
                        }
                    }
                }
            }
        }
        let all = KERNELS.iter().filter(|kernel| kernel.packs && (kernel.serves)(gpu.caps().arch));
        assert!(all.clone().all(|kernel| layouts.contains(kernel.layout)), "{layouts:?}");
    }
}

/// An embedding of codes: rows by number, as in the reference times a scale.
#[test]
fn rows_that_are_chosen_are_those_of_the_reference() {
    for gpu in gpus() {
        let (stream, mut random) = (gpu.stream().unwrap(), Random(27));
        let quantized = ["w4a8-g32", "w8a8-g128-asym"].map(str::to_owned);
        for name in formats().into_iter().chain(quantized) {
            for ([n, k], act_order) in
                [[130, 300], [64, 128], [37, 20], [330, 1032]].map(|s| [(s, false), (s, true)]).concat()
            {
                let w = with_zeros_in_bytes(random.qtensor(parse(&name).weight, [n, k], act_order));
                let expected = reference::dequantize(&w);
                // Some are other ranks': before the first of this one, and behind its last.
                let first = 5usize;
                let tokens: Vec<u32> = (0..40).map(|_| random.below(n + 10) as u32).chain([5, n as u32 + 4]).collect();
                let mut on_device = gpu.context().allocate(tokens.len()).unwrap();
                stream.upload(&tokens, on_device.view_mut()).unwrap();
                for packed in packed(&gpu, &stream, &w, &name) {
                    for scale in [1.0f32, 19.6] {
                        let what = format!("{name} {n} × {k} of {}, act-order {act_order}", packed.layout());
                        let mut floats = Floats::new(&gpu, &stream, Float::F32, tokens.len() * k);
                        let FloatViewMut::F32(out) = floats.view_mut(tokens.len() * k) else { panic!("f32") };
                        let table = (Table::Codes(&packed), first);
                        nn::embed(&gpu, &stream, table, k, on_device.view(), scale, out).unwrap();
                        let got = floats.read(&stream, &what);
                        for (&token, got) in tokens.iter().zip(got.chunks_exact(k)) {
                            let row = (token as usize).checked_sub(first).filter(|&row| row < n);
                            for (column, got) in got.iter().enumerate() {
                                let want = row.map_or(0.0, |row| expected[row * k + column] as f32 * scale);
                                assert_eq!(got.to_bits(), want.to_bits(), "{what}: {token}, {column}: {got}, {want}");
                            }
                        }
                    }
                }
            }
        }
    }
}

/// A product, whether it is faster so or not.
struct Product<'a> {
    gpu: &'a Gpu,
    stream: &'a Stream,
    w: &'a Packed,
    m: usize,
    types: [Float; 2],
    slab_bytes: usize,
}

impl Product<'_> {
    /// y twice, with the same bits; x begins `offset` elements after a multiple of 16 bytes.
    fn run(&self, x: &[f32], offset: usize, epilogue: Epilogue<'_>, what: &str) -> Vec<f32> {
        let Self { gpu, stream, w, m, types: [x_type, y_type], slab_bytes } = *self;
        let [n, k] = w.shape();
        let shifted: Vec<f32> = std::iter::repeat_n(0.0, offset).chain(x.iter().copied()).collect();
        let x = Floats::of(gpu, stream, x_type, &shifted);
        let problem = Problem { format: Some(w.format()), x: x_type, y: y_type, m, n, k };
        let mut workspace = Workspace::new(gpu, stream, floor::workspace_bytes_as(slab_bytes, &problem)).unwrap();
        let bytes = workspace.bytes();
        stream.fill(workspace.view_mut().slice(Workspace::COUNTER_BYTES..bytes), POISON).unwrap();
        let mut results = [0; 2].map(|_| {
            let mut y = Floats::new(gpu, stream, y_type, m * n);
            let call = Call {
                x: x.view(offset, m * k),
                m,
                w,
                epilogue,
                y: y.view_mut(m * n),
                workspace: Some(&mut workspace),
                batch_invariant: false,
            };
            floor::run_as(slab_bytes, gpu, stream, &call).unwrap_or_else(|e| panic!("{what}: {e}"));
            y.read(stream, what)
        });
        let bits = |y: &[f32]| y.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert!(bits(&results[0]) == bits(&results[1]), "{what}: not the same bits twice");
        std::mem::take(&mut results[0])
    }
}

#[test]
fn products_are_within_the_bound_across_slabs() {
    for gpu in gpus().iter().filter(|gpu| gpu.caps().cublaslt) {
        let stream = gpu.stream().unwrap();
        let mut random = Random(21);
        let mut seen = 0;
        for (i, name) in formats().iter().enumerate() {
            for (s, [n, k]) in [[600, 1000], [131, 517], [1, 512], [257, 2568], [192, 640]].into_iter().enumerate() {
                let format = parse(name);
                let w = with_zeros_in_bytes(random.qtensor(format.weight, [n, k], (i + s) % 2 == 1));
                const MOST: usize = 300;
                let kinds = [random.normals(MOST * k), random.activations(MOST * k)];
                for packed in packed(gpu, &stream, &w, name) {
                    for (x_type, y_type) in TYPES.into_iter().flat_map(|x| TYPES.map(|y| (x, y))) {
                        let problem = Problem { format: Some(format), x: x_type, y: y_type, m: 1 << 20, n, k };
                        let mine = KERNELS.iter().find(|kernel| !kernel.packs && kernel.layout == packed.layout());
                        // Where it is slower it is right all the same.
                        let refused = mine.unwrap().supports(&gpu.caps(), &problem).err();
                        if refused
                            .is_some_and(|why| Some(why) != floor::pays(&gpu.caps(), &problem, packed.layout()).err())
                        {
                            continue;
                        }
                        // Where a few large terms outweigh the others, roundings of weights do not average out.
                        let outliers = (i + s) % 3 == 0;
                        let rounded_weights = (outliers && x_type != Float::F32).then_some(x_type);
                        let x = rounded(&kinds[usize::from(outliers)], x_type);
                        // Slabs of 64 rows, and all at once.
                        for (j, m) in [1, 3, 17, 129, MOST].into_iter().enumerate().filter(|(j, _)| (i + j) % 2 == 0) {
                            let slab_bytes = if (i + j + s) % 3 == 0 { SLAB_BYTES } else { 0 };
                            let what = format!("{} in {} by {slab_bytes}", Problem { m, ..problem }, packed.layout());
                            let product =
                                Product { gpu, stream: &stream, w: &packed, m, types: [x_type, y_type], slab_bytes };
                            let y = product.run(&x[..m * k], j % 2 * 3, Epilogue::default(), &what);
                            // Rows in the middle tell nothing that the first and the last do not.
                            let bound = Bound { rounded_weights, ..Bound::new(y_type, k) };
                            let ends = [&x[..k], &x[(m - 1) * k..m * k]].concat();
                            let reference = reference::linear(&ends, 2, &w, format.act);
                            let y = [&y[..n], &y[(m - 1) * n..]].concat();
                            for (column, &y) in y.iter().enumerate() {
                                let error = (f64::from(y) - reference.value[column]).abs();
                                let allowed = bound.allowed(reference.magnitude[column]);
                                assert!(
                                    error <= allowed,
                                    "{what}: element {column} is {y}, off by {error:e} of {allowed:e}"
                                );
                            }
                            seen += 1;
                        }
                    }
                }
            }
        }
        assert!(seen > 300, "{seen} products");
    }
}

#[test]
fn bias_and_activation_come_last_in_every_type() {
    for gpu in gpus().iter().filter(|gpu| gpu.caps().cublaslt) {
        let stream = gpu.stream().unwrap();
        let mut random = Random(22);
        let (name, n, k, m) = ("w4a16-g32-asym", 201, 520, 6);
        let w = random.qtensor(parse(name).weight, [n, k], false);
        let bias = random.normals(n);
        let mut on_device = gpu.context().allocate::<f32>(n).unwrap();
        stream.upload(&bias, on_device.view_mut()).unwrap();
        for [x_type, y_type] in
            [[Float::F32, Float::F32], [Float::F32, Float::F16], [Float::F16, Float::F16], [Float::F16, Float::BF16]]
        {
            let x = rounded(&random.normals(m * k), x_type);
            let plain = reference::linear(&x, m, &w, parse(name).act);
            for packed in packed(gpu, &stream, &w, name) {
                for activation in ACTIVATIONS {
                    for bias_on_device in [None, Some(on_device.view())] {
                        let what = format!("{x_type} to {y_type} {activation:?} {}", packed.layout());
                        let product =
                            Product { gpu, stream: &stream, w: &packed, m, types: [x_type, y_type], slab_bytes: 0 };
                        let y = product.run(&x, 0, Epilogue { bias: bias_on_device, activation }, &what);
                        for (i, &y) in y.iter().enumerate() {
                            let added = if bias_on_device.is_some() { f64::from(bias[i % n]) } else { 0.0 };
                            let want = activation.apply((plain.value[i] + added) as f32);
                            // No function is steeper than 1.13; the sum was rounded to f32, and the value once.
                            let sum = Bound::new(x_type, k).allowed(plain.magnitude[i]) + 1e-6;
                            let allowed = (1.13 * sum) as f32 + y_type.unit_roundoff() as f32 * want.abs() + 2e-6;
                            assert!((y - want).abs() <= allowed, "{what}: {y} and {want} ± {allowed}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn a_product_is_recorded_also_the_first_time() {
    for gpu in gpus().iter().filter(|gpu| gpu.caps().cublaslt) {
        let stream = gpu.stream().unwrap();
        let mut random = Random(23);
        let (name, n, k, m) = ("w4a16-g128", 300, 1024, 40);
        let w = random.qtensor(parse(name).weight, [n, k], true);
        for packed in packed(gpu, &stream, &w, name) {
            let x = Floats::of(gpu, &stream, Float::F32, &random.normals(m * k));
            let problem = Problem { format: Some(packed.format()), x: Float::F32, y: Float::F32, m, n, k };
            let mut workspace = Workspace::new(gpu, &stream, floor::workspace_bytes_as(0, &problem)).unwrap();
            let mut y = Floats::new(gpu, &stream, Float::F32, m * n);
            let mut run = |stream: &Stream, y: &mut Floats| {
                let (x, y) = (x.view(0, m * k), y.view_mut(m * n));
                let epilogue = Epilogue { bias: None, activation: Activation::Silu };
                let workspace = Some(&mut workspace);
                floor::run_as(
                    0,
                    gpu,
                    stream,
                    &Call { x, m, w: &packed, epilogue, y, workspace, batch_invariant: false },
                )
            };
            // Kernels are loaded; cuBLASLt is not, nor has it seen such matrices.
            gpu.prepare(&matmul::instances_of(&gpu.caps(), &problem, packed.layout()).unwrap(), |_| ()).unwrap();
            stream.time_replays(1, 2, |stream| run(stream, &mut y)).unwrap();
            let replayed = y.read(&stream, "replayed");
            assert!(replayed.iter().all(|v| v.is_finite()));
            stream.fill(y.bytes.view_mut(), POISON).unwrap();
            run(&stream, &mut y).unwrap();
            assert_eq!(y.read(&stream, "at once"), replayed);
        }
    }
}

#[test]
fn what_it_does_not_take_is_told() {
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let w = Random(24).qtensor(parse("w4a16-g128").weight, [130, 200], false);
        for packed in packed(&gpu, &stream, &w, "w4a16-g128") {
            let run = |rows: std::ops::Range<usize>, len: usize| {
                let mut to = Floats::new(&gpu, &stream, Float::F16, len);
                let result = dequantize::run(&gpu, &stream, &packed, rows, &mut to.view_mut(len));
                result.map_err(|e| e.to_string())
            };
            run(0..130, 130 * 200).unwrap();
            run(64..64, 0).unwrap();
            assert!(run(1..130, 129 * 200).unwrap_err().contains("from a multiple of 64 on"));
            assert!(run(64..131, 67 * 200).is_err());
            assert!(run(0..130, 130 * 200 - 1).unwrap_err().contains("130 × 200 elements"));
        }
    }
}

/// What a device of this processor would offer.
fn caps(arch: &str, cublaslt: bool) -> Caps {
    Caps { cublaslt, ..super::products::caps(arch) }
}

#[test]
fn the_choice_is_pure_and_explained() {
    const NAME: &str = "dequantize_cublaslt";
    let problem = |name: &str, x, m| Problem { format: Some(parse(name)), x, y: x, m, n: 4096, k: 4096 };
    let chosen = |caps: &Caps, problem: &Problem, layout| matmul::select(caps, problem, layout).unwrap().name;
    let reason = |caps: &Caps, problem: &Problem, layout: &str| {
        let explained = matmul::explain(caps, problem, Some(layout));
        let mine = explained.into_iter().find(|(kernel, _)| kernel.name == NAME && kernel.layout == layout);
        mine.unwrap().1.map(|reason| reason.0).unwrap_or_default()
    };
    let hopper = caps("sm_90a", true);
    let (f16, many) = (Float::F16, 1 << 14);
    for layout in ["cuda_plain", "cuda_wna16"] {
        let other = problem("w4a16-g32", Float::BF16, many);
        let expected = if layout == "cuda_wna16" { "wna16_sm90" } else { NAME };
        assert_eq!(chosen(&hopper, &other, Some(layout)), expected);
        assert_eq!(chosen(&caps("sm_80", true), &other, Some(layout)), NAME);
        for (problem, why) in [
            (Problem { y: f16, ..other }, "rounds weights to bf16, which a result in f16 does not allow"),
            (Problem { y: Float::F32, ..other }, "rounds weights to bf16, which a result in f32 does not allow"),
            (Problem { k: 511, ..other }, "averages out from 512 columns on; k is 511"),
            (problem("w4a16-g128-sbf16", f16, many), "scales in bf16 may lie outside the range of f16"),
            (problem("w4a8-g128", f16, many), "multiplies exact activations"),
            (Problem { format: None, ..other }, "the weights are dense"),
        ] {
            let reason = reason(&hopper, &problem, layout);
            assert!(reason.contains(why), "{problem} in {layout}: {reason}");
        }
        assert_eq!(reason(&caps("sm_90a", false), &other, layout), "cuBLASLt was not found");
        assert!(
            reason(&caps("sm_75", true), &other, layout).contains("multiplies x in f16 or f32 on sm_75; x is bf16")
        );
        assert!(reason(&caps("sm_70", true), &other, layout).contains("is not written for sm_70"));
        // Weights in f32 are not rounded, and tensor cores multiply f32 from sm_80 on.
        let short = Problem { k: 300, ..problem("w4a16-g128", Float::F32, many) };
        let expected = if layout == "cuda_wna16" { "wna16_split" } else { NAME };
        assert_eq!(chosen(&hopper, &short, Some(layout)), expected);
        assert_eq!(chosen(&caps("sm_75", true), &short, Some(layout)), NAME);
    }
    // Weights are packed for another kernel, never for this.
    for name in FORMATS.iter().filter(|name| !parse(name).act.is_quantized()) {
        for (arch, x) in ["sm_75", "sm_80", "sm_89", "sm_90a"].into_iter().flat_map(|arch| TYPES.map(|x| (arch, x))) {
            let (caps, one) = (caps(arch, true), problem(name, x, 1));
            let layout = matmul::select(&caps, &one, None).unwrap().layout;
            let packs = |kernel: &&matmul::Kernel| kernel.packs && kernel.supports(&caps, &one).is_ok();
            assert_eq!(KERNELS.iter().find(packs).unwrap().layout, layout, "{name} with {x} on {arch}");
        }
    }
    for m in [0, 1, 8, 64, 1024, 1 << 15] {
        let same = problem("w4a16-g128", f16, m);
        assert_eq!(chosen(&hopper, &same, Some("cuda_plain")), NAME);
        assert_eq!(chosen(&hopper, &same, Some("cuda_wna16")), "wna16_sm90");
        let unlike = Problem { x: Float::BF16, y: Float::BF16, ..same };
        assert_eq!(chosen(&hopper, &unlike, Some("cuda_wna16")), "wna16_sm90");
        let best = if m < 384 { "wna16_mma" } else { NAME };
        assert_eq!(chosen(&caps("sm_89", true), &unlike, Some("cuda_wna16")), best);
        assert_eq!(chosen(&caps("sm_89", true), &same, Some("cuda_wna16")), best);
        let narrow = Problem { x: Float::F32, y: Float::F32, k: 128, ..same };
        assert_eq!(chosen(&hopper, &narrow, Some("cuda_plain")), "simt");
    }
}
