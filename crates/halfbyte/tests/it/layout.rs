//! Layouts are bijections.

use crate::data::{Random, parse, rounded};
use half::f16;
use halfbyte::cpu::isa::{Caps, Isa};
use halfbyte::cpu::pack::pack;
use halfbyte::format::FORMATS;
use halfbyte::layout::codes::Codes;
use halfbyte::layout::cpu_dense_n16::CpuDenseN16;
use halfbyte::layout::cpu_n16::{CpuN16, PackedZeros};
use halfbyte::layout::cuda_plain::CudaPlain;
use halfbyte::layout::stored::{StoredTensor, StoredZeros, Strides};
use halfbyte::{Error, FloatData, Floats, Group, QTensor, WeightFormat, Zero, Zeros};
use std::borrow::Cow;
use std::sync::Arc;

#[test]
fn what_is_packed_unpacks_to_the_same_tensor() {
    let mut random = Random(9);
    for name in FORMATS {
        for shape in [[1, 1], [16, 32], [17, 33], [40, 300], [3, 5000], [5, 0], [0, 7]] {
            for act_order in [false, true] {
                let w = random.qtensor(parse(name).weight, shape, act_order);
                assert_eq!(CpuN16::pack(&w, false).unpack(), w, "{name} {shape:?} act-order {act_order}");
                assert_eq!(CudaPlain::pack(&w).unwrap().unpack().unwrap(), w, "{name} {shape:?} act-order {act_order}");
            }
        }
    }
    for [n, k] in [[1, 1], [16, 8], [17, 9], [0, 3], [3, 0]] {
        let w = rounded(&random.normals(n * k), halfbyte::Float::F16);
        let halfs: Vec<f16> = w.iter().map(|&v| f16::from_f32(v)).collect();
        assert_eq!(CpuDenseN16::pack(Floats::F16(&halfs), [n, k]).unwrap().unpack(), w);
    }
}

#[test]
fn packed_codes_take_no_more_than_their_bits() {
    let mut random = Random(10);
    for (name, bits) in [("w4a16-g128", 4.125), ("w8a16-g128", 8.125), ("w2a16-g128", 2.125), ("w4a16-g128-asym", 4.25)]
    {
        let w = random.qtensor(parse(name).weight, [256, 1024], false);
        let packed = CpuN16::pack(&w, false).bytes() as f64 * 8.0 / (256.0 * 1024.0);
        assert_eq!(packed, bits, "{name}");
    }
}

/// Words of a stream of codes, the lowest bits first; what is left of the last word is filled with ones.
fn stream(codes: impl Iterator<Item = u8>, bits: u32) -> Vec<u32> {
    let mut words = Vec::new();
    for (at, code) in codes.enumerate() {
        let shift = at as u32 * bits % 32;
        if shift == 0 {
            words.push(u32::MAX);
        }
        let word = words.last_mut().unwrap();
        *word = *word & !(((1 << bits) - 1) << shift) | u32::from(code) << shift;
    }
    words
}

/// A tensor's codes in every layout that can hold them, put there code by code.
fn layouts(q: &QTensor) -> Vec<(&'static str, Codes<'static>)> {
    let ([n, k], bits) = ([q.n(), q.k()], q.format().bits);
    let code = |i: usize, j: usize| q.codes()[i * k + j];
    let bytes = |flip: u8| Codes::Bytes { codes: q.codes().iter().map(|c| c ^ flip).collect::<Vec<_>>().into(), flip };
    let all = q.clone();
    let rows = move |range: std::ops::Range<usize>, out: &mut [u8]| {
        out.copy_from_slice(&all.codes()[range.start * all.k()..range.end * all.k()]);
    };
    let mut out = vec![("bytes", bytes(0)), ("flipped bytes", bytes(0x80)), ("rows", Codes::Rows(Arc::new(rows)))];
    if bits == 3 || n == 0 || k == 0 {
        return out;
    }
    let per_word = 32 / bits as usize;
    let along: Vec<u32> = (0..n).flat_map(|i| stream((0..k).map(|j| code(i, j)), bits)).collect();
    if k % per_word == 0 {
        let per_row = k / per_word;
        let down: Vec<u32> =
            (0..per_row).flat_map(|t| (0..n).map(move |i| (t, i))).map(|(t, i)| along[i * per_row + t]).collect();
        out.push(("words down", Codes::WordsDown(down.into())));
    }
    out.push(("words along", Codes::WordsAlong(along.into())));
    if bits == 4 && n % 8 == 0 {
        let place = [0, 4, 1, 5, 2, 6, 3, 7];
        let word = |j: usize, c: usize| (0..8).fold(0, |w, o| w | u32::from(code(8 * c + o, j)) << (4 * place[o]));
        let across = (0..k).flat_map(|j| (0..n / 8).map(move |c| (j, c))).map(|(j, c)| word(j, c));
        out.push(("words across", Codes::WordsAcross(across.collect::<Vec<_>>().into())));
    }
    out
}

/// The scales or offsets as a file might have them: in the format's type or wide, by outputs or by groups.
fn table(q: &QTensor, values: &[f32], by_groups: bool, wide: bool) -> (FloatData<'static>, Strides) {
    let (n, groups) = (q.n(), q.groups());
    let values: Vec<f32> = match by_groups {
        true => (0..groups).flat_map(|g| (0..n).map(move |i| values[i * groups + g])).collect(),
        false => values.to_vec(),
    };
    let strides = if by_groups { Strides::of_groups(n) } else { Strides::of_outputs(groups) };
    let data = match q.format().scale {
        halfbyte::Float::F16 if !wide => FloatData::F16(values.into_iter().map(f16::from_f32).collect()),
        halfbyte::Float::BF16 if !wide => FloatData::BF16(values.into_iter().map(half::bf16::from_f32).collect()),
        _ => FloatData::F32(values.into()),
    };
    (data, strides)
}

fn stored(q: &QTensor, codes: Codes<'static>, by_groups: bool, wide: bool) -> StoredTensor<'static> {
    let zeros = match q.zeros() {
        Zeros::Symmetric => StoredZeros::Symmetric,
        Zeros::Integer(z) => {
            let wide: Vec<f32> = z.iter().map(|&z| f32::from(z)).collect();
            let (values, strides) = table(q, &wide, by_groups, true);
            StoredZeros::Integer(values.to_f32().into_iter().map(|z| z as u16).collect::<Vec<_>>().into(), strides)
        }
        Zeros::Float(o) => {
            let (values, strides) = table(q, o, by_groups, wide);
            StoredZeros::Float(values, strides)
        }
    };
    let index = q.group_index().map(<[u32]>::to_vec);
    StoredTensor::new(q.format(), [q.n(), q.k()], codes, table(q, q.scales(), by_groups, wide), zeros, index).unwrap()
}

/// Every bit that kernels read.
fn contents(w: &CpuN16) -> impl PartialEq + std::fmt::Debug + use<> {
    let groups = w.panels() * w.groups() * 16;
    let zeros: Vec<u32> = match w.zeros() {
        PackedZeros::Symmetric => Vec::new(),
        PackedZeros::Integer(z) => z.iter().map(|&z| u32::from(z)).collect(),
        PackedZeros::Float(o) => (0..groups).map(|i| o.get(i).to_bits()).collect(),
    };
    (
        w.codes()[..w.panels() * w.tiles() * 64].to_vec(),
        (w.spans().to_vec(), w.columns().map(<[u32]>::to_vec), w.bytes()),
        (0..groups).map(|i| w.scales().get(i).to_bits()).collect::<Vec<_>>(),
        zeros,
        w.code_sums().to_vec(),
    )
}

#[test]
fn every_layout_of_files_packs_to_the_same_bits() {
    let mut random = Random(11);
    let isas = [Isa::Plain, Isa::Avx2, Isa::Avx512].into_iter();
    let caps: Vec<Caps> = isas.filter_map(|isa| Caps::detect().limited_to(isa).ok()).collect();
    let shapes = [[16, 32], [8, 64], [40, 320], [272, 160], [48, 33], [17, 300], [64, 8], [3, 5000], [5, 0], [0, 7]];
    for name in FORMATS {
        for (at, shape) in shapes.into_iter().enumerate() {
            for act_order in [false, true] {
                let q = random.qtensor(parse(name).weight, shape, act_order);
                let expected = contents(&CpuN16::pack(&q, true));
                for (layout, codes) in layouts(&q) {
                    let w = stored(&q, codes, at % 2 == 0, at % 3 == 0);
                    let what = format!("{name} {shape:?} act-order {act_order}, {layout}");
                    assert_eq!(w.to_qtensor().unwrap(), q, "{what}");
                    for caps in &caps {
                        assert!(contents(&pack(*caps, &[&w], true).unwrap()) == expected, "{what}, {caps:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn tensors_below_each_other_pack_as_one() {
    let mut random = Random(12);
    for name in ["w4a16-g128", "w4a16-g32-asym", "w8a16-g32-asym", "w2a16-g32-float", "w3a16-g128", "w4a16-g20-asym"] {
        for heights in [[32, 16, 48], [24, 8, 144], [5, 30, 14], [0, 16, 1]] {
            let parts = heights.map(|n| random.qtensor(parse(name).weight, [n, 256], false));
            let joined = QTensor::concat_rows(&parts.each_ref()).unwrap();
            let expected = contents(&CpuN16::pack(&joined, true));
            for layout in ["bytes", "rows", "words down", "words along", "words across"] {
                let stored: Option<Vec<StoredTensor<'_>>> = parts
                    .iter()
                    .map(|q| {
                        let codes = layouts(q).into_iter().find(|(name, _)| *name == layout)?.1;
                        Some(stored(q, codes, true, false))
                    })
                    .collect();
                if let Some(stored) = stored {
                    assert!(
                        contents(&pack(Caps::detect(), &stored.iter().collect::<Vec<_>>(), true).unwrap()) == expected,
                        "{name} {heights:?} {layout}"
                    );
                }
            }
        }
    }
}

#[test]
fn stored_tensors_that_do_not_fit_are_refused() {
    let format = WeightFormat { bits: 4, group: Group::Size(32), zero: Zero::Integer, scale: halfbyte::Float::F16 };
    let good = || {
        let scales = (FloatData::F16(vec![f16::ONE; 32].into()), Strides::of_groups(16));
        (
            Codes::WordsDown(vec![0; 128].into()),
            scales,
            StoredZeros::Integer(vec![16; 32].into(), Strides::of_groups(16)),
        )
    };
    let new = |shape, (codes, scales, zeros), index| StoredTensor::new(format, shape, codes, scales, zeros, index);
    assert!(new([16, 64], good(), None).is_ok());
    let refused = |shape, parts, index, expected: &str| {
        let Error::Invalid { expected: text, .. } = new(shape, parts, index).unwrap_err() else { panic!("{expected}") };
        assert!(text.contains(expected), "{text}");
    };
    let (_, scales, zeros) = good();
    refused([16, 60], good(), None, "codes for 16 × 60");
    refused([17, 64], good(), None, "codes for 17 × 64");
    refused([usize::MAX, 64], good(), None, "fits memory");
    refused([16, 64], (Codes::WordsAcross(vec![0; 127].into()), scales.clone(), zeros.clone()), None, "codes for");
    let bytes = Codes::Bytes { codes: vec![0x90; 1024].into(), flip: 0x80 };
    refused([16, 64], (bytes, scales.clone(), zeros.clone()), None, "codes of 4 bits");
    let short = (FloatData::F16(vec![f16::ONE; 31].into()), Strides::of_groups(16));
    refused([16, 64], (good().0, short, zeros.clone()), None, "scales for 16 outputs and 2 groups");
    for (value, dtype) in [(f32::NAN, true), (f32::INFINITY, true), (1e-9, false)] {
        let values = match dtype {
            true => FloatData::F16(vec![f16::from_f32(value); 32].into()),
            false => FloatData::F32(vec![value; 32].into()),
        };
        refused([16, 64], (good().0, (values, scales.1), zeros.clone()), None, "scales finite and exact in f16");
    }
    let beyond = StoredZeros::Integer(Cow::Owned(vec![17; 32]), Strides::of_groups(16));
    refused([16, 64], (good().0, scales.clone(), beyond), None, "zero points up to 16");
    let far = StoredZeros::Integer(Cow::Owned(vec![1; 32]), Strides { output: usize::MAX, group: 2 });
    refused([16, 64], (good().0, scales.clone(), far), None, "zero points for");
    refused([16, 64], (good().0, scales, StoredZeros::Symmetric), None, "Integer zeros");
    refused([16, 64], good(), Some(vec![0; 63]), "64 group indices");
    refused([16, 64], good(), Some(vec![2; 64]), "group indices below 2");

    let tensor = new([16, 64], good(), None).unwrap();
    let mut reversed: Vec<u32> = (0..64).map(|j| j / 32).collect();
    reversed.reverse();
    let other = new([16, 64], good(), Some(reversed)).unwrap();
    assert!(pack(Caps::detect(), &[&tensor, &other], false).is_err());
    assert!(pack(Caps::detect(), &[], false).is_err());
}
