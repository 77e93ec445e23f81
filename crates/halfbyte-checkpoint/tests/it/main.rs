//! Tests of the crate through its public interface.

mod config;
mod folder;
mod gptq;
mod inspect;
mod malicious;
mod safetensors;
mod support;
