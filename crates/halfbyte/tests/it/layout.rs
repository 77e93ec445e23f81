//! Layouts are bijections.

use crate::data::{Random, parse, rounded};
use half::f16;
use halfbyte::Floats;
use halfbyte::format::FORMATS;
use halfbyte::layout::cpu_dense_n16::CpuDenseN16;
use halfbyte::layout::cpu_n16::CpuN16;

#[test]
fn what_is_packed_unpacks_to_the_same_tensor() {
    let mut random = Random(9);
    for name in FORMATS {
        for shape in [[1, 1], [16, 32], [17, 33], [40, 300], [3, 5000], [5, 0], [0, 7]] {
            for act_order in [false, true] {
                let w = random.qtensor(parse(name).weight, shape, act_order);
                assert_eq!(CpuN16::pack(&w, false).unpack(), w, "{name} {shape:?} act-order {act_order}");
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
