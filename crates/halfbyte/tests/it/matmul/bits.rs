//! Sums whose bits do not depend on what is multiplied beside them, and whole numbers that are added up before they are rounded.

use super::{check, forward};
use crate::cpu::with_each_caps;
use crate::data::{Random, parse, rounded};
use halfbyte::format::reference;
use halfbyte::ops::{Linear, Weight};
use halfbyte::{Float, QTensor, Zeros};

#[test]
fn a_row_of_quantised_activations_has_the_same_bits_alone_and_beside_others() {
    let mut random = Random(33);
    let formats = [
        "w4a8",
        "w4a8-g32",
        "w4a8-g128-asym",
        "w4a8-g32-float-sf32-xasym",
        "w8a8-g16-sbf16",
        "w3a8-g40-float",
        "w2a8-g64",
        "w8a8-asym-xasym",
        "w8a8-g1024-float",
    ];
    // Few rows, and as many as tiles of 16 are for; spans of several blocks, and more of them than are added up together.
    for (name, [n, k]) in formats.into_iter().flat_map(|name| [[70, 520], [33, 4500], [20, 9001]].map(|of| (name, of)))
    {
        let format = parse(name);
        for act_order in [false, true] {
            let linear =
                Linear::new(Weight::Quantized(&random.qtensor(format.weight, [n, k], act_order), format.act)).unwrap();
            let x = random.activations(70 * k);
            for cpu in with_each_caps(2) {
                let alone = |row: usize| forward(&linear, &cpu, &x[row * k..][..k], Float::F32, 1, Float::F32);
                for (m, rows) in [(5, 0..5), (70, 0..3), (70, 67..70)] {
                    let all = forward(&linear, &cpu, &x[..m * k], Float::F32, m, Float::F32);
                    for row in rows {
                        let what = format!("{name} {n}×{k}, act-order {act_order}, {row} of {m}, {:?}", cpu.caps());
                        assert_eq!(alone(row), all[row * n..][..n], "{what}");
                    }
                }
            }
        }
    }
}

/// Codes that are all their zero point add up to nothing, and few others beside them are not lost among what cancels.
#[test]
fn codes_near_an_extreme_zero_point_are_within_the_bound() {
    let mut random = Random(34);
    for (name, zero) in [("w8a8-asym", 0), ("w8a8-asym", 255), ("w8a8-asym-xasym", 0), ("w8a8-g1536-asym", 3)] {
        let format = parse(name);
        for (m, n, k) in [(1, 18, 640), (64, 18, 640), (64, 40, 4096), (40, 20, 7000)] {
            let groups = format.weight.group.count(k);
            for every in [usize::MAX, 100, 10] {
                let code = |at: usize| if at % every == every - 1 { zero ^ 1 } else { zero };
                let codes = (0..n * k).map(|at| code(at) as u8).collect();
                let zeros = Zeros::Integer(vec![zero as u16; n * groups]);
                let w = QTensor::new(format.weight, [n, k], codes, vec![1.0; n * groups], zeros, None).unwrap();
                let x: Vec<f32> = random.activations(m * k).iter().map(|v| 1.0 + v.abs().min(1.0)).collect();
                let reference = reference::linear(&x, m, &w, format.act);
                let linear = Linear::new(Weight::Quantized(&w, format.act)).unwrap();
                for cpu in with_each_caps(2) {
                    let y = forward(&linear, &cpu, &x, Float::F32, m, Float::F32);
                    check(&y, &reference, k, Float::F32, &format!("{name} {m} {n}×{k}, one of {every}"));
                    assert!(every < usize::MAX || y.iter().all(|&y| y == 0.0), "{name} {m} {n}×{k}: {:?}", &y[..4]);
                }
            }
        }
    }
}

#[test]
fn the_same_bits_whatever_the_number_of_threads() {
    let mut random = Random(4);
    let names = ["w4a8-g128", "w4a16-g128-asym", "w8a8-xasym", "w8a16", "w3a16-g32", "w3a8"];
    // Of one long row each thread makes integers of a part.
    for ([n, k], m, name) in [([333, 520], 1), ([333, 520], 9), ([333, 520], 40), ([35, 9001], 1)]
        .into_iter()
        .flat_map(|(shape, m)| names.map(|name| (shape, m, name)))
    {
        let format = parse(name);
        let w = random.qtensor(format.weight, [n, k], false);
        let linear = Linear::new(Weight::Quantized(&w, format.act)).unwrap();
        for x_type in [Float::F32, Float::BF16] {
            let x = rounded(&random.activations(m * k), x_type);
            for (a, b) in with_each_caps(1).iter().zip(&with_each_caps(5)) {
                let one = forward(&linear, a, &x, x_type, m, Float::F32);
                assert_eq!(one, forward(&linear, b, &x, x_type, m, Float::F32), "{name} m={m} {:?}", a.caps());
                assert_eq!(one, forward(&linear, a, &x, x_type, m, Float::F32), "{name} m={m}: twice");
            }
        }
    }
}
