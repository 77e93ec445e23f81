//! Tests of the crate through its public interface.

mod awq;
mod compressed_tensors;
mod config;
mod convert;
mod folder;
mod gguf;
mod gptq;
mod inspect;
mod malicious;
mod onnx;
mod onnx_malformed;
mod safetensors;
mod support;
