//! Launches of `experts_gemv.cu`: products of a few rows with the experts that they have chosen.

use super::{Gate, launch, narrow, overlapping, same_length};
use crate::cuda::Gpu;
use crate::cuda::driver::{Arg, Buffer, FloatView, FloatViewMut, Stream, View, ViewMut};
use crate::cuda::matmul::{Packed, grouped};
use crate::cuda::parameters::{Parameters, parameters};
use crate::cuda::sources::{Instance, Source};
use crate::error::{Error, Result};
use crate::kernel::{Activation, Reason};
use crate::layout::cuda_wna16::{Atom, STEP, STRIP};
use crate::tensor::Float;

static SOURCE: Source =
    Source { path: "nn/experts_gemv.cu", text: include_str!("experts_gemv.cu"), parameters: &[Params::LAYOUT] };

const OP: &str = "experts_gemv";

/// As in the source: warps of a block, blocks of a multiprocessor, rows of an item, experts that a row chooses at most.
const WARPS: u32 = 16;
const BLOCKS: usize = 2;
const ROWS: usize = STRIP / 4;
const MOST_CHOICES: usize = 16;

parameters! {
    /// As in the source.
    struct Params {
        weights: u64,
        biases: u64,
        ids: u64,
        shares: u64,
        x: u64,
        y: u64,
        n: u32,
        k: u32,
        experts: u32,
        top_k: u32,
    }
}

/// Weights of all experts of a layer, for products with those that a device chooses: gated ones, whose outputs are each choice's, or
/// others, whose outputs are added up by the shares of a row. It holds addresses: of the weights, which must outlive it.
#[derive(Debug)]
pub struct ExpertWeights {
    atom: Atom,
    dtype: Float,
    gate: Option<Gate>,
    n: usize,
    k: usize,
    weights: Buffer<u64>,
    biases: Option<Buffer<u64>>,
}

fn instance(atom: Atom, dtype: Float, gate: Option<Gate>) -> Instance {
    let numbers = [
        ("BITS", atom.bits as usize),
        ("BF16", (dtype == Float::BF16).into()),
        ("GROUP", atom.group),
        ("ZERO", atom.zero.into()),
        ("OUT", 2),
        ("COMBINED", gate.is_none().into()),
    ];
    let all = numbers.into_iter().fold(Instance::new(&SOURCE, OP), |all, (name, value)| all.defining(name, value));
    grouped::with_output_function(all, Activation::None, gate)
}

/// Of some formats, for the record of what kernels take.
pub(super) fn samples() -> Vec<Instance> {
    let of = |bits, group, zero, scale| {
        let atom = Atom { bits, group, zero, scale, factors: false };
        [None, Some(Gate::SWIGLU)].map(|gate| instance(atom, scale, gate))
    };
    [of(4, 128, false, Float::F16), of(4, 32, true, Float::BF16), of(8, 128, false, Float::F16)].concat()
}

/// What rows have chosen.
#[derive(Clone, Copy, Debug)]
pub struct Choices<'a> {
    /// Experts, `[rows, top_k]`, below the number of experts.
    pub ids: View<'a, u32>,
    /// Of a row.
    pub top_k: usize,
}

impl ExpertWeights {
    /// Of experts of one shape and format, each with its bias; with a gate of those that [`crate::cuda::matmul::Packer::pack_gated`] has
    /// packed. Or why there is no kernel for them: it takes sm_80, codes of 4 or 8 bits with scales of groups along k in the type of x,
    /// columns in order, exact activations.
    pub fn new(
        gpu: &Gpu,
        stream: &Stream,
        experts: &[(&Packed, Option<View<'_, f32>>)],
        gate: Option<Gate>,
        dtype: Float,
    ) -> Result<std::result::Result<Self, Reason>> {
        let refuse = |why: &str| Ok(Err(Reason(why.into())));
        let Some(first) = experts.first() else { return refuse("takes at least one expert") };
        if gpu.caps().arch.number < 80 || dtype == Float::F32 {
            return refuse("takes x in 16 bits from sm_80 on");
        }
        // Of gates the packed format is of other rows than those that the weight tells.
        let atom_of = |w: &Packed| match w {
            Packed::Wna16(of) if !w.format().act.is_quantized() && w.in_order() => Some(of.atom()),
            _ => None,
        };
        let of_kernel = |atom: &Atom| atom.group > 0 && !atom.factors && atom.scale == dtype;
        let Some(atom) = atom_of(first.0).filter(of_kernel) else {
            return refuse("takes 4 or 8 bits in groups, scales of the type of x, columns in order, exact activations");
        };
        let [n, k] = first.0.shape();
        if k % 8 != 0 {
            return refuse("takes rows of a multiple of 8 elements");
        }
        let (mut weights, mut biases) = (Vec::new(), Vec::new());
        for (w, bias) in experts {
            let Packed::Wna16(of) = w else { return refuse("takes weights in layout cuda_wna16") };
            if w.shape() != [n, k] || atom_of(w) != Some(atom) || bias.is_some() != first.1.is_some() {
                return refuse("takes experts of one shape and format");
            }
            if w.is_gated() != gate.is_some() || gate.is_some_and(|gate| !gate.gated) {
                return refuse("takes gates for weights that are packed with them");
            }
            weights.push(of.atoms());
            if let Some(bias) = bias {
                same_length(OP, "a bias", Some(n), bias.len())?;
                biases.push(bias.pointer());
            }
        }
        let upload = |addresses: &[u64]| {
            let mut buffer = gpu.context().allocate(addresses.len())?;
            stream.upload(addresses, buffer.view_mut())?;
            Ok::<_, Error>(buffer)
        };
        let biases = if biases.is_empty() { None } else { Some(upload(&biases)?) };
        Ok(Ok(Self { atom, dtype, gate, n, k, weights: upload(&weights)?, biases }))
    }

    /// The kernel as it is compiled.
    pub fn instance(&self) -> Instance {
        instance(self.atom, self.dtype, self.gate)
    }

    /// Whether rows that choose so many experts each are multiplied: what they are multiplied with fits a block's shared memory.
    pub fn serves(&self, gpu: &Gpu, top_k: usize) -> bool {
        top_k <= MOST_CHOICES && self.shared_bytes(top_k) <= (gpu.caps().shared_bytes as usize + 1024) / BLOCKS - 4096
    }

    fn shared_bytes(&self, top_k: usize) -> usize {
        let rows = if self.gate.is_some() { 1 } else { top_k };
        self.k.next_multiple_of(STEP) * 2 * rows
    }

    /// `y[r][i] = f(gate) · other` of `W[ids[r][i]] · x[r] + bias`. The bits of a row depend on its x and its experts alone.
    ///
    /// *Shapes:* x `[rows, k]`, y `[rows, top_k, n / 2]`, both of one type. *Accuracy:* gate and other within what
    /// [`crate::format::reference::Bound`] says, then as [`super::gate()`]. *Errors:* lengths or types that do not fit, weights that are
    /// not gated.
    pub fn gated(
        &self,
        gpu: &Gpu,
        stream: &Stream,
        choices: Choices<'_>,
        x: FloatView<'_>,
        y: FloatViewMut<'_>,
    ) -> Result<()> {
        let rows = self.rows(choices)?;
        if self.gate.is_none() || y.dtype() != self.dtype {
            return Err(Error::invalid(OP, format!("gated weights, y in {}", self.dtype), y.dtype().to_string()));
        }
        same_length(OP, "y", choices.ids.len().checked_mul(self.n / 2), y.len())?;
        self.launch(gpu, stream, choices, rows, (x, rows), [0, y.pointer()])
    }

    /// `y[r] = Σ shares[r][i] · (W[ids[r][i]] · x[r][i] + bias)`, in the order of i. The bits of a row depend on its x, its experts and
    /// shares alone.
    ///
    /// *Shapes:* shares `[rows, top_k]`, x `[rows, top_k, k]`, y `[rows, n]`. *Accuracy:* within what
    /// [`crate::format::reference::Bound`] says of each product, and two roundings of f32 for a share. *Errors:* lengths or types that
    /// do not fit, gated weights.
    pub fn combined(
        &self,
        gpu: &Gpu,
        stream: &Stream,
        (choices, shares): (Choices<'_>, View<'_, f32>),
        x: FloatView<'_>,
        y: ViewMut<'_, f32>,
    ) -> Result<()> {
        let rows = self.rows(choices)?;
        if self.gate.is_some() {
            return Err(Error::invalid(OP, "weights without gates", "gated ones"));
        }
        same_length(OP, "shares", Some(choices.ids.len()), shares.len())?;
        same_length(OP, "y", rows.checked_mul(self.n), y.len())?;
        self.launch(gpu, stream, choices, rows, (x, choices.ids.len()), [shares.pointer(), y.pointer()])
    }

    fn rows(&self, Choices { ids, top_k }: Choices<'_>) -> Result<usize> {
        if top_k == 0 || top_k > MOST_CHOICES || !ids.len().is_multiple_of(top_k) {
            let expected = format!("rows that choose from 1 to {MOST_CHOICES} experts");
            return Err(Error::invalid(OP, expected, format!("{} of {top_k}", ids.len())));
        }
        Ok(ids.len() / top_k)
    }

    fn launch(
        &self,
        gpu: &Gpu,
        stream: &Stream,
        Choices { ids, top_k }: Choices<'_>,
        rows: usize,
        (x, rows_of_x): (FloatView<'_>, usize),
        [shares, y]: [u64; 2],
    ) -> Result<()> {
        let Self { n, k, .. } = *self;
        same_length(OP, "x", rows_of_x.checked_mul(k), x.len())?;
        if x.dtype() != self.dtype || !x.pointer().is_multiple_of(16) {
            let expected = format!("x in {} at a multiple of 16 bytes", self.dtype);
            return Err(Error::invalid(OP, expected, format!("{} at {:#x}", x.dtype(), x.pointer())));
        }
        if rows == 0 || n == 0 {
            return Ok(());
        }
        if !self.serves(gpu, top_k) {
            return Err(Error::invalid(OP, "x that fits shared memory", format!("{top_k} rows of {k}")));
        }
        let params = Params {
            weights: self.weights.pointer(),
            biases: self.biases.as_ref().map_or(0, Buffer::pointer),
            ids: ids.pointer(),
            shares,
            x: x.pointer(),
            y,
            n: narrow(OP, "outputs", n)?,
            k: narrow(OP, "columns", k)?,
            experts: narrow(OP, "experts", self.weights.len())?,
            top_k: narrow(OP, "choices", top_k)?,
        };
        let items = n.div_ceil(ROWS) * if self.gate.is_some() { top_k } else { 1 };
        let blocks = items.min(BLOCKS * gpu.caps().multiprocessors.max(1) as usize);
        let shared = narrow(OP, "bytes", self.shared_bytes(top_k))?;
        let form = overlapping(gpu, launch(OP, [blocks, rows, 1], 32 * WARPS, shared)?);
        let function = gpu.function(&self.instance())?;
        // SAFETY: the one parameter is the source's `Params`, whose lengths were checked above; the weights outlive what holds their
        // addresses.
        unsafe { function.launch(stream, &form, &[Arg::new(&params)]) }
    }
}
