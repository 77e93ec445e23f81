//! Which kernel computes a convolution, and in which configuration: no device is needed.

use super::convolutions::{TYPES, caps, implicit_cases, kernel};
use crate::conv::{LAYOUTS, cases};
use crate::data::{Random, parse};
use halfbyte::conv::{Conv2dShape, Geometry, Layout2d};
use halfbyte::cuda::conv::{KERNELS, Plan, Problem, layout_of};
use halfbyte::cuda::sources::{Arch, Instance};
use halfbyte::cuda::{Caps, int8};
use halfbyte::{Act, Float, Format};
use std::collections::HashSet;

#[test]
fn the_choice_is_the_first_kernel_that_can_and_the_others_say_why_not() {
    let wide = Geometry { padding: [1; 4], ..Geometry::new(64, 64, [3, 3]) };
    let pointwise = Geometry::new(64, 64, [1, 1]);
    let narrow = Geometry { stride: [2, 2], padding: [3; 4], ..Geometry::new(3, 64, [7, 7]) };
    let nhwc = [Layout2d::Nhwc; 2];
    let problem = |name: &str, geometry, x, layouts| {
        let shape = Conv2dShape::new(geometry, 32, [56, 56]).unwrap();
        Problem { format: Some(parse(name)), shape, x, y: Float::F16, layouts, packed: "cuda_wna16" }
    };
    let chosen = |number, problem: &Problem, packed| {
        Plan::of(&caps(number), &Problem { packed, ..*problem }).unwrap().kernel().name
    };
    let half = Float::F16;
    assert_eq!(chosen(90, &problem("w4a16", wide, half, nhwc), "cuda_wna16"), "implicit_gemm_sm90");
    assert_eq!(chosen(90, &problem("w4a16", wide, half, nhwc), "cuda_plain"), "simt");
    assert_eq!(chosen(80, &problem("w4a16", wide, half, nhwc), "cuda_wna16"), "implicit_gemm_mma");
    assert_eq!(chosen(75, &problem("w4a16", wide, half, nhwc), "cuda_wna16"), "implicit_gemm_mma");
    assert_eq!(chosen(75, &problem("w4a16", wide, Float::BF16, nhwc), "cuda_plain"), "simt");
    assert_eq!(chosen(90, &problem("w4a16", wide, half, LAYOUTS), "cuda_wna16"), "implicit_gemm_rows_sm90");
    assert_eq!(chosen(90, &problem("w4a16", narrow, half, nhwc), "cuda_wna16_filled"), "implicit_gemm_rows_sm90");
    assert_eq!(chosen(90, &problem("w4a16", narrow, half, LAYOUTS), "cuda_wna16_filled"), "implicit_gemm_rows_sm90");
    assert_eq!(chosen(90, &problem("w4a16", narrow, Float::BF16, nhwc), "cuda_wna16_filled"), "simt");
    assert_eq!(chosen(90, &problem("w4a16", wide, half, [Layout2d::Nchw; 2]), "cuda_wna16"), "planes");
    let grouped = Geometry { groups: 2, ..wide };
    assert_eq!(chosen(90, &problem("w4a16", grouped, half, [Layout2d::Nchw; 2]), "cuda_wna16"), "simt");
    assert_eq!(chosen(90, &problem("w4a16", grouped, half, [Layout2d::Nchw; 2]), "cuda_wna16_groups"), "planes");
    for (number, x, name) in [(75, half, "w4a16"), (80, Float::BF16, "w8a16-asym"), (90, Float::F32, "w4a8")] {
        assert_eq!(chosen(number, &problem(name, grouped, x, nhwc), "cuda_wna16_groups"), "implicit_gemm_mma");
    }
    assert_eq!(chosen(75, &problem("w4a16", grouped, Float::F32, nhwc), "cuda_wna16_groups"), "simt");
    assert_eq!(chosen(80, &problem("w8a8", wide, half, [Layout2d::Nhwc, Layout2d::Nchw]), "cuda_wna16"), "planes");
    assert_eq!(chosen(90, &problem("w4a16", narrow, half, nhwc), "cuda_wna16"), "im2col_gemm");
    assert_eq!(chosen(90, &problem("w8a8", wide, half, nhwc), "cuda_wna16"), "implicit_gemm_a8_sm90");
    assert_eq!(chosen(90, &problem("w8a8", wide, Float::F32, nhwc), "cuda_wna16"), "implicit_gemm_a8_sm90");
    assert_eq!(chosen(90, &problem("w8a8", narrow, half, nhwc), "cuda_wna16_filled"), "implicit_gemm_a8_sm90");
    assert_eq!(chosen(80, &problem("w8a8", wide, half, nhwc), "cuda_wna16"), "im2col_gemm");
    assert_eq!(chosen(90, &problem("w4a16", wide, Float::F32, nhwc), "cuda_wna16"), "implicit_gemm_mma");
    assert_eq!(chosen(90, &problem("w8a8", wide, half, nhwc), "cuda_plain"), "simt");
    assert_eq!(chosen(90, &problem("w4a16", narrow, half, nhwc), "cuda_plain"), "simt");
    assert_eq!(chosen(90, &problem("w4a16", pointwise, half, nhwc), "cuda_wna16"), "implicit_gemm_sm90");
    let several = Geometry { co: 65, ..pointwise };
    assert_eq!(chosen(90, &problem("w4a16", several, half, nhwc), "cuda_wna16"), "gemm_1x1");
    assert_eq!(chosen(90, &problem("w8a8", pointwise, half, nhwc), "cuda_wna16"), "gemm_1x1");
    assert_eq!(chosen(80, &problem("w4a16", pointwise, half, nhwc), "cuda_wna16"), "gemm_1x1");
    for (geometry, why) in [
        (Geometry { groups: 2, ..wide }, "brings 64 channels of a group at a time, a group has 32"),
        (Geometry { stride: [9, 1], ..wide }, "strides up to 8"),
        (Geometry { padding: [129, 1, 1, 1], ..wide }, "at most 128 pixels outside"),
        (Geometry { dilation: [128, 1], padding: [120, 1, 120, 1], ..wide }, "at most 255 pixels apart"),
    ] {
        let problem = problem("w4a16", geometry, half, nhwc);
        let all = Plan::explain(&caps(90), &problem);
        let reasons: Vec<String> =
            all.iter().map(|(_, reason)| reason.as_ref().map_or_else(String::new, |r| r.0.clone())).collect();
        assert!(reasons[1].contains(why), "{problem}: {reasons:?}");
        let chosen = all.iter().filter(|(_, reason)| reason.is_none()).map(|(kernel, _)| kernel.name);
        let expected = if geometry.groups == 1 { "implicit_gemm_mma" } else { "simt" };
        assert_eq!(chosen.collect::<Vec<_>>(), [expected], "{problem}");
    }
    assert_eq!(
        problem("w4a16", narrow, half, nhwc).to_string(),
        "w4a16 with x f16 nhwc, y f16 nhwc at 32 × 3 × 56 × 56, 7 × 7 to 64, stride [2, 2] padding [3, 3, 3, 3] dilation [1, 1] groups 1"
    );
}

#[test]
fn groups_of_few_channels_are_for_the_kernel_that_loads_eight_at_a_time() {
    let grouped = |channels: usize, outputs: usize, groups: usize| Geometry {
        groups,
        padding: [1; 4],
        ..Geometry::new(channels * groups, outputs * groups, [3, 3])
    };
    let nhwc = [Layout2d::Nhwc; 2];
    let problem = |geometry: Geometry, [x, y]: [Float; 2], layouts, name: &str| {
        let shape = Conv2dShape::new(geometry, 32, [56, 56]).unwrap();
        let format: Option<Format> = (name != "dense").then(|| parse(name));
        let packed = layout_of(&caps(90), format, &geometry, x).unwrap();
        Problem { format, shape, x, y, layouts, packed }
    };
    let halfs = [Float::F16; 2];
    let listed: HashSet<String> =
        KERNELS.iter().flat_map(|row| (row.instances)()).map(|instance| instance.to_string()).collect();
    for number in [75, 80, 90] {
        for (channels, groups) in [(1, 128), (2, 12), (4, 32), (8, 9)] {
            for stride in [1, 2, 3] {
                let geometry = Geometry { stride: [stride; 2], ..grouped(channels, channels, groups) };
                for name in ["w4a16", "w8a16-asym", "w3a16", "w2a16-float", "w8a8", "w4a8-asym-xasym", "dense"] {
                    for types in TYPES.into_iter().flat_map(|x| TYPES.map(|y| [x, y])) {
                        let of_pixels = problem(geometry, types, nhwc, name);
                        let plan = Plan::of(&caps(number), &of_pixels).unwrap();
                        assert_eq!(plan.kernel().name, "depthwise", "{number}: {of_pixels}");
                        assert_eq!(plan.workspace_bytes() > 0, name.contains("a8"), "{of_pixels}");
                        for instance in plan.instances() {
                            assert!(listed.contains(&instance.to_string()), "{instance}");
                        }
                        let of_planes = Problem { layouts: [Layout2d::Nchw; 2], ..of_pixels };
                        let around = Plan::of(&caps(number), &of_planes).unwrap();
                        assert_eq!(around.kernel().name, "planes", "{number}: {of_planes}");
                        assert!(around.to_string().contains(&plan.to_string()), "{around} and {plan}");
                        assert!(around.workspace_bytes() > plan.workspace_bytes());
                    }
                }
            }
        }
    }
    for name in ["w4a8-g4-si8", "w8a16-g2-asym-sbf16", "w3a16-g4"] {
        let problem = problem(grouped(4, 4, 32), halfs, nhwc, name);
        assert_eq!(Plan::of(&caps(90), &problem).unwrap().kernel().name, "depthwise", "{problem}");
    }
    let large = Geometry { padding: [15; 4], ..grouped(1, 1, 64) };
    let large = problem(Geometry { kernel: [31, 31], ..large }, halfs, nhwc, "w4a16");
    let plan = Plan::of(&caps(90), &large).unwrap();
    let text = "64 channels a tile, 4 rows of the kernel at a time";
    assert!(plan.to_string().starts_with(text), "{plan}");
    let few = grouped(1, 1, 64);
    for (geometry, layouts, why) in [
        (few, [Layout2d::Nhwc, Layout2d::Nchw], "images in nhwc"),
        (grouped(16, 16, 4), nhwc, "groups of 1, 2, 4 or 8 channels, here 4 of 16"),
        (grouped(8, 8, 1), nhwc, "groups of 1, 2, 4 or 8 channels, here 1 of 8"),
        (grouped(1, 2, 64), nhwc, "as many outputs of a group as channels, 1 are 2"),
        (grouped(1, 1, 12), nhwc, "loads 8 channels at a time, a pixel has 12"),
        (Geometry { stride: [1 << 25, 1], ..few }, nhwc, "than 24 bits count"),
        (Geometry { kernel: [1, 2000], padding: [0, 1000, 0, 1000], ..few }, nhwc, "a row of the kernel"),
    ] {
        let problem = problem(geometry, halfs, layouts, "w8a16");
        let reason = kernel("depthwise").supports(&caps(90), &problem).unwrap_err();
        assert!(reason.0.contains(why), "{problem}: {}", reason.0);
    }
    let fragments = Problem { packed: "cuda_wna16", ..problem(few, halfs, nhwc, "w8a16") };
    let reason = kernel("depthwise").supports(&caps(90), &fragments).unwrap_err();
    assert_eq!(reason.0, "reads layout cuda_plain or floats, not cuda_wna16");
}

/// What compiles kernels for machines without a compiler goes through the rows of the table.
#[test]
fn rows_have_every_instance_of_every_plan() {
    let formats =
        ["w4a16", "w8a16-asym-sbf16", "w4a16-g32-asym", "w8a16-g64", "w8a8", "w4a8-g32-asym-xasym", "w8a8-asym"];
    let mut plans = 0;
    for format in formats.map(parse) {
        let of_row = KERNELS.iter().flat_map(|row| {
            let every = [90, 80].map(|number| (row.every_instance)(caps(number).arch, format));
            [(row.instances)(), every.concat()].concat()
        });
        let listed: HashSet<String> = of_row.map(|instance| instance.to_string()).collect();
        for (geometry, batch, size) in cases().into_iter().chain(implicit_cases()) {
            if geometry.scale_channels(format.weight.group).is_err() {
                continue;
            }
            let shape = Conv2dShape::new(geometry, batch, size).unwrap();
            for (number, multiprocessors) in [(90, 132), (90, 78), (80, 108)] {
                let caps = Caps { multiprocessors, ..caps(number) };
                let x = if format.act == Act::A16 { format.weight.scale } else { Float::F16 };
                let packed = layout_of(&caps, Some(format), &geometry, x).unwrap();
                for y in TYPES.into_iter().filter(|&y| format.act.is_quantized() || [x, Float::F32].contains(&y)) {
                    let problem = Problem { format: Some(format), shape, x, y, layouts: [Layout2d::Nhwc; 2], packed };
                    for plan in KERNELS.iter().flat_map(|row| row.plans(&caps, &problem)) {
                        plans += 1;
                        let own = |instance: &Instance| {
                            let windows = instance
                                .defines
                                .iter()
                                .any(|it| it.starts_with("HB_CONV") || it.starts_with("HB_IMAGES"));
                            windows || instance.source.path.starts_with("conv/")
                        };
                        for instance in plan.instances().iter().filter(|instance| own(instance)) {
                            assert!(listed.contains(&instance.to_string()), "{plan:?}: {instance}");
                        }
                    }
                }
            }
        }
    }
    assert!(plans > 1000, "{plans}");
}

/// Without a compiler: what it would be given, and would give numbers for.
#[test]
fn instances_of_rows_are_those_that_are_recorded() {
    let recorded = include_str!("resources.txt");
    for arch in ["sm_75", "sm_80", "sm_90a"].map(|arch| arch.parse::<Arch>().unwrap()) {
        let convolutions = KERNELS.iter().filter(|row| (row.serves)(arch)).flat_map(|row| (row.instances)());
        let of_bytes = int8::KERNELS.iter().filter(|row| (row.serves)(arch)).flat_map(|row| (row.instances)());
        for instance in convolutions.chain(of_bytes) {
            assert!(recorded.contains(&format!("{arch} {instance}: ")), "{arch} {instance}");
        }
    }
}

#[test]
fn a_weight_says_before_it_is_packed_where_it_would_lie() {
    let of = |name: &str, geometry: Geometry, number| {
        let format: Option<Format> = (name != "dense").then(|| parse(name));
        layout_of(&caps(number), format, &geometry, Float::F16).unwrap()
    };
    let wide = Geometry { padding: [1; 4], ..Geometry::new(64, 64, [3, 3]) };
    let narrow = Geometry { stride: [2, 2], padding: [3; 4], ..Geometry::new(3, 64, [7, 7]) };
    assert_eq!(of("dense", wide, 90), "dense");
    assert_eq!([of("w4a16", wide, 90), of("w8a8", wide, 90), of("w4a16", wide, 80)], ["cuda_wna16"; 3]);
    let forms = [of("w2a16", wide, 90), of("w3a16", wide, 90), of("w4a16-g32-float-sf32", wide, 80)];
    assert_eq!(forms, ["cuda_wna16"; 3]);
    assert_eq!([of("w4a16", narrow, 90), of("w8a8", narrow, 90)], ["cuda_wna16_filled"; 2]);
    assert_eq!(of("w4a16", wide, 75), "cuda_wna16");
    assert_eq!([of("w4a8-g64-si8", wide, 90), of("w4a8-g64-si8", wide, 75)], ["cuda_wna16_groups", "cuda_plain"]);
    let grouped = Geometry { groups: 2, ..wide };
    assert_eq!([of("w4a16", grouped, 90), of("w8a8", grouped, 80), of("w4a16", grouped, 75)], ["cuda_wna16_groups"; 3]);
    // f32 is for windows, also where channels are filled up; without bf16 on tensor cores for ordinary threads.
    for geometry in [wide, narrow] {
        let of = |number| layout_of(&caps(number), Some(parse("w8a16")), &geometry, Float::F32).unwrap();
        assert_eq!([75, 80, 90].map(of), ["cuda_plain", "cuda_wna16_groups", "cuda_wna16_groups"]);
    }
    assert_eq!([of("w8a8", grouped, 75), of("w4a16", Geometry { groups: 64, ..wide }, 90)], ["cuda_plain"; 2]);
    assert!(layout_of(&caps(90), Some(parse("w4a16-g9")), &wide, Float::F16).is_err());
}

/// Sizes of every magnitude: a kernel computes them or says why not, and so does the whole table.
#[test]
fn layers_drawn_at_random_are_planned_or_refused() {
    let mut random = Random(83);
    let formats =
        ["w4a16", "w8a16-asym", "w4a16-g32-float", "w3a16-g16", "w8a8", "w4a8-g32-asym-xasym", "w4a8-g64-si8"];
    let mut chosen = HashSet::new();
    for turn in 0..4000 {
        let mut of = |choices: &[usize]| choices[random.below(choices.len())];
        let groups = of(&[1, 1, 2, 3, 8, 64, 1000]);
        let channels = of(&[1, 2, 3, 4, 8, 12, 16, 24, 32, 64, 96, 200]);
        let outputs = of(&[channels, 1, 5, 32, 64, 130]);
        let kernel = [of(&[1, 2, 3, 5, 31]), of(&[1, 3, 7, 90])];
        let geometry = Geometry {
            groups,
            stride: [of(&[1, 2, 9, 1 << 20]), of(&[1, 2, 5])],
            padding: [of(&[0, 1, 3, 200, 1 << 30]), of(&[0, 1, 2]), of(&[0, 1]), of(&[0, 1, 100])],
            dilation: [of(&[1, 2, 300, 1 << 28]), of(&[1, 1, 3])],
            ..Geometry::new(groups * channels, groups * outputs, kernel)
        };
        let geometry = if turn % 9 == 0 { Geometry::new(channels, outputs, [1, 1]) } else { geometry };
        let (batch, size) = (of(&[0, 1, 3, 32, 1 << 20]), [of(&[1, 7, 56, 1 << 16]), of(&[1, 9, 224])]);
        let layouts = [LAYOUTS[of(&[0, 1, 1])], LAYOUTS[of(&[0, 1, 1])]];
        let (x, y, number) = (TYPES[of(&[0, 1, 2])], TYPES[of(&[0, 1, 2])], of(&[75, 80, 90]) as u32);
        let format = parse(formats[turn % formats.len()]);
        let Ok(shape) = Conv2dShape::new(geometry, batch, size) else { continue };
        // Where a weight would lie is told by one of its size.
        if geometry.co * geometry.k() > 1 << 20 {
            continue;
        }
        let caps = caps(number);
        let Ok(packed) = layout_of(&caps, Some(format), &geometry, x) else { continue };
        let problem = Problem { format: Some(format), shape, x, y, layouts, packed };
        let all = Plan::explain(&caps, &problem);
        assert!(all.iter().all(|(_, why)| why.as_ref().is_none_or(|why| !why.0.is_empty())), "{problem}");
        if let Ok(plan) = Plan::of(&caps, &problem) {
            assert!(!plan.instances().is_empty() && plan.workspace_bytes() < 1 << 50, "{plan:?}");
            chosen.insert(plan.kernel().name);
        }
    }
    for kernel in KERNELS.iter() {
        assert!(chosen.contains(kernel.name), "{} was never chosen: {chosen:?}", kernel.name);
    }
}
