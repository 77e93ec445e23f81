//! LLM.int8() on a GPU: the bits of the CPU where sums are exact, else within the bound; and weights by Paddle's rules.

use super::{gpus, queues};
use crate::data::Random;
use crate::fpa_intb::llm_int8::reference;
use half::{bf16, f16};
use halfbyte::cuda::driver::{FloatView, Stream, View};
use halfbyte::cuda::matmul::fpa_intb;
use halfbyte::cuda::nn::FloatBuffer;
use halfbyte::cuda::{AnyFloats, AnyFloatsMut, Cuda};
use halfbyte::layout::codes::FpaIntB;
use halfbyte::quantize::{WeightOnlyRule, weight_only};
use halfbyte::{Cpu, Float, FloatData, FloatsMut, Group, LlmInt8Linear, WeightFormat, Zero};

/// y of a layer, widened.
fn output(dtype: Float, len: usize, forward: impl FnOnce(FloatsMut<'_>) -> halfbyte::Result<()>) -> Vec<f32> {
    match dtype {
        Float::F16 => {
            let mut y = vec![f16::ONE; len];
            forward(FloatsMut::from(&mut y)).unwrap();
            y.iter().map(|y| y.to_f32()).collect()
        }
        Float::BF16 => {
            let mut y = vec![bf16::ONE; len];
            forward(FloatsMut::from(&mut y)).unwrap();
            y.iter().map(|y| y.to_f32()).collect()
        }
        Float::F32 => {
            let mut y = vec![1f32; len];
            forward(FloatsMut::from(&mut y)).unwrap();
            y
        }
    }
}

/// The same bits, or NaN for NaN.
fn same(got: &[f32], want: &[f32], what: &str) {
    let differs = |(a, b): (&f32, &f32)| a.to_bits() != b.to_bits() && !(a.is_nan() && b.is_nan());
    if let Some(i) = got.iter().zip(want).position(differs) {
        panic!("{what}: element {i} is {}, on the CPU {}", got[i], want[i]);
    }
    assert_eq!(got.len(), want.len(), "{what}");
}

fn of_type(dtype: Float, values: &[f32]) -> FloatData<'static> {
    match dtype {
        Float::F16 => FloatData::F16(values.iter().map(|&x| f16::from_f32(x)).collect::<Vec<_>>().into()),
        Float::BF16 => FloatData::BF16(values.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>().into()),
        Float::F32 => FloatData::F32(values.to_vec().into()),
    }
}

#[test]
fn products_have_the_bits_of_the_cpu() {
    let cpu = Cpu::all_threads().unwrap();
    for cuda in queues() {
        let mut random = Random(81);
        for round in 0..48 {
            let m = [1, 2, 5, 16, 70, 300][round % 6];
            // Sums below 2^24: k codes of at most 127 · 127.
            let [n, k] = [1 + random.below(300), 1 + random.below(1000)];
            let codes: Vec<i8> = (0..n * k).map(|_| random.bits() as i8).collect();
            let scales: Vec<f32> = (0..n).map(|_| random.normal().abs() * 0.01).collect();
            let bias = random.normals(n);
            let threshold = [6.0, 0.5, 1e9, 0.0, f32::INFINITY][round % 5];
            let mut x = random.activations(m * k);
            match round % 4 {
                1 => x[k / 2] = f32::NAN,
                2 => x[..k].fill(0.0),
                3 => x[m * k - 1] = f32::INFINITY,
                _ => {}
            }
            let [x_type, y_type] =
                [[Float::F16, Float::BF16, Float::F32][round % 3], [Float::F32, Float::F16][round % 2]];
            let x = of_type(x_type, &x);
            let on_cpu = LlmInt8Linear::new(&codes, [n, k], &scales).unwrap();
            let on_gpu = LlmInt8Linear::on(&cuda, &codes, [n, k], &scales).unwrap();
            let (on_cpu, on_gpu) = match round % 3 {
                0 => (on_cpu, on_gpu),
                _ => (on_cpu.with_bias(bias.clone()).unwrap(), on_gpu.with_bias(bias).unwrap()),
            };
            let want = output(y_type, m * n, |y| on_cpu.forward(&cpu, x.as_floats(), m, threshold, y));
            let once = || output(y_type, m * n, |y| on_gpu.forward(&cuda, x.as_floats(), m, threshold, y));
            let what = format!("round {round}: {x_type} to {y_type} [{m}, {n}, {k}] threshold {threshold}");
            same(&once(), &want, &what);
            same(&once(), &want, &format!("{what}, again"));
        }
    }
}

#[test]
fn large_sums_lie_within_the_bound() {
    for cuda in queues() {
        let mut random = Random(82);
        for (m, n, k) in [(1, 130, 4096), (17, 64, 11008), (200, 96, 20000)] {
            // Rows of one sign: their sums are the largest that there are.
            let codes: Vec<i8> = (0..n * k).map(|at| if at / k % 2 == 0 { 127 } else { random.bits() as i8 }).collect();
            let scales: Vec<f32> = (0..n).map(|_| random.normal().abs() * 0.01).collect();
            let bias = random.normals(n);
            let wide: Vec<f32> = (0..m * k).map(|_| Float::F16.round(0.1 + random.normal().abs() * 0.2)).collect();
            let x = of_type(Float::F16, &wide);
            let outliers = (0..k).filter(|&j| (0..m).any(|r| wide[r * k + j] > 0.8)).count();
            let layer = LlmInt8Linear::on(&cuda, &codes, [n, k], &scales).unwrap().with_bias(bias.clone()).unwrap();
            let expected = reference(&wide, &codes, &scales, &bias, m, Float::F16.round(0.8));
            let y = output(Float::F32, m * n, |y| layer.forward(&cuda, x.as_floats(), m, 0.8, y));
            let factor = Float::F32.unit_roundoff() + (outliers + 6 + k / 128) as f64 * 2f64.powi(-24);
            for (at, (y, (exact, magnitude))) in y.iter().zip(&expected).enumerate() {
                let far = (f64::from(*y) - exact).abs();
                assert!(far <= factor * magnitude, "[{m}, {n}, {k}] at {at}: {far} of {}", factor * magnitude);
            }
        }
    }
}

#[test]
fn tensors_of_the_device_are_read_where_they_lie_and_nothing_is_waited_for() {
    for cuda in queues() {
        let ([m, n, k], mut random) = ([3, 64, 256], Random(83));
        let codes: Vec<i8> = (0..n * k).map(|_| random.bits() as i8).collect();
        let layer = LlmInt8Linear::on(&cuda, &codes, [n, k], &vec![0.01; n]).unwrap();
        let x = of_type(Float::F16, &random.activations(m * k));
        let want = output(Float::F16, m * n, |y| layer.forward(&cuda, x.as_floats(), m, 2.0, y));
        let (there, mut y) = (cuda.upload(x.as_floats()).unwrap(), cuda.allocate(Float::F16, m * n).unwrap());
        // Behind a pause, so that a host that waits is seen.
        cuda.stream().delay(std::time::Duration::from_millis(300)).unwrap();
        let (x, to) = (AnyFloats::from(there.view(0..m * k)), AnyFloatsMut::from(y.view_mut(0..m * n)));
        layer.forward(&cuda, x, m, 2.0, to).unwrap();
        assert!(!cuda.stream().is_done().unwrap(), "the host waited");
        let mut got = vec![f16::ZERO; m * n];
        cuda.download(y.view(0..m * n), &mut got).unwrap();
        same(&got.iter().map(|y| y.to_f32()).collect::<Vec<_>>(), &want, "tensors of the device");
        // No rows; and what does not fit is an error.
        layer.forward(&cuda, &[0f32; 0], 0, 6.0, &mut [0f32; 0]).unwrap();
        assert!(layer.forward(&cuda, &[0f32; 256], 2, 6.0, &mut [0f32; 128]).is_err());
        assert!(layer.forward(&cuda, &[0f32; 256], 1, -1.0, &mut [0f32; 64]).is_err());
        let on = |cuda: &Cuda, codes: &[i8], shape, scales: &[f32]| LlmInt8Linear::on(cuda, codes, shape, scales);
        assert!(on(&cuda, &[0; 64], [1, 63], &[1.0]).is_err());
        assert!(on(&cuda, &[0; 64], [1, 64], &[-1.0]).is_err());
        assert!(on(&cuda, &[], [1, 0], &[1.0]).is_err());
        assert!(on(&cuda, &[0; 64], [1, 64], &[1.0]).unwrap().with_bias(vec![0.0; 2]).is_err());
    }
}

#[test]
fn signed_codes_and_their_scales_are_those_of_the_cpu() {
    for gpu in gpus() {
        let (stream, mut random) = (gpu.stream().unwrap(), Random(84));
        for round in 0..24 {
            let dtype = [Float::F16, Float::BF16, Float::F32][round % 3];
            let [n, k] = [1 + random.below(200), 1 + random.below(300)];
            let w = of_type(dtype, &random.normals(n * k));
            let group = [Group::Channel, Group::Size(64), Group::Size(37)][round / 3 % 3];
            let format = format(8, group, [Float::F32, dtype][round % 2]);
            let q = weight_only(w.as_floats(), [k, n], format, WeightOnlyRule::Paddle).unwrap();
            let want: Vec<i8> = q.codes().iter().map(|code| (code ^ 0x80) as i8).collect();
            let groups = q.groups();
            let want_scales: Vec<f32> = (0..n * groups).map(|at| q.scales()[at % n * groups + at / n]).collect();
            let there = FloatBuffer::upload(&gpu, &stream, w.as_floats()).unwrap();
            let mut codes = gpu.context().allocate::<i8>(n * k).unwrap();
            let mut scales = FloatBuffer::allocate(&gpu, format.scale, n * groups).unwrap();
            let mut quantize = |len: usize| {
                let to = (codes.view_mut(), scales.view_mut(0..len));
                fpa_intb::quantize_signed(&gpu, &stream, there.view(0..n * k), [k, n], format, to)
            };
            assert!(quantize(n * groups - 1).is_err());
            quantize(n * groups).unwrap();
            let mut got = vec![0i8; n * k];
            stream.download(codes.view(), &mut got).unwrap();
            assert!(got == want, "codes of {dtype} {group} [{n}, {k}]");
            same(&downloaded(&stream, scales.view(0..n * groups)), &want_scales, "scales");
        }
    }
}

#[test]
fn streams_of_codes_become_floats() {
    for gpu in gpus() {
        let (stream, mut random) = (gpu.stream().unwrap(), Random(85));
        for round in 0..48 {
            let (layout, bits) = ([FpaIntB::RowMajor, FpaIntB::Interleaved][round % 2], [4u32, 8][round / 2 % 2]);
            let dtype = [Float::F16, Float::BF16, Float::F32][round % 3];
            let group = [Group::Channel, Group::Size(64), Group::Size(128)][round / 4 % 3];
            let [n, k] = [32 * (1 + random.below(8)), 64 * (1 + random.below(6))];
            let format = format(bits, group, dtype);
            let groups = group.count(k);
            let codes: Vec<u8> = (0..n * k).map(|_| random.bits() as u8 & ((1u16 << bits) - 1) as u8).collect();
            let scales: Vec<f32> = random.normals(groups * n).into_iter().map(|s| dtype.round(s * 0.01)).collect();
            let packed = layout.pack(&codes, [n, k], bits).unwrap();
            let value = |at: usize| {
                let (j, i) = (at / n, at % n);
                let code = f32::from(codes[i * k + j]) - format.middle() as f32;
                dtype.round(code * scales[j / group.len(k) * n + i])
            };
            let want: Vec<f32> = (0..n * k).map(value).collect();
            let mut there = gpu.context().allocate(packed.len()).unwrap();
            stream.upload(&packed, there.view_mut()).unwrap();
            let upload = |values: &[f32]| {
                let values = of_type(dtype, values);
                FloatBuffer::upload(&gpu, &stream, values.as_floats()).unwrap()
            };
            let (scales, mut out) = (upload(&scales), upload(&vec![0.0; n * k]));
            let from = (there.view(), scales.view(0..groups * n));
            fpa_intb::dequantize(&gpu, &stream, layout, from, [k, n], format, out.view_mut(0..n * k)).unwrap();
            let got = downloaded(&stream, out.view(0..n * k));
            same(&got, &want, &format!("{layout:?} {bits} bits {group} {dtype} [{k}, {n}]"));
            let short = out.view_mut(1..n * k);
            assert!(fpa_intb::dequantize(&gpu, &stream, layout, from, [k, n], format, short).is_err());
        }
    }
}

fn format(bits: u32, group: Group, scale: Float) -> WeightFormat {
    WeightFormat { bits, group, zero: Zero::Symmetric, scale, channel_scale: None }
}

fn downloaded(stream: &Stream, from: FloatView<'_>) -> Vec<f32> {
    fn all<T: bytemuck::Pod>(stream: &Stream, from: View<'_, T>, wide: impl Fn(&T) -> f32) -> Vec<f32> {
        let mut values = vec![T::zeroed(); from.len()];
        stream.download(from, &mut values).unwrap();
        values.iter().map(wide).collect()
    }
    match from {
        FloatView::F16(from) => all(stream, from, |x| x.to_f32()),
        FloatView::BF16(from) => all(stream, from, |x| x.to_f32()),
        FloatView::F32(from) => all(stream, from, |x| *x),
    }
}
