//! Embedding and head in memory.

use super::{OnCpu, Projection};
use crate::arch::Spec;
use crate::comm::Comm;
use crate::decoder::{self, Product};
use crate::error::{Error, Result};
use crate::load::Loader;
use crate::shard::Shard;
use halfbyte::cpu::matmul::Packed;
use halfbyte::cpu::{Cpu, nn};
use halfbyte::layout::cpu_n16::PANEL;
use halfbyte::ops::{Linear, Weight};
use halfbyte::{Float, Floats, FloatsMut};
use halfbyte_checkpoint::FloatData;
use std::borrow::Cow;
use std::ops::Range;

/// The layer from vectors to logits, and the way back: the embedding. A rank holds the rows of some tokens.
#[derive(Debug)]
pub struct Vocabulary {
    tokens: Range<usize>,
    hidden: usize,
    /// Of the vectors.
    scale: Option<f32>,
    /// Of the logits.
    cap: Option<f32>,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    /// The head's weight is the embedding, which then is held once.
    Tied(Box<Linear>),
    /// An embedding `[tokens, hidden]` and a head.
    Apart(FloatData<'static>, Projection),
}

impl Vocabulary {
    /// Loads all rows. Errors: missing or malformed tensors, other shapes than the spec's.
    pub fn load(loader: &mut Loader<'_>, spec: &Spec) -> Result<Self> {
        decoder::vocabulary(spec, loader, &mut OnCpu, Shard::WHOLE)
    }

    pub(super) fn new(
        embedding: FloatData<'_>,
        tokens: Range<usize>,
        spec: &Spec,
        head: Option<Projection>,
    ) -> Result<Self> {
        let hidden = spec.hidden;
        let kind = match head {
            Some(head) => Kind::Apart(owned(embedding), head),
            None => {
                let weight = Weight::Dense(embedding.as_floats(), [tokens.len(), hidden]);
                Kind::Tied(Box::new(Linear::new(weight)?))
            }
        };
        Ok(Self { tokens, hidden, scale: spec.embedding_scale, cap: spec.logit_cap, kind })
    }

    /// Vectors of tokens, whose ids are below the vocabulary. Shape: out `[tokens, hidden]`.
    pub fn embed(&self, comm: &dyn Comm, tokens: &[u32], out: &mut [f32]) -> Result<()> {
        let hidden = self.hidden;
        for (&token, out) in tokens.iter().zip(out.chunks_exact_mut(hidden)) {
            let token = token as usize;
            if !self.tokens.contains(&token) {
                out.fill(0.0);
                continue;
            }
            let token = token - self.tokens.start;
            match &self.kind {
                Kind::Apart(rows, _) => {
                    widen(rows.as_floats().slice(token * hidden..(token + 1) * hidden), 1, out);
                }
                Kind::Tied(linear) => match linear.packed() {
                    Packed::Dense(packed) => {
                        // Element j of output i lies at [i / 16][j][i % 16].
                        let data = packed.data();
                        let first = token / PANEL * hidden * PANEL + token % PANEL;
                        widen(data.slice(first..first + (hidden - 1) * PANEL + 1), PANEL, out);
                    }
                    Packed::Quantized(..) => {
                        let [expected, got] = ["floats, for a head that is the embedding", "codes"];
                        return Err(Error::invalid("embed", expected, got));
                    }
                },
            }
        }
        // Each token's vector is one rank's; the others add nothing.
        comm.all_reduce(out);
        if let Some(scale) = self.scale {
            out.iter_mut().for_each(|v| *v *= scale);
        }
        Ok(())
    }

    /// Logits. Shapes: x `[m, hidden]`, y `[m, vocab]`.
    pub fn logits(&self, cpu: &Cpu, comm: &dyn Comm, x: &[f32], m: usize, y: &mut [f32]) -> Result<()> {
        if comm.size() < 2 {
            return self.own_logits(cpu, x, m, y);
        }
        let mut own = vec![0.0; m * self.tokens.len()];
        self.own_logits(cpu, x, m, &mut own)?;
        let parts = comm.all_gather(&own);
        let vocab = y.len() / m.max(1);
        for (i, row) in y.chunks_exact_mut(vocab).enumerate() {
            let mut first = 0;
            for part in &parts {
                let width = part.len() / m;
                row[first..first + width].copy_from_slice(&part[i * width..(i + 1) * width]);
                first += width;
            }
        }
        Ok(())
    }

    fn own_logits(&self, cpu: &Cpu, x: &[f32], m: usize, y: &mut [f32]) -> Result<()> {
        match &self.kind {
            Kind::Tied(linear) => linear.forward(cpu, Floats::F32(x), m, FloatsMut::F32(y))?,
            Kind::Apart(_, head) => head.forward(cpu, x, m, y, &mut Vec::new())?,
        }
        if let Some(cap) = self.cap {
            nn::soft_cap(cpu, y, cap);
        }
        Ok(())
    }

    /// Bytes of the rows of an embedding that a step of so many tokens does not read.
    pub(super) fn bytes_not_read(&self, tokens: usize) -> usize {
        match &self.kind {
            Kind::Tied(_) => 0,
            Kind::Apart(rows, _) => rows.len().saturating_sub(tokens * self.hidden) * rows.dtype().size_bytes(),
        }
    }

    /// What computes the logits of a row, and what it multiplies by.
    pub(super) fn head(&self, cpu: &Cpu) -> Result<(String, Product)> {
        let (n, k) = (self.tokens.len(), self.hidden);
        Ok(match &self.kind {
            Kind::Tied(linear) => {
                let kernel = linear.kernel(cpu, 1, Float::F32, Float::F32)?;
                (kernel.to_owned(), Product { n, k, bytes: linear.bytes() })
            }
            Kind::Apart(_, head) => (head.kernel(cpu, 1)?, Product { n, k, bytes: head.bytes() }),
        })
    }

    /// Bytes of an element of the embedding.
    pub(super) fn element_bytes(&self) -> usize {
        match &self.kind {
            Kind::Tied(linear) => linear.bytes() / (self.tokens.len() * self.hidden).max(1),
            Kind::Apart(rows, _) => rows.dtype().size_bytes(),
        }
    }

    /// Bytes that embedding and head take.
    pub fn bytes(&self) -> usize {
        match &self.kind {
            Kind::Tied(linear) => linear.bytes(),
            Kind::Apart(rows, head) => rows.len() * rows.dtype().size_bytes() + head.bytes(),
        }
    }
}

fn owned(data: FloatData<'_>) -> FloatData<'static> {
    match data {
        FloatData::F16(v) => FloatData::F16(Cow::Owned(v.into_owned())),
        FloatData::BF16(v) => FloatData::BF16(Cow::Owned(v.into_owned())),
        FloatData::F32(v) => FloatData::F32(Cow::Owned(v.into_owned())),
    }
}

/// Every `step`th element.
fn widen(from: Floats<'_>, step: usize, to: &mut [f32]) {
    match from {
        Floats::F16(v) => to.iter_mut().zip(v.iter().step_by(step)).for_each(|(to, v)| *to = v.to_f32()),
        Floats::BF16(v) => to.iter_mut().zip(v.iter().step_by(step)).for_each(|(to, v)| *to = v.to_f32()),
        Floats::F32(v) => to.iter_mut().zip(v.iter().step_by(step)).for_each(|(to, v)| *to = *v),
    }
}
