//! Weights in layout `cuda_wna16` on a device, and what the kernels that read it do before they multiply.

use super::gather::PIECE;
use super::gemm::Products;
use super::pack::{Packer, Target, Whole};
use super::plans::KeptPlans;
use super::wna8::Terms;
use super::{wna8_mma, wna8_sm90, wna16_mma, wna16_sm90};
use crate::cuda::driver::{Buffer, FloatView, Stream, View};
use crate::cuda::nn::Gate;
use crate::cuda::parameters::float_type;
use crate::cuda::sources::{Instance, Source};
use crate::cuda::tiled::Form;
use crate::cuda::{Caps, Gpu};
use crate::error::{Error, Result};
use crate::format::{Act, Format, WeightFormat};
use crate::kernel::{Activation, Problem, Reason};
use crate::layout::cuda_wna16::{Atom, order_of};
use crate::layout::stored::StoredTensor;
use crate::tensor::Float;

/// Name of the layout.
pub(super) const LAYOUT: &str = "cuda_wna16";

/// What a kernel that reads the layout is compiled with: the form of atoms, types of x and y and what comes last, then the
/// numbers of its configuration.
pub(super) fn instance<const N: usize>(
    (source, kernel): (&'static Source, &str),
    &Form { atom, x, out, .. }: &Form,
    activation: Activation,
    config: [(&str, usize); N],
) -> Instance {
    let (function, low, high) = super::activation(activation);
    let form = [
        ("BITS", atom.bits as usize),
        ("BF16", (x == Float::BF16).into()),
        ("GROUP", atom.group),
        ("ZERO", atom.zero.into()),
        ("OUT", float_type(out) as usize),
        ("ACTIVATION", function as usize),
    ];
    let numbers = form.into_iter().chain(config).map(|(name, value)| format!("HB_{name}={value}"));
    let limits = [("LOW", low), ("HIGH", high)];
    let limits = limits.map(|(name, v)| format!("HB_{name}=__uint_as_float({:#x}u)", v.to_bits()));
    let more = [
        (atom.factors, "FACTORS"),
        (atom.scale == Float::F32, "SCALE_F32"),
        (atom.offset, "W_OFFSET"),
        (atom.multiples, "MULTIPLES"),
    ];
    let more = more.into_iter().filter(|&(has, _)| has).map(|(_, name)| format!("HB_{name}=1"));
    with_table(Instance::new(source, kernel).with(numbers.chain(limits).chain(more)), atom)
}

/// What a kernel that looks codes up in a table is compiled with besides: the table, four codes a word.
pub(in crate::cuda) fn with_table(instance: Instance, atom: Atom) -> Instance {
    let words = atom.table.map(words_of_table).into_iter().flatten().enumerate();
    words.fold(instance, |instance, (i, word)| instance.defining(&format!("TABLE_{i}"), word as usize))
}

/// A table, four codes a word.
pub(super) fn words_of_table(table: [u8; 16]) -> [u32; 4] {
    std::array::from_fn(|i| u32::from_le_bytes(std::array::from_fn(|j| table[4 * i + j])))
}

/// The products that each kernel of the layout keeps prepared.
#[derive(Debug, Default)]
pub(super) struct PreparedProducts {
    pub wna16_mma: Products<wna16_mma::Wna16Mma>,
    pub wna16_sm90: Products<wna16_sm90::Wna16Sm90>,
    pub wna8_mma: Products<wna8_mma::Wna8Mma>,
    pub wna8_sm90: Products<wna8_sm90::Wna8Sm90>,
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
    /// What becomes of rows of gates and of what they let through, which take turns.
    gate: Option<Gate>,
    /// Whether products may round them to the type of x.
    pub(super) rounded: bool,
    /// Choices for all numbers of rows.
    pub(super) plans: KeptPlans,
    /// What kernels keep prepared.
    pub(super) products: PreparedProducts,
}

impl Weights {
    pub(super) fn new(packer: &mut Packer<'_>, whole: Whole, parts: &[&StoredTensor<'_>], act: Act) -> Result<Self> {
        let Whole { format, n, k, gate, .. } = whole;
        let atom = Atom::holding_all(parts, act)?;
        if gate.is_some() && atom.is_wide() {
            let expected = "gates with half scales, without offsets, in groups of 32 or more";
            return Err(Error::invalid("pack", expected, format!("{atom:?}")));
        }
        let order = parts.first().and_then(|part| part.group_index()).map(order_of);
        let weights = Self {
            n,
            k,
            format,
            act,
            atom,
            atoms: packer.allocate(atom.bytes_of([n, k])?)?,
            rows: packer.allocate(atom.bytes_of_rows(n))?,
            order: order.map(|order| packer.upload(&order)).transpose()?,
            gate,
            rounded: false,
            plans: Default::default(),
            products: Default::default(),
        };
        let target = Target::Wna16 { atom, atoms: weights.atoms(), rows: weights.rows(), order: weights.order() };
        packer.write(whole, parts, &target)?;
        Ok(weights)
    }

    pub(super) fn duplicate(&self, stream: &Stream) -> Result<Self> {
        Ok(Self {
            atoms: self.atoms.duplicate(stream)?,
            rows: self.rows.duplicate(stream)?,
            order: self.order.as_ref().map(|order| order.duplicate(stream)).transpose()?,
            plans: Default::default(),
            products: Default::default(),
            ..*self
        })
    }

    pub(in crate::cuda) fn shape(&self) -> [usize; 2] {
        [self.n, self.k]
    }

    /// Its rows, or half of them where each gate has its other.
    pub(super) fn outputs(&self) -> usize {
        if self.gate.is_some() { self.n / 2 } else { self.n }
    }

    pub(super) fn format(&self) -> Format {
        Format { weight: self.format, act: self.act }
    }

    /// What becomes of rows of gates and of what they let through, where these take turns ([`Packer::pack_gated`]).
    pub(in crate::cuda) fn gate(&self) -> Option<Gate> {
        self.gate
    }

    /// What its products are chosen by on a device.
    pub(super) fn caps(&self, gpu: &Gpu) -> Caps {
        Caps { rounded_weights: self.rounded, atom: Some(self.atom), gate: self.gate, ..gpu.caps() }
    }

    /// The form of its atoms.
    pub fn atom(&self) -> Atom {
        self.atom
    }

    pub(super) fn memory(&self) -> Vec<View<'_, u8>> {
        let order = self.order.as_ref().map(|order| order.view().cast());
        [self.atoms.view(), self.rows.view()].into_iter().chain(order).collect()
    }

    /// Address of the atoms.
    pub(in crate::cuda) fn atoms(&self) -> u64 {
        self.atoms.pointer()
    }

    /// Address of the scales and zero points of rows.
    pub(in crate::cuda) fn rows(&self) -> u64 {
        self.rows.pointer()
    }

    /// Address of the columns of x that the packed ones belong to; 0 if they are in that order.
    pub(super) fn order(&self) -> u64 {
        self.order.as_ref().map_or(0, Buffer::pointer)
    }

    /// Whether x is multiplied where it lies, and not a copy of it.
    pub(super) fn reads_in_place(&self, x: FloatView<'_>) -> bool {
        self.order.is_none() && self.k.is_multiple_of(PIECE) && x.pointer().is_multiple_of(2 * PIECE as u64)
    }
}

/// Whether the layout holds the numbers of a tensor, or why not.
pub(super) fn holds(w: &StoredTensor<'_>, act: Act) -> std::result::Result<(), Reason> {
    Atom::holding(w, act).map(|_| ()).map_err(|why| Reason(why.to_string()))
}

/// The form of atoms that a problem's weights have (`held` if that is known, else what their format says), or why there is none that
/// codes are multiplied from.
pub(in crate::cuda) fn atom(held: Option<Atom>, problem: &Problem) -> std::result::Result<Atom, Reason> {
    let Some(format) = problem.format else { return Err(Reason("multiplies codes, the weights are dense".into())) };
    if format.act.is_quantized() {
        return Err(Reason("multiplies exact activations (a16, a32), the format says quantised ones".into()));
    }
    sized(problem)?;
    let atom = Atom::of_any(format.weight, problem.k).map_err(|why| Reason(why.to_string()))?;
    Ok(held.unwrap_or(atom))
}

/// The form of a problem as the kernels for exact activations have it, or why they do not multiply it.
pub(super) fn gemm_form(held: Option<Atom>, problem: &Problem) -> std::result::Result<Form, Reason> {
    Ok(Form { atom: atom(held, problem)?, terms: Terms::default(), x: problem.x, out: problem.y })
}

/// Whether a problem has columns, and no more of anything than the layout counts.
pub(super) fn sized(problem: &Problem) -> std::result::Result<(), Reason> {
    if problem.k == 0 {
        return Err(Reason("multiplies by at least one column".into()));
    }
    if [problem.m, problem.n, problem.k].iter().any(|&size| size > i32::MAX as usize) {
        return Err(Reason("more rows or columns than 31 bits count".into()));
    }
    Ok(())
}
