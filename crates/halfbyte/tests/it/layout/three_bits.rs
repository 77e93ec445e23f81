//! Codes of 3 bits in tiles of their own on a CPU.

use super::*;

/// Sizes of groups, 0 for whole rows: less than a tile, a tile, several, and some that end within one.
const GROUPS: [usize; 9] = [8, 16, 20, 32, 48, 64, 100, 128, 0];

/// The name of a format of 3 bits with activations `act`, and a number of columns, whole groups or not.
pub fn drawn(random: &mut Random, act: &str) -> (String, usize) {
    let group = GROUPS[random.below(GROUPS.len())];
    let group_name = if group == 0 { String::new() } else { format!("-g{group}") };
    let zero = ["", "-asym", "-float"][random.below(3)];
    let k = match random.below(3) {
        0 => 1 + random.below(400),
        1 => group.max(16) * (1 + random.below(5)),
        _ => 32 * (1 + random.below(12)),
    };
    (format!("w3{act}{group_name}{zero}"), k)
}

#[test]
fn drawn_formats_of_3_bits_pack_to_the_same_bits() {
    let mut random = Random(61);
    let isas = Isa::ALL.into_iter();
    let caps: Vec<Caps> = isas.filter_map(|isa| Caps::detect().limited_to(isa).ok()).collect();
    for round in 0..80 {
        let (name, k) = drawn(&mut random, "a16");
        let n = [1, 16, 37, 64][round % 4];
        let q = random.qtensor(parse(&name).weight, [n, k], round % 5 == 0);
        let packed = CpuN16::pack(&q, true);
        assert_eq!(packed.unpack(), q, "{name} {n} × {k}");
        let expected = contents(&packed);
        for (layout, codes) in layouts(&q) {
            let w = stored(&q, codes, round % 2 == 0, round % 3 == 0);
            for caps in &caps {
                assert!(
                    contents(&pack(*caps, &[&w], true).unwrap()) == expected,
                    "{name} {n} × {k}, {layout}, {caps:?}"
                );
            }
        }
        // Each group begins with a tile of 16 columns, which 3 bits of 16 outputs fill.
        let of_group = |g: usize| q.format().group.len(k).min(k - g * q.format().group.len(k));
        let columns: usize = (0..q.groups()).map(|g| of_group(g).next_multiple_of(16)).sum();
        assert_eq!(
            packed.panels() * packed.panel_bytes(),
            n.next_multiple_of(16) * columns * 3 / 8,
            "{name} {n} × {k}"
        );
    }
}

#[test]
fn groups_of_16_with_multiples_take_what_a_file_gives_them() {
    let mut random = Random(62);
    let (_, w) = types_of_files::k_type(&mut random, "w3a16-g16-sf32", &[48], 512, true);
    let packed = pack(Caps::detect(), &[&w], false).unwrap();
    assert_eq!(packed.unpack(), w.to_qtensor().unwrap());
    // A byte of a factor for 16 columns, a half for 256.
    assert_eq!(packed.bytes() as f64 * 8.0 / (48.0 * 512.0), 3.0 + 8.0 / 16.0 + 16.0 / 256.0);
}
