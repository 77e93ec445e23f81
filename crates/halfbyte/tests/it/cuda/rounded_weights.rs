//! Weights that products may round to the type of x where y is finer.

use super::products::{caps, check, reference_of};
use super::queues;
use crate::data::{Random, parse, rounded};
use crate::ops::Typed;
use halfbyte::cuda::Caps;
use halfbyte::cuda::matmul::select;
use halfbyte::kernel::Problem;
use halfbyte::{Float, Linear, QTensor, Weight, Zeros};

/// In layouts for tensor cores, with scales of groups in f16, in f32 and with offsets, and in the plain layout.
const FORMATS: [&str; 14] = [
    "w4a16-g32",
    "w4a16-g64-asym",
    "w4a16-g128",
    "w8a16-g32",
    "w4a16",
    "w4a16-g32-float-sf32",
    "w8a16-g16-sf32",
    "w3a16-g32",
    "w2a16-g32",
    "w4a16-g20",
    "w4a16-g64-float",
    "w8a16-g32-float-sf32",
    "w2a16-g32-float-sbf16",
    "w4a16-g128-sbf16",
];

const ROWS: [usize; 9] = [1, 7, 64, 70, 128, 129, 200, 513, 1100];

#[test]
fn products_are_within_the_bound_whether_weights_are_rounded_or_not() {
    const MOST: usize = 1100;
    for cuda in queues() {
        let mut random = Random(131);
        let (mut rounding, mut exact) = (0, 0);
        for (i, name) in FORMATS.into_iter().enumerate() {
            let (format, [n, k]) = (parse(name), [[200, 1280], [1000, 640], [70, 2560]][i % 3]);
            let w = random.qtensor(format.weight, [n, k], i % 4 == 1);
            let mut linear = Linear::for_inputs(&cuda, Weight::Quantized(&w, format.act), Float::F16).unwrap();
            let x = rounded(&random.activations(MOST * k), Float::F16);
            let reference = reference_of(&x, MOST, &w, format.act);
            for allowed in [false, true] {
                if allowed {
                    assert!(linear.allow_rounded_weights().unwrap(), "{name}");
                }
                for m in ROWS {
                    let mut y = vec![0.0f32; m * n];
                    linear.forward(&cuda, Typed::new(&x[..m * k], Float::F16).get(), m, &mut y).unwrap();
                    let bound = linear.bound(&cuda, m, Float::F16, Float::F32).unwrap();
                    assert!(allowed || bound.rounded_weights.is_none(), "{name}: rounds what it may not");
                    *if bound.rounded_weights.is_some() { &mut rounding } else { &mut exact } += 1;
                    let kernel = linear.kernel(&cuda, m, Float::F16, Float::F32).unwrap();
                    check(&y, &reference, bound, &format!("{name} m={m}, {kernel}, rounding allowed: {allowed}"));
                }
            }
        }
        assert!(exact >= FORMATS.len() * ROWS.len() && rounding > 0, "{exact} exact products, {rounding} others");
    }
}

/// One scale or offset beyond what f16 holds, wherever it lies, and nothing is rounded; one just within, and it may be.
#[test]
fn weights_beyond_f16_are_not_rounded() {
    for cuda in queues() {
        let mut random = Random(132);
        for name in FORMATS {
            let (format, [n, k]) = (parse(name), [130, 1280]);
            let w = random.qtensor(format.weight, [n, k], false);
            let (scales, codes) = (w.scales().to_vec(), w.codes().to_vec());
            let zeros = w.zeros().clone();
            let at = random.below(scales.len());
            for (largest, allowed) in [(60_000.0, false), (60.0, true), (f32::NAN, false)] {
                let (mut scales, mut zeros) = (scales.clone(), zeros.clone());
                match &mut zeros {
                    Zeros::Float(offsets) if random.below(2) == 0 => {
                        offsets[at] = if allowed { -60.0 } else { -66_000.0 }
                    }
                    _ => scales[at] = largest,
                }
                let Ok(w) = QTensor::new(format.weight, [n, k], codes.clone(), scales, zeros, None) else { continue };
                let mut linear = Linear::for_inputs(&cuda, Weight::Quantized(&w, format.act), Float::F16).unwrap();
                assert_eq!(linear.allow_rounded_weights().unwrap(), allowed, "{name}, {largest} at {at}");
            }
        }
    }
}

/// Without a device: what is chosen for many rows where weights may be rounded, and where they may not.
#[test]
fn the_choice_follows_what_the_weight_allows() {
    let exact = Caps { cublaslt: true, ..caps("sm_90a") };
    let rounding = Caps { rounded_weights: true, ..exact };
    let of = |caps: &Caps, name: &str, m, layout| {
        let problem = Problem { format: Some(parse(name)), x: Float::F16, y: Float::F32, m, n: 4096, k: 4096 };
        let kernel = select(caps, &problem, Some(layout)).unwrap();
        (kernel.name, kernel.bound(caps, &problem).rounded_weights.is_some())
    };
    let tensor_cores = |caps, name, m| of(caps, name, m, "cuda_wna16");
    assert_eq!(tensor_cores(&exact, "w4a16-g32", 1024), ("wna16_sm90", false));
    assert_eq!(tensor_cores(&rounding, "w4a16-g32", 1024), ("wna16_sm90", true));
    assert_eq!(tensor_cores(&rounding, "w4a16-g32", 128), ("wna16_sm90", true));
    assert_eq!(tensor_cores(&rounding, "w4a16-g32", 64), ("wna16_sm90", false));
    assert_eq!(tensor_cores(&rounding, "w4a16-g128", 128), ("wna16_sm90", false));
    assert_eq!(tensor_cores(&rounding, "w4a16", 1024), ("wna16_sm90", false));
    // Scales in f32 and offsets apply to weights too; before Hopper weights become floats first.
    let q4_k = "w4a16-g32-float-sf32";
    assert_eq!(tensor_cores(&exact, q4_k, 1024), ("wna16_sm90", false));
    assert_eq!(tensor_cores(&rounding, q4_k, 64), ("wna16_sm90", false));
    assert_eq!(tensor_cores(&rounding, q4_k, 256), ("wna16_sm90", true));
    let exact_on_ampere = Caps { cublaslt: true, ..caps("sm_80") };
    let rounding_on_ampere = Caps { rounded_weights: true, ..exact_on_ampere };
    assert_eq!(tensor_cores(&rounding_on_ampere, q4_k, 256), ("wna16_mma", false));
    assert_eq!(tensor_cores(&rounding_on_ampere, q4_k, 512), ("dequantize_cublaslt", true));
    assert_eq!(tensor_cores(&exact_on_ampere, q4_k, 512), ("wna16_mma", false));
    // Nothing else multiplies these on tensor cores.
    assert_eq!(of(&exact, "w4a16-g20", 64, "cuda_plain"), ("simt", false));
    assert_eq!(of(&rounding, "w4a16-g20", 64, "cuda_plain"), ("dequantize_cublaslt", true));
}
