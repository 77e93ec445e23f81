//! Marlin: GPTQ's symmetric 4-bit codes, repacked for the kernel of that name: `B`, `s`, `workspace`.
//!
//! ```text
//! B          i32 [K/16, 2N]   tiles of 16 inputs × 64 outputs, 128 words each, side by side; see [`unpack`]
//! s          f16 [G, N]       scales, shuffled within runs of 64 outputs, or of 32 if there is one group; see [`scales`]
//! workspace  i32              what the kernel counts in; nothing of the weights
//! w[k, n] = s[k / 128, n] · (q[k, n] − 8)
//! ```
//!
//! K is a multiple of 128 and N of 256. A group has 128 inputs, or all of them. [`halfbyte::QTensor`] is the transpose,
//! `[n, k]` with n = N and k = K.
//!
//! Source: the packer of AutoGPTQ 0.7.1 (`qlinear_marlin.py`, after IST-DASLab's), whose output the tests read to its
//! exact values.

use super::{Description, Scheme, StoredFormat, StoredModule, StoredWeight, Weights, matrix};
use crate::config::{GptqSettings, QuantizationConfig};
use crate::error::{Error, Result};
use crate::finding::Finding;
use crate::safetensors::DType;
use halfbyte::{Group, QTensor, WeightFormat, Zero, Zeros};
use rayon::prelude::*;

/// The scheme's line in [`super::SCHEMES`].
pub(super) const SCHEME: Scheme = Scheme {
    name: "marlin",
    parts: &["B", "s", "workspace"],
    activations: &[],
    detect: |weights, prefix| {
        let checkpoint = weights.checkpoint();
        checkpoint.get(&format!("{prefix}.B")).is_some_and(|info| info.dtype == DType::I32)
            && checkpoint.contains(&format!("{prefix}.s"))
    },
    describe: |weights, prefix| {
        let Module { format, shape, findings } = examine(weights, prefix)?;
        Ok(Description { format: StoredFormat::Codes(format), shape, act_order: false, findings })
    },
    load,
};

/// Inputs of a group, if there is more than one.
const GROUP: usize = 128;
/// Inputs and outputs of a tile.
const TILE: [usize; 2] = [16, 64];
/// Words of a tile.
const TILE_WORDS: usize = TILE[0] * TILE[1] / 8;

struct Module {
    format: WeightFormat,
    shape: [usize; 2],
    findings: Vec<Finding>,
}

fn examine(weights: &Weights, prefix: &str) -> Result<Module> {
    let checkpoint = weights.checkpoint();
    let words = checkpoint.info(&format!("{prefix}.B"))?;
    let [rows, columns] = matrix(checkpoint, words.name, DType::I32)?;
    let dimensions = rows.checked_mul(TILE[0]).map(|k| [columns / 2, k]);
    let Some([n, k]) = dimensions.filter(|&[n, k]| n > 0 && k > 0 && k % 128 == 0 && n % 256 == 0 && columns % 2 == 0)
    else {
        let what = format!(
            "tensor `{}`: expected [inputs / 16, outputs · 2] with inputs a multiple of 128 and outputs of 256, got {:?}; \
             is this Marlin's?",
            words.name, words.shape
        );
        return Err(Error::malformed(words.file, what));
    };
    let scales = checkpoint.info(&format!("{prefix}.s"))?;
    let unexpected = || {
        let what = format!(
            "tensor `{}`: expected floats [1, {n}] or [{}, {n}] (one group, or groups of {GROUP}, for the {k} inputs of \
             `B`), got {} {:?}",
            scales.name,
            k / GROUP,
            scales.dtype,
            scales.shape
        );
        Error::malformed(scales.file, what)
    };
    let scale = scales.dtype.float().ok_or_else(unexpected)?;
    let groups = match *scales.shape {
        [groups, width] if width == n && (groups == 1 || groups == k / GROUP) => groups,
        _ => return Err(unexpected()),
    };
    let settings = match weights.quantization() {
        Some(QuantizationConfig::Gptq(config)) => Some(config.settings_of(prefix)).filter(|settings| settings.known),
        _ => None,
    };
    let (group, findings) = labelled(settings, prefix, k, groups);
    if groups > 1 && settings.is_some_and(|settings| settings.act_order) {
        let what = format!(
            "module `{prefix}`: the config says desc_act, but Marlin's tensors have no g_idx: the order of columns is \
             unknown"
        );
        return Err(Error::malformed(words.file, what));
    }
    let format = WeightFormat { bits: 4, group, zero: Zero::Symmetric, scale, channel_scale: None };
    Ok(Module { format, shape: [n, k], findings })
}

/// The groups, with what the config says otherwise.
fn labelled(settings: Option<GptqSettings>, prefix: &str, k: usize, groups: usize) -> (Group, Vec<Finding>) {
    let told = if groups == 1 { Group::Channel } else { Group::Size(GROUP) };
    let Some(settings) = settings else { return (told, Vec::new()) };
    let mut findings = Vec::new();
    let mut find = |text: String| findings.push(Finding::new(prefix, text));
    if settings.bits != 4 {
        find(format!("the config says {} bits for it, but Marlin's tensors hold 4; read as 4 bits", settings.bits));
    }
    if settings.sym == Some(false) {
        find("the config says sym false, but Marlin's tensors have no zero points; read as symmetric".into());
    }
    let Some(size) = settings.group_size else { return (told, findings) };
    let declared = size.map_or(Group::Channel, Group::Size);
    if declared.count(k) == groups {
        return (declared, findings);
    }
    let says = size.map_or("-1".to_owned(), |size| size.to_string());
    let is = if groups == 1 { "one group" } else { "groups of 128" };
    find(format!("the config says group_size {says}, but `s` has {is}; read as {is}"));
    (told, findings)
}

fn load(weights: &Weights, prefix: &str) -> Result<StoredModule<'static>> {
    let Module { format, shape: [n, k], findings } = examine(weights, prefix)?;
    let checkpoint = weights.checkpoint();
    let codes = unpack(&checkpoint.ints(&format!("{prefix}.B"))?, [n, k]);
    let scales = scales(&checkpoint.floats(&format!("{prefix}.s"))?.to_f32(), n, format.group.count(k));
    let tensor = QTensor::new(format, [n, k], codes, scales, Zeros::Symmetric, None).map_err(Error::numbers(prefix))?;
    Ok(StoredModule { weight: StoredWeight::Quantized(tensor.into()), findings })
}

/// Words `[k/16, 2n]` to codes `[n, k]`.
///
/// A tile of 16 inputs × 64 outputs is what 32 threads hold of four tensor-core operands of 16 × 16. Word 4t + j is that
/// of thread t in operand j, whose outputs are 16j to 16j + 15. In it lie the inputs i, i + 1, i + 8 and i + 9, with
/// i = 2 (t mod 4), of the outputs t/4 and t/4 + 8; the nibbles have them in the order 0 2 4 6 1 3 5 7.
fn unpack(words: &[i32], [n, k]: [usize; 2]) -> Vec<u8> {
    const ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];
    const INPUTS: [usize; 4] = [0, 1, 8, 9];
    let mut codes = vec![0u8; n * k];
    codes.par_chunks_mut(TILE[1] * k).enumerate().for_each(|(column, codes)| {
        for row in 0..k / TILE[0] {
            let tile = &words[row * 2 * n + column * TILE_WORDS..][..TILE_WORDS];
            for (at, &word) in tile.iter().enumerate() {
                let (thread, operand) = (at / 4, at % 4);
                for (nibble, of) in ORDER.into_iter().enumerate() {
                    let output = 16 * operand + thread / 4 + 8 * (of / 4);
                    let input = TILE[0] * row + 2 * (thread % 4) + INPUTS[of % 4];
                    codes[output * k + input] = (word as u32 >> (4 * nibble) & 15) as u8;
                }
            }
        }
    });
    codes
}

/// Scales `[groups, n]` to `[n, groups]` in the order of the outputs.
///
/// With several groups, runs of 64 are a transposed 8 × 8: place 8i + j has output i + 8j. With one, runs of 32 lie as a
/// thread needs them at the end: place 8i + j has output 2i + (0 1 8 9 16 17 24 25)[j].
fn scales(stored: &[f32], n: usize, groups: usize) -> Vec<f32> {
    const OUTPUTS: [usize; 8] = [0, 1, 8, 9, 16, 17, 24, 25];
    let run = if groups == 1 { 32 } else { 64 };
    let mut scales = vec![0.0; stored.len()];
    for (at, &scale) in stored.iter().enumerate() {
        let (group, place) = (at / n, at % n);
        let (i, j) = (place % run / 8, place % 8);
        let output = place / run * run + if groups == 1 { 2 * i + OUTPUTS[j] } else { i + 8 * j };
        scales[output * groups + group] = scale;
    }
    scales
}
