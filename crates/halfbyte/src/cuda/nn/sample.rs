//! Launches of `sample.cu`: tokens drawn on the device.

use super::host_tokens::{HostTokens, HostTokensOperands};
use super::{cluster, narrow, same_length};
use crate::cuda::Gpu;
use crate::cuda::driver::{Arg, Stream, View, ViewMut};
use crate::cuda::parameters::{Parameters, parameters};
use crate::cuda::sources::{Instance, Source};
use crate::error::{Error, Result};

static SOURCE: Source =
    Source { path: "nn/sample.cu", text: include_str!("sample.cu"), parameters: &[Row::LAYOUT, Params::LAYOUT] };

/// As in the source.
const THREADS: u32 = 512;
const MOST_ROWS: usize = 32;

pub(super) fn instance() -> Instance {
    Instance::new(&SOURCE, "sample")
}

parameters! {
    /// As in the source: what is asked of a row.
    struct Row {
        random: f64,
        inverse_temperature: f32,
        top_p: f32,
        top_k: u32,
        padding: u32,
    }

    /// As in the source.
    struct Params {
        logits: u64,
        choice: u64,
        drawn: u64,
        tokens: u64,
        length: u64,
        host: HostTokensOperands,
        rows: [Row; MOST_ROWS],
    }
}

/// How a text draws its next token.
#[derive(Clone, Copy, Debug)]
pub struct Draw {
    /// Logits are divided by this; 0: nothing is drawn, the most likely token is taken.
    pub temperature: f32,
    /// Draw from this many of the most likely tokens only; 0 for no limit.
    pub top_k: usize,
    /// Draw from the fewest most likely tokens whose probabilities reach this sum; 1 for no limit.
    pub top_p: f32,
    /// A random number, from 0 to below 1.
    pub random: f64,
}

/// What the draws of some texts, each a row, read and leave.
#[derive(Debug)]
pub struct Drawn<'a> {
    /// Logits `[rows, v]`, at least one of each row.
    pub logits: View<'a, f32>,
    /// What [`super::argmax`] found in them: the index of the greatest, then the bits of its value, `[rows, 2]`.
    pub choice: View<'a, u32>,
    /// Becomes the token, then the bits of the greatest logit, `[rows, 2]`.
    pub drawn: ViewMut<'a, u32>,
    /// Become the tokens, `[rows]`: what the next step reads.
    pub tokens: ViewMut<'a, u32>,
    /// Where the host sees the tokens too.
    pub host: Option<&'a HostTokens>,
}

/// Draws a token for each row. Among the candidates, in order of their logits where `top_p` is below 1, else of their ids, it is the
/// first whose weight, with those before it, passes `random` of all.
///
/// Where a logit is NaN or infinity the greatest is not finite, and the token means nothing; minus infinity never comes.
/// *Accuracy:* weights are within 2⁻²² of the exact ones, sums f64. *Errors:* lengths that do not fit, numbers out of range.
pub fn sample(gpu: &Gpu, stream: &Stream, draws: &[Draw], of: Drawn<'_>) -> Result<()> {
    const OP: &str = "sample";
    let rows = draws.len();
    if rows == 0 {
        return Ok(());
    }
    let length = of.logits.len() / rows;
    if length == 0 {
        return Err(Error::invalid(OP, "at least one logit of each row", "none"));
    }
    narrow(OP, "logits", length)?;
    same_length(OP, "logits", Some(rows * length), of.logits.len())?;
    same_length(OP, "choice", Some(2 * rows), of.choice.len())?;
    same_length(OP, "drawn", Some(2 * rows), of.drawn.len())?;
    same_length(OP, "tokens", Some(rows), of.tokens.len())?;
    for draw in draws {
        let within = draw.temperature >= 0.0
            && draw.temperature.is_finite()
            && draw.top_p > 0.0
            && draw.top_p <= 1.0
            && (0.0..1.0).contains(&draw.random);
        if !within {
            let expected = "a temperature of at least 0, a top-p above 0, a random number from 0 to below 1";
            return Err(Error::invalid(OP, expected, format!("{draw:?}")));
        }
    }
    let Drawn { logits, choice, mut drawn, mut tokens, host } = of;
    let function = gpu.function(&instance())?;
    let mut first = 0;
    for draws in draws.chunks(MOST_ROWS) {
        let (of_chunk, others) = drawn.split_at(2 * draws.len());
        let (tokens_of_chunk, other_tokens) = tokens.split_at(draws.len());
        let mut params = Params {
            logits: logits.slice(first * length..(first + draws.len()) * length).pointer(),
            choice: choice.slice(2 * first..2 * (first + draws.len())).pointer(),
            drawn: of_chunk.pointer(),
            tokens: tokens_of_chunk.pointer(),
            length: length as u64,
            host: HostTokensOperands::of(host, first, draws.len())?,
            rows: [Row { random: 0.0, inverse_temperature: 0.0, top_p: 1.0, top_k: 0, padding: 0 }; MOST_ROWS],
        };
        for (row, draw) in params.rows.iter_mut().zip(draws) {
            *row = Row {
                random: draw.random,
                inverse_temperature: if draw.temperature > 0.0 { 1.0 / draw.temperature } else { 0.0 },
                top_p: draw.top_p,
                top_k: draw.top_k.min(length) as u32,
                padding: 0,
            };
        }
        let form = cluster(gpu, THREADS, draws.len() as u32);
        // SAFETY: the one parameter is the source's `Params`, whose lengths were checked above.
        unsafe { function.launch(stream, &form, &[Arg::new(&params)]) }?;
        (first, drawn, tokens) = (first + draws.len(), others, other_tokens);
    }
    Ok(())
}
