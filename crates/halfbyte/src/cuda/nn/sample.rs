//! Launches of `sample.cu`: a token drawn on the device.

use super::{cluster, narrow, same_length};
use crate::cuda::Gpu;
use crate::cuda::driver::{Arg, Stream, View, ViewMut};
use crate::cuda::parameters::{Parameters, parameters};
use crate::cuda::sources::{Instance, Source};
use crate::error::{Error, Result};

static SOURCE: Source = Source { path: "nn/sample.cu", text: include_str!("sample.cu"), parameters: &[Params::LAYOUT] };

/// As in the source.
const THREADS: u32 = 512;

pub(super) fn instance() -> Instance {
    Instance::new(&SOURCE, "sample")
}

parameters! {
    /// As in the source.
    struct Params {
        logits: u64,
        greatest: u64,
        drawn: u64,
        token: u64,
        random: f64,
        length: u64,
        inverse_temperature: f32,
        top_p: f32,
        top_k: u32,
        padding: u32,
    }
}

/// A draw.
#[derive(Debug)]
pub struct Draw<'a> {
    /// Logits `[v]`, at least one.
    pub logits: View<'a, f32>,
    /// What [`super::argmax`] found in them: the index of the greatest, then the bits of its value, `[2]`.
    pub choice: View<'a, u32>,
    /// Becomes the token, then the bits of the greatest logit, `[2]`.
    pub drawn: ViewMut<'a, u32>,
    /// Becomes the token, `[1]`: what the next step reads.
    pub token: ViewMut<'a, u32>,
    /// Logits are divided by this.
    pub temperature: f32,
    /// Draw from this many of the most likely tokens only; 0 for no limit.
    pub top_k: usize,
    /// Draw from the fewest most likely tokens whose probabilities reach this sum; 1 for no limit.
    pub top_p: f32,
    /// A random number, from 0 to below 1.
    pub random: f64,
}

/// Draws a token. Among the candidates, in order of their logits where `top_p` is below 1, else of their ids, it is the first
/// whose weight, with those before it, passes `random` of all.
///
/// Where a logit is NaN or infinity the greatest is not finite, and the token means nothing; minus infinity never comes.
/// *Accuracy:* weights are within 2⁻²² of the exact ones, sums f64. *Errors:* lengths that do not fit, numbers out of range.
pub fn sample(gpu: &Gpu, stream: &Stream, draw: Draw<'_>) -> Result<()> {
    const OP: &str = "sample";
    if draw.logits.is_empty() {
        return Err(Error::invalid(OP, "at least one logit", "none"));
    }
    narrow(OP, "logits", draw.logits.len())?;
    same_length(OP, "choice", Some(2), draw.choice.len())?;
    same_length(OP, "drawn", Some(2), draw.drawn.len())?;
    same_length(OP, "token", Some(1), draw.token.len())?;
    let within = draw.temperature > 0.0
        && draw.temperature.is_finite()
        && draw.top_p > 0.0
        && draw.top_p <= 1.0
        && (0.0..1.0).contains(&draw.random);
    if !within {
        let expected = "a temperature and a top-p above 0, a random number from 0 to below 1";
        return Err(Error::invalid(OP, expected, format!("{}, {}, {}", draw.temperature, draw.top_p, draw.random)));
    }
    let params = Params {
        logits: draw.logits.pointer(),
        greatest: draw.choice.slice(1..2).pointer(),
        drawn: draw.drawn.pointer(),
        token: draw.token.pointer(),
        random: draw.random,
        length: draw.logits.len() as u64,
        inverse_temperature: 1.0 / draw.temperature,
        top_p: draw.top_p,
        top_k: draw.top_k.min(draw.logits.len()) as u32,
        padding: 0,
    };
    let form = cluster(gpu, THREADS);
    let function = gpu.function(&instance())?;
    // SAFETY: the one parameter is the source's `Params`, whose lengths were checked above.
    unsafe { function.launch(stream, &form, &[Arg::new(&params)]) }
}
