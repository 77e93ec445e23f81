//! Embedding and head in memory.

use super::{OnCpu, Projection};
use crate::arch::Spec;
use crate::comm::Comm;
use crate::decoder::{self, Product};
use crate::error::{Error, Result};
use crate::load::{Embedding, Loader};
use crate::shard::Shard;
use halfbyte::cpu::{Cpu, nn};
use halfbyte::ops::{Linear, Weight};
use halfbyte::{Act, Float, Floats, FloatsMut, StoredTensor};
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
    Apart(Rows, Projection),
}

/// An embedding that is only read.
#[derive(Debug)]
enum Rows {
    Floats(FloatData<'static>),
    /// Codes, as they would be packed for a product: a file's may be of any form.
    Codes(Box<Linear>),
}

impl Rows {
    /// Row `i` of `hidden` elements.
    fn read(&self, i: usize, hidden: usize, out: &mut [f32]) {
        match self {
            Self::Floats(rows) => {
                let row = rows.as_floats().slice(i * hidden..(i + 1) * hidden);
                out.iter_mut().enumerate().for_each(|(j, out)| *out = row.get(j));
            }
            Self::Codes(rows) => rows.packed().row(i, out),
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Floats(rows) => rows.len() * rows.dtype().size_bytes(),
            Self::Codes(rows) => rows.bytes(),
        }
    }
}

impl Vocabulary {
    /// Loads all rows. Errors: missing or malformed tensors, other shapes than the spec's.
    pub fn load(loader: &mut Loader<'_>, spec: &Spec) -> Result<Self> {
        decoder::vocabulary(spec, loader, &mut OnCpu, Shard::WHOLE)
    }

    pub(super) fn new(
        embedding: Embedding<'_>,
        tokens: Range<usize>,
        spec: &Spec,
        head: Option<Projection>,
        act: Act,
    ) -> Result<Self> {
        let (hidden, shape) = (spec.hidden, [tokens.len(), spec.hidden]);
        // Whichever way it is read, a row of codes is what they stand for.
        let of_codes =
            |codes: &StoredTensor<'_>, act| Ok::<_, Error>(Box::new(Linear::new(Weight::Stored(&[codes], act))?));
        let kind = match (head, embedding) {
            (Some(head), Embedding::Codes(codes)) => Kind::Apart(Rows::Codes(of_codes(&codes, Act::A16)?), head),
            (None, Embedding::Codes(codes)) => Kind::Tied(of_codes(&codes, act)?),
            (Some(head), Embedding::Stored(floats)) => Kind::Apart(Rows::Floats(owned(floats)), head),
            (None, Embedding::Stored(floats)) => {
                Kind::Tied(Box::new(Linear::new(Weight::Dense(floats.as_floats(), shape))?))
            }
            (Some(head), Embedding::Random(floats)) => {
                Kind::Apart(Rows::Floats(FloatData::F16(Cow::Owned(floats.draw()?))), head)
            }
            (None, Embedding::Random(floats)) => {
                Kind::Tied(Box::new(Linear::new(Weight::Dense(Floats::F16(&floats.draw()?), shape))?))
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
                Kind::Apart(rows, _) => rows.read(token, hidden, out),
                Kind::Tied(linear) => linear.packed().row(token, out),
            }
        }
        // Each token's vector is one rank's; the others add nothing.
        comm.all_reduce(out)?;
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
        let parts = comm.all_gather(&own)?;
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
            nn::soft_cap(cpu, y, cap)?;
        }
        Ok(())
    }

    /// Bytes of the rows of an embedding that a step of so many tokens does not read.
    pub(super) fn bytes_not_read(&self, tokens: usize) -> usize {
        match &self.kind {
            Kind::Tied(_) => 0,
            Kind::Apart(rows, _) => {
                rows.bytes() - rows.bytes() / self.tokens.len().max(1) * tokens.min(self.tokens.len())
            }
        }
    }

    /// What computes the logits of so many rows, and what it multiplies by.
    pub(super) fn head(&self, cpu: &Cpu, rows: usize) -> Result<(String, Product)> {
        let (n, k) = (self.tokens.len(), self.hidden);
        Ok(match &self.kind {
            Kind::Tied(linear) => {
                let kernel = linear.kernel(cpu, rows, Float::F32, Float::F32)?;
                (kernel.to_owned(), Product { n, k, bytes: linear.bytes() })
            }
            Kind::Apart(_, head) => (head.kernel(cpu, rows)?, Product { n, k, bytes: head.bytes() }),
        })
    }

    /// Bytes of a row of the embedding.
    pub(super) fn row_bytes(&self) -> usize {
        let bytes = match &self.kind {
            Kind::Tied(linear) => linear.bytes(),
            Kind::Apart(rows, _) => rows.bytes(),
        };
        bytes / self.tokens.len().max(1)
    }

    /// Bytes that embedding and head take.
    pub fn bytes(&self) -> usize {
        match &self.kind {
            Kind::Tied(linear) => linear.bytes(),
            Kind::Apart(rows, head) => rows.bytes() + head.bytes(),
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
