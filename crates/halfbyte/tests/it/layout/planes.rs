//! Codes that need fewer bits than their format has, in two planes.

use super::*;
use halfbyte::layout::cpu_n16::Held;

/// Formats of 8 bits whose codes may need fewer, with whole groups and with groups that are cut.
pub const NARROW: [&str; 5] =
    ["w8a16-g32", "w8a8-g16-sf32", "w8a16-g32-float-sf32", "w8a8-g20-float-xasym", "w8a8-xasym"];

/// A tensor whose codes need `bits` bits, around the middle in a symmetric format, and how a file might hold it.
pub fn narrow(
    random: &mut Random,
    format: WeightFormat,
    bits: u32,
    [n, k]: [usize; 2],
    act_order: bool,
) -> (QTensor, Codes<'static>) {
    let q = random.qtensor(format, [n, k], act_order);
    let add = if format.zero == Zero::Symmetric { 128 - (1u8 << (bits - 1)) } else { 0 };
    let least: Vec<u8> = q.codes().iter().map(|code| code & ((1 << bits) - 1)).collect();
    let codes = least.iter().map(|code| code + add).collect();
    let (zeros, index) = (q.zeros().clone(), q.group_index().map(<[u32]>::to_vec));
    let q = QTensor::new(format, [n, k], codes, q.scales().to_vec(), zeros, index).unwrap();
    let fields = |at, run, bits| Fields { at, run, bits };
    let high = if bits == 5 { fields(4, 1, 1) } else { fields(8, 4, 2) };
    let (codes, bytes) = if bits == 5 { (8, 6) } else { (16, 12) };
    let low = fields(0, 4, 4);
    let form = BlockForm { codes, bytes, low, high, add: 0, flip: 0, table: None, unpack: None };
    let blocks = in_blocks(&least, form);
    (q, Codes::Blocks { bytes: blocks.into(), form: BlockForm { add, ..form }.into() })
}

#[test]
fn tiles_hold_the_bits_that_codes_need() {
    let mut random = Random(44);
    let isas = Isa::ALL.into_iter();
    let caps: Vec<Caps> = isas.filter_map(|isa| Caps::detect().limited_to(isa).ok()).collect();
    for name in NARROW {
        let format = parse(name).weight;
        for bits in [5, 6] {
            for (at, shape) in [[1, 16], [16, 160], [40, 320], [17, 304], [3, 5008], [0, 16]].into_iter().enumerate() {
                for act_order in [false, true] {
                    let (q, codes) = narrow(&mut random, format, bits, shape, act_order);
                    let w = stored(&q, codes, at % 2 == 0, false);
                    let what = format!("{name} {shape:?} of {bits} bits, act-order {act_order}");
                    assert_eq!(w.to_qtensor().unwrap(), q, "{what}");
                    let wide = CpuN16::pack(&q, true);
                    // Tiles of 5 bits are as long as two groups of 16.
                    let bits_held = if format.group == Group::Size(16) { 6 } else { bits };
                    let base = if format.zero == Zero::Symmetric { 128 - (1 << (bits_held - 1)) } else { 0 };
                    let (mut row, mut want) = (vec![0.0; shape[1]], vec![0.0; shape[1]]);
                    for caps in &caps {
                        let packed = pack(*caps, &[&w], true).unwrap();
                        assert_eq!(packed.held(), Held { bits: bits_held, base: base as u8, table: None }, "{what}");
                        assert_eq!(packed.unpack(), q, "{what}, {caps:?}");
                        for i in 0..shape[0] {
                            packed.row(i, &mut row);
                            wide.row(i, &mut want);
                            assert_eq!(row, want, "{what}, {caps:?}: row {i}");
                        }
                        assert_eq!(packed.code_sums(), wide.code_sums(), "{what}");
                        if shape == [40, 320] && format.group == Group::Size(32) && !act_order {
                            let fewer = 48 * 320 * (8 - bits as usize) / 8;
                            assert_eq!(packed.bytes(), wide.bytes() - fewer, "{what}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn tensors_of_all_codes_below_others_keep_their_bits() {
    let mut random = Random(45);
    let format = parse("w8a16-g32").weight;
    let mut tensor = |bits, n| {
        let (q, codes) = narrow(&mut random, format, bits, [n, 64], false);
        (stored(&q, codes, false, false), q)
    };
    let (five, six, more) = (tensor(5, 24), tensor(6, 9), tensor(5, 16));
    let all = Random(46).qtensor(format, [7, 64], false);
    let all = (StoredTensor::from(&all), all.clone());
    for (parts, bits) in [([&five, &more], 5), ([&five, &six], 6), ([&six, &all], 8), ([&all, &five], 8)] {
        let packed = pack(Caps::detect(), &parts.map(|(w, _)| w), true).unwrap();
        assert_eq!((packed.bits(), packed.unpack()), (bits, below_each_other(&parts.map(|(_, q)| q.clone()))));
    }
}
