//! Codes of 4 bits that stand for a table of 16 codes of 8.

use super::*;
use halfbyte::layout::cpu_n16::Held;

/// Blocks whose fields lie in every way, and the bytes of each.
const FORMS: [(usize, usize, Fields); 4] = [
    (32, 18, Fields { at: 2, run: 16, bits: 4 }),
    (32, 17, Fields { at: 1, run: 16, bits: 4 }),
    (32, 16, Fields { at: 0, run: 1, bits: 4 }),
    (64, 36, Fields { at: 4, run: 8, bits: 4 }),
];

/// Tables in no order, with codes twice: such as 5 bits hold, and of all 8.
const TABLES: [[u8; 16]; 2] = [
    [128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116],
    [1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241],
];

/// Tensors of a format of 8 bits whose codes are those of a table, and how files might hold them.
pub fn tabled(random: &mut Random, format: WeightFormat, [n, k]: [usize; 2]) -> Vec<(QTensor, Codes<'static>)> {
    let mut out = Vec::new();
    for (codes, bytes, low) in FORMS.into_iter().filter(|(codes, ..)| k % codes == 0) {
        for table in TABLES {
            let q = random.qtensor(format, [n, k], false);
            let numbers: Vec<u8> = q.codes().iter().map(|code| code & 15).collect();
            let of_table = numbers.iter().map(|&number| table[usize::from(number)]).collect();
            let q = QTensor::new(format, [n, k], of_table, q.scales().to_vec(), q.zeros().clone(), None).unwrap();
            let form = BlockForm { codes, bytes, low, high: Fields::NONE, add: 0, flip: 0, table: None, unpack: None };
            let blocks = in_blocks(&numbers, form).into();
            out.push((q, Codes::Blocks { bytes: blocks, form: BlockForm { table: Some(table), ..form }.into() }));
        }
    }
    out
}

#[test]
fn numbers_of_tables_are_the_codes_that_stand_there() {
    let mut random = Random(61);
    let isas = Isa::ALL.into_iter();
    let caps: Vec<Caps> = isas.filter_map(|isa| Caps::detect().limited_to(isa).ok()).collect();
    for name in ["w8a16-g32", "w8a16-g32-sbf16", "w8a16-g16-sf32", "w8a8-xasym"] {
        let format = parse(name).weight;
        for (at, shape) in [[1, 64], [16, 192], [37, 320], [0, 64]].into_iter().enumerate() {
            for (i, (q, codes)) in tabled(&mut random, format, shape).into_iter().enumerate() {
                let w = stored(&q, codes, at % 2 == 0, false);
                let what = format!("{name} {shape:?}, form {i}");
                assert_eq!(w.to_qtensor().unwrap(), q, "{what}");
                assert_eq!(w.values().unwrap(), StoredTensor::from(&q).values().unwrap(), "{what}");
                let base = [112, 0][i % 2];
                let held = Held { bits: 4, base, table: Some(TABLES[i % 2].map(|code| code - base)) };
                for caps in &caps {
                    let packed = pack(*caps, &[&w], true).unwrap();
                    assert_eq!((packed.held(), packed.unpack()), (held, q.clone()), "{what}, {caps:?}");
                }
                let (rows, columns) = ([0..0, shape[0] / 2..shape[0]], [0..64, 64..shape[1]]);
                let (cut, part) = (w.cut(&rows, &columns).unwrap(), w.part(&rows, &columns).unwrap());
                assert_eq!(cut.to_qtensor().unwrap(), part, "{what}");
                let whole = matches!((cut.codes(), format.group), (Codes::Blocks { .. }, _) | (_, Group::Channel));
                assert!(whole, "{what}: the cut is no blocks");
            }
        }
    }
}

/// A CPU multiplies values of a table less the middle as signed bytes, of which -128 has no magnitude.
#[test]
fn a_table_with_the_least_code_lies_as_bytes_on_a_cpu() {
    let (q, codes) = tabled(&mut Random(63), parse("w8a16-g32").weight, [3, 64]).remove(1);
    let Codes::Blocks { bytes, form } = codes else { panic!("codes in blocks") };
    let of = |least: u8| {
        let of_codes = form.table.map(|table| table.map(|code| if code == 1 { least } else { code }));
        let codes = Codes::Blocks { bytes: bytes.clone(), form: BlockForm { table: of_codes, ..*form }.into() };
        let w = StoredTensor::new(
            q.format(),
            [3, 64],
            codes,
            table(&q, q.scales(), false, false),
            StoredZeros::Symmetric,
            None,
        )
        .unwrap();
        let packed = pack(Caps::detect(), &[&w], false).unwrap();
        assert_eq!(packed.unpack(), w.to_qtensor().unwrap());
        packed.held().bits
    };
    assert_eq!([of(1), of(0)], [4, 8]);
}

/// A table is for fields of 4 bits and codes of 8, alone.
#[test]
fn tables_that_readers_do_not_take_are_refused() {
    let format = parse("w8a16-g32").weight;
    let (q, codes) = tabled(&mut Random(62), format, [3, 64]).remove(0);
    let Codes::Blocks { form, .. } = codes else { panic!("codes in blocks") };
    let new = |form: BlockForm, format: WeightFormat| {
        let codes = Codes::Blocks { bytes: vec![0; 3 * 36].into(), form: form.into() };
        let scales = table(&q, &[1.0; 6], false, false);
        StoredTensor::new(format, [3, 64], codes, scales, StoredZeros::Symmetric, None)
    };
    assert!(new(*form, format).is_ok());
    assert!(new(*form, parse("w4a16-g32").weight).is_err());
    let two_bits = Fields { at: 2, run: 8, bits: 2 };
    for form in [
        BlockForm { add: 1, ..*form },
        BlockForm { flip: 0x80, ..*form },
        BlockForm { low: two_bits, ..*form },
        BlockForm { high: two_bits, ..*form },
        BlockForm { bytes: 17, ..*form },
    ] {
        assert!(new(form, format).is_err(), "{form:?}");
    }
}
