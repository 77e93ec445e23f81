//! Blocks of every type as weights on a CPU: at their own size in memory, and multiplied within the bound.

use super::blocks::{random_blocks, unpacked};
use crate::support::Random;
use halfbyte::cpu::Cpu;
use halfbyte::cpu::isa::{Caps, Isa};
use halfbyte::cpu::pack::pack;
use halfbyte::format::reference::{self, Bound};
use halfbyte::ops::{Linear, Weight};
use halfbyte::{Act, Float, Floats, FloatsMut, StoredTensor};
use halfbyte_checkpoint::gguf::{GgmlType, load};

/// Instruction sets that this machine has.
fn all_caps() -> Vec<Caps> {
    let found = Caps::detect();
    let mut caps: Vec<Caps> = Isa::ALL.into_iter().filter_map(|isa| found.limited_to(isa).ok()).collect();
    if found.bf16_dot {
        caps.push(Caps { bf16_dot: false, ..found });
    }
    caps
}

/// A tensor of each type with one row or more, and few columns or several blocks.
fn shapes(kind: GgmlType) -> [[usize; 2]; 4] {
    [[1, 1], [16, 3], [37, 2], [50, 5]].map(|[n, blocks]| [n, blocks * kind.block_len()])
}

#[test]
fn weights_take_their_own_size_and_keep_their_bits() {
    let mut random = Random(21);
    for (_, kind) in unpacked() {
        for [n, k] in shapes(kind) {
            let bytes = random_blocks(&mut random, kind, [n, k]);
            let tensor = load("w", kind, bytes.as_slice(), [n, k]).unwrap();
            let (q, values) = (tensor.to_qtensor().unwrap(), tensor.values().unwrap());
            for caps in all_caps() {
                let packed = pack(caps, &[&tensor], false).unwrap();
                assert_eq!(packed.unpack(), q, "{kind} {n} × {k}");
                let mut row = vec![f32::NAN; k];
                for (i, want) in values.chunks_exact(k).enumerate() {
                    packed.row(i, &mut row);
                    assert_eq!(row, want, "{kind}: row {i}");
                }
                let own = bytes.len() / n * n.next_multiple_of(16);
                let ratio = packed.bytes() as f64 / own as f64;
                assert!(ratio <= most(kind), "{kind} {n} × {k} takes {ratio} of its own size");
            }
        }
    }
}

/// What a type may take in memory, of its own size: codes that stand for 16 values take as many bits as the values.
fn most(kind: GgmlType) -> f64 {
    match kind {
        GgmlType::IQ4_NL => 1.9,
        GgmlType::IQ4_XS => 1.97,
        GgmlType::MXFP4 => 1.31,
        GgmlType::NVFP4 => 1.57,
        _ => 1.05,
    }
}

#[test]
fn products_of_every_type_are_within_the_bound() {
    let mut random = Random(22);
    let cpus: Vec<Cpu> = all_caps().into_iter().map(|caps| Cpu::with_caps(2, caps).unwrap()).collect();
    for (t, (_, kind)) in unpacked().into_iter().enumerate() {
        for (s, [n, k]) in shapes(kind).into_iter().enumerate() {
            let bytes = random_blocks(&mut random, kind, [n, k]);
            let tensor = load("w", kind, bytes.as_slice(), [n, k]).unwrap();
            for act in [Act::A16, Act::A8, Act::A8Asym] {
                let linear = Linear::new(Weight::Stored(&[&tensor], act)).unwrap();
                check(&cpus, &linear, &tensor, act, (&mut random, t + s), kind);
            }
        }
    }
}

/// Tensors of blocks, and one of the same numbers that knows no blocks.
#[test]
fn tensors_below_each_other_multiply_as_one() {
    let mut random = Random(23);
    let cpus: Vec<Cpu> = all_caps().into_iter().map(|caps| Cpu::with_caps(2, caps).unwrap()).collect();
    let pairs = [GgmlType::Q4_K, GgmlType::Q6_K, GgmlType::Q5_1, GgmlType::Q3_K].map(|kind| (kind, kind));
    for (first, second) in pairs.into_iter().chain([(GgmlType::Q5_0, GgmlType::Q8_0)]) {
        let k = 512;
        let [above, below] =
            [(first, 24), (second, 21)].map(|(kind, n)| (kind, n, random_blocks(&mut random, kind, [n, k])));
        let tensors = [&above, &below].map(|(kind, n, bytes)| load("w", *kind, bytes.as_slice(), [*n, k]).unwrap());
        let whole: Vec<_> = tensors.iter().map(|tensor| tensor.to_qtensor().unwrap()).collect();
        let plain = StoredTensor::from(&whole[1]);
        let joined = joined(&tensors);
        for parts in [[&tensors[0], &tensors[1]], [&tensors[0], &plain]] {
            let packed = pack(Caps::detect(), &parts, false).unwrap();
            assert_eq!(packed.unpack(), joined.to_qtensor().unwrap(), "{first} over {second}");
            for act in [Act::A16, Act::A8] {
                let linear = Linear::new(Weight::Stored(&parts, act)).unwrap();
                check(&cpus, &linear, &joined, act, (&mut random, 1), first);
            }
        }
    }
}

/// Tensors one below the other as one.
fn joined(tensors: &[StoredTensor<'_>; 2]) -> StoredTensor<'static> {
    use halfbyte::{QTensor, Zeros};
    let parts = [0, 1].map(|i| tensors[i].to_qtensor().unwrap());
    let all = |of: &dyn Fn(&QTensor) -> Vec<f32>| parts.iter().flat_map(of).collect::<Vec<f32>>();
    let offsets = |q: &QTensor| if let Zeros::Float(o) = q.zeros() { o.clone() } else { Vec::new() };
    let zeros = match parts[0].zeros() {
        Zeros::Float(_) => Zeros::Float(all(&offsets)),
        _ => Zeros::Symmetric,
    };
    let codes = parts.iter().flat_map(|q| q.codes().to_vec()).collect();
    let shape = [parts[0].n() + parts[1].n(), parts[0].k()];
    QTensor::new(parts[0].format(), shape, codes, all(&|q| q.scales().to_vec()), zeros, None).unwrap().into()
}

/// One row of x, a few, and as many as cross every tile.
fn check(
    cpus: &[Cpu],
    linear: &Linear,
    w: &StoredTensor<'_>,
    act: Act,
    (random, case): (&mut Random, usize),
    kind: GgmlType,
) {
    let (q, n, k) = (w.to_qtensor().unwrap(), w.n(), w.k());
    for m in [1, 2, 3, 6, 9, 25, 70] {
        if m > 20 && (case + m) % 2 == 0 {
            continue;
        }
        // bf16 hold these too.
        let x: Vec<f32> = (0..m * k).map(|_| (random.below(255) as f32 - 127.0) / 32.0).collect();
        let halves: Vec<half::bf16> = x.iter().map(|&v| half::bf16::from_f32(v)).collect();
        let reference = reference::linear(&x, m, &q, act);
        let bound = Bound::new(Float::F32, k);
        for (cpu, x) in cpus.iter().flat_map(|cpu| [(cpu, Floats::F32(&x)), (cpu, Floats::BF16(&halves))]) {
            let mut y = vec![f32::NAN; m * n];
            linear.forward(cpu, x, m, FloatsMut::F32(&mut y)).unwrap();
            for (i, &y) in y.iter().enumerate() {
                let (want, allowed) = (reference.value[i], bound.allowed(reference.magnitude[i]));
                let error = (f64::from(y) - want).abs();
                let caps = cpu.caps();
                assert!(
                    error <= allowed,
                    "{kind} {act:?} {n} × {k}, m = {m}, {caps:?}: {i} is {y}, not {want} ± {allowed:e}"
                );
            }
        }
    }
}
