//! Every operation on a GPU beside the same one on the CPU, on the same input.

use super::bytes::{ByteNetwork, Codes};
use super::floats::{FloatNetwork, Images};
use super::gpu::{GpuBytes, GpuFloats, Place};
use super::network::{Arithmetic, Network};
use half::f16;
use halfbyte::cpu::Cpu;
use halfbyte::cuda::{Caps, conv};
use halfbyte::format::reference::Bound;
use halfbyte::{Float, Format, Result};

/// Bytes on both: how many codes and classes have other bits.
pub struct CheckedBytes<'a, 'b> {
    pub gpu: &'a mut GpuBytes<'b>,
    pub cpu: &'a mut ByteNetwork<'b>,
    pub compared: usize,
    pub different: usize,
}

impl CheckedBytes<'_, '_> {
    fn same(&mut self, there: Place, here: Codes) -> Result<(Place, Codes)> {
        let codes = self.gpu.codes(there)?;
        self.count(&codes, &here.bytes);
        Ok((there, here))
    }

    fn count<T: PartialEq>(&mut self, there: &[T], here: &[T]) {
        self.compared += here.len();
        self.different += there.len().abs_diff(here.len()) + there.iter().zip(here).filter(|(a, b)| a != b).count();
    }
}

impl Arithmetic for CheckedBytes<'_, '_> {
    type Tensor = (Place, Codes);

    fn conv(&mut self, layer: usize, x: &Self::Tensor) -> Result<Self::Tensor> {
        let (there, here) = (self.gpu.conv(layer, &x.0)?, self.cpu.conv(layer, &x.1)?);
        self.same(there, here)
    }

    fn add(&mut self, a: &Self::Tensor, b: &Self::Tensor) -> Result<Self::Tensor> {
        let (there, here) = (self.gpu.add(&a.0, &b.0)?, self.cpu.add(&a.1, &b.1)?);
        self.same(there, here)
    }

    fn pool(&mut self, x: &Self::Tensor) -> Result<Self::Tensor> {
        let (there, here) = (self.gpu.pool(&x.0)?, self.cpu.pool(&x.1)?);
        self.same(there, here)
    }

    fn head(&mut self, x: &Self::Tensor) -> Result<Self::Tensor> {
        let (there, here) = (self.gpu.head(&x.0)?, self.cpu.head(&x.1)?);
        let bits = |classes: &[f32]| classes.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        let classes = self.gpu.classes(there)?;
        self.count(&bits(&classes), &bits(&here.floats));
        Ok((there, here))
    }
}

/// Halves on a GPU beside f32 on the CPU: how near the greatest difference comes to the sum of both bounds.
pub struct CheckedFloats<'a, 'b> {
    gpu: &'a mut GpuFloats<'b>,
    cpu: FloatNetwork<'a>,
    /// With the magnitudes of all weights and biases.
    magnitudes: FloatNetwork<'a>,
    caps: Caps,
    /// The greatest difference of a product, in parts of what both bounds allow: at most 1.
    pub worst: f64,
    /// Sums and means that are not what f32 rounded to a half is.
    pub different: usize,
}

impl<'a, 'b> CheckedFloats<'a, 'b> {
    pub fn new(
        cpu: &'a Cpu,
        network: &Network,
        format: Format,
        gpu: &'a mut GpuFloats<'b>,
        caps: Caps,
    ) -> Result<Self> {
        let on_cpu = FloatNetwork::new(cpu, network, Some(format))?;
        let mut magnitudes = network.clone();
        let layers = magnitudes.layers.iter_mut().chain([&mut magnitudes.head]);
        for (layer, changes) in layers.zip(&on_cpu.changes) {
            layer.weights.iter_mut().zip(changes).for_each(|(w, change)| *w = (f64::from(*w) + change).abs() as f32);
            layer.bias.iter_mut().for_each(|bias| *bias = bias.abs());
            layer.relu = false;
        }
        let magnitudes = FloatNetwork::new(cpu, &magnitudes, None)?;
        Ok(Self { gpu, cpu: on_cpu, magnitudes, caps, worst: 0.0, different: 0 })
    }

    fn images(&self, place: Place) -> Result<Images> {
        Ok(Images { values: self.gpu.values(place)?, batch: place.batch, size: place.size })
    }

    /// Compares results with magnitudes of their sums; a relu brings them no farther apart.
    fn compare(&mut self, there: &[f32], here: &Images, magnitudes: &Images, bound: Bound, k: usize) {
        // Magnitudes are sums in f32; halves below their normal range are rounded to steps of 2⁻²⁴.
        const ROUNDED: f64 = 1.0 + 1e-4;
        let smallest = 2f64.powi(-24);
        for ((&a, &b), &magnitude) in there.iter().zip(&here.values).zip(&magnitudes.values) {
            let magnitude = f64::from(magnitude) * ROUNDED;
            let allowed = bound.allowed(magnitude) + Bound::new(Float::F32, k).allowed(magnitude) + smallest;
            let off = f64::from(a - b).abs() / allowed;
            self.worst = if off.is_nan() { f64::INFINITY } else { self.worst.max(off) };
        }
    }

    /// Counts results that are not the nearest halves.
    fn nearest(&mut self, there: Place, here: &Images) -> Result<Place> {
        let values = self.gpu.values(there)?;
        let other = |(a, b): &(&f32, &f32)| **a != f16::from_f32(**b).to_f32();
        self.different += values.iter().zip(&here.values).filter(other).count();
        Ok(there)
    }
}

fn magnitudes_of(x: &Images) -> Images {
    Images { values: x.values.iter().map(|v| v.abs()).collect(), ..*x }
}

impl Arithmetic for CheckedFloats<'_, '_> {
    type Tensor = Place;

    fn conv(&mut self, layer: usize, x: &Place) -> Result<Place> {
        let there = self.gpu.conv(layer, x)?;
        let images = self.images(*x)?;
        let here = self.cpu.conv(layer, &images)?;
        let magnitudes = self.magnitudes.conv(layer, &magnitudes_of(&images))?;
        let problem = self.gpu.problem(layer, *x)?;
        let bound = conv::Plan::of(&self.caps, &problem)?.bound();
        let values = self.gpu.values(there)?;
        self.compare(&values, &here, &magnitudes, bound, problem.shape.geometry().k());
        Ok(there)
    }

    fn add(&mut self, a: &Place, b: &Place) -> Result<Place> {
        let there = self.gpu.add(a, b)?;
        let (a, b) = (self.images(*a)?, self.images(*b)?);
        let here = self.cpu.add(&a, &b)?;
        self.nearest(there, &here)
    }

    fn pool(&mut self, x: &Place) -> Result<Place> {
        let there = self.gpu.pool(x)?;
        let images = self.images(*x)?;
        let here = self.cpu.pool(&images)?;
        self.nearest(there, &here)
    }

    fn head(&mut self, x: &Place) -> Result<Place> {
        let there = self.gpu.head(x)?;
        let images = self.images(*x)?;
        let here = self.cpu.head(&images)?;
        let magnitudes = self.magnitudes.head(&magnitudes_of(&images))?;
        let classes = self.gpu.classes(there)?;
        self.compare(&classes, &here, &magnitudes, self.gpu.bound_of_head(&self.caps, x.batch)?, x.channels);
        Ok(there)
    }
}
