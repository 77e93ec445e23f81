//! Launches of `experts_gemv.cu`: the experts of a few rows, each choice by itself, in one kernel.

use super::{Gate, launch, narrow, same_length};
use crate::cuda::driver::{Arg, Buffer, FloatView, FloatViewMut, Launch, Stream, View, ViewMut};
use crate::cuda::matmul::{Packed, grouped, with_table};
use crate::cuda::parameters::{Parameters, parameters};
use crate::cuda::sources::{Arch, Instance, Source};
use crate::cuda::{Caps, Gpu};
use crate::error::{Error, Result};
use crate::kernel::{Activation, Reason};
use crate::layout::cuda_wna16::{Atom, STEP, STRIP};
use crate::tensor::Float;

static SOURCE: Source =
    Source { path: "nn/experts_gemv.cu", text: include_str!("experts_gemv.cu"), parameters: &[Params::LAYOUT] };

const OP: &str = "experts_gemv";

/// As in the source: warps of a block, rows of an item at least, experts that a row chooses at most.
const WARPS: u32 = 16;
const ROWS: usize = STRIP / 4;
const MOST_CHOICES: usize = 16;

/// Counters of a row.
const COUNTERS: usize = 2;

/// What it is expected to take: microseconds besides weights, the share of its bandwidth on the data sheet that memory gives, clocks in
/// which a multiprocessor converts and multiplies an atom (`docs/decisions/0020-experts-together.md`).
const BEGINS: f64 = 11.0;
const OF_BANDWIDTH: f64 = 0.77;
const CONVERTING: f64 = 225.0;

/// Bytes of shared memory that are not dynamic, with what each block takes besides.
const STATIC_BYTES: usize = 18 << 10;

parameters! {
    /// As in the source.
    struct Weights {
        atoms: u64,
        biases: u64,
    }

    /// As in the source.
    struct Params {
        up: Weights,
        down: Weights,
        ids: u64,
        shares: u64,
        x: u64,
        inner: u64,
        y: u64,
        counters: u64,
        hidden: u32,
        width: u32,
        experts: u32,
        top_k: u32,
    }
}

/// Up, with its gate, and down of all experts of a layer, for rows that a device deals out. It holds addresses: of the weights, which
/// must outlive it.
#[derive(Debug)]
pub struct ExpertsGemv {
    atom: Atom,
    dtype: Float,
    gate: Gate,
    hidden: usize,
    width: usize,
    top_k: usize,
    experts: usize,
    /// Of 16 rows, of an item of down.
    blocks: usize,
    /// Rows at most, each of which has a block at least: multiprocessors.
    most_rows: usize,
    /// Atoms and biases of up, then of down; empty: there are none.
    addresses: [Buffer<u64>; 4],
}

/// Rows, and what they have chosen: x `[rows, hidden]`, ids and shares `[rows, top_k]`.
#[derive(Clone, Copy, Debug)]
pub struct ChosenRows<'a> {
    /// Rows.
    pub x: FloatView<'a>,
    /// Experts of each, below their number.
    pub ids: View<'a, u32>,
    /// Their shares.
    pub shares: View<'a, f32>,
}

/// Units on their way of each warp: what registers hold beside scales and zero points.
fn units(atom: Atom) -> usize {
    let parameters = atom.groups() * if atom.zero { 2 } else { 1 };
    if (parameters, atom.field_bits()) == (8, 4) { 1 } else { 2 }
}

/// Blocks of 16 rows of an item of down: as many as up has, or one where fewer than half of the multiprocessors had an item then.
fn blocks_of_down(atom: Atom, hidden: usize, multiprocessors: usize) -> usize {
    let most = 8 / atom.field_bits() as usize;
    if 2 * hidden.div_ceil(16 * most) <= multiprocessors { 1 } else { most }
}

fn instance(atom: Atom, dtype: Float, gate: Gate, blocks: usize) -> Instance {
    let numbers = [
        ("BITS", atom.bits as usize),
        ("BF16", (dtype == Float::BF16).into()),
        ("GROUP", atom.group),
        ("ZERO", atom.zero.into()),
        ("OUT", 2),
        ("AT_ONCE", units(atom)),
        ("OF_DOWN", blocks),
    ];
    let all = numbers.into_iter().fold(Instance::new(&SOURCE, OP), |all, (name, value)| all.defining(name, value));
    let all = with_table(all, atom);
    grouped::with_output_function(all, Activation::None, Some(gate))
}

/// Of some formats on a processor, for the record of what kernels take.
pub(super) fn samples(arch: Arch) -> Vec<Instance> {
    let of = |bits, group, zero, scale, blocks| {
        let scale = if arch.multiplies(scale) { scale } else { Float::F16 };
        instance(Atom { bits, group, zero, scale, ..Atom::W4_G128 }, scale, Gate::SWIGLU, blocks)
    };
    vec![
        of(4, 128, false, Float::F16, 2),
        of(4, 128, false, Float::F16, 1),
        of(4, 32, true, Float::BF16, 2),
        of(4, 64, true, Float::F16, 1),
        of(8, 128, false, Float::F16, 1),
        of(8, 32, true, Float::F16, 1),
        of(2, 64, false, Float::F16, 2),
        of(3, 128, true, Float::BF16, 2),
        of(5, 32, false, Float::F16, 1),
        instance(Atom { table: Some(Atom::A_TABLE), group: 32, ..Atom::W4_G128 }, Float::F16, Gate::SWIGLU, 1),
    ]
}

/// A weight of an expert, with its bias.
pub type ExpertWeight<'a> = (&'a Packed, Option<View<'a, f32>>);

impl ExpertsGemv {
    /// Of experts of one shape and format, up as [`crate::cuda::matmul::Packer::pack_gated`] packs it, each row of which chooses `top_k`
    /// ones. Or why there is no kernel for them: it takes tensor cores for the type of x, codes of 2, 3, 4 or 8 bits with scales of groups along k in the type of x,
    /// columns in order, exact activations, and what a row's experts read within shared memory.
    pub fn new(
        gpu: &Gpu,
        stream: &Stream,
        [up, down]: [&[ExpertWeight<'_>]; 2],
        top_k: usize,
        dtype: Float,
    ) -> Result<std::result::Result<Self, Reason>> {
        let refuse = |why: &str| Ok(Err(Reason(why.into())));
        let (Some((of_up, _)), Some((of_down, _))) = (up.first(), down.first()) else {
            return refuse("takes at least one expert");
        };
        let Some(gate) = of_up.gate().filter(|_| gpu.caps().arch.multiplies(dtype)) else {
            return refuse("takes x in f16 from sm_75 on or bf16 from sm_80 on, and up packed with its gate");
        };
        let atom_of = |w: &Packed| match w {
            Packed::Wna16(of) if !w.format().act.is_quantized() && w.in_order() => Some(of.atom()),
            _ => None,
        };
        let of_kernel = |atom: &Atom| atom.group > 0 && !atom.factors && !atom.is_wide() && atom.scale == dtype;
        let Some(atom) = atom_of(of_up).filter(of_kernel) else {
            return refuse("takes codes in groups, scales of the type of x, columns in order, exact activations");
        };
        let ([n, hidden], [outputs, width]) = (of_up.shape(), of_down.shape());
        let alike = |all: &[ExpertWeight<'_>], gate: Option<Gate>| {
            let (first, bias) = &all[0];
            all.iter().all(|(w, other)| {
                w.shape() == first.shape()
                    && atom_of(w) == Some(atom)
                    && w.gate() == gate
                    && other.is_some() == bias.is_some()
            })
        };
        if !alike(up, Some(gate)) || !alike(down, None) || up.len() != down.len() {
            return refuse("takes experts of one shape and format, up packed with its gate");
        }
        if n != 2 * width || outputs != hidden || hidden % 8 != 0 || width % 8 != 0 {
            return refuse("takes down that reads what up leaves, in rows of a multiple of 8 elements");
        }
        for (all, n) in [(up, n), (down, outputs)] {
            for bias in all.iter().filter_map(|(_, bias)| bias.as_ref()) {
                same_length(OP, "a bias", Some(n), bias.len())?;
            }
        }
        let upload = |addresses: Vec<u64>| {
            let mut buffer = gpu.context().allocate(addresses.len())?;
            stream.upload(&addresses, buffer.view_mut())?;
            Ok::<_, Error>(buffer)
        };
        let atoms = |all: &[ExpertWeight<'_>]| {
            upload(
                all.iter().filter_map(|(w, _)| if let Packed::Wna16(w) = w { Some(w.atoms()) } else { None }).collect(),
            )
        };
        let biases = |all: &[ExpertWeight<'_>]| {
            upload(all.iter().filter_map(|(_, bias)| Some(bias.as_ref()?.pointer())).collect())
        };
        let addresses = [atoms(up)?, biases(up)?, atoms(down)?, biases(down)?];
        let most_rows = gpu.caps().multiprocessors.max(1) as usize;
        let blocks = blocks_of_down(atom, hidden, most_rows);
        let of = Self { atom, dtype, gate, hidden, width, top_k, experts: up.len(), blocks, most_rows, addresses };
        let room = gpu.caps().shared_bytes as usize;
        if top_k == 0 || top_k > MOST_CHOICES.min(of.experts) || of.shared_bytes() + STATIC_BYTES > room {
            return refuse("takes up to 16 choices of a row, and what they read within shared memory");
        }
        Ok(Ok(of))
    }

    /// The kernel as it is compiled.
    pub fn instance(&self) -> Instance {
        instance(self.atom, self.dtype, self.gate, self.blocks)
    }

    /// Rows that it takes at most.
    pub fn most_rows(&self) -> usize {
        self.most_rows
    }

    /// Microseconds that so many rows are expected to take: each choice its weights, which memory brings or warps convert; a row has as
    /// many multiprocessors as others.
    pub fn microseconds(&self, caps: &Caps, rows: usize) -> f64 {
        let caps = caps.or_known();
        let steps = |n: usize, k: usize| n.div_ceil(STRIP) * k.div_ceil(STEP);
        let atoms = steps(2 * self.width, self.hidden) + steps(self.hidden, self.width);
        let memory = caps.clocks_of_memory(self.atom.bytes()) / OF_BANDWIDTH / f64::from(caps.multiprocessors);
        let busy = rows * (self.most_rows / rows.max(1));
        let clocks = (rows * self.top_k * atoms) as f64 * memory.max(CONVERTING / busy.max(1) as f64);
        BEGINS + clocks / (f64::from(caps.clock_khz) * 1e-3)
    }

    /// Elements between up and down of so many rows.
    pub fn inner(&self, rows: usize) -> usize {
        rows * self.top_k * self.width
    }

    /// Counters of so many rows, zeros before the first launch; every launch leaves zeros.
    pub fn counters(rows: usize) -> usize {
        COUNTERS * rows
    }

    fn shared_bytes(&self) -> usize {
        let units = self.hidden.div_ceil(STEP).max(self.top_k * self.width.div_ceil(STEP));
        units * STEP * 2
    }

    /// `y[r] = Σ shares[r][i] · (down · (f(gate) · other of up · x[r]) + bias)`, in the order of i, of each its expert `ids[r][i]`. The
    /// bits of a row depend on its x, its experts and shares alone.
    ///
    /// *Shapes:* as [`ChosenRows`] says; inner `[rows, top_k, width]` of the type of x, y `[rows, hidden]`. *Accuracy:* sums within what
    /// [`crate::format::reference::Bound`] says, the gate as [`super::gate()`], rounded once to the type of x. *Errors:* lengths or types
    /// that do not fit.
    pub fn forward(
        &self,
        gpu: &Gpu,
        stream: &Stream,
        ChosenRows { x, ids, shares }: ChosenRows<'_>,
        (inner, counters): (FloatViewMut<'_>, ViewMut<'_, u32>),
        y: ViewMut<'_, f32>,
    ) -> Result<()> {
        let Self { hidden, width, top_k, experts, .. } = *self;
        let rows = ids.len() / top_k;
        same_length(OP, "ids", Some(rows * top_k), ids.len())?;
        same_length(OP, "shares", Some(ids.len()), shares.len())?;
        same_length(OP, "x", rows.checked_mul(hidden), x.len())?;
        same_length(OP, "y", rows.checked_mul(hidden), y.len())?;
        same_length(OP, "inner", Some(self.inner(rows)), inner.len())?;
        same_length(OP, "counters", Some(Self::counters(rows)), counters.len())?;
        let addresses = [x.pointer(), inner.pointer()];
        if [x.dtype(), inner.dtype()] != [self.dtype; 2] || addresses.iter().any(|at| !at.is_multiple_of(16)) {
            let expected = format!("x and inner in {} at multiples of 16 bytes", self.dtype);
            return Err(Error::invalid(
                OP,
                expected,
                format!("{} and {} at {addresses:#x?}", x.dtype(), inner.dtype()),
            ));
        }
        if rows == 0 {
            return Ok(());
        }
        let [up, up_biases, down, down_biases] =
            self.addresses.each_ref().map(|buffer| if buffer.is_empty() { 0 } else { buffer.pointer() });
        let params = Params {
            up: Weights { atoms: up, biases: up_biases },
            down: Weights { atoms: down, biases: down_biases },
            ids: ids.pointer(),
            shares: shares.pointer(),
            x: x.pointer(),
            inner: inner.pointer(),
            y: y.pointer(),
            counters: counters.pointer(),
            hidden: narrow(OP, "columns", hidden)?,
            width: narrow(OP, "columns", width)?,
            experts: narrow(OP, "experts", experts)?,
            top_k: narrow(OP, "choices", top_k)?,
        };
        // A block a multiprocessor at most: those of a row wait for each other.
        let items = (2 * width).div_ceil(ROWS) * top_k;
        let most = self.most_rows;
        if rows > most {
            return Err(Error::invalid(OP, format!("at most {most} rows"), rows.to_string()));
        }
        let shared = narrow(OP, "bytes", self.shared_bytes())?;
        let form = launch(OP, [items.min(most / rows), rows, 1], 32 * WARPS, shared)?;
        let form = Launch { cooperative: true, ..form };
        let function = gpu.function(&self.instance())?;
        // SAFETY: the one parameter is the source's `Params`, whose lengths were checked above; the weights outlive what holds their
        // addresses.
        unsafe { function.launch(stream, &form, &[Arg::new(&params)]) }
    }
}
