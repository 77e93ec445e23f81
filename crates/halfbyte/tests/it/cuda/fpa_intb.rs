//! Layouts of fpA_intB kernels on a device: the bits of the CPU, for every layout, type and rule of groups.

use super::gpus;
use crate::data::Random;
use half::{bf16, f16};
use halfbyte::cuda::Gpu;
use halfbyte::cuda::driver::{Buffer, FloatView, FloatViewMut, Stream};
use halfbyte::cuda::matmul::fpa_intb;
use halfbyte::layout::codes::FpaIntB;
use halfbyte::quantize::{WeightOnlyRule, weight_only};
use halfbyte::{Float, Floats, Group, WeightFormat, Zero};

/// What lies round whatever is written.
const GUARD: usize = 64;
const POISON: u8 = 0xa5;

const LAYOUTS: [FpaIntB; 2] = [FpaIntB::RowMajor, FpaIntB::Interleaved];

/// Room for bytes, with guards.
fn room(gpu: &Gpu, stream: &Stream, len: usize) -> Buffer<u8> {
    let mut buffer = gpu.context().allocate(len + 2 * GUARD).unwrap();
    stream.fill(buffer.view_mut(), POISON).unwrap();
    buffer
}

/// What was written between guards that are intact.
fn read(stream: &Stream, buffer: &Buffer<u8>) -> Vec<u8> {
    let mut all = vec![0; buffer.len()];
    stream.download(buffer.view(), &mut all).unwrap();
    let end = all.len() - GUARD;
    assert!(all[..GUARD].iter().chain(&all[end..]).all(|&byte| byte == POISON), "wrote outside");
    all[GUARD..end].to_vec()
}

fn shapes(random: &mut Random, layout: FpaIntB, bits: usize) -> [usize; 2] {
    match layout {
        FpaIntB::RowMajor => [32 / bits * (1 + random.below(40)), 1 + random.below(300)],
        FpaIntB::Interleaved => [16 / bits * (1 + random.below(60)), 64 * (1 + random.below(5))],
    }
}

#[test]
fn codes_lie_where_the_cpu_puts_them_and_come_back() {
    for gpu in gpus() {
        let (stream, mut random) = (gpu.stream().unwrap(), Random(61));
        for round in 0..40 {
            let (layout, bits) = (LAYOUTS[round % 2], [4u32, 8][round / 2 % 2]);
            let [n, k] = shapes(&mut random, layout, bits as usize);
            let codes: Vec<u8> = (0..n * k).map(|_| (random.bits() as u8) & ((1u16 << bits) - 1) as u8).collect();
            let expected = layout.pack(&codes, [n, k], bits).unwrap();
            let mut there = gpu.context().allocate(codes.len()).unwrap();
            stream.upload(&codes, there.view_mut()).unwrap();
            let (len, mut out) = (expected.len(), room(&gpu, &stream, expected.len()));
            let to = out.view_mut().slice(GUARD..GUARD + len);
            fpa_intb::pack(&gpu, &stream, layout, there.view(), [n, k], bits, to).unwrap();
            assert!(read(&stream, &out) == expected, "{layout:?} {bits} bits [{n}, {k}]");
            let mut back = room(&gpu, &stream, codes.len());
            let (from, to) = (out.view().slice(GUARD..GUARD + len), back.view_mut().slice(GUARD..GUARD + codes.len()));
            fpa_intb::unpack(&gpu, &stream, layout, from, [n, k], bits, to).unwrap();
            assert!(read(&stream, &back) == codes, "{layout:?} {bits} bits [{n}, {k}]");
        }
        // What does not fit is an error before anything is launched.
        let mut buffer = room(&gpu, &stream, 512);
        let layout = FpaIntB::Interleaved;
        let codes = gpu.context().allocate::<u8>(256).unwrap();
        let mut pack = |first: usize, len: usize, shape: [usize; 2], bits: u32| {
            let to = buffer.view_mut().slice(first..first + len);
            fpa_intb::pack(&gpu, &stream, layout, codes.view(), shape, bits, to)
        };
        assert!(pack(0, 128, [4, 64], 4).is_ok());
        assert!(pack(1, 128, [4, 64], 4).is_err());
        assert!(pack(0, 127, [4, 64], 4).is_err());
        assert!(pack(0, 128, [8, 32], 4).is_err());
        assert!(pack(0, 256, [4, 64], 3).is_err());
        stream.synchronize().unwrap();
    }
}

#[test]
fn weights_become_the_codes_and_scales_of_the_cpu() {
    for gpu in gpus() {
        let (stream, mut random) = (gpu.stream().unwrap(), Random(62));
        for round in 0..60 {
            let (layout, bits) = (LAYOUTS[round % 2], [4u32, 8][round / 2 % 2]);
            let dtype = [Float::F16, Float::BF16, Float::F32][round % 3];
            // As llm.int8 has them, and as the weights are.
            let scale = if round % 5 == 0 { Float::F32 } else { dtype };
            let group = [Group::Channel, Group::Size(64), Group::Size(128), Group::Size(37)][round / 4 % 4];
            let [n, k] = shapes(&mut random, layout, bits as usize);
            let format = WeightFormat { bits, group, zero: Zero::Symmetric, scale, channel_scale: None };
            let mut values = random.normals(n * k);
            // Columns of zeros of either sign, of the least numbers, and of halves, which are ties.
            for j in 0..k {
                values[j * n] = if j == 0 { -0.0 } else { 0.0 };
                values[j * n + 1] = if j % 2 == 0 { 6e-8 } else { -6e-8 };
                values[j * n + 2] = if j == 0 { 63.5 } else { (j % 127) as f32 * 0.5 };
            }
            let (stored, wide) = of_type(dtype, &values);
            let q = weight_only(Floats::from(&wide), [k, n], format, WeightOnlyRule::Paddle).unwrap();
            let expected = layout.pack(q.codes(), [n, k], bits).unwrap();
            let groups = q.groups();
            let scales: Vec<f32> = (0..n * groups).map(|at| q.scales()[at % n * groups + at / n]).collect();
            let expected_scales = of_type(scale, &scales).0;

            let mut w = gpu.context().allocate(stored.len()).unwrap();
            stream.upload(&stored, w.view_mut()).unwrap();
            let mut out = room(&gpu, &stream, expected.len());
            let mut to_scales = room(&gpu, &stream, expected_scales.len());
            let view = match dtype {
                Float::F16 => FloatView::from(w.view().cast::<f16>()),
                Float::BF16 => w.view().cast::<bf16>().into(),
                Float::F32 => w.view().cast::<f32>().into(),
            };
            let bytes = to_scales.view_mut().slice(GUARD..GUARD + expected_scales.len());
            let scales_view = match scale {
                Float::F16 => FloatViewMut::from(bytes.cast::<f16>()),
                Float::BF16 => bytes.cast::<bf16>().into(),
                Float::F32 => bytes.cast::<f32>().into(),
            };
            let to = out.view_mut().slice(GUARD..GUARD + expected.len());
            fpa_intb::quantize(&gpu, &stream, layout, view, [k, n], format, (to, scales_view)).unwrap();
            let what = format!("{layout:?} {bits} bits {dtype} {scale} {group} [{n}, {k}]");
            assert!(read(&stream, &to_scales) == expected_scales, "scales: {what}");
            assert!(read(&stream, &out) == expected, "codes: {what}");
        }
    }
}

/// Numbers in a type as their bytes, and widened again.
fn of_type(dtype: Float, values: &[f32]) -> (Vec<u8>, Vec<f32>) {
    let wide: Vec<f32> = values.iter().map(|&value| dtype.round(value)).collect();
    let bytes = |value: &f32| match dtype {
        Float::F16 => f16::from_f32(*value).to_le_bytes().to_vec(),
        Float::BF16 => bf16::from_f32(*value).to_le_bytes().to_vec(),
        Float::F32 => value.to_le_bytes().to_vec(),
    };
    (wide.iter().flat_map(bytes).collect(), wide)
}
