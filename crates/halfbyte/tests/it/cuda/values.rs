//! What is put onto the device as floats: what codes stand for, and floats as they are.

use super::gpus;
use crate::data::{Random, parse};
use crate::layout::{layouts, stored};
use half::{bf16, f16};
use halfbyte::Floats;
use halfbyte::cuda::matmul::Packer;
use halfbyte::cuda::nn::FloatBuffer;
use halfbyte::format::FORMATS;
use halfbyte::format::reference::dequantize;

/// What codes stand for, made on the device, beside the f64 reference rounded once; from every way that files have, with slabs
/// that cut the tensor.
#[test]
fn values_are_those_of_the_reference_rounded_once() {
    let shapes = [[64, 128], [300, 1000], [272, 160], [48, 33], [3, 5000], [5, 0], [0, 7]];
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let mut random = Random(36);
        for (at, name) in FORMATS.iter().enumerate() {
            for (s, shape) in shapes.into_iter().enumerate() {
                let q = random.qtensor(parse(name).weight, shape, (at + s) % 2 == 1);
                let want: Vec<u32> = dequantize(&q).into_iter().map(|v| (v as f32).to_bits()).collect();
                for (l, (from, codes)) in layouts(&q).into_iter().enumerate() {
                    let w = stored(&q, codes, (s + l) % 2 == 0, (at + l) % 3 == 0);
                    for slab_bytes in [64 << 20, 1] {
                        let mut packer = Packer::new(&gpu, &stream).with_slab_bytes(slab_bytes);
                        let values = packer.values(&w).unwrap();
                        let mut got = vec![0f32; values.len()];
                        stream.download(values.view(), &mut got).unwrap();
                        let got: Vec<u32> = got.into_iter().map(f32::to_bits).collect();
                        let differs = (0..want.len().max(got.len())).find(|&i| got.get(i) != want.get(i));
                        assert_eq!(differs, None, "{name} {shape:?} from {from}, slabs of {slab_bytes}");
                    }
                }
            }
        }
    }
}

/// Matrices of floats, also such as pass the pinned buffers several times, below each other.
#[test]
fn floats_arrive_as_they_are() {
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let (mut packer, mut random) = (Packer::new(&gpu, &stream), Random(37));
        let lens = [0, 7, (20 << 20) + 3, 1];
        let halfs = lens.map(|len| (0..len).map(|_| f16::from_bits(random.bits() as u16)).collect::<Vec<_>>());
        let singles =
            lens.map(|len| (0..len.min(1000)).map(|_| f32::from_bits(random.bits() as u32)).collect::<Vec<_>>());
        let parts: Vec<Floats<'_>> = halfs.iter().map(|part| Floats::F16(part)).collect();
        let FloatBuffer::F16(there) = packer.floats(&parts).unwrap() else { panic!("halfs") };
        let mut got = vec![f16::ZERO; there.len()];
        stream.download(there.view(), &mut got).unwrap();
        assert!(bytemuck::cast_slice::<_, u16>(&got) == bytemuck::cast_slice::<_, u16>(&halfs.concat()));
        let brains: Vec<Vec<bf16>> = singles
            .iter()
            .map(|part| part.iter().map(|v| bf16::from_bits((v.to_bits() >> 16) as u16)).collect())
            .collect();
        let parts: Vec<Floats<'_>> = brains.iter().map(|part| Floats::BF16(part)).collect();
        let FloatBuffer::BF16(there) = packer.floats(&parts).unwrap() else { panic!("brain floats") };
        let mut got = vec![bf16::ZERO; there.len()];
        stream.download(there.view(), &mut got).unwrap();
        assert!(bytemuck::cast_slice::<_, u16>(&got) == bytemuck::cast_slice::<_, u16>(&brains.concat()));
        let parts: Vec<Floats<'_>> = singles.iter().map(|part| Floats::F32(part)).collect();
        let FloatBuffer::F32(there) = packer.floats(&parts).unwrap() else { panic!("singles") };
        let mut got = vec![0f32; there.len()];
        stream.download(there.view(), &mut got).unwrap();
        assert!(bytemuck::cast_slice::<_, u32>(&got) == bytemuck::cast_slice::<_, u32>(&singles.concat()));
        assert!(packer.floats(&[]).is_err());
        assert!(packer.floats(&[Floats::F16(&halfs[1]), Floats::F32(&singles[1])]).is_err());
    }
}
