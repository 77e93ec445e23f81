//! `Model`: a language model on a device, and text from it, streamed.

use crate::checkpoint::act_of;
use crate::device;
use crate::error::{Failure, Result, invalid};
use crate::number::{self, Ids};
use crate::tensor::{DataType, Place, numpy_array};
use halfbyte::kernel::KvType;
use halfbyte::quantize::Rtn;
use halfbyte::{Act, Cpu, Float, Format};
use halfbyte_checkpoint::Weights;
use halfbyte_llm::stop::StopFilter;
use halfbyte_llm::{
    Config, Device, Finish, LoadOptions, Model as Loaded, Request, Sampling, Session, Tokenizer, device::Gpu,
};
use pyo3::exceptions::{PyRuntimeError, PyStopIteration, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::PyString;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Pieces of text that may wait for whoever reads them.
const PIECES_AHEAD: usize = 16;

/// A language model: its weights on a device, its tokenizer.
#[pyclass(frozen, module = "halfbyte")]
#[derive(Debug)]
pub struct Model {
    inner: Arc<Inner>,
    generation: u32,
}

#[derive(Debug)]
struct Inner {
    model: Loaded,
    tokenizer: Tokenizer,
}

/// Keys and values by the name of their type.
fn kv_of(name: &str) -> PyResult<KvType> {
    match name {
        "f32" => Ok(KvType::F32),
        "f16" => Ok(KvType::F16),
        "bf16" => Ok(KvType::Bf16),
        "int8" => Ok(KvType::Int8),
        other => invalid("kv", "f32, f16, bf16 or int8", format_args!("\"{other}\"")),
    }
}

/// A prompt: text, or tokens.
pub enum Prompt {
    /// Text.
    Text(String),
    /// Tokens.
    Tokens(Vec<u32>),
}

impl<'py> FromPyObject<'_, 'py> for Prompt {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        match value.is_instance_of::<PyString>() {
            true => value.extract().map(Self::Text),
            false => value.extract::<Ids>().map(|Ids(ids)| Self::Tokens(ids)),
        }
    }
}

/// Texts at the first of which a text ends.
pub struct Stop(Vec<String>);

impl<'py> FromPyObject<'_, 'py> for Stop {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if value.is_instance_of::<PyString>() {
            return Ok(Self(vec![value.extract()?]));
        }
        let refuse = |of: &Bound<'py, PyAny>| {
            let got = of.get_type().name().map_or_else(|_| "another type".to_owned(), |name| name.to_string());
            PyTypeError::new_err(format!("stop: expected a text, or several, got {got}"))
        };
        let mut texts = Vec::new();
        for text in value.try_iter().map_err(|_| refuse(&value))? {
            let text = text?;
            if !text.is_instance_of::<PyString>() {
                return Err(refuse(&text));
            }
            texts.push(text.extract()?);
        }
        Ok(Self(texts))
    }
}

/// Loads a language model: a folder in Hugging Face's form or a GGUF file. format: what dense layers of the blocks are rounded to;
/// act: what becomes of activations of layers that are quantised already; kv: what keys and values are kept as.
#[pyfunction]
#[pyo3(signature = (path, *, format=None, act=None, kv=None, device=None, search=false))]
pub fn load(
    py: Python<'_>,
    path: PathBuf,
    format: Option<&str>,
    act: Option<&str>,
    kv: Option<&str>,
    device: Option<&Bound<'_, PyAny>>,
    #[pyo3(from_py_with = number::search)] search: bool,
) -> Result<Model> {
    let format = format.map(str::parse::<Format>).transpose()?;
    let act = act.map(act_of).transpose()?;
    if let (Some(format), Some(act)) = (format, act)
        && format.act != act
    {
        return Ok(invalid("load", "act to be what format says, or left out", format_args!("{format} and another"))?);
    }
    if search && format.is_none() {
        return Ok(invalid("load", "search with a format to round to", "none")?);
    }
    let act = format.map(|format| format.act).or(act).unwrap_or(Act::A16);
    let place = device.filter(|device| !device.is_none()).map_or(Ok(Place::Cpu), device::place_of)?;
    let where_to = match place {
        Place::Cpu => Device::Cpu,
        Place::Cuda(index) => {
            let gpu = device::gpu(py, index)?;
            let activations = if act == Act::A32 { Float::F32 } else { Float::F16 };
            Device::Cuda(Gpu { gpu, activations, fused: true, persistent: true })
        }
    };
    let rtn = Rtn { search, ..Rtn::default() };
    let quantize = format.map(|format| (format.weight, rtn));
    let kv = kv.map(kv_of).transpose()?;
    let options = LoadOptions { device: where_to, act, quantize, kv, ..LoadOptions::default() };
    let inner = device::compute(py, || -> halfbyte_llm::Result<Inner> {
        let weights = Weights::open(&path)?;
        let model = Loaded::from_weights(Config::from_weights(&weights)?, &weights, &options)?;
        model.prepare(&|_, _| ())?;
        Ok(Inner { model, tokenizer: Tokenizer::from_weights(&weights)? })
    })?;
    Ok(Model { inner: Arc::new(inner), generation: device::generation(py) })
}

impl Model {
    /// Error: the model lies on a GPU of the process that this one was forked from.
    fn check_process(&self, py: Python<'_>) -> Result<()> {
        match self.inner.model.device() {
            Device::Cuda(_) if self.generation != device::generation(py) => device::alive(py),
            _ => Ok(()),
        }
    }

    fn ids(&self, prompt: Prompt) -> Result<Vec<u32>> {
        let Inner { model, tokenizer } = &*self.inner;
        let config = model.config();
        match prompt {
            Prompt::Text(text) => Ok(tokenizer.encode_prompt_within(&text, config.bos, config.spec.max_context)?),
            Prompt::Tokens(ids) => Ok(ids),
        }
    }
}

#[pymethods]
impl Model {
    /// Continues a prompt (text or tokens): an iterator over pieces of text as they are written, of whole characters.
    #[pyo3(signature = (prompt, *, max_tokens=128, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0,
        frequency_penalty=0.0, presence_penalty=0.0, seed=0,
                        stop=None, ignore_end=false))]
    #[expect(clippy::too_many_arguments, reason = "Python's options have names")]
    fn generate(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = number::prompt)] prompt: Prompt,
        #[pyo3(from_py_with = number::max_tokens)] max_tokens: usize,
        #[pyo3(from_py_with = number::temperature)] temperature: f32,
        #[pyo3(from_py_with = number::top_k)] top_k: usize,
        #[pyo3(from_py_with = number::top_p)] top_p: f32,
        #[pyo3(from_py_with = number::min_p)] min_p: f32,
        #[pyo3(from_py_with = number::repetition_penalty)] repetition_penalty: f32,
        #[pyo3(from_py_with = number::frequency_penalty)] frequency_penalty: f32,
        #[pyo3(from_py_with = number::presence_penalty)] presence_penalty: f32,
        #[pyo3(from_py_with = number::seed)] seed: u64,
        stop: Option<Stop>,
        #[pyo3(from_py_with = number::ignore_end)] ignore_end: bool,
    ) -> Result<Generation> {
        self.check_process(py)?;
        let ids = py.detach(|| self.ids(prompt))?;
        let sampling = Sampling {
            temperature,
            top_k,
            top_p,
            min_p,
            repetition_penalty,
            frequency_penalty,
            presence_penalty,
            seed,
        };
        // What is refused is refused here, not when the text is read.
        halfbyte_llm::Sampler::new(sampling)?;
        let config = self.inner.model.config();
        if ids.is_empty() {
            return Err(halfbyte_llm::Error::EmptyPrompt.into());
        }
        if let Some(&id) = ids.iter().find(|&&id| id as usize >= config.spec.vocab) {
            return Err(halfbyte_llm::Error::UnknownToken { id, vocab: config.spec.vocab }.into());
        }
        if ids.len() > config.spec.max_context {
            let (limit, got) = (config.spec.max_context, ids.len());
            return Err(halfbyte_llm::Error::ContextFull { limit, got }.into());
        }
        let stop = stop.map_or_else(Vec::new, |Stop(texts)| texts);
        StopFilter::check(&stop)?;
        let (send, pieces) = sync_channel(PIECES_AHEAD);
        let cancel = Arc::new(AtomicBool::new(false));
        let work = Work {
            inner: self.inner.clone(),
            cpu: device::cpu(py)?,
            ids,
            max_tokens,
            sampling,
            stop,
            ignore_end,
            cancel: cancel.clone(),
        };
        let thread = std::thread::Builder::new().name("halfbyte-generate".to_owned());
        let refused = |e| PyRuntimeError::new_err(format!("generate: no thread: {e}"));
        thread.spawn(move || work.run(&send)).map_err(refused)?;
        let pieces = Mutex::new(Some(pieces));
        Ok(Generation { pieces, cancel, state: Mutex::default(), generation: device::generation(py) })
    }

    /// Logits `[vocab]` after a prompt, as a numpy array of float32.
    fn logits<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = number::prompt)] prompt: Prompt,
    ) -> Result<Bound<'py, PyAny>> {
        self.check_process(py)?;
        let (ids, cpu) = (py.detach(|| self.ids(prompt))?, device::cpu(py)?);
        let logits = device::compute(py, || -> halfbyte_llm::Result<Vec<f32>> {
            let mut session = Session::new(&self.inner.model, &cpu, ids.len())?;
            Ok(session.prefill(&ids)?.to_vec())
        })?;
        Ok(numpy_array(py, &logits, &[logits.len()], DataType::F32)?)
    }

    /// Tokens of a text as a prompt has them.
    fn encode(&self, py: Python<'_>, text: &str) -> Result<Vec<u32>> {
        py.detach(|| self.ids(Prompt::Text(text.to_owned())))
    }

    /// Text of tokens. *Error:* ValueError: a token beyond the vocabulary.
    fn decode(&self, py: Python<'_>, #[pyo3(from_py_with = number::tokens)] tokens: Ids) -> Result<String> {
        let Ids(tokens) = tokens;
        let vocab = self.inner.model.config().spec.vocab;
        if let Some(&id) = tokens.iter().find(|&&id| id as usize >= vocab) {
            return Err(halfbyte_llm::Error::UnknownToken { id, vocab }.into());
        }
        Ok(py.detach(|| self.inner.tokenizer.decode(&tokens))?)
    }

    /// Where it lies.
    #[getter]
    fn device(&self) -> String {
        match self.inner.model.device() {
            Device::Cpu => Place::Cpu.to_string(),
            Device::Cuda(gpu) => Place::Cuda(gpu.gpu.context().info().index).to_string(),
        }
    }

    /// Number of weights, a tied head counted once.
    #[getter]
    fn parameters(&self) -> u64 {
        self.inner.model.parameters()
    }

    /// Bytes that the weights take.
    #[getter]
    fn nbytes(&self) -> usize {
        self.inner.model.weight_bytes()
    }

    /// Tokens that a text may have.
    #[getter]
    fn max_context(&self) -> usize {
        self.inner.model.config().spec.max_context
    }

    /// Size of the vocabulary.
    #[getter]
    fn vocab(&self) -> usize {
        self.inner.model.config().spec.vocab
    }

    /// What was odd about the checkpoint, and which reading was taken.
    #[getter]
    fn findings(&self) -> Vec<String> {
        self.inner.model.findings().iter().map(ToString::to_string).collect()
    }

    fn __repr__(&self) -> String {
        format!("Model({} parameters, {} bytes, device={})", self.parameters(), self.nbytes(), self.device())
    }
}

/// What a thread does that writes a text.
struct Work {
    inner: Arc<Inner>,
    cpu: Arc<Cpu>,
    ids: Vec<u32>,
    max_tokens: usize,
    sampling: Sampling,
    stop: Vec<String>,
    ignore_end: bool,
    cancel: Arc<AtomicBool>,
}

/// What it tells.
enum Told {
    Piece(Option<u32>, String),
    End(halfbyte_llm::Result<Finish>),
}

impl Work {
    fn run(&self, send: &SyncSender<Told>) {
        let finish = self.generate(send);
        // Nobody may be there any more who reads it.
        let _ = send.send(Told::End(finish));
    }

    fn generate(&self, send: &SyncSender<Told>) -> halfbyte_llm::Result<Finish> {
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
            cancel: Some(&self.cancel),
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
                    let finish = finish.map_err(Failure::from)?;
                    self.state().finish = Some(name_of(finish));
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

    /// Why it ended: length, end, stop, context or cancelled; None while it goes on.
    #[getter]
    fn finish_reason(&self) -> Option<&'static str> {
        self.state().finish
    }
}
