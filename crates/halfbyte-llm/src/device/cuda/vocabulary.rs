//! Embedding and head on a GPU.

use super::projection::{Input, Projection};
use crate::decoder::Product;
use crate::error::{Error, Result};
use halfbyte::cuda::driver::{Buffer, FloatView, View, ViewMut};
use halfbyte::cuda::nn::{self, Dense, DenseCall, Table};
use halfbyte::cuda::sources::Instance;
use halfbyte::ops::Linear;
use halfbyte::{Cuda, Float};

/// The layer from vectors to logits, and the way back: the embedding.
#[derive(Debug)]
pub(crate) struct Vocabulary {
    /// Of this rank's tokens, `[tokens, hidden]`.
    pub(super) embedding: Embedding,
    /// The first of them.
    pub(super) first: usize,
    /// What its vectors are multiplied by.
    pub(super) scale: f32,
    /// None where the head's weight is the embedding.
    pub(super) head: Option<Projection>,
    /// A logit becomes `cap · tanh(logit / cap)`.
    pub(super) logit_cap: Option<f32>,
}

/// Vectors of tokens, which may be the head's weight too.
#[derive(Debug)]
pub(super) enum Embedding {
    Floats(Dense),
    /// Packed for a product.
    Codes(Projection),
}

impl Embedding {
    /// Of codes.
    pub(super) fn of_packed(packed: Linear<Cuda>) -> Self {
        Self::Codes(Projection::of(vec![packed]))
    }

    /// Tokens and elements of a vector.
    pub(super) fn shape(&self) -> [usize; 2] {
        match self {
            Self::Floats(dense) => dense.shape(),
            Self::Codes(codes) => [codes.n(), codes.k()],
        }
    }

    /// Bytes that it takes.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Floats(dense) => dense.bytes(),
            Self::Codes(codes) => codes.bytes(),
        }
    }

    /// What vectors are read from. Error: codes that are not one weight.
    fn table(&self) -> Result<Table<'_>> {
        match self {
            Self::Floats(dense) => Ok(Table::Floats(dense.rows())),
            Self::Codes(codes) => match codes.single() {
                Some((packed, _)) => Ok(Table::Codes(packed)),
                None => Err(Error::invalid("embedding", "codes of one weight", "several")),
            },
        }
    }

    /// Floats, if it is such.
    pub(super) fn floats(&self) -> Option<FloatView<'_>> {
        if let Self::Floats(dense) = self { Some(dense.rows()) } else { None }
    }

    /// The kernel that reads vectors. Error: as of [`Embedding::table`].
    pub(super) fn instance(&self) -> Result<Instance> {
        Ok(self.table()?.instance())
    }
}

impl Vocabulary {
    /// What the head multiplies by, where that may be quantised.
    pub(super) fn product(&self) -> Option<&Projection> {
        match (&self.head, &self.embedding) {
            (Some(head), _) => Some(head),
            (None, Embedding::Codes(codes)) => Some(codes),
            (None, Embedding::Floats(_)) => None,
        }
    }

    /// The head's weights, if they are floats.
    pub(super) fn floats_of_head(&self) -> Option<FloatView<'_>> {
        self.head.as_ref().map_or_else(|| self.embedding.floats(), Projection::floats)
    }

    /// Bytes of embedding and head.
    pub(super) fn bytes(&self) -> usize {
        self.embedding.bytes() + self.head.as_ref().map_or(0, Projection::bytes)
    }

    /// Bytes of a vector.
    pub(super) fn row_bytes(&self) -> usize {
        let [tokens, _] = self.embedding.shape();
        self.embedding.bytes() / tokens.max(1)
    }

    /// Bytes that a step of so many tokens does not read.
    pub(super) fn bytes_not_read(&self, tokens: usize) -> usize {
        let [rows, _] = self.embedding.shape();
        if self.head.is_some() { self.embedding.bytes() - self.row_bytes() * tokens.min(rows) } else { 0 }
    }

    /// Vectors of tokens; zeros for those that other ranks have. Shape: out `[tokens, hidden]`.
    pub(super) fn embed(&self, cuda: &Cuda, tokens: View<'_, u32>, out: ViewMut<'_, f32>) -> Result<()> {
        let [_, hidden] = self.embedding.shape();
        let table = (self.embedding.table()?, self.first);
        Ok(nn::embed(cuda.gpu(), cuda.stream(), table, hidden, tokens, self.scale, out)?)
    }

    /// Logits of m vectors, but for the cap. Shapes: x `[m, hidden]`, y at least `[m, tokens]`.
    pub(super) fn logits(
        &self,
        cuda: &Cuda,
        x: FloatView<'_>,
        m: usize,
        y: &mut Buffer<f32>,
        room: &mut Buffer<f32>,
    ) -> Result<()> {
        match (&self.head, &self.embedding) {
            (Some(head), _) | (None, Embedding::Codes(head)) => head.run(cuda, Input::Floats(x), m, (y, 0), room),
            (None, Embedding::Floats(dense)) => {
                let [tokens, _] = dense.shape();
                let call = DenseCall { x, m, bias: None, y: y.view_mut().slice(0..m * tokens).into() };
                Ok(dense.forward(cuda.gpu(), cuda.stream(), call)?)
            }
        }
    }

    /// What computes the logits of so many rows, and what it multiplies by.
    pub(super) fn kernel(&self, cuda: &Cuda, rows: usize, x: Float) -> Result<(String, Product)> {
        Ok(match (&self.head, &self.embedding) {
            (Some(head), _) | (None, Embedding::Codes(head)) => {
                (head.kernel(cuda, rows, x)?, Product { n: head.n(), k: head.k(), bytes: head.bytes() })
            }
            (None, Embedding::Floats(dense)) => {
                let [n, k] = dense.shape();
                (dense.kernel(cuda.gpu(), rows, x).to_owned(), Product { n, k, bytes: dense.bytes() })
            }
        })
    }
}
