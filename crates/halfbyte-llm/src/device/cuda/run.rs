//! Rows on their way through the layers, on a GPU, and what lies between these.

use super::experts::Mixture;
use super::projection::{Input, Projection};
use super::{CudaModel, OnCuda, Vocabulary, persistent};
use crate::arch::spec::{GateClamp, NormKind};
use crate::decoder::{Attention, Decoder, Experts, FeedForward, InPlace, Norm, Slot, Steps};
use crate::error::{Error, Result};
use halfbyte::Cuda;
use halfbyte::cuda::driver::Buffer;
use halfbyte::cuda::matmul::{QuantizedForm, QuantizedRows};
use halfbyte::cuda::nn::{
    self, DenseCall, FloatBuffer, Gate, HeadNorms, KvCache, NewRows, PersistentDecode, QuantizedNorm, Step, StepOfText,
};
use std::ops::{ControlFlow, Range};

/// What passes between the layers of a text, and what its next step begins with. All of it is allocated once and stays where
/// it is, since recordings hold its addresses.
#[derive(Debug)]
pub(super) struct State {
    pub(super) cache: KvCache,
    /// Of the first row, `[1]`.
    pub(super) position: Buffer<u32>,
    pub(super) tokens: Buffer<u32>,
    /// The most likely token, then the bits of its logit.
    pub(super) choice: Buffer<u32>,
    /// A drawn token, then the same bits.
    pub(super) drawn: Buffer<u32>,
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
    /// Parts of a row's attention.
    partial: Buffer<f32>,
    /// All layers of a step of one token, where they are one kernel.
    persistent: Option<PersistentDecode>,
}

/// Rows that go through the layers together.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    pub(super) m: usize,
    /// Positions that attention is laid out for, at least those there are.
    pub(super) longest: usize,
    /// Whether every row goes through the last layer, or the last one only.
    pub(super) all: bool,
}

impl State {
    pub(super) fn new(model: &CudaModel, cuda: &Cuda, cache: KvCache, rows: usize) -> Result<Self> {
        let (gpu, context) = (&**cuda.gpu(), cuda.gpu().context());
        let (Decoder { hidden, heads, .. }, inner) = (&model.decoder, model.inner());
        let floats = |width: usize| FloatBuffer::allocate(gpu, model.activations, rows * width);
        let forms = model.forms_of_rows(rows).into_iter();
        let between = Mixture::rows_between(model, rows);
        let part = model.projections().map(Projection::widest_part).max().unwrap_or(0);
        Ok(Self {
            position: context.allocate(1)?,
            tokens: context.allocate(rows)?,
            choice: context.allocate(2)?,
            drawn: context.allocate(2)?,
            residual: context.allocate(rows * hidden)?,
            normed: floats(*hidden)?,
            update: context.allocate(rows * hidden)?,
            qkv: context.allocate(rows * heads.row())?,
            attended: floats(heads.heads * heads.head_size)?,
            up: context.allocate(between * 2 * inner)?,
            inner: FloatBuffer::allocate(gpu, model.activations, between * inner)?,
            codes: forms.map(|form| QuantizedRows::allocate(gpu, form)).collect::<halfbyte::Result<_>>()?,
            part: context.allocate(rows * part)?,
            mixture: Mixture::of(model, cuda, rows)?,
            partial: context.allocate(nn::partial_len(*heads, cache.capacity()))?,
            persistent: persistent::of_text(model, cuda, &cache)?,
            cache,
        })
    }

    /// Tokens and position from the device, to normed vectors in `normed`.
    pub(super) fn layers(&mut self, model: &CudaModel, cuda: &Cuda, rows: Rows) -> Result<()> {
        let Rows { m, longest, all } = rows;
        let mut run = Run { model, cuda, state: self, longest, on: 0..m, codes: None };
        model.decoder.forward(&mut run, all)
    }

    /// As [`State::layers`], of one token.
    pub(super) fn step(&mut self, model: &CudaModel, cuda: &Cuda, longest: usize) -> Result<()> {
        let hidden = model.decoder.hidden;
        let Self { persistent: Some(kernel), tokens, position, cache, normed, .. } = self else {
            return self.layers(model, cuda, Rows { m: 1, longest, all: false });
        };
        let step = StepOfText {
            token: tokens.view().slice(0..1),
            position: position.view(),
            embedding: model.decoder.vocabulary.embedding.rows(),
            norm: persistent::last_norm(model),
            rope: persistent::rope(model),
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

    /// From the vector in row `row` of `normed` to the next token; the text has grown by `advance`.
    pub(super) fn choose(
        &mut self,
        model: &CudaModel,
        cuda: &Cuda,
        row: usize,
        advance: usize,
        logits: &mut Buffer<f32>,
    ) -> Result<()> {
        self.head(model, cuda, row..row + 1, logits)?;
        self.most_likely(cuda, advance, logits)
    }

    /// From logits to the next token; the text has grown by `advance`.
    pub(super) fn most_likely(&mut self, cuda: &Cuda, advance: usize, logits: &Buffer<f32>) -> Result<()> {
        let step = Step {
            logits: logits.view(),
            choice: self.choice.view_mut(),
            token: self.tokens.view_mut().slice(0..1),
            position: self.position.view_mut(),
            advance,
        };
        Ok(nn::argmax(cuda.gpu(), cuda.stream(), step)?)
    }
}

/// A run: the model, its stream, and what it works on.
#[derive(Debug)]
pub(crate) struct Run<'m> {
    pub(super) model: &'m CudaModel,
    pub(super) cuda: &'m Cuda,
    pub(super) state: &'m mut State,
    /// Positions that attention is laid out for.
    pub(super) longest: usize,
    /// The rows that go on, among those that came in.
    pub(super) on: Range<usize>,
    /// The buffer of codes that the next product reads, in place of floats.
    pub(super) codes: Option<usize>,
}

impl Run<'_> {
    /// The buffer in which rows are quantised for a projection; None where it reads floats.
    fn codes_for(&self, reader: Option<&Projection>) -> Option<usize> {
        let m = self.on.len();
        let form = self.model.form_of_rows(reader?, m)?;
        self.state.codes.iter().position(|rows| QuantizedForm { m, ..rows.form() } == form)
    }
}

impl Steps<OnCuda> for Run<'_> {
    fn embed(&mut self, vocabulary: &Vocabulary) -> Result<()> {
        let (m, hidden) = (self.on.len(), self.model.decoder.hidden);
        let tokens = self.state.tokens.view().slice(0..m);
        let residual = self.state.residual.view_mut().slice(0..m * hidden);
        let Vocabulary { embedding, scale, .. } = vocabulary;
        Ok(nn::embed(self.cuda.gpu(), self.cuda.stream(), embedding.rows(), hidden, tokens, *scale, residual)?)
    }

    fn norm(&mut self, add: bool, norm: &Norm<OnCuda>, reader: Option<&Projection>) -> Result<()> {
        // A LayerNorm leaves floats.
        self.codes = self.codes_for(reader.filter(|_| norm.kind == NormKind::Rms));
        let (model, on, hidden) = (self.model, &self.on, self.model.decoder.hidden);
        let State { residual: stream_of_text, update, normed, codes, mixture, .. } = &mut *self.state;
        let residual = stream_of_text.view_mut().slice(on.start * hidden..on.end * hidden);
        let update = add.then(|| update.view().slice(0..on.len() * hidden));
        let (gpu, stream, weight, eps) = (self.cuda.gpu(), self.cuda.stream(), norm.weight.view(), norm.eps);
        match (self.codes, &norm.bias) {
            (None, None) => {
                let out = normed.view_mut(0..on.len() * hidden);
                nn::rms_norm(gpu, stream, nn::Norm { residual, update, weight, eps, out })?;
            }
            (None, Some(bias)) => {
                let out = normed.view_mut(0..on.len() * hidden);
                nn::LayerNorm { weight, bias: bias.view(), eps }.apply(gpu, stream, residual, update, out)?;
            }
            (Some(at), _) => {
                let (rounded, out) = (model.activations, codes[at].view_mut(on.len()));
                nn::rms_norm_quantized(gpu, stream, QuantizedNorm { residual, update, weight, eps, rounded, out })?;
            }
        }
        // Before a mixture of experts: what no product rounds, for the router.
        if let (None, Some(mixture)) = (reader, mixture) {
            let residual = stream_of_text.view_mut().slice(on.start * hidden..on.end * hidden);
            let out = mixture.exact.view_mut().slice(0..on.len() * hidden).into();
            match &norm.bias {
                None => nn::rms_norm(gpu, stream, nn::Norm { residual, update: None, weight, eps, out })?,
                Some(bias) => {
                    nn::LayerNorm { weight, bias: bias.view(), eps }.apply(gpu, stream, residual, None, out)?;
                }
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
        let State { qkv, position, cache, .. } = &mut *self.state;
        let qkv = qkv.view_mut().slice(0..self.on.len() * attention.heads.row());
        let norms = attention.head_norms.as_ref().map(|[queries, keys]| HeadNorms {
            queries: queries.weight.view(),
            keys: keys.weight.view(),
            eps: queries.eps,
        });
        let rows = NewRows { qkv, position: position.view(), norms };
        let rope = attention.rope.as_deref().unwrap_or(&self.model.no_rope);
        Ok(rope.apply(self.cuda.gpu(), self.cuda.stream(), rows, cache, layer)?)
    }

    fn last_rows(&mut self) -> Result<()> {
        self.on = self.on.end - 1..self.on.end;
        Ok(())
    }

    fn attend(&mut self, layer: usize, of: &Attention<OnCuda>) -> Result<()> {
        let (heads, on) = (of.heads, &self.on);
        let State { qkv, position, cache, partial, attended, .. } = &mut *self.state;
        let what = nn::Attention {
            qkv: qkv.view().slice(on.start * heads.row()..on.end * heads.row()),
            position: position.view(),
            first_row: on.start,
            longest: self.longest,
            scale: of.scale,
            window: of.window,
            cap: of.cap,
            slopes: of.alibi.as_ref().map(Buffer::view),
            sinks: of.sinks.as_ref().map(Buffer::view),
        };
        let out = attended.view_mut(0..on.len() * heads.heads * heads.head_size);
        Ok(nn::attention(self.cuda.gpu(), self.cuda.stream(), &what, cache, layer, partial.view_mut(), out)?)
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
