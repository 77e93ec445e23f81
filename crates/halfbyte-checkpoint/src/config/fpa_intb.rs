//! What a checkpoint in the layouts of fpA_intB kernels declares: our own form of it, TensorRT-LLM's `quantization`, and Paddle's
//! `weight_quantize_algo`.
//!
//! Source: `QuantConfig` of TensorRT-LLM (`modeling_utils.py`), `QuantizationConfig` of PaddleNLP.

use super::patterns::{Meaning, ModulePatterns};
use super::{Fields, group_size, not_read, strings};
use crate::error::{Error, Result};
use halfbyte::layout::codes::FpaIntB;
use serde::Serialize;
use std::path::PathBuf;

/// What such a checkpoint declares. The tensors have the last word on bits and groups.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FpaIntBConfig {
    /// The file that says so.
    pub file: PathBuf,
    /// Architecture whose layout codes lie in, 10 · major + minor of the compute capability; TensorRT-LLM's configs do not say.
    pub arch: Option<u32>,
    /// Bits a code, as the algorithm's name has them.
    pub bits: u32,
    /// Whether bytes lie as they are, output by output (`llm.int8`).
    pub plain: bool,
    /// Group size along k, if it says; inner None: one scale an output (−1 in the file).
    pub group_size: Option<Option<usize>>,
    /// Modules that stay dense (`exclude_modules`).
    pub exclude_modules: ModulePatterns,
}

/// The algorithms that are read, as lower-case names, with their bits and whether bytes lie as they are.
const ALGORITHMS: [(&str, u32, bool); 8] = [
    ("w8a16", 8, false),
    ("w4a16", 4, false),
    ("w8a16_gptq", 8, false),
    ("w4a16_gptq", 4, false),
    ("w4a16_awq", 4, false),
    ("weight_only_int8", 8, false),
    ("weight_only_int4", 4, false),
    ("llm.int8", 8, true),
];

const ALGORITHM: [&str; 2] = ["quant_algo", "weight_quantize_algo"];

/// Whether these fields, in which no method is named, are TensorRT-LLM's or Paddle's.
pub(super) fn is_declared(fields: &Fields<'_>) -> bool {
    fields.has(&ALGORITHM)
}

/// The fields of such a config. *Errors:* an algorithm that is not read, an architecture that has no such layout.
pub(super) fn parse(fields: &Fields<'_>) -> Result<FpaIntBConfig> {
    let Some(algorithm) = fields.text(&ALGORITHM)? else {
        let what = format!("expected the field `{}`, found none", fields.path(ALGORITHM[0]));
        return Err(Error::malformed(fields.file, what));
    };
    let Some(&(_, bits, plain)) = ALGORITHMS.iter().find(|(name, ..)| *name == algorithm) else {
        return not_read(fields, ALGORITHM.iter().find(|key| fields.has(&[key])).unwrap_or(&ALGORITHM[0]), &algorithm);
    };
    let arch = match fields.integer(&["arch"])? {
        None => None,
        Some(arch) => match u32::try_from(arch) {
            Ok(arch) if FpaIntB::of_arch(arch).is_ok() => Some(arch),
            _ => {
                let what = format!("`{}`: expected one of {:?}, got {arch}", fields.path("arch"), FpaIntB::ARCHS);
                return Err(Error::unsupported(fields.file, what));
            }
        },
    };
    let per_output = matches!(algorithm.as_str(), "w8a16" | "w4a16");
    let group_size = group_size(fields)?;
    Ok(FpaIntBConfig {
        file: fields.file.to_owned(),
        arch,
        bits,
        plain,
        // TensorRT-LLM writes its default size there too, where it means nothing.
        group_size: if per_output { None } else { group_size },
        exclude_modules: ModulePatterns::new(strings(fields, "exclude_modules")?, |text| {
            match text.contains(['*', '?']) {
                false => Meaning::Name(text),
                true => Meaning::Wildcards(text),
            }
        }),
    })
}
