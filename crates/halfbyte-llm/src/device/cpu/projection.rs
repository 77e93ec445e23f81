//! Linear layers in memory.

use super::OnCpu;
use crate::arch::spec::LinearSpec;
use crate::decoder;
use crate::device::room;
use crate::error::{Error, Result};
use crate::load::{Loader, alike, below_each_other};
use halfbyte::cpu::Cpu;
use halfbyte::ops::{Linear, Weight};
use halfbyte::{Act, Float, Floats, FloatsMut, StoredTensor};
use halfbyte_checkpoint::Cut;
use halfbyte_checkpoint::{StoredLinear, StoredWeight};

/// Linear layers that read the same vector; their outputs lie side by side.
#[derive(Debug)]
pub struct Projection {
    /// More than one only where the checkpoint stores them in different formats.
    parts: Vec<Linear>,
}

impl Projection {
    /// Loads whole layers of the same k. Errors: missing or malformed tensors, other shapes than the specs', weights that
    /// cannot be quantised.
    pub fn load(loader: &mut Loader<'_>, layers: &[LinearSpec]) -> Result<Self> {
        let whole: Vec<_> = layers.iter().map(|layer| (layer, Cut::whole(layer.shape.matrix()))).collect();
        decoder::projection(&whole, loader, &mut OnCpu)
    }

    /// Packs layers of the same k, as one product where they are stored alike. Errors name `prefix`.
    pub fn new(layers: &[StoredLinear<'_>], act: Act, prefix: &str) -> Result<Self> {
        let parts = layers.chunk_by(alike).map(|alike| pack(alike, act, prefix)).collect::<Result<_>>()?;
        Ok(Self { parts })
    }

    /// Outputs of all parts.
    pub fn n(&self) -> usize {
        self.parts.iter().map(Linear::n).sum()
    }

    /// Length of the reduction.
    pub fn k(&self) -> usize {
        self.parts.first().map_or(0, Linear::k)
    }

    /// Bytes that the packed weights take.
    pub fn bytes(&self) -> usize {
        self.parts.iter().map(Linear::bytes).sum()
    }

    /// The products that it is.
    pub fn parts(&self) -> &[Linear] {
        &self.parts
    }

    /// What multiplies m rows: a kernel, or those of its parts.
    pub fn kernel(&self, cpu: &Cpu, m: usize) -> Result<String> {
        let mut kernels: Vec<&str> = Vec::new();
        for part in &self.parts {
            let kernel = part.kernel(cpu, m, Float::F32, Float::F32)?;
            if !kernels.contains(&kernel) {
                kernels.push(kernel);
            }
        }
        Ok(kernels.join(", "))
    }

    /// Multiplies. Shapes: x `[m, k]`, y `[m, n]`; `part` is room for the outputs of one part.
    pub fn forward(&self, cpu: &Cpu, x: &[f32], m: usize, y: &mut [f32], part: &mut Vec<f32>) -> Result<()> {
        if let [only] = self.parts.as_slice() {
            return Ok(only.forward(cpu, Floats::F32(x), m, FloatsMut::F32(y))?);
        }
        let (n, mut from) = (self.n(), 0);
        for linear in &self.parts {
            let of_part = linear.n();
            let part = room(part, m * of_part);
            linear.forward(cpu, Floats::F32(x), m, FloatsMut::F32(part))?;
            for (y, part) in y.chunks_exact_mut(n).zip(part.chunks_exact(of_part)) {
                y[from..from + of_part].copy_from_slice(part);
            }
            from += of_part;
        }
        Ok(())
    }
}

/// Packs layers that are alike, one below the other; errors name `prefix`.
fn pack(layers: &[StoredLinear<'_>], act: Act, prefix: &str) -> Result<Linear> {
    let named = |source| Error::Weight {
        name: prefix.to_owned(),
        expected: "weights that can be packed".to_owned(),
        got: format!("{source}"),
    };
    let outputs = |layer: &StoredLinear<'_>| layer.weight.shape()[0];
    let linear = match &layers[0].weight {
        StoredWeight::Quantized(_) => {
            let parts: Vec<&StoredTensor<'_>> = layers
                .iter()
                .filter_map(|l| if let StoredWeight::Quantized(w) = &l.weight { Some(w) } else { None })
                .collect();
            Linear::new(Weight::Stored(&parts, act))
        }
        StoredWeight::Dense { floats, shape: [_, k] } => {
            let parts: Vec<Floats<'_>> = layers
                .iter()
                .filter_map(|l| {
                    if let StoredWeight::Dense { floats, .. } = &l.weight { Some(floats.as_floats()) } else { None }
                })
                .collect();
            let n = layers.iter().map(outputs).sum();
            match parts.as_slice() {
                [single] => Linear::new(Weight::Dense(*single, [n, *k])),
                several => Linear::new(Weight::Dense(below_each_other(several, floats.dtype()).as_floats(), [n, *k])),
            }
        }
    };
    let linear = linear.map_err(named)?;
    if layers.iter().all(|l| l.bias.is_none()) {
        return Ok(linear);
    }
    let bias = layers.iter().flat_map(|l| l.bias.clone().unwrap_or_else(|| vec![0.0; outputs(l)])).collect();
    linear.with_bias(bias).map_err(named)
}
