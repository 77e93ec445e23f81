//! Tests of the crate through its public interface.

mod awq;
mod bitsandbytes;
mod compressed_tensors;
mod config;
mod convert;
mod crash;
mod cuda;
mod files;
mod folder;
mod fpa_intb;
mod gguf;
mod gptq;
mod inspect;
mod labels;
mod malicious;
mod marlin;
mod memory;
mod modelopt;
mod mxfp4;
mod names;
mod native;
mod onnx;
mod onnx_malformed;
mod pytorch;
mod safetensors;
mod support;
