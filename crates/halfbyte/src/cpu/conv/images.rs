//! Images from planes to pixels.
//!
//! ```text
//! for each block of pixels, for each 16 channels:  16 × 16 elements, transposed on the way
//! ```

use crate::conv::Conv2dShape;
use crate::cpu::Cpu;
use crate::cpu::disjoint::DisjointMut;
use crate::cpu::isa::per_isa;
use crate::cpu::transpose::transpose as transpose32;
use crate::layout::Lines;
use crate::tensor::Floats;
use half::{bf16, f16};

/// Pixels of a task.
const BLOCK_PIXELS: usize = 128;

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

fn transpose<T: Block>(cpu: &Cpu, x: &[T], shape: &Conv2dShape, out: &mut [T]) {
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

/// Elements that a transposition is compiled for.
trait Block: Copy + Default + Send + Sync {
    /// `x[c·plane + p]` to `out[p·channels + c]`.
    fn transpose(cpu: &Cpu, x: &[Self], plane: usize, channels: usize, out: &mut [Self]);
}

/// Side of the squares that are transposed.
const SIDE: usize = 16;

#[inline(always)]
fn squares<T: Copy + Default>(x: &[T], plane: usize, channels: usize, out: &mut [T]) {
    let pixels = out.len() / channels;
    for c in (0..channels).step_by(SIDE) {
        let wide = (channels - c).min(SIDE);
        for p in (0..pixels).step_by(SIDE) {
            let high = (pixels - p).min(SIDE);
            if wide == SIDE && high == SIDE {
                let mut square = [[T::default(); SIDE]; SIDE];
                for (i, line) in square.iter_mut().enumerate() {
                    line.copy_from_slice(&x[(c + i) * plane + p..][..SIDE]);
                }
                for j in 0..SIDE {
                    let line: [T; SIDE] = std::array::from_fn(|i| square[i][j]);
                    out[(p + j) * channels + c..][..SIDE].copy_from_slice(&line);
                }
                continue;
            }
            for i in 0..wide {
                for j in 0..high {
                    out[(p + j) * channels + c + i] = x[(c + i) * plane + p + j];
                }
            }
        }
    }
}

per_isa! {
    fn squares_u16(x: &[u16], plane: usize, channels: usize, out: &mut [u16]) {
        squares(x, plane, channels, out);
    }
}

impl Block for u32 {
    fn transpose(cpu: &Cpu, x: &[Self], plane: usize, channels: usize, out: &mut [Self]) {
        transpose32(cpu.caps().isa, [channels, out.len() / channels], (x, plane), (out, channels));
    }
}

impl Block for u16 {
    fn transpose(cpu: &Cpu, x: &[Self], plane: usize, channels: usize, out: &mut [Self]) {
        squares_u16(cpu.caps().isa, x, plane, channels, out);
    }
}
