//! What a convolution may be: sizes of outputs, and errors of what does not fit.

use crate::data::{Random, parse};
use halfbyte::conv::{Conv2dShape, Geometry};
use halfbyte::cpu::Cpu;
use halfbyte::ops::{Conv2d, Weight};
use halfbyte::{Act, Floats, FloatsMut};

#[test]
fn sizes_of_outputs_and_what_is_no_convolution() {
    let new = Geometry::new;
    let output = |geometry, size| Conv2dShape::new(geometry, 1, size).map(|shape| shape.output());
    assert_eq!(
        output(Geometry { stride: [2, 2], padding: [3; 4], ..new(3, 64, [7, 7]) }, [224, 224]).unwrap(),
        [112; 2]
    );
    assert_eq!(
        output(Geometry { padding: [2, 0, 1, 2], stride: [1, 2], ..new(4, 5, [5, 3]) }, [11, 12]).unwrap(),
        [10, 6]
    );
    assert_eq!(output(Geometry { dilation: [2, 3], ..new(1, 1, [3, 2]) }, [5, 4]).unwrap(), [1, 1]);
    let none = Conv2dShape::new(new(3, 5, [2, 2]), 0, [4, 4]).unwrap();
    assert_eq!((none.x_len(), none.y_len(), none.output_pixels()), (0, 0, 0));

    let refused = |geometry: Geometry, batch: usize, size: [usize; 2]| {
        Conv2dShape::new(geometry, batch, size).unwrap_err().to_string()
    };
    assert_eq!(
        refused(Geometry { dilation: [1, 2], ..new(3, 8, [3, 3]) }, 1, [3, 4]),
        "conv2d: expected an input with padding no smaller than the kernel's reach of 5 across, got 4 with 0 and 0 of padding"
    );
    assert_eq!(refused(new(3, 8, [3, 3]), 1, [0, 4]), "conv2d: expected an input of at least 1 × 1 pixels, got 0 × 4");
    assert_eq!(
        refused(Geometry { groups: 2, ..new(3, 8, [1, 1]) }, 1, [4, 4]),
        "conv2d: expected groups that divide 3 input and 8 output channels, got 2"
    );
    assert_eq!(
        refused(Geometry { stride: [0, 1], ..new(3, 8, [1, 1]) }, 1, [4, 4]),
        "conv2d: expected at least 1 pixel of stride down, got 0"
    );
    for broken in [
        Geometry { groups: 0, ..new(3, 8, [1, 1]) },
        Geometry { dilation: [1, 0], ..new(3, 8, [1, 1]) },
        new(0, 8, [1, 1]),
        new(3, 0, [1, 1]),
        new(3, 8, [0, 1]),
        new(usize::MAX, usize::MAX, [usize::MAX, 2]),
        Geometry { padding: [usize::MAX, 0, 1, 0], ..new(3, 8, [1, 1]) },
        Geometry { dilation: [usize::MAX, 1], ..new(3, 8, [3, 1]) },
    ] {
        assert!(Conv2dShape::new(broken, 1, [4, 4]).is_err(), "{broken:?}");
        assert!(broken.weight_rows(&[0.0f32; 8]).is_err(), "{broken:?}");
        assert!(Conv2d::new(Weight::Dense(Floats::F32(&[0.0; 8]), [broken.co, 8]), broken).is_err(), "{broken:?}");
    }
    assert!(Conv2dShape::new(new(3, 8, [1, 1]), usize::MAX / 4, [4, 4]).is_err());
    assert!(Conv2dShape::new(new(3, 8, [1, 1]), 1, [usize::MAX, 4]).is_err());
}

#[test]
fn wrong_weights_and_lengths_are_errors() {
    let mut random = Random(38);
    let geometry = Geometry::new(8, 4, [3, 3]);
    let format = parse("w4a16-g8");
    let w = random.qtensor(format.weight, [4, 72], false);
    let cpu = Cpu::new(1).unwrap();
    let conv = Conv2d::new(Weight::Quantized(&w, format.act), geometry).unwrap();
    let mut y = [0.0; 16];
    let mut forward = |x: usize, y_len: usize, batch: usize| {
        let y = FloatsMut::F32(&mut y[..y_len]);
        conv.forward(&cpu, Floats::F32(&vec![0.0; x]), batch, [4, 4], y).map_err(|e| e.to_string())
    };
    assert_eq!(forward(128, 16, 1), Ok(()));
    assert_eq!(forward(127, 16, 1), Err("conv2d: expected x of 1 × 8 × 4 × 4, got 127 elements".to_owned()));
    assert_eq!(forward(128, 15, 1), Err("conv2d: expected y of 1 × 4 × 2 × 2, got 15 elements".to_owned()));
    assert!(forward(128, 16, usize::MAX).is_err());
    assert!(conv.with_bias(vec![0.0; 5]).is_err());

    let error = Conv2d::new(Weight::Quantized(&w, format.act), Geometry::new(9, 4, [3, 3])).unwrap_err();
    assert_eq!(error.to_string(), "conv2d: expected a weight of 4 × 81, got 4 × 72");
    let across = random.qtensor(parse("w4a16-g9").weight, [4, 72], false);
    assert!(
        Conv2d::new(Weight::Quantized(&across, Act::A16), geometry).unwrap_err().to_string().contains("groups of 9")
    );
    let shuffled = random.qtensor(format.weight, [4, 72], true);
    assert!(
        Conv2d::new(Weight::Quantized(&shuffled, Act::A16), geometry).unwrap_err().to_string().contains("act-order")
    );
    assert!(Conv2d::new(Weight::Dense(Floats::F32(&[0.0; 287]), [geometry.co, geometry.k()]), geometry).is_err());
    let whole = w.rows(0..4).unwrap();
    assert_eq!(whole, w);
    assert!(w.rows(1..5).is_err());
}
