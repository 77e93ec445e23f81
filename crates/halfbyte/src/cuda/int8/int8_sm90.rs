//! GEMM and implicit GEMM of bytes on Hopper: launches of `int8_sm90.cu`, x as windows on images that the copy engine (TMA) brings.

pub mod config;

use super::{Call, Kernel, Layer, Problem, Target};
use crate::conv::{Conv2dShape, Geometry, Layout2d};
use crate::cuda::conv::windows::{self, Windows};
use crate::cuda::driver::{Arg, Function, Launch, Stream, Swizzle, TensorMap, View};
use crate::cuda::kept::Kept;
use crate::cuda::sources::Source;
use crate::cuda::{Caps, Gpu};
use crate::error::{Error, Result};
use crate::format::int8::Byte;
use crate::kernel::Reason;
use crate::layout::cuda_int8::STEP;
use bytemuck::{Pod, Zeroable};
use config::Config;

static SOURCE: Source = Source { path: "int8/int8_sm90.cu", text: include_str!("int8_sm90.cu") };

const NAME: &str = "int8_sm90";

pub(super) const KERNEL: Kernel = Kernel {
    name: NAME,
    what: "wgmma of bytes from shared memory, windows of images by the copy engine",
    serves: |arch| arch.number == 90 && arch.specific,
    instances: || {
        let all = [false, true].into_iter().flat_map(config::configs);
        all.map(Config::instance).collect()
    },
    supports,
    workspace_bytes: |_| 0,
    run: |gpu, stream, problem, call| launch(gpu, stream, problem, &call, None),
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

fn is_unsigned(layer: &Layer) -> bool {
    layer.x().byte() == Byte::U8
}

/// Pixels, outputs of a group, columns, groups.
fn product_of(shape: &Conv2dShape) -> [usize; 4] {
    let g = shape.geometry();
    [shape.output_pixels(), g.outputs(), g.k(), g.groups]
}

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
    if !g.ci.is_multiple_of(PIECE) {
        return Err(Reason(format!("brings pixels of a multiple of {PIECE} channels, there are {}", g.ci)));
    }
    windows::taken(g, if is_pointwise(g) { PIECE } else { BOX })?;
    let config = config::config(product_of(shape), true, caps.multiprocessors as usize);
    let tiles = config.tiles([shape.output_pixels(), g.outputs()]);
    if [shape.output_pixels(), shape.x_len(), g.co, g.k(), tiles].iter().any(|&size| size > i32::MAX as usize) {
        return refuse("more pixels, columns or tiles than 31 bits count");
    }
    if g.groups > 65_535 {
        return refuse("more groups than a launch has rows of blocks");
    }
    if config::configs(true).iter().any(|config| config.shared_bytes() > caps.shared_bytes as usize) {
        return Err(Reason(format!("needs more shared memory than the {} bytes of a block", caps.shared_bytes)));
    }
    Ok(())
}

/// What a launch was prepared for.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Key {
    x: u64,
    shape: Conv2dShape,
    config: Config,
}

/// What is the same in every launch for a key.
#[derive(Debug)]
struct Prepared {
    map: TensorMap,
    launch: Launch,
    function: Function,
}

impl Prepared {
    fn new(gpu: &Gpu, key: &Key, x: View<'_, u8>) -> Result<Self> {
        let Key { shape, config, .. } = *key;
        let g = shape.geometry();
        let tiles = config.tiles([shape.output_pixels(), g.outputs()]);
        let windows = windows::map(&shape, [config.tokens, BOX], Swizzle::Bytes64);
        Ok(Self {
            map: TensorMap::of_windows(x, 1, &windows)?,
            launch: Launch {
                grid: [tiles as u32, g.groups as u32, 1],
                shared_bytes: config.shared_bytes() as u32,
                programmatic: true,
                ..Launch::linear(1, config.threads() as u32)
            },
            function: gpu.function(&config.instance())?,
        })
    }
}

/// The launches that a layer keeps prepared.
#[derive(Debug, Default)]
pub(super) struct Launches(Kept<Key, Prepared>);

/// `Arguments` of the source.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
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
    height: i32,
    width: i32,
    x_zero: i32,
    y_zero: i32,
    low: f32,
    high: f32,
    channels: i32,
    windows: Windows,
}

/// Puts a layer into a stream with a configuration of the caller's choice out of [`config::configs`]: for measuring which is
/// best. Errors: those of [`super::run`], a configuration for x of the other type.
pub fn run_as(config: Config, gpu: &Gpu, stream: &Stream, call: Call<'_>) -> Result<()> {
    let problem = call.problem()?;
    super::check(&KERNEL, gpu, &problem, &call)?;
    if !config::configs(is_unsigned(call.layer)).contains(&config) {
        return Err(Error::invalid(NAME, "a configuration for the type of x", format!("{config:?}")));
    }
    if call.y.len() == 0 { Ok(()) } else { launch(gpu, stream, &problem, &call, Some(config)) }
}

/// Puts a layer into a stream with a configuration, or the one that is chosen.
fn launch(gpu: &Gpu, stream: &Stream, problem: &Problem, call: &Call<'_>, config: Option<Config>) -> Result<()> {
    let refuse = |why: Reason| Error::invalid(NAME, "a problem that it serves", why.to_string());
    let Target::Bytes(y) = &call.y else { return Err(Error::invalid(NAME, "outputs in bytes", "outputs in floats")) };
    let shape = windows::flat(problem.shape).map_err(refuse)?;
    multiply_as(gpu, stream, call.layer, shape, (call.x, y.pointer()), config)
}

/// The same of images of a shape that it supports, in layers whose weight has the shape's outputs and, but for zeros, columns; y is
/// an address.
pub(super) fn multiply(
    gpu: &Gpu,
    stream: &Stream,
    layer: &Layer,
    shape: Conv2dShape,
    x: View<'_, u8>,
    y: u64,
) -> Result<()> {
    multiply_as(gpu, stream, layer, shape, (x, y), None)
}

fn multiply_as(
    gpu: &Gpu,
    stream: &Stream,
    layer: &Layer,
    shape: Conv2dShape,
    (x, y): (View<'_, u8>, u64),
    config: Option<Config>,
) -> Result<()> {
    let g = *shape.geometry();
    let Some(y_is) = layer.y() else { return Err(Error::invalid(NAME, "outputs in bytes", "outputs in floats")) };
    if [x.pointer(), y].iter().any(|address| !address.is_multiple_of(PIECE as u64)) {
        let got = format!("{:#x} and {y:#x}", x.pointer());
        return Err(Error::invalid(NAME, "x and y that begin at multiples of 16 bytes", got));
    }
    let multiprocessors = gpu.caps().multiprocessors as usize;
    let config = config.unwrap_or_else(|| config::config(product_of(&shape), is_unsigned(layer), multiprocessors));
    let key = Key { x: x.pointer(), shape, config };
    let prepared = layer.launches.0.get(key, |key| Prepared::new(gpu, key, x))?;
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
        rows: config.rows(g.outputs()) as i32,
        height: shape.input()[0] as i32,
        width: shape.input()[1] as i32,
        x_zero: layer.x().zero(),
        y_zero: y_is.zero(),
        low: layer.bounds[0],
        high: layer.bounds[1],
        channels: g.channels() as i32,
        windows: Windows::new(&shape, channels(&g)),
    };
    let args = [Arg::new(&arguments), Arg::new(&prepared.map)];
    // SAFETY: the parameters are the source's; lengths of x and y were checked by the callers, the others are the layer's.
    unsafe { prepared.function.launch(stream, &prepared.launch, &args) }
}
