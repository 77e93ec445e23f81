//! Sizes that say nothing about memory: weights without elements, and more memory than any machine has.

use halfbyte::cpu::attention::Heads;
use halfbyte::cpu::nn::Rope;
use halfbyte::format::int8::{Affine, Byte, Bytes, Int8Weight};
use halfbyte::layout::codes::Codes;
use halfbyte::layout::stored::{StoredTensor, StoredZeros, Strides};
use halfbyte::quantize::{Gptq, Hessian, Rtn, WeightOnlyRule, gptq, rtn, weight_only};
use halfbyte::{Act, Cpu, Error, FloatData, Floats, Format, Linear, LinearInt8, LlmInt8Linear, QTensor, Weight, Zeros};
use std::sync::Arc;

/// A shape without elements that is refused, another one of which is not.
const SIZES: [usize; 4] = [(1 << 24) + 1, 1 << 33, 1 << 60, usize::MAX];

fn refused<T>(result: halfbyte::Result<T>, what: &str) {
    match result {
        Err(Error::Invalid { expected, .. }) => assert!(expected.contains("16777216"), "{what}: {expected}"),
        Err(other) => panic!("{what}: {other}"),
        Ok(_) => panic!("{what}: taken"),
    }
}

#[test]
fn weights_without_elements_have_a_bounded_shape() {
    let cpu = Cpu::new(1).unwrap();
    let format = |name: &str| name.parse::<Format>().unwrap();
    let empty: Floats<'_> = (&[0f32; 0]).into();
    for size in SIZES {
        for shape in [[size, 0], [0, size]] {
            let what = format!("{shape:?}");
            for name in ["w4a16", "w8a8-g2", "w4a16-tensor", "w4a8-g128-si8"] {
                refused(rtn(empty, shape, format(name).weight, Rtn::default()), &what);
                let q = QTensor::new(format(name).weight, shape, Vec::new(), Vec::new(), Zeros::Symmetric, None);
                assert!(matches!(q, Err(Error::Invalid { .. })), "{what} {name}");
            }
            refused(
                weight_only(empty, [shape[1], shape[0]], format("w4a16-g64").weight, WeightOnlyRule::Paddle),
                &what,
            );
            refused(Linear::on(&cpu, Weight::Dense(empty, shape)), &what);
            refused(Linear::new(Weight::Dense(empty, shape)), &what);
            refused(Int8Weight::new(Bytes::I8(&[]), shape, &[1.0], &[]), &what);
            refused(LlmInt8Linear::on(&cpu, &[], shape, &[]), &what);
        }
        let hessian = Hessian::new(0).unwrap();
        refused(gptq(empty, [size, 0], format("w4a16").weight, &hessian, Gptq::default()), "gptq");
    }
}

#[test]
fn weights_without_elements_multiply() {
    let cpu = Cpu::new(2).unwrap();
    for shape @ [n, k] in [[0, 0], [5, 0], [0, 70]] {
        for name in ["w4a16-g32", "w8a8-g2", "w4a8", "w2a16-g64-asym", "w4a8-g32-float-xasym"] {
            let format: Format = name.parse().unwrap();
            let q = rtn((&[0f32; 0]).into(), shape, format.weight, Rtn::default()).unwrap();
            let layer = Linear::on(&cpu, Weight::Quantized(&q, format.act)).unwrap();
            let mut y = vec![7f32; 3 * n];
            layer.forward(&cpu, &vec![1f32; 3 * k], 3, &mut y).unwrap();
            assert_eq!(y, vec![0.0; 3 * n], "{name} {shape:?}");
        }
        let w = Int8Weight::new(Bytes::I8(&[]), shape, &[1.0], &[]).unwrap();
        let layer = LinearInt8::on(&cpu, &w, Affine::new(Byte::U8, 1.0, 3).unwrap(), None).unwrap();
        let mut y = vec![7f32; 2 * n];
        layer.forward_floats(&cpu, &vec![1u8; 2 * k], 2, &mut y).unwrap();
        assert_eq!(y, vec![0.0; 2 * n], "{shape:?}");
    }
}

#[test]
fn no_columns_have_any_number_of_rows() {
    let mut hessian = Hessian::new(0).unwrap();
    hessian.add(&[], usize::MAX).unwrap();
    assert!(matches!(hessian.add(&[], 1), Err(Error::Invalid { .. })));
    assert_eq!(hessian.rows(), u64::MAX);

    let cpu = Cpu::new(2).unwrap();
    for act in [Act::A16, Act::A8] {
        let format: Format = "w4a16".parse().unwrap();
        let q = rtn((&[0f32; 0]).into(), [0, 0], format.weight, Rtn::default()).unwrap();
        let layer = Linear::on(&cpu, Weight::Quantized(&q, act)).unwrap();
        layer.forward(&cpu, &[0f32; 0], usize::MAX, &mut [0f32; 0]).unwrap();
    }
    let w = Int8Weight::new(Bytes::I8(&[]), [0, 0], &[1.0], &[]).unwrap();
    let layer = LinearInt8::on(&cpu, &w, Affine::new(Byte::U8, 1.0, 0).unwrap(), None).unwrap();
    layer.forward_floats(&cpu, &[0u8; 0], usize::MAX, &mut [0f32; 0]).unwrap();
}

#[test]
fn memory_that_no_machine_has_is_an_error() {
    let few = |error: Error| assert!(matches!(error, Error::Memory { .. }), "{error}");
    few(Hessian::new(1 << 29).unwrap_err());
    let heads = Heads { heads: 1, kv_heads: 1, head_size: 4 };
    for position in [1 << 50, usize::MAX - 2] {
        let rope = Rope::new(vec![1.0, 0.1], 1.0, usize::MAX).unwrap();
        few(rope.apply(&Cpu::new(1).unwrap(), &mut [0f32; 12], heads, position).unwrap_err());
    }
    let (shape, format) = ([1 << 40, 1 << 20], "w4a16-sf32".parse::<Format>().unwrap().weight);
    let codes = Codes::Rows(Arc::new(|_, out: &mut [u8]| out.fill(1)));
    let scales = (FloatData::F32(vec![1.0].into()), Strides::TENSOR);
    let stored = StoredTensor::new(format, shape, codes, scales, StoredZeros::Symmetric, None).unwrap();
    few(stored.to_qtensor().unwrap_err());
    few(stored.values().unwrap_err());
    let all = shape.map(|size| 0..size);
    few(stored.part(&all[..1], &all[1..]).unwrap_err());
}
