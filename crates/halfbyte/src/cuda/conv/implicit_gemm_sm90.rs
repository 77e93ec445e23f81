//! Implicit GEMM on Hopper: `wna16_sm90.cu` with windows on images for x, which the copy engine brings position by position.
//!
//! Rows of the product are output pixels, so that x and y lie pixel by pixel, and k is no longer in memory than in
//! the weight. Each group of the convolution is a launch of its own.

pub mod config;

use super::launches::{Key, Prepared};
use super::weights::Kind;
use super::windows::{self, Windows};
use super::{Call, Kernel, Problem};
use crate::conv::{Conv2dShape, Geometry, Layout2d};
use crate::cuda::driver::{Arg, FloatView, Launch, Stream, Swizzle, TensorMap, View, Windows as Map};
use crate::cuda::matmul::wna16_sm90::config::Config;
use crate::cuda::matmul::{Packed, Wna16Weights, wna16_sm90};
use crate::cuda::sources::Instance;
use crate::cuda::{Caps, Gpu, Workspace};
use crate::error::{Error, Result};
use crate::format::reference::Bound;
use crate::format::{Format, WeightFormat};
use crate::kernel::{Activation, Reason};
use crate::layout::cuda_wna16::Atom;
use crate::tensor::Float;
use bytemuck::{Pod, Zeroable};
use config::Plan;

const NAME: &str = "implicit_gemm_sm90";

/// Of the weights that it reads.
const LAYOUT: &str = "cuda_wna16";

pub(super) const KERNEL: Kernel = Kernel {
    name: NAME,
    what: "wna16_sm90 on windows of images, which the copy engine brings: no matrix of patches",
    serves: |arch| arch.number == 90 && arch.specific,
    instances,
    instances_of: |caps, problem, _| match form(problem) {
        Ok(atom) => vec![instance(plan(caps, atom, problem).0, atom, problem.y, Activation::None)],
        Err(_) => Vec::new(),
    },
    supports,
    bound: |caps, problem, _| {
        let rounds = form(problem).is_ok_and(|atom| plan(caps, atom, problem).0.early);
        let rounded_weights = rounds.then_some(problem.x);
        Bound { rounded_weights, ..Bound::new(problem.y, problem.shape.geometry().k()) }
    },
    workspace_bytes: |caps, problem, _| match form(problem) {
        Ok(atom) => workspace_bytes_as(&plan(caps, atom, problem)),
        Err(_) => 0,
    },
    run,
};

/// Channels of a box of x.
const BOX: usize = 64;

/// The widths of tiles for the commonest formats, with one strip and more.
fn instances() -> Vec<Instance> {
    let atom = Atom { bits: 4, group: 0, zero: false, scale: Float::F16, factors: false };
    let forms = [
        (atom, Float::F16, Activation::Relu),
        (Atom { bits: 8, zero: true, scale: Float::BF16, ..atom }, Float::BF16, Activation::None),
        (Atom { bits: 8, zero: true, group: 32, ..atom }, Float::F16, Activation::Gelu),
        (Atom { group: 64, zero: true, scale: Float::BF16, ..atom }, Float::BF16, Activation::Silu),
        (Atom { bits: 8, group: 128, ..atom }, Float::F32, Activation::None),
    ];
    let all = forms.into_iter().flat_map(|(atom, out, activation)| {
        let configs = [64, 512].into_iter().flat_map(move |n| config::configs(atom, n, out));
        configs.map(move |config| instance(config, atom, out, activation))
    });
    all.collect()
}

/// Every configuration for a format that is chosen from, with y of the type of x and in f32 and without an activation; none if it
/// is not served.
pub fn every_instance(format: WeightFormat) -> Vec<Instance> {
    // More columns than any group: groups of all columns are what rows are.
    let Ok(atom) = Atom::of(format, usize::MAX) else { return Vec::new() };
    let shapes = [atom.scale, Float::F32].into_iter().flat_map(|out| [(64, out), (512, out)]);
    let all = shapes.flat_map(|(n, out)| config::configs(atom, n, out).into_iter().map(move |config| (config, out)));
    all.map(|(config, out)| instance(config, atom, out, Activation::None)).collect()
}

fn instance(config: Config, atom: Atom, out: Float, activation: Activation) -> Instance {
    let mut instance = config.instance(atom, out, activation);
    instance.defines.push("HB_CONV=64".into());
    instance
}

/// Whether weights are packed for this kernel, if the layout holds their numbers.
pub(super) fn packs(caps: &Caps, format: Format, geometry: &Geometry, x: Float) -> bool {
    let atom = Atom::of(format.weight, geometry.k());
    (KERNEL.serves)(caps.arch)
        && !format.act.is_quantized()
        && atom.is_ok_and(|atom| atom.scale == x)
        && windows::taken(geometry, BOX).is_ok()
}

/// The form of atoms, or why there is none.
pub(super) fn form(problem: &Problem) -> std::result::Result<Atom, Reason> {
    let g = problem.shape.geometry();
    let Some(format) = problem.format else { return Err(Reason("multiplies codes, the weights are dense".into())) };
    if format.act.is_quantized() {
        return Err(Reason("multiplies exact activations (a16, a32), the format says quantised ones".into()));
    }
    let atom = Atom::of(format.weight, g.k()).map_err(|why| Reason(why.to_string()))?;
    if problem.x != atom.scale {
        let (scale, x) = (atom.scale, problem.x);
        return Err(Reason(format!("multiplies x of the type of the scales, {scale}; x is {x}")));
    }
    Ok(atom)
}

fn plan(caps: &Caps, atom: Atom, problem: &Problem) -> Plan {
    let once = problem.shape.geometry().kernel == [1, 1];
    config::plan(atom, product_of(&problem.shape), problem.y, caps.multiprocessors as usize, once)
}

/// Rows, outputs and columns of a group's product.
fn product_of(shape: &Conv2dShape) -> [usize; 3] {
    [shape.output_pixels(), shape.geometry().outputs(), shape.geometry().k()]
}

/// All plans for a problem, of which one is chosen. Error: the kernel does not support the problem.
pub fn plans(caps: &Caps, problem: &Problem) -> std::result::Result<Vec<Plan>, Reason> {
    KERNEL.supports(caps, problem, LAYOUT)?;
    let atom = form(problem)?;
    Ok(config::plans(atom, product_of(&problem.shape), problem.y, caps.multiprocessors as usize))
}

/// What a plan for a problem is computed by, without an activation. Error: the kernel does not support the problem.
pub fn instance_as(plan: &Plan, problem: &Problem) -> std::result::Result<Instance, Reason> {
    Ok(instance(plan.0, form(problem)?, problem.y, Activation::None))
}

/// Bytes of workspace for a plan.
pub fn workspace_bytes_as((config, schedule): &Plan) -> usize {
    Workspace::COUNTER_BYTES + schedule.parts_bytes(*config)
}

fn supports(caps: &Caps, problem: &Problem, layout: &str) -> std::result::Result<(), Reason> {
    let refuse = |why: String| Err(Reason(why));
    if layout != LAYOUT {
        return refuse(format!("reads layout {LAYOUT}, the weights lie in {layout}"));
    }
    if problem.layouts != [Layout2d::Nhwc; 2] {
        return refuse("reads and writes images in nhwc".into());
    }
    let atom = form(problem)?;
    let g = problem.shape.geometry();
    windows::taken(g, BOX)?;
    let sizes = [problem.shape.output_pixels(), problem.shape.x_len(), g.co, g.k()];
    if sizes.iter().any(|&size| size > i32::MAX as usize) {
        return refuse("more pixels or columns than 31 bits count".into());
    }
    if problem.shape.output_pixels() == 0 {
        return Ok(());
    }
    let (config, schedule) = plan(caps, atom, problem);
    let shared = config.shared_bytes(atom, problem.y);
    if shared > caps.shared_bytes as usize {
        return refuse(format!("needs {shared} bytes of shared memory, a block has {}", caps.shared_bytes));
    }
    if !schedule.fits() {
        return refuse("more tiles than 32 bits count".into());
    }
    Ok(())
}

/// `Arguments` of the source, with its windows.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Arguments {
    pub product: wna16_sm90::Arguments,
    pub windows: Windows,
}

fn run(gpu: &Gpu, stream: &Stream, problem: &Problem, call: Call<'_>) -> Result<()> {
    let atom = form(problem).map_err(|why| Error::invalid(NAME, "a problem that it serves", why.to_string()))?;
    launch(gpu, stream, problem, &call, (atom, plan(&gpu.caps(), atom, problem)))
}

/// Puts a convolution into a stream with one of its [`plans`]: for measuring which is best. Those that scale early round weights to
/// the type of x.
///
/// Errors: those of [`super::run`], a plan of another problem.
pub fn run_as(plan: Plan, gpu: &Gpu, stream: &Stream, call: Call<'_>) -> Result<()> {
    let problem = call.problem()?;
    super::check(&KERNEL, gpu, &problem, &call, workspace_bytes_as(&plan))?;
    let refuse = |why: Reason| Error::invalid(NAME, "a problem that it serves", why.to_string());
    if !plans(&gpu.caps(), &problem).map_err(refuse)?.contains(&plan) {
        return Err(Error::invalid(NAME, format!("a plan for {problem}"), format!("{plan:?}")));
    }
    match call.y.is_empty() {
        true => Ok(()),
        false => launch(gpu, stream, &problem, &call, (form(&problem).map_err(refuse)?, plan)),
    }
}

fn fragments(part: &Packed) -> Option<&Wna16Weights> {
    if let Packed::Wna16(w) = part { Some(w) } else { None }
}

fn launch(gpu: &Gpu, stream: &Stream, problem: &Problem, call: &Call<'_>, (atom, plan): (Atom, Plan)) -> Result<()> {
    let why = |why: Reason| Error::invalid(NAME, "a problem that it serves", why.to_string());
    let shape = windows::flat(problem.shape).map_err(why)?;
    let g = *shape.geometry();
    let refuse = |expected: &str, got: String| Err(Error::invalid(NAME, expected, got));
    let parts: Option<Vec<&Wna16Weights>> = match &call.w.kind {
        Kind::Quantized(parts) if parts.len() == g.groups => parts.iter().map(fragments).collect(),
        _ => None,
    };
    let Some(parts) = parts else { return refuse("weights in fragments, group by group", call.w.layout().into()) };
    let x: View<'_, u8> = match call.x {
        FloatView::F16(x) => x.cast(),
        FloatView::BF16(x) => x.cast(),
        FloatView::F32(_) => return refuse("x in a half type", "f32".into()),
    };
    let y = call.y.pointer();
    if !x.pointer().is_multiple_of(16) || !y.is_multiple_of(16) {
        return refuse("x and y that begin at multiples of 16 bytes", format!("{:#x} and {y:#x}", x.pointer()));
    }
    let Some(workspace) = call.workspace.as_deref().map(|workspace| workspace.view().pointer()) else {
        return refuse("a workspace", "none".into());
    };
    let (out, activation) = (problem.y, call.epilogue.activation);
    let (config, schedule) = plan;
    let prepared = call.w.launches.get(Key { x: x.pointer(), shape, out, activation, plan }, |_| {
        let windows = Map {
            shape: [shape.batch(), shape.input()[0], shape.input()[1], g.channels()],
            ..windows::map(&shape, [config.tokens, BOX], Swizzle::Bytes128)
        };
        let map = |group: usize| TensorMap::of_windows(x.slice(group * g.channels() * 2..x.len()), 2, &windows);
        Ok(Prepared {
            maps: (0..g.groups).map(map).collect::<Result<_>>()?,
            launch: Launch {
                shared_bytes: config.shared_bytes(atom, out) as u32,
                programmatic: true,
                ..Launch::linear(schedule.workers as u32, config.threads() as u32)
            },
            function: gpu.function(&instance(config, atom, out, activation))?,
        })
    })?;
    for (group, (w, map)) in parts.into_iter().zip(&prepared.maps).enumerate() {
        let first = group * g.outputs();
        let bias = call.epilogue.bias.map_or(0, |bias: View<'_, f32>| bias.pointer() + 4 * first as u64);
        let y = y + (first * out.size_bytes()) as u64;
        let product =
            wna16_sm90::Arguments::new(w, &schedule, [y, bias, workspace], shape.output_pixels(), config.tokens);
        let arguments = Arguments { product, windows: Windows::new(&shape, g.channels()) };
        let args = [Arg::new(&arguments), Arg::new(map)];
        // SAFETY: the parameters are the source's; lengths of x, y, bias and workspace were checked by the callers, the others
        // are those of the packed weight.
        unsafe { prepared.function.launch(stream, &prepared.launch, &args) }?;
    }
    Ok(())
}
