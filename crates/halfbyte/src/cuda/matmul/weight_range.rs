//! Launches of `weight_range.cu`: whether weights lie within the range of f16.

use super::{Packed, simt};
use crate::cuda::Gpu;
use crate::cuda::driver::{Launch, Stream};
use crate::cuda::parameters::{Parameters, float_type, parameters};
use crate::cuda::sources::{Instance, Source};
use crate::error::Result;
use crate::format::Zero;
use crate::layout::cuda_wna16::{STEP, STRIP, UNIT};
use half::f16;

static SOURCE: Source =
    Source { path: "matmul/weight_range.cu", text: include_str!("weight_range.cu"), parameters: &[Terms::LAYOUT] };

/// As in the source.
const THREADS: u32 = 256;

/// Blocks at most.
const MOST_BLOCKS: u64 = 4096;

parameters! {
    /// As in the source.
    struct Terms {
        scales: u64,
        offsets: u64,
        stride: u64,
        stride_of_four: u64,
        runs: u64,
        each: u64,
        largest: u64,
        scale_type: u32,
        span: f32,
        multiples: u32,
        padding: u32,
    }
}

pub(super) fn instance() -> Instance {
    Instance::new(&SOURCE, "weight_range")
}

/// Whether no weight can lie beyond the range of f16, from its scales and offsets: codes are not looked at. Waits for the stream.
/// Error: memory that is short, a kernel that cannot be compiled.
pub(super) fn is_within_f16(gpu: &Gpu, stream: &Stream, w: &Packed) -> Result<bool> {
    let mut largest = gpu.context().allocate::<u32>(1)?;
    stream.upload(&[0u32], largest.view_mut())?;
    let terms = Terms { largest: largest.view().pointer(), ..terms(w) };
    let count = terms.runs.saturating_mul(terms.each);
    if count > 0 {
        let blocks = count.div_ceil(u64::from(THREADS)).min(MOST_BLOCKS) as u32;
        gpu.function(&instance())?.launch_typed(stream, &Launch::linear(blocks, THREADS), &terms, &[])?;
    }
    let mut bits = [0u32];
    stream.download(largest.view(), &mut bits)?;
    Ok(f32::from_bits(bits[0]) <= f16::MAX.to_f32())
}

/// Where the scales and offsets of a weight lie.
fn terms(w: &Packed) -> Terms {
    let format = w.format().weight;
    // A code lies at most so far from its zero point, which may be any of 8 bits.
    let span = if format.zero == Zero::Integer { 256.0 } else { (1u32 << format.bits) as f32 };
    let [n, k] = w.shape();
    match w {
        Packed::Plain(w) => {
            let simt::Parts { scales, zeros, scale_type, zero_kind, .. } = w.parts();
            let offsets = if zero_kind == OFFSETS { zeros } else { 0 };
            Terms {
                scales,
                offsets,
                stride: 0,
                stride_of_four: 0,
                runs: 1,
                each: w.scales() as u64,
                largest: 0,
                scale_type,
                span,
                multiples: 0,
                padding: 0,
            }
        }
        Packed::Wna16(w) => {
            let (atom, strips) = (w.atom(), n.div_ceil(STRIP));
            // Of fewer bits than the format has codes lie nearer.
            let span = atom.most_from_zero().map_or(span, |most| most as f32);
            let [scales_at, offsets_at] = atom.params_of(0, 0).map(|at| at as u64);
            // Runs are the scales of a strip, or of a unit.
            let (first, [stride, stride_of_four], runs, rows) = match atom.group {
                0 => (w.rows(), [1, 4].map(|runs| runs * atom.params_bytes()), strips, STRIP),
                _ => {
                    let units = strips * k.div_ceil(STEP) * (STRIP / UNIT);
                    (w.atoms() + scales_at, [atom.unit_params_bytes(), atom.bytes()], units, UNIT)
                }
            };
            let each = if atom.multiples { rows / 2 } else { rows * atom.groups().max(1) };
            let apart = if atom.group == 0 { (STRIP * atom.scale.size_bytes()) as u64 } else { offsets_at - scales_at };
            let offsets = if atom.offset { first + apart } else { 0 };
            let scale_type = float_type(atom.scale);
            Terms {
                scales: first,
                offsets,
                stride: stride as u64,
                stride_of_four: stride_of_four as u64,
                runs: runs as u64,
                each: each as u64,
                largest: 0,
                scale_type,
                span,
                multiples: if atom.multiples { atom.groups() as u32 } else { 0 },
                padding: 0,
            }
        }
    }
}

/// As [`simt::zero_kind`] numbers offsets.
const OFFSETS: u32 = 2;
