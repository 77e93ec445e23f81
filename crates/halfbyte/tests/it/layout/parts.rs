//! Parts of tensors.

use super::*;

/// Some rows and columns, in any order, with groups cut anywhere: the same numbers, in every layout that holds them.
#[test]
fn a_part_of_a_tensor_has_the_numbers_of_the_whole() {
    let mut random = Random(40);
    for (case, name) in FORMATS.iter().enumerate() {
        for shape in [[9, 40], [33, 300], [20, 1000], [3, 128]] {
            let w = random.qtensor(parse(name).weight, shape, case % 2 == 0);
            let [n, k] = shape;
            let mut some = |end: usize| -> Vec<std::ops::Range<usize>> {
                let mut ends: Vec<usize> = (0..6).map(|_| random.below(end + 1)).collect();
                ends.sort_unstable();
                [4, 0, 2].into_iter().map(|i| ends[i]..ends[i + 1]).collect()
            };
            let (rows, columns) = (some(n), some(k));
            let part = StoredTensor::from(&w).part(&rows, &columns).unwrap();
            let whole = dequantize(&w);
            let columns: Vec<usize> = columns.into_iter().flatten().collect();
            let of_row = |i: usize| columns.iter().map(|&j| whole[i * k + j]).collect::<Vec<_>>();
            let want: Vec<f64> = rows.into_iter().flatten().flat_map(of_row).collect();
            assert_eq!(dequantize(&part), want, "{name} {shape:?}");
            assert_eq!(CpuN16::pack(&part, false).unpack(), part, "{name} {shape:?}");
            assert_eq!(CudaPlain::pack(&part).unwrap().unpack().unwrap(), part, "{name} {shape:?}");
            let stored = StoredTensor::from(&part);
            assert_eq!(stored.to_qtensor().unwrap(), part, "{name} {shape:?}");
            let values = want.iter().map(|&v| v as f32).collect::<Vec<_>>();
            assert_eq!(stored.values().unwrap(), values, "{name} {shape:?}");
        }
    }
    let w = random.qtensor(parse("w4a16-g32").weight, [8, 64], false);
    let stored = StoredTensor::from(&w);
    let (all, wrong) = (std::slice::from_ref(&(0..8)), std::slice::from_ref(&(4..9)));
    assert!(stored.part(wrong, std::slice::from_ref(&(0..64))).unwrap_err().to_string().contains("rows below 8"));
    assert!(stored.part(all, &[3..5, 4..6]).unwrap_err().to_string().contains("column 4 twice"));
    assert!(stored.part(all, std::slice::from_ref(&(60..65))).unwrap_err().to_string().contains("columns below 64"));
}

/// No columns, and columns that are of fewer groups than so many fill: scales that no column has are there.
#[test]
fn a_part_has_as_many_groups_as_its_columns_fill() {
    let mut random = Random(44);
    for name in ["w4a16-g4", "w4a16", "w8a16-tensor", "w4a16-g4-asym", "w2a16-g4-float", "w4a8-g4-asym-si8"] {
        let w = random.qtensor(parse(name).weight, [3, 8], false);
        let empty = 3..3;
        for columns in [&[][..], std::slice::from_ref(&empty)] {
            let part = StoredTensor::from(&w).part(std::slice::from_ref(&(1..3)), columns).unwrap();
            assert_eq!(([part.n(), part.k()], part.groups()), ([2, 0], 1), "{name}");
            assert_eq!(CpuN16::pack(&part, false).unpack(), part, "{name}");
        }
    }
    let index = Some(vec![0, 0, 0, 0, 0, 0, 1, 1]);
    let scales = vec![1.0, 2.0, 3.0, 4.0];
    let uneven = QTensor::new(parse("w4a16-g4").weight, [2, 8], vec![9; 16], scales, Zeros::Symmetric, index).unwrap();
    let part = StoredTensor::from(&uneven).part(std::slice::from_ref(&(0..2)), std::slice::from_ref(&(0..6))).unwrap();
    assert_eq!(dequantize(&part), [[1.0; 6], [3.0; 6]].concat());
    let part = StoredTensor::from(&uneven).part(std::slice::from_ref(&(1..2)), std::slice::from_ref(&(5..8))).unwrap();
    assert_eq!(dequantize(&part), [3.0, 4.0, 4.0]);
}

/// Whole blocks of a file stay blocks, and known multiples known; others become numbers.
#[test]
fn a_cut_of_whole_blocks_leaves_them_as_they_are() {
    let mut random = Random(43);
    for name in ["w8a16-g32-float-sf32", "w8a16-g16-sf32"] {
        let (_, w) = super::types_of_files::k_type(&mut random, name, &[20], 1024, true);
        for (columns, whole) in [
            ([0..512, 512..1024], true),
            ([256..512, 768..1024], true),
            ([512..1024, 0..256], false),
            ([128..512, 512..768], false),
            ([0..256, 300..310], false),
        ] {
            let rows = [3..9, 0..2, 20..20, 8..20];
            let (cut, part) = (w.cut(&rows, &columns).unwrap(), w.part(&rows, &columns).unwrap());
            assert_eq!(cut.to_qtensor().unwrap(), part, "{name} {columns:?}");
            assert_eq!(matches!(cut.codes(), Codes::Blocks { .. }), whole, "{name} {columns:?}");
            let atom = Atom::holding_all(&[&cut], Act::A16);
            assert_eq!(atom.is_ok_and(|atom| atom.multiples), whole, "{name} {columns:?}");
        }
        let twice = w.cut(std::slice::from_ref(&(0..1)), &[0..256, 0..256]).unwrap_err().to_string();
        assert!(twice.contains("column 0 twice"), "{twice}");
        assert!(
            w.cut(&[0..3, 4..21], std::slice::from_ref(&(0..256))).unwrap_err().to_string().contains("rows below 20")
        );
    }
    // Scales of their own, in any order of strides: blocks of 16 codes, groups of 32.
    let (q, codes) = super::planes::narrow(&mut random, parse("w8a16-g32").weight, 5, [20, 256], false);
    for (by_groups, wide) in [(false, false), (true, false), (true, true)] {
        let w = stored(&q, codes.clone(), by_groups, wide);
        for (columns, whole) in [([32..96, 128..256], true), ([32..64, 80..112], false)] {
            let rows = [5..17, 1..3];
            let (cut, part) = (w.cut(&rows, &columns).unwrap(), w.part(&rows, &columns).unwrap());
            assert_eq!(cut.to_qtensor().unwrap(), part, "{columns:?} {by_groups} {wide}");
            assert_eq!(matches!(cut.codes(), Codes::Blocks { .. }), whole, "{columns:?}");
        }
    }
}
