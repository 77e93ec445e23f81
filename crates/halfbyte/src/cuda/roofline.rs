//! What a device can do at most, as measurements need it: reading memory, random halfs in it, and launches.

use super::Gpu;
use super::driver::{Arg, FloatViewMut, Function, Launch, Stream, View, ViewMut};
use super::sources::{Instance, Source};
use crate::error::{Error, Result};
use crate::tensor::Float;
use half::f16;

static SOURCE: Source = Source { path: "roofline.cu", text: include_str!("roofline.cu"), parameters: &[] };

/// As in the source.
const THREADS: u32 = 512;

const NAMES: [&str; 4] = ["read", "normal", "uniform", "nothing"];

/// Every instance that may be launched.
pub fn instances() -> Vec<Instance> {
    NAMES.map(|name| Instance::new(&SOURCE, name)).into()
}

/// The kernels, loaded.
#[derive(Debug)]
pub struct Roofline {
    read: Function,
    normal: Function,
    uniform: Function,
    nothing: Function,
    form: Launch,
    /// As products are launched.
    overlapping: Launch,
}

impl Roofline {
    /// Loads them. Errors: those of [`Gpu::function`].
    pub fn new(gpu: &Gpu) -> Result<Self> {
        let [read, normal, uniform, nothing] = NAMES.map(|name| gpu.function(&Instance::new(&SOURCE, name)));
        let form = Launch::linear(4 * gpu.caps().multiprocessors, THREADS);
        Ok(Self {
            read: read?,
            normal: normal?,
            uniform: uniform?,
            nothing: nothing?,
            form,
            overlapping: gpu.overlapping(form),
        })
    }

    /// Reads memory from one end to the other, in the queue; whole pieces of 16 bytes of it.
    pub fn read(&self, stream: &Stream, from: View<'_, u8>, sink: &mut ViewMut<'_, u32>) -> Result<()> {
        if sink.is_empty() || !from.pointer().is_multiple_of(16) {
            let got = format!("{} and {:#x}", sink.len(), from.pointer());
            return Err(Error::invalid("read memory", "room for a number, and pieces of 16 bytes", got));
        }
        let (pointer, pieces, sink) = (from.pointer(), from.len() as u64 / 16, sink.pointer());
        self.launch(stream, &self.read, self.form, &[Arg::new(&pointer), Arg::new(&pieces), Arg::new(&sink)])
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
        self.launch(stream, &self.normal, self.form, &args)
    }

    /// Fills memory with uniform numbers `(b − 32767.5) · step`, in the queue: b are the halves of the words that have the numbers
    /// from `first` on. The same come out on every device.
    pub fn uniform(&self, stream: &Stream, to: &mut ViewMut<'_, f16>, step: f32, first: u64) -> Result<()> {
        let (pointer, len) = (to.pointer(), to.len() as u64);
        let args = [Arg::new(&pointer), Arg::new(&len), Arg::new(&first), Arg::new(&step)];
        self.launch(stream, &self.uniform, self.form, &args)
    }

    /// Puts a kernel that does nothing into the queue, as products are launched: what the driver takes for each of their launches.
    pub fn nothing(&self, stream: &Stream) -> Result<()> {
        self.launch(stream, &self.nothing, self.overlapping, &[])
    }

    fn launch(&self, stream: &Stream, function: &Function, form: Launch, args: &[Arg<'_>]) -> Result<()> {
        // SAFETY: each caller gives the parameters of its kernel, which writes within what it is told of.
        unsafe { function.launch(stream, &form, args) }
    }
}
