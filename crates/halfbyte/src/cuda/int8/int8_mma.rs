//! GEMM and implicit GEMM of bytes on every processor from sm_75 on: launches of `int8_mma.cu`, x as windows on images whose
//! pixels have a multiple of 16 channels of a group.

use super::layer::LayerArguments;
use super::{Call, Int8, Kernel, Layer, Place, Problem, check_addresses, fits_31_bits};
use crate::conv::{Conv2dShape, Geometry};
use crate::cuda::conv::windows::{self, Windows};
use crate::cuda::dispatch::Configured;
use crate::cuda::driver::{Launch, Stream, View};
use crate::cuda::parameters::{Flat, Parameters, parameters};
use crate::cuda::sources::{Arch, Instance, Source};
use crate::cuda::{Caps, Gpu};
use crate::error::Result;
use crate::format::int8::Byte;
use crate::kernel::Reason;
use crate::layout::cuda_int8::{STEP, STRIP};

static SOURCE: Source =
    Source { path: "int8/int8_mma.cu", text: include_str!("int8_mma.cu"), parameters: &[Arguments::LAYOUT] };

const NAME: &str = "int8_mma";

pub(super) const KERNEL: Kernel = Kernel {
    name: NAME,
    what: "mma.sync on bytes of shared memory, windows of images 16 channels at a time",
    serves: |arch| arch.number >= 75,
    instances: || {
        let all = Kind::all();
        all.flat_map(|kind| CONFIGS.map(|config| config.instance(kind))).collect()
    },
    every_instance: |_, _| Vec::new(),
    choose: |caps, problem| Ok(Box::new(Implicit::of(caps, problem)?)),
    candidates: |caps, problem| {
        let Ok(chosen) = Implicit::of(caps, problem) else { return Vec::new() };
        CONFIGS.map(|config| Box::new(Implicit { config, ..chosen }) as Box<dyn Configured<Int8>>).into()
    },
};

/// Channels that are brought at once, and begin at multiples of so many bytes.
const PIECE: usize = 16;

/// As in the source.
const THREADS: usize = 256;

/// Clocks of the beginning and the end of a tile, and from the request of a stage to its arrival; bytes from the second-level cache that a
/// multiprocessor has in a clock. As for `int8_sm90`, from an H200.
const TILE: usize = 3000;
const LATENCY: usize = 2000;
const BYTES: usize = 56;

/// What the kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Kind {
    /// Type of the bytes of x.
    x: Byte,
    /// Whether weights have zero points.
    zeros: bool,
    /// Whether y is floats, whose type the kernel is told.
    floats: bool,
}

impl Kind {
    fn all() -> impl Iterator<Item = Self> {
        let bytes = [Byte::I8, Byte::U8].into_iter();
        let with_zeros = bytes.flat_map(|x| [false, true].map(|zeros| (x, zeros)));
        with_zeros.flat_map(|(x, zeros)| [false, true].map(|floats| Self { x, zeros, floats }))
    }

    fn of(problem: &Problem) -> Self {
        Self { x: problem.x, zeros: !problem.symmetric, floats: problem.floats }
    }

    /// What the source calls them, and their values.
    fn numbers(self) -> [(&'static str, usize); 3] {
        [("UNSIGNED", (self.x == Byte::U8).into()), ("ZEROS", self.zeros.into()), ("FLOATS", self.floats.into())]
    }
}

/// How the kernel divides a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Config {
    /// Pixels of a tile.
    tokens: usize,
    /// Strips of 64 outputs.
    strips: usize,
}

/// Every configuration.
const CONFIGS: [Config; 4] = [
    Config { tokens: 128, strips: 2 },
    Config { tokens: 64, strips: 2 },
    Config { tokens: 64, strips: 1 },
    Config { tokens: 32, strips: 1 },
];

impl std::fmt::Display for Config {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} pixels, {} strips", self.tokens, self.strips)
    }
}

impl Config {
    /// The one of the least time, by a model: pixels, outputs of a group, columns, groups.
    fn of([m, n, k, groups]: [usize; 4], caps: &Caps) -> Self {
        // Multiply-adds of a multiprocessor in a clock: of graphics cards half as many as of processors of data centres.
        let products = if matches!(caps.arch.number, 80 | 87 | 90..120) { 2048 } else { 1024 };
        let time = |config: &Self| {
            let tiles = config.tiles([m, n]).saturating_mul(groups);
            let multiprocessors = caps.multiprocessors.max(1) as usize;
            let most = ((caps.shared_bytes as usize + 1024) / (config.shared_bytes(caps.arch) + 1024)).clamp(1, 2);
            let (together, rounds) =
                (tiles.div_ceil(multiprocessors).min(most), tiles.div_ceil(most * multiprocessors));
            let (outputs, pixels) = (config.strips * STRIP, config.tokens);
            let of_stage = (outputs * pixels * STEP / products).max((outputs + pixels) * STEP / BYTES);
            let unit = (together * of_stage).max(LATENCY / (stages(caps.arch) - 1));
            rounds.saturating_mul(k.div_ceil(STEP).saturating_mul(unit).saturating_add(TILE))
        };
        // Of equals the smallest: more blocks.
        CONFIGS.into_iter().rev().min_by_key(time).unwrap_or(CONFIGS[0])
    }

    /// Tiles of a group's pixels and outputs.
    fn tiles(self, [m, n]: [usize; 2]) -> usize {
        m.div_ceil(self.tokens).saturating_mul(self.rows(n))
    }

    /// Tiles along the outputs of a group.
    fn rows(self, n: usize) -> usize {
        n.div_ceil(STRIP).div_ceil(self.strips)
    }

    /// Shared memory of a block.
    fn shared_bytes(self, arch: Arch) -> usize {
        stages(arch) * (self.strips * STRIP + self.tokens) * STEP
    }

    /// What is compiled.
    fn instance(self, kind: Kind) -> Instance {
        let numbers = [("NT", self.tokens), ("STRIPS", self.strips)].into_iter().chain(kind.numbers());
        let defines = numbers.map(|(name, value)| format!("HB_{name}={value}"));
        Instance::new(&SOURCE, NAME).with(defines)
    }
}

/// Stages of the ring, as in the source.
fn stages(arch: Arch) -> usize {
    if arch.number < 80 { 2 } else { 3 }
}

parameters! {
    /// `Arguments` of the source.
    struct Arguments {
        layer: Flat<LayerArguments>,
        m: i32,
        outputs: i32,
        steps: i32,
        rows: i32,
        height: i32,
        width: i32,
        pixel: i32,
        padding: u32,
        windows: Windows,
    }
}

/// A product, or a convolution as an implicit GEMM, in one configuration.
#[derive(Clone, Copy)]
pub(super) struct Implicit {
    /// One row of pixels, where each output sees one of its own.
    shape: Conv2dShape,
    kind: Kind,
    config: Config,
}

impl Implicit {
    /// In the configuration for a problem, or why it has none.
    pub fn of(caps: &Caps, problem: &Problem) -> std::result::Result<Self, Reason> {
        let (shape, g) = (&problem.shape, problem.shape.geometry());
        problem.is_in_nhwc()?;
        if !g.channels().is_multiple_of(PIECE) {
            let got = g.channels();
            return Err(Reason(format!("brings {PIECE} channels of a group at a time, a group has {got}")));
        }
        let config = Config::of([shape.output_pixels(), g.outputs(), g.k(), g.groups], caps);
        fits_31_bits(shape, config.tiles([shape.output_pixels(), g.outputs()]))?;
        if g.groups > 65_535 {
            return Err(Reason("more groups than a launch has rows of blocks".into()));
        }
        let shared = config.shared_bytes(caps.arch);
        if shared > caps.shared_bytes as usize {
            return Err(Reason(format!("needs {shared} bytes of shared memory, a block has {}", caps.shared_bytes)));
        }
        Ok(Self { shape: windows::flat(*shape)?, kind: Kind::of(problem), config })
    }

    /// Output pixels.
    pub fn pixels(&self) -> usize {
        self.shape.output_pixels()
    }

    /// What it is computed by.
    pub fn instance(&self) -> Instance {
        self.config.instance(self.kind)
    }

    /// Puts it into a stream, with a layer whose weight has the shape's outputs and, but for zeros, columns.
    pub fn multiply(&self, gpu: &Gpu, stream: &Stream, layer: &Layer, x: View<'_, u8>, y: Place) -> Result<()> {
        let (shape, config) = (&self.shape, self.config);
        let g: &Geometry = shape.geometry();
        check_addresses(NAME, [x.pointer(), y.address])?;
        let arguments = Arguments {
            layer: Flat(layer.arguments(x, y)),
            m: shape.output_pixels() as i32,
            outputs: g.outputs() as i32,
            steps: g.k().div_ceil(STEP) as i32,
            rows: config.rows(g.outputs()) as i32,
            height: shape.input()[0] as i32,
            width: shape.input()[1] as i32,
            pixel: g.ci as i32,
            padding: 0,
            windows: Windows::new(shape, g.channels()),
        };
        let launch = gpu.overlapping(Launch {
            grid: [config.tiles([shape.output_pixels(), g.outputs()]) as u32, g.groups as u32, 1],
            shared_bytes: config.shared_bytes(gpu.caps().arch) as u32,
            ..Launch::linear(1, THREADS as u32)
        });
        let flags = self.kind.numbers().iter().fold(config.strips, |key, (_, flag)| 2 * key + flag);
        let key = [config.tokens as u32, flags as u32];
        gpu.function_once((NAME, key), || self.instance())?.launch_typed(stream, &launch, &arguments, &[])
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
        self.multiply(gpu, stream, call.layer, call.x, Place::of(&call.y))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_fits_every_processor() {
        for number in [75, 80, 86, 89, 90, 120] {
            let arch = Arch { number, specific: false, ptx: false };
            for config in CONFIGS {
                assert!(config.shared_bytes(arch) <= arch.shared_bytes() as usize, "{arch}: {config}");
            }
        }
    }

    #[test]
    fn few_pixels_have_small_tiles_and_many_have_large_ones() {
        let caps = Caps { multiprocessors: 108, ..Caps::of_arch(Arch { number: 80, specific: false, ptx: false }) };
        assert_eq!(Config::of([1, 1024, 1024, 1], &caps), CONFIGS[3]);
        let many = Config::of([32 * 56 * 56, 512, 1152, 1], &caps);
        assert!(many.tokens * many.strips >= 128, "{many}");
    }
}
