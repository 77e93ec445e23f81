//! Reading an AWQ module: everything but the codes is read and checked first.

use super::super::{StoredModule, StoredWeight, Weights};
use super::layout::{Layout, declared, matrix_of_scales, zeros_name};
use super::pack;
use crate::config::AwqVersion;
use crate::error::{Error, Result};
use crate::finding::Finding;
use crate::safetensors::DType;
use halfbyte::layout::codes::{Codes, FpaIntB};
use halfbyte::layout::stored::{StoredTensor, StoredZeros, Strides};
use halfbyte::{Float, FloatData, WeightFormat, Zero};
use std::sync::Arc;

/// The zero point of a symmetric module.
const MIDDLE: u16 = 8;

/// A module of which everything but its codes has been read.
pub(super) struct Module<'a> {
    pub n: usize,
    pub k: usize,
    pub format: WeightFormat,
    pub findings: Vec<Finding>,
    version: AwqVersion,
    scales: (FloatData<'a>, Strides),
    zeros: StoredZeros<'static>,
}

/// Reads a module's shapes, scales and zero points.
pub(super) fn examine<'a>(weights: &'a Weights, prefix: &str) -> Result<Module<'a>> {
    let mut findings = Vec::new();
    let layout = Layout::of(weights, prefix, &mut findings)?;
    let Layout { version, n, k, group, room } = layout;
    let info = weights.checkpoint().info(&format!("{prefix}.scales"))?;
    let scale = info.dtype.float().ok_or_else(|| {
        Error::malformed(info.file, format!("tensor `{}`: expected floats, got {}", info.name, info.dtype))
    })?;
    let groups = group.count(k);
    // Of scales and zero points alike, room for more groups included.
    let strides = if version == AwqVersion::Gemv { Strides::of_outputs(room) } else { Strides::of_groups(n) };
    let scales = weights.checkpoint().floats(info.name)?;
    let value = |i: usize, g: usize| scales.as_floats().get(strides.at(i, g));
    let padding = (0..n).flat_map(|i| (groups..room).map(move |g| (i, g)));
    if let Some((i, g)) = padding.into_iter().find(|&(i, g)| value(i, g) != 0.0) {
        let what = format!(
            "tensor `{}`: expected {groups} groups for {k} inputs, and zeros as padding to {room}, got a scale of {} in \
             group {} of output {}",
            info.name,
            value(i, g),
            g,
            i
        );
        return Err(Error::malformed(info.file, what));
    }
    let zeros = match version {
        AwqVersion::Gemm | AwqVersion::Gemv => {
            let words = weights.checkpoint().ints(&zeros_name(weights.checkpoint(), prefix))?;
            let points =
                if version == AwqVersion::Gemm { pack::unpack_gemm(&words) } else { pack::unpack_gemv(&words) };
            StoredZeros::Integer(points.into(), strides)
        }
        AwqVersion::GemvFast => {
            let offsets = offsets(weights, prefix, [n, room], groups, scale)?;
            let scales = first_groups(&matrix_of_scales(weights, prefix, version, [n, room])?, room, groups);
            match zero_points(&offsets, &scales, scale) {
                Ok(points) => StoredZeros::Integer(points.into(), Strides::of_outputs(groups)),
                Err(other) => {
                    let total = offsets.len();
                    let text = format!(
                        "{other} of {total} stored offsets are not minus the scale times a zero point from 0 to 16; all \
                         were read as float offsets"
                    );
                    findings.push(Finding::new(prefix, text));
                    StoredZeros::Float(FloatData::F32(offsets.into()), Strides::of_outputs(groups))
                }
            }
        }
    };
    let zeros = match zeros {
        StoredZeros::Integer(points, strides) => {
            let symmetric = if points.len() == n * groups {
                points.iter().all(|&z| z == MIDDLE)
            } else {
                (0..n).all(|i| (0..groups).all(|g| points[strides.at(i, g)] == MIDDLE))
            };
            if symmetric { StoredZeros::Symmetric } else { StoredZeros::Integer(points, strides) }
        }
        other => other,
    };
    if declared(weights).is_some_and(|config| config.zero_point == Some(false))
        && !matches!(zeros, StoredZeros::Symmetric)
    {
        let text = "the config says zero_point false, but zero points other than 8 are stored; they were followed";
        findings.push(Finding::new(prefix, text));
    }
    let zero = match zeros {
        StoredZeros::Symmetric => Zero::Symmetric,
        StoredZeros::Integer(..) => Zero::Integer,
        StoredZeros::Float(..) => Zero::Float,
    };
    let format = WeightFormat { bits: 4, group, zero, scale, channel_scale: None };
    Ok(Module { n, k, format, findings, version, scales: (scales, strides), zeros })
}

/// Reads all of a module but its codes and scales, which stay where they are.
pub(super) fn load<'a>(weights: &'a Weights, prefix: &str) -> Result<StoredModule<'a>> {
    let Module { n, k, format, findings, version, scales, zeros } = examine(weights, prefix)?;
    let name = format!("{prefix}.qweight");
    let codes = match version {
        AwqVersion::Gemm => Codes::WordsAcross(weights.checkpoint().words(&name)?),
        AwqVersion::Gemv => Codes::WordsAlong(weights.checkpoint().words(&name)?),
        AwqVersion::GemvFast => {
            let bytes = weights.checkpoint().data(&name)?;
            let layout = FpaIntB::Interleaved;
            Codes::Rows(Arc::new(move |outputs, codes| layout.rows(&bytes, outputs, [n, k], 4, codes)))
        }
    };
    let tensor = StoredTensor::new(format, [n, k], codes, scales, zeros, None).map_err(Error::numbers(prefix))?;
    Ok(StoredModule { weight: StoredWeight::Quantized(tensor), findings })
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
pub(in crate::scheme) fn transposed<T: Copy>(values: &[T], rows: usize, columns: usize) -> Vec<T> {
    (0..columns).flat_map(|c| (0..rows).map(move |r| values[r * columns + c])).collect()
}
