//! Which kernel computes a convolution, and in which configuration: no device is needed.

use super::convolutions::caps;
use crate::conv::LAYOUTS;
use crate::data::parse;
use halfbyte::Float;
use halfbyte::conv::{Conv2dShape, Geometry, Layout2d};
use halfbyte::cuda::conv::{Plan, Problem};

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
    assert_eq!(chosen(80, &problem("w4a16", wide, half, nhwc), "cuda_wna16"), "im2col_gemm");
    assert_eq!(chosen(75, &problem("w4a16", wide, half, nhwc), "cuda_wna16"), "simt");
    assert_eq!(chosen(90, &problem("w4a16", wide, half, LAYOUTS), "cuda_wna16"), "implicit_gemm_rows_sm90");
    assert_eq!(chosen(90, &problem("w4a16", narrow, half, nhwc), "cuda_wna16_filled"), "implicit_gemm_rows_sm90");
    assert_eq!(chosen(90, &problem("w4a16", narrow, half, LAYOUTS), "cuda_wna16_filled"), "implicit_gemm_rows_sm90");
    assert_eq!(chosen(90, &problem("w4a16", narrow, Float::BF16, nhwc), "cuda_wna16_filled"), "simt");
    assert_eq!(chosen(90, &problem("w4a16", wide, half, [Layout2d::Nchw; 2]), "cuda_wna16"), "simt");
    assert_eq!(chosen(90, &problem("w4a16", narrow, half, nhwc), "cuda_wna16"), "im2col_gemm");
    assert_eq!(chosen(90, &problem("w8a8", wide, half, nhwc), "cuda_wna16"), "implicit_gemm_a8_sm90");
    assert_eq!(chosen(90, &problem("w8a8", wide, Float::F32, nhwc), "cuda_wna16"), "implicit_gemm_a8_sm90");
    assert_eq!(chosen(90, &problem("w8a8", narrow, half, nhwc), "cuda_wna16_filled"), "implicit_gemm_a8_sm90");
    assert_eq!(chosen(80, &problem("w8a8", wide, half, nhwc), "cuda_wna16"), "im2col_gemm");
    assert_eq!(chosen(90, &problem("w4a16", wide, Float::F32, nhwc), "cuda_wna16"), "simt");
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
        let expected = if geometry.groups == 1 { "im2col_gemm" } else { "simt" };
        assert_eq!(chosen.collect::<Vec<_>>(), [expected], "{problem}");
    }
    assert_eq!(
        problem("w4a16", narrow, half, nhwc).to_string(),
        "w4a16 with x f16 nhwc, y f16 nhwc at 32 × 3 × 56 × 56, 7 × 7 to 64, stride [2, 2] padding [3, 3, 3, 3] dilation [1, 1] groups 1"
    );
}
