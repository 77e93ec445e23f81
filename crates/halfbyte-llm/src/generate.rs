//! Text from a prompt, streamed.

use crate::engine::Session;
use crate::error::{Error, Result};
use crate::sampling::{LogProbs, Sampler, Sampling};
use crate::stop::StopFilter;
use crate::tokenizer::Tokenizer;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// What to write, and when to stop.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Token ids of the prompt; they follow what the session holds already.
    pub prompt: &'a [u32],
    /// At most this many new tokens.
    pub max_tokens: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Tokens that end the text, as a rule [`crate::Config::eos`]; none to write on.
    pub end_tokens: &'a [u32],
    /// Text that ends the text; it is not shown.
    pub stop: &'a [String],
    /// Set from another thread (or a signal) to stop before the next token.
    pub cancel: Option<&'a AtomicBool>,
}

/// Why writing stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// As many tokens as were asked for.
    Length,
    /// The model ended its text.
    End,
    /// A stop string came.
    Stop,
    /// The context is full.
    Context,
    /// The caller's flag, or its function, said so.
    Cancelled,
}

/// What was written, and how long it took.
#[derive(Clone, Debug, PartialEq)]
pub struct Generated {
    /// New tokens, the one that ended the text not among them. The session has not read the last of them.
    pub tokens: Vec<u32>,
    /// Why it stopped.
    pub finish: Finish,
    /// Time for the prompt, until its last logits.
    pub prefill: Duration,
    /// Time for the prompt and the choice of the first token, as far as it came.
    pub first: Duration,
    /// Time for all that followed the prompt.
    pub decode: Duration,
    /// Tokens run through the model after the prompt: the ones that `decode` is the time of.
    pub decoded: usize,
}

/// A token as it is written, and the text that is certain with it.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    /// The token; None for text that was held back until the end.
    pub token: Option<u32>,
    /// Text, perhaps none: the token may be a part of a character or of a stop string.
    pub text: &'a str,
    /// How likely it was, if that was asked for.
    pub logprobs: Option<&'a LogProbs>,
}

impl Session<'_> {
    /// Continues a prompt; `show` is handed each new piece of text and may stop the writing.
    ///
    /// Pieces are whole characters; a piece that may be the beginning of a stop string waits. Errors: an empty prompt,
    /// a prompt longer than the context, token ids beyond the vocabulary, stop strings of no bytes or more than 1024, sampling
    /// options or logits that [`Sampler`] refuses.
    pub fn generate(
        &mut self,
        tokenizer: &Tokenizer,
        request: &Request<'_>,
        show: &mut dyn FnMut(&str) -> ControlFlow<()>,
    ) -> Result<Generated> {
        self.generate_pieces(tokenizer, request, None, &mut |piece| match piece.text {
            "" => ControlFlow::Continue(()),
            text => show(text),
        })
    }

    /// Continues a prompt as [`Session::generate`] does; `show` is handed each token with its text and, if `logprobs` says of how
    /// many of the most likely tokens, how likely it was. The token that ends the text is not shown. Errors: as
    /// [`Session::generate`].
    pub fn generate_pieces(
        &mut self,
        tokenizer: &Tokenizer,
        request: &Request<'_>,
        logprobs: Option<usize>,
        show: &mut dyn FnMut(Piece<'_>) -> ControlFlow<()>,
    ) -> Result<Generated> {
        StopFilter::check(request.stop)?;
        let mut sampler = Sampler::new(request.sampling)?;
        let mut decoder = tokenizer.stream();
        let mut filter = StopFilter::new(request.stop);
        let cancelled = || request.cancel.is_some_and(|flag| flag.load(Ordering::Relaxed));
        let begun = Instant::now();
        match self.read_unless(request.prompt, request.cancel) {
            Err(Error::Cancelled) => {
                let (prefill, decode) = (begun.elapsed(), Duration::ZERO);
                let (finish, first) = (Finish::Cancelled, prefill);
                return Ok(Generated { tokens: Vec::new(), finish, prefill, first, decode, decoded: 0 });
            }
            other => other?,
        }
        sampler.saw(self.tokens());
        let prefill = begun.elapsed();
        let begun = Instant::now();
        let (mut tokens, mut decoded, mut first) = (Vec::new(), 0, prefill);
        let finish = loop {
            if tokens.len() == request.max_tokens {
                break Finish::Length;
            }
            if cancelled() {
                break Finish::Cancelled;
            }
            let goes_on = logprobs.is_none() && tokens.len() + 1 < request.max_tokens && self.len() < self.context();
            let token = if goes_on { self.next_to_read(&mut sampler) } else { self.next(&mut sampler) }?;
            if decoded == 0 {
                first = prefill + begun.elapsed();
            }
            if request.end_tokens.contains(&token) {
                break Finish::End;
            }
            let logprobs = logprobs.map(|top| LogProbs::of(self.logits()?, token, top)).transpose()?;
            tokens.push(token);
            let passed = filter.push(&decoder.push(token)?);
            let piece = Piece { token: Some(token), text: &passed.text, logprobs: logprobs.as_ref() };
            if show(piece).is_break() {
                break Finish::Cancelled;
            }
            if passed.stopped {
                break Finish::Stop;
            }
            if tokens.len() == request.max_tokens {
                break Finish::Length;
            }
            if self.len() == self.context() {
                break Finish::Context;
            }
            self.read_unless(&[token], None)?;
            decoded += 1;
        };
        let decode = begun.elapsed();
        if finish != Finish::Stop {
            let passed = filter.push(&decoder.finish()?);
            let rest = if passed.stopped { passed.text } else { passed.text + &filter.finish() };
            if !rest.is_empty() {
                // Nothing is left to stop.
                let _ = show(Piece { token: None, text: &rest, logprobs: None });
            }
        }
        Ok(Generated { tokens, finish, prefill, first, decode, decoded })
    }
}
