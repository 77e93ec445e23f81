//! Tokens through the layers of a Llama, and what lies between these.

use super::{LlamaCuda, Shape};
use crate::weights_cuda::{Input, Products, Projection, Workspaces};
use halfbyte::cuda::driver::{Buffer, Stream};
use halfbyte::cuda::matmul::{QuantizedForm, QuantizedRows};
use halfbyte::cuda::nn::{self, Attention, DenseCall, FloatBuffer, KvCache, NewRows, Norm, QuantizedNorm, Step};
use std::ops::Range;

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
    normed: FloatBuffer,
    update: Buffer<f32>,
    qkv: Buffer<f32>,
    attended: FloatBuffer,
    gate_up: Buffer<f32>,
    inner: FloatBuffer,
    /// In the place of `normed` and `inner` before products that read codes, a buffer for each form of these.
    codes: Vec<QuantizedRows>,
    /// For projections that could not be joined.
    part: Buffer<f32>,
    /// Parts of a row's attention.
    partial: Buffer<f32>,
    workspaces: Workspaces,
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
    pub(super) fn new(model: &LlamaCuda, stream: &Stream, cache: KvCache, rows: usize) -> halfbyte::Result<Self> {
        let (gpu, context, Shape { hidden, intermediate, heads, .. }) = (&*model.gpu, model.gpu.context(), model.shape);
        let floats = |width: usize| FloatBuffer::allocate(gpu, model.activations, rows * width);
        let forms = model.forms_of_rows(rows).into_iter();
        let part = model.projections().map(Projection::widest_part).max().unwrap_or(0);
        Ok(Self {
            position: context.allocate(1)?,
            tokens: context.allocate(rows)?,
            choice: context.allocate(2)?,
            drawn: context.allocate(2)?,
            residual: context.allocate(rows * hidden)?,
            normed: floats(hidden)?,
            update: context.allocate(rows * hidden)?,
            qkv: context.allocate(rows * heads.row())?,
            attended: floats(heads.heads * heads.head_size)?,
            gate_up: context.allocate(rows * 2 * intermediate)?,
            inner: floats(intermediate)?,
            codes: forms.map(|form| QuantizedRows::allocate(gpu, form)).collect::<halfbyte::Result<_>>()?,
            part: context.allocate(rows * part)?,
            partial: context.allocate(nn::partial_len(heads, cache.capacity()))?,
            workspaces: Workspaces::of(gpu, stream, model.projections(), model.activations)?,
            cache,
        })
    }

    /// Tokens and position from the device, to normed vectors in `normed`.
    pub(super) fn layers(&mut self, model: &LlamaCuda, stream: &Stream, rows: Rows) -> halfbyte::Result<()> {
        let (gpu, Shape { hidden, intermediate, heads, .. }) = (&*model.gpu, model.shape);
        let attended = heads.heads * heads.head_size;
        let Rows { m, longest, all } = rows;
        let mut on = 0..m;
        let residual = self.residual.view_mut().slice(0..m * hidden);
        nn::embed(gpu, stream, model.embedding.rows(), hidden, self.tokens.view().slice(0..m), residual)?;
        for (i, layer) in model.layers.iter().enumerate() {
            let codes = self.codes_for(model, &layer.qkv, m);
            self.norm(model, stream, &on, i > 0, &layer.attention_norm, codes)?;
            let normed = input(&self.normed, &self.codes, codes, [m, hidden]);
            let mut products = Products { gpu, stream, part: &mut self.part, workspaces: &mut self.workspaces };
            products.run(&layer.qkv, normed, m, &mut self.qkv)?;
            let qkv = self.qkv.view_mut().slice(0..m * heads.row());
            let rows = NewRows { qkv, position: self.position.view(), norms: None };
            model.rope.apply(gpu, stream, rows, &mut self.cache, i)?;
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
                window: None,
            };
            let out = self.attended.view_mut(0..rows * attended);
            nn::attention(gpu, stream, &what, &self.cache, i, self.partial.view_mut(), out)?;
            let attended = Input::Floats(self.attended.view(0..rows * attended));
            products.run(&layer.output, attended, rows, &mut self.update)?;
            let codes = self.codes_for(model, &layer.gate_up, rows);
            self.norm(model, stream, &on, true, &layer.mlp_norm, codes)?;
            let normed = input(&self.normed, &self.codes, codes, [rows, hidden]);
            let mut products = Products { gpu, stream, part: &mut self.part, workspaces: &mut self.workspaces };
            products.run(&layer.gate_up, normed, rows, &mut self.gate_up)?;
            let codes = self.codes_for(model, &layer.down, rows);
            let gate_up = self.gate_up.view().slice(0..rows * 2 * intermediate);
            match codes {
                Some(at) => {
                    let out = self.codes[at].view_mut(rows);
                    nn::swiglu_quantized(gpu, stream, gate_up, model.activations, out)?;
                }
                None => nn::swiglu(gpu, stream, gate_up, intermediate, self.inner.view_mut(0..rows * intermediate))?,
            }
            let inner = input(&self.inner, &self.codes, codes, [rows, intermediate]);
            let mut products = Products { gpu, stream, part: &mut self.part, workspaces: &mut self.workspaces };
            products.run(&layer.down, inner, rows, &mut self.update)?;
        }
        self.norm(model, stream, &on, !model.layers.is_empty(), &model.norm, None)
    }

    /// The buffer in which m rows are quantised for a projection; None where it reads floats.
    fn codes_for(&self, model: &LlamaCuda, projection: &Projection, m: usize) -> Option<usize> {
        let form = model.form_of_rows(projection, m)?;
        self.codes.iter().position(|rows| QuantizedForm { m, ..rows.form() } == form)
    }

    /// Adds what the last product left to the residual stream, if there is one, and norms it: to `normed`, or to codes.
    fn norm(
        &mut self,
        model: &LlamaCuda,
        stream: &Stream,
        on: &Range<usize>,
        add: bool,
        weight: &Buffer<f32>,
        codes: Option<usize>,
    ) -> halfbyte::Result<()> {
        let Shape { hidden, eps, .. } = model.shape;
        let residual = self.residual.view_mut().slice(on.start * hidden..on.end * hidden);
        let update = add.then(|| self.update.view().slice(0..on.len() * hidden));
        let (gpu, weight) = (&*model.gpu, weight.view());
        match codes {
            None => {
                let out = self.normed.view_mut(0..on.len() * hidden);
                nn::rms_norm(gpu, stream, Norm { residual, update, weight, eps, out })
            }
            Some(at) => {
                let (rounded, out) = (model.activations, self.codes[at].view_mut(on.len()));
                nn::rms_norm_quantized(gpu, stream, QuantizedNorm { residual, update, weight, eps, rounded, out })
            }
        }
    }

    /// Logits of some rows of `normed`.
    pub(super) fn head(
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
                products.run(head, Input::Floats(x), m, out)
            }
        }
    }

    /// From the vector in row `row` of `normed` to the next token; the text has grown by `advance`.
    pub(super) fn choose(
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

/// The rows that a product reads: floats, or codes of the buffer that is named.
fn input<'a>(
    floats: &'a FloatBuffer,
    codes: &'a [QuantizedRows],
    at: Option<usize>,
    [m, width]: [usize; 2],
) -> Input<'a> {
    match at {
        Some(at) => Input::Codes(codes[at].view(m)),
        None => Input::Floats(floats.view(0..m * width)),
    }
}
