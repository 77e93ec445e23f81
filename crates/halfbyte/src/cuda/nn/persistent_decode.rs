//! Launches of `persistent_decode.cu`: all layers of a step of one token in one kernel.

use super::collectives::Neighbours;
use super::floats::float_type;
use super::kv_cache::KvCache;
use super::rope::{HeadNorms, Rope};
use super::{narrow, same_length};
use crate::cuda::driver::{Arg, Buffer, FloatView, FloatViewMut, Inbox, Launch, Stream, View};
use crate::cuda::matmul::Packed;
use crate::cuda::parameters::{Parameters, parameters};
use crate::cuda::sources::{Instance, Source};
use crate::cuda::{Caps, Gpu};
use crate::error::{Error, Result};
use crate::format::Act;
use crate::kernel::{Heads, Reason};
use crate::layout::cuda_wna16::{Atom, STEP, STRIP};
use crate::tensor::Float;

static SOURCE: Source = Source {
    path: "nn/persistent_decode.cu",
    text: include_str!("persistent_decode.cu"),
    parameters: &[Params::LAYOUT, Layer::LAYOUT],
};

const OP: &str = "persistent_decode";

type Answer<T> = std::result::Result<T, Reason>;

/// As in the source: warps that compute, warps that bring weights, rows that are multiplied together.
const WARPS: usize = 12;
const COPYING_WARPS: usize = 3;
const ROWS: usize = STRIP / 4;
/// Bytes of 128 columns of x: four digits of each, and their power of two.
const X_UNIT: usize = 4 * STEP + 16;
/// Products of a layer: q, k, v; output; gate, up; down.
pub const PRODUCTS: usize = 4;
/// Stages of a warp's ring, at least and at most.
const STAGES: [usize; 2] = [3, 8];
/// Query heads that share a key head, at most.
const MOST_OF_GROUP: usize = 8;
/// Ranks that share a model, at most.
const MOST_RANKS: usize = 8;

parameters! {
    /// As in the source.
    struct Product {
        w: u64,
        bias: u64,
        norm: u64,
        eps: f32,
        padding: u32,
    }

    /// As in the source, where products are an array.
    struct Layer {
        qkv: Product,
        output: Product,
        up: Product,
        down: Product,
        query_norm: u64,
        key_norm: u64,
        keys: u64,
        values: u64,
        query_eps: f32,
        key_eps: f32,
        scale: f32,
        window: u32,
    }

    /// As in the source.
    struct Params {
        layers: u64,
        token: u64,
        position: u64,
        embedding: u64,
        norm: u64,
        normed: u64,
        turns: u64,
        words: u64,
        state: u64,
        of_ranks: [u64; MOST_RANKS],
        failed: u64,
        silent: u64,
        capacity: u64,
        first: u64,
        tokens: u64,
        count: u32,
        embedding_type: u32,
        eps: f32,
        rank: u32,
    }
}

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
    sizes: Sizes,
    atom: Atom,
    /// Whether activations are quantised.
    quantized: bool,
    dtype: Float,
    layers: usize,
    /// That share the model.
    ranks: usize,
    blocks: usize,
    /// Steps of 128 columns in a stage.
    steps: usize,
    stages: usize,
    /// Bytes of shared memory before the table of layers.
    table: usize,
}

impl Plan {
    /// The kernel for a model with these products, the same number in each layer, and keys and values of a type; or why there
    /// is none: it takes Hopper, codes in places of 4 or 8 bits with scales of groups along k in the type of x, exact activations or symmetric codes
    /// of them in groups of 128, heads of 64 or 128 elements, at most 8 query heads a key head, and sizes that are multiples of 128.
    pub fn of(caps: &Caps, sizes: Sizes, products: &[[&Packed; PRODUCTS]], dtype: Float) -> Answer<Self> {
        let first = products.first().and_then(|layer| layer.first());
        let Some((atom, act)) = first.and_then(|first| Some((atom_of(first)?, first.format().act))) else {
            return Err(Reason("weights in layout cuda_wna16".into()));
        };
        if act.is_quantized() && (act != Act::A8 || atom.group != STEP) {
            return Err(Reason("exact activations, or symmetric codes of them in groups of 128".into()));
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

    /// With weights of a form, and activations as codes or not.
    fn sized(caps: &Caps, sizes: Sizes, form: (Atom, bool), dtype: Float, layers: usize) -> Answer<Self> {
        let (atom, quantized) = form;
        let refuse = |why: String| Err(Reason(why));
        if !caps.arch.is_hopper() {
            return refuse("takes sm_90a".into());
        }
        if dtype == Float::F32 || atom.group == 0 || atom.factors || atom.is_wide() || atom.scale != dtype {
            return refuse(format!(
                "keys and values in f16 or bf16, and scales of groups in that type, on one level, not {dtype}"
            ));
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
        let even = sizes.shapes().iter().all(|[_, k]| k.is_multiple_of(2 * STEP));
        let with = |steps, stages| {
            let plan = Self { sizes, atom, quantized, dtype, layers, ranks: 1, blocks, steps, stages, table: 0 };
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
        let scales = if groups == 1 && !zero { 32 } else { groups * if zero { 192 } else { 128 } };
        let unit = 256 * self.atom.bits as usize + scales;
        let of_product = |at: usize| {
            let (paired, n) = if at == 2 { (1, inner) } else { (0, self.sizes.shapes()[at][0]) };
            (n / ROWS).div_ceil(self.blocks) << paired
        };
        let most = (0..PRODUCTS).map(of_product).max().unwrap_or(0).next_multiple_of(8);
        let (plan, sums) = (8 + 8 * WARPS + 8 + 16 * most, 8 * (ROWS * WARPS + 8));
        let x_and_sums = |at: usize| self.sizes.shapes()[at][1] / STEP * X_UNIT + of_product(at) * sums;
        let attended = WARPS * (group * head * 4 + 64);
        let x = (0..PRODUCTS).map(x_and_sums).max().unwrap_or(0).max(attended);
        let rest = of_product(1) * 64 + 192 + 8 * pairs.max(2) + 32 * (head + 32) + 4 * head + (group + 2) * head * 4;
        WARPS * self.stages * (self.steps * unit + 16) + x + rest + PRODUCTS * plan
    }

    fn shared_bytes(&self) -> usize {
        self.table + self.layers * size_of::<Layer>()
    }

    /// Positions of a text are divided into at most so many parts for each key head; as in the source.
    fn most_parts(&self) -> usize {
        (self.blocks / self.sizes.heads.kv_heads).min(32)
    }

    /// Sets of places; as in the source.
    fn sets(&self) -> usize {
        if self.ranks == 1 { 2 } else { 3 }
    }

    /// Words of a set of places; as in the source.
    fn words(&self) -> usize {
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
            ("OUT", 2),
            ("ACTIVATION", 0),
            ("HIDDEN", hidden),
            ("INNER", inner),
            ("HEADS", heads.heads),
            ("KV_HEADS", heads.kv_heads),
            ("HEAD", heads.head_size),
            ("PAIRS", pairs),
            ("RANKS", self.ranks),
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
    let atom = |bits, group, zero, scale| Atom { bits, group, zero, scale, factors: false, offset: false };
    let models = [
        (wide, (atom(4, 128, false, Float::F16), false)),
        (wide, (atom(8, 32, true, Float::BF16), false)),
        (narrow, (atom(4, 32, true, Float::F16), false)),
        (wide, (atom(4, 128, false, Float::F16), true)),
        (narrow, (atom(8, 128, true, Float::BF16), true)),
    ];
    let plan = |(sizes, form): (Sizes, (Atom, bool))| Plan::sized(&Caps::H200, sizes, form, form.0.scale, 32).ok();
    let alone: Vec<Plan> = models.into_iter().filter_map(plan).collect();
    let shared = alone.first().and_then(|plan| plan.clone().among(2).ok());
    alone.iter().chain(&shared).map(Plan::instance).collect()
}

fn atom_of(w: &Packed) -> Option<Atom> {
    if let Packed::Wna16(w) = w { Some(w.atom()) } else { None }
}

/// A norm before a product: its factors, and what is added to the mean square.
#[derive(Clone, Copy, Debug)]
pub struct StreamNorm<'a> {
    /// `[hidden]`.
    pub weight: View<'a, f32>,
    /// Added to the mean square.
    pub eps: f32,
}

/// A layer of a model.
#[derive(Debug)]
pub struct StepLayer<'a> {
    /// Weights and biases of q, k and v; the output; gate and up; down.
    pub products: [(&'a Packed, Option<View<'a, f32>>); PRODUCTS],
    /// Before attention, and before the MLP.
    pub norms: [StreamNorm<'a>; 2],
    /// Norms of heads, where the model has them.
    pub head_norms: Option<HeadNorms<'a>>,
    /// Factor of the scores.
    pub scale: f32,
    /// Positions that a query sees at most.
    pub window: Option<usize>,
}

/// A model's steps of one token in one text. It holds addresses: of the weights, of the text's cache and of what a step reads.
#[derive(Debug)]
pub struct PersistentDecode {
    plan: Plan,
    layers: Buffer<u8>,
    /// The sets of places, which other ranks write into too.
    words: Inbox,
    state: Buffer<u32>,
    /// Those that the model is shared with.
    neighbours: Option<Neighbours>,
}

/// What a step reads and writes besides.
#[derive(Debug)]
pub struct StepOfText<'a> {
    /// The token, `[1]`.
    pub token: View<'a, u32>,
    /// Its position, `[1]`.
    pub position: View<'a, u32>,
    /// `[tokens, hidden]`: of all tokens, or of those from `first_token` on that this rank has.
    pub embedding: FloatView<'a>,
    /// The first of them.
    pub first_token: usize,
    /// The last norm.
    pub norm: StreamNorm<'a>,
    /// Rotations of all layers.
    pub rope: &'a Rope,
    /// The cache that the layers were given.
    pub cache: &'a mut KvCache,
    /// The normed stream, `[hidden]`, in the type of the cache.
    pub normed: FloatViewMut<'a>,
}

impl PersistentDecode {
    /// The layers of a model with the cache of a text. *Errors:* another number of layers than the plan has, vectors of a wrong
    /// length, memory that is short.
    pub fn new(gpu: &Gpu, stream: &Stream, plan: Plan, layers: &[StepLayer<'_>], cache: &KvCache) -> Result<Self> {
        let Sizes { hidden, heads, .. } = plan.sizes;
        same_length(OP, "layers", Some(plan.layers), layers.len())?;
        if cache.heads() != heads || cache.kv() != plan.dtype.into() || cache.capacity() == 0 {
            return Err(Error::invalid(OP, "a cache of the model's heads and type, with room", "another"));
        }
        let mut table = Vec::with_capacity(layers.len());
        for (i, layer) in layers.iter().enumerate() {
            for norm in layer.norms {
                same_length(OP, "a norm", Some(hidden), norm.weight.len())?;
            }
            for weight in layer.head_norms.iter().flat_map(|norms| [norms.queries, norms.keys]) {
                same_length(OP, "a norm of heads", Some(heads.head_size), weight.len())?;
            }
            let product = |at: usize, norm: Option<StreamNorm<'_>>| {
                let (Packed::Wna16(w), bias) = layer.products[at] else {
                    return Err(Error::invalid(OP, "weights in layout cuda_wna16", "others"));
                };
                if let Some(bias) = bias {
                    same_length(OP, "a bias", Some(w.shape()[0]), bias.len())?;
                }
                Ok(Product {
                    w: w.atoms(),
                    bias: bias.map_or(0, |bias| bias.pointer()),
                    norm: norm.map_or(0, |norm| norm.weight.pointer()),
                    eps: norm.map_or(0.0, |norm| norm.eps),
                    padding: 0,
                })
            };
            let [keys, values] = cache.layer(OP, i)?;
            let norms = layer.head_norms;
            table.push(Layer {
                qkv: product(0, Some(layer.norms[0]))?,
                output: product(1, None)?,
                up: product(2, Some(layer.norms[1]))?,
                down: product(3, None)?,
                query_norm: norms.map_or(0, |norms| norms.queries.pointer()),
                key_norm: norms.map_or(0, |norms| norms.keys.pointer()),
                keys: keys.pointer(),
                values: values.pointer(),
                query_eps: norms.map_or(0.0, |norms| norms.eps),
                key_eps: norms.map_or(0.0, |norms| norms.eps),
                scale: layer.scale,
                // No text is longer than positions have bits for.
                window: layer.window.map_or(0, |window| u32::try_from(window).unwrap_or(u32::MAX)),
            });
        }
        let context = gpu.context();
        let bytes: &[u8] = bytemuck::cast_slice(&table);
        let mut buffer = context.allocate(bytes.len())?;
        stream.upload(bytes, buffer.view_mut())?;
        let words = Inbox::new(context, stream, plan.sets() * plan.words())?;
        let mut state = context.allocate(3)?;
        stream.upload(&[0, 0, 0], state.view_mut())?;
        Ok(Self { plan, layers: buffer, words, state, neighbours: None })
    }

    /// What the other ranks are told of the places that they write into. Error: the system lets no other process open them.
    pub fn address(&self, gpu: &Gpu) -> Result<Vec<u8>> {
        self.words.address(gpu.context())
    }

    /// The same with the places of the other ranks, which run their steps side by side with this one's. *Errors:* another number of ranks
    /// than the plan has.
    pub fn meet(self, neighbours: Neighbours) -> Result<Self> {
        same_length(OP, "ranks", Some(self.plan.ranks), neighbours.size())?;
        Ok(Self { neighbours: Some(neighbours), ..self })
    }

    /// Bytes that it takes on the device.
    pub fn bytes(&self) -> usize {
        self.layers.bytes() + 4 * self.plan.sets() * self.plan.words() + self.state.bytes()
    }

    /// One token through all layers: keys and values go to the cache, the normed stream to `normed`.
    ///
    /// *Accuracy:* a product rounds each x to 2⁻³⁰ of the greatest among 128 columns, is exact for the columns of a group of scales,
    /// and adds groups up in f32: within what [`crate::format::reference::Bound`] says for x in the cache's type; what attention and
    /// the gate give is rounded to that type. Attention has scores and weights of two halves, within the bound of
    /// [`attention`](super::attention()). *Errors:* lengths that do not fit.
    pub fn step(&self, gpu: &Gpu, stream: &Stream, step: StepOfText<'_>) -> Result<()> {
        let Sizes { hidden, pairs, .. } = self.plan.sizes;
        same_length(OP, "normed", Some(hidden), step.normed.len())?;
        same_length(OP, "a norm", Some(hidden), step.norm.weight.len())?;
        same_length(OP, "token", Some(1), step.token.len())?;
        same_length(OP, "position", Some(1), step.position.len())?;
        same_length(OP, "frequencies", Some(pairs), step.rope.pairs())?;
        if step.normed.dtype() != self.plan.dtype {
            return Err(Error::invalid(
                OP,
                format!("a normed stream in {}", self.plan.dtype),
                step.normed.dtype().to_string(),
            ));
        }
        let tokens = step.embedding.len() / hidden;
        let mut of_ranks = [0; MOST_RANKS];
        let (mut failed, mut silent, mut rank) = (self.state.pointer() + 8, 0, 0);
        match &self.neighbours {
            None => same_length(OP, "ranks", Some(self.plan.ranks), 1)?,
            Some(neighbours) => {
                (failed, silent, rank) = (neighbours.failed(), neighbours.silent(), neighbours.rank());
                let pointers = neighbours.pointers(self.words.pointer());
                of_ranks.iter_mut().zip(pointers).for_each(|(of_rank, pointer)| *of_rank = pointer);
            }
        }
        let params = Params {
            of_ranks,
            failed,
            silent,
            first: step.first_token as u64,
            tokens: tokens as u64,
            rank: narrow(OP, "ranks", rank)?,
            layers: self.layers.pointer(),
            token: step.token.pointer(),
            position: step.position.pointer(),
            embedding: step.embedding.pointer(),
            norm: step.norm.weight.pointer(),
            normed: step.normed.pointer(),
            turns: step.rope.pointer(),
            words: self.words.pointer(),
            state: self.state.pointer(),
            capacity: step.cache.capacity() as u64,
            count: narrow(OP, "layers", self.plan.layers)?,
            embedding_type: float_type(step.embedding.dtype()),
            eps: step.norm.eps,
        };
        let form = Launch {
            shared_bytes: narrow(OP, "bytes", self.plan.shared_bytes())?,
            cooperative: true,
            ..Launch::linear(self.plan.blocks as u32, 32 * (WARPS + COPYING_WARPS) as u32)
        };
        let function = gpu.function(&self.plan.instance())?;
        // SAFETY: the one parameter is the source's `Params`, whose lengths were checked; the cache is borrowed to be written.
        unsafe { function.launch(stream, &form, &[Arg::new(&params)]) }
    }
}
