//! Direct convolution of bytes on Hopper's tensor cores, stride 1: launches of `int8_direct_sm90.cu`, which bring each pixel to a
//! multiprocessor once for all positions.

pub mod config;
mod grid;

use super::{Call, Kernel, Problem, Target};
use crate::conv::{Conv2dShape, Layout2d};
use crate::cuda::driver::{Arg, Launch, Stream};
use crate::cuda::sources::Source;
use crate::cuda::{Caps, Gpu};
use crate::error::{Error, Result};
use crate::format::int8::Byte;
use crate::kernel::Reason;
use crate::layout::cuda_int8::STEP;
use bytemuck::{Pod, Zeroable};
use config::Config;
pub(super) use grid::fold;
use grid::{Grid, SQUARE};

static SOURCE: Source = Source { path: "int8/int8_direct_sm90.cu", text: include_str!("int8_direct_sm90.cu") };

const NAME: &str = "int8_direct_sm90";

pub(super) const KERNEL: Kernel = Kernel {
    name: NAME,
    what: "wgmma of bytes from shared memory, where each pixel lies once for all positions",
    serves: |arch| arch.number == 90 && arch.specific,
    instances: || {
        let form = |slots| Config { slots, strips: 1, alone: true };
        let squares = (1..=SQUARE / 4).map(|fold| (form(config::SLOTS[0]), fold));
        let forms = config::SLOTS.into_iter().map(|slots| (form(slots), 0)).chain(squares);
        forms.flat_map(|(form, fold)| [false, true].map(|unsigned| form.instance(fold, unsigned))).collect()
    },
    supports,
    workspace_bytes: |_| 0,
    run: |gpu, stream, problem, call| launch(gpu, stream, problem, &call, None),
};

/// Columns of a product up to which windows of one position are brought at once: with more it is a stream, and nothing is seen twice.
const MOST_COLUMNS: usize = 128;

/// Channels that a product takes at once.
const CHANNELS: usize = 32;

/// Bytes that are read and written at once.
const PIECE: u64 = 16;

/// Rows and columns of an image, so that floats divide by them.
const MOST_SIZE: usize = 1 << 19;

/// Blocks along the outputs that a launch has at most.
const MOST_ROWS: usize = 65_535;

fn supports(caps: &Caps, problem: &Problem) -> std::result::Result<(), Reason> {
    let refuse = |why: &str| Err(Reason(why.into()));
    let (shape, g) = (&problem.shape, problem.shape.geometry());
    if problem.floats {
        return refuse("writes bytes, y is floats");
    }
    if !problem.symmetric {
        return refuse("multiplies weights without zero points");
    }
    if problem.layouts != [Layout2d::Nhwc; 2] {
        return refuse("reads and writes images in nhwc");
    }
    let Some(grid) = Grid::new(shape) else {
        return refuse("computes one group, of stride 1, or of stride 2 on up to 4 channels and rows of even length");
    };
    if grid.fold == 0 && !g.ci.is_multiple_of(CHANNELS) {
        return Err(Reason(format!("multiplies {CHANNELS} channels at once, there are {}", g.ci)));
    }
    if grid.kernel == [1, 1] && g.ci > MOST_COLUMNS {
        return Err(Reason(format!("computes products of up to {MOST_COLUMNS} columns, there are {}", g.ci)));
    }
    let slots = grid.slots().and_then(|slots| slots.checked_add(grid.reach()));
    if [slots.unwrap_or(usize::MAX), shape.output_pixels(), shape.x_len(), g.co]
        .iter()
        .any(|&size| size > i32::MAX as usize / 2)
    {
        return refuse("more pixels than 30 bits count");
    }
    if grid.size.iter().any(|&size| size > MOST_SIZE) {
        return Err(Reason(format!("more rows or columns of an image than {MOST_SIZE}")));
    }
    match config::config(&grid, g.co, caps.multiprocessors as usize) {
        Some(config) if config.blocks(&grid, g.co)[1] <= MOST_ROWS => Ok(()),
        Some(_) => refuse("more outputs than a launch has rows of blocks"),
        None => Err(Reason(format!("has no room for what a block sees of {} channels", g.ci))),
    }
}

/// `Arguments` of the source.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Arguments {
    w: u64,
    constants: u64,
    multipliers: u64,
    x: u64,
    y: u64,
    n: i32,
    steps: i32,
    strips: i32,
    channels: i32,
    chunk: i32,
    kernel: [i32; 2],
    dilation: [i32; 2],
    images: i32,
    input: [i32; 2],
    before: [i32; 2],
    output: [i32; 2],
    grid: [i32; 2],
    slots: i32,
    plane: i32,
    stages: i32,
    at_staging: i32,
    at_x: i32,
    at_offsets: i32,
    at_outputs: i32,
    at_pixels: i32,
    at_barriers: i32,
    x_zero: i32,
    y_zero: i32,
    low: f32,
    high: f32,
    padding: i32,
}

/// The forms that a shape can have: for measuring which is best.
pub fn configs(shape: &Conv2dShape) -> Vec<Config> {
    Grid::new(shape).map_or_else(Vec::new, |grid| config::configs(&grid, shape.geometry().co))
}

/// Puts a layer into a stream with a configuration of the caller's choice out of [`configs`]. Errors: those of [`super::run`],
/// a configuration that the shape does not have.
pub fn run_as(config: Config, gpu: &Gpu, stream: &Stream, call: Call<'_>) -> Result<()> {
    let problem = call.problem()?;
    super::check(&KERNEL, gpu, &problem, &call)?;
    if !configs(&problem.shape).contains(&config) {
        return Err(Error::invalid(NAME, "a configuration for the shape", format!("{config:?}")));
    }
    if call.y.len() == 0 { Ok(()) } else { launch(gpu, stream, &problem, &call, Some(config)) }
}

/// Puts a layer into a stream with a configuration, or the one that is chosen.
fn launch(gpu: &Gpu, stream: &Stream, problem: &Problem, call: &Call<'_>, config: Option<Config>) -> Result<()> {
    let refuse = |why: &str| Error::invalid(NAME, "a problem that it serves", why);
    let Target::Bytes(y) = &call.y else { return Err(Error::invalid(NAME, "outputs in bytes", "outputs in floats")) };
    let (layer, shape, g) = (call.layer, &problem.shape, problem.shape.geometry());
    let Some(y_is) = layer.y() else { return Err(Error::invalid(NAME, "outputs in bytes", "outputs in floats")) };
    let (x, y) = (call.x.pointer(), y.pointer());
    if [x, y].iter().any(|address| !address.is_multiple_of(PIECE)) {
        return Err(Error::invalid(NAME, "x and y that begin at multiples of 16 bytes", format!("{x:#x} and {y:#x}")));
    }
    let grid = Grid::new(shape).ok_or_else(|| refuse("windows at different distances"))?;
    let chosen = || config::config(&grid, g.co, gpu.caps().multiprocessors as usize);
    let config = config.or_else(chosen).ok_or_else(|| refuse("no form"))?;
    let shared = config.shared(&grid).ok_or_else(|| refuse("more than shared memory holds"))?;
    let w = match (grid.fold, &layer.squares) {
        (0, _) => layer.codes.pointer(),
        (_, Some(squares)) => squares.pointer(),
        (_, None) => return Err(refuse("a layer without a weight of squares")),
    };
    let pair = |sizes: [usize; 2]| sizes.map(|size| size as i32);
    let arguments = Arguments {
        w,
        constants: layer.constants.pointer(),
        multipliers: layer.scales.pointer(),
        x,
        y,
        n: g.co as i32,
        steps: grid.k().div_ceil(STEP) as i32,
        strips: config.strips as i32,
        channels: grid.channels as i32,
        chunk: if grid.channels.is_multiple_of(STEP) { STEP as i32 } else { grid.channels as i32 },
        kernel: pair(grid.kernel),
        dilation: pair(grid.dilation),
        images: grid.images as i32,
        // Rows of squares may end within a square.
        input: pair(if grid.fold > 0 { [shape.input()[0], grid.input[1]] } else { grid.input }),
        before: pair(grid.before),
        output: pair(grid.output),
        grid: pair(grid.size),
        slots: (config.tile() + grid.reach()) as i32,
        plane: shared.plane as i32,
        stages: shared.stages as i32,
        at_staging: shared.staging as i32,
        at_x: shared.x as i32,
        at_offsets: shared.offsets as i32,
        at_outputs: shared.outputs as i32,
        at_pixels: shared.pixels as i32,
        at_barriers: shared.barriers as i32,
        x_zero: layer.x().zero(),
        y_zero: y_is.zero(),
        low: layer.bounds[0],
        high: layer.bounds[1],
        padding: 0,
    };
    let [tiles, rows] = config.blocks(&grid, g.co);
    let launch = Launch {
        grid: [tiles as u32, rows as u32, 1],
        shared_bytes: shared.bytes as u32,
        programmatic: true,
        ..Launch::linear(1, config::THREADS as u32)
    };
    let function = gpu.function(&config.instance(grid.fold, layer.x().byte() == Byte::U8))?;
    // SAFETY: the parameter is the source's; lengths of x and y were checked by the callers, the others are the layer's.
    unsafe { function.launch(stream, &launch, &[Arg::new(&arguments)]) }
}
