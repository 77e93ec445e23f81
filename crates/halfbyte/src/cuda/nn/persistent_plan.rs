//! Which models `persistent_decode.cu` takes, and what it is compiled for: sizes, forms of weights, shared memory.

use super::Gate;
use super::persistent_decode::SOURCE;
use super::persistent_layers::{Layer, StepLayer, StepMlp};
use super::persistent_model::{Mixture, Steps, Weights, atom_of, most_bits};
use crate::cuda::Caps;
use crate::cuda::matmul::{grouped, with_table};
use crate::cuda::parameters::float_type;
use crate::cuda::sources::Instance;
use crate::format::Act;
use crate::kernel::{Activation, Heads, Reason};
use crate::layout::cuda_wna16::{Atom, STEP, STRIP, UNIT};
use crate::tensor::Float;

type Answer<T> = std::result::Result<T, Reason>;

/// As in the source: warps that compute, warps that bring weights, rows that are multiplied together.
pub(super) const WARPS: usize = 12;
pub(super) const COPYING_WARPS: usize = 4;
const ROWS: usize = UNIT;
/// As in the source: positions that attention takes at once.
const TILE: usize = 16;
/// As in the source: bytes of half a tile's keys or values, 64 elements of each.
const LEAST: usize = TILE / 2 * 128;
/// As in the source: bytes of what a block keeps of two rows of the stream.
const OWN: usize = 32;
/// Products of a layer: q, k, v; output; gate, up; down.
pub const PRODUCTS: usize = 4;
/// Stages of a warp's ring, at least and at most.
const STAGES: [usize; 2] = [3, 8];
/// Experts of a model, and of a token, at most: registers and lanes for their logits.
const MOST_EXPERTS: [usize; 2] = [256, 32];
/// Query heads of a key head that a block attends with, at most; elements of a head.
const MOST_OF_SHARE: usize = 8;
const MOST_OF_HEAD: usize = 256;
/// Ranks that share a model, at most.
pub(super) const MOST_RANKS: usize = 8;
/// Kinds of rotations, at most.
pub(super) const MOST_ROPES: usize = 2;
/// Rows of a super-strip: where rows of values begin at one, they lie as those of a tensor of their own do.
const SUPER_STRIP: usize = 4 * STRIP;
/// Columns whose products are summed as integers, at most: 127 · 128 of each, as 16 times those of 4 bits are.
const MOST_SUMMED: usize = 1 << 17;

/// Sizes of a model, the same in all of its layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Length of the residual stream.
    pub hidden: usize,
    /// Length of the vector inside the MLP, or inside each expert.
    pub inner: usize,
    /// Heads of attention.
    pub heads: Heads,
    /// Elements of a head that are rotated in pairs: half of them.
    pub pairs: usize,
    /// Kinds of rotations, of which each layer has one.
    pub ropes: usize,
}

impl Sizes {
    /// Outputs and reduction of each product, with so many experts of a token side by side.
    fn shapes(&self, experts: usize, gate: Gate) -> [[usize; 2]; PRODUCTS] {
        let Self { hidden, heads, .. } = *self;
        let (attended, inner) = (heads.heads * heads.head_size, experts * self.inner);
        let up = if gate.gated { 2 * inner } else { inner };
        [[heads.row(), hidden], [hidden, attended], [up, hidden], [hidden, inner]]
    }

    /// Rows of values, the last ones of the first product.
    fn rows_of_values(&self) -> usize {
        self.heads.kv_heads * self.heads.head_size
    }

    /// What the query heads of a key head are divided into: as few shares of one length as have columns of B.
    fn shares_of_group(&self) -> usize {
        let group = self.heads.group();
        (1..=group).find(|shares| group.is_multiple_of(*shares) && group / shares <= MOST_OF_SHARE).unwrap_or(group)
    }

    fn shares(&self) -> usize {
        self.heads.kv_heads * self.shares_of_group()
    }

    fn heads_of_share(&self) -> usize {
        self.heads.heads / self.shares()
    }

    fn rows_before_values(&self) -> usize {
        self.heads.row() - self.rows_of_values()
    }
}

/// What a step of one token is computed by: the kernel for a model on a device.
#[derive(Clone, Debug)]
pub struct Plan {
    pub(super) sizes: Sizes,
    weights: Weights,
    pub(super) steps_of_layer: Steps,
    pub(super) mixture: Option<Mixture>,
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
    /// Of a block.
    pub(super) shared_bytes: usize,
}

impl Plan {
    /// The kernel for a model with these layers, and keys and values of a type; or why there is none: it takes Hopper, codes in places
    /// of 4 or 8 bits with scales of groups along k or of rows, or of both (`-si8`), in the type of x, exact activations or symmetric
    /// codes of them in groups of 128 or whole rows, heads of 16 to 256 elements in steps of 16, as many multiprocessors as key heads, and sizes that are
    /// multiples of 128. All products have one format, but where scales and offsets are multiples of halves (GGUF's Q3_K to Q6_K). Experts
    /// have scales of groups.
    pub fn of(caps: &Caps, sizes: Sizes, layers: &[StepLayer<'_>], dtype: Float) -> Answer<Self> {
        let Some((atom, act)) = layers.first().and_then(|layer| {
            let (first, _) = layer.products.first()?;
            Some((atom_of(first)?, first.format().act))
        }) else {
            return Err(Reason("weights in layout cuda_wna16".into()));
        };
        if act.is_quantized() && (act != Act::A8 || atom.group != STEP && !atom.has_rows()) {
            return Err(Reason("exact activations, or symmetric codes of them in groups of 128 or whole rows".into()));
        }
        let mixture = layers.first().and_then(|layer| layer.mlp.experts()).map(Mixture::of);
        if layers.iter().any(|layer| layer.mlp.experts().map(Mixture::of) != mixture) {
            return Err(Reason("as many experts in all layers, or none".into()));
        }
        let Some(steps) =
            layers.first().and_then(Steps::of).filter(|steps| layers.iter().all(|l| Steps::of(l) == Some(*steps)))
        else {
            return Err(Reason("the same steps in all layers".into()));
        };
        let of_experts = !steps.gate.gated || steps.layer_norm || steps.norms_behind;
        if steps.gate.clamp.is_some() || mixture.is_some() && of_experts {
            let why = "gates without limits, and experts that are gated, behind RMS norms, with no norms behind them";
            return Err(Reason(why.into()));
        }
        let values_apart = layers.iter().any(|layer| layer.values.is_some());
        let mut weights = Weights { values_apart, ..Weights::of(atom, act.is_quantized()) };
        for layer in layers {
            let mut shapes = sizes.shapes(1, steps.gate);
            if layer.values.is_some() {
                shapes[0][0] = sizes.rows_before_values();
            }
            let values = layer.values.map(|values| (values, [sizes.rows_of_values(), sizes.hidden]));
            let [of_attention @ .., of_up, of_down] = shapes;
            let mlps: Vec<_> = match &layer.mlp {
                StepMlp::Dense([up, down]) => vec![(*up, of_up), (*down, of_down)],
                StepMlp::Experts(of) => {
                    of.experts.iter().flat_map(|[up, down]| [((*up, None), of_up), ((*down, None), of_down)]).collect()
                }
            };
            let down = if let StepMlp::Dense([_, down]) = &layer.mlp { Some(*down) } else { None };
            if layer.products.into_iter().chain(layer.values).chain(down).any(|(w, _)| w.gate().is_some()) {
                return Err(Reason("no gates but in gate and up".into()));
            }
            if let Some(why) = layer.mlp.experts().and_then(|experts| experts.unlike(sizes.hidden)) {
                return Err(Reason(why.into()));
            }
            for ((w, _), shape) in layer.products.into_iter().zip(of_attention).chain(mlps).chain(values) {
                let of_this = atom_of(w).filter(|_| w.in_order() && w.format().act == act);
                let together = of_this.and_then(|atom| weights.with(Weights::of(atom, act.is_quantized())));
                let Some(together) = together else {
                    return Err(Reason("all products in one format or in K types, with columns in order".into()));
                };
                weights = together;
                if w.shape() != shape {
                    return Err(Reason(format!("a product of {shape:?}, there is one of {:?}", w.shape())));
                }
            }
        }
        if values_apart && (weights.forms == 0 || !sizes.rows_before_values().is_multiple_of(SUPER_STRIP)) {
            let why =
                format!("K types, and queries and keys of a multiple of {SUPER_STRIP} rows, where values are apart");
            return Err(Reason(why));
        }
        Self::sized(caps, sizes, (weights, steps, mixture), dtype, layers.len())
    }

    /// The same for ranks, each with a part of the model and a GPU; or why there is none.
    pub fn among(self, ranks: usize) -> Answer<Self> {
        match ranks {
            2.. if self.steps_of_layer.norms_behind => {
                Err(Reason("one rank, where what layers add to the stream is normed".into()))
            }
            1..=MOST_RANKS => Ok(Self { ranks, ..self }),
            _ => Err(Reason(format!("1 to {MOST_RANKS} ranks"))),
        }
    }

    /// The same for texts whose keys and values lie in pages.
    pub(super) fn paged(self) -> Self {
        Self { paged: true, ..self }
    }

    /// With weights of a form.
    pub(super) fn sized(
        caps: &Caps,
        sizes: Sizes,
        (weights, steps_of_layer, mixture): (Weights, Steps, Option<Mixture>),
        dtype: Float,
        layers: usize,
    ) -> Answer<Self> {
        let Weights { atom, quantized, forms, .. } = weights;
        let shapes = sizes.shapes(mixture.map_or(1, |mixture| mixture.top_k), steps_of_layer.gate);
        let refuse = |why: String| Err(Reason(why));
        if !caps.arch.is_hopper() {
            return refuse("a GPU of sm_90a".into());
        }
        let of_rows = atom.group == 0 && atom.zero || atom.factors && !quantized;
        let other = forms == 0 && (atom.is_wide() || atom.scale != dtype);
        if dtype == Float::F32 || of_rows || other {
            return refuse(format!("keys and values in {}, not {dtype}, and no zero points of whole rows", atom.scale));
        }
        let (Heads { head_size, .. }, blocks) = (sizes.heads, caps.multiprocessors as usize);
        let steps = head_size.is_multiple_of(16) && (16..=MOST_OF_HEAD).contains(&head_size);
        if !steps || 2 * sizes.pairs > head_size || !sizes.pairs.is_multiple_of(2) {
            return refuse(format!(
                "heads of 16 to {MOST_OF_HEAD} elements in steps of 16, of which a multiple of 4 is rotated, not {head_size}"
            ));
        }
        if !(1..=MOST_ROPES).contains(&sizes.ropes) {
            return refuse(format!("1 to {MOST_ROPES} kinds of rotary positions"));
        }
        if steps_of_layer.norms_behind && steps_of_layer.layer_norm {
            return refuse("RMS norms, where what layers add to the stream is normed".into());
        }
        if sizes.shares() > blocks {
            return refuse(format!(
                "a multiprocessor, of {blocks}, for each {MOST_OF_SHARE} query heads of a key head"
            ));
        }
        let of_one = sizes.shapes(1, steps_of_layer.gate);
        if of_one.iter().any(|[n, k]| !n.is_multiple_of(STRIP) || !k.is_multiple_of(STEP)) {
            return refuse(format!("outputs in multiples of {STRIP}, columns of {STEP}"));
        }
        if let Some(Mixture { experts, top_k, .. }) = mixture {
            let [most, most_chosen] = MOST_EXPERTS;
            if experts > most || top_k > most_chosen.min(experts) || top_k == 0 || atom.has_rows() || forms != 0 {
                return refuse(format!(
                    "up to {most} experts with scales of groups, of which a token has {most_chosen}"
                ));
            }
        }
        if quantized && atom.has_rows() && shapes.iter().any(|[_, k]| *k > MOST_SUMMED) {
            return refuse(format!("at most {MOST_SUMMED} columns, whose products 32 bits hold"));
        }
        let even = of_one.iter().all(|[_, k]| k.is_multiple_of(2 * STEP));
        let with = |steps, stages| {
            let (ranks, paged) = (1, false);
            let plan = Self {
                sizes,
                weights,
                steps_of_layer,
                mixture,
                dtype,
                layers,
                ranks,
                paged,
                blocks,
                steps,
                stages,
                shared_bytes: 0,
            };
            Self { shared_bytes: plan.sum_of_shared(), ..plan }
        };
        let steps = if even { 1..=2 } else { 1..=1 };
        let mut plans = steps.rev().flat_map(|steps| (STAGES[0]..=STAGES[1]).rev().map(move |stages| (steps, stages)));
        let room = caps.shared_bytes as usize;
        let fitting =
            plans.find_map(|(steps, stages)| Some(with(steps, stages)).filter(|plan| plan.shared_bytes <= room));
        fitting.ok_or_else(|| {
            Reason(format!("a model that fits {} bytes of shared memory: shorter layers", caps.shared_bytes))
        })
    }

    /// Bytes of shared memory; as the source counts them.
    fn sum_of_shared(&self) -> usize {
        let Sizes { inner, heads, pairs, ropes, .. } = self.sizes;
        let (head, group, shapes) = (heads.head_size, self.sizes.heads_of_share(), self.shapes());
        let Weights { atom, forms, .. } = self.weights;
        let kinds = forms.count_ones().max(1) as usize;
        let of_product = |at: usize| {
            let is_paired = at == 2 && self.steps_of_layer.gate.gated && !self.steps_of_layer.beside;
            let (paired, n) = if is_paired { (1, inner) } else { (0, shapes[at][0]) };
            (n / ROWS).div_ceil(self.blocks) << paired
        };
        let most = (0..PRODUCTS).map(of_product).max().unwrap_or(0);
        let (plan, sums) = (8 + 8 * WARPS + 8 + 16 * most * kinds, 8 * (ROWS * WARPS + 8));
        // 128 columns of x: four digits of each, or a code, and their power of two or scale.
        let x_unit = if self.weights.quantized { STEP } else { 4 * STEP } + 16;
        // A stage's columns of each warp, or all where they have one rule; what warps add up.
        let whole = self.weights.quantized && atom.has_rows();
        let units =
            if whole { shapes.map(|[_, k]| k / STEP).into_iter().fold(0, usize::max) } else { WARPS * self.steps };
        let x = (units * x_unit + most * sums).max(WARPS * (group * (head + 4) * 4 + 64));
        let rest =
            272 + ropes * 8 * pairs.max(2) + 32 * (head.next_multiple_of(32) + 8) + 4 * head + (group + 2) * head * 4;
        // A barrier, a token's experts, all logits, a block's rows of the stream.
        let of_experts = self.mixture.map_or(0, |Mixture { experts, top_k, .. }| {
            16 + 32 * top_k + 16 * experts.div_ceil(4) + 4 * ROWS * of_product(1)
        });
        WARPS * self.stages * (stage_bytes(self.steps * self.unit_bytes()) + 16)
            + x
            + rest
            + of_experts
            + PRODUCTS * plan
            + 2 * size_of::<Layer>()
            + ROWS / 2 * of_product(1) * OWN
    }

    /// Positions of a box of keys or values: those of a tile where a stage has room, else half of them; as in the source.
    pub(super) fn box_positions(&self) -> usize {
        let stage = stage_bytes(self.steps * self.unit_bytes());
        if stage >= before_boxes(stage) + 2 * LEAST { TILE } else { TILE / 2 }
    }

    /// Bytes of 16 rows and 128 columns of weights, of the longest form.
    fn unit_bytes(&self) -> usize {
        let Weights { atom, forms, .. } = self.weights;
        if forms == 0 { atom } else { Atom { bits: most_bits(forms), ..atom } }.unit_bytes()
    }

    /// Outputs and reduction of each product.
    fn shapes(&self) -> [[usize; 2]; PRODUCTS] {
        self.sizes.shapes(self.mixture.map_or(1, |mixture| mixture.top_k), self.steps_of_layer.gate)
    }

    /// Positions of a text are divided into at most so many parts for each share of query heads; as in the source.
    fn most_parts(&self) -> usize {
        (self.blocks / self.sizes.shares()).min(32)
    }

    /// Bytes of q, k and v in one tensor before the rows of v, where these may be apart.
    pub(super) fn bytes_before_values(&self, atom: Atom) -> usize {
        self.sizes.rows_before_values() / STRIP * (self.sizes.hidden / STEP) * atom.bytes()
    }

    /// Where row 0 of q, k and v would be, of a vector of the rows of v.
    pub(super) fn before_values(&self, bias: u64) -> u64 {
        bias.wrapping_sub(4 * self.sizes.rows_before_values() as u64)
    }

    /// Whether the mean of a stream is known from sums that blocks leave, and products add what norms would; as in the source.
    pub(super) fn has_mean_of_sums(&self) -> bool {
        self.steps_of_layer.layer_norm && !self.weights.quantized && !self.steps_of_layer.beside
    }

    /// Where ranks that run side by side leave words for each other: it must be the same on all of them.
    pub fn places(&self) -> [usize; 3] {
        let [[qkv, _], [_, attended], ..] = self.shapes();
        [self.words(), self.words_of_layer(), self.of_stream() * self.sizes.hidden + qkv + attended / 2]
    }

    /// Sets of places; as in the source.
    pub(super) fn sets(&self) -> usize {
        if self.ranks == 1 { 2 } else { 3 }
    }

    /// Vectors that a stream consists of; as in the source.
    fn of_stream(&self) -> usize {
        if self.steps_of_layer.norms_behind { 2 } else { self.ranks }
    }

    fn words_of_layer(&self) -> usize {
        let [[qkv, _], [_, attended], _, [_, width]] = self.shapes();
        let logits = self.mixture.map_or(0, |mixture| 64 * mixture.experts.div_ceil(4));
        let sums = match self.has_mean_of_sums() || self.steps_of_layer.norms_behind {
            true => 2 * self.ranks * (self.sizes.hidden / ROWS).div_ceil(self.blocks).div_ceil(4) * self.blocks,
            false => 0,
        };
        2 * self.of_stream() * self.sizes.hidden + qkv + attended / 2 + width / 2 + logits + sums.next_multiple_of(4)
    }

    /// Words of a set of places; as in the source.
    pub(super) fn words(&self) -> usize {
        let heads = self.sizes.heads;
        let parts = heads.heads * self.most_parts() * (heads.head_size + 2);
        (self.layers + 1) * self.words_of_layer() + self.layers * parts
    }

    /// The kernel as it is compiled.
    pub fn instance(&self) -> Instance {
        let Self { sizes: Sizes { hidden, inner, heads, pairs, ropes }, weights, .. } = *self;
        let Weights { atom, quantized, forms, values_apart } = weights;
        let Steps { layer_norm, alibi, capped, norms_behind, gate, beside } = self.steps_of_layer;
        let of_mixture = |of: fn(Mixture) -> usize| self.mixture.map_or(0, of);
        let numbers = [
            ("BITS", atom.bits as usize),
            ("BF16", (self.dtype == Float::BF16).into()),
            ("GROUP", atom.group),
            ("ZERO", atom.zero.into()),
            ("QUANTIZED", quantized.into()),
            ("W_OFFSET", atom.offset.into()),
            ("SCALE_F32", (atom.scale == Float::F32).into()),
            ("MULTIPLES", atom.multiples.into()),
            ("FORMS", forms as usize),
            ("VALUES_APART", values_apart.into()),
            ("FACTORS", atom.factors.into()),
            ("OUT", 2),
            ("HIDDEN", hidden),
            ("INNER", inner),
            ("HEADS", heads.heads),
            ("KV_HEADS", heads.kv_heads),
            ("SHARES_OF_GROUP", self.sizes.shares_of_group()),
            ("HEAD", heads.head_size),
            ("PAIRS", pairs),
            ("ROPES", ropes),
            ("LAYER_NORM", layer_norm.into()),
            ("ALIBI", alibi.into()),
            ("CAPPED", capped.into()),
            ("NORMS_BEHIND", norms_behind.into()),
            ("BESIDE", beside.into()),
            ("EXPERTS", of_mixture(|mixture| mixture.experts)),
            ("CHOSEN", of_mixture(|mixture| mixture.top_k)),
            ("SHARES_OF_CHOSEN", of_mixture(|mixture| mixture.of_chosen.into())),
            ("ROUTER_TYPE", of_mixture(|mixture| float_type(mixture.router) as usize)),
            ("RANKS", self.ranks),
            ("PAGED", self.paged.into()),
            ("BLOCKS", self.blocks),
            ("STEPS", self.steps),
            ("STAGES", self.stages),
            ("BOX_POSITIONS", self.box_positions()),
            ("SHARED_BYTES", self.shared_bytes),
        ];
        let instance =
            Instance::new(&SOURCE, "persistent_decode").with(numbers.map(|(name, value)| format!("HB_{name}={value}")));
        let instance = with_table(instance, atom);
        match gate.gated {
            true => grouped::with_output_function(instance, Activation::None, Some(gate)),
            false => grouped::with_output_function(instance, gate.activation, None).defining("GATED", 0),
        }
    }

    /// What it is, for people.
    pub fn describe(&self) -> String {
        let Self { blocks, stages, steps, .. } = self;
        format!("{blocks} blocks, rings of {stages} stages of {} columns", steps * STEP)
    }
}

/// Bytes that a box of keys or values begins behind a stage of so many, at most: at a multiple of 128; as in the source.
fn before_boxes(stage: usize) -> usize {
    match stage % 128 {
        0 => 0,
        64 => 64,
        other if other % 32 == 0 => 96,
        _ => 112,
    }
}

/// A stage of weights of so many bytes, or longer so that it has room for the smallest box; as in the source.
fn stage_bytes(weights: usize) -> usize {
    if weights >= before_boxes(weights) + LEAST { weights } else { weights.max(LEAST).next_multiple_of(128) }
}
