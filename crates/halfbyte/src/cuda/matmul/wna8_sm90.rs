//! Launches of `wna8_sm90.cu`: 4- and 8-bit weights times activations that are quantised on the fly, on Hopper.
//!
//! One kernel quantises x, group by group as the weights have them, the next one multiplies: it fetches its first weights while
//! the other runs.

pub mod config;

use super::quantize_activations::{self, Form};
use super::wna16::{self, Weights};
use super::{Call, Epilogue, Kernel, Packed};
use crate::cuda::driver::{Arg, Function, Launch, Promotion, Stream, Swizzle, TensorMap, Tiles, View};
use crate::cuda::kept::Kept;
use crate::cuda::sources::{Instance, Source};
use crate::cuda::tiled::Room;
use crate::cuda::{Caps, Gpu, Workspace};
use crate::error::{Error, Result};
use crate::format::Act;
use crate::kernel::{Activation, Problem, Reason};
use crate::layout::cuda_wna16::Atom;
use crate::tensor::Float;
use bytemuck::{Pod, Zeroable};
use config::{Config, Terms};

static SOURCE: Source = Source { path: "matmul/wna8_sm90.cu", text: include_str!("wna8_sm90.cu") };

const NAME: &str = "wna8_sm90";

pub(super) const KERNEL: Kernel = Kernel {
    name: NAME,
    layout: wna16::LAYOUT,
    what: "x quantised on the fly, integer wgmma on bytes of weights, copies by the bulk engine",
    packs: true,
    batch_invariant: false,
    serves: |arch| arch.number == 90 && arch.specific,
    instances,
    instances_of: |caps, problem| {
        let Ok((atom, terms)) = form(problem) else { return Vec::new() };
        let (config, _) = choose(caps, (atom, terms), [problem.m, problem.n, problem.k], problem.y, None);
        let quantize = quantize_activations::instance(x_form(problem, atom, terms));
        vec![quantize, config.instance(atom, terms, problem.y, Activation::None)]
    },
    rounds_weights: |_, _| false,
    supports,
    workspace_bytes: |caps, problem| room(caps, problem, None).map_or(0, |room| room.bytes),
    holds: wna16::holds,
    pack: |packer, whole, parts, act| Ok(Packed::Wna16(Weights::new(packer, whole, parts, act)?)),
    run: |gpu, stream, call| run(gpu, stream, call, None),
};

/// Columns of one scale that 32 bits of sums are sure to hold.
const MOST_COLUMNS: usize = 1 << 16;

/// Columns up to which the source divides by the ratio of two groups with one multiplication.
pub(in crate::cuda) const MOST_K: usize = 1 << 21;

/// Every number of tokens for the commonest formats, and the other forms of conversion.
fn instances() -> Vec<Instance> {
    let atom = Atom { bits: 4, group: 128, zero: false, scale: Float::F16, factors: false };
    let plain = Terms { sums: false, offsets: false, pixels: false };
    let all = [8, 16, 32, 64, 128, 1024].into_iter().flat_map(|m| {
        let forms = [
            (atom, plain, Float::F16),
            (Atom { bits: 8, ..atom }, plain, Float::F16),
            (Atom { factors: true, ..atom }, plain, Float::F16),
            (
                Atom { factors: true, group: 32, scale: Float::BF16, ..atom },
                Terms { sums: false, offsets: true, pixels: false },
                Float::F32,
            ),
            (Atom { bits: 8, group: 0, ..atom }, plain, Float::BF16),
            (Atom { zero: true, group: 32, ..atom }, Terms { sums: true, offsets: true, pixels: false }, Float::F32),
            (
                Atom { bits: 8, zero: true, group: 0, scale: Float::BF16, factors: false },
                Terms { sums: true, offsets: true, pixels: false },
                Float::F16,
            ),
        ];
        forms.into_iter().map(move |(atom, terms, out)| {
            config::config(atom, terms, [m, 21504, 14336], out, 132).instance(atom, terms, out, Activation::None)
        })
    });
    all.chain(quantize_activations::instances()).collect()
}

/// The form of atoms and terms, or why there is none.
pub fn form(problem: &Problem) -> std::result::Result<(Atom, Terms), Reason> {
    let refuse = |why: &str| Err(Reason(why.into()));
    let Some(format) = problem.format else { return refuse("multiplies codes, the weights are dense") };
    if !format.act.is_quantized() {
        return refuse("multiplies quantised activations (a8), the format says exact ones");
    }
    wna16::sized(problem)?;
    let atom = Atom::of_levels(format.weight, problem.k).map_err(|why| Reason(why.to_string()))?;
    Ok((atom, Terms { sums: atom.zero, offsets: format.act == Act::A8Asym, pixels: false }))
}

/// How the codes of x lie.
pub(super) fn x_form(problem: &Problem, atom: Atom, terms: Terms) -> Form {
    let group = problem.format.map_or(problem.k, |format| format.weight.activation_group().len(problem.k)).max(1);
    // Zero points need the sums of an atom's groups, which may be parts of one.
    let piece = if terms.sums && atom.group > 0 { atom.group } else { group };
    Form { m: problem.m, k: problem.k, group, piece, sums: terms.sums, offsets: terms.offsets, pixels: false }
}

/// The configuration of a product and who computes what: the one for its shape, or one that was asked for.
fn choose(
    caps: &Caps,
    (atom, terms): (Atom, Terms),
    [m, n, k]: [usize; 3],
    out: Float,
    asked: Option<Config>,
) -> (Config, config::Schedule) {
    let (shape, multiprocessors) = ([m.max(1), n.max(1), k.max(1)], caps.multiprocessors.max(1) as usize);
    let config = asked.unwrap_or_else(|| config::config(atom, terms, shape, out, multiprocessors));
    (config, config.schedule(shape, multiprocessors))
}

/// Whether numbers of 32 bits hold the sums of so many columns, and the source's division.
pub(super) fn check_columns(atom: Atom, k: usize) -> std::result::Result<(), Reason> {
    if atom.has_rows() && k > MOST_COLUMNS {
        return Err(Reason(format!("adds up to {MOST_COLUMNS} columns of one scale, k is {k}")));
    }
    if k > MOST_K {
        return Err(Reason(format!("multiplies up to {MOST_K} columns, k is {k}")));
    }
    Ok(())
}

/// What the source divides the number of a group of atoms by to come to that of x: exact up to [`MOST_K`] columns in groups of 32.
/// 0: each has its own.
pub(super) fn ratio(x: Form, atom: Atom) -> u32 {
    let ratio = x.piece.checked_div(atom.group).filter(|&ratio| ratio > 1);
    ratio.map_or(0, |ratio| ((1 << 32) / ratio + 1) as u32)
}

fn supports(caps: &Caps, problem: &Problem) -> std::result::Result<(), Reason> {
    let (atom, terms) = form(problem)?;
    let refuse = |why: String| Err(Reason(why));
    check_columns(atom, problem.k)?;
    let (config, schedule) = choose(caps, (atom, terms), [problem.m, problem.n, problem.k], problem.y, None);
    let shared = config.shared_bytes(atom, terms, problem.y);
    if shared > caps.shared_bytes as usize {
        return refuse(format!("needs {shared} bytes of shared memory, a block has {}", caps.shared_bytes));
    }
    if !schedule.fits() {
        return refuse("more tiles than 32 bits count".into());
    }
    Ok(())
}

fn room(caps: &Caps, problem: &Problem, asked: Option<Config>) -> std::result::Result<Room, Reason> {
    let (atom, terms) = form(problem)?;
    let (config, schedule) = choose(caps, (atom, terms), [problem.m, problem.n, problem.k], problem.y, asked);
    Ok(Room::new(x_form(problem, atom, terms), config.parts_bytes(&schedule)))
}

/// What a launch was prepared for.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Key {
    codes: u64,
    m: usize,
    out: Float,
    activation: Activation,
    asked: Option<Config>,
}

/// What is the same in every launch for a key.
#[derive(Debug)]
struct Prepared {
    schedule: config::Schedule,
    box_rows: usize,
    map: TensorMap,
    launch: Launch,
    function: Function,
}

impl Prepared {
    fn new(gpu: &Gpu, w: &Weights, terms: Terms, key: &Key, codes: View<'_, u8>) -> Result<Self> {
        let ([n, k], atom) = (w.shape(), w.atom());
        let (config, schedule) = choose(&gpu.caps(), (atom, terms), [key.m, n, k], key.out, key.asked);
        let box_rows = config.tokens.min(key.m);
        let pitch = k.next_multiple_of(128);
        let tiles = Tiles {
            shape: [key.m, pitch],
            stride: pitch,
            tile: [box_rows as u32, 128],
            swizzle: Swizzle::Bytes128,
            promotion: Promotion::Bytes256,
        };
        Ok(Self {
            schedule,
            box_rows,
            map: TensorMap::of_bytes(codes, &tiles)?,
            launch: Launch {
                grid: [(schedule.workers * config.split) as u32, 1, 1],
                cluster: [config.split as u32, 1, 1],
                shared_bytes: config.shared_bytes(atom, terms, key.out) as u32,
                programmatic: true,
                ..Launch::linear(1, config.threads() as u32)
            },
            function: gpu.function(&config.instance(atom, terms, key.out, key.activation))?,
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
    terms: u64,
    y: u64,
    bias: u64,
    parts: u64,
    counters: u64,
    m: i32,
    n: i32,
    k: i32,
    box_bytes: i32,
    m_pitch: i32,
    steps: i32,
    rows: i32,
    columns: i32,
    waves: i32,
    workers: i32,
    sharers: i32,
    first: i32,
    units: i32,
    ratio: u32,
    groups: i32,
    padding: i32,
}

impl Arguments {
    /// Of m rows in boxes of `box_rows`, with x in a form; terms, y, bias and the workspace are addresses, of the bias 0 if there is
    /// none.
    pub(in crate::cuda) fn new(
        w: &Weights,
        schedule: &config::Schedule,
        [terms, y, bias, workspace]: [u64; 4],
        (m, box_rows): (usize, usize),
        x: &Form,
    ) -> Self {
        let config::Schedule { steps, rows, columns, waves, workers, sharers, cut } = *schedule;
        let [n, k] = w.shape();
        Self {
            w: w.atoms(),
            rows_of_scales: w.rows(),
            terms,
            y,
            bias,
            parts: workspace + Workspace::COUNTER_BYTES as u64,
            counters: workspace,
            m: m as i32,
            n: n as i32,
            k: k as i32,
            box_bytes: (box_rows * 128) as i32,
            m_pitch: x.m_pitch() as i32,
            steps: steps as i32,
            rows: rows as i32,
            columns: columns as i32,
            waves: waves as i32,
            workers: workers as i32,
            sharers: sharers as i32,
            first: (waves * workers) as i32,
            units: (cut * steps) as i32,
            ratio: ratio(*x, w.atom()),
            groups: x.pieces() as i32,
            padding: 0,
        }
    }
}

/// Puts a product into a stream with a configuration of the caller's choice, one of [`config::all`] for the weight's form and y:
/// for measuring which is best.
///
/// Errors: those of [`super::run`], another configuration, a workspace that is too small for it.
pub fn run_as(config: Config, gpu: &Gpu, stream: &Stream, call: &Call<'_>) -> Result<()> {
    super::check(&KERNEL, gpu, call)?;
    let (atom, terms) = form(&super::problem(call)).map_err(refuse)?;
    if !config::all(atom, terms, call.y.dtype()).contains(&config) {
        return Err(Error::invalid(NAME, "a configuration for this weight", format!("{config:?}")));
    }
    match call.y.is_empty() {
        true => Ok(()),
        false => run(gpu, stream, call, Some(config)),
    }
}

fn run(gpu: &Gpu, stream: &Stream, call: &Call<'_>, asked: Option<Config>) -> Result<()> {
    let Packed::Wna16(w) = call.w else {
        return Err(Error::invalid(NAME, "weights in layout cuda_wna16", call.w.layout()));
    };
    let problem = super::problem(call);
    let room = room(&gpu.caps(), &problem, asked).map_err(refuse)?;
    let workspace = call.workspace.as_deref().map(Workspace::view);
    let Some(workspace) = workspace.filter(|workspace| workspace.len() >= room.bytes) else {
        let given = call.workspace.as_ref().map_or(0, |workspace| workspace.bytes());
        return Err(Error::invalid(NAME, format!("a workspace of {} bytes", room.bytes), given.to_string()));
    };
    let (atom, terms) = form(&problem).map_err(refuse)?;
    let x = x_form(&problem, atom, terms);
    let codes = workspace.slice(room.codes..room.codes + x.codes_bytes());
    let terms = workspace.pointer() + room.terms as u64;
    quantize_activations::run(gpu, stream, x, call.x, w.order(), [codes.pointer(), terms])?;
    let rows = Rows { codes, terms, asked };
    multiply(gpu, stream, w, &problem, rows, call.epilogue, call.y.pointer(), workspace)
}

fn refuse(why: Reason) -> Error {
    Error::invalid(NAME, "a product that it serves", why.to_string())
}

/// How x must lie as codes for a problem that it supports.
pub(super) fn rows_form(problem: &Problem) -> Option<Form> {
    let (atom, terms) = form(problem).ok()?;
    Some(x_form(problem, atom, terms))
}

/// Quantised x: codes, and the address of terms, as [`rows_form`] says; and the configuration, if one is asked for.
pub(super) struct Rows<'a> {
    pub codes: View<'a, u8>,
    pub terms: u64,
    pub asked: Option<Config>,
}

/// Multiplies what is quantised, into the problem's y at an address, with a workspace of the kernel's size.
#[expect(clippy::too_many_arguments, reason = "a call with other rows")]
pub(super) fn multiply(
    gpu: &Gpu,
    stream: &Stream,
    w: &Weights,
    problem: &Problem,
    of_x: Rows<'_>,
    epilogue: Epilogue<'_>,
    y: u64,
    workspace: View<'_, u8>,
) -> Result<()> {
    let (atom, terms) = form(problem).map_err(refuse)?;
    let x = x_form(problem, atom, terms);
    if !y.is_multiple_of(16) {
        return Err(Error::invalid(NAME, "y that begins at a multiple of 16 bytes", format!("{y:#x}")));
    }
    let Rows { codes, terms: of_x, asked } = of_x;
    let key = Key { codes: codes.pointer(), m: problem.m, out: problem.y, activation: epilogue.activation, asked };
    let prepared = w.launches_a8.0.get(key, |key| Prepared::new(gpu, w, terms, key, codes))?;
    let bias = epilogue.bias.map_or(0, |bias: View<'_, f32>| bias.pointer());
    let addresses = [of_x, y, bias, workspace.pointer()];
    let arguments = Arguments::new(w, &prepared.schedule, addresses, (problem.m, prepared.box_rows), &x);
    let args = [Arg::new(&arguments), Arg::new(&prepared.map)];
    // SAFETY: the parameters are the source's; lengths of x, y, bias and workspace were checked by `run_with`, the others
    // are those of the packed weight.
    unsafe { prepared.function.launch(stream, &prepared.launch, &args) }
}
