//! A model as it is served: its name, its words, and the engine that writes.

use crate::engine::Engine;
use crate::error::{ApiError, Error, Result};
use crate::grammar::Grammars;
use crate::tools::ToolForm;
use halfbyte::cpu::Cpu;
use halfbyte_llm::chat::ChatTemplate;
use halfbyte_llm::schedule::{Options, Queue};
use halfbyte_llm::tokenizer::TokenBytes;
use halfbyte_llm::{Device, Model, Tokenizer};
use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

/// A model with what clients need of it.
#[derive(Debug)]
pub struct Served {
    /// What clients call it.
    pub name: String,
    /// Seconds since 1970 when it was begun.
    pub created: u64,
    pub(crate) tokenizer: Tokenizer,
    pub(crate) template: Option<ChatTemplate>,
    /// What begins a prompt that no template wrote.
    pub(crate) bos: Option<u32>,
    /// Each ends a text.
    pub(crate) end_tokens: Vec<u32>,
    /// How it writes calls of tools, if that is known.
    pub(crate) tool_form: Option<ToolForm>,
    pub(crate) engine: Engine,
    vocab: usize,
    device: Device,
    grammars: OnceLock<std::result::Result<Grammars, String>>,
    tokens: OnceLock<std::result::Result<Vec<TokenBytes>, String>>,
}

impl Served {
    /// Begins to serve a model: `cpu` computes if it lies in memory, and may be shared with other models. Errors: options of zero, memory
    /// that is short, a name that is none.
    pub fn start(
        name: &str,
        model: Model,
        tokenizer: Tokenizer,
        template: Option<ChatTemplate>,
        cpu: Arc<Cpu>,
        options: Options,
    ) -> Result<Self> {
        if name.is_empty() || name.len() > 200 || name.chars().any(char::is_control) {
            let expected = "1 to 200 bytes, without control characters".to_owned();
            return Err(Error::Settings { what: "the name of a model", expected, got: format!("{name:?}") });
        }
        let config = model.config();
        let (bos, vocab, device) = (config.bos, config.spec.vocab, model.device().clone());
        let mut end_tokens = config.eos.clone();
        // Where a template names another, a turn ends with it.
        let of_template = template.as_ref().and_then(|template| tokenizer.id(template.tokens().eos.as_deref()?));
        end_tokens.extend(of_template.filter(|id| !config.eos.contains(id)));
        let tool_form = template.as_ref().and_then(|template| ToolForm::of(&template.source(true)));
        let engine = Engine::start(name, Arc::new(model), cpu, options)?;
        Ok(Self {
            name: name.to_owned(),
            created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            // Texts are cut by as many threads as there are requests, of words that clients think of.
            tokenizer: tokenizer.without_memory(),
            template,
            bos,
            end_tokens,
            tool_form,
            engine,
            vocab,
            device,
            grammars: OnceLock::new(),
            tokens: OnceLock::new(),
        })
    }

    /// Tokens that a prompt and its answer may have together; the last one of an answer comes on top, as nobody reads it.
    pub fn context(&self) -> usize {
        self.engine.queue().map_or(0, |queue| queue.longest_prompt())
    }

    /// Tokens that it knows.
    pub(crate) fn vocab(&self) -> usize {
        self.vocab
    }

    pub(crate) fn queue(&self) -> std::result::Result<Queue, ApiError> {
        self.engine.queue().ok_or_else(|| ApiError::unavailable("The server is shutting down."))
    }

    /// What makes grammars for its vocabulary. Error, as a text: it has none that one could follow.
    pub(crate) fn grammars(&self) -> std::result::Result<&Grammars, String> {
        let make = || Grammars::new(&self.tokenizer, &self.end_tokens, self.vocab).map_err(|e| e.to_string());
        self.grammars.get_or_init(make).as_ref().map_err(Clone::clone)
    }

    /// The name of a token and its bytes, as they are told with its logarithm.
    pub(crate) fn token(&self, id: u32) -> (String, Option<Vec<u8>>) {
        let make = || self.tokenizer.bytes_of_tokens().map_err(|e| e.to_string());
        let known = self.tokens.get_or_init(make).as_ref().ok().and_then(|tokens| tokens.get(id as usize));
        match known {
            Some(TokenBytes { bytes, .. }) => (String::from_utf8_lossy(bytes).into_owned(), Some(bytes.clone())),
            None => (self.tokenizer.token(id).unwrap_or_default(), None),
        }
    }

    /// Bytes of its GPU's memory that are free, and all of them.
    pub(crate) fn gpu_memory(&self) -> Option<[usize; 2]> {
        match &self.device {
            Device::Cpu => None,
            Device::Cuda(gpu) => gpu.gpu.context().memory().ok(),
        }
    }
}
