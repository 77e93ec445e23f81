//! Implicit GEMM on every processor from sm_75 on: `wna16_mma.cu` with windows on images for x, which all threads copy piece by
//! piece.
//!
//! Rows of the product are output pixels. One launch computes all groups of the convolution: their outputs lie one below the other
//! in the weight, those of each filled up to whole strips of 64. Images that the kernel does not read where they lie are copied into
//! the workspace as halfs (`cuda/halfs.cu`): f32, and what is quantised on the fly, as three images in bf16 whose sum they are,
//! over each of which k runs; and channels that are no multiple of 8, filled up.

pub mod config;

use super::columns::Columns;
use super::depthwise;
use super::gemm_1x1::one_part;
use super::weights::Unpacked;
use super::windows::Windows;
use super::{Call, Convolution, Kernel, Problem};
use crate::conv::{Conv2dShape, Geometry};
use crate::cuda::dispatch::Configured;
use crate::cuda::driver::{FloatView, Stream};
use crate::cuda::halfs::{self, PARTS_OF_F32, PIECE, Quantized, Runs};
use crate::cuda::kept::Kept;
use crate::cuda::matmul::wna16_mma::{self, config::Config};
use crate::cuda::matmul::{Packed, Wna16Weights};
use crate::cuda::parameters::{Flat, Parameters, parameters};
use crate::cuda::sources::{Arch, Instance, Source};
use crate::cuda::tiled::{Form, Prepared, Tile, check};
use crate::cuda::{Caps, Gpu, Workspace};
use crate::error::{Error, Result};
use crate::format::{Format, Group, QTensor, WeightFormat, Zeros};
use crate::kernel::{Activation, Reason};
use crate::layout::cuda_wna16::{Atom, STEP, STRIP};
use crate::tensor::Float;
use config::{Sizes, Tiling};

/// The kernel of products, which takes windows besides where they are asked for.
static SOURCE: Source = Source {
    path: "matmul/wna16_mma.cu",
    text: include_str!("../matmul/wna16_mma.cu"),
    parameters: &[ImageArguments::LAYOUT],
};

const NAME: &str = "implicit_gemm_mma";

/// Of weights as products have them, and of those whose groups of outputs, or whose columns, are filled up.
const LAYOUT: &str = "cuda_wna16";
pub(super) const OF_GROUPS: &str = "cuda_wna16_groups";

pub(super) const KERNEL: Kernel = Kernel {
    name: NAME,
    what: "wna16_mma on windows of images, 8 channels at a time: no matrix of patches",
    serves: |arch| arch.number >= 75,
    instances,
    every_instance,
    choose: |caps, problem| {
        let mut all = tilings(caps, problem)?;
        Ok(Box::new(all.swap_remove(0)))
    },
    candidates: |caps, problem| {
        let all = tilings(caps, problem).unwrap_or_default().into_iter();
        all.map(|planned| Box::new(planned) as Box<dyn Configured<Convolution>>).collect()
    },
};

const ALIGNMENT: usize = 256;

/// Multiply-adds of tensor cores that take as long as one of `simt`, at most: on an H200 that kernel did 0.13 to 0.3 T a second, this one
/// 56 to 117, a third of it where x has three parts.
const MOST_MULTIPLIED: usize = 128;

/// Every form for the commonest format, and the smallest for others.
fn instances() -> Vec<Instance> {
    let atom = Atom { group: 0, ..Atom::W4_G128 };
    // The least shared memory, and no bf16: what compiles for every processor.
    let caps = Caps::of_arch(Arch { number: 75, specific: false, ptx: false });
    let wide = Atom { scale: Float::F32, ..atom };
    let forms = [
        (atom, Float::F16, Activation::Relu),
        (Atom { bits: 8, zero: true, group: 32, ..atom }, Float::F32, Activation::Silu),
        (Atom { bits: 8, zero: true, ..atom }, Float::F16, Activation::None),
        (Atom { offset: true, group: 64, ..wide }, Float::F32, Activation::None),
        (Atom { bits: 3, group: 16, ..wide }, Float::BF16, Activation::Gelu),
    ];
    let all = forms.into_iter().flat_map(|(atom, out, activation)| {
        let form = Form { x: Float::F16, ..Form::floats(atom, out) };
        config::configs(atom, out, &caps).into_iter().map(move |config| instance(&form, config, activation))
    });
    all.chain(halfs::instances()).collect()
}

/// Every configuration for a format that is chosen from, with x in each half type, y of that type and in f32, without an activation.
fn every_instance(arch: Arch, format: Format) -> Vec<Instance> {
    // With more columns than any group, and with so few that a row has one.
    let of = |k: usize| {
        let geometry = Geometry { groups: 1, ..Geometry::new(k, 1, [1, 1]) };
        Numbers::of(format, &geometry).ok().map(|numbers| numbers.atom)
    };
    let share = match format.weight.group {
        Group::Size(size) => size.saturating_mul(PIECE),
        _ => STEP,
    };
    let mut atoms: Vec<Atom> = [share, 1].into_iter().filter_map(of).collect();
    atoms.dedup();
    let halfs = [Float::F16, Float::BF16].into_iter().filter(|&x| arch.multiplies(x));
    let forms = halfs.flat_map(|x| [Float::F16, Float::BF16, Float::F32].map(|out| (x, out)));
    let all = forms.flat_map(|(x, out)| atoms.iter().map(move |&atom| Form { x, ..Form::floats(atom, out) }));
    let all = all.flat_map(|form| {
        let configs =
            wna16_mma::devices(arch).into_iter().flat_map(move |caps| config::configs(form.atom, form.out, &caps));
        configs.map(move |config| instance(&form, config, Activation::None))
    });
    let mut all: Vec<_> = all.collect();
    all.sort_by_cached_key(Instance::to_string);
    all.dedup_by_key(|instance| instance.to_string());
    all
}

fn instance(form: &Form, config: Config, activation: Activation) -> Instance {
    let mut instance = Instance { source: &SOURCE, ..config.instance(form, activation) };
    instance.defines.push("HB_IMAGES=1".into());
    instance
}

/// What the numbers of a layer are.
#[derive(Clone, Copy)]
struct Numbers {
    /// That of weights, one level of scales.
    weight: WeightFormat,
    atom: Atom,
    /// Channels of a group, filled up.
    channels: usize,
    /// Rows of the weight that a group has, filled up if there are several.
    rows: usize,
}

impl Numbers {
    /// Those of a layer, or why there are none.
    fn of(format: Format, geometry: &Geometry) -> std::result::Result<Self, Reason> {
        let why = |why: Error| Reason(why.to_string());
        let channels = geometry.channels().next_multiple_of(PIECE);
        let share = geometry.scale_channels(format.weight.group).map_err(why)?;
        let one = format.weight.group.count(geometry.k()) == 1;
        let group = match format.weight.group {
            Group::Tensor | Group::Channel => Group::Channel,
            Group::Size(_) if one => Group::Channel,
            _ if channels == geometry.channels() => Group::Size(share),
            // What is filled up has the scale of its position.
            _ if share == geometry.channels() => Group::Size(channels),
            _ => return Err(Reason("fills up channels where a position has one scale, or a row".into())),
        };
        let scale = if format.weight.channel_scale.is_some() { Float::F32 } else { format.weight.scale };
        let weight = WeightFormat { group, scale, channel_scale: None, ..format.weight };
        let rows = match geometry.groups {
            1 => geometry.co,
            _ => geometry.outputs().next_multiple_of(STRIP),
        };
        let atom = Atom::of_any(weight, geometry.positions().saturating_mul(channels)).map_err(why)?;
        Ok(Self { weight, atom, channels, rows })
    }

    /// Whether the weight is as products have it.
    fn keeps(&self, geometry: &Geometry) -> bool {
        geometry.groups == 1 && self.channels == geometry.channels()
    }

    /// Whether so little of what tensor cores multiply is of the layer that ordinary threads are as fast.
    fn is_wasted(&self, geometry: &Geometry) -> bool {
        let [rows, k] = self.shape(geometry);
        let multiplied = rows.saturating_mul(k.next_multiple_of(STEP));
        multiplied / MOST_MULTIPLIED > geometry.co.saturating_mul(geometry.k())
    }

    fn shape(&self, geometry: &Geometry) -> [usize; 2] {
        [self.rows * geometry.groups, self.channels * geometry.positions()]
    }

    fn columns(&self, geometry: &Geometry) -> Columns {
        let (of_position, of_group) = (self.channels, self.rows);
        Columns { of_row: geometry.kernel[1] * of_position, of_position, of_group }
    }

    /// A weight with its rows and columns filled up, by numbers that nothing is multiplied by.
    fn fill(&self, w: &QTensor, geometry: &Geometry) -> Result<QTensor> {
        let by_row = match w.format().channel_scale.is_some() || w.format().group == Group::Tensor {
            // One level of scales, one for each row at least.
            true => {
                let group = if w.format().group == Group::Tensor { Group::Channel } else { w.format().group };
                w.express(WeightFormat { scale: self.weight.scale, channel_scale: None, group, ..w.format() })?
            }
            false => std::borrow::Cow::Borrowed(w),
        };
        let (w, k, groups) = (by_row.as_ref(), w.k(), self.weight.group.count(self.shape(geometry)[1]));
        let outputs = geometry.outputs();
        let row = |i: usize| i / self.rows * outputs + (i % self.rows).min(outputs - 1);
        let [n, wide] = self.shape(geometry);
        let (mut codes, mut scales) = (Vec::with_capacity(n * wide), Vec::with_capacity(n * groups));
        let (mut points, mut offsets) = (Vec::new(), Vec::new());
        for i in (0..n).map(row) {
            for position in w.codes()[i * k..(i + 1) * k].chunks(geometry.channels()) {
                codes.extend_from_slice(position);
                codes.resize(codes.len() + self.channels - geometry.channels(), 0);
            }
            let of_row = i * groups..(i + 1) * groups;
            scales.extend_from_slice(&w.scales()[of_row.clone()]);
            match w.zeros() {
                Zeros::Symmetric => {}
                Zeros::Integer(zeros) => points.extend_from_slice(&zeros[of_row]),
                Zeros::Float(zeros) => offsets.extend_from_slice(&zeros[of_row]),
            }
        }
        let zeros = match w.zeros() {
            Zeros::Symmetric => Zeros::Symmetric,
            Zeros::Integer(_) => Zeros::Integer(points),
            Zeros::Float(_) => Zeros::Float(offsets),
        };
        QTensor::new(self.weight, [n, wide], codes, scales, zeros, None)
    }
}

/// How the kernel has x: its type, where it is read, and in how many parts; or why it does not.
fn x_of(arch: Arch, problem: &Problem, numbers: &Numbers) -> std::result::Result<X, Reason> {
    let quantized = problem.format.is_some_and(|format| format.act.is_quantized());
    let wide = quantized || problem.x == Float::F32;
    let half = if wide { Float::BF16 } else { problem.x };
    if !arch.multiplies(half) {
        return Err(Reason(format!(
            "multiplies x in f16 on {arch}; x is {}",
            if quantized { "quantised" } else { problem.x.name() }
        )));
    }
    let lies = !wide && numbers.channels == problem.shape.geometry().channels();
    Ok(X { half, parts: if wide { PARTS_OF_F32 } else { 1 }, lies })
}

/// How the kernel has x.
#[derive(Clone, Copy, Debug, PartialEq)]
struct X {
    half: Float,
    parts: usize,
    lies: bool,
}

/// A weight as this kernel has it, and where its rows and columns lie, if it serves the layer and the numbers.
pub(super) fn weight(of: &Unpacked<'_>) -> Result<Option<(QTensor, Columns)>> {
    let Unpacked { caps, w, format, geometry, x } = *of;
    let wide = format.act.is_quantized() || x == Float::F32;
    let serves = (KERNEL.serves)(caps.arch)
        && depthwise::takes(geometry).is_err()
        && caps.arch.multiplies(if wide { Float::BF16 } else { x });
    let numbers = Numbers::of(format, geometry).ok();
    let Some(numbers) = numbers.filter(|numbers| serves && !numbers.is_wasted(geometry)) else { return Ok(None) };
    Ok(Some((numbers.fill(w, geometry)?, numbers.columns(geometry))))
}

fn tilings(caps: &Caps, problem: &Problem) -> std::result::Result<Vec<Planned>, Reason> {
    let refuse = |why: &str| Err(Reason(why.into()));
    let Problem { format: Some(format), shape, y: out, packed, .. } = *problem else {
        return refuse("multiplies codes, the weights are dense");
    };
    let g = shape.geometry();
    let numbers = Numbers::of(format, g)?;
    let as_products = numbers.keeps(g) && packed == LAYOUT;
    if !as_products && packed != OF_GROUPS {
        let expected = if numbers.keeps(g) { LAYOUT } else { OF_GROUPS };
        return Err(Reason(format!("reads layout {expected}, the weights lie in {packed}")));
    }
    if as_products && format.act.is_quantized() {
        return refuse("leaves codes of x to kernels that multiply them as integers");
    }
    problem.is_in_nhwc()?;
    let x = x_of(caps.arch, problem, &numbers)?;
    let [rows, k] = numbers.shape(g);
    let elements = shape.input_pixels().saturating_mul(numbers.channels.saturating_mul(g.groups));
    let reach = [0, 1].map(|axis| (g.kernel[axis] - 1).saturating_mul(g.dilation[axis]));
    let padded = [0, 1].map(|axis| shape.input()[axis] + g.padding[axis] + g.padding[axis + 2]);
    let sizes = [shape.output_pixels(), elements, shape.x_len(), rows, k, g.co, padded[0], padded[1]];
    if sizes.iter().any(|&size| size > i32::MAX as usize) || reach.iter().any(|&reach| reach >= 1 << 29) {
        return refuse("more pixels or columns than 31 bits count");
    }
    // Pieces are divided by their number in a position, and positions by the kernel's columns, as products by 2^32 over them.
    let pieces = k.next_multiple_of(STEP) / PIECE;
    let exact = |numbers: usize, divisor: usize| numbers.saturating_mul(divisor) < 1 << 32;
    if !exact(pieces, numbers.channels / PIECE) || !exact(pieces, g.kernel[1]) {
        return refuse("more columns of a position than 32 bits of a product tell apart");
    }
    let steps_of_w = k.div_ceil(STEP);
    let strips_of_group = (g.groups > 1).then_some(numbers.rows / STRIP);
    let sizes = Sizes { pixels: shape.output_pixels().max(1), rows, steps: x.parts * steps_of_w, strips_of_group };
    let form = Form { x: x.half, ..Form::floats(numbers.atom, out) };
    let act = format.act.is_quantized().then_some(format.act);
    let share = g.scale_channels(format.weight.activation_group()).map_err(|why| Reason(why.to_string()))?;
    let all = config::tilings(numbers.atom, sizes, out, caps);
    let patches = config::time_of_patches([shape.output_pixels(), g.co, k], caps);
    if as_products && x.lies && caps.arch.is_hopper() && all.first().is_some_and(|&(time, _)| time > patches) {
        return refuse("leaves it to im2col_gemm, which multiplies patches by wgmma in less time");
    }
    let planned = |(_, tiling): (usize, Tiling)| {
        check(caps, &form, &tiling)?;
        let act = act.map(|act| (act, share));
        Ok(Planned { shape, numbers, x, x_type: problem.x, act, form, tiling, launches: Kept::default() })
    };
    let all = all.into_iter().map(planned).collect::<Vec<std::result::Result<_, Reason>>>();
    let none = Reason("has no form that the device has room for".into());
    let why = all.iter().find_map(|one| one.as_ref().err().cloned()).unwrap_or(none);
    let all: Vec<_> = all.into_iter().flatten().collect();
    if all.is_empty() { Err(why) } else { Ok(all) }
}

/// A problem with a tiling, and the launches that are kept prepared: by the activation.
struct Planned {
    shape: Conv2dShape,
    numbers: Numbers,
    x: X,
    x_type: Float,
    act: Quantized,
    form: Form,
    tiling: Tiling,
    launches: Kept<Activation, Prepared>,
}

impl Planned {
    fn parts_bytes(&self) -> usize {
        self.tiling.0.parts_bytes(&self.tiling.1)
    }

    /// Elements of a part of x.
    fn part(&self) -> usize {
        self.shape.input_pixels() * self.shape.geometry().groups * self.numbers.channels
    }

    /// Where the copy of x begins in the workspace.
    fn copy_at(&self) -> usize {
        (Workspace::COUNTER_BYTES + self.parts_bytes()).next_multiple_of(ALIGNMENT)
    }

    /// Puts a copy of x into a stream where it is not read itself, and says where the kernel reads it.
    fn images(&self, gpu: &Gpu, stream: &Stream, x: FloatView<'_>, workspace: u64) -> Result<u64> {
        if self.x.lies {
            return match x.pointer().is_multiple_of(2 * PIECE as u64) {
                true => Ok(x.pointer()),
                false => Err(Error::invalid(NAME, "x at a multiple of 16 bytes", format!("{:#x}", x.pointer()))),
            };
        }
        let to = workspace + self.copy_at() as u64;
        let g = self.shape.geometry();
        let (runs, filled) = (self.shape.input_pixels() * g.groups, self.numbers.channels);
        let images = Runs { runs, length: g.channels(), filled };
        images.split(gpu, stream, (x.dtype(), self.act), [x.pointer(), to])?;
        Ok(to)
    }

    /// The weight, if it is the one that was planned for.
    fn weight<'a>(&self, call: &Call<'a>) -> Result<&'a Wna16Weights> {
        let (shape, atom) = (self.numbers.shape(self.shape.geometry()), self.numbers.atom);
        match one_part(NAME, &call.w.kind)? {
            Packed::Wna16(w) if w.shape() == shape && w.atom() == atom => Ok(w),
            other => {
                let got = format!("{:?} in layout {}", other.shape(), other.layout());
                Err(Error::invalid(NAME, format!("a weight of {shape:?} in {atom:?}"), got))
            }
        }
    }
}

impl Configured<Convolution> for Planned {
    fn text(&self) -> String {
        let parts = if self.x.parts > 1 { format!(" of {} parts of x", self.x.parts) } else { String::new() };
        format!("{}{parts} {}", self.tiling.0, if self.parts_bytes() > 0 { "cut" } else { "whole" })
    }

    fn instances(&self) -> Vec<Instance> {
        let copies = (!self.x.lies).then(|| halfs::instance(self.x_type, self.act));
        copies.into_iter().chain([instance(&self.form, self.tiling.0, Activation::None)]).collect()
    }

    fn workspace_bytes(&self) -> usize {
        self.copy_at() + if self.x.lies { 0 } else { 2 * self.x.parts * self.part() }
    }

    fn run(&self, gpu: &Gpu, stream: &Stream, call: Call<'_>) -> Result<()> {
        let Self { shape, numbers, form, tiling, .. } = self;
        let addresses = [call.y_at(0), call.bias_at(0), call.room(NAME)?.pointer()];
        let (g, w) = (shape.geometry(), self.weight(&call)?);
        let prepared = self.launches.get(call.epilogue.activation, |&activation| {
            Prepared::new(gpu, &instance(form, tiling.0, activation), form, *tiling, Vec::new())
        })?;
        let x = self.images(gpu, stream, call.x, addresses[2])?;
        let reciprocal = |divisor: usize| (1u64 << 32).div_ceil(divisor as u64);
        let arguments = ImageArguments {
            product: Flat(wna16_mma::Arguments::of_images(
                w.into(),
                &prepared.schedule,
                addresses,
                shape.output_pixels(),
                x,
            )),
            windows: Windows::new(shape, numbers.channels),
            height: shape.input()[0] as i32,
            width: shape.input()[1] as i32,
            pixel: (g.groups * numbers.channels) as i32,
            outputs: g.outputs() as i32,
            strips: numbers.rows.div_ceil(STRIP) as i32,
            steps_of_w: numbers.shape(g)[1].div_ceil(STEP) as i32,
            part: self.part() as u64,
            of_channels: reciprocal(numbers.channels / PIECE),
            of_columns: reciprocal(g.kernel[1]),
        };
        prepared.function.launch_typed(stream, &prepared.launch, &arguments, &[])
    }
}

parameters! {
    /// `ImageArguments` of the source.
    struct ImageArguments {
        product: Flat<wna16_mma::Arguments>,
        windows: Windows,
        height: i32,
        width: i32,
        pixel: i32,
        outputs: i32,
        strips: i32,
        steps_of_w: i32,
        part: u64,
        of_channels: u64,
        of_columns: u64,
    }
}
