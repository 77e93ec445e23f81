//! Layers of bytes in groups of any number of channels on tensor cores: every configuration of `int8_mma_narrow` to the bit as the
//! plain kernel and the CPU have them, shapes at random and many pixels.

use super::gpus;
use super::int8::{Bench, Random8, TYPES, kernel, same};
use super::int8_forms::OUTPUTS;
use crate::conv_int8::{bytes, forward as on_cpu};
use crate::data::Random;
use halfbyte::Float;
use halfbyte::conv::{Conv2dShape, Geometry, Layout2d};
use halfbyte::cpu::Cpu;
use halfbyte::cuda::int8::{Epilogue, Layer, Problem};
use halfbyte::format::int8::{Byte, Int8Weight};
use halfbyte::ops::{Activation, Conv2dInt8};

/// Of a group: pieces of 1, 2, 4 and 8 channels, fewer columns than a stage has and several stages.
const CHANNELS: [usize; 14] = [1, 2, 3, 5, 6, 8, 12, 20, 24, 25, 40, 66, 100, 136];

/// Of a group: bytes and fours at a time, rests of 16 and of strips, two tiles.
const OUTPUTS_OF_GROUP: [usize; 12] = [1, 3, 5, 8, 12, 16, 20, 40, 64, 65, 72, 132];

/// What is compared, and how it went: the configurations that were seen, by their text.
struct Compared<'a> {
    bench: Bench<'a>,
    cpu: &'a Cpu,
    seen: Vec<String>,
}

impl Compared<'_> {
    /// A layer of random numbers with y of a type, in every configuration.
    fn compare(
        &mut self,
        random: &mut Random,
        shape: Conv2dShape,
        types: [Byte; 3],
        symmetric: bool,
        y: Option<Float>,
    ) {
        let Bench { gpu, stream } = self.bench;
        let (geometry, layouts) = (*shape.geometry(), [Layout2d::Nhwc; 2]);
        let problem = Problem { shape, x: types[0], symmetric, floats: y.is_some(), layouts };
        let plans = kernel("int8_mma_narrow").plans(&gpu.caps(), &problem);
        if plans.is_empty() {
            return;
        }
        let data = Random8::new(random, &shape, types, symmetric);
        let w = Int8Weight::new(bytes(types[1], &data.w), [geometry.co, geometry.k()], &data.scales, &data.zeros);
        let w = w.unwrap();
        let float_bias = (y.is_some() && random.below(2) == 0).then(|| random.normals(geometry.co));
        let activation = match y {
            None => [Activation::None, Activation::Relu][random.below(2)],
            Some(_) => [Activation::None, Activation::Silu, Activation::Clamp(-0.25, 0.5)][random.below(3)],
        };
        let epilogue = Epilogue { bias: Some(&data.bias), float_bias: float_bias.as_deref(), activation };
        let y_is = y.is_none().then_some(data.y_is);
        let layer = Layer::conv2d(gpu, stream, &w, geometry, data.x_is, y_is, epilogue).unwrap();
        assert_eq!(layer.is_symmetric(), symmetric);
        let plain = kernel("int8_simt").plan(&gpu.caps(), &problem).unwrap();
        let want = self.bench.elements(&plain, &layer, &data.x, y);
        for plan in plans {
            let got = self.bench.elements(&plan, &layer, &data.x, y);
            let wrong = got.iter().zip(&want).position(|(got, want)| got != want);
            let what = format!("{plan:?} {types:?} symmetric {symmetric} {y:?} {activation:?}");
            assert_eq!(wrong, None, "{what}: first byte that is wrong of {}", want.len());
            self.seen.push(plan.to_string());
        }
        if y.is_none() {
            let reference = Conv2dInt8::new(&w, geometry, data.x_is, data.y_is).unwrap();
            let reference = reference.with_bias(data.bias.clone()).unwrap().with_activation(activation).unwrap();
            let want = on_cpu(&reference, self.cpu, &data.x, &shape, layouts);
            let plan = kernel("int8_mma_narrow").plan(&gpu.caps(), &problem).unwrap();
            same(&self.bench.forward(&plan, &layer, &data.x), &want, &shape, &format!("{plan:?} {types:?}"));
        }
    }
}

/// A shape at random with so many channels and outputs of a group.
fn shape(random: &mut Random, channels: usize, outputs: usize) -> Conv2dShape {
    let mut up_to = |most: usize| 1 + random.below(most);
    let groups = up_to(5);
    let (kernel, stride, dilation) = ([up_to(5), up_to(5)], [up_to(3), up_to(3)], [up_to(3), up_to(3)]);
    let padding = [0; 4].map(|_| up_to(5) - 1);
    let reach = [0, 1].map(|axis| (kernel[axis] - 1) * dilation[axis] + 1);
    // Images may be smaller than what a window spans, if the padding is wide enough.
    let size = [0, 1].map(|axis| up_to(13).max(reach[axis].saturating_sub(padding[axis] + padding[axis + 2])));
    let geometry = Geometry::new(groups * channels, groups * outputs, kernel);
    let geometry = Geometry { groups, stride, dilation, padding, ..geometry };
    Conv2dShape::new(geometry, up_to(3), size).unwrap()
}

#[test]
fn groups_of_any_number_of_channels_have_the_bits_of_the_plain_kernel() {
    let cpu = Cpu::new(4).unwrap();
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let mut compared = Compared { bench: Bench { gpu: &gpu, stream: &stream }, cpu: &cpu, seen: Vec::new() };
        let mut random = Random(83);
        for (turn, channels) in CHANNELS.into_iter().enumerate() {
            for (i, outputs) in OUTPUTS_OF_GROUP.into_iter().enumerate() {
                for y in OUTPUTS {
                    let shape = shape(&mut random, channels, outputs);
                    let (types, symmetric) = (TYPES[(turn + i) % 4], random.below(2) == 0);
                    compared.compare(&mut random, shape, types, symmetric, y);
                }
            }
        }
        let mut seen = compared.seen;
        for piece in [1, 2, 4, 8] {
            let of_piece = format!(", {piece} channels at a time");
            assert!(
                seen.iter().filter(|text| text.ends_with(&of_piece)).count() > 200,
                "few tests of {piece} channels"
            );
        }
        seen.sort();
        seen.dedup();
        assert_eq!(seen.len(), 16, "every configuration of every piece: {seen:#?}");
    }
}

#[test]
fn many_pixels_in_groups_have_the_bits_of_the_plain_kernel() {
    let cpu = Cpu::new(4).unwrap();
    let of = |groups: usize, channels: usize, outputs: usize, kernel: usize| {
        let geometry = Geometry::new(groups * channels, groups * outputs, [kernel; 2]);
        Geometry { padding: [1; 4], groups, ..geometry }
    };
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let mut compared = Compared { bench: Bench { gpu: &gpu, stream: &stream }, cpu: &cpu, seen: Vec::new() };
        let mut random = Random(84);
        for (geometry, batch, size) in [
            (of(2, 40, 72, 3), 16, [13, 28]),
            (of(7, 24, 12, 3), 2, [56, 56]),
            (of(4, 2, 40, 4), 2, [80, 96]),
            (of(4, 6, 20, 4), 16, [28, 28]),
            (of(8, 8, 16, 3), 4, [32, 32]),
            (Geometry { stride: [2, 2], ..of(3, 8, 64, 3) }, 16, [7, 7]),
            // One group: a row of a product, patches of an image.
            (Geometry { padding: [0; 4], ..of(1, 1000, 70, 1) }, 1, [1, 300]),
            (Geometry { stride: [2, 2], padding: [3; 4], ..of(1, 3, 64, 7) }, 2, [112, 110]),
        ] {
            let shape = Conv2dShape::new(geometry, batch, size).unwrap();
            for (i, types) in TYPES.into_iter().enumerate() {
                compared.compare(&mut random, shape, types, i % 2 == 0, OUTPUTS[i % 2]);
                compared.compare(&mut random, shape, types, i % 2 != 0, None);
            }
        }
        assert!(compared.seen.len() >= 8 * 8 * 4, "{} comparisons", compared.seen.len());
    }
}
