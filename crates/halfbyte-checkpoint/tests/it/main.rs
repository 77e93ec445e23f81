//! Tests of the crate through its public interface.

mod awq;
mod bitsandbytes;
mod compressed_tensors;
mod config;
mod folder;
mod gptq;
mod inspect;
mod labels;
mod malicious;
mod marlin;
mod safetensors;
mod support;
