//! Implicit GEMM with quantised activations on Hopper: `wna8_sm90.cu` with windows on images of codes, which the copy engine
//! brings position by position, and with windows on the scales of their pixels.
//!
//! Every pixel is quantised once, before: a scale for the channels that share one in a weight, so that it has the same codes in
//! every window. Each position and group of channels is a group of the product. Each group of the convolution is a launch of
//! its own.

pub mod config;

use super::columns::{Columns, FILLED};
use super::launches::{Key, Prepared};
use super::weights::Kind;
use super::windows::{self, Windows};
use super::{Call, Kernel, Problem};
use crate::conv::{Conv2dShape, Geometry, Layout2d};
use crate::cuda::driver::{Arg, Launch, Stream, Swizzle, TensorMap, View, Windows as Map};
use crate::cuda::matmul::quantize_activations;
use crate::cuda::matmul::wna8_sm90::{self, MOST_K, config::Config, config::Terms};
use crate::cuda::matmul::{Packed, QuantizedForm};
use crate::cuda::sources::Instance;
use crate::cuda::{Caps, Gpu, Workspace};
use crate::error::{Error, Result};
use crate::format::reference::Bound;
use crate::format::{Act, Format, Group, QTensor, WeightFormat};
use crate::kernel::{Activation, Reason};
use crate::layout::cuda_wna16::Atom;
use crate::tensor::Float;
use bytemuck::{Pod, Zeroable};
use config::Plan;
use std::borrow::Cow;

const NAME: &str = "implicit_gemm_a8_sm90";

/// Of the weights that it reads.
const LAYOUT: &str = "cuda_wna16";

pub(super) const KERNEL: Kernel = Kernel {
    name: NAME,
    what: "wna8_sm90 on windows of images quantised before, which the copy engine brings: no matrix of patches",
    serves: |arch| arch.number == 90 && arch.specific,
    instances,
    instances_of: |caps, problem, _| match Product::of(problem) {
        Ok(product) => product.instances(product.plan(caps, problem).0, problem.y, Activation::None),
        Err(_) => Vec::new(),
    },
    supports,
    bound: |_, problem, _| Bound::new(problem.y, problem.shape.geometry().k()),
    workspace_bytes: |caps, problem, _| match Product::of(problem) {
        Ok(product) => Room::new(&product, &product.plan(caps, problem)).bytes,
        Err(_) => 0,
    },
    run,
};

/// Channels of a box of codes.
const BOX: usize = 64;

/// A pixel's terms of a piece as the copy engine counts them: elements of so many bytes.
const TERM_BYTES: usize = 2;
const TERM_ELEMENTS: usize = 16 / TERM_BYTES;

/// Both widths of tiles for the commonest formats, and the other terms.
fn instances() -> Vec<Instance> {
    let atom = Atom { bits: 4, group: 128, zero: false, scale: Float::F16, factors: false };
    let plain = Terms { sums: false, offsets: false, pixels: true };
    let all = Terms { sums: true, offsets: true, ..plain };
    let forms = [
        (atom, plain, Float::F16, Activation::Relu),
        (Atom { bits: 8, group: 64, ..atom }, plain, Float::F16, Activation::None),
        (Atom { bits: 8, scale: Float::BF16, ..atom }, Terms { offsets: true, ..plain }, Float::BF16, Activation::Silu),
        (Atom { group: 32, ..atom }, plain, Float::F32, Activation::None),
        (Atom { zero: true, group: 32, ..atom }, all, Float::F32, Activation::None),
        (Atom { bits: 8, zero: true, ..atom }, all, Float::F16, Activation::Gelu),
        (Atom { bits: 8, zero: true, group: 64, ..atom }, all, Float::F16, Activation::None),
    ];
    let all = forms.into_iter().flat_map(|(atom, terms, out, activation)| {
        let configs = config::configs(atom, terms, 64, out).into_iter();
        configs.map(move |config| instance(config, atom, terms, out, activation))
    });
    all.collect()
}

fn instance(config: Config, atom: Atom, terms: Terms, out: Float, activation: Activation) -> Instance {
    let mut instance = config.instance(atom, terms, out, activation);
    instance.defines.push("HB_CONV=64".into());
    instance
}

/// A weight as this kernel has it, and where its columns lie, if it serves the layer and the numbers.
pub(super) fn weight<'a>(
    caps: &Caps,
    w: &'a QTensor,
    format: Format,
    geometry: &Geometry,
) -> Result<Option<(Cow<'a, QTensor>, Columns)>> {
    let form = Form::of(format, geometry).ok().filter(|_| (KERNEL.serves)(caps.arch));
    let Some(form) = form.filter(|form| windows::taken(&form.inner, BOX).is_ok()) else { return Ok(None) };
    let columns = Columns::of(&form.inner);
    if columns == Columns::of(geometry) {
        return Ok(Some((w.express(form.weight)?, columns)));
    }
    let by_position = WeightFormat { group: Group::Size(geometry.channels()), ..form.weight };
    let filled = columns.fill(w.express(by_position)?.as_ref(), geometry, form.weight.group)?;
    Ok(filled.map(|w| (Cow::Owned(w), columns)))
}

/// What the numbers of a layer are.
#[derive(Clone, Copy)]
struct Form {
    atom: Atom,
    terms: Terms,
    /// Channels of x that share a scale, and with those that are filled up.
    share: usize,
    columns: usize,
    /// That of weights: a scale for each position.
    weight: WeightFormat,
    /// The layer with its channels filled up to boxes.
    inner: Geometry,
}

impl Form {
    /// That of a layer, or why there is none.
    fn of(format: Format, geometry: &Geometry) -> std::result::Result<Self, Reason> {
        let refuse = |why: &str| Err(Reason(why.into()));
        if !format.act.is_quantized() {
            return refuse("multiplies quantised activations (a8), the format says exact ones");
        }
        let why = |why: Error| Reason(why.to_string());
        let (share, channels) = (geometry.scale_channels(format.weight.group).map_err(why)?, geometry.channels());
        // One scale a position is one of what is filled up, too.
        let fills = geometry.groups == 1 && share == channels && !channels.is_multiple_of(BOX);
        let inner = match fills {
            true => Geometry { ci: channels.next_multiple_of(BOX), ..*geometry },
            false => *geometry,
        };
        let columns = if fills { inner.ci } else { share };
        let weight = WeightFormat { group: Group::Size(columns), ..format.weight };
        let atom = Atom::of(weight, inner.k()).map_err(why)?;
        if atom.group == 0 {
            return refuse("multiplies weights of several positions or groups of channels");
        }
        let terms = Terms { sums: atom.zero, offsets: format.act == Act::A8Asym, pixels: true };
        Ok(Self { atom, terms, share, columns, weight, inner })
    }

    /// Columns that each set of a pixel's terms is for, if so many share a scale: zero points need the sums of an atom's groups,
    /// which may be parts of those.
    fn piece(&self, share: usize) -> usize {
        if self.terms.sums { self.atom.group } else { share }
    }
}

/// A problem as this kernel computes it.
struct Product {
    form: Form,
    /// The problem's, with channels filled up.
    inner: Conv2dShape,
    /// Of the pixels of x.
    x: QuantizedForm,
}

impl Product {
    fn of(problem: &Problem) -> std::result::Result<Self, Reason> {
        let (shape, g) = (&problem.shape, problem.shape.geometry());
        let Some(format) = problem.format else { return Err(Reason("multiplies codes, the weights are dense".into())) };
        let form = Form::of(format, g)?;
        let inner =
            Conv2dShape::new(form.inner, shape.batch(), shape.input()).map_err(|why| Reason(why.to_string()))?;
        let x = QuantizedForm {
            m: shape.input_pixels(),
            k: g.ci,
            group: form.share,
            piece: form.piece(form.share),
            sums: form.terms.sums,
            offsets: form.terms.offsets,
            pixels: true,
        };
        Ok(Self { form, inner, x })
    }

    /// The terms of a pixel's channels in a group of the convolution, filled up.
    fn of_group(&self) -> QuantizedForm {
        QuantizedForm { k: self.form.inner.channels(), piece: self.form.piece(self.form.columns), ..self.x }
    }

    fn plan(&self, caps: &Caps, problem: &Problem) -> Plan {
        let Form { atom, terms, .. } = self.form;
        config::plan(atom, terms, sizes(&self.inner), problem.y, caps.multiprocessors as usize)
    }

    fn instances(&self, config: Config, out: Float, activation: Activation) -> Vec<Instance> {
        let Form { atom, terms, .. } = self.form;
        vec![quantize_activations::instance(self.x), instance(config, atom, terms, out, activation)]
    }

    /// A launch, with maps of codes and of terms for each group; both are the images' from the first pixel on.
    fn prepared(&self, gpu: &Gpu, key: &Key<Plan>, [codes, terms]: [View<'_, u8>; 2]) -> Result<Prepared> {
        let (shape, (config, schedule)) = (&self.inner, key.plan);
        let (g, [h, w]) = (shape.geometry(), shape.input());
        let of_codes = Map {
            shape: [shape.batch(), h, w, g.channels()],
            ..windows::map(shape, [config.tokens, BOX], Swizzle::Bytes64)
        };
        let of_group = self.of_group().pieces() * TERM_ELEMENTS;
        let of_terms = Map {
            shape: [shape.batch(), h, w, of_group],
            pixel: of_group * g.groups,
            ..windows::map(shape, [config.tokens, TERM_ELEMENTS], Swizzle::None)
        };
        let mut maps = Vec::with_capacity(2 * g.groups);
        for group in 0..g.groups {
            let (codes_at, terms_at) = (group * g.channels(), group * of_group * TERM_BYTES);
            maps.push(TensorMap::of_windows(codes.slice(codes_at..codes.len()), 1, &of_codes)?);
            maps.push(TensorMap::of_windows(terms.slice(terms_at..terms.len()), TERM_BYTES, &of_terms)?);
        }
        let Form { atom, terms, .. } = self.form;
        Ok(Prepared {
            maps,
            launch: Launch {
                shared_bytes: config.shared_bytes(atom, terms, key.out) as u32,
                programmatic: true,
                ..Launch::linear(schedule.workers as u32, config.threads() as u32)
            },
            function: gpu.function(&instance(config, atom, terms, key.out, key.activation))?,
        })
    }
}

/// Rows, outputs and columns of a group's product.
fn sizes(shape: &Conv2dShape) -> [usize; 3] {
    [shape.output_pixels(), shape.geometry().outputs(), shape.geometry().k()]
}

/// All plans for a problem, of which one is chosen. Error: the kernel does not support the problem.
pub fn plans(caps: &Caps, problem: &Problem, layout: &str) -> std::result::Result<Vec<Plan>, Reason> {
    KERNEL.supports(caps, problem, layout)?;
    let Product { form: Form { atom, terms, .. }, inner, .. } = Product::of(problem)?;
    Ok(config::plans(atom, terms, sizes(&inner), problem.y, caps.multiprocessors as usize))
}

/// What a plan for a problem is computed by, without an activation. Error: the kernel does not support the problem.
pub fn instances_as(plan: &Plan, problem: &Problem) -> std::result::Result<Vec<Instance>, Reason> {
    Ok(Product::of(problem)?.instances(plan.0, problem.y, Activation::None))
}

/// Bytes of workspace for a plan of a problem. Error: the kernel does not support the problem.
pub fn workspace_bytes_as(plan: &Plan, problem: &Problem) -> std::result::Result<usize, Reason> {
    Ok(Room::new(&Product::of(problem)?, plan).bytes)
}

/// Where things lie in the workspace: counters, sums of cut tiles, codes of x, terms of x.
struct Room {
    codes: usize,
    terms: usize,
    bytes: usize,
}

impl Room {
    fn new(product: &Product, (config, schedule): &Plan) -> Self {
        const ALIGNMENT: usize = 256;
        let codes = (Workspace::COUNTER_BYTES + config.parts_bytes(schedule)).next_multiple_of(ALIGNMENT);
        let terms = (codes + product.x.codes_bytes()).next_multiple_of(ALIGNMENT);
        Self { codes, terms, bytes: terms + product.x.terms_bytes() }
    }
}

fn supports(caps: &Caps, problem: &Problem, layout: &str) -> std::result::Result<(), Reason> {
    let refuse = |why: String| Err(Reason(why));
    let product = Product::of(problem)?;
    let g = product.inner.geometry();
    let expected = if g == problem.shape.geometry() { LAYOUT } else { FILLED };
    if layout != expected {
        return refuse(format!("reads layout {expected}, the weights lie in {layout}"));
    }
    if problem.layouts != [Layout2d::Nhwc; 2] {
        return refuse("reads and writes images in nhwc".into());
    }
    windows::taken(g, BOX)?;
    let sizes = [problem.shape.output_pixels(), product.inner.x_len(), g.co];
    if sizes.iter().any(|&size| size > i32::MAX as usize) || g.k() > MOST_K {
        return refuse(format!("more pixels than 31 bits count, or more than {MOST_K} columns"));
    }
    if problem.shape.output_pixels() == 0 {
        return Ok(());
    }
    let (config, schedule) = product.plan(caps, problem);
    let shared = config.shared_bytes(product.form.atom, product.form.terms, problem.y);
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
struct Arguments {
    product: wna8_sm90::Arguments,
    windows: Windows,
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
    super::check(&KERNEL, gpu, &problem, &call, Room::new(&product, &plan).bytes)?;
    if !plans(&gpu.caps(), &problem, call.w.layout()).map_err(served)?.contains(&plan) {
        return Err(Error::invalid(NAME, format!("a plan for {problem}"), format!("{plan:?}")));
    }
    match call.y.is_empty() {
        true => Ok(()),
        false => launch(gpu, stream, &problem, &call, &product, plan),
    }
}

fn launch(gpu: &Gpu, stream: &Stream, problem: &Problem, call: &Call<'_>, product: &Product, plan: Plan) -> Result<()> {
    let (shape, g) = (problem.shape, product.inner.geometry());
    let refuse = |expected: &str, got: String| Err(Error::invalid(NAME, expected, got));
    let parts: &[Packed] = match &call.w.kind {
        Kind::Quantized(parts) if parts.len() == g.groups => parts,
        _ => return refuse("weights in fragments, group by group", call.w.layout().into()),
    };
    let y = call.y.pointer();
    if !y.is_multiple_of(16) {
        return refuse("y that begins at a multiple of 16 bytes", format!("{y:#x}"));
    }
    let room = Room::new(product, &plan);
    let Some(workspace) = call.workspace.as_deref().map(Workspace::view) else {
        return refuse(&format!("a workspace of {} bytes", room.bytes), "none".into());
    };
    let codes = workspace.slice(room.codes..room.codes + product.x.codes_bytes());
    let terms = workspace.slice(room.terms..room.bytes);
    quantize_activations::run(gpu, stream, product.x, call.x, 0, [codes.pointer(), terms.pointer()])?;
    let (out, activation) = (problem.y, call.epilogue.activation);
    // Where the codes begin, the terms are at a place that shape and plan tell.
    let key = Key { x: codes.pointer(), shape, out, activation, plan };
    let prepared = call.w.launches_a8.get(key, |key| product.prepared(gpu, key, [codes, terms]))?;
    let x = product.of_group();
    let (config, schedule) = &plan;
    for (group, (part, maps)) in parts.iter().zip(prepared.maps.chunks_exact(2)).enumerate() {
        let Packed::Wna16(w) = part else { return refuse("weights in fragments", part.layout().into()) };
        if w.shape() != [g.outputs(), g.k()] {
            return refuse(&format!("a weight of {} × {}", g.outputs(), g.k()), format!("{:?}", w.shape()));
        }
        let first = group * g.outputs();
        let bias = call.epilogue.bias.map_or(0, |bias: View<'_, f32>| bias.pointer() + 4 * first as u64);
        let addresses = [terms.pointer(), y + (first * out.size_bytes()) as u64, bias, workspace.pointer()];
        let pixels = (shape.output_pixels(), config.tokens);
        let product_of = wna8_sm90::Arguments::new(w, schedule, addresses, pixels, &x);
        let arguments = Arguments { product: product_of, windows: Windows::new(&product.inner, g.channels()) };
        let args = [Arg::new(&arguments), Arg::new(&maps[0]), Arg::new(&maps[1])];
        // SAFETY: the parameters are the source's; lengths of x, y, bias and workspace were checked by the callers, the others
        // are those of the packed weight.
        unsafe { prepared.function.launch(stream, &prepared.launch, &args) }?;
    }
    Ok(())
}
