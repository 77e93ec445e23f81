//! Every operation on a GPU beside the same one on the CPU, on the same input.

use super::bytes::{ByteNetwork, Codes};
use super::floats::{FloatNetwork, Images};
use super::gpu::Gpu;
use super::machine::Machine;
use super::network::{Arithmetic, Network};
use half::f16;
use halfbyte::cpu::Cpu;
use halfbyte::format::reference::Bound;
use halfbyte::{Float, Format, Result};

/// Bytes on both: how many codes and classes have other bits.
pub struct CheckedBytes<'a, 'b> {
    pub gpu: &'a mut ByteNetwork<'b, Gpu>,
    pub cpu: &'a mut ByteNetwork<'b, Cpu>,
    pub compared: usize,
    pub different: usize,
}

impl CheckedBytes<'_, '_> {
    fn same(&mut self, there: Codes<Gpu>, here: Codes<Cpu>) -> Result<(Codes<Gpu>, Codes<Cpu>)> {
        let codes = self.gpu.machine.download_bytes(there.bytes())?;
        self.count(&codes, here.bytes());
        Ok((there, here))
    }

    fn count<T: PartialEq>(&mut self, there: &[T], here: &[T]) {
        self.compared += here.len();
        self.different += there.len().abs_diff(here.len()) + there.iter().zip(here).filter(|(a, b)| a != b).count();
    }
}

impl Arithmetic for CheckedBytes<'_, '_> {
    type Tensor = (Codes<Gpu>, Codes<Cpu>);

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
        let classes = self.gpu.machine.download(there.classes())?;
        self.count(&bits(&classes), &bits(here.classes()));
        Ok((there, here))
    }
}

/// Halves on a GPU beside f32 on the CPU: how near the greatest difference comes to the sum of both bounds.
pub struct CheckedFloats<'a, 'b> {
    gpu: &'a mut FloatNetwork<'b, Gpu>,
    cpu: FloatNetwork<'a, Cpu>,
    /// With the magnitudes of all weights and biases.
    magnitudes: FloatNetwork<'a, Cpu>,
    /// The greatest difference of a product, in parts of what both bounds allow: at most 1.
    pub worst: f64,
    /// Sums and means that are not what f32 rounded to a half is.
    pub different: usize,
}

impl<'a, 'b> CheckedFloats<'a, 'b> {
    pub fn new(cpu: &'a Cpu, network: &Network, format: Format, gpu: &'a mut FloatNetwork<'b, Gpu>) -> Result<Self> {
        let on_cpu = FloatNetwork::new(cpu, network, Some(format))?;
        let mut magnitudes = network.clone();
        let layers = magnitudes.layers.iter_mut().chain([&mut magnitudes.head]);
        for (layer, changes) in layers.zip(&on_cpu.changes) {
            layer.weights.iter_mut().zip(changes).for_each(|(w, change)| *w = (f64::from(*w) + change).abs() as f32);
            layer.bias.iter_mut().for_each(|bias| *bias = bias.abs());
            layer.relu = false;
        }
        let magnitudes = FloatNetwork::new(cpu, &magnitudes, None)?;
        Ok(Self { gpu, cpu: on_cpu, magnitudes, worst: 0.0, different: 0 })
    }

    fn images(&self, x: &Images<Gpu>) -> Result<Images<Cpu>> {
        let values = self.gpu.machine.download(&x.values)?;
        Ok(Images { values, batch: x.batch, size: x.size, channels: x.channels })
    }

    /// Compares results with magnitudes of their sums; a relu brings them no farther apart.
    fn compare(&mut self, there: &[f32], here: &Images<Cpu>, magnitudes: &Images<Cpu>, bound: Bound, k: usize) {
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
    fn nearest(&mut self, there: Images<Gpu>, here: &Images<Cpu>) -> Result<Images<Gpu>> {
        let values = self.images(&there)?.values;
        let other = |(a, b): &(&f32, &f32)| **a != f16::from_f32(**b).to_f32();
        self.different += values.iter().zip(&here.values).filter(other).count();
        Ok(there)
    }
}

fn magnitudes_of(x: &Images<Cpu>) -> Images<Cpu> {
    Images { values: x.values.iter().map(|v| v.abs()).collect(), ..*x }
}

impl Arithmetic for CheckedFloats<'_, '_> {
    type Tensor = Images<Gpu>;

    fn conv(&mut self, layer: usize, x: &Images<Gpu>) -> Result<Images<Gpu>> {
        let there = self.gpu.conv(layer, x)?;
        let images = self.images(x)?;
        let here = self.cpu.conv(layer, &images)?;
        let magnitudes = self.magnitudes.conv(layer, &magnitudes_of(&images))?;
        let conv = &self.gpu.layers[layer];
        let bound = conv.bound(self.gpu.machine.device(), x.batch, x.size, Float::F16, Float::F16)?;
        let k = conv.geometry().k();
        self.compare(&self.images(&there)?.values, &here, &magnitudes, bound, k);
        Ok(there)
    }

    fn add(&mut self, a: &Images<Gpu>, b: &Images<Gpu>) -> Result<Images<Gpu>> {
        let there = self.gpu.add(a, b)?;
        let (a, b) = (self.images(a)?, self.images(b)?);
        let here = self.cpu.add(&a, &b)?;
        self.nearest(there, &here)
    }

    fn pool(&mut self, x: &Images<Gpu>) -> Result<Images<Gpu>> {
        let there = self.gpu.pool(x)?;
        let images = self.images(x)?;
        let here = self.cpu.pool(&images)?;
        self.nearest(there, &here)
    }

    fn head(&mut self, x: &Images<Gpu>) -> Result<Images<Gpu>> {
        let there = self.gpu.head(x)?;
        let images = self.images(x)?;
        let here = self.cpu.head(&images)?;
        let magnitudes = self.magnitudes.head(&magnitudes_of(&images))?;
        let bound = self.gpu.head.bound(self.gpu.machine.device(), x.batch, Float::F16, Float::F32)?;
        self.compare(&self.images(&there)?.values, &here, &magnitudes, bound, x.channels);
        Ok(there)
    }
}
