//! Implicit products, whatever their plan: on Hopper of pixels, of rows of windows, of quantised activations; on all processors of
//! groups and images of every type.

use super::convolutions::{Bench, Images, TYPES, check, implicit_cases, kernel, prepare};
use super::gpus;
use crate::conv::{LAYOUTS, cases};
use crate::data::{Random, parse, rounded, with_zeros_in_bytes};
use halfbyte::conv::{Conv2dShape, Geometry, Layout2d};
use halfbyte::cuda::conv::{Plan, Problem, Weights};
use halfbyte::cuda::matmul::Epilogue;
use halfbyte::format::reference::{self, Bound};
use halfbyte::{Float, Floats};

const IMPLICIT_FORMATS: [&str; 13] = [
    "w4a16",
    "w8a16",
    "w4a16-asym",
    "w8a16-asym-sbf16",
    "w8a16-tensor",
    "w4a16-g64",
    "w4a16-g64-asym-sbf16",
    "w8a16-g32",
    "w4a16-g32-asym",
    "w8a16-g64-asym",
    "w4a16-sbf16",
    "w2a16-g64",
    "w3a16-asym",
];

#[test]
fn implicit_products_are_within_the_bound_whatever_their_plan() {
    let implicit = kernel("implicit_gemm_sm90");
    for gpu in gpus().into_iter().filter(|gpu| (implicit.serves)(gpu.caps().arch)) {
        let stream = gpu.stream().unwrap();
        let bench = Bench { gpu: &gpu, stream: &stream, kernel: implicit };
        let mut random = Random(62);
        let (caps, layout) = (gpu.caps(), "cuda_wna16");
        let problem_of = |g: usize, i: usize, shape: Conv2dShape| {
            let format = parse(IMPLICIT_FORMATS[i]);
            let x = format.weight.scale;
            let y = if (g + i).is_multiple_of(2) { x } else { TYPES[(g + i) / 2 % 3] };
            Problem { format: Some(format), shape, x, y, layouts: [Layout2d::Nhwc; 2], packed: layout }
        };
        // Some here, others for the next format.
        let plans_of = |g: usize, i: usize, problem: &Problem| {
            let plans = implicit.plans(&caps, problem);
            plans.into_iter().skip((g + i) % 9).step_by(9).collect::<Vec<_>>()
        };
        let all = implicit_cases().into_iter().enumerate().flat_map(|(g, (geometry, batch, size))| {
            let shape = Conv2dShape::new(geometry, batch, size).unwrap();
            (0..IMPLICIT_FORMATS.len()).map(move |i| (g, i, shape))
        });
        let needed = all.flat_map(|(g, i, shape)| {
            let problem = problem_of(g, i, shape);
            let chosen = implicit.plan(&caps, &problem).unwrap();
            plans_of(g, i, &problem).iter().chain([&chosen]).flat_map(Plan::instances).collect::<Vec<_>>()
        });
        prepare(&gpu, needed.chain((kernel("simt").instances)()));
        for (g, (geometry, batch, size)) in implicit_cases().into_iter().enumerate() {
            let shape = Conv2dShape::new(geometry, batch, size).unwrap();
            for (i, name) in IMPLICIT_FORMATS.into_iter().enumerate() {
                let format = parse(name);
                let w = with_zeros_in_bytes(random.qtensor(format.weight, [geometry.co, geometry.k()], false));
                let Problem { x: x_type, y: y_type, .. } = problem_of(g, i, shape);
                let x = rounded(&random.activations(shape.x_len()), x_type);
                let reference = reference::conv2d_linear(&x, &w, format.act, &shape).unwrap();
                let images = Images { shape: &shape, x: &x, types: [x_type, y_type], layouts: [Layout2d::Nhwc; 2] };
                let w = Weights::pack(&gpu, &stream, &w, format.act, geometry, x_type).unwrap();
                assert_eq!(w.layout(), layout, "{name} {geometry:?}");
                let problem = images.problem(&w);
                let chosen = Plan::of(&caps, &problem).unwrap();
                assert_eq!(chosen.kernel().name, "implicit_gemm_sm90", "{problem}");
                let y = bench.forward_by(&chosen, &w, &images, Epilogue::default());
                check(&y, &reference, chosen.bound(), &format!("{chosen:?}"));
                // The plain kernel reads the same weights.
                let plain = Bench { kernel: kernel("simt"), ..bench };
                let y = plain.forward(&w, &images, Epilogue::default());
                check(&y, &reference, Bound::new(y_type, geometry.k()), &format!("plain: {problem}"));
                for plan in plans_of(g, i, &problem) {
                    let y = bench.forward_by(&plan, &w, &images, Epilogue::default());
                    check(&y, &reference, plan.bound(), &format!("{plan:?}"));
                }
            }
        }
    }
}

const QUANTIZED_FORMATS: [&str; 11] = [
    "w8a8",
    "w4a8",
    "w8a8-xasym-sbf16",
    "w4a8-asym",
    "w8a8-asym-xasym",
    "w4a8-g64",
    "w8a8-g64-asym",
    "w4a8-g32",
    "w4a8-g32-asym-xasym",
    "w8a8-tensor",
    "w2a8-g64",
];

#[test]
fn implicit_products_of_quantised_activations_are_within_the_bound_whatever_their_plan() {
    let implicit = kernel("implicit_gemm_a8_sm90");
    for gpu in gpus().into_iter().filter(|gpu| (implicit.serves)(gpu.caps().arch)) {
        let stream = gpu.stream().unwrap();
        let bench = Bench { gpu: &gpu, stream: &stream, kernel: implicit };
        let (mut random, mut served, caps) = (Random(69), [0; 2], gpu.caps());
        let new = Geometry::new;
        // Several boxes of channels that share a scale, and channels that are filled up to one box and to several.
        let further = [
            (Geometry { padding: [1; 4], ..new(256, 100, [3, 2]) }, 2, [8, 7]),
            (Geometry { padding: [1; 4], ..new(130, 64, [2, 3]) }, 1, [6, 7]),
            (Geometry { padding: [1; 4], stride: [2, 1], ..new(96, 72, [3, 3]) }, 2, [7, 6]),
            (Geometry { padding: [2; 4], dilation: [2, 2], ..new(3, 64, [3, 3]) }, 3, [9, 13]),
        ];
        let mut all = Vec::new();
        let geometries = implicit_cases().into_iter().chain(cases()).chain(further);
        for (g, (geometry, batch, size)) in geometries.enumerate() {
            let shape = Conv2dShape::new(geometry, batch, size).unwrap();
            for (i, format) in QUANTIZED_FORMATS.into_iter().map(parse).enumerate() {
                if geometry.scale_channels(format.weight.group).is_err() {
                    continue;
                }
                let [x, y] = [TYPES[(g + i) % 3], TYPES[(g + i) / 3 % 3]];
                let layouts = [Layout2d::Nhwc; 2];
                let w = with_zeros_in_bytes(random.qtensor(format.weight, [geometry.co, geometry.k()], false));
                let packed = Weights::pack(&gpu, &stream, &w, format.act, geometry, x).unwrap();
                let problem = Problem { format: Some(format), shape, x, y, layouts, packed: packed.layout() };
                if implicit.supports(&caps, &problem).is_ok() {
                    all.push((problem, w, packed));
                }
            }
        }
        let needed = all.iter().flat_map(|(problem, _, _)| {
            let plans = implicit.plans(&caps, problem).into_iter();
            plans.flat_map(|plan| plan.instances())
        });
        prepare(&gpu, needed.chain((kernel("simt").instances)()));
        for (problem, w, packed) in &all {
            let (shape, format, layout) = (&problem.shape, problem.format.unwrap(), packed.layout());
            let x = rounded(&random.activations(shape.x_len()), problem.x);
            let reference = reference::conv2d_linear(&x, w, format.act, shape).unwrap();
            let images = Images { shape, x: &x, types: [problem.x, problem.y], layouts: problem.layouts };
            assert_eq!(images.problem(packed), *problem);
            let selected = Plan::of(&caps, problem).unwrap().kernel().name;
            let expected = if shape.is_product() { "gemm_1x1" } else { "implicit_gemm_a8_sm90" };
            assert_eq!(selected, expected, "{problem}");
            let bound = implicit.plan(&caps, problem).unwrap().bound();
            check(&bench.forward(packed, &images, Epilogue::default()), &reference, bound, &problem.to_string());
            // The plain kernel reads the same weights.
            let plain = Bench { kernel: kernel("simt"), ..bench };
            check(
                &plain.forward(packed, &images, Epilogue::default()),
                &reference,
                bound,
                &format!("plain: {problem}"),
            );
            for plan in implicit.plans(&caps, problem) {
                let y = bench.forward_by(&plan, packed, &images, Epilogue::default());
                check(&y, &reference, bound, &format!("{plan:?}"));
                served[usize::from(layout == "cuda_wna16_filled")] += 1;
            }
        }
        assert!(served[0] >= 200 && served[1] >= 100, "{served:?} plans with their own columns, and filled up");
    }
}

#[test]
fn implicit_products_of_rows_of_windows_are_within_the_bound_whatever_their_plan() {
    let implicit = kernel("implicit_gemm_rows_sm90");
    let formats = ["w4a16", "w8a16", "w8a16-asym-sbf16", "w4a16-asym", "w8a16-tensor", "w4a16-g32", "w8a16-g16"];
    for gpu in gpus().into_iter().filter(|gpu| (implicit.serves)(gpu.caps().arch)) {
        let stream = gpu.stream().unwrap();
        let bench = Bench { gpu: &gpu, stream: &stream, kernel: implicit };
        let (mut random, mut served, caps) = (Random(70), [0; 2], gpu.caps());
        let new = Geometry::new;
        // Windows of more than a unit, of 96 columns a row, and beyond the rows' end; the patches of a transformer.
        let further = [
            (Geometry { padding: [1; 4], ..new(32, 150, [3, 3]) }, 2, [10, 9]),
            (Geometry { stride: [2, 2], padding: [3; 4], ..new(3, 64, [7, 7]) }, 2, [30, 34]),
            (Geometry { stride: [8, 8], ..new(3, 72, [8, 8]) }, 2, [24, 32]),
            (Geometry { stride: [1, 3], padding: [2, 5, 0, 1], dilation: [3, 2], ..new(5, 65, [3, 2]) }, 2, [9, 12]),
        ];
        let geometries = cases().into_iter().chain(implicit_cases()).chain(further);
        let mut all = Vec::new();
        for (g, (geometry, batch, size)) in geometries.enumerate() {
            let shape = Conv2dShape::new(geometry, batch, size).unwrap();
            for (i, format) in formats.into_iter().map(parse).enumerate() {
                if geometry.scale_channels(format.weight.group).is_err() {
                    continue;
                }
                let w = with_zeros_in_bytes(random.qtensor(format.weight, [geometry.co, geometry.k()], false));
                let x = format.weight.scale;
                let packed = Weights::pack(&gpu, &stream, &w, format.act, geometry, x).unwrap();
                let y = if i % 2 == 0 { x } else { TYPES[(g + i) % 3] };
                let layouts = [LAYOUTS[(g + i) % 2], Layout2d::Nhwc];
                let problem = Problem { format: Some(format), shape, x, y, layouts, packed: packed.layout() };
                if implicit.supports(&caps, &problem).is_ok() {
                    all.push((problem, w, packed));
                }
            }
        }
        // Some here, others for the next format.
        let plans_of = |turn: usize, problem: &Problem| {
            let plans = implicit.plans(&caps, problem);
            plans.into_iter().skip(turn % 5).step_by(5).collect::<Vec<_>>()
        };
        let needed = all.iter().enumerate().flat_map(|(turn, (problem, _, _))| {
            let chosen = implicit.plan(&caps, problem).unwrap();
            plans_of(turn, problem).iter().chain([&chosen]).flat_map(Plan::instances).collect::<Vec<_>>()
        });
        prepare(&gpu, needed.chain((kernel("simt").instances)()));
        for (turn, (problem, w, packed)) in all.iter().enumerate() {
            let (shape, format) = (&problem.shape, problem.format.unwrap());
            let filled = packed.layout() == "cuda_wna16_filled";
            served[usize::from(filled)] += 1;
            if filled {
                let selected = Plan::of(&caps, problem).unwrap().kernel().name;
                assert_eq!(selected, "implicit_gemm_rows_sm90", "{problem}");
            }
            let x = rounded(&random.activations(shape.x_len()), problem.x);
            let reference = reference::conv2d_linear(&x, w, format.act, shape).unwrap();
            let images = Images { shape, x: &x, types: [problem.x, problem.y], layouts: problem.layouts };
            let bound = implicit.plan(&caps, problem).unwrap().bound();
            check(&bench.forward(packed, &images, Epilogue::default()), &reference, bound, &problem.to_string());
            // The plain kernel reads the same weights.
            let plain = Bench { kernel: kernel("simt"), ..bench };
            let exact = Bound::new(problem.y, shape.geometry().k());
            check(
                &plain.forward(packed, &images, Epilogue::default()),
                &reference,
                exact,
                &format!("plain: {problem}"),
            );
            for plan in plans_of(turn, problem) {
                let y = bench.forward_by(&plan, packed, &images, Epilogue::default());
                check(&y, &reference, plan.bound(), &format!("{plan:?}"));
            }
        }
        assert!(served[0] >= 20 && served[1] >= 40, "{served:?} weights with their own columns, and filled up");
    }
}

#[test]
fn many_pixels_go_through_whole_rounds_and_cut_tiles() {
    let implicit = kernel("implicit_gemm_sm90");
    for gpu in gpus().into_iter().filter(|gpu| (implicit.serves)(gpu.caps().arch)) {
        let stream = gpu.stream().unwrap();
        let mut random = Random(63);
        // One output of each strip is looked at: the reference in f64 takes its time.
        for (geometry, batch, size) in [
            (Geometry { padding: [1; 4], ..Geometry::new(64, 128, [3, 3]) }, 16, [56, 56]),
            (Geometry { padding: [1; 4], stride: [2, 2], ..Geometry::new(128, 256, [3, 3]) }, 9, [29, 31]),
        ] {
            let shape = Conv2dShape::new(geometry, batch, size).unwrap();
            let format = parse("w4a16");
            let w = random.qtensor(format.weight, [geometry.co, geometry.k()], false);
            let x = rounded(&random.activations(shape.x_len()), Float::F16);
            let images = Images { shape: &shape, x: &x, types: [Float::F16; 2], layouts: [Layout2d::Nhwc; 2] };
            let packed = Weights::pack(&gpu, &stream, &w, format.act, geometry, Float::F16).unwrap();
            let plain = Bench { gpu: &gpu, stream: &stream, kernel: kernel("simt") };
            let want = plain.forward(&packed, &images, Epilogue::default());
            // Sums of absolute values, as |x| and |w| give them.
            let absolute = x.iter().map(|v| v.abs()).collect::<Vec<_>>();
            let values: Vec<f32> = reference::dequantize(&w).iter().map(|v| v.abs() as f32).collect();
            let dense = Weights::dense(&gpu, &stream, Floats::F32(&values), geometry).unwrap();
            let sums = Images { x: &absolute, types: [Float::F32; 2], ..images };
            let magnitude = plain.forward(&dense, &sums, Epilogue::default());
            let plans = implicit.plans(&gpu.caps(), &images.problem(&packed));
            prepare(&gpu, plans.iter().flat_map(Plan::instances));
            for ends in [" whole", " cut"] {
                assert!(plans.iter().any(|plan| plan.to_string().ends_with(ends)), "{plans:?}");
            }
            for plan in plans {
                let y = plain.forward_by(&plan, &packed, &images, Epilogue::default());
                for (i, (&y, &want)) in y.iter().zip(&want).enumerate() {
                    let allowed = 2.0 * Bound::new(Float::F16, geometry.k()).allowed(f64::from(magnitude[i]) * 1.001);
                    let error = f64::from((y - want).abs());
                    assert!(error <= allowed, "{plan:?}: element {i} is {y}, plain {want}");
                }
            }
        }
    }
}

/// Groups of many channels and few, of a whole number of pieces and not, of outputs that fill strips and do not.
fn grouped_cases() -> Vec<(Geometry, usize, [usize; 2])> {
    let of =
        |[ci, co, groups]: [usize; 3], kernel| Geometry { groups, padding: [1; 4], ..Geometry::new(ci, co, kernel) };
    vec![
        (of([64, 64, 2], [3, 3]), 2, [9, 8]),
        (of([128, 192, 4], [3, 3]), 1, [7, 7]),
        (of([48, 40, 2], [3, 3]), 2, [6, 5]),
        (of([60, 36, 3], [1, 3]), 1, [5, 6]),
        (Geometry { stride: [2, 1], dilation: [1, 2], ..of([64, 512, 2], [3, 2]) }, 1, [8, 9]),
        (of([128, 260, 2], [1, 1]), 1, [12, 11]),
        (Geometry { padding: [3, 2, 1, 0], ..of([10, 66, 1], [5, 5]) }, 1, [9, 7]),
        (of([32, 384, 1], [3, 3]), 1, [20, 21]),
    ]
}

#[test]
fn implicit_products_by_mma_sync_are_within_the_bound_whatever_their_plan() {
    let implicit = kernel("implicit_gemm_mma");
    let formats = [
        "w4a16",
        "w8a16-asym",
        "w4a16-asym-sbf16",
        "w4a16-g32",
        "w8a16-g16-asym",
        "w3a16-g32",
        "w2a16-g16-float",
        "w4a16-g64-float-sf32",
        "w8a16-sf32",
        "w8a8",
        "w4a8-g32-asym-xasym",
        "w4a8-g32-si8",
        "w8a16-tensor",
    ];
    for gpu in gpus().into_iter().filter(|gpu| (implicit.serves)(gpu.caps().arch)) {
        let (stream, caps) = (gpu.stream().unwrap(), gpu.caps());
        let bench = Bench { gpu: &gpu, stream: &stream, kernel: implicit };
        let plain = Bench { kernel: kernel("simt"), ..bench };
        let mut random = Random(79);
        let mut cases_of = Vec::new();
        let all = grouped_cases().into_iter().chain(cases()).chain(implicit_cases()).enumerate();
        for (g, (geometry, batch, size)) in all {
            let shape = Conv2dShape::new(geometry, batch, size).unwrap();
            for (i, format) in formats.into_iter().map(parse).enumerate() {
                if geometry.scale_channels(format.weight.group).is_err() {
                    continue;
                }
                let types = [TYPES[(g + i) % 3], TYPES[(g + i) / 2 % 3]];
                let w = with_zeros_in_bytes(random.qtensor(format.weight, [geometry.co, geometry.k()], false));
                let packed = Weights::pack(&gpu, &stream, &w, format.act, geometry, types[0]).unwrap();
                let layouts = [Layout2d::Nhwc; 2];
                let problem =
                    Problem { format: Some(format), shape, x: types[0], y: types[1], layouts, packed: packed.layout() };
                let plans = implicit.plans(&caps, &problem);
                // The one that is chosen, and another.
                let kept = [0, 1 + (g + i) % 8].map(|at| at % plans.len().max(1));
                let plans: Vec<Plan> =
                    plans.into_iter().enumerate().filter(|(at, _)| kept.contains(at)).map(|(_, plan)| plan).collect();
                if !plans.is_empty() {
                    cases_of.push((w, packed, format, types, shape, plans));
                }
            }
        }
        let least = if caps.arch.multiplies(Float::BF16) { 100 } else { 60 };
        assert!(cases_of.len() >= least, "{} served on {}", cases_of.len(), caps.arch);
        let needed = cases_of.iter().flat_map(|case| case.5.iter().flat_map(Plan::instances));
        prepare(&gpu, needed.chain((plain.kernel.instances)()));
        for (at, (w, packed, format, types, shape, plans)) in cases_of.iter().enumerate() {
            let x = rounded(&random.activations(shape.x_len()), types[0]);
            let reference = reference::conv2d_linear(&x, w, format.act, shape).unwrap();
            let images = Images { shape, x: &x, types: *types, layouts: [Layout2d::Nhwc; 2] };
            for plan in plans {
                let y = bench.forward_by(plan, packed, &images, Epilogue::default());
                check(&y, &reference, plan.bound(), &format!("{plan:?} on {}", packed.layout()));
            }
            if at % 5 == 0 {
                let y = plain.forward(packed, &images, Epilogue::default());
                check(
                    &y,
                    &reference,
                    Bound::new(types[1], shape.geometry().k()),
                    &format!("simt on {}", packed.layout()),
                );
            }
        }
    }
}
