//! Who multiplies on a CPU: the team of threads, the instruction sets, and the kernels.

pub mod attention;
pub mod conv;
mod disjoint;
pub mod int8;
pub mod isa;
mod lanes;
pub mod matmul;
pub mod nn;
#[doc(hidden)]
pub mod pack;
mod patches;
#[doc(hidden)]
pub mod roofline;
mod scratch;
pub mod threads;
mod transpose;
#[cfg(target_arch = "x86_64")]
mod x86;

use crate::error::{Error, Result};
use isa::Caps;
use scratch::Kept;
use std::cell::RefCell;
use threads::Threads;

thread_local! {
    static SCRATCH: RefCell<matmul::Scratch> = RefCell::default();
    static CONV_SCRATCH: RefCell<conv::Scratch> = RefCell::default();
}

/// A CPU as a device: a team of threads and what the processor offers.
#[derive(Debug)]
pub struct Cpu {
    threads: Threads,
    caps: Caps,
    /// Bytes ahead that kernels prefetch a stream of weights; 0: the processor brings it by itself.
    stream_ahead: usize,
    scratch: Kept<matmul::Scratch>,
    conv_scratch: Kept<conv::Scratch>,
}

impl Cpu {
    /// A team of `threads` threads (at least 1) with the best instruction set found, within what `HALFBYTE_ISA` allows. Errors: the
    /// variable names none, or one that the processor does not reach; the system starts no more threads.
    pub fn new(threads: usize) -> Result<Self> {
        Self::with_caps(threads, Caps::detect_within_environment()?)
    }

    /// As many threads as the system offers to this process. Errors: as [`Cpu::new`].
    pub fn all_threads() -> Result<Self> {
        Self::new(std::thread::available_parallelism().map_or(1, usize::from))
    }

    /// A team restricted to given capabilities. Errors: the processor does not have them; the system starts no more threads.
    pub fn with_caps(threads: usize, caps: Caps) -> Result<Self> {
        let found = Caps::detect().limited_to(caps.isa)?;
        if caps.bf16_dot && !found.bf16_dot {
            let cause = "expected a processor with bf16 dot products faster than f32 multiply-adds, got one without";
            return Err(Error::Device { op: "cpu", cause: format!("{cause} in {}", found.isa.name()) });
        }
        let caps = Caps { bf16_dot: caps.bf16_dot, ..found };
        let threads = Threads::new(threads).map_err(|e| Error::Device {
            op: "cpu",
            cause: format!("expected a team of {threads} threads, got {e}"),
        })?;
        let stream_ahead = isa::stream_ahead();
        let (scratch, conv_scratch) = (Kept::new(&SCRATCH), Kept::new(&CONV_SCRATCH));
        Ok(Self { threads, caps, stream_ahead, scratch, conv_scratch })
    }

    /// The team.
    pub fn threads(&self) -> &Threads {
        &self.threads
    }

    /// What the processor offers, as far as this device uses it.
    pub fn caps(&self) -> Caps {
        self.caps
    }
}
