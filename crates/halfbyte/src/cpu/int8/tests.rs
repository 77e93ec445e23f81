//! What no linear layer asks for: rows written when they are wanted, rows with gaps, several products side by side.

use super::{Call, Requantize, Rows, Target, multiply};
use crate::cpu::Cpu;
use crate::cpu::isa::{Caps, Isa};
use crate::format::int8::{Affine, Byte, Bytes, BytesMut, Int8Weight, multiplier};
use crate::format::reference;
use crate::kernel::Activation;
use crate::layout::cpu_int8::CpuInt8;
use std::ops::Range;

fn bytes(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| ((i * 2_654_435_761 + seed * 40_503) >> 7) as u8).collect()
}

/// Two groups of columns of x, each times a weight of its own, into two groups of columns of y.
fn grouped(cpu: &Cpu, [m, n, k]: [usize; 3], byte: Byte, written: bool) {
    const GAP: usize = 3;
    let x = bytes(1, m * (2 * k + GAP));
    let (x_stride, y_stride) = (2 * k + GAP, 2 * n + GAP);
    let x_affine = Affine::new(byte, 0.1, 9).unwrap();
    let y_affine = Affine::new(Byte::U8, 7.0 * (k as f32).sqrt(), 100).unwrap();
    let mut y = vec![77u8; m * y_stride];
    let mut want = y.clone();
    for group in 0..2 {
        let codes = bytes(group + 2, n * k);
        let weight = Int8Weight::new(Bytes::U8(&codes), [n, k], &[0.2], &[140]).unwrap();
        let w = CpuInt8::pack(&weight).unwrap();
        let bias: Vec<i32> = (0..n as i32).map(|i| i * 100 - 500).collect();
        let requantize = Requantize::new(&w, x_affine, Some(&bias), y_affine, Activation::None).unwrap();
        let row = |row: usize| &x[row * x_stride + group * k..][..k];
        let write = |rows: Range<usize>, out: &mut [u8]| {
            assert_eq!(out.len(), rows.len() * k);
            rows.zip(out.chunks_exact_mut(k)).for_each(|(r, out)| out.copy_from_slice(row(r)));
        };
        let x = if written { Rows::Written(&write) } else { Rows::Strided(&x[group * k..], x_stride) };
        let target = Target::Bytes(&requantize, BytesMut::U8(&mut y));
        multiply(cpu, Call { x, byte, m, w: &w, y: target, stride: y_stride, column: group * n });

        let rows: Vec<u8> = (0..m).flat_map(row).copied().collect();
        let rows = if byte == Byte::U8 { Bytes::U8(&rows) } else { Bytes::I8(bytemuck::cast_slice(&rows)) };
        let sums = reference::int8_sums(rows, m, x_affine.zero(), &weight, Some(&bias));
        for (at, &sum) in sums.iter().enumerate() {
            let code = reference::requantize(sum, multiplier(x_affine, 0.2, y_affine), 100, 0..=255);
            want[at / n * y_stride + group * n + at % n] = code as u8;
        }
    }
    assert!(y == want, "{m}×{n}×{k} {byte:?}, written {written}, on {cpu:?}");
}

#[test]
fn rows_come_from_anywhere_and_go_anywhere() {
    let found = Caps::detect();
    for caps in Isa::ALL.into_iter().filter_map(|isa| found.limited_to(isa).ok()) {
        for threads in [1, 3] {
            let cpu = Cpu::with_caps(threads, caps).unwrap();
            // One task; too few blocks of rows for the team; a block of rows a task.
            for shape in [[3, 5, 7], [1, 33, 16], [40, 70, 145], [700, 24, 30]] {
                for byte in [Byte::U8, Byte::I8] {
                    for written in [false, true] {
                        grouped(&cpu, shape, byte, written);
                    }
                }
            }
        }
    }
}
