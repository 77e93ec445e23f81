//! Direct convolution on the scalar units (SIMT), any geometry from any layout: launches of `simt.cu`, what faster kernels are
//! compared with.

use super::columns::Columns;
use super::images::Images;
use super::weights::{DENSE, Kind};
use super::{Call, Convolution, Kernel, OP, Problem, quantize_pixels};
use crate::conv::Layout2d;
use crate::cuda::dispatch::{About, Bind, Configured};
use crate::cuda::driver::{FloatView, Launch, Stream};
use crate::cuda::matmul::{self, Packed};
use crate::cuda::parameters::{Parameters, float_type, parameters};
use crate::cuda::sources::{Instance, Source};
use crate::cuda::{Caps, Gpu};
use crate::error::Result;
use crate::format::Act;
use crate::kernel::Reason;

static SOURCE: Source = Source { path: "conv/simt.cu", text: include_str!("simt.cu"), parameters: &[Params::LAYOUT] };

pub(super) const KERNEL: Kernel = Kernel::with_one(
    About {
        name: "simt",
        what: "a thread an output, f32 multiply-add, every geometry, format, layout and processor",
        serves: |arch| arch.number >= 75,
        instances: || {
            let codes = [[1, 2], [1, 4], [1, 8], [2, 2], [2, 3], [2, 4], [2, 8]];
            let all = [[0, 0]].into_iter().chain(codes).map(|[layout, bits]| instance(layout, bits));
            all.chain(quantize_pixels::instances()).collect()
        },
    },
    choose,
);

/// The layout of weights that all groups of a convolution share.
pub(super) const PLAIN: &str = "cuda_plain";

/// As in the source: threads of a block, and output pixels of a thread.
const THREADS: usize = 256;
const PIXELS: usize = 4;

parameters! {
    /// As in `include/conv_weights.cuh`.
    pub(super) struct Weight {
        codes: u64,
        scales: u64,
        zeros: u64,
        n: u64,
        k: u64,
        group: u32,
        middle: u32,
        dtype: u32,
        zero_kind: u32,
    }

    /// As in the source.
    struct Params {
        images: Images,
        w: Weight,
        x: u64,
        bias: u64,
        y: u64,
        pixels: u64,
        first: u64,
        x_type: u32,
        y_type: u32,
        activation: u32,
        low: f32,
        high: f32,
        of_row: u32,
        of_position: u32,
        of_group: u32,
        outputs: u64,
    }
}

/// The layout's number in the source, and the bits of a code's place.
fn instance(layout: u32, bits: u32) -> Instance {
    Instance::new(&SOURCE, format!("conv_plain<{layout}, {bits}>"))
}

/// Threads for so many outputs of every pixel.
fn tasks(problem: &Problem, outputs: usize) -> usize {
    problem.shape.output_pixels().div_ceil(PIXELS).saturating_mul(outputs)
}

fn choose(_: &Caps, problem: &Problem) -> Bind<Convolution> {
    let g = problem.shape.geometry();
    let act = problem.format.map(|format| format.act).filter(|act| act.is_quantized());
    let scales = act.is_some() && !quantize_pixels::counts(&problem.shape);
    let blocks = tasks(problem, g.co).div_ceil(THREADS) > i32::MAX as usize;
    if blocks || scales || [g.ci, g.co, g.k()].iter().any(|&size| size > i32::MAX as usize) {
        return Err(Reason("more channels or blocks than 31 bits count".into()));
    }
    Ok(Box::new(Direct { problem: *problem, act }))
}

/// A thread for some pixels of an output.
struct Direct {
    problem: Problem,
    /// How images are quantised, if they are.
    act: Option<Act>,
}

impl Direct {
    /// The convolution itself, by the layout of the weight.
    fn instance(&self) -> Instance {
        let bits = self.problem.format.map_or(0, |format| format.weight.bits);
        match self.problem.packed {
            DENSE => instance(0, 0),
            PLAIN => instance(1, if bits == 3 { 4 } else { bits }),
            _ => instance(2, bits),
        }
    }
}

/// A part of a weight, with the numbers of its instance.
fn weight(part: &Packed) -> (Weight, [u32; 2]) {
    let ([n, k], format) = (part.shape(), part.format().weight);
    let [n, k] = [n as u64, k as u64];
    let (middle, zero_kind) = (format.middle(), matmul::zero_kind(format.zero));
    match part {
        Packed::Plain(w) => {
            let w = w.parts();
            let (group, dtype) = (w.group, w.scale_type);
            let weight =
                Weight { codes: w.codes, scales: w.scales, zeros: w.zeros, n, k, group, middle, dtype, zero_kind };
            (weight, [1, w.field_bits])
        }
        Packed::Wna16(w) => {
            let atom = w.atom();
            let (group, dtype) = (atom.group as u32, float_type(atom.scale));
            let middle = middle.wrapping_add_signed(-atom.base(format));
            let weight = Weight { codes: w.atoms(), scales: w.rows(), zeros: 0, n, k, group, middle, dtype, zero_kind };
            (weight, [2, atom.bits])
        }
    }
}

/// The parts of a call's weight, each with the numbers of its instance.
pub(super) fn weights(call: &Call<'_>) -> Vec<(Weight, [u32; 2])> {
    match &call.w.kind {
        Kind::Quantized(parts) => parts.iter().map(weight).collect(),
        Kind::Dense(floats) => {
            let (view, g): (FloatView<'_>, _) = (floats.view(0..floats.len()), call.w.geometry());
            let dtype = float_type(view.dtype());
            let (n, k) = (g.co as u64, g.k() as u64);
            let none = Weight { codes: 0, scales: 0, zeros: 0, n, k, group: 1, middle: 0, dtype, zero_kind: 0 };
            vec![(Weight { codes: view.pointer(), ..none }, [0; 2])]
        }
    }
}

impl Configured<Convolution> for Direct {
    fn text(&self) -> String {
        format!("{PIXELS} pixels of an output a thread")
    }

    fn instances(&self) -> Vec<Instance> {
        self.act.map(quantize_pixels::instance).into_iter().chain([self.instance()]).collect()
    }

    /// Room for what quantised images stand for.
    fn workspace_bytes(&self) -> usize {
        self.act.map_or(0, |_| quantize_pixels::workspace_bytes(&self.problem.shape))
    }

    fn run(&self, gpu: &Gpu, stream: &Stream, mut call: Call<'_>) -> Result<()> {
        let problem = &self.problem;
        let [mut x_layout, y_layout] = problem.layouts;
        let (mut x, mut x_type, bias) = (call.x.pointer(), call.x.dtype(), call.bias_at(0));
        if let (Some(_), Some(format)) = (self.act, problem.format) {
            x = quantize_pixels::in_workspace(gpu, stream, (&problem.shape, format), &mut call)?;
            (x_layout, x_type) = (Layout2d::Nhwc, crate::tensor::Float::F32);
        }
        let Columns { of_row, of_position, of_group } = call.w.columns;
        let (activation, low, high) = matmul::activation(call.epilogue.activation);
        let images = Images::new(OP, &problem.shape, [x_layout, y_layout])?;
        let parts = weights(&call);
        let (mut first, outputs) = (0, (problem.shape.geometry().co / parts.len().max(1)) as u64);
        for (w, [layout, bits]) in parts {
            let params = Params {
                images,
                w,
                x,
                bias,
                y: call.y.pointer(),
                pixels: problem.shape.output_pixels() as u64,
                first,
                x_type: float_type(x_type),
                y_type: float_type(problem.y),
                activation,
                low,
                high,
                of_row: of_row as u32,
                of_position: of_position as u32,
                of_group: of_group as u32,
                outputs,
            };
            first += outputs;
            let blocks = tasks(problem, outputs as usize).div_ceil(THREADS);
            // Blocks are within the limit, as `choose` has checked.
            let launch = Launch::linear(blocks as u32, THREADS as u32);
            let function = gpu.function_once(("conv simt", [layout, bits]), || instance(layout, bits))?;
            function.launch_typed(stream, &launch, &params, &[])?;
        }
        Ok(())
    }
}
