//! Names of formats, and what tensors refuse.

use crate::data::parse;
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
            weight: WeightFormat { bits: 4, group: Group::Size(32), zero: Zero::Integer, scale: Float::F16 },
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
    ] {
        let error = name.parse::<Format>().unwrap_err();
        assert!(
            matches!(error, Error::Invalid { .. }) && error.to_string().contains(&format!("\"{name}\"")),
            "{error}"
        );
    }
}

#[test]
fn every_code_means_what_the_format_says() {
    for bits in [2u32, 3, 4, 8] {
        let count = 1usize << bits;
        let codes: Vec<u8> = (0..count).map(|c| c as u8).collect();
        let of = |zero, zeros| {
            let format = WeightFormat { bits, group: Group::Channel, zero, scale: Float::F16 };
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
    let format = WeightFormat { bits: 4, group: Group::Size(2), zero: Zero::Integer, scale: Float::F16 };
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
    assert!(text(make(&[0; 4], &[0.5; 2], Zeros::Symmetric, None)).contains("expected Integer zeros"));
    assert!(text(make(&[0; 4], &[0.5; 2], good(), Some(vec![0, 0, 1, 2]))).contains("group indices below 2"));
    let huge = QTensor::new(format, [usize::MAX, 4], vec![], vec![], good(), None).unwrap_err();
    assert!(huge.to_string().contains("fits memory"), "{huge}");
}
