//! Direct convolution of bytes on Hopper's tensor cores, stride 1: launches of `int8_direct_sm90.cu`, which bring each pixel to a
//! multiprocessor once for all positions.

pub mod config;
mod grid;

use super::int8_sm90;
use super::{Call, Int8, Kernel, Problem, Rounding, bytes_of, check_addresses};
use crate::cuda::dispatch::Configured;
use crate::cuda::driver::{Launch, Stream};
use crate::cuda::parameters::{Flat, Pair, Parameters, parameters};
use crate::cuda::sources::{Arch, Instance, Source};
use crate::cuda::{Caps, Gpu};
use crate::error::{Error, Result};
use crate::format::int8::Byte;
use crate::kernel::Reason;
use crate::layout::cuda_int8::STEP;
use config::{Config, Shared};
pub(super) use grid::fold;
use grid::{Grid, SQUARE};

static SOURCE: Source = Source {
    path: "int8/int8_direct_sm90.cu",
    text: include_str!("int8_direct_sm90.cu"),
    parameters: &[Arguments::LAYOUT],
};

const NAME: &str = "int8_direct_sm90";

pub(super) const KERNEL: Kernel = Kernel {
    name: NAME,
    what: "wgmma of bytes from shared memory, where each pixel lies once for all positions",
    serves: Arch::is_hopper,
    instances: || {
        let form = |slots| Config { slots, strips: 1, alone: true };
        let squares = (1..=SQUARE / 4).map(|fold| (form(config::SLOTS[0]), fold));
        let forms = config::SLOTS.into_iter().map(|slots| (form(slots), 0)).chain(squares);
        forms.flat_map(|(form, fold)| [false, true].map(|unsigned| form.instance(fold, unsigned))).collect()
    },
    every_instance: |_, _| Vec::new(),
    choose: |caps, problem| {
        let (direct, clocks) = Direct::of(caps, problem)?;
        let implicit = int8_sm90::Implicit::of(caps, problem).ok().and_then(|implicit| implicit.clocks());
        if let Some(fewer) = implicit.filter(|fewer| fewer + fewer / SURE <= clocks) {
            return Err(Reason(format!("is expected to take {clocks} clocks, {} {fewer}", int8_sm90::NAME)));
        }
        Ok(Box::new(direct))
    },
    candidates: |caps, problem| {
        let Ok((Direct { grid, .. }, _)) = Direct::of(caps, problem) else { return Vec::new() };
        let all = config::configs(&grid, problem.shape.geometry().co).into_iter();
        let all = all.filter_map(|config| Direct::new(problem, grid, config));
        all.map(|direct| Box::new(direct) as Box<dyn Configured<Int8>>).collect()
    },
};

/// Columns of a product up to which windows of one position are brought at once: with more it is a stream, and nothing is seen twice.
const MOST_COLUMNS: usize = 128;

/// The part of its time by which another kernel must be expected to be faster, for models to be sure of it. (32 layers that both compute, one
/// H200.)
const SURE: usize = 10;

/// Channels that a product takes at once.
const CHANNELS: usize = 32;

/// Rows and columns of an image, so that floats divide by them.
const MOST_SIZE: usize = 1 << 19;

/// Blocks along the outputs that a launch has at most.
const MOST_ROWS: usize = 65_535;

parameters! {
    /// `Arguments` of the source.
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
        kernel: Pair,
        dilation: Pair,
        images: i32,
        input: Pair,
        before: Pair,
        output: Pair,
        grid: Pair,
        slots: i32,
        plane: i32,
        stages: i32,
        at_staging: i32,
        at_x: i32,
        at_offsets: i32,
        at_outputs: i32,
        at_pixels: i32,
        at_barriers: i32,
        rounding: Flat<Rounding>,
        padding: i32,
    }
}

/// A convolution on a grid of slots, in one configuration.
struct Direct {
    problem: Problem,
    grid: Grid,
    config: Config,
    shared: Shared,
}

impl Direct {
    /// In the configuration for a problem, with the clocks that it is expected to take; or why it has none.
    fn of(caps: &Caps, problem: &Problem) -> std::result::Result<(Self, usize), Reason> {
        let refuse = |why: &str| Err(Reason(why.into()));
        let (shape, g) = (&problem.shape, problem.shape.geometry());
        problem.is_bytes_in_nhwc()?;
        let Some(grid) = Grid::new(shape) else {
            return refuse(
                "computes one group, of stride 1, or of stride 2 on up to 4 channels and rows of even length",
            );
        };
        if grid.fold == 0 && !g.ci.is_multiple_of(CHANNELS) {
            return Err(Reason(format!("multiplies {CHANNELS} channels at once, there are {}", g.ci)));
        }
        if grid.kernel == [1, 1] && g.ci > MOST_COLUMNS {
            return Err(Reason(format!("computes products of up to {MOST_COLUMNS} columns, there are {}", g.ci)));
        }
        let slots = grid.slots().and_then(|slots| slots.checked_add(grid.reach())).unwrap_or(usize::MAX);
        let sizes = [slots, shape.output_pixels(), shape.x_len(), g.co];
        if sizes.iter().any(|&size| size > i32::MAX as usize / 2) {
            return refuse("more pixels than 30 bits count");
        }
        if grid.size.iter().any(|&size| size > MOST_SIZE) {
            return Err(Reason(format!("more rows or columns of an image than {MOST_SIZE}")));
        }
        let config = config::config(&grid, g.co, caps.multiprocessors as usize);
        let timed = |(config, clocks)| Some((Self::new(problem, grid, config)?, clocks));
        let Some((direct, clocks)) = config.and_then(timed) else {
            return Err(Reason(format!("has no room for what a block sees of {} channels", g.ci)));
        };
        match direct.config.blocks(&grid, g.co)[1] <= MOST_ROWS {
            true => Ok((direct, clocks)),
            false => refuse("more outputs than a launch has rows of blocks"),
        }
    }

    /// In a configuration that a block has room for.
    fn new(problem: &Problem, grid: Grid, config: Config) -> Option<Self> {
        let shared = config.shared(&grid)?;
        Some(Self { problem: *problem, grid, config, shared })
    }

    fn instance(&self) -> Instance {
        self.config.instance(self.grid.fold, self.problem.x == Byte::U8)
    }
}

impl Configured<Int8> for Direct {
    fn text(&self) -> String {
        format!("direct, {}", self.config)
    }

    fn instances(&self) -> Vec<Instance> {
        vec![self.instance()]
    }

    fn run(&self, gpu: &Gpu, stream: &Stream, call: Call<'_>) -> Result<()> {
        let Self { problem, grid, config, shared } = self;
        let (layer, shape, co) = (call.layer, &problem.shape, problem.shape.geometry().co);
        let (x, y) = (call.x.pointer(), bytes_of(NAME, &call.y)?);
        check_addresses(NAME, [x, y])?;
        let w = match (grid.fold, &layer.squares) {
            (0, _) => layer.codes.pointer(),
            (_, Some(squares)) => squares.pointer(),
            (_, None) => return Err(Error::invalid(NAME, "a layer with a weight of squares", "none")),
        };
        let arguments = Arguments {
            w,
            constants: layer.constants.pointer(),
            multipliers: layer.scales.pointer(),
            x,
            y,
            n: co as i32,
            steps: grid.k().div_ceil(STEP) as i32,
            strips: config.strips as i32,
            channels: grid.channels as i32,
            chunk: if grid.channels.is_multiple_of(STEP) { STEP as i32 } else { grid.channels as i32 },
            kernel: grid.kernel.into(),
            dilation: grid.dilation.into(),
            images: grid.images as i32,
            // Rows of squares may end within a square.
            input: Pair::from(if grid.fold > 0 { [shape.input()[0], grid.input[1]] } else { grid.input }),
            before: grid.before.into(),
            output: grid.output.into(),
            grid: grid.size.into(),
            slots: (config.tile() + grid.reach()) as i32,
            plane: shared.plane as i32,
            stages: shared.stages as i32,
            at_staging: shared.staging as i32,
            at_x: shared.x as i32,
            at_offsets: shared.offsets as i32,
            at_outputs: shared.outputs as i32,
            at_pixels: shared.pixels as i32,
            at_barriers: shared.barriers as i32,
            rounding: Flat(layer.rounding()),
            padding: 0,
        };
        let [tiles, rows] = config.blocks(grid, co);
        let launch = gpu.overlapping(Launch {
            grid: [tiles as u32, rows as u32, 1],
            shared_bytes: shared.bytes as u32,
            ..Launch::linear(1, config::THREADS as u32)
        });
        let numbers = [config.slots * 2 + usize::from(problem.x == Byte::U8), grid.fold].map(|n| n as u32);
        gpu.function_once((NAME, numbers), || self.instance())?.launch_typed(stream, &launch, &arguments, &[])
    }
}
