//! Tokens in mapped host memory: kernels leave them there, and the host sees them while the stream goes on.

use crate::cuda::Gpu;
use crate::cuda::driver::{Buffer, HostWords, Stream};
use crate::cuda::parameters::parameters;
use crate::error::{Error, Result};

const OP: &str = "tokens of a launch";

/// Of a word: nothing was left there yet.
const NOT_YET: u64 = u64::MAX;

/// Looks at a word until the host looks after the stream: a fault ends it, and no word comes any more.
const LOOKS: usize = 4096;

parameters! {
    /// `HostTokensOperands` of `include/host_tokens.cuh`.
    pub(super) struct HostTokensOperands {
        words: u64,
        turns: u64,
        rows: u64,
    }
}

impl HostTokensOperands {
    /// Of a launch of so many rows, from one of them on. Error: there are not so many.
    pub(super) fn of(tokens: Option<&HostTokens>, first: usize, rows: usize) -> Result<Self> {
        let Some(tokens) = tokens else { return Ok(Self { words: 0, turns: 0, rows: 0 }) };
        let all = tokens.launches.len();
        if first + rows > all {
            return Err(Error::invalid(OP, format!("at most {all} rows"), (first + rows).to_string()));
        }
        let words = tokens.words.pointer() + (first * size_of::<u64>()) as u64;
        let turns = tokens.turns.pointer() + (first * size_of::<u32>()) as u64;
        Ok(Self { words, turns, rows: all as u64 })
    }
}

/// What [`super::argmax`] or [`super::sample`] leaves of each row: its token, and the greatest logit.
///
/// A row has two places, which launches take in turns, so that one launch may be ahead of the host. All launches that are given these
/// are in one stream, one kernel's: [`HostTokens::make_room`], the launch, [`HostTokens::launched`].
#[derive(Debug)]
pub struct HostTokens {
    /// `[2, rows]`: bits of the logit, then the token.
    words: HostWords,
    /// Launches of each row that are done, `[rows]`.
    turns: Buffer<u32>,
    /// Launches of each row, as [`after`] counts them.
    launches: Vec<u8>,
    /// Whether the place of a row's next launch is empty: room was made, and no launch followed, as where a step failed.
    empty: Vec<bool>,
}

/// Where the tokens of a launch come: words, one a row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenPlaces(Vec<usize>);

/// A launch more: from two on, an even number or an odd one, of which none is the last.
fn after(launches: u8) -> u8 {
    if launches < 3 { launches + 1 } else { 2 }
}

impl HostTokens {
    /// For launches of up to so many rows.
    pub fn new(gpu: &Gpu, stream: &Stream, rows: usize) -> Result<Self> {
        let mut turns = gpu.context().allocate(rows)?;
        stream.fill(turns.view_mut(), 0)?;
        let words = HostWords::new(gpu.context(), 2 * rows, NOT_YET)?;
        Ok(Self { words, turns, launches: vec![0; rows], empty: vec![false; rows] })
    }

    /// Where the next launch of a row leaves its token.
    fn place(&self, row: usize) -> usize {
        usize::from(self.launches[row] % 2) * self.launches.len() + row
    }

    /// Makes room for what the next launch leaves of the first rows: what the last but one left there has come, and is of no use any
    /// more. Where no launch followed, room may be made again. Errors: those of the stream.
    pub fn make_room(&mut self, stream: &Stream, rows: usize) -> Result<()> {
        for row in 0..rows.min(self.launches.len()) {
            let place = self.place(row);
            if self.launches[row] >= 2 && !self.empty[row] {
                self.word(stream, place)?;
            }
            self.words.set(place, NOT_YET);
            self.empty[row] = true;
        }
        Ok(())
    }

    /// Such a launch was put into the stream.
    pub fn launched(&mut self, rows: usize) -> TokenPlaces {
        let places = (0..rows.min(self.launches.len())).map(|row| {
            let place = self.place(row);
            self.launches[row] = after(self.launches[row]);
            self.empty[row] = false;
            place
        });
        TokenPlaces(places.collect())
    }

    /// The tokens of one of the last two launches, and the greatest logit of each row, as soon as they are there. Errors: those of the
    /// stream; none was left.
    pub fn wait(&self, stream: &Stream, of: &TokenPlaces) -> Result<Vec<(u32, f32)>> {
        let words = of.0.iter().map(|&place| self.word(stream, place));
        words.map(|word| word.map(|word| (word as u32, f32::from_bits((word >> 32) as u32)))).collect()
    }

    /// A word, once it is there.
    fn word(&self, stream: &Stream, place: usize) -> Result<u64> {
        loop {
            for _ in 0..LOOKS {
                match self.words.get(place) {
                    NOT_YET => std::hint::spin_loop(),
                    word => return Ok(word),
                }
            }
            if stream.is_done()? && self.words.get(place) == NOT_YET {
                return Err(Error::invalid(OP, "a token of each row", "a stream that is done and left none"));
            }
            std::thread::yield_now();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::after;

    #[test]
    fn launches_take_both_places_in_turns_without_end() {
        let mut launches = 0;
        for i in 0..1000 {
            assert_eq!((launches % 2 == 1, launches >= 2), (i % 2 == 1, i >= 2));
            launches = after(launches);
        }
    }
}
