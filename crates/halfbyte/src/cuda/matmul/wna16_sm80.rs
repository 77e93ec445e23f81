//! Launches of `wna16_sm80.cu`: 4- and 8-bit weights times half floats on every processor from sm_80 on.
//!
//! Codes are multiplied as exact integers, and scales multiply the sums of their groups: weights are never rounded.

pub mod config;

use super::gather::{self, Gather};
use super::wna16_sm90::Weights;
use super::{Call, Kernel, Packed};
use crate::cuda::driver::{Arg, Function, Launch, Stream, View};
use crate::cuda::sources::{Arch, Instance, Source};
use crate::cuda::{Caps, Gpu, Workspace};
use crate::error::{Error, Result};
use crate::format::WeightFormat;
use crate::kernel::{Activation, Problem, Reason};
use crate::layout::cuda_wna16::{Atom, CudaWna16};
use crate::tensor::Float;
use bytemuck::{Pod, Zeroable};
use config::{Config, Schedule};
use std::sync::{Arc, Mutex, PoisonError};

static SOURCE: Source = Source { path: "matmul/wna16_sm80.cu", text: include_str!("wna16_sm80.cu") };

const NAME: &str = "wna16_sm80";

pub(super) const KERNEL: Kernel = Kernel {
    name: NAME,
    layout: "cuda_wna16",
    what: "mma.sync on weights converted in registers, copies by cp.async",
    serves: |arch| arch.number >= 80,
    instances,
    supports,
    workspace_bytes,
    holds: |w| CudaWna16::holds(w).map(|_| ()).map_err(|why| Reason(why.to_string())),
    pack: |gpu, stream, w, act| Ok(Packed::Wna16(Weights::new(gpu, stream, w, act)?)),
    run,
};

/// Warpgroups of a block at most, each with a counter of its own for every cut tile.
const MOST_WARPGROUPS: usize = 2;

/// Tiles that may be cut, for each of which the workspace has counters.
const MOST_CUT: usize = Workspace::COUNTER_BYTES / 4 / MOST_WARPGROUPS;

/// Launches that a weight keeps prepared.
const KEPT: usize = 32;

/// Every configuration for the commonest format and the others' forms of conversion, each for the least and for the most
/// shared memory that a processor has.
fn instances() -> Vec<Instance> {
    let atom = Atom { bits: 4, group: 128, zero: false, scale: Float::F16 };
    let forms = [
        (atom, [Float::F16; 2], Activation::None),
        (Atom { scale: Float::BF16, ..atom }, [Float::BF16; 2], Activation::Silu),
        (Atom { bits: 8, zero: true, group: 32, ..atom }, [Float::BF16, Float::F32], Activation::Gelu),
        (Atom { bits: 8, group: 0, zero: true, scale: Float::BF16 }, [Float::F16; 2], Activation::GeluTanh),
        (Atom { zero: true, group: 32, ..atom }, [Float::BF16; 2], Activation::Relu6),
    ];
    let mut all = Vec::new();
    for (number, shared_bytes) in [(89, 101_376), (90, 232_448)] {
        let arch = Arch { number, specific: false };
        let caps = Caps { arch, multiprocessors: 132, shared_bytes, l2_bytes: 0 };
        for (atom, [x, out], activation) in forms {
            all.extend(config::all(atom, out, &caps).into_iter().map(|c| c.instance(atom, [x, out], activation)));
        }
    }
    all.sort_by_key(Instance::to_string);
    all.dedup_by_key(|instance| instance.to_string());
    all
}

/// Every configuration for a format and x of a type on a device, with y of the type of x and in f32 and without an activation;
/// none if it is not served.
pub fn instances_of(format: WeightFormat, x: Float, caps: &Caps) -> Vec<Instance> {
    // More columns than any group: groups of all columns are what rows are.
    let Ok(atom) = Atom::of(format, usize::MAX) else { return Vec::new() };
    let of = |out: Float| {
        config::all(atom, out, caps).into_iter().map(move |c| c.instance(atom, [x, out], Activation::None))
    };
    of(x).chain(of(Float::F32)).collect()
}

/// How a product is to be computed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Plan {
    /// The kernel's form; none: the one that is chosen for the shape.
    pub config: Option<Config>,
    /// Whether a row of y must have the same bits whatever m is: sums are then cut as n and k alone tell.
    pub invariant: bool,
}

impl Plan {
    /// What [`super::run`] does.
    const CHOSEN: Self = Self { config: None, invariant: false };

    /// Rows of x that are multiplied in one launch.
    fn rows(self, m: usize) -> usize {
        if self.invariant { m.min(config::ROWS_AT_ONCE) } else { m }
    }

    fn choose(self, caps: &Caps, atom: Atom, [m, n, k]: [usize; 3], out: Float) -> (Config, Schedule) {
        let shape = [m.max(1), n.max(1), k.max(1)];
        let config = self.config.unwrap_or_else(|| config::config(atom, shape, out, caps));
        let schedule = match self.invariant {
            true => Schedule::pieces(config, shape, config::invariant_pieces(shape)),
            false => config::schedule(config, shape, config.workers(atom, out, caps)),
        };
        (config, schedule)
    }

    /// Counters, sums of cut tiles, and room for the columns of some rows of x in another order.
    fn workspace_bytes(self, caps: &Caps, atom: Atom, [m, n, k]: [usize; 3], out: Float) -> usize {
        let parts = |m: usize| {
            let (config, schedule) = self.choose(caps, atom, [m, n, k], out);
            schedule.parts_bytes(config)
        };
        let rows = m.min(gather::ROWS);
        let all = self.rows(m);
        let each = [all, m % all.max(1), rows, m % gather::ROWS];
        Workspace::COUNTER_BYTES + each.map(parts).into_iter().max().unwrap_or(0) + rows * k * 2
    }
}

fn supports(caps: &Caps, problem: &Problem) -> std::result::Result<(), Reason> {
    let refuse = |why: String| Err(Reason(why));
    let Some(format) = problem.format else { return refuse("multiplies codes, the weights are dense".into()) };
    if format.act.is_quantized() {
        return refuse("multiplies exact activations (a16, a32), the format says quantised ones".into());
    }
    let atom = Atom::of(format.weight, problem.k).map_err(|why| Reason(why.to_string()))?;
    if problem.x == Float::F32 {
        return refuse("multiplies x in f16 or bf16; x is f32".into());
    }
    if problem.k == 0 || !problem.k.is_multiple_of(8) {
        return refuse(format!("copies rows of x in pieces of 8 elements, k is {}", problem.k));
    }
    if [problem.m, problem.n, problem.k].iter().any(|&size| size > i32::MAX as usize) {
        return refuse("more rows or columns than 31 bits count".into());
    }
    let (config, schedule) = Plan::CHOSEN.choose(caps, atom, [problem.m, problem.n, problem.k], problem.x);
    let shared = config.shared_bytes(atom, problem.x);
    if shared > caps.shared_bytes as usize {
        return refuse(format!("needs {shared} bytes of shared memory, a block has {}", caps.shared_bytes));
    }
    if !schedule.fits() {
        return refuse("more tiles than 32 bits count".into());
    }
    Ok(())
}

fn workspace_bytes(caps: &Caps, problem: &Problem) -> usize {
    let Some(atom) = problem.format.and_then(|format| Atom::of(format.weight, problem.k).ok()) else { return 0 };
    let shape = [problem.m, problem.n, problem.k];
    // Of y only the type of x is known here; y in f32 may have more blocks at once.
    [problem.x, Float::F32]
        .map(|out| Plan::CHOSEN.workspace_bytes(caps, atom, shape, out))
        .into_iter()
        .max()
        .unwrap_or(0)
}

/// The number of a type in the source.
fn number(out: Float) -> usize {
    match out {
        Float::F16 => 0,
        Float::BF16 => 1,
        Float::F32 => 2,
    }
}

/// What a launch was prepared for.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Key {
    m: usize,
    x: Float,
    out: Float,
    activation: Activation,
    plan: Plan,
}

/// What is the same in every launch for a key.
#[derive(Debug)]
struct Prepared {
    schedule: Schedule,
    launch: Launch,
    function: Function,
}

/// Launches for one weight, made once and kept.
#[derive(Debug, Default)]
pub(super) struct Kept(Mutex<Vec<(Key, Arc<Prepared>)>>);

impl Kept {
    fn get(&self, gpu: &Gpu, atom: Atom, [n, k]: [usize; 2], key: Key) -> Result<Arc<Prepared>> {
        let kept = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, prepared)) = kept().iter().find(|(other, _)| *other == key) {
            return Ok(prepared.clone());
        }
        let (config, schedule) = key.plan.choose(&gpu.caps(), atom, [key.m, n, k], key.out);
        let prepared = Arc::new(Prepared {
            schedule,
            launch: Launch {
                shared_bytes: config.shared_bytes(atom, key.out) as u32,
                programmatic: gpu.caps().arch.number >= 90,
                ..Launch::linear(schedule.workers as u32, config.threads() as u32)
            },
            function: gpu.function(&config.instance(atom, [key.x, key.out], key.activation))?,
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
    x: u64,
    y: u64,
    bias: u64,
    parts: u64,
    counters: u64,
    m: i32,
    n: i32,
    k: i32,
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
    multiply(Plan::CHOSEN, gpu, stream, call)
}

/// Puts a product into a stream as the caller plans it: with one of [`config::all`] for the weight's form and y, for measuring
/// which is best, or such that the bits of a row do not depend on m.
///
/// Errors: those of [`super::run`], a shape that the plan does not cover.
pub fn run_as(plan: Plan, gpu: &Gpu, stream: &Stream, call: &Call<'_>) -> Result<()> {
    super::check(&KERNEL, gpu, call)?;
    if call.y.is_empty() {
        return Ok(());
    }
    multiply(plan, gpu, stream, call)
}

fn multiply(plan: Plan, gpu: &Gpu, stream: &Stream, call: &Call<'_>) -> Result<()> {
    let refuse = |expected: String, got: String| Err(Error::invalid(NAME, expected, got));
    let Packed::Wna16(w) = call.w else {
        return refuse("weights in layout cuda_wna16".into(), call.w.layout().into());
    };
    let (atom, [n, k], m, out) = (w.atom(), w.shape(), call.m, call.y.dtype());
    if plan.config.is_some_and(|config| !config::all(atom, out, &gpu.caps()).contains(&config)) {
        return refuse("a configuration for this weight".into(), format!("{:?}", plan.config));
    }
    let needed = plan.workspace_bytes(&gpu.caps(), atom, [m, n, k], out);
    let workspace = match call.workspace.as_deref() {
        Some(workspace) if workspace.bytes() >= needed => workspace.view(),
        other => return refuse(format!("a workspace of {needed} bytes"), format!("{other:?}")),
    };
    let (x, y) = (call.x.pointer(), call.y.pointer());
    let mut rows = plan.rows(m);
    if w.order().is_some() {
        rows = rows.min(gather::ROWS);
    }
    for first in (0..m).step_by(rows) {
        let m = rows.min(m - first);
        let y = y + (first * n * out.size_bytes()) as u64;
        let mut x = x + (first * k * 2) as u64;
        if let Some(order) = w.order() {
            let to = workspace.slice(needed - m * k * 2..needed).pointer();
            Gather { x, order: order.pointer(), to, rows: m, k }.run(gpu, stream)?;
            x = to;
        }
        product(plan, gpu, stream, call, Rows { x, m, y, workspace: workspace.pointer() })?;
    }
    Ok(())
}

/// Some rows of a product: addresses on the device.
struct Rows {
    x: u64,
    m: usize,
    y: u64,
    workspace: u64,
}

fn product(plan: Plan, gpu: &Gpu, stream: &Stream, call: &Call<'_>, rows: Rows) -> Result<()> {
    let Rows { x, m, y, workspace } = rows;
    let Packed::Wna16(w) = call.w else {
        return Err(Error::invalid(NAME, "weights in layout cuda_wna16", call.w.layout()));
    };
    for (what, address) in [("x", x), ("y", y)] {
        if !address.is_multiple_of(16) {
            let expected = format!("{what} that begins at a multiple of 16 bytes");
            return Err(Error::invalid(NAME, expected, format!("{address:#x}")));
        }
    }
    let [n, k] = w.shape();
    let key = Key { m, x: call.x.dtype(), out: call.y.dtype(), activation: call.epilogue.activation, plan };
    let prepared = w.sm80.get(gpu, w.atom(), [n, k], key)?;
    let Schedule { steps, rows, columns, waves, workers, sharers, cut } = prepared.schedule;
    if !prepared.schedule.fits() {
        return Err(Error::invalid(NAME, "tiles that 32 bits count", format!("{:?}", prepared.schedule)));
    }
    let [atoms, rows_of_scales] = w.addresses();
    let arguments = Arguments {
        w: atoms,
        rows_of_scales,
        x,
        y,
        bias: call.epilogue.bias.map_or(0, |bias: View<'_, f32>| bias.pointer()),
        parts: workspace + Workspace::COUNTER_BYTES as u64,
        counters: workspace,
        m: m as i32,
        n: n as i32,
        k: k as i32,
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
    // SAFETY: the parameter is the source's; lengths of x, y and bias were checked by `check`, the workspace's by `multiply`,
    // the others are those of the packed weight.
    unsafe { prepared.function.launch(stream, &prepared.launch, &[Arg::new(&arguments)]) }
}
