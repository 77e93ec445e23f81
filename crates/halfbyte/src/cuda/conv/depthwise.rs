//! Direct convolution of groups of few channels and as many outputs (depthwise, ResNeXt's), images pixel by pixel: launches of
//! `depthwise.cu`.

use super::simt::{self, Weight};
use super::weights::DENSE;
use super::{Call, Convolution, Kernel, Problem, quantize_pixels};
use crate::conv::Geometry;
use crate::cuda::dispatch::{About, Bind, Configured};
use crate::cuda::driver::{Launch, Stream};
use crate::cuda::parameters::{Parameters, float_type, parameters};
use crate::cuda::sources::{Instance, Source};
use crate::cuda::{Caps, Gpu, matmul};
use crate::error::{Error, Result};
use crate::format::Format;
use crate::kernel::Reason;
use crate::tensor::Float;

static SOURCE: Source =
    Source { path: "conv/depthwise.cu", text: include_str!("depthwise.cu"), parameters: &[Params::LAYOUT] };

const NAME: &str = "depthwise";

pub(super) const KERNEL: Kernel = Kernel::with_one(
    About {
        name: NAME,
        what: "groups of 1, 2, 4 or 8 channels and as many outputs: f32 multiply-add, 8 channels of 4 pixels a thread",
        serves: |arch| arch.number >= 75,
        instances: || {
            let types = [Float::F16, Float::BF16, Float::F32];
            let forms = CHANNELS.into_iter().map(|channels| [channels as u32, 0, 0]).chain(NEIGHBOURS);
            let all = forms.flat_map(|form| types.map(|x| instance(form, x)));
            all.chain(quantize_pixels::instances()).collect()
        },
    },
    choose,
);

/// Channels of a group.
const CHANNELS: [usize; 4] = [1, 2, 4, 8];

/// Channels of a group, columns of the kernel and its stride across where a pixel of a row is loaded once for all columns. With one
/// channel and 3 columns the kernel has 3 rows.
const NEIGHBOURS: [[u32; 3]; 8] =
    [[1, 3, 1], [1, 3, 2], [1, 5, 1], [1, 5, 2], [1, 7, 1], [1, 7, 2], [2, 3, 1], [4, 3, 1]];

/// As in the source: threads of a block, pixels of a span, channels of a thread.
const THREADS: usize = 256;
const PIXELS: usize = 4;
const VECTOR: usize = 8;

/// Vectors of a tile at most: 128 bytes of a pixel in a half type.
const MOST_LANES: usize = 8;

/// Shared memory of a block at most: two blocks of a multiprocessor of every processor have as much, and leave the most to L1.
const SHARED_BYTES: usize = 32 << 10;

/// Blocks that a multiprocessor has at a time, by their registers.
const BLOCKS: usize = 2;

/// Sizes in pixels and channels, strides and dilations are at most this: then sums and products of a few have 31 bits.
const MOST: usize = 1 << 24;

parameters! {
    /// As in the source.
    struct Params {
        w: Weight,
        x: u64,
        bias: u64,
        y: u64,
        image_bytes: u64,
        row_bytes: u64,
        pixel_bytes: u32,
        channels: u32,
        height: u32,
        width: u32,
        rows: u32,
        columns: u32,
        across: u32,
        spans: u32,
        kernel_rows: u32,
        kernel_columns: u32,
        stride_down: u32,
        stride_across: u32,
        dilation_down: u32,
        dilation_across: u32,
        top: u32,
        left: u32,
        lanes: u32,
        steps: u32,
        together: u32,
        bits: u32,
        y_type: u32,
        activation: u32,
        low: f32,
        high: f32,
    }
}

/// Channels of a group, and one of [`NEIGHBOURS`] or zeros; the type of x.
fn instance([channels, columns, stride]: [u32; 3], x: Float) -> Instance {
    Instance::new(&SOURCE, format!("depthwise<{channels}, {columns}, {stride}, {}>", float_type(x)))
}

/// How a convolution is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cut {
    /// Tiles of channels, and vectors of each.
    tiles: usize,
    lanes: usize,
    /// Rows of the kernel whose weights are in shared memory at a time.
    together: usize,
    /// Spans of pixels in a row of y, and of all rows.
    across: usize,
    spans: usize,
    /// Blocks of a tile, and steps of each.
    blocks: usize,
    steps: usize,
}

impl Cut {
    /// On so many multiprocessors, or why there is none.
    fn of(problem: &Problem, multiprocessors: usize) -> std::result::Result<Self, Reason> {
        let (shape, g) = (&problem.shape, problem.shape.geometry());
        let vectors = g.ci / VECTOR;
        // Of a vector, in f32.
        let row_bytes = g.kernel[1].saturating_mul(g.channels() * VECTOR * 4);
        let most = MOST_LANES.min((SHARED_BYTES - MOST_LANES * VECTOR * 4) / row_bytes);
        if most == 0 {
            return Err(Reason("a row of the kernel has more weights than it keeps in shared memory".into()));
        }
        let tiles = vectors.div_ceil(most);
        let lanes = vectors.div_ceil(tiles);
        let together = g.kernel[0].min((SHARED_BYTES - lanes * VECTOR * 4) / (lanes * row_bytes));
        let [rows, columns] = shape.output();
        let across = columns.div_ceil(PIXELS);
        let spans = shape.batch().saturating_mul(rows).saturating_mul(across);
        let all = spans.div_ceil(THREADS / lanes).max(1);
        let steps = all.div_ceil((BLOCKS * multiprocessors / tiles).clamp(1, 65_535));
        let cut = Self { tiles, lanes, together, across, spans, blocks: all.div_ceil(steps), steps };
        if cut.spans > i32::MAX as usize { Err(Reason("more pixels than 31 bits count".into())) } else { Ok(cut) }
    }

    /// Shared memory of a block: the bias and weights.
    fn shared_bytes(&self, row_columns: usize) -> usize {
        (1 + self.together * row_columns) * self.lanes * VECTOR * 4
    }
}

/// Whether a layer has groups as it takes them, or why not.
pub(super) fn takes(g: &Geometry) -> std::result::Result<(), Reason> {
    if g.groups == 1 || !CHANNELS.contains(&g.channels()) {
        return Err(Reason(format!("takes groups of 1, 2, 4 or 8 channels, here {} of {}", g.groups, g.channels())));
    }
    if g.outputs() != g.channels() {
        return Err(Reason(format!(
            "takes as many outputs of a group as channels, {} are {}",
            g.channels(),
            g.outputs()
        )));
    }
    if !g.ci.is_multiple_of(VECTOR) {
        return Err(Reason(format!("loads {VECTOR} channels at a time, a pixel has {}", g.ci)));
    }
    Ok(())
}

fn choose(caps: &Caps, problem: &Problem) -> Bind<Convolution> {
    let (shape, g) = (&problem.shape, problem.shape.geometry());
    let refuse = |why: &str| Err(Reason(why.into()));
    problem.is_in_nhwc()?;
    takes(g)?;
    if ![DENSE, simt::PLAIN].contains(&problem.packed) {
        return Err(Reason(format!("reads layout {} or floats, not {}", simt::PLAIN, problem.packed)));
    }
    let padded = [0, 1].map(|axis| shape.input()[axis] + g.padding[axis] + g.padding[axis + 2]);
    let sizes = [padded, g.stride, g.dilation, [g.ci, shape.batch()]];
    if sizes.as_flattened().iter().any(|&size| size > MOST) || g.k() > i32::MAX as usize {
        return refuse("more channels, rows, columns or images than 24 bits count");
    }
    let quantized = problem.format.filter(|format| format.act.is_quantized());
    if quantized.is_some() && !quantize_pixels::counts(shape) {
        return refuse("more scales of images than 39 bits count");
    }
    let cut = Cut::of(problem, caps.multiprocessors.max(1) as usize)?;
    Ok(Box::new(Depthwise { problem: *problem, cut, quantized }))
}

/// A thread for some channels of some pixels.
struct Depthwise {
    problem: Problem,
    cut: Cut,
    /// The format, if images are quantised.
    quantized: Option<Format>,
}

impl Depthwise {
    /// Numbers of the instance.
    fn form(&self) -> [u32; 3] {
        let g = self.problem.shape.geometry();
        let channels = g.channels() as u32;
        let [columns, stride] = [g.kernel[1], g.stride[1]].map(|size| size as u32);
        let form = [channels, columns, stride];
        let whole = (channels, columns) != (1, 3) || g.kernel[0] == 3;
        let is_one = g.dilation[1] == 1 && whole && NEIGHBOURS.contains(&form);
        if is_one { form } else { [channels, 0, 0] }
    }

    /// Type of x as it is read.
    fn x_type(&self) -> Float {
        if self.quantized.is_some() { Float::F32 } else { self.problem.x }
    }
}

impl Configured<Convolution> for Depthwise {
    fn text(&self) -> String {
        let Cut { lanes, together, steps, .. } = self.cut;
        let channels = lanes * VECTOR;
        format!("{channels} channels a tile, {together} rows of the kernel at a time, {steps} steps a block")
    }

    fn instances(&self) -> Vec<Instance> {
        let of_x = self.quantized.map(|format| quantize_pixels::instance(format.act));
        of_x.into_iter().chain([instance(self.form(), self.x_type())]).collect()
    }

    fn workspace_bytes(&self) -> usize {
        self.quantized.map_or(0, |_| quantize_pixels::workspace_bytes(&self.problem.shape))
    }

    fn run(&self, gpu: &Gpu, stream: &Stream, mut call: Call<'_>) -> Result<()> {
        let (shape, cut) = (&self.problem.shape, &self.cut);
        let g = *shape.geometry();
        let x = match self.quantized {
            Some(format) => quantize_pixels::in_workspace(gpu, stream, (shape, format), &mut call)?,
            None => call.x.pointer(),
        };
        let y = call.y.pointer();
        if [x, y].iter().any(|address| !address.is_multiple_of(16)) {
            let got = format!("{x:#x} and {y:#x}");
            return Err(Error::invalid(NAME, "x and y that begin at multiples of 16 bytes", got));
        }
        let parts = simt::weights(&call);
        let [(w, [_, bits])] = parts[..] else {
            return Err(Error::invalid(NAME, "all groups in one weight", format!("{} weights", parts.len())));
        };
        let (activation, low, high) = matmul::activation(call.epilogue.activation);
        let pixel_bytes = g.ci * self.x_type().size_bytes();
        let [height, width] = shape.input();
        let params = Params {
            w,
            x,
            bias: call.bias_at(0),
            y,
            image_bytes: (height * width * pixel_bytes) as u64,
            row_bytes: (width * pixel_bytes) as u64,
            pixel_bytes: pixel_bytes as u32,
            channels: g.ci as u32,
            height: height as u32,
            width: width as u32,
            rows: shape.output()[0] as u32,
            columns: shape.output()[1] as u32,
            across: cut.across as u32,
            spans: cut.spans as u32,
            kernel_rows: g.kernel[0] as u32,
            kernel_columns: g.kernel[1] as u32,
            stride_down: g.stride[0] as u32,
            stride_across: g.stride[1] as u32,
            dilation_down: g.dilation[0] as u32,
            dilation_across: g.dilation[1] as u32,
            top: g.padding[0] as u32,
            left: g.padding[1] as u32,
            lanes: cut.lanes as u32,
            steps: cut.steps as u32,
            together: cut.together as u32,
            bits,
            y_type: float_type(self.problem.y),
            activation,
            low,
            high,
        };
        let launch = gpu.overlapping(Launch {
            grid: [cut.tiles as u32, cut.blocks as u32, 1],
            shared_bytes: cut.shared_bytes(g.kernel[1] * g.channels()) as u32,
            ..Launch::linear(1, THREADS as u32)
        });
        let (form, x_type) = (self.form(), self.x_type());
        let [channels, columns, stride] = form;
        let key = [64 * channels + 4 * columns + stride, float_type(x_type)];
        let function = gpu.function_once((NAME, key), || instance(form, x_type))?;
        function.launch_typed(stream, &launch, &params, &[])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conv::{Conv2dShape, Layout2d};

    fn cut(shape: &Conv2dShape) -> std::result::Result<Cut, Reason> {
        let (x, layouts) = (Float::F16, [Layout2d::Nhwc; 2]);
        Cut::of(&Problem { format: None, shape: *shape, x, y: x, layouts, packed: DENSE }, 132)
    }

    #[test]
    fn tiles_and_steps_cover_all_channels_and_pixels_and_fit_shared_memory() {
        for (groups, channels) in [(8, 1), (24, 1), (128, 1), (144, 1), (960, 1), (32, 4), (68, 2), (9, 8), (32, 8)] {
            for (kernel, size) in [([1, 1], [1, 1]), ([3, 3], [56, 57]), ([31, 31], [40, 33]), ([2, 90], [7, 200])] {
                for batch in [0, 1, 3, 32] {
                    let ci = groups * channels;
                    let geometry = Geometry { padding: [15; 4], groups, ..Geometry::new(ci, ci, kernel) };
                    let shape = Conv2dShape::new(geometry, batch, size).unwrap();
                    let cut = cut(&shape).unwrap();
                    let Cut { tiles, lanes, together, across, spans, blocks, steps } = cut;
                    assert!(tiles * lanes * VECTOR >= ci && (tiles - 1) * lanes * VECTOR < ci, "{cut:?}");
                    assert!(together >= 1 && together <= kernel[0], "{cut:?}");
                    assert!(cut.shared_bytes(kernel[1] * channels) <= SHARED_BYTES, "{cut:?}");
                    let of_block = steps * (THREADS / lanes);
                    assert!(across * PIXELS >= shape.output()[1] && across * shape.output()[0] * batch == spans);
                    assert!(blocks * of_block >= spans && (blocks - 1) * of_block <= spans, "{cut:?}");
                }
            }
        }
        let depthwise = Geometry { groups: 128, padding: [1; 4], ..Geometry::new(128, 128, [3, 3]) };
        let all = cut(&Conv2dShape::new(depthwise, 32, [56; 2]).unwrap()).unwrap();
        assert_eq!([all.tiles, all.lanes, all.together, all.across, all.steps], [2, 8, 3, 14, 6]);
        let wide = Geometry { groups: 2, ..Geometry::new(16, 16, [1, 200]) };
        let wide = cut(&Conv2dShape::new(wide, 1, [1, 300]).unwrap());
        assert!(wide.unwrap_err().0.contains("a row of the kernel"));
    }
}
