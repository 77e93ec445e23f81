//! The forms of files that a quantised model can be written in.

use crate::config::{GptqVersion, is_head};
use crate::error::{Error, Result};
use crate::safetensors::{self, DType, TensorSpec};
use crate::scheme::{Weights, awq, compressed_tensors, fpa_intb, gguf, gptq, matmul_nbits, native};
use crate::writer::Writer;
use half::{bf16, f16};
use halfbyte::layout::codes::FpaIntB;
use halfbyte::{Float, QTensor, WeightFormat, Zero};
use serde_json::Value;
use std::borrow::Cow;
use std::path::Path;

/// A form of files that quantised models are written in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// GPTQ, with zero points stored in one way or the other. None: `gptq` if every format is symmetric, else `gptq_v2`.
    ///
    /// The older `gptq` cannot hold a zero point of 0, and GPTQModel refuses asymmetric models in it that it has not
    /// written itself; symmetric ones are read by everything.
    Gptq(Option<GptqVersion>),
    /// AWQ in the layout `gemm`: 4 bits, integer zero points.
    Awq,
    /// compressed-tensors, `pack-quantized`.
    CompressedTensors,
    /// TensorRT-LLM's tensors, in a layout of fpA_intB kernels: 4 or 8 bits.
    FpaIntB(FpaIntB),
    /// ONNX: a `MatMulNBits` node for each module, other tensors as initialisers.
    Onnx,
    /// GGUF: blocks of Q4_0, Q4_1 and Q8_0; config and tokenizer are in the file too.
    Gguf,
    /// Our own, which holds every format.
    Native,
}

impl Target {
    /// Its name, for GPTQ, AWQ, compressed-tensors and our own as `quant_method` spells it.
    pub fn name(self) -> &'static str {
        match self {
            Target::Gptq(_) => "gptq",
            Target::Awq => "awq",
            Target::CompressedTensors => "compressed-tensors",
            Target::FpaIntB(_) => "fpa_intb",
            Target::Onnx => "onnx",
            Target::Gguf => "gguf",
            Target::Native => "halfbyte",
        }
    }

    /// Whether it says which group a column belongs to (act-order).
    pub(crate) fn has_group_index(self) -> bool {
        matches!(self, Target::Gptq(_) | Target::Native)
    }

    /// The format nearest to this one that the form has for a module of shape `[n, k]`. Whether it holds the module's
    /// numbers exactly is for [`QTensor::express`] to say. Error: there is none, for the reason that is given.
    pub fn nearest(self, format: WeightFormat, shape: [usize; 2]) -> std::result::Result<WeightFormat, String> {
        match self {
            Target::Gptq(_) => gptq::nearest(format, shape),
            Target::Awq => awq::nearest(format, shape),
            Target::CompressedTensors => compressed_tensors::nearest(format, shape),
            Target::FpaIntB(layout) => fpa_intb::nearest(layout, format, shape),
            Target::Onnx => matmul_nbits::nearest(format, shape),
            Target::Gguf => gguf::nearest(format, shape),
            Target::Native => native::nearest(format, shape),
        }
    }

    /// Whether the form holds modules of this format and shape `[n, k]`, as far as these tell. Error: why not.
    pub fn check(self, format: WeightFormat, shape: [usize; 2]) -> std::result::Result<(), String> {
        let nearest = self.nearest(format, shape)?;
        if nearest == format { Ok(()) } else { Err(differences(format, nearest)) }
    }

    /// What writes this form of a model, in which some format is asymmetric or none. Error: the model's config or
    /// tokenizer cannot be said in it.
    pub(crate) fn form(self, source: &Weights, asymmetric: bool) -> Result<Box<dyn Form>> {
        Ok(match self {
            Target::Gptq(version) => {
                let usual = if asymmetric { GptqVersion::V2 } else { GptqVersion::V1 };
                Box::new(gptq::Writer(version.unwrap_or(usual)))
            }
            Target::Awq => Box::new(awq::Writer),
            Target::CompressedTensors => Box::new(compressed_tensors::Writer),
            Target::FpaIntB(layout) => Box::new(fpa_intb::Writer(layout)),
            Target::Onnx => Box::new(matmul_nbits::OnnxForm),
            Target::Gguf => Box::new(gguf::GgufForm::new(source)?),
            Target::Native => Box::new(native::Writer),
        })
    }
}

/// Why a form does not take a format as it is.
fn differences(format: WeightFormat, nearest: WeightFormat) -> String {
    let mut reasons = Vec::new();
    if format.bits != nearest.bits {
        reasons.push(format!("its codes have {} bits, not {}", nearest.bits, format.bits));
    }
    if format.group != nearest.group {
        reasons.push(format!("it has {}, not {}", nearest.group, format.group));
    }
    if format.zero != nearest.zero {
        reasons.push(match nearest.zero {
            Zero::Symmetric => "it has no zero points".to_owned(),
            Zero::Integer => "it has integer zero points only, no float offsets".to_owned(),
            Zero::Float => "it has float offsets only, no zero points".to_owned(),
        });
    }
    if format.channel_scale != nearest.channel_scale {
        reasons.push("its scales have one level, not two".to_owned());
    }
    if format.scale != nearest.scale {
        reasons.push(format!("its scales are {}, not {}", nearest.scale, format.scale));
    }
    reasons.join("; ")
}

/// What a form of files does with modules.
pub(crate) trait Form {
    /// The tensors that a module becomes, whose format is one of [`Target::nearest`].
    fn specs(&self, module: &str, format: WeightFormat, shape: [usize; 2]) -> Vec<TensorSpec>;

    /// Hands on these tensors' bytes, in that order. Error: numbers that the form cannot hold.
    fn pack(&self, module: &str, q: &QTensor, put: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()>;

    /// What a tensor that is not quantised becomes; None leaves it out. Error: it cannot be there.
    fn dense(&self, tensor: &TensorSpec) -> Result<Option<TensorSpec>> {
        Ok(Some(tensor.clone()))
    }

    /// Error: a tensor that is left out says what the rest of the model does not.
    fn check_left_out(&self, _tensor: &TensorSpec, _data: &[u8]) -> Result<()> {
        Ok(())
    }

    /// The data of such a tensor.
    fn dense_data<'a>(&self, _tensor: &TensorSpec, data: Cow<'a, [u8]>) -> Result<Cow<'a, [u8]>> {
        Ok(data)
    }

    /// Tensors that the form has of its own.
    fn extra(&self) -> &[(TensorSpec, Vec<u8>)] {
        &[]
    }

    /// The only file that is written; None: a folder with a config and what else a model has.
    fn only_file(&self) -> Option<&'static str> {
        None
    }

    /// `quantization_config` of a model; None where the tensors say it all. Error: what the config cannot say.
    fn config(&self, model: &Settings<'_>) -> Result<Option<Value>>;

    /// Begins the files of a model, whose tensors are these.
    fn create(
        &self,
        dir: &Path,
        tensors: &[TensorSpec],
        _model: &Settings<'_>,
        max_shard_bytes: u64,
    ) -> Result<Writer> {
        safetensors::create(dir, tensors, max_shard_bytes)
    }
}

/// A quantised module.
#[derive(Clone, Debug)]
pub(crate) struct Module {
    pub name: String,
    pub format: WeightFormat,
    /// Outputs and length of the reduction.
    pub shape: [usize; 2],
}

/// What a config has to say of a whole model.
#[derive(Debug)]
pub(crate) struct Settings<'a> {
    /// Every quantised module.
    pub quantized: &'a [Module],
    /// Linear layers that stay dense.
    pub dense: &'a [String],
    /// Whether any module was quantised in another order of columns.
    pub act_order: bool,
}

impl Settings<'_> {
    /// Whether the output head is quantised.
    pub fn has_head(&self) -> bool {
        self.quantized.iter().any(|module| is_head(&module.name))
    }

    /// The commonest value of a property; the first of equally common ones, so that the same model gives the same file.
    /// None: no module.
    pub fn commonest<T: PartialEq>(&self, property: impl Fn(&WeightFormat) -> T) -> Option<T> {
        let mut counts: Vec<(T, usize)> = Vec::new();
        for module in self.quantized {
            let value = property(&module.format);
            match counts.iter_mut().find(|(known, _)| *known == value) {
                Some((_, count)) => *count += 1,
                None => counts.push((value, 1)),
            }
        }
        counts.into_iter().rev().max_by_key(|(_, count)| *count).map(|(value, _)| value)
    }
}

/// A regular expression that matches this module's name alone, for Python's `re` as for ours: neither takes a backslash before letters,
/// whatever their script.
pub(crate) fn exactly(name: &str) -> String {
    format!("^{}$", regex::escape(name))
}

/// A refusal of a form to hold a module.
pub(crate) fn unrepresentable(module: &str, scheme: &'static str) -> impl Fn(String) -> Error {
    let module = module.to_owned();
    move |reason| Error::Unrepresentable { tensor: module.clone(), scheme, reason }
}

/// The scales in f16. Error: one that is not exact in it.
pub(crate) fn f16_scales(q: &QTensor) -> std::result::Result<Vec<f16>, String> {
    let scales: Vec<f16> = q.scales().iter().map(|&s| f16::from_f32(s)).collect();
    match scales.iter().zip(q.scales()).find(|(narrow, wide)| narrow.to_f32() != **wide) {
        None => Ok(scales),
        Some((narrow, wide)) => Err(format!("its scales are f16, and {wide} is not exact in it (nearest: {narrow})")),
    }
}

/// Hands on numbers that are exact in a type.
pub(crate) fn floats(values: &[f32], dtype: Float, put: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
    match dtype {
        Float::F16 => put(bytemuck::cast_slice(&values.iter().map(|&v| f16::from_f32(v)).collect::<Vec<_>>())),
        Float::BF16 => put(bytemuck::cast_slice(&values.iter().map(|&v| bf16::from_f32(v)).collect::<Vec<_>>())),
        Float::F32 => put(bytemuck::cast_slice(values)),
    }
}

/// A tensor of a module.
pub(crate) fn spec(module: &str, part: &str, dtype: DType, shape: &[usize]) -> TensorSpec {
    TensorSpec { name: format!("{module}.{part}"), dtype, shape: shape.to_vec() }
}
