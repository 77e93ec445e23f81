//! Launches of `experts_gemv.cu`: products of a few rows with the experts that they have chosen.

use super::{launch, narrow, overlapping, same_length};
use crate::cuda::Gpu;
use crate::cuda::driver::{Arg, Buffer, FloatView, Stream, View, ViewMut};
use crate::cuda::matmul::Packed;
use crate::cuda::parameters::{Parameters, parameters};
use crate::cuda::sources::{Instance, Source};
use crate::error::{Error, Result};
use crate::kernel::Reason;
use crate::layout::cuda_wna16::{Atom, STEP, STRIP};
use crate::tensor::Float;

static SOURCE: Source =
    Source { path: "nn/experts_gemv.cu", text: include_str!("experts_gemv.cu"), parameters: &[Params::LAYOUT] };

const OP: &str = "experts_gemv";

/// As in the source.
const WARPS: usize = 8;
const ROWS: usize = STRIP / 4;
/// Warps that keep a multiprocessor's loads going.
const WARPS_OF_MULTIPROCESSOR: usize = 24;
/// Units of 128 columns that a warp has at least, where rows are divided.
const LEAST_UNITS: usize = 4;
/// Bytes of shared memory that every processor has.
const MOST_SHARED: usize = 48 << 10;

parameters! {
    /// As in the source.
    struct Params {
        weights: u64,
        biases: u64,
        ids: u64,
        x: u64,
        y: u64,
        n: u32,
        k: u32,
        experts: u32,
        sharing: u32,
        split: u32,
        padding: u32,
    }
}

/// Weights of all experts of a layer, for products with those that a device chooses. It holds addresses: of the weights, which
/// must outlive it.
#[derive(Debug)]
pub struct ExpertWeights {
    atom: Atom,
    dtype: Float,
    n: usize,
    k: usize,
    weights: Buffer<u64>,
    biases: Option<Buffer<u64>>,
}

fn instance(atom: Atom, dtype: Float) -> Instance {
    let numbers = [
        ("BITS", atom.bits as usize),
        ("BF16", (dtype == Float::BF16).into()),
        ("GROUP", atom.group),
        ("ZERO", atom.zero.into()),
        ("OUT", 2),
        ("ACTIVATION", 0),
    ];
    Instance::new(&SOURCE, "experts_gemv").with(numbers.map(|(name, value)| format!("HB_{name}={value}")))
}

/// Of some formats, for the record of what kernels take.
pub(super) fn samples() -> Vec<Instance> {
    let of = |bits, group, zero, scale| instance(Atom { bits, group, zero, scale, factors: false }, scale);
    vec![of(4, 128, false, Float::F16), of(4, 32, true, Float::BF16), of(8, 128, false, Float::F16)]
}

impl ExpertWeights {
    /// Of experts of one shape and format, each with its bias; or why there is no kernel for them: it takes sm_80, codes of 4 or 8
    /// bits with scales of groups along k in the type of x, columns in order, exact activations, and rows that fit shared memory.
    pub fn new(
        gpu: &Gpu,
        stream: &Stream,
        experts: &[(&Packed, Option<View<'_, f32>>)],
        dtype: Float,
    ) -> Result<std::result::Result<Self, Reason>> {
        let refuse = |why: &str| Ok(Err(Reason(why.to_owned())));
        if gpu.caps().arch.number < 80 || dtype == Float::F32 {
            return refuse("takes sm_80, and x in f16 or bf16");
        }
        let atom_of = |w: &Packed| match w {
            Packed::Wna16(of) if w.in_order() && !w.format().act.is_quantized() => Some(of.atom()),
            _ => None,
        };
        let Some(first) = experts.first() else { return refuse("takes experts") };
        let ([n, k], Some(atom)) = (first.0.shape(), atom_of(first.0)) else {
            return refuse("takes weights in layout cuda_wna16, with columns in order and exact activations");
        };
        if atom.group == 0 || atom.factors || atom.scale != dtype {
            return refuse("takes scales of groups in the type of x, on one level");
        }
        if k.next_multiple_of(STEP) * 2 > MOST_SHARED || !k.is_multiple_of(8) {
            return refuse("takes rows of a multiple of 8 elements that fit 48 KB");
        }
        let (mut weights, mut biases) = (Vec::new(), Vec::new());
        for (w, bias) in experts {
            let Packed::Wna16(of) = w else { return refuse("takes weights in layout cuda_wna16") };
            if w.shape() != [n, k] || atom_of(w) != Some(atom) || bias.is_some() != first.1.is_some() {
                return refuse("takes experts of one shape and format");
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
        Ok(Ok(Self { atom, dtype, n, k, weights: upload(&weights)?, biases }))
    }

    /// The kernel as it is compiled.
    pub fn instance(&self) -> Instance {
        instance(self.atom, self.dtype)
    }

    /// `y[i] = W[ids[i]] · x[i / sharing]`, and its bias. The bits of a row depend on its x and its expert alone.
    ///
    /// *Shapes:* ids `[pairs]`, below the number of experts, x `[pairs / sharing, k]`, y `[pairs, n]`. *Accuracy:* within what
    /// [`crate::format::reference::Bound`] says. *Errors:* lengths or types that do not fit.
    pub fn multiply(
        &self,
        gpu: &Gpu,
        stream: &Stream,
        ids: View<'_, u32>,
        (x, sharing): (FloatView<'_>, usize),
        y: ViewMut<'_, f32>,
    ) -> Result<()> {
        let Self { atom, dtype, n, k, weights, biases } = self;
        let (pairs, experts) = (ids.len(), weights.len());
        if sharing == 0 || !pairs.is_multiple_of(sharing) || x.dtype() != *dtype {
            let expected = format!("rows of x in {dtype}, each of a whole number of choices");
            return Err(Error::invalid(OP, expected, format!("{pairs} of {sharing}, in {}", x.dtype())));
        }
        same_length(OP, "x", (pairs / sharing).checked_mul(*k), x.len())?;
        same_length(OP, "y", pairs.checked_mul(*n), y.len())?;
        if !x.pointer().is_multiple_of(16) {
            return Err(Error::invalid(OP, "x at a multiple of 16 bytes", format!("{:#x}", x.pointer())));
        }
        if y.is_empty() {
            return Ok(());
        }
        let (row_blocks, units) = (n.div_ceil(ROWS), k.div_ceil(STEP));
        // As if there were one row, so that its bits do not depend on others.
        let enough = |split: &usize| {
            row_blocks * split >= WARPS_OF_MULTIPROCESSOR * gpu.caps().multiprocessors as usize
                || units < 2 * split * LEAST_UNITS
        };
        let split = [1, 2, 4].into_iter().find(enough).unwrap_or(WARPS);
        let params = Params {
            weights: weights.pointer(),
            biases: biases.as_ref().map_or(0, Buffer::pointer),
            ids: ids.pointer(),
            x: x.pointer(),
            y: y.pointer(),
            n: narrow(OP, "outputs", *n)?,
            k: narrow(OP, "columns", *k)?,
            experts: narrow(OP, "experts", experts)?,
            sharing: narrow(OP, "choices", sharing)?,
            split: narrow(OP, "warps", split)?,
            padding: 0,
        };
        let shared = narrow(OP, "bytes", k.next_multiple_of(STEP) * 2)?;
        let grid = [row_blocks.div_ceil(WARPS / split), pairs, 1];
        let form = overlapping(gpu, launch(OP, grid, 32 * WARPS as u32, shared)?);
        let function = gpu.function(&instance(*atom, *dtype))?;
        // SAFETY: the one parameter is the source's `Params`, whose lengths were checked above; the weights outlive what holds their
        // addresses.
        unsafe { function.launch(stream, &form, &[Arg::new(&params)]) }
    }
}
