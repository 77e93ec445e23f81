//! Convolutions of bytes: products whose rows are read in the image, and a loop of its own for one channel a group.
//!
//! ```text
//! x to pixels, if it lies in planes; into its padding, of x's zero point, and unsigned      (once, all threads)
//! products:   for each group of channels:  int8::multiply, with rows as they lie in the image
//! depthwise:  for each output pixel:  c = Σ x[position] · (w − zW)[position]                int32, channels in registers
//! epilogue, as that of products; bytes of y to planes, if they lie so, floats straight to theirs
//! ```
//!
//! A window is a few runs of bytes (`windows.rs`). Where those are no multiples of 4 bytes, rows are gathered as they are needed,
//! as those of floats are; and so they are where images with their padding would be larger than all rows together.

use super::images;
use super::windows::{self, Windows};
use crate::conv::{Conv2dShape, Geometry, Layout2d};
use crate::cpu::Cpu;
use crate::cpu::disjoint::DisjointMut;
use crate::cpu::int8::{self, Dequantize, Placed, Requantize, Rows, Runs};
use crate::cpu::isa::per_isa;
use crate::cpu::matmul;
use crate::cpu::patches::Patches;
use crate::error::Result;
use crate::format::int8::{Affine, Byte, BytesMut, Int8Weight};
use crate::layout::Lines;
use crate::layout::cpu_int8::{CpuInt8, QUAD};
use crate::memory::collected;
use crate::tensor::FloatsMut;
use std::ops::Range;

/// Weights in the form that they are multiplied in.
#[derive(Clone, Debug)]
pub(crate) struct Weights {
    /// One for each group of channels; a single one for all of them if each has one input channel.
    pub packed: Vec<CpuInt8>,
    /// What becomes of the sums of each.
    pub epilogues: Vec<Epilogue>,
    /// The single one, if each group has one input channel.
    pub depthwise: Option<Depthwise>,
}

/// What becomes of the sums of a weight.
#[derive(Clone, Debug)]
pub(crate) enum Epilogue {
    Bytes(Requantize),
    Floats(Dequantize),
}

/// Weights less their zero points, `[position][co]`.
#[derive(Clone, Debug)]
pub(crate) struct Depthwise(Vec<i16>);

impl Depthwise {
    /// From weights `[co, kh · kw]`. Error: memory is short.
    pub fn new(w: &Int8Weight<'_>) -> Result<Self> {
        let (co, positions) = (w.n(), w.k());
        let order = (0..positions).flat_map(|p| (0..co).map(move |o| (p, o)));
        let weights = order.map(|(p, o)| (w.codes().get(o * positions + p) - w.zero(o)) as i16);
        Ok(Self(collected("conv2d int8", co * positions, weights)?))
    }

    /// Bytes that the weights take.
    pub fn bytes(&self) -> usize {
        size_of_val(self.0.as_slice())
    }
}

/// What a convolution is stored to; signed bytes as their bits.
pub(crate) enum Y<'a> {
    Bytes(&'a mut [u8]),
    Floats(FloatsMut<'a>),
}

impl Y<'_> {
    fn is_empty(&self) -> bool {
        match self {
            Y::Bytes(y) => y.is_empty(),
            Y::Floats(y) => y.is_empty(),
        }
    }
}

/// The same, with what finishes the sums: for bytes pixel by pixel.
enum Target<'a> {
    Bytes(&'a mut [u8]),
    Floats(matmul::Output<'a>),
}

/// One convolution; signed bytes as their bits. The epilogues are of y's kind.
pub(crate) struct Call<'a> {
    pub shape: &'a Conv2dShape,
    pub x: &'a [u8],
    /// What the bytes of x stand for.
    pub affine: Affine,
    pub x_layout: Layout2d,
    pub weights: &'a Weights,
    pub y: Y<'a>,
    pub y_layout: Layout2d,
}

/// Computes a convolution whose lengths have been checked.
pub(crate) fn run(cpu: &Cpu, call: Call<'_>) {
    if !call.y.is_empty() {
        cpu.conv_scratch.with(|scratch| run_with(cpu, scratch, call));
    }
}

fn run_with(cpu: &Cpu, scratch: &mut super::Scratch, call: Call<'_>) {
    let Call { shape, x, affine, x_layout, weights, y, y_layout } = call;
    let super::Scratch { images: pixels, wide, repeated, padded, .. } = scratch;
    let x = match x_layout {
        Layout2d::Nhwc => x,
        Layout2d::Nchw => {
            pixels.ensure(x.len());
            images::transpose(cpu, x, shape, pixels.as_mut_slice::<u8>());
            &pixels.as_slice::<u8>()[..x.len()]
        }
    };
    let x =
        if weights.depthwise.is_some() && shape.geometry().outputs() > 1 { repeat(cpu, x, shape, repeated) } else { x };
    match (y, &weights.epilogues[0], y_layout) {
        (Y::Bytes(y), _, Layout2d::Nhwc) => convolve(cpu, shape, (x, affine), weights, padded, Target::Bytes(y)),
        (Y::Bytes(y), _, Layout2d::Nchw) => {
            wide.ensure(y.len());
            let by_pixel = &mut wide.as_mut_slice::<u8>()[..y.len()];
            convolve(cpu, shape, (x, affine), weights, padded, Target::Bytes(by_pixel));
            images::to_planes(cpu, by_pixel, shape, y);
        }
        (Y::Floats(y), Epilogue::Floats(epilogue), layout) => {
            let (size, pixels) = ([shape.output_pixels(), shape.geometry().co], shape.output().iter().product());
            let y = match layout {
                Layout2d::Nhwc => epilogue.output(y, size),
                Layout2d::Nchw => epilogue.planes(y, size, pixels),
            };
            convolve(cpu, shape, (x, affine), weights, padded, Target::Floats(y));
        }
        (Y::Floats(_), Epilogue::Bytes(_), _) => unreachable!("epilogues are of y's kind"),
    }
}

/// x lies pixel by pixel.
fn convolve(
    cpu: &Cpu,
    shape: &Conv2dShape,
    (x, affine): (&[u8], Affine),
    weights: &Weights,
    padded: &mut Lines,
    mut y: Target<'_>,
) {
    if let Some(w) = &weights.depthwise {
        return depthwise(cpu, shape, (x, affine), (w, &weights.epilogues[0]), y);
    }
    let geometry = shape.geometry();
    let channels = geometry.channels();
    let (in_place, byte) = match in_padding(cpu, shape, (x, affine), padded) {
        Some((x, runs)) => (Some((x, runs)), Byte::U8),
        None => (None, affine.byte()),
    };
    for (group, (w, epilogue)) in weights.packed.iter().zip(&weights.epilogues).enumerate() {
        let (windows, patches) = (Windows::new(shape, group), Patches::new(shape, group, 0, channels));
        let starts = |first: usize, out: &mut [usize]| windows.starts(first, out);
        let write = |rows: Range<usize>, out: &mut [u8]| {
            for (row, out) in rows.zip(out.chunks_exact_mut(w.k())) {
                patches.copy(x, row, affine.zero() as u8, out);
            }
        };
        let rows = match &in_place {
            Some((x, runs)) => Rows::Placed(Placed { x, runs, starts: &starts }),
            None if shape.is_product() => Rows::Strided(x, channels),
            None => Rows::Written(&write),
        };
        let (m, column) = (shape.output_pixels(), group * geometry.outputs());
        let y = match (epilogue, &mut y) {
            (Epilogue::Bytes(epilogue), Target::Bytes(y)) => match epilogue.y().byte() {
                Byte::U8 => int8::Target::Bytes(epilogue, BytesMut::U8(y)),
                Byte::I8 => int8::Target::Bytes(epilogue, BytesMut::I8(bytemuck::cast_slice_mut(y))),
            },
            (Epilogue::Floats(epilogue), Target::Floats(y)) => int8::Target::Floats(epilogue, *y),
            _ => unreachable!("epilogues are of y's kind"),
        };
        int8::multiply(cpu, int8::Call { x: rows, byte, m, w, y, stride: geometry.co, column });
    }
}

/// Images with their padding, unsigned, and how windows lie in them; None where rows are better written, or cannot lie so.
fn in_padding<'a>(
    cpu: &Cpu,
    shape: &Conv2dShape,
    (x, affine): (&'a [u8], Affine),
    padded: &'a mut Lines,
) -> Option<(&'a [u8], Runs)> {
    let geometry = shape.geometry();
    if affine.byte() == Byte::U8 && geometry.padding == [0; 4] {
        return Windows::runs(shape, QUAD).map(|runs| (x, runs));
    }
    let rows_len = shape.output_pixels().checked_mul(geometry.k())?.checked_mul(geometry.groups)?;
    let [height, width] = windows::padded(shape);
    let len = [height, width, geometry.ci].iter().try_fold(shape.batch(), |len, &size| len.checked_mul(size))?;
    if len >= rows_len {
        return None;
    }
    let runs = Windows::runs(shape, QUAD)?;
    let flip = if affine.byte() == Byte::I8 { 0x80 } else { 0 };
    padded.ensure(len);
    images::pad(cpu, x, shape, [affine.zero() as u8 ^ flip, flip], &mut padded.as_mut_slice::<u8>()[..len]);
    Some((&padded.as_slice::<u8>()[..len], runs))
}

/// Finishes and stores the sums of a pixel; there is room for floats.
type Finish<'a> = dyn Fn(usize, &[i32], &mut Vec<f32>) + Sync + 'a;

fn depthwise(
    cpu: &Cpu,
    shape: &Conv2dShape,
    (x, affine): (&[u8], Affine),
    (w, epilogue): (&Depthwise, &Epilogue),
    y: Target<'_>,
) {
    let Geometry { co, kernel, .. } = *shape.geometry();
    let isa = cpu.caps().isa;
    let [rows, columns] = shape.output();
    let padding = vec![affine.zero() as u8; co];
    let flip = if affine.byte() == Byte::I8 { 0x80 } else { 0 };
    let finish: &Finish<'_> = match (epilogue, y) {
        (Epilogue::Bytes(epilogue), Target::Bytes(y)) => {
            let y = DisjointMut::new(y);
            // SAFETY: each pixel is of one task.
            &move |pixel, sums, _| epilogue.finish(isa, sums, unsafe { y.range(pixel * co..(pixel + 1) * co) })
        }
        (Epilogue::Floats(epilogue), Target::Floats(y)) => &move |pixel, sums, values| {
            values.resize(co, 0.0);
            epilogue.finish(isa, sums, values);
            // SAFETY: each pixel is of one task.
            unsafe { y.store(pixel, 0, values) };
        },
        _ => unreachable!("epilogues are of y's kind"),
    };
    cpu.threads().run(shape.batch() * rows, &|row| {
        let (mut sums, mut values) = (vec![0i32; co], Vec::new());
        let mut taps = Vec::with_capacity(kernel[0] * kernel[1]);
        for pixel in row * columns..(row + 1) * columns {
            let window = shape.window(pixel);
            taps.clear();
            for (position, w) in w.0.chunks_exact(co).enumerate() {
                let [ky, kx] = [position / kernel[1], position % kernel[1]];
                let inside = window.rows.contains(&ky) && window.columns.contains(&kx);
                let x = if inside { &x[window.pixel([ky, kx]) * co..][..co] } else { &padding };
                taps.push((x, w));
            }
            add_taps(isa, &taps, flip, &mut sums);
            finish(pixel, &sums, &mut values);
        }
    });
}

/// Channels whose sums are in registers together.
const BLOCK: usize = 64;

per_isa! {
    /// `sums = Σ (x ^ flip) · w`. On the way they may leave int32 and come back.
    fn add_taps(taps: &[(&[u8], &[i16])], flip: u8, sums: &mut [i32]) {
        for (block, sums) in sums.chunks_mut(BLOCK).enumerate() {
            let at = block * BLOCK;
            if let Ok(sums) = <&mut [i32; BLOCK]>::try_from(&mut *sums) {
                let mut acc = [0i32; BLOCK];
                for (x, w) in taps {
                    let (x, w) = (&x[at..][..BLOCK], &w[at..][..BLOCK]);
                    for c in 0..BLOCK {
                        acc[c] = acc[c].wrapping_add(i32::from(x[c] ^ flip) * i32::from(w[c]));
                    }
                }
                *sums = acc;
                continue;
            }
            sums.fill(0);
            for (x, w) in taps {
                for ((sum, x), w) in sums.iter_mut().zip(&x[at..]).zip(&w[at..]) {
                    *sum = sum.wrapping_add(i32::from(x ^ flip) * i32::from(*w));
                }
            }
        }
    }
}

/// Each channel as often as it has outputs.
fn repeat<'a>(cpu: &Cpu, x: &[u8], shape: &Conv2dShape, out: &'a mut Lines) -> &'a [u8] {
    let Geometry { ci, co, .. } = *shape.geometry();
    let pixels = shape.input_pixels();
    out.ensure(pixels * co);
    let parts = DisjointMut::new(out.as_mut_slice::<u8>());
    cpu.threads().run(pixels.div_ceil(BLOCK), &|block| {
        let pixels = block * BLOCK..((block + 1) * BLOCK).min(pixels);
        // SAFETY: each block has a part of its own.
        let out = unsafe { parts.range(pixels.start * co..pixels.end * co) };
        for (out, &code) in out.chunks_exact_mut(co / ci).zip(&x[pixels.start * ci..pixels.end * ci]) {
            out.fill(code);
        }
    });
    &out.as_slice::<u8>()[..pixels * co]
}
