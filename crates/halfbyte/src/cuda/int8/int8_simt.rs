//! Direct convolution and product of bytes on the scalar units (SIMT), any layer: launches of `int8_simt.cu`, what faster kernels are
//! compared with.

use super::{Call, Int8, Kernel, OP, Place, Problem, Rounding};
use crate::cuda::conv::images::Images;
use crate::cuda::dispatch::{About, Bind, Configured};
use crate::cuda::driver::{Buffer, Launch, Stream};
use crate::cuda::parameters::{Flat, Parameters, float_type, parameters};
use crate::cuda::sources::{Instance, Source};
use crate::cuda::{Caps, Gpu};
use crate::error::Result;
use crate::format::int8::Byte;
use crate::kernel::Reason;
use crate::layout::cuda_int8::STEP;

static SOURCE: Source =
    Source { path: "int8/int8_simt.cu", text: include_str!("int8_simt.cu"), parameters: &[Params::LAYOUT] };

pub(super) const KERNEL: Kernel = Kernel::with_one(
    About {
        name: "int8_simt",
        what: "a thread an output, integer multiply-add, every geometry, layout and processor",
        serves: |arch| arch.number >= 75,
        instances: || vec![instance()],
    },
    choose,
);

/// As in the source: threads of a block, and pixels of a thread.
const THREADS: usize = 256;
const PIXELS: usize = 4;

parameters! {
    /// As in the source.
    struct Params {
        images: Images,
        x: u64,
        w: u64,
        zeros: u64,
        bias: u64,
        scales: u64,
        float_bias: u64,
        y: u64,
        pixels: u64,
        n: u64,
        steps: u32,
        x_unsigned: u32,
        rounding: Flat<Rounding>,
        bytes: u32,
        y_type: u32,
        activation: u32,
        unused: u32,
    }
}

fn instance() -> Instance {
    Instance::new(&SOURCE, "int8_plain")
}

fn blocks(problem: &Problem) -> usize {
    let tasks = problem.shape.output_pixels().div_ceil(PIXELS).saturating_mul(problem.shape.geometry().co);
    tasks.div_ceil(THREADS)
}

fn choose(_: &Caps, problem: &Problem) -> Bind<Int8> {
    let g = problem.shape.geometry();
    if [blocks(problem), g.ci, g.co, g.k()].iter().any(|&size| size > i32::MAX as usize) {
        return Err(Reason("more channels or blocks than 31 bits count".into()));
    }
    Ok(Box::new(Direct { problem: *problem }))
}

/// A thread for some pixels of an output.
struct Direct {
    problem: Problem,
}

impl Configured<Int8> for Direct {
    fn text(&self) -> String {
        format!("{PIXELS} pixels of an output a thread")
    }

    fn instances(&self) -> Vec<Instance> {
        vec![instance()]
    }

    fn run(&self, gpu: &Gpu, stream: &Stream, call: Call<'_>) -> Result<()> {
        let problem = &self.problem;
        let (layer, g) = (call.layer, problem.shape.geometry());
        let y = Place::of(&call.y);
        let (activation, rounding) = layer.function(problem.floats);
        let pointer = |buffer: &Option<Buffer<i32>>| buffer.as_ref().map_or(0, Buffer::pointer);
        let params = Params {
            images: Images::new(OP, &problem.shape, problem.layouts)?,
            x: call.x.pointer(),
            w: layer.codes.pointer(),
            zeros: pointer(&layer.zeros),
            bias: pointer(&layer.bias),
            scales: layer.scales.pointer(),
            float_bias: layer.float_bias.as_ref().map_or(0, Buffer::pointer),
            y: y.address,
            pixels: problem.shape.output_pixels() as u64,
            n: g.co as u64,
            steps: g.k().div_ceil(STEP) as u32,
            x_unsigned: (layer.x().byte() == Byte::U8).into(),
            rounding: Flat(rounding),
            bytes: y.floats.is_none().into(),
            y_type: y.floats.map_or(0, float_type),
            activation,
            unused: 0,
        };
        let launch = Launch::linear(blocks(problem) as u32, THREADS as u32);
        // Blocks are within the limit, as `choose` has checked.
        gpu.function_once(("int8 simt", [0; 2]), instance)?.launch_typed(stream, &launch, &params, &[])
    }
}
