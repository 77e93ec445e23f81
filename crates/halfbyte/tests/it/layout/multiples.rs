//! Scales and offsets as whole multiples of halves.

use super::*;
use halfbyte::layout::multiples::Multiples;

/// A tensor whose scales and offsets are multiples of halves of `block` groups, and these: of bytes, or of numbers below `most`.
fn multiples(random: &mut Random, [n, k]: [usize; 2], block: usize, most: usize) -> (QTensor, [Multiples<'static>; 2]) {
    let q = random.qtensor(parse("w4a16-g16-float-sf32").weight, [n, k], false);
    let mut drawn = |least: i32| {
        let halves: Vec<f16> = (0..n * q.groups() / block).map(|_| f16::from_f32(random.normal() * 0.01)).collect();
        let factors: Vec<i8> = (0..n * q.groups()).map(|_| (least + random.below(most) as i32) as i8).collect();
        Multiples::new(block, halves, factors).unwrap()
    };
    let both = [drawn(if most > 16 { -128 } else { 0 }), drawn(0)];
    let [scales, offsets] = [0, 1].map(|i| both[i].products());
    let q = QTensor::new(q.format(), [n, k], q.codes().to_vec(), scales, Zeros::Float(offsets), None).unwrap();
    (q, both)
}

#[test]
fn multiples_pack_to_fewer_bytes_and_the_same_numbers() {
    let mut random = Random(41);
    for block in [1, 2, 8, 16] {
        for n in [1, 16, 37] {
            let (q, [scales, offsets]) = multiples(&mut random, [n, 512], block, 128);
            let w = StoredTensor::from(&q).with_multiples(scales.clone(), Some(offsets.clone())).unwrap();
            assert_eq!(w.to_qtensor().unwrap(), q);
            let (packed, plain) = (pack(Caps::detect(), &[&w], true).unwrap(), CpuN16::pack(&q, true));
            assert_eq!(packed.unpack(), q, "blocks of {block}");
            let numbers = plain.panels() * q.groups() * 16;
            let plain_bytes = plain.bytes() - 2 * 4 * numbers;
            assert_eq!(packed.bytes(), plain_bytes + 2 * (numbers + 2 * numbers / block), "blocks of {block}");
            // Below a tensor of other blocks, or of none, there are singles.
            let other = multiples(&mut random, [24, 512], 4, 128);
            let below = StoredTensor::from(&other.0);
            let expected = contents(&CpuN16::pack(&below_each_other(&[q.clone(), other.0.clone()]), true));
            let [s, o] = other.1;
            for below in [below.clone(), below.with_multiples(s, Some(o)).unwrap()] {
                assert!(contents(&pack(Caps::detect(), &[&w, &below], true).unwrap()) == expected, "blocks of {block}");
            }
            let alike = pack(Caps::detect(), &[&w, &w], true).unwrap();
            assert_eq!(alike.unpack(), below_each_other(&[q.clone(), q.clone()]));
        }
    }
}

#[test]
fn small_factors_take_a_nibble() {
    let mut random = Random(47);
    for (block, bits) in [(1, 8), (2, 4), (16, 4)] {
        let (q, [scales, offsets]) = multiples(&mut random, [37, 512], block, 16);
        let w = StoredTensor::from(&q).with_multiples(scales, Some(offsets)).unwrap();
        let packed = pack(Caps::detect(), &[&w], false).unwrap();
        assert_eq!(packed.unpack(), q, "blocks of {block}");
        let numbers = packed.panels() * q.groups() * 16;
        assert_eq!(packed.bytes(), numbers * 8 + 2 * (numbers * bits / 8 + 2 * numbers / block), "blocks of {block}");
    }
}

#[test]
fn other_products_are_refused() {
    let (q, [scales, offsets]) = multiples(&mut Random(42), [3, 64], 4, 128);
    let new = |scales: &Multiples<'static>, offsets: Option<&Multiples<'static>>| {
        StoredTensor::from(&q).with_multiples(scales.clone(), offsets.cloned()).map(|_| ())
    };
    assert!(new(&scales, Some(&offsets)).is_ok());
    assert!(new(&scales, None).is_err());
    assert!(new(&offsets, Some(&offsets)).unwrap_err().to_string().contains("its scales and offsets"));
    assert!(new(&scales, Some(&scales)).is_err());
    let (_, [of_more, _]) = multiples(&mut Random(42), [4, 64], 4, 128);
    assert!(new(&of_more, Some(&offsets)).is_err());
    for (block, halves, factors) in [(3, 1, 3), (0, 0, 0), (4, 2, 7), (2, usize::MAX, 2)] {
        let halves = vec![f16::ONE; halves.min(9)];
        assert!(Multiples::new(block, halves, vec![1; factors]).is_err());
    }
    // A row of 3 groups has no whole blocks of 2.
    let q = Random(43).qtensor(parse("w4a16-g16-sf32").weight, [2, 48], false);
    let halves: Vec<f16> = vec![f16::ONE; 3];
    let multiples = Multiples::new(2, halves, vec![1; 6]).unwrap();
    let ones = (FloatData::F32(vec![1.0; 6].into()), Strides::of_outputs(3));
    let codes = Codes::Bytes { codes: q.codes().to_vec().into(), flip: 0 };
    let w = StoredTensor::new(q.format(), [2, 48], codes, ones, StoredZeros::Symmetric, None).unwrap();
    assert!(w.with_multiples(multiples, None).is_err());
}
