//! Tests of the library through its public interface, one binary.

mod awq;
mod conv;
mod cuda;
mod data;
mod drift;
mod express;
mod format;
mod gptq;
mod layout;
mod matmul;
mod quantize;
mod refine;
mod tidy;
