//! Implicit GEMM with few channels on Hopper: `wna16_sm90.cu` with rows of windows for x.
//!
//! x is copied once, to images in which a row of a window is the channels of a pixel (`window_rows.rs`); the copy engine brings
//! those row by row, 32 columns at a time.

use super::columns::{Columns, FILLED};
use super::implicit_gemm_sm90::{self, config, config::Plan};
use super::launches::{Key, Prepared};
use super::weights::Kind;
use super::window_rows::{self, WindowRows};
use super::windows::Windows;
use super::{Call, Kernel, Problem};
use crate::conv::{Conv2dShape, Geometry, Layout2d};
use crate::cuda::driver::{Arg, FloatView, Launch, Stream, TensorMap, View};
use crate::cuda::matmul::wna16_sm90::config::Config;
use crate::cuda::matmul::{Packed, wna16_sm90};
use crate::cuda::sources::Instance;
use crate::cuda::{Caps, Gpu, Workspace};
use crate::error::{Error, Result};
use crate::format::reference::Bound;
use crate::format::{Format, QTensor};
use crate::kernel::{Activation, Reason};
use crate::layout::cuda_wna16::Atom;
use crate::tensor::Float;
use std::borrow::Cow;

const NAME: &str = "implicit_gemm_rows_sm90";

pub(super) const KERNEL: Kernel = Kernel {
    name: NAME,
    what: "wna16_sm90 on rows of windows, which the copy engine brings from a copy of x: few channels",
    serves: |arch| arch.number == 90 && arch.specific,
    instances,
    instances_of: |caps, problem, _| match Product::of(problem) {
        Ok(product) => product.instances(product.plan(caps, problem).0, problem.y),
        Err(_) => Vec::new(),
    },
    supports,
    bound: |caps, problem, _| {
        let rounds = Product::of(problem).is_ok_and(|product| product.plan(caps, problem).0.early);
        let rounded_weights = rounds.then_some(problem.x);
        Bound { rounded_weights, ..Bound::new(problem.y, problem.shape.geometry().k()) }
    },
    workspace_bytes: |caps, problem, _| match Product::of(problem) {
        Ok(product) => product.workspace_bytes(problem, &product.plan(caps, problem)),
        Err(_) => 0,
    },
    run,
};

const ALIGNMENT: usize = 256;

/// A third of the forms each for the commonest formats with one strip, and others with more: but for how the rows of x lie they
/// are those of `implicit_gemm_sm90`.
fn instances() -> Vec<Instance> {
    let atom = Atom { bits: 4, group: 0, zero: false, scale: Float::F16, factors: false };
    let forms = [
        (atom, 64, Float::F16, Activation::Relu),
        (Atom { bits: 8, ..atom }, 64, Float::F16, Activation::None),
        (
            Atom { bits: 8, zero: true, group: 32, scale: Float::BF16, factors: false },
            64,
            Float::BF16,
            Activation::None,
        ),
        (Atom { zero: true, scale: Float::BF16, ..atom }, 512, Float::F32, Activation::Silu),
    ];
    let all = forms.into_iter().enumerate().flat_map(|(first, (atom, n, out, activation))| {
        let configs = config::configs(atom, n, out).into_iter().skip(first % 3).step_by(3);
        configs.map(move |config| instance(config, atom, out, activation))
    });
    all.chain([window_rows::instance()]).collect()
}

fn instance(config: Config, atom: Atom, out: Float, activation: Activation) -> Instance {
    let mut instance = config.instance(atom, out, activation);
    instance.defines.push(format!("HB_CONV={}", window_rows::BOX));
    instance
}

/// A weight as this kernel has it, and where its columns lie, if it serves the layer and the numbers.
pub(super) fn weight<'a>(
    caps: &Caps,
    w: &'a QTensor,
    format: Format,
    geometry: &Geometry,
    x: Float,
) -> Result<Option<(Cow<'a, QTensor>, Columns)>> {
    let atom = Atom::of(format.weight, geometry.k());
    let served = (KERNEL.serves)(caps.arch) && !format.act.is_quantized() && atom.is_ok_and(|atom| atom.scale == x);
    let Some(rows) = WindowRows::of(geometry).ok().filter(|_| served) else { return Ok(None) };
    Ok(rows.weight(w, geometry)?.map(|w| (w, rows.weight_columns(geometry))))
}

/// A problem as this kernel computes it.
struct Product {
    atom: Atom,
    rows: WindowRows,
    /// Of the images of rows of windows.
    inner: Conv2dShape,
}

impl Product {
    fn of(problem: &Problem) -> std::result::Result<Self, Reason> {
        let g = problem.shape.geometry();
        let rows = WindowRows::of(g)?;
        let inner = rows.shape(&problem.shape).map_err(|why| Reason(why.to_string()))?;
        let atom = implicit_gemm_sm90::form(problem)?;
        if !rows.keeps_columns(g) && atom.group > 0 {
            return Err(Reason("fills up columns of weights with one scale a row".into()));
        }
        Ok(Self { atom, rows, inner })
    }

    fn sizes(&self) -> [usize; 3] {
        let g = self.inner.geometry();
        [self.inner.output_pixels(), g.co, g.k()]
    }

    fn plan(&self, caps: &Caps, problem: &Problem) -> Plan {
        config::plan(self.atom, self.sizes(), problem.y, caps.multiprocessors as usize, false)
    }

    fn instances(&self, config: Config, out: Float) -> Vec<Instance> {
        vec![window_rows::instance(), instance(config, self.atom, out, Activation::None)]
    }

    /// Where the images begin in the workspace.
    fn images_at((config, schedule): &Plan) -> usize {
        (Workspace::COUNTER_BYTES + schedule.parts_bytes(*config)).next_multiple_of(ALIGNMENT)
    }

    fn workspace_bytes(&self, problem: &Problem, plan: &Plan) -> usize {
        Self::images_at(plan) + self.rows.bytes(&problem.shape)
    }
}

/// All plans for a problem, of which one is chosen. Error: the kernel does not support the problem.
pub fn plans(caps: &Caps, problem: &Problem, layout: &str) -> std::result::Result<Vec<Plan>, Reason> {
    KERNEL.supports(caps, problem, layout)?;
    let product = Product::of(problem)?;
    Ok(config::plans(product.atom, product.sizes(), problem.y, caps.multiprocessors as usize))
}

/// What a plan for a problem is computed by, without an activation. Error: the kernel does not support the problem.
pub fn instances_as(plan: &Plan, problem: &Problem) -> std::result::Result<Vec<Instance>, Reason> {
    Ok(Product::of(problem)?.instances(plan.0, problem.y))
}

/// Bytes of workspace for a plan of a problem. Error: the kernel does not support the problem.
pub fn workspace_bytes_as(plan: &Plan, problem: &Problem) -> std::result::Result<usize, Reason> {
    Ok(Product::of(problem)?.workspace_bytes(problem, plan))
}

fn supports(caps: &Caps, problem: &Problem, layout: &str) -> std::result::Result<(), Reason> {
    let refuse = |why: String| Err(Reason(why));
    let product = Product::of(problem)?;
    let expected = if product.rows.keeps_columns(problem.shape.geometry()) { "cuda_wna16" } else { FILLED };
    if layout != expected {
        return refuse(format!("reads layout {expected}, the weights lie in {layout}"));
    }
    if problem.layouts[1] != Layout2d::Nhwc {
        return refuse("writes images in nhwc".into());
    }
    let [pixels, n, k] = product.sizes();
    if [pixels, n, k].iter().any(|&size| size > i32::MAX as usize) {
        return refuse("more pixels or columns than 31 bits count".into());
    }
    if pixels == 0 {
        return Ok(());
    }
    product.rows.are_made(&problem.shape)?;
    let (config, schedule) = product.plan(caps, problem);
    let shared = config.shared_bytes(product.atom, problem.y);
    if shared > caps.shared_bytes as usize {
        return refuse(format!("needs {shared} bytes of shared memory, a block has {}", caps.shared_bytes));
    }
    if !schedule.fits() {
        return refuse("more tiles than 32 bits count".into());
    }
    Ok(())
}

fn served(why: Reason) -> Error {
    Error::invalid(NAME, "a problem that it serves", why.to_string())
}

fn run(gpu: &Gpu, stream: &Stream, problem: &Problem, call: Call<'_>) -> Result<()> {
    let product = Product::of(problem).map_err(served)?;
    let plan = product.plan(&gpu.caps(), problem);
    launch(gpu, stream, problem, &call, &product, plan)
}

/// Puts a convolution into a stream with one of its [`plans`]: for measuring which is best.
///
/// Errors: those of [`super::run`], a plan of another problem.
pub fn run_as(plan: Plan, gpu: &Gpu, stream: &Stream, call: Call<'_>) -> Result<()> {
    let problem = call.problem()?;
    let product = Product::of(&problem).map_err(served)?;
    super::check(&KERNEL, gpu, &problem, &call, product.workspace_bytes(&problem, &plan))?;
    if !plans(&gpu.caps(), &problem, call.w.layout()).map_err(served)?.contains(&plan) {
        return Err(Error::invalid(NAME, format!("a plan for {problem}"), format!("{plan:?}")));
    }
    match call.y.is_empty() {
        true => Ok(()),
        false => launch(gpu, stream, &problem, &call, &product, plan),
    }
}

fn launch(gpu: &Gpu, stream: &Stream, problem: &Problem, call: &Call<'_>, product: &Product, plan: Plan) -> Result<()> {
    let refuse = |expected: &str, got: String| Err(Error::invalid(NAME, expected, got));
    let part = match &call.w.kind {
        Kind::Quantized(parts) => parts.first().filter(|_| parts.len() == 1),
        Kind::Dense(_) => None,
    };
    let Some(Packed::Wna16(w)) = part else { return refuse("weights in fragments", call.w.layout().into()) };
    let [pixels, n, k] = product.sizes();
    if w.shape() != [n, k] {
        return refuse(&format!("a weight of {n} × {k}"), format!("{:?}", w.shape()));
    }
    let x = match call.x {
        FloatView::F16(x) => x.pointer(),
        FloatView::BF16(x) => x.pointer(),
        FloatView::F32(_) => return refuse("x in a half type", "f32".into()),
    };
    let y = call.y.pointer();
    if !y.is_multiple_of(16) {
        return refuse("y that begins at a multiple of 16 bytes", format!("{y:#x}"));
    }
    let bytes = product.workspace_bytes(problem, &plan);
    let Some(workspace) = call.workspace.as_deref().map(Workspace::view) else {
        return refuse(&format!("a workspace of {bytes} bytes"), "none".into());
    };
    let images: View<'_, u8> = workspace.slice(Product::images_at(&plan)..bytes);
    product.rows.make(gpu, stream, &problem.shape, (x, problem.layouts[0]), images.pointer())?;
    let (out, activation, (config, schedule)) = (problem.y, call.epilogue.activation, plan);
    let key = Key { x: images.pointer(), shape: problem.shape, out, activation, plan };
    let prepared = call.w.launches_rows.get(key, |_| {
        let map = product.rows.map(&problem.shape, config.tokens)?;
        Ok(Prepared {
            maps: vec![TensorMap::of_windows(images, 2, &map)?],
            launch: Launch {
                shared_bytes: config.shared_bytes(product.atom, out) as u32,
                programmatic: true,
                ..Launch::linear(schedule.workers as u32, config.threads() as u32)
            },
            function: gpu.function(&instance(config, product.atom, out, activation))?,
        })
    })?;
    let [map] = prepared.maps.as_slice() else { return refuse("one map", prepared.maps.len().to_string()) };
    let bias = call.epilogue.bias.map_or(0, |bias: View<'_, f32>| bias.pointer());
    let addresses = [y, bias, workspace.pointer()];
    let arguments = implicit_gemm_sm90::Arguments {
        product: wna16_sm90::Arguments::new(w, &schedule, addresses, pixels, config.tokens),
        windows: Windows::new(&product.inner, product.rows.columns),
    };
    // SAFETY: the parameters are the source's; lengths of x, y, bias and workspace were checked by the callers, the others are
    // those of the packed weight.
    unsafe { prepared.function.launch(stream, &prepared.launch, &[Arg::new(&arguments), Arg::new(map)]) }
}
