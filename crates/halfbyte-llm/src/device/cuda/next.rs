//! From logits to the tokens that the next step reads, on a GPU, and to the host.

use crate::error::{Error, Result};
use halfbyte::Cuda;
use halfbyte::cuda::driver::{Buffer, View, ViewMut};
use halfbyte::cuda::nn::{self, Draw, Drawn, HostTokens, Step, TokenPlaces};

/// What follows texts, each a row of logits. It is allocated once and stays where it is, since recordings hold its addresses.
#[derive(Debug)]
pub(super) struct Next {
    /// Of each text the most likely token, then the bits of its logit.
    choice: Buffer<u32>,
    /// A drawn token, then the same bits.
    drawn: Buffer<u32>,
    /// What the host sees of both.
    likely: HostTokens,
    draws: HostTokens,
}

/// Tokens of one launch, which the host sees as they come. The next launch may follow meanwhile.
#[derive(Clone, Debug, Default)]
pub(super) struct Chosen {
    drawn: bool,
    places: TokenPlaces,
}

impl Next {
    /// Of so many texts.
    pub(super) fn new(cuda: &Cuda, texts: usize) -> Result<Self> {
        let (gpu, context) = (cuda.gpu(), cuda.gpu().context());
        Ok(Self {
            choice: context.allocate(2 * texts)?,
            drawn: context.allocate(2 * texts)?,
            likely: HostTokens::new(gpu, cuda.stream(), texts)?,
            draws: HostTokens::new(gpu, cuda.stream(), texts)?,
        })
    }

    /// Before so many texts choose their most likely tokens.
    pub(super) fn make_room(&mut self, cuda: &Cuda, texts: usize) -> Result<()> {
        Ok(self.likely.make_room(cuda.stream(), texts)?)
    }

    /// From the logits of texts to the most likely tokens, which are left where the next step reads them; positions grow by `advance`.
    /// It can be recorded: before it is put into the stream, so or so, there is [`Next::make_room`], and then [`Next::chosen`].
    pub(super) fn most_likely(
        &mut self,
        cuda: &Cuda,
        [tokens, positions]: [ViewMut<'_, u32>; 2],
        advance: usize,
        logits: View<'_, f32>,
    ) -> Result<()> {
        let choice = self.choice.view_mut().slice(0..2 * tokens.len());
        let step = Step { logits, choice, tokens, positions, advance, host: Some(&self.likely) };
        Ok(nn::argmax(cuda.gpu(), cuda.stream(), step)?)
    }

    /// So many texts choose their most likely tokens in the stream.
    pub(super) fn chosen(&mut self, texts: usize) -> Chosen {
        Chosen { drawn: false, places: self.likely.launched(texts) }
    }

    /// From the same logits to tokens that are drawn, or the most likely ones, where the next step reads them.
    pub(super) fn draw(
        &mut self,
        cuda: &Cuda,
        draws: &[Draw],
        logits: View<'_, f32>,
        tokens: ViewMut<'_, u32>,
    ) -> Result<Chosen> {
        let texts = draws.len();
        self.draws.make_room(cuda.stream(), texts)?;
        let of = Drawn {
            logits,
            choice: self.choice.view().slice(0..2 * texts),
            drawn: self.drawn.view_mut().slice(0..2 * texts),
            tokens,
            host: Some(&self.draws),
        };
        nn::sample(cuda.gpu(), cuda.stream(), draws, of)?;
        Ok(Chosen { drawn: true, places: self.draws.launched(texts) })
    }

    /// The tokens, as soon as they are there; an error for a text whose greatest logit is none.
    pub(super) fn tokens(&self, cuda: &Cuda, chosen: &Chosen) -> Result<Vec<Result<u32>>> {
        let host = if chosen.drawn { &self.draws } else { &self.likely };
        let tokens = host.wait(cuda.stream(), &chosen.places)?;
        let finite = |(token, greatest): (u32, f32)| {
            if greatest.is_finite() { Ok(token) } else { Err(Error::NotFinite(greatest)) }
        };
        Ok(tokens.into_iter().map(finite).collect())
    }
}
