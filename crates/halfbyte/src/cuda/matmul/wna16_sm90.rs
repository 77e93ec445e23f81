//! Launches of `wna16_sm90.cu`: 4- and 8-bit weights times half floats on Hopper.
//!
//! Products use exact codes and scale the sums of each group. Those of more than 128 rows, with y a half float, use weights
//! that were scaled and rounded to the type of x, once.

mod candidates;
pub mod config;

pub use candidates::{candidates, compiles};

use super::gather;
use super::wna16::{self, Rows, Weights};
use super::{Call, Kernel, Packed};
use crate::cuda::driver::{Arg, FloatView, Function, Launch, Promotion, Stream, Swizzle, TensorMap, Tiles, View};
use crate::cuda::kept::Kept;
use crate::cuda::sources::{Instance, Source};
use crate::cuda::{Caps, Gpu, Workspace};
use crate::error::{Error, Result};
use crate::format::WeightFormat;
use crate::kernel::{Activation, Problem, Reason};
use crate::layout::cuda_wna16::Atom;
use crate::tensor::Float;
use bytemuck::{Pod, Zeroable};
use config::{Config, Schedule};

static SOURCE: Source = Source { path: "matmul/wna16_sm90.cu", text: include_str!("wna16_sm90.cu") };

const NAME: &str = "wna16_sm90";

pub(super) const KERNEL: Kernel = Kernel {
    name: NAME,
    layout: wna16::LAYOUT,
    what: "wgmma or mma.sync on weights converted in registers, copies by the bulk engine",
    packs: true,
    batch_invariant: true,
    serves: |arch| arch.number == 90 && arch.specific,
    instances,
    instances_of: |caps, problem| {
        let Ok(atom) = wna16::atom(problem) else { return Vec::new() };
        let (config, _) = Choice::Fast.make(caps, atom, [problem.m, problem.n, problem.k], problem.y);
        vec![config.instance(atom, problem.y, Activation::None), gather::instance()]
    },
    rounds_weights: |caps, problem| {
        let shape = [problem.m, problem.n, problem.k];
        wna16::atom(problem).is_ok_and(|atom| Choice::Fast.make(caps, atom, shape, problem.y).0.early)
    },
    supports,
    workspace_bytes,
    holds: wna16::holds,
    pack: |packer, whole, parts, act| Ok(Packed::Wna16(Weights::new(packer, whole, parts, act)?)),
    run,
};

/// Every configuration for the commonest format, and the others' forms of conversion.
fn instances() -> Vec<Instance> {
    let atom = Atom { bits: 4, group: 128, zero: false, scale: Float::F16, factors: false };
    let all = config::all(atom, Float::F16).into_iter().map(|c| c.instance(atom, Float::F16, Activation::None));
    let others = [
        (Atom { scale: Float::BF16, ..atom }, Float::BF16, Activation::Silu),
        (Atom { bits: 8, scale: Float::BF16, zero: true, group: 32, factors: false }, Float::F32, Activation::Gelu),
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
pub fn every_instance(format: WeightFormat) -> Vec<Instance> {
    // More columns than any group: groups of all columns are what rows are.
    let Ok(atom) = Atom::of(format, usize::MAX) else { return Vec::new() };
    let of = |out: Float| config::all(atom, out).into_iter().map(move |c| c.instance(atom, out, Activation::None));
    of(atom.scale).chain(of(Float::F32)).collect()
}

/// How a launch comes to its configuration.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Choice {
    /// The fastest.
    Fast,
    /// One that sums in the same order whatever the number of rows.
    BatchInvariant,
    /// The caller's.
    Given(Config),
}

impl Choice {
    fn make(self, caps: &Caps, atom: Atom, [m, n, k]: [usize; 3], out: Float) -> (Config, Schedule) {
        let (shape, multiprocessors) = ([m.max(1), n.max(1), k.max(1)], caps.multiprocessors.max(1) as usize);
        let config = match self {
            Choice::Fast => config::config(atom, shape, out, multiprocessors),
            Choice::BatchInvariant => config::batch_invariant(atom, shape, out, multiprocessors),
            Choice::Given(config) => config,
        };
        let schedule = match self {
            Choice::BatchInvariant => Schedule::whole(config, shape),
            _ => Schedule::new(config, shape, multiprocessors),
        };
        (config, schedule)
    }
}

fn supports(caps: &Caps, problem: &Problem) -> std::result::Result<(), Reason> {
    let atom = wna16::atom(problem)?;
    let refuse = |why: String| Err(Reason(why));
    if problem.x != atom.scale {
        return refuse(format!("multiplies x of the type of the scales, {}; x is {}", atom.scale, problem.x));
    }
    for choice in [Choice::Fast, Choice::BatchInvariant] {
        let (config, schedule) = choice.make(caps, atom, [problem.m, problem.n, problem.k], problem.y);
        let shared = config.shared_bytes(atom, problem.y);
        if shared > caps.shared_bytes as usize {
            return refuse(format!("needs {shared} bytes of shared memory, a block has {}", caps.shared_bytes));
        }
        if !schedule.fits() {
            return refuse("more tiles than 32 bits count".into());
        }
    }
    Ok(())
}

/// Counters, sums of cut tiles, and room for a copy of some rows of x.
fn workspace_bytes(caps: &Caps, problem: &Problem) -> usize {
    let Ok(atom) = wna16::atom(problem) else { return 0 };
    let parts = |m: usize| {
        let (config, schedule) = Choice::Fast.make(caps, atom, [m, problem.n, problem.k], problem.y);
        schedule.parts_bytes(config)
    };
    wna16::workspace_bytes(problem, parts)
}

/// What a launch was prepared for.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Key {
    x: u64,
    pitch: usize,
    m: usize,
    out: Float,
    activation: Activation,
    choice: Choice,
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

impl Prepared {
    fn new(gpu: &Gpu, w: &Weights, key: &Key, x: FloatView<'_>) -> Result<Self> {
        let ([n, k], atom) = (w.shape(), w.atom());
        let (config, schedule) = key.choice.make(&gpu.caps(), atom, [key.m, n, k], key.out);
        let box_rows = config.tokens.min(key.m);
        let tiles = Tiles {
            shape: [key.m, k],
            stride: key.pitch,
            tile: [box_rows as u32, 64],
            swizzle: Swizzle::Bytes128,
            promotion: Promotion::Bytes256,
        };
        Ok(Self {
            schedule,
            box_rows,
            map: TensorMap::of_matrix(x, &tiles)?,
            launch: Launch {
                grid: [(schedule.workers * config.split) as u32, 1, 1],
                cluster: [config.split as u32, 1, 1],
                shared_bytes: config.shared_bytes(atom, key.out) as u32,
                programmatic: true,
                ..Launch::linear(1, config.threads() as u32)
            },
            function: gpu.function(&config.instance(atom, key.out, key.activation))?,
        })
    }
}

/// The launches that a weight keeps prepared.
#[derive(Debug, Default)]
pub(super) struct Launches(Kept<Key, Prepared>);

/// `Arguments` of the source.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(in crate::cuda) struct Arguments {
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

impl Arguments {
    /// Of m rows, in boxes of `box_rows`; y, bias and the workspace are addresses, of the bias 0 if there is none.
    pub(in crate::cuda) fn new(
        w: &Weights,
        schedule: &Schedule,
        [y, bias, workspace]: [u64; 3],
        m: usize,
        box_rows: usize,
    ) -> Self {
        let Schedule { steps, rows, columns, waves, workers, sharers, cut } = *schedule;
        Self {
            w: w.atoms(),
            rows_of_scales: w.rows(),
            y,
            bias,
            parts: workspace + Workspace::COUNTER_BYTES as u64,
            counters: workspace,
            m: m as i32,
            n: w.shape()[0] as i32,
            box_bytes: (box_rows * 128) as i32,
            steps: steps as i32,
            rows: rows as i32,
            columns: columns as i32,
            waves: waves as i32,
            workers: workers as i32,
            sharers: sharers as i32,
            first: (waves * workers) as i32,
            units: (cut * steps) as i32,
            padding: 0,
        }
    }
}

fn run(gpu: &Gpu, stream: &Stream, call: &mut Call<'_>) -> Result<()> {
    let Packed::Wna16(w) = call.w else {
        return Err(Error::invalid(NAME, "weights in layout cuda_wna16", call.w.layout()));
    };
    let choice = if call.batch_invariant { Choice::BatchInvariant } else { Choice::Fast };
    let bytes = workspace_bytes(&gpu.caps(), &super::problem(call));
    wna16::run(gpu, stream, call, w, bytes, |rows| product(gpu, stream, w, call, choice, rows))
}

/// Puts a product into a stream with a configuration of the caller's choice, as [`config::all`] and [`candidates`] have them for
/// the weight's form and y: for measuring which is best. Those that scale early round weights to the type of x.
///
/// Errors: those of [`super::run`], a copy of x that would be needed, a shape that the configuration does not cover.
pub fn run_as(config: Config, gpu: &Gpu, stream: &Stream, call: &Call<'_>) -> Result<()> {
    super::check(&KERNEL, gpu, call)?;
    let refuse = |expected: &str, got: String| Err(Error::invalid(NAME, expected, got));
    let Packed::Wna16(w) = call.w else { return refuse("weights in layout cuda_wna16", call.w.layout().into()) };
    let (atom, y) = (w.atom(), call.y.dtype());
    let known = compiles(config, atom, y) || config::all(atom, y).contains(&config);
    if !w.reads_in_place(call.x) || !known {
        return refuse("a configuration for this weight", format!("{config:?}"));
    }
    if call.y.is_empty() {
        return Ok(());
    }
    let [n, k] = w.shape();
    let needed = match config.workspace_bytes([call.m, n, k], gpu.caps().multiprocessors as usize) {
        Some(bytes) => bytes,
        None => return refuse("a shape that the configuration covers", format!("{} × {n} × {k}", call.m)),
    };
    let workspace = match call.workspace.as_deref() {
        Some(workspace) if workspace.bytes() >= needed => workspace.view().pointer(),
        other => return refuse(&format!("a workspace of {needed} bytes"), format!("{other:?}")),
    };
    let rows = Rows { x: call.x, pitch: k, m: call.m, y: call.y.pointer(), workspace };
    product(gpu, stream, w, call, Choice::Given(config), rows)
}

fn product(gpu: &Gpu, stream: &Stream, w: &Weights, call: &Call<'_>, choice: Choice, rows: Rows<'_>) -> Result<()> {
    let Rows { x, pitch, m, y, workspace } = rows;
    if !y.is_multiple_of(16) {
        return Err(Error::invalid(NAME, "y that begins at a multiple of 16 bytes", format!("{y:#x}")));
    }
    let (out, activation) = (call.y.dtype(), call.epilogue.activation);
    let key = Key { x: x.pointer(), pitch, m, out, activation, choice };
    let prepared = w.launches.0.get(key, |key| Prepared::new(gpu, w, key, x))?;
    let bias = call.epilogue.bias.map_or(0, |bias: View<'_, f32>| bias.pointer());
    let arguments = Arguments::new(w, &prepared.schedule, [y, bias, workspace], m, prepared.box_rows);
    let args = [Arg::new(&arguments), Arg::new(&prepared.map)];
    // SAFETY: the parameters are the source's; lengths of x, y, bias and workspace were checked by `run_with`, the others
    // are those of the packed weight.
    unsafe { prepared.function.launch(stream, &prepared.launch, &args) }
}
