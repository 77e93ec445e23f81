//! Writing the dense model that a checkpoint stands for.

use super::part::refuse_part;
use super::staging::Staging;
use super::{Job, Step, Written, check_side_files, complete, dense_config, linears, owners, write_steps};
use crate::contents::odd_values;
use crate::error::{Error, Result};
use crate::exact;
use crate::safetensors::{self, DType, TensorSpec, cast_floats};
use crate::scheme::{LinearWeight, Weights};
use half::{bf16, f16};
use halfbyte::{Float, Floats, QTensor, Zeros};
use rayon::prelude::*;
use serde_json::Value;

/// Writes the dense model folder that a checkpoint stands for, every float tensor in `dtype`.
///
/// *Accuracy:* with f32, a code times an f16 or bf16 scale is exact; other results are rounded to nearest, once. Float
/// tensors that are not quantised are converted too; others are copied. *Errors:* a value beyond the range of `dtype`,
/// with the tensor's name; otherwise as [`super::write_model`].
pub fn write_dense(mut job: Job<'_>, dtype: Float) -> Result<Written> {
    let source = job.source;
    refuse_part("make a model dense", source)?;
    check_side_files(source)?;
    let checkpoint = source.checkpoint();
    let mut config = dense_config(source)?;
    set_dtype(&mut config, dtype);

    let modules = linears(source)?;
    let quantized = || modules.iter().enumerate().filter(|(_, module)| module.source.is_some());
    let owners = owners(source, quantized())?;
    let mut planned = vec![false; modules.len()];
    let mut steps = Vec::new();
    for info in checkpoint.tensors() {
        match owners.at.get(info.name) {
            Some(&at) => {
                if !std::mem::replace(&mut planned[at], true) {
                    let module = &modules[at];
                    let name = format!("{}.weight", module.name);
                    let spec = TensorSpec { name, dtype: dtype.into(), shape: module.shape.to_vec() };
                    steps.push(Step { name: module.name, task: true, specs: vec![spec] });
                }
            }
            None => {
                let dtype = if info.dtype.float().is_some() { DType::from(dtype) } else { info.dtype };
                let spec = TensorSpec { name: info.name.to_owned(), dtype, shape: info.shape.to_vec() };
                steps.push(Step { name: info.name, task: false, specs: vec![spec] });
            }
        }
    }

    let staging = Staging::create(job.target, job.overwrite, source)?;
    let mut findings = Vec::new();
    let create = |specs: &[TensorSpec], shard| safetensors::create(staging.path(), specs, shard);
    let written = write_steps(&mut job, create, steps, |step, writer| {
        let name = step.name;
        if step.task {
            let bytes = floats_of(source, name, dtype)?;
            source.release(name);
            findings.extend(odd_values(name, cast_floats(dtype, bytes.as_slice()).as_floats()));
            return writer.write(&format!("{name}.weight"), &bytes);
        }
        if checkpoint.info(name)?.dtype.float().is_some() {
            findings.extend(odd_values(name, checkpoint.floats(name)?.as_floats()));
        }
        match checkpoint.info(name)?.dtype.float() {
            Some(own) if own != dtype => {
                writer.write(name, &converted(checkpoint.floats(name)?.as_floats(), dtype, name)?)?;
            }
            _ => writer.write(name, &checkpoint.data(name)?)?,
        }
        checkpoint.release(name);
        Ok(())
    })?;
    let folder = complete(&job, staging, config)?;
    Ok(Written { path: folder, tensor_bytes: written.tensor_bytes, quantized: 0, findings, left_out: owners.left_out })
}

/// What a module stands for, as bytes of `dtype`.
pub(super) fn floats_of(source: &Weights, name: &str, dtype: Float) -> Result<Vec<u8>> {
    match source.load_linear(name)?.weight {
        LinearWeight::Quantized(q) => dequantized(&q, dtype, name),
        LinearWeight::Dense { floats, .. } => converted(floats.as_floats(), dtype, name),
    }
}

/// The first number that a module stands for and f32 does not hold; None if it holds all of them.
pub(super) fn first_not_in_f32(source: &Weights, name: &str) -> Result<Option<f64>> {
    let weight = source.load_linear(name)?.weight;
    source.release(name);
    let LinearWeight::Quantized(q) = weight else { return Ok(None) };
    let fits = |[value, rest]: [f64; 2]| rest == 0.0 && (f64::from(value as f32) == value || value.is_nan());
    let elements = (0..q.codes().len()).into_par_iter().with_min_len(1 << 14);
    let first = elements.find_first(|&i| !fits(exact::element(&q, i)));
    Ok(first.map(|i| exact::element(&q, i)[0]))
}

/// Says the type in the field that the config has for it: `dtype` since transformers 5, `torch_dtype` before.
fn set_dtype(config: &mut serde_json::Map<String, Value>, dtype: Float) {
    let name = match dtype {
        Float::F16 => "float16",
        Float::BF16 => "bfloat16",
        Float::F32 => "float32",
    };
    let mut said = false;
    for key in ["dtype", "torch_dtype"] {
        if let Some(value) = config.get_mut(key) {
            *value = name.into();
            said = true;
        }
    }
    if !said {
        config.insert("torch_dtype".into(), name.into());
    }
}

/// The matrix that a quantised tensor stands for, as bytes of `dtype`.
fn dequantized(q: &QTensor, dtype: Float, name: &str) -> Result<Vec<u8>> {
    let (k, groups) = (q.k(), q.groups());
    let group_of: Vec<usize> = (0..k).map(|j| q.group_of(j)).collect();
    let middle = f64::from(q.format().middle());
    rows(q.n(), k, dtype, name, |i, j| {
        let g = i * groups + group_of[j];
        let (scale, code) = (f64::from(q.scales()[g]), f64::from(q.codes()[i * k + j]));
        match q.zeros() {
            Zeros::Symmetric => scale * (code - middle),
            Zeros::Integer(zeros) => scale * (code - f64::from(zeros[g])),
            Zeros::Float(offsets) => scale * code + f64::from(offsets[g]),
        }
    })
}

/// Floats of another type, as bytes of `dtype`.
pub(crate) fn converted(floats: Floats<'_>, dtype: Float, name: &str) -> Result<Vec<u8>> {
    const ROW: usize = 1 << 12;
    let (full, rest) = (floats.len() / ROW, floats.len() % ROW);
    let mut bytes = rows(full, ROW, dtype, name, |i, j| f64::from(floats.get(i * ROW + j)))?;
    bytes.extend(rows(1, rest, dtype, name, |_, j| f64::from(floats.get(full * ROW + j)))?);
    Ok(bytes)
}

/// `n` rows of `k` values, rounded to `dtype`, as bytes. Error: a finite value that rounds to infinity.
fn rows(n: usize, k: usize, dtype: Float, name: &str, value: impl Fn(usize, usize) -> f64 + Sync) -> Result<Vec<u8>> {
    let row_bytes = k * dtype.size_bytes();
    let mut bytes = vec![0u8; n * row_bytes];
    let too_large = bytes.par_chunks_mut(row_bytes.max(1)).enumerate().find_map_any(|(i, row)| {
        for (j, out) in row.chunks_exact_mut(dtype.size_bytes()).enumerate() {
            let value = value(i, j);
            let finite = match dtype {
                Float::F16 => {
                    let v = f16::from_f32(odd_f32(value));
                    out.copy_from_slice(&v.to_le_bytes());
                    v.is_finite()
                }
                Float::BF16 => {
                    let v = bf16::from_f32(odd_f32(value));
                    out.copy_from_slice(&v.to_le_bytes());
                    v.is_finite()
                }
                Float::F32 => {
                    let v = value as f32;
                    out.copy_from_slice(&v.to_le_bytes());
                    v.is_finite()
                }
            };
            if !finite && value.is_finite() {
                return Some(value);
            }
        }
        None
    });
    match too_large {
        None => Ok(bytes),
        Some(value) => Err(Error::Unrepresentable {
            tensor: name.to_owned(),
            scheme: dtype.name(),
            reason: format!("{value} is beyond its range"),
        }),
    }
}

/// `value` as f32, rounded to odd: cut off, with the last bit set if anything was lost. Rounding that again, to a type of
/// at most 22 bits, gives what rounding `value` at once would give; rounding to nearest twice would not.
fn odd_f32(value: f64) -> f32 {
    let nearest = value as f32;
    if f64::from(nearest) == value || value.is_nan() {
        return nearest;
    }
    let bits = nearest.to_bits();
    // One less in the bits is the next float towards zero; infinity becomes the largest float.
    let cut = if f64::from(nearest).abs() > value.abs() { bits - 1 } else { bits };
    f32::from_bits(cut | 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_goes_by_the_value_and_not_by_its_neighbour_in_f32() {
        // Between two f16 numbers, a hair above and below the middle: f32 rounds both to the middle itself.
        let (low, high) = (1.0, 1.0 + 2f64.powi(-10));
        let middle = (low + high) / 2.0;
        let hair = 2f64.powi(-40);
        assert_eq!((middle + hair) as f32, middle as f32);
        for (value, expected) in [(middle + hair, high), (middle - hair, low), (middle, low), (-middle - hair, -high)] {
            assert_eq!(f16::from_f32(odd_f32(value)).to_f64(), expected, "{value:e}");
        }
        assert_eq!(f16::from_f32(odd_f32(1e300)), f16::INFINITY);
        assert_eq!(f16::from_f32(odd_f32(65519.999)), f16::MAX);
        assert_eq!(bf16::from_f32(odd_f32(-0.0)).to_bits(), 0x8000);
        assert!(odd_f32(f64::NAN).is_nan());
        assert_eq!(odd_f32(f64::NEG_INFINITY), f32::NEG_INFINITY);
    }
}
