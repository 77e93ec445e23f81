//! The same numbers in another format.

use crate::data::{Random, parse};
use halfbyte::format::reference;
use halfbyte::{QTensor, WeightFormat, Zeros};
use std::borrow::Cow;

fn format(name: &str) -> WeightFormat {
    parse(name).weight
}

/// Expresses, and holds that every weight is what it was.
fn expressed(q: &QTensor, name: &str) -> QTensor {
    let result = q.express(format(name)).unwrap().into_owned();
    assert_eq!(result.format(), format(name));
    assert_eq!(reference::dequantize(&result), reference::dequantize(q), "{name}");
    result
}

fn refusal(q: &QTensor, name: &str) -> String {
    q.express(format(name)).unwrap_err().to_string()
}

#[test]
fn what_a_format_can_hold_comes_back_as_it_was() {
    let mut random = Random(1);
    for (from, through) in [
        ("w4a16-g32", "w4a16-g32-asym"),
        ("w4a16-g32", "w4a16-g32-float-sf32"),
        ("w4a16-g32-asym", "w4a16-g32-float-sf32"),
        ("w3a16-g128-asym", "w4a16-g32-asym-sf32"),
        ("w4a16-g20", "w8a16-g10-asym"),
        ("w2a16-g32-float", "w4a16-g16-float-sf32"),
        ("w4a16", "w4a16-g32"),
        ("w8a16-tensor", "w8a16-g64"),
        ("w8a16-sbf16", "w8a16-sf32"),
    ] {
        let q = random.qtensor(format(from), [5, 200], false);
        let there = expressed(&q, through);
        let back = expressed(&there, from);
        // A scale's sign or the zero of an unused group may be said in two ways; the numbers here have one.
        assert_eq!(back, q, "{from} through {through}");
    }
}

#[test]
fn codes_move_where_a_format_has_its_zero_elsewhere() {
    let q = Random(6).qtensor(format("w4a16-g32-asym"), [5, 200], false);
    let centred = expressed(&q, "w8a16-g32");
    // Where zero lay is not in the numbers any more.
    assert!(refusal(&centred, "w4a16-g32-asym").contains("zero points from 0 to 16"));
}

#[test]
fn the_same_format_is_not_copied() {
    let q = Random(2).qtensor(format("w4a16-g32"), [2, 64], true);
    assert!(matches!(q.express(format("w4a16-g32")).unwrap(), Cow::Borrowed(same) if *same == q));
}

#[test]
fn a_group_index_stays_where_the_groups_stay() {
    let q = Random(3).qtensor(format("w4a16-g32"), [3, 96], true);
    assert!(q.group_index().is_some());
    let other = expressed(&q, "w4a16-g32-asym-sf32");
    assert_eq!(other.group_index(), q.group_index());
    assert!(refusal(&q, "w4a16-g16").contains("act-order"));
    // Columns of a part name more groups than they fill.
    let index = Some(vec![0, 1, 2, 3, 0, 1, 2, 3]);
    let scales = vec![1.0, 0.5, 0.25, 2.0];
    let part = QTensor::new(format("w4a16-g4"), [1, 8], vec![9; 8], scales, Zeros::Symmetric, index).unwrap();
    assert_eq!(part.groups(), 4);
    assert_eq!(expressed(&part, "w8a16-g4-asym").group_index(), part.group_index());
}

#[test]
fn groups_join_only_where_they_agree() {
    let mut random = Random(4);
    let wide = random.qtensor(format("w4a16-g64-asym"), [2, 128], false);
    assert_eq!(expressed(&expressed(&wide, "w4a16-g16-asym"), "w4a16-g64-asym"), wide);
    let text = refusal(&wide, "w4a16-g128-asym");
    assert!(text.contains("row 0, group 0"), "{text}");
    // Equal scales, other zeros.
    let zeros = Zeros::Integer(vec![3, 4]);
    let q = QTensor::new(format("w4a16-g2-asym"), [1, 4], vec![1, 2, 3, 4], vec![0.5; 2], zeros, None).unwrap();
    assert!(refusal(&q, "w4a16-g4-asym").contains("equal zeros"));
}

#[test]
fn what_does_not_fit_is_refused_with_its_place() {
    let make = |name: &str, codes: &[u8], scale: f32, zeros: Zeros| {
        QTensor::new(format(name), [1, codes.len()], codes.to_vec(), vec![scale], zeros, None).unwrap()
    };
    // Codes of an asymmetric group that is not centred.
    let q = make("w4a16-asym", &[0, 15], 0.5, Zeros::Integer(vec![3]));
    assert!(refusal(&q, "w4a16").contains("codes of 4 bits"), "{}", refusal(&q, "w4a16"));
    expressed(&q, "w8a16");
    // One that happens to fit.
    let q = make("w4a16-asym", &[2, 9], 0.5, Zeros::Integer(vec![3]));
    assert_eq!(expressed(&q, "w4a16").codes(), [7, 14]);
    // A scale that f16 does not have.
    let q = make("w4a16-sf32", &[0, 15], 0.1, Zeros::Symmetric);
    assert!(refusal(&q, "w4a16").contains("exact in f16"));
    // scale · zero beyond f16's eleven bits.
    let q = make("w4a16-asym", &[0, 15], 1.0 + 2f32.powi(-10), Zeros::Integer(vec![3]));
    assert!(refusal(&q, "w4a16-float").contains("scale · zero point exact in f16"));
    expressed(&q, "w4a16-float-sf32");
    // Offsets that are no multiple of the scale, and one that only rounding makes one.
    for offset in [0.3, -(3.0 + 2f32.powi(-22)) * 0.75, 100.0] {
        let q = make("w4a16-float-sf32", &[0, 15], 0.75, Zeros::Float(vec![offset]));
        let text = refusal(&q, "w4a16-asym-sf32");
        assert!(text.contains("whole multiples") || text.contains("zero points from 0 to 16"), "{text}");
    }
    // A scale of 0 with an offset is a constant, which no zero point can say.
    let q = make("w4a16-float", &[0, 15], 0.0, Zeros::Float(vec![0.5]));
    assert!(refusal(&q, "w4a16-asym").contains("where the scale is 0"));
    // Fewer bits.
    let q = make("w8a16-asym", &[0, 16], 1.0, Zeros::Integer(vec![0]));
    assert!(refusal(&q, "w4a16-asym").contains("codes of 4 bits"));
    // A scale for all rows.
    let two = QTensor::new(format("w4a16"), [2, 1], vec![1, 2], vec![0.5, 0.25], Zeros::Symmetric, None).unwrap();
    assert!(refusal(&two, "w4a16-tensor").contains("one scale"));
}

#[test]
fn nothing_is_still_expressed() {
    for shape in [[0, 64], [3, 0], [0, 0]] {
        let q = Random(5).qtensor(format("w4a16-g32"), shape, false);
        expressed(&q, "w8a16-g16-asym");
    }
}

/// To two levels where the scales allow it, and back to every format that holds the products.
#[test]
fn scales_on_two_levels_are_the_same_numbers_as_on_one() {
    for name in ["w4a8-g32-si8", "w4a8-g20-asym-sbf16-si8"] {
        let q = Random(6).qtensor(format(name), [5, 90], true);
        let one = q.format().zero;
        let free = halfbyte::WeightFormat { channel_scale: None, ..q.format() };
        let wide = q.express(free).unwrap();
        assert_eq!((wide.scales(), wide.channel_scales()), (q.scales(), None));
        assert_eq!(*wide.express(q.format()).unwrap(), q, "{name} {one:?}");
    }
    // Halves of the channel's scale are as exact as it is.
    let scales = vec![0.5, 0.75, 1.25];
    let q = QTensor::new(format("w4a16-g2"), [1, 6], vec![3; 6], scales, Zeros::Symmetric, None).unwrap();
    assert_eq!(expressed(&q, "w4a8-g2-si8").factors(), Some([2, 3, 5].as_slice()));
    let scales = vec![0.5, 0.75, 1.26];
    let scales = scales.into_iter().map(|s| halfbyte::Float::F16.round(s)).collect();
    let q = QTensor::new(format("w4a16-g2"), [1, 6], vec![3; 6], scales, Zeros::Symmetric, None).unwrap();
    let text = refusal(&q, "w4a8-g2-si8");
    assert!(text.contains("whole multiples of one f16 number") && text.contains("row 0"), "{text}");
}
