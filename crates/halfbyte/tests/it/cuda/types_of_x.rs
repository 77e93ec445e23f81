//! x of every type that a kernel takes, beside scales of every type, against the f64 reference.

use super::gpus;
use super::matmul::{MOST, ROWS};
use super::products::{Bench, TYPES, WIDE, formats_of_atoms, prepare, reference_of};
use crate::data::{Random, parse, rounded, with_zeros_in_bytes};
use halfbyte::Float;
use halfbyte::cuda::matmul::{self, KERNELS};
use halfbyte::kernel::Problem;

const SHAPES: [[usize; 2]; 4] = [[600, 1000], [65, 136], [1, 8], [320, 2568]];

/// All numbers of rows in some shape, of each format.
fn rows(format: usize, shape: usize) -> impl Iterator<Item = usize> {
    ROWS.iter().copied().enumerate().filter(move |(i, _)| (format + shape + i).is_multiple_of(3)).map(|(_, m)| m)
}

fn within_the_bound(name: &str, types: &[Float]) {
    let kernel = KERNELS.iter().find(|kernel| kernel.name == name).unwrap();
    for gpu in gpus().into_iter().filter(|gpu| (kernel.serves)(gpu.caps().arch)) {
        let (stream, caps) = (gpu.stream().unwrap(), gpu.caps());
        let types: Vec<_> = types.iter().copied().filter(|&x| x == Float::F32 || caps.arch.multiplies(x)).collect();
        let names: Vec<String> = formats_of_atoms().into_iter().chain(WIDE.map(String::from)).collect();
        let problems = |i: usize, s: usize, x| {
            let (format, [n, k]) = (parse(&names[i]), SHAPES[s]);
            let problem = move |m| Problem { format: Some(format), x, y: TYPES[i % 3], m, n, k };
            rows(i, s).map(problem).filter(|problem| kernel.supports(&caps, problem).is_ok()).collect::<Vec<_>>()
        };
        let cases = || (0..names.len()).flat_map(|i| (0..SHAPES.len()).map(move |s| (i, s)));
        let all = cases().flat_map(|(i, s)| types.iter().map(move |&x| (i, s, x)));
        prepare(&gpu, kernel, all.flat_map(|(i, s, x)| problems(i, s, x)));
        let (mut random, mut compared) = (Random(11), 0);
        for (i, s) in cases() {
            let (format, [n, k]) = (parse(&names[i]), SHAPES[s]);
            let act_order = (i + s) % 4 == 3;
            let w = with_zeros_in_bytes(random.qtensor(format.weight, [n, k], act_order));
            if kernel.holds(&(&w).into(), format.act).is_err() {
                continue;
            }
            let packed = matmul::pack_for(kernel, &gpu, &stream, &w, format.act).unwrap();
            for &x_type in &types {
                let x = rounded(&random.activations(MOST * k), x_type);
                let reference = reference_of(&x, MOST, &w, format.act);
                let bench = Bench::new(kernel, &gpu, &stream);
                for problem in problems(i, s, x_type) {
                    bench.check(&packed, &x, &problem, &reference, &format!("act-order {act_order}"));
                    compared += 1;
                }
            }
        }
        assert!(compared > 100, "{compared} products");
    }
}

#[test]
fn either_half_by_mma_sync() {
    within_the_bound("wna16_mma", &[Float::F16, Float::BF16]);
}

#[test]
fn f16_by_wgmma() {
    within_the_bound("wna16_sm90", &[Float::F16]);
}

#[test]
fn bf16_by_wgmma() {
    within_the_bound("wna16_sm90", &[Float::BF16]);
}

#[test]
fn f32_in_parts() {
    within_the_bound("wna16_split", &[Float::F32]);
}
