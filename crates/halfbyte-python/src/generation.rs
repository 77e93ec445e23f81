//! `Generation`: a text that a thread writes, piece by piece.

use crate::device;
use crate::error::Result;
use crate::model::Inner;
use halfbyte::Cpu;
use halfbyte_llm::{Finish, Request, Sampling, Session};
use pyo3::exceptions::{PyRuntimeError, PyStopIteration};
use pyo3::prelude::*;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Pieces of text that may wait for whoever reads them.
const PIECES_AHEAD: usize = 16;

/// What a thread does that writes a text.
pub struct Work {
    /// The model with its tokenizer.
    pub inner: Arc<Inner>,
    /// What computes on the CPU.
    pub cpu: Arc<Cpu>,
    /// The prompt.
    pub ids: Vec<u32>,
    /// New tokens at most.
    pub max_tokens: usize,
    /// How they are drawn.
    pub sampling: Sampling,
    /// Texts at the first of which it ends.
    pub stop: Vec<String>,
    /// Whether tokens that end a text do not.
    pub ignore_end: bool,
}

/// What it tells.
enum Told {
    Piece(Option<u32>, String),
    End(halfbyte_llm::Result<Finish>),
}

impl Work {
    /// Begins the text, on a thread of its own.
    pub fn begin(self, py: Python<'_>) -> Result<Generation> {
        let (send, pieces) = sync_channel(PIECES_AHEAD);
        let cancel = Arc::new(AtomicBool::new(false));
        let cancelled = cancel.clone();
        let run = move || {
            let finish = self.generate(&send, &cancelled);
            // Nobody may be there any more who reads it.
            let _ = send.send(Told::End(finish));
        };
        let thread = std::thread::Builder::new().name("halfbyte-generate".to_owned());
        thread.spawn(run).map_err(|e| PyRuntimeError::new_err(format!("generate: no thread: {e}")))?;
        let pieces = Mutex::new(Some(pieces));
        Ok(Generation { pieces, cancel, state: Mutex::default(), generation: device::generation(py) })
    }

    fn generate(&self, send: &SyncSender<Told>, cancel: &AtomicBool) -> halfbyte_llm::Result<Finish> {
        let Inner { model, tokenizer } = &*self.inner;
        let config = model.config();
        let context = self.ids.len().saturating_add(self.max_tokens).min(config.spec.max_context);
        let mut session = Session::new(model, &self.cpu, context)?;
        let request = Request {
            prompt: &self.ids,
            max_tokens: self.max_tokens,
            sampling: self.sampling,
            end_tokens: if self.ignore_end { &[] } else { &config.eos },
            stop: &self.stop,
            cancel: Some(cancel),
        };
        let generated = session.generate_pieces(tokenizer, &request, None, &mut |piece| match send
            .send(Told::Piece(piece.token, piece.text.to_owned()))
        {
            Ok(()) => ControlFlow::Continue(()),
            Err(_) => ControlFlow::Break(()),
        })?;
        Ok(generated.finish)
    }
}

/// A text as it is written. Ends early when it is closed or let go of.
#[pyclass(frozen, module = "halfbyte")]
#[derive(Debug)]
pub struct Generation {
    pieces: Mutex<Option<Receiver<Told>>>,
    cancel: Arc<AtomicBool>,
    state: Mutex<State>,
    generation: u32,
}

impl std::fmt::Debug for Told {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Told::Piece(_, text) => f.debug_tuple("Piece").field(text).finish(),
            Told::End(_) => f.write_str("End"),
        }
    }
}

#[derive(Debug, Default)]
struct State {
    tokens: Vec<u32>,
    finish: Option<&'static str>,
}

impl Drop for Generation {
    fn drop(&mut self) {
        self.cancel.store(true, Ordering::Relaxed);
        // What a thread of another process held when this one was forked is never let go of.
        if Python::try_attach(|py| self.is_forked(py)) == Some(true) {
            let pieces = self.pieces.get_mut().unwrap_or_else(PoisonError::into_inner);
            std::mem::forget(pieces.take());
        }
    }
}

/// Why a text ended that an error ended.
const FAILED: &str = "error";

fn name_of(finish: Finish) -> &'static str {
    match finish {
        Finish::Length => "length",
        Finish::End => "end",
        Finish::Stop => "stop",
        Finish::Context => "context",
        Finish::Cancelled => "cancelled",
    }
}

impl Generation {
    /// Whether another process began the text, from which this one was forked.
    fn is_forked(&self, py: Python<'_>) -> bool {
        self.generation != device::generation(py)
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the thread tells next; None at the end. Looks for Ctrl-C ten times a second.
    fn next(&self, py: Python<'_>) -> Result<Option<Told>> {
        loop {
            let told = py.detach(|| {
                let mut pieces = self.pieces.lock().unwrap_or_else(PoisonError::into_inner);
                let Some(receiver) = &*pieces else { return Ok(None) };
                let told = receiver.recv_timeout(Duration::from_millis(100));
                if matches!(told, Ok(Told::End(_)) | Err(RecvTimeoutError::Disconnected)) {
                    *pieces = None;
                }
                told.map(Some)
            });
            match told {
                Ok(told) => return Ok(told),
                Err(RecvTimeoutError::Disconnected) => {
                    self.state().finish = Some(FAILED);
                    return Err(PyRuntimeError::new_err("generate: the thread that writes the text has ended").into());
                }
                Err(RecvTimeoutError::Timeout) => py.check_signals().inspect_err(|_| self.close(py))?,
            }
        }
    }
}

#[pymethods]
impl Generation {
    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> Result<String> {
        if self.is_forked(py) {
            let text = "generate: expected the process that began the text, got one that was forked from it";
            return Err(PyRuntimeError::new_err(text).into());
        }
        // Whoever reads on in C, as list() does, would else not hear of Ctrl-C as long as pieces come.
        py.check_signals().inspect_err(|_| self.close(py))?;
        loop {
            match self.next(py)? {
                None => return Err(PyStopIteration::new_err(()).into()),
                Some(Told::Piece(token, text)) => {
                    self.state().tokens.extend(token);
                    if !text.is_empty() {
                        return Ok(text);
                    }
                }
                Some(Told::End(finish)) => {
                    self.state().finish = Some(finish.as_ref().map_or(FAILED, |finish| name_of(*finish)));
                    finish?;
                    return Err(PyStopIteration::new_err(()).into());
                }
            }
        }
    }

    /// Ends the writing after the token at hand.
    fn close(&self, py: Python<'_>) {
        self.cancel.store(true, Ordering::Relaxed);
        if !self.is_forked(py) {
            py.detach(|| *self.pieces.lock().unwrap_or_else(PoisonError::into_inner) = None);
        }
        self.state().finish.get_or_insert("cancelled");
    }

    /// Tokens so far, the one that ended the text not among them.
    #[getter]
    fn tokens(&self) -> Vec<u32> {
        self.state().tokens.clone()
    }

    /// Why it ended: length, end, stop, context, cancelled, or error, which was raised; None while it goes on.
    #[getter]
    fn finish_reason(&self) -> Option<&'static str> {
        self.state().finish
    }
}
