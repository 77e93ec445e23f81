//! Reproducible random data.

use halfbyte::random::splitmix64;
use halfbyte::{Activation, Float, Format, QTensor, WeightFormat, Zero, Zeros};

/// All functions that a product may end in.
pub const ACTIVATIONS: [Activation; 7] = [
    Activation::None,
    Activation::Relu,
    Activation::Relu6,
    Activation::Clamp(-0.5, 0.25),
    Activation::Gelu,
    Activation::GeluTanh,
    Activation::Silu,
];

/// From a seed.
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        splitmix64(&mut self.0)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// Near to normal, mean 0, deviation 1.
    pub fn normal(&mut self) -> f32 {
        let sum: f32 = (0..6).map(|_| (self.bits() >> 40) as f32 / (1 << 24) as f32).sum();
        (sum - 3.0) * std::f32::consts::SQRT_2
    }

    pub fn normals(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.normal()).collect()
    }

    /// Normal with a few elements a hundred times larger, as activations have them.
    pub fn activations(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.normal() * if self.below(200) == 0 { 100.0 } else { 1.0 }).collect()
    }

    /// A tensor whose codes and zeros take every value; with a shuffled group index if asked for.
    pub fn qtensor(&mut self, format: WeightFormat, [n, k]: [usize; 2], act_order: bool) -> QTensor {
        let groups = format.group.count(k);
        let codes = (0..n * k).map(|_| self.below(format.max_code() as usize + 1) as u8).collect();
        let mut scales: Vec<f32> =
            (0..n * groups).map(|_| format.scale.round(self.normal().abs() * 0.01 + 0.001)).collect();
        if format.group == halfbyte::Group::Tensor {
            scales.fill(0.013);
            scales = scales.into_iter().map(|s| format.scale.round(s)).collect();
        }
        let zeros = match format.zero {
            Zero::Symmetric => Zeros::Symmetric,
            Zero::Integer => {
                Zeros::Integer((0..n * groups).map(|_| self.below(format.max_code() as usize + 2) as u16).collect())
            }
            Zero::Float => Zeros::Float((0..n * groups).map(|_| format.scale.round(self.normal() * 0.05)).collect()),
        };
        if let Some(dtype) = format.channel_scale {
            for i in 0..n {
                let channel = dtype.round(self.normal().abs() * 0.01 + 0.001);
                for at in i * groups..(i + 1) * groups {
                    let zero = if let Zeros::Integer(z) = &zeros { i32::from(z[at]) } else { format.middle() as i32 };
                    let fits = |&f: &i32| f <= 16 && -zero * f >= -128 && (15 - zero) * f <= 127;
                    let most = (1..=16).take_while(fits).count();
                    scales[at] = channel * (1 + self.below(most)) as f32;
                }
            }
        }
        let index = act_order.then(|| {
            let mut index: Vec<u32> = (0..k).map(|j| (j / format.group.len(k).max(1)) as u32).collect();
            for j in (1..k).rev() {
                index.swap(j, self.below(j + 1));
            }
            index
        });
        QTensor::new(format, [n, k], codes, scales, zeros, index).unwrap()
    }
}

/// The same tensor with zero points that fit a byte.
pub fn with_zeros_in_bytes(w: QTensor) -> QTensor {
    let Zeros::Integer(zeros) = w.zeros() else { return w };
    let zeros = Zeros::Integer(zeros.iter().map(|&z| z.min(255)).collect());
    let index = w.group_index().map(<[u32]>::to_vec);
    QTensor::new(w.format(), [w.n(), w.k()], w.codes().to_vec(), w.scales().to_vec(), zeros, index).unwrap()
}

/// Rows of several tensors of one format, k and order of columns, one below the other.
pub fn below_each_other(parts: &[QTensor]) -> QTensor {
    let first = &parts[0];
    let zeros = match first.zeros() {
        Zeros::Symmetric => Zeros::Symmetric,
        Zeros::Integer(_) => Zeros::Integer(joined(parts, |p| match p.zeros() {
            Zeros::Integer(z) => z,
            other => panic!("{other:?}"),
        })),
        Zeros::Float(_) => Zeros::Float(joined(parts, |p| match p.zeros() {
            Zeros::Float(o) => o,
            other => panic!("{other:?}"),
        })),
    };
    let (n, index) = (parts.iter().map(QTensor::n).sum(), first.group_index().map(<[u32]>::to_vec));
    let (codes, scales) = (joined(parts, QTensor::codes), joined(parts, QTensor::scales));
    QTensor::new(first.format(), [n, first.k()], codes, scales, zeros, index).unwrap()
}

fn joined<T: Copy>(parts: &[QTensor], of: impl Fn(&QTensor) -> &[T]) -> Vec<T> {
    parts.iter().flat_map(of).copied().collect()
}

pub fn parse(name: &str) -> Format {
    name.parse().unwrap()
}

pub fn rounded(values: &[f32], dtype: Float) -> Vec<f32> {
    values.iter().map(|&v| dtype.round(v)).collect()
}
