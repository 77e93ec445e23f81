//! Sources of kernels, compiled into the program: what the run-time compiler is given.
//!
//! `HALFBYTE_CUDA_SOURCES` names a folder that is read instead, as this one (`crates/halfbyte/src/cuda`) while a kernel is
//! being written: edit, run again, build nothing.

use super::parameters::StructLayout;
use crate::error::{Error, Result};
use crate::tensor::Float;
use std::borrow::Cow;
use std::path::Path;

/// The environment variable that names a folder to read sources from.
pub const VARIABLE: &str = "HALFBYTE_CUDA_SOURCES";

/// A source file.
#[derive(Debug)]
pub struct Source {
    /// Path below this folder.
    pub path: &'static str,
    /// What it holds.
    pub text: &'static str,
    /// The structs that its kernels take, which [`Source::checked`] has C++ compare with its own.
    pub parameters: &'static [&'static StructLayout],
}

/// The headers of these names.
macro_rules! headers {
    ($($name:literal)+) => {
        &[$(Source {
            path: concat!("include/", $name),
            text: include_str!(concat!("include/", $name)),
            parameters: &[],
        }),+]
    };
}

/// Headers, included as `#include "ptx.cuh"`; all of them are handed to every compilation.
pub const HEADERS: &[Source] = headers![
    "activation.cuh"
    "ampere.cuh"
    "attention.cuh"
    "attention_tiles.cuh"
    "attention_wgmma.cuh"
    "binned_sum.cuh"
    "cluster_join.cuh"
    "conv_weights.cuh"
    "cp_async_ring.cuh"
    "decode_codes.cuh"
    "dense.cuh"
    "dequant.cuh"
    "early_launch.cuh"
    "epilogue.cuh"
    "exchange_words.cuh"
    "fixed_point.cuh"
    "flash_decoding.cuh"
    "floats.cuh"
    "folded_norm.cuh"
    "grouped.cuh"
    "hopper.cuh"
    "host_tokens.cuh"
    "image_rows.cuh"
    "images.cuh"
    "int8_layer.cuh"
    "int8_narrow.cuh"
    "int8_quads.cuh"
    "multiples.cuh"
    "next_norm.cuh"
    "output_function.cuh"
    "packing.cuh"
    "persistent_attention.cuh"
    "persistent_experts.cuh"
    "persistent_inputs.cuh"
    "persistent_multiples.cuh"
    "persistent_norms.cuh"
    "persistent_parts.cuh"
    "persistent_plan.cuh"
    "persistent_products.cuh"
    "persistent_ranks.cuh"
    "ptx.cuh"
    "quantize.cuh"
    "quantize_rows.cuh"
    "random.cuh"
    "ranks.cuh"
    "requantize.cuh"
    "rope.cuh"
    "stored_codes.cuh"
    "stream_k_schedule.cuh"
    "threads_of_row.cuh"
    "warp.cuh"
    "weight_atom.cuh"
    "wgmma.cuh"
    "wgmma_bytes.cuh"
    "wgmma_int8.cuh"
    "windows.cuh"
    "wna16_multiply.cuh"
    "wna16_rows.cuh"
    "wna16_mma.cuh"
    "wna16_sm90.cuh"
    "wna16_stages.cuh"
    "wna8_multiply.cuh"
    "wna8_promote.cuh"
    "wna8_rows.cuh"
    "wna8_mma.cuh"
    "wna8_sm90.cuh"
];

impl Source {
    /// The text: the one compiled in, or that of the file in the folder of [`VARIABLE`]. Error: it cannot be read.
    pub fn read(&self) -> Result<Cow<'static, str>> {
        match std::env::var_os(VARIABLE).filter(|folder| !folder.is_empty()) {
            None => Ok(Cow::Borrowed(self.text)),
            Some(folder) => {
                let path = Path::new(&folder).join(self.path);
                let text = std::fs::read_to_string(&path);
                text.map(Cow::Owned).map_err(|e| Error::Device {
                    op: VARIABLE,
                    cause: format!("{} cannot be read: {e}", path.display()),
                })
            }
        }
    }

    /// What the compiler is given: [`Source::read`], then assertions that structs of C++ lie as those of Rust do.
    pub fn checked(&self) -> Result<Cow<'static, str>> {
        let text = self.read()?;
        if self.parameters.is_empty() {
            return Ok(text);
        }
        let assertions: String = self.parameters.iter().map(|layout| layout.assertions()).collect();
        // Errors in what follows are reported under this name.
        Ok(Cow::Owned(format!("{text}\n#line 1 \"structs of {}\"\n{assertions}", self.path)))
    }

    /// The headers that it includes, and those that these include, in the order of [`HEADERS`]. Error: one cannot be read.
    pub fn headers(&self) -> Result<Vec<&'static Source>> {
        let mut included = vec![false; HEADERS.len()];
        let mut unread = vec![self.read()?];
        while let Some(text) = unread.pop() {
            for line in text.lines().map(str::trim).filter(|line| line.starts_with("#include")) {
                let is_named = |header: &Source| line.contains(&format!("\"{}\"", header.name()));
                let place = HEADERS.iter().position(is_named);
                if let Some(place) = place.filter(|&place| !std::mem::replace(&mut included[place], true)) {
                    unread.push(HEADERS[place].read()?);
                }
            }
        }
        Ok(HEADERS.iter().zip(included).filter_map(|(header, is_included)| is_included.then_some(header)).collect())
    }

    /// The name by which other sources include it.
    pub fn name(&self) -> &'static str {
        self.path.rsplit('/').next().unwrap_or(self.path)
    }
}

/// A kernel of a source with its template arguments and definitions: what is compiled as one.
#[derive(Clone, Debug)]
pub struct Instance {
    /// The file.
    pub source: &'static Source,
    /// The kernel, with its arguments if it is a template: `plain<4, 8>`.
    pub expression: String,
    /// What is defined while it is compiled: `TOKENS=8`.
    pub defines: Vec<String>,
}

impl Instance {
    /// Without definitions.
    pub fn new(source: &'static Source, expression: impl Into<String>) -> Self {
        Self { source, expression: expression.into(), defines: Vec::new() }
    }

    /// With these definitions.
    pub fn with(self, defines: impl IntoIterator<Item = String>) -> Self {
        Self { defines: defines.into_iter().collect(), ..self }
    }
}

impl Instance {
    /// With one more definition of the kernels for packed weights, or in the place of one: `HB_name=value`.
    pub fn defining(mut self, name: &str, value: impl std::fmt::Display) -> Self {
        let define = format!("HB_{name}={value}");
        match self.defines.iter_mut().find(|other| other.starts_with(&format!("HB_{name}="))) {
            Some(other) => *other = define,
            None => self.defines.push(define),
        }
        self
    }
}

impl std::fmt::Display for Instance {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} of {}", self.expression, self.source.path)?;
        if !self.defines.is_empty() {
            write!(f, " with {}", self.defines.join(" "))?;
        }
        Ok(())
    }
}

/// A processor that kernels are compiled for: `sm_80`, `sm_90a`; or a virtual one, whose PTX the driver translates: `compute_75`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Arch {
    /// Compute capability: 10 · major + minor.
    pub number: u32,
    /// With the instructions that only this very processor has.
    pub specific: bool,
    /// As PTX, which runs on every later processor too.
    pub ptx: bool,
}

/// The environment variable that names an older processor whose code is run, as PTX (`compute_75`): to try it on a newer one.
pub const ARCH_VARIABLE: &str = "HALFBYTE_CUDA_ARCH";

impl Arch {
    /// The richest code for a device of this compute capability: from 9.0 on with its own instructions.
    pub fn of([major, minor]: [u32; 2]) -> Self {
        Self { number: 10 * major + minor, specific: major >= 9, ptx: false }
    }

    /// What a device of this compute capability runs: [`Arch::of`], or what [`ARCH_VARIABLE`] names. Error: no virtual processor, or
    /// one that is newer than the device.
    pub fn of_device(compute: [u32; 2]) -> Result<Self> {
        let own = Self::of(compute);
        let Some(name) = std::env::var_os(ARCH_VARIABLE).filter(|name| !name.is_empty()) else { return Ok(own) };
        let asked = name.to_str().and_then(|name| name.parse::<Self>().ok());
        asked.filter(|asked| asked.ptx && asked.number <= own.number).ok_or_else(|| {
            let expected = format!("a virtual processor as compute_75, at most compute_{}", own.number);
            Error::invalid(ARCH_VARIABLE, expected, name.to_string_lossy())
        })
    }

    /// Whether it is Hopper with its own instructions (TMA, wgmma): sm_90a.
    pub fn is_hopper(self) -> bool {
        self.number == 90 && self.specific
    }

    /// Whether tensor cores multiply halves of a type: f16 from sm_75 on, bf16 from sm_80 on.
    pub fn multiplies(self, x: Float) -> bool {
        match x {
            Float::F16 => self.number >= 75,
            Float::BF16 => self.number >= 80,
            Float::F32 => false,
        }
    }

    /// Shared memory that a block may have: of graphics cards less than of the processors of data centres.
    pub fn shared_bytes(self) -> u32 {
        match self.number {
            ..80 => 65_536,
            80 | 87 => 166_912,
            90..120 => 232_448,
            _ => 101_376,
        }
    }
}

impl std::fmt::Display for Arch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = if self.ptx { "compute" } else { "sm" };
        write!(f, "{kind}_{}{}", self.number, if self.specific { "a" } else { "" })
    }
}

impl std::str::FromStr for Arch {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let fail = || Error::invalid("processor", "a name like sm_80, sm_90a or compute_75", format!("\"{text}\""));
        let virtual_one = text.strip_prefix("compute_");
        let number = virtual_one.or_else(|| text.strip_prefix("sm_")).ok_or_else(fail)?;
        let (number, specific) = match number.strip_suffix('a') {
            Some(number) => (number, true),
            None => (number, false),
        };
        let digits = number.bytes().all(|byte| byte.is_ascii_digit());
        let number = number.parse().ok().filter(|number| digits && (10..1000).contains(number)).ok_or_else(fail)?;
        Ok(Self { number, specific, ptx: virtual_one.is_some() })
    }
}
