//! From logits to the tokens that the next step reads, on a GPU.

use super::run::Rows;
use crate::error::Result;
use halfbyte::Cuda;
use halfbyte::cuda::driver::{Buffer, View};
use halfbyte::cuda::nn::{self, Draw, Drawn, Step};

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
