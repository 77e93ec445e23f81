//! Tensors of random numbers: valid, of the deviation that they say, the same wherever and however often they are made.

use crate::data::parse;
use halfbyte::cpu::isa::Caps;
use halfbyte::cpu::pack::pack;
use halfbyte::format::{FORMATS, Zero, reference};
use halfbyte::layout::codes::random::word;
use halfbyte::layout::cpu_n16::CpuN16;
use halfbyte::{Group, StoredTensor, WeightFormat, Zeros};

#[test]
fn random_tensors_are_valid_and_of_the_deviation_that_they_say() {
    for name in FORMATS {
        let format = parse(name).weight;
        let [n, k] = [200, 1000];
        let random = |seed| StoredTensor::random(format, [n, k], seed).unwrap().to_qtensor().unwrap();
        let q = random(5);
        assert_eq!((q.format(), q.n(), q.k()), (format, n, k), "{name}");
        assert_eq!(q, random(5), "{name}");
        assert_ne!(q.codes(), random(6).codes(), "{name}");
        // Every code as often as any other, within six deviations.
        let mut counts = vec![0usize; format.max_code() as usize + 1];
        q.codes().iter().for_each(|&code| counts[usize::from(code)] += 1);
        let expected = (n * k) as f64 / counts.len() as f64;
        let far = counts.iter().find(|&&count| (count as f64 - expected).abs() > 6.0 * expected.sqrt());
        assert_eq!(far, None, "{name}: {expected} expected");
        let values = reference::dequantize(&q);
        let square = values.iter().map(|v| v * v).sum::<f64>() / values.len() as f64;
        let deviation = square.sqrt() * (k as f64).sqrt();
        assert!((0.7..1.3).contains(&deviation), "{name}: deviation {deviation} / √k");
        if format.zero == Zero::Symmetric && format.group != Group::Tensor && format.channel_scale.is_none() {
            // Of 4 bits it would be −0.11, were all scales positive.
            let mean = values.iter().sum::<f64>() / values.len() as f64 / square.sqrt();
            assert!(mean.abs() < 0.06, "{name}: a mean of {mean} deviations");
        }
        if format.group != Group::Tensor {
            assert!(q.scales().iter().any(|&scale| scale != q.scales()[0]), "{name}: scales differ");
        }
        if let Zeros::Integer(zeros) = q.zeros()
            && format.group != Group::Tensor
        {
            assert!(zeros.iter().any(|&zero| zero != zeros[0]), "{name}: zero points differ");
        }
    }
}

#[test]
fn random_tensors_pack_as_their_codes_do() {
    for name in FORMATS {
        for shape in [[40, 96], [33, 130], [5, 7], [4, 0], [0, 4]] {
            let random = StoredTensor::random(parse(name).weight, shape, 9).unwrap();
            let [packed, expected] =
                [pack(Caps::detect(), &[&random], true).unwrap(), CpuN16::pack(&random.to_qtensor().unwrap(), true)];
            assert_eq!(packed.codes(), expected.codes(), "{name} {shape:?}");
            assert_eq!(packed.unpack(), expected.unpack(), "{name} {shape:?}");
        }
    }
}

#[test]
fn random_tensors_take_formats_that_exist_and_no_memory() {
    let format = parse("w4a16-g128").weight;
    assert!(StoredTensor::random(WeightFormat { bits: 5, ..format }, [8, 8], 1).is_err());
    assert!(StoredTensor::random(WeightFormat { group: Group::Size(0), ..format }, [8, 8], 1).is_err());
    // 500 GB of codes, none of which is there.
    let large = StoredTensor::random(format, [1 << 20, 1 << 20], 1).unwrap();
    assert_eq!((large.n(), large.k(), large.scales().0.len()), (1 << 20, 1 << 20, (1 << 20) + (1 << 13)));
}

/// What the source for GPUs computes too: another function would give other weights there.
#[test]
fn words_are_what_they_were() {
    assert_eq!([0, 1, 2, 1 << 40, u64::MAX].map(word), [0, 1753845952, 3507691905, 3600644485, 2571457629]);
}
