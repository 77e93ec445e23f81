//! Launches of `wna8_sm80.cu`: 4- and 8-bit weights times activations that are quantised on the fly, on every processor from
//! sm_80 on.
//!
//! One kernel quantises x, as for [`wna8_sm90`], the next one multiplies. Integers of a group are exact, and a row of y has the
//! same bits wherever tiles are cut alike: rows that do not depend on each other are only a matter of the cuts.

pub mod config;

use super::quantize_activations;
use super::wna8_sm90::config::Terms;
use super::wna8_sm90::{self, x_form};
use super::wna16::{self, Weights};
use super::wna16_sm80;
use super::{Call, Kernel, Packed};
use crate::cuda::driver::{Arg, Function, Launch, Stream, View};
use crate::cuda::kept::Kept;
use crate::cuda::schedule::Cuts;
use crate::cuda::sources::{Arch, Instance, Source};
use crate::cuda::tiled::Room;
use crate::cuda::{Caps, Gpu, Workspace};
use crate::error::{Error, Result};
use crate::kernel::{Activation, Problem, Reason};
use crate::layout::cuda_wna16::Atom;
use crate::tensor::Float;
use bytemuck::{Pod, Zeroable};
use config::{Config, Schedule};

static SOURCE: Source = Source { path: "matmul/wna8_sm80.cu", text: include_str!("wna8_sm80.cu") };

const NAME: &str = "wna8_sm80";

pub(super) const KERNEL: Kernel = Kernel {
    name: NAME,
    layout: wna16::LAYOUT,
    what: "x quantised on the fly, integer mma.sync on bytes of weights, copies by cp.async",
    packs: true,
    batch_invariant: true,
    serves: |arch| arch.number >= 80,
    instances,
    instances_of: |caps, problem| {
        let Ok((atom, terms)) = form(problem) else { return Vec::new() };
        let (config, _) = Choice::FAST.make(caps, atom, terms, [problem.m, problem.n, problem.k], problem.y);
        let quantize = quantize_activations::instance(x_form(problem, atom, terms));
        vec![quantize, config.instance(atom, terms, problem.y, Activation::None)]
    },
    rounds_weights: |_, _| false,
    supports,
    workspace_bytes: |caps, problem| {
        let bytes = |choice: Choice| choice.room(caps, problem).map_or(0, |room| room.bytes);
        bytes(Choice::FAST).max(bytes(Choice::BATCH_INVARIANT))
    },
    holds: wna16::holds,
    pack: |packer, whole, parts, act| Ok(Packed::Wna16(Weights::new(packer, whole, parts, act)?)),
    run: |gpu, stream, call| {
        multiply(gpu, stream, call, Choice { config: None, batch_invariant: call.batch_invariant })
    },
};

/// Every configuration for the commonest formats, and for the other forms of conversion with the least shared memory.
fn instances() -> Vec<Instance> {
    let of = |shared_bytes: u32, atom, terms, out, activation| {
        let caps = Caps {
            arch: Arch::of([8, 0]),
            multiprocessors: 108,
            shared_bytes,
            l2_bytes: 0,
            memory_mb_per_s: 0,
            clock_khz: 0,
            cublaslt: false,
        };
        let all = config::all(atom, terms, out, &caps).into_iter();
        all.map(move |config| config.instance(atom, terms, out, activation))
    };
    let atom = Atom { bits: 4, group: 128, zero: false, scale: Float::F16, factors: false };
    let plain = Terms { sums: false, offsets: false, pixels: false };
    let [_, _, most] = wna16_sm80::SHARED_BYTES;
    let [least, ..] = wna16_sm80::SHARED_BYTES;
    let common =
        [4, 8].into_iter().flat_map(|bits| of(most, Atom { bits, ..atom }, plain, Float::F16, Activation::None));
    let all = Terms { sums: true, offsets: true, pixels: false };
    let others = [
        (Atom { bits: 8, ..atom }, plain, Float::F16, Activation::None),
        (Atom { bits: 8, group: 0, ..atom }, plain, Float::BF16, Activation::Silu),
        (
            Atom { group: 64, scale: Float::BF16, ..atom },
            Terms { offsets: true, ..plain },
            Float::F16,
            Activation::Gelu,
        ),
        (Atom { zero: true, group: 32, ..atom }, all, Float::F32, Activation::GeluTanh),
        (Atom { bits: 8, zero: true, ..atom }, all, Float::F16, Activation::None),
        (
            Atom { bits: 8, zero: true, group: 0, scale: Float::BF16, factors: false },
            all,
            Float::F16,
            Activation::Relu6,
        ),
    ];
    let few = others.into_iter().flat_map(|(atom, terms, out, activation)| of(least, atom, terms, out, activation));
    common.chain(few).chain(quantize_activations::instances()).collect()
}

/// The form of atoms and terms, or why there is none.
fn form(problem: &Problem) -> std::result::Result<(Atom, Terms), Reason> {
    let (atom, terms) = wna8_sm90::form(problem)?;
    if atom.factors {
        return Err(Reason("multiplies scales on one level, the format has two".into()));
    }
    Ok((atom, terms))
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

    fn make(self, caps: &Caps, atom: Atom, terms: Terms, [m, n, k]: [usize; 3], out: Float) -> (Config, Schedule) {
        let shape = [m.max(1), n.max(1), k.max(1)];
        let config = self.config.unwrap_or_else(|| config::config(atom, terms, shape, out, caps));
        let schedule = match self.batch_invariant {
            true => config.invariant_schedule(shape),
            false => config.schedule(shape, config.workers(atom, terms, out, caps)),
        };
        (config, schedule)
    }

    /// Rows that one launch takes.
    fn rows(self, m: usize) -> usize {
        if self.batch_invariant { m.min(config::ROWS_AT_ONCE) } else { m }
    }

    /// Where things lie in the workspace.
    fn room(self, caps: &Caps, problem: &Problem) -> std::result::Result<Room, Reason> {
        let (atom, terms) = form(problem)?;
        let parts = |m: usize| {
            let (config, schedule) = self.make(caps, atom, terms, [m, problem.n, problem.k], problem.y);
            config.parts_bytes(&schedule)
        };
        // The rows that are left in the end may be cut another way.
        let rows = self.rows(problem.m).max(1);
        Ok(Room::new(x_form(problem, atom, terms), parts(rows).max(parts(problem.m % rows))))
    }
}

fn supports(caps: &Caps, problem: &Problem) -> std::result::Result<(), Reason> {
    let (atom, terms) = form(problem)?;
    let refuse = |why: String| Err(Reason(why));
    wna8_sm90::check_columns(atom, problem.k)?;
    for choice in [Choice::FAST, Choice::BATCH_INVARIANT] {
        let shape = [choice.rows(problem.m), problem.n, problem.k];
        let (config, schedule) = choice.make(caps, atom, terms, shape, problem.y);
        let shared = config.shared_bytes(atom, terms, problem.y);
        if shared > caps.shared_bytes as usize {
            return refuse(format!("needs {shared} bytes of shared memory, a block has {}", caps.shared_bytes));
        }
        if !schedule.fits() {
            return refuse("more tiles than 32 bits count".into());
        }
    }
    Ok(())
}

/// What a launch was prepared for.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Key {
    m: usize,
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
    fn new(gpu: &Gpu, w: &Weights, terms: Terms, &Key { m, out, activation, choice }: &Key) -> Result<Self> {
        let ([n, k], atom, caps) = (w.shape(), w.atom(), gpu.caps());
        let (config, schedule) = choice.make(&caps, atom, terms, [m, n, k], out);
        if !schedule.fits() {
            return Err(Error::invalid(NAME, "tiles that 32 bits count", format!("{schedule:?}")));
        }
        Ok(Self {
            schedule,
            launch: Launch {
                shared_bytes: config.shared_bytes(atom, terms, out) as u32,
                programmatic: caps.arch.number >= 90,
                ..Launch::linear(schedule.workers as u32, config.threads() as u32)
            },
            function: gpu.function(&config.instance(atom, terms, out, activation))?,
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
    terms: u64,
    y: u64,
    bias: u64,
    parts: u64,
    counters: u64,
    m: i32,
    n: i32,
    k: i32,
    pitch: i32,
    cuts: Cuts,
    ratio: u32,
    groups: i32,
    m_pitch: i32,
    padding: i32,
}

/// Puts a product into a stream with a configuration of the caller's choice, one of [`config::all`] for the weight's form, y and
/// the device: for measuring which is best.
///
/// Errors: those of [`super::run`], another configuration.
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
    let unserved = |why: Reason| Error::invalid(NAME, "a product that it serves", why.to_string());
    let (atom, terms) = form(&problem).map_err(unserved)?;
    if choice.config.is_some_and(|config| !config::all(atom, terms, problem.y, &caps).contains(&config)) {
        return refuse("a configuration for this weight".into(), format!("{:?}", choice.config));
    }
    let room = choice.room(&caps, &problem).map_err(unserved)?;
    let workspace = call.workspace.as_deref().map(Workspace::view);
    let Some(workspace) = workspace.filter(|workspace| workspace.len() >= room.bytes) else {
        let given = call.workspace.as_ref().map_or(0, |workspace| workspace.bytes());
        return refuse(format!("a workspace of {} bytes", room.bytes), given.to_string());
    };
    let x = x_form(&problem, atom, terms);
    let [codes, terms_at] = [room.codes, room.terms].map(|at| workspace.pointer() + at as u64);
    quantize_activations::run(gpu, stream, x, call.x, w.order(), [codes, terms_at])?;
    let at_once = choice.rows(call.m);
    for first in (0..call.m).step_by(at_once) {
        let y = call.y.pointer() + (first * problem.n * problem.y.size_bytes()) as u64;
        if !y.is_multiple_of(16) {
            return refuse("y that begins at a multiple of 16 bytes".into(), format!("{y:#x}"));
        }
        let m = at_once.min(call.m - first);
        let key = Key { m, out: problem.y, activation: call.epilogue.activation, choice };
        let prepared = w.launches_a8_sm80.0.get(key, |key| Prepared::new(gpu, w, terms, key))?;
        let arguments = Arguments {
            w: w.atoms(),
            rows_of_scales: w.rows(),
            x: codes + (first * x.pitch()) as u64,
            // Rows at once are a multiple of four: the terms of the next ones begin at 16 bytes again.
            terms: terms_at + (first * 4) as u64,
            y,
            bias: call.epilogue.bias.map_or(0, |bias: View<'_, f32>| bias.pointer()),
            parts: workspace.pointer() + Workspace::COUNTER_BYTES as u64,
            counters: workspace.pointer(),
            m: m as i32,
            n: problem.n as i32,
            k: problem.k as i32,
            pitch: x.pitch() as i32,
            cuts: prepared.schedule.into(),
            ratio: wna8_sm90::ratio(x, atom),
            groups: x.pieces() as i32,
            m_pitch: x.m_pitch() as i32,
            padding: 0,
        };
        // SAFETY: the parameter is the source's; lengths of x, y and bias were checked by `check`, the workspace's above, the
        // others are those of the packed weight.
        unsafe { prepared.function.launch(stream, &prepared.launch, &[Arg::new(&arguments)]) }?;
    }
    Ok(())
}
