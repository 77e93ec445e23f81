//! Which models `persistent_decode.cu` takes, and what it is compiled for: sizes, forms of weights, shared memory.

use super::persistent_decode::{Layer, SOURCE};
use crate::cuda::Caps;
use crate::cuda::matmul::Packed;
use crate::cuda::sources::Instance;
use crate::format::Act;
use crate::kernel::{Heads, Reason};
use crate::layout::cuda_wna16::{Atom, STEP, STRIP};
use crate::tensor::Float;

type Answer<T> = std::result::Result<T, Reason>;

/// As in the source: warps that compute, warps that bring weights, rows that are multiplied together.
pub(super) const WARPS: usize = 12;
pub(super) const COPYING_WARPS: usize = 3;
const ROWS: usize = STRIP / 4;
/// Products of a layer: q, k, v; output; gate, up; down.
pub const PRODUCTS: usize = 4;
/// Stages of a warp's ring, at least and at most.
const STAGES: [usize; 2] = [3, 8];
/// Query heads that share a key head, at most.
const MOST_OF_GROUP: usize = 8;
/// Ranks that share a model, at most.
pub(super) const MOST_RANKS: usize = 8;
/// Columns whose products are summed as integers, at most: 127 · 128 of each, four times where rows share a word.
const MOST_SUMMED: usize = 1 << 15;

/// Sizes of a model, the same in all of its layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Length of the residual stream.
    pub hidden: usize,
    /// Length of the vector inside the MLP.
    pub inner: usize,
    /// Heads of attention.
    pub heads: Heads,
    /// Elements of a head that are rotated in pairs: half of them.
    pub pairs: usize,
}

impl Sizes {
    /// Outputs and reduction of each product.
    fn shapes(&self) -> [[usize; 2]; PRODUCTS] {
        let Self { hidden, inner, heads, .. } = *self;
        let attended = heads.heads * heads.head_size;
        [[heads.row(), hidden], [hidden, attended], [2 * inner, hidden], [hidden, inner]]
    }
}

/// What a step of one token is computed by: the kernel for a model on a device.
#[derive(Clone, Debug)]
pub struct Plan {
    pub(super) sizes: Sizes,
    atom: Atom,
    /// Whether activations are quantised.
    quantized: bool,
    pub(super) dtype: Float,
    pub(super) layers: usize,
    /// That share the model.
    pub(super) ranks: usize,
    /// Whether keys and values lie in pages.
    pub(super) paged: bool,
    pub(super) blocks: usize,
    /// Steps of 128 columns in a stage.
    steps: usize,
    stages: usize,
    /// Bytes of shared memory before the table of layers.
    table: usize,
}

impl Plan {
    /// The kernel for a model with these products, the same number in each layer, and keys and values of a type; or why there
    /// is none: it takes Hopper, codes in places of 4 or 8 bits with scales of groups along k or of rows, or of both (`-si8`), in the type
    /// of x, exact activations or symmetric codes of them in groups of 128 or whole rows, heads of 64 or 128 elements, at most 8 query
    /// heads a key head, and sizes that are multiples of 128.
    pub fn of(caps: &Caps, sizes: Sizes, products: &[[&Packed; PRODUCTS]], dtype: Float) -> Answer<Self> {
        let first = products.first().and_then(|layer| layer.first());
        let Some((atom, act)) = first.and_then(|first| Some((atom_of(first)?, first.format().act))) else {
            return Err(Reason("weights in layout cuda_wna16".into()));
        };
        if act.is_quantized() && (act != Act::A8 || atom.group != STEP && !atom.has_rows()) {
            return Err(Reason("exact activations, or symmetric codes of them in groups of 128 or whole rows".into()));
        }
        for layer in products {
            for (w, shape) in layer.iter().zip(sizes.shapes()) {
                if atom_of(w) != Some(atom) || !w.in_order() || w.format().act != act {
                    return Err(Reason("all products in one format, with columns in order".into()));
                }
                if w.shape() != shape {
                    return Err(Reason(format!("a product of {shape:?}, there is one of {:?}", w.shape())));
                }
            }
        }
        Self::sized(caps, sizes, (atom, act.is_quantized()), dtype, products.len())
    }

    /// The same for ranks, each with a part of the model and a GPU; or why there is none.
    pub fn among(self, ranks: usize) -> Answer<Self> {
        match ranks {
            1..=MOST_RANKS => Ok(Self { ranks, ..self }),
            _ => Err(Reason(format!("1 to {MOST_RANKS} ranks"))),
        }
    }

    /// The same for texts whose keys and values lie in pages.
    pub fn paged(self) -> Self {
        Self { paged: true, ..self }
    }

    /// With weights of a form, and activations as codes or not.
    fn sized(caps: &Caps, sizes: Sizes, form: (Atom, bool), dtype: Float, layers: usize) -> Answer<Self> {
        let (atom, quantized) = form;
        let refuse = |why: String| Err(Reason(why));
        if !caps.arch.is_hopper() {
            return refuse("takes sm_90a".into());
        }
        let of_rows = atom.group == 0 && atom.zero || atom.factors && !quantized;
        if dtype == Float::F32 || of_rows || atom.is_wide() || atom.scale != dtype {
            return refuse(format!("keys and values in {}, not {dtype}, and no zero points of whole rows", atom.scale));
        }
        let (Heads { head_size, kv_heads, .. }, blocks) = (sizes.heads, caps.multiprocessors as usize);
        if !matches!(head_size, 64 | 128) || 2 * sizes.pairs > head_size || !sizes.pairs.is_multiple_of(2) {
            return refuse(format!(
                "heads of 64 or 128 elements, of which a multiple of 4 is rotated, not {head_size}"
            ));
        }
        if sizes.heads.group() > MOST_OF_GROUP || kv_heads > blocks {
            return refuse(format!("at most {MOST_OF_GROUP} query heads a key head, and {blocks} key heads"));
        }
        if sizes.shapes().iter().any(|[n, k]| !n.is_multiple_of(STRIP) || !k.is_multiple_of(STEP)) {
            return refuse(format!("outputs in multiples of {STRIP}, columns of {STEP}"));
        }
        if quantized && atom.has_rows() && sizes.shapes().iter().any(|[_, k]| *k > MOST_SUMMED) {
            return refuse(format!("at most {MOST_SUMMED} columns, whose products 32 bits hold"));
        }
        let even = sizes.shapes().iter().all(|[_, k]| k.is_multiple_of(2 * STEP));
        let with = |steps, stages| {
            let plan =
                Self { sizes, atom, quantized, dtype, layers, ranks: 1, paged: false, blocks, steps, stages, table: 0 };
            Self { table: plan.begin_of_table(), ..plan }
        };
        let steps = if even { 1..=2 } else { 1..=1 };
        let mut plans = steps.rev().flat_map(|steps| (STAGES[0]..=STAGES[1]).rev().map(move |stages| (steps, stages)));
        let room = caps.shared_bytes as usize;
        let fitting =
            plans.find_map(|(steps, stages)| Some(with(steps, stages)).filter(|plan| plan.shared_bytes() <= room));
        fitting.ok_or_else(|| {
            Reason(format!("a model that fits {} bytes of shared memory: fewer layers, or shorter", caps.shared_bytes))
        })
    }

    /// Where the table of layers begins in shared memory; as the source counts it.
    fn begin_of_table(&self) -> usize {
        let Sizes { inner, heads, pairs, .. } = self.sizes;
        let (head, group) = (heads.head_size, heads.group());
        let (groups, zero) = (self.atom.groups(), self.atom.zero);
        let scales = if groups == 1 && !zero { 32 } else { groups * if zero { 192 } else { 128 } }; // of rows: none
        let unit = 256 * self.atom.bits as usize + scales;
        let of_product = |at: usize| {
            let (paired, n) = if at == 2 { (1, inner) } else { (0, self.sizes.shapes()[at][0]) };
            (n / ROWS).div_ceil(self.blocks) << paired
        };
        let most = (0..PRODUCTS).map(of_product).max().unwrap_or(0).next_multiple_of(8);
        let (plan, sums) = (8 + 8 * WARPS + 8 + 16 * most, 8 * (ROWS * WARPS + 8));
        // 128 columns of x: four digits of each, or a code, and their power of two or scale.
        let x_unit = if self.quantized { STEP } else { 4 * STEP } + 16;
        let x_and_sums = |at: usize| self.sizes.shapes()[at][1] / STEP * x_unit + of_product(at) * sums;
        let attended = WARPS * (group * head * 4 + 64);
        let x = (0..PRODUCTS).map(x_and_sums).max().unwrap_or(0).max(attended);
        let rest = of_product(1) * 64 + 192 + 8 * pairs.max(2) + 32 * (head + 32) + 4 * head + (group + 2) * head * 4;
        WARPS * self.stages * (self.steps * unit + 16) + x + rest + PRODUCTS * plan
    }

    pub(super) fn shared_bytes(&self) -> usize {
        self.table + self.layers * size_of::<Layer>()
    }

    /// Positions of a text are divided into at most so many parts for each key head; as in the source.
    fn most_parts(&self) -> usize {
        (self.blocks / self.sizes.heads.kv_heads).min(32)
    }

    /// Sets of places; as in the source.
    pub(super) fn sets(&self) -> usize {
        if self.ranks == 1 { 2 } else { 3 }
    }

    /// Words of a set of places; as in the source.
    pub(super) fn words(&self) -> usize {
        let Sizes { hidden, inner, heads, .. } = self.sizes;
        let of_layer = 2 * self.ranks * hidden + heads.row() + heads.heads * heads.head_size / 2 + inner / 2 + 32;
        let parts = heads.kv_heads * self.most_parts() * heads.group() * (heads.head_size + 2);
        (self.layers + 1) * of_layer + self.layers * parts
    }

    /// The kernel as it is compiled.
    pub fn instance(&self) -> Instance {
        let Self { sizes: Sizes { hidden, inner, heads, pairs }, atom, .. } = *self;
        let numbers = [
            ("BITS", atom.bits as usize),
            ("BF16", (self.dtype == Float::BF16).into()),
            ("GROUP", atom.group),
            ("ZERO", atom.zero.into()),
            ("QUANTIZED", self.quantized.into()),
            ("FACTORS", atom.factors.into()),
            ("OUT", 2),
            ("ACTIVATION", 0),
            ("HIDDEN", hidden),
            ("INNER", inner),
            ("HEADS", heads.heads),
            ("KV_HEADS", heads.kv_heads),
            ("HEAD", heads.head_size),
            ("PAIRS", pairs),
            ("RANKS", self.ranks),
            ("PAGED", self.paged.into()),
            ("BLOCKS", self.blocks),
            ("STEPS", self.steps),
            ("STAGES", self.stages),
            ("TABLE", self.table),
        ];
        Instance::new(&SOURCE, "persistent_decode").with(numbers.map(|(name, value)| format!("HB_{name}={value}")))
    }

    /// What it is, for people.
    pub fn describe(&self) -> String {
        let Self { blocks, stages, steps, .. } = self;
        format!("{blocks} blocks, rings of {stages} stages of {} columns", steps * STEP)
    }
}

/// Of a few models, for the record of what kernels take.
pub(super) fn samples() -> Vec<Instance> {
    let heads = |heads, kv_heads, head_size| Heads { heads, kv_heads, head_size };
    let wide = Sizes { hidden: 4096, inner: 14336, heads: heads(32, 8, 128), pairs: 64 };
    let narrow = Sizes { hidden: 384, inner: 1024, heads: heads(6, 2, 64), pairs: 32 };
    let atom = |bits, group, zero, scale| Atom { bits, group, zero, scale, ..Atom::W4_G128 };
    let two_levels = Atom { factors: true, ..atom(4, 128, false, Float::F16) };
    let models = [
        (wide, (atom(4, 128, false, Float::F16), false)),
        (wide, (atom(8, 32, true, Float::BF16), false)),
        (narrow, (atom(4, 32, true, Float::F16), false)),
        (wide, (atom(4, 128, false, Float::F16), true)),
        (narrow, (atom(8, 128, true, Float::BF16), true)),
        (wide, (two_levels, true)),
        (wide, (atom(8, 0, false, Float::F16), true)),
        (narrow, (atom(4, 0, false, Float::BF16), false)),
    ];
    let plan = |(sizes, form): (Sizes, (Atom, bool))| Plan::sized(&Caps::H200, sizes, form, form.0.scale, 32).ok();
    let alone: Vec<Plan> = models.into_iter().filter_map(plan).collect();
    let shared = alone.first().and_then(|plan| plan.clone().among(2).ok());
    let paged = alone.iter().take(1).map(|plan| plan.clone().paged());
    alone.iter().cloned().chain(shared).chain(paged).map(|plan| plan.instance()).collect()
}

fn atom_of(w: &Packed) -> Option<Atom> {
    if let Packed::Wna16(w) = w { Some(w.atom()) } else { None }
}
