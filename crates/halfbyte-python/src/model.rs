//! `Model`: a language model on a device.

use crate::checkpoint::act_of;
use crate::device;
use crate::error::{Result, invalid};
use crate::generation::{Generation, Work};
use crate::number::{self, Ids};
use crate::tensor::{DataType, Place, numpy_array};
use halfbyte::kernel::KvType;
use halfbyte::quantize::Rtn;
use halfbyte::{Act, Float, Format};
use halfbyte_checkpoint::{self as checkpoint, Weights, linears};
use halfbyte_llm::stop::StopFilter;
use halfbyte_llm::{Config, Device, LoadOptions, Model as Loaded, Sampling, Session, Tokenizer, device::Gpu};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyString;
use std::path::PathBuf;
use std::sync::Arc;

/// A language model: its weights on a device, its tokenizer.
#[pyclass(frozen, module = "halfbyte")]
#[derive(Debug)]
pub struct Model {
    inner: Arc<Inner>,
    generation: u32,
}

/// What a text is written by.
#[derive(Debug)]
pub struct Inner {
    /// The model.
    pub model: Loaded,
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
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

/// Error: an option that would change nothing for a model: a format where it is quantised, activations of 8 bits where it is not.
fn refuse_useless(weights: &Weights, format: Option<Format>, act: Option<Act>) -> checkpoint::Result<()> {
    if format.is_none() && !act.is_some_and(Act::is_quantized) {
        return Ok(());
    }
    let quantized = linears(weights)?.iter().any(|linear| linear.source.is_some());
    let (expected, got) = match (format, act) {
        (Some(format), _) if quantized => (
            "no format for a model that is quantised already",
            format!("{format} for {}", weights.checkpoint().path().display()),
        ),
        (None, Some(_)) if !quantized => (
            "act a8 or a8-xasym with a model that is quantised, or with a format to round it to",
            format!("it with the floats of {}", weights.checkpoint().path().display()),
        ),
        _ => return Ok(()),
    };
    Err(checkpoint::Error::Invalid { op: "load", expected: expected.to_owned(), got })
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
    let applied = format.map(|format| format.act).or(act).unwrap_or(Act::A16);
    let place = device.filter(|device| !device.is_none()).map_or(Ok(Place::Cpu), device::place_of)?;
    let where_to = match place {
        Place::Cpu => Device::Cpu,
        Place::Cuda(index) => {
            let gpu = device::gpu(py, index)?;
            let activations = if applied == Act::A32 { Float::F32 } else { Float::F16 };
            Device::Cuda(Gpu { gpu, activations, fused: true, persistent: true })
        }
    };
    let rtn = Rtn { search, ..Rtn::default() };
    let quantize = format.map(|format| (format.weight, rtn));
    let kv = kv.map(kv_of).transpose()?;
    let options = LoadOptions { device: where_to, act: applied, quantize, kv, ..LoadOptions::default() };
    let inner = device::compute(py, || -> halfbyte_llm::Result<Inner> {
        let weights = Weights::open(&path)?;
        refuse_useless(&weights, format, act)?;
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
        Work { inner: self.inner.clone(), cpu: device::cpu(py)?, ids, max_tokens, sampling, stop, ignore_end }.begin(py)
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
