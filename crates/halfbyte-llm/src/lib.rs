//! Tokens in, tokens out: language models on int weights.
//!
//! The modules in the order in which data passes them:
//!
//! ```text
//! config.json ──config, arch──▶ Spec ─┐
//! *.safetensors ──load, shard─────────┴▶ decoder (on a device) ─▶ engine ─▶ sampling ─▶ generate ─▶ text
//! text ──tokenizer──▶ token ids ─────────────────────────────────▲   └─▶ eval (perplexity, divergence, logits)
//! ```
//!
//! An architecture is data, a [`Spec`]; one decoder runs it wherever the weights lie, in memory or on a GPU
//! ([`LoadOptions::device`]), whole or a part on each of several ranks ([`LoadOptions::comm`]). Beside that, `calibrate` runs
//! the same decoder block by block to quantise a model.
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

pub mod arch;
pub mod calibrate;
pub mod chat;
pub mod check;
pub mod comm;
pub mod config;
mod decoder;
pub mod device;
pub mod engine;
pub mod error;
pub mod eval;
pub mod explain;
pub mod generate;
pub mod load;
pub mod profile;
mod random;
pub mod sampling;
pub mod schedule;
pub mod shard;
pub mod stop;
pub mod tokenizer;

pub use arch::Spec;
pub use config::Config;
pub use device::Device;
pub use engine::{Model, Session};
pub use error::{Error, Result};
pub use generate::{Finish, Generated, Piece, Request};
pub use halfbyte::kernel::KvType;
pub use load::LoadOptions;
pub use random::RandomWeights;
pub use sampling::{Constraint, LogProb, LogProbs, Sampler, Sampling};
pub use tokenizer::Tokenizer;

/// The examples of the guide, compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/guide-rust.md")]
pub struct Guide;
