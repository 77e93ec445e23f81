//! Convolutions on a CPU: products whose rows are windows on images.
//!
//! ```text
//! x to pixels, if it lies in planes; with quantised activations, pixels to codes            (once, all threads)
//! exact activations, by vectors:
//!     for each strip of output pixels × group of channels:                                  (a task each)
//!         what the strip's windows see, with its padding, in f32                            in the cache
//!         windows where they lie × weights, epilogue, to pixels or planes
//! quantised activations, and AMX tiles:
//!     for each slab of output pixels × group of channels:                                   (a task each)
//!         panels of what the slab's windows see, gathered                                   in the cache
//!         panels × weights, by the kernels and drivers of `matmul`, epilogue, to pixels or planes
//! ```
//!
//! No bit depends on the number of threads: slabs are cut by the shape alone, and each output of a strip is a sum of its own. Where there are
//! fewer of them than threads, threads share the outputs of each. One channel a group goes to `depthwise`.

pub(crate) mod depthwise;
pub mod explain;
mod images;
pub(crate) mod int8;
mod strips;
mod windows;

use super::Cpu;
use super::matmul::{self, Epilogue, Input, Kernel, Output, Packed, Pixels, Placed, Plans, Rows};
use super::patches::Patches;
use crate::conv::{Conv2dShape, Layout2d};
use crate::error::Result;
use crate::kernel::Problem;
use crate::layout::Lines;
use crate::layout::cpu_n16::PANEL;
use crate::tensor::{Float, Floats, FloatsMut};
use depthwise::Depthwise;
use std::cell::RefCell;
use std::ops::Range;
use strips::Strips;

/// Bytes of a slab's panels of x: half of a level-2 cache of 1 MiB, less the weights' share.
const SLAB_BYTES: usize = 384 << 10;

/// Rows of a slab: enough to pay for bringing weights to registers' form, few enough for the tasks to come out even.
const SLAB_ROWS: Range<usize> = 64..193;

/// Output pixels from which on windows are multiplied where they lie: copies of fewer fit one tile, which multiplies weights as they are packed.
const LEAST_IN_PLACE: usize = 9;

/// Weights in the form that they are multiplied in.
#[derive(Debug)]
pub(crate) enum Weights {
    /// One product for each group of channels.
    Products(Vec<Packed>),
    /// One input channel a group.
    Depthwise(Depthwise),
}

/// One convolution.
pub(crate) struct Call<'a> {
    pub shape: &'a Conv2dShape,
    pub x: Floats<'a>,
    pub x_layout: Layout2d,
    pub weights: &'a Weights,
    /// The kernels that were chosen for its products.
    pub plans: &'a Plans,
    pub epilogue: Epilogue<'a>,
    pub y: FloatsMut<'a>,
    pub y_layout: Layout2d,
}

/// Buffers that a device keeps from convolution to convolution.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    /// x pixel by pixel.
    images: Lines,
    /// x as `depthwise` multiplies it; y pixel by pixel, where bytes become planes.
    wide: Lines,
    /// Bytes of x, each channel as often as it has outputs.
    repeated: Lines,
    /// Bytes of x with their padding, unsigned.
    padded: Lines,
    encoded: matmul::Scratch,
}

thread_local! {
    /// Panels of the slab that this thread computes.
    static SLAB: RefCell<matmul::Scratch> = RefCell::default();

    /// The strip that it multiplies.
    static STRIP: RefCell<strips::Room> = RefCell::default();
}

/// Computes a convolution whose lengths have been checked. Error: no kernel serves the product.
pub(crate) fn run(cpu: &Cpu, call: Call<'_>) -> Result<()> {
    let Call { shape, x, x_layout, weights, plans, epilogue, y, y_layout } = call;
    let (m, geometry) = (shape.output_pixels(), shape.geometry());
    let kernel = match weights {
        Weights::Products(w) => Some(plans.of_windows(&cpu.caps(), &problem(shape, &w[0], [x.dtype(), y.dtype()]))?),
        Weights::Depthwise(_) => None,
    };
    if m == 0 {
        return Ok(());
    }
    let y = match y_layout {
        Layout2d::Nhwc => Output::new(y, [m, geometry.co], epilogue),
        Layout2d::Nchw => Output::planes(y, [m, geometry.co], shape.output().iter().product(), epilogue),
    };
    cpu.conv_scratch.with(|Scratch { images, wide, encoded, .. }| {
        let x = match x_layout {
            Layout2d::Nhwc => x,
            Layout2d::Nchw => images::to_pixels(cpu, x, shape, images),
        };
        match (weights, kernel) {
            (Weights::Products(w), Some(kernel)) => products(cpu, kernel, shape, x, w, encoded, &y),
            (Weights::Depthwise(w), _) => w.run(cpu, shape, x, wide, &y),
            (Weights::Products(_), None) => unreachable!("products have a kernel"),
        }
    });
    Ok(())
}

/// The product whose kernel multiplies: that of all output pixels at once.
pub(crate) fn problem(shape: &Conv2dShape, w: &Packed, [x, y]: [Float; 2]) -> Problem {
    Problem { format: w.format(), x, y, m: shape.output_pixels(), n: w.n(), k: w.k() }
}

fn products(
    cpu: &Cpu,
    kernel: &Kernel,
    shape: &Conv2dShape,
    x: Floats<'_>,
    weights: &[Packed],
    encoded: &mut matmul::Scratch,
    y: &Output<'_>,
) {
    let geometry = shape.geometry();
    let (k, groups, outputs) = (geometry.k(), geometry.groups, geometry.outputs());
    if kernel.placed && !matches!(&weights[0], Packed::Quantized(_, act) if act.is_quantized()) {
        return products_of_strips(cpu, kernel, shape, x, weights, y);
    }
    let pixels = match &weights[0] {
        Packed::Quantized(w, act) if act.is_quantized() && !shape.is_product() => {
            let pixels = Pixels::new(w, *act, geometry.positions());
            pixels.encode(cpu, x, shape.input_pixels() * groups, encoded);
            Some(pixels)
        }
        _ => None,
    };
    let row_bytes = match &weights[0] {
        Packed::Quantized(_, act) if act.is_quantized() => k,
        _ => k * 4,
    };
    let slabs = Slabs::new(shape.output_pixels(), row_bytes);
    let part = |i: usize| {
        let (group, rows) = (i % groups, slabs.rows(i / groups));
        let from = match &pixels {
            Some(pixels) => Rows::Encoded(pixels.windows(encoded, shape, [group, rows.start])),
            None if shape.is_product() => Rows::Matrix(x.slice(rows.start * k..rows.end * k)),
            None => Rows::Patches(x, Patches::new(shape, group, rows.start, geometry.channels())),
        };
        let input = Input { x: from, m: rows.len(), w: &weights[group] };
        let y = y.part(rows, group * outputs..(group + 1) * outputs);
        SLAB.with_borrow_mut(|scratch| matmul::run_part(kernel, cpu, scratch, &input, &y));
    };
    let parts = slabs.count * groups;
    if parts >= cpu.threads().count() {
        cpu.threads().run(parts, &part);
    } else {
        (0..parts).for_each(part);
    }
}

/// The product of exact activations, of windows where they lie. Where strips are too few for all threads, several share the outputs of one, and each
/// makes the strip for itself.
fn products_of_strips(
    cpu: &Cpu,
    kernel: &Kernel,
    shape: &Conv2dShape,
    x: Floats<'_>,
    weights: &[Packed],
    y: &Output<'_>,
) {
    let (threads, groups, outputs) = (cpu.threads().count(), weights.len(), shape.geometry().outputs());
    let strips = Strips::new(shape, threads);
    let parts = strips.count() * groups;
    let in_place = weights[0].is_in_order() && shape.output_pixels() >= LEAST_IN_PLACE;
    let shares = if in_place { threads.div_ceil(parts).min(outputs.div_ceil(PANEL)) } else { 1 };
    cpu.threads().run(parts * shares, &|i| {
        let (part, share) = (i / shares, i % shares);
        let (strip, group) = (part / groups, part % groups);
        let rows = strips.rows(strip);
        let y = y.part(rows.clone(), group * outputs..(group + 1) * outputs);
        STRIP.with_borrow_mut(|room| {
            let strip = strips.make(x, strip, group, room);
            let x =
                Rows::Placed(Placed::new(strip.x, strips.runs(), strip.starts, in_place.then_some([share, shares])));
            let input = Input { x, m: rows.len(), w: &weights[group] };
            SLAB.with_borrow_mut(|scratch| matmul::run_part(kernel, cpu, scratch, &input, &y));
        });
    });
}

/// Output pixels, cut evenly.
#[derive(Clone, Copy, Debug)]
struct Slabs {
    rows: usize,
    count: usize,
}

impl Slabs {
    fn new(rows: usize, row_bytes: usize) -> Self {
        let most = (SLAB_BYTES / row_bytes.max(1)).clamp(SLAB_ROWS.start, SLAB_ROWS.end - 1);
        Self { rows, count: rows.div_ceil(most) }
    }

    fn rows(&self, slab: usize) -> Range<usize> {
        let share = |slab: usize| (slab as u128 * self.rows as u128 / self.count as u128) as usize;
        share(slab)..share(slab + 1)
    }
}
