//! Convolutions of one input channel a group: no sums over channels, so no product; channels lie beside each other in
//! registers.
//!
//! ```text
//! x to f32, each channel as often as it has outputs                         (once, all threads; not if x is that already)
//! for each row of output pixels, for each pixel:                            (a task a row)
//!     for each block of channels:  sum = Σ x[position] · w[position]        over the positions inside of the image
//!     epilogue
//! ```
//!
//! With quantised activations a group of a scale is one channel of one pixel: codes are ±127, or an offset alone, and what
//! they stand for is x but for the rounding of its scale. That is what is multiplied.

use crate::conv::{Conv2dShape, Geometry};
use crate::cpu::Cpu;
use crate::cpu::disjoint::DisjointMut;
use crate::cpu::isa::per_isa;
use crate::cpu::matmul::{Output, widen};
use crate::error;
use crate::format::{Act, QTensor, Zeros};
use crate::kernel::Reason;
use crate::layout::Lines;
use crate::memory::collected;
use crate::quantize::activations::LEAST_RANGE;
use crate::tensor::Floats;

/// Channels whose sums are in registers together.
const BLOCK: usize = 64;

/// Positions whose products are added up by themselves before that is added to a sum: in one long sum of like terms roundings add up too,
/// and it would leave the bound.
const TAPS_TOGETHER: usize = 64;

/// Pixels that are widened together.
const BLOCK_PIXELS: usize = 64;

/// Outputs a channel up to which a convolution of one channel a group is none of products: each product would have as few
/// outputs, and each channel of x is held as often.
const MOST_OUTPUTS: usize = 8;

/// Whether each channel of x is seen by few outputs, and by no output together with another, or why not.
pub(crate) fn serves(geometry: &Geometry) -> Result<(), Reason> {
    match geometry.channels() == 1 && geometry.groups > 1 && geometry.outputs() <= MOST_OUTPUTS {
        true => Ok(()),
        false => Err(Reason(format!("computes several groups of one channel each, of up to {MOST_OUTPUTS} outputs"))),
    }
}

/// Weights `[position][co]`, in f32.
#[derive(Debug)]
pub(crate) struct Depthwise {
    weights: Vec<f32>,
    co: usize,
    /// What becomes of x, if it is quantised.
    act: Option<Act>,
}

impl Depthwise {
    /// From weights `[co, kh · kw]`. Error: memory is short.
    pub fn quantized(w: &QTensor, act: Act) -> error::Result<Self> {
        let (co, positions) = (w.n(), w.k());
        let value = |o: usize, p: usize| {
            let at = o * w.groups() + w.group_of(p);
            let code = f32::from(w.codes()[o * positions + p]);
            let scale = w.scales()[at];
            match w.zeros() {
                Zeros::Symmetric => scale * (code - w.format().middle() as f32),
                Zeros::Integer(zeros) => scale * (code - f32::from(zeros[at])),
                // Rounded once, as by a multiply-add.
                Zeros::Float(offsets) => (f64::from(scale) * f64::from(code) + f64::from(offsets[at])) as f32,
            }
        };
        let order = (0..positions).flat_map(|p| (0..co).map(move |o| (o, p)));
        let weights = collected("conv2d", co * positions, order.map(|(o, p)| value(o, p)))?;
        Ok(Self { weights, co, act: act.is_quantized().then_some(act) })
    }

    /// From floats `[co, kh · kw]`. Error: memory is short.
    pub fn dense(w: Floats<'_>, co: usize) -> error::Result<Self> {
        let positions = w.len() / co;
        let order = (0..positions).flat_map(|p| (0..co).map(move |o| o * positions + p));
        Ok(Self { weights: collected("conv2d", w.len(), order.map(|at| w.get(at)))?, co, act: None })
    }

    /// Bytes that the weights take.
    pub fn bytes(&self) -> usize {
        self.weights.len() * 4
    }

    /// x lies pixel by pixel.
    pub(super) fn run(&self, cpu: &Cpu, shape: &Conv2dShape, x: Floats<'_>, room: &mut Lines, y: &Output<'_>) {
        let x = match x {
            Floats::F32(x) if self.act.is_none() && shape.geometry().ci == self.co => x,
            x => self.widen(cpu, x, shape.input_pixels(), room),
        };
        let Geometry { kernel, .. } = *shape.geometry();
        let [rows, columns] = shape.output();
        let isa = cpu.caps().isa;
        cpu.threads().run(shape.batch() * rows, &|row| {
            let mut sums = vec![0.0; self.co];
            let mut taps = Vec::with_capacity(kernel[0] * kernel[1]);
            for pixel in row * columns..(row + 1) * columns {
                let window = shape.window(pixel);
                taps.clear();
                for ky in window.rows.clone() {
                    for kx in window.columns.clone() {
                        taps.push([window.pixel([ky, kx]) * self.co, (ky * kernel[1] + kx) * self.co]);
                    }
                }
                add_taps(isa, x, &self.weights, &taps, &mut sums);
                // SAFETY: each pixel is of one task.
                unsafe { y.store(pixel, 0, &sums) };
            }
        });
    }

    /// x in f32 as it is multiplied, each channel as often as it has outputs.
    fn widen<'a>(&self, cpu: &Cpu, x: Floats<'_>, pixels: usize, room: &'a mut Lines) -> &'a [f32] {
        let (co, channels) = (self.co, x.len() / pixels);
        room.ensure(pixels * co * 4);
        let out = DisjointMut::new(room.as_mut_slice::<f32>());
        cpu.threads().run(pixels.div_ceil(BLOCK_PIXELS), &|block| {
            let pixels = block * BLOCK_PIXELS..((block + 1) * BLOCK_PIXELS).min(pixels);
            // SAFETY: each block has a part of its own.
            let out = unsafe { out.range(pixels.start * co..pixels.end * co) };
            let x = x.slice(pixels.start * channels..pixels.end * channels);
            if channels == co {
                widen(x, 0..x.len(), out);
            } else {
                let wide = x.to_f32();
                for (out, &v) in out.chunks_exact_mut(co / channels).zip(&wide) {
                    out.fill(v);
                }
            }
            match self.act {
                Some(Act::A8Asym) => out.iter_mut().filter(|v| !v.is_finite()).for_each(|v| *v = f32::NAN),
                Some(_) => coded(cpu.caps().isa, out),
                None => {}
            }
        });
        &room.as_slice::<f32>()[..pixels * co]
    }
}

per_isa! {
    /// What the code of each element stands for, which is ±127 in a scale of its own. As with any group, a magnitude too
    /// small for a scale becomes 0, and NaN and infinity NaN.
    fn coded(x: &mut [f32]) {
        for v in x {
            // Of the greatest numbers the product may round to infinity.
            let coded = (v.abs() / 127.0 * 127.0).min(f32::MAX).copysign(*v);
            let coded = if v.abs() < LEAST_RANGE { 0.0 } else { coded };
            *v = if v.is_finite() { coded } else { f32::NAN };
        }
    }
}

per_isa! {
    /// `sums[c] = Σ x[tap + c] · w[tap + c]`.
    fn add_taps(x: &[f32], w: &[f32], taps: &[[usize; 2]], sums: &mut [f32]) {
        for (block, sums) in sums.chunks_mut(BLOCK).enumerate() {
            let at = block * BLOCK;
            sums.fill(0.0);
            for taps in taps.chunks(TAPS_TOGETHER) {
                let mut acc = [0.0f32; BLOCK];
                if sums.len() == BLOCK {
                    for tap in taps {
                        let (x, w) = (&x[tap[0] + at..][..BLOCK], &w[tap[1] + at..][..BLOCK]);
                        for c in 0..BLOCK {
                            acc[c] += x[c] * w[c];
                        }
                    }
                } else {
                    for tap in taps {
                        for ((sum, x), w) in acc[..sums.len()].iter_mut().zip(&x[tap[0] + at..]).zip(&w[tap[1] + at..]) {
                            *sum += x * w;
                        }
                    }
                }
                for (sum, acc) in sums.iter_mut().zip(acc) {
                    *sum += acc;
                }
            }
        }
    }
}
