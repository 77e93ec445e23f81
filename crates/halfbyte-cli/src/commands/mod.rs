//! The subcommands, one file each.

pub mod bench;
pub mod completions;
pub mod convert;
pub mod demo;
pub mod dequantize;
pub mod doctor;
pub mod eval;
pub mod explain;
pub mod inspect;
pub mod quantize;
pub mod run;
pub mod serve;
pub mod verify;
