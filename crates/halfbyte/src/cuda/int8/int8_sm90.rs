//! GEMM and implicit GEMM of bytes on Hopper: launches of `int8_sm90.cu`, x as windows on images that the copy engine (TMA) brings.

pub mod config;

use super::{Call, Int8, Kernel, Layer, Problem, Rounding, bytes_of, check_addresses};
use crate::conv::{Conv2dShape, Geometry};
use crate::cuda::conv::windows::{self, Windows};
use crate::cuda::dispatch::Configured;
use crate::cuda::driver::{Function, Launch, Stream, Swizzle, TensorMap, View};
use crate::cuda::kept::Kept;
use crate::cuda::parameters::{Flat, Parameters, parameters};
use crate::cuda::sources::{Arch, Instance, Source};
use crate::cuda::{Caps, Gpu};
use crate::error::Result;
use crate::format::int8::Byte;
use crate::kernel::Reason;
use crate::layout::cuda_int8::STEP;
use config::Config;

static SOURCE: Source =
    Source { path: "int8/int8_sm90.cu", text: include_str!("int8_sm90.cu"), parameters: &[Arguments::LAYOUT] };

pub(super) const NAME: &str = "int8_sm90";

pub(super) const KERNEL: Kernel = Kernel {
    name: NAME,
    what: "wgmma of bytes from shared memory, windows of images by the copy engine",
    serves: Arch::is_hopper,
    instances: || {
        let all = [false, true].into_iter().flat_map(config::forms);
        all.map(Config::instance).collect()
    },
    every_instance: |_, _| Vec::new(),
    choose: |caps, problem| Ok(Box::new(Implicit::of(caps, problem)?)),
    candidates: |caps, problem| {
        let Ok(Implicit { shape, .. }) = Implicit::of(caps, problem) else { return Vec::new() };
        let all = config::configs(sizes(&shape), problem.x == Byte::U8, caps.multiprocessors as usize);
        all.into_iter().map(|config| Box::new(Implicit::new(shape, config)) as Box<dyn Configured<Int8>>).collect()
    },
};

/// Channels of a box of x.
const BOX: usize = 64;

/// Channels that begin at multiples of so many bytes.
const PIECE: usize = 16;

/// Columns of a position: a product may have any number of pieces, which the copy engine fills up with zeros.
fn channels(geometry: &Geometry) -> usize {
    if is_pointwise(geometry) { geometry.channels().next_multiple_of(BOX) } else { geometry.channels() }
}

fn is_pointwise(geometry: &Geometry) -> bool {
    geometry.positions() == 1 && geometry.groups == 1
}

/// Pixels, outputs of a group, columns, groups.
fn sizes(shape: &Conv2dShape) -> [usize; 4] {
    let g = shape.geometry();
    [shape.output_pixels(), g.outputs(), g.k(), g.groups]
}

parameters! {
    /// `Arguments` of the source.
    struct Arguments {
        w: u64,
        constants: u64,
        position_sums: u64,
        multipliers: u64,
        y: u64,
        m: i32,
        n: i32,
        outputs: i32,
        steps: i32,
        rows: i32,
        parts: i32,
        height: i32,
        width: i32,
        rounding: Flat<Rounding>,
        channels: i32,
        windows: Windows,
        padding: i32,
    }
}

/// A product, or a convolution as an implicit GEMM, in one configuration.
pub(super) struct Implicit {
    /// One row of pixels, where each output sees one of its own.
    shape: Conv2dShape,
    config: Config,
    /// As [`Implicit::clocks`] has it.
    clocks: Option<usize>,
    /// By the address of x.
    launches: Kept<u64, Prepared>,
}

/// What is the same in every launch for an address of x.
#[derive(Debug)]
struct Prepared {
    map: TensorMap,
    launch: Launch,
    function: Function,
}

impl Implicit {
    /// In the configuration for a problem, or why it has none.
    pub fn of(caps: &Caps, problem: &Problem) -> std::result::Result<Self, Reason> {
        let refuse = |why: &str| Err(Reason(why.into()));
        let (shape, g) = (&problem.shape, problem.shape.geometry());
        problem.is_bytes_in_nhwc()?;
        if !g.ci.is_multiple_of(PIECE) {
            return Err(Reason(format!("brings pixels of a multiple of {PIECE} channels, there are {}", g.ci)));
        }
        windows::taken(g, if is_pointwise(g) { PIECE } else { BOX })?;
        let (config, clocks) = config::config(sizes(shape), problem.x == Byte::U8, caps.multiprocessors as usize);
        let tiles = config.tiles([shape.output_pixels(), g.outputs()]).saturating_mul(config.parts);
        if [shape.output_pixels(), shape.x_len(), g.co, g.k(), tiles].iter().any(|&size| size > i32::MAX as usize) {
            return refuse("more pixels, columns or tiles than 31 bits count");
        }
        if g.groups > 65_535 {
            return refuse("more groups than a launch has rows of blocks");
        }
        if config::forms(true).iter().any(|config| config.shared_bytes() > caps.shared_bytes as usize) {
            return Err(Reason(format!("needs more shared memory than the {} bytes of a block", caps.shared_bytes)));
        }
        let at_once = tiles.saturating_mul(g.groups) <= 2 * caps.multiprocessors as usize;
        Ok(Self { clocks: at_once.then_some(clocks), ..Self::new(windows::flat(*shape)?, config) })
    }

    fn new(shape: Conv2dShape, config: Config) -> Self {
        Self { shape, config, clocks: None, launches: Kept::default() }
    }

    /// Output pixels.
    pub fn pixels(&self) -> usize {
        self.shape.output_pixels()
    }

    /// Clocks that it is expected to take, where all of its blocks run at once: with more its model leaves out what memory takes.
    pub fn clocks(&self) -> Option<usize> {
        self.clocks
    }

    /// What it is computed by.
    pub fn instance(&self) -> Instance {
        self.config.instance()
    }

    fn prepared(&self, gpu: &Gpu, x: View<'_, u8>) -> Result<Prepared> {
        let Self { shape, config, .. } = self;
        let g = shape.geometry();
        let tiles = config.tiles([shape.output_pixels(), g.outputs()]);
        let windows = windows::map(shape, [config.tokens, BOX], Swizzle::Bytes64);
        Ok(Prepared {
            map: TensorMap::of_windows(x, 1, &windows)?,
            launch: gpu.overlapping(Launch {
                grid: [(tiles * config.parts) as u32, g.groups as u32, 1],
                cluster: [config.parts as u32, 1, 1],
                shared_bytes: config.shared_bytes() as u32,
                ..Launch::linear(1, config.threads() as u32)
            }),
            function: gpu.function(&config.instance())?,
        })
    }

    /// Puts it into a stream, with a layer whose weight has the shape's outputs and, but for zeros, columns; y is an address.
    pub fn multiply(&self, gpu: &Gpu, stream: &Stream, layer: &Layer, x: View<'_, u8>, y: u64) -> Result<()> {
        let (shape, g) = (&self.shape, *self.shape.geometry());
        check_addresses(NAME, [x.pointer(), y])?;
        let prepared = self.launches.get(x.pointer(), |_| self.prepared(gpu, x))?;
        let arguments = Arguments {
            w: layer.codes.pointer(),
            constants: layer.constants.pointer(),
            position_sums: layer.position_sums.pointer(),
            multipliers: layer.scales.pointer(),
            y,
            m: shape.output_pixels() as i32,
            n: g.co as i32,
            outputs: g.outputs() as i32,
            steps: g.k().div_ceil(STEP) as i32,
            rows: self.config.rows(g.outputs()) as i32,
            parts: self.config.parts as i32,
            height: shape.input()[0] as i32,
            width: shape.input()[1] as i32,
            rounding: Flat(layer.rounding()),
            channels: g.channels() as i32,
            windows: Windows::new(shape, channels(&g)),
            padding: 0,
        };
        prepared.function.launch_typed(stream, &prepared.launch, &arguments, std::slice::from_ref(&prepared.map))
    }
}

impl Configured<Int8> for Implicit {
    fn text(&self) -> String {
        format!("implicit, {}", self.config)
    }

    fn instances(&self) -> Vec<Instance> {
        vec![self.instance()]
    }

    fn run(&self, gpu: &Gpu, stream: &Stream, call: Call<'_>) -> Result<()> {
        self.multiply(gpu, stream, call.layer, call.x, bytes_of(NAME, &call.y)?)
    }
}
