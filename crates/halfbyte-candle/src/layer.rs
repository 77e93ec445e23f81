//! The layer, and what it does on a CPU.

use candle_core::{CpuStorage, CustomOp1, DType, Device, Error, Layout, Module, Result, Shape, Tensor, bail};
use half::{bf16, f16};
use halfbyte::quantize::{Rtn, rtn};
use halfbyte::{Act, Cpu, Floats, FloatsMut, Format, Linear, Weight};
use halfbyte_checkpoint::{StoredLinear, StoredWeight, Weights};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// `y = x · Wᵀ + bias` with W in codes (or dense), packed once for the device that it was made for. Clones share it.
///
/// It is a [`Module`]: `forward` takes x `[.., k]` in f32, f16 or bf16 on the layer's device and gives y `[.., n]` of the same type.
/// An x that is contiguous is read where it lies; another is made so by candle first. *Accuracy:* [`halfbyte::Linear::bound`].
/// *Errors:* another last dimension, type or device. `backward` through it is candle's error that it is not supported.
#[derive(Clone, Debug)]
pub struct QLinear(pub(crate) Arc<Layer>);

/// Where the packed weight lies.
#[derive(Debug)]
pub(crate) enum Layer {
    Cpu(Linear<Cpu>),
    #[cfg(feature = "cuda")]
    Cuda(halfbyte::Linear<halfbyte::Cuda>),
}

/// halfbyte's errors as candle's.
pub(crate) fn wrap(error: impl std::fmt::Display + Send + Sync + 'static) -> Error {
    Error::wrap(error)
}

/// The threads that all layers on the CPU share. They are started when a first layer is made.
fn cpu() -> Result<&'static Cpu> {
    static CPU: OnceLock<Cpu> = OnceLock::new();
    static OPENING: Mutex<()> = Mutex::new(());
    if let Some(cpu) = CPU.get() {
        return Ok(cpu);
    }
    let _one_at_a_time = OPENING.lock().unwrap_or_else(PoisonError::into_inner);
    match CPU.get() {
        Some(cpu) => Ok(cpu),
        None => {
            let cpu = Cpu::all_threads().map_err(wrap)?;
            Ok(CPU.get_or_init(|| cpu))
        }
    }
}

impl QLinear {
    /// Packs a weight for a device of candle's, with a bias `[n]` if there is one.
    ///
    /// *Errors:* those of [`Linear::on`], a bias of another length, a device that halfbyte does not have (Metal; CUDA without the
    /// feature `cuda`).
    pub fn new(weight: Weight<'_>, bias: Option<Vec<f32>>, device: &Device) -> Result<Self> {
        let layer = match device {
            Device::Cpu => {
                let linear = Linear::on(cpu()?, weight).map_err(wrap)?;
                Layer::Cpu(match bias {
                    Some(bias) => linear.with_bias(bias).map_err(wrap)?,
                    None => linear,
                })
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => Layer::Cuda(crate::on_cuda::pack(device, weight, bias)?),
            other => {
                bail!("halfbyte: expected a CPU or, with the feature `cuda`, a CUDA device, got {:?}", other.location())
            }
        };
        Ok(Self(Arc::new(layer)))
    }

    /// Quantises a weight `[n, k]` by rounding to nearest, to a format as `w4a16-g128`, for the device that it lies on.
    ///
    /// *Errors:* a weight that is no matrix of f32, f16 or bf16, NaN or infinity in it, a format that does not parse, a bias that is
    /// not `[n]`, and those of [`QLinear::new`].
    pub fn quantize(weight: &Tensor, bias: Option<&Tensor>, format: &str) -> Result<Self> {
        let format: Format = format.parse().map_err(wrap)?;
        let (n, k) = weight.dims2()?;
        let of = |weight: Floats<'_>| rtn(weight, [n, k], format.weight, Rtn::default()).map_err(wrap);
        let flat = weight.flatten_all()?;
        let quantized = match weight.dtype() {
            DType::F32 => of((&flat.to_vec1::<f32>()?).into()),
            DType::F16 => of((&flat.to_vec1::<f16>()?).into()),
            DType::BF16 => of((&flat.to_vec1::<bf16>()?).into()),
            other => bail!("halfbyte: expected a weight of f32, f16 or bf16, got {other:?}"),
        }?;
        let bias = bias.map(|bias| bias.to_dtype(DType::F32)?.to_vec1::<f32>()).transpose()?;
        Self::new(Weight::Quantized(&quantized, format.act), bias, weight.device())
    }

    /// Takes a layer out of a checkpoint by its name, as `model.layers.0.self_attn.q_proj`, with its bias if there is one. `act`: what
    /// becomes of activations where the layer is quantised.
    ///
    /// *Errors:* those of [`Weights::stored_linear`] and of [`QLinear::new`].
    pub fn load(weights: &Weights, name: &str, act: Act, device: &Device) -> Result<Self> {
        let StoredLinear { weight, bias, .. } = weights.stored_linear(name).map_err(wrap)?;
        match &weight {
            StoredWeight::Quantized(w) => Self::new(Weight::Stored(&[w], act), bias, device),
            StoredWeight::Dense { floats, shape } => Self::new(Weight::Dense(floats.as_floats(), *shape), bias, device),
        }
    }

    /// Outputs.
    pub fn n(&self) -> usize {
        match &*self.0 {
            Layer::Cpu(linear) => linear.n(),
            #[cfg(feature = "cuda")]
            Layer::Cuda(linear) => linear.n(),
        }
    }

    /// Inputs.
    pub fn k(&self) -> usize {
        match &*self.0 {
            Layer::Cpu(linear) => linear.k(),
            #[cfg(feature = "cuda")]
            Layer::Cuda(linear) => linear.k(),
        }
    }

    /// Bytes that the packed weight takes.
    pub fn bytes(&self) -> usize {
        match &*self.0 {
            Layer::Cpu(linear) => linear.bytes(),
            #[cfg(feature = "cuda")]
            Layer::Cuda(linear) => linear.bytes(),
        }
    }

    /// Rows of x, where its elements begin and end in its storage, and the shape of y.
    pub(crate) fn rows(&self, layout: &Layout) -> Result<(usize, [usize; 2], Shape)> {
        let (dims, k) = (layout.dims(), self.k());
        let Some((_, before)) = dims.split_last().filter(|(last, _)| **last == k) else {
            bail!("halfbyte: expected x of shape [.., {k}], got {dims:?}");
        };
        // As the op it can be applied to any tensor; `forward` has made it so.
        let Some((begin, end)) = layout.contiguous_offsets() else {
            bail!("halfbyte: expected a contiguous x, got strides {:?} of shape {dims:?}", layout.stride());
        };
        Ok((before.iter().product(), [begin, end], Shape::from([before, &[self.n()]].concat())))
    }
}

impl Module for QLinear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        // Nothing is copied where it is so already.
        x.contiguous()?.apply_op1(self.clone())
    }
}

impl CustomOp1 for QLinear {
    fn name(&self) -> &'static str {
        "halfbyte-linear"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        // The other variants are those of other features.
        #[allow(irrefutable_let_patterns)]
        let Layer::Cpu(linear) = &*self.0 else {
            bail!("halfbyte: expected x on the GPU where the weight lies, got one on the CPU");
        };
        let (m, [begin, end], shape) = self.rows(layout)?;
        let len = shape.elem_count();
        let run = |x: Floats<'_>, y: FloatsMut<'_>| linear.forward(cpu()?, x, m, y).map_err(wrap);
        Ok(match storage {
            CpuStorage::F32(x) => {
                let mut y = vec![0f32; len];
                run((&x[begin..end]).into(), (&mut y).into())?;
                (CpuStorage::F32(y), shape)
            }
            CpuStorage::F16(x) => {
                let mut y = vec![f16::ZERO; len];
                run((&x[begin..end]).into(), (&mut y).into())?;
                (CpuStorage::F16(y), shape)
            }
            CpuStorage::BF16(x) => {
                let mut y = vec![bf16::ZERO; len];
                run((&x[begin..end]).into(), (&mut y).into())?;
                (CpuStorage::BF16(y), shape)
            }
            _ => bail!("halfbyte: expected x of f32, f16 or bf16, got another type"),
        })
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        storage: &candle_core::CudaStorage,
        layout: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        crate::on_cuda::forward(self, storage, layout)
    }
}
