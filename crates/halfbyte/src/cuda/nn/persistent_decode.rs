//! Launches of `persistent_decode.cu`: all layers of a step of one token in one kernel.

use super::collectives::Neighbours;
use super::floats::float_type;
use super::kv_cache::KvCache;
use super::persistent_model::form;
use super::persistent_plan::{COPYING_WARPS, MOST_RANKS, PRODUCTS, Plan, Sizes, WARPS};
use super::rope::{HeadNorms, Rope};
use super::{Gate, narrow, same_length};
use crate::cuda::Gpu;
use crate::cuda::driver::{Arg, Buffer, FloatView, FloatViewMut, Inbox, Launch, Stream, View};
use crate::cuda::matmul::Packed;
use crate::cuda::parameters::{Parameters, parameters};
use crate::cuda::sources::Source;
use crate::error::{Error, Result};
use crate::kv_pages::PAGE_LENGTH;
use crate::layout::cuda_wna16::Atom;

pub(super) static SOURCE: Source = Source {
    path: "nn/persistent_decode.cu",
    text: include_str!("persistent_decode.cu"),
    parameters: &[Params::LAYOUT, Layer::LAYOUT],
};

const OP: &str = "persistent_decode";

parameters! {
    /// As in the source.
    struct Product {
        w: u64,
        bias: u64,
    }

    /// As in the source, where products are an array.
    pub(super) struct Layer {
        qkv: Product,
        output: Product,
        up: Product,
        down: Product,
        norms: [u64; 2],
        norm_biases: [u64; 2],
        query_norm: u64,
        key_norm: u64,
        keys: u64,
        values: u64,
        w_of_values: u64,
        bias_of_values: u64,
        router: u64,
        eps: [f32; 2],
        head_eps: f32,
        scale: f32,
        window: u32,
        forms: u32,
    }

    /// As in the source.
    struct Params {
        layers: u64,
        scales: u64,
        token: u64,
        position: u64,
        embedding: u64,
        norm: u64,
        norm_bias: u64,
        slopes: u64,
        normed: u64,
        turns: u64,
        words: u64,
        state: u64,
        of_ranks: [u64; MOST_RANKS],
        failed: u64,
        silent: u64,
        pages: u64,
        capacity: u64,
        positions: u64,
        first: u64,
        tokens: u64,
        count: u32,
        embedding_type: u32,
        eps: f32,
        rank: u32,
    }
}

/// A norm of the stream: an RMS norm, or a LayerNorm where it has a bias.
#[derive(Clone, Copy, Debug)]
pub struct StreamNorm<'a> {
    /// `[hidden]`.
    pub weight: View<'a, f32>,
    /// `[hidden]`.
    pub bias: Option<View<'a, f32>>,
    /// Added to the mean square.
    pub eps: f32,
}

impl StreamNorm<'_> {
    fn bias(&self) -> u64 {
        self.bias.map_or(0, |bias| bias.pointer())
    }

    /// *Errors:* vectors of another length, a bias where the others have none or none where they have one.
    fn fits(&self, hidden: usize, layer_norm: bool) -> Result<()> {
        same_length(OP, "a norm", Some(hidden), self.weight.len())?;
        same_length(
            OP,
            "a norm's bias",
            Some(if layer_norm { hidden } else { 0 }),
            self.bias.map_or(0, |bias| bias.len()),
        )
    }
}

/// A weight and its bias.
pub type StepProduct<'a> = (&'a Packed, Option<View<'a, f32>>);

/// The products of a layer's MLP.
#[derive(Debug)]
pub enum StepMlp<'a> {
    /// Weights and biases of gate and up, or of up alone; down.
    Dense([StepProduct<'a>; 2]),
    /// A mixture of experts.
    Experts(StepExperts<'a>),
}

impl<'a> StepMlp<'a> {
    pub(super) fn experts(&self) -> Option<&StepExperts<'a>> {
        if let Self::Experts(experts) = self { Some(experts) } else { None }
    }
}

/// A mixture of experts without biases.
#[derive(Debug)]
pub struct StepExperts<'a> {
    /// Of each expert gate and up, as [`Packer::pack_gated`](crate::cuda::matmul::Packer::pack_gated) leaves them; down.
    pub experts: Vec<[&'a Packed; 2]>,
    /// `[experts, hidden]`.
    pub router: FloatView<'a>,
    /// Experts of a token.
    pub top_k: usize,
    /// Whether their shares are a softmax of their logits alone, or of all.
    pub of_chosen: bool,
}

impl StepExperts<'_> {
    /// What the kernel would need.
    pub(super) fn unlike(&self, hidden: usize) -> Option<&'static str> {
        if self.router.len() != self.experts.len() * hidden {
            return Some("a router of all experts");
        }
        let gated = |[up, down]: &[&Packed; 2]| up.gate().is_some() && down.gate().is_none();
        (!self.experts.iter().all(gated)).then_some("experts whose gates and what they let through take turns")
    }
}

/// A layer of a model.
#[derive(Debug)]
pub struct StepLayer<'a> {
    /// Weights and biases of q, k and v; the output.
    pub products: [StepProduct<'a>; 2],
    /// What follows attention.
    pub mlp: StepMlp<'a>,
    /// What is between its products.
    pub gate: Gate,
    /// Those of v, where it is not in the first of them.
    pub values: Option<StepProduct<'a>>,
    /// Before attention, and before the MLP.
    pub norms: [StreamNorm<'a>; 2],
    /// Norms of heads, where the model has them.
    pub head_norms: Option<HeadNorms<'a>>,
    /// Of each head, by how much a score falls with each position that lies between, `[heads]`; the same in all layers.
    pub alibi: Option<View<'a, f32>>,
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
    /// Where the scales of rows are, of each layer and product.
    scales: Buffer<u64>,
    /// Where weights of experts are, of each layer gate and up of all, then down.
    experts: Buffer<u64>,
    /// Where slopes of heads are, or 0.
    slopes: u64,
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
    /// The pages of the text in the cache, for a plan of [paged](Plan::paged) texts; none: its positions lie in order.
    pub pages: Option<View<'a, u32>>,
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

/// What the source is told of a product.
#[derive(Clone, Copy)]
struct OfProduct {
    atom: Atom,
    w: u64,
    bias: u64,
    rows: u64,
}

/// *Errors:* weights in another layout, a bias of another length.
fn of_product((w, bias): StepProduct<'_>) -> Result<OfProduct> {
    let Packed::Wna16(w) = w else {
        return Err(Error::invalid(OP, "weights in layout cuda_wna16", "others"));
    };
    if let Some(bias) = bias {
        same_length(OP, "a bias", Some(w.shape()[0]), bias.len())?;
    }
    Ok(OfProduct { atom: w.atom(), w: w.atoms(), bias: bias.map_or(0, |bias| bias.pointer()), rows: w.rows() })
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
        let context = gpu.context();
        let mut addresses = Vec::new();
        for experts in layers.iter().filter_map(|layer| layer.mlp.experts()) {
            for at in 0..2 {
                for weights in &experts.experts {
                    addresses.push(of_product((weights[at], None))?.w);
                }
            }
        }
        let mut experts = context.allocate(addresses.len())?;
        stream.upload(&addresses, experts.view_mut())?;
        let table_of = |layer: usize, at: usize| {
            let count = plan.mixture.map_or(0, |mixture| mixture.experts);
            experts.pointer() + (8 * count * (2 * layer + at)) as u64
        };
        let mut slopes: Option<Vec<f32>> = None;
        let mut table = Vec::with_capacity(layers.len());
        let mut scales = Vec::with_capacity(layers.len() * PRODUCTS);
        for (i, layer) in layers.iter().enumerate() {
            for norm in layer.norms {
                norm.fits(hidden, plan.steps_of_layer.layer_norm)?;
            }
            if let Some(of_heads) = layer.alibi {
                same_length(OP, "slopes", Some(heads.heads), of_heads.len())?;
                let mut values = vec![0.0; heads.heads];
                stream.download(of_heads, &mut values)?;
                if *slopes.get_or_insert_with(|| values.clone()) != values {
                    return Err(Error::invalid(OP, "the same slopes in all layers", "others"));
                }
            }
            for weight in layer.head_norms.iter().flat_map(|norms| [norms.queries, norms.keys]) {
                same_length(OP, "a norm of heads", Some(heads.head_size), weight.len())?;
            }
            let [qkv, output] = [of_product(layer.products[0])?, of_product(layer.products[1])?];
            let [up, down] = match &layer.mlp {
                StepMlp::Dense(products) => [of_product(products[0])?, of_product(products[1])?],
                StepMlp::Experts(_) => [0, 1].map(|at| OfProduct { w: table_of(i, at), ..qkv }),
            };
            // Of q, k and v in one tensor the rows of v begin where their atoms do.
            let values = match layer.values {
                None => {
                    let bytes_before = plan.bytes_before_values(qkv.atom) as u64;
                    OfProduct { w: qkv.w + bytes_before, ..qkv }
                }
                Some(values) => {
                    let values = of_product(values)?;
                    if (values.bias == 0) != (qkv.bias == 0) {
                        return Err(Error::invalid(OP, "biases of q, k and v, or none", "of some"));
                    }
                    let rows_before = plan.sizes.rows_before_values() as u64;
                    OfProduct { bias: values.bias.wrapping_sub(4 * rows_before), ..values }
                }
            };
            let products = [qkv, output, up, down];
            scales.extend(products.map(|product| product.rows));
            let forms = products.iter().chain([&values]).enumerate();
            let forms = forms.fold(0, |forms, (at, product)| forms | form(product.atom) << (4 * at));
            let [qkv, output, up, down] = products.map(|OfProduct { w, bias, .. }| Product { w, bias });
            let [keys, of_cache] = cache.layer(OP, i)?;
            let norms = layer.head_norms;
            table.push(Layer {
                qkv,
                output,
                up,
                down,
                norms: layer.norms.map(|norm| norm.weight.pointer()),
                norm_biases: layer.norms.map(|norm| norm.bias()),
                query_norm: norms.map_or(0, |norms| norms.queries.pointer()),
                key_norm: norms.map_or(0, |norms| norms.keys.pointer()),
                keys: keys.pointer(),
                values: of_cache.pointer(),
                w_of_values: values.w,
                bias_of_values: values.bias,
                router: layer.mlp.experts().map_or(0, |experts| experts.router.pointer()),
                eps: layer.norms.map(|norm| norm.eps),
                head_eps: norms.map_or(0.0, |norms| norms.eps),
                scale: layer.scale,
                // No text is longer than positions have bits for.
                window: layer.window.map_or(0, |window| u32::try_from(window).unwrap_or(u32::MAX)),
                forms,
            });
        }
        // Compiled now, not in the first step.
        gpu.function(&plan.instance())?;
        let bytes: &[u8] = bytemuck::cast_slice(&table);
        let mut buffer = context.allocate(bytes.len())?;
        stream.upload(bytes, buffer.view_mut())?;
        let mut of_rows = context.allocate(scales.len())?;
        stream.upload(&scales, of_rows.view_mut())?;
        let words = Inbox::new(context, stream, plan.sets() * plan.words())?;
        let mut state = context.allocate(3)?;
        stream.upload(&[0, 0, 0], state.view_mut())?;
        let slopes = layers.first().and_then(|layer| layer.alibi).map_or(0, |slopes| slopes.pointer());
        Ok(Self { plan, layers: buffer, scales: of_rows, experts, slopes, words, state, neighbours: None })
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
        let tables = self.layers.bytes() + self.scales.bytes() + self.experts.bytes();
        tables + 4 * self.plan.sets() * self.plan.words() + self.state.bytes()
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
        step.norm.fits(hidden, self.plan.steps_of_layer.layer_norm)?;
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
        let pages = step.pages.map_or(0, |pages| pages.len());
        if step.pages.is_some() != self.plan.paged || self.plan.paged && pages == 0 {
            let expected = if self.plan.paged { "the pages of a text" } else { "a text in order" };
            return Err(Error::invalid(OP, expected, format!("{pages} pages")));
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
            scales: self.scales.pointer(),
            token: step.token.pointer(),
            position: step.position.pointer(),
            embedding: step.embedding.pointer(),
            norm: step.norm.weight.pointer(),
            norm_bias: step.norm.bias(),
            slopes: self.slopes,
            normed: step.normed.pointer(),
            turns: step.rope.pointer(),
            words: self.words.pointer(),
            state: self.state.pointer(),
            pages: step.pages.map_or(0, |pages| pages.pointer()),
            capacity: step.cache.capacity() as u64,
            positions: if self.plan.paged { pages * PAGE_LENGTH } else { step.cache.capacity() } as u64,
            count: narrow(OP, "layers", self.plan.layers)?,
            embedding_type: float_type(step.embedding.dtype()),
            eps: step.norm.eps,
        };
        let form = Launch {
            shared_bytes: narrow(OP, "bytes", self.plan.shared_bytes)?,
            cooperative: true,
            ..Launch::linear(self.plan.blocks as u32, 32 * (WARPS + COPYING_WARPS) as u32)
        };
        let function = gpu.function(&self.plan.instance())?;
        // SAFETY: the one parameter is the source's `Params`, whose lengths were checked; the cache is borrowed to be written.
        unsafe { function.launch(stream, &form, &[Arg::new(&params)]) }
    }
}
