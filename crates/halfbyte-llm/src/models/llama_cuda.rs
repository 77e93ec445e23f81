//! [Llama](super::llama) on a GPU: the same graph, the same numbers but for the type of what products read.
//!
//! ```text
//! several tokens:  upload them ─ layers ─ (head ─ most likely token)            each kernel launched by the host
//! one token:       layers ─ head ─ most likely token, position + 1              recorded once, then replayed
//! ```
//!
//! A recorded step reads token and position from the device and leaves the next ones there, so that a greedy text takes one
//! launch a token and brings back its id. There is a recording for each power of two of the context's length, which attention
//! divides into parts.

use super::llama::{EMBEDDING, groups};
use super::{Batch, Resident, Text};
use crate::config::Config;
use crate::device::Gpu as Device;
use crate::engine::PREFILL_TOKENS;
use crate::error::{Error, Result};
use crate::sampling::Sampler;
use crate::weights::Loader;
use crate::weights_cuda::{Loading, Products, Projection, Workspaces};
use halfbyte::Float;
use halfbyte::cpu::Cpu;
use halfbyte::cuda::Gpu;
use halfbyte::cuda::driver::{Buffer, Graph, Stream};
use halfbyte::cuda::nn::{self, Attention, Dense, DenseCall, FloatBuffer, KvCache, Norm, Rope, Step};
use halfbyte::kernel::Heads;
use std::ops::Range;
use std::sync::Arc;

/// Positions that the shortest recording serves.
const SHORTEST_RECORDING: usize = 256;

#[derive(Debug)]
struct LlamaCuda {
    gpu: Arc<Gpu>,
    activations: Float,
    shape: Shape,
    rope: Rope,
    layers: Vec<Layer>,
    norm: Buffer<f32>,
    /// `[vocab, hidden]`.
    embedding: Dense,
    /// None where the head's weight is the embedding.
    head: Option<Projection>,
}

#[derive(Clone, Copy, Debug)]
struct Shape {
    layers: usize,
    hidden: usize,
    intermediate: usize,
    vocab: usize,
    heads: Heads,
    eps: f32,
}

#[derive(Debug)]
struct Layer {
    attention_norm: Buffer<f32>,
    /// Queries, keys and values, side by side.
    qkv: Projection,
    output: Projection,
    mlp_norm: Buffer<f32>,
    /// Gate, then up.
    gate_up: Projection,
    down: Projection,
}

impl Layer {
    fn load(config: &Config, weights: &mut Loader<'_>, loading: &Loading<'_>, i: usize) -> Result<Self> {
        let groups = groups(config, i);
        let mut norm = |name: &str| -> Result<Buffer<f32>> {
            loading.vector(&weights.vector(&format!("model.layers.{i}.{name}.weight"), config.hidden_size)?)
        };
        let [attention_norm, mlp_norm] = [norm("input_layernorm")?, norm("post_attention_layernorm")?];
        let mut joined = |group: usize| loading.joined(weights, &groups[group].layers);
        let (qkv, output, gate_up, down) = (joined(0)?, joined(1)?, joined(2)?, joined(3)?);
        Ok(Self { attention_norm, qkv, output, mlp_norm, gate_up, down })
    }

    fn projections(&self) -> [&Projection; 4] {
        [&self.qkv, &self.output, &self.gate_up, &self.down]
    }
}

/// Packs the weights of a Llama onto a GPU.
pub fn load(config: &Config, weights: &mut Loader<'_>, device: &Device) -> Result<Box<dyn Resident>> {
    let Device { gpu, activations } = device.clone();
    let stream = gpu.stream()?;
    let loading = Loading { gpu: &gpu, stream: &stream, activations };
    let hidden = config.hidden_size;
    let layers = weights.side_by_side(config.layers, |weights, i| Layer::load(config, weights, &loading, i))?;
    let norm = loading.vector(&weights.vector("model.norm.weight", hidden)?)?;
    let shape = [config.vocab_size, hidden];
    let embedding =
        weights.embedding_by(EMBEDDING, shape, |rows| Ok(Dense::new(&gpu, &stream, rows.as_floats(), shape)?))?;
    let head = match config.tied_embeddings {
        true => None,
        false => Some(weights.untied_head_by("lm_head", shape, |stored, act| loading.pack(&[stored], act, "lm_head"))?),
    };
    let shape = Shape {
        layers: config.layers,
        hidden,
        intermediate: config.intermediate_size,
        vocab: config.vocab_size,
        heads: config.attention_heads(),
        eps: config.rms_norm_eps,
    };
    let rope = Rope::new(&gpu, &stream, &config.rope_frequencies)?;
    stream.synchronize()?;
    Ok(Box::new(LlamaCuda { gpu, activations, shape, rope, layers, norm, embedding, head }))
}

impl LlamaCuda {
    fn projections(&self) -> impl Iterator<Item = &Projection> {
        self.layers.iter().flat_map(Layer::projections).chain(&self.head)
    }
}

impl Resident for LlamaCuda {
    fn begin<'m>(&'m self, _: &'m Cpu, context: usize) -> Result<Box<dyn Text + 'm>> {
        let Self { gpu, activations, shape, .. } = self;
        let stream = gpu.stream()?;
        let cache = KvCache::new(gpu, shape.layers, shape.heads, context, *activations)?;
        let state = State::new(self, &stream, cache, context.clamp(1, PREFILL_TOKENS))?;
        Ok(Box::new(CudaText::new(self, stream, state)?))
    }

    fn prepare(&self, progress: &(dyn Fn(usize, usize) + Sync)) -> Result<()> {
        let mut instances = nn::instances(Some(self.shape.heads.head_size));
        let mut layouts: Vec<&str> = self.projections().flat_map(Projection::layouts).collect();
        layouts.sort_unstable();
        layouts.dedup();
        let arch = self.gpu.caps().arch;
        let kernels = halfbyte::cuda::matmul::KERNELS.iter().filter(|kernel| (kernel.serves)(arch));
        instances.extend(kernels.filter(|k| layouts.contains(&k.layout)).flat_map(|kernel| (kernel.instances)()));
        Ok(self.gpu.prepare(&instances, |done| progress(done, instances.len()))?)
    }

    fn bytes(&self) -> usize {
        let norms: usize = self.layers.iter().map(|l| l.attention_norm.bytes() + l.mlp_norm.bytes()).sum();
        let products: usize = self.projections().map(Projection::bytes).sum();
        norms + self.norm.bytes() + products + self.embedding.bytes()
    }

    fn kv_bytes_per_token(&self) -> usize {
        let Shape { layers, heads, .. } = self.shape;
        2 * layers * heads.kv_heads * heads.head_size * self.activations.size_bytes()
    }
}

/// What passes between the layers of a text, and what its next step begins with. All of it is allocated once and stays where
/// it is, since recordings hold its addresses.
#[derive(Debug)]
struct State {
    cache: KvCache,
    /// Of the first row, `[1]`.
    position: Buffer<u32>,
    tokens: Buffer<u32>,
    /// The most likely token, then the bits of its logit.
    choice: Buffer<u32>,
    residual: Buffer<f32>,
    normed: FloatBuffer,
    update: Buffer<f32>,
    qkv: Buffer<f32>,
    attended: FloatBuffer,
    gate_up: Buffer<f32>,
    inner: FloatBuffer,
    /// For projections that could not be joined.
    part: Buffer<f32>,
    /// Parts of a row's attention.
    partial: Buffer<f32>,
    workspaces: Workspaces,
}

/// Rows that go through the layers together.
#[derive(Clone, Copy)]
struct Rows {
    m: usize,
    /// Positions that attention is laid out for, at least those there are.
    longest: usize,
    /// Whether every row goes through the last layer, or the last one only.
    all: bool,
}

impl State {
    fn new(model: &LlamaCuda, stream: &Stream, cache: KvCache, rows: usize) -> halfbyte::Result<Self> {
        let (gpu, context, Shape { hidden, intermediate, heads, .. }) = (&*model.gpu, model.gpu.context(), model.shape);
        let floats = |width: usize| FloatBuffer::allocate(gpu, model.activations, rows * width);
        let part = model.projections().map(Projection::widest_part).max().unwrap_or(0);
        Ok(Self {
            position: context.allocate(1)?,
            tokens: context.allocate(rows)?,
            choice: context.allocate(2)?,
            residual: context.allocate(rows * hidden)?,
            normed: floats(hidden)?,
            update: context.allocate(rows * hidden)?,
            qkv: context.allocate(rows * heads.row())?,
            attended: floats(heads.heads * heads.head_size)?,
            gate_up: context.allocate(rows * 2 * intermediate)?,
            inner: floats(intermediate)?,
            part: context.allocate(rows * part)?,
            partial: context.allocate(nn::partial_len(heads, cache.capacity()))?,
            workspaces: Workspaces::of(gpu, stream, model.projections(), model.activations)?,
            cache,
        })
    }

    /// Tokens and position from the device, to normed vectors in `normed`.
    fn layers(&mut self, model: &LlamaCuda, stream: &Stream, rows: Rows) -> halfbyte::Result<()> {
        let (gpu, Shape { hidden, intermediate, heads, .. }) = (&*model.gpu, model.shape);
        let attended = heads.heads * heads.head_size;
        let Rows { m, longest, all } = rows;
        let mut on = 0..m;
        let residual = self.residual.view_mut().slice(0..m * hidden);
        nn::embed(gpu, stream, model.embedding.rows(), hidden, self.tokens.view().slice(0..m), residual)?;
        for (i, layer) in model.layers.iter().enumerate() {
            self.norm(model, stream, &on, i > 0, &layer.attention_norm)?;
            let normed = self.normed.view(0..m * hidden);
            let mut products = Products { gpu, stream, part: &mut self.part, workspaces: &mut self.workspaces };
            products.run(&layer.qkv, normed, m, &mut self.qkv)?;
            let qkv = self.qkv.view_mut().slice(0..m * heads.row());
            model.rope.apply(gpu, stream, qkv, self.position.view(), &mut self.cache, i)?;
            if i + 1 == model.layers.len() && !all {
                // From here on nothing looks at rows other than the last.
                on = m - 1..m;
            }
            let rows = on.len();
            let what = Attention {
                qkv: self.qkv.view().slice(on.start * heads.row()..on.end * heads.row()),
                position: self.position.view(),
                first_row: on.start,
                longest,
                scale: (heads.head_size as f32).sqrt().recip(),
            };
            let out = self.attended.view_mut(0..rows * attended);
            nn::attention(gpu, stream, &what, &self.cache, i, self.partial.view_mut(), out)?;
            products.run(&layer.output, self.attended.view(0..rows * attended), rows, &mut self.update)?;
            self.norm(model, stream, &on, true, &layer.mlp_norm)?;
            let normed = self.normed.view(0..rows * hidden);
            let mut products = Products { gpu, stream, part: &mut self.part, workspaces: &mut self.workspaces };
            products.run(&layer.gate_up, normed, rows, &mut self.gate_up)?;
            let gate_up = self.gate_up.view().slice(0..rows * 2 * intermediate);
            nn::swiglu(gpu, stream, gate_up, intermediate, self.inner.view_mut(0..rows * intermediate))?;
            products.run(&layer.down, self.inner.view(0..rows * intermediate), rows, &mut self.update)?;
        }
        self.norm(model, stream, &on, !model.layers.is_empty(), &model.norm)
    }

    /// Adds what the last product left to the residual stream, if there is one, and norms it.
    fn norm(
        &mut self,
        model: &LlamaCuda,
        stream: &Stream,
        on: &Range<usize>,
        add: bool,
        weight: &Buffer<f32>,
    ) -> halfbyte::Result<()> {
        let Shape { hidden, eps, .. } = model.shape;
        let norm = Norm {
            residual: self.residual.view_mut().slice(on.start * hidden..on.end * hidden),
            update: add.then(|| self.update.view().slice(0..on.len() * hidden)),
            weight: weight.view(),
            eps,
            out: self.normed.view_mut(0..on.len() * hidden),
        };
        nn::rms_norm(&model.gpu, stream, norm)
    }

    /// Logits of some rows of `normed`.
    fn head(
        &mut self,
        model: &LlamaCuda,
        stream: &Stream,
        rows: Range<usize>,
        out: &mut Buffer<f32>,
    ) -> halfbyte::Result<()> {
        let (gpu, Shape { hidden, vocab, .. }, m) = (&*model.gpu, model.shape, rows.len());
        let x = self.normed.view(rows.start * hidden..rows.end * hidden);
        match &model.head {
            None => {
                let y = out.view_mut().slice(0..m * vocab).into();
                model.embedding.forward(gpu, stream, DenseCall { x, m, bias: None, y })
            }
            Some(head) => {
                let mut products = Products { gpu, stream, part: &mut self.part, workspaces: &mut self.workspaces };
                products.run(head, x, m, out)
            }
        }
    }

    /// From the vector in row `row` of `normed` to the next token; the text has grown by `advance`.
    fn choose(
        &mut self,
        model: &LlamaCuda,
        stream: &Stream,
        row: usize,
        advance: usize,
        logits: &mut Buffer<f32>,
    ) -> halfbyte::Result<()> {
        self.head(model, stream, row..row + 1, logits)?;
        let step = Step {
            logits: logits.view(),
            choice: self.choice.view_mut(),
            token: self.tokens.view_mut().slice(0..1),
            position: self.position.view_mut(),
            advance,
        };
        nn::argmax(&model.gpu, stream, step)
    }
}

/// A step of one token, as it was recorded.
#[derive(Debug)]
struct Recording {
    /// Positions that it serves.
    longest: usize,
    graph: Graph,
}

#[derive(Debug)]
struct CudaText<'m> {
    model: &'m LlamaCuda,
    stream: Stream,
    recordings: Vec<Recording>,
    state: State,
    /// After the last token, `[vocab]`.
    logits: Buffer<f32>,
    /// After some tokens, where all are asked for; grows.
    many_logits: Buffer<f32>,
    len: usize,
    /// Vectors in `normed`.
    rows: usize,
    /// Whether `logits` and `choice` are those after the last token, and the device's position is the text's length.
    chosen: bool,
    /// The token that the device goes on with, where the host knows it.
    next: Option<u32>,
    /// Whether a step was made, so that every kernel of it is loaded: that cannot be done while one is recorded.
    stepped: bool,
}

impl<'m> CudaText<'m> {
    fn new(model: &'m LlamaCuda, stream: Stream, state: State) -> Result<Self> {
        let context = model.gpu.context();
        Ok(Self {
            logits: context.allocate(model.shape.vocab)?,
            many_logits: context.allocate(0)?,
            model,
            stream,
            recordings: Vec::new(),
            state,
            len: 0,
            rows: 0,
            chosen: false,
            next: None,
            stepped: false,
        })
    }

    /// Puts tokens and position onto the device.
    fn place(&mut self, tokens: &[u32]) -> Result<()> {
        let position = u32::try_from(self.len);
        let position = position.map_err(|_| Error::ContextFull { limit: u32::MAX as usize, got: self.len })?;
        self.stream.upload(&[position], self.state.position.view_mut())?;
        Ok(self.stream.upload(tokens, self.state.tokens.view_mut().slice(0..tokens.len()))?)
    }

    /// One token, with what chooses the next.
    fn step(&mut self) -> Result<()> {
        let longest = (self.len + 1).next_power_of_two().max(SHORTEST_RECORDING).min(self.capacity());
        let Self { model, stream, recordings, state, logits, stepped, .. } = self;
        let rows = Rows { m: 1, longest, all: false };
        if !*stepped {
            state.layers(model, stream, rows)?;
            state.choose(model, stream, 0, 1, logits)?;
            *stepped = true;
            return Ok(());
        }
        if !recordings.iter().any(|recording| recording.longest == longest) {
            let graph = stream.capture(|stream| {
                state.layers(model, stream, rows)?;
                state.choose(model, stream, 0, 1, logits)
            })?;
            recordings.push(Recording { longest, graph });
        }
        for recording in recordings.iter().filter(|recording| recording.longest == longest) {
            recording.replay(stream)?;
        }
        Ok(())
    }

    /// Computes the logits after the last token, and the most likely next one, if that was not done.
    fn choose(&mut self) -> Result<()> {
        if !self.chosen {
            self.place(&[])?;
            let Self { model, stream, state, logits, rows, .. } = self;
            state.choose(model, stream, *rows - 1, 0, logits)?;
            (self.chosen, self.next) = (true, None);
        }
        Ok(())
    }
}

impl Recording {
    #[expect(unsafe_code, reason = "what a recording uses is known here, where it was made")]
    fn replay(&self, stream: &Stream) -> halfbyte::Result<()> {
        // SAFETY: a recording uses the weights of the model, which outlives the text, and the text's own state and logits,
        // which are allocated once and go with it; all that uses them is in this stream.
        unsafe { self.graph.launch(stream) }
    }
}

impl Text for CudaText<'_> {
    fn capacity(&self) -> usize {
        self.state.cache.capacity()
    }

    fn position(&self) -> usize {
        self.len
    }

    fn truncate(&mut self, position: usize) {
        if position < self.len {
            (self.len, self.chosen, self.next) = (position, false, None);
        }
    }

    fn read(&mut self, batch: Batch<'_>) -> Result<()> {
        let m = batch.tokens.len();
        let goes_on = self.chosen && m == 1 && self.next == Some(batch.tokens[0]);
        if !goes_on {
            self.place(batch.tokens)?;
        }
        (self.chosen, self.next) = (false, None);
        if m == 1 && !batch.all_rows {
            self.step()?;
            (self.rows, self.chosen) = (1, true);
            self.len += 1;
            return Ok(());
        }
        let rows = Rows { m, longest: self.len + m, all: batch.all_rows };
        self.state.layers(self.model, &self.stream, rows)?;
        self.rows = if batch.all_rows { m } else { 1 };
        self.len += m;
        if !batch.all_rows {
            self.choose()?;
        }
        Ok(self.stream.synchronize()?)
    }

    fn logits(&mut self, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        if rows == (self.rows - 1..self.rows) && self.chosen {
            return Ok(self.stream.download(self.logits.view(), out)?);
        }
        let Self { model, stream, state, many_logits, .. } = self;
        if many_logits.len() < out.len() {
            *many_logits = model.gpu.context().allocate(out.len())?;
        }
        state.head(model, stream, rows, many_logits)?;
        Ok(stream.download(many_logits.view().slice(0..out.len()), out)?)
    }

    fn next(&mut self, sampler: &mut Sampler) -> Result<u32> {
        self.choose()?;
        if !sampler.is_greedy() {
            let mut logits = vec![0.0; self.model.shape.vocab];
            self.stream.download(self.logits.view(), &mut logits)?;
            return sampler.next(&logits);
        }
        let mut choice = [0; 2];
        self.stream.download(self.state.choice.view(), &mut choice)?;
        let [token, value] = [choice[0], choice[1]];
        let value = f32::from_bits(value);
        if !value.is_finite() {
            return Err(Error::NotFinite(value));
        }
        self.next = Some(token);
        Ok(token)
    }
}
