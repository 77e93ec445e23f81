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
        assert_eq!(chosen(arch, &problem(new(3, 64, [7, 7]), true, false, nhwc)), "int8_im2col_gemm");
        assert_eq!(chosen(arch, &problem(wide, true, false, LAYOUTS)), "int8_im2col_gemm");
        assert_eq!(chosen(arch, &problem(wide, false, false, nhwc)), "int8_mma");
        assert_eq!(chosen(arch, &problem(wide, false, true, nhwc)), "int8_mma");
        assert_eq!(chosen(arch, &problem(new(3, 64, [7, 7]), false, true, nhwc)), "int8_im2col_gemm");
    }
    for (problem, why, instead) in [
        (problem(wide, false, false, nhwc), "without zero points", "int8_mma"),
        (problem(wide, true, true, nhwc), "y is floats", "int8_mma"),
        (problem(wide, true, false, LAYOUTS), "in nhwc", "int8_im2col_gemm"),
        (problem(wide, true, false, [Layout2d::Nchw; 2]), "in nhwc", "int8_planes"),
        (problem(wide, false, false, [Layout2d::Nchw; 2]), "without zero points", "int8_planes"),
        (problem(wide, true, true, [Layout2d::Nchw; 2]), "y is floats", "int8_simt"),
        (problem(new(3, 64, [7, 7]), false, true, nhwc), "y is floats", "int8_im2col_gemm"),
        (problem(Geometry { groups: 2, ..wide }, true, false, nhwc), "a group has 32", "int8_mma"),
        (problem(Geometry::new(40, 8, [1, 1]), true, false, nhwc), "a multiple of 16 channels", "int8_im2col_gemm"),
        (problem(Geometry::new(3, 64, [7, 7]), true, false, nhwc), "a multiple of 16 channels", "int8_im2col_gemm"),
    ] {
        assert_eq!(chosen(90, &problem), instead, "{problem}");
        let reason = kernel("int8_sm90").supports(&caps(90), &problem).unwrap_err();
        assert!(reason.0.contains(why), "{problem}: {reason}");
    }
}
