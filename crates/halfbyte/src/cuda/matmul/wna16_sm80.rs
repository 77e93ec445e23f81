//! Launches of `wna16_sm80.cu`: 4- and 8-bit weights times half floats on every processor from sm_80 on.
//!
//! Codes are multiplied as exact integers, and scales multiply the sums of their groups: weights are never rounded, and x may be
//! of another type than the scales.

pub mod config;

use super::wna16::{self, Rows, Weights};
use super::{Call, Kernel, Packed, gather};
use crate::cuda::driver::{Arg, Function, Launch, Stream, View};
use crate::cuda::kept::Kept;
use crate::cuda::schedule::Cuts;
use crate::cuda::sources::{Arch, Instance, Source};
use crate::cuda::{Caps, Gpu, Workspace};
use crate::error::{Error, Result};
use crate::format::WeightFormat;
use crate::kernel::{Activation, Problem, Reason};
use crate::layout::cuda_wna16::Atom;
use crate::tensor::Float;
use bytemuck::{Pod, Zeroable};
use config::{Config, Schedule};

static SOURCE: Source = Source { path: "matmul/wna16_sm80.cu", text: include_str!("wna16_sm80.cu") };

const NAME: &str = "wna16_sm80";

pub(super) const KERNEL: Kernel = Kernel {
    name: NAME,
    layout: wna16::LAYOUT,
    what: "mma.sync on weights converted in registers, copies by cp.async",
    packs: true,
    batch_invariant: true,
    serves: |arch| arch.number >= 80,
    instances,
    instances_of: |caps, problem| {
        let Ok(atom) = wna16::atom(problem) else { return Vec::new() };
        let (config, _) = Choice::FAST.make(caps, atom, [problem.m, problem.n, problem.k], problem.y);
        vec![config.instance(atom, [problem.x, problem.y], Activation::None), gather::instance()]
    },
    rounds_weights: |_, _| false,
    supports,
    workspace_bytes,
    holds: wna16::holds,
    pack: |packer, whole, parts, act| Ok(Packed::Wna16(Weights::new(packer, whole, parts, act)?)),
    run,
};

/// Shared memory that a block may have: on the processors of graphics cards, on sm_80, and on those of data centres since.
pub(super) const SHARED_BYTES: [u32; 3] = [101_376, 166_912, 232_448];

/// Every configuration for a form of atoms and devices with so much shared memory.
fn instances_with(shared_bytes: u32, atom: Atom, [x, out]: [Float; 2], activation: Activation) -> Vec<Instance> {
    let caps = Caps {
        arch: Arch::of([8, 0]),
        multiprocessors: 108,
        shared_bytes,
        l2_bytes: 0,
        memory_mb_per_s: 0,
        clock_khz: 0,
        cublaslt: false,
    };
    config::all(atom, out, &caps).into_iter().map(|c| c.instance(atom, [x, out], activation)).collect()
}

/// Every configuration for the commonest format, and for the others' forms of conversion with the least shared memory.
fn instances() -> Vec<Instance> {
    let atom = Atom { bits: 4, group: 128, zero: false, scale: Float::F16, factors: false };
    let all = SHARED_BYTES.into_iter().flat_map(|bytes| instances_with(bytes, atom, [Float::F16; 2], Activation::None));
    let others = [
        (Atom { scale: Float::BF16, ..atom }, [Float::BF16; 2], Activation::Silu),
        (Atom { bits: 8, zero: true, group: 32, ..atom }, [Float::BF16, Float::F32], Activation::Gelu),
        (
            Atom { bits: 8, group: 0, zero: true, scale: Float::BF16, factors: false },
            [Float::F16; 2],
            Activation::GeluTanh,
        ),
        (Atom { zero: true, group: 32, ..atom }, [Float::BF16; 2], Activation::Relu6),
        (Atom { bits: 8, zero: true, group: 64, ..atom }, [Float::F16; 2], Activation::None),
    ];
    let few = others.into_iter().flat_map(|(atom, types, act)| instances_with(SHARED_BYTES[0], atom, types, act));
    let mut all: Vec<_> = all.chain(few).collect();
    all.sort_by_cached_key(Instance::to_string);
    all.dedup_by_key(|instance| instance.to_string());
    all
}

/// Every configuration for a format and x of the type of its scales, with y of the type of x and in f32 and without an
/// activation; none if it is not served.
pub fn every_instance(format: WeightFormat) -> Vec<Instance> {
    // More columns than any group: groups of all columns are what rows are.
    let Ok(atom) = Atom::of(format, usize::MAX) else { return Vec::new() };
    let types = [[atom.scale; 2], [atom.scale, Float::F32]];
    let of = |bytes| types.into_iter().flat_map(move |types| instances_with(bytes, atom, types, Activation::None));
    SHARED_BYTES.into_iter().flat_map(of).collect()
}

/// How a launch comes to its configuration and its cuts.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Choice {
    /// The caller's; none: the fastest.
    config: Option<Config>,
    /// Whether sums are cut as n and k alone tell, so that a row of y has the same bits whatever m is.
    batch_invariant: bool,
}

impl Choice {
    const FAST: Self = Self { config: None, batch_invariant: false };
    const BATCH_INVARIANT: Self = Self { config: None, batch_invariant: true };

    fn make(self, caps: &Caps, atom: Atom, [m, n, k]: [usize; 3], out: Float) -> (Config, Schedule) {
        let shape = [m.max(1), n.max(1), k.max(1)];
        let config = self.config.unwrap_or_else(|| config::config(atom, shape, out, caps));
        let schedule = match self.batch_invariant {
            true => config::pieces(config, shape, config::invariant_pieces(shape)),
            false => config::schedule(config, shape, config.workers(atom, out, caps)),
        };
        (config, schedule)
    }

    /// Rows that one launch takes.
    fn rows(self, m: usize) -> usize {
        if self.batch_invariant { m.min(config::ROWS_AT_ONCE) } else { m }
    }

    fn workspace_bytes(self, caps: &Caps, atom: Atom, problem: &Problem) -> usize {
        let parts = |m: usize| {
            let (config, schedule) = self.make(caps, atom, [self.rows(m), problem.n, problem.k], problem.y);
            config.parts_bytes(&schedule)
        };
        wna16::workspace_bytes(problem, parts)
    }
}

fn supports(caps: &Caps, problem: &Problem) -> std::result::Result<(), Reason> {
    let atom = wna16::atom(problem)?;
    let refuse = |why: String| Err(Reason(why));
    if problem.x == Float::F32 {
        return refuse("multiplies x in f16 or bf16; x is f32".into());
    }
    for choice in [Choice::FAST, Choice::BATCH_INVARIANT] {
        let shape = [choice.rows(problem.m), problem.n, problem.k];
        let (config, schedule) = choice.make(caps, atom, shape, problem.y);
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

fn workspace_bytes(caps: &Caps, problem: &Problem) -> usize {
    let Ok(atom) = wna16::atom(problem) else { return 0 };
    let of = |choice: Choice| choice.workspace_bytes(caps, atom, problem);
    of(Choice::FAST).max(of(Choice::BATCH_INVARIANT))
}

/// What a launch was prepared for.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Key {
    m: usize,
    x: Float,
    out: Float,
    activation: Activation,
    choice: Choice,
}

/// What is the same in every launch for a key.
#[derive(Debug)]
struct Prepared {
    schedule: Schedule,
    launch: Launch,
    function: Function,
}

impl Prepared {
    fn new(gpu: &Gpu, w: &Weights, &Key { m, x, out, activation, choice }: &Key) -> Result<Self> {
        let ([n, k], atom, caps) = (w.shape(), w.atom(), gpu.caps());
        let (config, schedule) = choice.make(&caps, atom, [m, n, k], out);
        if !schedule.fits() {
            return Err(Error::invalid(NAME, "tiles that 32 bits count", format!("{schedule:?}")));
        }
        Ok(Self {
            schedule,
            launch: Launch {
                shared_bytes: config.shared_bytes(atom, out) as u32,
                programmatic: caps.arch.number >= 90,
                ..Launch::linear(schedule.workers as u32, config.threads() as u32)
            },
            function: gpu.function(&config.instance(atom, [x, out], activation))?,
        })
    }
}

/// The launches that a weight keeps prepared.
#[derive(Debug, Default)]
pub(super) struct Launches(Kept<Key, Prepared>);

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
    pitch: i32,
    cuts: Cuts,
}

fn run(gpu: &Gpu, stream: &Stream, call: &mut Call<'_>) -> Result<()> {
    multiply(gpu, stream, call, Choice { config: None, batch_invariant: call.batch_invariant })
}

/// Puts a product into a stream with a configuration of the caller's choice, one of [`config::all`] for the weight's form, y and
/// the device: for measuring which is best.
///
/// Errors: those of [`super::run`], a shape that the configuration does not cover.
pub fn run_as(config: Config, gpu: &Gpu, stream: &Stream, call: &Call<'_>) -> Result<()> {
    super::check(&KERNEL, gpu, call)?;
    if call.y.is_empty() {
        return Ok(());
    }
    multiply(gpu, stream, call, Choice { config: Some(config), batch_invariant: call.batch_invariant })
}

fn multiply(gpu: &Gpu, stream: &Stream, call: &Call<'_>, choice: Choice) -> Result<()> {
    let refuse = |expected: String, got: String| Err(Error::invalid(NAME, expected, got));
    let Packed::Wna16(w) = call.w else {
        return refuse("weights in layout cuda_wna16".into(), call.w.layout().into());
    };
    let (caps, problem) = (gpu.caps(), super::problem(call));
    if choice.config.is_some_and(|config| !config::all(w.atom(), problem.y, &caps).contains(&config)) {
        return refuse("a configuration for this weight".into(), format!("{:?}", choice.config));
    }
    let needed = choice.workspace_bytes(&caps, w.atom(), &problem);
    let given = call.workspace.as_ref().map_or(0, |workspace| workspace.bytes());
    if given < needed {
        return refuse(format!("a workspace of {needed} bytes"), given.to_string());
    }
    wna16::run(gpu, stream, call, w, needed, |rows| {
        let at_once = choice.rows(rows.m);
        (0..rows.m).step_by(at_once).try_for_each(|first| {
            let part = Part {
                x: rows.x.pointer() + (first * rows.pitch * 2) as u64,
                y: rows.y + (first * problem.n * problem.y.size_bytes()) as u64,
                m: at_once.min(rows.m - first),
            };
            product(gpu, stream, w, call, choice, &rows, part)
        })
    })
}

/// Rows of one launch: addresses of the first one's x and y.
struct Part {
    x: u64,
    y: u64,
    m: usize,
}

fn product(
    gpu: &Gpu,
    stream: &Stream,
    w: &Weights,
    call: &Call<'_>,
    choice: Choice,
    all: &Rows<'_>,
    Part { x, y, m }: Part,
) -> Result<()> {
    if !y.is_multiple_of(16) {
        return Err(Error::invalid(NAME, "y that begins at a multiple of 16 bytes", format!("{y:#x}")));
    }
    let [n, k] = w.shape();
    let key = Key { m, x: call.x.dtype(), out: call.y.dtype(), activation: call.epilogue.activation, choice };
    let prepared = w.launches_sm80.0.get(key, |key| Prepared::new(gpu, w, key))?;
    let arguments = Arguments {
        w: w.atoms(),
        rows_of_scales: w.rows(),
        x,
        y,
        bias: call.epilogue.bias.map_or(0, |bias: View<'_, f32>| bias.pointer()),
        parts: all.workspace + Workspace::COUNTER_BYTES as u64,
        counters: all.workspace,
        m: m as i32,
        n: n as i32,
        k: k as i32,
        pitch: all.pitch as i32,
        cuts: prepared.schedule.into(),
    };
    // SAFETY: the parameter is the source's; lengths of x, y and bias were checked by `check`, the workspace's by `multiply`,
    // the others are those of the packed weight.
    unsafe { prepared.function.launch(stream, &prepared.launch, &[Arg::new(&arguments)]) }
}
