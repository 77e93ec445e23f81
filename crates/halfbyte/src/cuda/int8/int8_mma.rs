//! GEMM and implicit GEMM of bytes on every processor from sm_75 on: launches of `int8_mma.cu`, x as windows on images whose
//! pixels have a multiple of 16 channels of a group; for `int8_mma_narrow` of any number.

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
    candidates: |caps, problem| Implicit::of(caps, problem).map_or_else(|_| Vec::new(), Implicit::in_every_config),
};

/// Channels that are brought at once, and begin at multiples of so many bytes.
pub(super) const PIECE: usize = 16;

/// As in the source: threads of a block, outputs of a warp in a strip.
const THREADS: usize = 256;
const OF_WARP: usize = 16;

/// Clocks of the beginning and the end of a tile, and from the request of a stage to its arrival; bytes from the second-level cache that a
/// multiprocessor has in a clock. As for `int8_sm90`, from an H200.
const TILE: usize = 3000;
const LATENCY: usize = 2000;
const BYTES: usize = 56;

/// Instructions of a thread for a piece of fewer channels, and those of all threads that a multiprocessor begins in a clock.
const OF_NARROW_PIECE: usize = 10;
const INSTRUCTIONS: usize = 128;

/// What the kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Kind {
    /// Channels that are brought at once.
    piece: usize,
    /// Type of the bytes of x.
    x: Byte,
    /// Whether weights have zero points; with narrow pieces, whether they may.
    zeros: bool,
    /// Whether y is floats, whose type the kernel is told.
    floats: bool,
}

impl Kind {
    fn all() -> impl Iterator<Item = Self> {
        let bytes = [Byte::I8, Byte::U8].into_iter();
        let with_zeros = bytes.flat_map(|x| [false, true].map(|zeros| (x, zeros)));
        with_zeros.flat_map(|(x, zeros)| [false, true].map(|floats| Self { piece: PIECE, x, zeros, floats }))
    }

    /// Those of narrow pieces: one for weights with zero points and without.
    fn all_narrow() -> impl Iterator<Item = Self> {
        let wide = Self::all().filter(|kind| kind.zeros);
        wide.flat_map(|kind| NARROW_PIECES.map(|piece| Self { piece, ..kind }))
    }

    fn of(problem: &Problem) -> Self {
        let piece = piece_of(problem.shape.geometry().channels());
        Self { piece, x: problem.x, zeros: piece < PIECE || !problem.symmetric, floats: problem.floats }
    }

    /// Forms of a tile that it is compiled in.
    fn configs(self) -> [Config; 4] {
        if self.piece < PIECE { NARROW_CONFIGS } else { CONFIGS }
    }

    /// What the source calls them, and their values.
    fn numbers(self) -> [(&'static str, usize); 4] {
        let [unsigned, zeros, floats] = [self.x == Byte::U8, self.zeros, self.floats].map(usize::from);
        [("PIECE", self.piece), ("UNSIGNED", unsigned), ("ZEROS", zeros), ("FLOATS", floats)]
    }
}

/// Channels that are brought at once where those of a group are no multiple of 16.
const NARROW_PIECES: [usize; 4] = [8, 4, 2, 1];

/// Channels that are brought at once: the most that divide those of a group. Then a piece has those of one position, and begins at
/// a multiple of its size: pixels are whole groups.
fn piece_of(channels: usize) -> usize {
    1 << channels.trailing_zeros().min(PIECE.trailing_zeros())
}

/// How the kernel divides a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Config {
    /// Pixels of a tile.
    tokens: usize,
    /// Strips of 64 outputs.
    strips: usize,
}

/// Those of pieces of 16 channels.
const CONFIGS: [Config; 4] = [
    Config { tokens: 128, strips: 2 },
    Config { tokens: 64, strips: 2 },
    Config { tokens: 64, strips: 1 },
    Config { tokens: 32, strips: 1 },
];

/// Those of narrow pieces: groups with few channels often have few outputs. The one that brings pixels once comes later of two as large.
const NARROW_CONFIGS: [Config; 4] = [
    Config { tokens: 128, strips: 1 },
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
    fn of(kind: Kind, [m, n, k, groups]: [usize; 4], caps: &Caps) -> Self {
        // Multiply-adds of a multiprocessor in a clock: of graphics cards half as many as of processors of data centres.
        let products = if matches!(caps.arch.number, 80 | 87 | 90..120) { 2048 } else { 1024 };
        let time = |config: &Self| {
            let tiles = config.tiles([m, n]).saturating_mul(groups);
            let multiprocessors = caps.multiprocessors.max(1) as usize;
            let most = (caps.shared_bytes as usize + 1024) / (config.shared_bytes(caps.arch) + 1024);
            let most = most.clamp(1, config.blocks(kind, caps.arch));
            let (together, rounds) =
                (tiles.div_ceil(multiprocessors).min(most), tiles.div_ceil(most * multiprocessors));
            // With narrow pieces, rows of outputs that are not there are neither brought nor multiplied.
            let outputs = match kind.piece {
                PIECE => config.strips * STRIP,
                _ => n.div_ceil(config.rows(n).max(1)).next_multiple_of(OF_WARP),
            };
            let pixels = config.tokens;
            let pieces = if kind.piece < PIECE { pixels * k.min(STEP) / kind.piece } else { 0 };
            let of_stage = (outputs * pixels * STEP / products)
                .max((outputs + pixels) * STEP / BYTES)
                .max(pieces * OF_NARROW_PIECE / INSTRUCTIONS);
            let unit = (together * of_stage).max(LATENCY / (stages(caps.arch) - 1));
            rounds.saturating_mul(k.div_ceil(STEP).saturating_mul(unit).saturating_add(TILE))
        };
        // Of equals the smallest: more blocks.
        let configs = kind.configs();
        configs.into_iter().rev().min_by_key(time).unwrap_or(configs[0])
    }

    /// Tiles of a group's pixels and outputs.
    fn tiles(self, [m, n]: [usize; 2]) -> usize {
        m.div_ceil(self.tokens).saturating_mul(self.rows(n))
    }

    /// Tiles along the outputs of a group.
    fn rows(self, n: usize) -> usize {
        n.div_ceil(STRIP).div_ceil(self.strips)
    }

    /// Blocks of a multiprocessor, at most: of narrow pieces as in the source.
    fn blocks(self, kind: Kind, arch: Arch) -> usize {
        match (self.tokens * self.strips, kind.piece < PIECE && arch.number >= 80) {
            (..=32, true) => 4,
            (..=64, true) => 3,
            _ => 2,
        }
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
        problem.is_in_nhwc()?;
        let got = problem.shape.geometry().channels();
        if !got.is_multiple_of(PIECE) {
            return Err(Reason(format!("brings {PIECE} channels of a group at a time, a group has {got}")));
        }
        Self::of_any_channels(caps, problem)
    }

    /// The same of images in nhwc, whatever the number of channels of a group.
    pub fn of_any_channels(caps: &Caps, problem: &Problem) -> std::result::Result<Self, Reason> {
        let (shape, g, kind) = (&problem.shape, problem.shape.geometry(), Kind::of(problem));
        let config = Config::of(kind, [shape.output_pixels(), g.outputs(), g.k(), g.groups], caps);
        fits_31_bits(shape, config.tiles([shape.output_pixels(), g.outputs()]))?;
        if g.groups > 65_535 {
            return Err(Reason("more groups than a launch has rows of blocks".into()));
        }
        let shared = config.shared_bytes(caps.arch);
        if shared > caps.shared_bytes as usize {
            return Err(Reason(format!("needs {shared} bytes of shared memory, a block has {}", caps.shared_bytes)));
        }
        Ok(Self { shape: windows::flat(*shape)?, kind, config })
    }

    /// In every configuration, to be measured.
    pub fn in_every_config(self) -> Vec<Box<dyn Configured<Int8>>> {
        self.kind.configs().map(|config| Box::new(Self { config, ..self }) as Box<dyn Configured<Int8>>).into()
    }

    /// Output pixels.
    pub fn pixels(&self) -> usize {
        self.shape.output_pixels()
    }

    /// What it is computed by.
    pub fn instance(&self) -> Instance {
        self.config.instance(self.kind)
    }

    /// Of the instance.
    fn key(&self) -> [u32; 2] {
        let [(_, piece), flags @ ..] = self.kind.numbers();
        let flags = flags.iter().fold(self.config.strips, |key, (_, flag)| 2 * key + flag);
        [(self.config.tokens * 2 * PIECE + piece) as u32, flags as u32]
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
        gpu.function_once((NAME, self.key()), || self.instance())?.launch_typed(stream, &launch, &arguments, &[])
    }
}

impl Configured<Int8> for Implicit {
    fn text(&self) -> String {
        match self.kind.piece {
            PIECE => format!("implicit, {}", self.config),
            piece => format!("implicit, {}, {piece} channels at a time", self.config),
        }
    }

    fn instances(&self) -> Vec<Instance> {
        vec![self.instance()]
    }

    fn run(&self, gpu: &Gpu, stream: &Stream, call: Call<'_>) -> Result<()> {
        self.multiply(gpu, stream, call.layer, call.x, Place::of(&call.y))
    }
}

/// What is compiled for narrow pieces.
pub(super) fn narrow_instances() -> Vec<Instance> {
    Kind::all_narrow().flat_map(|kind| kind.configs().map(|config| config.instance(kind))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIND: Kind = Kind { piece: PIECE, x: Byte::U8, zeros: false, floats: false };

    #[test]
    fn every_form_fits_every_processor() {
        for number in [75, 80, 86, 89, 90, 120] {
            let arch = Arch { number, specific: false, ptx: false };
            for config in CONFIGS.into_iter().chain(NARROW_CONFIGS) {
                assert!(config.shared_bytes(arch) <= arch.shared_bytes() as usize, "{arch}: {config}");
            }
        }
    }

    #[test]
    fn few_pixels_have_small_tiles_and_many_have_large_ones() {
        let caps = Caps { multiprocessors: 108, ..Caps::of_arch(Arch { number: 80, specific: false, ptx: false }) };
        assert_eq!(Config::of(KIND, [1, 1024, 1024, 1], &caps), CONFIGS[3]);
        let many = Config::of(KIND, [32 * 56 * 56, 512, 1152, 1], &caps);
        assert!(many.tokens * many.strips >= 128, "{many}");
    }
    #[test]
    fn a_piece_divides_the_channels_of_a_group() {
        for (channels, piece) in
            [(1, 1), (2, 2), (3, 1), (4, 4), (6, 2), (8, 8), (20, 4), (24, 8), (40, 8), (48, 16), (64, 16)]
        {
            assert_eq!(piece_of(channels), piece, "{channels}");
        }
        assert!((1..300).all(|channels| channels % piece_of(channels) == 0));
        assert!((1..300).all(|channels| piece_of(channels) == PIECE || channels % (2 * piece_of(channels)) != 0));
    }

    #[test]
    fn few_outputs_of_narrow_groups_have_one_strip() {
        let caps = Caps { multiprocessors: 132, ..Caps::of_arch(Arch { number: 90, specific: true, ptx: false }) };
        let kind = Kind { piece: 8, zeros: true, ..KIND };
        for sizes in [[8 * 56 * 56, 12, 216, 64], [16 * 32 * 32, 16, 72, 8], [1, 64, 72, 3]] {
            assert_eq!(Config::of(kind, sizes, &caps).strips, 1, "{sizes:?}");
        }
        assert_eq!(Config::of(kind, [1, 12, 216, 2], &caps), NARROW_CONFIGS[3]);
        assert_eq!(Config::of(kind, [32 * 56 * 56, 128, 360, 2], &caps), NARROW_CONFIGS[1]);
    }

    #[test]
    fn every_kernel_has_a_key_of_its_own() {
        let kinds = Kind::all().chain(Kind::all_narrow());
        let all = kinds.flat_map(|kind| kind.configs().map(|config| Implicit { shape: one(), kind, config }));
        let mut keys: Vec<_> = all.map(|implicit| (implicit.key(), implicit.instance().to_string())).collect();
        let count = keys.len();
        keys.sort();
        keys.dedup_by_key(|(key, _)| *key);
        assert_eq!((keys.len(), count), (96, 96));
    }

    fn one() -> Conv2dShape {
        Conv2dShape::new(Geometry::new(16, 1, [1, 1]), 1, [1, 1]).unwrap()
    }
}
