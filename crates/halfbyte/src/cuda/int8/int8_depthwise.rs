//! Convolutions of bytes whose groups have few channels (depthwise), on every processor from sm_75 on: launches of
//! `int8_depthwise.cu`.

use super::int8_depthwise_rows::{self, Rows};
use super::layer::LayerArguments;
use super::{Call, Int8, Kernel, Place, Problem, check_addresses, fits_31_bits};
use crate::cuda::conv::windows::Windows;
use crate::cuda::dispatch::{About, Bind, Configured};
use crate::cuda::driver::{Launch, Stream};
use crate::cuda::parameters::{Flat, Parameters, parameters};
use crate::cuda::sources::{Instance, Source};
use crate::cuda::{Caps, Gpu};
use crate::error::Result;
use crate::format::int8::Byte;
use crate::kernel::Reason;
use crate::layout::cuda_int8::STEP;

static SOURCE: Source = Source {
    path: "int8/int8_depthwise.cu",
    text: include_str!("int8_depthwise.cu"),
    parameters: &[Arguments::LAYOUT],
};

pub(super) const NAME: &str = "int8_depthwise";

pub(super) const KERNEL: Kernel = Kernel::with_one(
    About {
        name: NAME,
        what: "groups of 1, 2, 4 or 8 channels, by dp4a or dp2a: a thread some channels of neighbouring pixels",
        serves: |arch| arch.number >= 75,
        instances: || {
            let kinds: Vec<_> =
                CHANNELS.into_iter().flat_map(|channels| (0..8).map(move |bits| Kind::of(channels, bits))).collect();
            let of_any = kinds.iter().map(|kind| kind.instance());
            of_any.chain(int8_depthwise_rows::instances(&kinds)).collect()
        },
    },
    choose,
);

/// Channels of a group that it is compiled for.
const CHANNELS: [usize; 4] = [1, 2, 4, 8];

/// As in the source: threads of a block, pixels and channels of a thread, slots of so many channels that a block has at most.
const THREADS: usize = 256;
const PIXELS: usize = 2;
const PIECE: usize = 16;
const SLOTS: usize = 8;

/// What the kernel is compiled for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kind {
    /// Of a group.
    pub(super) channels: usize,
    /// Whether x is u8.
    unsigned: bool,
    /// Whether weights have zero points.
    pub(super) zeros: bool,
    /// Whether y is floats, whose type the kernel is told.
    floats: bool,
}

impl Kind {
    fn of(channels: usize, bits: usize) -> Self {
        Self { channels, unsigned: bits & 1 != 0, zeros: bits & 2 != 0, floats: bits & 4 != 0 }
    }

    /// As the sources are told: whether x is u8, whether weights have zero points, whether y is floats.
    pub(super) fn flags(self) -> [usize; 3] {
        [self.unsigned, self.zeros, self.floats].map(usize::from)
    }

    /// What is compiled for any geometry.
    fn instance(self) -> Instance {
        let [unsigned, zeros, floats] = self.flags();
        let numbers = [("C", self.channels), ("UNSIGNED", unsigned), ("ZEROS", zeros), ("FLOATS", floats)];
        Instance::new(&SOURCE, NAME).with(numbers.iter().map(|(name, value)| format!("HB_{name}={value}")))
    }

    /// Of the instance for a form; 0: any geometry.
    pub(super) fn key(self, form: u32) -> [u32; 2] {
        let [unsigned, zeros, floats] = self.flags().map(|flag| flag as u32);
        [self.channels as u32, unsigned + 2 * zeros + 4 * floats + 8 * form]
    }

    /// Columns of an output that a step of the kernel has.
    fn columns(self) -> usize {
        if self.channels == 1 { 4 } else { 2 * self.channels }
    }
}

parameters! {
    /// `Arguments` of the source.
    struct Arguments {
        layer: Flat<LayerArguments>,
        m: i32,
        slots: i32,
        steps: i32,
        atoms: i32,
        height: i32,
        width: i32,
        windows: Windows,
    }
}

fn choose(caps: &Caps, problem: &Problem) -> Bind<Int8> {
    let (shape, g) = (&problem.shape, problem.shape.geometry());
    problem.is_in_nhwc()?;
    if !CHANNELS.contains(&g.channels()) || g.outputs() != g.channels() {
        let (channels, outputs) = (g.channels(), g.outputs());
        let got = format!("a group has {channels} and {outputs}");
        return Err(Reason(format!("computes groups of 1, 2, 4 or 8 channels and as many outputs, {got}")));
    }
    if !g.ci.is_multiple_of(PIECE) {
        return Err(Reason(format!("brings {PIECE} channels at a time, an image has {}", g.ci)));
    }
    let depthwise = Depthwise::of(problem);
    let [tiles, rows] = depthwise.grid();
    fits_31_bits(shape, tiles)?;
    if rows > 65_535 {
        return Err(Reason("more channels than a launch has rows of blocks for".into()));
    }
    match Rows::of(problem, depthwise.kind, caps.multiprocessors as usize) {
        Some(rows) => Ok(Box::new(rows)),
        None => Ok(Box::new(depthwise)),
    }
}

/// A convolution of groups of few channels.
struct Depthwise {
    problem: Problem,
    kind: Kind,
    /// Pieces of 16 channels that a block has.
    slots: usize,
}

impl Depthwise {
    fn of(problem: &Problem) -> Self {
        let g = problem.shape.geometry();
        let kind = Kind {
            channels: g.channels(),
            unsigned: problem.x == Byte::U8,
            zeros: !problem.symmetric,
            floats: problem.floats,
        };
        // As even as they can be.
        let pieces = g.ci / PIECE;
        Self { problem: *problem, kind, slots: pieces.div_ceil(pieces.div_ceil(SLOTS)) }
    }

    /// Blocks along the pixels, and along the channels.
    fn grid(&self) -> [usize; 2] {
        let shape = &self.problem.shape;
        let pixels = THREADS / self.slots * PIXELS;
        [shape.output_pixels().div_ceil(pixels), (shape.geometry().ci / PIECE).div_ceil(self.slots)]
    }
}

impl Configured<Int8> for Depthwise {
    fn text(&self) -> String {
        let channels = self.slots * PIECE;
        format!("groups of {}, {} pixels of {channels} channels", self.kind.channels, THREADS / self.slots * PIXELS)
    }

    fn instances(&self) -> Vec<Instance> {
        vec![self.kind.instance()]
    }

    fn run(&self, gpu: &Gpu, stream: &Stream, call: Call<'_>) -> Result<()> {
        let (shape, layer, kind) = (&self.problem.shape, call.layer, self.kind);
        let (g, y) = (shape.geometry(), Place::of(&call.y));
        check_addresses(NAME, [call.x.pointer(), y.address])?;
        let arguments = Arguments {
            layer: Flat(layer.arguments(call.x, y)),
            m: shape.output_pixels() as i32,
            slots: self.slots as i32,
            steps: g.k().div_ceil(kind.columns()) as i32,
            atoms: g.k().div_ceil(STEP) as i32,
            height: shape.input()[0] as i32,
            width: shape.input()[1] as i32,
            windows: Windows::new(shape, g.channels()),
        };
        let [tiles, rows] = self.grid().map(|size| size as u32);
        let launch = gpu.overlapping(Launch { grid: [tiles, rows, 1], ..Launch::linear(1, THREADS as u32) });
        gpu.function_once((NAME, kind.key(0)), || kind.instance())?.launch_typed(stream, &launch, &arguments, &[])
    }
}
