//! Names of formats, and what tensors refuse.

use crate::data::{Random, parse};
use halfbyte::format::{FORMATS, reference};
use halfbyte::{Act, Error, Float, Format, Group, QTensor, WeightFormat, Zero, Zeros};

#[test]
fn names_parse_and_print_the_same() {
    for name in FORMATS {
        assert_eq!(parse(name).to_string(), *name);
    }
    assert_eq!(
        parse("w4a8-g32-asym"),
        Format {
            weight: WeightFormat {
                bits: 4,
                group: Group::Size(32),
                zero: Zero::Integer,
                scale: Float::F16,
                channel_scale: None
            },
            act: Act::A8
        }
    );
}

#[test]
fn what_is_no_format_is_an_error_that_quotes_it() {
    for name in [
        "",
        "w4",
        "w5a16",
        "w4a4",
        "w4a16-g0",
        "w4a16-g",
        "w4a16-g+8",
        "w4a16-g64-g32",
        "w4a16-asym-float",
        "w4a16-xasym",
        "w4a8-xasym-xasym",
        "w4a16-",
        "W4A16",
        "w4a16-g99999999999999999999",
        "w4a16 ",
        "w4a16-q",
        "w4a8-si8",
        "w4a8-tensor-si8",
        "w8a8-g128-si8",
        "w4a8-g32-float-si8",
        "w4a8-g32-sf32-si8",
        "w4a8-g32-si8-si8",
    ] {
        let error = name.parse::<Format>().unwrap_err();
        assert!(
            matches!(error, Error::Invalid { .. }) && error.to_string().contains(&format!("\"{name}\"")),
            "{error}"
        );
    }
}

#[test]
fn texts_say_what_is_wrong() {
    let error = "w4a16-g0".parse::<Format>().unwrap_err().to_string();
    assert!(error.contains("-g{N} with N from 1 on"), "{error}");
    let [a, b] = ["w4a16-g4-asym", "w4a16-sf32"].map(|name| {
        let format = parse(name).weight;
        halfbyte::quantize::rtn((&[0f32; 8]).into(), [1, 8], format, Default::default()).unwrap()
    });
    let [a, b] = [&a, &b].map(halfbyte::layout::stored::StoredTensor::from);
    let error = halfbyte::Linear::new(halfbyte::Weight::Stored(&[&a, &b], Act::A16)).unwrap_err().to_string();
    let expected =
        "linear: expected format w4-g4-asym, k 8 and the same group index everywhere, got format w4-sf32, k 8";
    assert_eq!(error, expected);
}

#[test]
fn every_code_means_what_the_format_says() {
    for bits in [2u32, 3, 4, 8] {
        let count = 1usize << bits;
        let codes: Vec<u8> = (0..count).map(|c| c as u8).collect();
        let of = |zero, zeros| {
            let format = WeightFormat { bits, group: Group::Channel, zero, scale: Float::F16, channel_scale: None };
            reference::dequantize(&QTensor::new(format, [1, count], codes.clone(), vec![0.25], zeros, None).unwrap())
        };
        let expect = |f: &dyn Fn(f64) -> f64| (0..count).map(|c| f(c as f64)).collect::<Vec<_>>();
        assert_eq!(of(Zero::Symmetric, Zeros::Symmetric), expect(&|c| 0.25 * (c - f64::from(1 << (bits - 1)))));
        for z in 0..=count {
            assert_eq!(of(Zero::Integer, Zeros::Integer(vec![z as u16])), expect(&|c| 0.25 * (c - z as f64)));
        }
        assert_eq!(of(Zero::Float, Zeros::Float(vec![-1.5])), expect(&|c| 0.25 * c - 1.5));
    }
}

#[test]
fn tensors_refuse_what_does_not_fit() {
    let format =
        WeightFormat { bits: 4, group: Group::Size(2), zero: Zero::Integer, scale: Float::F16, channel_scale: None };
    let make = |codes: &[u8], scales: &[f32], zeros: Zeros, index: Option<Vec<u32>>| {
        QTensor::new(format, [1, 4], codes.to_vec(), scales.to_vec(), zeros, index)
            .map(|_| ())
            .map_err(|e| e.to_string())
    };
    let good = || Zeros::Integer(vec![8, 16]);
    assert_eq!(make(&[0, 15, 3, 4], &[0.5, 0.25], good(), Some(vec![1, 0, 1, 0])), Ok(()));
    let text = |r: Result<(), String>| r.unwrap_err();
    assert_eq!(text(make(&[0, 16, 3, 4], &[0.5, 0.25], good(), None)), "qtensor: expected codes of 4 bits, got 16");
    assert_eq!(text(make(&[0; 3], &[0.5, 0.25], good(), None)), "qtensor: expected 4 codes, got 3");
    assert_eq!(text(make(&[0; 4], &[0.5], good(), None)), "qtensor: expected 2 scales, got 1");
    assert!(text(make(&[0; 4], &[0.5, 0.1], good(), None)).contains("finite and exact in f16, got 0.1"));
    assert!(text(make(&[0; 4], &[0.5, f32::NAN], good(), None)).contains("got NaN"));
    assert!(text(make(&[0; 4], &[0.5; 2], Zeros::Integer(vec![17, 0]), None)).contains("zero points up to 16"));
    assert!(text(make(&[0; 4], &[0.5; 2], Zeros::Symmetric, None)).contains("expected integer zero points"));
    assert!(text(make(&[0; 4], &[0.5; 2], good(), Some(vec![0, 0, 1, 2]))).contains("group indices below 2"));
    let huge = QTensor::new(format, [usize::MAX, 4], vec![], vec![], good(), None).unwrap_err();
    assert!(huge.to_string().contains("fit memory"), "{huge}");
    let wide = QTensor::new(format, [0, u32::MAX as usize], vec![], vec![], good(), None).unwrap_err();
    assert!(wide.to_string().contains("columns"), "{wide}");
}

/// A row of groups of two columns on two levels: scales and zero points.
fn two_levels(scales: &[f32], zeros: Option<&[u16]>) -> halfbyte::Result<QTensor> {
    let name = if zeros.is_some() { "w4a8-g2-asym-si8" } else { "w4a8-g2-si8" };
    let zeros = zeros.map_or(Zeros::Symmetric, |zeros| Zeros::Integer(zeros.to_vec()));
    let k = 2 * scales.len();
    QTensor::new(parse(name).weight, [1, k], vec![5; k], scales.to_vec(), zeros, None)
}

#[test]
fn scales_on_two_levels_are_factors_of_the_greatest_scale_of_a_channel() {
    let parts = |scales: &[f32]| {
        let q = two_levels(scales, None).unwrap();
        assert_eq!(q.scales(), scales);
        (q.channel_scales().unwrap()[0], q.factors().unwrap().to_vec())
    };
    assert_eq!(parts(&[1.0, 1.5, 4.0]), (0.5, vec![2, 3, 8]));
    assert_eq!(parts(&[0.75, 12.0]), (0.75, vec![1, 16]));
    assert_eq!(parts(&[-0.5, -0.25]), (-0.25, vec![2, 1]));
    assert_eq!(parts(&[0.0, 0.0]), (0.0, vec![1, 1]));
    // 3 · (1 + 2⁻¹⁰) needs 12 bits, so that it is no scale of a channel; a third of it is one.
    let odd = 1.0 + 2f32.powi(-10);
    assert_eq!(parts(&[3.0 * odd, 6.0 * odd]), (odd, vec![3, 6]));
    let q = two_levels(&[0.5, 0.25], None).unwrap();
    assert_eq!(q.rows(0..1).unwrap(), q);
    assert_eq!([q.activation_groups(), q.activation_group_of(3)], [1, 0]);
}

#[test]
fn scales_that_are_no_factors_of_one_are_refused_with_their_row() {
    for scales in [[1.0, 17.0], [1.0, 0.3], [1.0, -1.0], [1.0, 0.0], [16.0, 15.5], [1e30, 1e30]] {
        let text = two_levels(&scales, None).unwrap_err().to_string();
        assert!(text.contains("whole multiples of one f16 number") && text.contains("in row 0"), "{scales:?}: {text}");
    }
}

/// Every zero point with every factor: taken if and only if all 16 codes are bytes with sign.
#[test]
fn factors_keep_every_code_within_a_byte() {
    for zero in 0..=16u16 {
        for factor in 1..=40u16 {
            // The other group, of factor 1, leaves no other scale of the channel.
            let q = two_levels(&[f32::from(factor), 1.0], Some(&[zero, 8]));
            let bytes = (0..16).map(|code| (code - i32::from(zero)) * i32::from(factor));
            let fits = factor <= 16 && bytes.into_iter().all(|byte| (-128..=127).contains(&byte));
            assert_eq!(q.is_ok(), fits, "zero point {zero}, factor {factor}");
        }
    }
}

/// The specification is what a byte with a scale for each channel means, with one scale for each row of x.
#[test]
fn products_on_two_levels_are_those_of_bytes_with_a_scale_a_channel() {
    let mut random = Random(14);
    for name in ["w4a8-g32-si8", "w4a8-g20-asym-si8"] {
        let (format, [m, n, k]) = (parse(name), [3, 7, 130]);
        let w = random.qtensor(format.weight, [n, k], true);
        let (channel, factors) = (w.channel_scales().unwrap(), w.factors().unwrap());
        let byte = |i: usize, j: usize| {
            let g = w.group_of(j);
            let code = i32::from(w.codes()[i * k + j]) - w.zero_point(i, g).unwrap() as i32;
            i8::try_from(code * i32::from(factors[i * w.groups() + g])).unwrap()
        };
        let codes = (0..n * k).map(|at| (i32::from(byte(at / k, at % k)) + 128) as u8).collect();
        let bytes =
            QTensor::new(parse("w8a8").weight, [n, k], codes, channel.to_vec(), Zeros::Symmetric, None).unwrap();
        assert_eq!(reference::dequantize(&w), reference::dequantize(&bytes));
        let x = random.activations(m * k);
        let [two, one] = [&w, &bytes].map(|w| reference::linear(&x, m, w, format.act));
        assert_eq!((two.value, two.magnitude), (one.value, one.magnitude), "{name}");
    }
}
