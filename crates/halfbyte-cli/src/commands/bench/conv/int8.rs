//! Convolutions of bytes: 8 bits in, 8 bits out, compared with sums in integers, bit by bit.

use super::{Bench, EFFORT, Line, checked_part, copies};
use crate::commands::bench::check::Check;
use crate::commands::bench::report::Timed;
use crate::failure::Result;
use crate::progress::Progress;
use crate::random::{self, Random};
use crate::timing::measure;
use halfbyte::conv::{Conv2dShape, Geometry};
use halfbyte::format::int8::{Affine, Byte, Bytes, BytesMut, Int8Weight, multiplier};
use halfbyte::format::reference;
use halfbyte::ops::{Activation, Conv2dInt8};

/// A layer before it is packed: symmetric weights with a scale each output, and a bias.
pub(super) struct Source {
    /// `[co, k]`.
    codes: Vec<i8>,
    scales: Vec<f32>,
    pub bias: Vec<i32>,
    pub x: Affine,
    pub y: Affine,
}

impl Source {
    /// Random, with half of the outputs above 0 and few at the end of the codes. Zero points are those behind a relu: the
    /// least code.
    pub fn new(geometry: &Geometry, byte: Byte) -> Result<Self> {
        // Deviations of uniform codes, the least one being that of 0, and of −127 to 127.
        const X_STEPS: f32 = 147.0;
        const W_STEPS: f32 = 73.0;
        let (co, k) = (geometry.co, geometry.k());
        let codes = random::bytes(co * k, 1).into_iter().map(|code| (code as i8).max(-127)).collect();
        let mut random = Random(2);
        let scales = (0..co).map(|_| 0.01 + 0.005 * random.uniform()).collect();
        let sum = X_STEPS * W_STEPS * (k as f32).sqrt();
        let bias = (0..co).map(|_| (0.1 * sum * random.normal()) as i32).collect();
        let zero = *byte.codes().start();
        let (x, y) = (Affine::new(byte, 0.02, zero)?, Affine::new(byte, 0.02 * 0.01 * sum / 80.0, zero)?);
        Ok(Self { codes, scales, bias, x, y })
    }

    pub fn weight(&self, geometry: &Geometry) -> Result<Int8Weight<'_>> {
        Ok(Int8Weight::new(Bytes::I8(&self.codes), [geometry.co, geometry.k()], &self.scales, &[])?)
    }

    fn pack(&self, geometry: Geometry) -> Result<Conv2dInt8> {
        let conv = Conv2dInt8::new(&self.weight(&geometry)?, geometry, self.x, self.y)?;
        Ok(conv.with_bias(self.bias.clone())?.with_activation(Activation::Relu)?)
    }
}

/// Bytes of a type, from their bits.
pub(super) fn bytes(byte: Byte, bits: &[u8]) -> Bytes<'_> {
    match byte {
        Byte::U8 => Bytes::U8(bits),
        Byte::I8 => Bytes::I8(bytemuck::cast_slice(bits)),
    }
}

impl Bench<'_> {
    /// With bias and relu.
    pub(super) fn run_int8(&self, byte: Byte, progress: &Progress) -> Result<Line> {
        let (geometry, size) = (self.shape.geometry(), self.shape.size);
        let shape = Conv2dShape::new(geometry, self.batch, size)?;
        progress.step(format!("int8 {} batch {}", super::name(&geometry, size), self.batch));
        let image_bytes = shape.x_len() + shape.y_len();
        self.refuse_too_large(&shape, image_bytes)?;
        let source = Source::new(&geometry, byte)?;
        let conv = source.pack(geometry)?.with_layouts(self.layout, self.layout);
        let copies = copies(image_bytes + conv.bytes());
        let convs = vec![conv; copies];
        let x: Vec<Vec<u8>> = (0..copies).map(|seed| random::bytes(shape.x_len(), 3 + seed as u64)).collect();
        let mut y = vec![vec![0x55u8; shape.y_len()]; copies];
        let measured = measure(EFFORT, |run| {
            let at = run % copies;
            let y = match byte {
                Byte::U8 => BytesMut::U8(&mut y[at]),
                Byte::I8 => BytesMut::I8(bytemuck::cast_slice_mut(&mut y[at])),
            };
            Ok(convs[at].forward(self.cpu, bytes(byte, &x[at]), self.batch, size, y)?)
        })?;
        let (x, y) = (bytes(byte, &x[0]), bytes(byte, &y[0]));
        let check = if self.check { Some(self.compare_int8(&source, &shape, x, y)?) } else { None };
        let (kernel, weight_bytes) = (convs[0].kernel(self.cpu), convs[0].bytes());
        let timed = Timed { kernel, weight_bytes, copies, measured, operations: shape.operations() };
        Ok(self.line("int8".to_owned(), byte.name(), &shape, timed, check))
    }

    /// Compares codes of the first and the last image with sums in integers: none may differ. `worst` is how many steps the
    /// furthest one is off.
    pub(super) fn compare_int8(
        &self,
        source: &Source,
        shape: &Conv2dShape,
        x: Bytes<'_>,
        y: Bytes<'_>,
    ) -> Result<Check> {
        let geometry = shape.geometry();
        let (part, weight) = (checked_part(shape)?, source.weight(geometry)?);
        let channels = part.geometry().co;
        let weights: Vec<f64> = source.codes[..channels * geometry.k()].iter().map(|&code| code.into()).collect();
        let [pixels, seen] = [shape.input(), shape.output()].map(|size| size.iter().product::<usize>());
        let mut found = Check { elements: 0, worst: 0.0, passed: true };
        for image in self.checked_images() {
            let planes = (0..geometry.ci).flat_map(|c| (0..pixels).map(move |p| (c, p)));
            let code = |(c, p)| x.get(self.at([image, c, p], [geometry.ci, pixels])) - source.x.zero();
            let x: Vec<f64> = planes.map(|element| code(element).into()).collect();
            // Sums of products of bytes are exact in f64.
            let sums = reference::conv2d(&x, &weights, &part).value;
            for (i, sum) in sums.iter().enumerate() {
                let (c, p) = (i / seen, i % seen);
                let multiplier = multiplier(source.x, weight.scale(c), source.y);
                // The zero point is the least code, so that the codes begin where relu does.
                let (sum, codes) = (*sum as i64 + i64::from(source.bias[c]), source.y.byte().codes());
                let want = reference::requantize(sum, multiplier, source.y.zero(), codes);
                let off = (y.get(self.at([image, c, p], [geometry.co, seen])) - want).abs();
                found.elements += 1;
                found.worst = found.worst.max(off.into());
                found.passed &= off == 0;
            }
        }
        Ok(found)
    }
}
