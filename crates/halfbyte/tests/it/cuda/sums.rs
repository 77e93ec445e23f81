//! Sums and means between convolutions: codes to the bit as the rules of `format::int8` say, floats rounded once.

use super::gpus;
use super::products::TYPES;
use crate::data::{Random, rounded};
use halfbyte::cuda::Gpu;
use halfbyte::cuda::driver::{Buffer, Stream};
use halfbyte::cuda::nn::{self, FloatBuffer};
use halfbyte::format::int8::{Affine, Byte, Mean, Sum};
use halfbyte::{Error, Float, Floats};

const BYTES: [Byte; 2] = [Byte::U8, Byte::I8];

fn value(byte: Byte, bits: u8) -> i32 {
    if byte == Byte::I8 { i32::from(bits as i8) } else { i32::from(bits) }
}

/// Meanings of a, b and y for every choice of types.
fn meanings(random: &mut Random) -> Vec<[Affine; 3]> {
    let mut affine = |byte: Byte, scale: f32| {
        let zero = byte.codes().start() + random.below(256) as i32;
        Affine::new(byte, scale * (0.5 + random.normal().abs()), zero).unwrap()
    };
    let types = BYTES.iter().flat_map(|&a| BYTES.iter().flat_map(move |&b| BYTES.map(|y| [a, b, y])));
    types.map(|[a, b, y]| [affine(a, 0.03), affine(b, 0.02), affine(y, 0.04)]).collect()
}

#[test]
fn codes_of_sums_are_the_nearest() {
    let mut random = Random(61);
    for [a, b, y] in meanings(&mut random) {
        for relu in [false, true] {
            let sum = Sum::new([a, b], y, relu).unwrap();
            assert_eq!(sum.bytes(), [a, b, y].map(|x| x.byte()));
            for (qa, qb) in
                (0..=255).flat_map(|i| (0..=255).step_by(7).map(move |j| (value(a.byte(), i), value(b.byte(), j))))
            {
                let real = |x: Affine, q: i32| f64::from(x.scale()) * f64::from(q - x.zero());
                let steps = (real(a, qa) + real(b, qb)) / f64::from(y.scale());
                let steps = if relu { steps.max(0.0) } else { steps };
                let (least, greatest) = y.byte().codes().into_inner();
                let want = (steps + f64::from(y.zero())).clamp(f64::from(least), f64::from(greatest));
                let got = f64::from(sum.code(qa, qb));
                // Half a step, and what the factors are off by.
                assert!((got - want).abs() <= 0.51, "{a:?} {b:?} {y:?}: {qa} + {qb} is {got}, expected {want}");
            }
        }
    }
    let [near, far] = [1.0, 65.0].map(|scale| Affine::new(Byte::U8, scale, 3).unwrap());
    assert!(matches!(Sum::new([near, far], near, true), Err(Error::Invalid { .. })));
    assert!(matches!(Mean::new(near, 0, near), Err(Error::Invalid { .. })));
    assert!(matches!(Mean::new(near, (1 << 23) + 1, near), Err(Error::Invalid { .. })));
    // The mean of 3, 4 and 8 less 3 is 2, which is code 7 where a step is a half.
    let half = Affine::new(Byte::I8, 0.5, 3).unwrap();
    assert_eq!(Mean::new(near, 3, half).unwrap().code(15), 7);
}

struct Bench<'a> {
    gpu: &'a Gpu,
    stream: Stream,
}

impl Bench<'_> {
    fn upload(&self, bits: &[u8]) -> Buffer<u8> {
        let mut buffer = self.gpu.context().allocate(bits.len()).unwrap();
        self.stream.upload(bits, buffer.view_mut()).unwrap();
        buffer
    }

    fn read(&self, buffer: &Buffer<u8>) -> Vec<u8> {
        let mut out = vec![0; buffer.len()];
        self.stream.download(buffer.view(), &mut out).unwrap();
        out
    }

    fn floats(&self, values: &[f32], dtype: Float) -> FloatBuffer {
        let singles = FloatBuffer::upload(self.gpu, &self.stream, Floats::F32(values)).unwrap();
        if dtype == Float::F32 {
            return singles;
        }
        let mut out = FloatBuffer::allocate(self.gpu, dtype, values.len()).unwrap();
        let zeros = FloatBuffer::upload(self.gpu, &self.stream, Floats::F32(&vec![0.0; values.len()])).unwrap();
        let whole = 0..values.len();
        let of = [singles.view(whole.clone()), zeros.view(whole.clone())];
        nn::add(self.gpu, &self.stream, of, false, out.view_mut(whole)).unwrap();
        out
    }

    fn widened(&self, floats: &FloatBuffer) -> Vec<f32> {
        floats.to_f32(&self.stream, 0..floats.len()).unwrap()
    }
}

#[test]
fn codes_on_a_gpu_are_those_of_the_rules() {
    for gpu in gpus() {
        let bench = Bench { gpu: &gpu, stream: gpu.stream().unwrap() };
        let mut random = Random(62);
        for (i, [a, b, y]) in meanings(&mut random).into_iter().enumerate() {
            // A first element that is at no multiple of 4, and ends that fill no word.
            for (len, first) in [(1, 0), (1023, 0), (4096, 0), (2050, 1)] {
                let mut bits = |len: usize| -> Vec<u8> { (0..len).map(|_| random.bits() as u8).collect() };
                let (of_a, of_b) = (bits(first + len), bits(first + len));
                let sum = Sum::new([a, b], y, i % 2 == 0).unwrap();
                let code = |(&p, &q): (&u8, &u8)| sum.code(value(a.byte(), p), value(b.byte(), q)) as u8;
                let want: Vec<u8> = of_a[first..].iter().zip(&of_b[first..]).map(code).collect();
                let (on_a, on_b, mut out) = (bench.upload(&of_a), bench.upload(&of_b), bench.upload(&vec![9; len + 8]));
                let views = [on_a.view().slice(first..first + len), on_b.view().slice(first..first + len)];
                nn::add_codes(&gpu, &bench.stream, &sum, views, out.view_mut().slice(first..first + len)).unwrap();
                let got = bench.read(&out);
                assert!(got[first..first + len] == want, "{a:?} + {b:?} to {y:?}, {len} from {first}");
                assert!(got[..first].iter().chain(&got[first + len..]).all(|&v| v == 9), "wrote outside");
            }
            for size @ [images, pixels, channels] in [[1, 1, 1], [3, 49, 70], [2, 1024, 64]] {
                let x: Vec<u8> = (0..images * pixels * channels).map(|_| random.bits() as u8).collect();
                let mean = Mean::new(a, pixels, y).unwrap();
                let sum = |image: usize, c: usize| {
                    (0..pixels).map(|p| value(a.byte(), x[(image * pixels + p) * channels + c])).sum::<i32>()
                };
                let all = (0..images).flat_map(|image| (0..channels).map(move |c| (image, c)));
                let want: Vec<u8> = all.map(|(image, c)| mean.code(sum(image, c)) as u8).collect();
                let (on_device, mut out) = (bench.upload(&x), bench.upload(&vec![0; images * channels]));
                nn::mean_codes(&gpu, &bench.stream, &mean, on_device.view(), size, out.view_mut()).unwrap();
                assert!(bench.read(&out) == want, "means of {a:?} to {y:?}, {size:?}");
            }
        }
    }
}

#[test]
fn floats_on_a_gpu_are_rounded_once() {
    for gpu in gpus() {
        let bench = Bench { gpu: &gpu, stream: gpu.stream().unwrap() };
        let mut random = Random(63);
        for (i, dtype) in TYPES.into_iter().enumerate() {
            let [of_b, of_y] = [TYPES[(i + 1) % 3], TYPES[(i + 2) % 3]];
            let len = 1001;
            let (mut a, b) = (rounded(&random.normals(len), dtype), rounded(&random.normals(len), of_b));
            a[7] = f32::NAN;
            let (on_a, on_b) = (bench.floats(&a, dtype), bench.floats(&b, of_b));
            for relu in [false, true] {
                let mut out = FloatBuffer::allocate(&gpu, of_y, len).unwrap();
                let views = [on_a.view(0..len), on_b.view(0..len)];
                nn::add(&gpu, &bench.stream, views, relu, out.view_mut(0..len)).unwrap();
                for ((got, a), b) in bench.widened(&out).into_iter().zip(&a).zip(&b) {
                    let want = of_y.round(if relu && a + b < 0.0 { 0.0 } else { a + b });
                    assert!(got == want || (got.is_nan() && want.is_nan()), "{a} + {b} is {got}, expected {want}");
                }
            }
            let size @ [images, pixels, channels] = [3, 49, 70];
            let x = rounded(&random.normals(images * pixels * channels), dtype);
            let on_device = bench.floats(&x, dtype);
            let mut out = FloatBuffer::allocate(&gpu, of_y, images * channels).unwrap();
            let (view, to) = (on_device.view(0..x.len()), out.view_mut(0..images * channels));
            nn::mean(&gpu, &bench.stream, view, size, to).unwrap();
            for (at, got) in bench.widened(&out).into_iter().enumerate() {
                let first = at / channels * pixels * channels + at % channels;
                let sum = (0..pixels).fold(0.0, |sum: f32, p| sum + x[first + p * channels]);
                assert_eq!(got, of_y.round(sum / pixels as f32), "mean {at}");
            }
            let short = nn::mean(&gpu, &bench.stream, on_device.view(0..x.len() - 1), size, out.view_mut(0..210));
            assert!(matches!(short, Err(Error::Invalid { .. })));
            let views = [on_a.view(0..len), on_b.view(0..len - 1)];
            let short = nn::add(&gpu, &bench.stream, views, false, out.view_mut(0..len.min(210)));
            assert!(matches!(short, Err(Error::Invalid { .. })));
        }
    }
}
