//! Rows that are quantised where they are made, once for all products that read them: the bits of kernels one by one.

use super::gpus;
use super::products::{TYPES, caps};
use crate::data::{Random, parse, with_zeros_in_bytes};
use bytemuck::Pod;
use halfbyte::cuda::driver::{Buffer, Stream, View};
use halfbyte::cuda::matmul::{
    self, Call, Epilogue, KERNELS, Kernel, Packed, QuantizedCall, QuantizedForm, QuantizedRows, quantize_activations,
    rows_form, run_quantized, run_quantized_with,
};
use halfbyte::cuda::nn::{self, FloatBuffer, Gate, Norm, QuantizedNorm};
use halfbyte::cuda::{Gpu, Workspace};
use halfbyte::kernel::{Activation, Problem};
use halfbyte::{Error, Float};

/// Outputs and columns of weights, and numbers of rows.
const SHAPES: [[usize; 2]; 3] = [[600, 1024], [320, 2560], [65, 384]];
const ROWS: &[usize] = &[1, 7, 32, 129, 300];

struct Bench<'a> {
    gpu: &'a Gpu,
    stream: Stream,
}

impl Bench<'_> {
    fn upload<T: Pod>(&self, values: &[T]) -> Buffer<T> {
        let mut buffer = self.gpu.context().allocate(values.len()).unwrap();
        self.stream.upload(values, buffer.view_mut()).unwrap();
        buffer
    }

    fn read<T: Pod>(&self, view: View<'_, T>) -> Vec<T> {
        let mut out = vec![T::zeroed(); view.len()];
        self.stream.download(view, &mut out).unwrap();
        out
    }

    /// Room with poison in it, of which terms that no row has stay.
    fn rows(&self, form: QuantizedForm) -> QuantizedRows {
        let mut rows = QuantizedRows::allocate(self.gpu, form).unwrap();
        let view = rows.view_mut(form.m);
        self.stream.fill(view.codes, 0x55).unwrap();
        self.stream.fill(view.terms, 0x55).unwrap();
        rows
    }

    /// Codes, and the bits of terms.
    fn content(&self, rows: &QuantizedRows, m: usize) -> (Vec<u8>, Vec<u32>) {
        let view = rows.view(m);
        (self.read(view.codes), self.read(view.terms).iter().map(|v| v.to_bits()).collect())
    }

    /// What one kernel more makes of floats.
    fn by_itself(&self, form: QuantizedForm, floats: &FloatBuffer) -> (Vec<u8>, Vec<u32>) {
        let mut rows = self.rows(form);
        let (x, to) = (floats.view(0..form.m * form.k), rows.view_mut(form.m));
        quantize_activations(self.gpu, &self.stream, form, x, None, to.codes, to.terms).unwrap();
        self.content(&rows, form.m)
    }
}

/// Groups in lanes of a warp, a whole block's, a row's; pieces of them; sums and offsets; widths that fill nothing.
fn forms() -> Vec<QuantizedForm> {
    let mut forms = Vec::new();
    for (i, k) in [128, 384, 1000, 4096, 4100, 20].into_iter().enumerate() {
        for (j, [group, piece]) in [[32, 32], [128, 128], [256, 64], [16, 16], [48, 16], [512, 128], [768, 768], [k, k]]
            .into_iter()
            .enumerate()
        {
            let (m, sums, offsets) = ([1, 5, 33][(i + j) % 3], (i + j) % 2 == 0, j % 2 == 0);
            forms.push(QuantizedForm { m, k, group, piece, sums, offsets, pixels: false });
        }
    }
    forms
}

#[test]
fn norms_leave_the_codes_of_norms_that_are_quantized() {
    for gpu in gpus() {
        let bench = Bench { gpu: &gpu, stream: gpu.stream().unwrap() };
        let mut random = Random(41);
        for (i, form) in forms().into_iter().enumerate() {
            let (dtype, QuantizedForm { m, k, .. }) = (TYPES[i % 3], form);
            let mut residual = random.activations(m * k);
            if m > 1 {
                residual[k..2 * k].fill(0.0);
                residual[0] = f32::NAN;
            }
            let (update, weight) = (bench.upload(&random.normals(m * k)), bench.upload(&random.normals(k)));
            let (update, weight, eps) = ((i % 2 == 0).then(|| update.view()), weight.view(), 1e-5);
            let [mut separate, mut fused] = [bench.upload(&residual), bench.upload(&residual)];
            let mut out = FloatBuffer::allocate(&gpu, dtype, m * k).unwrap();
            let norm = Norm {
                residual: separate.view_mut(),
                update: update.map(Into::into),
                weight,
                eps,
                out: out.view_mut(0..m * k),
                exact: None,
                next: None,
            };
            nn::rms_norm(&gpu, &bench.stream, norm).unwrap();
            let want = bench.by_itself(form, &out);
            let mut rows = bench.rows(form);
            let (residual, out) = (fused.view_mut(), rows.view_mut(m));
            let norm = QuantizedNorm { residual, update, weight, eps, rounded: dtype, out };
            nn::rms_norm_quantized(&gpu, &bench.stream, norm).unwrap();
            assert!(bench.content(&rows, m) == want, "{form:?}, {dtype}: other codes or terms");
            let bits = |v: Vec<f32>| v.into_iter().map(f32::to_bits).collect::<Vec<_>>();
            assert!(bits(bench.read(fused.view())) == bits(bench.read(separate.view())), "{form:?}: another stream");
        }
    }
}

#[test]
fn gated_activations_leave_the_codes_of_those_that_are_quantized() {
    for gpu in gpus() {
        let bench = Bench { gpu: &gpu, stream: gpu.stream().unwrap() };
        let mut random = Random(42);
        for (i, form) in forms().into_iter().enumerate() {
            let (dtype, QuantizedForm { m, k, .. }) = (TYPES[i % 3], form);
            let plain = Gate { activation: Activation::GeluTanh, gated: false, clamp: None };
            let (gate, each) = if i % 4 == 3 { (plain, 1) } else { (Gate::SWIGLU, 2) };
            let mut gate_up = random.activations(each * m * k);
            gate_up[0] = f32::INFINITY;
            let gate_up = bench.upload(&gate_up);
            let mut out = FloatBuffer::allocate(&gpu, dtype, m * k).unwrap();
            nn::gate(&gpu, &bench.stream, gate, gate_up.view(), k, out.view_mut(0..m * k)).unwrap();
            let want = bench.by_itself(form, &out);
            let mut rows = bench.rows(form);
            nn::gate_quantized(&gpu, &bench.stream, gate, gate_up.view(), dtype, rows.view_mut(m)).unwrap();
            assert!(bench.content(&rows, m) == want, "{form:?}, {dtype}: other codes or terms");
        }
    }
}

/// Formats of weights with products of quantised rows.
const FORMATS: [&str; 5] = ["w4a8-g128", "w8a8", "w8a8-g32-asym", "w4a8-g64-xasym", "w4a8-g256-asym-xasym"];

fn problem_of(name: &str, [i, j]: [usize; 2], [m, n, k]: [usize; 3]) -> Problem {
    Problem { format: Some(parse(name)), x: Float::F32, y: TYPES[(i + j) % 3], m, n, k }
}

/// What a norm leaves for one kernel is what it leaves for every other, on all processors.
#[test]
fn all_kernels_for_quantised_activations_read_the_same_rows() {
    for (i, name) in FORMATS.into_iter().enumerate() {
        for (j, &[n, k]) in SHAPES.iter().enumerate() {
            let problem = problem_of(name, [i, j], [ROWS[j], n, k]);
            let forms: Vec<_> = KERNELS.iter().filter_map(|kernel| kernel.rows_form(&problem)).collect();
            assert!(forms.len() == 2 && forms[0] == forms[1], "{problem}: {forms:?}");
            for (arch, want) in [("sm_80", "wna8_mma"), ("sm_89", "wna8_mma"), ("sm_90a", "wna8_sm90")] {
                let kernel = matmul::select(&caps(arch), &problem, None).unwrap();
                assert_eq!((kernel.name, kernel.rows_form(&problem)), (want, Some(forms[0])), "{problem} on {arch}");
            }
            let exact = Problem { format: Some(parse("w4a16-g128")), ..problem };
            assert!(KERNELS.iter().all(|kernel| kernel.rows_form(&exact).is_none()));
        }
    }
}

#[test]
fn products_of_quantized_rows_are_those_of_the_floats() {
    for gpu in gpus() {
        let caps = gpu.caps();
        let reads = |kernel: &&Kernel| kernel.rows_form(&problem_of(FORMATS[0], [0; 2], [1, 64, 256])).is_some();
        for kernel in KERNELS.iter().filter(|kernel| (kernel.serves)(caps.arch)).filter(reads) {
            products_of_quantized_rows(&gpu, kernel);
        }
    }
}

fn products_of_quantized_rows(gpu: &Gpu, kernel: &'static Kernel) {
    let bench = Bench { gpu, stream: gpu.stream().unwrap() };
    let mut random = Random(43);
    let problems = FORMATS.into_iter().enumerate().flat_map(|(i, name)| {
        let of = move |(j, &m): (usize, &usize)| problem_of(name, [i, j], [m, SHAPES[i % 3][0], SHAPES[i % 3][1]]);
        ROWS.iter().enumerate().map(of)
    });
    let instances: Vec<_> = problems.flat_map(|problem| kernel.instances_of(&gpu.caps(), &problem)).collect();
    gpu.prepare(&instances, |_| ()).unwrap();
    for (i, name) in FORMATS.into_iter().enumerate() {
        let (format, [n, k]) = (parse(name), SHAPES[i % 3]);
        let w = with_zeros_in_bytes(random.qtensor(format.weight, [n, k], false));
        let packed = matmul::pack_for(kernel, gpu, &bench.stream, &w, format.act).unwrap();
        let bias = bench.upload(&random.normals(n));
        // Room for more rows than there are, as a model has.
        let mut rows = bench.rows(rows_form(&gpu.caps(), &packed, 300).unwrap());
        for (j, &m) in ROWS.iter().enumerate() {
            // Another activation is another kernel.
            let activation = if [i, j] == [1, 2] { Activation::Silu } else { Activation::None };
            let problem = problem_of(name, [i, j], [m, n, k]);
            let y = problem.y;
            let x = bench.upload(&random.activations(m * k));
            let mut workspace =
                Workspace::new(gpu, &bench.stream, kernel.workspace_bytes(&gpu.caps(), &problem)).unwrap();
            let epilogue = Epilogue { bias: Some(bias.view()), activation };
            let [mut want, mut got] = [(); 2].map(|()| FloatBuffer::allocate(gpu, y, m * n).unwrap());
            let call = Call {
                x: x.view().into(),
                m,
                w: &packed,
                epilogue,
                y: want.view_mut(0..m * n),
                workspace: Some(&mut workspace),
                batch_invariant: false,
            };
            matmul::run_with(kernel, gpu, &bench.stream, call).unwrap();
            let (form, to) = (rows_form(&gpu.caps(), &packed, m).unwrap(), rows.view_mut(m));
            quantize_activations(gpu, &bench.stream, form, x.view().into(), None, to.codes, to.terms).unwrap();
            let call = QuantizedCall {
                x: rows.view(m),
                w: &packed,
                epilogue,
                y: got.view_mut(0..m * n),
                workspace: Some(&mut workspace),
            };
            run_quantized_with(kernel, gpu, &bench.stream, call).unwrap();
            let name = format!("{}: {name}", kernel.name);
            assert!(bytes_of(&bench, &got) == bytes_of(&bench, &want), "{name} m={m}, y {y}: other bits");
        }
    }
}

fn bytes_of(bench: &Bench<'_>, floats: &FloatBuffer) -> Vec<u8> {
    match floats {
        FloatBuffer::F16(v) => bytemuck::cast_slice(&bench.read(v.view())).to_vec(),
        FloatBuffer::BF16(v) => bytemuck::cast_slice(&bench.read(v.view())).to_vec(),
        FloatBuffer::F32(v) => bytemuck::cast_slice(&bench.read(v.view())).to_vec(),
    }
}

#[test]
fn other_rows_than_the_weights_are_refused() {
    for gpu in gpus().into_iter().filter(|gpu| gpu.caps().arch >= caps("sm_80").arch) {
        let bench = Bench { gpu: &gpu, stream: gpu.stream().unwrap() };
        let mut random = Random(44);
        let mut pack = |name: &str, act_order| -> Packed {
            let w = with_zeros_in_bytes(random.qtensor(parse(name).weight, [64, 256], act_order));
            matmul::pack(&gpu, &bench.stream, &w, parse(name).act, Float::F16).unwrap()
        };
        let [of_g128, of_g64, exact] = ["w4a8-g128", "w4a8-g64", "w4a16-g128"].map(|name| pack(name, false));
        let ordered = pack("w4a8-g128", true);
        let form = |w: &Packed| rows_form(&gpu.caps(), w, 4);
        assert!(form(&exact).is_none() && form(&ordered).is_none() && form(&of_g64) != form(&of_g128));
        let rows = bench.rows(form(&of_g128).unwrap());
        let mut workspace = Workspace::new(&gpu, &bench.stream, 8 << 20).unwrap();
        let mut y = FloatBuffer::allocate(&gpu, Float::F32, 4 * 64).unwrap();
        for (w, len, workspace) in [
            (&of_g64, 4 * 64, Some(&mut workspace)),
            (&exact, 4 * 64, None),
            (&ordered, 4 * 64, None),
            (&of_g128, 4 * 63, None),
            (&of_g128, 4 * 64, None),
        ] {
            let call =
                QuantizedCall { x: rows.view(4), w, epilogue: Epilogue::default(), y: y.view_mut(0..len), workspace };
            let refused = run_quantized(&gpu, &bench.stream, call).unwrap_err();
            assert!(matches!(refused, Error::Invalid { .. }), "{refused}");
        }
        let none = QuantizedForm { m: 1, k: 256, group: 24, piece: 24, sums: false, offsets: false, pixels: false };
        assert!(matches!(QuantizedRows::allocate(&gpu, none), Err(Error::Invalid { .. })));
    }
}
