//! What is packed on the device against what is packed on the CPU, bit for bit, from every way that files have.

mod tables;

use super::gpus;
use crate::data::{Random, below_each_other, parse, with_zeros_in_bytes};
use crate::layout::{layouts, stored};
use bytemuck::{Pod, Zeroable};
use half::f16;
use halfbyte::cuda::driver::{Arg, Event, Launch, Stream, Uploader};
use halfbyte::cuda::matmul::{self, KERNELS, Kernel, Packed, Packer};
use halfbyte::cuda::roofline::Roofline;
use halfbyte::format::FORMATS;
use halfbyte::layout::codes::{Codes, random::word};
use halfbyte::layout::cuda_plain::{CudaPlain, PlainZeros};
use halfbyte::layout::cuda_wna16::CudaWna16;
use halfbyte::layout::stored::{StoredTensor, StoredZeros, Strides};
use halfbyte::{Act, FloatData, QTensor, Zero};
use std::sync::Arc;
use std::time::Instant;

/// Formats of every form of atoms, besides those of the table.
const MORE: [&str; 20] = [
    "w2a16-g64",
    "w2a16-asym-sbf16",
    "w3a16-g32-asym",
    "w3a16",
    "w4a16-g64-sbf16",
    "w4a16-g32-asym-sbf16",
    "w4a16-asym-sbf16",
    "w8a16-g128-asym-sbf16",
    "w8a16-g64-asym",
    "w8a16-asym",
    "w4a16-g256-asym",
    "w8a16-g96",
    "w4a16-g32-float-sf32",
    "w4a16-float-sbf16",
    "w4a16-g48-asym",
    "w8a16-g16-sf32",
    "w8a16-g32-float-sf32",
    "w3a16-g16-sf32",
    "w3a16-g80-float",
    "w4a16-g128-asym-sf32",
];

fn kernel(layout: &str) -> &'static Kernel {
    KERNELS.iter().find(|kernel| kernel.layout == layout).unwrap()
}

fn download(packed: &Packed, stream: &Stream) -> Vec<Vec<u8>> {
    // Behind codes, scales, zeros and the group of each column the columns of each group lie, where x is quantised.
    let format = packed.format();
    let of_w = 3 + usize::from(format.weight.zero != Zero::Symmetric);
    let most = if format.act.is_quantized() && packed.layout() == "cuda_plain" { of_w } else { usize::MAX };
    let parts = packed.memory().into_iter().take(most).map(|view| {
        let mut bytes = vec![0u8; view.len()];
        stream.download(view, &mut bytes).unwrap();
        bytes
    });
    parts.collect()
}

fn floats(values: &FloatData<'_>) -> Vec<u8> {
    match values {
        FloatData::F16(v) => bytemuck::cast_slice(v).to_vec(),
        FloatData::BF16(v) => bytemuck::cast_slice(v).to_vec(),
        FloatData::F32(v) => bytemuck::cast_slice(v).to_vec(),
    }
}

/// What the device must hold, for each layout that holds the tensor.
fn expected(w: &QTensor, act: Act) -> Vec<(&'static str, Vec<Vec<u8>>)> {
    expected_of(&w.into(), act)
}

/// The same of a tensor of which more may be known than its numbers.
fn expected_of(w: &StoredTensor<'_>, act: Act) -> Vec<(&'static str, Vec<Vec<u8>>)> {
    let words = |words: &[u32]| bytemuck::cast_slice::<u32, u8>(words).to_vec();
    let plain = CudaPlain::pack(&w.to_qtensor().unwrap()).unwrap();
    let zeros = match plain.zeros() {
        PlainZeros::Symmetric => None,
        PlainZeros::Integer(z) => Some(bytemuck::cast_slice::<u16, u8>(z).to_vec()),
        PlainZeros::Float(o) => Some(floats(o)),
    };
    let parts = [words(plain.codes()), floats(plain.scales())].into_iter().chain(zeros);
    let mut all = vec![("cuda_plain", parts.chain(plain.group_of().map(words)).collect::<Vec<_>>())];
    if let Ok(wna16) = CudaWna16::pack_stored(w, act) {
        let parts = [wna16.atoms().to_vec(), wna16.rows().to_vec()].into_iter();
        all.push(("cuda_wna16", parts.chain(wna16.order().map(words)).collect()));
    }
    all
}

/// Asserts that two packed tensors are the same, and says where they are not.
#[track_caller]
fn same(got: &[Vec<u8>], want: &[Vec<u8>], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (part, (got, want)) in got.iter().zip(want).enumerate() {
        assert_eq!(got.len(), want.len(), "{what}: bytes of part {part}");
        let differs = got.iter().zip(want).position(|(got, want)| got != want);
        assert_eq!(differs, None, "{what}: part {part} of {} bytes", got.len());
    }
}

#[test]
fn every_layout_of_files_packs_to_the_bits_of_the_cpu() {
    let shapes =
        [[64, 128], [16, 32], [72, 640], [300, 1000], [272, 160], [65, 136], [48, 33], [3, 5000], [5, 0], [0, 7]];
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let mut packer = Packer::new(&gpu, &stream);
        let mut random = Random(31);
        for (at, name) in FORMATS.iter().chain(&MORE).enumerate() {
            let act = parse(name).act;
            for (s, shape) in shapes.into_iter().enumerate() {
                let q = with_zeros_in_bytes(random.qtensor(parse(name).weight, shape, (at + s) % 2 == 1));
                let expected = expected(&q, act);
                for (l, (from, codes)) in layouts(&q).into_iter().enumerate() {
                    let w = stored(&q, codes, (s + l) % 2 == 0, (at + l) % 3 == 0);
                    for (layout, want) in &expected {
                        let packed = packer.pack_for(kernel(layout), &[&w], act).unwrap();
                        assert_eq!((packed.shape(), packed.layout()), (shape, *layout));
                        let what = format!("{name} {shape:?} from {from} to {layout}");
                        same(&download(&packed, &stream), want, &what);
                    }
                }
            }
        }
    }
}

/// Codes that are drawn by the kernel: alone, below others, and with slabs that cut them.
#[test]
fn random_tensors_pack_to_the_bits_of_the_cpu() {
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        for (at, name) in FORMATS.iter().chain(&MORE).enumerate() {
            let act = parse(name).act;
            for [n, k] in [[64, 128], [300, 1000], [600, 640], [5, 33], [3, 5000], [5, 0], [0, 7]] {
                let seed = 100 * at as u32 + n as u32;
                let parts = [(n, seed), (70, seed + 1)];
                let parts = parts.map(|(n, seed)| StoredTensor::random(parse(name).weight, [n, k], seed).unwrap());
                let whole = below_each_other(&parts.each_ref().map(|part| part.to_qtensor().unwrap()));
                for (layout, want) in &expected(&whole, act) {
                    for slab_bytes in [64 << 20, 1] {
                        let mut packer = Packer::new(&gpu, &stream).with_slab_bytes(slab_bytes);
                        let packed = packer.pack_for(kernel(layout), &parts.each_ref(), act).unwrap();
                        same(&download(&packed, &stream), want, &format!("{name} {n} × {k} to {layout}"));
                    }
                }
            }
        }
    }
}

/// Floats that are drawn by a kernel: the function of the words that is said, with the end of an odd length untouched.
#[test]
fn random_floats_are_those_of_their_numbers() {
    for gpu in gpus() {
        let (stream, roofline) = (gpu.stream().unwrap(), Roofline::new(&gpu).unwrap());
        for (len, first) in [(1, 0), (2, 5), (100_001, 7 << 40), (1 << 21, u64::from(u32::MAX) - 9)] {
            let mut there = gpu.context().allocate::<f16>(len + 1).unwrap();
            stream.fill(there.view_mut().cast::<u8>(), 0x7b).unwrap();
            roofline.uniform(&stream, &mut there.view_mut().slice(0..len), 1e-3, first).unwrap();
            let mut got = vec![f16::ZERO; len + 1];
            stream.download(there.view(), &mut got).unwrap();
            let want = |i: usize| {
                let word = word(first + i as u64 / 2);
                f16::from_f32((f32::from((word >> (i % 2 * 16)) as u16) - 32767.5) * 1e-3)
            };
            let differs = (0..len).find(|&i| got[i] != want(i));
            assert_eq!(differs, None, "{len} floats from {first} on");
            assert_eq!(got[len].to_bits(), 0x7b7b);
        }
    }
}

/// Strips that several tensors share, tensors stored in different ways, and slabs that cut them.
#[test]
fn tensors_below_each_other_and_slabs_pack_as_one() {
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let mut random = Random(32);
        for name in
            ["w4a16-g128", "w4a16-g32-asym", "w8a16-g64-asym", "w4a16", "w4a16-g16-float-sf32", "w2a16-g32-float"]
        {
            for heights in [[320, 64, 640], [24, 8, 1200], [5, 300, 14], [0, 16, 1], [512, 520, 8]] {
                let mut parts = heights.map(|n| random.qtensor(parse(name).weight, [n, 512], true));
                parts = parts.map(with_zeros_in_bytes);
                if name.contains("-g") {
                    let index = parts[0].group_index().map(<[u32]>::to_vec);
                    let index = index.filter(|_| heights[0] % 2 == 1);
                    parts = parts.map(|q| reindexed(&q, index.clone()));
                }
                let expected = expected(&below_each_other(&parts), Act::A16);
                let rotated = |q: &QTensor, i: usize| {
                    let mut all = layouts(q);
                    let at = i % all.len();
                    all.swap_remove(at).1
                };
                for turn in 0..7 {
                    let stored: Vec<_> = parts
                        .iter()
                        .enumerate()
                        .map(|(i, q)| stored(q, rotated(q, turn + i), turn % 2 == 0, i == 1))
                        .collect();
                    let refs: Vec<&StoredTensor<'_>> = stored.iter().collect();
                    for slab_bytes in [1, 200_000, usize::MAX] {
                        let mut packer = Packer::new(&gpu, &stream).with_slab_bytes(slab_bytes);
                        for (layout, want) in &expected {
                            let packed = packer.pack_for(kernel(layout), &refs, Act::A16).unwrap();
                            let what = format!("{name} {heights:?} turn {turn}, slabs of {slab_bytes}, to {layout}");
                            same(&download(&packed, &stream), want, &what);
                        }
                    }
                }
            }
        }
    }
}

/// The same tensor with its columns in other groups.
fn reindexed(q: &QTensor, index: Option<Vec<u32>>) -> QTensor {
    let (codes, scales) = (q.codes().to_vec(), q.scales().to_vec());
    QTensor::new(q.format(), [q.n(), q.k()], codes, scales, q.zeros().clone(), index).unwrap()
}

/// More than the pinned buffers hold at once, of one packer that was used for less before.
#[test]
fn what_passes_the_buffers_several_times_arrives_whole() {
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let mut packer = Packer::new(&gpu, &stream).with_slab_bytes(20 << 20);
        let mut random = Random(33);
        for [n, k] in [[64, 256], [5000, 8192]] {
            let q = random.qtensor(parse("w4a16-g128").weight, [n, k], false);
            let expected = expected(&q, Act::A16);
            for (from, codes) in layouts(&q) {
                let w = stored(&q, codes, true, false);
                for (layout, want) in &expected {
                    let packed = packer.pack_for(kernel(layout), &[&w], Act::A16).unwrap();
                    same(&download(&packed, &stream), want, &format!("{n} × {k} from {from} to {layout}"));
                }
            }
        }
    }
}

#[test]
fn what_cannot_be_packed_is_refused() {
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let mut packer = Packer::new(&gpu, &stream);
        let mut random = Random(34);
        let format = parse("w8a16-g32-asym").weight;
        let q = |zero: u16| {
            let zeros = halfbyte::Zeros::Integer(vec![zero; 2]);
            QTensor::new(format, [1, 64], vec![0; 64], vec![1.0; 2], zeros, None).unwrap()
        };
        for kernel in KERNELS {
            let mut pack = |parts: &[&StoredTensor<'_>]| packer.pack_for(kernel, parts, Act::A16);
            let error = pack(&[]).unwrap_err().to_string();
            assert_eq!(error, "pack: expected at least one tensor, got none");
            let (one, other) = (q(3), random.qtensor(parse("w8a16-g32").weight, [1, 64], false));
            let error = pack(&[&(&one).into(), &(&other).into()]).unwrap_err().to_string();
            assert!(error.contains("the same group index everywhere"), "{error}");
            let four = parse("w4a16").weight;
            let scale = (FloatData::F32(vec![1.0].into()), Strides::TENSOR);
            let rows = Codes::Rows(Arc::new(|_, out: &mut [u8]| out.fill(16)));
            let wrong = StoredTensor::new(four, [3, 40], rows, scale, StoredZeros::Symmetric, None).unwrap();
            assert_eq!(pack(&[&wrong]).unwrap_err().to_string(), "pack: expected codes of 4 bits, got 16");
        }
        let wide = q(256);
        let wide = StoredTensor::from(&wide);
        let error = packer.pack_for(kernel("cuda_wna16"), &[&wide], Act::A16).unwrap_err().to_string();
        assert!(error.contains("zero points of 8 bits, got 256"), "{error}");
        let packed = packer.pack(&[&wide], Act::A16, halfbyte::Float::F16).unwrap();
        assert_eq!(packed.layout(), "cuda_plain");
    }
}

/// As in the source.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Part {
    codes: u64,
    stride: u64,
    scales: u64,
    by_scale: [u64; 2],
    zeros: u64,
    by_zero: [u64; 2],
    channels: u64,
    offset_halves: u64,
    rows: [u32; 2],
    kind: [u32; 2],
    types: [u32; 2],
    /// Of blocks, and of multiples.
    form: [u32; 12],
}

/// As in the source.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Params {
    parts: u64,
    order: u64,
    to: [u64; 3],
    shape: [u32; 3],
    first: u32,
    count: u32,
    groups: [u32; 2],
    middle: u32,
    types: [u32; 2],
    factors: [u32; 2],
    raised: u32,
    atom_bits: u32,
    multiples: [u32; 2],
}

/// The kernels alone beside a copy within the device, and packing from files, with memory for the result, beside a copy to it from
/// pinned memory.
#[test]
#[ignore = "a measurement, for a device that nothing else uses"]
fn packing_keeps_pace_with_copies() {
    const N: usize = 21504;
    const K: usize = 14336;
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let mut random = Random(35);
        let between = |what: &mut dyn FnMut()| {
            let [before, after] = [(); 2].map(|()| Event::new(gpu.context()).unwrap());
            what();
            stream.record(&before).unwrap();
            (0..10).for_each(|_| what());
            stream.record(&after).unwrap();
            stream.synchronize().unwrap();
            after.seconds_since(&before).unwrap() / 10.0
        };
        let best = |what: &mut dyn FnMut()| {
            let time = |what: &mut dyn FnMut()| {
                let start = Instant::now();
                what();
                start.elapsed().as_secs_f64()
            };
            (0..4).map(|_| time(what)).fold(f64::INFINITY, f64::min)
        };
        let half = 512 << 20;
        let (from, mut to) = (gpu.context().allocate::<u8>(half).unwrap(), gpu.context().allocate::<u8>(half).unwrap());
        let copied = 2.0 * half as f64 / between(&mut || stream.copy(from.view(), to.view_mut()).unwrap());
        drop((from, to));
        println!("copies within the device: {:.2} TB/s; {N} × {K} of each kind, cuda_wna16", copied * 1e-12);
        println!(
            "kind          MB in+out | kernel µs  TB/s  of copy | pinned ms pageable ms | pack ms GB/s | CPU ms + upload ms"
        );
        for (name, kind) in [
            ("w4a16-g128", "words down"),
            ("w4a16-g128-asym", "words across"),
            ("w4a16-g128", "words along"),
            ("w4a16-g32-asym", "words down"),
            ("w4a16-g128", "bytes"),
            ("w8a16-g128", "bytes"),
            ("w8a16", "words along"),
            ("w4a16-g128", "rows"),
        ] {
            let format = parse(name).weight;
            let (bits, groups) = (format.bits as usize, format.group.count(K));
            let words: Arc<Vec<u32>> = Arc::new((0..N * K * bits / 32).map(|_| random.bits() as u32).collect());
            let bytes = || -> Vec<u8> {
                let bytes = bytemuck::cast_slice::<u32, u8>(&words).iter();
                if bits == 8 { bytes.copied().collect() } else { bytes.flat_map(|b| [b & 15, b >> 4]).collect() }
            };
            let codes = match kind {
                "words down" => Codes::WordsDown(words.to_vec().into()),
                "words along" => Codes::WordsAlong(words.to_vec().into()),
                "words across" => Codes::WordsAcross(words.to_vec().into()),
                "bytes" => Codes::Bytes { codes: bytes().into(), flip: 0 },
                _ => Codes::Rows(Arc::new({
                    let words = words.clone();
                    move |rows: std::ops::Range<usize>, out: &mut [u8]| {
                        let bytes = &bytemuck::cast_slice::<u32, u8>(&words)[rows.start * K / 2..rows.end * K / 2];
                        out.chunks_exact_mut(2).zip(bytes).for_each(|(out, b)| out.copy_from_slice(&[b & 15, b >> 4]));
                    }
                })),
            };
            let by_groups = kind != "words along";
            let strides = if by_groups { Strides::of_groups(N) } else { Strides::of_outputs(groups) };
            let scales = vec![half::f16::from_f32(0.01); N * groups];
            let asym = name.contains("asym");
            let zeros = vec![7u16; if asym { N * groups } else { 0 }];
            let stored_zeros =
                if asym { StoredZeros::Integer(zeros.clone().into(), strides) } else { StoredZeros::Symmetric };
            let scales_data = (FloatData::F16(scales.clone().into()), strides);
            let w = StoredTensor::new(format, [N, K], codes, scales_data, stored_zeros, None).unwrap();
            let mut packer = Packer::new(&gpu, &stream);
            let mut packed = None;
            let pack = best(&mut || packed = Some(packer.pack_for(kernel("cuda_wna16"), &[&w], Act::A16).unwrap()));
            drop(packer);
            let packed = packed.unwrap();
            let out = packed.bytes() as f64;

            // The same codes whole on the device, and the kernel by itself.
            let raw = bytes_of(w.codes(), &bytes);
            let mut staged = gpu.context().allocate::<u8>(raw.len()).unwrap();
            let mut uploader = Uploader::new(gpu.context());
            let pinned = best(&mut || {
                uploader.upload(&stream, staged.view_mut(), 1, |_, _| Ok(())).unwrap();
                stream.synchronize().unwrap();
            });
            let pageable = best(&mut || stream.upload(&raw, staged.view_mut()).unwrap());
            let (mut scales_there, mut zeros_there) =
                (gpu.context().allocate(scales.len()).unwrap(), gpu.context().allocate(zeros.len()).unwrap());
            stream.upload(&scales, scales_there.view_mut()).unwrap();
            stream.upload(&zeros, zeros_there.view_mut()).unwrap();
            let (number, stride) = match w.codes() {
                Codes::Bytes { .. } | Codes::Random { .. } | Codes::Rows(_) => (0, K),
                Codes::WordsAlong(_) => (1, K * bits / 32),
                Codes::WordsDown(_) => (2, N),
                Codes::WordsAcross(_) => (3, N / 8),
                Codes::Blocks { .. } => unreachable!("none is made above"),
            };
            let by = [strides.output as u64, strides.group as u64];
            let part = Part {
                codes: staged.pointer(),
                stride: stride as u64,
                scales: scales_there.pointer(),
                by_scale: by,
                zeros: zeros_there.pointer(),
                by_zero: by,
                channels: 0,
                offset_halves: 0,
                rows: [0, N as u32],
                kind: [number, 0],
                types: [0, 0],
                form: [0; 12],
            };
            let mut table = gpu.context().allocate(1).unwrap();
            stream.upload(&[part], table.view_mut()).unwrap();
            let memory = packed.memory();
            let params = Params {
                parts: table.pointer(),
                order: 0,
                to: [memory[0].pointer(), memory[1].pointer(), 0],
                shape: [N as u32, K as u32, groups as u32],
                first: 0,
                count: 1,
                groups: [format.group.len(K) as u32, if groups == 1 { 0 } else { format.group.len(K) as u32 }],
                middle: format.middle(),
                types: [0, u32::from(asym)],
                factors: [0; 2],
                raised: 0,
                atom_bits: bits as u32,
                multiples: [0; 2],
            };
            let instance = format!("wna16<{bits}>");
            let instance = matmul::auxiliary().into_iter().find(|i| i.expression == instance).unwrap();
            let function = gpu.function(&instance).unwrap();
            let launch = Launch::linear((N / 64 * K / 128) as u32, 256);
            // SAFETY: the parameters are the source's, and the buffers have room for the whole matrix.
            let seconds = between(&mut || unsafe { function.launch(&stream, &launch, &[Arg::new(&params)]) }.unwrap());
            let moved = raw.len() as f64 + (scales.len() + zeros.len()) as f64 * 2.0 + out;

            let start = Instant::now();
            let on_cpu = CudaWna16::pack(&w.to_qtensor().unwrap(), Act::A16).unwrap();
            let cpu = start.elapsed().as_secs_f64();
            let mut there = gpu.context().allocate(on_cpu.atoms().len()).unwrap();
            let start = Instant::now();
            stream.upload(on_cpu.atoms(), there.view_mut()).unwrap();
            let upload = start.elapsed().as_secs_f64();
            let mut again = vec![0u8; on_cpu.atoms().len()];
            stream.download(memory[0], &mut again).unwrap();
            assert!(again == on_cpu.atoms(), "{name} {kind}");
            println!(
                "{name:>16} {kind:12} {:6.1} | {:7.1} {:5.2} {:4.0} % | {:6.2} {:6.2} | {:7.2} {:5.1} | {:7.1} + {:5.1}",
                moved * 1e-6,
                seconds * 1e6,
                moved / seconds * 1e-12,
                moved / seconds / copied * 1e2,
                pinned * 1e3,
                pageable * 1e3,
                pack * 1e3,
                raw.len() as f64 / pack * 1e-9,
                cpu * 1e3,
                upload * 1e3
            );
        }
    }
}

/// The bytes that go up.
fn bytes_of(codes: &Codes<'_>, bytes: &dyn Fn() -> Vec<u8>) -> Vec<u8> {
    match codes {
        Codes::WordsDown(words) | Codes::WordsAlong(words) | Codes::WordsAcross(words) => {
            bytemuck::cast_slice::<u32, u8>(words).to_vec()
        }
        Codes::Bytes { .. } | Codes::Blocks { .. } | Codes::Random { .. } | Codes::Rows(_) => bytes(),
    }
}
