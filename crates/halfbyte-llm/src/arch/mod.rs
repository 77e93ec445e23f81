//! Architectures as data: a table, and a file each that turns a `config.json` into a [`Spec`].
//!
//! Nothing here knows of devices, ranks or formats: the decoder runs a [`Spec`] on every device, in every format.
//! CONTRIBUTING.md has the recipe for another one.

mod bloom;
mod experts;
mod gemma2;
mod gemma3;
mod gpt_neox;
mod gpt_oss;
mod llama;
mod mistral;
mod mixtral;
mod phi3;
mod qwen2;
mod qwen3;
mod qwen3_moe;
mod rename;
mod rope;
mod sizes;
pub mod spec;
mod windows;

pub use spec::Spec;

use crate::config::Fields;
use crate::error::Result;

/// An architecture, as checkpoints name it.
#[derive(Clone, Copy, Debug)]
pub struct Architecture {
    /// Its name in `architectures` of `config.json`.
    pub architecture: &'static str,
    /// Its name in `model_type`.
    pub model_type: &'static str,
    /// What a configuration says of it. Errors, each naming the field: a wrong type, a missing size, sizes that are zero,
    /// absurd or do not divide, an activation function, rope type or other property that is not supported.
    pub spec: fn(&Fields<'_>) -> Result<Spec>,
}

/// Every architecture that can run.
pub static ARCHITECTURES: &[Architecture] = &[
    bloom::ARCHITECTURE,
    gemma2::ARCHITECTURE,
    gemma3::ARCHITECTURE,
    gpt_neox::ARCHITECTURE,
    gpt_oss::ARCHITECTURE,
    llama::ARCHITECTURE,
    mistral::ARCHITECTURE,
    mixtral::ARCHITECTURE,
    phi3::ARCHITECTURE,
    qwen2::ARCHITECTURE,
    qwen3::ARCHITECTURE,
    qwen3_moe::ARCHITECTURE,
];
