//! What a device can do at most, as measurements need it: reading memory, and random halfs in it.

use super::Gpu;
use super::driver::{Arg, FloatViewMut, Function, Launch, Stream, View, ViewMut};
use super::sources::{Instance, Source};
use crate::error::{Error, Result};
use crate::tensor::Float;

static SOURCE: Source = Source { path: "roofline.cu", text: include_str!("roofline.cu"), parameters: &[] };

/// As in the source.
const THREADS: u32 = 512;

/// Every instance that may be launched.
pub fn instances() -> Vec<Instance> {
    ["read", "normal"].map(|name| Instance::new(&SOURCE, name)).into()
}

/// The kernels, loaded.
#[derive(Debug)]
pub struct Roofline {
    read: Function,
    normal: Function,
    blocks: u32,
}

impl Roofline {
    /// Loads them. Errors: those of [`Gpu::function`].
    pub fn new(gpu: &Gpu) -> Result<Self> {
        let [read, normal] = ["read", "normal"].map(|name| gpu.function(&Instance::new(&SOURCE, name)));
        Ok(Self { read: read?, normal: normal?, blocks: 4 * gpu.caps().multiprocessors })
    }

    /// Reads memory from one end to the other, in the queue; whole pieces of 16 bytes of it.
    pub fn read(&self, stream: &Stream, from: View<'_, u8>, sink: &mut ViewMut<'_, u32>) -> Result<()> {
        if sink.is_empty() || !from.pointer().is_multiple_of(16) {
            let got = format!("{} and {:#x}", sink.len(), from.pointer());
            return Err(Error::invalid("read memory", "room for a number, and pieces of 16 bytes", got));
        }
        let (pointer, pieces, sink) = (from.pointer(), from.len() as u64 / 16, sink.pointer());
        self.launch(stream, &self.read, &[Arg::new(&pointer), Arg::new(&pieces), Arg::new(&sink)])
    }

    /// Fills memory with normal numbers of a deviation, in the queue. Error: a type of 32 bits.
    pub fn normal(&self, stream: &Stream, to: &mut FloatViewMut<'_>, deviation: f32, seed: u32) -> Result<()> {
        let dtype: u32 = match to.dtype() {
            Float::F16 => 0,
            Float::BF16 => 1,
            Float::F32 => return Err(Error::invalid("normal numbers", "f16 or bf16", "f32")),
        };
        let (pointer, len) = (to.pointer(), to.len() as u64);
        let args = [Arg::new(&pointer), Arg::new(&len), Arg::new(&seed), Arg::new(&deviation), Arg::new(&dtype)];
        self.launch(stream, &self.normal, &args)
    }

    fn launch(&self, stream: &Stream, function: &Function, args: &[Arg<'_>]) -> Result<()> {
        // SAFETY: each caller gives the parameters of its kernel, which writes within what it is told of.
        unsafe { function.launch(stream, &Launch::linear(self.blocks, THREADS), args) }
    }
}
