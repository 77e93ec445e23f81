//! Launches of `wna16_sm90.cu`: 4- and 8-bit weights times half floats on Hopper.
//!
//! Products of up to 16 rows use exact codes and scale the sums of each group. With more rows, scaled weights may be rounded to
//! the type of x, once: see [`rounds_weights`].

pub mod config;

use super::gather::{self, Gather};
use super::{Call, Kernel, Packed, upload};
use crate::cuda::driver::{
    Arg, Buffer, FloatView, Function, Launch, Promotion, Stream, Swizzle, TensorMap, Tiles, View,
};
use crate::cuda::sources::{Instance, Source};
use crate::cuda::{Caps, Gpu, Workspace};
use crate::error::{Error, Result};
use crate::format::{Act, Format, QTensor, WeightFormat};
use crate::kernel::{Activation, Problem, Reason};
use crate::layout::cuda_wna16::{Atom, CudaWna16};
use crate::tensor::Float;
use bytemuck::{Pod, Zeroable};
use config::{Config, Schedule};
use half::{bf16, f16};
use std::sync::{Arc, Mutex, PoisonError};

static SOURCE: Source = Source { path: "matmul/wna16_sm90.cu", text: include_str!("wna16_sm90.cu") };

const NAME: &str = "wna16_sm90";

pub(super) const KERNEL: Kernel = Kernel {
    name: NAME,
    layout: "cuda_wna16",
    what: "wgmma or mma.sync on weights converted in registers, copies by the bulk engine",
    serves: |arch| arch.number == 90 && arch.specific,
    instances,
    supports,
    workspace_bytes,
    holds: |w| CudaWna16::holds(w).map(|_| ()).map_err(|why| Reason(why.to_string())),
    pack: |gpu, stream, w, act| Ok(Packed::Wna16(Weights::new(gpu, stream, w, act)?)),
    run,
};

/// Tiles that may be cut, for each of which the workspace has two counters.
const MOST_CUT: usize = Workspace::COUNTER_BYTES / 8;

/// Launches that a weight keeps prepared.
const KEPT: usize = 32;

/// Every configuration for the commonest format, and the others' forms of conversion.
fn instances() -> Vec<Instance> {
    let atom = Atom { bits: 4, group: 128, zero: false, scale: Float::F16 };
    let all = config::all(atom, Float::F16).into_iter().map(|c| c.instance(atom, Float::F16, Activation::None));
    let others = [
        (Atom { scale: Float::BF16, ..atom }, Float::BF16, Activation::Silu),
        (Atom { bits: 8, scale: Float::BF16, zero: true, group: 32 }, Float::F32, Activation::Gelu),
        (Atom { bits: 8, group: 0, zero: true, ..atom }, Float::F16, Activation::GeluTanh),
        (Atom { zero: true, group: 64, ..atom }, Float::F16, Activation::Relu6),
    ];
    let few = others.into_iter().flat_map(|(atom, out, activation)| {
        let shapes = [[1, 21504, 14336], [64, 4096, 4096], [1024, 21504, 14336]];
        shapes.map(|shape| config::config(atom, shape, out, 132).instance(atom, out, activation))
    });
    all.chain(few).collect()
}

/// Every configuration for a format, with y of the type of x and in f32 and without an activation; none if it is not served.
pub fn instances_of(format: WeightFormat) -> Vec<Instance> {
    // More columns than any group: groups of all columns are what rows are.
    let Ok(atom) = Atom::of(format, usize::MAX) else { return Vec::new() };
    let of = |out: Float| config::all(atom, out).into_iter().map(move |c| c.instance(atom, out, Activation::None));
    of(atom.scale).chain(of(Float::F32)).collect()
}

/// Whether a product multiplies by weights that were scaled and rounded to the type of x: each then has one more rounding of
/// that type than [`crate::format::reference::Bound`] counts.
pub fn rounds_weights(caps: &Caps, problem: &Problem) -> bool {
    let Some(atom) = problem.format.and_then(|format| Atom::of(format.weight, problem.k).ok()) else { return false };
    choose(caps, atom, [problem.m, problem.n, problem.k], problem.x).0.early
}

fn choose(caps: &Caps, atom: Atom, [m, n, k]: [usize; 3], out: Float) -> (Config, Schedule) {
    let (shape, multiprocessors) = ([m.max(1), n.max(1), k.max(1)], caps.multiprocessors.max(1) as usize);
    let config = config::config(atom, shape, out, multiprocessors);
    (config, Schedule::new(config, shape, multiprocessors))
}

fn supports(caps: &Caps, problem: &Problem) -> std::result::Result<(), Reason> {
    let refuse = |why: String| Err(Reason(why));
    let Some(format) = problem.format else { return refuse("multiplies codes, the weights are dense".into()) };
    if format.act.is_quantized() {
        return refuse("multiplies exact activations (a16, a32), the format says quantised ones".into());
    }
    let atom = Atom::of(format.weight, problem.k).map_err(|why| Reason(why.to_string()))?;
    if problem.x != atom.scale {
        return refuse(format!("multiplies x of the type of the scales, {}; x is {}", atom.scale, problem.x));
    }
    if problem.k == 0 || !problem.k.is_multiple_of(8) {
        return refuse(format!("copies rows of x in pieces of 8 elements, k is {}", problem.k));
    }
    if [problem.m, problem.n, problem.k].iter().any(|&size| size > i32::MAX as usize) {
        return refuse("more rows or columns than 31 bits count".into());
    }
    let (config, schedule) = choose(caps, atom, [problem.m, problem.n, problem.k], problem.x);
    let shared = config.shared_bytes(atom, problem.x);
    if shared > caps.shared_bytes as usize {
        return refuse(format!("needs {shared} bytes of shared memory, a block has {}", caps.shared_bytes));
    }
    if !schedule.fits() {
        return refuse("more tiles than 32 bits count".into());
    }
    Ok(())
}

/// Counters, sums of cut tiles, and room for the columns of some rows of x in another order.
fn workspace_bytes(caps: &Caps, problem: &Problem) -> usize {
    let Some(atom) = problem.format.and_then(|format| Atom::of(format.weight, problem.k).ok()) else { return 0 };
    let parts = |m: usize| {
        let (config, schedule) = choose(caps, atom, [m, problem.n, problem.k], problem.x);
        schedule.parts_bytes(config)
    };
    let rows = problem.m.min(gather::ROWS);
    let most = [problem.m, rows, problem.m % gather::ROWS].map(parts).into_iter().max().unwrap_or(0);
    Workspace::COUNTER_BYTES + most + rows * problem.k * 2
}

/// The number of a type in the source.
fn number(out: Float) -> usize {
    match out {
        Float::F16 => 0,
        Float::BF16 => 1,
        Float::F32 => 2,
    }
}

/// A weight in layout `cuda_wna16` on a device.
#[derive(Debug)]
pub struct Weights {
    n: usize,
    k: usize,
    format: WeightFormat,
    act: Act,
    atom: Atom,
    atoms: Buffer<u8>,
    rows: Buffer<u8>,
    order: Option<Buffer<u32>>,
    prepared: Mutex<Vec<(Key, Arc<Prepared>)>>,
    /// Launches of the other kernel that reads this layout.
    pub(super) sm80: super::wna16_sm80::Kept,
}

/// What a launch was prepared for.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Key {
    x: u64,
    m: usize,
    out: Float,
    activation: Activation,
    config: Option<Config>,
}

/// What is the same in every launch for a key.
#[derive(Debug)]
struct Prepared {
    schedule: Schedule,
    box_rows: usize,
    map: TensorMap,
    launch: Launch,
    function: Function,
}

impl Weights {
    pub(super) fn new(gpu: &Gpu, stream: &Stream, w: &QTensor, act: Act) -> Result<Self> {
        let packed = CudaWna16::pack(w)?;
        Ok(Self {
            n: packed.n(),
            k: packed.k(),
            format: packed.format(),
            act,
            atom: packed.atom(),
            atoms: upload(gpu, stream, packed.atoms())?,
            rows: upload(gpu, stream, packed.rows())?,
            order: packed.order().map(|order| upload(gpu, stream, order)).transpose()?,
            prepared: Mutex::default(),
            sm80: Default::default(),
        })
    }

    pub(super) fn duplicate(&self, stream: &Stream) -> Result<Self> {
        Ok(Self {
            atoms: self.atoms.duplicate(stream)?,
            rows: self.rows.duplicate(stream)?,
            order: self.order.as_ref().map(|order| order.duplicate(stream)).transpose()?,
            prepared: Mutex::default(),
            sm80: Default::default(),
            ..*self
        })
    }

    pub(super) fn shape(&self) -> [usize; 2] {
        [self.n, self.k]
    }

    pub(super) fn format(&self) -> Format {
        Format { weight: self.format, act: self.act }
    }

    /// The form of its atoms.
    pub fn atom(&self) -> Atom {
        self.atom
    }

    /// Where the atoms and the table of rows begin.
    pub(super) fn addresses(&self) -> [u64; 2] {
        [self.atoms.pointer(), self.rows.pointer()]
    }

    /// The column of x that belongs to each packed column, if not the same one.
    pub(super) fn order(&self) -> Option<&Buffer<u32>> {
        self.order.as_ref()
    }

    pub(super) fn bytes(&self) -> usize {
        self.atoms.bytes() + self.rows.bytes() + self.order.as_ref().map_or(0, Buffer::bytes)
    }

    /// The launch for a key, out of those kept, or made and kept.
    fn prepare(&self, gpu: &Gpu, key: Key, x: FloatView<'_>) -> Result<Arc<Prepared>> {
        let kept = || self.prepared.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, prepared)) = kept().iter().find(|(other, _)| *other == key) {
            return Ok(prepared.clone());
        }
        let shape = [key.m, self.n, self.k];
        let (config, schedule) = match key.config {
            None => choose(&gpu.caps(), self.atom, shape, key.out),
            Some(config) => (config, Schedule::new(config, shape, gpu.caps().multiprocessors as usize)),
        };
        let box_rows = config.tokens.min(key.m);
        let tiles = Tiles {
            shape: [key.m, self.k],
            stride: self.k,
            tile: [box_rows as u32, 64],
            swizzle: Swizzle::Bytes128,
            promotion: Promotion::Bytes256,
        };
        let prepared = Arc::new(Prepared {
            schedule,
            box_rows,
            map: TensorMap::of_matrix(x, &tiles)?,
            launch: Launch {
                grid: [(schedule.workers * config.split) as u32, 1, 1],
                cluster: [config.split as u32, 1, 1],
                shared_bytes: config.shared_bytes(self.atom, key.out) as u32,
                programmatic: true,
                ..Launch::linear(1, config.threads() as u32)
            },
            function: gpu.function(&config.instance(self.atom, key.out, key.activation))?,
        });
        let mut kept = kept();
        if kept.len() == KEPT {
            kept.remove(0);
        }
        kept.push((key, prepared.clone()));
        Ok(prepared)
    }
}

/// `Arguments` of the source.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Arguments {
    w: u64,
    rows_of_scales: u64,
    y: u64,
    bias: u64,
    parts: u64,
    counters: u64,
    m: i32,
    n: i32,
    box_bytes: i32,
    steps: i32,
    rows: i32,
    columns: i32,
    waves: i32,
    workers: i32,
    sharers: i32,
    first: i32,
    units: i32,
    padding: i32,
}

fn run(gpu: &Gpu, stream: &Stream, call: &mut Call<'_>) -> Result<()> {
    let Packed::Wna16(w) = call.w else {
        return Err(Error::invalid(NAME, "weights in layout cuda_wna16", call.w.layout()));
    };
    let y = call.y.pointer();
    let Some(workspace) = call.workspace.as_deref().map(Workspace::view) else {
        return Err(Error::invalid(NAME, "a workspace", "none"));
    };
    let Some(order) = &w.order else {
        let all = Rows { x: call.x, m: call.m, y, workspace: workspace.pointer(), config: None };
        return product(gpu, stream, w, call, all);
    };
    let problem = Problem { format: Some(w.format()), x: w.atom.scale, m: call.m, n: w.n, k: w.k };
    let end = workspace_bytes(&gpu.caps(), &problem);
    for first in (0..call.m).step_by(gather::ROWS) {
        let m = gather::ROWS.min(call.m - first);
        let sorted = workspace.slice(end - m * w.k * 2..end);
        let x = match w.atom.scale {
            Float::BF16 => FloatView::BF16(sorted.cast::<bf16>()),
            _ => FloatView::F16(sorted.cast::<f16>()),
        };
        let from = call.x.pointer() + (first * w.k * 2) as u64;
        Gather { x: from, order: order.pointer(), to: x.pointer(), rows: m, k: w.k }.run(gpu, stream)?;
        let y = y + (first * w.n * call.y.dtype().size_bytes()) as u64;
        product(gpu, stream, w, call, Rows { x, m, y, workspace: workspace.pointer(), config: None })?;
    }
    Ok(())
}

/// Puts a product into a stream with a configuration of the caller's choice, one of [`config::all`] for the weight's form and
/// y: for measuring which is best.
///
/// Errors: those of [`super::run`], columns in another order, a shape that the configuration does not cover.
pub fn run_as(config: Config, gpu: &Gpu, stream: &Stream, call: &Call<'_>) -> Result<()> {
    super::check(&KERNEL, gpu, call)?;
    let refuse = |expected: &str, got: String| Err(Error::invalid(NAME, expected, got));
    let Packed::Wna16(w) = call.w else { return refuse("weights in layout cuda_wna16", call.w.layout().into()) };
    if w.order.is_some() || !config::all(w.atom, call.y.dtype()).contains(&config) {
        return refuse("a configuration for this weight", format!("{config:?}"));
    }
    if call.y.is_empty() {
        return Ok(());
    }
    let schedule = Schedule::new(config, [call.m, w.n, w.k], gpu.caps().multiprocessors as usize);
    if !schedule.fits() || schedule.steps < config.split {
        return refuse("a shape that the configuration covers", format!("{schedule:?}"));
    }
    let needed = Workspace::COUNTER_BYTES + schedule.parts_bytes(config);
    let workspace = match call.workspace.as_deref() {
        Some(workspace) if workspace.bytes() >= needed => workspace.view().pointer(),
        other => return refuse(&format!("a workspace of {needed} bytes"), format!("{other:?}")),
    };
    let rows = Rows { x: call.x, m: call.m, y: call.y.pointer(), workspace, config: Some(config) };
    product(gpu, stream, w, call, rows)
}

/// Some rows of a product.
struct Rows<'a> {
    x: FloatView<'a>,
    m: usize,
    y: u64,
    workspace: u64,
    config: Option<Config>,
}

fn product(gpu: &Gpu, stream: &Stream, w: &Weights, call: &Call<'_>, rows: Rows<'_>) -> Result<()> {
    let Rows { x, m, y, workspace, config } = rows;
    if !y.is_multiple_of(16) {
        return Err(Error::invalid(NAME, "y that begins at a multiple of 16 bytes", format!("{y:#x}")));
    }
    let key = Key { x: x.pointer(), m, out: call.y.dtype(), activation: call.epilogue.activation, config };
    let prepared = w.prepare(gpu, key, x)?;
    let Schedule { steps, rows, columns, waves, workers, sharers, cut } = prepared.schedule;
    let arguments = Arguments {
        w: w.atoms.pointer(),
        rows_of_scales: w.rows.pointer(),
        y,
        bias: call.epilogue.bias.map_or(0, |bias: View<'_, f32>| bias.pointer()),
        parts: workspace + Workspace::COUNTER_BYTES as u64,
        counters: workspace,
        m: m as i32,
        n: w.n as i32,
        box_bytes: (prepared.box_rows * 128) as i32,
        steps: steps as i32,
        rows: rows as i32,
        columns: columns as i32,
        waves: waves as i32,
        workers: workers as i32,
        sharers: sharers as i32,
        first: (waves * workers) as i32,
        units: (cut * steps) as i32,
        padding: 0,
    };
    let args = [Arg::new(&arguments), Arg::new(&prepared.map)];
    // SAFETY: the parameters are the source's; lengths of x, y, bias and workspace were checked by `run_with`, the others
    // are those of the packed weight.
    unsafe { prepared.function.launch(stream, &prepared.launch, &args) }
}
