//! Tokens in, tokens out: language models on int weights.
//!
//! The modules in the order in which data passes them:
//!
//! ```text
//! config.json ─config─┐
//! *.safetensors ──────┴▶ models (graph + packed weights) ─▶ engine (KV cache) ─▶ sampling ─▶ generate ─▶ text
//! text ──tokenizer──▶ token ids ────────────────────────────▲      └─▶ eval (perplexity, divergence, logits)
//! ```
//!
//! Beside that, `calibrate` runs a model block by block to quantise it. Where a model lies and computes, in memory or on a
//! GPU, is [`LoadOptions::device`]; nothing after it looks different.
//!
//! ```no_run
//! use halfbyte::cpu::Cpu;
//! use halfbyte_llm::{LoadOptions, Model, Request, Sampling, Session, Tokenizer};
//! use std::{ops::ControlFlow, path::Path};
//!
//! # fn main() -> halfbyte_llm::Result<()> {
//! let folder = Path::new("models/stdlib-11m");
//! let (cpu, tokenizer) = (Cpu::all_threads()?, Tokenizer::from_folder(folder)?);
//! let model = Model::load(folder, &LoadOptions::default())?;
//! let prompt = tokenizer.encode_prompt("def ", model.config().bos)?;
//! let mut session = Session::new(&model, &cpu, prompt.len() + 64)?;
//! let request = Request {
//!     prompt: &prompt,
//!     max_tokens: 64,
//!     sampling: Sampling::default(),
//!     end_tokens: &model.config().eos,
//!     stop: &[],
//!     cancel: None,
//! };
//! session.generate(&tokenizer, &request, &mut |text| {
//!     print!("{text}");
//!     ControlFlow::Continue(())
//! })?;
//! # Ok(())
//! # }
//! ```
#![deny(unsafe_code)]

pub mod calibrate;
pub mod config;
pub mod device;
pub mod engine;
pub mod error;
pub mod eval;
pub mod generate;
pub mod models;
pub mod sampling;
mod stop;
pub mod tokenizer;
pub mod weights;
mod weights_cuda;

pub use config::Config;
pub use device::Device;
pub use engine::{Model, Session};
pub use error::{Error, Result};
pub use generate::{Finish, Generated, Request};
pub use sampling::{Sampler, Sampling};
pub use tokenizer::Tokenizer;
pub use weights::LoadOptions;
