//! Which layout a module is in: shapes first, then the label.

use super::super::Weights;
use super::pack::{FAST_INPUTS, FAST_OUTPUTS};
use crate::checkpoint::Checkpoint;
use crate::config::{AwqConfig, AwqVersion, QuantizationConfig};
use crate::error::{Error, Result};
use crate::finding::Finding;
use crate::safetensors::DType;
use halfbyte::Group;

/// The AWQ part of what a checkpoint declares.
pub(super) fn declared(weights: &Weights) -> Option<&AwqConfig> {
    match weights.quantization() {
        Some(QuantizationConfig::Awq(config)) => Some(config),
        _ => None,
    }
}

/// Whether a module is AWQ's. Its shapes tell, and the config where they are GPTQ's too: scales are as wide as `qweight`
/// there. Without a config, tensors that may be of either are AWQ's unless they have a `g_idx`.
pub(super) fn detect(weights: &Weights, prefix: &str) -> bool {
    let checkpoint = weights.checkpoint();
    if !checkpoint.contains(&format!("{prefix}.qweight")) {
        return false;
    }
    let shapes = Shapes::of(checkpoint, prefix).ok();
    match weights.quantization() {
        Some(QuantizationConfig::Awq(_)) => shapes.is_none_or(|s| s.any_layout() || s.qweight[1] != s.scales[1]),
        Some(_) => shapes.is_some_and(|s| s.any_layout() && s.qweight[1] != s.scales[1]),
        None => shapes.is_some_and(|s| !checkpoint.contains(&format!("{prefix}.g_idx")) && s.any_layout()),
    }
}

/// Name of the zero points' tensor: llm-awq has one of its own.
pub(super) fn zeros_name(checkpoint: &Checkpoint, prefix: &str) -> String {
    let [usual, other] = ["qzeros", "scaled_zeros"].map(|part| format!("{prefix}.{part}"));
    if !checkpoint.contains(&usual) && checkpoint.contains(&other) { other } else { usual }
}

/// Shapes of a module's three tensors, and what tells the layouts apart beside them.
#[derive(Clone, Copy, Debug)]
struct Shapes {
    /// Whether `qweight` is of 16-bit words; else 32.
    short: bool,
    /// Whether `qzeros` are floats; else packed integers.
    float_zeros: bool,
    qweight: [usize; 2],
    qzeros: [usize; 2],
    scales: [usize; 2],
}

impl Shapes {
    /// Errors: a tensor is missing, is no matrix, is empty, or has a type that none of the layouts has.
    fn of(checkpoint: &Checkpoint, prefix: &str) -> Result<Self> {
        let part = |name: &str, expected: &str, fits: fn(DType) -> bool| {
            let info = checkpoint.info(name)?;
            match *info.shape {
                [rows, columns] if rows > 0 && columns > 0 && fits(info.dtype) => Ok((info.dtype, [rows, columns])),
                ref shape => {
                    let what =
                        format!("tensor `{name}`: expected a matrix of {expected}, got {} {shape:?}", info.dtype);
                    Err(Error::malformed(info.file, what))
                }
            }
        };
        let (words, qweight) =
            part(&format!("{prefix}.qweight"), "I32 or I16", |d| matches!(d, DType::I32 | DType::I16))?;
        let (_, scales) = part(&format!("{prefix}.scales"), "F16, BF16 or F32", |d| d.float().is_some())?;
        let zeros = zeros_name(checkpoint, prefix);
        let (zero, qzeros) = part(&zeros, "I32, F16, BF16 or F32", |d| d == DType::I32 || d.float().is_some())?;
        Ok(Self { short: words == DType::I16, float_zeros: zero != DType::I32, qweight, qzeros, scales })
    }

    /// The dimensions `[n, k]` in a layout and the number of groups that there is room for; None if the shapes are not
    /// that layout's.
    fn dimensions(&self, version: AwqVersion) -> Option<([usize; 2], usize)> {
        let Self { short, float_zeros, qweight: [rows, columns], qzeros, scales } = *self;
        let [groups, width] = scales;
        match version {
            AwqVersion::Gemm => {
                let n = columns.checked_mul(8)?;
                let fits = !short && !float_zeros && width == n && qzeros == [groups, columns];
                fits.then_some(([n, rows], groups))
            }
            AwqVersion::Gemv => {
                let k = columns.checked_mul(8)?;
                let fits =
                    !short && !float_zeros && groups == rows && qzeros[0] == rows && qzeros[1].checked_mul(8)? == width;
                fits.then_some(([rows, k], width))
            }
            AwqVersion::GemvFast => {
                let n = rows.checked_mul(FAST_OUTPUTS)?;
                let fits = short && float_zeros && columns % FAST_INPUTS == 0 && width == n && qzeros == scales;
                fits.then_some(([n, columns], groups))
            }
        }
    }

    fn any_layout(&self) -> bool {
        VERSIONS.into_iter().any(|version| self.dimensions(version).is_some())
    }

    /// Whether GPTQ's 4-bit tensors look the same.
    fn like_gptq(&self) -> bool {
        let [rows, width] = self.scales;
        !self.short
            && !self.float_zeros
            && self.qweight[1] == width
            && self.qzeros[0] == rows
            && self.qzeros[1].checked_mul(8) == Some(width)
    }
}

const VERSIONS: [AwqVersion; 3] = [AwqVersion::Gemm, AwqVersion::Gemv, AwqVersion::GemvFast];

/// The layout of a module, settled.
pub(super) struct Layout {
    pub version: AwqVersion,
    pub n: usize,
    pub k: usize,
    pub group: Group,
    /// Groups that scales have room for: those beyond the module's own are padding.
    pub room: usize,
}

impl Layout {
    /// The layout in which the tensors fit each other and the config's group size: the declared one, or the only one.
    pub fn of(weights: &Weights, prefix: &str, findings: &mut Vec<Finding>) -> Result<Self> {
        let checkpoint = weights.checkpoint();
        let config = declared(weights);
        let shapes = Shapes::of(checkpoint, prefix)?;
        let info = checkpoint.info(&format!("{prefix}.qweight"))?;
        if config.is_none() && shapes.like_gptq() {
            let what = format!(
                "module `{prefix}`: its shapes are both GPTQ's and those of AWQ's gemv, and no quantization_config says \
                 which it is"
            );
            return Err(Error::malformed(info.file, what));
        }
        let fitting: Vec<(AwqVersion, Result<Self>)> = VERSIONS
            .into_iter()
            .filter_map(|version| {
                let (dimensions, room) = shapes.dimensions(version)?;
                Some((version, Self::in_groups(weights, prefix, version, dimensions, room)))
            })
            .collect();
        let label = config.map_or(AwqVersion::Gemm, |c| c.version);
        let mut refusal = None;
        let mut settled = Vec::new();
        for (version, layout) in fitting {
            match layout {
                Ok(layout) => settled.push(layout),
                Err(e) if refusal.is_none() || version == label => refusal = Some(e),
                Err(_) => {}
            }
        }
        if let Some(at) = settled.iter().position(|layout| layout.version == label)
            && (config.is_some() || settled.len() == 1)
        {
            if weights.quantization().is_none() {
                findings.push(Finding::new(prefix, "no quantization_config; the shapes are those of AWQ's gemm"));
            }
            return Ok(settled.swap_remove(at));
        }
        let names = |layouts: &[Self]| layouts.iter().map(|l| l.version.name()).collect::<Vec<_>>().join(" or ");
        match (settled.pop(), refusal) {
            (Some(only), _) if settled.is_empty() => {
                let name = only.version.name();
                let text = match config {
                    Some(_) => Some(format!(
                        "the config says {}, but the tensors have the types and shapes of {name}; read as {name}",
                        label.name()
                    )),
                    // A config of another scheme is a contradiction that is found for every scheme alike.
                    None if weights.quantization().is_some() => None,
                    None => Some(format!("no quantization_config; the shapes are those of AWQ's {name}")),
                };
                findings.extend(text.map(|text| Finding::new(prefix, text)));
                Ok(only)
            }
            (Some(last), _) => {
                settled.push(last);
                let what = format!("module `{prefix}`: its shapes are those of {} alike", names(&settled));
                Err(Error::malformed(info.file, what))
            }
            (None, Some(refusal)) => Err(refusal),
            (None, None) => {
                let expected = match label {
                    AwqVersion::Gemm => "qweight I32 [k, n/8], qzeros I32 [groups, n/8], scales [groups, n]",
                    AwqVersion::Gemv => "qweight I32 [n, k/8], qzeros I32 [n, w], scales [n, 8w]",
                    AwqVersion::GemvFast => {
                        "qweight I16 [n/4, k] with k a multiple of 64, qzeros of floats [groups, n], scales [groups, n]"
                    }
                };
                let zeros = checkpoint.info(&zeros_name(checkpoint, prefix))?;
                let what = format!(
                    "module `{prefix}`: expected {expected} (AWQ, {}), got qweight {} {:?}, {} {} {:?}, scales {:?}; is \
                     this AWQ of 4 bits?",
                    label.name(),
                    info.dtype,
                    shapes.qweight,
                    zeros.name.rsplit('.').next().unwrap_or_default(),
                    zeros.dtype,
                    shapes.qzeros,
                    shapes.scales
                );
                Err(Error::malformed(info.file, what))
            }
        }
    }

    /// The layout with its groups. Errors: the declared group size does not fit the scales, or none is declared and
    /// the scales tell none.
    fn in_groups(
        weights: &Weights,
        prefix: &str,
        version: AwqVersion,
        [n, k]: [usize; 2],
        room: usize,
    ) -> Result<Self> {
        let info = weights.checkpoint().info(&format!("{prefix}.scales"))?;
        let padded = version != AwqVersion::Gemm;
        let fail = |expected: String| {
            let what = format!("tensor `{}`: expected {expected}, got {:?}", info.name, info.shape);
            Err(Error::malformed(info.file, what))
        };
        let group = match declared(weights).map(|config| config.group_size) {
            Some(size) => {
                let group = size.map_or(Group::Channel, Group::Size);
                let groups = group.count(k);
                if if padded { groups > room } else { groups != room } {
                    let size = size.map_or("-1".to_owned(), |g| g.to_string());
                    let least = if padded { " or more" } else { "" };
                    return fail(format!(
                        "{groups}{least} groups for {k} inputs and group_size {size} ({})",
                        version.name()
                    ));
                }
                group
            }
            None => {
                let groups = if padded { used(weights, prefix, version, [n, room])? } else { room };
                if groups == 0 || k % groups != 0 {
                    return fail(format!(
                        "a number of groups that divides the {k} inputs, as no config gives their size"
                    ));
                }
                if groups == 1 { Group::Channel } else { Group::Size(k / groups) }
            }
        };
        Ok(Self { version, n, k, group, room })
    }
}

/// Groups up to the last one that any output has a scale in.
fn used(weights: &Weights, prefix: &str, version: AwqVersion, [n, room]: [usize; 2]) -> Result<usize> {
    let scales = matrix_of_scales(weights, prefix, version, [n, room])?;
    Ok((0..room).rev().find(|g| (0..n).any(|i| scales[i * room + g] != 0.0)).map_or(0, |last| last + 1))
}

/// The stored scales, padding included, as `[n, room]`.
pub(super) fn matrix_of_scales(
    weights: &Weights,
    prefix: &str,
    version: AwqVersion,
    [n, room]: [usize; 2],
) -> Result<Vec<f32>> {
    let stored = weights.checkpoint().floats(&format!("{prefix}.scales"))?.to_f32();
    Ok(if version == AwqVersion::Gemv { stored } else { super::read::transposed(&stored, room, n) })
}
