//! Codes of 4 bits that stand for a table of 16.

use super::*;
use crate::layout::tables::tabled;

/// Codes that a table gives, in every form of blocks.
#[test]
fn codes_of_tables_pack_to_the_bits_of_the_cpu() {
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let (mut packer, mut random) = (Packer::new(&gpu, &stream), Random(33));
        for name in ["w8a16-g32", "w8a16-g32-sbf16", "w8a16-g16-sf32"] {
            for shape in [[64, 128], [72, 640], [300, 1024], [3, 64]] {
                for (i, (q, codes)) in tabled(&mut random, parse(name).weight, shape).into_iter().enumerate() {
                    let w = stored(&q, codes, i % 2 == 0, false);
                    for (layout, want) in &expected_of(&w, Act::A16) {
                        let packed = packer.pack_for(kernel(layout), &[&w], Act::A16).unwrap();
                        let what = format!("{name} {shape:?}, form {i}, to {layout}");
                        same(&download(&packed, &stream), want, &what);
                    }
                }
            }
        }
    }
}
