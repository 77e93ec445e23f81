//! The GPU part: what a machine without a GPU can show, and with one everything.
//!
//! Without a device, or without NVRTC, tests that need it say so and pass; `HALFBYTE_REQUIRE_CUDA=1` and
//! `HALFBYTE_REQUIRE_NVRTC=1` make them fail instead.

mod cache;
mod conv;
mod conv_depthwise;
mod conv_implicit;
mod conv_plans;
mod conversions;
mod convolutions;
mod dequantize;
mod driver;
mod edge_shapes;
mod folded_norm;
mod fpa_intb;
mod grouped;
mod int8;
mod int8_forms;
mod int8_narrow;
mod int8_plans;
mod library;
mod llm_int8;
mod matmul;
mod nn;
mod nvrtc;
mod ops;
mod pack;
mod parameters;
mod plans;
mod products;
mod quantized;
mod quantized_rows;
mod rounded_weights;
mod sums;
mod types_of_files;
mod types_of_x;
mod values;
mod wide;
mod wna16_mma;
mod wna8_mma;

use halfbyte::Float;
use halfbyte::cuda::nvrtc::Nvrtc;
use halfbyte::cuda::{Cuda, Gpu};
use std::io::Write;
use std::process::{Command, Output};
use std::sync::Arc;

/// All devices; none, said aloud, where there are none.
pub fn gpus() -> Vec<Gpu> {
    match Gpu::open(0) {
        Ok(first) => [first].into_iter().chain((1..Gpu::count()).map(|i| Gpu::open(i as u32).unwrap())).collect(),
        Err(why) => {
            skip("HALFBYTE_REQUIRE_CUDA", &format!("no GPU: {why}"));
            Vec::new()
        }
    }
}

/// A type of x, or f16 where tensor cores do not multiply it.
fn half_of(gpu: &Gpu, x: Float) -> Float {
    if gpu.caps().arch.multiplies(x) { x } else { Float::F16 }
}

/// A queue of every device, as layers run in it.
pub fn queues() -> Vec<Cuda> {
    let queue = |gpu: Gpu| {
        let stream = gpu.stream().unwrap();
        Cuda::new(Arc::new(gpu), stream).unwrap()
    };
    gpus().into_iter().map(queue).collect()
}

fn nvrtc() -> Option<&'static Nvrtc> {
    match Nvrtc::open() {
        Ok(nvrtc) => Some(nvrtc),
        Err(why) => {
            skip("HALFBYTE_REQUIRE_NVRTC", &format!("no NVRTC: {why}"));
            None
        }
    }
}

/// Says what is skipped, past the harness that keeps the output of tests that pass.
fn skip(required: &str, why: &str) {
    assert!(std::env::var(required).map_or(true, |value| value != "1"), "{required}=1, but {why}");
    let test = std::thread::current().name().unwrap_or("a test").to_owned();
    let why = why.lines().next().unwrap_or_default();
    let _ = std::io::stderr().write_all(format!("skipped: {test}: {why}\n").as_bytes());
}

const CHILD: &str = "HALFBYTE_TEST_CHILD";

/// Whether this process was started by [`in_child`].
pub fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

/// Runs one test of this binary in a process of its own, with these environment variables: they are read once, or what is
/// done to a device cannot be undone.
fn child(test: &str, environment: &[(&str, &str)]) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture", "--test-threads=1"]);
    command.env(CHILD, "1").envs(environment.iter().copied());
    command
}

pub fn in_child(test: &str, environment: &[(&str, &str)]) {
    passed(test, child(test, environment).output().unwrap());
}

fn passed(test: &str, output: Output) {
    let text = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
    assert!(output.status.success() && text.contains("1 passed"), "{test}: {}\n{text}", output.status);
}
