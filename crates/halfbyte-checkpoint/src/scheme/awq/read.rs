//! Reading an AWQ module: everything but the codes is read and checked first.

use super::super::{LinearWeight, LoadedModule, Weights};
use super::layout::{Layout, declared, matrix_of_scales, zeros_name};
use super::pack;
use crate::config::AwqVersion;
use crate::error::{Error, Result};
use crate::finding::Finding;
use crate::safetensors::DType;
use halfbyte::{Float, QTensor, WeightFormat, Zero, Zeros};

/// The zero point of a symmetric module.
const MIDDLE: u16 = 8;

/// A module of which everything but its codes has been read.
pub(super) struct Module {
    pub n: usize,
    pub k: usize,
    pub format: WeightFormat,
    pub findings: Vec<Finding>,
    version: AwqVersion,
    /// `[n, groups]`, as in the tensor that it becomes; so are the zeros.
    scales: Vec<f32>,
    zeros: Zeros,
}

/// Reads a module's shapes, scales and zero points.
pub(super) fn examine(weights: &Weights, prefix: &str) -> Result<Module> {
    let mut findings = Vec::new();
    let layout = Layout::of(weights, prefix, &mut findings)?;
    let Layout { version, n, k, group, room } = layout;
    let info = weights.checkpoint().info(&format!("{prefix}.scales"))?;
    let scale = info.dtype.float().ok_or_else(|| {
        Error::malformed(info.file, format!("tensor `{}`: expected floats, got {}", info.name, info.dtype))
    })?;
    let groups = group.count(k);
    let stored = matrix_of_scales(weights, prefix, version, [n, room])?;
    let scales = first_groups(&stored, room, groups);
    if let Some(at) = (0..n * room).find(|&at| at % room >= groups && stored[at] != 0.0) {
        let what = format!(
            "tensor `{}`: expected {groups} groups for {k} inputs, and zeros as padding to {room}, got a scale of {} in \
             group {} of output {}",
            info.name,
            stored[at],
            at % room,
            at / room
        );
        return Err(Error::malformed(info.file, what));
    }
    let zeros = match version {
        AwqVersion::Gemm | AwqVersion::Gemv => {
            let words = weights.checkpoint().ints(&zeros_name(weights.checkpoint(), prefix))?;
            let points = match version {
                AwqVersion::Gemm => pack::unpack_gemm(&words, [groups, n]),
                _ => first_groups(&pack::unpack_gemv(&words), room, groups),
            };
            Zeros::Integer(points.into_iter().map(u16::from).collect())
        }
        AwqVersion::GemvFast => {
            let offsets = offsets(weights, prefix, [n, room], groups, scale)?;
            match zero_points(&offsets, &scales, scale) {
                Ok(points) => Zeros::Integer(points),
                Err(other) => {
                    let total = offsets.len();
                    let text = format!(
                        "{other} of {total} stored offsets are not minus the scale times a zero point from 0 to 16; all \
                         were read as float offsets"
                    );
                    findings.push(Finding::new(prefix, text));
                    Zeros::Float(offsets)
                }
            }
        }
    };
    let zeros = match zeros {
        Zeros::Integer(points) if points.iter().all(|&z| z == MIDDLE) => Zeros::Symmetric,
        other => other,
    };
    if declared(weights).is_some_and(|config| config.zero_point == Some(false)) && zeros != Zeros::Symmetric {
        let text = "the config says zero_point false, but zero points other than 8 are stored; they were followed";
        findings.push(Finding::new(prefix, text));
    }
    let zero = match zeros {
        Zeros::Symmetric => Zero::Symmetric,
        Zeros::Integer(_) => Zero::Integer,
        Zeros::Float(_) => Zero::Float,
    };
    let format = WeightFormat { bits: 4, group, zero, scale };
    Ok(Module { n, k, format, findings, version, scales, zeros })
}

/// Reads a module.
pub(super) fn load(weights: &Weights, prefix: &str) -> Result<LoadedModule<'static>> {
    let Module { n, k, format, findings, version, scales, zeros } = examine(weights, prefix)?;
    let name = format!("{prefix}.qweight");
    let codes = match version {
        AwqVersion::Gemm => pack::unpack_gemm(&weights.checkpoint().ints(&name)?, [k, n]),
        AwqVersion::Gemv => pack::unpack_gemv(&weights.checkpoint().ints(&name)?),
        AwqVersion::GemvFast => pack::unpack_gemv_fast(weights.checkpoint().bytes(&name)?, [n, k]),
    };
    let tensor = QTensor::new(format, [n, k], codes, scales, zeros, None).map_err(Error::numbers(prefix))?;
    Ok(LoadedModule { weight: LinearWeight::Quantized(tensor), findings })
}

/// What `gemv_fast` adds after scaling, `[n, groups]`. Error: it is of another type than the scales.
fn offsets(weights: &Weights, prefix: &str, [n, room]: [usize; 2], groups: usize, scale: Float) -> Result<Vec<f32>> {
    let name = zeros_name(weights.checkpoint(), prefix);
    let info = weights.checkpoint().info(&name)?;
    if info.dtype != DType::from(scale) {
        let what = format!("tensor `{name}`: expected {} as the scales, got {}", DType::from(scale), info.dtype);
        return Err(Error::malformed(info.file, what));
    }
    let stored = transposed(&weights.checkpoint().floats(&name)?.to_f32(), room, n);
    Ok(first_groups(&stored, room, groups))
}

/// The zero points that the offsets were computed from: those whose product with the scale, rounded to the file's type
/// as packers do, is the offset, so that zero points are exact where offsets are rounded. Where the scale is 0, so is
/// every weight, and the middle is taken. Error: how many offsets come from no zero point.
fn zero_points(offsets: &[f32], scales: &[f32], dtype: Float) -> std::result::Result<Vec<u16>, usize> {
    let point = |offset: f32, scale: f32| {
        let point = if scale == 0.0 { f32::from(MIDDLE) } else { (-offset / scale).round() };
        ((0.0..=16.0).contains(&point) && dtype.round(point * scale) == -offset).then_some(point as u16)
    };
    let points: Vec<u16> = offsets.iter().zip(scales).filter_map(|(&o, &s)| point(o, s)).collect();
    if points.len() == offsets.len() { Ok(points) } else { Err(offsets.len() - points.len()) }
}

/// The first groups of every row of `[n, room]`.
fn first_groups<T: Copy>(values: &[T], room: usize, groups: usize) -> Vec<T> {
    values.chunks_exact(room).flat_map(|row| &row[..groups]).copied().collect()
}

/// `[rows, columns]` to `[columns, rows]`.
pub(super) fn transposed<T: Copy>(values: &[T], rows: usize, columns: usize) -> Vec<T> {
    (0..columns).flat_map(|c| (0..rows).map(move |r| values[r * columns + c])).collect()
}
