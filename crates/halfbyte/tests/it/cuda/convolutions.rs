//! What tests of convolutions on a GPU run, and what they compare it with.

use crate::conv::{laid_out, planes};
use bytemuck::Pod;
use half::{bf16, f16};
use halfbyte::Float;
use halfbyte::conv::{Conv2dShape, Geometry, Layout2d};
use halfbyte::cuda::conv::{Call, KERNELS, Kernel, Plan, Problem, Weights};
use halfbyte::cuda::driver::{Buffer, FloatView, FloatViewMut, Stream, ViewMut};
use halfbyte::cuda::matmul::Epilogue;
use halfbyte::cuda::sources::{Arch, Instance};
use halfbyte::cuda::{Caps, Gpu, Workspace};
use halfbyte::format::reference::{Bound, Product};

/// Elements before and after every output, to see that a kernel writes nothing else.
const GUARD: usize = 64;

/// Every byte of outputs and guards before the kernel runs: NaN in all three types.
const POISON: u8 = 0xff;

pub(super) const TYPES: [Float; 3] = [Float::F16, Float::BF16, Float::F32];

/// By its name: tests say which one they mean.
pub(super) fn kernel(name: &str) -> &'static Kernel {
    KERNELS.iter().find(|kernel| kernel.name == name).unwrap()
}

/// One device, and what is computed there.
pub(super) struct Bench<'a> {
    pub gpu: &'a Gpu,
    pub stream: &'a Stream,
    pub kernel: &'static Kernel,
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
    pub fn upload<T: Pod>(&self, values: &[T]) -> Buffer<T> {
        let mut buffer = self.gpu.context().allocate(values.len()).unwrap();
        self.stream.upload(values, buffer.view_mut()).unwrap();
        buffer
    }

    /// y `[batch, co, oh, ow]`, in the configuration that the kernel chooses.
    pub fn forward(&self, w: &Weights, images: &Images<'_>, epilogue: Epilogue<'_>) -> Vec<f32> {
        let plan = self.kernel.plan(&self.gpu.caps(), &images.problem(w)).unwrap();
        self.forward_by(&plan, w, images, epilogue)
    }

    /// y `[batch, co, oh, ow]`, computed twice with the same bits, and nothing else written.
    pub fn forward_by(&self, plan: &Plan, w: &Weights, images: &Images<'_>, epilogue: Epilogue<'_>) -> Vec<f32> {
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
                let once: Vec<$type> = self.guarded(plan, w, x, images, epilogue);
                let again: Vec<$type> = self.guarded(plan, w, x, images, epilogue);
                let bits = |y: &[$type]| bytemuck::cast_slice::<$type, u8>(y).to_vec();
                assert_eq!(bits(&once), bits(&again), "{plan:?}: not the same bits twice");
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

    fn guarded<T: Pod>(
        &self,
        plan: &Plan,
        w: &Weights,
        x: FloatView<'_>,
        images: &Images<'_>,
        epilogue: Epilogue<'_>,
    ) -> Vec<T>
    where
        for<'a> FloatViewMut<'a>: From<ViewMut<'a, T>>,
    {
        let (shape, [x_layout, y_layout]) = (images.shape, images.layouts);
        let len = shape.y_len();
        let mut y = self.gpu.context().allocate::<T>(len + 2 * GUARD).unwrap();
        self.stream.fill(y.view_mut(), POISON).unwrap();
        let bytes = plan.workspace_bytes();
        let mut workspace = Workspace::new(self.gpu, self.stream, bytes).unwrap();
        let counters = bytes.min(Workspace::COUNTER_BYTES);
        self.stream.fill(workspace.view_mut().slice(counters..bytes), POISON).unwrap();
        let y_view = y.view_mut().slice(GUARD..GUARD + len).into();
        let (batch, size, workspace_view) = (shape.batch(), shape.input(), Some(&mut workspace));
        let call = Call { x, x_layout, batch, size, w, epilogue, y: y_view, y_layout, workspace: workspace_view };
        plan.run(self.gpu, self.stream, call).unwrap();
        let mut left = vec![1u8; counters];
        self.stream.download(workspace.view().slice(0..counters), &mut left).unwrap();
        assert!(left.iter().all(|&byte| byte == 0), "{plan:?}: counters left behind");
        let mut all = vec![T::zeroed(); len + 2 * GUARD];
        self.stream.download(y.view(), &mut all).unwrap();
        let intact = |guard: &[T]| bytemuck::cast_slice::<T, u8>(guard).iter().all(|&byte| byte == POISON);
        assert!(intact(&all[..GUARD]) && intact(&all[GUARD + len..]), "{plan:?}: wrote outside");
        all[GUARD..GUARD + len].to_vec()
    }
}

impl Images<'_> {
    pub fn problem(&self, w: &Weights) -> Problem {
        let ([x, y], layouts) = (self.types, self.layouts);
        Problem { format: w.format(), shape: *self.shape, x, y, layouts, packed: w.layout() }
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

/// A device that is not there: the choice needs none.
pub(super) fn caps(number: u32) -> Caps {
    let arch = Arch { number, specific: number >= 90, ptx: false };
    Caps { arch, l2_bytes: 50 << 20, cublaslt: false, ..super::products::caps("sm_90a") }
}
