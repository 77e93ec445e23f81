//! Which kernel computes a layer of bytes: no device is needed.

use super::convolutions::caps;
use super::int8::kernel;
use crate::conv::LAYOUTS;
use halfbyte::conv::{Conv2dShape, Geometry, Layout2d};
use halfbyte::cuda::int8::{Plan, Problem};
use halfbyte::format::int8::Byte;

#[test]
fn the_choice_is_the_first_kernel_that_can() {
    let wide = Geometry { padding: [1; 4], ..Geometry::new(64, 64, [3, 3]) };
    let problem = |geometry, symmetric, floats, layouts| {
        let shape = Conv2dShape::new(geometry, 32, [56, 56]).unwrap();
        Problem { shape, x: Byte::U8, symmetric, floats, layouts }
    };
    let nhwc = [Layout2d::Nhwc; 2];
    let chosen = |number, problem: &Problem| Plan::of(&caps(number), problem).unwrap().kernel().name;
    let new = Geometry::new;
    for (geometry, kernel) in [
        (wide, "int8_direct_sm90"),
        (new(64, 256, [1, 1]), "int8_direct_sm90"),
        (new(256, 64, [1, 1]), "int8_sm90"),
        (Geometry { stride: [2, 2], padding: [3; 4], ..new(3, 64, [7, 7]) }, "int8_direct_sm90"),
        (Geometry { stride: [2, 2], ..wide }, "int8_sm90"),
        (Geometry { groups: 2, ..Geometry { ci: 128, ..wide } }, "int8_sm90"),
        // More channels than shared memory holds of what a block sees.
        (Geometry { padding: [1; 4], ..new(2048, 512, [3, 3]) }, "int8_sm90"),
    ] {
        assert_eq!(chosen(90, &problem(geometry, true, false, nhwc)), kernel, "{geometry:?}");
    }
    assert_eq!(chosen(90, &problem(new(48, 7, [1, 1]), true, false, nhwc)), "int8_sm90");
    for arch in [75, 80] {
        assert_eq!(chosen(arch, &problem(wide, true, false, nhwc)), "int8_mma");
        assert_eq!(chosen(arch, &problem(new(3, 64, [7, 7]), true, false, nhwc)), "int8_mma_narrow");
        assert_eq!(chosen(arch, &problem(wide, true, false, LAYOUTS)), "int8_im2col_gemm");
        assert_eq!(chosen(arch, &problem(wide, false, false, nhwc)), "int8_mma");
        assert_eq!(chosen(arch, &problem(wide, false, true, nhwc)), "int8_mma");
        assert_eq!(chosen(arch, &problem(new(3, 64, [7, 7]), false, true, nhwc)), "int8_mma_narrow");
    }
    for (problem, why, instead) in [
        (problem(wide, false, false, nhwc), "without zero points", "int8_mma"),
        (problem(wide, true, true, nhwc), "y is floats", "int8_mma"),
        (problem(wide, true, false, LAYOUTS), "in nhwc", "int8_im2col_gemm"),
        (problem(wide, true, false, [Layout2d::Nchw; 2]), "in nhwc", "int8_planes"),
        (problem(wide, false, false, [Layout2d::Nchw; 2]), "without zero points", "int8_planes"),
        (problem(wide, true, true, [Layout2d::Nchw; 2]), "y is floats", "int8_simt"),
        (problem(new(3, 64, [7, 7]), false, true, nhwc), "y is floats", "int8_mma_narrow"),
        (problem(Geometry { groups: 2, ..wide }, true, false, nhwc), "a group has 32", "int8_mma"),
        (problem(Geometry::new(40, 8, [1, 1]), true, false, nhwc), "a multiple of 16 channels", "int8_mma_narrow"),
        (problem(Geometry::new(3, 64, [7, 7]), true, false, nhwc), "a multiple of 16 channels", "int8_mma_narrow"),
    ] {
        assert_eq!(chosen(90, &problem), instead, "{problem}");
        let reason = kernel("int8_sm90").supports(&caps(90), &problem).unwrap_err();
        assert!(reason.0.contains(why), "{problem}: {reason}");
    }
}

/// Few tiles are shared among blocks, which is faster than to hold what a block sees once for all positions.
#[test]
fn few_tiles_of_many_columns_are_cut() {
    let chosen = |batch, ci, co, size| {
        let geometry = Geometry { padding: [1; 4], ..Geometry::new(ci, co, [3, 3]) };
        let shape = Conv2dShape::new(geometry, batch, [size; 2]).unwrap();
        let layouts = [Layout2d::Nhwc; 2];
        let plan =
            Plan::of(&caps(90), &Problem { shape, x: Byte::U8, symmetric: true, floats: false, layouts }).unwrap();
        (plan.kernel().name, format!("{plan:?}"))
    };
    for (batch, ci, co, size, name, parts) in [
        (1, 512, 512, 7, "int8_sm90", "8 parts"),
        (1, 256, 256, 14, "int8_sm90", "4 parts"),
        (32, 512, 512, 7, "int8_direct_sm90", "alone"),
        (32, 128, 128, 28, "int8_direct_sm90", "one of two"),
        (1, 2048, 120, 14, "int8_sm90", "8 parts"),
    ] {
        let (kernel, configuration) = chosen(batch, ci, co, size);
        assert!(kernel == name && configuration.contains(parts), "{batch} {ci} {co} {size}: {kernel} {configuration}");
    }
}

#[test]
fn groups_of_few_channels_have_a_kernel_of_their_own() {
    let problem = |ci: usize, co: usize, groups: usize, symmetric, floats, layouts| {
        let geometry = Geometry { padding: [1; 4], groups, ..Geometry::new(ci, co, [3, 3]) };
        let shape = Conv2dShape::new(geometry, 2, [56, 56]).unwrap();
        Problem { shape, x: Byte::I8, symmetric, floats, layouts }
    };
    let (pixels, planes) = ([Layout2d::Nhwc; 2], [Layout2d::Nchw; 2]);
    let layouts_of_x = [Layout2d::Nchw, Layout2d::Nhwc];
    for arch in [75, 80, 90] {
        let chosen = |problem: &Problem| Plan::of(&caps(arch), problem).unwrap().kernel().name;
        for channels in [1, 2, 4, 8] {
            for (symmetric, floats) in [(true, false), (false, false), (true, true), (false, true)] {
                let problem = |layouts| problem(96, 96, 96 / channels, symmetric, floats, layouts);
                assert_eq!(chosen(&problem(pixels)), "int8_depthwise");
                assert_eq!(chosen(&problem(layouts_of_x)), "int8_planes");
                assert_eq!(chosen(&problem(planes)), if floats { "int8_simt" } else { "int8_planes" });
            }
        }
        for (ci, co, groups, instead, why) in [
            (24, 24, 24, "int8_simt", "brings 16 channels at a time, an image has 24"),
            (96, 192, 96, "int8_simt", "as many outputs, a group has 1 and 2"),
            (48, 48, 16, "int8_mma_narrow", "1, 2, 4 or 8 channels and as many outputs, a group has 3 and 3"),
        ] {
            let problem = problem(ci, co, groups, true, false, pixels);
            assert_eq!(chosen(&problem), instead);
            let reason = kernel("int8_depthwise").supports(&caps(arch), &problem).unwrap_err();
            assert!(reason.0.contains(why), "{problem}: {reason}");
        }
        let problem = problem(96, 96, 96, true, true, planes);
        let reason = kernel("int8_planes").supports(&caps(arch), &problem).unwrap_err();
        assert!(reason.0.contains("copies bytes of y, not floats"), "{reason}");
    }
}

#[test]
fn groups_of_any_number_of_channels_are_multiplied_by_tensor_cores() {
    let problem = |geometry, symmetric, floats, layouts| {
        let shape = Conv2dShape::new(geometry, 16, [28, 30]).unwrap();
        Problem { shape, x: Byte::U8, symmetric, floats, layouts }
    };
    let of = |groups: usize, channels: usize, outputs: usize, kernel: usize| {
        let geometry = Geometry::new(groups * channels, groups * outputs, [kernel; 2]);
        Geometry { padding: [1; 4], groups, ..geometry }
    };
    let (pixels, planes) = ([Layout2d::Nhwc; 2], [Layout2d::Nchw; 2]);
    for arch in [75, 80, 86, 90, 120] {
        let chosen = |problem: &Problem| Plan::of(&caps(arch), problem).unwrap().kernel().name;
        let groups = [
            (2, 40, 72, 3),
            (64, 24, 12, 3),
            (4, 2, 40, 4),
            (4, 6, 20, 4),
            (8, 8, 16, 3),
            (3, 8, 64, 3),
            (2, 37, 5, 1),
        ];
        for (groups, channels, outputs, kernel) in groups {
            let geometry = of(groups, channels, outputs, kernel);
            for (symmetric, floats) in [(true, false), (false, false), (true, true), (false, true)] {
                assert_eq!(chosen(&problem(geometry, symmetric, floats, pixels)), "int8_mma_narrow", "{geometry:?}");
                let in_planes = chosen(&problem(geometry, symmetric, floats, planes));
                assert_eq!(in_planes, if floats { "int8_simt" } else { "int8_planes" }, "{geometry:?}");
            }
        }
        // One group goes here before patches; a multiple of 16 channels does not.
        for geometry in [of(1, 40, 64, 3), of(1, 3, 64, 3), of(1, 100, 24, 1)] {
            let problem = problem(geometry, false, true, pixels);
            assert_eq!(chosen(&problem), "int8_mma_narrow", "{geometry:?}");
            assert_eq!(kernel("int8_im2col_gemm").supports(&caps(arch), &problem), Ok(()), "{geometry:?}");
        }
        for (geometry, layouts, why) in [
            (of(2, 48, 8, 3), pixels, "leaves a multiple of 16 channels"),
            (of(2, 1, 2, 3), pixels, "more than 128 times as much as 2 outputs by 9 columns"),
            (of(2, 40, 72, 3), planes, "in nhwc"),
        ] {
            let problem = problem(geometry, true, false, layouts);
            let reason = kernel("int8_mma_narrow").supports(&caps(arch), &problem).unwrap_err();
            assert!(reason.0.contains(why), "{problem}: {reason}");
        }
    }
}
