//! Tests of the library through its public interface, one binary.

mod awq;
mod conv;
mod conv_int8;
mod cpu;
mod cuda;
mod data;
mod drift;
mod express;
mod format;
mod fpa_intb;
mod golden;
mod gptq;
mod int8;
mod layout;
mod like_terms;
mod matmul;
mod ops;
mod quantize;
mod random;
mod refine;
mod residual_network;
#[cfg(target_os = "linux")]
mod short_memory;
mod sizes;
mod tidy;
