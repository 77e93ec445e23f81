//! Scales in f32, float offsets, groups of 16 and codes of 3 bits, by every kernel that multiplies from codes on tensor cores, with exact
//! activations and with quantised ones.

use super::gpus;
use super::matmul::{MOST, ROWS};
use super::products::{Bench, TYPES, WIDE, check, prepare, reference_of};
use crate::data::{Random, parse, rounded, with_zeros_in_bytes};
use halfbyte::cuda::matmul::{self, Epilogue, KERNELS, Kernel};
use halfbyte::format::Zeros;
use halfbyte::format::reference::Bound;
use halfbyte::kernel::Problem;
use halfbyte::{Act, Float, Format, QTensor};

const SHAPES: [[usize; 2]; 6] = [[600, 1000], [65, 136], [1, 8], [320, 2568], [16, 128], [4096, 1536]];

/// Formats and shapes, with a type of x and of y for each, as far as the kernel takes them.
fn problems(kernel: &'static Kernel) -> impl Iterator<Item = Problem> {
    let cases =
        WIDE.into_iter().enumerate().flat_map(|(i, name)| SHAPES.into_iter().enumerate().map(move |s| (i, name, s)));
    cases.map(move |(i, name, (s, [n, k]))| {
        let y = if kernel.name.ends_with("sm90") { TYPES[(i + s) % 3] } else { Float::F32 };
        let act = match kernel.name {
            "wna16_sm90" | "wna16_mma" => Act::A16,
            _ => [Act::A8, Act::A8Asym][(i / 2 + s) % 2],
        };
        // Half scales and x are of one type on Hopper.
        let x = match parse(name).weight.scale {
            Float::F32 => TYPES[(i + s) % 2],
            scale => scale,
        };
        Problem { format: Some(Format { act, ..parse(name) }), x, y, m: 1, n, k }
    })
}

/// Of a kernel: the reference takes minutes, so that each has a test of its own.
fn products_are_within_the_bound(name: &str) {
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        for kernel in KERNELS.iter().filter(|kernel| kernel.name == name) {
            if !(kernel.serves)(gpu.caps().arch) {
                continue;
            }
            let rows = |problem: Problem| ROWS.iter().map(move |&m| Problem { m, ..problem });
            prepare(&gpu, kernel, problems(kernel).flat_map(rows));
            let (mut random, mut served) = (Random(21), 0);
            for (i, problem) in problems(kernel).enumerate() {
                let Problem { format: Some(format), x: x_type, y: out, n, k, .. } = problem else { continue };
                if kernel.supports(&gpu.caps(), &problem).is_err() {
                    continue;
                }
                let w = with_zeros_in_bytes(random.qtensor(format.weight, [n, k], i % 4 == 3));
                let packed = matmul::pack_for(kernel, &gpu, &stream, &w, format.act).unwrap();
                let x = rounded(&random.activations(MOST * k), x_type);
                let reference = reference_of(&x, MOST, &w, format.act);
                for batch_invariant in [false, true].into_iter().take(1 + usize::from(kernel.batch_invariant)) {
                    let bench = Bench { batch_invariant, ..Bench::new(kernel, &gpu, &stream) };
                    for &m in ROWS {
                        let y = bench.forward(&packed, &x[..m * k], [x_type, out], m, Epilogue::default());
                        let what = format!("{} {} m={m} {batch_invariant}", kernel.name, problem);
                        let problem = Problem { m, ..problem };
                        let bound =
                            if batch_invariant { Bound::new(out, k) } else { kernel.bound(&gpu.caps(), &problem) };
                        check(&y, &reference, bound, &what);
                        served += 1;
                    }
                }
            }
            assert!(served > ROWS.len() * if kernel.batch_invariant { 120 } else { 60 }, "{}: {served}", kernel.name);
        }
    }
}

#[test]
fn products_of_floats_by_wgmma_are_within_the_bound() {
    products_are_within_the_bound("wna16_sm90");
}

#[test]
fn products_of_floats_by_mma_sync_are_within_the_bound() {
    products_are_within_the_bound("wna16_mma");
}

#[test]
fn products_of_codes_by_wgmma_are_within_the_bound() {
    products_are_within_the_bound("wna8_sm90");
}

#[test]
fn products_of_codes_by_mma_sync_are_within_the_bound() {
    products_are_within_the_bound("wna8_mma");
}

/// With offsets that nearly cancel a code's part, for a weight that meets far the greatest x: both parts are then hundreds of times the
/// sums around them.
#[test]
fn offsets_that_cancel_codes_are_within_the_bound() {
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let kernels: Vec<_> = KERNELS.iter().filter(|kernel| (kernel.serves)(gpu.caps().arch)).collect();
        let (mut random, mut served) = (Random(23), 0);
        for (i, name) in WIDE.into_iter().filter(|name| name.contains("float")).enumerate() {
            let format = parse(name);
            let n = 200;
            for (s, k) in [32, 64, 128, 512].into_iter().enumerate() {
                let w = random.qtensor(format.weight, [n, k], false);
                let Zeros::Float(offsets) = w.zeros() else { panic!("{name} has no offsets") };
                let (column, mut offsets) = (random.below(k), offsets.clone());
                let (group, groups) = (w.group_of(column), w.groups());
                for row in 0..n {
                    let at = row * groups + group;
                    offsets[at] = format.weight.scale.round(-w.scales()[at] * f32::from(w.codes()[row * k + column]));
                }
                let zeros = Zeros::Float(offsets);
                let w = QTensor::new(w.format(), [n, k], w.codes().to_vec(), w.scales().to_vec(), zeros, None).unwrap();
                let x_type = match format.weight.scale {
                    Float::F32 => TYPES[(i + s) % 2],
                    scale => scale,
                };
                let mut x: Vec<f32> = (0..MOST * k).map(|_| random.normal()).collect();
                x.chunks_mut(k).for_each(|row| row[column] *= 1000.0);
                let x = rounded(&x, x_type);
                let reference = reference_of(&x, MOST, &w, Act::A16);
                for kernel in &kernels {
                    for &m in ROWS {
                        let problem = Problem { format: Some(format), x: x_type, y: Float::F32, m, n, k };
                        if kernel.supports(&gpu.caps(), &problem).is_err() {
                            continue;
                        }
                        let packed = matmul::pack_for(kernel, &gpu, &stream, &w, Act::A16).unwrap();
                        let bench = Bench::new(kernel, &gpu, &stream);
                        let y = bench.forward(&packed, &x[..m * k], [x_type, Float::F32], m, Epilogue::default());
                        let what = format!("{} {problem}", kernel.name);
                        check(&y, &reference, kernel.bound(&gpu.caps(), &problem), &what);
                        served += 1;
                    }
                }
            }
        }
        assert!(served > 100, "{served}");
    }
}
