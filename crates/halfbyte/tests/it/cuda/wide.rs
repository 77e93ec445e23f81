//! Scales in f32, float offsets, groups of 16 and codes of 3 bits, by every kernel that multiplies from codes on tensor cores, with exact
//! activations and with quantised ones.

use super::gpus;
use super::matmul::{MOST, ROWS};
use super::products::{Bench, TYPES, WIDE, check, reference_of};
use crate::data::{Random, parse, rounded, with_zeros_in_bytes};
use halfbyte::cuda::matmul::{self, Epilogue, KERNELS, Kernel};
use halfbyte::format::reference::Bound;
use halfbyte::kernel::Problem;
use halfbyte::{Act, Float, Format};

const SHAPES: [[usize; 2]; 6] = [[600, 1000], [65, 136], [1, 8], [320, 2568], [16, 128], [4096, 1536]];

const KERNEL_NAMES: [&str; 4] = ["wna16_sm90", "wna16_mma", "wna8_sm90", "wna8_mma"];

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

#[test]
fn offsets_f32_scales_and_groups_of_16_are_within_the_bound() {
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        for kernel in KERNELS.iter().filter(|kernel| KERNEL_NAMES.contains(&kernel.name)) {
            if !(kernel.serves)(gpu.caps().arch) {
                continue;
            }
            let rows = |problem: Problem| ROWS.iter().map(move |&m| Problem { m, ..problem });
            let mut instances: Vec<_> =
                problems(kernel).flat_map(rows).flat_map(|p| kernel.instances_of(&gpu.caps(), &p)).collect();
            instances.sort_by_key(ToString::to_string);
            instances.dedup_by_key(|instance| instance.to_string());
            gpu.prepare(&instances, |_| ()).unwrap();
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
