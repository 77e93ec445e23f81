//! Tests of the crate through its public interface.

mod awq;
mod compressed_tensors;
mod config;
mod folder;
mod gguf;
mod gptq;
mod inspect;
mod malicious;
mod safetensors;
mod support;
