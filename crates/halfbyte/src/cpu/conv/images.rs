//! Images from planes to pixels, and back: each is a matrix of channels × pixels, transposed block by block. And into their padding.

use super::windows::padded;
use crate::conv::Conv2dShape;
use crate::cpu::Cpu;
use crate::cpu::disjoint::DisjointMut;
use crate::cpu::transpose::{transpose as transpose_32, transpose_8, transpose_16};
use crate::layout::Lines;
use crate::tensor::Floats;
use half::{bf16, f16};

/// Pixels of a task.
const BLOCK_PIXELS: usize = 128;

/// Bytes of lines that a task brings into their padding.
const PAD_BYTES: usize = 16 << 10;

/// Planes of a task.
const BLOCK_PLANES: usize = 16;

/// Brings x of any type from planes to pixels.
pub(super) fn to_pixels<'a>(cpu: &Cpu, x: Floats<'a>, shape: &Conv2dShape, out: &'a mut Lines) -> Floats<'a> {
    let len = x.len();
    out.ensure(len * x.dtype().size_bytes());
    match x {
        Floats::F32(x) => {
            transpose(cpu, bytemuck::cast_slice(x), shape, out.as_mut_slice::<u32>());
            Floats::F32(&out.as_slice::<f32>()[..len])
        }
        Floats::F16(x) => {
            transpose(cpu, bytemuck::cast_slice(x), shape, out.as_mut_slice::<u16>());
            Floats::F16(&out.as_slice::<f16>()[..len])
        }
        Floats::BF16(x) => {
            transpose(cpu, bytemuck::cast_slice(x), shape, out.as_mut_slice::<u16>());
            Floats::BF16(&out.as_slice::<bf16>()[..len])
        }
    }
}

/// Brings x from planes to pixels.
pub(super) fn transpose<T: Block>(cpu: &Cpu, x: &[T], shape: &Conv2dShape, out: &mut [T]) {
    let (channels, plane) = (shape.geometry().ci, shape.input().iter().product::<usize>());
    let blocks = plane.div_ceil(BLOCK_PIXELS);
    let out = DisjointMut::new(out);
    cpu.threads().run(shape.batch() * blocks, &|i| {
        let (image, first) = (i / blocks, i % blocks * BLOCK_PIXELS);
        let end = (first + BLOCK_PIXELS).min(plane);
        // SAFETY: each block has a part of its own.
        let out = unsafe { out.range((image * plane + first) * channels..(image * plane + end) * channels) };
        let x = &x[image * channels * plane + first..(image + 1) * channels * plane];
        T::transpose(cpu, x, plane, channels, out);
    });
}

/// Brings y from pixels to planes.
pub(super) fn to_planes(cpu: &Cpu, y: &[u8], shape: &Conv2dShape, out: &mut [u8]) {
    let (channels, plane) = (shape.geometry().co, shape.output().iter().product::<usize>());
    let blocks = channels.div_ceil(BLOCK_PLANES);
    let out = DisjointMut::new(out);
    cpu.threads().run(shape.batch() * blocks, &|i| {
        let (image, first) = (i / blocks, i % blocks * BLOCK_PLANES);
        let end = (first + BLOCK_PLANES).min(channels);
        // SAFETY: each block has a part of its own.
        let out = unsafe { out.range((image * channels + first) * plane..(image * channels + end) * plane) };
        let y = &y[image * plane * channels + first..(image + 1) * plane * channels];
        // What are planes and pixels here are pixels and planes there.
        u8::transpose(cpu, y, channels, plane, out);
    });
}

/// Brings bytes that lie pixel by pixel into their padding, each `^ flip`.
pub(super) fn pad(cpu: &Cpu, x: &[u8], shape: &Conv2dShape, [padding, flip]: [u8; 2], out: &mut [u8]) {
    let (channels, [h, w], [height, width]) = (shape.geometry().ci, shape.input(), padded(shape));
    let [top, left, ..] = shape.geometry().padding;
    let (line, inside) = (width * channels, left * channels..(left + w) * channels);
    let lines = shape.batch() * height;
    let block = (PAD_BYTES / line).max(1);
    let out = DisjointMut::new(out);
    cpu.threads().run(lines.div_ceil(block), &|i| {
        let lines = i * block..((i + 1) * block).min(lines);
        // SAFETY: each block has a part of its own.
        let out = unsafe { out.range(lines.start * line..lines.end * line) };
        for (out, row) in out.chunks_exact_mut(line).zip(lines) {
            let (image, y) = (row / height, row % height);
            if y < top || y >= top + h {
                out.fill(padding);
                continue;
            }
            out[..inside.start].fill(padding);
            out[inside.end..].fill(padding);
            let x = &x[(image * h + y - top) * w * channels..][..inside.len()];
            match flip {
                0 => out[inside.clone()].copy_from_slice(x),
                _ => out[inside.clone()].iter_mut().zip(x).for_each(|(out, code)| *out = code ^ flip),
            }
        }
    });
}

/// Elements that a transposition is compiled for.
pub(super) trait Block: Copy + Send + Sync {
    /// `x[c·plane + p]` to `out[p·channels + c]`.
    fn transpose(cpu: &Cpu, x: &[Self], plane: usize, channels: usize, out: &mut [Self]);
}

impl Block for u32 {
    fn transpose(cpu: &Cpu, x: &[Self], plane: usize, channels: usize, out: &mut [Self]) {
        transpose_32(cpu.caps().isa, [channels, out.len() / channels], (x, plane), (out, channels));
    }
}

impl Block for u16 {
    fn transpose(_: &Cpu, x: &[Self], plane: usize, channels: usize, out: &mut [Self]) {
        transpose_16([channels, out.len() / channels], (x, plane), (out, channels));
    }
}

impl Block for u8 {
    fn transpose(_: &Cpu, x: &[Self], plane: usize, channels: usize, out: &mut [Self]) {
        transpose_8([channels, out.len() / channels], (x, plane), (out, channels));
    }
}
