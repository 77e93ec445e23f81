//! Rows on their way through the layers, on a GPU, and what lies between these.

use super::experts::Mixture;
use super::projection::{Input, Projection};
use super::{CudaModel, OnCuda, Vocabulary, persistent};
use crate::arch::spec::{GateClamp, NormKind};
use crate::decoder::{Attention, Decoder, Experts, FeedForward, InPlace, Norm, Slot, Steps};
use crate::error::{Error, Result};
use halfbyte::Cuda;
use halfbyte::cuda::driver::{Buffer, View};
use halfbyte::cuda::matmul::{QuantizedForm, QuantizedRows};
use halfbyte::cuda::nn::{
    self, AttentionWorkspace, DenseCall, Draw, Drawn, FloatBuffer, Gate, HeadNorms, KvCache, NewRows, PersistentDecode,
    QuantizedNorm, Step, StepOfText,
};
use std::ops::{ControlFlow, Range};

/// What follows texts, each a row of logits. It is allocated once and stays where it is, since recordings hold its addresses.
#[derive(Debug)]
pub(super) struct Next {
    /// What the next step of one text reads.
    pub(super) tokens: Buffer<u32>,
    pub(super) positions: Buffer<u32>,
    /// Of each text the most likely token, then the bits of its logit.
    pub(super) choice: Buffer<u32>,
    /// A drawn token, then the same bits.
    pub(super) drawn: Buffer<u32>,
}

impl Next {
    /// Of so many texts, with room for the tokens of so many rows.
    pub(super) fn new(cuda: &Cuda, texts: usize, rows: usize) -> Result<Self> {
        let context = cuda.gpu().context();
        Ok(Self {
            tokens: context.allocate(rows)?,
            positions: context.allocate(rows)?,
            choice: context.allocate(2 * texts)?,
            drawn: context.allocate(2 * texts)?,
        })
    }

    /// So many rows of the one text, whose tokens and positions lie here.
    pub(super) fn rows(&self, m: usize, longest: usize) -> Rows<'_> {
        let [tokens, positions] = [&self.tokens, &self.positions].map(|of_rows| of_rows.view().slice(0..m));
        Rows { tokens, positions, longest, texts: None }
    }

    /// From the logits of so many texts to the most likely tokens; each has grown by `advance`.
    pub(super) fn most_likely(
        &mut self,
        cuda: &Cuda,
        texts: usize,
        advance: usize,
        logits: View<'_, f32>,
    ) -> Result<()> {
        let step = Step {
            logits,
            choice: self.choice.view_mut().slice(0..2 * texts),
            tokens: self.tokens.view_mut().slice(0..texts),
            positions: self.positions.view_mut().slice(0..texts),
            advance,
        };
        Ok(nn::argmax(cuda.gpu(), cuda.stream(), step)?)
    }

    /// From the same logits to tokens that are drawn, or the most likely ones.
    pub(super) fn draw(&mut self, cuda: &Cuda, draws: &[Draw], logits: View<'_, f32>) -> Result<()> {
        let texts = draws.len();
        let of = Drawn {
            logits,
            choice: self.choice.view().slice(0..2 * texts),
            drawn: self.drawn.view_mut().slice(0..2 * texts),
            tokens: self.tokens.view_mut().slice(0..texts),
        };
        Ok(nn::sample(cuda.gpu(), cuda.stream(), draws, of)?)
    }
}

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
}

/// Rows that go through the layers together.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows<'a> {
    pub(super) tokens: View<'a, u32>,
    /// Of each in its text.
    pub(super) positions: View<'a, u32>,
    /// Positions that attention is laid out for, at least those that a text has.
    pub(super) longest: usize,
    /// None: they are of the one text, which lies in the cache in order.
    pub(super) texts: Option<Pages<'a>>,
}

/// Whose rows are whose, and where the texts lie in the cache: first those of one row each, then the others.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pages<'a> {
    /// Where each row lies.
    pub(super) slots: View<'a, u32>,
    /// Positions of the texts' last rows.
    pub(super) last: View<'a, u32>,
    /// The pages of each text, as many of all.
    pub(super) tables: View<'a, u32>,
    /// The rows of the texts that have several.
    pub(super) chunks: &'a [Range<usize>],
}

impl<'a> Pages<'a> {
    fn texts(&self) -> usize {
        self.last.len()
    }

    /// Of a range of texts.
    fn tables_of(&self, texts: Range<usize>) -> View<'a, u32> {
        let width = self.tables.len() / self.texts().max(1);
        self.tables.slice(texts.start * width..texts.end * width)
    }
}

impl State {
    /// For so many rows, of so many texts up to `longest` positions each; of one perhaps with what computes its steps in one kernel.
    pub(super) fn new(
        model: &CudaModel,
        cuda: &Cuda,
        cache: KvCache,
        [rows, texts, longest]: [usize; 3],
        persistent: Option<PersistentDecode>,
    ) -> Result<Self> {
        let (gpu, context) = (&**cuda.gpu(), cuda.gpu().context());
        let (Decoder { hidden, heads, .. }, inner) = (&model.decoder, model.inner());
        let floats = |width: usize| FloatBuffer::allocate(gpu, model.activations, rows * width);
        let forms = model.forms_of_rows(rows).into_iter();
        let part = model.projections().map(Projection::widest_part).max().unwrap_or(0);
        Ok(Self {
            residual: context.allocate(rows * hidden)?,
            normed: floats(*hidden)?,
            update: context.allocate(rows * hidden)?,
            qkv: context.allocate(rows * heads.row())?,
            attended: floats(heads.heads * heads.head_size)?,
            up: context.allocate(rows * 2 * inner)?,
            inner: floats(inner)?,
            codes: forms.map(|form| QuantizedRows::allocate(gpu, form)).collect::<halfbyte::Result<_>>()?,
            part: context.allocate(rows * part)?,
            mixture: Mixture::of(model, cuda, rows)?,
            attention: AttentionWorkspace::new(gpu, cuda.stream(), *heads, texts, longest)?,
            persistent,
            room: longest,
            cache,
        })
    }

    /// Whether a step asks the host for something, so that it cannot be recorded.
    pub(super) fn asks_host(&self) -> bool {
        self.mixture.as_ref().is_some_and(Mixture::asks_host)
    }

    /// From tokens to normed vectors in `normed`, of all rows or of the last one of each text.
    pub(super) fn layers(&mut self, model: &CudaModel, cuda: &Cuda, rows: Rows<'_>, all: bool) -> Result<()> {
        let mut run = Run::new(model, cuda, self, rows);
        model.decoder.forward(&mut run, all)
    }

    /// As [`State::layers`], of one token of a text alone.
    pub(super) fn step(&mut self, model: &CudaModel, cuda: &Cuda, rows: Rows<'_>) -> Result<()> {
        let hidden = model.decoder.hidden;
        let Self { persistent: Some(kernel), cache, normed, room, .. } = self else {
            return self.layers(model, cuda, rows, false);
        };
        let step = StepOfText {
            token: rows.tokens,
            position: rows.positions,
            embedding: model.decoder.vocabulary.embedding.rows(),
            norm: persistent::last_norm(model),
            rope: persistent::rope(model, *room),
            cache,
            normed: normed.view_mut(0..hidden),
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
        match &vocabulary.head {
            None => {
                let y = out.view_mut().slice(0..m * vocab).into();
                let call = DenseCall { x, m, bias: None, y };
                vocabulary.embedding.forward(cuda.gpu(), cuda.stream(), call)?;
            }
            Some(head) => head.run(cuda, Input::Floats(x), m, (out, 0), &mut self.part)?,
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
    rows: Rows<'m>,
    /// The rows that go on, among those that came in: of several texts the last ones come first then.
    on: Range<usize>,
    /// Whether of each text the last row alone goes on.
    narrowed: bool,
    /// The buffer of codes that the next product reads, in place of floats.
    codes: Option<usize>,
}

impl<'m> Run<'m> {
    pub(super) fn new(model: &'m CudaModel, cuda: &'m Cuda, state: &'m mut State, rows: Rows<'m>) -> Self {
        Self { model, cuda, state, on: 0..rows.tokens.len(), rows, narrowed: false, codes: None }
    }

    /// The kernel that computes what so many rows see.
    pub(super) fn attention_kernel(&self, window: Option<usize>, rows: usize) -> Result<&'static str> {
        Ok(nn::attention_kernel(self.cuda.gpu(), rows, self.rows.longest, window, &self.state.cache)?)
    }

    fn attend_rows(&mut self, layer: usize, of: &Attention<OnCuda>, on: Range<usize>, seen: Seen<'_>) -> Result<()> {
        let (heads, width) = (of.heads, of.heads.heads * of.heads.head_size);
        let State { qkv, cache, attention, attended, .. } = &mut *self.state;
        // What attention gives lies where the rows are that go on.
        let first = if self.rows.texts.is_some() { on.start } else { 0 };
        let what = nn::Attention {
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
        };
        let out = attended.view_mut(first * width..(first + on.len()) * width);
        Ok(nn::attention(self.cuda.gpu(), self.cuda.stream(), &what, cache, layer, attention, out)?)
    }

    /// The buffer in which rows are quantised for a projection; None where it reads floats.
    fn codes_for(&self, reader: Option<&Projection>) -> Option<usize> {
        let m = self.on.len();
        let form = self.model.form_of_rows(reader?, m)?;
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
        let residual = self.state.residual.view_mut().slice(0..m * hidden);
        let Vocabulary { embedding, scale, .. } = vocabulary;
        Ok(nn::embed(
            self.cuda.gpu(),
            self.cuda.stream(),
            embedding.rows(),
            hidden,
            self.rows.tokens,
            *scale,
            residual,
        )?)
    }

    fn norm(&mut self, add: bool, norm: &Norm<OnCuda>, reader: Option<&Projection>) -> Result<()> {
        // A LayerNorm leaves floats.
        self.codes = self.codes_for(reader.filter(|_| norm.kind == NormKind::Rms));
        let (model, on, hidden) = (self.model, &self.on, self.model.decoder.hidden);
        let State { residual: stream_of_text, update, normed, codes, mixture, .. } = &mut *self.state;
        let residual = stream_of_text.view_mut().slice(on.start * hidden..on.end * hidden);
        let update = add.then(|| update.view().slice(0..on.len() * hidden));
        let (gpu, stream, weight, eps) = (self.cuda.gpu(), self.cuda.stream(), norm.weight.view(), norm.eps);
        // Before a mixture of experts: what no product rounds, for the router.
        let exact = mixture.as_mut().filter(|_| reader.is_none());
        let exact = exact.map(|mixture| mixture.exact.view_mut().slice(0..on.len() * hidden));
        match (self.codes, &norm.bias) {
            (None, None) => {
                let out = normed.view_mut(0..on.len() * hidden);
                nn::rms_norm(gpu, stream, nn::Norm { residual, update, weight, eps, out, exact })?;
            }
            (None, Some(bias)) => {
                let (out, norm) =
                    (normed.view_mut(0..on.len() * hidden), nn::LayerNorm { weight, bias: bias.view(), eps });
                norm.apply(gpu, stream, residual, update, out)?;
                if let Some(exact) = exact {
                    let residual = stream_of_text.view_mut().slice(on.start * hidden..on.end * hidden);
                    norm.apply(gpu, stream, residual, None, exact.into())?;
                }
            }
            (Some(at), _) => {
                let (rounded, out) = (model.activations, codes[at].view_mut(on.len()));
                nn::rms_norm_quantized(gpu, stream, QuantizedNorm { residual, update, weight, eps, rounded, out })?;
            }
        }
        Ok(())
    }

    fn norm_in_place(&mut self, what: InPlace, norm: &Norm<OnCuda>) -> Result<()> {
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
        let (on, hidden) = (&self.on, self.model.decoder.hidden);
        let State { residual, update, .. } = &mut *self.state;
        let residual = residual.view_mut().slice(on.start * hidden..on.end * hidden);
        let update = update.view().slice(0..on.len() * hidden);
        Ok(nn::add_to(self.cuda.gpu(), self.cuda.stream(), residual, update)?)
    }

    fn project(&mut self, by: &Projection, from: Slot, to: Slot) -> Result<()> {
        let (m, codes) = (self.on.len(), self.codes.take());
        let state = &mut *self.state;
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
            Slot::Update => &mut state.update,
            Slot::Normed | Slot::Attended | Slot::Inner => return Err(unknown("room for outputs in f32", "another")),
        };
        by.run(self.cuda, x, m, (y, 0), &mut state.part)
    }

    fn append(&mut self, layer: usize, attention: &Attention<OnCuda>) -> Result<()> {
        let State { qkv, cache, room, .. } = &mut *self.state;
        let qkv = qkv.view_mut().slice(0..self.on.len() * attention.heads.row());
        let norms = attention.head_norms.as_ref().map(|[queries, keys]| HeadNorms {
            queries: queries.weight.view(),
            keys: keys.weight.view(),
            eps: queries.eps,
        });
        let Rows { positions, texts, .. } = self.rows;
        let rows = NewRows { qkv, positions, slots: texts.map_or(positions, |texts| texts.slots), norms };
        let rope = attention.rope.as_deref().map_or(&self.model.no_rope, |rope| rope.of(*room));
        Ok(rope.apply(self.cuda.gpu(), self.cuda.stream(), rows, cache, layer)?)
    }

    fn last_rows(&mut self) -> Result<()> {
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
        self.codes = self.codes_for(Some(&mlp.down));
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
        Ok(ControlFlow::Continue(()))
    }
}

/// What an MLP does between its products.
pub(super) fn gate_of(mlp: &FeedForward<OnCuda>) -> Gate {
    let clamp = mlp.clamp.map(|GateClamp { alpha, limit }| [alpha, limit]);
    Gate { activation: mlp.activation, gated: mlp.gated, clamp }
}

/// What no decoder asks for.
fn unknown(expected: &str, got: &str) -> Error {
    Error::invalid("a step of a model on a GPU", expected, got)
}
