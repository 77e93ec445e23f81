//! Where models lie and compute.

use halfbyte::Float;
use std::sync::Arc;

/// Where a model lies and computes.
#[derive(Clone, Debug, Default)]
pub enum Device {
    /// In memory, with the CPU that a session is given.
    #[default]
    Cpu,
    /// On a GPU.
    Cuda(Gpu),
}

/// A GPU, and how a model computes on it.
#[derive(Clone, Debug)]
pub struct Gpu {
    /// The device.
    pub gpu: Arc<halfbyte::cuda::Gpu>,
    /// Type of what products read, and of the cache of keys and values: f16 as a rule, bf16 where numbers pass 65504, f32
    /// to compare. Everything else is f32.
    pub activations: Float,
    /// Whether what only products with quantised activations read is quantised where it is made, and not by a kernel of its own.
    /// It changes no bit; without it, to compare.
    pub fused: bool,
}

impl Gpu {
    /// Device `index`, with activations in f16. Errors: no driver, one too old, no such device.
    pub fn open(index: u32) -> halfbyte::Result<Self> {
        Ok(Self { gpu: Arc::new(halfbyte::cuda::Gpu::open(index)?), activations: Float::F16, fused: true })
    }
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(Gpu { gpu, activations, .. }) => {
                let info = gpu.context().info();
                write!(f, "cuda:{} ({}), activations {activations}", info.index, info.name)
            }
        }
    }
}
