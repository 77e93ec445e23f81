//! Every GPU kernel × format × edge shape against the f64 reference, element by element.

use super::gpus;
use super::matmul::{MOST, ROWS};
use super::products::{Bench, TYPES, prepare, reference_of};
use crate::data::{Random, parse, rounded, with_zeros_in_bytes};
use halfbyte::cuda::matmul::{self, KERNELS};
use halfbyte::format::FORMATS;
use halfbyte::kernel::Problem;

const SHAPES: &[[usize; 2]] = &[[1, 1], [16, 128], [17, 33], [48, 256], [130, 300], [37, 20], [5, 0], [80, 129]];

/// One kernel, where it serves. Each has a test, so that they can run in processes side by side: together they take many minutes.
fn within_the_bound(name: &str) {
    let kernel = KERNELS.iter().find(|kernel| kernel.name == name).unwrap();
    for gpu in gpus().into_iter().filter(|gpu| (kernel.serves)(gpu.caps().arch)) {
        let (stream, caps) = (gpu.stream().unwrap(), gpu.caps());
        let cases =
            || FORMATS.iter().enumerate().flat_map(|(i, format)| (0..SHAPES.len()).map(move |s| (i, format, s)));
        let problem = |i: usize, s: usize, x, (j, m): (usize, usize)| {
            let [n, k] = SHAPES[s];
            Problem { format: Some(parse(FORMATS[i])), x, y: TYPES[(i + j + s) % 3], m, n, k }
        };
        let rows = || ROWS.iter().copied().enumerate();
        let all = cases()
            .flat_map(|(i, _, s)| TYPES.into_iter().flat_map(move |x| rows().map(move |row| problem(i, s, x, row))));
        prepare(&gpu, kernel, all.filter(|problem| kernel.supports(&caps, problem).is_ok()));
        let (mut random, mut compared) = (Random(1), 0);
        for (i, format, s) in cases() {
            let (format, [n, k]) = (parse(format), SHAPES[s]);
            let act_order = (i + s) % 3 == 0;
            let mut w = random.qtensor(format.weight, [n, k], act_order);
            if kernel.holds(&(&w).into(), format.act).is_err() {
                w = with_zeros_in_bytes(w);
            }
            for x_type in TYPES {
                let one = Problem { format: Some(format), x: x_type, y: x_type, m: 1, n, k };
                if kernel.supports(&caps, &one).is_err() {
                    continue;
                }
                let packed = matmul::pack_for(kernel, &gpu, &stream, &w, format.act).unwrap();
                let x = rounded(&random.activations(MOST * k), x_type);
                let reference = reference_of(&x, MOST, &w, format.act);
                let bench = Bench::new(kernel, &gpu, &stream);
                for row in rows() {
                    let problem = problem(i, s, x_type, row);
                    bench.check(&packed, &x, &problem, &reference, &format!("act-order {act_order}"));
                    compared += 1;
                }
            }
        }
        assert!(compared > 0, "no case reached {name}");
    }
}

macro_rules! kernels {
    ($($name:ident),+) => {
        $(#[test]
        fn $name() {
            within_the_bound(stringify!($name));
        })+

        #[test]
        fn each_kernel_that_packs_weights_has_a_test() {
            let tested = [$(stringify!($name)),+];
            let packs = |kernel: &&matmul::Kernel| kernel.packs;
            assert!(KERNELS.iter().filter(packs).all(|kernel| tested.contains(&kernel.name)), "{tested:?}");
        }
    };
}
kernels!(wna16_sm90, wna16_mma, wna16_split, wna8_sm90, wna8_mma, simt);
