//! Scales and offsets as multiples of halves in the atoms of tensor cores, codes of 8 bits in 6: GGUF's K types on a GPU.

use super::planes::narrow;
use super::*;
use halfbyte::layout::multiples::Multiples;

/// Formats of Q4_K, Q5_K, Q3_K and Q6_K, with what a weight takes in memory, in bits.
pub const K_TYPES: [(&str, f64); 4] = [
    ("w4a16-g32-float-sf32", 4.625),
    ("w8a16-g32-float-sf32", 6.625),
    ("w3a16-g16-sf32", 4.625),
    ("w8a16-g16-sf32", 6.625),
];

/// Tensors of such a type one below the other, and all of them as one; k is a multiple of 256. Factors of offsets are negative, as
/// files have them, or not.
pub fn k_type(
    random: &mut Random,
    name: &str,
    heights: &[usize],
    k: usize,
    negative: bool,
) -> (Vec<StoredTensor<'static>>, StoredTensor<'static>) {
    let format = parse(name).weight;
    let (groups, block) = (format.group.count(k), 256 / format.group.len(k));
    let has_offsets = format.zero == Zero::Float;
    let stored =
        |q: &[QTensor], codes: Codes<'static>, scales: Multiples<'static>, offsets: Option<Multiples<'static>>| {
            let (n, strides) = (q.iter().map(QTensor::n).sum(), Strides::of_outputs(groups));
            let zeros = match &offsets {
                Some(offsets) => StoredZeros::Float(FloatData::F32(offsets.products().into()), strides),
                None => StoredZeros::Symmetric,
            };
            let numbers = (FloatData::F32(scales.products().into()), strides);
            let w = StoredTensor::new(format, [n, k], codes, numbers, zeros, None).unwrap();
            w.with_multiples(scales, offsets).unwrap()
        };
    let (mut parts, mut all_q, mut all_bytes, mut form) = (Vec::new(), Vec::new(), Vec::new(), None);
    let mut all = [(Vec::new(), Vec::new()), (Vec::new(), Vec::new())];
    for &n in heights {
        let (q, codes) = match format.bits {
            8 => {
                let (q, codes) = narrow(random, format, 6, [n, k], false);
                let Codes::Blocks { bytes, form: own } = &codes else { panic!("codes in blocks") };
                all_bytes.extend_from_slice(bytes);
                form = Some(own.clone());
                (q, codes)
            }
            _ => {
                let q = random.qtensor(format, [n, k], false);
                all_bytes.extend_from_slice(q.codes());
                let codes = q.codes().to_vec();
                (q, Codes::Bytes { codes: codes.into(), flip: 0 })
            }
        };
        let mut multiples = |[least, most]: [i32; 2], all: &mut (Vec<f16>, Vec<i8>)| {
            let halves: Vec<f16> = (0..n * groups / block).map(|_| f16::from_f32(random.normal() * 0.01)).collect();
            let factors = (0..n * groups).map(|_| (least + random.below((most - least + 1) as usize) as i32) as i8);
            let factors: Vec<i8> = factors.collect();
            all.0.extend_from_slice(&halves);
            all.1.extend_from_slice(&factors);
            Multiples::new(block, halves, factors).unwrap()
        };
        let scales = multiples(if has_offsets { [0, 63] } else { [-128, 127] }, &mut all[0]);
        let range = if negative { [-63, 0] } else { [0, 63] };
        let offsets = has_offsets.then(|| multiples(range, &mut all[1]));
        parts.push(stored(std::slice::from_ref(&q), codes, scales, offsets));
        all_q.push(q);
    }
    let codes = match form {
        Some(form) => Codes::Blocks { bytes: all_bytes.into(), form },
        None => Codes::Bytes { codes: all_bytes.into(), flip: 0 },
    };
    let [scales, offsets] = all.map(|(halves, factors)| Multiples::new(block, halves, factors).unwrap());
    let whole = stored(&all_q, codes, scales, has_offsets.then_some(offsets));
    (parts, whole)
}

#[test]
fn k_types_take_little_more_than_in_a_file_and_unpack_to_the_same_tensor() {
    let mut random = Random(51);
    for (name, bits) in K_TYPES {
        for (i, [n, k]) in [[64, 256], [1, 512], [300, 768], [257, 256], [16, 2560]].into_iter().enumerate() {
            for act in [Act::A16, Act::A8] {
                let (_, w) = k_type(&mut random, name, &[n], k, i % 2 == 0);
                let packed = match CudaWna16::pack_stored(&w, act) {
                    Err(error) if act == Act::A8 && name.contains("g16") => {
                        assert!(error.to_string().contains("a multiple of 32, for quantised"), "{error}");
                        continue;
                    }
                    packed => packed.unwrap(),
                };
                assert!(packed.atom().multiples, "{name}");
                assert_eq!(packed.unpack().unwrap(), w.to_qtensor().unwrap(), "{name} {n} × {k}");
                let weights = n.next_multiple_of(64) * k;
                assert_eq!(packed.atoms().len() as f64 * 8.0 / weights as f64, bits, "{name}");
                // Of the numbers alone the other form.
                assert!(!CudaWna16::pack(&w.to_qtensor().unwrap(), act).unwrap().atom().multiples);
            }
        }
    }
}

#[test]
fn other_multiples_lie_as_single_numbers() {
    let mut random = Random(52);
    let name = "w4a16-g32-float-sf32";
    let of = |w: &[&StoredTensor<'_>]| Atom::holding_all(w, Act::A16).unwrap();
    let (parts, _) = k_type(&mut random, name, &[40, 8], 512, true);
    assert!(of(&[&parts[0], &parts[1]]).multiples);
    // Beside a tensor of which nothing is known; factors of 7 bits or of both signs; halves of fewer columns than an atom has.
    let q = parts[1].to_qtensor().unwrap();
    assert!(!of(&[&parts[0], &(&q).into()]).multiples);
    for (block, factors) in [(8, [0, 64]), (8, [-1, 1]), (2, [0, 63])] {
        let halves = vec![f16::from_f32(0.5); 16 / block];
        let scales = Multiples::new(block, halves, [factors; 8].concat()).unwrap();
        let numbers = |of: &Multiples<'_>| (FloatData::F32(of.products().into()), Strides::of_outputs(16));
        let (offsets, strides) = numbers(&scales);
        let zeros = StoredZeros::Float(offsets, strides);
        let codes = Codes::Bytes { codes: vec![3; 512].into(), flip: 0 };
        let w = StoredTensor::new(parse(name).weight, [1, 512], codes, numbers(&scales), zeros, None).unwrap();
        let w = w.with_multiples(scales.clone(), Some(scales)).unwrap();
        assert!(!of(&[&w]).multiples, "{block} {factors:?}");
        assert_eq!(CudaWna16::pack_stored(&w, Act::A16).unwrap().unpack().unwrap(), w.to_qtensor().unwrap());
    }
    // Bytes that are not known to be of 6 bits.
    let (parts, _) = k_type(&mut random, "w8a16-g16-sf32", &[5], 256, true);
    let q = parts[0].to_qtensor().unwrap();
    let multiples = Multiples::new(16, vec![f16::from_f32(0.25); 5], vec![7; 80]).unwrap();
    let numbers = (FloatData::F32(multiples.products().into()), Strides::of_outputs(16));
    let codes = Codes::Bytes { codes: q.codes().to_vec().into(), flip: 0 };
    let w = StoredTensor::new(q.format(), [5, 256], codes, numbers, StoredZeros::Symmetric, None).unwrap();
    let w = w.with_multiples(multiples, None).unwrap();
    assert!(!of(&[&w]).multiples);
}

#[test]
fn random_k_types_hold_as_those_of_files() {
    for (name, bits) in K_TYPES {
        let format = parse(name).weight;
        let w = StoredTensor::random_k_type(format, [130, 768], 7).unwrap();
        assert_eq!(
            w.to_qtensor().unwrap(),
            StoredTensor::random_k_type(format, [130, 768], 7).unwrap().to_qtensor().unwrap()
        );
        let packed = CudaWna16::pack_stored(&w, Act::A16).unwrap();
        assert_eq!(packed.atoms().len() as f64 * 8.0 / (192.0 * 768.0), bits, "{name}");
        let values = dequantize(&w.to_qtensor().unwrap());
        let of = |power: i32| values.iter().map(|v| v.powi(power)).sum::<f64>() / values.len() as f64;
        let deviation = (of(2) * 768.0).sqrt();
        assert!(
            (0.8..1.25).contains(&deviation) && of(1).abs() < 0.2 / 768f64.sqrt(),
            "{name}: {deviation}, {}",
            of(1)
        );
    }
    let refused = |name: &str, k| StoredTensor::random_k_type(parse(name).weight, [2, k], 1).unwrap_err().to_string();
    assert!(refused("w4a16-g32-float-sf32", 128).contains("multiples of 256"));
    assert!(refused("w4a16-g128", 256).contains("scales in f32 of 32 columns"));
}
