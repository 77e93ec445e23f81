//! What files have besides a format in the atoms of tensor cores: scales and offsets as multiples of halves, GGUF's K types; codes of 8 bits in 5,
//! Q5_0 and Q5_1; codes of a table.

use super::planes::narrow;
use super::*;
use halfbyte::layout::multiples::Multiples;
use std::slice;

/// Formats of Q4_K, Q5_K, Q3_K, Q6_K and Q2_K, with what a weight takes in memory, in bits.
pub const K_TYPES: [(&str, f64); 5] = [
    ("w4a16-g32-float-sf32", 4.625),
    ("w8a16-g32-float-sf32", 5.625),
    ("w3a16-g16-sf32", 3.625),
    ("w8a16-g16-sf32", 6.625),
    ("w2a16-g16-float-sf32", 2.75),
];

/// What else files have: formats of Q5_0 and Q5_1; of IQ4_NL, MXFP4, NVFP4, also with a scale of the whole, and IQ4_XS, whose codes are of a
/// table.
pub const OTHER_TYPES: [(&str, bool, f64); 7] = [
    ("w8a16-g32", false, 5.5),
    ("w8a16-g32-float", false, 6.0),
    ("w8a16-g32", true, 4.5),
    ("w8a16-g32-sbf16", true, 4.5),
    ("w8a16-g16", true, 5.0),
    ("w8a16-g16-sf32", true, 6.0),
    ("w8a16-g32-sf32", true, 5.0),
];

/// Tensors of a type of files one below the other, and all of them as one; k is a multiple of 256.
pub type OfFile = (Vec<StoredTensor<'static>>, StoredTensor<'static>);

/// Draws such tensors of some heights.
type Draw = Box<dyn Fn(&mut Random, &[usize], usize) -> OfFile + Send + Sync>;

/// A type of files: its name, what a weight takes in memory in bits, and what draws tensors.
pub type TypeOfFiles = (String, f64, Draw);

/// All of them.
pub fn types_of_files() -> Vec<TypeOfFiles> {
    let k_types = K_TYPES.into_iter().map(|(name, bits)| {
        let draw = move |random: &mut Random, heights: &[usize], k| {
            let negative = random.below(2) == 0;
            k_type(random, name, heights, k, negative)
        };
        (format!("K type {name}"), bits, Box::new(draw) as Draw)
    });
    let others = OTHER_TYPES.into_iter().map(|(name, tabled, bits)| {
        let draw = move |random: &mut Random, heights: &[usize], k| {
            let (format, shape) = (parse(name).weight, [heights.iter().sum(), k]);
            let (q, codes) = match tabled {
                false => narrow(random, format, 5, shape, false),
                true => {
                    let mut all = super::tables::tabled(random, format, shape);
                    all.swap_remove(random.below(all.len()))
                }
            };
            let whole = super::stored(&q, codes, random.below(2) == 0, false);
            let mut first = 0;
            let part = |&height: &usize| {
                first += height;
                let (rows, columns) = (first - height..first, 0..k);
                whole.cut(slice::from_ref(&rows), slice::from_ref(&columns)).unwrap()
            };
            (heights.iter().map(part).collect(), whole.clone())
        };
        let what = if tabled { "a table" } else { "5 bits" };
        (format!("{what} in {name}"), bits, Box::new(draw) as Box<_>)
    });
    k_types.chain(others).collect()
}

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
                let (q, codes) = narrow(random, format, if has_offsets { 5 } else { 6 }, [n, k], false);
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
        let most = if block == 16 { 15 } else { 63 };
        let scales = multiples(if has_offsets { [0, most] } else { [-128, 127] }, &mut all[0]);
        let range = if negative { [-most, 0] } else { [0, most] };
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

/// Symmetric codes of 8 bits that 5 bits hold, or that a table has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fewer {
    /// 112 to 143.
    FiveBits,
    /// Those of [`Atom::A_TABLE`].
    Table,
}

impl Fewer {
    /// A tensor with such codes in the place of its own.
    pub fn of(self, q: &QTensor) -> QTensor {
        let code = |&code: &u8| match self {
            Self::FiveBits => 112 + (code & 31),
            Self::Table => Atom::A_TABLE[usize::from(code & 15)],
        };
        let codes = q.codes().iter().map(code).collect();
        QTensor::new(q.format(), [q.n(), q.k()], codes, q.scales().to_vec(), q.zeros().clone(), None).unwrap()
    }

    /// As files have it; k is a multiple of 32.
    pub fn stored(self, q: &QTensor) -> StoredTensor<'static> {
        let (low, high, fields) = match self {
            Self::FiveBits => (Fields { at: 0, run: 16, bits: 4 }, Fields { at: 16, run: 4, bits: 1 }, 20),
            Self::Table => (Fields { at: 0, run: 16, bits: 4 }, Fields::NONE, 16),
        };
        let number = |&code: &u8| match self {
            Self::FiveBits => code - 112,
            Self::Table => Atom::A_TABLE.iter().position(|&of| of == code).unwrap() as u8,
        };
        let numbers: Vec<u8> = q.codes().iter().map(number).collect();
        let form = BlockForm { codes: 32, bytes: fields, low, high, add: 0, flip: 0, table: None, unpack: None };
        let bytes = super::in_blocks(&numbers, form).into();
        let form = match self {
            Self::FiveBits => BlockForm { add: 112, ..form },
            Self::Table => BlockForm { table: Some(Atom::A_TABLE), ..form },
        };
        super::stored(q, Codes::Blocks { bytes, form: form.into() }, false, false)
    }
}

#[test]
fn types_of_files_take_little_more_than_there_and_unpack_to_the_same_tensor() {
    let mut random = Random(51);
    for (name, bits, draw) in types_of_files() {
        for [n, k] in [[64, 256], [1, 512], [300, 768], [257, 256], [16, 2560]] {
            for act in [Act::A16, Act::A8] {
                let (parts, w) = draw(&mut random, &[n], k);
                let packed = CudaWna16::pack_stored(&w, act).unwrap();
                assert_eq!(packed.unpack().unwrap(), w.to_qtensor().unwrap(), "{name} {n} × {k}");
                assert_eq!(packed.atoms(), CudaWna16::pack_stored(&parts[0], act).unwrap().atoms(), "{name} {n} × {k}");
                let weights = n.next_multiple_of(64) * k;
                // Beside quantised activations all but K types lie in bytes.
                let bytes = act == Act::A8 && !packed.atom().multiples;
                let took = packed.atoms().len() as f64 * 8.0 / weights as f64;
                assert!(if bytes { packed.atom().bits == 8 && took > bits } else { took == bits }, "{name}: {took}");
                // Of the numbers alone the form of the format.
                let of_numbers = CudaWna16::pack(&w.to_qtensor().unwrap(), act).unwrap().atom();
                assert!(
                    !of_numbers.multiples && of_numbers.table.is_none() && of_numbers.bits == w.format().bits,
                    "{name}"
                );
            }
        }
    }
}

/// Beside a tensor of bytes, of another table or of more bits, all lie in bytes.
#[test]
fn codes_of_some_tensors_lie_as_those_of_the_widest() {
    let mut random = Random(53);
    let format = parse("w8a16-g32").weight;
    let mut tabled: Vec<_> = super::tables::tabled(&mut random, format, [8, 256]);
    let [(q, codes), (other_q, other_codes)] = [tabled.remove(1), tabled.remove(0)];
    let (five_q, five) = narrow(&mut random, format, 5, [8, 256], false);
    let (six_q, six) = narrow(&mut random, format, 6, [8, 256], false);
    let of = |(q, codes): (&QTensor, &Codes<'static>)| super::stored(q, codes.clone(), false, false);
    let [tabled, other, five, six] = [(&q, &codes), (&other_q, &other_codes), (&five_q, &five), (&six_q, &six)].map(of);
    let bytes = StoredTensor::from(&q);
    let held = |w: &[&StoredTensor<'_>]| {
        let atom = Atom::holding_all(w, Act::A16).unwrap();
        (atom.bits, atom.table.is_some())
    };
    assert_eq!(held(&[&tabled, &tabled]), (4, true));
    assert_eq!(held(&[&five, &five]), (5, false));
    // The other table's codes are around 128, and 5 bits hold them.
    assert_eq!(held(&[&other, &five]), (5, false));
    assert_eq!(held(&[&five, &other]), (5, false));
    for others in [&other, &five, &six, &bytes] {
        assert_eq!(held(&[&tabled, others]), (8, false));
        assert_eq!(held(&[others, &tabled]), (8, false));
    }
    assert_eq!(held(&[&six]), (8, false));
    assert_eq!(held(&[&five, &bytes]), (8, false));
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
    let w = StoredTensor::random_of_table(parse("w8a16-g32-sbf16").weight, [130, 768], 7).unwrap();
    let values = dequantize(&w.to_qtensor().unwrap());
    let deviation = (values.iter().map(|v| v * v).sum::<f64>() / values.len() as f64 * 768.0).sqrt();
    assert!((0.9..1.1).contains(&deviation), "{deviation}");
    assert_eq!(CudaWna16::pack_stored(&w, Act::A16).unwrap().atom().table, Some(Atom::A_TABLE));
    let of_table = |name: &str, k| StoredTensor::random_of_table(parse(name).weight, [2, k], 1).is_err();
    assert!(of_table("w8a16-g32", 48) && of_table("w4a16-g32", 64) && of_table("w8a16-g32-asym", 64));
    let refused = |name: &str, k| StoredTensor::random_k_type(parse(name).weight, [2, k], 1).unwrap_err().to_string();
    assert!(refused("w4a16-g32-float-sf32", 128).contains("multiples of 256"));
    assert!(refused("w4a16-g128", 256).contains("the format of Q2_K, Q3_K"));
}
