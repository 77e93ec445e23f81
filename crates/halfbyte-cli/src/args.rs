//! Options that several commands share.

pub mod conv;
mod whole;

pub use whole::whole;

use clap::{Args, ValueEnum};
use halfbyte::kernel::KvType;
use halfbyte::layout::codes::FpaIntB;
use halfbyte::quantize::{Rtn, SymmetricScale};
use halfbyte::{Act, Float, Format, Group};
use halfbyte_checkpoint::{GptqVersion, Hint, Target};
use std::str::FromStr;

/// Options of every command.
#[derive(Clone, Debug, Args)]
pub struct Common {
    /// Print one JSON object instead of text.
    #[arg(long, global = true)]
    pub json: bool,
    /// Where to compute: cpu, cuda or cuda:I; auto takes the first GPU that works, else the CPU. Run, serve, eval, demo, and bench
    /// model and models compute on GPUs; if asked for one, bench matmul, conv, experts, launch and ranks do too, and explain tells of
    /// it. Everything else is done by the CPU. With --tp each rank of a machine has a GPU, in order, or those of cuda:I,J,...
    #[arg(long, global = true, value_name = "DEVICE", default_value = "auto")]
    pub device: Device,
    /// Threads to compute with [default: all that the system offers].
    #[arg(long, global = true, value_name = "N", value_parser = whole::<u16>(1..=1024))]
    pub threads: Option<u16>,
    /// No progress and no notes on standard error.
    #[arg(long, short, global = true)]
    pub quiet: bool,
}

/// A device as `--device` names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Device {
    /// The best there is.
    Auto,
    /// The CPU.
    Cpu,
    /// GPUs, one for each rank of this machine; of none, as many as it takes from the first on.
    Cuda(Vec<u32>),
}

impl FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Device::Auto),
            "cpu" => Ok(Device::Cpu),
            "cuda" => Ok(Device::Cuda(Vec::new())),
            _ => match text.strip_prefix("cuda:").map(|list| list.split(',').map(str::parse).collect()) {
                Some(Ok(numbers)) => Ok(Device::Cuda(numbers)),
                _ => Err("expected auto, cpu, cuda, cuda:I or cuda:I,J,...".to_owned()),
            },
        }
    }
}

/// What becomes of activations, as `--act` names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ActArg {
    /// Quantised on the fly to 8 bits, one scale a row and group.
    A8,
    /// Quantised on the fly to 8 bits, with scale and offset.
    #[value(name = "a8-xasym")]
    A8Xasym,
    /// Exact.
    A16,
    /// Exact.
    A32,
}

impl ActArg {
    /// As a command line spells it.
    pub fn name(self) -> &'static str {
        match self {
            ActArg::A8 => "a8",
            ActArg::A8Xasym => "a8-xasym",
            ActArg::A16 => "a16",
            ActArg::A32 => "a32",
        }
    }
}

impl From<ActArg> for Act {
    fn from(act: ActArg) -> Act {
        match act {
            ActArg::A8 => Act::A8,
            ActArg::A8Xasym => Act::A8Asym,
            ActArg::A16 => Act::A16,
            ActArg::A32 => Act::A32,
        }
    }
}

/// What keys and values are kept as, as `--kv` names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KvArg {
    /// As they come.
    F32,
    /// Halfs.
    F16,
    /// Brain floats.
    Bf16,
    /// Codes of 8 bits.
    Int8,
}

impl From<KvArg> for KvType {
    fn from(kv: KvArg) -> KvType {
        match kv {
            KvArg::F32 => KvType::F32,
            KvArg::F16 => KvType::F16,
            KvArg::Bf16 => KvType::Bf16,
            KvArg::Int8 => KvType::Int8,
        }
    }
}

/// Options of rounding to nearest.
#[derive(Clone, Copy, Debug, Args)]
pub struct RtnArgs {
    /// Search each group's scale for the least squared error (slower, often better).
    #[arg(long)]
    pub search: bool,
    /// How a symmetric scale follows from the largest magnitude: narrow divides it by 2^(b-1) - 1, full by (2^b - 1) / 2.
    #[arg(long, value_enum, default_value = "narrow", value_name = "RANGE")]
    pub symmetric_range: SymmetricRange,
}

/// The two conventions for symmetric scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SymmetricRange {
    /// Both extremes are met exactly; the lowest code stays unused.
    Narrow,
    /// Every code is used; an extreme on the positive side is off by half a step.
    Full,
}

impl From<RtnArgs> for Rtn {
    fn from(args: RtnArgs) -> Rtn {
        let symmetric = match args.symmetric_range {
            SymmetricRange::Narrow => SymmetricScale::Narrow,
            SymmetricRange::Full => SymmetricScale::Full,
        };
        Rtn { symmetric, search: args.search }
    }
}

/// Bits of the output head: 16 leaves it as floats.
pub fn head_bits(text: &str) -> std::result::Result<u32, String> {
    match text.parse() {
        Ok(bits @ (4 | 8 | 16)) => Ok(bits),
        _ => Err("expected 4, 8 or 16".to_owned()),
    }
}

/// Bits a code.
pub fn bits(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(bits @ (2 | 3 | 4 | 8)) => Ok(bits),
        _ => Err("expected 2, 3, 4 or 8".to_owned()),
    }
}

/// Weights along k that share a scale.
pub fn group(text: &str) -> Result<Group, String> {
    match text.parse() {
        Ok(-1i64) => Ok(Group::Channel),
        Ok(size @ 1..=0xff_ffff) => Ok(Group::Size(size as usize)),
        _ => Err("expected -1 (one scale a channel) or a size from 1 to 16777215".to_owned()),
    }
}

/// An architecture of GPUs that has a layout of fpA_intB kernels.
pub fn arch(text: &str) -> std::result::Result<u32, String> {
    let arch = text.parse().ok().filter(|&arch| FpaIntB::of_arch(arch).is_ok());
    arch.ok_or_else(|| format!("expected one of {}", FpaIntB::ARCHS.map(|arch| arch.to_string()).join(", ")))
}

/// What a person knows of a model whose files do not say it.
#[derive(Clone, Copy, Debug, Args)]
pub struct HintArgs {
    /// Weights along k that share a scale, -1 for all of an output channel: for GPTQ files without a config, where the shapes
    /// leave it open. What files say is not overruled.
    #[arg(long, value_name = "N", value_parser = group)]
    pub group: Option<Group>,
    /// Architecture of GPUs in whose layout codes lie, as 70 or 80: for fpA_intB weights (TensorRT-LLM, Paddle) without a config
    /// that says it.
    #[arg(long, value_name = "SM", value_parser = arch)]
    pub arch: Option<u32>,
}

impl HintArgs {
    /// Nothing is known.
    pub const NONE: Self = Self { group: None, arch: None };
}

impl From<HintArgs> for Hint {
    fn from(args: HintArgs) -> Hint {
        Hint { group: args.group, arch: args.arch }
    }
}

/// A form of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FormArg {
    /// GPTQ: `gptq` if every format is symmetric, else `gptq_v2`.
    Gptq,
    /// GPTQ with zero points stored less one, as AutoGPTQ does.
    #[value(name = "gptq_v1")]
    GptqV1,
    /// GPTQ with zero points as they are.
    #[value(name = "gptq_v2")]
    GptqV2,
    /// AWQ, layout gemm: 4 bits.
    Awq,
    /// compressed-tensors, pack-quantized.
    CompressedTensors,
    /// The layout of fpA_intB kernels for sm_75 to sm_89, under TensorRT-LLM's names: 4 or 8 bits.
    #[value(name = "fpa_intb")]
    FpaIntB,
    /// The same for sm_70.
    #[value(name = "fpa_intb_sm70")]
    FpaIntBSm70,
    /// ONNX: a MatMulNBits node for each layer.
    Onnx,
    /// GGUF: Q4_0, Q4_1 and Q8_0 blocks, with config and tokenizer in one file.
    Gguf,
    /// Our own, which holds every format; only halfbyte reads it.
    Native,
}

impl FormArg {
    /// Its name.
    pub fn name(self) -> &'static str {
        Target::from(self).name()
    }
}

impl From<FormArg> for Target {
    fn from(form: FormArg) -> Target {
        match form {
            FormArg::Gptq => Target::Gptq(None),
            FormArg::GptqV1 => Target::Gptq(Some(GptqVersion::V1)),
            FormArg::GptqV2 => Target::Gptq(Some(GptqVersion::V2)),
            FormArg::Awq => Target::Awq,
            FormArg::CompressedTensors => Target::CompressedTensors,
            FormArg::FpaIntB => Target::FpaIntB(FpaIntB::Interleaved),
            FormArg::FpaIntBSm70 => Target::FpaIntB(FpaIntB::RowMajor),
            FormArg::Onnx => Target::Onnx,
            FormArg::Gguf => Target::Gguf,
            FormArg::Native => Target::Native,
        }
    }
}

/// A float type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FloatArg {
    /// Single precision.
    F32,
    /// Half precision.
    F16,
    /// Brain float.
    Bf16,
}

impl From<FloatArg> for Float {
    fn from(float: FloatArg) -> Float {
        match float {
            FloatArg::F32 => Float::F32,
            FloatArg::F16 => Float::F16,
            FloatArg::Bf16 => Float::BF16,
        }
    }
}

/// What the weights of a product are: a format, or dense floats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightKind {
    /// Codes.
    Quantized(Format),
    /// Floats.
    Dense(Float),
}

impl WeightKind {
    /// The format; None if dense.
    pub fn format(self) -> Option<Format> {
        match self {
            WeightKind::Quantized(format) => Some(format),
            WeightKind::Dense(_) => None,
        }
    }
}

impl FromStr for WeightKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "f32" => Ok(WeightKind::Dense(Float::F32)),
            "f16" => Ok(WeightKind::Dense(Float::F16)),
            "bf16" => Ok(WeightKind::Dense(Float::BF16)),
            _ => text
                .parse()
                .map(WeightKind::Quantized)
                .map_err(|e: halfbyte::Error| format!("{e}; dense weights are f32, f16 or bf16")),
        }
    }
}

impl std::fmt::Display for WeightKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            WeightKind::Quantized(format) => format.fmt(f),
            WeightKind::Dense(float) => float.fmt(f),
        }
    }
}
