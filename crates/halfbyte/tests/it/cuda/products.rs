//! A product on a GPU with guards round what it writes, and what it is compared with.

use bytemuck::Pod;
use half::{bf16, f16};
use halfbyte::cuda::driver::{Buffer, FloatView, FloatViewMut, Stream, ViewMut};
use halfbyte::cuda::matmul::{self, Call, Configuration, Epilogue, Kernel, Packed};
use halfbyte::cuda::{Caps, Gpu, Workspace};
use halfbyte::format::reference::{self, Bound, Product};
use halfbyte::kernel::Problem;
use halfbyte::{Act, Float, QTensor};
use rayon::prelude::*;

/// Elements before and after every output, to see that a kernel writes nothing else.
const GUARD: usize = 64;

/// Every byte of outputs and guards before the kernel runs: NaN in all three types.
const POISON: u8 = 0xff;

pub(super) const TYPES: [Float; 3] = [Float::F16, Float::BF16, Float::F32];

/// Compiles what a kernel computes problems by, each instance once.
pub(super) fn prepare(gpu: &Gpu, kernel: &Kernel, problems: impl Iterator<Item = Problem>) {
    let mut instances: Vec<_> = problems.flat_map(|problem| kernel.instances_of(&gpu.caps(), &problem)).collect();
    instances.sort_by_cached_key(ToString::to_string);
    instances.dedup_by_key(|instance| instance.to_string());
    gpu.prepare(&instances, |_| ()).unwrap();
}

pub(super) struct Bench<'a> {
    pub(super) kernel: &'static Kernel,
    pub(super) gpu: &'a Gpu,
    pub(super) stream: &'a Stream,
    /// If not the one that it chooses.
    pub(super) configuration: Option<Configuration>,
    pub(super) batch_invariant: bool,
}

impl<'b> Bench<'b> {
    pub(super) fn new(kernel: &'static Kernel, gpu: &'b Gpu, stream: &'b Stream) -> Self {
        Self { kernel, gpu, stream, configuration: None, batch_invariant: false }
    }

    /// Zeroed counters, and poison in all the rest.
    pub(super) fn workspace(&self, bytes: usize) -> Workspace {
        let mut workspace = Workspace::new(self.gpu, self.stream, bytes).unwrap();
        let counters = bytes.min(Workspace::COUNTER_BYTES);
        self.stream.fill(workspace.view_mut().slice(counters..bytes), POISON).unwrap();
        workspace
    }

    pub(super) fn upload<T: Pod>(&self, values: &[T]) -> Buffer<T> {
        let mut buffer = self.gpu.context().allocate(values.len()).unwrap();
        self.stream.upload(values, buffer.view_mut()).unwrap();
        buffer
    }

    /// The product of a problem's rows, against the reference of all of them.
    pub(super) fn check(&self, w: &Packed, x: &[f32], problem: &Problem, reference: &Product, more: &str) {
        let &Problem { x: x_type, y, m, k, .. } = problem;
        let got = self.forward(w, &x[..m * k], [x_type, y], m, Epilogue::default());
        let bound = self.kernel.bound(&self.gpu.caps(), problem);
        check(&got, reference, bound, &format!("{}: {problem}, {more}", self.kernel.name));
    }

    /// The product twice, whose bits must agree, with guards round the output that must stay as they were.
    pub(super) fn forward(
        &self,
        w: &Packed,
        x: &[f32],
        [x_type, out]: [Float; 2],
        m: usize,
        epilogue: Epilogue<'_>,
    ) -> Vec<f32> {
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
        let [n, k] = w.shape();
        let len = m * n;
        let mut y = self.gpu.context().allocate::<T>(len + 2 * GUARD).unwrap();
        self.stream.fill(y.view_mut(), POISON).unwrap();
        let out = FloatViewMut::from(y.view_mut()).dtype();
        let problem = Problem { format: Some(w.format()), x: x.dtype(), y: out, m, n, k };
        let (caps, batch_invariant) = (w.caps(self.gpu), self.batch_invariant);
        let bytes = match &self.configuration {
            None => self.kernel.workspace_bytes(&caps, &problem),
            Some(configuration) => configuration.workspace_bytes(&caps, &problem, batch_invariant),
        };
        let mut workspace = self.workspace(bytes);
        let y_view = y.view_mut().slice(GUARD..GUARD + len).into();
        let call = Call { x, m, w, epilogue, y: y_view, workspace: Some(&mut workspace), batch_invariant };
        match &self.configuration {
            None => matmul::run_with(self.kernel, self.gpu, self.stream, call).unwrap(),
            Some(asked) => matmul::run_as(self.kernel, asked, self.gpu, self.stream, &call).unwrap(),
        }
        let mut counters = vec![1u8; bytes.min(Workspace::COUNTER_BYTES)];
        self.stream.download(workspace.view().slice(0..counters.len()), &mut counters).unwrap();
        assert!(counters.iter().all(|&byte| byte == 0), "{}: counters left behind", self.kernel.name);
        let mut all = vec![T::zeroed(); len + 2 * GUARD];
        self.stream.download(y.view(), &mut all).unwrap();
        let intact = |guard: &[T]| bytemuck::cast_slice::<T, u8>(guard).iter().all(|&byte| byte == POISON);
        assert!(intact(&all[..GUARD]) && intact(&all[GUARD + len..]), "{}: wrote outside", self.kernel.name);
        all[GUARD..GUARD + len].to_vec()
    }
}

/// The first rows of a product against the reference.
pub(super) fn check(y: &[f32], reference: &Product, bound: Bound, what: &str) {
    for (i, &y) in y.iter().enumerate() {
        let (want, magnitude) = (reference.value[i], reference.magnitude[i]);
        let error = (f64::from(y) - want).abs();
        let allowed = bound.allowed(magnitude);
        assert!(error <= allowed, "{what}: element {i} is {y}, expected {want} ± {allowed:e}, off by {error:e}");
    }
}

/// The reference, some rows a thread.
pub(super) fn reference_of(x: &[f32], m: usize, w: &QTensor, act: Act) -> Product {
    const ROWS: usize = 50;
    let k = w.k();
    let chunks = (0..m).step_by(ROWS).map(|first| first..m.min(first + ROWS)).collect::<Vec<_>>();
    let parts: Vec<Product> =
        chunks.into_par_iter().map(|r| reference::linear(&x[r.start * k..r.end * k], r.len(), w, act)).collect();
    let join = |of: fn(&Product) -> &Vec<f64>| parts.iter().flat_map(of).copied().collect();
    Product { value: join(|p| &p.value), magnitude: join(|p| &p.magnitude) }
}

/// What a device of this processor would offer, for tests of the choice without one.
pub(super) fn caps(arch: &str) -> Caps {
    Caps { arch: arch.parse().unwrap(), ..Caps::H200 }
}

/// Formats with scales in f32, offsets, groups of 16 or codes of 2 and 3 bits.
pub(super) const WIDE: [&str; 19] = [
    "w4a16-g32-float-sf32",
    "w8a16-g16-sf32",
    "w8a16-g32-float-sf32",
    "w3a16-g16-sf32",
    "w4a16-g32-float",
    "w4a16-g128-sf32",
    "w4a16-g64-float-sbf16",
    "w4a16-float",
    "w4a16-asym-sf32",
    "w4a16-g48-asym",
    "w8a16-g128-float",
    "w8a16-sf32",
    "w3a16-g128",
    "w3a16-g64-asym-sbf16",
    "w4a16-g16-float-sf32",
    "w4a16-g64-asym-si8",
    "w2a16-g64-asym",
    "w2a16-g128-sbf16",
    "w2a16-g16-float-sf32",
];

/// Every form of atoms of the Hopper kernel.
pub(super) fn formats_of_atoms() -> Vec<String> {
    let mut names = Vec::new();
    for bits in [4, 8] {
        for group in ["", "-g32", "-g64", "-g128"] {
            for zero in ["", "-asym"] {
                names.extend(["", "-sbf16"].map(|scale| format!("w{bits}a16{group}{zero}{scale}")));
            }
        }
    }
    names
        .extend(["w2a16", "w2a16-g64", "w2a16-g32-asym-sbf16", "w3a16-g128-asym", "w3a16-g32-sbf16"].map(String::from));
    names
}
