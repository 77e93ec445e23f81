//! Layouts are bijections.

mod atoms;
mod multiples;
mod parts;
pub mod planes;
pub mod tables;
pub mod three_bits;
pub mod types_of_files;

use crate::data::{Random, below_each_other, parse, rounded, with_zeros_in_bytes};
use half::f16;
use halfbyte::cpu::isa::{Caps, Isa};
use halfbyte::cpu::pack::pack;
use halfbyte::format::FORMATS;
use halfbyte::format::reference::dequantize;
use halfbyte::layout::codes::{BlockForm, Codes, Fields};
use halfbyte::layout::cpu_dense_n16::CpuDenseN16;
use halfbyte::layout::cpu_n16::{CpuN16, PackedZeros};
use halfbyte::layout::cuda_plain::CudaPlain;
use halfbyte::layout::cuda_wna16::{Atom, CudaWna16};
use halfbyte::layout::stored::{StoredTensor, StoredZeros, Strides};
use halfbyte::{Act, Error, FloatData, Floats, Group, QTensor, WeightFormat, Zero, Zeros};
use std::borrow::Cow;
use std::sync::Arc;

#[test]
fn what_is_packed_unpacks_to_the_same_tensor() {
    let mut random = Random(9);
    for name in FORMATS {
        for shape in [[1, 1], [16, 32], [17, 33], [40, 300], [3, 5000], [5, 0], [0, 7]] {
            for act_order in [false, true] {
                let w = random.qtensor(parse(name).weight, shape, act_order);
                let packed = CpuN16::pack(&w, false);
                assert_eq!(packed.unpack(), w, "{name} {shape:?} act-order {act_order}");
                let (values, mut row) = (StoredTensor::from(&w).values().unwrap(), vec![f32::NAN; shape[1]]);
                for (i, want) in values.chunks_exact(shape[1].max(1)).enumerate() {
                    packed.row(i, &mut row);
                    assert_eq!(row, want, "row {i} of {name} {shape:?} act-order {act_order}");
                }
                assert_eq!(CudaPlain::pack(&w).unwrap().unpack().unwrap(), w, "{name} {shape:?} act-order {act_order}");
            }
        }
    }
    for [n, k] in [[1, 1], [16, 8], [17, 9], [0, 3], [3, 0]] {
        let w = rounded(&random.normals(n * k), halfbyte::Float::F16);
        let halfs: Vec<f16> = w.iter().map(|&v| f16::from_f32(v)).collect();
        let packed = CpuDenseN16::pack(Floats::F16(&halfs), [n, k]).unwrap();
        assert_eq!(packed.unpack(), w);
        let mut row = vec![f32::NAN; k];
        for (i, want) in w.chunks_exact(k.max(1)).enumerate() {
            packed.row(i, &mut row);
            assert_eq!(row, want);
        }
    }
}

/// Formats of both widths with every size of groups, with and without zero points, with scales of both types.
const WNA16: [&str; 34] = [
    "w4a16-g128",
    "w4a16-g128-asym",
    "w4a16-g64-sbf16",
    "w4a16-g32-asym",
    "w4a16-asym-sbf16",
    "w4a16-tensor",
    "w8a16-g128-asym-sbf16",
    "w8a16-g64",
    "w8a16-g32-asym",
    "w8a16",
    "w4a16-g256-asym",
    "w8a16-g96",
    "w4a8-g128-si8",
    "w4a8-g64-asym-si8",
    "w4a8-g32-asym-sbf16-si8",
    "w4a8-g256-asym-si8",
    "w4a16-g128-asym-si8",
    "w4a16-g32-float-sf32",
    "w4a16-g32-float",
    "w4a16-float-sbf16",
    "w4a16-g128-sf32",
    "w4a16-asym-sf32",
    "w4a16-g48-asym",
    "w8a16-g16-sf32",
    "w8a16-g32-float-sf32",
    "w8a16-tensor-sf32",
    "w2a16-g32",
    "w2a16-g64-asym",
    "w2a16-g16-float-sf32",
    "w2a16",
    "w3a16-g128",
    "w3a16-g16-sf32",
    "w3a16-g64-asym",
    "w3a16-g80-float",
];

#[test]
fn what_is_packed_for_tensor_cores_unpacks_to_the_same_tensor() {
    let mut random = Random(12);
    for name in WNA16 {
        let act = parse(name).act;
        for shape in [[1, 1], [64, 128], [65, 129], [300, 1000], [130, 640], [3, 5000], [5, 0], [0, 7]] {
            for act_order in [false, true] {
                let w = with_zeros_in_bytes(random.qtensor(parse(name).weight, shape, act_order));
                if shape[1] == 0 && Atom::of(w.format(), 0).is_err() {
                    assert!(CudaWna16::pack(&w, act).unwrap_err().to_string().contains("at least one column"));
                    continue;
                }
                let packed = CudaWna16::pack(&w, act).unwrap();
                assert_eq!(packed.unpack().unwrap(), w, "{name} {shape:?} act-order {act_order}");
                let atoms = shape[0].div_ceil(64) * shape[1].div_ceil(128);
                assert_eq!(packed.atoms().len(), atoms * packed.atom().bytes());
            }
        }
    }
}

#[test]
fn what_tensor_cores_cannot_hold_is_refused() {
    let refused = |name: &str, k| Atom::of(parse(name).weight, k).unwrap_err().to_string();
    assert!(refused("w4a16-g32-float", 256).contains("float offsets"));
    assert!(refused("w4a16-g32-sf32", 256).contains("got f32"));
    assert!(refused("w4a16-g20", 256).contains("a multiple of 32, got 20"));
    assert!(refused("w4a16-g32-si8", 256).contains("one level of scales"));
    let refused = |name: &str, k| Atom::of_levels(parse(name).weight, k).unwrap_err().to_string();
    assert!(refused("w4a16-g20-si8", 256).contains("a multiple of 32, got 20"));
    assert!(refused("w4a16-g32-sf32", 256).contains("got f32"));
    assert_eq!(Atom::of(parse("w4a16-g20").weight, 16).unwrap().group, 0);
    let of_5_bits = WeightFormat { bits: 5, ..parse("w4a16-g128").weight };
    assert!(Atom::of(of_5_bits, 256).unwrap_err().to_string().contains("codes of 2, 3, 4 or 8 bits, got 5"));
    let refused = |name: &str, k| Atom::of_any(parse(name).weight, k).unwrap_err().to_string();
    assert!(refused("w4a16-g20-sf32", 256).contains("a multiple of 16, got 20"));

    let format = parse("w8a16-g32-asym").weight;
    let tensor = |zero, scale, index| {
        QTensor::new(format, [1, 64], vec![0; 64], vec![scale; 2], Zeros::Integer(vec![zero; 2]), index).unwrap()
    };
    let why = |w: QTensor| CudaWna16::pack(&w, Act::A16).unwrap_err().to_string();
    assert!(why(tensor(256, 1.0, None)).contains("zero points of 8 bits, got 256"));
    assert!(why(tensor(255, 512.0, None)).contains("f16 scales up to"));
    let uneven = [vec![0; 33], vec![1; 31]].concat();
    assert!(why(tensor(1, 1.0, Some(uneven))).contains("32 columns in group 0, got 33"));
}

#[test]
fn packed_codes_take_no_more_than_their_bits() {
    let mut random = Random(10);
    let formats = [("w4a16-g128", 4.125), ("w8a16-g128", 8.125), ("w2a16-g128", 2.125), ("w4a16-g128-asym", 4.25)];
    let of_3 = [("w3a16-g128", 3.125), ("w3a16-g64-asym", 3.5), ("w3a16-g16", 4.0), ("w3a8", 3.015625)];
    for (name, bits) in formats.into_iter().chain(of_3) {
        let w = random.qtensor(parse(name).weight, [256, 1024], false);
        let packed = CpuN16::pack(&w, false).bytes() as f64 * 8.0 / (256.0 * 1024.0);
        assert_eq!(packed, bits, "{name}");
    }
    let formats = [("w2a16-g128", 2.125), ("w3a16-g128", 3.125), ("w3a16-g64-asym", 3.375), ("w4a16-g128", 4.125)];
    for (name, bits) in formats {
        let w = random.qtensor(parse(name).weight, [256, 1024], false);
        let packed = CudaWna16::pack(&w, Act::A16).unwrap().atoms().len() as f64 * 8.0 / (256.0 * 1024.0);
        assert_eq!(packed, bits, "{name} for tensor cores");
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
pub fn layouts(q: &QTensor) -> Vec<(&'static str, Codes<'static>)> {
    let ([n, k], bits) = ([q.n(), q.k()], q.format().bits);
    let code = |i: usize, j: usize| q.codes()[i * k + j];
    let bytes = |flip: u8| Codes::Bytes { codes: q.codes().iter().map(|c| c ^ flip).collect::<Vec<_>>().into(), flip };
    let all = q.clone();
    let rows = move |range: std::ops::Range<usize>, out: &mut [u8]| {
        out.copy_from_slice(&all.codes()[range.start * all.k()..range.end * all.k()]);
    };
    let mut out = vec![("bytes", bytes(0)), ("flipped bytes", bytes(0x80)), ("rows", Codes::Rows(Arc::new(rows)))];
    for (name, form) in block_forms(bits).into_iter().filter(|(_, form)| k % form.codes == 0) {
        out.push((name, Codes::Blocks { bytes: in_blocks(q.codes(), form).into(), form: form.into() }));
    }
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

/// Forms of blocks for codes of some bits: of one field and of two, in long runs and in short ones.
fn block_forms(bits: u32) -> Vec<(&'static str, BlockForm)> {
    let fields = |at, run, bits| Fields { at, run, bits };
    let form =
        |codes, bytes, low, high, flip| BlockForm { codes, bytes, low, high, add: 0, flip, table: None, unpack: None };
    match bits {
        2 => vec![
            ("blocks of 128", form(128, 34, fields(2, 32, 2), Fields::NONE, 0)),
            ("blocks of single bits", form(32, 10, fields(6, 4, 1), fields(0, 1, 1), 0)),
        ],
        3 => vec![("blocks of 32", form(32, 14, fields(2, 8, 2), fields(10, 1, 1), 5))],
        4 => vec![
            ("blocks of 32", form(32, 18, fields(2, 16, 4), Fields::NONE, 0)),
            ("blocks of 32 in an odd number of bytes", form(32, 17, fields(1, 16, 4), Fields::NONE, 0)),
            ("blocks of neighbours", form(32, 16, fields(0, 1, 4), Fields::NONE, 0)),
            ("blocks of 64", form(64, 34, fields(16, 4, 2), fields(0, 16, 2), 15)),
        ],
        _ => vec![
            ("blocks of 32", form(32, 34, fields(2, 32, 8), Fields::NONE, 0x80)),
            ("blocks of 128", form(128, 130, fields(0, 64, 4), fields(64, 32, 4), 0)),
        ],
    }
}

/// Blocks, as their drawing says; what lies between the codes is anything.
fn in_blocks(codes: &[u8], form: BlockForm) -> Vec<u8> {
    let mut out = Vec::new();
    for codes in codes.chunks_exact(form.codes) {
        let mut block = vec![0xa6u8; form.bytes];
        for (fields, down) in [(form.low, 0), (form.high, form.low.bits)].into_iter().filter(|(f, _)| f.bits > 0) {
            let Fields { at, run, bits } = fields;
            let in_byte = 8 / bits as usize;
            for (u, codes) in codes.chunks_exact(run * in_byte).enumerate() {
                for (t, byte) in block[at + u * run..][..run].iter_mut().enumerate() {
                    let field = |f: usize| u32::from(codes[f * run + t] ^ form.flip) >> down & ((1 << bits) - 1);
                    *byte = (0..in_byte).fold(0, |byte, f| byte | field(f) << (f as u32 * bits)) as u8;
                }
            }
        }
        out.extend(block);
    }
    out
}

#[test]
fn blocks_that_readers_do_not_take_are_refused() {
    let q = Random(14).qtensor(parse("w4a16-g32").weight, [3, 64], false);
    let good = block_forms(4)[0].1;
    let new = |form: BlockForm, bytes: usize, k: usize| {
        let codes = Codes::Blocks { bytes: vec![0; bytes].into(), form: form.into() };
        let scales = table(&q, &[1.0; 6], false, false);
        StoredTensor::new(q.format(), [3, k], codes, scales, StoredZeros::Symmetric, None)
    };
    assert!(new(good, 3 * 36, 64).is_ok());
    let fields = |at, run, bits| Fields { at, run, bits };
    for (form, bytes, k) in [
        (good, 3 * 36 - 1, 64),
        (good, 3 * 36, 48),
        (BlockForm { bytes: 0, ..good }, 0, 64),
        (BlockForm { bytes: 16, ..good }, 3 * 32, 64),
        (BlockForm { codes: 0, ..good }, 0, 64),
        (BlockForm { low: fields(3, 16, 4), ..good }, 3 * 36, 64),
        (BlockForm { low: fields(2, 16, 3), ..good }, 3 * 36, 64),
        (BlockForm { low: Fields::NONE, ..good }, 3 * 36, 64),
        (BlockForm { low: fields(2, 6, 4), ..good }, 3 * 36, 64),
        (BlockForm { low: fields(2, 1, 2), ..good }, 3 * 36, 64),
        (BlockForm { low: fields(usize::MAX - 1, 16, 4), ..good }, 3 * 36, 64),
        (BlockForm { high: fields(0, 16, 1), ..good }, 3 * 36, 64),
        (BlockForm { add: 1, ..good }, 3 * 36, 64),
        (BlockForm { flip: 16, ..good }, 3 * 36, 64),
        (BlockForm { table: Some([1; 16]), ..good }, 3 * 36, 64),
    ] {
        assert!(new(form, bytes, k).is_err(), "{form:?} of {bytes} bytes for {k} columns");
    }
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

pub fn stored(q: &QTensor, codes: Codes<'static>, by_groups: bool, wide: bool) -> StoredTensor<'static> {
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
        w.codes()[..w.panels() * w.panel_bytes()].to_vec(),
        (w.spans().to_vec(), w.columns().map(<[u32]>::to_vec), w.bytes()),
        (0..groups).map(|i| w.scales().get(i).to_bits()).collect::<Vec<_>>(),
        zeros,
        w.code_sums().to_vec(),
    )
}

#[test]
fn every_layout_of_files_packs_to_the_same_bits() {
    let mut random = Random(11);
    let isas = Isa::ALL.into_iter();
    let caps: Vec<Caps> = isas.filter_map(|isa| Caps::detect().limited_to(isa).ok()).collect();
    let shapes = [[16, 32], [8, 64], [40, 320], [272, 160], [48, 33], [17, 300], [64, 8], [3, 5000], [5, 0], [0, 7]];
    for name in FORMATS {
        for (at, shape) in shapes.into_iter().enumerate() {
            for act_order in [false, true] {
                let q = random.qtensor(parse(name).weight, shape, act_order);
                let expected = contents(&CpuN16::pack(&q, true));
                let values: Vec<u32> = dequantize(&q).into_iter().map(|v| (v as f32).to_bits()).collect();
                for (layout, codes) in layouts(&q) {
                    let w = stored(&q, codes, at % 2 == 0, at % 3 == 0);
                    let what = format!("{name} {shape:?} act-order {act_order}, {layout}");
                    assert_eq!(w.to_qtensor().unwrap(), q, "{what}");
                    assert!(w.values().unwrap().into_iter().map(f32::to_bits).eq(values.iter().copied()), "{what}");
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
            let joined = below_each_other(&parts);
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
    let format = WeightFormat {
        bits: 4,
        group: Group::Size(32),
        zero: Zero::Integer,
        scale: halfbyte::Float::F16,
        channel_scale: None,
    };
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
    refused([16, 64], (good().0, scales, StoredZeros::Symmetric), None, "integer zero points");
    refused([16, 64], good(), Some(vec![0; 63]), "64 group indices");
    refused([16, 64], good(), Some(vec![2; 64]), "group indices below 2");
    refused([0, u32::MAX as usize], good(), None, "columns");
    let of_tensor = |scales: &[f32]| {
        let (codes, scales) =
            (Codes::Bytes { codes: vec![1; 8].into(), flip: 0 }, FloatData::F32(scales.to_vec().into()));
        let weight = parse("w8a16-tensor-sf32").weight;
        StoredTensor::new(weight, [2, 4], codes, (scales, Strides::of_outputs(1)), StoredZeros::Symmetric, None)
    };
    assert!(of_tensor(&[0.5, 0.25]).unwrap_err().to_string().contains("one scale and zero for the whole tensor"));
    // One below the other each has its scale.
    let [above, below] = [0.5, 0.25].map(|scale| of_tensor(&[scale; 2]).unwrap());
    let both = pack(Caps::detect(), &[&above, &below], false).unwrap().unpack();
    assert_eq!((both.format().group, both.scales()), (Group::Channel, &[0.5, 0.5, 0.25, 0.25][..]));

    let tensor = new([16, 64], good(), None).unwrap();
    let mut reversed: Vec<u32> = (0..64).map(|j| j / 32).collect();
    reversed.reverse();
    let other = new([16, 64], good(), Some(reversed)).unwrap();
    assert!(pack(Caps::detect(), &[&tensor, &other], false).is_err());
    assert!(pack(Caps::detect(), &[], false).is_err());
}
