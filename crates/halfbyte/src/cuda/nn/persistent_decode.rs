//! Launches of `persistent_decode.cu`: all layers of a step of one token in one kernel.

use super::collectives::Neighbours;
use super::kv_cache::KvCache;
use super::persistent_layers::{Layer, PersistentLayers, StreamNorm};
use super::persistent_plan::{COPYING_WARPS, MOST_RANKS, MOST_ROPES, Plan, Sizes, WARPS};
use super::rope::Rope;
use super::{narrow, same_length};
use crate::cuda::Gpu;
use crate::cuda::driver::{Arg, Buffer, FloatView, FloatViewMut, Inbox, Launch, Stream, TensorMap, View};
use crate::cuda::parameters::{Parameters, float_type, parameters};
use crate::cuda::sources::Source;
use crate::error::{Error, Result};
use crate::kv_pages::PAGE_LENGTH;
use std::sync::Arc;

pub(super) static SOURCE: Source = Source {
    path: "nn/persistent_decode.cu",
    text: include_str!("persistent_decode.cu"),
    parameters: &[Params::LAYOUT, Layer::LAYOUT],
};

pub(super) const OP: &str = "persistent_decode";

/// What memory brings while the last layer ends and the next kernel begins, about 4 µs.
const BEHIND_BYTES: usize = 16 << 20;

parameters! {
    /// As in the source.
    struct Params {
        layers: u64,
        scales: u64,
        token: u64,
        position: u64,
        embedding: u64,
        norm: u64,
        norm_bias: u64,
        norm_behind: u64,
        slopes: u64,
        normed: u64,
        turns: [u64; MOST_ROPES],
        words: u64,
        state: u64,
        of_ranks: [u64; MOST_RANKS],
        failed: u64,
        silent: u64,
        pages: u64,
        behind: u64,
        capacity: u64,
        positions: u64,
        first: u64,
        tokens: u64,
        count: u32,
        embedding_type: u32,
        eps: f32,
        eps_behind: f32,
        rank: u32,
        of_behind: u32,
    }
}

/// A model's steps of one token in one text. It holds addresses: of the text's cache and of what a step reads.
#[derive(Debug)]
pub struct PersistentDecode {
    plan: Plan,
    layers: Arc<PersistentLayers>,
    /// What the source is told of each layer.
    table: Buffer<u8>,
    /// Keys and values of the cache.
    maps: [TensorMap; 2],
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
    /// The pages of the text in the cache, where texts are paged; none: its positions lie in order.
    pub pages: Option<View<'a, u32>>,
    /// `[tokens, hidden]`: of all tokens, or of those from `first_token` on that this rank has.
    pub embedding: FloatView<'a>,
    /// The first of them.
    pub first_token: usize,
    /// The last norm.
    pub norm: StreamNorm<'a>,
    /// The kinds of rotations that layers have.
    pub ropes: &'a [&'a Rope],
    /// The cache that the layers were given.
    pub cache: &'a mut KvCache,
    /// The normed stream, `[hidden]`, in the type of the cache.
    pub normed: FloatViewMut<'a>,
    /// Weights that the next kernel reads from the first on, as the head's: the beginning comes into the second-level cache meanwhile.
    pub behind: Option<FloatView<'a>>,
}

impl PersistentDecode {
    /// The layers of a model with the cache of a text, or, `paged`, of texts whose keys and values lie in pages. *Errors:* a cache of other
    /// heads or another type, memory that is short.
    pub fn new(
        gpu: &Gpu,
        stream: &Stream,
        layers: &Arc<PersistentLayers>,
        cache: &KvCache,
        paged: bool,
    ) -> Result<Self> {
        let plan = if paged { layers.plan().clone().paged() } else { layers.plan().clone() };
        if cache.heads() != plan.sizes.heads || cache.kv() != plan.dtype.into() || cache.capacity() == 0 {
            return Err(Error::invalid(OP, "a cache of the model's heads and type, with room", "another"));
        }
        // Compiled now, not in the first step.
        gpu.function(&plan.instance())?;
        let table = layers.table(cache)?;
        let maps = cache.maps(OP, plan.box_positions())?;
        let bytes: &[u8] = bytemuck::cast_slice(&table);
        let context = gpu.context();
        let mut buffer = context.allocate(bytes.len())?;
        stream.upload(bytes, buffer.view_mut())?;
        let words = Inbox::new(context, stream, plan.sets() * plan.words())?;
        let mut state = context.allocate(3)?;
        stream.upload(&[0, 0, 0], state.view_mut())?;
        Ok(Self { plan, layers: layers.clone(), table: buffer, maps, words, state, neighbours: None })
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

    /// Bytes that it takes on the device besides the model.
    pub fn bytes(&self) -> usize {
        self.table.bytes() + 4 * self.plan.sets() * self.plan.words() + self.state.bytes()
    }

    /// One token through all layers: keys and values go to the cache, the normed stream to `normed`.
    ///
    /// *Accuracy:* a product rounds each x to 2⁻³⁰ of the greatest among 128 columns, is exact for the columns of a group of scales,
    /// and adds groups up in f32: within what [`crate::format::reference::Bound`] says for x in the cache's type; what attention and
    /// the gate give is rounded to that type. Attention has scores and weights of two halves, within the bound of
    /// [`attention`](super::attention()). *Errors:* lengths that do not fit.
    pub fn step(&self, gpu: &Gpu, stream: &Stream, step: StepOfText<'_>) -> Result<()> {
        let Sizes { hidden, pairs, ropes, .. } = self.plan.sizes;
        same_length(OP, "normed", Some(hidden), step.normed.len())?;
        step.norm.fits(hidden, self.plan.steps_of_layer.layer_norm)?;
        same_length(OP, "token", Some(1), step.token.len())?;
        same_length(OP, "position", Some(1), step.position.len())?;
        same_length(OP, "rotations", Some(ropes), step.ropes.len())?;
        let mut turns = [0; MOST_ROPES];
        for (to, rope) in turns.iter_mut().zip(step.ropes) {
            same_length(OP, "frequencies", Some(pairs), rope.pairs())?;
            *to = rope.pointer();
        }
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
        let pieces = self.plan.blocks * WARPS;
        // A piece begins at 16 bytes.
        let behind = step.behind.filter(|of| of.pointer().is_multiple_of(16));
        let of_behind =
            behind.map_or(0, |of| (of.len() * of.dtype().size_bytes()).min(BEHIND_BYTES) / pieces / 16 * 16);
        let (norm_behind, eps_behind) = self.layers.last_behind();
        let params = Params {
            behind: behind.map_or(0, |of| of.pointer()),
            of_behind: narrow(OP, "bytes", of_behind)?,
            of_ranks,
            failed,
            silent,
            first: step.first_token as u64,
            tokens: tokens as u64,
            rank: narrow(OP, "ranks", rank)?,
            layers: self.table.pointer(),
            scales: self.layers.scales(),
            token: step.token.pointer(),
            position: step.position.pointer(),
            embedding: step.embedding.pointer(),
            norm: step.norm.weight.pointer(),
            norm_bias: step.norm.bias(),
            norm_behind,
            slopes: self.layers.slopes(),
            normed: step.normed.pointer(),
            turns,
            words: self.words.pointer(),
            state: self.state.pointer(),
            pages: step.pages.map_or(0, |pages| pages.pointer()),
            capacity: step.cache.capacity() as u64,
            positions: if self.plan.paged { pages * PAGE_LENGTH } else { step.cache.capacity() } as u64,
            count: narrow(OP, "layers", self.plan.layers)?,
            embedding_type: float_type(step.embedding.dtype()),
            eps: step.norm.eps,
            eps_behind,
        };
        let form = Launch {
            shared_bytes: narrow(OP, "bytes", self.plan.shared_bytes)?,
            cooperative: true,
            ..Launch::linear(self.plan.blocks as u32, 32 * (WARPS + COPYING_WARPS) as u32)
        };
        let function = gpu.function(&self.plan.instance())?;
        let [keys, values] = &self.maps;
        // SAFETY: the first parameter is the source's `Params`, whose lengths were checked, the others are maps of the cache, which is borrowed
        // to be written.
        unsafe { function.launch(stream, &form, &[Arg::new(&params), Arg::new(keys), Arg::new(values)]) }
    }
}
