//! Rows on their way through the layers, on a GPU, and what lies between these.

pub(super) mod folded;
mod norms;
mod rows;

use super::experts::Mixture;
use super::next::{Chosen, Next};
use super::projection::{Input, Projection};
use super::ranks::Ranks;
use super::{CudaModel, OnCuda, Vocabulary, persistent};
use crate::arch::spec::GateClamp;
use crate::decoder::{Attention, Behind, Decoder, Experts, FeedForward, InPlace, Norm, Slot, Steps};
use crate::error::{Error, Result};
use folded::{Folded, Folding};
use halfbyte::Cuda;
use halfbyte::cuda::driver::{Buffer, View};
use halfbyte::cuda::matmul::{QuantizedForm, QuantizedRows};
use halfbyte::cuda::nn::{
    self, AttentionWorkspace, FloatBuffer, Gate, HeadNorms, KvCache, NewRows, PersistentDecode, StepOfText,
};
use halfbyte::kernel::Activation;
pub(super) use rows::{Pages, Rows};
use std::ops::{ControlFlow, Range};

/// What passes between the layers. All of it is allocated once and stays where it is, since recordings hold its addresses.
#[derive(Debug)]
pub(super) struct State {
    pub(super) cache: KvCache,
    /// Tokens that a text has room for.
    room: usize,
    residual: Buffer<f32>,
    pub(super) normed: FloatBuffer,
    pub(super) update: Buffer<f32>,
    qkv: Buffer<f32>,
    attended: FloatBuffer,
    pub(super) up: Buffer<f32>,
    pub(super) inner: FloatBuffer,
    /// In the place of `normed` and `inner` before products that read codes, a buffer for each form of these.
    codes: Vec<QuantizedRows>,
    /// For projections that could not be joined.
    pub(super) part: Buffer<f32>,
    /// Of experts, where the model has some.
    pub(super) mixture: Option<Mixture>,
    /// Between the blocks that share a row's attention.
    attention: AttentionWorkspace,
    /// All layers of a step of one token, where they are one kernel.
    persistent: Option<PersistentDecode>,
    /// The number of the one vector that is read where an embedding has no floats, `[1]`: 0.
    only_row: Buffer<u32>,
    /// Those that the model is shared with.
    ranks: Option<Ranks>,
    folding: Folding,
}

impl State {
    /// For so many rows, of so many texts up to `longest` positions each, which lie in order or in pages. Before a step [`State::meet`].
    pub(super) fn new(
        model: &CudaModel,
        cuda: &Cuda,
        cache: KvCache,
        [rows, texts, longest]: [usize; 3],
        paged: bool,
    ) -> Result<Self> {
        let (gpu, context) = (&**cuda.gpu(), cuda.gpu().context());
        let (Decoder { hidden, heads, .. }, inner) = (&model.decoder, model.inner());
        let floats = |width: usize| FloatBuffer::allocate(gpu, model.activations, rows * width);
        let forms = model.forms_of_rows(rows).into_iter();
        let part = model.projections().map(Projection::widest_part).max().unwrap_or(0);
        let persistent = persistent::over(model, cuda, &cache, paged)?;
        let mut only_row = context.allocate(1)?;
        cuda.stream().fill(only_row.view_mut(), 0)?;
        Ok(Self {
            only_row,
            residual: context.allocate(rows * hidden)?,
            normed: floats(*hidden)?,
            update: context.allocate(rows * hidden)?,
            qkv: context.allocate(rows * heads.row())?,
            attended: floats(heads.heads * heads.head_size)?,
            up: context.allocate(rows * model.not_activated())?,
            inner: floats(inner)?,
            codes: forms.map(|form| QuantizedRows::allocate(gpu, form)).collect::<halfbyte::Result<_>>()?,
            part: context.allocate(rows * part)?,
            mixture: Mixture::of(model, cuda, rows)?,
            attention: AttentionWorkspace::new(gpu, cuda.stream(), *heads, texts, longest)?,
            persistent,
            ranks: None,
            folding: Folding::new(cuda)?,
            room: longest,
            cache,
        })
    }

    /// Meets the ranks that the model is shared with, for steps of so many texts. All have theirs by now.
    pub(super) fn meet(&mut self, model: &CudaModel, cuda: &Cuda, texts: usize) -> Result<()> {
        let Some(ranks) = Ranks::meet(model, cuda, texts)? else { return Ok(()) };
        if let Some(kernel) = self.persistent.take() {
            self.persistent = ranks.side_by_side(cuda, kernel)?;
        }
        self.ranks = Some(ranks);
        Ok(())
    }

    /// Whether a step asks the host for something, so that it cannot be recorded.
    pub(super) fn asks_host(&self) -> bool {
        self.mixture.as_ref().is_some_and(Mixture::asks_host)
    }

    /// Comes before anything that waits for the queue: NCCL's kernels would wait for ever for a rank that has left. Error: one has.
    pub(super) fn watch(&self, cuda: &Cuda) -> Result<()> {
        self.ranks.as_ref().map_or(Ok(()), |ranks| ranks.wait(cuda))
    }

    /// Waits for what was put into the queue. Error: a rank was not heard of meanwhile.
    pub(super) fn wait(&self, cuda: &Cuda) -> Result<()> {
        self.watch(cuda)?;
        cuda.stream().synchronize()?;
        self.ranks.as_ref().map_or(Ok(()), Ranks::heard)
    }

    /// Brings to the host what is there when the queue is done. Errors: those of [`State::wait`].
    pub(super) fn read<T: bytemuck::Pod>(&self, cuda: &Cuda, from: View<'_, T>, out: &mut [T]) -> Result<()> {
        self.watch(cuda)?;
        cuda.stream().download(from, out)?;
        self.ranks.as_ref().map_or(Ok(()), Ranks::heard)
    }

    /// Chosen tokens, as soon as they are there. Errors: those of [`State::wait`].
    pub(super) fn tokens(&self, cuda: &Cuda, next: &Next, chosen: &Chosen) -> Result<Vec<Result<u32>>> {
        self.watch(cuda)?;
        let tokens = next.tokens(cuda, chosen)?;
        self.ranks.as_ref().map_or(Ok(()), Ranks::heard)?;
        Ok(tokens)
    }

    /// From tokens to normed vectors in `normed`, of all rows or of the last one of each text.
    pub(super) fn layers(&mut self, model: &CudaModel, cuda: &Cuda, rows: Rows<'_>, all: bool) -> Result<()> {
        let mut run = Run::new(model, cuda, self, rows);
        model.decoder.forward(&mut run, all)
    }

    /// As [`State::layers`], of one token of a text alone.
    pub(super) fn step(&mut self, model: &CudaModel, cuda: &Cuda, rows: Rows<'_>) -> Result<()> {
        let Decoder { hidden, vocabulary, embedding_norm, .. } = &model.decoder;
        if self.persistent.is_none() {
            return self.layers(model, cuda, rows, false);
        }
        // Others than floats as they are, other kernels make: the vector is all that there is, in f32.
        let as_they_are = embedding_norm.is_none() && vocabulary.scale == 1.0;
        let floats = vocabulary.embedding.floats().filter(|_| as_they_are);
        if floats.is_none() {
            let mut run = Run::new(model, cuda, self, rows);
            run.embed(vocabulary)?;
            if let Some(norm) = embedding_norm {
                run.norm_in_place(InPlace::Stream, norm)?;
            }
        }
        let Self { persistent: Some(kernel), cache, normed, room, residual, only_row, .. } = self else {
            return self.layers(model, cuda, rows, false);
        };
        let (token, embedding, first_token) = match floats {
            Some(floats) => (rows.tokens, floats, vocabulary.first),
            // All ranks have it, and the first one's is taken.
            None => (only_row.view(), residual.view().slice(0..*hidden).into(), usize::from(model.comm.rank() != 0)),
        };
        let step = StepOfText {
            token,
            position: rows.positions,
            pages: rows.texts.map(|texts| texts.tables),
            embedding,
            first_token,
            norm: persistent::last_norm(model),
            ropes: &persistent::ropes(model, *room),
            cache,
            normed: normed.view_mut(0..*hidden),
            behind: vocabulary.floats_of_head(),
        };
        Ok(kernel.step(cuda.gpu(), cuda.stream(), step)?)
    }

    /// Logits of some rows of `normed`.
    pub(super) fn head(
        &mut self,
        model: &CudaModel,
        cuda: &Cuda,
        rows: Range<usize>,
        out: &mut Buffer<f32>,
    ) -> Result<()> {
        let (Decoder { hidden, vocab, vocabulary, .. }, m) = (&model.decoder, rows.len());
        let x = self.normed.view(rows.start * hidden..rows.end * hidden);
        let own = match &mut self.ranks {
            None => &mut *out,
            Some(ranks) => ranks.own_logits(cuda, m)?,
        };
        vocabulary.logits(cuda, x, m, own, &mut self.part)?;
        if let Some(ranks) = &self.ranks {
            ranks.join_logits(cuda, m, out.view_mut().slice(0..m * vocab))?;
        }
        match vocabulary.logit_cap {
            None => Ok(()),
            Some(cap) => Ok(nn::soft_cap(cuda.gpu(), cuda.stream(), out.view_mut().slice(0..m * vocab), cap)?),
        }
    }
}

/// A run: the model, its stream, and what it works on.
#[derive(Debug)]
pub(crate) struct Run<'m> {
    pub(super) model: &'m CudaModel,
    pub(super) cuda: &'m Cuda,
    pub(super) state: &'m mut State,
    pub(super) rows: Rows<'m>,
    /// The rows that go on, among those that came in: of several texts the last ones come first then.
    on: Range<usize>,
    /// Whether of each text the last row alone goes on.
    pub(super) narrowed: bool,
    /// The buffer of codes that the next product reads, in place of floats.
    codes: Option<usize>,
    /// Whether the update is the sum over ranks already.
    summed: bool,
    /// The rows of the stream that this rank keeps, where the others are not up to date.
    own: Option<Range<usize>>,
    folded: Folded,
}

impl<'m> Run<'m> {
    pub(super) fn new(model: &'m CudaModel, cuda: &'m Cuda, state: &'m mut State, rows: Rows<'m>) -> Self {
        Self {
            model,
            cuda,
            state,
            on: 0..rows.tokens.len(),
            rows,
            narrowed: false,
            codes: None,
            summed: false,
            own: None,
            folded: Folded::default(),
        }
    }

    /// Whether attention appends rows itself: one of each text.
    pub(super) fn appends_in_attention(&self) -> bool {
        let of = match self.rows.texts {
            None => nn::Rows::OfOneText,
            Some(texts) if texts.chunks.is_empty() => nn::Rows::OnePerText,
            Some(_) => return false,
        };
        nn::appends(self.cuda.gpu(), &self.state.cache, of, self.rows.tokens.len())
    }

    fn attend_rows(&mut self, layer: usize, of: &Attention<OnCuda>, on: Range<usize>, seen: Seen<'_>) -> Result<()> {
        let append = self.appends_in_attention().then(|| append_of(self.model, of, self.state.room));
        let (heads, width) = (of.heads, of.heads.heads * of.heads.head_size);
        let State { qkv, cache, attention, attended, .. } = &mut *self.state;
        // What attention gives lies where the rows are that go on.
        let first = if self.rows.texts.is_some() { on.start } else { 0 };
        let what = nn::Attention {
            append,
            qkv: qkv.view().slice(on.start * heads.row()..on.end * heads.row()),
            rows: seen.rows,
            positions: seen.positions,
            pages: seen.pages,
            fresh: seen.fresh,
            longest: self.rows.longest,
            scale: of.scale,
            window: of.window,
            cap: of.cap,
            slopes: of.alibi.as_ref().map(Buffer::view),
            sinks: of.sinks.as_ref().map(Buffer::view),
            kernels: nn::Kernels::All,
        };
        let out = attended.view_mut(first * width..(first + on.len()) * width);
        Ok(nn::attention(self.cuda.gpu(), self.cuda.stream(), &what, cache, layer, attention, out)?)
    }

    /// The buffer in which rows are quantised for a projection; None where it reads floats.
    fn codes_for(&self, reader: Option<&Projection>, from: Slot) -> Option<usize> {
        let m = self.on.len();
        let form = self.model.form_of_rows(reader?, from, m)?;
        self.state.codes.iter().position(|rows| QuantizedForm { m, ..rows.form() } == form)
    }
}

/// Whose rows attend, and to what.
struct Seen<'a> {
    rows: nn::Rows,
    positions: View<'a, u32>,
    pages: Option<View<'a, u32>>,
    /// Positions of each text that are of these rows.
    fresh: usize,
}

impl Steps<OnCuda> for Run<'_> {
    fn embed(&mut self, vocabulary: &Vocabulary) -> Result<()> {
        let (m, hidden) = (self.on.len(), self.model.decoder.hidden);
        let State { residual, ranks, .. } = &mut *self.state;
        vocabulary.embed(self.cuda, self.rows.tokens, residual.view_mut().slice(0..m * hidden))?;
        // Each token's vector is one rank's; the others add nothing.
        match ranks {
            None => Ok(()),
            Some(ranks) => ranks.sum(self.cuda, residual.view_mut().slice(0..m * hidden)),
        }
    }

    fn norm(&mut self, add: bool, norm: &Norm<OnCuda>, reader: Option<&Projection>) -> Result<()> {
        if self.norm_folded(norm) {
            return Ok(());
        }
        self.norm_rows(add, norm, reader)
    }

    fn update(&mut self, by: &Projection, from: Slot, behind: Option<Behind<'_, OnCuda>>) -> Result<()> {
        match behind {
            Some(behind) if self.update_folded(by, from, &behind)? => Ok(()),
            _ => self.project(by, from, Slot::Update),
        }
    }

    fn norm_in_place(&mut self, what: InPlace, norm: &Norm<OnCuda>) -> Result<()> {
        match what {
            InPlace::Update => self.sum_update()?,
            InPlace::Stream => self.whole_stream()?,
        }
        let (on, hidden) = (&self.on, self.model.decoder.hidden);
        let rows = match what {
            InPlace::Stream => self.state.residual.view_mut().slice(on.start * hidden..on.end * hidden),
            InPlace::Update => self.state.update.view_mut().slice(0..on.len() * hidden),
        };
        let (gpu, stream, weight, eps) = (self.cuda.gpu(), self.cuda.stream(), norm.weight.view(), norm.eps);
        match &norm.bias {
            None => nn::rms_norm_in_place(gpu, stream, rows, weight, eps)?,
            Some(bias) => nn::LayerNorm { weight, bias: bias.view(), eps }.apply_in_place(gpu, stream, rows)?,
        }
        Ok(())
    }

    fn add(&mut self) -> Result<()> {
        self.whole_stream()?;
        if self.add_sum()? {
            return Ok(());
        }
        let (on, hidden) = (&self.on, self.model.decoder.hidden);
        let State { residual, update, .. } = &mut *self.state;
        let residual = residual.view_mut().slice(on.start * hidden..on.end * hidden);
        let update = update.view().slice(0..on.len() * hidden);
        Ok(nn::add_to(self.cuda.gpu(), self.cuda.stream(), residual, update)?)
    }

    fn project(&mut self, by: &Projection, from: Slot, to: Slot) -> Result<()> {
        if self.project_folded(by, to)? {
            return Ok(());
        }
        let (m, codes) = (self.on.len(), self.codes.take());
        let state = &mut *self.state;
        if let Some(width) = by.activated_outputs() {
            let x = match codes {
                Some(at) => Input::Codes(state.codes[at].view(m)),
                None => Input::Floats(state.normed.view(0..m * by.k())),
            };
            return by.run_activated(self.cuda, x, m, state.inner.view_mut(0..m * width));
        }
        let x = match codes {
            Some(at) => Input::Codes(state.codes[at].view(m)),
            None => match from {
                Slot::Normed => Input::Floats(state.normed.view(0..m * by.k())),
                Slot::Attended => Input::Floats(state.attended.view(0..m * by.k())),
                Slot::Inner => Input::Floats(state.inner.view(0..m * by.k())),
                Slot::Qkv | Slot::Up | Slot::Update => return Err(unknown("rows that products read", "others")),
            },
        };
        let y = match to {
            Slot::Qkv => &mut state.qkv,
            Slot::Up => &mut state.up,
            Slot::Update => {
                self.summed = false;
                &mut state.update
            }
            Slot::Normed | Slot::Attended | Slot::Inner => return Err(unknown("room for outputs in f32", "another")),
        };
        by.run(self.cuda, x, m, (y, 0), &mut state.part)
    }

    fn append(&mut self, layer: usize, attention: &Attention<OnCuda>) -> Result<()> {
        if self.appends_in_attention() {
            return Ok(());
        }
        let State { qkv, cache, room, .. } = &mut *self.state;
        let qkv = qkv.view_mut().slice(0..self.on.len() * attention.heads.row());
        let nn::Append { rope, norms } = append_of(self.model, attention, *room);
        let Rows { positions, texts, .. } = self.rows;
        let rows = NewRows { qkv, positions, slots: texts.map_or(positions, |texts| texts.slots), norms };
        Ok(rope.apply(self.cuda.gpu(), self.cuda.stream(), rows, cache, layer)?)
    }

    fn last_rows(&mut self) -> Result<()> {
        self.whole_stream()?;
        self.folded.place = None;
        let Some(Pages { last, chunks, .. }) = self.rows.texts else {
            self.on = self.on.end - 1..self.on.end;
            return Ok(());
        };
        let (hidden, row) = (self.model.decoder.hidden, self.model.decoder.heads.row());
        // In order: none goes where one of a later text comes from.
        for (i, chunk) in chunks.iter().enumerate() {
            let (from, to) = (chunk.end - 1, last.len() - chunks.len() + i);
            let State { residual, qkv, .. } = &mut *self.state;
            for (buffer, width) in [(residual, hidden), (qkv, row)] {
                if from != to {
                    buffer.copy_within(self.cuda.stream(), from * width..(from + 1) * width, to * width)?;
                }
            }
        }
        (self.on, self.narrowed) = (0..last.len(), true);
        Ok(())
    }

    fn attend(&mut self, layer: usize, of: &Attention<OnCuda>) -> Result<()> {
        let positions = self.rows.positions;
        let Some(texts) = self.rows.texts else {
            let fresh = positions.len();
            let positions = positions.slice(self.on.clone());
            let seen = Seen { rows: nn::Rows::OfOneText, positions, pages: None, fresh };
            return self.attend_rows(layer, of, self.on.clone(), seen);
        };
        let (rows, all) = (nn::Rows::OnePerText, texts.texts());
        let singles = if self.narrowed { all } else { all - texts.chunks.len() };
        let last = if self.narrowed { texts.last } else { positions };
        let pages = Some(texts.tables_of(0..singles));
        let fresh = if self.narrowed { texts.chunks.iter().map(Range::len).max().unwrap_or(1) } else { 1 };
        let seen = Seen { rows, positions: last.slice(0..singles), pages, fresh };
        self.attend_rows(layer, of, 0..singles, seen)?;
        for (text, chunk) in (singles..all).zip(texts.chunks) {
            let pages = Some(texts.tables_of(text..text + 1));
            let (rows, fresh) = (nn::Rows::OfOneText, chunk.len());
            let seen = Seen { rows, positions: positions.slice(chunk.clone()), pages, fresh };
            self.attend_rows(layer, of, chunk.clone(), seen)?;
        }
        Ok(())
    }

    fn activate(&mut self, mlp: &FeedForward<OnCuda>) -> Result<()> {
        self.codes = self.codes_for(Some(&mlp.down), Slot::Inner);
        if mlp.up.activated_outputs().is_some() {
            return Ok(());
        }
        let (gpu, m, width, gate) = (self.cuda.gpu(), self.on.len(), mlp.inner, gate_of(mlp));
        let State { up, inner, codes, .. } = &mut *self.state;
        let x = up.view().slice(0..m * mlp.up.n());
        match self.codes {
            Some(at) => {
                let out = codes[at].view_mut(m);
                nn::gate_quantized(gpu, self.cuda.stream(), gate, x, self.model.activations, out)?;
            }
            None => nn::gate(gpu, self.cuda.stream(), gate, x, width, inner.view_mut(0..m * width))?,
        }
        Ok(())
    }

    fn experts(&mut self, experts: &Experts<OnCuda>) -> Result<ControlFlow<()>> {
        self.state.experts(self.model, self.cuda, experts, self.on.len())?;
        self.summed = false;
        Ok(ControlFlow::Continue(()))
    }
}

/// How rows become what attention reads, in a text that has room for so many tokens.
fn append_of<'a>(model: &'a CudaModel, attention: &'a Attention<OnCuda>, room: usize) -> nn::Append<'a> {
    let norms = attention.head_norms.as_ref().map(|[queries, keys]| HeadNorms {
        queries: queries.weight.view(),
        keys: keys.weight.view(),
        eps: queries.eps,
    });
    nn::Append { rope: attention.rope.as_deref().map_or(&model.no_rope, |rope| rope.of(room)), norms }
}

/// What an MLP does between its products.
pub(super) fn gate_of(mlp: &FeedForward<OnCuda>) -> Gate {
    function_of(mlp.activation, mlp.gated, mlp.clamp)
}

pub(super) fn function_of(activation: Activation, gated: bool, clamp: Option<GateClamp>) -> Gate {
    Gate { activation, gated, clamp: clamp.map(|GateClamp { alpha, limit }| [alpha, limit]) }
}

/// What no decoder asks for.
fn unknown(expected: &str, got: &str) -> Error {
    Error::invalid("a step of a model on a GPU", expected, got)
}
